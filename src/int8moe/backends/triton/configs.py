"""How a layer is launched: a default plan for every shape, tuned plans, and tile files in the format that vLLM reads.

A tile file is named `E=<experts>,N=<intermediate size>,device_name=<name>,dtype=int8_w8a8.json` and maps token counts
(as strings) to tiles; vLLM takes one tile for both GEMMs and knows no other key. What more there is to say stands in a
file beside it, `....plans.json`, which is read first. `INT8MOE_TUNED_CONFIG_FOLDER` is searched first (without it, the
folder where `int8moe tune` keeps its files), then `tuned/` beside this file. Imports no framework.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from int8moe.errors import ConfigError

logger = logging.getLogger(__name__)
FOLDER_VARIABLE = "INT8MOE_TUNED_CONFIG_FOLDER"
PACKAGED = Path(__file__).parent / "tuned"

SHORT, SHORTEST = 384, 256  # intermediate sizes of a rank up to which `default_plan` knows better tiles
GROUP_SUMS = 64 * 256  # most int32 accumulators of one group of a specialised tile
ROW_SLOTS = 256  # most slots that a plan for slots by themselves is used for
MOST_SUMS = 1 << 16  # of a program without tensor cores, one for each weight of a step
EXACT_STEPS = (1 << 24) // (127 * 128)  # along K, over which float32 sums of int8 products stay exact

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
FAR = 4  # times the most tokens that were tuned, beyond which the default plan is taken


@dataclass(frozen=True)
class TileConfig:
    """One launch of the grouped GEMM.

    Args:
        block_m: slots of one expert that a program handles; 8: products are transposed, since those of tensor cores
            have 16 rows and 8 columns (at W8A16 of sorted slots with 2 warps, since 4 take wgmma on 9.0, poor at it);
            1, of slots by themselves only: products without tensor cores.
        block_k: step along K.
        block_n: int32 accumulators across; a gated GEMM 1 splits them between gate and up.
        group_m: blocks of slots that share a tile of weights in L2.
        tma: tiles come by the bulk copy engine, where GPU and shape allow it.
        persistent: programs for each multiprocessor, which take tile after tile; 0: a program for each tile.
        specialized: `specialized.py`, where GPU, Triton and the rows allow it (else `plain`): persistent, one program
            for each multiprocessor; num_warps are those of each of its two groups.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int
    tma: bool = True
    persistent: int = 0
    specialized: bool = False

    @property
    def parts(self) -> int:
        """Of a specialised tile: 2 where a group's registers hold half of its rows, 1 where they hold all."""
        return 2 if self.block_m * self.block_n > GROUP_SUMS else 1

    def plain(self) -> TileConfig:
        """The same blocks where all warps do the same."""
        if not self.specialized:
            return self
        warps = 8 if self.parts == 2 else 4  # the registers of four hold 128 x 128 sums
        return replace(self, num_warps=warps, num_stages=3, persistent=2 if warps == 4 else 1, specialized=False)

    def columns(self, gated: bool) -> int:
        """Output columns of one program."""
        return max(16, self.block_n // 2) if gated else self.block_n

    def shared_bytes(self, a_bytes: int, y_bytes: int = 2) -> int:
        """Upper estimate of the shared memory of the pipelined operands; in a persistent launch, where they are not
        given up between two tiles, of the outputs, too (of `y_bytes` an element)."""
        per_stage = self.block_k * (self.block_m * a_bytes + self.block_n)
        # W8A16: weights after conversion, which products of few rows take from registers (not all of transposed ones).
        stored = self.block_m >= 64 or (self.block_m < 16 and self.num_warps >= 4)
        converted = self.block_k * self.block_n * a_bytes if a_bytes > 1 and stored else 0
        # What Triton 3.6 takes on 9.0: bfloat16 outputs pass in two parts, float32 in one.
        outputs = self.block_m * self.block_n * (4 if y_bytes > 2 else 1) if self.persistent else 0
        if self.specialized:  # outputs of both groups, some in two parts; and the barriers
            halves = 2 if self.num_warps == 4 or self.block_n == 256 else 1
            outputs = self.block_m * self.block_n * y_bytes * (2 // self.parts) // halves + 1024
        return per_stage * self.num_stages + converted + outputs


@dataclass(frozen=True)
class Plan:
    """How one layer call is launched.

    Args:
        gemm1, gemm2: tiles.
        rows: few slots, each by itself: neither sorted nor quantised beforehand.
        sort_rows: the rows of hidden_states are quantised into the order of their experts, once for each slot, so that
            tiles of them lie in one piece; otherwise GEMM 1 gathers them.
    """

    gemm1: TileConfig
    gemm2: TileConfig
    rows: bool = False
    sort_rows: bool = False


def device_shared_memory(capability: tuple[int, int] | None) -> int:
    """Bytes of shared memory one block may have on a GPU of this compute capability (None: AMD)."""
    known = [c for c in SHARED_MEMORY if capability is not None and c <= capability]
    return SHARED_MEMORY[max(known)] if known else LEAST_SHARED_MEMORY


def fitted(tile: TileConfig, capability: tuple[int, int] | None, a_bytes: int, y_bytes: int = 2) -> TileConfig:
    """`tile`, a specialised one made plain where the GPU runs none; then not persistent, with fewer stages, with a
    shorter step along K, until it fits the shared memory."""
    limit = device_shared_memory(capability)
    if capability != (9, 0) or a_bytes > 1:
        tile = tile.plain()
    while tile.shared_bytes(a_bytes, y_bytes) > limit:
        if tile.persistent and not tile.specialized:
            tile = replace(tile, persistent=0)
        elif tile.num_stages > 2:
            tile = replace(tile, num_stages=tile.num_stages - 1)
        elif tile.block_k > 32:
            tile = replace(tile, block_k=tile.block_k // 2)
        else:
            break
    return tile


def in_blocks(plan: Plan, capability: tuple[int, int] | None, a_bytes: int, y_bytes: int) -> Plan:
    """`plan` for sorted slots, which have no blocks below 8, with tiles `fitted`."""
    gemm1, gemm2 = (
        fitted(replace(tile, block_m=max(8, tile.block_m)), capability, a_bytes, y_bytes)
        for tile in (plan.gemm1, plan.gemm2)
    )
    return replace(plan, gemm1=gemm1, gemm2=gemm2, rows=False)


@functools.lru_cache(maxsize=4096)
def default_plan(
    tokens: int,
    num_experts: int,
    topk: int,
    capability: tuple[int, int] | None,
    a_bytes: int = 1,
    y_bytes: int = 2,
    all_experts: int | None = None,
    specialized: bool = True,
    intermediate: int | None = None,
) -> Plan:
    """A sane plan for any shape, from the mean number of rows an expert gets.

    Args:
        num_experts: local experts. all_experts: those of all ranks, over which the slots are spread; None: the same.
        a_bytes: bytes of one element of A; 1 is W8A8.
        specialized: the Triton that will run it has specialised tiles (3.6 and later). What such a plan would be with
            its tiles made plain was never measured, so there is another one without.
        intermediate: of the rank; None: not a short one, along which GEMM 2 has few steps.
    """
    slots = tokens * topk
    rows = slots / max(1, all_experts or num_experts)
    block_k = 128 // a_bytes
    # Large experts that tokens share are better read once; where weights are converted, a row by itself costs less.
    alone = slots <= 16 and num_experts >= (8 if a_bytes == 1 else 4) * slots
    hopper = capability == (9, 0) and a_bytes == 1
    if hopper and specialized and rows >= (96 if intermediate is not None and intermediate <= SHORTEST else 48):
        first = TileConfig(128, 128, 128, 16, 8, 4, specialized=True)
        second = TileConfig(128, 256, 128, 16, 4, 4, specialized=True)
        if rows < 96:
            first = second = TileConfig(64, 256, 128, 8, 8, 4, specialized=True)
        first, second = (fitted(tile, capability, a_bytes, y_bytes) for tile in (first, second))
        return Plan(first, second, sort_rows=True)
    converting = capability == (9, 0) and a_bytes == 2  # takes long steps to hide
    if alone:
        tile = TileConfig(16, 64, 2 * block_k, 1, 4, 4)
        if hopper or converting:
            tile = TileConfig(8, 64, 256, 1, 4, 4)
    elif rows <= 12 and hopper:
        tile = TileConfig(8, 64, 256, 1, 4, 4) if rows <= 4 else TileConfig(16, 64, 256, 1, 4, 3)
    elif rows <= 12:
        tile = TileConfig(16, 128, 256, 1, 4, 3) if converting else TileConfig(16, 128, block_k, 1, 4, 4)
    elif rows <= 24:
        tile = TileConfig(32, 128, block_k, 1, 4, 3)
    elif rows <= 96:
        tile = TileConfig(64, 128, block_k, 8, 4, 3)
    else:
        tile = TileConfig(128, 128, block_k, 8, 4 if hopper else 8, 3, persistent=2 if hopper else 0)
    if a_bytes == 4 or (capability is not None and capability < (8, 0)):
        # Products in float32 (Triton's way for int8 before 8.0) use no tensor cores: small tiles stay in registers.
        tile = replace(tile, block_m=min(32, tile.block_m), block_n=64, block_k=32, num_warps=4, num_stages=2)
    second = tile
    if hopper and rows <= 12 and not alone and intermediate is not None and intermediate <= SHORT:
        second = TileConfig(16, 128, 128, 1, 4, 3)
    tile, second = (fitted(each, capability, a_bytes, y_bytes) for each in (tile, second))
    return Plan(tile, second, rows=alone)


def file_name(num_experts: int, intermediate: int, device_name: str, dtype: str) -> str:
    """The name vLLM gives the file: local experts, intermediate size of this rank, device, int8_w8a8 or int8_w8a16."""
    device = device_name.replace(" ", "_")
    if "H200" in device.split("_"):
        device = "NVIDIA_H200"
    return f"E={num_experts},N={intermediate},device_name={device},dtype={dtype}.json"


TILE_KEYS = {
    "BLOCK_SIZE_M": "block_m",
    "BLOCK_SIZE_N": "block_n",
    "BLOCK_SIZE_K": "block_k",
    "GROUP_SIZE_M": "group_m",
    "num_warps": "num_warps",
    "num_stages": "num_stages",
}


# Least and most of what a file may say. The most are far beyond any use, and keep what is wrong from Triton and
# `fitted`; a block has at most 32 warps (CUDA C++ Programming Guide).
_RANGES = {
    "block_m": (8, 1024), "block_n": (16, 1024), "block_k": (32, 1024), "group_m": (1, 1 << 16), "num_warps": (1, 32),
    "num_stages": (1, 64), "persistent": (0, 64),
}  # fmt: skip


def _check_value(path: Path, tokens: str, key: str, name: str, value: Any) -> None:
    low, high = _RANGES[name]
    power_of_two = name.startswith("block") or name == "num_warps"
    whole = type(value) is int  # `true` is an int to Python
    if not whole or not low <= value <= high or (power_of_two and value & (value - 1)):
        end = f"at most {high}" if whole and value > high else f"at least {low}"
        needs = f"{'a power of two' if power_of_two else 'an integer'} of {end}"
        raise ConfigError(f"{path}, entry {tokens!r}: {key} is {value!r}, needs {needs}.")


def _check_tokens(path: Path, tokens: str) -> int:
    if int(tokens) < 1:
        raise ConfigError(f"{path}, entry {tokens!r}: that is no number of tokens, needs at least 1.")
    return int(tokens)


def _tile(path: Path, tokens: str, entry: Mapping[str, Any], rows: bool = False) -> TileConfig:
    """The tile of an entry; `rows`: of slots by themselves, of which a block may have one."""
    alone = rows and type(entry.get("BLOCK_SIZE_M")) is int and entry["BLOCK_SIZE_M"] == 1
    for key, name in TILE_KEYS.items():
        if not (alone and name == "block_m"):
            _check_value(path, tokens, key, name, entry.get(key))
    tile = TileConfig(**{name: entry[key] for key, name in TILE_KEYS.items()})
    if alone and tile.block_n * tile.block_k > MOST_SUMS:
        raise ConfigError(
            f"{path}, entry {tokens!r}: BLOCK_SIZE_N times BLOCK_SIZE_K is {tile.block_n * tile.block_k}, needs at most"
            f" {MOST_SUMS} where BLOCK_SIZE_M is 1."
        )
    return tile


@functools.lru_cache(maxsize=256)
def read_file(path: Path) -> dict[int, TileConfig]:
    """Tiles by token count. Keys that are no numbers (`triton_version`) and what else a tile may hold are ignored.

    Raises:
        ConfigError: the file is not of this format; the message says file, entry and need.
    """
    try:
        content = json.loads(path.read_text())
        rows = {key: value for key, value in content.items() if key.isdigit()}
        return {_check_tokens(path, key): _tile(path, key, value) for key, value in rows.items()}
    except (ValueError, AttributeError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is not a tile file: {error}.") from error


_PLAN_KEYS = {"tma": bool, "persistent": int, "specialized": bool}


def plans_name(tile_file: str) -> str:
    """The name of the file with whole plans that stands beside a tile file."""
    return tile_file.removesuffix(".json") + ".plans.json"


def tile_entry(tile: TileConfig) -> dict[str, Any]:
    """`tile` as vLLM's files hold it."""
    return {key: getattr(tile, name) for key, name in TILE_KEYS.items()}


def plan_entry(plan: Plan) -> dict[str, Any]:
    """`plan` as a plans file holds it."""
    tiles = {
        name: tile_entry(tile)
        | {key: getattr(tile, key) for key in _PLAN_KEYS if key != "specialized" or tile.specialized}
        for name, tile in (("gemm1", plan.gemm1), ("gemm2", plan.gemm2))
    }
    return {"rows": plan.rows, "sort_rows": plan.sort_rows, **tiles}


def _check_specialized(path: Path, tokens: str, tile: TileConfig) -> None:
    """Refuse what `specialized.py` cannot run. The groups give a stage back when the next one is multiplied: with one
    stage they and the copying warp wait for each other for ever."""
    needs = (
        ("num_stages", tile.num_stages, tile.num_stages >= 2, "at least 2"),
        ("num_warps", tile.num_warps, tile.num_warps in (4, 8), "4 or 8"),
        ("rows of a group", tile.block_m // tile.parts, tile.block_m // tile.parts >= 64, "at least 64"),
        ("BLOCK_SIZE_N", tile.block_n, tile.block_n <= 256, "at most 256"),
        ("BLOCK_SIZE_K", tile.block_k, tile.block_k in (32, 64, 128), "32, 64 or 128"),
    )
    for name, value, right, need in needs:
        if not right:
            raise ConfigError(
                f"{path}, entry {tokens!r}: {name} is {value}, needs {need} where specialized is true. Correct the"
                " entry, or remove it and tune again."
            )


def plan_of_entry(path: Path, tokens: str, entry: Mapping[str, Any]) -> Plan:
    """The plan that `plan_entry` wrote; `path` and `tokens` are for messages.

    Raises:
        ConfigError: a value is missing or of the wrong kind, or no kernel can run the tile.
    """
    for key in ("rows", "sort_rows"):
        if type(entry.get(key, False)) is not bool:
            raise ConfigError(f"{path}, entry {tokens!r}: {key} is {entry[key]!r}, needs true or false.")
    tiles, rows = [], entry.get("rows", False)
    for gemm in ("gemm1", "gemm2"):
        tile = _tile(path, f"{tokens}.{gemm}", entry.get(gemm, {}), rows)
        more = {key: entry[gemm][key] for key in _PLAN_KEYS if key in entry[gemm]}
        for key, value in more.items():
            if type(value) is not _PLAN_KEYS[key]:
                raise ConfigError(
                    f"{path}, entry {tokens!r}: {gemm}.{key} is {value!r}, needs {_PLAN_KEYS[key].__name__}."
                )
        tile = replace(tile, **more)
        _check_value(path, tokens, f"{gemm}.persistent", "persistent", tile.persistent)
        if tile.specialized:
            _check_specialized(path, f"{tokens}.{gemm}", tile)
        tiles.append(tile)
    return Plan(tiles[0], tiles[1], rows, entry.get("sort_rows", False))


@functools.lru_cache(maxsize=256)
def read_plans(path: Path) -> dict[int, Plan]:
    """Plans by token count of a plans file.

    Raises:
        ConfigError: the file is not of this format; the message says file, entry and need.
    """
    try:
        plans = json.loads(path.read_text())["plans"]
        return {_check_tokens(path, key): plan_of_entry(path, key, value) for key, value in plans.items()}
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is not a plans file: {type(error).__name__}: {error}.") from error


def user_tuned_folder() -> Path:
    """Where `int8moe tune` keeps its files: `INT8MOE_TUNED_CONFIG_FOLDER`, else under the XDG data folder."""
    base = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    return Path(os.environ.get(FOLDER_VARIABLE) or os.path.join(base, "int8moe", "tuned"))


@dataclass(frozen=True)
class Won:
    """A plan of a plans file, and what it was tuned for.

    Args:
        experts: of the rank, as in the file's name; how many the layer has on all ranks no file says.
        intermediate: of the rank.
    """

    experts: int
    topk: int
    hidden: int
    intermediate: int
    tokens: int
    plan: Plan


def won_plans(device_name: str, dtype: str) -> Iterator[Won]:
    """Every plan of the plans files for this GPU and dtype (as in `file_name`), of every layer.

    Of two files of one name the user's is taken, as `choose_plan` does. One that is not of the format is left out with
    a warning: where its own layer is launched it is an error.
    """
    device = plans_name(file_name(0, 0, device_name, dtype)).partition(",device_name=")[2]
    seen = set()
    for folder in (user_tuned_folder(), PACKAGED):
        for path in sorted(folder.glob("*.plans.json")):
            if path.name.partition(",device_name=")[2] != device or path.name in seen:
                continue
            seen.add(path.name)
            try:
                layer, plans = _tuned_layer(path), read_plans(path)
            except (ConfigError, OSError) as error:
                logger.warning("a plans file is left out: %s", error)
                continue
            yield from (Won(*layer, tokens, plan) for tokens, plan in plans.items())


def _tuned_layer(path: Path) -> tuple[int, int, int, int]:
    """Experts, topk, hidden and intermediate size at the head of a plans file."""
    keys = ("experts", "topk", "hidden", "intermediate")
    try:
        content = json.loads(path.read_text())
        experts, topk, hidden, intermediate = (content[key] for key in keys)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} is not a plans file: {type(error).__name__}: {error}.") from error
    for key, value in zip(keys, (experts, topk, hidden, intermediate), strict=True):
        if type(value) is not int or value < 1:
            raise ConfigError(f"{path}: {key} is {value!r}, needs an integer of at least 1.")
    return experts, topk, hidden, intermediate


@functools.lru_cache(maxsize=1024)
def _warn_once(
    experts: int, topk: int, hidden: int, intermediate: int, device: str, weight_only: bool, num_experts: int
) -> None:
    ep = num_experts // experts if num_experts % experts == 0 else 1
    logger.warning(
        "no tuned tiles for %d experts of %d x %d on %s: default tiles are used. To make them:"
        " int8moe tune --layer %d,%d,%d,%d%s%s",
        experts, hidden, intermediate, device, experts * ep, topk, hidden, intermediate,
        f" --ep {ep}" if ep > 1 else "", " --weight-only" if weight_only else "",
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _tuned(folder: Path, name: str) -> dict[int, Plan]:
    for directory in (folder, PACKAGED):
        if (directory / plans_name(name)).is_file():
            return read_plans(directory / plans_name(name))
        if (directory / name).is_file():
            return {tokens: Plan(tile, tile) for tokens, tile in read_file(directory / name).items()}
    return {}


def choose_plan(
    tokens: int,
    num_experts: int,
    topk: int,
    hidden: int,
    intermediate: int,
    device_name: str,
    capability: tuple[int, int] | None,
    a_bytes: int = 1,
    all_experts: int | None = None,
    y_bytes: int = 2,
    specialized: bool = True,
) -> Plan:
    """The tuned plan of the nearest token count where a file fits this device and shape; else, and for more than FAR
    times as many tokens as were tuned, the default.

    Args:
        num_experts: on this rank. all_experts: of the layer; given, a missing file is warned of once, with the command
            that would make it. y_bytes: bytes of one element of what the GEMMs write. specialized: see `default_plan`.
    """
    default = functools.partial(
        default_plan, tokens, num_experts, topk, capability, a_bytes, y_bytes, all_experts, specialized, intermediate
    )
    name = file_name(num_experts, intermediate, device_name, "int8_w8a8" if a_bytes == 1 else "int8_w8a16")
    tuned = _tuned(user_tuned_folder(), name)
    if not tuned:
        if all_experts is not None and device_name != "cpu":
            _warn_once(num_experts, topk, hidden, intermediate, device_name, a_bytes > 1, all_experts)
        return default()
    if tokens > FAR * max(tuned):  # blocks for a few rows would read the weights once for each few
        return default()
    plan = tuned[min(tuned, key=lambda m: (abs(m - tokens), m))]
    if plan.rows and tokens * topk <= ROW_SLOTS:
        return plan
    return in_blocks(plan, capability, a_bytes, y_bytes)
