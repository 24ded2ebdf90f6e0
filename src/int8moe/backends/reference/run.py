"""The plain statement of docs/numerics.md: every step, in order, one line of PyTorch each where possible.

Other backends are held to these bits. Nothing here is optimised; `rint`, `exp` and the activations are
written out because the contract fixes their roundings.
"""

from __future__ import annotations

from typing import Any

import torch

from int8moe import numerics as c
from int8moe.backends.arguments import check_call, check_routing_values
from int8moe.config import FusedMoEConfig, MoEActivation
from int8moe.quant_config import FusedMoEQuantConfig
from int8moe.schemes import kInt8DynamicTensorSym
from int8moe.weights import ExpertWeights


def _f(value: float) -> torch.Tensor:
    """A constant rounded to float32 before it meets a tensor."""
    return torch.tensor(value, dtype=torch.float32)


def div(a: torch.Tensor | float, b: torch.Tensor | float) -> torch.Tensor:
    """True division. Both sides become full tensors: torch takes `scalar / tensor`, and on CUDA `tensor /
    scalar`, as a multiplication by the reciprocal, which rounds twice."""
    like = a if isinstance(a, torch.Tensor) else b
    assert isinstance(like, torch.Tensor)
    full = lambda v: v if isinstance(v, torch.Tensor) else torch.full_like(like, v)
    return torch.div(full(a), full(b))


def rint(v: torch.Tensor) -> torch.Tensor:
    """Nearest integer, ties to even, of float32 |v| < 2**22."""
    return (v + c.RINT_MAGIC) - c.RINT_MAGIC


def exp(x: torch.Tensor) -> torch.Tensor:
    """The contract's exponential (numerics, step 4); NaN stays NaN."""
    x = x.clamp(c.EXP_LOW, c.EXP_HIGH)
    n = rint(x * _f(c.LOG2E))
    r = (x - n * _f(c.LN2_HIGH)) - n * _f(c.LN2_LOW)
    p = torch.full_like(r, c.EXP_POLYNOMIAL[0])
    for coefficient in c.EXP_POLYNOMIAL[1:]:
        p = p * r + _f(coefficient)
    y = (p * (r * r) + r) + 1.0
    return y * ((n.to(torch.int32) + 127) << 23).view(torch.float32)


def sigmoid_mul(g: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """g * sigmoid(z), as g / (1 + exp(-z))."""
    return div(g, exp(-z) + 1.0)


def tanh(z: torch.Tensor) -> torch.Tensor:
    return 1.0 - div(2.0, exp(z * 2.0) + 1.0)


def erf(x: torch.Tensor) -> torch.Tensor:
    """Abramowitz & Stegun 7.1.26, on the contract's exponential."""
    a = x.abs()
    t = div(1.0, a * _f(c.ERF_P) + 1.0)
    p = torch.full_like(t, c.ERF_POLYNOMIAL[0])
    for coefficient in c.ERF_POLYNOMIAL[1:]:
        p = p * t + _f(coefficient)
    y = 1.0 - (p * t) * exp(-(a * a))
    return torch.where(x < 0, -y, y)


def activation_function(kind: MoEActivation, g: torch.Tensor, alpha: float) -> torch.Tensor:
    """The activation of the gate alone, float32 in and out."""
    if kind is MoEActivation.SILU:
        return sigmoid_mul(g, g)
    if kind is MoEActivation.GELU:
        return (g * 0.5) * (erf(g * _f(c.SQRT_HALF)) + 1.0)
    if kind is MoEActivation.GELU_TANH:
        inner = (g + ((g * g) * g) * _f(c.GELU_TANH_CUBIC)) * _f(c.GELU_TANH_SCALE)
        return (g * 0.5) * (tanh(inner) + 1.0)
    if kind is MoEActivation.RELU2:
        positive = torch.where(g < 0, torch.zeros_like(g), g)
        return positive * positive
    return sigmoid_mul(g, g * _f(alpha))


def activate(config: FusedMoEConfig, y: torch.Tensor) -> torch.Tensor:
    """Gate, clamp and multiply: float32 [R, 2*I] (or [R, I] when not gated) to float32 [R, I]."""
    kind, limit = MoEActivation(config.activation), config.swiglu_limit
    if not config.is_act_and_mul:
        gate, up = y, None
    elif kind.is_interleaved:
        gate, up = y[:, 0::2], y[:, 1::2]
    else:
        gate, up = y.chunk(2, dim=-1)
    if limit is not None:
        gate = torch.where(gate > _f(limit), _f(limit), gate)
        if up is not None:
            up = torch.where(up > _f(limit), _f(limit), torch.where(up < _f(-limit), _f(-limit), up))
    h = activation_function(kind, gate, config.swiglu_alpha)
    if up is None:
        return h
    return h * (up + 1.0) if kind.is_swigluoai else h * up


def quantize_activations(x: torch.Tensor, per_tensor: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Step 2: codes int8 [R, K] and scale float32 [R, 1], from any float [R, K].

    A row (or, per tensor, the whole) that holds NaN or infinity gets scale NaN and zero codes.
    """
    x = x.float()
    amax = x.abs().amax(-1, keepdim=True) if x.numel() else x.new_zeros(x.shape[0], 1)
    if per_tensor and len(amax):
        amax = amax.amax().expand_as(amax)
    finite = torch.isfinite(amax)
    a = torch.where(finite, amax, 1.0).clamp_min(c.AMAX_FLOOR)
    q = rint(x * div(c.INT8_MAX, a)).clamp(-c.INT8_MAX, c.INT8_MAX)
    scale = torch.where(finite, div(a, c.INT8_MAX), float("nan"))
    return torch.where(finite, q, 0.0).to(torch.int8), scale


def gemm(
    x: torch.Tensor, x_scale: torch.Tensor | None, w: torch.Tensor, w_scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Steps 3 and 6: float32 [R, N] from x [R, K] (int8 with x_scale, or float without) and int8 w [N, K]."""
    if x_scale is None:
        y = (x.float() @ w.float().T) * w_scale
    else:
        acc = (x.double() @ w.double().T).to(torch.float32)  # exact in float64: |sum| < 2**31
        y = (acc * x_scale) * w_scale
    return y if bias is None else y + bias.float()


class ReferenceRunner:
    """Runs the contract expert by expert."""

    def __init__(self, config: FusedMoEConfig, quant_config: FusedMoEQuantConfig) -> None:
        self.config, self.quant_config = config, quant_config
        self.weights: ExpertWeights | None = None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Keep the canonical tensors of `layer` as they are."""
        q = self.quant_config
        self.weights = ExpertWeights(
            layer.w13_weight.data, layer.w2_weight.data, q.w1_scale, q.w2_scale, q.w1_bias, q.w2_bias
        )
        self.weights.check_fits(self.config)

    def unpack_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The canonical tensors, which are kept as they are."""
        assert self.weights is not None, "process_weights_after_loading comes first"
        return self.weights.w13, self.weights.w2

    def apply(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *,
        expert_map: torch.Tensor | None = None,
        apply_router_weight_on_input: bool = False,
    ) -> torch.Tensor:
        check_call(self.config, hidden_states, topk_weights, topk_ids, expert_map)
        check_routing_values(self.config, topk_ids, expert_map)
        assert self.weights is not None, "process_weights_after_loading comes first"
        (tokens, topk), dtype = topk_ids.shape, hidden_states.dtype
        local = topk_ids if expert_map is None else expert_map.to(topk_ids.device)[topk_ids.long()]
        token = torch.arange(tokens, device=topk_ids.device).repeat_interleave(topk)
        flat, weight = local.reshape(-1), topk_weights.reshape(-1, 1)
        mine = (flat >= 0).nonzero().squeeze(1)  # slots whose expert lives here
        rows = hidden_states[token[mine]]
        if apply_router_weight_on_input:
            rows = (rows.float() * weight[mine]).to(dtype)
        y = self._experts(rows, flat[mine].long())
        if not apply_router_weight_on_input:
            y = y * weight[mine]
        slots = torch.zeros(tokens * topk, y.shape[1], device=y.device)
        slots[mine] = y.to(dtype).float()
        held = (flat >= 0).view(tokens, topk)
        out = torch.zeros(tokens, y.shape[1], device=y.device)
        for k in range(topk):  # step 7: slot order, absent slots skipped
            out = torch.where(held[:, k : k + 1], out + slots.view(tokens, topk, y.shape[1])[:, k], out)
        return out.to(dtype)

    def _experts(self, rows: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        """float32 [R, H] before the router weight, of rows [R, H] and their local experts [R]."""
        w, key = self.weights, self.quant_config.activation_key
        assert w is not None
        per_tensor = key == kInt8DynamicTensorSym
        quantize = lambda x: (x, None) if key is None else quantize_activations(x, per_tensor)
        q, scale = quantize(rows)
        h = rows.new_zeros(len(rows), w.intermediate_size)
        groups = [(e, (expert == e).nonzero().squeeze(1)) for e in expert.unique().tolist()]
        pick = lambda t, i: None if t is None else t[i]
        for e, r in groups:
            y1 = gemm(q[r], pick(scale, r), w.w13[e], w.w13_scale[e], pick(w.w13_bias, e))
            h[r] = activate(self.config, y1).to(rows.dtype)
        q, scale = quantize(h)
        y = torch.zeros(len(rows), w.hidden_size, device=rows.device)
        for e, r in groups:
            y[r] = gemm(q[r], pick(scale, r), w.w2[e], w.w2_scale[e], pick(w.w2_bias, e))
        return y
