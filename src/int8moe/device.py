"""The machine as a value, and the one place that asks for it.

`Platform.current()` asks once, without importing a framework: NVIDIA through the driver's management
library (no context is made, so forking stays safe), ROCm through the kernel's topology files, CPUs
through /proc. `Platform.named()` answers for machines that are not here.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
import platform as _stdlib_platform
import re
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from int8moe.errors import ConfigError

GIB = 1 << 30
ISA_FLAGS = (
    "avx2", "fma", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni",
    "amx_tile", "amx_int8", "amx_bf16", "neon", "dotprod", "i8mm", "sve",
)  # fmt: skip
_ARM_HWCAPS = {"asimd": "neon", "asimddp": "dotprod", "i8mm": "i8mm", "sve": "sve"}
TRACKED_PACKAGES = ("torch", "triton", "humming-kernels", "transformers", "compressed-tensors")
_PACKAGE_ALIASES = {"triton": ("triton", "pytorch-triton", "pytorch-triton-rocm")}


@dataclass(frozen=True)
class Platform:
    """One machine, as far as choosing a kernel needs to know it.

    Args:
        kind: "cuda", "rocm", "xpu" or "cpu".
        name: product name, as the driver or /proc spells it.
        capability: CUDA compute capability, (major, minor); None elsewhere or when unknown.
        isa: CPU instruction-set features that matter here (`ISA_FLAGS`).
        memory_bytes: GPU memory, or RAM; None when unknown.
        bandwidth_gbps: memory bandwidth, GB/s, as the vendor states it; None when unknown.
        int8_tops, bf16_tflops: dense peak rates, as the vendor states them; None when unknown.
        packages: installed packages that backends ask for; for a named machine, what is assumed there.
        device_count: GPUs of this kind, or 1.
        cuda_toolkit: what can compile CUDA here, of `CUDA_PIECES`; for a named machine, all of them.
    """

    kind: str
    name: str
    capability: tuple[int, int] | None = None
    isa: frozenset[str] = frozenset()
    memory_bytes: int | None = None
    bandwidth_gbps: float | None = None
    int8_tops: float | None = None
    bf16_tflops: float | None = None
    packages: frozenset[str] = frozenset()
    device_count: int = 1
    cuda_toolkit: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.kind not in ("cuda", "rocm", "xpu", "cpu"):
            raise ConfigError(f"platform kind is {self.kind!r}, needs cuda, rocm, xpu or cpu.")
        object.__setattr__(self, "isa", frozenset(self.isa))
        object.__setattr__(self, "packages", frozenset(self.packages))
        object.__setattr__(self, "cuda_toolkit", frozenset(self.cuda_toolkit))

    @staticmethod
    def current() -> Platform:
        """This machine; asked once per process. `INT8MOE_DEVICE` names another one, `cpu` forces the CPU."""
        return _current(os.environ.get("INT8MOE_DEVICE", ""))

    @staticmethod
    def cpu() -> Platform:
        """This machine's CPU, also where there is a GPU."""
        return _probe_cpu()

    @staticmethod
    def named(name: str) -> Platform:
        """The catalogue's entry of that name, `current`, or `cpu` for this machine's CPU.

        Raises:
            ConfigError: no such machine; the message lists those that are known.
        """
        key = _normal(name)
        if key == "current":
            return Platform.current()
        if key == "cpu":
            return Platform.cpu()
        for entry, machine in CATALOGUE.items():
            if key in (_normal(entry), _normal(machine.name)):
                return machine
        raise ConfigError(f"device is {name!r}, needs one of: current, cpu, {', '.join(CATALOGUE)}.")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {name: sorted(getattr(self, name)) for name in ("isa", "packages", "cuda_toolkit")}


def _normal(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


@functools.lru_cache(maxsize=8)
def _current(override: str) -> Platform:
    if override:
        return Platform.named(override if _normal(override) != "current" else "cpu")
    return _probe_cuda() or _probe_rocm() or _probe_cpu()


@functools.lru_cache(maxsize=1)
def installed_packages() -> frozenset[str]:
    """Names among `TRACKED_PACKAGES` whose distributions are installed (metadata only, no import)."""

    def has(name: str) -> bool:
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            return False
        return True

    return frozenset(name for name in TRACKED_PACKAGES if any(map(has, _PACKAGE_ALIASES.get(name, (name,)))))


CUDA_PIECES = {
    "nvrtc": ("lib64/libnvrtc.so*", "lib/libnvrtc.so*", "*/lib/libnvrtc.so*"),
    "nvcc": ("bin/nvcc", "cuda_nvcc/bin/nvcc"),
    "cuda_runtime.h": ("include/cuda_runtime.h", "*/include/cuda_runtime.h"),
    "CCCL headers": ("include/cuda/std/cstdint", "include/cccl/cuda/std/cstdint", "*/include/cuda/std/cstdint",
                     "*/include/cccl/cuda/std/cstdint"),
}  # fmt: skip
"""What compiling a CUDA kernel at run time takes, and where it lies below a toolkit's folder."""


@functools.lru_cache(maxsize=1)
def find_cuda_toolkit() -> frozenset[str]:
    """What there is of `CUDA_PIECES` in toolkits that fit torch's CUDA version: the machine's own (/usr/local/cuda*,
    CUDA_HOME, CUDA_PATH), and those that pip installed. Looks at folders only."""
    wanted = _torch_cuda_major()
    roots = [root for root, major in _cuda_roots() if None in (wanted, major) or major == wanted]
    return frozenset(
        piece
        for piece, places in CUDA_PIECES.items()
        if any(next(root.glob(place), None) for root in roots for place in places)
    )


def _torch_cuda_major() -> int | None:
    """Of the CUDA that torch was built for, by the text of its version module."""
    try:
        text = Path(str(importlib.metadata.distribution("torch").locate_file("torch/version.py"))).read_text()
    except (importlib.metadata.PackageNotFoundError, OSError):
        return None
    found = re.search(r"^cuda\b.*=\s*['\"](\d+)\.", text, re.MULTILINE)
    return int(found.group(1)) if found else None


def _cuda_roots() -> Iterable[tuple[Path, int | None]]:
    """Folders that may hold a toolkit, and its major version where the folder says so."""
    named = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    for folder in dict.fromkeys(
        [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*")), *map(Path, named)]
    ):
        try:
            text = (folder / "version.json").read_text()
            found = re.search(r'"cuda"\s*:\s*\{[^}]*"version"\s*:\s*"(\d+)', text)
        except OSError:
            found = re.match(r"cuda-(\d+)", folder.resolve().name)
        if folder.is_dir():
            yield folder, int(found.group(1)) if found else None
    for entry in sys.path:
        nvidia = Path(entry or ".") / "nvidia"
        if (nvidia / "cu13").is_dir():
            yield nvidia / "cu13", 13
        if (nvidia / "cuda_runtime").is_dir() or (nvidia / "cuda_nvcc").is_dir():
            yield nvidia, 12


def _probe_cuda() -> Platform | None:
    """The first visible NVIDIA GPU through libnvidia-ml, or None."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.split(",")[0].strip() in ("", "-1", "NoDevFiles"):
        return None
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2() != 0:
        return None
    try:
        count = ctypes.c_uint()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        if count.value == 0:
            return None
        handle = ctypes.c_void_p()
        first = (visible or "0").split(",")[0].strip()
        if first.isdigit():
            found = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(first)), ctypes.byref(handle))
        else:
            found = nvml.nvmlDeviceGetHandleByUUID(first.encode(), ctypes.byref(handle))
        if found != 0:
            return None
        name = ctypes.create_string_buffer(96)
        nvml.nvmlDeviceGetName(handle, name, ctypes.c_uint(96))
        major, minor = ctypes.c_int(), ctypes.c_int()
        nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
        memory = (ctypes.c_ulonglong * 3)()  # total, free, used
        nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    finally:
        nvml.nvmlShutdown()
    machine = Platform(
        "cuda", name.value.decode(errors="replace"), (major.value, minor.value), memory_bytes=memory[0],
        packages=installed_packages(), device_count=len(visible.split(",")) if visible else count.value,
        cuda_toolkit=find_cuda_toolkit(),
    )  # fmt: skip
    return _with_rates(machine)


def _with_rates(machine: Platform) -> Platform:
    """Fill in vendor rates from the catalogue entry whose name the driver's name contains."""
    for entry in CATALOGUE.values():
        if entry.kind == machine.kind and _normal(entry.name) in _normal(machine.name):
            return replace(
                machine, bandwidth_gbps=entry.bandwidth_gbps, int8_tops=entry.int8_tops, bf16_tflops=entry.bf16_tflops
            )
    return machine


def _probe_rocm(root: str = "/sys/class/kfd/kfd/topology/nodes") -> Platform | None:
    """The first AMD GPU in the kernel's topology files, or None."""
    try:
        nodes = sorted(os.listdir(root), key=lambda n: int(n) if n.isdigit() else 1 << 30)
    except OSError:
        return None
    found: list[Platform] = []
    for node in nodes:
        properties = dict(_pairs(os.path.join(root, node, "properties")))
        if properties.get("simd_count", "0") == "0":
            continue
        version = int(properties.get("gfx_target_version", "0"))
        name = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
        banks = os.path.join(root, node, "mem_banks")
        sizes = [
            int(dict(_pairs(os.path.join(banks, bank, "properties"))).get("size_in_bytes", "0"))
            for bank in (os.listdir(banks) if os.path.isdir(banks) else [])
        ]
        product = next((p.name for p in CATALOGUE.values() if p.kind == "rocm" and name in p.isa), name)
        found.append(
            Platform(
                "rocm", product, isa=frozenset({name}), memory_bytes=sum(sizes) or None, packages=installed_packages()
            )
        )
    return replace(_with_rates(found[0]), device_count=len(found)) if found else None


def _pairs(path: str) -> Iterable[tuple[str, str]]:
    try:
        with open(path) as lines:
            for line in lines:
                key, _, value = line.strip().partition(" ")
                yield key, value
    except OSError:
        return


@functools.lru_cache(maxsize=1)
def _probe_cpu() -> Platform:
    name, flags = _stdlib_platform.machine(), frozenset[str]()
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                key, _, value = (part.strip() for part in line.partition(":"))
                if key in ("model name", "Model") and value:
                    name = value
                if key in ("flags", "Features"):
                    spelled = {_ARM_HWCAPS.get(f, f) for f in value.split()}
                    flags = frozenset(spelled & set(ISA_FLAGS))
                    if name != _stdlib_platform.machine():
                        break
    except OSError:
        pass
    try:
        memory: int | None = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        memory = None
    return Platform("cpu", name, isa=flags, memory_bytes=memory, packages=installed_packages())


_GPU_PACKAGES = frozenset({"torch", "triton", "humming-kernels"})
_AVX512 = frozenset({"avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512_vnni"})


def _cuda(name: str, capability: tuple[int, int], gib: float, gbps: float, int8: float, bf16: float) -> Platform:
    return Platform(
        "cuda", name, capability, frozenset(), int(gib * GIB), gbps, int8, bf16, _GPU_PACKAGES,
        cuda_toolkit=frozenset(CUDA_PIECES),
    )  # fmt: skip


def _named_cpu(name: str, isa: Iterable[str], gbps: float) -> Platform:
    return Platform("cpu", name, isa=frozenset(isa), bandwidth_gbps=gbps, packages=frozenset({"torch"}))


# Dense rates and bandwidths from the vendors' data sheets (no sparsity). CPU bandwidths are one
# socket's memory channels at their rated speed; a CPU's memory size is the owner's choice, so unknown.
CATALOGUE: dict[str, Platform] = {
    "t4": _cuda("Tesla T4", (7, 5), 16, 320, 130, 65),
    "v100": _cuda("Tesla V100", (7, 0), 32, 900, 62, 125),
    "a100": _cuda("NVIDIA A100", (8, 0), 80, 2039, 624, 312),
    "rtx-3090": _cuda("NVIDIA GeForce RTX 3090", (8, 6), 24, 936, 284, 71),
    "rtx-4090": _cuda("NVIDIA GeForce RTX 4090", (8, 9), 24, 1008, 661, 165),
    "l40s": _cuda("NVIDIA L40S", (8, 9), 48, 864, 733, 362),
    "h100": _cuda("NVIDIA H100", (9, 0), 80, 3350, 1979, 989),
    "h200": _cuda("NVIDIA H200", (9, 0), 141, 4800, 1979, 989),
    "b200": _cuda("NVIDIA B200", (10, 0), 180, 8000, 4500, 2250),
    "mi300x": Platform(
        "rocm", "AMD Instinct MI300X", None, frozenset({"gfx942"}), 192 * GIB, 5300, 2615, 1307,
        frozenset({"torch", "triton"}),
    ),
    "zen3": _named_cpu("zen3", {"avx2", "fma"}, 204.8),
    "zen4": _named_cpu("zen4", _AVX512, 460.8),
    "sapphire-rapids": _named_cpu(
        "sapphire-rapids", _AVX512 | {"avx_vnni", "amx_tile", "amx_int8", "amx_bf16"}, 307.2
    ),
    "graviton3": _named_cpu("graviton3", {"neon", "dotprod", "i8mm", "sve"}, 307.2),
}  # fmt: skip
