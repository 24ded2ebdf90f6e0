"""`quantize_weight` for a block of rows that stays in the processor's cache: the same codes and scales, bit for bit.

Of the operations with the right result it takes those that PyTorch runs vectorised: `amin` and `amax` for `aminmax`
along rows, `round` for the addition of the magic number. Rows of a scale that is no normal float32 need no mask: over
the scale 1, every weight of them rounds to 0.
"""

from __future__ import annotations

import torch

from int8moe.errors import NonFiniteWeight
from int8moe.numerics import INT8_MAX

_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


def row_scales(weight: torch.Tensor) -> torch.Tensor:
    """float32 [N]: max|w| / 127 of the rows of float32 [N, K], and 1 where that is no normal number."""
    amax = (
        torch.maximum(-weight.amin(dim=-1), weight.amax(dim=-1)) if weight.shape[1] else weight.new_zeros(len(weight))
    )
    scale = torch.div(amax, torch.full_like(amax, INT8_MAX))
    return torch.where(scale < _SMALLEST_NORMAL, 1.0, scale)


def quantize_rows(weight: torch.Tensor, name: str, scale_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [N, K] and scales [N] of weight [N, K], of any float dtype.

    Raises:
        NonFiniteWeight: NaN or infinity.
    """
    w = weight.to(torch.float32, copy=True)
    scale = row_scales(w).to(scale_dtype)
    if not torch.isfinite(scale).all():
        row = int((~torch.isfinite(scale)).nonzero()[0])
        raise NonFiniteWeight(f"{name} holds NaN or infinity (row {row}); needs finite weights.")
    codes = w.div_(scale.float()[:, None]).round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)
    return codes, scale
