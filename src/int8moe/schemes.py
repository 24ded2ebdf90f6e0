"""Quantisation schemes as plain values: what is scaled, by how many scales, and when.

A `QuantKey` describes one tensor (weights or activations); a pair of them is a scheme. The names are
the ones serving engines use, so that a key printed here can be looked up there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class GroupShape(NamedTuple):
    """How many rows and columns share one scale; -1 stands for the whole extent."""

    row: int
    col: int

    @property
    def name(self) -> str:
        names = {(-1, -1): "per_tensor", (-1, 1): "per_channel", (1, -1): "per_token"}
        return names.get((self.row, self.col), f"group_{self.row}x{self.col}")


PER_TENSOR = GroupShape(-1, -1)
PER_CHANNEL = GroupShape(-1, 1)
PER_TOKEN = GroupShape(1, -1)


@dataclass(frozen=True)
class ScaleDesc:
    """One kind of scale: its dtype, whether it is fixed ahead of time, and what shares it."""

    dtype: str
    static: bool
    group_shape: GroupShape

    def __str__(self) -> str:
        return f"{self.dtype},{'static' if self.static else 'dynamic'},{self.group_shape.name}"


@dataclass(frozen=True)
class QuantKey:
    """How one tensor is quantised: code dtype, scale, symmetric or not."""

    dtype: str
    scale: ScaleDesc
    symmetric: bool = True

    def __str__(self) -> str:
        kind = "symmetric" if self.symmetric else "asymmetric"
        return f"QuantKey({self.dtype},scale({self.scale}),{kind})"


kInt8StaticChannelSym = QuantKey("i8", ScaleDesc("f32", True, PER_CHANNEL))
kInt8StaticTensorSym = QuantKey("i8", ScaleDesc("f32", True, PER_TENSOR))
kInt8DynamicTokenSym = QuantKey("i8", ScaleDesc("f32", False, PER_TOKEN))
kInt8DynamicTensorSym = QuantKey("i8", ScaleDesc("f32", False, PER_TENSOR))
kInt8Static = kInt8StaticTensorSym


class Scheme(NamedTuple):
    """A weight key with an activation key; `None` as activation key means weight-only (W8A16)."""

    weight_key: QuantKey | None
    activation_key: QuantKey | None

    def __str__(self) -> str:
        return SCHEME_NAMES.get(self, f"weights {self.weight_key}, activations {self.activation_key}")


W8A8_CHANNEL_TOKEN = Scheme(kInt8StaticChannelSym, kInt8DynamicTokenSym)
W8A8_TENSOR_TENSOR = Scheme(kInt8StaticTensorSym, kInt8DynamicTensorSym)
W8A16_CHANNEL = Scheme(kInt8StaticChannelSym, None)
W8A16_TENSOR = Scheme(kInt8StaticTensorSym, None)
SCHEME_NAMES = {
    W8A8_CHANNEL_TOKEN: "w8a8 (channel scales, token activations)",
    W8A8_TENSOR_TENSOR: "w8a8 (tensor scales, tensor activations)",
    W8A16_CHANNEL: "w8a16 (channel scales)",
    W8A16_TENSOR: "w8a16 (tensor scales)",
}
SCHEMES_BY_FLAG = {
    "w8a8": W8A8_CHANNEL_TOKEN,
    "w8a8-tensor": W8A8_TENSOR_TENSOR,
    "w8a16": W8A16_CHANNEL,
    "w8a16-tensor": W8A16_TENSOR,
}
