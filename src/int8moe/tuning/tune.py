"""The search: for each token count, the tiles of both GEMMs, then whole layer calls of the plans they make."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from int8moe.backends.triton import launch
from int8moe.backends.triton.configs import Plan, TileConfig, Won, default_plan, fitted
from int8moe.config import FusedMoEConfig
from int8moe.errors import Int8MoeError
from int8moe.tuning import space, winners
from int8moe.tuning.measure import Call, Stage, layer_of, median_us, run_layer
from int8moe.tuning.precompile import Compiler, Task, plan_tasks

SCREEN_SECONDS, LAYER_SECONDS = 0.02, 0.25
SORTED_SLOTS = 1024  # from here on rows sorted beforehand are tried, too
TALL_ROWS = 256  # slots of an expert from which the tallest blocks are tried
LEAST_GAIN = 0.02  # of the default's time; less is noise
LAYERS = 4  # plans of a token count that are timed as whole layers,
LEADERS = 5  # and tiles of each GEMM that are tried in the best of them
ENOUGH_BYTES, MOST_CALLS = 400e6, 16  # of weights that the calls of one graph touch: several times a GPU's last cache

Tick = Callable[[str, float], None]
"""Told what is being done, and which share of this token count is done."""
Timer = Callable[[Sequence[Callable[[], object]], float], float]
"""Median time of one of some bodies, microseconds, and the seconds to spend."""


@dataclass(frozen=True)
class Found:
    """The result for one token count.

    Args:
        plan: the fastest. latency_us, default_us: of a whole layer call, by it and by the default plan.
        tried: tiles measured. refused: tiles that did not compile, did not run or gave other bits, and why.
        layers_us: of each plan timed as a whole layer.
    """

    tokens: int
    plan: Plan
    latency_us: float
    default_us: float
    tried: int
    refused: dict[str, str] = field(default_factory=dict)
    layers_us: dict[str, float] = field(default_factory=dict)

    @property
    def gain(self) -> float:
        """Share of the default's time that is saved."""
        return 1 - self.latency_us / self.default_us


@dataclass
class Search:
    """What is tried for one token count. Keys of `gemm1` are (block_m, rows sorted beforehand), of `gemm2` block_m."""

    tokens: int
    calls: list[Call]
    default: Plan
    rows: list[TileConfig]
    gemm1: dict[tuple[int, bool], list[TileConfig]]
    gemm2: dict[int, list[TileConfig]]


Times = list[tuple[float, TileConfig]]


class Tuner:
    """Tunes one layer shape on a GPU. Use as a context: it keeps compiling processes.

    Args:
        gbps, tops: what the GPU can do, in 1e9 bytes and 1e12 int8 operations a second; for the cost model.
        check: every tile must give the bits of the others, and every plan those of the default plan (W8A8).
        won: for a quick search, plans of other layers: only their tiles are tried, for which the cost model has no say.
        note: called with every measured tile: tokens, 1 or 2 for the GEMM, kind, tile, microseconds.
        device, timer: for tests.
    """

    def __init__(
        self, config: FusedMoEConfig, *, weight_only: bool = False, gbps: float, tops: float, check: bool = True,
        workers: int | None = None, won: Sequence[Won] = (),
        note: Callable[[int, int, str, TileConfig, float], None] | None = None,
        device: str = "cuda", timer: Timer = median_us,
    ) -> None:  # fmt: skip
        self.config, self.weight_only, self.gbps, self.tops = config, weight_only, gbps, tops
        self.check = check and not weight_only  # W8A16 is held to a tolerance, not to bits
        self.won, self.note, self.timer = won, note, timer
        self.layer = layer_of(config, device, weight_only)
        self.device = self.layer.w13.device
        self.facts = launch.device_facts(self.device)
        self.topk = config.experts_per_token
        self.y_bytes = getattr(torch, str(config.in_dtype)).itemsize
        self.a_bytes = self.y_bytes if weight_only else 1
        self.compiler = Compiler(self.facts, launch.processors(self.device), workers)
        self.broken: dict[Task, str] = {}
        self.compiled: set[Task] = set()

    def __enter__(self) -> Tuner:
        return self

    def __exit__(self, *_: object) -> None:
        self.compiler.__exit__()

    # --- what to try ---

    def search(self, tokens: int) -> Search:
        """The tiles to compile and measure first."""
        calls = self._calls(tokens)
        gemm1, gemm2 = self._gemm(True, calls[0]), self._gemm(False, calls[0])
        slots = tokens * self.topk
        default = default_plan(
            tokens, self.layer.num_local, self.topk, self.facts[1], self.a_bytes, self.y_bytes, self.config.num_experts,
            launch.specialized is not None, self.layer.intermediate,
        )  # fmt: skip
        special = launch.specializes(self.device) and not self.weight_only
        if self.won:
            tiles = winners.tiles(self.won, self.config, tokens, gemm1, gemm2, special)
            return Search(tokens, calls, default, *tiles)
        rows = (
            space.row_tiles(min(gemm1.k, gemm2.k), gemm1.capability, self.a_bytes) if slots <= space.ROW_SLOTS else []
        )
        heights = space.likely_block_ms(gemm1, 2 if slots <= 16 else 3)
        firsts = {(m, False): space.likely_tiles(gemm1, m) for m in heights}
        if slots >= SORTED_SLOTS and not self.weight_only:
            if special and slots >= TALL_ROWS * self.layer.num_local:
                heights.append(space.TALL)
            firsts |= {(m, True): space.likely_tiles(gemm1, m, special) for m in heights if m >= 64}
        seconds = {m: space.likely_tiles(gemm2, m, special) for m in heights}
        return Search(tokens, calls, default, rows, firsts, seconds)

    def _calls(self, tokens: int) -> list[Call]:
        """As many calls as touch more weights than a cache holds."""
        calls = [Call(self.config, self.layer, tokens, seed=0)]
        expert = self.layer.w13[0].numel() + self.layer.w2[0].numel()
        touched = max(1, len(calls[0].rows(self.layer.num_local))) * expert
        more = min(MOST_CALLS, int(ENOUGH_BYTES / touched)) if self.device.type == "cuda" else 1
        return calls + [Call(self.config, self.layer, tokens, seed=s) for s in range(1, more)]

    def _gemm(self, first: bool, call: Call) -> space.Gemm:
        w = self.layer.w13 if first else self.layer.w2
        return space.Gemm(
            call.rows(self.layer.num_local), w.shape[1], w.shape[2], self.a_bytes, self.facts[1],
            launch.processors(self.device), self.gbps, self.tops,
        )  # fmt: skip

    def _tasks(self, search: Search) -> Iterator[Task]:
        config, weight_only = self.config, self.weight_only
        yield from plan_tasks(config, weight_only, search.default)
        yield from plan_tasks(config, weight_only, self._in_blocks(search.default))
        for first in (True, False):
            yield from (Task(config, weight_only, first, "rows", tile) for tile in search.rows)
        for (_, sort_rows), tiles in search.gemm1.items():
            yield from (Task(config, weight_only, True, _kind(sort_rows), tile) for tile in tiles)
        for tiles in search.gemm2.values():
            yield from (Task(config, weight_only, False, "gathered", tile) for tile in tiles)

    def compile(self, searches: Sequence[Search], tick: Callable[[int, int], None]) -> None:
        """Compile what `searches` need and what is not compiled yet, in several processes; `tick(done, of)`."""
        self._compile([task for search in searches for task in self._tasks(search)], tick)

    def _compile(self, tasks: Sequence[Task], tick: Callable[[int, int], None]) -> None:
        missing = [task for task in dict.fromkeys(tasks) if task not in self.compiled]
        self.compiled.update(missing)
        if self.device.type != "cuda":
            return
        for number, (task, error) in enumerate(self.compiler.compile(missing), 1):
            if error is not None:
                self.broken[task] = error
            tick(number, len(missing))

    def _in_blocks(self, plan: Plan) -> Plan:
        """A plan in blocks of one height, plain, with rows gathered, as near to `plan` as that can be: it says what
        tiles must compute."""
        tile = plan.gemm1
        if plan.rows:
            tile = replace(tile, block_n=64, block_k=128 // self.a_bytes)
        elif tile.specialized:
            tile = fitted(tile.plain(), self.facts[1], self.a_bytes, self.y_bytes)
        return Plan(tile, tile)

    # --- measuring ---

    def tune(self, search: Search, tick: Tick) -> Found:
        """The fastest plan for one token count.

        Raises:
            Int8MoeError: even the default plan does not run.
        """
        measured = _Measured(self, search)
        try:
            want = run_layer(self.layer, search.calls[0], search.default)
            if self.check:
                measured.expect(self._in_blocks(search.default))
        except Exception as error:
            what = f"{type(error).__name__}: {str(error)[:200]}"
            raise Int8MoeError(f"the default plan does not run at M={search.tokens}: {what}") from error
        rounds = 1 if self.won else 2
        steps = 2 * rounds * len(search.gemm1) + (1 if search.rows else 0) + 1
        done = 0

        def step(text: str) -> None:
            nonlocal done
            tick(f"M={search.tokens}: {text}", done / steps)
            done += 1

        plans: dict[Plan, float] = {}
        alone: list[Times] = [[], []]
        if search.rows:
            step("slots by themselves")
            alone = [measured.row_tiles(first, search.rows) for first in (True, False)]
            _add(plans, *alone, rows=True)
        firsts: dict[tuple[int, bool], Times] = {}
        seconds: dict[int, Times] = {}

        def measure(of: Search) -> None:
            """Add the times of these tiles; the first form of a height brings those of its GEMM 2."""
            gemm2 = dict(of.gemm2)
            for (block_m, sort_rows), tiles in of.gemm1.items():
                stages = [Stage(self.layer, call, self.topk, block_m, sort_rows) for call in search.calls]
                step(f"GEMM 1, blocks of {block_m}")
                one = firsts.setdefault((block_m, sort_rows), [])
                one += measured.tiles(True, stages, tiles, _kind(sort_rows))
                step(f"GEMM 2, blocks of {block_m}")
                if one and block_m in gemm2:
                    for stage in stages:
                        stage.gemm1(_fastest(one)[1])
                    seconds.setdefault(block_m, []).extend(
                        measured.tiles(False, stages, gemm2.pop(block_m), "gathered")
                    )
                del stages  # before the next ones are made

        measure(search)
        if not self.won:  # what won has its order and persistence from a search that varied them
            more = replace(
                search,
                rows=[],
                gemm1={key: self._variants(True, search.calls[0], one) for key, one in firsts.items()},
                gemm2={block_m: self._variants(False, search.calls[0], two) for block_m, two in seconds.items()},
            )
            self.compile([more], lambda *_: None)  # all in one go, so that no process waits for another
            measure(more)
        for (_, sort_rows), one in firsts.items():
            for two in seconds.values():
                _add(plans, one, two, sort_rows=sort_rows)
        step("whole layers")
        default_us = measured.layer(search.default, want)
        if default_us is None:
            why = measured.refused[str(search.default)]
            raise Int8MoeError(f"the default plan does not run at M={search.tokens}: {why}")
        best, best_us = search.default, default_us
        layers = {"default": default_us}

        def timed(plan: Plan) -> None:
            nonlocal best, best_us
            us = None if _title(plan) in layers else measured.layer(plan, want)
            if us is None:
                return
            layers[_title(plan)] = us
            if us < min(best_us, default_us * (1 - LEAST_GAIN)):
                best, best_us = plan, us

        for plan in sorted(plans, key=lambda p: plans[p])[:LAYERS]:
            timed(plan)
        # The fastest for a moment, or alone, is not the fastest within a layer: others in their places.
        form = best.sort_rows
        sorted_firsts = [one for (_, sort_rows), one in firsts.items() if sort_rows == form]
        for tile in _leaders(alone[:1] if best.rows else sorted_firsts):
            timed(replace(best, gemm1=tile))
        for tile in _leaders(alone[1:] if best.rows else seconds.values()):
            timed(replace(best, gemm2=tile))
        return Found(search.tokens, best, best_us, default_us, measured.tried, measured.refused, layers)

    def _variants(self, first: bool, call: Call, times: Times) -> list[TileConfig]:
        """The best of `times` in other orders, and persistent."""
        gemm = self._gemm(first, call)
        return [v for tile in space.best(times, space.REFINED) for v in space.variants(gemm, tile)]


class _Measured:
    """Times of one token count, and what had to be refused."""

    def __init__(self, tuner: Tuner, search: Search) -> None:
        self.tuner, self.search = tuner, search
        self.tried = 0
        self.refused: dict[str, str] = {}
        self.want: dict[bool, torch.Tensor] = {}

    def expect(self, plan: Plan) -> None:
        """Keep what a plan of `_in_blocks` computes: every tile must give these bits."""
        stage = Stage(self.tuner.layer, self.search.calls[0], self.tuner.topk, plan.gemm1.block_m, False)
        self.want[True] = stage.gemm1(plan.gemm1)[stage.held(True)]
        self.want[False] = stage.gemm2(plan.gemm2)[stage.held(False)]

    def _time(
        self, first: bool, kind: str, tile: TileConfig, bodies: Sequence[Callable[[], object]],
        check: Callable[[], bool] | None = None,
    ) -> float | None:  # fmt: skip
        tuner = self.tuner
        name = f"GEMM {1 if first else 2}, {kind}, {tile}"
        task = Task(tuner.config, tuner.weight_only, first, kind, tile)
        if task in tuner.broken:
            self.refused[name] = tuner.broken[task]
            return None
        try:
            if check is not None and not check():
                self.refused[name] = "other bits than the default plan"
                return None
            us = tuner.timer(bodies, SCREEN_SECONDS)
        except Exception as error:  # too much shared memory or too many registers for this GPU
            self.refused[name] = f"{type(error).__name__}: {str(error)[:200]}"
            return None
        self.tried += 1
        if tuner.note is not None:
            tuner.note(self.search.tokens, 1 if first else 2, kind, tile, us)
        return us

    def tiles(self, first: bool, stages: list[Stage], tiles: Sequence[TileConfig], kind: str) -> Times:
        """Times of tiles of the grouped GEMM."""
        run = Stage.gemm1 if first else Stage.gemm2

        def same(tile: TileConfig) -> bool:
            (stages[0].h if first else stages[0].y).fill_(float("nan"))
            return torch.equal(run(stages[0], tile)[stages[0].held(first)], self.want[first])

        times = []
        for tile in tiles:
            bodies = [partial(run, stage, tile) for stage in stages]
            us = self._time(first, kind, tile, bodies, partial(same, tile) if self.tuner.check else None)
            if us is not None:
                times.append((us, tile))
        return times

    def row_tiles(self, first: bool, tiles: Sequence[TileConfig]) -> Times:
        """Times of tiles for slots by themselves."""
        layer, calls, topk = self.tuner.layer, self.search.calls, self.tuner.topk
        slots, device, dtype = calls[0].ids.numel(), self.tuner.device, calls[0].x.dtype
        local = torch.empty(slots, dtype=torch.int32, device=device)
        h = [torch.randn(slots, layer.intermediate, device=device).to(dtype) for _ in calls]
        y = torch.empty(slots, layer.intermediate if first else layer.w2.shape[1], dtype=dtype, device=device)

        def run(number: int, tile: TileConfig) -> None:
            call = calls[number]
            routing = (call.ids, call.expert_map, call.num_experts)
            if first:
                launch.row_gemm(layer, True, call.x, y, *routing, local, tile, topk)
            else:
                launch.row_gemm(layer, False, h[number], y, *routing, None, tile, 1, call.weights)

        times = []
        for tile in tiles:
            us = self._time(first, "rows", tile, [partial(run, n, tile) for n in range(len(calls))])
            if us is not None:
                times.append((us, tile))
        return times

    def layer(self, plan: Plan, want: torch.Tensor) -> float | None:
        """Time of a whole call, after its result was compared with `want`."""
        layer, calls = self.tuner.layer, self.search.calls
        try:
            if self.tuner.check and not torch.equal(run_layer(layer, calls[0], plan), want):
                self.refused[str(plan)] = "other bits than the default plan"
                return None
            return self.tuner.timer([partial(run_layer, layer, call, plan) for call in calls], LAYER_SECONDS)
        except Exception as error:
            self.refused[str(plan)] = f"{type(error).__name__}: {str(error)[:200]}"
            return None


def _fastest(times: Times) -> tuple[float, TileConfig]:
    return min(times, key=lambda pair: pair[0])


def _add(plans: dict[Plan, float], one: Times, two: Times, **form: bool) -> None:
    """Add the plan of the fastest tiles, and the sum of their times; nothing where a GEMM has none."""
    if one and two:
        (us1, tile1), (us2, tile2) = _fastest(one), _fastest(two)
        plans[Plan(tile1, tile2, **form)] = us1 + us2


def _leaders(times: Iterable[Times]) -> list[TileConfig]:
    """The fastest tile of each size of blocks and number of warps, of specialised ones and of others; the LEADERS first
    of those."""
    found: dict[str, tuple[float, TileConfig]] = {}
    for us, tile in (pair for one in times for pair in one):
        key = _blocks(tile)
        if key not in found or us < found[key][0]:
            found[key] = (us, tile)
    return space.best(found.values(), LEADERS)


def _title(plan: Plan) -> str:
    """What tells a plan from the others of one token count."""
    form = "rows" if plan.rows else _kind(plan.sort_rows)
    return f"{form}, {_blocks(plan.gemm1)} and {_blocks(plan.gemm2)}"


def _blocks(tile: TileConfig) -> str:
    """What of a tile is tried in whole layers; among tiles that agree in it a short burst decides."""
    return f"{tile.block_m} x {tile.block_n} by {tile.num_warps}{' specialised' if tile.specialized else ''} warps"


def _kind(sort_rows: bool) -> str:
    return "sorted" if sort_rows else "gathered"
