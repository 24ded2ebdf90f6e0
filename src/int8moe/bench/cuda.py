"""Times and limits of a GPU: CUDA graphs, events, the profiler, copies, dense matrix products. Also for ROCm."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from int8moe.bench.base import Limits
from int8moe.errors import Int8MoeError

logger = logging.getLogger(__name__)
MIN_TURNS, MAX_TURNS = 10, 2000
LIMIT_SECONDS = 0.3
COPY_BYTES, COPY_CACHES = 1 << 30, 8
DENSE_SIZE = 8192
Body = Callable[[], Any]


@dataclass(frozen=True)
class Gpu:
    """The GPU that times are taken on; capability is None on AMD, driver where nobody says."""

    name: str
    capability: tuple[int, int] | None
    multiprocessors: int
    l2_bytes: int
    memory_bytes: int
    driver: str | None


def find_gpu() -> Gpu | None:
    """The current GPU of torch, or None."""
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Gpu(
        found.name,
        None if torch.version.hip else (found.major, found.minor),
        found.multi_processor_count,
        int(getattr(found, "L2_cache_size", 0)),
        found.total_memory,
        driver_version(),
    )


def driver_version() -> str | None:
    """NVIDIA's driver, through its management library."""
    with contextlib.suppress(OSError, AttributeError):
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        text = ctypes.create_string_buffer(96)
        if nvml.nvmlInit_v2() == 0:
            failed = nvml.nvmlSystemGetDriverVersion(text, ctypes.c_uint(96))
            nvml.nvmlShutdown()
            return None if failed else text.value.decode(errors="replace")
    return None


def free_bytes() -> int:
    """GPU memory that can be allocated, with what torch only keeps for later."""
    free, _ = torch.cuda.mem_get_info()
    return int(free) + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


# --- times -----------------------------------------------------------------------------------------------------------


def capture(body: Body) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of what `body` launches, after two calls to warm up, and what `body` returned while it was captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            body()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = body()
    return graph, out


def _all(bodies: Sequence[Body]) -> list[Any]:
    return [body() for body in bodies]


def _events(body: Body) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    body()
    end.record()
    return begin, end


def timed_in_turn(bodies: dict[str, Body], seconds: float) -> dict[str, list[float]]:
    """Milliseconds of each body, one after the other until about `seconds` are over, `MIN_TURNS` of each at least.
    Nothing waits in between, so that the GPU always has work."""
    once = 0.0
    for body in bodies.values():
        for _ in range(3):
            body()
        torch.cuda.synchronize()
        begin, end = _events(body)
        torch.cuda.synchronize()
        once += begin.elapsed_time(end)
    turns = max(MIN_TURNS, min(MAX_TURNS, int(seconds * 1e3 / max(once, 1e-3))))
    pairs: dict[str, list[Any]] = {name: [] for name in bodies}
    for _ in range(turns):
        for name, body in bodies.items():
            pairs[name].append(_events(body))
    torch.cuda.synchronize()
    return {name: [begin.elapsed_time(end) for begin, end in each] for name, each in pairs.items()}


def graphs_in_turn(forms: dict[str, Sequence[Body]], seconds: float) -> dict[str, list[float]]:
    """Milliseconds of one call of each form: replays, in turn, of a graph that makes one call of each of its bodies,
    divided by their number."""
    graphs = {name: capture(functools.partial(_all, bodies))[0] for name, bodies in forms.items()}
    times = timed_in_turn({name: graph.replay for name, graph in graphs.items()}, seconds)
    return {name: [ms / len(forms[name]) for ms in each] for name, each in times.items()}


def kernel_times_us(bodies: Sequence[Body]) -> dict[str, float]:
    """Mean microseconds that each kernel takes in a call, longest first: one call of each body under the profiler.

    Empty, with a WARNING, where the profiler sees no kernel (it needs CUPTI, or roctracer).
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    bodies[0]()
    torch.cuda.synchronize()
    total: dict[str, float] = {}
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for body in bodies:
                body()
            torch.cuda.synchronize()
        for event in profiled.events() or ():
            if event.device_type == DeviceType.CUDA:
                total[event.name] = total.get(event.name, 0.0) + event.time_range.elapsed_us()
    except (RuntimeError, AssertionError) as error:
        logger.warning("no times of single kernels: %s", error)
        return {}
    if not total:
        logger.warning("no times of single kernels: torch's profiler saw none on this GPU.")
    by_time = sorted(total.items(), key=lambda item: -item[1])
    return {name: round(us / len(bodies), 3) for name, us in by_time}


# --- limits ----------------------------------------------------------------------------------------------------------


def _median_ms(body: Body) -> float:
    """Of launches back to back: a rate that the GPU holds, not that of its first moment."""
    return statistics.median(timed_in_turn({"": body}, LIMIT_SECONDS)[""])


def _random_int8(*shape: int) -> torch.Tensor:
    return torch.randint(-127, 128, shape, dtype=torch.int8, device="cuda")


def traffic_rates(count: int) -> dict[str, float]:
    """1e9 bytes a second, read and written, of two ways to copy `count` random bytes; and read alone, of a sum."""
    source = _random_int8(count // 8 * 8)
    target = torch.empty_like(source)
    whole, into = source.view(torch.int64), target.view(torch.int64)
    copies = {
        "copy": lambda: target.copy_(source),
        "bitwise_not": lambda: torch.bitwise_not(whole, out=into),
    }
    rates = {name: 2 * len(source) / _median_ms(body) / 1e6 for name, body in copies.items()}
    return rates | {"sum": len(source) / _median_ms(lambda: whole.sum()) / 1e6}


def _check_corners(a: torch.Tensor, w: torch.Tensor, c: torch.Tensor, name: str) -> None:
    """Raises Int8MoeError where the first or last sums of c = a @ w.T are wrong; float64 holds them exactly."""
    size = 256
    for part in (slice(None, size), slice(-size, None)):
        exact = a[part].double() @ w[part].double().T
        want = exact.int() if c.dtype is torch.int32 else exact.float().to(c.dtype)
        if not torch.equal(c[part, part], want):
            raise Int8MoeError(f"the dense int8 product {name} is wrong; no limit was measured.")


def int8_rates(size: int) -> dict[str, float]:
    """1e9 operations a second of dense int8 products [size, size] @ [size, size], of every way that runs here."""
    from int8moe.bench import triton_peak

    a, w = _random_int8(size, size), _random_int8(size, size)
    out = torch.empty(size, size, dtype=torch.bfloat16, device="cuda")
    ways: dict[str, Body] = {"torch._int_mm": lambda: torch._int_mm(a, w.t())}
    ways |= {str(tile): lambda tile=tile: triton_peak.matmul(a, w, out, tile) for tile in triton_peak.TILES}  # type: ignore[misc]
    rates: dict[str, float] = {}
    for name, body in ways.items():
        try:
            c = body()
            torch.cuda.synchronize()
        except Exception as error:  # a tile that does not fit this GPU, or a product that this torch lacks
            logger.info("%s does not run here: %s", name, error)
            continue
        _check_corners(a, w, c, name)
        rates[name] = 2 * size**3 / _median_ms(body) / 1e6
    return rates


def bf16_rate(size: int) -> float:
    """1e9 operations a second of torch.matmul in bf16."""
    a, w = (torch.randn(size, size, device="cuda").to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / _median_ms(lambda: torch.matmul(a, w.t(), out=out)) / 1e6


def measure_limits(gpu: Gpu, weight_only: bool) -> Limits:
    """Copy of memory and dense matrix products: int8, or bf16 for `weight_only`, which multiplies in 16 bits.

    Raises:
        Int8MoeError: no int8 product runs here, or one is wrong.
    """
    available = free_bytes()
    rates = traffic_rates(min(max(COPY_BYTES, COPY_CACHES * gpu.l2_bytes), available // 4))
    torch.cuda.empty_cache()
    size = DENSE_SIZE
    while size > 1024 and 8 * size * size > available:
        size //= 2
    bf16, chains = bf16_rate(size), int8_rates(size)
    torch.cuda.empty_cache()
    if not chains:
        raise Int8MoeError(f"no dense int8 product runs on {gpu.name}; its limit cannot be measured.")
    others = {f"{name}_gbps": round(rate, 1) for name, rate in rates.items()} | {"bf16_matmul_gops": round(bf16)}
    read = max(rates["copy"], rates["bitwise_not"])
    if weight_only:
        return Limits(read, bf16, "torch.matmul", {"torch.matmul": bf16}, "copy", "bf16", others)
    chain = max(chains, key=lambda name: chains[name])
    return Limits(read, chains[chain], chain, chains, "copy", "int8", others)
