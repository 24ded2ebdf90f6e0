"""`ReferenceExperts`: what the plain PyTorch backend needs. Chosen only by name."""

from __future__ import annotations

from int8moe.backends.base import FusedMoEExperts
from int8moe.config import FusedMoEActivationFormat
from int8moe.rules import ACTIVATION_FORMAT, EXACT_INT32, GATED_INTERLEAVE, IN_DTYPE, LORA, SCHEME
from int8moe.schemes import W8A8_CHANNEL_TOKEN, W8A8_TENSOR_TENSOR, W8A16_CHANNEL, W8A16_TENSOR


class ReferenceExperts(FusedMoEExperts):
    """docs/numerics.md in plain PyTorch: slow, obvious, the definition of correct."""

    runner = "int8moe.backends.reference.run:ReferenceRunner"
    rules = (
        SCHEME.one_of(W8A8_CHANNEL_TOKEN, W8A8_TENSOR_TENSOR, W8A16_CHANNEL, W8A16_TENSOR),
        IN_DTYPE.one_of("bfloat16", "float16", "float32"),
        ACTIVATION_FORMAT.one_of(FusedMoEActivationFormat.Standard),
        LORA.is_false(),
        GATED_INTERLEAVE,
        *EXACT_INT32,
    )
