"""The grouped GEMM with its warps specialised: one warp copies tiles, two groups of four or eight warps multiply.

In `kernels.grouped_gemm_kernel` every warp waits for every step of K and for the end of every tile. Here the copying
warp runs ahead through a ring of stages, over the end of a tile too, and the groups take what is there: both halves of
a tile each, or tiles in turns, so that one group multiplies while the other finishes its sums (the two schedules that
CUTLASS calls cooperative and ping-pong). Written in Gluon, Triton's lower level, which says what waits for what; for
compute capability 9.0, W8A8, and rows of A that lie in the order of their experts.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_wait

from int8moe.backends.triton.kernels import (
    PER_CALL,
    finished,
    hand_over,
    place_of,
    round_to,
    split_columns,
    table_entry,
    weight_values,
)

copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # its name before Triton 3.9 or so
INSTRUCTION: tl.constexpr = tl.constexpr(128)  # columns that one int8 wgmma of Triton takes at most


def shared_layout(block: list[int]) -> gl.NVMMASharedLayout:
    """How a tile of int8 lies in shared memory for the copy engine and the tensor cores: swizzled by its row."""
    return gl.NVMMASharedLayout(min(128, block[-1]), 8, len(block))


@gluon.jit
def tile_of(
    tile, blocks, tiles_n, BLOCK_EXPERT, BLOCK_FIRST, BLOCK_ROWS, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr
):  # fmt: skip
    """First column, expert, first place and rows of a tile; rows 0 past the last one."""
    block, n_first = place_of(tile, blocks, tiles_n, BLOCK_N, GROUP_M)
    inside = tile < blocks * tiles_n
    # Past the first cache, since these may be read before the kernel before this one has ended.
    expert = gl.load(BLOCK_EXPERT + block, mask=inside, other=0, cache_modifier=".cg")
    first = gl.load(BLOCK_FIRST + block, mask=inside, other=0, cache_modifier=".cg")
    return n_first, expert, first, gl.load(BLOCK_ROWS + block, mask=inside, other=0, cache_modifier=".cg")


@gluon.jit
def copy_weights(
    W, expert, n_first, start, w_rows, here, target, wanted, GATED: gl.constexpr, INTERLEAVED: gl.constexpr
):  # fmt: skip
    """A step of a tile's weights into `target`, if `wanted`."""
    if GATED and not INTERLEAVED:
        copy_tile(W, [expert * 2, n_first, start], here, target, pred=wanted)
    elif GATED:
        copy_tile(W, [expert * w_rows + 2 * n_first, start], here, target, pred=wanted)
    else:
        copy_tile(W, [expert * w_rows + n_first, start], here, target, pred=wanted)


@gluon.jit
def copy_tiles(
    A, W, BLOCK_EXPERT, BLOCK_FIRST, BLOCK_ROWS, a_ring, w_ring, full, free, blocks, tiles_n, K, w_rows,
    GATED: gl.constexpr, INTERLEAVED: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
    PARTS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """The copying warp: all steps of all tiles of this program, each into the next stage that is free."""
    ROWS: gl.constexpr = a_ring.shape[1]
    BLOCK_K: gl.constexpr = a_ring.shape[2]
    WIDE: gl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    step = 0
    first_tile = gl.program_id(0)
    n_first, expert, first, _ = tile_of(
        first_tile, blocks, tiles_n, BLOCK_EXPERT, BLOCK_FIRST, BLOCK_ROWS, BLOCK_N, GROUP_M
    )
    BYTES: gl.constexpr = (PARTS * ROWS + WIDE) * BLOCK_K
    ahead = 0
    if EARLY:  # weights of the first stages while the kernel before still works on what they will be multiplied by
        if first_tile < blocks * tiles_n:
            ahead = gl.minimum(gl.cdiv(K, BLOCK_K), STAGES)
        for stage in range(ahead):
            here = full.index(stage)
            mbarrier.expect(here, BYTES)
            copy_weights(
                W, expert, n_first, stage * BLOCK_K, w_rows, here, w_ring.index(stage), True, GATED, INTERLEAVED
            )
        gdc_wait()
    for tile in range(first_tile, blocks * tiles_n, gl.num_programs(0)):
        following = tile_of(
            tile + gl.num_programs(0), blocks, tiles_n, BLOCK_EXPERT, BLOCK_FIRST, BLOCK_ROWS, BLOCK_N, GROUP_M
        )
        for start in range(0, K, BLOCK_K):
            stage = step % STAGES
            mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
            here = full.index(stage)
            if EARLY:
                mbarrier.expect(here, BYTES, pred=step >= ahead)
            else:
                mbarrier.expect(here, BYTES)
            for part in gl.static_range(PARTS):
                copy_tile(A, [first + part * ROWS, start], here, a_ring.index(stage * PARTS + part))
            wanted = step >= ahead if EARLY else True
            copy_weights(W, expert, n_first, start, w_rows, here, w_ring.index(stage), wanted, GATED, INTERLEAVED)
            step += 1
        n_first, expert, first, _ = following


@gluon.jit
def multiply_tiles(
    tensors, a_ring, w_ring, full, free, turn, blocks, tiles_n, N, K, w_rows,
    GATED: gl.constexpr, INTERLEAVED: gl.constexpr, ACTIVATION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
    QUICK: gl.constexpr, Y_PLACES: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
    PARTS: gl.constexpr, WHO: gl.constexpr, PDL: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """One group of warps: the WHO-th half of the rows of every tile (PARTS 2), or every second tile (PARTS 1)."""
    if EARLY:
        hand_over(PDL)
    A_SCALE, W_SCALE, BIAS, Y, ROUTER_WEIGHT, ORDER, BLOCK_EXPERT, BLOCK_FIRST, BLOCK_ROWS = tensors
    ROWS: gl.constexpr = a_ring.shape[1]
    BLOCK_K: gl.constexpr = a_ring.shape[2]
    WIDE: gl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    TURNS: gl.constexpr = 2 // PARTS
    PART: gl.constexpr = WHO if PARTS == 2 else 0
    ACROSS: gl.constexpr = gl.num_warps() * 16 // ROWS if gl.num_warps() * 16 > ROWS else 1  # warps beside one another
    TWO: gl.constexpr = GATED and not INTERLEAVED and ACROSS > 1  # gate and up by themselves: a warp needs both
    SUM_COLUMNS: gl.constexpr = BLOCK_N if TWO else WIDE
    EACH: gl.constexpr = SUM_COLUMNS // ACROSS
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [gl.num_warps() // ACROSS, ACROSS], [16, EACH if EACH < INSTRUCTION else INSTRUCTION, 32]
    )
    # How neighbours in a row come to lie in one thread, for stores of 16 bytes.
    LANES: gl.constexpr = BLOCK_N // 8 if BLOCK_N < 256 else 32
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0])

    steps = gl.cdiv(K, BLOCK_K)
    apart = gl.num_programs(0) * TURNS
    first_tile = gl.program_id(0) + (WHO * gl.num_programs(0) if PARTS == 1 else 0)
    step = WHO * steps if PARTS == 1 else 0
    taken = 0
    n_first, expert, first, rows = tile_of(
        first_tile, blocks, tiles_n, BLOCK_EXPERT, BLOCK_FIRST, BLOCK_ROWS, BLOCK_N, GROUP_M
    )
    for tile in range(first_tile, blocks * tiles_n, apart):
        following = tile_of(tile + apart, blocks, tiles_n, BLOCK_EXPERT, BLOCK_FIRST, BLOCK_ROWS, BLOCK_N, GROUP_M)
        first += PART * ROWS
        rows -= PART * ROWS
        if rows > 0:
            acc = gl.zeros([ROWS, SUM_COLUMNS], gl.int32, SUMS)
            up = acc
            if PARTS == 1:  # stages are told from one another by parity only: not before the other group is through
                mbarrier.wait(turn.index(WHO), (taken & 1) ^ (1 - WHO))
                taken += 1
            for i in range(steps):
                stage = step % STAGES
                mbarrier.wait(full.index(stage), (step // STAGES) & 1)
                a = a_ring.index(stage * PARTS + PART)
                w = w_ring.index(stage)
                if GATED and not INTERLEAVED:
                    w = w.reshape([WIDE, BLOCK_K])
                if TWO:
                    gate_w, up_w = w.slice(0, BLOCK_N), w.slice(BLOCK_N, BLOCK_N)
                    acc = warpgroup_mma(a, gate_w.permute((1, 0)), acc, use_acc=i > 0, is_async=True)
                    up = warpgroup_mma(a, up_w.permute((1, 0)), up, use_acc=i > 0, is_async=True)
                    acc, up = warpgroup_mma_wait(2, deps=(acc, up))
                else:
                    acc = warpgroup_mma(a, w.permute((1, 0)), acc, use_acc=i > 0, is_async=True)
                    acc = warpgroup_mma_wait(1, deps=(acc,))
                # The step before is done: its stage can be filled again.
                mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1, pred=i > 0)
                step += 1
            if PARTS == 1:
                mbarrier.arrive(turn.index(1 - WHO), count=1)
            if TWO:
                acc, up = warpgroup_mma_wait(0, deps=(acc, up))
            else:
                acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1)

            if GATED and not TWO:
                gate, up = split_columns(acc, INTERLEAVED)
            else:
                gate = acc
            if not GATED:
                up = None
            HELD: gl.constexpr = gate.type.layout
            m = gl.arange(0, ROWS, gl.SliceLayout(1, HELD))
            n = n_first + gl.arange(0, BLOCK_N, gl.SliceLayout(0, HELD))
            place = first + gl.where(m < rows, m, 0)
            gate_scale, up_scale, gate_bias, up_bias = weight_values(
                W_SCALE, BIAS, expert.to(gl.int64) * w_rows, n, N, GATED, INTERLEAVED
            )
            y = finished(
                gate, up, gl.load(A_SCALE + place), gate_scale, up_scale, gate_bias, up_bias, True, BIAS is not None,
                ACTIVATION, ALPHA, LIMIT, QUICK,
            )  # fmt: skip
            if ROUTER_WEIGHT is not None:
                y = y * gl.load(ROUTER_WEIGHT + gl.load(ORDER + place))[:, None]
            y = gl.convert_layout(round_to(y, Y.dtype.element_ty), STORED)
            m = gl.arange(0, ROWS, gl.SliceLayout(1, STORED))
            n = n_first + gl.arange(0, BLOCK_N, gl.SliceLayout(0, STORED))
            row = first + gl.where(m < rows, m, 0)
            if not Y_PLACES:
                row = gl.load(ORDER + row)
            pointers = Y + row.to(gl.int64)[:, None] * N + n[None, :]
            gl.store(pointers, y, mask=(m < rows)[:, None] & (n < N)[None, :])
        else:  # this half of the tile has no rows: only say that it is not needed
            for _ in range(steps):
                stage = step % STAGES
                mbarrier.wait(full.index(stage), (step // STAGES) & 1)
                mbarrier.arrive(free.index(stage), count=1)
                step += 1
        step += (TURNS - 1) * steps
        n_first, expert, first, rows = following


@gluon.jit(do_not_specialize=PER_CALL)
def specialized_gemm_kernel(
    A, A_SCALE, W, W_SCALE, BIAS, Y, ROUTER_WEIGHT, ORDER, BLOCK_EXPERT, BLOCK_FIRST, BLOCK_ROWS, TOTALS, N, K, w_rows,
    GATED: gl.constexpr, INTERLEAVED: gl.constexpr, ACTIVATION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
    QUICK: gl.constexpr, Y_PLACES: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
    PARTS: gl.constexpr, PDL: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Persistent; arguments as in `kernels.grouped_gemm_kernel`, with A and W as tensor descriptors and A_PLACES.

    PARTS: 2, each group has half the rows of a tile (blocks of A are half a tile high); 1: a tile in turns.
    """
    # Sums of lists, since Triton knows no starred element.
    a_ring = gl.allocate_shared_memory(gl.int8, [STAGES * PARTS] + A.block_type.shape, A.layout)  # noqa: RUF005
    w_ring = gl.allocate_shared_memory(gl.int8, [STAGES] + W.block_type.shape, W.layout)  # noqa: RUF005
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for who in gl.static_range(2):
        mbarrier.init(turn.index(who), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=PARTS)
    if not EARLY:
        hand_over(PDL)
    blocks = table_entry(TOTALS, EARLY)
    tiles_n = gl.cdiv(N, BLOCK_N)
    tensors = (A_SCALE, W_SCALE, BIAS, Y, ROUTER_WEIGHT, ORDER, BLOCK_EXPERT, BLOCK_FIRST, BLOCK_ROWS)
    gl.warp_specialize(
        [
            (multiply_tiles, (
                tensors, a_ring, w_ring, full, free, turn, blocks, tiles_n, N, K, w_rows, GATED, INTERLEAVED,
                ACTIVATION, ALPHA, LIMIT, QUICK, Y_PLACES, BLOCK_N, GROUP_M, STAGES, PARTS, 0, PDL, EARLY,
            )),
            (multiply_tiles, (
                tensors, a_ring, w_ring, full, free, turn, blocks, tiles_n, N, K, w_rows, GATED, INTERLEAVED,
                ACTIVATION, ALPHA, LIMIT, QUICK, Y_PLACES, BLOCK_N, GROUP_M, STAGES, PARTS, 1, PDL, EARLY,
            )),
            (copy_tiles, (
                A, W, BLOCK_EXPERT, BLOCK_FIRST, BLOCK_ROWS, a_ring, w_ring, full, free, blocks, tiles_n, K, w_rows,
                GATED, INTERLEAVED, BLOCK_N, GROUP_M, STAGES, PARTS, EARLY,
            )),
        ],
        [gl.num_warps(), 1],
        [232, 40] if gl.num_warps() == 4 else [112, 24],  # registers of a thread; the first group has what is left
    )  # fmt: skip
