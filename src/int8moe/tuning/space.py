"""The plans that tuning tries, pruned by a model of their cost. Imports no framework."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from int8moe.backends.triton.configs import TileConfig, device_shared_memory

BLOCK_MS = (16, 32, 64, 128)
KEEP = 14  # of a GEMM's tiles, after the cost model
ROW_SLOTS = 256  # most slots for which rows by themselves are tried


@dataclass(frozen=True)
class Gemm:
    """One grouped GEMM as the cost model sees it.

    Args:
        rows: slots of each expert that has any. n, k: rows and columns of one expert's weights.
        gated: two columns of the product make one output. a_bytes: of one element of A.
        capability: of the GPU. processors: its multiprocessors. gbps, tops: its rates, in 1e9 bytes and 1e12 operations.
    """

    rows: tuple[int, ...]
    n: int
    k: int
    gated: bool
    a_bytes: int
    capability: tuple[int, int] | None
    processors: int
    gbps: float
    tops: float


def blocks(rows: Sequence[int], block_m: int) -> int:
    return sum(-(-r // block_m) for r in rows)


def estimate_us(gemm: Gemm, tile: TileConfig) -> float:
    """About how long a tile takes: the larger of memory and arithmetic, with what is lost in the last wave."""
    count = blocks(gemm.rows, tile.block_m)
    across = -(-gemm.n // tile.block_n)
    tiles = count * across
    resident = max(1, min(device_shared_memory(gemm.capability) // max(1, tile.shared_bytes(gemm.a_bytes)),
                          2048 // (32 * tile.num_warps)))  # fmt: skip
    resident = min(resident, max(1, 65536 // (tile.block_m * tile.block_n + 64 * 32 * tile.num_warps)))
    waves = -(-tiles // (gemm.processors * resident))
    full = tiles / (gemm.processors * resident)
    # An SM's operand rate falls with small tiles: bytes into shared memory for each product.
    intensity = 2.0 * tile.block_m * tile.block_n / (tile.block_m * gemm.a_bytes + tile.block_n)
    rate = gemm.tops * 1e12 * min(1.0, intensity / 170.0)
    compute = 2.0 * tiles * tile.block_m * tile.block_n * gemm.k / rate
    memory = (len(gemm.rows) * gemm.n * gemm.k + sum(gemm.rows) * gemm.k * gemm.a_bytes) / (gemm.gbps * 1e9)
    tail = waves / full if full > 1 else 1.0
    return max(compute * min(tail, 2.0), memory * (0.7 + 0.3 * min(tail, 2.0))) * 1e6


def tiles(gemm: Gemm, block_m: int) -> Iterator[TileConfig]:
    """Every tile of `block_m` that fits this GPU."""
    engines = (True, False) if gemm.capability is not None and gemm.capability >= (9, 0) else (False,)
    limit = device_shared_memory(gemm.capability)
    wide = (64, 128, 256) if block_m <= 64 else (128, 256)
    groups = (1,) if block_m <= 32 else (1, 8, 16)
    for block_n, block_k, warps, stages, engine in itertools.product(wide, (64, 128, 256), (4, 8), (3, 4, 5), engines):
        per_thread = block_m * block_n // (32 * warps)
        if per_thread > 128 or (warps == 8 and per_thread < 32):
            continue
        if block_k > 128 and (block_m > 32 or block_k > gemm.k):
            continue
        if block_k * gemm.a_bytes < 64 or (block_k < 128 and block_m < 64 and gemm.a_bytes == 1):
            continue
        if engine and block_n > 256:
            continue
        for group in groups:
            tile = TileConfig(block_m, block_n, block_k, group, warps, stages, engine)
            if tile.shared_bytes(gemm.a_bytes) <= limit:
                yield tile


def likely_tiles(gemm: Gemm, block_m: int, keep: int = KEEP) -> list[TileConfig]:
    """The `keep` tiles of `block_m` that the cost model likes best, of different width, depth and engine first."""
    ranked = sorted(tiles(gemm, block_m), key=lambda tile: estimate_us(gemm, tile))
    seen: dict[tuple[object, ...], int] = {}
    order = []
    for position, tile in enumerate(ranked):
        family = (tile.block_n, tile.block_k, tile.num_warps, tile.tma)
        nth = seen.get(family, 0)
        seen[family] = nth + 1
        order.append((estimate_us(gemm, tile) * (1 + 0.15 * nth), position, tile))
    order.sort(key=lambda item: item[:2])
    return [tile for _, _, tile in order[:keep]]


def likely_block_ms(gemm: Gemm, keep: int = 2) -> list[int]:
    """The heights worth trying: those whose best tile the model thinks fastest."""
    best = {m: min((estimate_us(gemm, t) for t in tiles(gemm, m)), default=float("inf")) for m in BLOCK_MS}
    return sorted(sorted(BLOCK_MS, key=lambda m: best[m])[:keep])


def row_tiles(k: int, a_bytes: int) -> list[TileConfig]:
    """Tiles for slots by themselves: block_n is 16 columns at least (32 where gated)."""
    found = []
    for block_n, block_k, warps, stages in itertools.product((16, 32, 64), (128, 256, 512), (1, 2, 4), (2, 3, 4)):
        if block_k > max(128, k) or block_n * block_k * stages > 96 * 1024 or block_n * block_k < 4096:
            continue
        found.append(TileConfig(16, block_n, block_k, 1, warps, stages, False))
    return found
