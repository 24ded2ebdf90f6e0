"""How a layer's tensors are quantised, as tensors: scales, biases, activation constants.

Holds torch tensors but imports no torch, so that choosing stays free of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from int8moe.schemes import (
    QuantKey,
    kInt8DynamicTensorSym,
    kInt8DynamicTokenSym,
    kInt8StaticChannelSym,
    kInt8StaticTensorSym,
)


@dataclass
class FusedMoEQuantConfig:
    """Quantisation of one layer.

    Args:
        weight_key, activation_key: the scheme; activation_key None is weight-only.
        w1_scale: float32 [E, 2*I] (or [E, 2*I, 1]; [E] or [E, 1] for one scale per expert); scales of w13.
        w2_scale: float32 [E, H] (or [E, H, 1]; [E] or [E, 1]).
        w1_bias, w2_bias: [E, 2*I] and [E, H], any float dtype, or None.
    """

    weight_key: QuantKey
    activation_key: QuantKey | None
    w1_scale: Any
    w2_scale: Any
    w1_bias: Any = None
    w2_bias: Any = None

    @property
    def use_int8_w8a8(self) -> bool:
        return self.activation_key is not None

    @property
    def use_int8_w8a16(self) -> bool:
        return self.activation_key is None

    @property
    def per_act_token_quant(self) -> bool:
        return self.activation_key == kInt8DynamicTokenSym


def int8_w8a8_moe_quant_config(
    w1_scale: Any, w2_scale: Any, w1_bias: Any = None, w2_bias: Any = None, per_act_token_quant: bool = True
) -> FusedMoEQuantConfig:
    """W8A8: channel scales with per-token activations, or tensor scales with per-tensor activations."""
    weight_key = kInt8StaticChannelSym if per_act_token_quant else kInt8StaticTensorSym
    activation_key = kInt8DynamicTokenSym if per_act_token_quant else kInt8DynamicTensorSym
    return FusedMoEQuantConfig(weight_key, activation_key, w1_scale, w2_scale, w1_bias, w2_bias)


def int8_w8a16_moe_quant_config(
    w1_scale: Any, w2_scale: Any, w1_bias: Any = None, w2_bias: Any = None
) -> FusedMoEQuantConfig:
    """W8A16: int8 weights with channel scales, activations in 16 bits."""
    return FusedMoEQuantConfig(kInt8StaticChannelSym, None, w1_scale, w2_scale, w1_bias, w2_bias)
