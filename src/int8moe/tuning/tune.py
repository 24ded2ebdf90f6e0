"""The search: for each token count, the tiles of both GEMMs, then whole layer calls of the plans they make."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from int8moe.backends.triton import launch
from int8moe.backends.triton.configs import Plan, TileConfig, default_plan
from int8moe.config import FusedMoEConfig
from int8moe.errors import Int8MoeError
from int8moe.tuning import space
from int8moe.tuning.measure import Call, Stage, layer_of, median_us, run_layer
from int8moe.tuning.precompile import Task, compile_all, plan_tasks

SCREEN_SECONDS, LAYER_SECONDS = 0.03, 0.25
SORTED_SLOTS = 4096  # from here on rows sorted beforehand are tried, too
LEAST_GAIN = 0.02  # of the default's time; less is noise
ENOUGH_BYTES = 400e6  # of weights that the calls of one graph touch together: several times a GPU's last cache

Tick = Callable[[str, float], None]
"""Told what is being done, and which share of the work is done."""


@dataclass(frozen=True)
class Found:
    """The result for one token count.

    Args:
        plan: the fastest. latency_us, default_us: of a whole layer call, by it and by the default plan.
        tried: tiles measured. refused: tiles that did not compile, did not run or gave wrong bits, and why.
    """

    tokens: int
    plan: Plan
    latency_us: float
    default_us: float
    tried: int
    refused: dict[str, str] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def gain(self) -> float:
        """Share of the default's time that is saved."""
        return 1 - self.latency_us / self.default_us


@dataclass
class _Search:
    """One token count: what to try."""

    tokens: int
    rows: list[TileConfig]
    gemm1: dict[tuple[int, bool], list[TileConfig]]  # by (block_m, sort_rows)
    gemm2: dict[int, list[TileConfig]]
    default: Plan

    def tasks(self, config: FusedMoEConfig, weight_only: bool) -> Iterable[Task]:
        yield from plan_tasks(config, weight_only, self.default)
        for first in (True, False):
            yield from (Task(config, weight_only, first, "rows", tile) for tile in self.rows)
        for (_, sort_rows), tiles in self.gemm1.items():
            kind = "sorted" if sort_rows else "gathered"
            yield from (Task(config, weight_only, True, kind, tile) for tile in tiles)
        for tiles in self.gemm2.values():
            yield from (Task(config, weight_only, False, "gathered", tile) for tile in tiles)


class Tuner:
    """Tunes one layer shape on the current GPU.

    Args:
        gbps, tops: what the GPU can do, for the cost model. check: every tile must give the default plan's bits.
        keep: tiles of a GEMM and height that are measured.
    """

    def __init__(
        self, config: FusedMoEConfig, *, weight_only: bool = False, gbps: float, tops: float, check: bool = True,
        keep: int = space.KEEP, workers: int | None = None,
    ) -> None:  # fmt: skip
        self.config, self.weight_only, self.check, self.keep, self.workers = config, weight_only, check, keep, workers
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.facts = launch.device_facts(self.device)
        self.layer = layer_of(config, "cuda", weight_only)
        self.gbps, self.tops = gbps, tops
        self.topk = config.experts_per_token
        self.a_bytes = torch.empty(0, dtype=getattr(torch, str(config.in_dtype))).element_size() if weight_only else 1
        self.broken: dict[Task, str] = {}

    # --- what to try ---

    def _calls(self, tokens: int) -> list[Call]:
        calls = [Call(self.config, self.layer, tokens, seed=0)]
        expert = self.layer.w13[0].numel() + self.layer.w2[0].numel()
        touched = max(1, len(calls[0].rows(self.layer.num_local))) * expert
        more = min(16, int(ENOUGH_BYTES / touched))
        return calls + [Call(self.config, self.layer, tokens, seed=s) for s in range(1, more)]

    def _gemm(self, first: bool, call: Call) -> space.Gemm:
        w = self.layer.w13 if first else self.layer.w2
        return space.Gemm(
            call.rows(self.layer.num_local), w.shape[1], w.shape[2], first and self.layer.gated, self.a_bytes,
            self.facts[1], launch.processors(self.device), self.gbps, self.tops,
        )  # fmt: skip

    def search(self, tokens: int) -> _Search:
        """The tiles that tuning for `tokens` will compile and measure."""
        call = Call(self.config, self.layer, tokens, seed=0)
        gemm1, gemm2 = self._gemm(True, call), self._gemm(False, call)
        slots = tokens * self.topk
        default = default_plan(tokens, self.layer.num_local, self.topk, self.facts[1], self.a_bytes)
        rows = space.row_tiles(gemm1.k, self.a_bytes) if slots <= space.ROW_SLOTS else []
        heights = space.likely_block_ms(gemm1, 2 if slots > 1 else 1)
        firsts = {(m, False): space.likely_tiles(gemm1, m, self.keep) for m in heights}
        if slots >= SORTED_SLOTS and not self.weight_only:
            firsts |= {(m, True): space.likely_tiles(gemm1, m, self.keep) for m in heights if m >= 64}
        return _Search(tokens, rows, firsts, {m: space.likely_tiles(gemm2, m, self.keep) for m in heights}, default)

    def compile(self, searches: Sequence[_Search], tick: Tick) -> None:
        """Compile what all of `searches` need, in several processes."""
        tasks = list(dict.fromkeys(t for s in searches for t in s.tasks(self.config, self.weight_only)))
        done = compile_all(tasks, self.facts, launch.processors(self.device), self.workers)
        for number, (task, error) in enumerate(done, 1):
            if error is not None:
                self.broken[task] = error
            tick(f"compiling {number} of {len(tasks)} kernels", number / len(tasks))

    # --- measuring ---

    def tune(self, search: _Search, tick: Tick) -> Found:
        """The fastest plan for one token count. Raises Int8MoeError where even the default plan does not run."""
        tokens, calls = search.tokens, self._calls(search.tokens)
        self.refused: dict[str, str] = {}
        self.tried = 0
        want = run_layer(self.layer, calls[0], search.default)
        plans: dict[Plan, float] = {}
        stages = len(search.gemm1) + len(search.gemm2) + (2 if search.rows else 0)
        done = 0

        def step(text: str) -> None:
            nonlocal done
            done += 1
            tick(f"M={tokens}: {text}", done / (stages + 1))

        parts: dict[str, float] = {}
        if search.rows:
            best = []
            for first in (True, False):
                best.append(self._best_row_tile(first, calls, search.rows))
                step("slots by themselves")
            if best[0] and best[1]:
                parts["rows.gemm1"], parts["rows.gemm2"] = best[0][0], best[1][0]
                plans[Plan(best[0][1], best[1][1], rows=True)] = best[0][0] + best[1][0]
        second: dict[int, tuple[float, TileConfig] | None] = {}
        for (block_m, sort_rows), tiles in search.gemm1.items():
            held = [Stage(self.layer, call, self.topk, block_m, sort_rows) for call in calls]
            one = self._best_tile(True, held, tiles, "sorted" if sort_rows else "gathered")
            step(f"GEMM 1, block_m {block_m}")
            if block_m not in second:
                for stage in held:
                    stage.gemm1(search.default.gemm1 if False else tiles[0])
                second[block_m] = self._best_tile(False, held, search.gemm2[block_m], "gathered")
                step(f"GEMM 2, block_m {block_m}")
            two = second[block_m]
            if one and two:
                name = f"{'sorted' if sort_rows else 'gathered'}.{block_m}"
                parts[f"{name}.gemm1"], parts[f"{name}.gemm2"] = one[0], two[0]
                extra = 0.2 * one[0] if sort_rows else 0.0
                plans[Plan(one[1], two[1], sort_rows=sort_rows)] = one[0] + two[0] + extra
            del held
        default_us = self._layer_us(calls, search.default, want)
        if default_us is None:
            raise Int8MoeError(f"the default plan does not run at M={tokens}: {self.refused}")
        best_plan, best_us = search.default, default_us
        for plan in sorted(plans, key=lambda p: plans[p])[:4]:
            us = self._layer_us(calls, plan, want)
            if us is not None:
                parts[
                    f"layer.{'rows' if plan.rows else 'sorted' if plan.sort_rows else 'gathered'}.{plan.gemm1.block_m}"
                ] = us
            if us is not None and us < best_us:
                best_plan, best_us = plan, us
        if best_us > default_us * (1 - LEAST_GAIN):
            best_plan, best_us = search.default, default_us
        step("whole layer")
        return Found(tokens, best_plan, best_us, default_us, self.tried, self.refused, parts)

    def _layer_us(self, calls: list[Call], plan: Plan, want: torch.Tensor) -> float | None:
        try:
            if self.check and not self.weight_only and not torch.equal(run_layer(self.layer, calls[0], plan), want):
                self.refused[str(plan)] = "other bits than the default plan"
                return None
            bodies = [lambda call=call: run_layer(self.layer, call, plan) for call in calls]
            return median_us(bodies, LAYER_SECONDS)
        except Exception as error:
            self.refused[str(plan)] = f"{type(error).__name__}: {str(error)[:200]}"
            return None

    def _best_tile(
        self, first: bool, stages: list[Stage], tiles: Sequence[TileConfig], kind: str
    ) -> tuple[float, TileConfig] | None:
        best: tuple[float, TileConfig] | None = None
        want: torch.Tensor | None = None
        for tile in tiles:
            if Task(self.config, self.weight_only, first, kind, tile) in self.broken:
                self.refused[str(tile)] = self.broken[Task(self.config, self.weight_only, first, kind, tile)]
                continue
            run = Stage.gemm1 if first else Stage.gemm2
            try:
                if self.check and not self.weight_only:
                    (stages[0].h if first else stages[0].y).fill_(float("nan"))
                    got = run(stages[0], tile)[stages[0].held(first)]
                    if want is None:
                        want = got.clone()
                    elif not torch.equal(got, want):
                        self.refused[str(tile)] = "other bits than the other tiles"
                        continue
                us = median_us([lambda s=stage: run(s, tile) for stage in stages], SCREEN_SECONDS, 5)
            except Exception as error:
                self.refused[str(tile)] = f"{type(error).__name__}: {str(error)[:200]}"
                continue
            self.tried += 1
            self.note(first, kind, tile, us)
            if best is None or us < best[0]:
                best = us, tile
        return best

    def _best_row_tile(
        self, first: bool, calls: list[Call], tiles: Sequence[TileConfig]
    ) -> tuple[float, TileConfig] | None:
        slots = calls[0].ids.numel()
        dtype, hidden = calls[0].x.dtype, self.config.hidden_dim
        local = torch.empty(slots, dtype=torch.int32, device=self.device)
        h = [torch.randn(slots, self.layer.intermediate, device=self.device).to(dtype) for _ in calls]
        y = torch.empty(slots, self.layer.intermediate if first else hidden, dtype=dtype, device=self.device)

        def run(number: int, tile: TileConfig) -> None:
            call = calls[number]
            routing = (call.ids, call.expert_map, call.num_experts)
            if first:
                launch.row_gemm(self.layer, True, call.x, y, *routing, local, tile, self.topk)
            else:
                launch.row_gemm(self.layer, False, h[number], y, *routing, None, tile, 1, call.weights)

        best: tuple[float, TileConfig] | None = None
        for tile in tiles:
            if (why := self.broken.get(Task(self.config, self.weight_only, first, "rows", tile))) is not None:
                self.refused[str(tile)] = why
                continue
            try:
                us = median_us([lambda n=n: run(n, tile) for n in range(len(calls))], SCREEN_SECONDS, 5)
            except Exception as error:
                self.refused[str(tile)] = f"{type(error).__name__}: {str(error)[:200]}"
                continue
            self.tried += 1
            self.note(first, "rows", tile, us)
            if best is None or us < best[0]:
                best = us, tile
        return best

    def note(self, first: bool, kind: str, tile: TileConfig, us: float) -> None:
        """Called with every measured tile; for records of a search."""


def seconds_left(start: float, share: float) -> float:
    """Estimate from the share of the work done since `start` (`time.perf_counter`)."""
    return (time.perf_counter() - start) * (1 - share) / max(share, 1e-3)
