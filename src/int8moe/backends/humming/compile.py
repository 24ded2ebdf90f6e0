"""Compiling Humming's kernels before they are needed: side by side, and kept for other processes (cache.py)."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from int8moe.backends.humming.cache import cache_folder
from int8moe.backends.humming.launch import NAN_TO_INFINITY, GemmPlan, LayerPlan, Tuning, on_device, quantize

logger = logging.getLogger(__name__)

MOST_TOKENS = 8192
"""Kernels for more tokens in one call are compiled when such a call comes."""
REPORT_SECONDS = 5.0
Tick = Callable[[int, int], None]
"""Told how many kernels are done, and out of how many."""


@dataclass(frozen=True)
class Warmed:
    """What compiling ahead did: GEMM kernels that the layer has, of which so many were compiled now, and the time."""

    kernels: int
    compiled: int
    seconds: float
    cache: str


def jobs(plan: LayerPlan, slots: int | Sequence[int]) -> list[tuple[GemmPlan, Tuning]]:
    """The GEMM kernels, each once, of calls with up to so many slots, or with just these numbers of slots."""
    exact = None if isinstance(slots, int) else slots
    found: dict[tuple[str, str], tuple[GemmPlan, Tuning]] = {}
    for gemm in (plan.w13, plan.w2):
        if exact is None:
            chosen = [t for t in gemm.tunings if t.low < int(slots)]  # type: ignore[arg-type]
        else:
            chosen = [gemm.tuning(n) for n in exact]
        found |= {(gemm.config.to_str(), t.text): (gemm, t) for t in chosen}
    return list(found.values())


def compile_ahead(
    plan: LayerPlan, slots: int | Sequence[int], device: torch.device, tick: Tick | None = None
) -> Warmed:
    """Compile the GEMMs of `jobs(plan, slots)` side by side, and the kernels that quantise; those in the cache are only
    loaded. One INFO line where it takes long, and more as it goes on."""
    from humming.kernel.humming import HummingKernel
    from humming.utils.cpu import get_parallel_build_workers

    todo = jobs(plan, slots)
    index = torch.cuda.current_device() if device.index is None else device.index
    started = said = time.monotonic()
    before = _cached()

    def compile_one(job: tuple[GemmPlan, Tuning]) -> None:
        gemm, tuning = job
        HummingKernel.prepare_kernels(gemm.config.to_str(), plan.compute_config, tuning.text, index)

    done = 0
    with ThreadPoolExecutor(max_workers=max(1, min(len(todo) or 1, get_parallel_build_workers()))) as pool:
        for future in as_completed([pool.submit(compile_one, job) for job in todo]):
            future.result()
            done += 1
            if tick:
                tick(done, len(todo))
            if time.monotonic() - said > REPORT_SECONDS and done < len(todo):
                said = time.monotonic()
                logger.info(
                    "compiling Humming kernels: %d of %d after %.0f s (kept in %s)",
                    done, len(todo), said - started, cache_folder(),
                )  # fmt: skip
    _load_quantizers(plan, device)
    return Warmed(len(todo), max(0, _cached() - before), round(time.monotonic() - started, 2), str(cache_folder()))


def _cached() -> int:
    with suppress(OSError):
        return sum(1 for entry in os.scandir(cache_folder()) if entry.is_dir())
    return 0


def _load_quantizers(plan: LayerPlan, device: torch.device) -> None:
    """Run the kernels that quantise on one row of zeros: the package compiles those of all row counts together."""
    new = lambda *shape, dtype=torch.int32: torch.zeros(shape, dtype=dtype, device=device)
    first: dict[str, Any] = {"activation_type": "unary", "activation_impl": NAN_TO_INFINITY}
    second: dict[str, Any] = dict(plan.activation)
    rows = 1
    if plan.gemm_type == "grouped_contiguous":
        first |= {"layout": "scatter", "scatter_idx": new(1, plan.topk)}
        second |= {"num_valid_tokens": new(1)}
    elif plan.gemm_type == "grouped_masked":
        rows = plan.experts
        first |= {"layout": "grouped_mask", "expert_tokens": new(plan.experts)}
        second |= {"layout": "grouped_mask", "expert_tokens": new(plan.experts)}
    with on_device(new(1)):
        quantize(plan.w13, new(rows, plan.hidden, dtype=plan.dtype), **first)
        quantize(plan.w2, new(rows, plan.w13.rows, dtype=plan.dtype), **second)
