"""A dense int8 matrix product in Triton, to measure what a GPU's tensor cores give at best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from int8moe.backends.triton import launch


@dataclass(frozen=True)
class Tile:
    """One launch. `persistent`: as many programs as multiprocessors, each takes several tiles."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    persistent: bool = False

    def __str__(self) -> str:
        name = f"triton {self.m}x{self.n}x{self.k}, {self.warps} warps, {self.stages} stages"
        return f"{name}, persistent" if self.persistent else name


TILES = (
    Tile(128, 256, 128, 8, 3),
    Tile(128, 256, 128, 8, 4),
    Tile(128, 256, 128, 8, 3, persistent=True),
    Tile(128, 128, 128, 4, 3),
    Tile(128, 128, 128, 4, 4),
)
GROUP_M = 8  # tiles of A that share a tile of W while it is in L2


@triton.jit
def matmul_kernel(  # type: ignore[no-untyped-def]
    A, W, C, M, N, K,
    TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    FLATTEN: tl.constexpr,
):  # fmt: skip
    """C [M, N] = A [M, K] @ W [N, K].T: int8 in, int32 sums, stored in the dtype of C. Tiles divide M, N and K.
    TMA: A and W are tensor descriptors. Each program takes every num_programs-th tile."""
    tiles_m = M // BLOCK_M
    tiles_n = N // BLOCK_N
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN):
        per_group = GROUP_M * tiles_n
        group_first = (tile // per_group) * GROUP_M
        group_size = tl.minimum(tiles_m - group_first, GROUP_M)
        m_first = (group_first + (tile % per_group) % group_size) * BLOCK_M
        n_first = (tile % per_group) // group_size * BLOCK_N
        m = m_first + tl.arange(0, BLOCK_M)
        n = n_first + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        if not TMA:
            a_pointers = A + m[:, None] * K + k[None, :]
            w_pointers = W + n[None, :] * K + k[:, None]
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
        for start in range(0, K, BLOCK_K):
            if TMA:
                acc = tl.dot(A.load([m_first, start]), W.load([n_first, start]).T, acc, out_dtype=tl.int32)
            else:
                acc = tl.dot(tl.load(a_pointers), tl.load(w_pointers), acc, out_dtype=tl.int32)
                a_pointers += BLOCK_K
                w_pointers += BLOCK_K
        pointers = C + m[:, None] * N + n[None, :]
        if C.dtype.element_ty == tl.int32:
            tl.store(pointers, acc)
        else:
            tl.store(pointers, acc.to(tl.float32).to(C.dtype.element_ty))


def matmul(a: torch.Tensor, w: torch.Tensor, c: torch.Tensor, tile: Tile, tma: bool | None = None) -> torch.Tensor:
    """c [M, N] = a [M, K] @ w [N, K].T, int8 with int32 sums, rounded to the dtype of c; returns c.

    Args:
        a, w, c: contiguous, below 2**31 elements each; the tile divides M, N and K.
        tma: tiles by the bulk copy engine; None: where the GPU has it.
    """
    (m, k), n = a.shape, w.shape[0]
    assert m % tile.m == 0 and n % tile.n == 0 and k % tile.k == 0, (m, n, k, tile)
    tma = launch.has_tma(a.device) if tma is None else tma
    described: Any = lambda t, rows: TensorDescriptor(t, list(t.shape), list(t.stride()), [rows, tile.k])
    tiles = (m // tile.m) * (n // tile.n)
    programs = min(tiles, launch.processors(a.device)) if tile.persistent else tiles
    matmul_kernel[(programs,)](
        described(a, tile.m) if tma else a, described(w, tile.n) if tma else w, c, m, n, k,
        TMA=tma, BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, GROUP_M=GROUP_M, FLATTEN=tile.persistent,
        num_warps=tile.warps, num_stages=tile.stages, **launch.EXACT,
    )  # fmt: skip
    return c
