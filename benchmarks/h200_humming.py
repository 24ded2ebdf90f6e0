"""The Humming backend on one NVIDIA GPU: is it right, and how fast is it?

    PYTHONPATH=src:tests python3 benchmarks/h200_humming.py --out DIR [--seconds 150] [--only cases|checks|time]
    PYTHONPATH=src:tests python3 benchmarks/h200_humming.py --out DIR --dry      (anywhere: no GPU, nothing compiled)

Cases: all of tests/cases.py that the rules admit (sizes raised to multiples of 16, float32 ones in bfloat16), each on
all three classes. Two errors are given, relative Frobenius norms: against `ReferenceExperts` (at most 2e-2) and against
the same layer rounded where Humming rounds (tests/humming_rounding.py, at most 4e-3). Checks: conversion and back, CUDA
graphs, torch.compile, several streams, two layers in turn, wrong ids. Both run in processes, cases of one shape
together, since most of the time is compilation and a crash must not take the rest along. Times: both standard classes
on two models' shapes, in a CUDA graph, with the package's tile widths and with ours. Results go to DIR/humming.json as
they come.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import queue
import sys
import time
import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from cases import ADVERSARIAL, Case, build
from humming_rounding import REFERENCE_LIMIT, ROUNDED_LIMIT, error, rounded_output
from int8moe.backends.humming.support import (
    BatchedHummingGroupedExperts,
    HummingGroupedExperts,
    HummingIndexedExperts,
)
from int8moe.config import FusedMoEConfig
from int8moe.device import CUDA_PIECES, Platform, find_cuda_toolkit
from int8moe.errors import AlreadyConverted
from int8moe.oracle.int8 import Int8MoeBackend, convert_to_int8_moe_kernel_format
from int8moe.quant_config import int8_w8a8_moe_quant_config

CLASSES = {c.__name__: c for c in (HummingIndexedExperts, HummingGroupedExperts, BatchedHummingGroupedExperts)}
SHAPES = {  # experts, topk, hidden, intermediate
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "mixtral-8x7b": (8, 2, 4096, 14336),
}
TOKENS = (1, 8, 32, 128, 512, 2048)
CHECKED_TOKENS = 16
GROUP = 6
MORE_CASES = {
    "ragged_tile": dict(H=80, I=48, M=35, bias=True),
    "ragged_tile_fp16": dict(H=208, I=336, M=35, dtype="float16"),
    "unit_tile": dict(H=16, I=16, M=3),
    "tiles_of_64": dict(H=256, I=192, M=70),
    "tiles_of_64_fp16": dict(H=256, I=192, M=70, dtype="float16", bias=True),
    "long_k": dict(H=4096, I=1024, M=12, E=4),
    "long_k_extreme": dict(H=4096, I=1024, M=12, E=4, weights="extreme"),
    "wide_fp16": dict(H=2048, I=768, M=40, E=16, topk=4, dtype="float16"),
}
DRY = False


# --- cases -----------------------------------------------------------------------------------------------------------


def machine() -> Platform:
    """This machine; package and compiler count as there where Python finds them, also without metadata."""
    here = Platform.named("h200") if DRY else Platform.current()
    return replace(here, packages=here.packages | {"humming-kernels"}, cuda_toolkit=frozenset(CUDA_PIECES))


def adapted(name: str) -> dict[str, Any]:
    """The case's arguments, as Humming can take them."""
    kwargs = dict((ADVERSARIAL | MORE_CASES)[name])
    for side in ("H", "I"):
        if side in kwargs:
            kwargs[side] = -(-kwargs[side] // 16) * 16
    if kwargs.get("dtype") == "float32":
        kwargs["dtype"] = "bfloat16"
    return kwargs


def distinct_cases() -> list[str]:
    """Names of all cases, without those that become the same as another."""
    seen: dict[str, str] = {}
    for name in (*MORE_CASES, *ADVERSARIAL):
        kwargs = {"dtype": "bfloat16", "H": 64, "I": 96} | adapted(name)
        seen.setdefault(repr(sorted(kwargs.items(), key=lambda item: item[0])), name)
    return list(seen.values())


def make(name: str, cls: type) -> Case:
    case = build(**adapted(name), platform=machine())
    parallel = replace(
        case.config.moe_parallel_config, use_batched_activation_format=cls is BatchedHummingGroupedExperts
    )
    return replace(case, config=replace(case.config, moe_parallel_config=parallel))


def kernels_for(tokens: int) -> None:
    """Compile no more kernels than calls of so many tokens need."""
    from int8moe.backends.humming import compile as ahead

    ahead.MOST_TOKENS = max(1, tokens)


def run_case(cls: type, case: Case) -> torch.Tensor:
    """What the class computes; dry, what it should compute, after asking the package for every kernel."""
    kernels_for(len(case.hidden_states))
    if not DRY:
        return case.run(cls, "cuda")
    from int8moe.backends.humming import compile as ahead
    from int8moe.backends.humming import run

    experts = cls(case.config, case.quant_config)._run
    plan = run.make_plan(case.config, experts.gemm_type, torch.device("cuda", 0))
    assert ahead.jobs(plan, run.slots_here(case.config, ahead.MOST_TOKENS)) and plan.key()
    assert all('"use_stream_k": false' in t.text for g in (plan.w13, plan.w2) for t in g.tunings)
    return rounded_output(case)


def check_case(class_name: str, name: str) -> dict[str, Any]:
    """One case on one class. Never raises."""
    started = time.time()
    record: dict[str, Any] = {"kind": "case", "class": class_name, "case": name}
    try:
        cls = CLASSES[class_name]
        case = make(name, cls)
        supported, reason = cls.is_supported_config(
            case.config, case.quant_config.weight_key, case.quant_config.activation_key
        )
        if not supported:
            return record | {"status": "refused", "reason": reason}
        got = run_case(cls, case)
        reference, rounded = case.reference_output(), rounded_output(case)
        (record["error_reference"], record["finite_reference"]) = error(got, reference)
        (record["error_rounded"], record["finite_rounded"]) = error(got, rounded)
        good = record["error_reference"] <= REFERENCE_LIMIT and record["error_rounded"] <= ROUNDED_LIMIT
        good = good and not record["finite_rounded"]
        record["status"] = "ok" if good else "WRONG"
    except Exception as problem:
        record |= {"status": "RAISED", "reason": f"{problem!r:.400}", "trace": traceback.format_exc()[-1500:]}
    return record | {"seconds": round(time.time() - started, 1)}


# --- checks ----------------------------------------------------------------------------------------------------------


def to_cuda(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else t.cuda()


def load(cls: type, case: Case, layer: Any = None) -> Any:
    tensors = {
        name: to_cuda(getattr(case.quant_config, name)) for name in ("w1_scale", "w2_scale", "w1_bias", "w2_bias")
    }
    moved = replace(case.quant_config, **tensors)
    kernels_for(len(case.hidden_states))
    experts = cls(case.config, moved)
    experts.process_weights_after_loading(
        layer or SimpleNamespace(w13_weight=case.w13.cuda(), w2_weight=case.w2.cuda())
    )
    return experts


def conversion(cls: type) -> None:
    """convert_to_int8_moe_kernel_format, then the experts: the same result as without; and back to canonical."""
    case = make("ragged_tile", cls)
    layer = SimpleNamespace(
        w13_weight=case.w13.cuda(), w2_weight=case.w2.cuda(),
        w13_scale=case.quant_config.w1_scale.cuda(), w2_scale=case.quant_config.w2_scale.cuda(),
    )  # fmt: skip
    arguments = (Int8MoeBackend.HUMMING, layer.w13_weight, layer.w2_weight, layer)
    w13, w2 = convert_to_int8_moe_kernel_format(*arguments)
    assert w13 is layer.w13_weight and w2 is layer.w2_weight and w13.dtype is torch.int32
    assert not hasattr(layer, "w13_scale") and layer.w13_weight_scale.shape == (*case.w13.shape[:2], 1)
    try:
        convert_to_int8_moe_kernel_format(*arguments)
        raise AssertionError("converted twice")
    except AlreadyConverted:
        pass
    experts = load(cls, case, layer)
    assert torch.equal(case.call(experts, "cuda"), case.run(cls, "cuda")), "differs from the unconverted path"
    for back, canonical in zip(experts.unpack_weights(), (case.w13, case.w2), strict=True):
        assert torch.equal(back.cpu(), canonical), "unpack_weights is not exact"


def graph_replay(cls: type) -> None:
    """A captured call gives for new inputs and a new routing what an eager call gives."""
    case = make("tiles_of_64", cls)
    experts = load(cls, case)
    x, w, ids = case.hidden_states.cuda(), case.topk_weights.cuda(), case.topk_ids.cuda()
    experts.apply(x, w, ids)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = experts.apply(x, w, ids)
    x.copy_(torch.randn_like(x))
    ids.copy_(ids.flip(0))
    graph.replay()
    torch.cuda.synchronize()
    assert error(captured, experts.apply(x, w, ids))[0] <= ROUNDED_LIMIT


def wrong_ids(cls: type) -> None:
    """Ids that name no expert are not read, make their token NaN, and change no other."""
    case = make("tiles_of_64", cls)
    experts = load(cls, case)
    good = case.call(experts, "cuda")
    case.topk_ids[3], case.topk_ids[5] = 10**6, -7
    got = case.call(experts, "cuda")
    rest = [t for t in range(len(got)) if t not in (3, 5)]
    assert got[[3, 5]].isnan().all() and error(got[rest], good[rest])[0] <= ROUNDED_LIMIT


def unaligned_input(cls: type) -> None:
    """A view that starts off 16 bytes and is not contiguous."""
    case = make("tiles_of_64", cls)
    experts = load(cls, case)
    want = case.call(experts, "cuda")
    wide = torch.zeros(case.hidden_states.shape[0], case.hidden_states.shape[1] + 3, dtype=case.hidden_states.dtype)
    wide[:, 1:-2] = case.hidden_states
    got = experts.apply(wide.cuda()[:, 1:-2], case.topk_weights.cuda(), case.topk_ids.cuda())
    assert error(got, want)[0] <= ROUNDED_LIMIT


def batched_entry(cls: type) -> None:
    """`apply_batched` against `apply` with one expert a token."""
    if cls is not BatchedHummingGroupedExperts:
        return
    case = make("tiles_of_64", cls)
    case = replace(case, config=replace(case.config, experts_per_token=1))
    experts = load(cls, case)
    counts = torch.tensor([3, 0, 24, 1, 7, 16, 0, 9], dtype=torch.int32, device="cuda")
    x = torch.randn(8, 24, case.config.hidden_dim, device="cuda").bfloat16()
    x[torch.arange(24, device="cuda") >= counts[:, None]] = float("nan")
    got = experts._run.apply_batched(x, counts)
    assert not got[torch.arange(24, device="cuda") >= counts[:, None]].any(), "rows past the count are not zero"
    for e, n in enumerate(counts.tolist()):
        if n:
            ids = torch.full((n, 1), e, device="cuda")
            assert error(got[e, :n], experts.apply(x[e, :n], torch.ones(n, 1, device="cuda"), ids))[0] <= ROUNDED_LIMIT


def full_graph(cls: type) -> None:
    """torch.compile takes the call whole, between other operations, and gives what an eager call gives."""
    case = make("tiles_of_64", cls)
    experts = load(cls, case)
    arguments = tuple(t.cuda() for t in (case.hidden_states, case.topk_weights, case.topk_ids))

    def step(x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return experts.apply(x * 2, w, ids) + 1

    compiled = torch.compile(step, fullgraph=True)
    assert torch.equal(compiled(*arguments), step(*arguments))


def several_streams(cls: type) -> None:
    """Calls of one layer and of another at once on two streams, as eager calls and as graphs, give the same bits."""
    cases = [make("tiles_of_64", cls), make("ragged_tile", cls)]
    layers = [load(cls, case) for case in cases]
    inputs = [tuple(t.cuda() for t in (c.hidden_states, c.topk_weights, c.topk_ids)) for c in cases]
    calls = [functools.partial(e.apply, *a) for e, a in zip(layers, inputs, strict=True)]
    want = [call() for call in calls]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for order in ((0, 1), (0, 0), (1, 0)):
        got: list[list[torch.Tensor]] = [[], []]
        for _ in range(50):
            for stream, which in zip(streams, order, strict=True):
                with torch.cuda.stream(stream):
                    got[streams.index(stream)].append(calls[which]())
        torch.cuda.synchronize()
        for outputs, which in zip(got, order, strict=True):
            assert all(torch.equal(out, want[which]) for out in outputs), f"streams with layers {order} differ"
    graphs, held = [], []
    for call in (calls[0], calls[0], calls[1]):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            held.append(call())
        graphs.append(graph)
    for _ in range(20):
        for graph, stream in zip(graphs, (streams[0], streams[1], streams[0]), strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, want[which]) for out, which in zip(held, (0, 0, 1), strict=True)), "graphs differ"


def two_layers_in_turn(cls: type) -> None:
    """Layers of different shapes, called in turn, do not disturb each other."""
    cases = [make(name, cls) for name in ("tiles_of_64", "ragged_tile", "unit_tile")]
    layers = [load(cls, case) for case in cases]
    want = [case.call(experts, "cuda") for experts, case in zip(layers, cases, strict=True)]
    for _ in range(5):
        for experts, case, out in zip(layers, cases, want, strict=True):
            assert torch.equal(case.call(experts, "cuda"), out)


def same_bits_in_any_batch(cls: type) -> None:
    """A token's bits do not depend on the batch: no sum along K is rounded in between."""
    case = make("tiles_of_64", cls)
    experts = load(cls, case)
    x, w, ids = (t.cuda() for t in (case.hidden_states, case.topk_weights, case.topk_ids))
    whole = experts.apply(x, w, ids)
    for tokens in (1, 2, 7, 33):
        assert torch.equal(experts.apply(x[:tokens], w[:tokens], ids[:tokens]), whole[:tokens]), tokens


CHECKS = {
    f.__name__: f
    for f in (
        conversion, graph_replay, full_graph, several_streams, two_layers_in_turn, same_bits_in_any_batch, wrong_ids,
        unaligned_input, batched_entry,
    )
}  # fmt: skip


def check_other(class_name: str, name: str) -> dict[str, Any]:
    """One check on one class. Never raises."""
    started = time.time()
    record: dict[str, Any] = {"kind": "check", "class": class_name, "case": name}
    try:
        if not DRY:
            CHECKS[name](CLASSES[class_name])
            torch.cuda.synchronize()
        record["status"] = "ok"
    except Exception as problem:
        record |= {"status": "RAISED", "reason": f"{problem!r:.400}", "trace": traceback.format_exc()[-1500:]}
    return record | {"seconds": round(time.time() - started, 1)}


# --- processes -------------------------------------------------------------------------------------------------------

Task = tuple[str, str, str]
"""Kind, class, name."""


@dataclass
class Worker:
    """A process, and what it has not answered yet, in its order."""

    process: Any
    tasks: list[Task] = field(default_factory=list)


def work(tasks: list[Task], results: Any, dry: bool) -> None:
    """Do `tasks` in order; ends where one of them broke the GPU's context."""
    if dry:
        go_dry()
    torch.set_num_threads(1)
    for task in tasks:
        kind, class_name, name = task
        record = (check_case if kind == "case" else check_other)(class_name, name)
        results.put((task, record))
        try:
            if not dry:
                torch.cuda.synchronize()
        except Exception:
            results.close()
            results.join_thread()
            os._exit(1)


def go_dry() -> None:
    global DRY
    DRY = True
    import humming_offline

    humming_offline.pretend()


def grouped_tasks(only: str | None) -> list[list[Task]]:
    """Tasks that share kernels together, at most `GROUP`; the slow ones first."""
    groups: dict[Any, list[Task]] = {}
    if only != "checks":
        for class_name in CLASSES:
            for name in distinct_cases():
                k = {"E": 8, "H": 64, "I": 96, "dtype": "bfloat16", "bias": False} | adapted(name)
                shape = (class_name, k["E"], k["H"], k["I"], k["dtype"], k["bias"], k.get("gated", True))
                groups.setdefault(shape, []).append(("case", class_name, name))
    if only != "cases":
        for class_name in CLASSES:
            for part in (list(CHECKS)[0::2], list(CHECKS)[1::2]):
                groups["checks", class_name, part[0]] = [("check", class_name, name) for name in part]
    cut = [tasks[i : i + GROUP] for tasks in groups.values() for i in range(0, len(tasks), GROUP)]
    return merged(sorted(cut, key=len, reverse=True))


def merged(groups: list[list[Task]]) -> list[list[Task]]:
    """Small groups put together: a process takes seconds to start."""
    full = [g for g in groups if len(g) > GROUP // 2]
    for group in (g for g in groups if len(g) <= GROUP // 2):
        room = next((g for g in full if len(g) + len(group) <= GROUP and g[0][1] == group[0][1]), None)
        if room is None:
            full.append(list(group))
        else:
            room.extend(group)
    return full


def correctness(report: Any, until: float, workers: int, only: str | None) -> None:
    """All tasks, until the time is over; what did not get its turn is said. A process that dies is replaced, and the
    task that it was at counts as crashed."""
    context = multiprocessing.get_context("spawn")
    results, waiting, running = context.Queue(), grouped_tasks(only), []

    def collect(seconds: float) -> None:
        try:
            while True:
                task, record = results.get(timeout=seconds)
                for worker in running:
                    if task in worker.tasks:
                        worker.tasks.remove(task)
                report(record)
        except queue.Empty:
            pass

    while (waiting or running) and time.time() < until:
        while waiting and len(running) < workers:
            tasks = waiting.pop(0)
            process = context.Process(target=work, args=(tasks, results, DRY), daemon=True)
            process.start()
            running.append(Worker(process, list(tasks)))
        collect(0.2)
        for worker in [w for w in running if not w.process.is_alive()]:
            collect(0.5)
            running.remove(worker)
            if worker.tasks:
                kind, class_name, name = worker.tasks.pop(0)
                report({"kind": kind, "class": class_name, "case": name, "status": "CRASHED"})
                if worker.tasks:
                    waiting.insert(0, worker.tasks)
    for worker in running:
        worker.process.terminate()
    for kind, class_name, name in [t for w in running for t in w.tasks] + [t for tasks in waiting for t in tasks]:
        report({"kind": kind, "class": class_name, "case": name, "status": "no time"})


# --- time ------------------------------------------------------------------------------------------------------------


@dataclass
class Layer:
    config: FusedMoEConfig
    w13: torch.Tensor
    w2: torch.Tensor
    s13: torch.Tensor
    s2: torch.Tensor


def model_layer(name: str) -> Layer:
    experts, topk, hidden, inner = SHAPES[name]
    g = torch.Generator(device="cuda").manual_seed(0)
    codes = lambda *s: torch.randint(-127, 128, s, dtype=torch.int8, device="cuda", generator=g)
    scales = lambda *s: torch.rand(s, device="cuda", generator=g) * 1e-3 + 1e-5
    return Layer(
        FusedMoEConfig(experts, topk, hidden, inner, platform=machine()),
        codes(experts, 2 * inner, hidden),
        codes(experts, hidden, inner),
        scales(experts, 2 * inner),
        scales(experts, hidden),
    )


def graph_time_us(call: Any) -> tuple[float, float, float]:
    """Median and quartiles of one replay, in microseconds."""
    import triton

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    low, median, high = triton.testing.do_bench(graph.replay, warmup=10, rep=50, quantiles=[0.25, 0.5, 0.75])
    return median * 1e3, low * 1e3, high * 1e3


def time_one(experts: Any, layer: Layer, topk: int, count: int, tokens: int) -> dict[str, Any]:
    """Error of some tokens and time of the whole layer. Never raises."""
    try:
        g = torch.Generator(device="cuda").manual_seed(tokens)
        x = torch.randn(tokens, experts.config.hidden_dim, device="cuda", generator=g).bfloat16()
        weights, ids = torch.randn(tokens, count, device="cuda", generator=g).softmax(-1).topk(topk, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        got = experts.apply(x, weights, ids)
        some = torch.linspace(0, tokens - 1, min(tokens, CHECKED_TOKENS), device="cuda").round().long()
        case = Case(experts.config, layer.w13, layer.w2, experts.quant_config, x, weights, ids)
        off, finite = error(got[some], rounded_output(case, some))
        median, low, high = graph_time_us(lambda: experts.apply(x, weights, ids))
        return {
            "status": "ok" if off <= ROUNDED_LIMIT and not finite else "WRONG", "error_rounded": off,
            "latency_us": round(median, 1), "quartiles_us": [round(low, 1), round(high, 1)],
        }  # fmt: skip
    except Exception as problem:
        return {"status": "RAISED", "reason": f"{problem!r:.400}", "trace": traceback.format_exc()[-1500:]}


def time_class(report: Any, until: float, cls: type, name: str, layer: Layer, head: dict[str, Any]) -> None:
    from int8moe.backends.humming import compile as ahead

    count, topk, _, _ = SHAPES[name]
    real = ahead.compile_ahead
    try:
        started = time.time()
        experts = cls(layer.config, int8_w8a8_moe_quant_config(layer.s13, layer.s2))
        slots = [m * topk for m in TOKENS]
        ahead.compile_ahead = lambda plan, _, device, tick=None: real(plan, slots, device, tick)
        experts.process_weights_after_loading(SimpleNamespace(w13_weight=layer.w13, w2_weight=layer.w2))
        torch.cuda.synchronize()
        report(head | {"load_s": round(time.time() - started, 2)})
    except Exception as problem:
        report(head | {"status": "RAISED", "reason": f"{problem!r:.400}", "trace": traceback.format_exc()[-1500:]})
        return
    finally:
        ahead.compile_ahead = real
    for tokens in TOKENS:
        if time.time() < until:
            report(head | {"M": tokens} | time_one(experts, layer, topk, count, tokens))
        else:
            report(head | {"M": tokens, "status": "no time"})


def timing(report: Any, until: float) -> None:
    from int8moe.backends.humming import launch

    for name in SHAPES:
        try:
            layer = model_layer(name)
        except Exception as problem:
            report({"kind": "time", "shape": name, "status": "RAISED", "reason": f"{problem!r:.400}"})
            continue
        for narrower in (True, False):
            launch.NARROWER = narrower
            for cls in (HummingIndexedExperts, HummingGroupedExperts):
                head = {"kind": "time", "class": cls.__name__, "shape": name, "narrower_tiles": narrower}
                if time.time() < until:
                    time_class(report, until, cls, name, layer, head)
                else:
                    report(head | {"status": "no time"})
        launch.NARROWER = True
        del layer
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--seconds", type=float, default=150.0, help="for everything; cases and checks get 70 %% of it")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--only", choices=["cases", "checks", "time"])
    parser.add_argument("--dry", action="store_true", help="no GPU: all but compiling and running")
    a = parser.parse_args()
    started, results = time.time(), []
    a.out.mkdir(parents=True, exist_ok=True)

    def report(record: dict[str, Any]) -> None:
        results.append(record)
        (a.out / "humming.json").write_text(json.dumps(results, indent=1))
        shown = {
            k: f"{v:.2e}" if isinstance(v, float) and "error" in k else v for k, v in record.items() if k != "trace"
        }
        print(json.dumps(shown), flush=True)
        if record.get("status") in ("RAISED", "WRONG") and "trace" in record:
            print(record["trace"], file=sys.stderr, flush=True)

    import humming
    import triton

    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "triton": triton.__version__}
    if a.dry:
        go_dry()
    toolkit = sorted(find_cuda_toolkit())
    name = "dry" if a.dry else torch.cuda.get_device_name()
    report({"kind": "machine", "device": name, **versions, "humming": humming.__version__, "cuda_toolkit": toolkit})
    if a.only != "time":
        share = 0.7 if a.only is None else 1.0
        correctness(report, started + a.seconds * share, a.workers, a.only)
    if a.only in (None, "time") and not a.dry:
        timing(report, started + a.seconds)
    states = [r["status"] for r in results if "status" in r]
    report(
        {
            "kind": "summary",
            **{s: states.count(s) for s in sorted(set(states))},
            "seconds": round(time.time() - started),
        }
    )


if __name__ == "__main__":
    main()
