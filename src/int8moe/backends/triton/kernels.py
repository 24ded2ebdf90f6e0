"""Device code of the Triton backend: alignment, row quantisation, grouped GEMM, combine.

Imports no torch, so that every kernel can be compiled ahead of time on a machine without a GPU. docs/numerics.md fixes
each float step; launch all of it with `enable_fp_fusion=False`. What keeps the bits equal here: `div_rn` for every
division, NaN handled by comparisons or on the bits (`tl.max` and `tl.minimum` may drop NaN), bfloat16 converted by
integer arithmetic (Triton's interpreter truncates).

Words used: a *slot* is one (token, k) pair, numbered token * topk + k. A *block* is up to BLOCK_M slots of one expert.
"""

import triton
import triton.language as tl

from int8moe import numerics as c

PER_CALL = ("slots", "chunks", "max_tokens")
"""Arguments that follow the number of tokens: specialising on them would compile again and again while serving."""

INVALID: tl.constexpr = tl.constexpr(-2)  # local expert of an id that names no expert
ABSENT: tl.constexpr = tl.constexpr(-1)  # local expert of an id whose expert lives elsewhere
LAST: tl.constexpr = tl.constexpr(2147483647)  # sort key of slots that have no local expert

INFINITY_BITS: tl.constexpr = tl.constexpr(0x7F800000)
ABS_MASK: tl.constexpr = tl.constexpr(0x7FFFFFFF)

MAGIC: tl.constexpr = tl.constexpr(c.RINT_MAGIC)
MAGIC_BITS: tl.constexpr = tl.constexpr(0x4B400000)  # bits of RINT_MAGIC: its lowest 22 bits count units
INT8_MAX: tl.constexpr = tl.constexpr(c.INT8_MAX)
AMAX_FLOOR: tl.constexpr = tl.constexpr(c.AMAX_FLOOR)
EXP_LOW: tl.constexpr = tl.constexpr(c.EXP_LOW)
EXP_HIGH: tl.constexpr = tl.constexpr(c.EXP_HIGH)
LOG2E: tl.constexpr = tl.constexpr(c.LOG2E)
LN2_HIGH: tl.constexpr = tl.constexpr(c.LN2_HIGH)
LN2_LOW: tl.constexpr = tl.constexpr(c.LN2_LOW)
EXP_0: tl.constexpr = tl.constexpr(c.EXP_POLYNOMIAL[0])
EXP_1: tl.constexpr = tl.constexpr(c.EXP_POLYNOMIAL[1])
EXP_2: tl.constexpr = tl.constexpr(c.EXP_POLYNOMIAL[2])
EXP_3: tl.constexpr = tl.constexpr(c.EXP_POLYNOMIAL[3])
EXP_4: tl.constexpr = tl.constexpr(c.EXP_POLYNOMIAL[4])
EXP_5: tl.constexpr = tl.constexpr(c.EXP_POLYNOMIAL[5])
GELU_TANH_SCALE: tl.constexpr = tl.constexpr(c.GELU_TANH_SCALE)
GELU_TANH_CUBIC: tl.constexpr = tl.constexpr(c.GELU_TANH_CUBIC)
SQRT_HALF: tl.constexpr = tl.constexpr(c.SQRT_HALF)
ERF_P: tl.constexpr = tl.constexpr(c.ERF_P)
ERF_0: tl.constexpr = tl.constexpr(c.ERF_POLYNOMIAL[0])
ERF_1: tl.constexpr = tl.constexpr(c.ERF_POLYNOMIAL[1])
ERF_2: tl.constexpr = tl.constexpr(c.ERF_POLYNOMIAL[2])
ERF_3: tl.constexpr = tl.constexpr(c.ERF_POLYNOMIAL[3])
ERF_4: tl.constexpr = tl.constexpr(c.ERF_POLYNOMIAL[4])


# --- float steps ---------------------------------------------------------------------------------------------------


@triton.jit
def to_float32(x):
    """Exact; bfloat16 by its bits, which needs no bfloat16 instruction and is right in the interpreter too."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """float32 `x` rounded to nearest even; NaN stays NaN."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x != x, 0x7FC0, rounded)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def absolute_bits(x):
    """|x| of float32 as int32: ordered like the values, infinity and NaN above all numbers."""
    return x.to(tl.int32, bitcast=True) & ABS_MASK


@triton.jit
def exp(x):
    """The contract's exponential (numerics, step 4); NaN stays NaN."""
    x = tl.where(x < EXP_LOW, EXP_LOW, x)
    x = tl.where(x > EXP_HIGH, EXP_HIGH, x)
    shifted = x * LOG2E + MAGIC
    n = shifted - MAGIC
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    p = r * EXP_0 + EXP_1
    p = p * r + EXP_2
    p = p * r + EXP_3
    p = p * r + EXP_4
    p = p * r + EXP_5
    y = (p * (r * r) + r) + 1.0
    exponent = shifted.to(tl.int32, bitcast=True) - MAGIC_BITS  # n, without converting a NaN to an integer
    return y * ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def sigmoid_mul(g, z):
    """g * sigmoid(z)."""
    return tl.math.div_rn(g, exp(-z) + 1.0)


@triton.jit
def tanh(z):
    return 1.0 - tl.math.div_rn(tl.full(z.shape, 2.0, tl.float32), exp(z * 2.0) + 1.0)


@triton.jit
def erf(x):
    """Abramowitz & Stegun 7.1.26."""
    a = tl.abs(x)
    t = tl.math.div_rn(tl.full(x.shape, 1.0, tl.float32), a * ERF_P + 1.0)
    p = t * ERF_0 + ERF_1
    p = p * t + ERF_2
    p = p * t + ERF_3
    p = p * t + ERF_4
    y = 1.0 - (p * t) * exp(-(a * a))
    return tl.where(x < 0.0, -y, y)


@triton.jit
def activate(g, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr):
    """The activation of the gate alone (numerics, step 4)."""
    if ACTIVATION == "silu":
        return sigmoid_mul(g, g)
    elif ACTIVATION == "gelu":
        return (g * 0.5) * (erf(g * SQRT_HALF) + 1.0)
    elif ACTIVATION == "gelu_tanh":
        inner = (g + ((g * g) * g) * GELU_TANH_CUBIC) * GELU_TANH_SCALE
        return (g * 0.5) * (tanh(inner) + 1.0)
    elif ACTIVATION == "relu2":
        positive = tl.where(g < 0.0, 0.0, g)
        return positive * positive
    else:
        tl.static_assert(ACTIVATION == "swigluoai")
        return sigmoid_mul(g, g * ALPHA)


# --- alignment: slots sorted by local expert, stable, with a table of blocks ------------------------------------------


@triton.jit
def resolve(ids, mask, EXPERT_MAP, num_experts, num_local):
    """Local experts of global `ids`: ABSENT where the map says elsewhere, INVALID where an id names no expert.
    Nothing is read through an invalid id."""
    known = (ids >= 0) & (ids < num_experts)
    local = tl.where(known, ids, 0).to(tl.int32)
    if EXPERT_MAP is not None:
        local = tl.load(EXPERT_MAP + local, mask=mask & known, other=INVALID).to(tl.int32)
        known = known & (local >= ABSENT) & (local < num_local)
    return tl.where(known, local, INVALID)


@triton.jit
def sort_keys(IDS, index, slots, EXPERT_MAP, num_experts, num_local):
    """Local experts of the slots `index`, and the keys to sort them by (LAST where there is none)."""
    mask = index < slots
    ids = tl.load(IDS + index, mask=mask, other=-1)
    local = resolve(ids, mask, EXPERT_MAP, num_experts, num_local)
    return local, tl.where(mask & (local >= 0), local, LAST)


@triton.jit(do_not_specialize=PER_CALL)
def resolve_kernel(IDS, LOCAL, EXPERT_MAP, slots, num_experts, num_local, SIZE: tl.constexpr):
    """LOCAL [slots]: local expert of each slot."""
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    local, _ = sort_keys(IDS, index, slots, EXPERT_MAP, num_experts, num_local)
    tl.store(LOCAL + index, local, mask=index < slots)


@triton.jit
def write_block(BLOCK_EXPERT, BLOCK_FIRST, BLOCK_ROWS, block, expert, first, rows, mask):
    """One row of the block table: its expert, its first place in the sorted order, how many slots it holds."""
    tl.store(BLOCK_EXPERT + block, expert, mask=mask)
    tl.store(BLOCK_FIRST + block, first, mask=mask)
    tl.store(BLOCK_ROWS + block, rows, mask=mask)


@triton.jit(do_not_specialize=PER_CALL)
def align_few_kernel(
    IDS, EXPERT_MAP, LOCAL, SORTED, BLOCK_EXPERT, BLOCK_FIRST, BLOCK_ROWS, NUM_BLOCKS, slots, num_experts, num_local,
    BLOCK_M: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The whole alignment of up to SIZE slots in one program, by comparing every slot with every other; its cost does
    not depend on the number of experts."""
    i = tl.arange(0, SIZE)
    local, key = sort_keys(IDS, i, slots, EXPERT_MAP, num_experts, num_local)
    tl.store(LOCAL + i, local, mask=i < slots)
    place = tl.zeros([SIZE], tl.int32)  # slots before this one in the sorted order
    rank = tl.zeros([SIZE], tl.int32)  # slots before this one with the same expert
    count = tl.zeros([SIZE], tl.int32)  # slots with the same expert
    block = tl.zeros([SIZE], tl.int32)  # blocks of the experts before this one's
    for start in range(0, SIZE, TILE):
        j = start + tl.arange(0, TILE)
        _, other = sort_keys(IDS, j, slots, EXPERT_MAP, num_experts, num_local)
        same = key[:, None] == other[None, :]
        less = other[None, :] < key[:, None]
        earlier = same & (j[None, :] < i[:, None])
        rank_of_j = tl.sum((same & (i[:, None] < j[None, :])).to(tl.int32), 0)
        opens = (other < LAST) & (rank_of_j % BLOCK_M == 0)  # j is the first slot of a block
        place += tl.sum((less | earlier).to(tl.int32), 1)
        rank += tl.sum(earlier.to(tl.int32), 1)
        count += tl.sum(same.to(tl.int32), 1)
        block += tl.sum((less & opens[None, :]).to(tl.int32), 1)
    held = key < LAST
    tl.store(SORTED + place, i, mask=held)
    opens_here = held & (rank % BLOCK_M == 0)
    rows = tl.minimum(count - rank, BLOCK_M)
    write_block(BLOCK_EXPERT, BLOCK_FIRST, BLOCK_ROWS, block + rank // BLOCK_M, key, place, rows, opens_here)
    tl.store(NUM_BLOCKS, tl.sum(opens_here.to(tl.int32), 0))


@triton.jit(do_not_specialize=PER_CALL)
def count_chunks_kernel(
    IDS, EXPERT_MAP, LOCAL, RANK, COUNTS, slots, num_experts, num_local, SIZE: tl.constexpr, TILE: tl.constexpr
):
    """First of four: per chunk of SIZE slots, each slot's rank among its expert's slots of the chunk, and
    COUNTS [chunks, num_local] (zeroed before)."""
    chunk = tl.program_id(0)
    i = chunk * SIZE + tl.arange(0, SIZE)
    local, key = sort_keys(IDS, i, slots, EXPERT_MAP, num_experts, num_local)
    rank = tl.zeros([SIZE], tl.int32)
    count = tl.zeros([SIZE], tl.int32)
    for start in range(0, SIZE, TILE):
        j = chunk * SIZE + start + tl.arange(0, TILE)
        _, other = sort_keys(IDS, j, slots, EXPERT_MAP, num_experts, num_local)
        same = key[:, None] == other[None, :]
        rank += tl.sum((same & (j[None, :] < i[:, None])).to(tl.int32), 1)
        count += tl.sum(same.to(tl.int32), 1)
    tl.store(LOCAL + i, local, mask=i < slots)
    tl.store(RANK + i, rank, mask=i < slots)
    last = (key < LAST) & (rank + 1 == count)
    tl.store(COUNTS + chunk.to(tl.int64) * num_local + key, count, mask=last)


@triton.jit(do_not_specialize=PER_CALL)
def prefix_chunks_kernel(COUNTS, TOTAL, chunks, num_local, TILE: tl.constexpr, EXPERTS: tl.constexpr):
    """Second: COUNTS becomes, per expert, the slots of the chunks before; TOTAL [num_local] its slots in all."""
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    before = tl.zeros([EXPERTS], tl.int32)
    for start in range(0, chunks, TILE):
        chunk = start + tl.arange(0, TILE)
        mask = (chunk < chunks)[:, None] & (expert < num_local)[None, :]
        pointers = COUNTS + chunk.to(tl.int64)[:, None] * num_local + expert[None, :]
        count = tl.load(pointers, mask=mask, other=0)
        tl.store(pointers, before[None, :] + tl.cumsum(count, 0) - count, mask=mask)
        before += tl.sum(count, 0)
    tl.store(TOTAL + expert, before, mask=expert < num_local)


@triton.jit
def prefix_experts_kernel(TOTAL, START, BLOCK_START, NUM_BLOCKS, num_local, BLOCK_M: tl.constexpr, TILE: tl.constexpr):
    """Third: per expert, the slots and the blocks of the experts before it. One program."""
    slots = tl.zeros([1], tl.int32)
    blocks = tl.zeros([1], tl.int32)
    for start in range(0, num_local, TILE):
        expert = start + tl.arange(0, TILE)
        mask = expert < num_local
        total = tl.load(TOTAL + expert, mask=mask, other=0)
        own = (total + BLOCK_M - 1) // BLOCK_M
        tl.store(START + expert, slots + tl.cumsum(total, 0) - total, mask=mask)
        tl.store(BLOCK_START + expert, blocks + tl.cumsum(own, 0) - own, mask=mask)
        slots += tl.sum(total, 0)
        blocks += tl.sum(own, 0)
    tl.store(NUM_BLOCKS + tl.arange(0, 1), blocks)


@triton.jit(do_not_specialize=PER_CALL)
def scatter_kernel(
    LOCAL, RANK, COUNTS, TOTAL, START, BLOCK_START, SORTED, BLOCK_EXPERT, BLOCK_FIRST, BLOCK_ROWS, slots, num_local,
    BLOCK_M: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Fourth: SORTED [slots], and the block table, which the first slot of each block writes."""
    chunk = tl.program_id(0)
    i = chunk * SIZE + tl.arange(0, SIZE)
    expert = tl.load(LOCAL + i, mask=i < slots, other=-1)
    held = expert >= 0
    rank = tl.load(RANK + i, mask=held, other=0)
    rank += tl.load(COUNTS + chunk.to(tl.int64) * num_local + expert, mask=held, other=0)
    place = tl.load(START + expert, mask=held, other=0) + rank
    tl.store(SORTED + place, i, mask=held)
    opens = held & (rank % BLOCK_M == 0)
    block = tl.load(BLOCK_START + expert, mask=opens, other=0) + rank // BLOCK_M
    rows = tl.minimum(tl.load(TOTAL + expert, mask=opens, other=0) - rank, BLOCK_M)
    write_block(BLOCK_EXPERT, BLOCK_FIRST, BLOCK_ROWS, block, expert, place, rows, opens)


@triton.jit(do_not_specialize=PER_CALL)
def batched_blocks_kernel(
    TOTAL, BLOCK_START, BLOCK_EXPERT, BLOCK_FIRST, BLOCK_ROWS, max_tokens, BLOCK_M: tl.constexpr, TILE: tl.constexpr
):
    """The block table of a batch [num_local, max_tokens, ...] whose expert e holds TOTAL[e] rows; a program each."""
    expert = tl.program_id(0)
    total = tl.load(TOTAL + expert)
    block_start = tl.load(BLOCK_START + expert)
    blocks = (total + BLOCK_M - 1) // BLOCK_M
    for start in range(0, blocks, TILE):
        j = start + tl.arange(0, TILE)
        rows = tl.minimum(total - j * BLOCK_M, BLOCK_M)
        first = expert * max_tokens + j * BLOCK_M
        e = tl.zeros([TILE], tl.int32) + expert
        write_block(BLOCK_EXPERT, BLOCK_FIRST, BLOCK_ROWS, block_start + j, e, first, rows, j < blocks)


# --- quantisation --------------------------------------------------------------------------------------------------


@triton.jit
def row_amax(X, row, stride, width, BLOCK: tl.constexpr):
    """Bits of max|x| over a row (numerics, step 2); at least INFINITY_BITS when it holds infinity or NaN."""
    amax = tl.zeros([BLOCK], tl.int32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(X + row * stride + column, mask=column < width, other=0.0)
        amax = tl.maximum(amax, absolute_bits(to_float32(x)))
    return tl.max(amax, 0)


@triton.jit
def row_amax_kernel(X, HELD, AMAX, stride, width, BLOCK: tl.constexpr):
    """AMAX [rows] as bits; 0 for rows with HELD < 0, which are not read. For one scale per tensor."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(HELD + row) < 0:
        tl.store(AMAX + row, 0)
    else:
        tl.store(AMAX + row, row_amax(X, row, stride, width, BLOCK))


@triton.jit
def quantize_rows_kernel(X, Q, SCALE, HELD, AMAX, stride, width, BLOCK: tl.constexpr):
    """Step 2: Q int8 [rows, width] and SCALE float32 [rows] of X [rows, width].

    HELD [rows], if given: rows with HELD < 0 are neither read nor written. AMAX [1], if given: the bits of one amax.
    """
    row = tl.program_id(0).to(tl.int64)
    if HELD is not None:  # noqa: SIM102 (decided when compiling)
        if tl.load(HELD + row) < 0:
            return
    if AMAX is not None:
        bits = tl.load(AMAX)
    else:
        bits = row_amax(X, row, stride, width, BLOCK)
    finite = bits < INFINITY_BITS
    a = tl.where(finite, bits, 0).to(tl.float32, bitcast=True)
    a = tl.where(a < AMAX_FLOOR, AMAX_FLOOR, a)
    inverse = tl.math.div_rn(INT8_MAX, a)
    tl.store(SCALE + row, tl.where(finite, tl.math.div_rn(a, INT8_MAX), float("nan")))
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = to_float32(tl.load(X + row * stride + column, mask=column < width, other=0.0))
        q = (x * inverse + MAGIC) - MAGIC
        q = tl.where(q > INT8_MAX, INT8_MAX, tl.where(q < -INT8_MAX, -INT8_MAX, q))
        q = tl.where(finite, q, 0.0)
        tl.store(Q + row * width + column, q.to(tl.int8), mask=column < width)


# --- grouped GEMM --------------------------------------------------------------------------------------------------


@triton.jit
def load_tile(pointers, columns_left, EVEN_K: tl.constexpr, axis: tl.constexpr, BLOCK_K: tl.constexpr):
    """BLOCK_K columns of K, zeros past its end."""
    if EVEN_K:
        return tl.load(pointers)
    else:
        inside = tl.expand_dims(tl.arange(0, BLOCK_K) < columns_left, axis)
        return tl.load(pointers, mask=inside, other=0)


@triton.jit
def dot(a, w, acc, IN_FLOAT32: tl.constexpr):
    """acc + a @ w: int8 by int8 in int32, or floats by int8 in float32 (W8A16).

    IN_FLOAT32 multiplies in float32 where there is no such instruction: int8 before compute capability 8.0, bfloat16 in
    the interpreter. For int8 it is exact: |a @ w| <= 2**14 * BLOCK_K <= 2**24 over one step, which joins an int32 sum.
    """
    if IN_FLOAT32:
        tl.static_assert(a.shape[1] <= 1024)
        return acc + tl.dot(to_float32(a), to_float32(w), input_precision="ieee").to(acc.dtype)
    elif a.dtype == tl.int8:
        return tl.dot(a, w, acc, out_dtype=tl.int32)
    else:
        return tl.dot(a, w.to(a.dtype), acc, input_precision="ieee")


@triton.jit
def dequantize(acc, a_scale, W_SCALE, BIAS, rows, mask):
    """Step 3: (float(acc) * x_scale) * w_scale, then + bias; without x_scale for W8A16."""
    y = acc.to(tl.float32)
    if a_scale is not None:
        y = y * a_scale[:, None]
    y = y * tl.load(W_SCALE + rows, mask=mask, other=0.0)[None, :]
    if BIAS is not None:
        y = y + tl.load(BIAS + rows, mask=mask, other=0.0)[None, :]
    return y


@triton.jit
def grouped_gemm_kernel(
    A, A_SCALE, W, W_SCALE, BIAS, Y, ROUTER_WEIGHT, SORTED, BLOCK_EXPERT, BLOCK_FIRST, BLOCK_ROWS, NUM_BLOCKS,
    N, K, w_rows, stride_a, slots_per_row,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    EVEN_K: tl.constexpr, IN_FLOAT32: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """One tile of Y [slots, N]: GEMM 1 with the activation fused, or GEMM 2 with the router weight.

    Slot s reads row s // slots_per_row of A [rows, K]. W is [experts, w_rows, K], W_SCALE and BIAS [experts, w_rows].
    GATED: two accumulators, gate and up, share the tile of A; their W rows are n and N + n (INTERLEAVED: 2n, 2n + 1).
    SORTED None: places are slots (batched format). ROUTER_WEIGHT [slots] or None. Without A_SCALE this is W8A16.
    """
    blocks = tl.load(NUM_BLOCKS)
    tiles_n = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    if pid >= blocks * tiles_n:
        return
    # GROUP_M blocks share each tile of W while it is in L2.
    per_group = GROUP_M * tiles_n
    group_first = (pid // per_group) * GROUP_M
    group_size = tl.minimum(blocks - group_first, GROUP_M)
    block = group_first + (pid % per_group) % group_size
    tile_n = (pid % per_group) // group_size

    expert = tl.load(BLOCK_EXPERT + block).to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    real = m < tl.load(BLOCK_ROWS + block)
    # Rows past the block's end repeat its first slot: always written memory, never stored.
    slot = tl.load(BLOCK_FIRST + block) + tl.where(real, m, 0)
    if SORTED is not None:
        slot = tl.load(SORTED + slot)
    a_row = (slot // slots_per_row).to(tl.int64)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    n_inside = n < N
    gate_row = tl.where(n_inside, n, 0)
    if INTERLEAVED:
        gate_row = gate_row * 2
        up_row = gate_row + 1
    else:
        up_row = gate_row + N

    k = tl.arange(0, BLOCK_K)
    a_pointers = A + a_row[:, None] * stride_a + k[None, :]
    w_expert = W + expert * w_rows * K
    gate_pointers = w_expert + gate_row.to(tl.int64)[None, :] * K + k[:, None]
    if A.dtype.element_ty == tl.int8:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if GATED:
        up_acc = acc
        up_pointers = w_expert + up_row.to(tl.int64)[None, :] * K + k[:, None]
    for start in range(0, K, BLOCK_K):
        a = load_tile(a_pointers, K - start, EVEN_K, 0, BLOCK_K)
        acc = dot(a, load_tile(gate_pointers, K - start, EVEN_K, 1, BLOCK_K), acc, IN_FLOAT32)
        if GATED:
            up_acc = dot(a, load_tile(up_pointers, K - start, EVEN_K, 1, BLOCK_K), up_acc, IN_FLOAT32)
            up_pointers += BLOCK_K
        a_pointers += BLOCK_K
        gate_pointers += BLOCK_K

    a_scale = None
    if A_SCALE is not None:
        a_scale = tl.load(A_SCALE + a_row)
    scale_row = expert * w_rows
    y = dequantize(acc, a_scale, W_SCALE, BIAS, scale_row + gate_row, n_inside)
    if ACTIVATION is not None:
        if LIMIT is not None:
            y = tl.where(y > LIMIT, LIMIT, y)
        h = activate(y, ACTIVATION, ALPHA)
        if GATED:
            u = dequantize(up_acc, a_scale, W_SCALE, BIAS, scale_row + up_row, n_inside)
            if LIMIT is not None:
                u = tl.where(u > LIMIT, LIMIT, tl.where(u < -LIMIT, -LIMIT, u))
            if ACTIVATION == "swigluoai":
                u = u + 1.0
            h = h * u
        y = h
    if ROUTER_WEIGHT is not None:
        y = y * tl.load(ROUTER_WEIGHT + slot)[:, None]
    pointers = Y + slot.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(pointers, round_to(y, Y.dtype.element_ty), mask=real[:, None] & n_inside[None, :])


# --- combine -------------------------------------------------------------------------------------------------------


@triton.jit
def combine_kernel(Y, OUT, LOCAL, BATCH_ROW, ROUTER_WEIGHT, topk, width, BLOCK: tl.constexpr):
    """Step 7: OUT [tokens, width] sums the slots of each token in slot order; a token with an INVALID id becomes NaN.

    Y [slots, width] is rounded already. With BATCH_ROW [slots], slot s is row BATCH_ROW[s] of Y float32 instead, and
    the router weight and the rounding of step 6 happen here.
    """
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    invalid = tl.zeros([BLOCK], tl.int32)
    for k in range(topk):
        slot = token * topk + k
        local = tl.load(LOCAL + slot)
        held = local >= 0
        row = slot
        if BATCH_ROW is not None:
            row = tl.load(BATCH_ROW + slot)
        columns_held = tl.where(held, width, 0)
        y = to_float32(tl.load(Y + row.to(tl.int64) * width + column, mask=column < columns_held, other=0.0))
        if BATCH_ROW is not None:
            if ROUTER_WEIGHT is not None:
                y = y * tl.load(ROUTER_WEIGHT + slot)
            y = to_float32(round_to(y, OUT.dtype.element_ty))
        total = tl.where(held, total + y, total)
        invalid = tl.where(local == INVALID, 1, invalid)
    total = tl.where(invalid > 0, float("nan"), total)
    out = round_to(total, OUT.dtype.element_ty)
    tl.store(OUT + token.to(tl.int64) * width + column, out, mask=column < width)
