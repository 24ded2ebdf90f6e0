"""Layer times beside the machine's own limits: `int8moe bench`.

Each backend brings one `Bench` (base.py). This module finds it and imports no framework.
"""

from __future__ import annotations

import importlib

from int8moe.bench.base import Bench
from int8moe.errors import ConfigError

BENCHES = {
    "cpu": "int8moe.bench.cpu:CPUBench",
    "triton": "int8moe.bench.triton:TritonBench",
    "humming": "int8moe.bench.humming:HummingBench",
}
"""Where each backend's bench is; another backend is added beside cpu.py with a line here."""


def check_backend(backend: str) -> None:
    """Raises ConfigError where `backend` has no bench."""
    if backend not in BENCHES:
        raise ConfigError(f"backend is {backend!r}, which has no bench; needs one of: {', '.join(BENCHES)}.")


def find_bench(backend: str) -> type[Bench]:
    """The bench of a backend. Raises ConfigError where it has none."""
    check_backend(backend)
    module, _, name = BENCHES[backend].partition(":")
    found: type[Bench] = getattr(importlib.import_module(module), name)
    return found
