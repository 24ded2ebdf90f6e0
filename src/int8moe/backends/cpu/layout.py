"""The CPU kernel's weight layout: tiles of 16 output rows, 4 columns deep.

    packed[e, tile, k // 4, c, k % 4] = canonical[e, row(tile, c), k]

`row(tile, c)` is `16 * tile + c`; for gated w13 a tile holds 8 gate rows and the 8 up rows that belong to them, so that
the activation happens where the sums are. Columns are zero-padded to 4, rows to 16. It is what a dot-product
instruction of any width reads in a straight line, so one packing serves every instruction set.
"""

from __future__ import annotations

import torch

from int8moe.backends.cpu.native import load

PLAIN, PAIRS_SPLIT, PAIRS_INTERLEAVED = 0, 1, 2


def w13_order(is_act_and_mul: bool, is_interleaved: bool) -> int:
    """Row order of w13 for `pack` and `unpack`."""
    if not is_act_and_mul:
        return PLAIN
    return PAIRS_INTERLEAVED if is_interleaved else PAIRS_SPLIT


def pack(weight: torch.Tensor, order: int) -> torch.Tensor:
    """int8 [E, N, K] to int8 [E, packed bytes of one expert]; `unpack` restores it exactly."""
    native, weight = load(), weight.contiguous()
    experts, n, k = weight.shape
    packed = torch.empty(experts, native.packed_bytes(n, k, order), dtype=torch.int8)
    native.pack(weight.data_ptr(), packed.data_ptr(), experts, n, k, order, torch.get_num_threads())
    return packed


def unpack(packed: torch.Tensor, n: int, k: int, order: int) -> torch.Tensor:
    """The int8 [E, N, K] that `pack` was given."""
    weight = torch.empty(packed.shape[0], n, k, dtype=torch.int8)
    load().unpack(packed.data_ptr(), weight.data_ptr(), packed.shape[0], n, k, order, torch.get_num_threads())
    return weight
