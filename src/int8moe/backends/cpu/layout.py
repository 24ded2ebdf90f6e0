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


def pack(weight: torch.Tensor, order: int, in_place: bool = False) -> torch.Tensor:
    """int8 [E, N, K] to int8 [E, packed bytes of one expert]; `unpack` restores it exactly.

    Args:
        in_place: take the memory of `weight`, which then holds the packed bytes, where an expert is as large packed as
            not (N a multiple of 16, or of 8 pairs, and K of 4): the peak is one expert more than the weights.
    """
    native, weight = load(), weight.contiguous()
    experts, n, k = weight.shape
    size = native.packed_bytes(n, k, order)
    if in_place and size == n * k:
        packed = weight.view(experts, size)
    else:
        packed = torch.empty(experts, size, dtype=torch.int8)
    if not native.pack(weight.data_ptr(), packed.data_ptr(), experts, n, k, order, torch.get_num_threads()):
        raise MemoryError(f"no memory for a copy of one expert of {n} x {k} while packing.")
    return packed


def unpack(packed: torch.Tensor, n: int, k: int, order: int) -> torch.Tensor:
    """The int8 [E, N, K] that `pack` was given."""
    weight = torch.empty(packed.shape[0], n, k, dtype=torch.int8)
    load().unpack(packed.data_ptr(), weight.data_ptr(), packed.shape[0], n, k, order, torch.get_num_threads())
    return weight


def make_hints(isa: int, packed: torch.Tensor, n: int, k: int, order: int) -> torch.Tensor | None:
    """What instruction set `isa` wants to know of packed weights beforehand (bits, int64 [E, words]), or None."""
    native = load()
    words = native.hint_words(isa, n, k, order)
    if not words:
        return None
    hints = torch.empty(packed.shape[0], words, dtype=torch.int64)
    native.make_hints(isa, packed.data_ptr(), hints.data_ptr(), packed.shape[0], n, k, order, torch.get_num_threads())
    return hints
