"""Symmetric INT8 quantisation of weights, one scale per output row (docs/numerics.md, step 1)."""

from __future__ import annotations

import torch

from int8moe.errors import NonFiniteWeight
from int8moe.numerics import INT8_MAX, RINT_MAGIC

_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


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
    matrices = weight.reshape(-1, *weight.shape[-2:])
    for index, matrix in enumerate(matrices):  # one float32 copy of one matrix at a time
        w = matrix.to(torch.float32, copy=True)
        low, high = torch.aminmax(w, dim=-1) if w.shape[-1] else (w.new_zeros(w.shape[0]),) * 2
        amax = torch.maximum(-low, high)
        if not torch.isfinite(amax).all():
            row = int((~torch.isfinite(amax)).nonzero()[0])
            where = f"expert {index}, row {row}" if weight.dim() > 2 else f"row {row}"
            raise NonFiniteWeight(f"{name} holds NaN or infinity ({where}); needs finite weights.")
        scale = torch.div(amax, torch.full_like(amax, INT8_MAX))
        zero = scale < _SMALLEST_NORMAL
        scale = torch.where(zero, 1.0, scale).to(scale_dtype).float()
        q = w.div_(scale[:, None]).add_(RINT_MAGIC).sub_(RINT_MAGIC).clamp_(-INT8_MAX, INT8_MAX)
        codes.view(-1, *weight.shape[-2:])[index] = q.masked_fill_(zero[:, None], 0.0)
        scales.view(-1, weight.shape[-2])[index] = scale
    return codes, scales


def dequantize_weight(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 [..., N, K] from codes [..., N, K] and scales [..., N]."""
    return codes.float() * scale[..., None]
