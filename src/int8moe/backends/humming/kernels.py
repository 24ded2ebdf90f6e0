# mypy: ignore-errors
"""Triton kernels around Humming's own: where each slot's row goes, and the weighted sum at the end.

A slot is one (token, k) pair, numbered token * topk + k. A slot whose expert lives elsewhere (`expert_map` says -1) has
no row and adds nothing; one whose id or map entry is out of range has no row either, and makes its token NaN.
Everything stays on the device, and slots keep their order within an expert, so no result depends on timing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

BLOCK_SLOTS = 1024
BLOCK_COLUMNS = 1024


def _power_of_two(n: int) -> int:
    return max(16, triton.next_power_of_2(n))


@dataclass(frozen=True)
class Route:
    """Where the slots of one call go.

    Args:
        ids: int32 or int64 [tokens, topk], global expert ids.
        expert_map: [num_experts], global id to local index or -1; None when all experts are local.
        num_experts, num_local_experts: of the model, and here.
    """

    ids: torch.Tensor
    expert_map: torch.Tensor | None
    num_experts: int
    num_local_experts: int

    @property
    def topk(self) -> int:
        return self.ids.shape[1]

    @property
    def slots(self) -> int:
        return self.ids.numel()

    def arguments(self) -> tuple:
        """The leading arguments of every kernel here."""
        mapped = self.expert_map is not None
        return self.ids, self.expert_map if mapped else self.ids, self.num_experts, self.num_local_experts, mapped

    @property
    def block(self) -> int:
        return min(BLOCK_SLOTS, _power_of_two(self.slots))


@triton.jit
def _local_expert(ids, expert_map, offsets, mask, num_experts, num_local_experts, MAPPED: tl.constexpr):
    """Local expert of each slot; -1 where it lives elsewhere, -2 where the id or its map entry is out of range. Reads
    the map at valid ids only."""
    expert = tl.load(ids + offsets, mask=mask, other=0)
    valid = (expert >= 0) & (expert < num_experts)
    if MAPPED:
        expert = tl.load(expert_map + expert, mask=mask & valid, other=-1)
        valid = valid & (expert >= -1) & (expert < num_local_experts)
    return tl.where(valid, expert, -2).to(tl.int32)


@triton.jit
def _count_kernel(
    ids, expert_map, num_experts, num_local_experts, MAPPED: tl.constexpr, counts, slots, BLOCK: tl.constexpr
):
    me = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, slots, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        local = _local_expert(ids, expert_map, offsets, offsets < slots, num_experts, num_local_experts, MAPPED)
        total += ((local == me) & (offsets < slots)).to(tl.int32)
    tl.store(counts + me, tl.sum(total, 0))


@triton.jit
def _align_kernel(
    ids, expert_map, num_experts, num_local_experts, MAPPED: tl.constexpr, counts, slots,
    sorted_ids, expert_ids, num_tokens_padded,
    BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_PAD: tl.constexpr,
):  # fmt: skip
    """Program e lists the slots of expert e, filled up to a multiple of BLOCK_M with the number of slots."""
    me = tl.program_id(0)
    experts = tl.arange(0, BLOCK_E)
    every = tl.load(counts + experts, mask=experts < num_local_experts, other=0)
    first = tl.sum(tl.where(experts < me, (every + BLOCK_M - 1) // BLOCK_M, 0), 0)
    count = tl.load(counts + me)
    blocks = (count + BLOCK_M - 1) // BLOCK_M
    row = first * BLOCK_M
    for start in range(0, slots, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < slots
        local = _local_expert(ids, expert_map, offsets, inside, num_experts, num_local_experts, MAPPED)
        mine = ((local == me) & inside).to(tl.int32)
        tl.store(sorted_ids + row + tl.cumsum(mine, 0) - 1, offsets, mask=mine > 0)
        row += tl.sum(mine, 0)
    pad = tl.arange(0, BLOCK_PAD)
    tl.store(sorted_ids + row + pad, tl.zeros((BLOCK_PAD,), tl.int32) + slots, mask=pad < blocks * BLOCK_M - count)
    for start in range(0, blocks, BLOCK_PAD):
        tl.store(expert_ids + first + start + pad, tl.zeros((BLOCK_PAD,), tl.int32) + me, mask=start + pad < blocks)
    if me == num_local_experts - 1:
        tl.store(num_tokens_padded, (first + blocks) * BLOCK_M)


@triton.jit
def _group_kernel(
    ids, expert_map, num_experts, num_local_experts, MAPPED: tl.constexpr, counts, slots,
    slot_rows, expert_offsets,
    BLOCK: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Program e gives the slots of expert e consecutive rows; the first program gives -1 to slots without one."""
    me = tl.program_id(0)
    experts = tl.arange(0, BLOCK_E)
    every = tl.load(counts + experts, mask=experts < num_local_experts, other=0)
    row = tl.sum(tl.where(experts < me, every, 0), 0)
    if me == 0:
        tl.store(expert_offsets, 0)
    tl.store(expert_offsets + me + 1, row + tl.load(counts + me))
    for start in range(0, slots, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < slots
        local = _local_expert(ids, expert_map, offsets, inside, num_experts, num_local_experts, MAPPED)
        mine = ((local == me) & inside).to(tl.int32)
        tl.store(slot_rows + offsets, row + tl.cumsum(mine, 0) - 1, mask=mine > 0)
        row += tl.sum(mine, 0)
        if me == 0:
            tl.store(slot_rows + offsets, tl.zeros((BLOCK,), tl.int32) - 1, mask=inside & (local < 0))


@triton.jit
def _combine_kernel(
    ids, expert_map, num_experts, num_local_experts, MAPPED: tl.constexpr,
    rows, slot_rows, weights, out, topk, columns,
    HAS_ROWS: tl.constexpr, HAS_WEIGHTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(0, topk):
        slot = token * topk + k
        local = _local_expert(ids, expert_map, slot, slot >= 0, num_experts, num_local_experts, MAPPED)
        local = local + tl.zeros((BLOCK,), tl.int32)
        held = local >= 0
        row = slot
        if HAS_ROWS:
            row = tl.load(slot_rows + slot).to(tl.int64)
        value = tl.load(rows + row * columns + column, mask=inside & held, other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            value = value * tl.load(weights + slot)
        total = tl.where(held, total + value, tl.where(local == -2, float("nan"), total))
    tl.store(out + token * columns + column, total.to(out.dtype.element_ty), mask=inside)


def count(route: Route) -> torch.Tensor:
    """Slots of each local expert, int32 [E]."""
    counts = torch.empty(route.num_local_experts, dtype=torch.int32, device=route.ids.device)
    _count_kernel[(route.num_local_experts,)](*route.arguments(), counts, route.slots, BLOCK=route.block)
    return counts


def align(route: Route, counts: torch.Tensor, block_m: int) -> dict[str, torch.Tensor]:
    """Routing of the indexed GEMM with tiles of `block_m` rows.

    Returns:
        sorted_ids: int32, the slots of expert 0, then 1, and so on, each list filled up to a multiple of block_m with
            the number of slots; as long as the worst case needs, of which the first num_tokens_padded entries count.
        expert_ids: int32, the expert of each tile. num_tokens_padded: int32 scalar tensor.
    """
    experts, slots = route.num_local_experts, route.slots
    tiles = -(-(slots + min(experts, slots) * (block_m - 1)) // block_m)
    new = lambda *shape: torch.empty(shape, dtype=torch.int32, device=counts.device)
    sorted_ids, expert_ids, num_tokens_padded = new(tiles * block_m), new(tiles), new(1)
    _align_kernel[(experts,)](
        *route.arguments(), counts, slots, sorted_ids, expert_ids, num_tokens_padded, BLOCK_M=block_m,
        BLOCK=route.block, BLOCK_E=_power_of_two(experts), BLOCK_PAD=_power_of_two(block_m),
    )  # fmt: skip
    return {"sorted_ids": sorted_ids, "expert_ids": expert_ids, "num_tokens_padded": num_tokens_padded}


def group(route: Route, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Routing of the contiguous grouped GEMM.

    Returns:
        Row of each slot, int32 [tokens, topk], -1 where it has none; each expert's first row and the end, int32 [E+1].
    """
    experts = route.num_local_experts
    slot_rows = torch.empty(tuple(route.ids.shape), dtype=torch.int32, device=counts.device)
    offsets = torch.empty(experts + 1, dtype=torch.int32, device=counts.device)
    _group_kernel[(experts,)](
        *route.arguments(), counts, route.slots, slot_rows, offsets, BLOCK=route.block, BLOCK_E=_power_of_two(experts),
    )  # fmt: skip
    return slot_rows, offsets


def combine(
    route: Route, rows: torch.Tensor, slot_rows: torch.Tensor | None, weights: torch.Tensor | None
) -> torch.Tensor:
    """Sum over the slots of each token in slot order, in float32, rounded once: [tokens, H] in the dtype of `rows`.
    A token that names an expert out of range is NaN.

    Args:
        rows: [R, H]; slot s is row s, or row slot_rows[s].
        weights: float32 [tokens, topk], or None for a plain sum.
    """
    tokens, columns = route.ids.shape[0], rows.shape[1]
    out = torch.empty((tokens, columns), dtype=rows.dtype, device=rows.device)
    block = min(BLOCK_COLUMNS, _power_of_two(columns))
    _combine_kernel[(tokens, triton.cdiv(columns, block))](
        *route.arguments(), rows, rows if slot_rows is None else slot_rows, rows if weights is None else weights, out,
        route.topk, columns, HAS_ROWS=slot_rows is not None, HAS_WEIGHTS=weights is not None, BLOCK=block,
    )  # fmt: skip
    return out
