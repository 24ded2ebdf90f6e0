"""CPU layer times: checked against the reference first, then timed with cold weights, all forms in turn.

Weights are cold since successive calls use other copies of the layer, together several times the last-level cache.
A call is hidden states and routing in, combined output out.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from int8moe.backends.cpu import native
from int8moe.backends.cpu.support import CPUExpertsInt8
from int8moe.backends.reference.support import ReferenceExperts
from int8moe.bench import limits as machine_limits
from int8moe.bench.base import Bench, Limits, Options, Row, Tick, Timing
from int8moe.bench.layer import (
    DRAWN_EXPERTS,
    OURS,
    Call,
    draw_call,
    draw_hidden,
    draw_weights,
    expert_bytes,
    fit_copies,
    left_for_layers,
    operations,
    packed_layer,
)
from int8moe.bench.shapes import BenchShape
from int8moe.bench.torch_loop import FORMS, TorchLoop
from int8moe.config import FusedMoEConfig
from int8moe.device import Platform
from int8moe.errors import ConfigError, Int8MoeError
from int8moe.schemes import kInt8DynamicTokenSym, kInt8StaticChannelSym

MIN_TURNS = 3
CHECKED_TOKENS = 16
"""The reference is slow: rows above this many tokens are not compared with it."""
MAX_THREADS_A_CORE = 8
COLD_BYTES, COLD_CACHES, MAX_COPIES = 256 << 20, 4, 1024
_DRAWN_PER_SECOND = 25e6  # weights drawn and quantised by one core
_PACKED_PER_SECOND = 1e9


@dataclass(frozen=True)
class Turns:
    """How many copies of one layer are used in turn, by form, and whether that makes weights cold."""

    copies: dict[str, int]
    cold: bool


def cold_bytes() -> int:
    """Weights together this large do not stay in a cache: 4 x the last-level caches, at least 256 MiB."""
    return max(COLD_BYTES, COLD_CACHES * machine_limits.last_level_cache_bytes())


def plan_turns(name: str, config: FusedMoEConfig, compare: Sequence[str], available: int | None) -> Turns:
    """Copies of each form: enough to be cold, two at least where memory allows, `MAX_COPIES` at most.

    Raises:
        Int8MoeError: not even one copy of each form fits the available memory.
    """
    size = {OURS: config.experts_bytes(1, scale_bytes=4)}
    size |= {form: config.experts_bytes(FORMS[form].itemsize) for form in compare}
    # While packing, the canonical weights are there too; the reference holds one expert's w13 in float64.
    fixed = size[OURS] + 12 * config.w13_rows * config.hidden_dim
    cold = cold_bytes()
    wanted = {form: min(MAX_COPIES, max(2, math.ceil(cold / count))) for form, count in size.items()}
    copies = fit_copies(name, wanted, size, fixed, available)
    return Turns(copies, all(copies[form] * size[form] >= cold for form in copies))


def check_against_reference(
    name: str, config: FusedMoEConfig, call: Call, reference: Call, tokens: Sequence[int], isa: str
) -> None:
    """Raises Int8MoeError where the layer's bits are not the reference's."""
    for count in sorted({m for m in tokens if m <= CHECKED_TOKENS} or {CHECKED_TOKENS}):
        x, (weights, ids) = draw_hidden(config, count), draw_call(config, count, 0)
        got, want = call(x, weights, ids), reference(x, weights, ids)
        if not torch.equal(got, want):
            raise Int8MoeError(
                f"{name} at M={count}: the CPU kernel ({isa}) differs from the reference in"
                f" {int((got != want).sum())} of {want.numel()} values; nothing was timed."
            )


class Between:
    """The PyTorch operations around a layer in a model, small: norm, linear, residual, norm; and after it the same."""

    def __init__(self, config: FusedMoEConfig) -> None:
        hidden, dtype = config.hidden_dim, getattr(torch, str(config.in_dtype))
        g = torch.Generator().manual_seed(1)
        make = lambda: (torch.randn(hidden, hidden, generator=g) * hidden**-0.5).to(dtype)
        self.before_weight, self.after_weight, self.shape = make(), make(), (hidden,)

    def before(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x + F.linear(F.rms_norm(x, self.shape), self.before_weight), self.shape)

    def after(self, y: torch.Tensor) -> torch.Tensor:
        return F.linear(F.rms_norm(y.to(self.after_weight.dtype), self.shape), self.after_weight)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class CPUBench(Bench):
    """Times `CPUExpertsInt8`, beside PyTorch's expert loop where asked."""

    backend, experts_class = "CPU", "CPUExpertsInt8"
    forms = tuple(FORMS)
    takes = ("threads", "isa", "between")

    def __init__(self, shapes: Sequence[BenchShape], options: Options) -> None:
        super().__init__(shapes, options)
        self._isa = native.select_isa()
        self.isa = native.isa_name(self._isa)
        self.threads = options.threads or torch.get_num_threads()
        most = MAX_THREADS_A_CORE * machine_limits.usable_cores()
        if self.threads > most:
            raise ConfigError(
                f"threads is {self.threads}, needs at most {most}: {MAX_THREADS_A_CORE} for each core that this process"
                " may use."
            )
        self.limits: Limits | None = None
        self._busy = machine_limits.busy_cores()
        platform, available = Platform.cpu(), machine_limits.available_memory_bytes()
        self._configs: list[FusedMoEConfig] = []
        self._turns: list[Turns] = []
        for shape in self.shapes:
            config = shape.config(platform)
            ok, reason = CPUExpertsInt8.is_supported_config(config, kInt8StaticChannelSym, kInt8DynamicTokenSym)
            if not ok:
                raise ConfigError(f"{shape.name}: the CPU backend cannot run this layer since {reason}.")
            self._configs.append(config)
            left = left_for_layers(shape.name, config, max(options.tokens), available)
            self._turns.append(plan_turns(shape.name, config, options.compare, left))

    def machine(self) -> dict[str, Any]:
        return {
            "device": Platform.cpu().name,
            "cores": machine_limits.usable_cores(),
            "threads": self.threads,
            "isa": self.isa,
            "busy_cores_before": self._busy,
            "last_level_cache_bytes": machine_limits.last_level_cache_bytes(),
        }

    def summary(self) -> str:
        count = lambda number, what: f"{number} {what}{'' if number == 1 else 's'}"
        cores = machine_limits.usable_cores()
        return f"{Platform.cpu().name}, {count(self.threads, 'thread')} of {count(cores, 'core')}, {self.isa}"

    def method(self) -> dict[str, Any]:
        o = self.options
        return {
            "seconds": o.seconds,
            "weights": "uniform codes" if o.uniform_codes else "normal, quantised per row",
            "routing": "random distinct experts",
            "between_torch_operations": o.between,
            "cold_bytes": cold_bytes(),
            "layers_in_turn": {
                s.name: t.copies | {"cold": t.cold} for s, t in zip(self.shapes, self._turns, strict=True)
            },
        }

    def measure_limits(self) -> Limits:
        available = machine_limits.available_memory_bytes()
        buffer = cold_bytes() if available is None else min(cold_bytes(), available // 2)
        with torch_threads(self.threads):
            self.limits = machine_limits.measure_limits(self._isa, self.threads, max(1, buffer >> 20))
        return self.limits

    def planned_seconds(self) -> float:
        return sum(
            self._setup_seconds(c, t) + sum(self._row_seconds(c, m) for m in self.options.tokens)
            for c, t in zip(self._configs, self._turns, strict=True)
        )

    def _setup_seconds(self, config: FusedMoEConfig, turns: Turns) -> float:
        one = config.experts_bytes(1)
        drawn = one * min(1.0, DRAWN_EXPERTS / max(1, config.num_local_experts or 1))
        copied = sum(n * one * (1 if form == OURS else FORMS[form].itemsize) for form, n in turns.copies.items())
        return drawn / _DRAWN_PER_SECOND + copied / _PACKED_PER_SECOND

    def _row_seconds(self, config: FusedMoEConfig, tokens: int) -> float:
        """At least `seconds`; longer where the few calls that have to be made take longer."""
        assert self.limits is not None, "measure_limits comes first"
        compute = self.limits.compute_ms(operations(config, tokens)) / 1e3
        slower = sum(4.0 for _ in self.options.compare)  # fp32 is 4 x the bytes, and about that in operations
        return max(self.options.seconds, (MIN_TURNS + 1) * 1.5 * compute * (1 + slower))

    def rows(self, tick: Tick) -> Iterator[Row]:
        assert self.limits is not None, "measure_limits comes first"
        at = 0.0
        with torch_threads(self.threads), torch.no_grad():
            for shape, config, turns in zip(self.shapes, self._configs, self._turns, strict=True):
                name, setup = shape.name, self._setup_seconds(config, turns)
                layers = self._make_layers(
                    shape.name, config, turns,
                    lambda share: tick(f"{name}: weights", at + share * setup),  # noqa: B023
                )  # fmt: skip
                at += setup
                for tokens in self.options.tokens:
                    planned = self._row_seconds(config, tokens)
                    yield self._time_row(
                        shape.name, config, layers, tokens,
                        lambda share: tick(f"{name}: M={tokens}", at + share * planned),  # noqa: B023
                    )  # fmt: skip
                    at += planned
                del layers
        tick("done", at)

    def _make_layers(
        self, name: str, config: FusedMoEConfig, turns: Turns, tick: Callable[[float], None]
    ) -> dict[str, list[Call]]:
        """The copies of every form, after one was checked. They hold the same values, each in its own memory."""
        weights = draw_weights(config, self.options.uniform_codes, lambda share: tick(0.8 * share))
        first = packed_layer(CPUExpertsInt8, config, weights)
        reference = packed_layer(ReferenceExperts, config, weights)
        check_against_reference(name, config, first.apply, reference.apply, self.options.tokens, self.isa)
        more = range(1, turns.copies[OURS])
        layers: dict[str, list[Call]] = {
            OURS: [first.apply, *(packed_layer(CPUExpertsInt8, config, weights).apply for _ in more)]
        }
        for form in self.options.compare:
            layers[form] = [TorchLoop(config, weights, FORMS[form]).apply for _ in range(turns.copies[form])]
        tick(1.0)
        return layers

    def _time_row(
        self,
        name: str,
        config: FusedMoEConfig,
        layers: dict[str, list[Call]],
        tokens: int,
        tick: Callable[[float], None],
    ) -> Row:
        assert self.limits is not None
        # Few tokens choose few experts: many routings then, and a prime number, so that every copy meets each.
        few = tokens * config.experts_per_token < 4 * config.num_experts
        routings = [draw_call(config, tokens, seed) for seed in range(61 if few else 7)]
        touched = [len(ids.unique()) for _, ids in routings]
        x = draw_hidden(config, tokens)
        between = Between(config) if self.options.between else None
        times: dict[str, list[float]] = {form: [] for form in layers}
        tick(0.0)
        for copies in layers.values():
            _timed(copies[-1], x, *routings[-1], between)
        begin, turn, seconds = time.perf_counter(), 0, self.options.seconds
        while turn < MIN_TURNS or time.perf_counter() - begin < seconds:
            for form, copies in layers.items():
                call = routings[turn % len(routings)]
                times[form].append(_timed(copies[turn % len(copies)], x, *call, between))
            turn += 1
            spent = (time.perf_counter() - begin) / seconds if seconds else 1.0
            tick(min(1.0, spent, turn / MIN_TURNS))
        experts = statistics.mean(touched[t % len(touched)] for t in range(turn))
        timing = {form: Timing.of(values) for form, values in times.items()}
        return Row(
            name, config, tokens, timing.pop(OURS), experts, experts * expert_bytes(config),
            operations(config, tokens), self.limits, timing,
        )  # fmt: skip


def _timed(layer: Call, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, between: Between | None) -> float:
    """Milliseconds of the layer's own call."""
    if between is not None:
        x = between.before(x)
    begin = time.perf_counter()
    y = layer(x, weights, ids)
    spent = time.perf_counter() - begin
    if between is not None:
        between.after(y)
    return spent * 1e3
