"""Launches of the Triton kernels: align, quantise, the two GEMMs, combine.

All buffers have sizes that follow from shapes alone and come from torch's allocator; nothing waits for the device, so a
CUDA graph can capture any of this.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton

from int8moe.backends.triton import kernels
from int8moe.backends.triton.configs import TileConfig, choose_tile

INTERPRETED = not isinstance(kernels.combine_kernel, triton.JITFunction)
"""TRITON_INTERPRET was set when triton was imported: kernels run on CPU tensors, in numpy."""

FEW_SLOTS = 256  # one program compares every slot with every other: 65,536 comparisons
CHUNK, TILE = 256, 32
EXACT: dict[str, Any] = {} if INTERPRETED else {"enable_fp_fusion": False}
"""Given at every launch: a fused multiply-add rounds once where the contract rounds twice."""


@dataclass(frozen=True)
class Layer:
    """One layer's weights and what is computed between them.

    Args:
        w13, w2: canonical int8, contiguous. w13_scale, w2_scale: float32 [E, rows]. Biases: float32 [E, rows], or None.
        activation: a kernel's name for it: silu, gelu, gelu_tanh, relu2, swigluoai.
        interleaved: rows of w13 alternate gate and up. limit: clamp before the activation, or None.
        activations: "token", "tensor" (one scale for all), or "float" (W8A16).
    """

    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor
    w2_scale: torch.Tensor
    w13_bias: torch.Tensor | None
    w2_bias: torch.Tensor | None
    activation: str
    gated: bool
    interleaved: bool
    alpha: float
    limit: float | None
    activations: str

    @property
    def num_local(self) -> int:
        return self.w13.shape[0]

    @property
    def intermediate(self) -> int:
        return self.w2.shape[2]


@dataclass(frozen=True)
class Blocks:
    """Slots in the order of their local experts, cut into blocks of up to `block_m` slots of one expert.

    Args:
        local: int32 [slots], local expert; ABSENT (-1) or INVALID (-2) where there is none here.
        order: int32 [slots], slots by local expert, stable; places past the last held slot are unwritten. None in
            the batched format, where places are slots.
        expert, first, rows: int32 [capacity], of each block: its expert, first place, number of slots.
        count: int32 [1], blocks in use. capacity: most blocks there can be.
    """

    local: torch.Tensor
    order: torch.Tensor | None
    expert: torch.Tensor
    first: torch.Tensor
    rows: torch.Tensor
    count: torch.Tensor
    capacity: int


def on_device(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Launch on the tensor's own GPU."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


@functools.lru_cache(maxsize=64)
def device_facts(device: torch.device) -> tuple[str, tuple[int, int] | None]:
    """Name and compute capability; ("cpu", None) in the interpreter, no capability on AMD."""
    if device.type != "cuda":
        return device.type, None
    name = torch.cuda.get_device_name(device)
    return name, None if torch.version.hip else torch.cuda.get_device_capability(device)


def in_float32(a: torch.Tensor) -> bool:
    """Whether products of `a` need float32 (see `kernels.dot`)."""
    capability = device_facts(a.device)[1]
    if INTERPRETED:
        return a.dtype is torch.bfloat16
    return a.dtype is torch.int8 and capability is not None and capability < (8, 0)


# --- alignment -----------------------------------------------------------------------------------------------------


def block_capacity(slots: int, num_local: int, block_m: int) -> int:
    """Most blocks that `slots` slots of `num_local` experts can fill."""
    return min(slots, (slots + min(slots, num_local) * (block_m - 1)) // block_m)


def _int32(device: torch.device, *lengths: int) -> list[torch.Tensor]:
    """Unwritten int32 vectors in one allocation, each 16-byte aligned, so that kernels are not specialised anew."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + -(-length // 4) * 4)
    whole = torch.empty(starts[-1], dtype=torch.int32, device=device)
    return [whole[start : start + length] for start, length in zip(starts, lengths, strict=False)]


def align(
    topk_ids: torch.Tensor, expert_map: torch.Tensor | None, num_experts: int, num_local: int, block_m: int
) -> Blocks:
    """Sort slots by local expert, stable, into blocks.

    Args:
        topk_ids: int32 or int64 [M, topk], contiguous, M and topk at least 1; an id outside the experts is INVALID.
        expert_map: int32 [num_experts], or None.
    """
    slots, device = topk_ids.numel(), topk_ids.device
    capacity = block_capacity(slots, num_local, block_m)
    local, order, expert, first, rows, count = _int32(device, slots, slots, capacity, capacity, capacity, 1)
    if slots <= FEW_SLOTS:
        size = max(16, triton.next_power_of_2(slots))
        kernels.align_few_kernel[(1,)](
            topk_ids, expert_map, local, order, expert, first, rows, count, slots, num_experts, num_local,
            BLOCK_M=block_m, SIZE=size, TILE=min(TILE, size), num_warps=4 if size <= 64 else 8, **EXACT,
        )  # fmt: skip
        return Blocks(local, order, expert, first, rows, count, capacity)
    chunks = triton.cdiv(slots, CHUNK)
    counts = torch.zeros(chunks, num_local, dtype=torch.int32, device=device)
    rank, total, start, block_start = _int32(device, slots, num_local, num_local, num_local)
    kernels.count_chunks_kernel[(chunks,)](
        topk_ids, expert_map, local, rank, counts, slots, num_experts, num_local, SIZE=CHUNK, TILE=TILE,
        num_warps=8, **EXACT,
    )  # fmt: skip
    kernels.prefix_chunks_kernel[(triton.cdiv(num_local, 16),)](
        counts, total, chunks, num_local, TILE=64, EXPERTS=16, **EXACT
    )
    _prefix_experts(total, start, block_start, count, block_m)
    kernels.scatter_kernel[(chunks,)](
        local, rank, counts, total, start, block_start, order, expert, first, rows, slots, num_local,
        BLOCK_M=block_m, SIZE=CHUNK, **EXACT,
    )  # fmt: skip
    return Blocks(local, order, expert, first, rows, count, capacity)


def _prefix_experts(
    total: torch.Tensor, start: torch.Tensor, block_start: torch.Tensor, count: torch.Tensor, block_m: int
) -> None:
    tile = min(1024, max(16, triton.next_power_of_2(len(total))))
    kernels.prefix_experts_kernel[(1,)](
        total, start, block_start, count, len(total), BLOCK_M=block_m, TILE=tile, **EXACT
    )


def align_batched(expert_num_tokens: torch.Tensor, max_tokens: int, block_m: int) -> Blocks:
    """Blocks of a batch [E, max_tokens, ...]: slot e * max_tokens + t is expert e's where t < expert_num_tokens[e]."""
    experts, device = len(expert_num_tokens), expert_num_tokens.device
    total = expert_num_tokens.clamp(0, max_tokens).to(torch.int32)
    index = torch.arange(experts, dtype=torch.int32, device=device)[:, None]
    held = torch.arange(max_tokens, dtype=torch.int32, device=device)[None, :] < total[:, None]
    local = torch.where(held, index, -1).reshape(-1)
    capacity = experts * triton.cdiv(max_tokens, block_m)
    expert, first, rows, count, start, block_start = _int32(device, *[capacity] * 3, 1, experts, experts)
    _prefix_experts(total, start, block_start, count, block_m)
    kernels.batched_blocks_kernel[(experts,)](
        total, block_start, expert, first, rows, max_tokens, BLOCK_M=block_m, TILE=16, **EXACT
    )
    return Blocks(local, None, expert, first, rows, count, capacity)


def local_experts(
    topk_ids: torch.Tensor, expert_map: torch.Tensor | None, num_experts: int, num_local: int
) -> torch.Tensor:
    """int32 [M, topk]: local expert of each slot, ABSENT or INVALID."""
    local = torch.empty(topk_ids.shape, dtype=torch.int32, device=topk_ids.device)
    slots = topk_ids.numel()
    kernels.resolve_kernel[(triton.cdiv(slots, CHUNK),)](
        topk_ids, local, expert_map, slots, num_experts, num_local, SIZE=CHUNK, **EXACT
    )
    return local


# --- quantisation, GEMMs, combine ------------------------------------------------------------------------------------


def quantize_rows(
    x: torch.Tensor, held: torch.Tensor | None, per_tensor_held: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Step 2: int8 [rows, width] and float32 scales [rows].

    Args:
        x: [rows, width], last dimension contiguous.
        held: int32 [rows]; rows with held < 0 are neither read nor written. None: all are there.
        per_tensor_held: int32 [rows] or None; given, one scale for all rows, from those with per_tensor_held >= 0.
    """
    rows, width = x.shape
    block = min(4096, max(16, triton.next_power_of_2(width)))
    warps = 4 if block <= 2048 else 8
    q = torch.empty(rows, width, dtype=torch.int8, device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    amax = None
    if per_tensor_held is not None:
        each = torch.empty(rows, dtype=torch.int32, device=x.device)
        kernels.row_amax_kernel[(rows,)](
            x, per_tensor_held, each, x.stride(0), width, BLOCK=block, num_warps=warps, **EXACT
        )
        amax = torch.amax(each, 0, keepdim=True)
    kernels.quantize_rows_kernel[(rows,)](
        x, q, scale, held, amax, x.stride(0), width, BLOCK=block, num_warps=warps, **EXACT
    )
    return q, scale


def grouped_gemm(
    layer: Layer,
    first: bool,
    a: torch.Tensor,
    a_scale: torch.Tensor | None,
    y: torch.Tensor,
    blocks: Blocks,
    tile: TileConfig,
    slots_per_row: int,
    router_weight: torch.Tensor | None = None,
) -> None:
    """GEMM 1 with the activation (`first`), or GEMM 2 with the router weight, into y [slots, N]."""
    w, w_scale, bias = (
        (layer.w13, layer.w13_scale, layer.w13_bias) if first else (layer.w2, layer.w2_scale, layer.w2_bias)
    )
    gated = first and layer.gated
    n, k = y.shape[1], a.shape[1]
    columns = tile.columns(gated)
    kernels.grouped_gemm_kernel[(blocks.capacity * triton.cdiv(n, columns),)](
        a, a_scale, w, w_scale, bias, y, router_weight, blocks.order, blocks.expert, blocks.first, blocks.rows,
        blocks.count, n, k, w.shape[1], a.stride(0), slots_per_row,
        GATED=gated,
        INTERLEAVED=gated and layer.interleaved,
        ACTIVATION=layer.activation if first else None,
        ALPHA=layer.alpha,
        LIMIT=layer.limit,
        EVEN_K=k % tile.block_k == 0,
        IN_FLOAT32=in_float32(a),
        BLOCK_M=tile.block_m,
        BLOCK_N=columns,
        BLOCK_K=tile.block_k,
        GROUP_M=tile.group_m,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **EXACT,
    )  # fmt: skip


def tile_for(layer: Layer, tokens: int, topk: int, x: torch.Tensor) -> TileConfig:
    name, capability = device_facts(x.device)
    a_bytes = x.element_size() if layer.activations == "float" else 1
    return choose_tile(tokens, layer.num_local, topk, layer.intermediate, name, capability, a_bytes)


def run_experts(
    layer: Layer,
    x: torch.Tensor,
    blocks: Blocks,
    tile: TileConfig,
    slots_per_row: int,
    router_weight: torch.Tensor | None,
    y: torch.Tensor,
) -> None:
    """Steps 2 to 6: y [slots, H] of every held slot, in the dtype of y; rows of other slots stay as they are.

    Args:
        x: [rows, H], last dimension contiguous; slot s belongs to row s // slots_per_row.
        router_weight: float32 [slots], or None: already applied, or applied later.
    """
    local = blocks.local
    per_tensor, weight_only = layer.activations == "tensor", layer.activations == "float"
    h = torch.empty(len(y), layer.intermediate, dtype=x.dtype, device=x.device)
    if weight_only:
        a, scale = x, None
    else:
        needed = local.view(-1, slots_per_row).amax(1) if per_tensor else None  # rows that a held slot reads
        a, scale = quantize_rows(x, local if blocks.order is None else None, needed)
    grouped_gemm(layer, True, a, scale, h, blocks, tile, slots_per_row)
    if weight_only:
        a, scale = h, None
    else:
        a, scale = quantize_rows(h, local, local if per_tensor else None)
    grouped_gemm(layer, False, a, scale, y, blocks, tile, 1, router_weight)


def combine(
    y: torch.Tensor,
    local: torch.Tensor,
    like: torch.Tensor,
    batch_row: torch.Tensor | None = None,
    router_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Step 7: [M, H] in the dtype of `like`, from y and local [M, topk] (batched format: see `combine_kernel`)."""
    tokens, topk = local.shape
    width = y.shape[1]
    out = torch.empty(tokens, width, dtype=like.dtype, device=y.device)
    block = min(1024, max(16, triton.next_power_of_2(width)))
    kernels.combine_kernel[(tokens, triton.cdiv(width, block))](
        y, out, local, batch_row, router_weight, topk, width, BLOCK=block, **EXACT
    )
    return out
