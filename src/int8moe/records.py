"""Measured layer times, and what they say about which backend is faster.

A record is one JSON object a line: where it was measured (device), what (backend, experts class, scheme), the
shape per rank (E, topk, H, I), dtype, tokens M, and `latency_us`. Records come from this package (devices that were
measured) and from the user's folder, which wins. Imports no framework.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

from int8moe.config import FusedMoEConfig
from int8moe.errors import ConfigError

logger = logging.getLogger(__name__)
MIN_GAIN = 1.03
"""A backend overtakes one before it in the static order only when it is at least this much faster."""
BF16 = "BF16"
"""`LayerTime.backend` of the same layer in bfloat16, which no oracle chooses: it says where INT8 pays off."""


@dataclass(frozen=True)
class LayerTime:
    """Median time of one layer call, microseconds."""

    device: str
    backend: str
    experts_class: str
    E: int
    topk: int
    H: int
    I: int
    dtype: str
    M: int
    latency_us: float
    source: str = ""

    def fits(self, config: FusedMoEConfig) -> bool:
        """Measured on this device, at this shape and dtype."""
        return (
            (self.E, self.topk, self.H, self.I)
            == (
                config.num_local_experts,
                config.experts_per_token,
                config.hidden_dim,
                config.intermediate_size_per_partition,
            )
            and self.dtype == config.in_dtype
            and self.device == config.platform.name
        )


def user_folder() -> Path:
    """Where the user's own records live: `INT8MOE_RECORDS`, else under the XDG data folder."""
    base = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    return Path(os.environ.get("INT8MOE_RECORDS") or os.path.join(base, "int8moe", "records"))


_NEEDS = {"str": "text", "int": "a whole number above 0", "float": "a number above 0"}


def _record(line: str, source: str) -> LayerTime:
    """The record that a line holds; what else it may hold is ignored. Raises ValueError."""
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("it is no JSON object")
    values: dict[str, Any] = {"source": source}
    for f in fields(LayerTime):
        if f.name == "source":
            continue
        if f.name not in row:
            raise ValueError(f"it has no {f.name}")
        value, kind = row[f.name], str(f.type)
        types = {"str": str, "int": int, "float": (int, float)}[kind]
        right = isinstance(value, types) and not isinstance(value, bool)  # type: ignore[arg-type]
        if not right or (kind != "str" and not 0 < value < math.inf):
            raise ValueError(f"{f.name} is {value!r}, needs {_NEEDS[kind]}")
        values[f.name] = value
    return LayerTime(**values)


def read_records(folder: Path | Any) -> list[LayerTime]:
    """All records of the `.jsonl` files in `folder`; a line that is not one is skipped with a WARNING."""
    found: list[LayerTime] = []
    try:
        files = sorted((f for f in folder.iterdir() if f.name.endswith(".jsonl")), key=lambda f: f.name)
        texts = [(f.name, f.read_text()) for f in files]
    except OSError:
        return found
    for name, text in texts:
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip():
                continue
            try:
                found.append(_record(line, f"{name}:{number}"))
            except ValueError as error:
                logger.warning("%s line %d is not a layer record, skipped: %s", name, number, error)
    return found


def make_user_folder() -> Path:
    """The user's folder, made where it is missing. Raises ConfigError where it cannot be, or be written to."""
    folder = user_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the folder for measured records, {folder}, cannot be made ({error.strerror});"
            " needs one that can: set INT8MOE_RECORDS."
        ) from None
    if not os.access(folder, os.W_OK):
        raise ConfigError(
            f"the folder for measured records, {folder}, cannot be written to; needs one that can: set INT8MOE_RECORDS."
        )
    return folder


def append_records(times: Iterable[LayerTime], name: str) -> Path:
    """Add `times` to `<name>.jsonl` in the user's folder; returns the file. Raises as `make_user_folder`."""
    file = make_user_folder() / f"{name}.jsonl"
    with open(file, "a") as lines:
        for time in times:
            row = asdict(time)
            del row["source"]  # where it was read from
            lines.write(json.dumps(row) + "\n")
    return file


def load_records() -> list[LayerTime]:
    """Shipped records, then the user's; for one measurement point the later one wins."""
    shipped = read_records(resources.files("int8moe") / "measured")
    merged = {}
    for record in [*shipped, *read_records(user_folder())]:
        key = tuple(v for k, v in asdict(record).items() if k not in ("latency_us", "source"))
        merged[key] = record
    return list(merged.values())


@dataclass(frozen=True)
class Ranking:
    """What the records say for one configuration: relative time by name (1.0 is the fastest)."""

    relative: dict[str, float]
    tokens: tuple[int, ...]
    sources: tuple[str, ...]

    def __str__(self) -> str:
        times = ", ".join(f"{name} {value:.2f}" for name, value in sorted(self.relative.items(), key=lambda p: p[1]))
        return f"measured relative layer time over M={list(self.tokens)}: {times} ({', '.join(self.sources)})"

    def reorder(self, names: Sequence[str], gain: float = 1.0) -> list[str]:
        """`names`, the measured ones among them sorted into their places: one moves ahead of its neighbour only when it
        is faster, `gain` times at least."""
        places = [i for i, name in enumerate(names) if name in self.relative]
        measured, order = [names[i] for i in places], list(names)
        for i in range(1, len(measured)):
            j = i
            while j and self._overtakes(measured[j], measured[j - 1], gain):
                measured[j - 1], measured[j] = measured[j], measured[j - 1]
                j -= 1
        for place, name in zip(places, measured, strict=True):
            order[place] = name
        return order

    def _overtakes(self, one: str, other: str, gain: float) -> bool:
        mine, theirs = self.relative[one], self.relative[other]
        return mine < theirs and mine * gain <= theirs


def _fitting(config: FusedMoEConfig, records: Iterable[LayerTime] | None) -> list[LayerTime]:
    return [r for r in (load_records() if records is None else records) if r.fits(config)]


def _rank(records: Iterable[LayerTime], name: Callable[[LayerTime], str]) -> Ranking | None:
    """Compare what `name` tells apart, where at least two were measured at the same token counts: the geometric mean
    over these, of the best time of each, relative to the fastest."""
    times: dict[str, dict[int, LayerTime]] = {}
    for record in records:
        row = times.setdefault(name(record), {})
        if record.M not in row or record.latency_us < row[record.M].latency_us:
            row[record.M] = record
    if len(times) < 2:
        return None
    common = sorted(set.intersection(*(set(row) for row in times.values())))
    if not common:
        return None
    mean = {b: math.exp(sum(math.log(row[m].latency_us) for m in common) / len(common)) for b, row in times.items()}
    best = min(mean.values())
    sources = sorted({row[m].source.split(":")[0] for row in times.values() for m in common})
    return Ranking({b: v / best for b, v in mean.items()}, tuple(common), tuple(sources))


def rank(
    config: FusedMoEConfig,
    records: Iterable[LayerTime] | None = None,
    usable: Callable[[str, str], bool] = lambda backend, experts_class: True,
) -> Ranking | None:
    """Compare INT8 backends, each by its fastest usable class, on this device and shape.

    Args:
        usable: of (backend, experts class): whether it counts. A class that cannot run a deployment must not speak for
            its backend.
    """
    fitting = (r for r in _fitting(config, records) if r.backend.upper() != BF16)
    return _rank((r for r in fitting if usable(r.backend.upper(), r.experts_class)), lambda r: r.backend.upper())


def rank_classes(config: FusedMoEConfig, backend: str, records: Iterable[LayerTime] | None = None) -> Ranking | None:
    """Compare the experts classes of one backend on this device and shape."""
    return _rank((r for r in _fitting(config, records) if r.backend.upper() == backend), lambda r: r.experts_class)


def slower_than(
    config: FusedMoEConfig,
    backend: str,
    experts_class: str,
    other: str,
    gain: float = 1.0,
    records: Iterable[LayerTime] | None = None,
) -> dict[int, float]:
    """Token counts at which this class was measured slower than the fastest of backend `other` (or BF16: the same layer
    in bfloat16), `gain` times at least, and how many times."""
    fitting = _fitting(config, records)
    best = lambda of: {r.M: r.latency_us for r in sorted(of, key=lambda r: -r.latency_us)}
    ours = best(r for r in fitting if (r.backend.upper(), r.experts_class) == (backend, experts_class))
    theirs = best(r for r in fitting if r.backend.upper() == other)
    return {m: us / theirs[m] for m, us in sorted(ours.items()) if m in theirs and us > gain * theirs[m]}
