"""Checks of the dense int8 product, in processes of their own: Triton decides at import whether it interprets.

Run as `python triton_peak_checks.py interpret`: bits, in Triton's interpreter; or with `compile 80 90`: every tile as
it would be launched there.
"""

from __future__ import annotations

import os
import sys

if sys.argv[1] == "interpret":
    os.environ["TRITON_INTERPRET"] = "1"
else:
    os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from int8moe.backends.triton import configs
from int8moe.bench import triton_peak
from int8moe.bench.triton_peak import Tile


def interpret() -> int:
    """Several tiles of each axis, last groups that are not full, and the largest codes."""
    g = torch.Generator().manual_seed(0)
    checked = 0
    for m, n, k in ((16, 16, 32), (48, 64, 96), (160, 32, 64)):
        a, w = (torch.randint(-127, 128, (rows, k), dtype=torch.int8, generator=g) for rows in (m, n))
        a[0], w[0] = -128, -128
        want = a.long() @ w.long().T
        for tma in (False, True):
            for persistent in (False, True):
                for dtype in (torch.int32, torch.float32):
                    tile, c = Tile(16, 16, 32, 4, 2, persistent), torch.full((m, n), -1, dtype=dtype)
                    assert triton_peak.matmul(a, w, c, tile, tma) is c
                    assert torch.equal(c, want.to(dtype)), (m, n, k, tma, persistent, dtype)
                    checked += 1
    return checked


def compile_for(capability: int) -> int:
    kernel, tma = triton_peak.matmul_kernel, capability >= 90
    for tile in triton_peak.TILES:
        constants = {
            "TMA": tma, "BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "GROUP_M": triton_peak.GROUP_M,
            "FLATTEN": tile.persistent,
        }  # fmt: skip
        pointer = lambda rows: f"tensordesc<i8[{rows},{tile.k}]>" if tma else "*i8"  # noqa: B023
        types = {"A": pointer(tile.m), "W": pointer(tile.n), "C": "*bf16", "M": "i32", "N": "i32", "K": "i32"}
        signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
        divisible = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names)
                     if name in types and not types[name].startswith("tensordesc")}  # fmt: skip
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=divisible)
        options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False}
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        limit = configs.SHARED_MEMORY[divmod(capability, 10)]
        fits = compiled.metadata.shared <= limit
        assert fits or (capability < 90 and tile.stages > 3), (str(tile), compiled.metadata.shared, limit)
        wanted = "wgmma.mma_async" if tma else "mma.sync"
        assert wanted in compiled.asm["ptx"] and ".s32.s8.s8" in compiled.asm["ptx"], str(tile)
    return len(triton_peak.TILES)


if __name__ == "__main__":
    if sys.argv[1] == "interpret":
        print(interpret(), "products")
    else:
        print(sum(compile_for(int(capability)) for capability in sys.argv[2:]), "kernels")
