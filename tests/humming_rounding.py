"""The reference's layer, rounded where the humming-kernels package rounds: what a right Humming layer computes.

Read off the package's CUDA sources (0.1.20), as long as no GEMM splits K over blocks:

- quantise: `scale = max(amax / 127, 1e-30)` and `rint(x * (1 / scale))`, true divisions; h is not rounded first.
- GEMM: the exact int32 sum as float32, times the row's activation scale (for float16 times the expert's scale before
  that), rounded to 16 bits; times the weight scale, itself 16 bits, plus the bias, rounded once more.

Every step is one IEEE operation, so a right layer has these bits but for the last unit of the exponential in the
activation. A scale that is one unit off is no such matter: input values of exactly half their row's maximum lie on a
tie (63.5), the wrong scale flips the codes of all of them, and the token's output moves by 0.5 to 1.2 % (26 of 700
tokens of a Qwen3-30B-A3B layer). That is what dividing a CUDA tensor by a Python number does (PyTorch multiplies by the
reciprocal), hence `true_division`.
"""

from __future__ import annotations

import torch

from cases import Case
from int8moe.backends.humming.layout import split_scale
from int8moe.backends.reference.run import activate
from int8moe.weights import per_row_scale

ROUNDED_LIMIT = 4e-3
"""Largest relative Frobenius error of a right layer against `rounded_output`."""
REFERENCE_LIMIT = 2e-2
"""And against `ReferenceExperts`, which rounds elsewhere."""


def true_division(x: torch.Tensor, by: float) -> torch.Tensor:
    """x / by, correctly rounded on a GPU too."""
    return x / torch.full_like(x, by)


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, as floats, and scales [R, 1]; NaN counts as infinity."""
    x = torch.where(x.isnan(), torch.inf, x.float())
    scale = true_division(x.abs().amax(-1, keepdim=True), 127.0).clamp_min(1e-30)
    codes = (x * (torch.ones_like(scale) / scale)).nan_to_num(0.0).round().clamp(-128, 127)
    return codes, scale


def gemm(
    x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """x [R, K] float, w int8 [N, K], scale float32 [N]: [R, N] in `dtype`."""
    codes, x_scale = quantize(x)
    rows, common = split_scale(scale[None], dtype)
    acc = (codes.double() @ w.double().T).float()
    y = (acc * (x_scale if common is None else x_scale * common)).to(dtype).float() * rows[0].float()
    return (y if bias is None else y + bias.to(dtype).float()).to(dtype)


def rounded_output(case: Case, tokens: torch.Tensor | None = None) -> torch.Tensor:
    """What Humming computes for `case`, or for some of its tokens."""
    config, q, dtype = case.config, case.quant_config, case.hidden_states.dtype
    pick = (lambda t: t) if tokens is None else (lambda t: t[tokens])
    x, ids, weights = pick(case.hidden_states), pick(case.topk_ids).long(), pick(case.topk_weights)
    s13, s2 = per_row_scale("w13", q.w1_scale, "w13", case.w13), per_row_scale("w2", q.w2_scale, "w2", case.w2)
    local = ids if case.expert_map is None else case.expert_map.long()[ids]
    count, topk = ids.shape
    rows = x.repeat_interleave(topk, 0)
    if case.apply_router_weight_on_input:
        rows = (rows.float() * weights.reshape(-1, 1)).to(dtype)
    y = torch.zeros(count * topk, config.hidden_dim, dtype=dtype, device=x.device)
    flat = local.flatten()
    for e in flat.unique().tolist():
        if e < 0:
            continue
        r = (flat == e).nonzero().squeeze(1)
        bias = lambda t, e=e: None if t is None else t[e]
        y1 = gemm(rows[r], case.w13[e], s13[e], bias(q.w1_bias), dtype)
        y[r] = gemm(activate(config, y1.float()), case.w2[e], s2[e], bias(q.w2_bias), dtype)
    out = torch.zeros(count, config.hidden_dim, device=x.device)
    for k in range(topk):
        term = y.view(count, topk, config.hidden_dim)[:, k].float()
        if not case.apply_router_weight_on_input:
            term = term * weights[:, k : k + 1]
        out = torch.where(local[:, k : k + 1] >= 0, out + term, out)
    return out.to(dtype)


def error(got: torch.Tensor, want: torch.Tensor) -> tuple[float, int]:
    """Relative error over what is finite in both, and how many values are finite in one only."""
    got, want = got.double().cpu(), want.double().cpu()
    both = got.isfinite() & want.isfinite()
    size = float(want[both].norm())
    difference = float((got[both] - want[both]).norm())
    return (difference / size if size else difference), int((got.isfinite() != want.isfinite()).sum())
