"""Humming layer times on a GPU: the indexed and the grouped class in turn, by the method of triton.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from int8moe.backends.base import FusedMoEExperts
from int8moe.backends.humming.support import HummingIndexedExperts
from int8moe.bench.base import Options
from int8moe.bench.shapes import BenchShape
from int8moe.bench.triton import BF16, HUMMING_GROUPED, TRITON, TritonBench


class HummingBench(TritonBench):
    """Times `HummingIndexedExperts` and `HummingGroupedExperts`, beside Triton and torch's grouped bf16 product where
    asked. Both are held to a tolerance before the clock starts."""

    backend, experts_class = "HUMMING", "HummingIndexedExperts"
    forms = (TRITON, BF16, HUMMING_GROUPED)
    takes = ("kernels",)
    packages = ("int8moe", "torch", "triton", "humming-kernels")
    experts: type[FusedMoEExperts] = HummingIndexedExperts

    def __init__(self, shapes: Sequence[BenchShape], options: Options) -> None:
        others = [form for form in options.compare if form != HUMMING_GROUPED]
        super().__init__(shapes, replace(options, compare=(HUMMING_GROUPED, *others)))
