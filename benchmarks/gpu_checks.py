"""Whether the Triton backend computes the contract's bits on this GPU: everything that the interpreter cannot show.

    PYTHONPATH=src:tests python3 benchmarks/gpu_checks.py --out OUT --seconds 80 --workers 15

Prints a line for each section and keeps OUT/gpu_checks.json up to date; exit code 1 if anything failed. Nearly all time
is spent compiling, so that checks run in several processes, those of which much depends first and the others in an
order drawn with a fixed seed: a time limit cuts each section about equally, and what did not run is counted. A process
whose GPU context broke, that died or that hangs is replaced, and costs one check. `--only TEXT` runs the sections whose
name holds TEXT; `--tiles all` tries every tile that tuning may choose, otherwise a third of them.

For NVIDIA's sanitizer, in one process and with the least that reaches every kernel and every way to launch it:

    export PYTHONPATH=src:tests PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --tool memcheck python3 benchmarks/gpu_checks.py --sanitize
    compute-sanitizer --tool racecheck python3 benchmarks/gpu_checks.py --sanitize

PYTORCH_NO_CUDA_MEMORY_CACHING=1 gives each tensor memory of its own; otherwise tensors are pieces of large blocks, and
an access past the end of one is not seen. Run it once without the sanitizer before, so that kernels are compiled.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import json
import logging
import multiprocessing
import os
import queue
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from cases import ADVERSARIAL, Case, assert_same_bits, build
from int8moe.backends import arguments
from int8moe.backends.reference.run import quantize_activations
from int8moe.backends.reference.support import ReferenceExperts
from int8moe.backends.triton import kernels, launch
from int8moe.backends.triton.configs import Plan, TileConfig, default_plan, device_shared_memory, fitted
from int8moe.backends.triton.support import BatchedTritonExperts, TritonExperts
from int8moe.bench.cuda import capture
from int8moe.bench.layer import draw_call, draw_hidden, draw_weights, packed_layer
from int8moe.bench.shapes import named_shape
from int8moe.config import FusedMoEConfig, MoEActivation
from int8moe.device import Platform
from int8moe.quant_config import FusedMoEQuantConfig
from int8moe.tuning import space
from int8moe.weights import ExpertWeights

DEVICE = "cpu" if launch.INTERPRETED else "cuda"
CLASSES: dict[str, type] = {"standard": TritonExperts, "batched": BatchedTritonExperts}
DTYPES = ("bfloat16", "float16", "float32")
WEIGHT_ONLY_ERROR = {"bfloat16": 4e-3, "float16": 5e-4, "float32": 1e-5}  # as in tests/differential/test_triton.py
FEW_PROCESSORS = 3  # of which persistent programs are told, so that each has several tiles of a small layer to take
CHECKED_TOKENS = 16
MISMATCHES_SHOWN = 10
START_SECONDS, CHECK_SECONDS = 120.0, 60.0  # a process that needs longer to start, or for one check, hangs

Capability = tuple[int, int] | None
Found = dict[str, Any] | None
"""What is wrong, or None."""


# --- comparing -------------------------------------------------------------------------------------------------------


def difference(got: torch.Tensor, want: torch.Tensor) -> Found:
    """None when bits are equal (two NaNs are), else how much differs."""
    got, want = got.cpu(), want.cpu()
    try:
        assert_same_bits(got, want)
    except AssertionError as error:
        found: dict[str, Any] = {"what": str(error)[:200]}
        if got.shape == want.shape:
            a, b = got.double(), want.double()
            both = torch.isfinite(a) & torch.isfinite(b)
            differs = ~((a == b) | (a.isnan() & b.isnan()))
            found |= {
                "values_that_differ": int(differs.sum()),
                "of": a.numel(),
                "rows_that_differ": differs.flatten(1).any(1).nonzero().flatten().tolist()[:10],
                "max_abs_difference": float((a - b).abs()[both].max()) if both.any() else None,
                "max_abs_reference": float(b.abs()[both].max()) if both.any() else None,
                "nan_positions_that_differ": int((a.isnan() != b.isnan()).sum()),
            }
        return found
    return None


def described(error: Exception) -> dict[str, Any]:
    return {"error": f"{type(error).__name__}: {str(error)[:300]}", "trace": traceback.format_exc()[-1500:]}


def capability() -> Capability:
    return launch.device_facts(torch.device(DEVICE))[1]


def loaded(case: Case, cls: str) -> Any:
    """An experts object with the case's weights on the GPU."""
    to = lambda t: None if t is None else t.to(DEVICE)
    q = case.quant_config
    moved = FusedMoEQuantConfig(
        q.weight_key, q.activation_key, to(q.w1_scale), to(q.w2_scale), to(q.w1_bias), to(q.w2_bias)
    )
    experts = CLASSES[cls](case.config, moved)
    experts.process_weights_after_loading(SimpleNamespace(w13_weight=to(case.w13), w2_weight=to(case.w2)))
    return experts


def inputs(case: Case) -> list[torch.Tensor]:
    return [t.to(DEVICE) for t in (case.hidden_states, case.topk_weights, case.topk_ids)]


# --- plans -----------------------------------------------------------------------------------------------------------


def random_plan(seed: int, gpu: Capability, a_bytes: int = 1) -> Plan:
    """Any plan that a GPU can run with outputs of any dtype, by a seed."""
    pick = random.Random(seed).choice

    def tile(block_m: int, rows: bool) -> TileConfig:
        if rows:
            block_n, block_k = pick((16, 32, 64, 128)), pick((32, 64, 128, 256, 512))
            if block_m == 1:  # a sum for each
                block_n = min(block_n, 16384 // block_k)
            warps = 4 if block_n * block_k > 16384 else pick((2, 4))
        else:
            block_n, block_k = pick((16, 32, 64, 128, 256)), pick((32, 64, 128, 256)) // a_bytes
            warps = 8 if block_m * block_n > 128 * 128 else pick((4, 8))
        block_k = min(block_k, 128 * 256 // block_n)  # larger tiles take half a minute to compile
        made = TileConfig(
            block_m, block_n, max(32, block_k), pick((1, 3, 8)), warps, pick((2, 3, 4)), pick((True, True, False)),
            0 if rows else pick((0, 0, 1, 2)),
        )  # fmt: skip
        made = fitted(made, gpu, a_bytes)
        # Between two tiles, a persistent program holds outputs beside operands: float32 at most.
        most = made.shared_bytes(a_bytes) + 4 * block_m * block_n
        return replace(made, persistent=0) if most > device_shared_memory(gpu) else made

    rows = pick((True, False, False, False))
    height = lambda: pick((16, 8, 1) if rows else (8, 16, 32, 64, 128))
    return Plan(tile(height(), rows), tile(height(), rows), rows, not rows and pick((True, False)))


@contextlib.contextmanager
def forced(plan: Plan) -> Iterator[list[int]]:
    """Every call is launched by `plan`; yields the token counts of the calls that asked for one."""
    launching: Any = launch  # whose names are replaced
    choose, processors = launching.choose_plan, launching.processors
    asked: list[int] = []

    def always(tokens: int, *_: Any) -> Plan:
        asked.append(tokens)
        return plan

    launching.choose_plan = always
    if plan.gemm1.persistent or plan.gemm2.persistent:
        launching.processors = lambda device: FEW_PROCESSORS
    try:
        yield asked
    finally:
        launching.choose_plan, launching.processors = choose, processors


def check_forced(case: Case, cls: str, plan: Plan, want: torch.Tensor) -> Found:
    """One call by `plan`; None if bits are right."""
    with forced(plan) as asked:
        got = case.run(CLASSES[cls], DEVICE)
    if not asked and case.topk_ids.numel() and len(case.w13):
        return {"what": "the call did not ask for a plan, so that none was forced"}
    found = difference(got, want)
    return found and {"plan": str(plan), **found}


# --- small cases -----------------------------------------------------------------------------------------------------


def random_case(seed: int, scheme: str) -> Case:
    """What the strategy of tests/cases.py draws, and larger, by a seed."""
    g = random.Random(seed)
    pick, number = g.choice, g.randint
    experts, activation = number(1, 12), pick(list(MoEActivation))
    local = sorted({number(0, experts - 1) for _ in range(number(1, experts))}) if number(0, 1) else None
    return build(
        seed=seed,
        E=experts,
        topk=number(1, experts),
        H=pick((number(1, 140), 16 * number(1, 40))),
        I=pick((number(1, 140), 16 * number(1, 40))),
        M=pick((number(0, 40), number(100, 300))),
        dtype=pick(DTYPES),
        activation=activation,
        gated=activation.is_swigluoai or bool(number(0, 1)),
        bias=bool(number(0, 1)),
        limit=pick((None, 0.1, 1.0, 7.0)),
        local=local,
        routing=pick(("random", "one_expert", "first_experts")),
        weights=pick(("random", "extreme", "zero_rows")),
        rows=pick(("normal", "zeros", "nan", "inf", "tiny", "huge", "spread", "nan_one")),
        on_input=bool(number(0, 1)),
        scheme=scheme,
    )


def check_adversarial(cls: str, name: str) -> Found:
    case = build(**ADVERSARIAL[name])
    return difference(case.run(CLASSES[cls], DEVICE), case.reference_output())


def check_random(cls: str, scheme: str, seed: int) -> Found:
    """A drawn case, by the plan that is chosen for it and by a drawn one."""
    case = random_case(seed, scheme)
    want = case.reference_output()
    found = difference(case.run(CLASSES[cls], DEVICE), want)
    return found or check_forced(case, cls, random_plan(seed, capability()), want)


def check_invalid(cls: str, bad: int, mapped: bool) -> Found:
    case = build(M=6, local=[1, 2, 5, 6] if mapped else None)
    want = case.reference_output()
    case.topk_ids[2, 1], want[2] = bad, float("nan")
    return difference(case.run(CLASSES[cls], DEVICE), want)


# --- every tile ------------------------------------------------------------------------------------------------------

TILE_LAYERS: dict[str, dict[str, Any]] = {
    # H and I are multiples of 16, so that tiles come by the copy engine, and of no tile.
    "silu": dict(E=6, topk=2, H=528, I=272),
    "swigluoai": dict(E=6, topk=2, H=528, I=272, activation=MoEActivation.SWIGLUOAI, bias=True, limit=1.0),
}
MANY_TOKENS, FEW_TOKENS = 610, 5


@functools.lru_cache(maxsize=4)
def tile_case(layer: str, tokens: int) -> tuple[Case, torch.Tensor]:
    case = build(M=tokens, **TILE_LAYERS[layer])
    return case, case.reference_output()


def tile_plans(gpu: Capability, part: str = "all") -> list[tuple[str, int, Plan]]:
    """Layer, tokens and plan for every tile that tuning may choose: its own, other orders of them, persistent ones, and
    those for slots by themselves. Both GEMMs take the same tile, GEMM 1 sorts its rows beforehand in every second plan
    and, where tuning tries it, in each. `part` is all, or sample: a third, drawn with a fixed seed."""
    case = build(M=MANY_TOKENS, **TILE_LAYERS["silu"])
    counts = tuple(torch.bincount(case.topk_ids.flatten()).tolist())
    gemms = [
        space.Gemm(counts, w.shape[1], w.shape[2], 1, gpu, FEW_PROCESSORS, 4000.0, 1200.0) for w in (case.w13, case.w2)
    ]
    plans: list[tuple[str, int, Plan]] = []
    special = gpu == (9, 0) and launch.specialized is not None
    for block_m in (*space.BLOCK_MS, space.TALL):
        for tile in dict.fromkeys(t for gemm in gemms for t in space.all_tiles(gemm, block_m, special)):
            for each in dict.fromkeys([tile, *(v for gemm in gemms for v in space.variants(gemm, tile))]):
                sorts = (False, True) if block_m >= 64 and each == tile else (len(plans) % 2 == 1,)
                if each.specialized:  # others gather
                    sorts = (True,)
                plans += [("silu", MANY_TOKENS, Plan(each, each, sort_rows=sort)) for sort in sorts]
            sort = tile.specialized or len(plans) % 2 == 1
            plans.append(("swigluoai", MANY_TOKENS, Plan(tile, tile, sort_rows=sort)))
    for tile in space.row_tiles(TILE_LAYERS["silu"]["H"], gpu, 2):  # W8A16's run W8A8 too
        plans += [(layer, FEW_TOKENS, Plan(tile, tile, rows=True)) for layer in TILE_LAYERS]
    return plans if part == "all" else random.Random(0).sample(plans, -(-len(plans) // 3))


def check_tile(layer: str, tokens: int, plan: Plan) -> Found:
    case, want = tile_case(layer, tokens)
    found = check_forced(case, "standard", plan, want)
    if found is None:
        return None
    if not plan.rows:
        plain = default_plan(tokens, len(case.w13), case.topk_ids.shape[1], capability()).gemm1.plain()
        plain = fitted(replace(plain, block_m=plan.gemm1.block_m), capability(), 1)
        for gemm, mixed in (("gemm1", replace(plan, gemm1=plain)), ("gemm2", replace(plan, gemm2=plain))):
            found[f"with the default {gemm}"] = check_forced(case, "standard", mixed, want) or "equal"
    return found


# --- real shapes -----------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def shape_layer(shape: str) -> tuple[FusedMoEConfig, ExpertWeights]:
    config = named_shape(shape).config(Platform.current())
    return config, draw_weights(config, True, lambda share: None, DEVICE)


def shape_call(config: FusedMoEConfig, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return draw_hidden(config, tokens, DEVICE), *draw_call(config, tokens, 0, DEVICE)


def check_alone(cls: str, tokens: int) -> Found:
    """A token has the bits of itself in a call of its own."""
    config, weights = shape_layer("qwen3-30b")
    experts, arguments = packed_layer(CLASSES[cls], config, weights), shape_call(config, tokens)
    together = experts.apply(*arguments)
    for token in sorted({0, 1, tokens // 2, tokens - 1}):
        alone = experts.apply(*(t[token : token + 1] for t in arguments))
        if (found := difference(alone, together[token : token + 1])) is not None:
            return {"token": token, **found}
    return None


def check_shape(cls: str, shape: str, tokens: int) -> Found:
    """Some tokens, evenly spread, against the reference on their experts alone."""
    config, weights = shape_layer(shape)
    x, router_weights, ids = shape_call(config, tokens)
    few = torch.linspace(0, tokens - 1, min(tokens, CHECKED_TOKENS), device=x.device).round().long()
    want = packed_layer(ReferenceExperts, config, weights).apply(x[few], router_weights[few], ids[few])
    got = packed_layer(CLASSES[cls], config, weights).apply(x, router_weights, ids)
    return difference(got[few], want) or (None if bool(got.isfinite().all()) else {"what": "values are not finite"})


# --- the quotient ----------------------------------------------------------------------------------------------------

QUOTIENT_BLOCK, QUOTIENT_CHUNK = 4096, 1 << 28
QUOTIENTS = {"silu": 1.0, "swigluoai, alpha 1.702": 1.702, "swigluoai, alpha 0.25": 0.25, "swigluoai, alpha 4": 4.0}


@triton.jit(do_not_specialize=("start", "shown"))
def quotient_kernel(  # type: ignore[no-untyped-def]
    COUNT, SHOWN, start, shown, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, SIZE: tl.constexpr
):
    """For the SIZE float32 whose bits follow start + program * SIZE: adds to COUNT those where the quick quotient has
    other bits than `div_rn`, two NaNs being equal, and writes (bits of g, quick, exact) of the first into SHOWN."""
    bits = start + tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    g = bits.to(tl.float32, bitcast=True)
    quick = kernels.activate(g, ACTIVATION, ALPHA, True)
    exact = kernels.activate(g, ACTIVATION, ALPHA, False)
    quick_bits, exact_bits = quick.to(tl.int32, bitcast=True), exact.to(tl.int32, bitcast=True)
    differs = (quick_bits != exact_bits) & ~((quick != quick) & (exact != exact))
    place = tl.atomic_add(COUNT + tl.zeros([SIZE], tl.int32), tl.full([SIZE], 1, tl.int64), mask=differs)
    kept = differs & (place < shown)
    row = SHOWN + 3 * tl.where(kept, place, 0)
    tl.store(row, bits, mask=kept)
    tl.store(row + 1, quick_bits, mask=kept)
    tl.store(row + 2, exact_bits, mask=kept)


def check_quotient(name: str) -> Found:
    """All 2**32 bit patterns of the gate."""
    count = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    shown = torch.zeros(64, 3, dtype=torch.int32, device=DEVICE)
    for start in range(-(2**31), 2**31, QUOTIENT_CHUNK):
        quotient_kernel[(QUOTIENT_CHUNK // QUOTIENT_BLOCK,)](
            count, shown, start, len(shown), ACTIVATION=name.split(",")[0], ALPHA=QUOTIENTS[name], SIZE=QUOTIENT_BLOCK,
            num_warps=8, **launch.EXACT,
        )  # fmt: skip
    differ = int(count)
    if not differ:
        return None
    rows = shown[: min(differ, len(shown))].cpu()
    values = rows.view(torch.float32).tolist()
    first = [
        {"g": g, "g_bits": f"{bits & 0xFFFFFFFF:08x}", "quick": quick, "exact": exact}
        for (bits, _, _), (g, quick, exact) in zip(rows.tolist(), values, strict=True)
    ]
    first.sort(key=lambda row: (abs(row["g"]), row["g_bits"]))
    return {"patterns_that_differ": differ, "of": 2**32, "some": first[:MISMATCHES_SHOWN]}


# --- memory that was never written -----------------------------------------------------------------------------------

POISON = {"NaN": 0xFF, "huge": 0x7F}  # each byte: NaN and -1; 3.4e38, 127 and 2139062143
POISON_CASES: dict[str, dict[str, Any]] = {
    "all local": dict(E=16, topk=4, H=256, I=128),
    "expert map": dict(E=16, topk=4, H=256, I=128, local=[1, 4, 6, 11], dtype="float32"),
    "per tensor": dict(E=16, topk=4, H=256, I=128, local=[0, 3, 8], scheme="w8a8-tensor"),
    "ragged": dict(E=6, topk=2, H=70, I=45, dtype="float16", bias=True),
}


def poison_free_memory(byte: int) -> None:
    """Fill what the caching allocator will give out next: blocks of every size, small ones often."""
    torch.cuda.empty_cache()
    sizes = [256 << 20, *[32 << 20] * 8, *(1 << power for power in range(20, 8, -1) for _ in range(64))]
    for block in [torch.empty(size, dtype=torch.uint8, device=DEVICE) for size in sizes]:
        block.fill_(byte)
    torch.cuda.synchronize()


@contextlib.contextmanager
def poisoned_empty(byte: int) -> Iterator[None]:
    """`torch.empty` fills what it gives."""
    original = torch.empty

    def empty(*args: Any, **named: Any) -> torch.Tensor:
        made = original(*args, **named)
        if made.numel() and made.device.type == DEVICE:
            made.reshape(-1).view(torch.uint8).fill_(byte)
        return made

    torch.empty = empty  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.empty = original  # type: ignore[assignment]


def check_poison(cls: str, name: str, tokens: int, pattern: str) -> Found:
    """Every element of the result is written and right, whatever was in memory before: once between launches that
    overlap as always, in blocks that were freed; once certainly in every tensor, with a launch before each kernel."""
    case = build(M=tokens, seed=tokens, **POISON_CASES[name])
    want, experts, arguments = case.reference_output(), loaded(case, cls), inputs(case)
    expert_map = None if case.expert_map is None else case.expert_map.to(DEVICE)
    call = lambda: experts.apply(*arguments, expert_map=expert_map)
    found = difference(call(), want)
    if found is not None:
        return {"memory": "as it comes", **found}
    with poisoned_empty(POISON[pattern]):
        found = difference(call(), want)
    if found is not None:
        return {"memory": "every torch.empty", **found}
    if DEVICE == "cpu":
        return None
    for turn in range(3):
        poison_free_memory(POISON[pattern])
        segments = torch.cuda.memory_stats()["segment.all.allocated"]
        out = call()
        fresh = torch.cuda.memory_stats()["segment.all.allocated"] - segments
        if (found := difference(out, want)) is not None:
            return {"memory": "freed blocks", "turn": turn, **found}
        if fresh:
            return {"what": f"{fresh} segments were not poisoned: poison_free_memory has to free more"}
    return None


# --- alignment -------------------------------------------------------------------------------------------------------

ALIGNED_EXPERTS = {8: 128, 128: 16, 1024: 64, 2000: 16}  # experts: block_m
ALIGNED_SLOTS = (1, 257, 5000, 8193, 65536)


def check_alignment(num_experts: int, slots: int, mapped: bool) -> Found:
    """Order, table of blocks and codes against a plain statement in numpy."""
    rng = np.random.default_rng(slots + num_experts)
    block_m = ALIGNED_EXPERTS[num_experts]
    ids = rng.integers(0, num_experts, slots)
    expert_map: np.ndarray | None = None
    num_local, x = num_experts, None
    if mapped:
        num_local = (num_experts + 1) // 2
        expert_map = np.full(num_experts, -1, np.int32)
        expert_map[rng.permutation(num_experts)[:num_local]] = np.arange(num_local)
        ids[rng.random(slots) < 0.1] = rng.choice([-1, -5, num_experts, 2**33])
    else:
        x = torch.randn(slots, 48, generator=torch.Generator().manual_seed(slots)).bfloat16()
    to = lambda a: None if a is None else torch.from_numpy(a).to(DEVICE)
    got, codes = launch.align(
        to(ids.reshape(-1, 1)), to(expert_map), num_experts, num_local, block_m, None if x is None else x.to(DEVICE),
        second_block_m=2 * block_m, places=True,
    )  # fmt: skip
    known = (ids >= 0) & (ids < num_experts)
    local = np.where(known, ids, 0)
    local = np.where(known, local if expert_map is None else expert_map[local], -2)
    if not np.array_equal(got.local.cpu().numpy(), local):
        return {"what": "local experts differ"}
    order = np.argsort(np.where(local < 0, num_local, local), kind="stable")[: (local >= 0).sum()]
    if got.order is None or not np.array_equal(got.order.cpu().numpy()[: len(order)], order):
        return {"what": "the order differs"}
    place = np.where(local < 0, local, 0)
    place[order] = np.arange(len(order))
    if got.place is None or not np.array_equal(got.place.cpu().numpy(), place):
        return {"what": "the places differ"}
    ordered = local[order]
    for blocks, height in ((got, block_m), (got.second, 2 * block_m)):
        if blocks is None:
            return {"what": f"there are no blocks of {height}"}
        table = []
        for expert, first, rows in zip(*np.unique(ordered, return_index=True, return_counts=True), strict=True):
            table += [(int(expert), int(first) + r, min(height, int(rows) - r)) for r in range(0, int(rows), height)]
        count, held = blocks.totals.tolist()
        if (count, held) != (len(table), len(order)) or count > blocks.capacity:
            return {"what": f"totals are {count}, {held} of {blocks.capacity}; needs {len(table)}, {len(order)}"}
        columns = (t.cpu()[:count].tolist() for t in (blocks.expert, blocks.first, blocks.rows))
        if list(zip(*columns, strict=True)) != table:
            return {"what": f"the table of blocks of {height} differs"}
    if x is not None:
        assert codes is not None
        q, scale = quantize_activations(x)
        if not torch.equal(codes[0].cpu(), q):
            return {"what": "codes differ"}
        return difference(codes[1][:, None], scale)
    return None


# --- graphs, torch.compile, streams ----------------------------------------------------------------------------------


def check_graph(cls: str, scheme: str, tokens: int) -> Found:
    """A replay takes what its input tensors hold by then."""
    first, second = (build(M=tokens, E=16, topk=4, H=256, I=128, scheme=scheme, seed=s) for s in (0, 1))
    second.w13, second.w2, second.quant_config = first.w13, first.w2, first.quant_config
    experts, held = loaded(first, cls), inputs(first)
    graph, out = capture(lambda: experts.apply(*held))
    for turn, case in enumerate((second, first, second)):
        for tensor, new in zip(held, (case.hidden_states, case.topk_weights, case.topk_ids), strict=True):
            tensor.copy_(new)
        out.fill_(float("nan"))
        graph.replay()
        if (found := difference(out, case.reference_output())) is not None:
            return {"turn": turn, **found}
    return None


def check_compile(cls: str) -> Found:
    case = build(M=6)
    experts = loaded(case, cls)
    step = torch.compile(lambda x, w, i: experts.apply(x + 0, w, i) * 1, fullgraph=True)
    return difference(step(*inputs(case)), case.reference_output())


def check_streams(cls: str) -> Found:
    """Two layers of different shape at once, on two streams, many calls each."""
    layers = [
        build(M=300, E=16, topk=4, H=256, I=128),
        build(M=3, E=8, topk=2, H=512, I=320, dtype="float16", seed=1),
    ]
    experts, arguments = [loaded(case, cls) for case in layers], [inputs(case) for case in layers]
    for one, given in zip(experts, arguments, strict=True):
        one.apply(*given)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    outs: list[list[torch.Tensor]] = [[], []]
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)  # both queues are full before either starts
    for _ in range(50):
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                outs[number].append(experts[number].apply(*arguments[number]))
    torch.cuda.synchronize()
    for number, case in enumerate(layers):
        want = case.reference_output()
        for turn, out in enumerate(outs[number]):
            if (found := difference(out, want)) is not None:
                return {"layer": number, "turn": turn, **found}
    return None


# --- weight-only -----------------------------------------------------------------------------------------------------

WEIGHT_ONLY: dict[str, dict[str, Any]] = {
    "ragged": dict(H=70, I=96, M=12, bias=True, activation=MoEActivation.SWIGLUOAI),
    "one token": dict(H=512, I=256, M=1, bias=True),
    "many tokens": dict(H=512, I=256, M=300, E=4, bias=True),
}


def check_weight_only(cls: str, dtype: str, name: str) -> Found:
    """W8A16 within its tolerance, by the plan chosen for it and by two drawn ones."""
    case = build(scheme="w8a16", dtype=dtype, **WEIGHT_ONLY[name])
    want, a_bytes = case.reference_output().double(), case.hidden_states.element_size()
    plans = [None] if dtype == "float32" else [None, *(random_plan(seed, capability(), a_bytes) for seed in (1, 2))]
    for plan in plans:
        with contextlib.nullcontext() if plan is None else forced(plan):
            got = case.run(CLASSES[cls], DEVICE).double()
        error = float((got - want).norm() / want.norm())
        if not error <= WEIGHT_ONLY_ERROR[dtype]:
            return {"relative_error": error, "tolerance": WEIGHT_ONLY_ERROR[dtype], "plan": str(plan)}
    return None


# --- what is checked -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """One check: its section, its name there, and what makes it."""

    section: str
    name: str
    body: Callable[[], Found]


def checks(
    section: str, function: Callable[..., Found], arguments: Sequence[tuple[Any, ...]], kind: str = ""
) -> list[Check]:
    """One check for each tuple of arguments, which is its name, after `kind`."""
    return [Check(section, kind + ", ".join(map(str, a)), functools.partial(function, *a)) for a in arguments]


def bundles(gpu: Capability, tiles: str) -> tuple[list[list[Check]], list[list[Check]]]:
    """Checks that one process makes one after the other: first those on a shared layer or of much else, then single
    ones in a drawn order."""
    alone, real, graphs = "a token alone and among others", "real shapes", "CUDA graph, torch.compile, streams"
    mappings = [(e, s, m) for e in ALIGNED_EXPERTS for s in ALIGNED_SLOTS for m in (False, True)]
    first = [
        checks("quotient, all 2**32 patterns", check_quotient, [(name,) for name in QUOTIENTS]),
        checks(real, check_shape, [("standard", "mixtral", m) for m in (1, 64, 2048)]),
        checks(real, check_shape, [("standard", "qwen3-30b", m) for m in (1, 8, 300, 4096)]),
        checks(real, check_shape, [("batched", "qwen3-30b", m) for m in (1, 300)]),
        checks(alone, check_alone, [("standard", m) for m in (7, 40, 129, 1000, 4096)]),
        checks(alone, check_alone, [("batched", m) for m in (7, 40, 129, 1000)]),
        *(
            checks(graphs, check_graph, [(cls, scheme, m) for m in (1, 40, 300)], "graph, ")
            for cls in CLASSES
            for scheme in ("w8a8", "w8a8-tensor")
        ),
        *(checks(graphs, check_compile, [(cls,)], "compile, ") for cls in CLASSES),
        *(checks(graphs, check_streams, [(cls,)], "streams, ") for cls in CLASSES),
    ]
    then = [
        *checks("adversarial", check_adversarial, [(cls, name) for cls in CLASSES for name in ADVERSARIAL]),
        *(
            check
            for cls, scheme, count in (
                ("standard", "w8a8", 160),
                ("batched", "w8a8", 60),
                ("standard", "w8a8-tensor", 50),
                ("batched", "w8a8-tensor", 20),
            )
            for check in checks(f"random, {scheme}, {cls}", check_random, [(cls, scheme, s) for s in range(count)])
        ),
        *checks(f"tiles of tuning ({tiles})", check_tile, tile_plans(gpu, tiles)),
        *checks(
            "unwritten memory", check_poison,
            [(cls, name, m, p) for cls in CLASSES for name in POISON_CASES for m in (1, 40, 300) for p in POISON],
        ),
        *checks("alignment", check_alignment, mappings),
        *checks(
            "weight-only, tolerance", check_weight_only,
            [(cls, dtype, name) for cls in CLASSES for dtype in DTYPES for name in WEIGHT_ONLY],
        ),
        *checks(
            "invalid ids become NaN", check_invalid,
            [(cls, bad, mapped) for cls in CLASSES for bad in (-1, 8, 2**40) for mapped in (False, True)],
        ),
    ]  # fmt: skip
    random.Random(0).shuffle(then)
    return first, [[check] for check in then]


# --- the record ------------------------------------------------------------------------------------------------------


@dataclass
class Section:
    """Results of one section."""

    total: int
    equal: int = 0
    failed: list[dict[str, Any]] = field(default_factory=list)
    check_seconds: float = 0.0

    @property
    def not_run(self) -> int:
        return self.total - self.equal - len(self.failed)


class Report:
    """Prints and keeps results: a line for each section, a JSON file rewritten as they come in."""

    def __init__(self, path: Path | None, every: Sequence[Check], facts: dict[str, Any]) -> None:
        self.path, self.facts, self.start, self.written = path, facts, time.time(), 0.0
        self.cut: list[str] = []
        self.sections: dict[str, Section] = {}
        for check in every:
            self.sections.setdefault(check.section, Section(0)).total += 1

    def note(self, check: Check, found: Found, seconds: float) -> None:
        section = self.sections[check.section]
        section.check_seconds += seconds
        if found is None:
            section.equal += 1
        else:
            section.failed.append({"check": check.name, **found})
            if len(section.failed) <= MISMATCHES_SHOWN:
                print(f"  WRONG {check.section} / {check.name}: {json.dumps(found, default=str)[:900]}", flush=True)
        if section.not_run == 0:
            self._line(check.section)
        if time.time() - self.written > 1:
            self.write()

    def _line(self, name: str) -> None:
        s = self.sections[name]
        missing = f", {s.not_run} not run" if s.not_run else ""
        print(
            f"{name}: {s.equal} right, {len(s.failed)} wrong{missing}; {s.check_seconds:.0f} s of checks, at"
            f" {time.time() - self.start:.0f} s",
            flush=True,
        )

    def write(self) -> None:
        self.written = time.time()
        if self.path is None:
            return
        sections = {
            name: {
                "right": s.equal, "wrong": len(s.failed), "not_run": s.not_run, "seconds": round(s.check_seconds, 1),
                "first_wrong": s.failed[:MISMATCHES_SHOWN],
            }
            for name, s in self.sections.items()
        }  # fmt: skip
        content = {**self.facts, "seconds": round(time.time() - self.start, 1), "cut": self.cut, "sections": sections}
        whole = self.path.with_suffix(".part")
        whole.write_text(json.dumps(content, indent=1, default=str))
        whole.replace(self.path)

    def close(self) -> int:
        """Lines of sections that did not finish, the sum; returns the exit code."""
        for name, section in self.sections.items():
            if section.not_run:
                self._line(name)
        if self.cut:
            print(f"cut by the time limit while they ran: {'; '.join(self.cut)}", flush=True)
        self.write()
        right, wrong, missing = (
            sum(f(s) for s in self.sections.values())
            for f in (lambda s: s.equal, lambda s: len(s.failed), lambda s: s.not_run)
        )
        seconds = time.time() - self.start
        print(f"all: {right} right, {wrong} wrong, {missing} not run, {seconds:.0f} s", flush=True)
        return 1 if wrong or not right else 0


def facts_of_the_machine() -> dict[str, Any]:
    gpu = torch.cuda.get_device_properties(0)
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": gpu.name,
        "capability": list(torch.cuda.get_device_capability(0)),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda},
    }


# --- processes -------------------------------------------------------------------------------------------------------


def made(check: Check) -> Found:
    """What a check finds; an exception is something found."""
    try:
        found = check.body()
        if DEVICE == "cuda" and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return found
    except Exception as error:
        return described(error)


def context_broke() -> bool:
    """Whether an error on the GPU makes this process useless."""
    try:
        if DEVICE == "cuda" and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return False
    except Exception:
        return True


def serve(connection: Any) -> None:
    """A child: checks in, what they found out."""
    prepare_process()
    connection.send("ready")
    while (check := connection.recv()) is not None:
        found = made(check)
        connection.send((found, found is not None and context_broke()))


def prepare_process() -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    os.environ.pop(arguments.VALIDATE_VARIABLE, None)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no further processes
    logging.getLogger("int8moe").setLevel(logging.ERROR)  # one warning for every shape without tuned tiles


class Child:
    """A process that makes checks."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.ready = False

    def answer(self, deadline: float, seconds: float) -> Any:
        """What comes next, or None at the deadline.

        Raises:
            EOFError: the process died. TimeoutError: it hangs.
        """
        if self.connection.poll(max(0.0, min(deadline - time.time(), seconds))):
            return self.connection.recv()
        if time.time() >= deadline:
            return None
        raise TimeoutError

    def ask(self, check: Check, deadline: float) -> tuple[Found, bool] | None:
        """What the check found, and whether this process has to be replaced; None: cut by the deadline."""
        try:
            if not self.ready:
                self.ready = self.answer(deadline, START_SECONDS) is not None
            if not self.ready:
                return None
            self.connection.send(check)
            return self.answer(deadline, CHECK_SECONDS)
        except TimeoutError:
            return {"error": f"no answer in {CHECK_SECONDS if self.ready else START_SECONDS:.0f} s"}, True
        except (EOFError, OSError):
            self.process.join(5)
            return {"error": f"the process died with exit code {self.process.exitcode}"}, True

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


Result = tuple[Check, Found, float, bool]
"""What a check found, its seconds, and whether the time limit cut it."""


def work(todo: queue.SimpleQueue[list[Check]], results: queue.SimpleQueue[Result | None], deadline: float) -> None:
    """A thread: hands bundles to a child of its own, until none is left or the deadline has passed."""
    child: Child | None = None
    try:
        while time.time() < deadline:
            try:
                bundle = todo.get_nowait()
            except queue.Empty:
                return
            for check in bundle:
                child = child or Child()
                start = time.time()
                answer = child.ask(check, deadline)
                seconds = time.time() - start
                if answer is None:
                    results.put((check, None, seconds, True))
                    return
                results.put((check, answer[0], seconds, False))
                if answer[1]:
                    child.stop()
                    child = None
    finally:
        if child is not None:
            child.stop()
        results.put(None)


def make_all(plan: Sequence[list[Check]], report: Report, workers: int, deadline: float) -> None:
    """Every check, in `workers` processes, until the deadline."""
    todo: queue.SimpleQueue[list[Check]] = queue.SimpleQueue()
    for bundle in plan:
        todo.put(bundle)
    results: queue.SimpleQueue[Result | None] = queue.SimpleQueue()
    running = min(workers, len(plan))
    for _ in range(running):
        threading.Thread(target=work, args=(todo, results, deadline), daemon=True).start()
    while running:
        result = results.get()
        if result is None:
            running -= 1
        elif result[3]:
            report.cut.append(f"{result[0].section} / {result[0].name} ({result[2]:.0f} s)")
        else:
            report.note(*result[:3])


# --- the sanitizer ---------------------------------------------------------------------------------------------------

_SMALL = TileConfig(16, 32, 64, 1, 4, 3)
_TALL = TileConfig(64, 64, 64, 8, 4, 3)
_PERSISTENT = replace(_SMALL, persistent=1)
_POINTERS = replace(_SMALL, tma=False)
_TALL_POINTERS = replace(_TALL, tma=False, persistent=1)
_EIGHT = TileConfig(8, 64, 128, 1, 4, 3)
_ONE = TileConfig(1, 32, 128, 1, 4, 3)
_LAYER: dict[str, Any] = dict(E=3, topk=2, H=144, I=80, M=40)
_INTERLEAVED: dict[str, Any] = {**_LAYER, "activation": MoEActivation.SWIGLUOAI, "bias": True, "limit": 1.0}
SANITIZED: dict[str, tuple[str, dict[str, Any], Plan]] = {
    "rows": ("standard", {**_LAYER, "M": 1}, Plan(_SMALL, _SMALL, rows=True)),
    "rows, ragged, mapped": (
        "standard",
        dict(E=6, topk=3, H=70, I=45, M=2, local=[0, 4, 5], bias=True),
        Plan(_SMALL, _SMALL, rows=True),
    ),
    "copy engine": ("standard", _LAYER, Plan(_SMALL, _SMALL)),
    "copy engine, rows sorted, 64": ("standard", _LAYER, Plan(_TALL, _TALL, sort_rows=True)),
    "copy engine, persistent, rows sorted": ("standard", _INTERLEAVED, Plan(_PERSISTENT, _PERSISTENT, sort_rows=True)),
    "pointers": ("standard", _LAYER, Plan(_POINTERS, _POINTERS)),
    "pointers, persistent, 64": ("standard", _INTERLEAVED, Plan(_TALL_POINTERS, _TALL_POINTERS)),
    "ragged, mapped": (
        "standard",
        dict(E=6, topk=3, H=71, I=45, M=21, local=[0, 4, 5], dtype="float32", activation=MoEActivation.GELU),
        Plan(_SMALL, _SMALL),
    ),
    "per tensor": ("standard", {**_LAYER, "scheme": "w8a8-tensor"}, Plan(_SMALL, _SMALL)),
    "batched": ("batched", {**_LAYER, "local": [0, 2]}, Plan(_SMALL, _SMALL)),
    "batched, per tensor": ("batched", {**_LAYER, "scheme": "w8a8-tensor"}, Plan(_SMALL, _SMALL)),
    "rows, blocks of 8": ("standard", {**_LAYER, "M": 1}, Plan(_EIGHT, _EIGHT, rows=True)),
    "rows, without tensor cores": ("standard", {**_LAYER, "M": 1}, Plan(_ONE, _ONE, rows=True)),
    "blocks of 8": ("standard", _LAYER, Plan(_EIGHT, _EIGHT)),
    **{
        f"specialised, {tile.block_m} x {tile.block_n}, {tile.num_warps} warps": (
            "standard",
            dict(E=4, topk=2, H=256, I=128, M=150),
            Plan(tile, tile, sort_rows=True),
        )
        for tile in (
            TileConfig(64, 128, 128, 8, 4, 3, specialized=True),
            TileConfig(128, 128, 128, 8, 8, 3, specialized=True),
            TileConfig(128, 256, 128, 8, 8, 3, specialized=True),
        )
    },
    "slots in chunks": ("standard", dict(E=4, topk=2, H=16, I=16, M=2100), Plan(_TALL, _TALL)),
}


def check_sanitized(name: str) -> Found:
    cls, what, plan = SANITIZED[name]
    case = build(**what)
    return check_forced(case, cls, plan, case.reference_output())


def sanitized() -> list[Check]:
    section = "least, in one process"
    alignments = [(num_experts, 5000, mapped) for num_experts in (8, 128) for mapped in (False, True)]
    return [
        *checks(section, check_sanitized, [(name,) for name in SANITIZED]),
        *checks(section, check_weight_only, [("standard", "bfloat16", name) for name in ("ragged", "one token")]),
        *checks(section, check_alignment, alignments),
    ]


# --- the command -----------------------------------------------------------------------------------------------------


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder of gpu_checks.json")
    parser.add_argument("--seconds", type=float, default=80.0, help="time limit; what did not run by then is counted")
    parser.add_argument("--workers", type=int, default=max(1, min(15, (os.cpu_count() or 1) - 1)))
    parser.add_argument("--tiles", choices=("all", "sample"), default="sample")
    parser.add_argument("--only", default="", help="sections whose name holds this")
    parser.add_argument("--sanitize", action="store_true", help="the least, in one process, for compute-sanitizer")
    arguments = parser.parse_args(given)
    deadline = time.time() + arguments.seconds
    if not torch.cuda.is_available() or launch.INTERPRETED:
        print("needs a CUDA GPU, without TRITON_INTERPRET")
        return 2
    path = None
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        path = arguments.out / ("gpu_checks_sanitize.json" if arguments.sanitize else "gpu_checks.json")
    if arguments.sanitize:
        prepare_process()
        report = Report(path, sanitized(), facts_of_the_machine())
        if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") != "1":
            print("without PYTORCH_NO_CUDA_MEMORY_CACHING=1 the sanitizer sees few accesses past the end of a tensor")
        for check in sanitized():
            start = time.time()
            report.note(check, made(check), time.time() - start)
        return report.close()
    first, then = bundles(capability(), arguments.tiles)
    plan = [bundle for bundle in (*first, *then) if arguments.only in bundle[0].section]
    report = Report(path, [check for bundle in plan for check in bundle], facts_of_the_machine())
    make_all(plan, report, arguments.workers, deadline)
    return report.close()


if __name__ == "__main__":
    sys.exit(main())
