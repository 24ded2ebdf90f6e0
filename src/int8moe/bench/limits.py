"""The CPU's own limits: streaming read, int8 operations from registers, memory and last-level cache."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from int8moe.backends.cpu import native
from int8moe.bench.base import Limits
from int8moe.errors import Int8MoeError

MIB = 1 << 20
_REPEATS, _PEAK_MS = 8, 150
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def measure_limits(isa: int, threads: int, megabytes: int) -> Limits:
    """Measure both with `threads` threads; `megabytes` is the buffer that is read, larger than the caches.

    Raises:
        Int8MoeError: there is no memory for the buffer.
    """
    module = native.load()
    read = module.measure_read(threads, megabytes, _REPEATS) / 1e9
    chains = {name: rate / 1e9 for name, rate in module.measure_peak(isa, threads, _PEAK_MS)}
    if not read > 0:
        raise Int8MoeError(f"no memory for the buffer of {megabytes} MiB that is read to measure the limits.")
    chain = max(chains, key=lambda name: chains[name])
    return Limits(read, chains[chain], chain, chains)


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def busy_cores(seconds: float = 0.2, stat: str = "/proc/stat") -> float | None:
    """How many of this process's cores other work holds, over `seconds` in which we sleep; None where nobody says.

    The load average would not do: for a minute it still counts what has ended.
    """
    try:
        before = _core_ticks(stat)
        time.sleep(seconds)
        after = _core_ticks(stat)
    except (OSError, ValueError):
        return None
    busy = 0.0
    for core in before.keys() & after.keys():
        idle, total = (b - a for a, b in zip(before[core], after[core], strict=True))
        busy += 1 - idle / total if total > 0 else 0.0
    return round(busy, 2) if before else None


def _core_ticks(stat: str) -> dict[int, tuple[int, int]]:
    """Idle and all clock ticks of each core that this process may use."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    found = {}
    for core, text in re.findall(r"^cpu(\d+) (.*)$", Path(stat).read_text(), re.M):
        ticks = [int(t) for t in text.split()[:8]]  # user nice system idle iowait irq softirq steal
        if int(core) in allowed:
            found[int(core)] = ticks[3] + ticks[4], sum(ticks)
    return found


def last_level_cache_bytes(root: str = "/sys/devices/system/cpu") -> int:
    """All last-level caches of this process's cores together; 0 where the system does not say."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    caches: dict[tuple[int, str], int] = {}
    for cpu in allowed:
        for index in Path(root, f"cpu{cpu}", "cache").glob("index*"):
            try:
                level, size = int((index / "level").read_text()), (index / "size").read_text().strip()
                shared = (index / "shared_cpu_list").read_text().strip()
            except (OSError, ValueError):
                continue
            if found := re.fullmatch(r"(\d+)([KMG]?)", size):
                caches[level, shared] = int(found[1]) * _UNITS.get(found[2], 1)
    last = max((level for level, _ in caches), default=0)
    return sum(size for (level, _), size in caches.items() if level == last)


def available_memory_bytes(meminfo: str = "/proc/meminfo", cgroup: str = "/sys/fs/cgroup") -> int | None:
    """What can still be allocated: MemAvailable, or what a container's limit leaves. None where nobody says."""
    found: list[int] = []
    try:
        if line := re.search(r"^MemAvailable:\s+(\d+) kB", Path(meminfo).read_text(), re.M):
            found.append(int(line[1]) << 10)
    except OSError:
        pass
    try:
        limit, used = (int(Path(cgroup, f"memory.{name}").read_text()) for name in ("max", "current"))
        cached = re.search(r"^inactive_file (\d+)", Path(cgroup, "memory.stat").read_text(), re.M)
        found.append(limit - used + (int(cached[1]) if cached else 0))
    except (OSError, ValueError):  # no such limit ("max" is not a number)
        pass
    return max(0, min(found)) if found else None
