"""What every backend's bench takes and gives: options, the machine's limits, one row a token count.

Imports no framework.
"""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

from int8moe.bench.shapes import BenchShape
from int8moe.config import FusedMoEConfig
from int8moe.errors import ConfigError

DEFAULT_TOKENS = (1, 4, 16, 64, 256, 1024)
GPU_TOKENS = (1, 8, 32, 128, 512, 2048, 8192)
SOME_TAKE = ("threads", "isa", "between", "weight_only", "kernels")
"""Fields of `Options` that only some backends take."""
Tick = Callable[[str, float], None]
"""Told what is being done, and how far the plan is, in its own seconds (`Bench.planned_seconds`)."""


@dataclass(frozen=True)
class Units:
    """How times and rates are shown; records keep milliseconds and 1e9 operations a second."""

    time: str = "ms"
    per_ms: float = 1.0
    rate: str = "GOP/s"
    per_gops: float = 1.0


CPU_UNITS, GPU_UNITS = Units(), Units("µs", 1e3, "TOPS", 1e-3)


@dataclass(frozen=True)
class Options:
    """How to measure.

    Args:
        tokens: token counts M, one row each.
        threads: CPU threads; None for PyTorch's own number.
        compare: other forms of the same layer, timed in turn with it (`Bench.forms`).
        seconds: time for one row, all forms together; at least `MIN_TURNS` calls of each are made.
        between: time each call between PyTorch operations, as a model runs it.
        uniform_codes: draw int8 codes evenly, instead of quantising normally distributed weights.
        isa: the CPU kernel's instruction set that was asked for.
        weight_only: W8A16 instead of W8A8.
        kernels: show the times of each kernel.
    """

    tokens: tuple[int, ...] = DEFAULT_TOKENS
    threads: int | None = None
    compare: tuple[str, ...] = ()
    seconds: float = 2.0
    between: bool = False
    uniform_codes: bool = False
    isa: str | None = None
    weight_only: bool = False
    kernels: bool = False


@dataclass(frozen=True)
class Limits:
    """What the machine can do at best, measured: no layer call can take less than `floor_ms`.

    Args:
        read_gbps: memory traffic, 1e9 bytes a second: streaming read by all threads of a CPU, copy on a GPU.
        peak_gops: 1e9 operations a second, a multiply-add is two: int8 from registers on all threads of a CPU, a dense
            matrix product on a GPU.
        chain: the instruction chain, or the matrix product, that reached the peak.
        chains: every chain tried, and its rate.
        traffic, products: what read_gbps and peak_gops are of, as tables say it.
        others: more rates of this machine, which make no floor.
    """

    read_gbps: float
    peak_gops: float
    chain: str = ""
    chains: dict[str, float] = field(default_factory=dict)
    traffic: str = "read"
    products: str = "int8"
    others: dict[str, float] = field(default_factory=dict)

    def shown(self, units: Units) -> str:
        peak = f"{self.products} {self.peak_gops * units.per_gops:.0f} {units.rate}"
        return f"{self.traffic} {self.read_gbps:.1f} GB/s, {peak}"

    def read_ms(self, count: float) -> float:
        return count / self.read_gbps / 1e6

    def compute_ms(self, operations: float) -> float:
        return operations / self.peak_gops / 1e6

    def floor_ms(self, count: float, operations: float) -> float:
        """max(bytes / read rate, operations / peak), milliseconds."""
        return max(self.read_ms(count), self.compute_ms(operations))


@dataclass(frozen=True)
class Timing:
    """One form's times of one row, milliseconds."""

    median_ms: float
    quartiles_ms: tuple[float, float]
    calls: int

    @classmethod
    def of(cls, values: Sequence[float], calls_each: int = 1) -> Timing:
        """Of measured times, each the mean over `calls_each` calls."""
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(middle, (low, high), len(values) * calls_each)


@dataclass(frozen=True)
class Row:
    """One shape at one token count.

    Args:
        bytes: int8 weights and scales of the experts that a call touches, mean over the calls.
        operations: of one call; a multiply-add is two.
        compared: the other forms' times, by name.
        kernels_us: mean time of each GPU kernel in a call, by name. They may overlap, so that their sum can be more
            than the call's time.
    """

    shape: str
    config: FusedMoEConfig
    M: int
    time: Timing
    experts_touched: float
    bytes: float
    operations: float
    limits: Limits
    compared: dict[str, Timing]
    kernels_us: dict[str, float] = field(default_factory=dict)

    @property
    def gbps(self) -> float:
        return self.bytes / self.time.median_ms / 1e6

    @property
    def gops(self) -> float:
        return self.operations / self.time.median_ms / 1e6

    @property
    def read_percent(self) -> float:
        return 100 * self.gbps / self.limits.read_gbps

    @property
    def peak_percent(self) -> float:
        return 100 * self.gops / self.limits.peak_gops

    @property
    def floor_ms(self) -> float:
        return self.limits.floor_ms(self.bytes, self.operations)

    @property
    def floor_by(self) -> str:
        """Which limit makes the floor: "read" or "compute"."""
        return "read" if self.limits.read_ms(self.bytes) >= self.limits.compute_ms(self.operations) else "compute"

    @property
    def floor_percent(self) -> float:
        """100 is as fast as the machine's limits allow."""
        return 100 * self.floor_ms / self.time.median_ms

    def to_dict(self) -> dict[str, Any]:
        c = self.config
        return {
            "shape": self.shape,
            "E": c.num_local_experts,
            "topk": c.experts_per_token,
            "H": c.hidden_dim,
            "I": c.intermediate_size_per_partition,
            "tp": c.moe_parallel_config.tp_size,
            "dtype": c.in_dtype,
            "activation": getattr(c.activation, "value", c.activation),
            "M": self.M,
            "median_ms": round(self.time.median_ms, 5),
            "quartiles_ms": [round(v, 5) for v in self.time.quartiles_ms],
            "calls": self.time.calls,
            "experts_touched": round(self.experts_touched, 2),
            "bytes": round(self.bytes),
            "operations": round(self.operations),
            "gbps": round(self.gbps, 3),
            "read_percent": round(self.read_percent, 2),
            "gops": round(self.gops, 2),
            "peak_percent": round(self.peak_percent, 2),
            "floor_ms": round(self.floor_ms, 5),
            "floor_by": self.floor_by,
            "floor_percent": round(self.floor_percent, 2),
            "compared": {
                name: asdict(t) | {"times_as_long": round(t.median_ms / self.time.median_ms, 3)}
                for name, t in self.compared.items()
            },
        } | ({"kernels_us": self.kernels_us} if self.kernels_us else {})


class Bench(ABC):
    """Layer timing of one backend.

    Making one refuses what cannot be timed, before anything is measured:

    Raises:
        ConfigError: a form that is not in `forms`, an option that is not in `takes`, or a layer that the backend
            cannot run.
        Int8MoeError: the machine lacks what is needed (memory, the compiled kernel).
    """

    backend = ""
    """As the oracle spells it."""
    experts_class = ""
    forms: tuple[str, ...] = ()
    """What `Options.compare` may name."""
    measured_as: Mapping[str, tuple[str, str]] = MappingProxyType({})
    """Backend and experts class, as records of layer times name them, of the forms that records keep."""
    takes: tuple[str, ...] = ()
    """Which of `SOME_TAKE` apply here."""
    packages: tuple[str, ...] = ("int8moe", "torch")
    """Whose versions a record names."""
    default_tokens: tuple[int, ...] = DEFAULT_TOKENS
    units = CPU_UNITS
    roofline = False
    """Whether the picture shows operations a second against operations a byte, too."""

    def __init__(self, shapes: Sequence[BenchShape], options: Options) -> None:
        unknown = [form for form in options.compare if form not in self.forms]
        if unknown:
            raise ConfigError(f"compare is {unknown[0]!r}, needs one of: {', '.join(self.forms)}.")
        for name in SOME_TAKE:
            value = getattr(options, name)
            if value not in (None, False) and name not in self.takes:
                raise ConfigError(
                    f"{name} is {value!r}, which does not apply to the {self.backend.lower()} backend; needs to be left"
                    " out."
                )
        self.shapes, self.options = tuple(shapes), options

    @abstractmethod
    def machine(self) -> dict[str, Any]:
        """`device` (as `Platform.name`), and what else says where the times were taken."""

    def summary(self) -> str:
        """The machine in a few words, for headings."""
        return str(self.machine()["device"])

    def compiler(self) -> str:
        """What compiled the kernel, where it says so."""
        return "unknown"

    @abstractmethod
    def method(self) -> dict[str, Any]:
        """How the times are taken, for the record."""

    @abstractmethod
    def measure_limits(self) -> Limits:
        """The machine's limits; comes before `rows`."""

    @abstractmethod
    def planned_seconds(self) -> float:
        """About how long `rows` will take; comes after `measure_limits`."""

    @abstractmethod
    def rows(self, tick: Tick) -> Iterator[Row]:
        """Check each shape against the reference, then time it: one row for each shape and token count.

        Raises:
            Int8MoeError: the kernel differs from the reference; names shape and token count.
        """
