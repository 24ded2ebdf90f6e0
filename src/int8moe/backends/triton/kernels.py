"""Device code of the Triton backend: alignment, row quantisation, grouped GEMM, combine.

Imports no torch, so that every kernel can be compiled ahead of time on a machine without a GPU. docs/numerics.md fixes
each float step; launch all of it with `enable_fp_fusion=False`. What keeps the bits equal here: `div_rn` for every
division, NaN handled by comparisons or on the bits (`tl.max` and `tl.minimum` may drop NaN), bfloat16 converted by
integer arithmetic in Triton's interpreter (which truncates).

Words used: a *slot* is one (token, k) pair, numbered token * topk + k. A *block* is up to BLOCK_M slots of one expert.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from int8moe import numerics as c

PER_CALL = ("slots", "chunks", "max_tokens", "slots_per_row", "rows")
"""Arguments that follow the number of tokens: specialising on them would compile again and again while serving."""

BY_BITS: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))  # it would truncate to bfloat16

INVALID: tl.constexpr = tl.constexpr(-2)  # local expert of an id that names no expert
ABSENT: tl.constexpr = tl.constexpr(-1)  # local expert of an id whose expert lives elsewhere
LAST: tl.constexpr = tl.constexpr(2147483647)  # sort key of slots that have no local expert

INFINITY_BITS: tl.constexpr = tl.constexpr(0x7F800000)
ABS_MASK: tl.constexpr = tl.constexpr(0x7FFFFFFF)

MAGIC: tl.constexpr = tl.constexpr(c.RINT_MAGIC)
EXPONENT_OF_ONE: tl.constexpr = tl.constexpr(127 << 23)
MINUS_A_QUARTER: tl.constexpr = tl.constexpr((125 << 23) - (1 << 31))  # its bits
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
    if dtype == tl.bfloat16 and BY_BITS:
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
def exp_fraction(r):
    """The contract's exponential of r, of at most half a ln 2 in size."""
    p = r * EXP_0 + EXP_1
    p = p * r + EXP_2
    p = p * r + EXP_3
    p = p * r + EXP_4
    p = p * r + EXP_5
    return (p * (r * r) + r) + 1.0


@triton.jit
def exp(x):
    """The contract's exponential (numerics, step 4); NaN stays NaN."""
    x = tl.maximum(x, EXP_LOW, propagate_nan=tl.PropagateNan.ALL)
    x = tl.minimum(x, EXP_HIGH, propagate_nan=tl.PropagateNan.ALL)
    shifted = x * LOG2E + MAGIC
    n = shifted - MAGIC
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    y = exp_fraction(r)
    # 2**n from the bits of n + MAGIC, whose lowest 22 count n: what MAGIC itself adds is shifted out.
    power = (shifted.to(tl.int32, bitcast=True) << 23) + EXPONENT_OF_ONE
    return y * power.to(tl.float32, bitcast=True)


@triton.jit
def full_like(like, value):
    """`value` in every element, and laid out as `like`: Gluon knows no other way to the layout of an argument."""
    return tl.where(like == like, value, value)


@triton.jit
def multiply_add(a, b, c):
    """a * b + c, rounded once: only where a * b is exact, so that the contract's two roundings are the same."""
    return tl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [a, b, c], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def quick_sigmoid_mul(g, z):
    """g / (1 + exp(-z)), rounded where the contract rounds, for z = g or a few times g.

    `div_rn` branches for operands whose exponents are extreme, and a branch for each value keeps a warp from working on
    several at once. Here a first approximation is refined in the same steps (P. Markstein, IA-64 and elementary
    functions, 2000, ch. 8), which round rightly unless something on the way leaves the normal range. Nothing does:
    with both operands divided by 4 the reciprocal stays normal, and where the divisor is large, so is g. What is left:
    |g| below 2**-60, for which the divisor is 2, and infinite g, whose quotient is itself and also half of it.

    The rest is `exp` and one more, with products that are exact left to multiply-adds: this is most of what the warps
    do between two tiles. exp(-80) is already too little to change 1, and 2**n times a quarter a normal number there.
    """
    z = tl.maximum(z, -EXP_HIGH, propagate_nan=tl.PropagateNan.ALL)
    z = tl.minimum(z, 80.0, propagate_nan=tl.PropagateNan.ALL)
    shifted = z * -LOG2E + MAGIC
    n = shifted - MAGIC
    y = exp_fraction(multiply_add(n, full_like(n, -LN2_HIGH), -z) - n * LN2_LOW)
    power = (shifted.to(tl.int32, bitcast=True) << 23) + MINUS_A_QUARTER
    b = multiply_add(y, power.to(tl.float32, bitcast=True), full_like(y, -0.25))
    q = tl.inline_asm_elementwise(
        """{
        .reg .f32 a, r, e, q;
        mul.rn.f32 a, $1, 0f3E800000;
        rcp.approx.ftz.f32 r, $2;
        neg.f32 r, r;
        fma.rn.f32 e, $2, r, 0f3F800000;
        fma.rn.f32 r, e, r, r;
        mul.rn.f32 q, a, r;
        fma.rn.f32 e, $2, q, a;
        fma.rn.f32 q, e, r, q;
        fma.rn.f32 e, $2, q, a;
        fma.rn.f32 $0, e, r, q;
        }""",
        "=f,f,f", [g, b], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip
    # From 2**-60 up to infinity, as unsigned integers without the sign.
    size = (g.to(tl.uint32, bitcast=True) << 1) - (67 << 24)
    return tl.where(size < ((255 - 67) << 24), q, g * 0.5)


@triton.jit
def sigmoid_mul(g, z, QUICK: tl.constexpr):
    """g * sigmoid(z)."""
    if QUICK:
        return quick_sigmoid_mul(g, z)
    else:
        return tl.math.div_rn(g, exp(-z) + 1.0)


@triton.jit
def tanh(z):
    return 1.0 - tl.math.div_rn(full_like(z, 2.0), exp(z * 2.0) + 1.0)


@triton.jit
def erf(x):
    """Abramowitz & Stegun 7.1.26."""
    a = tl.abs(x)
    t = tl.math.div_rn(full_like(x, 1.0), a * ERF_P + 1.0)
    p = t * ERF_0 + ERF_1
    p = p * t + ERF_2
    p = p * t + ERF_3
    p = p * t + ERF_4
    y = 1.0 - (p * t) * exp(-(a * a))
    return tl.where(x < 0.0, -y, y)


@triton.jit
def activate(g, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, QUICK: tl.constexpr):
    """The activation of the gate alone (numerics, step 4)."""
    if ACTIVATION == "silu":
        return sigmoid_mul(g, g, QUICK)
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
        return sigmoid_mul(g, g * ALPHA, QUICK)


# --- launches that overlap -------------------------------------------------------------------------------------------


@triton.jit
def hand_over(PDL: tl.constexpr):
    """Programmatic dependent launch: wait for the kernel before, and let the one after come as soon as there is room.

    Every program of every kernel of a chain passes here before it touches what others wrote or may still read.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


# --- int8 weights as floats ----------------------------------------------------------------------------------------


@triton.jit
def converted(w, dtype: tl.constexpr, CONVERT: tl.constexpr):
    """int8 `w` in a 16-bit dtype, exact; with CONVERT, divided by that.

    CONVERT (0; 64 for bfloat16, 1 for float16): five instructions for four weights, of which three run at half rate,
    instead of eight and six. u = w + 128 is w with its top bit flipped. As the bits of a bfloat16, u is u * 2**-133
    (below 128 it has no exponent, from 128 on the least one, and both count alike), and one multiply-add makes
    (u - 128) / 64 of it. As the low bits of a float16 of 1024, it is 1024 + u.
    """
    if CONVERT == 0:
        return w.to(dtype)
    elif dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 u, a, b, s, o;
            xor.b32 u, $2, 0x80808080;
            prmt.b32 a, u, 0, 0x4140;
            prmt.b32 b, u, 0, 0x4342;
            mov.b32 s, 0x7F007F00;
            mov.b32 o, 0xC000C000;
            fma.rn.bf16x2 $0, a, s, o;
            fma.rn.bf16x2 $1, b, s, o;
            }""",
            "=r,=r,r", [w], dtype=tl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 u, a, b, o;
            xor.b32 u, $2, 0x80808080;
            prmt.b32 a, u, 0x64, 0x4140;
            prmt.b32 b, u, 0x64, 0x4342;
            mov.b32 o, 0x64806480;
            sub.rn.f16x2 $0, a, o;
            sub.rn.f16x2 $1, b, o;
            }""",
            "=r,=r,r", [w], dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip


@triton.jit
def widened(w, BY_HAND: tl.constexpr):
    """int8 `w` in float32. BY_HAND: in 9 instructions at full rate for four; a conversion runs at an eighth of it.
    The byte w + 128 in the lowest bits of 2**23 is that much more."""
    if BY_HAND:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 u, a, b, c, d, m;
            mov.b32 m, 0x4B000000;
            xor.b32 u, $4, 0x80808080;
            prmt.b32 a, u, m, 0x7440;
            prmt.b32 b, u, m, 0x7441;
            prmt.b32 c, u, m, 0x7442;
            prmt.b32 d, u, m, 0x7443;
            add.rn.f32 $0, a, 0fCB000080;
            add.rn.f32 $1, b, 0fCB000080;
            add.rn.f32 $2, c, 0fCB000080;
            add.rn.f32 $3, d, 0fCB000080;
            }""",
            "=f,=f,=f,=f,r", [w], dtype=tl.float32, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return w.to(tl.float32)


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


@triton.jit(do_not_specialize=PER_CALL)
def count_kernel(
    IDS, EXPERT_MAP, LOCAL, COUNTS, slots, num_experts, num_local, EXPERTS: tl.constexpr, SIZE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """LOCAL [slots], and COUNTS [chunks, EXPERTS]: slots of each expert in each chunk of SIZE slots; a program each."""
    hand_over(PDL)
    chunk = tl.program_id(0)
    index = chunk * SIZE + tl.arange(0, SIZE)
    local, key = sort_keys(IDS, index, slots, EXPERT_MAP, num_experts, num_local)
    tl.store(LOCAL + index, local, mask=index < slots)
    counts = tl.histogram(tl.where(key < LAST, key, 0), EXPERTS, key < LAST)
    tl.store(COUNTS + chunk * EXPERTS + tl.arange(0, EXPERTS), counts)


@triton.jit
def write_blocks(BLOCK_EXPERT, BLOCK_FIRST, BLOCK_ROWS, block, expert, first, count, BLOCK_M: tl.constexpr):
    """Rows of the block table, from `block` on, of an expert whose `count` slots stand at places from `first` on."""
    TILE: tl.constexpr = 16
    for start in range(0, tl.cdiv(count, BLOCK_M), TILE):
        j = start + tl.arange(0, TILE)
        mask = j * BLOCK_M < count
        tl.store(BLOCK_EXPERT + block + j, j * 0 + expert, mask=mask)
        tl.store(BLOCK_FIRST + block + j, first + j * BLOCK_M, mask=mask)
        tl.store(BLOCK_ROWS + block + j, tl.minimum(count - j * BLOCK_M, BLOCK_M), mask=mask)


@triton.jit
def expert_blocks(
    expert, counts, BLOCK_EXPERT, BLOCK_FIRST, BLOCK_ROWS, TOTALS, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr
):  # fmt: skip
    """One expert's rows of a block table, from the slots of every expert; the first expert's program writes TOTALS."""
    bins = tl.arange(0, EXPERTS)
    first = tl.sum(tl.where(bins < expert, counts, 0), 0)
    count = tl.sum(tl.where(bins == expert, counts, 0), 0)
    blocks = (counts + (BLOCK_M - 1)) // BLOCK_M
    block = tl.sum(tl.where(bins < expert, blocks, 0), 0)
    if expert == 0:
        tl.store(TOTALS, tl.sum(blocks, 0))
        tl.store(TOTALS + 1, tl.sum(counts, 0))
    write_blocks(BLOCK_EXPERT, BLOCK_FIRST, BLOCK_ROWS, block, expert, first, count, BLOCK_M)


@triton.jit(do_not_specialize=PER_CALL)
def scan_kernel(
    COUNTS, chunks, EXPERTS: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """COUNTS [chunks + 1, EXPERTS], of which `count_kernel` wrote all but the last row: each row becomes the sum of
    those before it. A program for COLUMNS experts, SIZE rows at a time."""
    hand_over(PDL)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    before = tl.zeros([COLUMNS], tl.int32)
    for start in range(0, chunks, SIZE):
        row = start + tl.arange(0, SIZE)
        pointers = COUNTS + row[:, None] * EXPERTS + column[None, :]
        counts = tl.load(pointers, mask=(row < chunks)[:, None], other=0)
        tl.store(pointers, before[None, :] + tl.cumsum(counts, 0) - counts, mask=(row < chunks)[:, None])
        before += tl.sum(counts, 0)
    tl.store(COUNTS + chunks * EXPERTS + column, before)


@triton.jit
def align_expert(
    expert, IDS, EXPERT_MAP, LOCAL, ORDER, PLACE, slots, num_experts, num_local,
    EXPERTS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """ORDER and PLACE of one expert's slots, out of up to SIZE; the first expert's program writes LOCAL. Returns the
    slots of every expert."""
    i = tl.arange(0, SIZE)
    local, key = sort_keys(IDS, i, slots, EXPERT_MAP, num_experts, num_local)
    counts = tl.histogram(tl.where(key < LAST, key, 0), EXPERTS, key < LAST)
    if expert == 0:
        tl.store(LOCAL + i, local, mask=i < slots)
        if PLACE is not None:
            tl.store(PLACE + i, local, mask=(i < slots) & (local < 0))
    bins = tl.arange(0, EXPERTS)
    if tl.sum(tl.where(bins == expert, counts, 0), 0) > 0:
        mine = key == expert
        first = tl.sum(tl.where(bins < expert, counts, 0), 0)
        place = first + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(ORDER + place, i, mask=mine)
        if PLACE is not None:
            tl.store(PLACE + i, place, mask=mine)
    return counts


@triton.jit
def place_chunk(chunk, LOCAL, ORDER, PLACE, counts, before, slots, EXPERTS: tl.constexpr, SIZE: tl.constexpr):
    """ORDER and PLACE of the slots of one chunk: behind those of lesser experts, and of its own expert before it."""
    STEP: tl.constexpr = 32
    i = chunk * SIZE + tl.arange(0, SIZE)
    key = tl.load(LOCAL + i, mask=i < slots, other=ABSENT)
    rank = tl.zeros([SIZE], tl.int32)
    for start in range(0, SIZE, STEP):  # summed over the first axis, which one thread holds: nothing is exchanged
        j = chunk * SIZE + start + tl.arange(0, STEP)
        earlier = tl.load(LOCAL + j, mask=j < slots, other=ABSENT)
        rank += tl.sum(((earlier[:, None] == key[None, :]) & (j[:, None] < i[None, :])).to(tl.int32), 0)
    base = tl.cumsum(counts, 0) - counts + before
    place = tl.gather(base, tl.maximum(key, 0), 0) + rank
    tl.store(ORDER + place, i, mask=key >= 0)
    if PLACE is not None:
        tl.store(PLACE + i, tl.where(key >= 0, place, key), mask=i < slots)


@triton.jit(do_not_specialize=PER_CALL)
def prepare_kernel(
    IDS, EXPERT_MAP, LOCAL, COUNTS, ORDER, PLACE, BLOCK_EXPERT, BLOCK_FIRST, BLOCK_ROWS, TOTALS,
    BLOCK_EXPERT_2, BLOCK_FIRST_2, BLOCK_ROWS_2, TOTALS_2, slots, chunks, num_experts, num_local,
    X, Q, SCALE, stride, width, rows,
    BLOCK_M: tl.constexpr, BLOCK_M_2: tl.constexpr, EXPERTS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The alignment, with a table of blocks of BLOCK_M slots and, if given, one of BLOCK_M_2: a program for each local
    expert and, with COUNTS (as `scan_kernel` leaves it), for each chunk of SIZE slots. PLACE, if given: the place of
    each slot, negative where it has none. In the same launch step 2 for each row of X, where X is given: the two do
    not need each other."""
    hand_over(PDL)
    pid = tl.program_id(0)
    aligners = num_local
    if COUNTS is not None:
        aligners += chunks
    if pid < aligners:
        if COUNTS is None:
            expert = pid
            counts = align_expert(
                pid, IDS, EXPERT_MAP, LOCAL, ORDER, PLACE, slots, num_experts, num_local, EXPERTS, SIZE
            )
        else:
            expert = pid - chunks
            bins = tl.arange(0, EXPERTS)
            counts = tl.load(COUNTS + chunks * EXPERTS + bins)
            if pid < chunks:
                before = tl.load(COUNTS + pid * EXPERTS + bins)
                place_chunk(pid, LOCAL, ORDER, PLACE, counts, before, slots, EXPERTS, SIZE)
        if expert >= 0:
            expert_blocks(expert, counts, BLOCK_EXPERT, BLOCK_FIRST, BLOCK_ROWS, TOTALS, BLOCK_M, EXPERTS)
            if BLOCK_EXPERT_2 is not None:
                expert_blocks(expert, counts, BLOCK_EXPERT_2, BLOCK_FIRST_2, BLOCK_ROWS_2, TOTALS_2, BLOCK_M_2, EXPERTS)
    elif X is not None:
        row = (pid - aligners).to(tl.int64) + tl.arange(0, 1)
        quantize_tile(X, row, row < rows, Q, SCALE, None, None, stride, width, width, BLOCK, CHUNKS, EVEN, 0)


@triton.jit(do_not_specialize=PER_CALL)
def align_batched_kernel(
    COUNTS, LOCAL, BLOCK_EXPERT, BLOCK_FIRST, BLOCK_ROWS, TOTALS, num_local, max_tokens,
    BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """LOCAL and blocks of a batch [num_local, max_tokens, ...] whose expert e holds COUNTS[e] rows; a program each."""
    expert = tl.program_id(0)
    bins = tl.arange(0, EXPERTS)
    counts = tl.load(COUNTS + bins, mask=bins < num_local, other=0)
    counts = tl.minimum(tl.maximum(counts, 0), max_tokens).to(tl.int32)
    blocks = (counts + (BLOCK_M - 1)) // BLOCK_M
    block = tl.sum(tl.where(bins < expert, blocks, 0), 0)
    count = tl.sum(tl.where(bins == expert, counts, 0), 0)
    if expert == 0:
        tl.store(TOTALS, tl.sum(blocks, 0))
        tl.store(TOTALS + 1, tl.sum(counts, 0))
    first = expert * max_tokens
    write_blocks(BLOCK_EXPERT, BLOCK_FIRST, BLOCK_ROWS, block, expert, first, count, BLOCK_M)
    for start in range(0, max_tokens, SIZE):
        t = start + tl.arange(0, SIZE)
        tl.store(LOCAL + (first + t).to(tl.int64), tl.where(t < count, expert, ABSENT), mask=t < max_tokens)


# --- quantisation --------------------------------------------------------------------------------------------------


@triton.jit
def row_amax(X, width, BLOCK: tl.constexpr):
    """Bits of max|x| over a row (numerics, step 2); at least INFINITY_BITS when it holds infinity or NaN."""
    amax = tl.zeros([BLOCK], tl.int32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(X + column, mask=column < width, other=0.0)
        amax = tl.maximum(amax, absolute_bits(to_float32(x)))
    return tl.max(amax, 0)


@triton.jit
def row_scale(bits):
    """From the bits of amax: (scale, inverse, whether all of the row is finite)."""
    finite = bits < INFINITY_BITS
    a = tl.where(finite, bits, 0).to(tl.float32, bitcast=True)
    a = tl.where(a < AMAX_FLOOR, AMAX_FLOOR, a)
    scale = tl.where(finite, tl.math.div_rn(a, INT8_MAX), float("nan"))
    return scale, tl.math.div_rn(INT8_MAX, a), finite


@triton.jit
def codes(x, inverse, finite):
    """int8 codes of `x` in its own dtype.

    |x * inverse| stays below 127.5, so that nothing is left to clamp; and the lowest byte of the sum with MAGIC, whose
    own is zero, is the rounded value.
    """
    rounded = (to_float32(x) * inverse + MAGIC).to(tl.int32, bitcast=True)
    return tl.where(finite, rounded, 0).to(tl.int8)


@triton.jit
def rows_amax(X, row, held, stride, width, BLOCK: tl.constexpr):
    """Bits of max|x| of some rows of X, an int64 vector, BLOCK columns at a time; 0 where not `held`."""
    column = tl.arange(0, BLOCK)
    most = tl.zeros([row.shape[0], BLOCK], tl.int32)
    for start in range(0, width, BLOCK):
        inside = held[:, None] & (start + column < width)[None, :]
        x = tl.load(X + row[:, None] * stride + start + column[None, :], mask=inside, other=0.0)
        most = tl.maximum(most, absolute_bits(to_float32(x)))
    return tl.max(most, 1)


@triton.jit
def store_codes(x, inverse, finite, inside, column, Q, PLACE, target, held, stride_q, SPREAD: tl.constexpr):
    """Codes of columns of some rows to Q: to `target`, or (SPREAD) to the places PLACE[target * SPREAD + k] that are
    not negative, for every k."""
    q = codes(x, inverse[:, None], finite[:, None])
    if SPREAD:
        for k in tl.static_range(SPREAD):
            place = tl.load(PLACE + target * SPREAD + k, mask=held, other=ABSENT).to(tl.int64)
            tl.store(Q + place[:, None] * stride_q + column[None, :], q, mask=inside & (place >= 0)[:, None])
    else:
        tl.store(Q + target[:, None] * stride_q + column[None, :], q, mask=inside)


@triton.jit
def store_scales(scale, SCALE, PLACE, target, held, SPREAD: tl.constexpr):
    """The scales of some rows, to where `store_codes` puts their codes."""
    if SPREAD:
        for k in tl.static_range(SPREAD):
            place = tl.load(PLACE + target * SPREAD + k, mask=held, other=ABSENT).to(tl.int64)
            tl.store(SCALE + place, scale, mask=place >= 0)
    else:
        tl.store(SCALE + target, scale, mask=held)


@triton.jit
def quantize_tile(
    X, row, held, Q, SCALE, PLACE, AMAX, stride, stride_q, width, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
    EVEN: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """Step 2 for some rows, an int64 vector, where `held`: see `store_codes` for where they go. AMAX [1], if given: the
    bits of one amax for all rows. CHUNKS pieces of BLOCK columns are a row, without a rest if EVEN; 0: rows are too
    wide to be kept, and are read twice."""
    column = tl.arange(0, BLOCK)
    pieces = ()
    for i in tl.static_range(CHUNKS):
        inside = held[:, None]
        if not EVEN:
            inside = inside & (i * BLOCK + column < width)[None, :]
        x = tl.load(X + row[:, None] * stride + (i * BLOCK + column)[None, :], mask=inside, other=0.0)
        pieces = pieces + (x,)  # noqa: RUF005, Triton knows no starred element
    if AMAX is not None:
        bits = tl.load(AMAX) + tl.zeros(row.shape, tl.int32)
    elif CHUNKS > 0:
        most = tl.abs(to_float32(pieces[0]))
        for i in tl.static_range(1, CHUNKS):
            most = tl.maximum(most, tl.abs(to_float32(pieces[i])), propagate_nan=tl.PropagateNan.ALL)
        bits = tl.max(absolute_bits(most), 1)
    else:
        bits = rows_amax(X, row, held, stride, width, BLOCK)
    scale, inverse, finite = row_scale(bits)
    store_scales(scale, SCALE, PLACE, row, held, SPREAD)
    for i in tl.static_range(CHUNKS):
        inside = held[:, None]
        if not EVEN:
            inside = inside & (i * BLOCK + column < width)[None, :]
        store_codes(pieces[i], inverse, finite, inside, i * BLOCK + column, Q, PLACE, row, held, stride_q, SPREAD)
    if CHUNKS == 0:
        for start in range(0, width, BLOCK):
            at = start + column
            inside = held[:, None] & (at < width)[None, :]
            x = tl.load(X + row[:, None] * stride + at[None, :], mask=inside, other=0.0)
            store_codes(x, inverse, finite, inside, at, Q, PLACE, row, held, stride_q, SPREAD)


@triton.jit
def held_rows(row, rows, HELD, TOTALS, EARLY: tl.constexpr):
    """Which of some rows are there: of the first `rows`, those with HELD [rows] >= 0, or, with TOTALS, the first
    TOTALS[1]."""
    held = row < rows
    if TOTALS is not None:
        held = row < table_entry(TOTALS + 1, EARLY)
    if HELD is not None:
        held = tl.load(HELD + row, mask=held, other=ABSENT, cache_modifier=".cg" if EARLY else "") >= 0
    return held


@triton.jit(do_not_specialize=PER_CALL)
def row_amax_kernel(X, HELD, TOTALS, AMAX, stride, width, rows, BLOCK: tl.constexpr):
    """AMAX [rows] as bits; 0 for rows that are not held, which are not read. For one scale per tensor."""
    row = tl.program_id(0) + tl.arange(0, 1)
    held = held_rows(row, rows, HELD, TOTALS, False)
    tl.store(AMAX + row, rows_amax(X, row.to(tl.int64), held, stride, width, BLOCK), mask=row < rows)


@triton.jit(do_not_specialize=PER_CALL)
def quantize_rows_kernel(
    X, Q, SCALE, HELD, TOTALS, PLACE, AMAX, stride, stride_q, width, rows,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, SPREAD: tl.constexpr,
    PDL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Step 2: Q int8 [rows, width], its rows stride_q apart, and SCALE float32 [rows] of X [rows, width], for the rows
    that are held, ROWS a program. With PLACE [rows * SPREAD], a row goes to the places of its SPREAD slots instead.
    EARLY: HELD or TOTALS is read before the kernel before this one has ended (see `grouped_gemm_kernel`)."""
    if not EARLY:
        hand_over(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    held = held_rows(row, rows, HELD, TOTALS, EARLY)
    if EARLY:
        hand_over(PDL)
    if tl.max(held.to(tl.int32), 0) > 0:
        quantize_tile(
            X, row.to(tl.int64), held, Q, SCALE, PLACE, AMAX, stride, stride_q, width, BLOCK, CHUNKS, EVEN, SPREAD
        )


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
def dot(a, w, acc, IN_FLOAT32: tl.constexpr, CONVERT: tl.constexpr, SWAP: tl.constexpr):
    """acc + a @ w: int8 by int8 in int32, or floats by int8 in float32 (W8A16; CONVERT: see `converted`).

    IN_FLOAT32 multiplies in float32 where there is no such instruction: int8 before compute capability 8.0, bfloat16 in
    the interpreter. For int8 it is exact: |a @ w| <= 2**14 * BLOCK_K <= 2**24 over one step, which joins an int32 sum.
    SWAP: all of it transposed.
    """
    if IN_FLOAT32:
        tl.static_assert(a.shape[1] <= 1024)
        left, right = to_float32(a), to_float32(w)
    elif a.dtype == tl.int8:
        left, right = a, w
    else:
        left, right = a, converted(w, a.dtype, CONVERT)
    if SWAP:
        first, second = tl.trans(right), tl.trans(left)
    else:
        first, second = left, right
    if IN_FLOAT32:
        return acc + tl.dot(first, second, input_precision="ieee").to(acc.dtype)
    elif a.dtype == tl.int8:
        return tl.dot(first, second, acc, out_dtype=tl.int32)
    else:
        return tl.dot(first, second, acc, input_precision="ieee")


@triton.jit
def summed(acc, CONVERT: tl.constexpr, SWAP: tl.constexpr):
    """The sums of `dot`, as a @ w has them."""
    if CONVERT > 1:
        acc = acc * CONVERT
    if SWAP:
        acc = tl.trans(acc)
    return acc


@triton.jit
def row_values(POINTER, rows, mask):
    """Scales or biases of some rows; anything where there are none (Triton's functions cannot return None)."""
    if POINTER is None:
        return rows
    elif mask is None:
        return tl.load(POINTER + rows)
    else:
        return tl.load(POINTER + rows, mask=mask, other=0.0)


@triton.jit
def weight_values(W_SCALE, BIAS, first_row, n, N, GATED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Scales and biases behind output columns n, of weights from `first_row` on: of gate and up, or up as gate. n is
    not clamped, so that neighbours are loaded together."""
    gate_row, up_row = weight_rows(n, N, GATED, INTERLEAVED)
    gate_scale = row_values(W_SCALE, first_row + gate_row, n < N)
    gate_bias = row_values(BIAS, first_row + gate_row, n < N)
    up_scale, up_bias = gate_scale, gate_bias
    if GATED:
        up_scale = row_values(W_SCALE, first_row + up_row, n < N)
        up_bias = row_values(BIAS, first_row + up_row, n < N)
    return gate_scale, up_scale, gate_bias, up_bias


@triton.jit
def dequantize(acc, a_scale, w_scale, bias, A_SCALE: tl.constexpr, BIAS: tl.constexpr):
    """Step 3: (float(acc) * x_scale) * w_scale, then + bias where there is one; without x_scale (A_SCALE) for W8A16.
    Scales and bias are of the shape of acc, or are spread to it."""
    y = acc.to(tl.float32)
    if A_SCALE:
        y = y * a_scale
    y = y * w_scale
    if BIAS:
        y = y + bias
    return y


@triton.jit
def split_columns(x, INTERLEAVED: tl.constexpr):
    """(gate, up) of x [..., 2 * n]: the two halves, or every second column."""
    HALF: tl.constexpr = x.shape[-1] // 2
    if len(x.shape) == 1:
        if INTERLEAVED:
            return tl.split(tl.reshape(x, [HALF, 2]))
        else:
            return tl.split(tl.permute(tl.reshape(x, [2, HALF]), [1, 0]))
    elif INTERLEAVED:
        return tl.split(tl.reshape(x, [x.shape[0], HALF, 2]))
    else:
        return tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, HALF]), [0, 2, 1]))


@triton.jit
def weight_rows(n, N, GATED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Rows of one expert's weights behind output columns n: (gate or only, up)."""
    if INTERLEAVED:
        return n * 2, n * 2 + 1
    elif GATED:
        return n, n + N
    else:
        return n, n


@triton.jit
def activated(gate, up, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, QUICK: tl.constexpr):
    """Step 4 on float32 gate and up (None where not gated)."""
    if LIMIT is not None:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
    h = activate(gate, ACTIVATION, ALPHA, QUICK)
    if up is not None:
        if LIMIT is not None:
            up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        if ACTIVATION == "swigluoai":
            up = up + 1.0
        h = h * up
    return h


@triton.jit
def finished(
    acc, up_acc, a_scale, gate_scale, up_scale, gate_bias, up_bias, A_SCALE: tl.constexpr, BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, QUICK: tl.constexpr,
):  # fmt: skip
    """Steps 3 and 4 of a tile [m, n]; up_acc is None where the layer is not gated, ACTIVATION in GEMM 2."""
    if A_SCALE:
        a_scale = a_scale[:, None]
    y = dequantize(acc, a_scale, gate_scale[None, :], gate_bias[None, :], A_SCALE, BIAS)
    if ACTIVATION is not None:
        up = None
        if up_acc is not None:
            up = dequantize(up_acc, a_scale, up_scale[None, :], up_bias[None, :], A_SCALE, BIAS)
        y = activated(y, up, ACTIVATION, ALPHA, LIMIT, QUICK)
    return y


@triton.jit
def place_of(tile, blocks, tiles_n, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Block and first column of a tile. GROUP_M blocks share each tile of W while it is in L2."""
    if GROUP_M == 1:
        return tile // tiles_n, tile % tiles_n * BLOCK_N
    else:
        per_group = GROUP_M * tiles_n
        group_first = (tile // per_group) * GROUP_M
        group_size = tl.maximum(tl.minimum(blocks - group_first, GROUP_M), 1)
        within = tile % per_group
        return group_first + within % group_size, within // group_size * BLOCK_N


@triton.jit
def table_entry(pointer, EARLY: tl.constexpr):
    """A value of the block table; read past the first cache, which may be older, before the kernel before has ended."""
    if EARLY:
        return tl.load(pointer, cache_modifier=".cg")
    else:
        return tl.load(pointer)


@triton.jit
def gemm_tile(
    n_first, expert, first, rows, A, A_SCALE, W, W_SCALE, BIAS, Y, ROUTER_WEIGHT, ORDER, N, K, w_rows, stride_a,
    slots_per_row,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    QUICK: tl.constexpr,
    A_TMA: tl.constexpr, W_TMA: tl.constexpr, A_PLACES: tl.constexpr, Y_PLACES: tl.constexpr, EVEN_K: tl.constexpr,
    IN_FLOAT32: tl.constexpr, CONVERT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of `grouped_gemm_kernel`: BLOCK_N columns from n_first on, of `rows` slots at places from `first` on."""
    SWAP: tl.constexpr = BLOCK_M < 16  # a product of the tensor cores has 16 rows, or twice that, and 8 columns
    JOINED: tl.constexpr = GATED and W_TMA  # gate and up in one product
    WIDE: tl.constexpr = 2 * BLOCK_N if JOINED else BLOCK_N
    m = tl.arange(0, BLOCK_M)
    real = m < rows
    # Rows past the block's end repeat its first place: always written memory, never stored.
    place = first + tl.where(real, m, 0)
    slot = place
    if ORDER is not None:
        slot = tl.load(ORDER + place)
    if A_PLACES:
        a_row = place.to(tl.int64)
    else:
        a_row = (slot // slots_per_row).to(tl.int64)
    n = n_first + tl.arange(0, BLOCK_N)
    n_inside = n < N
    gate_row, up_row = weight_rows(tl.where(n_inside, n, 0), N, GATED, INTERLEAVED)

    # Before the products, so that nothing is waited for after them.
    a_scale = row_values(A_SCALE, a_row, None)
    gate_scale, up_scale, gate_bias, up_bias = weight_values(
        W_SCALE, BIAS, expert.to(tl.int64) * w_rows, n, N, GATED, INTERLEAVED
    )
    router_weight = row_values(ROUTER_WEIGHT, slot, None)

    k = tl.arange(0, BLOCK_K)
    if not A_TMA:
        a_pointers = A + a_row[:, None] * stride_a + k[None, :]
    if not W_TMA:
        w_expert = W + expert.to(tl.int64) * w_rows * K
        gate_pointers = w_expert + gate_row.to(tl.int64)[None, :] * K + k[:, None]
        up_pointers = w_expert + up_row.to(tl.int64)[None, :] * K + k[:, None]
    SUM: tl.constexpr = tl.int32 if A_SCALE is not None else tl.float32
    if SWAP:
        acc = tl.zeros([WIDE, BLOCK_M], SUM)
    else:
        acc = tl.zeros([BLOCK_M, WIDE], SUM)
    up_acc = None
    if GATED and not JOINED:
        up_acc = acc
    for start in range(0, K, BLOCK_K):
        if A_TMA:
            a = A.load([first, start])
        else:
            a = load_tile(a_pointers, K - start, EVEN_K, 0, BLOCK_K)
            a_pointers += BLOCK_K
        if W_TMA:
            if JOINED and not INTERLEAVED:
                w = tl.reshape(W.load([expert * 2, n_first, start]), [WIDE, BLOCK_K])
            elif JOINED:
                w = W.load([expert * w_rows + 2 * n_first, start])
            else:
                w = W.load([expert * w_rows + n_first, start])
            acc = dot(a, w.T, acc, IN_FLOAT32, CONVERT, SWAP)
        else:
            w = load_tile(gate_pointers, K - start, EVEN_K, 1, BLOCK_K)
            acc = dot(a, w, acc, IN_FLOAT32, CONVERT, SWAP)
            gate_pointers += BLOCK_K
            if GATED:
                w = load_tile(up_pointers, K - start, EVEN_K, 1, BLOCK_K)
                up_acc = dot(a, w, up_acc, IN_FLOAT32, CONVERT, SWAP)
                up_pointers += BLOCK_K

    acc = summed(acc, CONVERT, SWAP)
    if JOINED:
        acc, up_acc = split_columns(acc, INTERLEAVED)
    elif GATED:
        up_acc = summed(up_acc, CONVERT, SWAP)
    y = finished(
        acc, up_acc, a_scale, gate_scale, up_scale, gate_bias, up_bias, A_SCALE is not None, BIAS is not None,
        ACTIVATION, ALPHA, LIMIT, QUICK,
    )  # fmt: skip
    if ROUTER_WEIGHT is not None:
        y = y * router_weight[:, None]
    if Y_PLACES:
        y_row = place
    else:
        y_row = slot
    pointers = Y + y_row.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(pointers, round_to(y, Y.dtype.element_ty), mask=real[:, None] & n_inside[None, :])


@triton.jit(do_not_specialize=PER_CALL)
def grouped_gemm_kernel(
    A, A_SCALE, W, W_SCALE, BIAS, Y, ROUTER_WEIGHT, ORDER, BLOCK_EXPERT, BLOCK_FIRST, BLOCK_ROWS, TOTALS,
    N, K, w_rows, stride_a, slots_per_row,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    QUICK: tl.constexpr,
    A_TMA: tl.constexpr, W_TMA: tl.constexpr, A_PLACES: tl.constexpr, Y_PLACES: tl.constexpr, EVEN_K: tl.constexpr,
    IN_FLOAT32: tl.constexpr, CONVERT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, PERSISTENT: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Tiles of Y: GEMM 1 with the activation fused, or GEMM 2 with the router weight. A program takes the tile of its
    number, or (PERSISTENT) that and every num_programs-th after it.

    The row of A for the slot at a place is that place (A_PLACES) or slot // slots_per_row; the row of Y is that place
    (Y_PLACES) or the slot. ORDER gives the slot at a place; None: they are the same (batched format). W is
    [experts, w_rows, K], W_SCALE and BIAS [experts, w_rows]. ROUTER_WEIGHT [slots] or None. Without A_SCALE: W8A16.
    GATED: BLOCK_N columns of Y take 2 * BLOCK_N rows of W: n and N + n, or (INTERLEAVED) 2n and 2n + 1.
    A_TMA, W_TMA: A and W are tensor descriptors: [rows, K]; [experts * w_rows, K] or, gated and not interleaved,
    [experts * 2, N, K]. What lies past their ends reads as zero.

    EARLY: the tables were complete before the kernel before this one let this one come, and are read before it ends.
    """
    if not EARLY:
        hand_over(PDL)
    blocks = table_entry(TOTALS, EARLY)
    tiles_n = tl.cdiv(N, BLOCK_N)
    if PERSISTENT:
        if EARLY:
            hand_over(PDL)
        for tile in tl.range(tl.program_id(0), blocks * tiles_n, tl.num_programs(0), flatten=True):
            block, n_first = place_of(tile, blocks, tiles_n, BLOCK_N, GROUP_M)
            gemm_tile(
                n_first, tl.load(BLOCK_EXPERT + block), tl.load(BLOCK_FIRST + block), tl.load(BLOCK_ROWS + block),
                A, A_SCALE, W, W_SCALE, BIAS, Y, ROUTER_WEIGHT, ORDER, N, K, w_rows, stride_a, slots_per_row,
                GATED, INTERLEAVED, ACTIVATION, ALPHA, LIMIT, QUICK, A_TMA, W_TMA, A_PLACES, Y_PLACES, EVEN_K,
                IN_FLOAT32, CONVERT, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
    else:
        # The table has a row for every program of the grid: in use or not, it is loaded together with `blocks`.
        block, n_first = place_of(tl.program_id(0), blocks, tiles_n, BLOCK_N, GROUP_M)
        expert, first = table_entry(BLOCK_EXPERT + block, EARLY), table_entry(BLOCK_FIRST + block, EARLY)
        rows = table_entry(BLOCK_ROWS + block, EARLY)
        if EARLY:
            hand_over(PDL)
        if tl.program_id(0) < blocks * tiles_n:
            gemm_tile(
                n_first, expert, first, rows,
                A, A_SCALE, W, W_SCALE, BIAS, Y, ROUTER_WEIGHT, ORDER, N, K, w_rows, stride_a, slots_per_row,
                GATED, INTERLEAVED, ACTIVATION, ALPHA, LIMIT, QUICK, A_TMA, W_TMA, A_PLACES, Y_PLACES, EVEN_K,
                IN_FLOAT32, CONVERT, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip


@triton.jit
def prefetch(pointer, size):
    """Ask for `size` bytes (a multiple of 16; none if not positive) to be brought into L2, by one thread."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .u32 t;
        mov.u32 t, %tid.x;
        setp.eq.u32 p, t, 0;
        setp.gt.and.s32 p, $2, 0, p;
        @p cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r", [pointer, size], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def prefetch_tile(W, expert, tile, N, K, w_rows, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_N: tl.constexpr):
    """The weights of BLOCK_N output columns into L2; none of an expert that is not here."""
    first = tile * BLOCK_N
    size = tl.where(expert >= 0, tl.minimum(N - first, BLOCK_N) * K, 0)
    w_expert = W + tl.maximum(expert, 0).to(tl.int64) * w_rows * K
    if INTERLEAVED:
        prefetch(w_expert + 2 * first * K, 2 * size)
    else:
        prefetch(w_expert + first * K, size)
        if GATED:
            prefetch(w_expert + (N + first) * K, size)


@triton.jit(do_not_specialize=PER_CALL)
def row_gemm_kernel(
    X, W, W_SCALE, BIAS, Y, ROUTER_WEIGHT, IDS, EXPERT_MAP, LOCAL, N, K, w_rows, stride_x, slots, slots_per_row,
    num_experts, num_local,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    QUICK: tl.constexpr,
    QUANTIZE: tl.constexpr, IN_FLOAT32: tl.constexpr, CONVERT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
    STAGES: tl.constexpr, BY_HAND: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns of one slot's row of Y [slots, N], from its row of X [rows, K] in its own dtype: for few slots,
    unsorted. Slots are the fast direction, so that those of one expert read a tile of W at the same time.

    QUANTIZE (W8A8): every program quantises the row by itself. LOCAL [slots], if given, is written. PREFETCH: the tile
    of W is asked for as soon as the expert is known. BLOCK_M 1: without tensor cores, STAGES steps of K under way at
    once, and weights as in `widened` (BY_HAND). The rest is as in `grouped_gemm_kernel`.
    """
    SWAP: tl.constexpr = BLOCK_M < 16  # as in `gemm_tile`
    slot = tl.program_id(0) % slots
    tile = tl.program_id(0) // slots
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    n_inside = n < N
    if PREFETCH and LOCAL is None:
        # Ids were there before the kernel before this one: the weights can come while that one still runs.
        # Past the first cache, which may be older than what the kernel two before has written.
        expert = resolve(tl.load(IDS + slot, cache_modifier=".cg"), True, EXPERT_MAP, num_experts, num_local)
        prefetch_tile(W, expert, tile, N, K, w_rows, GATED, INTERLEAVED, BLOCK_N)
    else:
        hand_over(PDL)
        expert = resolve(tl.load(IDS + slot), True, EXPERT_MAP, num_experts, num_local)
        if PREFETCH:
            prefetch_tile(W, expert, tile, N, K, w_rows, GATED, INTERLEAVED, BLOCK_N)
    gate_scale, up_scale, gate_bias, up_bias = weight_values(
        W_SCALE, BIAS, tl.maximum(expert, 0).to(tl.int64) * w_rows, n, N, GATED, INTERLEAVED
    )
    if ROUTER_WEIGHT is not None:
        router_weight = tl.load(ROUTER_WEIGHT + slot, cache_modifier=".cg")
    if PREFETCH and LOCAL is None:
        hand_over(PDL)
    if LOCAL is not None:
        tl.store(LOCAL + slot, expert)
    row = X + (slot // slots_per_row).to(tl.int64) * stride_x
    if QUANTIZE:  # before the expert is known to be here: it does not have to be waited for
        scale, inverse, finite = row_scale(row_amax(row, K, BLOCK))
    WIDE: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    wide = tl.arange(0, WIDE)
    if INTERLEAVED:
        n_wide, second = tile * BLOCK_N + wide // 2, wide % 2
    else:
        n_wide, second = tile * BLOCK_N + wide % BLOCK_N, wide // BLOCK_N
    first_row, second_row = weight_rows(tl.where(n_wide < N, n_wide, 0), N, GATED, INTERLEAVED)
    w_row = tl.where(second == 0, first_row, second_row)
    if expert >= 0:
        SUM: tl.constexpr = tl.int32 if QUANTIZE else tl.float32
        k = tl.arange(0, BLOCK_K)
        w_rows_here = W + expert.to(tl.int64) * w_rows * K + w_row.to(tl.int64) * K
        if BLOCK_M == 1:
            # Sums of int8 products are exact in float32 up to 2**24: `configs.EXACT_STEPS`.
            sums = tl.zeros([WIDE, BLOCK_K], tl.float32)
            w_pointers = w_rows_here[:, None] + k[None, :]
            for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
                inside = k < K - start
                a = to_float32(tl.load(row + start + k, mask=inside, other=0.0))
                if QUANTIZE:
                    a = tl.where(finite, (a * inverse + MAGIC) - MAGIC, 0.0)
                w = tl.load(w_pointers, mask=inside[None, :], other=0)
                sums = tl.fma(widened(w, BY_HAND), tl.broadcast_to(a[None, :], [WIDE, BLOCK_K]), sums)
                w_pointers += BLOCK_K
            one = tl.sum(sums.to(SUM), 1)
        else:
            if SWAP:
                acc = tl.zeros([WIDE, BLOCK_M], SUM)
            else:
                acc = tl.zeros([BLOCK_M, WIDE], SUM)
            w_pointers = w_rows_here[None, :] + k[:, None]
            for start in range(0, K, BLOCK_K):
                inside = k < K - start
                a = tl.load(row + start + k, mask=inside, other=0.0)
                if QUANTIZE:
                    a = codes(a, inverse, finite)
                w = tl.load(w_pointers, mask=inside[:, None], other=0)
                acc = dot(tl.broadcast_to(a[None, :], [BLOCK_M, BLOCK_K]), w, acc, IN_FLOAT32, CONVERT, SWAP)
                w_pointers += BLOCK_K
            # All BLOCK_M rows are the same; a tensor core has no fewer.
            acc = summed(acc, CONVERT, SWAP)
            one = tl.sum(tl.where((tl.arange(0, BLOCK_M) == 0)[:, None], acc, tl.zeros_like(acc)), 0)
        a_scale = None
        if QUANTIZE:
            a_scale = tl.full([1], 1.0, tl.float32) * scale
        up_acc = None
        if GATED:
            gate_sum, up_sum = split_columns(one, INTERLEAVED)
            up_acc = up_sum[None, :]
        else:
            gate_sum = one
        y = finished(
            gate_sum[None, :], up_acc, a_scale, gate_scale, up_scale, gate_bias, up_bias, QUANTIZE, BIAS is not None,
            ACTIVATION, ALPHA, LIMIT, QUICK,
        )  # fmt: skip
        if ROUTER_WEIGHT is not None:
            y = y * router_weight
        tl.store(Y + slot.to(tl.int64) * N + n[None, :], round_to(y, Y.dtype.element_ty), mask=n_inside[None, :])


# --- combine -------------------------------------------------------------------------------------------------------


@triton.jit
def combine_kernel(
    Y, OUT, LOCAL, BATCH_ROW, ROUTER_WEIGHT, width, TOPK: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Step 7: OUT [tokens, width] sums the slots of each token in slot order; a token with an INVALID id becomes NaN.

    Y [slots, width] is rounded already. With BATCH_ROW [slots], slot s is row BATCH_ROW[s] of Y float32 instead, and
    the router weight and the rounding of step 6 happen here. EARLY: LOCAL is read before the kernel before this one
    has ended (see `grouped_gemm_kernel`).
    """
    token = tl.program_id(0)
    early = ()
    if EARLY:
        for k in tl.static_range(TOPK):
            early = early + (table_entry(LOCAL + token * TOPK + k, True),)  # noqa: RUF005
    hand_over(PDL)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    invalid = tl.zeros([BLOCK], tl.int32)
    for k in tl.static_range(TOPK):  # all loads are under way before the first sum
        slot = token * TOPK + k
        if EARLY:
            local = early[k]
        else:
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
