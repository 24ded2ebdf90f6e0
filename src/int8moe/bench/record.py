"""A run's record: where, with what, how, and the rows; and the layer times that choosing a backend reads.

Imports no framework.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from int8moe.bench.base import Bench, Limits, Row
from int8moe.records import LayerTime

SCHEMA = 1


def make_record(bench: Bench, limits: Limits, rows: Sequence[Row]) -> dict[str, Any]:
    """The whole run as plain values, ready for JSON."""
    return {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "backend": bench.backend,
        "experts_class": bench.experts_class,
        "machine": bench.machine(),
        "versions": {name: _version(name) for name in bench.packages}
        | {"python": platform.python_version(), "compiler": bench.compiler()},
        "commit": commit(),
        "limits": asdict(limits),
        "method": bench.method(),
        "rows": [row.to_dict() for row in rows],
    }


def write_record(record: dict[str, Any], path: str | Path) -> None:
    Path(path).write_text(json.dumps(record, indent=1) + "\n")


def layer_times(bench: Bench, rows: Iterable[Row]) -> list[LayerTime]:
    """The medians, as `int8moe.records` keeps them, also of the compared forms that records know."""
    device, times = bench.machine()["device"], []
    for row in rows:
        timed = {(bench.backend, bench.experts_class): row.time}
        timed |= {bench.measured_as[form]: t for form, t in row.compared.items() if form in bench.measured_as}
        times += [
            LayerTime(
                device=device,
                backend=backend,
                experts_class=experts_class,
                E=int(row.config.num_local_experts or 0),
                topk=row.config.experts_per_token,
                H=row.config.hidden_dim,
                I=row.config.intermediate_size_per_partition,
                dtype=str(row.config.in_dtype),
                M=row.M,
                latency_us=round(time.median_ms * 1e3, 3),
            )
            for (backend, experts_class), time in timed.items()
        ]
    return times


def commit(package: Path | None = None) -> str | None:
    """The commit this package runs from ("-dirty" with changes), or None outside a checkout of its own."""
    package = package or Path(__file__).resolve().parents[1]
    root = package.parents[1]
    if not (root / ".git").exists():
        return None
    try:
        described = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip() or None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
