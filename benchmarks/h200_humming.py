"""The Humming backend on one NVIDIA GPU: is it right, and how fast is it?

    PYTHONPATH=src:tests python3 benchmarks/h200_humming.py --out DIR --minutes 4

First every case of tests/cases.py that the rules admit (sizes raised to multiples of 16, float32 cases in bfloat16),
in worker processes, since most of the time is compilation and a crash must not take the rest along. Two errors are
given, both relative Frobenius norms: against `ReferenceExperts` (at most 2e-2) and against the same layer rounded where
Humming rounds (at most 4e-3). Then layer times of two models' shapes in a CUDA graph. Results go to DIR/humming.json as
they come.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from cases import ADVERSARIAL, Case, build
from int8moe.backends.humming import layout
from int8moe.backends.humming.support import (
    BatchedHummingGroupedExperts,
    HummingGroupedExperts,
    HummingIndexedExperts,
)
from int8moe.backends.reference.run import activate
from int8moe.config import FusedMoEConfig
from int8moe.device import Platform
from int8moe.errors import AlreadyConverted
from int8moe.oracle.int8 import Int8MoeBackend, convert_to_int8_moe_kernel_format
from int8moe.quant_config import int8_w8a8_moe_quant_config
from int8moe.weights import per_row_scale

CLASSES = {c.__name__: c for c in (HummingIndexedExperts, HummingGroupedExperts, BatchedHummingGroupedExperts)}
REFERENCE_LIMIT, ROUNDED_LIMIT = 2e-2, 4e-3
SHAPES = {  # experts, topk, hidden, intermediate
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "mixtral-8x7b": (8, 2, 4096, 14336),
}
TOKENS = (1, 8, 32, 128, 512, 2048)
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


# --- the reference, rounded where Humming rounds ---------------------------------------------------------------------


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Humming's: scale = max(amax / 127, 1e-30), codes = rint(x * (1 / scale)); NaN counts as infinity."""
    x = torch.where(x.isnan(), torch.inf, x.float())
    scale = (x.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30)
    codes = (x * (1 / scale)).nan_to_num(0.0).round().clamp(-128, 127)
    return codes, scale


def gemm(
    x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """x [R, K] float, w int8 [N, K], scale float32 [N]: rounded before the row's scale and after it."""
    codes, x_scale = quantize(x)
    rows, common = layout.split_scale(scale[None], dtype)
    acc = (codes.double() @ w.double().T).float()
    y = (acc * (x_scale if common is None else x_scale * common)).to(dtype).float() * rows[0].float()
    return (y if bias is None else y + bias.to(dtype).float()).to(dtype)


def rounded_output(case: Case, tokens: torch.Tensor | None = None) -> torch.Tensor:
    """What Humming computes for `case` (or for some of its tokens), as far as float32 and PyTorch can say."""
    config, q, dtype = case.config, case.quant_config, case.hidden_states.dtype
    pick = (lambda t: t) if tokens is None else (lambda t: t[tokens])
    x, ids, weights = pick(case.hidden_states), pick(case.topk_ids).long(), pick(case.topk_weights)
    s13, s2 = per_row_scale("w13", q.w1_scale, "w13", case.w13), per_row_scale("w2", q.w2_scale, "w2", case.w2)
    local = ids if case.expert_map is None else case.expert_map.long()[ids]
    count, topk = ids.shape
    rows = x.repeat_interleave(topk, 0)
    if case.apply_router_weight_on_input:
        rows = (rows.float() * weights.reshape(-1, 1)).to(dtype)
    y = torch.zeros(count * topk, config.hidden_dim, dtype=dtype, device=x.device)
    flat = local.flatten()
    for e in flat.unique().tolist():
        if e < 0:
            continue
        r = (flat == e).nonzero().squeeze(1)
        bias = lambda t, e=e: None if t is None else t[e]
        y1 = gemm(rows[r], case.w13[e], s13[e], bias(q.w1_bias), dtype)
        y[r] = gemm(activate(config, y1.float()), case.w2[e], s2[e], bias(q.w2_bias), dtype)
    out = torch.zeros(count, config.hidden_dim, device=x.device)
    for k in range(topk):
        term = y.view(count, topk, config.hidden_dim)[:, k].float()
        if not case.apply_router_weight_on_input:
            term = term * weights[:, k : k + 1]
        out = torch.where(local[:, k : k + 1] >= 0, out + term, out)
    return out.to(dtype)


def error(got: torch.Tensor, want: torch.Tensor) -> tuple[float, int]:
    """Relative error over what is finite in both, and how many values are finite in one only."""
    got, want = got.double().cpu(), want.double().cpu()
    both = got.isfinite() & want.isfinite()
    size = float(want[both].norm())
    difference = float((got[both] - want[both]).norm())
    return (difference / size if size else difference), int((got.isfinite() != want.isfinite()).sum())


# --- correctness, in workers -----------------------------------------------------------------------------------------


def machine() -> Platform:
    """This machine; the package counts as installed where it can be imported, also without its metadata."""
    here = Platform.current()
    return replace(here, packages=here.packages | {"humming-kernels"})


def adapted(name: str) -> dict[str, Any]:
    """The case's arguments, as Humming can take them."""
    kwargs = dict((ADVERSARIAL | MORE_CASES)[name])
    for side in ("H", "I"):
        if side in kwargs:
            kwargs[side] = -(-kwargs[side] // 16) * 16
    if kwargs.get("dtype") == "float32":
        kwargs["dtype"] = "bfloat16"
    return kwargs


def make(name: str, cls: type) -> Case:
    case = build(**adapted(name), platform=machine())
    parallel = replace(
        case.config.moe_parallel_config, use_batched_activation_format=cls is BatchedHummingGroupedExperts
    )
    return replace(case, config=replace(case.config, moe_parallel_config=parallel))


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
        got = case.run(cls, "cuda")
        reference, rounded = case.reference_output(), rounded_output(case)
        (record["error_reference"], record["finite_reference"]) = error(got, reference)
        (record["error_rounded"], record["finite_rounded"]) = error(got, rounded)
        good = record["error_reference"] <= REFERENCE_LIMIT and record["error_rounded"] <= ROUNDED_LIMIT
        good = good and not record["finite_rounded"]
        record["status"] = "ok" if good else "WRONG"
    except Exception as problem:
        record |= {"status": "RAISED", "reason": f"{problem!r:.400}", "trace": traceback.format_exc()[-1500:]}
    return record | {"seconds": round(time.time() - started, 1)}


def to_cuda(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else t.cuda()


def load(cls: type, case: Case, layer: Any = None) -> Any:
    tensors = {
        name: to_cuda(getattr(case.quant_config, name)) for name in ("w1_scale", "w2_scale", "w1_bias", "w2_bias")
    }
    moved = replace(case.quant_config, **tensors)
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


CHECKS = {f.__name__: f for f in (conversion, graph_replay, wrong_ids, unaligned_input, batched_entry)}


def check_other(class_name: str, name: str) -> dict[str, Any]:
    record: dict[str, Any] = {"kind": "check", "class": class_name, "case": name}
    try:
        CHECKS[name](CLASSES[class_name])
        torch.cuda.synchronize()
        return record | {"status": "ok"}
    except Exception as problem:
        return record | {"status": "RAISED", "reason": f"{problem!r:.400}", "trace": traceback.format_exc()[-1500:]}


def work(task: tuple[str, str, str]) -> dict[str, Any]:
    kind, class_name, name = task
    torch.set_num_threads(1)
    try:
        torch.cuda.synchronize()
    except Exception:  # an earlier task of this process broke its context; the pool replaces the process soon
        return {"kind": kind, "class": class_name, "case": name, "status": "lost"}
    return (check_case if kind == "case" else check_other)(class_name, name)


def correctness(report: Any, seconds: float, workers: int) -> None:
    """All cases on all classes, until the time is over; what did not get its turn is said."""
    first = ["bias", "tiles_of_64", "tiles_of_64_fp16", "ragged_tile", "expert_map", "nan_and_inf_rows"]
    names = first + [n for n in (*MORE_CASES, *ADVERSARIAL) if n not in first]
    tasks = [("case", c, n) for n in first for c in CLASSES] + [("check", c, n) for n in CHECKS for c in CLASSES]
    tasks += [("case", c, n) for n in names[len(first) :] for c in CLASSES]
    until = time.time() + seconds
    pool = multiprocessing.get_context("spawn").Pool(workers, maxtasksperchild=12)
    waiting = {task: pool.apply_async(work, (task,)) for task in tasks}
    try:
        while waiting and time.time() < until:
            for task in [t for t, result in waiting.items() if result.ready()]:
                record = waiting.pop(task).get()
                if record["status"] == "lost":
                    waiting[task] = pool.apply_async(work, (task,))
                else:
                    report(record)
            time.sleep(0.2)
    finally:
        pool.terminate()
        pool.join()
    for _, class_name, name in waiting:
        report({"kind": "case", "class": class_name, "case": name, "status": "no time"})


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


def compile_ahead(runner: Any, slots: list[int]) -> None:
    """Compile the GEMMs of these sizes in parallel; afterwards each is found in the package's cache."""
    from humming.kernel.humming import HummingKernel

    for part in runner.gemms:
        chosen = {id(t): t for t in map(part.tuning, slots)}.values()
        table = json.dumps([[t.low, t.high, json.loads(t.text)] for t in chosen])
        HummingKernel.prepare_kernels(part.config.to_str(), runner.compute_config, table, torch.cuda.current_device())


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
    """Error of three tokens and time of the whole layer. Never raises."""
    try:
        g = torch.Generator(device="cuda").manual_seed(tokens)
        x = torch.randn(tokens, experts.config.hidden_dim, device="cuda", generator=g).bfloat16()
        weights, ids = torch.randn(tokens, count, device="cuda", generator=g).softmax(-1).topk(topk, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        got = experts.apply(x, weights, ids)
        some = torch.tensor(sorted({0, tokens // 2, tokens - 1}), device="cuda")
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
    count, topk, _, _ = SHAPES[name]
    try:
        started = time.time()
        experts = cls(layer.config, int8_w8a8_moe_quant_config(layer.s13, layer.s2))
        experts.process_weights_after_loading(SimpleNamespace(w13_weight=layer.w13, w2_weight=layer.w2))
        torch.cuda.synchronize()
        loaded = time.time()
        compile_ahead(experts._run, [m * topk for m in TOKENS])
        report(head | {"load_s": round(loaded - started, 2), "compile_s": round(time.time() - loaded, 1)})
    except Exception as problem:
        report(head | {"status": "RAISED", "reason": f"{problem!r:.400}", "trace": traceback.format_exc()[-1500:]})
        return
    for tokens in TOKENS:
        if time.time() < until:
            report(head | {"M": tokens} | time_one(experts, layer, topk, count, tokens))


def timing(report: Any, until: float) -> None:
    from int8moe.backends.humming import run

    for invariant in (False, True):
        run.BATCH_INVARIANT = invariant
        for name in SHAPES:
            try:
                layer = model_layer(name)
            except Exception as problem:
                report({"kind": "time", "shape": name, "status": "RAISED", "reason": f"{problem!r:.400}"})
                continue
            for cls in (HummingIndexedExperts, HummingGroupedExperts):
                head = {"kind": "time", "class": cls.__name__, "shape": name, "batch_invariant": invariant}
                if time.time() < until:
                    time_class(report, until, cls, name, layer, head)
                else:
                    report(head | {"status": "no time"})
            del layer
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--only", choices=["cases", "time"])
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
    report({"kind": "machine", "device": torch.cuda.get_device_name(), **versions, "humming": humming.__version__})
    seconds = a.minutes * 60
    if a.only != "time":
        correctness(report, seconds * (0.95 if a.only == "cases" else 0.55), a.workers)
    if a.only != "cases":
        timing(report, started + seconds)
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
