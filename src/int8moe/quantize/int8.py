"""Symmetric INT8 quantisation of weights, one scale per output row (docs/numerics.md, step 1).

Of the operations with the right result this takes those that PyTorch runs vectorised (`amin` and `amax` for `aminmax`
along rows), on blocks of rows that stay in the processor's cache. Rows of a scale that is no normal float32 need no
mask: over the scale 1, every weight of them rounds to 0.
"""

from __future__ import annotations

import torch

from int8moe.errors import NonFiniteWeight
from int8moe.numerics import INT8_MAX

BLOCK = 2**20
"""Elements that are quantised at a time on a CPU: 4 MiB in float32, which stays in the cache."""
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


def row_scales(weight: torch.Tensor) -> torch.Tensor:
    """float32 [N]: max|w| / 127 of the rows of float32 [N, K], and 1 where that is no normal number."""
    amax = (
        torch.maximum(-weight.amin(dim=-1), weight.amax(dim=-1)) if weight.shape[1] else weight.new_zeros(len(weight))
    )
    scale = torch.div(amax, torch.full_like(amax, INT8_MAX))
    return torch.where(scale < _SMALLEST_NORMAL, 1.0, scale)


def quantize_rows(
    weight: torch.Tensor, name: str, scale_dtype: torch.dtype = torch.float32, first: int = 0, place: str = ""
) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [N, K] and scales [N] of weight [N, K], any float dtype: the rows from `first` on of what `name` names, at
    `place` in it.

    Raises:
        NonFiniteWeight: NaN or infinity; the message names the row.
    """
    w = weight.to(torch.float32, copy=True)
    scale = row_scales(w).to(scale_dtype)
    if not torch.isfinite(scale).all():
        row = first + int((~torch.isfinite(scale)).nonzero()[0])
        raise NonFiniteWeight(f"{name} holds NaN or infinity ({place}row {row}); needs finite weights.")
    codes = w.div_(scale.float()[:, None]).round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)
    return codes, scale


def quantize_weight(
    weight: torch.Tensor, name: str = "weight", scale_dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales: `scale = max|w| / 127` per row, `q = clamp(rint(w / scale), -127, 127)`.

    Args:
        weight: [..., N, K] of any float dtype.
        name: what an error calls it.
        scale_dtype: float32, or a shorter dtype that scales are rounded to before the codes are made.
    Returns:
        int8 [..., N, K] and scales [..., N]. A zero row (or one whose scale would not be a normal float32) gets
        scale 1 and zero codes.
    Raises:
        NonFiniteWeight: NaN or infinity; the message names tensor, expert and row.
    """
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(weight.shape[:-1], dtype=scale_dtype, device=weight.device)
    rows, columns = weight.shape[-2:]
    step = max(1, BLOCK // max(1, columns)) if weight.device.type == "cpu" else max(1, rows)
    for index, matrix in enumerate(weight.reshape(-1, rows, columns)):
        place = f"expert {index}, " if weight.dim() > 2 else ""
        for start in range(0, rows, step):
            part = slice(start, start + step)
            q, scale = quantize_rows(matrix[part], name, scale_dtype, start, place)
            codes.view(-1, rows, columns)[index, part] = q
            scales.view(-1, rows)[index, part] = scale
    return codes, scales


def dequantize_weight(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 [..., N, K] from codes [..., N, K] and scales [..., N]."""
    return codes.float() * scale[..., None]
