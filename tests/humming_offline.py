"""Makes the humming-kernels package believe in a GPU that is not here, so that its own Python code runs: layer
descriptions, kernel choices, weight conversion. Only what asks the device, or launches on it, is replaced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch


def described(version: int = 90, multiprocessors: int = 132) -> SimpleNamespace:
    """The package's description of a device of compute capability version / 10."""
    return SimpleNamespace(
        sm_version=version, sm_major=version // 10, sm_minor=version % 10, sm_count=multiprocessors, is_ppu=False,
        index=0, name="NVIDIA H200" if version == 90 else "a GPU", max_registers_per_sm=65536,
        max_threads_per_block=1024, max_threads_per_sm=2048, default_smem_size=48 << 10, max_smem_size=227 << 10,
        tensorcore_tops={"float16": 600.0, "int8": 1200.0}, memory_bandwidth_gbps=3000.0, l2_cache_size=50 << 20,
        l2_cache_size_mb=50.0,
    )  # fmt: skip


def pretend(version: int = 90, patch: Callable[[Any, str, Any], None] = setattr) -> SimpleNamespace:
    """Patch the package (by `patch`, a monkeypatch's setattr in tests). Not where there is a GPU."""
    assert not torch.cuda.is_available()
    import humming.config.config
    import humming.device
    import humming.ops
    import humming.transform
    import humming.tune
    import humming.tune.process_input

    device = described(version)
    patch(humming.device.current_device, "_value", device)
    for module in (
        humming.device, humming.transform, humming.tune, humming.config.config, humming.tune.process_input,
    ):  # fmt: skip
        patch(module, "DeviceInfo", lambda _=None: device)
    patch(torch.cuda, "device", lambda _: contextlib.nullcontext())
    patch(torch.cuda, "current_device", lambda: 0)
    flip = lambda x, source, target, **_: (x.view(torch.uint8) ^ 0x80).view(torch.int32)
    patch(humming.ops, "convert_weight", flip)
    return device
