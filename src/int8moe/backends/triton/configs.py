"""Tile choice of the grouped GEMM: a default for every shape, and tuned files in the format that vLLM reads.

A tuned file is named `E=<experts>,N=<intermediate size>,device_name=<name>,dtype=int8_w8a8.json` and maps token counts
(as strings) to tiles. `INT8MOE_TUNED_CONFIG_FOLDER` is searched first, then `tuned/` beside this file. Imports no
framework.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from int8moe.errors import ConfigError

FOLDER_VARIABLE = "INT8MOE_TUNED_CONFIG_FOLDER"
PACKAGED = Path(__file__).parent / "tuned"

_KIB = 1024
SHARED_MEMORY = {
    (7, 5): 64 * _KIB,
    (8, 0): 163 * _KIB,
    (8, 6): 99 * _KIB,
    (8, 7): 163 * _KIB,
    (8, 9): 99 * _KIB,
    (9, 0): 227 * _KIB,
    (10, 0): 227 * _KIB,
    (12, 0): 99 * _KIB,
}
"""Bytes of shared memory one block may have, by compute capability (CUDA C++ Programming Guide, technical
specifications)."""
LEAST_SHARED_MEMORY = 64 * _KIB  # also AMD's local data share


@dataclass(frozen=True)
class TileConfig:
    """One launch of the grouped GEMM.

    Args:
        block_m: slots of one expert that a program handles. block_k: step along K.
        block_n: int32 accumulators across; a gated GEMM 1 splits them between gate and up.
        group_m: blocks of slots that share a tile of weights in L2.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int

    def columns(self, gated: bool) -> int:
        """Output columns of one program."""
        return max(16, self.block_n // 2) if gated else self.block_n

    def shared_bytes(self, a_bytes: int) -> int:
        """Upper estimate of the shared memory of the pipelined operands."""
        per_stage = self.block_k * (self.block_m * a_bytes + self.block_n)
        converted = self.block_k * self.block_n * a_bytes if a_bytes > 1 else 0  # W8A16: weights after conversion
        return per_stage * self.num_stages + converted


def fitted(tile: TileConfig, capability: tuple[int, int] | None, a_bytes: int) -> TileConfig:
    """`tile` with fewer stages, then a shorter step along K, until it fits the device's shared memory."""
    known = [c for c in SHARED_MEMORY if capability is not None and c <= capability]
    limit = SHARED_MEMORY[max(known)] if known else LEAST_SHARED_MEMORY
    while tile.shared_bytes(a_bytes) > limit:
        if tile.num_stages > 2:
            tile = replace(tile, num_stages=tile.num_stages - 1)
        elif tile.block_k > 32:
            tile = replace(tile, block_k=tile.block_k // 2)
        else:
            break
    return tile


@functools.lru_cache(maxsize=4096)
def default_tile(
    tokens: int, num_experts: int, topk: int, capability: tuple[int, int] | None, a_bytes: int = 1
) -> TileConfig:
    """A sane tile for any shape, from the mean number of rows an expert gets.

    Args:
        num_experts: local experts. a_bytes: bytes of one element of A; 1 is W8A8.
    """
    slots = tokens * topk
    rows = slots / max(1, num_experts)
    block_k = 128 // a_bytes
    if rows <= 12:
        tile = TileConfig(16, 64 if slots <= 128 else 128, block_k, 1, 4, 4)
    elif rows <= 24:
        tile = TileConfig(32, 128, block_k, 1, 4, 4)
    elif rows <= 64:
        tile = TileConfig(64, 128, block_k, 8, 4, 4)
    else:
        tile = TileConfig(128, 128, block_k, 8, 8, 4)
    if a_bytes == 4 or (capability is not None and capability < (8, 0)):
        # Products in float32 (Triton's way for int8 before 8.0) use no tensor cores: small tiles stay in registers.
        tile = replace(tile, block_m=min(32, tile.block_m), block_n=64, block_k=32, num_warps=4, num_stages=2)
    return fitted(tile, capability, a_bytes)


def file_name(num_experts: int, intermediate: int, device_name: str, dtype: str) -> str:
    """The name vLLM gives the file: local experts, intermediate size of this rank, device, int8_w8a8 or int8_w8a16."""
    device = device_name.replace(" ", "_")
    if "H200" in device.split("_"):
        device = "NVIDIA_H200"
    return f"E={num_experts},N={intermediate},device_name={device},dtype={dtype}.json"


_KEYS = {
    "BLOCK_SIZE_M": "block_m",
    "BLOCK_SIZE_N": "block_n",
    "BLOCK_SIZE_K": "block_k",
    "GROUP_SIZE_M": "group_m",
    "num_warps": "num_warps",
    "num_stages": "num_stages",
}


def _tile(path: Path, tokens: str, entry: Mapping[str, Any]) -> TileConfig:
    values = {}
    for key, name in _KEYS.items():
        value = entry.get(key)
        low = {"block_m": 16, "block_n": 16, "block_k": 32}.get(name, 1)
        power_of_two = name.startswith("block") or name == "num_warps"
        if not isinstance(value, int) or value < low or (power_of_two and value & (value - 1)):
            needs = f"{'a power of two' if power_of_two else 'an integer'} of at least {low}"
            raise ConfigError(f"{path}, entry {tokens!r}: {key} is {value!r}, needs {needs}.")
        values[name] = value
    return TileConfig(**values)


@functools.lru_cache(maxsize=256)
def read_file(path: Path) -> dict[int, TileConfig]:
    """Tiles by token count. Keys that are no numbers (`triton_version`) and what else a tile may hold are ignored.

    Raises:
        ConfigError: the file is not of this format; the message says file, entry and need.
    """
    try:
        content = json.loads(path.read_text())
        rows = {key: value for key, value in content.items() if key.isdigit()}
        return {int(key): _tile(path, key, value) for key, value in rows.items()}
    except (ValueError, AttributeError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is not a tile file: {error}.") from error


@functools.lru_cache(maxsize=1024)
def _tuned(folder: str, name: str) -> dict[int, TileConfig]:
    for directory in (Path(folder) if folder else None, PACKAGED):
        if directory is not None and (directory / name).is_file():
            return read_file(directory / name)
    return {}


def choose_tile(
    tokens: int,
    num_experts: int,
    topk: int,
    intermediate: int,
    device_name: str,
    capability: tuple[int, int] | None,
    a_bytes: int = 1,
) -> TileConfig:
    """The tuned tile of the nearest token count where a file fits this device and shape, else the default."""
    name = file_name(num_experts, intermediate, device_name, "int8_w8a8" if a_bytes == 1 else "int8_w8a16")
    tuned = _tuned(os.environ.get(FOLDER_VARIABLE, ""), name)
    if tuned:
        return tuned[min(tuned, key=lambda m: (abs(m - tokens), m))]
    return default_tile(tokens, num_experts, topk, capability, a_bytes)
