"""`ExpertWeights`: one layer's experts in the canonical layout, checked when made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from int8moe.config import FusedMoEConfig
from int8moe.errors import NonFiniteWeight, ShapeMismatch

if TYPE_CHECKING:
    import torch


@dataclass
class ExpertWeights:
    """Canonical int8 experts of one rank.

    Args:
        w13: int8 [E, 2*I, H], gate rows then up (alternating for interleaved swigluoai; [E, I, H] when not gated).
        w2: int8 [E, H, I].
        w13_scale: float32 [E, 2*I], one per output row; [E, 2*I, 1], [E] and [E, 1] are accepted.
        w2_scale: float32 [E, H], likewise.
        w13_bias, w2_bias: [E, 2*I] and [E, H], or None.

    Raises:
        ShapeMismatch: two tensors do not fit each other; the message names both shapes.
        NonFiniteWeight: a scale is NaN or infinity; the message names expert and row.
    """

    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor
    w2_scale: torch.Tensor
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("w13", "w2"):
            tensor = getattr(self, name)
            if tensor.dim() != 3:
                raise ShapeMismatch(
                    f"{name} has shape {tuple(tensor.shape)}, needs 3 dimensions: experts, rows, columns."
                )
            if str(tensor.dtype) != "torch.int8":
                raise ShapeMismatch(f"{name} has dtype {tensor.dtype}, needs torch.int8.")
        experts, rows, hidden = self.w13.shape
        if self.w2.shape[0] != experts or self.w2.shape[1] != hidden:
            raise ShapeMismatch(
                f"w2 has shape {tuple(self.w2.shape)}, needs ({experts}, {hidden}, I) for w13 {tuple(self.w13.shape)}."
            )
        if rows not in (self.intermediate_size, 2 * self.intermediate_size):
            raise ShapeMismatch(
                f"w13 has {rows} rows, needs {2 * self.intermediate_size} (gated) or {self.intermediate_size}"
                f" to fit w2 {tuple(self.w2.shape)}."
            )
        self.w13_scale = per_row_scale("w13_scale", self.w13_scale, "w13", self.w13)
        self.w2_scale = per_row_scale("w2_scale", self.w2_scale, "w2", self.w2)
        for name, weight in (("w13", self.w13), ("w2", self.w2)):
            bias = getattr(self, f"{name}_bias")
            if bias is not None and tuple(bias.shape) != tuple(weight.shape[:2]):
                raise ShapeMismatch(
                    f"{name}_bias has shape {tuple(bias.shape)}, needs {tuple(weight.shape[:2])}:"
                    f" one per output row of {name} {tuple(weight.shape)}."
                )

    @property
    def num_experts(self) -> int:
        return self.w13.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.w13.shape[2]

    @property
    def intermediate_size(self) -> int:
        return self.w2.shape[2]

    def check_fits(self, config: FusedMoEConfig) -> None:
        """Raise ShapeMismatch unless the tensors have the shapes that `config` describes."""
        experts, hidden = config.num_local_experts, config.hidden_dim
        wanted = {
            "w13": (experts, config.w13_rows, hidden),
            "w2": (experts, hidden, config.intermediate_size_per_partition),
        }
        for name, want in wanted.items():
            got = tuple(getattr(self, name).shape)
            if got != want:
                raise ShapeMismatch(f"{name} has shape {got}, needs {want}: (local experts, rows, columns).")
        for name in ("w13_bias", "w2_bias"):
            if (getattr(self, name) is not None) != config.has_bias:
                has = "is missing" if config.has_bias else "is given"
                raise ShapeMismatch(f"{name} {has}, and the configuration has has_bias={config.has_bias}.")


def per_row_scale(name: str, scale: torch.Tensor, weight_name: str, weight: torch.Tensor) -> torch.Tensor:
    """`scale` as contiguous float32 [E, rows]; a per-tensor scale ([E] or [E, 1]) is repeated over the rows."""
    want = tuple(weight.shape[:2])
    shape = tuple(scale.shape)
    if shape in (want[:1], (want[0], 1), (want[0], 1, 1)):
        scale = scale.reshape(want[0], 1).expand(*want)
    elif shape == (*want, 1):
        scale = scale.reshape(want)
    elif shape != want:
        raise ShapeMismatch(
            f"{name} has shape {shape}, needs {want}: one scale per output row of {weight_name} {tuple(weight.shape)}."
        )
    scale = scale.float().contiguous()
    finite = scale.isfinite()
    if not finite.all():
        expert, row = (~finite).nonzero()[0].tolist()
        raise NonFiniteWeight(f"{name} holds NaN or infinity (expert {expert}, row {row}); needs finite scales.")
    return scale
