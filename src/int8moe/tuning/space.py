"""The tiles that tuning tries, pruned by a model of their cost. Imports no framework."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from int8moe.backends.triton.configs import TileConfig, device_shared_memory

BLOCK_MS = (8, 16, 32, 64, 128)
TALL = 256  # of specialised tiles only
ROW_SLOTS = 64  # most slots for which rows by themselves are tried
TOO_SLOW = 2.5  # a tile that the model puts this far behind its best is not measured
REFINED = 2  # of a GEMM's tiles, those whose order and persistence are varied
WAVES = 4  # from which a tile is first tried persistent

# block_m: (block_n, block_k, warps, stages). What was near the fastest somewhere on an H200.
_TILES = {
    8: [(128, 256, 4, 3), (64, 256, 4, 3), (64, 256, 4, 4), (128, 256, 2, 3)],
    16: [(64, 256, 4, 3), (64, 256, 4, 4), (64, 128, 4, 4), (128, 256, 4, 3), (128, 128, 4, 3), (128, 128, 4, 5)],
    32: [(64, 256, 4, 3), (128, 128, 4, 3), (128, 128, 4, 4), (128, 256, 4, 3), (256, 128, 4, 3)],
    64: [(128, 128, 4, 3), (128, 128, 4, 4), (128, 128, 8, 3), (128, 64, 4, 6), (256, 64, 4, 4), (256, 64, 4, 5)],
    128: [
        (128, 128, 4, 3), (128, 64, 4, 4), (128, 64, 4, 5), (128, 64, 4, 6), (256, 128, 8, 3), (256, 128, 8, 4),
        (256, 64, 8, 6), (256, 64, 8, 8),
    ],
}  # fmt: skip
# The same for few rows of 16-bit activations, whose weights are converted in registers: long steps, and two warps for
# blocks of 8. The rest of `_TILES` is tried with steps of as many bytes of A.
_CONVERTING = {
    8: [(64, 256, 2, 4), (64, 256, 2, 3), (128, 256, 2, 3), (64, 128, 2, 6), (32, 256, 2, 4), (128, 128, 2, 4)],
    16: [(128, 256, 4, 3), (64, 256, 4, 3), (128, 128, 4, 4), (64, 128, 4, 4), (64, 128, 2, 4)],
}
# The same for specialised tiles, on 9.0 where rows of A lie in order.
_SPECIALIZED: dict[int, list[tuple[int, int, int, int]]] = {
    64: [(128, 128, 4, 6), (128, 128, 8, 6), (256, 128, 8, 4)],
    128: [(128, 128, 8, 5), (128, 128, 8, 4), (256, 128, 8, 4), (256, 128, 4, 4)],
    TALL: [(128, 128, 8, 3)],
}
# For slots by themselves: (block_n, block_k, warps, stages).
_ROW_TILES = (
    (16, 512, 4, 3), (16, 256, 2, 4), (32, 256, 4, 4), (32, 512, 4, 3), (32, 256, 2, 4), (64, 256, 4, 4),
    (64, 512, 4, 3), (64, 512, 2, 3), (64, 256, 4, 3), (128, 256, 4, 3),
)  # fmt: skip
# The same without tensor cores, for wide activations: a warp of four reads whole steps of its rows.
_VECTOR_TILES = (
    (16, 512, 4, 4), (16, 512, 4, 6), (32, 512, 4, 3), (32, 512, 4, 4), (64, 512, 4, 2), (64, 512, 4, 3),
    (32, 512, 8, 3), (64, 512, 8, 3),
)  # fmt: skip


@dataclass(frozen=True)
class Gemm:
    """One grouped GEMM as the cost model sees it.

    Args:
        rows: slots of each expert that has any. n, k: rows and columns of one expert's weights.
        a_bytes: of one element of A. capability: of the GPU. processors: its multiprocessors.
        gbps, tops: its rates, in 1e9 bytes and 1e12 operations a second.
    """

    rows: tuple[int, ...]
    n: int
    k: int
    a_bytes: int
    capability: tuple[int, int] | None
    processors: int
    gbps: float
    tops: float


def blocks(rows: Sequence[int], block_m: int) -> int:
    """Blocks of `block_m` slots that experts with these slots fill."""
    return sum(-(-r // block_m) for r in rows)


def resident(gemm: Gemm, tile: TileConfig) -> int:
    """Programs that a multiprocessor holds at once, by shared memory and by the registers of the accumulators."""
    by_memory = device_shared_memory(gemm.capability) // max(1, tile.shared_bytes(gemm.a_bytes))
    if tile.specialized:
        return 1
    by_registers = 65536 // (tile.block_m * tile.block_n + 56 * 32 * tile.num_warps)
    return max(1, min(by_memory, by_registers, 48 // tile.num_warps))


def waves(gemm: Gemm, tile: TileConfig) -> float:
    """Times that all processors are filled with the tiles of a GEMM."""
    tiles = blocks(gemm.rows, tile.block_m) * -(-gemm.n // tile.block_n)
    return tiles / (gemm.processors * resident(gemm, tile))


def estimate_us(gemm: Gemm, tile: TileConfig) -> float:
    """About how long a tile takes: the larger of memory and arithmetic, with what is lost in the last wave."""
    tiles = blocks(gemm.rows, tile.block_m) * -(-gemm.n // tile.block_n)
    at_once = gemm.processors * resident(gemm, tile)
    loss = min(2.0, -(-tiles // at_once) * at_once / tiles) if tiles else 1.0
    # Small tiles bring more bytes into shared memory for each product than a multiprocessor can take.
    intensity = 2.0 * tile.block_m * tile.block_n / (tile.block_m * gemm.a_bytes + tile.block_n)
    compute = 2.0 * tiles * tile.block_m * tile.block_n * gemm.k / (gemm.tops * 1e12 * min(1.0, intensity / 170.0))
    memory = (len(gemm.rows) * gemm.n * gemm.k + sum(gemm.rows) * gemm.k * gemm.a_bytes) / (gemm.gbps * 1e9)
    return max(compute * loss, memory * (0.7 + 0.3 * loss)) * 1e6


def fits(gemm: Gemm, tile: TileConfig) -> bool:
    """Whether the GPU's shared memory and the layer's width allow the tile."""
    return (
        tile.shared_bytes(gemm.a_bytes) <= device_shared_memory(gemm.capability)
        and tile.block_k <= (256 if gemm.a_bytes <= 2 else 64)
        and (tile.block_k <= 128 // gemm.a_bytes or tile.block_k <= gemm.k)
        and tile.block_n <= max(64, 2 * gemm.n)
    )


def all_tiles(gemm: Gemm, block_m: int, special: bool = False) -> list[TileConfig]:
    """Every tile of `block_m` that fits this GPU, in the order of the model's estimates; persistent where there are
    many to each processor. `special`: specialised tiles, too (rows of A lie in the order of their experts)."""
    engine = gemm.capability is not None and gemm.capability >= (9, 0)
    group = 8 if block_m >= 64 else 1

    def suited(tile: TileConfig) -> TileConfig:
        persistent = replace(tile, persistent=resident(gemm, tile))
        return persistent if block_m >= 64 and waves(gemm, tile) >= WAVES and fits(gemm, persistent) else tile

    if block_m < 16 and gemm.capability is None:
        return []  # transposed products, for the instructions of NVIDIA's tensor cores
    sizes = [(n, max(32, k // gemm.a_bytes), warps, stages) for n, k, warps, stages in _TILES.get(block_m, ())]
    if gemm.a_bytes == 2 and block_m in _CONVERTING:
        sizes = _CONVERTING[block_m]
    made = [suited(TileConfig(block_m, n, k, group, warps, stages, engine)) for n, k, warps, stages in sizes]
    if special:
        made += [
            TileConfig(block_m, n, k, group, warps, stages, specialized=True)
            for n, k, warps, stages in _SPECIALIZED.get(block_m, ())
        ]
    return sorted((t for t in dict.fromkeys(made) if fits(gemm, t)), key=lambda t: estimate_us(gemm, t))


def likely_tiles(gemm: Gemm, block_m: int, special: bool = False) -> list[TileConfig]:
    """The tiles of `block_m` to measure."""
    found = all_tiles(gemm, block_m, special)
    return [t for t in found if estimate_us(gemm, t) <= TOO_SLOW * estimate_us(gemm, found[0])] if found else []


def likely_block_ms(gemm: Gemm, keep: int = 3) -> list[int]:
    """The heights to try: those whose best tile the model thinks fastest."""
    best = {m: estimate_us(gemm, found[0]) for m in BLOCK_MS if (found := all_tiles(gemm, m))}
    return sorted(sorted(best, key=lambda m: best[m])[:keep])


def variants(gemm: Gemm, tile: TileConfig) -> list[TileConfig]:
    """`tile` with other orders of the blocks, and persistent where its outputs find room, too."""
    count = blocks(gemm.rows, tile.block_m)
    groups = [g for g in (8, 16, 32) if g <= max(1, count)] if tile.block_m >= 64 else [tile.group_m]
    tiles = count * -(-gemm.n // tile.block_n)
    if tile.specialized:
        return [v for g in groups if (v := replace(tile, group_m=g)) != tile]
    most = resident(gemm, tile)
    persistent = sorted({0, *(p for p in (most, 1) if p * gemm.processors < tiles)})
    made = (replace(tile, group_m=g, persistent=p) for g in groups for p in persistent)
    return [t for t in made if t != tile and fits(gemm, t)]


def row_tiles(k: int, capability: tuple[int, int] | None, a_bytes: int = 1) -> list[TileConfig]:
    """Tiles for slots by themselves, on NVIDIA's also with products transposed; block_k steps along a K of `k`."""
    heights = (16, 8) if capability is not None else (16,)
    sizes = [(m, *values) for m in heights for values in _ROW_TILES]
    if a_bytes > 1:
        sizes += [(1, *values) for values in _VECTOR_TILES]
    made = (TileConfig(m, n, step, 1, warps, stages, False) for m, n, step, warps, stages in sizes)
    return [tile for tile in made if row_fits(tile, k)]


def row_fits(tile: TileConfig, k: int) -> bool:
    """Whether a tile for slots by themselves steps along a K of `k`."""
    return tile.block_k <= max(256, k)


def best(times: Iterable[tuple[float, TileConfig]], count: int) -> list[TileConfig]:
    """The `count` fastest."""
    return [tile for _, tile in sorted(times, key=lambda pair: pair[0])[:count]]
