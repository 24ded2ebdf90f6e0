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
import torch.nn.functional as F
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from int8moe.backends.triton import kernels
from int8moe.backends.triton.configs import EXACT_STEPS, Plan, TileConfig, choose_plan, fitted, in_blocks

specialized: Any = None
"""The module of that name; None before Triton 3.6, whose Gluon starts groups of warps in another way."""
if tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6):
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as LaidOutDescriptor

    from int8moe.backends.triton import specialized as specialized_module

    specialized = specialized_module

INTERPRETED = not isinstance(kernels.combine_kernel, triton.JITFunction)
"""TRITON_INTERPRET was set when triton was imported: kernels run on CPU tensors, in numpy."""

CHUNK = 4096  # slots that one program sorts; with more, a kernel of its own counts them first
SMALL_CHUNK = 128  # slots that one program sorts then
SCANNED = 16, 256  # experts and chunks that one program adds up at a time
ROW_BLOCK = 16384  # widest row that one program holds
PIECE, PIECES, WIDEST_PIECE = 256, 8, 2048  # columns that a warp quantises at once; pieces of a row
ROW_WARPS = 4  # of a program that quantises rows
ALIGNED = 16  # bytes, of which rows of int8 must be a multiple for the copy engine and for loads of several bytes
EXACT: dict[str, Any] = {} if INTERPRETED else {"enable_fp_fusion": False}
"""Given at every launch: a fused multiply-add rounds once where the contract rounds twice."""


@dataclass(frozen=True)
class Layer:
    """One layer's weights and what is computed between them.

    Args:
        w13, w2: canonical int8, contiguous; w2 with columns of zeros behind (`aligned`).
        w13_scale, w2_scale: float32 [E, rows]. Biases: float32 [E, rows], or None.
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
        return self.w13.shape[1] // (2 if self.gated else 1)


@dataclass(frozen=True)
class Blocks:
    """Slots in the order of their local experts, cut into blocks of up to `block_m` slots of one expert.

    Args:
        local: int32 [slots], local expert; ABSENT (-1) or INVALID (-2) where there is none here.
        order: int32 [slots], slots by local expert, stable; places past the last held slot are unwritten. None in
            the batched format, where places are slots.
        expert, first, rows: int32 [capacity], of each block: its expert, first place, number of slots.
        totals: int32 [2], blocks in use and slots held. capacity: most blocks there can be.
        second: the same slots in blocks of another height, for GEMM 2; None: these.
        place: int32 [slots], the place of each slot, negative where it has none; None where it was not asked for.
    """

    local: torch.Tensor
    order: torch.Tensor | None
    expert: torch.Tensor
    first: torch.Tensor
    rows: torch.Tensor
    totals: torch.Tensor
    capacity: int
    second: Blocks | None = None
    place: torch.Tensor | None = None

    def held(self) -> dict[str, torch.Tensor | None]:
        """Kernel arguments that say which places hold a slot."""
        return {
            "HELD": self.local if self.order is None else None,
            "TOTALS": None if self.order is None else self.totals,
        }


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


@functools.lru_cache(maxsize=64)
def processors(device: torch.device) -> int:
    """Streaming multiprocessors (compute units) of a GPU; a few in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def converts(a: torch.Tensor, block_k: int) -> int:
    """What the sums of W8A16 are multiplied by where weights are widened by `kernels.converted`'s own instructions; 0
    where they are not: with short steps they made a layer slower, and other GPUs were not measured."""
    if INTERPRETED or device_facts(a.device)[1] != (9, 0) or block_k < 128:
        return 0
    return {torch.bfloat16: 64, torch.float16: 1}.get(a.dtype, 0)


def has_tma(device: torch.device) -> bool:
    """Whether tiles can come by the bulk copy engine (compute capability 9.0 and later)."""
    capability = device_facts(device)[1]
    return capability is not None and capability >= (9, 0)


def specializes(device: torch.device) -> bool:
    """Whether `specialized` runs here."""
    return specialized is not None and device_facts(device)[1] == (9, 0)


def overlap(device: torch.device) -> dict[str, Any]:
    """Arguments of every launch of a layer: programmatic dependent launch where the GPU has it."""
    if INTERPRETED or not has_tma(device):
        return {"PDL": False, **EXACT}
    return {"PDL": True, "launch_pdl": True, **EXACT}


def describable(a: torch.Tensor) -> bool:
    """Whether the bulk copy engine can address rows of `a`: 16-byte aligned."""
    return a.data_ptr() % 16 == 0 and all(s * a.element_size() % 16 == 0 for s in a.stride()[:-1])


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


def _row_block(width: int, most: int = ROW_BLOCK) -> int:
    return min(most, max(16, triton.next_power_of_2(width)))


def _pieces(width: int) -> tuple[int, dict[str, Any]]:
    """Warps that quantise one row, each 8 values a lane at a time, and the kernel arguments that say in which pieces.

    A row of up to 16,384 columns is in registers then (a wider one is read twice), and nearly all lanes hold values: a
    power of two above a width of 768 or 14,336 would leave some idle.
    """
    block = min(PIECE, max(16, triton.next_power_of_2(width)))
    while block * PIECES < width and block < WIDEST_PIECE:
        block *= 2
    chunks = triton.cdiv(width, block)
    if chunks > PIECES:
        chunks = 0
    return max(1, block // PIECE), {"BLOCK": block, "CHUNKS": chunks, "EVEN": width % block == 0}


def _empty_codes(rows: int, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Unwritten int8 [rows, width] and float32 scales [rows]."""
    return (
        torch.empty(rows, width, dtype=torch.int8, device=device),
        torch.empty(rows, dtype=torch.float32, device=device),
    )


def align(
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    num_experts: int,
    num_local: int,
    block_m: int,
    x: torch.Tensor | None = None,
    second_block_m: int | None = None,
    places: bool = False,
) -> tuple[Blocks, tuple[torch.Tensor, torch.Tensor] | None]:
    """Sort slots by local expert, stable, into blocks; and quantise the rows of `x`, if given, meanwhile.

    Args:
        topk_ids: int32 or int64 [M, topk], contiguous, M and topk at least 1; an id outside the experts is INVALID.
        expert_map: int32 [num_experts], or None. x: [M, H], last dimension contiguous.
        second_block_m: height of the blocks of GEMM 2, where it is another. places: `Blocks.place` is wanted.
    Returns:
        The blocks, and int8 [M, H] with float32 scales [M] (step 2), or None without `x`.
    """
    slots, device = topk_ids.numel(), topk_ids.device
    capacity = block_capacity(slots, num_local, block_m)
    two = second_block_m is not None and second_block_m != block_m
    capacity_2 = block_capacity(slots, num_local, second_block_m or block_m) if two else 0
    local, order, place, *tables = _int32(
        device, slots, slots, slots if places else 0, *[capacity] * 3, 2, *[capacity_2] * 3, 2
    )
    experts = max(16, triton.next_power_of_2(num_local))
    size, chunks, counts, codes = max(16, triton.next_power_of_2(slots)), 1, None, None
    if slots > CHUNK:
        size = SMALL_CHUNK
        chunks = triton.cdiv(slots, size)
        counts = torch.empty(chunks + 1, experts, dtype=torch.int32, device=device)
        kernels.count_kernel[(chunks,)](
            topk_ids, expert_map, local, counts, slots, num_experts, num_local, EXPERTS=experts, SIZE=size, num_warps=4,
            **overlap(device),
        )  # fmt: skip
        kernels.scan_kernel[(experts // SCANNED[0],)](
            counts, chunks, EXPERTS=experts, COLUMNS=SCANNED[0], SIZE=SCANNED[1], num_warps=4, **overlap(device)
        )
        if x is not None:  # many rows: by programs of their own, which are not as large as those that sort
            codes, x = quantize_rows(x), None
    aligners = num_local + (0 if counts is None else chunks)
    rows, width = (0, 0) if x is None else x.shape
    q, scale = (None, None) if x is None else _empty_codes(rows, width, device)
    block = _row_block(width)
    kernels.prepare_kernel[(aligners + rows,)](
        topk_ids, expert_map, local, counts, order, place if places else None, *tables[:4],
        *(tables[4:] if two else [None] * 4), slots, chunks, num_experts, num_local,
        x, q, scale, 0 if x is None else x.stride(0), width, rows, BLOCK_M=block_m,
        BLOCK_M_2=second_block_m if two else None, EXPERTS=experts, SIZE=size, BLOCK=block,
        CHUNKS=1 if width <= block else 0, EVEN=width == block,
        num_warps=8 if max(size, block // 4) > 256 else 4, **overlap(device),
    )  # fmt: skip
    expert, first, held, totals, *others = tables
    second = Blocks(local, order, others[0], others[1], others[2], others[3], capacity_2) if two else None
    blocks = Blocks(local, order, expert, first, held, totals, capacity, second, place if places else None)
    return blocks, codes if q is None or scale is None else (q, scale)


def align_batched(
    expert_num_tokens: torch.Tensor, max_tokens: int, block_m: int, second_block_m: int | None = None
) -> Blocks:
    """Blocks of a batch [E, max_tokens, ...]: slot e * max_tokens + t is expert e's where t < expert_num_tokens[e]."""
    second = None
    if second_block_m not in (None, block_m):
        assert second_block_m is not None
        second = align_batched(expert_num_tokens, max_tokens, second_block_m)
    experts, device = len(expert_num_tokens), expert_num_tokens.device
    capacity = experts * triton.cdiv(max_tokens, block_m)
    local, expert, first, rows, totals = _int32(device, experts * max_tokens, *[capacity] * 3, 2)
    kernels.align_batched_kernel[(experts,)](
        expert_num_tokens, local, expert, first, rows, totals, experts, max_tokens,
        BLOCK_M=block_m, EXPERTS=max(16, triton.next_power_of_2(experts)), SIZE=256, **EXACT,
    )  # fmt: skip
    return Blocks(local, None, expert, first, rows, totals, capacity, second)


def local_experts(
    topk_ids: torch.Tensor, expert_map: torch.Tensor | None, num_experts: int, num_local: int
) -> torch.Tensor:
    """int32 [M, topk]: local expert of each slot, ABSENT or INVALID."""
    local = torch.empty(topk_ids.shape, dtype=torch.int32, device=topk_ids.device)
    slots = topk_ids.numel()
    kernels.resolve_kernel[(triton.cdiv(slots, 256),)](
        topk_ids, local, expert_map, slots, num_experts, num_local, SIZE=256, **EXACT
    )
    return local


# --- quantisation, GEMMs, combine ------------------------------------------------------------------------------------


def quantize_rows(
    x: torch.Tensor,
    blocks: Blocks | None = None,
    one_scale_for: dict[str, torch.Tensor | None] | None = None,
    spread: int = 0,
    early: bool = False,
    columns: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Step 2: int8 [rows, width], or [rows, columns] with the rest unwritten, and float32 scales [rows].

    Args:
        x: [rows, width], last dimension contiguous.
        blocks: given, only its held places are read and written; without, all rows.
        one_scale_for: given, one scale for all rows, from those that these arguments hold (`Blocks.held`).
        spread: given, a row of x belongs to that many slots, and is written to the place (`Blocks.place`) of each.
        early: `blocks` were complete before the kernel before this one let this one come.
    """
    rows, width = x.shape
    warps, pieces = _pieces(width)
    a_program = max(1, ROW_WARPS // warps)
    q, scale = _empty_codes(rows * max(1, spread), columns or width, x.device)
    amax = None
    if one_scale_for is not None:
        each = torch.empty(rows, dtype=torch.int32, device=x.device)
        kernels.row_amax_kernel[(rows,)](
            x,
            one_scale_for["HELD"],
            one_scale_for["TOTALS"],
            each,
            x.stride(0),
            width,
            rows,
            BLOCK=_row_block(width, 4096),
            num_warps=4,
            **EXACT,
        )
        amax = torch.amax(each, 0, keepdim=True)
    held = {"HELD": None, "TOTALS": None} if blocks is None or spread else blocks.held()
    kernels.quantize_rows_kernel[(triton.cdiv(rows, a_program),)](
        x, q, scale, held["HELD"], held["TOTALS"], blocks.place if blocks is not None and spread else None, amax,
        x.stride(0), q.stride(0), width, rows, **pieces, ROWS=a_program, SPREAD=spread, num_warps=warps * a_program,
        EARLY=early and overlap(x.device)["PDL"], **overlap(x.device),
    )  # fmt: skip
    return q, scale


def _weights(layer: Layer, first: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    return (layer.w13, layer.w13_scale, layer.w13_bias) if first else (layer.w2, layer.w2_scale, layer.w2_bias)


def aligned(w: torch.Tensor) -> torch.Tensor:
    """int8 [E, N, K] with zeros behind K up to a multiple of ALIGNED; `w` where it is one already."""
    return F.pad(w, (0, -w.shape[2] % ALIGNED)) if w.shape[2] % ALIGNED else w.contiguous()


def _as_wide(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """`x` [rows, K] with zeros behind where those of w [E, N, K'] stand."""
    return F.pad(x, (0, w.shape[2] - x.shape[1])) if x.shape[1] < w.shape[2] else x


def _between(layer: Layer, first: bool) -> dict[str, Any]:
    """Kernel arguments of what follows a GEMM."""
    gated = first and layer.gated
    return {
        "GATED": gated, "INTERLEAVED": gated and layer.interleaved, "ACTIVATION": layer.activation if first else None,
        "ALPHA": layer.alpha, "LIMIT": layer.limit if first else None,
        "QUICK": not INTERPRETED and torch.version.hip is None and 0.25 <= layer.alpha <= 4,
    }  # fmt: skip


def _descriptor(a: torch.Tensor, block: list[int], laid_out: bool) -> Any:
    """Of `a`, in its shape and strides; `laid_out`: with the layout that tiles have in shared memory, which Gluon asks
    for."""
    shape, strides = list(a.shape), list(a.stride())
    if not laid_out:
        return TensorDescriptor(a, shape, strides, block)
    return LaidOutDescriptor(a, shape, strides, block, specialized.shared_layout(block))


def _weight_descriptor(layer: Layer, first: bool, columns: int, block_k: int, laid_out: bool = False) -> Any:
    w = layer.w13 if first else layer.w2
    experts, rows, k = w.shape
    if first and layer.gated and not layer.interleaved:
        return _descriptor(w.view(experts * 2, rows // 2, k), [2, columns, block_k], laid_out)
    wide = 2 * columns if first and layer.gated else columns
    return _descriptor(w.view(experts * rows, k), [wide, block_k], laid_out)


def grouped_gemm(
    layer: Layer,
    first: bool,
    a: torch.Tensor,
    a_scale: torch.Tensor | None,
    y: torch.Tensor,
    blocks: Blocks,
    tile: TileConfig,
    slots_per_row: int | None,
    router_weight: torch.Tensor | None = None,
) -> None:
    """GEMM 1 with the activation (`first`), into y [places, N]; or GEMM 2 with the router weight, into y [slots, N].

    Args:
        slots_per_row: the slot at a place takes row slot // slots_per_row of a; None: the row of that place.
    """
    assert tile.block_m >= 8, "a plan for slots by themselves, which has not passed `in_blocks`"
    w, w_scale, bias = _weights(layer, first)
    a = _as_wide(a, w)
    n, k = y.shape[1], a.shape[1]
    columns = tile.columns(first and layer.gated)
    engine = tile.tma and has_tma(a.device)
    a_tma = engine and slots_per_row is None and describable(a)
    w_tma = engine and describable(w) and not in_float32(a)
    tiles = blocks.capacity * triton.cdiv(n, columns)
    special = tile.specialized and a_tma and w_tma and blocks.order is not None and specializes(a.device)
    if tile.specialized and not special:
        tile = fitted(tile.plain(), device_facts(a.device)[1], a.element_size(), y.element_size())
    programs = tile.persistent or int(special)
    grid = min(tiles, processors(a.device) * programs) if programs else tiles
    arguments: dict[str, Any] = {
        **_between(layer, first), "Y_PLACES": first, "BLOCK_N": columns, "GROUP_M": tile.group_m,
        "num_warps": tile.num_warps, **overlap(a.device),
    }  # fmt: skip
    # A kernel lets the next one come only after it has waited for all before it (`kernels.hand_over`). So the tables
    # are complete if any kernel of ours stands between the one that wrote them and this one: before GEMM 2 that is GEMM
    # 1, before GEMM 1 the one that brings rows into order.
    early = blocks.order is not None and (not first or slots_per_row is None)
    arguments["EARLY"] = early and arguments["PDL"]
    tensors = (y, router_weight, blocks.order, blocks.expert, blocks.first, blocks.rows, blocks.totals)
    if special:
        specialized.specialized_gemm_kernel[(grid,)](
            _descriptor(a, [tile.block_m // tile.parts, tile.block_k], True),
            a_scale,
            _weight_descriptor(layer, first, columns, tile.block_k, True),
            w_scale, bias, *tensors, n, k, w.shape[1], STAGES=tile.num_stages, PARTS=tile.parts, **arguments,
        )  # fmt: skip
        return
    kernels.grouped_gemm_kernel[(grid,)](
        _descriptor(a, [tile.block_m, tile.block_k], False) if a_tma else a,
        a_scale,
        _weight_descriptor(layer, first, columns, tile.block_k) if w_tma else w,
        w_scale, bias, *tensors, n, k, w.shape[1], a.stride(0), slots_per_row or 1,
        A_TMA=a_tma,
        W_TMA=w_tma,
        A_PLACES=slots_per_row is None,
        EVEN_K=k % tile.block_k == 0,
        IN_FLOAT32=in_float32(a),
        CONVERT=converts(a, tile.block_k),
        BLOCK_M=tile.block_m,
        BLOCK_K=tile.block_k,
        PERSISTENT=tile.persistent > 0,
        num_stages=tile.num_stages,
        **arguments,
    )  # fmt: skip


def row_gemm(
    layer: Layer,
    first: bool,
    x: torch.Tensor,
    y: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    num_experts: int,
    local: torch.Tensor | None,
    tile: TileConfig,
    slots_per_row: int,
    router_weight: torch.Tensor | None = None,
) -> None:
    """The same for few slots, unsorted and not quantised before: y [slots, N] of x [rows, K]. Writes `local`."""
    w, w_scale, bias = _weights(layer, first)
    x = _as_wide(x, w)
    n, k = y.shape[1], x.shape[1]
    columns = tile.columns(first and layer.gated)
    slots = topk_ids.numel()
    quantize = layer.activations == "token"
    block_m = min(16, tile.block_m)
    if quantize and k > EXACT_STEPS * tile.block_k:  # of a block of one
        block_m = max(8, block_m)
    kernels.row_gemm_kernel[(slots * triton.cdiv(n, columns),)](
        x, w, w_scale, bias, y, router_weight, topk_ids, expert_map, local, n, k, w.shape[1], x.stride(0), slots,
        slots_per_row, num_experts, layer.num_local,
        **_between(layer, first),
        QUANTIZE=quantize,
        IN_FLOAT32=in_float32(w if quantize else x),
        CONVERT=0 if quantize else converts(x, tile.block_k),
        BLOCK_M=block_m,
        BLOCK_N=columns,
        BLOCK_K=tile.block_k,
        BLOCK=_row_block(k, 4096),
        PREFETCH=overlap(x.device)["PDL"] and k % 16 == 0 and w.data_ptr() % 16 == 0,
        STAGES=tile.num_stages,
        BY_HAND=not INTERPRETED and torch.version.hip is None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **overlap(x.device),
    )  # fmt: skip


def plan_for(
    layer: Layer, tokens: int, topk: int, x: torch.Tensor, all_experts: int | None = None, y_bytes: int | None = None,
    rows: bool = True,
) -> Plan:  # fmt: skip
    """See `choose_plan`; the GEMMs write in the dtype of `x` where `y_bytes` does not say more. rows: slots may go by
    themselves."""
    name, capability = device_facts(x.device)
    a_bytes = x.element_size() if layer.activations == "float" else 1
    y_bytes = y_bytes or x.element_size()
    plan = choose_plan(
        tokens,
        layer.num_local,
        topk,
        layer.w13.shape[2],
        layer.intermediate,
        name,
        capability,
        a_bytes,
        all_experts,
        y_bytes,
        specialized is not None,
    )
    return plan if rows or not plan.rows else in_blocks(plan, capability, a_bytes, y_bytes)


def run_rows(
    layer: Layer,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    num_experts: int,
    plan: Plan,
    slots_per_row: int,
    router_weight: torch.Tensor | None,
) -> torch.Tensor:
    """Steps 2 to 7 for few slots: [M, H]."""
    tokens, topk = topk_ids.shape
    (local,) = _int32(x.device, tokens * topk)
    h = torch.empty(tokens * topk, layer.intermediate, dtype=x.dtype, device=x.device)
    routing = (topk_ids, expert_map, num_experts)
    row_gemm(layer, True, x, h, *routing, local, plan.gemm1, slots_per_row)
    y = torch.empty(len(h), layer.w2.shape[1], dtype=x.dtype, device=x.device)
    row_gemm(layer, False, h, y, *routing, None, plan.gemm2, 1, router_weight)
    return combine(y, local.view(tokens, topk), x)


def run_blocks(
    layer: Layer,
    x: torch.Tensor,
    blocks: Blocks,
    codes: tuple[torch.Tensor, torch.Tensor] | None,
    plan: Plan,
    slots_per_row: int,
    router_weight: torch.Tensor | None,
    y: torch.Tensor,
) -> None:
    """Steps 2 to 6: y [slots, H] of every held slot, in the dtype of y; rows of other slots stay as they are.

    Args:
        x: [rows, H], last dimension contiguous; slot s belongs to row s // slots_per_row.
        codes: int8 [rows, H] and scales of x, where they are there already.
        router_weight: float32 [slots], or None: already applied, or applied later.
    """
    per_tensor, weight_only = layer.activations == "tensor", layer.activations == "float"
    rows: int | None = None if blocks.order is None else slots_per_row
    h = torch.empty(len(y), layer.intermediate, dtype=x.dtype, device=x.device)
    a, scale = x, None
    if codes is not None:
        a, scale = codes
    elif not weight_only:
        one_scale_for = None
        if per_tensor:  # from the rows that a held slot reads
            one_scale_for = {"HELD": blocks.local.view(-1, slots_per_row).amax(1), "TOTALS": None}
        if plan.sort_rows and rows is not None and not per_tensor:
            a, scale = quantize_rows(x, blocks, spread=rows)
            rows = None
        else:
            a, scale = quantize_rows(x, blocks if rows is None else None, one_scale_for)
    grouped_gemm(layer, True, a, scale, h, blocks, plan.gemm1, rows)
    a, scale = h, None
    if not weight_only:
        a, scale = quantize_rows(
            h, blocks, blocks.held() if per_tensor else None, early=blocks.order is not None and not per_tensor,
            columns=layer.w2.shape[2],  # what stands there meets zeros
        )  # fmt: skip
    grouped_gemm(layer, False, a, scale, y, blocks.second or blocks, plan.gemm2, None, router_weight)


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
        y, out, local, batch_row, router_weight, width, TOPK=topk, BLOCK=block,
        EARLY=batch_row is None and overlap(y.device)["PDL"], **overlap(y.device),
    )  # fmt: skip
    return out
