"""Time int8moe's CPU layer and its peers in one run, alternating call by call.

    benchmarks/peers/build.sh; benchmarks/peers/fetch_amx.sh
    python benchmarks/peers/run.py --out benchmarks/records/cpu_peers.json

Every peer has the same float weights, quantised its own way, and gets the same calls: hidden states and routing in,
combined output out. Each is checked against a float32 statement first. All of them live in one process, run on the same
OpenMP threads (PyTorch's; KTransformers has its own), and take turns in a new random order each round, so that a slow
minute of the machine falls on all of them. Weights are cold: successive calls use other layers, and for one token other
experts.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import functools
import gc
import importlib.util
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from int8moe.backends.cpu.native import load, select_isa
from int8moe.backends.cpu.support import CPUExpertsInt8
from int8moe.config import FusedMoEConfig
from int8moe.device import Platform
from int8moe.quant_config import int8_w8a8_moe_quant_config
from int8moe.quantize.int8 import quantize_weight

REPOSITORY = Path(__file__).resolve().parents[2]
COLD_BYTES = 256 << 20  # int8 bytes of the layers in turn, where memory allows
MAX_ERROR = 0.1  # against float32 on the unrounded weights: int8 gives 0.02 to 0.06, a wrong kernel about 1
SLOW = 4  # a peer this many times slower than the fastest takes part in every SLOW-th round only
BUSY = 0.12  # cores that other processes may use before a cell is marked with ~


@dataclass(frozen=True)
class Shape:
    num_experts: int
    topk: int
    hidden: int
    intermediate: int

    @property
    def expert_weights(self) -> int:
        return 3 * self.hidden * self.intermediate


SHAPES = {
    "olmoe": Shape(64, 8, 2048, 1024),
    "qwen3-30b": Shape(128, 8, 2048, 768),
    "mixtral-half": Shape(8, 2, 4096, 7168),
    "tiny": Shape(8, 2, 512, 1024),
}


@dataclass(frozen=True)
class Call:
    """What one layer is called with. The hidden states are bfloat16 values in both forms."""

    x: torch.Tensor  # float32 [M, H]
    x_bf16: torch.Tensor  # bfloat16 [M, H]
    topk_weights: torch.Tensor  # float32 [M, topk]
    topk_ids: torch.Tensor  # int64 [M, topk]


# ---------------------------------------------------------------- inputs


def draw_expert(shape: Shape, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    """w13 [2*I, H] and w2 [H, I], float32, normal draws scaled by 1/sqrt of the row length."""
    H, I = shape.hidden, shape.intermediate
    g = torch.Generator().manual_seed(1000 * layer + expert)
    return torch.randn(2 * I, H, generator=g).div_(H**0.5), torch.randn(H, I, generator=g).div_(I**0.5)


def draw_calls(shape: Shape, M: int, count: int = 16) -> list[Call]:
    """Calls with routing drawn at random; of one token each, successive ones share no expert."""
    g = torch.Generator().manual_seed(M)
    E, topk, calls, order = shape.num_experts, shape.topk, [], []
    for _ in range(count):
        x = torch.randn(M, shape.hidden, generator=g).bfloat16()
        if M == 1:
            if len(order) < topk:
                order = torch.randperm(E, generator=g).tolist()
            ids, order = torch.tensor([order[:topk]]), order[topk:]
        else:
            ids = torch.rand(M, E, generator=g).topk(topk, dim=-1).indices
        weights = torch.randn(M, topk, generator=g).softmax(-1)
        calls.append(Call(x.float(), x, weights, ids))
    return calls


def rows_by_expert(ids: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """For each expert hit: its number and the positions in `ids.flatten()` that name it."""
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    experts, counts = flat[order].unique_consecutive(return_counts=True)
    return list(zip(experts.tolist(), order.split(counts.tolist()), strict=True))


# ---------------------------------------------------------------- peers
# A peer takes the weights of each layer expert by expert (`put`), ends that with `done`, prepares what it is called
# with (`prepare`, not timed), and is called.


class Statement:
    """The layer in float32, for layer 0 and one call of each token count; it keeps outputs, not weights."""

    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls
        self.out = [torch.zeros_like(call.x) for call in calls]
        self.rows = [dict(rows_by_expert(call.topk_ids)) for call in calls]

    def put(self, layer: int, expert: int, w13: torch.Tensor, w2: torch.Tensor) -> None:
        for call, out, by_expert in zip(self.calls, self.out, self.rows, strict=True):
            if layer == 0 and expert in by_expert:
                rows = by_expert[expert]
                token = rows // call.topk_ids.shape[1]
                gate, up = F.linear(call.x[token], w13).chunk(2, -1)
                y = F.linear(F.silu(gate) * up, w2)
                out.index_add_(0, token, y * call.topk_weights.flatten()[rows, None])

    def error(self, index: int, got: torch.Tensor) -> float:
        """Relative error in the Frobenius norm."""
        want = self.out[index]
        return float((got.float() - want).norm() / want.norm())


class Ours:
    """int8moe's CPU layer, bfloat16 in and out."""

    bytes_per_weight = 1.0

    def __init__(self, shape: Shape, layers: int) -> None:
        E, H, I = shape.num_experts, shape.hidden, shape.intermediate
        self.config = FusedMoEConfig(E, shape.topk, H, I, platform=Platform.cpu())
        self.scales = [(torch.empty(E, 2 * I), torch.empty(E, H)) for _ in range(layers)]
        self.sources = [
            SimpleNamespace(
                w13_weight=torch.empty(E, 2 * I, H, dtype=torch.int8), w2_weight=torch.empty(E, H, I, dtype=torch.int8)
            )
            for _ in range(layers)
        ]
        self.layers: list[CPUExpertsInt8] = []

    def put(self, layer: int, expert: int, w13: torch.Tensor, w2: torch.Tensor) -> None:
        source, (s13, s2) = self.sources[layer], self.scales[layer]
        source.w13_weight[expert], s13[expert] = quantize_weight(w13)
        source.w2_weight[expert], s2[expert] = quantize_weight(w2)

    def done(self) -> None:
        for source, scales in zip(self.sources, self.scales, strict=True):
            layer = CPUExpertsInt8(self.config, int8_w8a8_moe_quant_config(*scales))
            layer.process_weights_after_loading(source)
            self.layers.append(layer)
        self.isa = self.layers[0]._run.isa

    def prepare(self, call: Call) -> Any:
        return call.x_bf16, call.topk_weights, call.topk_ids

    def call(self, layer: int, prepared: Any) -> torch.Tensor:
        return self.layers[layer].apply(*prepared)

    def close(self) -> None:
        self.layers.clear()
        self.sources.clear()


class TorchLoop:
    """PyTorch's usual expert loop in bfloat16: rows sorted by expert, two linears each, index_add."""

    bytes_per_weight = 2.0
    dtype = torch.bfloat16

    def __init__(self, shape: Shape, layers: int) -> None:
        self.weights: list[dict[int, Any]] = [{} for _ in range(layers)]

    def pack(self, w: torch.Tensor) -> Any:
        return w.to(self.dtype)

    def linear(self, x: torch.Tensor, w: Any) -> torch.Tensor:
        return F.linear(x, w)

    def put(self, layer: int, expert: int, w13: torch.Tensor, w2: torch.Tensor) -> None:
        self.weights[layer][expert] = self.pack(w13), self.pack(w2)

    def done(self) -> None:
        pass

    def prepare(self, call: Call) -> Any:
        x = call.x_bf16 if self.dtype is torch.bfloat16 else call.x
        return x, call.topk_weights.to(self.dtype), call.topk_ids

    def call(self, layer: int, prepared: Any) -> torch.Tensor:
        x, topk_weights, topk_ids = prepared
        weights, topk, out = topk_weights.reshape(-1, 1), topk_ids.shape[1], torch.zeros_like(x)
        for expert, rows in rows_by_expert(topk_ids):
            w13, w2 = self.weights[layer][expert]
            token = rows // topk
            gate, up = self.linear(x[token], w13).chunk(2, -1)
            out.index_add_(0, token, self.linear(F.silu(gate) * up, w2) * weights[rows])
        return out

    def close(self) -> None:
        self.weights.clear()


class TorchFbgemm(TorchLoop):
    """The same loop over `quantized.linear_dynamic` (FBGEMM): one activation scale per call, 7-bit range."""

    bytes_per_weight = 1.0
    dtype = torch.float32

    def pack(self, w: torch.Tensor) -> Any:
        torch.backends.quantized.engine = "fbgemm"
        scale = w.abs().amax(1).div(127)
        q = torch.quantize_per_channel(w, scale, torch.zeros(len(w), dtype=torch.int64), 0, torch.qint8)
        return torch.ops.quantized.linear_prepack(q, None)

    def linear(self, x: torch.Tensor, w: Any) -> torch.Tensor:
        return torch.ops.quantized.linear_dynamic(x, w, True)


class Ggml:
    """One layer on a ggml's CPU backend, through ggml_moe.c; float32 in and out."""

    bytes_per_weight = 1.07

    def __init__(self, shape: Shape, layers: int, library: Path, type_name: str) -> None:
        self.lib = lib = ctypes.CDLL(str(library), mode=os.RTLD_LOCAL | os.RTLD_NOW)
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        lib.moe_new.restype = lib.moe_plan.restype = pointer
        lib.moe_type.argtypes = [ctypes.c_char_p]
        lib.moe_new.argtypes = [integer] * 6
        lib.moe_set_expert.argtypes = [pointer, integer, pointer, pointer, pointer]
        lib.moe_plan.argtypes = [pointer, integer, integer]
        lib.moe_run.argtypes = [pointer] * 6
        lib.moe_free.argtypes = lib.moe_plan_free.argtypes = [pointer]
        self.shape, self.plans = shape, {}
        number = lib.moe_type(type_name.encode())
        if number < 0:
            raise SystemExit(f"{library} knows no type {type_name!r}.")
        merged = 0  # gate and up apart, as in most GGUF files
        sizes = shape.num_experts, shape.topk, shape.hidden, shape.intermediate
        self.layers = [lib.moe_new(number, merged, *sizes) for _ in range(layers)]
        if not all(self.layers):
            raise MemoryError(f"ggml has no memory for {layers} layers of {shape}.")

    def put(self, layer: int, expert: int, w13: torch.Tensor, w2: torch.Tensor) -> None:
        gate, up = w13.chunk(2)
        self.lib.moe_set_expert(self.layers[layer], expert, gate.data_ptr(), up.data_ptr(), w2.data_ptr())

    def done(self) -> None:
        pass

    def prepare(self, call: Call) -> Any:
        M, ids, out = len(call.x), call.topk_ids.int(), torch.empty_like(call.x)
        if M not in self.plans:
            self._free_plans()
            self.plans[M] = self.lib.moe_plan(self.layers[0], M, torch.get_num_threads())
        pointers = tuple(t.data_ptr() for t in (call.x, ids, call.topk_weights, out))
        return self.plans[M], pointers, out, (call, ids)

    def call(self, layer: int, prepared: Any) -> torch.Tensor:
        plan, pointers, out, _ = prepared
        if self.lib.moe_run(plan, self.layers[layer], *pointers):
            raise RuntimeError("ggml_graph_compute failed")
        return out

    def _free_plans(self) -> None:
        for plan in self.plans.values():
            self.lib.moe_plan_free(plan)
        self.plans.clear()

    def close(self) -> None:
        self._free_plans()
        for layer in self.layers:
            self.lib.moe_free(layer)
        self.layers.clear()


class Vllm:
    """vLLM's INT8 W8A8 MoE for AMX, `fused_experts_cpu`, as its CPUExpertsInt8 calls it; bfloat16 in and out."""

    bytes_per_weight = 1.0

    def __init__(self, shape: Shape, layers: int, library: Path, _: None) -> None:
        torch.ops.load_library(library)
        self.ops = torch.ops._C
        E, H, I = shape.num_experts, shape.hidden, shape.intermediate
        self.scales = [(torch.empty(E, 2 * I), torch.empty(E, H)) for _ in range(layers)]
        self.codes = tuple(torch.empty(*size, dtype=torch.int8) for size in ((E, 2 * I, H), (E, H, I)))
        self.last, self.weights = E - 1, dict[int, tuple[torch.Tensor, ...]]()

    def put(self, layer: int, expert: int, w13: torch.Tensor, w2: torch.Tensor) -> None:
        for codes, scales, w in zip(self.codes, self.scales[layer], (w13, w2), strict=True):
            codes[expert], scales[expert] = quantize_weight(w)
        if expert == self.last:
            self.weights[layer] = tuple(self.ops.convert_weight_packed(codes) for codes in self.codes)

    def done(self) -> None:
        self.codes = ()

    def prepare(self, call: Call) -> Any:
        return torch.empty_like(call.x_bf16), call.x_bf16, call.topk_weights, call.topk_ids.int()

    def call(self, layer: int, prepared: Any) -> torch.Tensor:
        out, x, topk_weights, topk_ids = prepared
        w8a8, absent = 1, (None,) * 8  # no zero points, static scale, blocks, biases, alpha, limit
        arguments = *self.weights[layer], topk_weights, topk_ids, w8a8, *self.scales[layer], *absent
        self.ops.fused_experts_cpu(out, x, *arguments, True)  # True: the weights are packed
        return out

    def close(self) -> None:
        self.weights.clear()


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Drops what compiled code prints: kt-kernel announces each layer."""
    sys.stdout.flush()
    kept, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
        os.close(null)


@functools.cache
def kt_pool(library: Path, threads: int) -> tuple[Any, Any]:
    """kt-kernel's compiled module and a pool of so many workers. Its usual CPUInfer adds a thread that never sleeps."""
    spec = importlib.util.spec_from_file_location("kt_kernel_ext", library)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with silent():
        return module, module.WorkerPool(threads)


class Kt:
    """KTransformers' AMXINT8 MoE, `AMXInt8_MOE` of kt-kernel; bfloat16 in and out, on workers of its own.

    The workers are pinned to the first cores and spin for 50 ms after a call, then sleep, looking up every ms. So
    before the clock starts they are woken by a call of one token, and after it they are left alone until they sleep.
    """

    bytes_per_weight = 1.0
    MAX_TOKENS = 1024  # what its buffers are made for

    def __init__(self, shape: Shape, layers: int, library: Path, _: None) -> None:
        self.shape, self.threads = shape, torch.get_num_threads()
        self.module, self.pool = kt_pool(library, self.threads)
        E, H, I = shape.num_experts, shape.hidden, shape.intermediate
        self.source = [torch.empty(*size, dtype=torch.bfloat16) for size in ((E, I, H), (E, I, H), (E, H, I))]
        self.experts, self.on_gpu = torch.arange(E), torch.zeros(E, dtype=torch.bool)
        self.layers = dict[int, Any]()
        x = torch.randn(1, H)
        self.one = self.prepare(Call(x, x.bfloat16(), torch.ones(1, shape.topk), self.experts[None, : shape.topk]))
        self.ramp = torch.zeros(1 << 20)

    def put(self, layer: int, expert: int, w13: torch.Tensor, w2: torch.Tensor) -> None:
        for source, w in zip(self.source, (*w13.chunk(2), w2), strict=True):
            source[expert] = w
        if expert == self.shape.num_experts - 1:
            self.layers[layer] = self._load(layer)

    def _load(self, layer: int) -> Any:
        """The layer quantised from `source`, which it no longer reads afterwards."""
        s = self.shape
        config = self.module.moe.MOEConfig(s.num_experts, s.topk, s.hidden, s.intermediate, self.on_gpu.data_ptr())
        config.layer_idx, config.pool, config.max_len = layer, self.pool, self.MAX_TOKENS
        config.gate_proj, config.up_proj, config.down_proj = (w.data_ptr() for w in self.source)
        config.physical_to_logical_map = self.experts.data_ptr()
        with silent():
            experts = self.module.moe.AMXInt8_MOE(config)
            experts.load_weights()
        return experts

    def done(self) -> None:
        self.source.clear()

    def prepare(self, call: Call) -> Any:
        M = len(call.x)
        if M > self.MAX_TOKENS:
            raise SystemExit(f"{M} tokens at once; the buffers of kt_amx_int8 hold {self.MAX_TOKENS}.")
        out, count = torch.empty_like(call.x_bf16), torch.tensor([M], dtype=torch.int32)
        tensors = call.topk_ids.contiguous(), call.topk_weights, call.x_bf16, out
        return (count.data_ptr(), self.shape.topk, *(t.data_ptr() for t in tensors), False), (count, *tensors)

    def wake(self, layer: int) -> None:
        self.cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, sorted(self.cores)[self.threads :])  # the caller spins too: beside the workers
        time.sleep(0.005)  # PyTorch's threads spin for some ms
        self.call(layer, self.one)

    def call(self, layer: int, prepared: Any) -> torch.Tensor:
        self.layers[layer].forward(*prepared[0])
        return prepared[1][-1]

    def rest(self) -> None:
        time.sleep(0.06)
        os.sched_setaffinity(0, self.cores)
        self.ramp.add_(1)  # PyTorch's threads are awake when the next peer is called

    def close(self) -> None:
        self.layers.clear()


PEERS: dict[str, tuple[Callable[..., Any], str | None, str | None]] = {  # class, library, ggml type
    "int8moe": (Ours, None, None),
    "ik_q8_KV_r8": (Ggml, "ik", "q8_KV_r8"),
    "ik_q8_0_r8": (Ggml, "ik", "q8_0_r8"),
    "llama_q8_0": (Ggml, "llama", "q8_0"),
    "torch_fbgemm": (TorchFbgemm, None, None),
    "torch_bf16": (TorchLoop, None, None),
    "vllm_amx_int8": (Vllm, "vllm", None),
    "kt_amx_int8": (Kt, "kt/kt", None),
}
AMX = ("vllm_amx_int8", "kt_amx_int8")
KT_OPENMP = "libgomp-d46f9225.so.1.0.0"  # kt-kernel's copy; AMXInt8_MOE starts no thread of it


def make_peer(name: str, shape: Shape, layers: int, libraries: Path) -> Any:
    make, library, type_name = PEERS[name]
    return make(shape, layers, libraries / f"{library}.so", type_name) if library else make(shape, layers)


def why_absent(name: str, libraries: Path, threads: int) -> str | None:
    """Why this peer cannot take part, and what to do; None if it can."""
    library = PEERS[name][1]
    if name in AMX and " amx_int8" not in Path("/proc/cpuinfo").read_text():
        return "this CPU has no amx_int8"
    if library and not (libraries / f"{library}.so").exists():
        script = "fetch_amx.sh fetches" if name in AMX else "build.sh builds"
        return f"{library}.so is not in {libraries}; benchmarks/peers/{script} it"
    if name == "kt_amx_int8" and len(os.sched_getaffinity(0)) <= threads:
        return f"its caller spins beside {threads} workers, so it needs {threads + 1} cores; give fewer --threads"
    return None


def present(names: list[str], libraries: Path, threads: int) -> list[str]:
    """The peers that can take part; says why the others cannot."""
    for name in names:
        if name not in PEERS:
            raise SystemExit(f"no peer {name!r}; there are {', '.join(PEERS)}.")
    absent = {name: why for name in names if (why := why_absent(name, libraries, threads))}
    for name, why in absent.items():
        print(f"{name} is left out: {why}")
    return [n for n in names if n not in absent]


# ---------------------------------------------------------------- the machine


class Limits:
    """What the machine can do at best, measured again before every cell. The best of the run is the limit."""

    def __init__(self, threads: int) -> None:
        self.threads, self.best = threads, dict[str, float]()

    def measure(self) -> dict[str, float]:
        """DRAM read rate, and the int8 chains of the instruction set that int8moe runs; about a second."""
        native = load()
        now = {"dram_read_gbps": native.measure_read(self.threads, 512, 2) / 1e9}
        for name, rate in native.measure_peak(select_isa(), self.threads, 30):
            now[f"int8_gops: {name}"] = rate / 1e9
        for name, value in now.items():
            self.best[name] = max(value, self.best.get(name, 0.0))
        return {name: round(value, 2) for name, value in now.items()}

    def limit_ms(self, touched_bytes: float, operations: float) -> tuple[float, str]:
        """The least time for a call that reads these int8 bytes and does these operations, and what bounds it."""
        read = touched_bytes / self.best["dram_read_gbps"] / 1e6
        compute = operations / max(rate for name, rate in self.best.items() if name.startswith("int8_gops")) / 1e6
        return max((read, "memory"), (compute, "compute"))


def cpu_seconds() -> tuple[float, float]:
    """CPU seconds that the machine has used (stolen ones too), and this process."""
    fields = [int(v) for v in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    own = os.times()
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK"), own.user + own.system


class OtherWork:
    """Cores that other processes use, from `start` on."""

    def __init__(self) -> None:
        self.begin, (self.all, self.own) = time.perf_counter(), cpu_seconds()

    def cores(self) -> float:
        total, own = cpu_seconds()
        return max(0.0, (total - self.all) - (own - self.own)) / max(time.perf_counter() - self.begin, 0.02)


def wait_until_quiet(seconds: float) -> None:
    """Return when other processes use less than a tenth of a core, or after so many seconds."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        work = OtherWork()
        time.sleep(0.4)
        if work.cores() < 0.1:
            return
        time.sleep(0.6)


def openmp_runtimes() -> list[str]:
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "/" in line}
    return sorted(
        os.path.basename(p) for p in paths if os.path.basename(p).startswith(("libgomp", "libiomp", "libomp"))
    )


def first_line(path: str) -> str | None:
    with contextlib.suppress(OSError, IndexError):
        return Path(path).read_text().splitlines()[0]
    return None


def describe(threads: int, libraries: Path, names: list[str]) -> dict[str, Any]:
    def git(*command: str) -> str:
        result = subprocess.run(("git", "-C", str(REPOSITORY), *command), capture_output=True, text=True)
        return result.stdout.strip()

    built = {PEERS[name][1] for name in names} - {None}
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": Platform.cpu().name,
        "cores": os.cpu_count(),
        "threads": threads,
        "l3": first_line("/sys/devices/system/cpu/cpu0/cache/index3/size"),
        "huge_pages": first_line("/sys/kernel/mm/transparent_hugepage/enabled"),
        "kernel": platform.release(),
        "versions": {
            "int8moe": git("rev-parse", "--short", "HEAD") + (" with changes" if git("status", "--porcelain") else ""),
            "torch": torch.__version__,
            "python": platform.python_version(),
            **{f"{Path(name).name}.so": first_line(str(libraries / f"{name}.version")) for name in sorted(built)},
        },
    }


# ---------------------------------------------------------------- measuring


def choose_layers(shape: Shape, peers: list[str], memory_bytes: float) -> int:
    """As many layers as make the weights cold, 2 to 24, and no more than fit."""
    one = shape.num_experts * shape.expert_weights
    needed = one * sum(PEERS[name][0].bytes_per_weight for name in peers)
    fit = int(memory_bytes // needed)
    if fit < 1:
        raise SystemExit(f"one layer for all peers takes {needed / 2**30:.1f} GiB, more than --memory-gib.")
    return min(fit, max(2, min(24, COLD_BYTES // one + 1)))


def timed_call(peer: Any, layer: int, argument: Any, layers: int) -> float:
    """Milliseconds of one call. Threads that are a peer's own are awake before it and asleep after it."""
    if hasattr(peer, "wake"):
        peer.wake((layer + 1) % layers)  # another layer, so that this one's weights stay cold
    start = time.perf_counter()
    peer.call(layer, argument)
    ms = (time.perf_counter() - start) * 1e3
    if hasattr(peer, "rest"):
        peer.rest()
    return ms


def time_cell(
    peers: dict[str, Any], calls: list[Call], layers: int, seconds: float, rounds: int, first: dict[str, float]
) -> list[dict[str, float]]:
    """One dict per round, peer to ms. `first` holds the ms of an earlier call of each peer."""
    prepared = {name: [peer.prepare(call) for call in calls] for name, peer in peers.items()}
    fastest = min(first.values())
    slow = {name for name, ms in first.items() if ms > SLOW * fastest}
    order, shuffle = list(peers), random.Random(len(calls[0].x)).shuffle
    result: list[dict[str, float]] = []
    begin = time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < seconds or len(result) < rounds:
        turn = len(result)
        shuffle(order)
        times = {}
        for name in order:
            # Slow ones sit out most rounds, and all of those that only fill up the number of rounds.
            if name in slow and (turn % SLOW or (turn and elapsed > seconds)):
                continue
            times[name] = timed_call(peers[name], turn % layers, prepared[name][turn % len(calls)], layers)
        result.append(times)
    return result


def summarize(rounds: list[dict[str, float]], name: str) -> dict[str, Any]:
    times = [times[name] for times in rounds if name in times]
    beside = [times[name] / times["int8moe"] for times in rounds if name in times and "int8moe" in times]
    low, median, high = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
    summary: dict[str, Any] = {
        "median_ms": round(median, 4),
        "quartiles_ms": [round(low, 4), round(high, 4)],
        "min_ms": round(min(times), 4),
        "calls": len(times),
    }
    if beside and name != "int8moe":
        summary["times_int8moe"] = round(statistics.median(beside), 3)  # of the same rounds
    return summary


def run_shape(name: str, names: list[str], tokens: list[int], args: argparse.Namespace, limits: Limits) -> list[dict]:
    shape = SHAPES[name]
    layers = choose_layers(shape, names, args.memory_gib * 2**30)
    print(f"{name}: {layers} layers in turn, {len(names)} peers; drawing and packing weights ...", flush=True)
    calls = {M: draw_calls(shape, M) for M in tokens}
    statement = Statement([calls[M][0] for M in tokens])
    peers = {peer: make_peer(peer, shape, layers, args.libraries) for peer in names}
    for layer in range(layers):
        for expert in range(shape.num_experts):
            w13, w2 = draw_expert(shape, layer, expert)
            for taker in (statement, *peers.values()):
                taker.put(layer, expert, w13, w2)
    for peer in peers.values():
        peer.done()
    rows = []
    for index, M in enumerate(tokens):
        errors, first = {}, {}
        for peer in names:
            prepared = peers[peer].prepare(calls[M][0])
            errors[peer] = statement.error(index, peers[peer].call(0, prepared))
            first[peer] = timed_call(peers[peer], layers - 1, prepared, layers)
            if not errors[peer] < MAX_ERROR:
                print(f"{name} M={M} {peer} is left out: its relative error is {errors[peer]:.3g}", flush=True)
                del first[peer]
        wait_until_quiet(args.quiet)
        here, work = limits.measure(), OtherWork()
        rounds = time_cell({p: peers[p] for p in first}, calls[M], layers, args.seconds, args.rounds, first)
        hit = statistics.mean(len(c.topk_ids.unique()) for c in calls[M])
        row = {
            "shape": name, "E": shape.num_experts, "topk": shape.topk, "H": shape.hidden, "I": shape.intermediate,
            "M": M, "layers": layers, "rounds": len(rounds), "other_cores": round(work.cores(), 2),
            "touched_mb": round(hit * shape.expert_weights / 1e6, 2),
            "gop": round(2 * M * shape.topk * shape.expert_weights / 1e9, 4), "limits_before": here,
            "peers": {p: {**summarize(rounds, p), "relative_error": round(errors[p], 5)} for p in first},
        }  # fmt: skip
        if hasattr(peers.get("int8moe"), "isa"):
            row["isa"] = peers["int8moe"].isa
        rows.append(row)
        medians = "  ".join(f"{p} {s['median_ms']:.4g}" for p, s in row["peers"].items())
        print(f"  M={M}: {medians} ms; {len(rounds)} rounds, others used {row['other_cores']} cores", flush=True)
    for peer in peers.values():
        peer.close()
    return rows


def add_shares(rows: list[dict], limits: Limits) -> None:
    """Each cell's limit and each peer's share of it, by the best rates of the run."""
    for row in rows:
        limit = limits.limit_ms(row["touched_mb"] * 1e6, row["gop"] * 1e9)
        row["limit_ms"], row["bound"] = round(limit[0], 4), limit[1]
        for peer in row["peers"].values():
            peer["share_of_limit"] = round(limit[0] / peer["median_ms"], 3)


def table(rows: list[dict]) -> str:
    """Markdown, one table per shape: median ms, share of the limit; ~ where others used the machine."""
    out = []
    for shape in dict.fromkeys(row["shape"] for row in rows):
        cells = [row for row in rows if row["shape"] == shape]
        heads = [f"M={c['M']}{'~' if c['other_cores'] > BUSY else ''}" for c in cells]
        out += ["", f"### {shape}", "", f"| ms (share of limit) | {' | '.join(heads)} | rel. error |"]
        out += ["|" + " --- |" * (len(cells) + 2)]
        if all("limit_ms" in c for c in cells):
            out += [f"| *limit* | {' | '.join(f'''{c['limit_ms']:.3g}, {c['bound']}''' for c in cells)} | |"]
        for peer in dict.fromkeys(p for c in cells for p in c["peers"]):
            texts, errors = [], []
            for cell in cells:
                p = cell["peers"].get(peer)
                share = f" ({100 * p['share_of_limit']:.0f} %)" if p and "share_of_limit" in p else ""
                texts.append(f"{p['median_ms']:.3g}{share}" if p else "")
                errors += [p["relative_error"]] if p else []
            out += [f"| {peer} | {' | '.join(texts)} | {statistics.median(errors):.3f} |"]
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", default="1,4,16,64,256,1024")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--seconds", type=float, default=6.0, help="time for one cell, all peers together")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of a cell at the least, whatever they take")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quiet", type=float, default=20.0, help="seconds to wait for a quiet machine before a cell")
    parser.add_argument("--memory-gib", type=float, default=14.0, help="for the weights of all peers together")
    parser.add_argument(
        "--libraries", type=Path, default=REPOSITORY / ".data" / "peers", help="where build.sh put them"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore", message=".*quantize_per_channel")  # PyTorch means to drop what torch_fbgemm uses
    names = present(args.peers.split(","), args.libraries, args.threads)
    tokens = [int(M) for M in args.tokens.split(",")]
    record = describe(args.threads, args.libraries, names)
    limits = Limits(args.threads)
    rows: list[dict] = []
    gc.disable()
    with torch.inference_mode():
        for shape in args.shapes.split(","):
            rows += run_shape(shape, names, tokens, args, limits)
            gc.collect()
            add_shares(rows, limits)
            record |= {
                "openmp_runtimes": openmp_runtimes(),
                "limits": {name: round(value, 2) for name, value in limits.best.items()},
                "rows": rows,
            }
            if args.out:
                args.out.write_text(json.dumps(record, indent=1) + "\n")
    if len([r for r in record["openmp_runtimes"] if r != KT_OPENMP]) > 1:
        print(f"two OpenMP runtimes are loaded, {record['openmp_runtimes']}: their idle threads disturb each other")
    print(json.dumps(record["limits"]))
    print(table(rows))


if __name__ == "__main__":
    main()
