"""`CPUExpertsInt8`: what the native CPU kernel needs. One class; the instruction set is chosen at run time."""

from __future__ import annotations

from int8moe.backends.base import FusedMoEExperts
from int8moe.config import FusedMoEActivationFormat
from int8moe.rules import ACTIVATION_FORMAT, EXACT_INT32, GATED_INTERLEAVE, IN_DTYPE, LORA, PLATFORM, SCHEME
from int8moe.schemes import W8A8_CHANNEL_TOKEN


class CPUExpertsInt8(FusedMoEExperts):
    """Native C++ kernel (csrc/cpu): the whole layer in one call, same bits on every instruction set."""

    runner = "int8moe.backends.cpu.run:CPURunner"
    rules = (
        PLATFORM.one_of("cpu"),
        SCHEME.one_of(W8A8_CHANNEL_TOKEN),
        IN_DTYPE.one_of("bfloat16", "float16", "float32"),
        ACTIVATION_FORMAT.one_of(FusedMoEActivationFormat.Standard),
        LORA.is_false(),
        GATED_INTERLEAVE,
        *EXACT_INT32,
    )
