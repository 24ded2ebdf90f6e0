"""Compiles kernels in several processes into Triton's cache on disk, where the measuring process finds them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from int8moe.backends.triton.configs import Plan, TileConfig
from int8moe.config import FusedMoEConfig


@dataclass(frozen=True)
class Task:
    """One kernel: GEMM 1 (`first`) or 2 of a layer with a tile; `kind` rows, gathered or sorted."""

    config: FusedMoEConfig
    weight_only: bool
    first: bool
    kind: str
    tile: TileConfig


class _Warm:
    """Stands for a kernel: a launch compiles instead of running."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **named: self.kernel.warmup(*args, grid=grid, **named)


def _start(facts: tuple[str, tuple[int, int] | None], processors: int) -> None:
    from int8moe.backends.triton import kernels, launch

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in [name for name in vars(kernels) if name.endswith("_gemm_kernel")]:
        setattr(kernels, name, _Warm(getattr(kernels, name)))
    launch.device_facts = lambda device: facts  # type: ignore[assignment]
    launch.processors = lambda device: processors  # type: ignore[assignment]


def _compile(task: Task) -> tuple[Task, str | None]:
    import torch

    from int8moe.backends.triton import launch
    from int8moe.tuning.measure import layer_of

    try:
        layer = layer_of(task.config, "cpu", task.weight_only)
        topk = task.config.experts_per_token
        tokens = 64
        slots = tokens * topk
        dtype = getattr(torch, str(task.config.in_dtype))
        n = layer.intermediate if task.first else task.config.hidden_dim
        k = task.config.hidden_dim if task.first else layer.intermediate
        y = torch.empty(slots, n, dtype=dtype)
        weights = None if task.first else torch.empty(tokens, topk)
        mapped = layer.num_local < task.config.num_experts
        if task.kind == "rows":
            ids = torch.empty(tokens, topk, dtype=torch.int64)
            local = torch.empty(slots, dtype=torch.int32) if task.first else None
            expert_map = torch.empty(task.config.num_experts, dtype=torch.int32) if mapped else None
            launch.row_gemm(
                layer, task.first, torch.empty(tokens if task.first else slots, k, dtype=dtype), y, ids, expert_map,
                task.config.num_experts, local, task.tile, topk if task.first else 1, weights,
            )  # fmt: skip
            return task, None
        int32 = lambda n: torch.empty(n, dtype=torch.int32)
        blocks = launch.Blocks(int32(slots), int32(slots), int32(slots), int32(slots), int32(slots), int32(2), slots)
        gathered = task.first and task.kind == "gathered"
        rows = tokens if gathered else slots
        a = torch.empty(rows, k, dtype=dtype if task.weight_only else torch.int8)
        scale = None if task.weight_only else torch.empty(rows)
        launch.grouped_gemm(layer, task.first, a, scale, y, blocks, task.tile, topk if gathered else None, weights)
    except Exception as error:  # a tile that does not compile is not tried
        return task, f"{type(error).__name__}: {str(error)[:200]}"
    return task, None


def compile_all(
    tasks: Sequence[Task], facts: tuple[str, tuple[int, int] | None], processors: int, workers: int | None = None
) -> Iterator[tuple[Task, str | None]]:
    """Yields each task as it is done, with what went wrong."""
    workers = max(1, min(len(tasks), workers or (len(os.sched_getaffinity(0)) - 1) or 1))
    with multiprocessing.get_context("spawn").Pool(workers, _start, (facts, processors)) as pool:
        yield from pool.imap_unordered(_compile, tasks, chunksize=1)


def plan_tasks(config: FusedMoEConfig, weight_only: bool, plan: Plan) -> list[Task]:
    """The GEMMs of a plan."""
    kind = "rows" if plan.rows else "sorted" if plan.sort_rows else "gathered"
    return [Task(config, weight_only, True, kind, plan.gemm1), Task(config, weight_only, False, kind, plan.gemm2)]
