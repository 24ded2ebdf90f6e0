"""The Humming experts classes: what they need. Their kernels are those of the humming-kernels package."""

from __future__ import annotations

from typing import Any

from int8moe.backends.base import FusedMoEExperts
from int8moe.config import FusedMoEActivationFormat
from int8moe.rules import (
    ACTIVATION_FORMAT,
    CAPABILITY,
    CUDA_TOOLKIT,
    EXACT_INT32,
    GATED_INTERLEAVE,
    HIDDEN_DIM,
    IN_DTYPE,
    INTERMEDIATE,
    LORA,
    PACKAGES,
    PLATFORM,
    SCHEME,
    Fact,
    Rule,
)
from int8moe.schemes import W8A8_CHANNEL_TOKEN


def _longest_row(width: int) -> int:
    """The widest row that one block can quantise: 1024 threads, each a power of two of at most 256 values that
    divides the width."""
    return 1024 * min(width & -width, 256)


def _quantises_in_one_block(width: Fact[Any]) -> Rule:
    return width.satisfies(
        lambda n: n <= _longest_row(n), "at most 1024 times its largest power-of-two divisor (up to 256)"
    ).because("one block of 1024 threads quantises a row")


_SIXTEEN_BYTES = "rows of int8 activations are read 16 bytes at a time; weights are padded to tiles of 64"

_CUDA = PLATFORM.one_of("cuda")
_COMPILES = "Humming compiles its kernels when they are first used: pip install 'humming-kernels[cu13]', or [cu12]"

_COMMON = (
    PLATFORM.one_of("cuda"),
    CAPABILITY.at_least((7, 5)).when(_CUDA).because("int8 tensor cores"),
    CAPABILITY.at_most((12, 9)).when(_CUDA).because("the package chooses kernels for no newer GPU"),
    CAPABILITY.at_least((8, 0)).when(_CUDA, IN_DTYPE.one_of("bfloat16")).because("bfloat16 arithmetic"),
    PACKAGES.includes("humming-kernels").because("pip install 'int8moe[humming]'"),
    CUDA_TOOLKIT.satisfies(lambda pieces: "nvrtc" in pieces or "nvcc" in pieces, "nvrtc or nvcc among them")
    .when(_CUDA)
    .because(_COMPILES),
    CUDA_TOOLKIT.includes("cuda_runtime.h").when(_CUDA).because(_COMPILES),
    CUDA_TOOLKIT.includes("CCCL headers").when(_CUDA).because(_COMPILES),
    SCHEME.one_of(W8A8_CHANNEL_TOKEN).because("Humming's dynamic activation scales are per token"),
    IN_DTYPE.one_of("bfloat16", "float16").because("Humming's GEMM writes 16-bit floats"),
    HIDDEN_DIM.multiple_of(16).because(_SIXTEEN_BYTES),
    INTERMEDIATE.multiple_of(16).because(_SIXTEEN_BYTES),
    _quantises_in_one_block(HIDDEN_DIM),
    _quantises_in_one_block(INTERMEDIATE),
    LORA.is_false(),
    GATED_INTERLEAVE,
    *EXACT_INT32,
)
# Every activation fits: it is handed to the package as a C++ expression (run.activation_source). So do biases.

_STANDARD = (ACTIVATION_FORMAT.one_of(FusedMoEActivationFormat.Standard), *_COMMON)


class BatchedHummingGroupedExperts(FusedMoEExperts):
    """Humming's masked grouped GEMM, on a padded batch per expert: `hidden_states [E_local, max_tokens, H]`."""

    activation_format = FusedMoEActivationFormat.BatchedExperts
    runner = "int8moe.backends.humming.run:BatchedGroupedRunner"
    rules = (ACTIVATION_FORMAT.one_of(FusedMoEActivationFormat.BatchedExperts), *_COMMON)


class HummingGroupedExperts(FusedMoEExperts):
    """Humming's contiguous grouped GEMM: rows are scattered into expert order while they are quantised."""

    runner = "int8moe.backends.humming.run:GroupedRunner"
    rules = _STANDARD


class HummingIndexedExperts(FusedMoEExperts):
    """Humming's indexed GEMM: each token is quantised once and gathered inside the kernel."""

    runner = "int8moe.backends.humming.run:IndexedRunner"
    rules = _STANDARD
