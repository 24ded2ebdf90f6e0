"""`TritonExperts` and `BatchedTritonExperts`: what the Triton kernels need."""

from __future__ import annotations

from int8moe.backends.base import FusedMoEExperts
from int8moe.config import FusedMoEActivationFormat
from int8moe.rules import (
    ACTIVATION_FORMAT,
    CAPABILITY,
    EXACT_INT32,
    GATED_INTERLEAVE,
    IN_DTYPE,
    LORA,
    PACKAGES,
    PLATFORM,
    SCHEME,
    Fact,
    Rule,
)
from int8moe.schemes import W8A8_CHANNEL_TOKEN, W8A8_TENSOR_TENSOR, W8A16_CHANNEL, W8A16_TENSOR

_BFLOAT16_PRODUCTS = Rule(
    Fact("bfloat16 products on cuda", lambda d: d.activation_key is None and d.config.in_dtype == "bfloat16"
         and d.config.platform.kind == "cuda"),
    "yes",
    bool,
)  # fmt: skip
"""Only weight-only schemes multiply bfloat16; W8A8 loads and stores it by its bits."""

# Triton has int8 tensor-core instructions from 8.0 on; on 7.5 the same sums run in float32 steps, exact and slow.
_RULES = (
    PLATFORM.one_of("cuda", "rocm"),
    CAPABILITY.at_least((7, 5)).when(PLATFORM.one_of("cuda")).because("the oldest these kernels are compiled for"),
    CAPABILITY.at_least((8, 0)).when(_BFLOAT16_PRODUCTS).because("weight-only multiplies bfloat16 on tensor cores"),
    PACKAGES.includes("triton").because("pip install 'int8moe[triton]'"),
    SCHEME.one_of(W8A8_CHANNEL_TOKEN, W8A8_TENSOR_TENSOR, W8A16_CHANNEL, W8A16_TENSOR),
    IN_DTYPE.one_of("bfloat16", "float16", "float32"),
    LORA.is_false(),
    GATED_INTERLEAVE,
    *EXACT_INT32,
)


class TritonExperts(FusedMoEExperts):
    """Our Triton kernels: W8A8 (channel x token, tensor x tensor) and W8A16."""

    runner = "int8moe.backends.triton.run:TritonRunner"
    rules = (*_RULES, ACTIVATION_FORMAT.one_of(FusedMoEActivationFormat.Standard))


class BatchedTritonExperts(FusedMoEExperts):
    """The same kernels on one padded batch per expert."""

    runner = "int8moe.backends.triton.run:BatchedTritonRunner"
    activation_format = FusedMoEActivationFormat.BatchedExperts
    rules = (*_RULES, ACTIVATION_FORMAT.one_of(FusedMoEActivationFormat.BatchedExperts))
