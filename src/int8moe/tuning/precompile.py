"""Compiles kernels in several processes into Triton's cache on disk, where the measuring process finds them.

The processes are plain children that run this module: no start method of `multiprocessing` asks the caller's main
module for a guard then.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

from int8moe.backends.triton.configs import Plan, TileConfig
from int8moe.config import FusedMoEConfig

Facts = tuple[str, "tuple[int, int] | None"]
"""Name and compute capability of the GPU."""


@dataclass(frozen=True)
class Task:
    """One kernel: GEMM 1 (`first`) or 2 of a layer with a tile; `kind` is rows, gathered or sorted."""

    config: FusedMoEConfig
    weight_only: bool
    first: bool
    kind: str
    tile: TileConfig


def plan_tasks(config: FusedMoEConfig, weight_only: bool, plan: Plan) -> list[Task]:
    """The GEMMs of a plan."""
    first = "rows" if plan.rows else "sorted" if plan.sort_rows else "gathered"
    second = "rows" if plan.rows else "gathered"  # what GEMM 2 reads is in the order of the experts either way
    return [Task(config, weight_only, True, first, plan.gemm1), Task(config, weight_only, False, second, plan.gemm2)]


class Compiler:
    """Children that compile, started when there is work for them and kept until the `with` block ends.

    Ctrl-C does not reach them (they are a session of their own): the block ends them. Where this process is killed,
    their stdin ends, and each ends after the kernel it is at.
    """

    command: tuple[str, ...] = (sys.executable, "-m", "int8moe.tuning.precompile")

    def __init__(self, facts: Facts, processors: int, workers: int | None = None) -> None:
        self.start = (facts, processors)
        self.workers = workers or len(os.sched_getaffinity(0))
        self.children: dict[int, subprocess.Popen[bytes]] = {}
        self.threads: list[threading.Thread] = []
        self.closed = False
        self._lock = threading.Lock()  # of children and closed

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.closed = True
            children = list(self.children.values())
        for child in children:
            child.kill()
        for thread in self.threads:  # each ends a moment after its child
            thread.join()
        for number in list(self.children):
            self._drop(number)

    def compile(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, str | None]]:
        """Yields each task as it is done, with what went wrong."""
        todo: queue.SimpleQueue[Task] = queue.SimpleQueue()
        for task in tasks:
            todo.put(task)
        done: queue.SimpleQueue[tuple[Task, str | None]] = queue.SimpleQueue()
        self.threads = [
            threading.Thread(target=self._serve, args=(number, todo, done), daemon=True)
            for number in range(min(self.workers, len(tasks)))
        ]
        for thread in self.threads:
            thread.start()
        for _ in tasks:
            yield done.get()

    def _serve(
        self, number: int, todo: queue.SimpleQueue[Task], done: queue.SimpleQueue[tuple[Task, str | None]]
    ) -> None:
        """Hand out tasks to one child until none is left."""
        while True:
            try:
                task = todo.get_nowait()
            except queue.Empty:
                return
            done.put((task, self._ask(number, task)))

    def _ask(self, number: int, task: Task) -> str | None:
        """What went wrong with a task. A child that dies fails its task only: the next one gets a new child."""
        try:
            child = self._child(number)
            assert child.stdin is not None and child.stdout is not None
            _send(child.stdin, task)
            error: str | None = pickle.load(child.stdout)
            return error
        except Exception as problem:  # whatever it is, a task without an answer would be waited for forever
            self._drop(number)
            return f"the compiling process died ({type(problem).__name__})"

    def _child(self, number: int) -> subprocess.Popen[bytes]:
        """The child of this number, started where there is none."""
        with self._lock:
            if self.closed:
                raise RuntimeError("the compiler is closed")
            if number in self.children:
                return self.children[number]
            path = os.pathsep.join(p for p in sys.path if p)
            child = self.children[number] = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        assert child.stdin is not None
        _send(child.stdin, self.start)
        return child

    def _drop(self, number: int) -> None:
        with self._lock:
            child = self.children.pop(number, None)
        if child is None:
            return
        child.kill()
        with contextlib.suppress(OSError):  # closing flushes what the child can take no more
            child.communicate()


def _send(pipe: IO[bytes], value: Any) -> None:
    pickle.dump(value, pipe)
    pipe.flush()


class _Warm:
    """Stands for a kernel: a launch compiles instead of running."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **named: self.kernel.warmup(*args, grid=grid, **named)


def _compile(task: Task) -> None:
    """Launch as a layer call would, on memory that is never touched."""
    import torch

    from int8moe.backends.triton import launch
    from int8moe.tuning.measure import layer_of

    layer = layer_of(task.config, "cpu", task.weight_only)
    topk, tokens = task.config.experts_per_token, 64
    slots = tokens * topk
    dtype = getattr(torch, str(task.config.in_dtype))
    n = layer.intermediate if task.first else task.config.hidden_dim
    k = task.config.hidden_dim if task.first else layer.intermediate
    y = torch.empty(slots, n, dtype=dtype)
    weights = None if task.first else torch.empty(tokens, topk)
    int32 = lambda count: torch.empty(count, dtype=torch.int32)
    if task.kind == "rows":
        x = torch.empty(tokens if task.first else slots, k, dtype=dtype)
        expert_map = int32(task.config.num_experts) if layer.num_local < task.config.num_experts else None
        launch.row_gemm(
            layer, task.first, x, y, torch.empty(tokens, topk, dtype=torch.int64), expert_map, task.config.num_experts,
            int32(slots) if task.first else None, task.tile, topk if task.first else 1, weights,
        )  # fmt: skip
        return
    blocks = launch.Blocks(int32(slots), int32(slots), int32(slots), int32(slots), int32(slots), int32(2), slots)
    gathered = task.first and task.kind == "gathered"
    a = torch.empty(tokens if gathered else slots, k, dtype=dtype if task.weight_only else torch.int8)
    scale = None if task.weight_only else torch.empty(len(a))
    launch.grouped_gemm(layer, task.first, a, scale, y, blocks, task.tile, topk if gathered else None, weights)


def main() -> None:
    """A child: tasks by stdin, what went wrong (or None) by stdout."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else prints does not reach the answers
    facts, processors = pickle.load(sys.stdin.buffer)
    from int8moe.backends.triton import kernels, launch

    for name in ("grouped_gemm_kernel", "row_gemm_kernel"):
        setattr(kernels, name, _Warm(getattr(kernels, name)))
    if launch.specialized is not None:
        launch.specialized.specialized_gemm_kernel = _Warm(launch.specialized.specialized_gemm_kernel)
    launch.device_facts = lambda device: facts  # type: ignore[assignment]
    launch.processors = lambda device: processors  # type: ignore[assignment]
    while True:
        try:
            task = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            _compile(task)
            error = None
        except Exception as problem:  # a tile that does not compile is not measured
            error = f"{type(problem).__name__}: {str(problem)[:200]}"
        try:
            _send(answers, error)
        except BrokenPipeError:  # the parent was killed
            return


if __name__ == "__main__":
    main()
