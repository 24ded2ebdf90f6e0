"""The Triton backend on a GPU: first bits against the reference, then layer times beside bf16 and the floor.

    PYTHONPATH=src:tests python3 benchmarks/h200_triton.py --out OUT --minutes 6

Needs torch and triton. Writes OUT/triton_correctness.json and OUT/triton_times.json after every entry: a run cut short
keeps what it measured. Small cases run in several processes, since nearly all of their time is compiling kernels.
One timed call is hidden states and routing in, combined output out, inside a CUDA graph.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import multiprocessing
import os
import statistics
import sys
import time
import traceback
import types
from pathlib import Path
from typing import Any

import torch

try:
    import hypothesis  # noqa: F401
except ImportError:  # cases.py needs its names only to define strategies, which are not used here
    anything = types.SimpleNamespace(composite=lambda f: f, DrawFn=object)
    sys.modules["hypothesis"] = types.ModuleType("hypothesis")
    sys.modules["hypothesis"].strategies = anything  # type: ignore[attr-defined]
    sys.modules["hypothesis.strategies"] = anything  # type: ignore[assignment]

import triton

from cases import ADVERSARIAL, Case, assert_same_bits, build
from int8moe.backends.reference.support import ReferenceExperts
from int8moe.backends.triton import launch, run
from int8moe.backends.triton.support import BatchedTritonExperts, TritonExperts
from int8moe.bench.cuda import capture, graphs_in_turn
from int8moe.bench.torch_grouped import TorchGrouped, grouped_product
from int8moe.config import FusedMoEConfig, MoEActivation
from int8moe.quant_config import FusedMoEQuantConfig, int8_w8a8_moe_quant_config
from int8moe.weights import ExpertWeights

SHAPES = {  # E, topk, H, I
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "olmoe": (64, 8, 2048, 1024),
    "mixtral-8x7b": (8, 2, 4096, 14336),
}
TOKENS = (1, 8, 32, 128, 512, 2048, 8192)
COPY_TBPS, INT8_TOPS = 4.27, 1247.0  # measured ceilings of one H200 (read + write; dense, 8192 cubed)
MISMATCHES_SHOWN = 10


class Record:
    """A JSON file, rewritten after every entry."""

    def __init__(self, path: Path) -> None:
        self.path = path
        gpu = torch.cuda.get_device_properties(0)
        self.content: dict[str, Any] = {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "device": gpu.name,
            "capability": list(torch.cuda.get_device_capability(0)),
            "versions": {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda},
            "entries": [],
        }

    def add(self, **entry: Any) -> None:
        self.content["entries"].append(entry)
        self.path.write_text(json.dumps(self.content, indent=1))


# --- correctness ---------------------------------------------------------------------------------------------------


def difference(got: torch.Tensor, want: torch.Tensor) -> dict[str, Any] | None:
    """None when bits are equal (two NaNs are), else how much differs."""
    try:
        assert_same_bits(got, want)
    except AssertionError as error:
        a, b = got.double(), want.double()
        both = torch.isfinite(a) & torch.isfinite(b)
        differs = ~((a == b) | (a.isnan() & b.isnan()))
        return {
            "what": str(error)[:200],
            "values_that_differ": int(differs.sum()),
            "of": a.numel(),
            "max_abs_difference": float((a - b).abs()[both].max()) if both.any() else None,
            "max_abs_reference": float(b.abs()[both].max()) if both.any() else None,
            "nan_positions_that_differ": int((a.isnan() != b.isnan()).sum()),
        }
    return None


def random_case(seed: int, scheme: str) -> Case:
    """What tests/cases.py's strategy draws, by a seed."""
    g = torch.Generator().manual_seed(seed)
    pick = lambda options: options[int(torch.randint(len(options), (1,), generator=g))]
    number = lambda low, high: int(torch.randint(low, high + 1, (1,), generator=g))
    experts, activation = number(1, 12), pick(list(MoEActivation))
    local = sorted({number(0, experts - 1) for _ in range(number(1, experts))}) if number(0, 1) else None
    return build(
        seed=seed,
        E=experts,
        topk=number(1, experts),
        H=pick([number(1, 140), 16 * number(1, 40)]),
        I=pick([number(1, 140), 16 * number(1, 40)]),
        M=pick([number(0, 40), number(100, 300)]),
        dtype=pick(["bfloat16", "float16", "float32"]),
        activation=activation,
        gated=activation.is_swigluoai or bool(number(0, 1)),
        bias=bool(number(0, 1)),
        limit=pick([None, 0.1, 1.0, 7.0]),
        local=local,
        routing=pick(["random", "one_expert", "first_experts"]),
        weights=pick(["random", "extreme", "zero_rows"]),
        rows=pick(["normal", "zeros", "nan", "inf", "tiny", "huge", "spread", "nan_one"]),
        on_input=bool(number(0, 1)),
        scheme=scheme,
    )


def described(error: Exception) -> dict[str, Any]:
    return {"error": f"{type(error).__name__}: {str(error)[:300]}", "trace": traceback.format_exc()[-1500:]}


class Section:
    """One kind of check: counts, and details of the first mismatches. An exception is a failure, not an end."""

    def __init__(self, name: str, record: Record) -> None:
        self.name, self.record, self.passed, self.failed = name, record, 0, []
        self.start = time.time()

    def check(self, case: str, body: Any) -> None:
        try:
            found = body()
        except Exception as error:
            found = described(error)
        self.note(case, found)

    def note(self, case: str, found: dict[str, Any] | None) -> None:
        if found is None:
            self.passed += 1
        else:
            self.failed.append({"case": case, **found})
            if len(self.failed) <= MISMATCHES_SHOWN:
                print(f"  MISMATCH {self.name} / {case}: {json.dumps(found)[:900]}", flush=True)

    def close(self) -> None:
        seconds = round(time.time() - self.start, 1)
        print(f"{self.name}: {self.passed} equal, {len(self.failed)} not, {seconds} s", flush=True)
        self.record.add(
            section=self.name, equal=self.passed, failed=len(self.failed), seconds=seconds,
            mismatches=self.failed[:MISMATCHES_SHOWN],
        )  # fmt: skip


CLASSES = {"standard": TritonExperts, "batched": BatchedTritonExperts}
Task = tuple[str, str, str]  # section, class, case: the name of an adversarial case, or the seed of a random one


def small_tasks() -> list[Task]:
    tasks = [("adversarial", cls, name) for cls in CLASSES for name in ADVERSARIAL]
    for scheme, cls, count in (
        ("w8a8", "standard", 200),
        ("w8a8", "batched", 100),
        ("w8a8-tensor", "standard", 80),
        ("w8a8-tensor", "batched", 40),
    ):
        tasks += [(scheme, cls, str(seed)) for seed in range(count)]
    return tasks


def run_task(task: Task) -> tuple[Task, dict[str, Any] | None]:
    """In a worker process. After a fault on the GPU all later cases of that worker fail, too."""
    torch.set_num_threads(1)
    section, cls, name = task
    try:
        case = build(**ADVERSARIAL[name]) if section == "adversarial" else random_case(int(name), section)
        return task, difference(case.run(CLASSES[cls], "cuda"), case.reference_output())
    except Exception as error:
        return task, described(error)


def check_small(record: Record, deadline: float, workers: int) -> int:
    tasks = small_tasks()
    sections = {key: Section(", ".join(key), record) for key in dict.fromkeys(task[:2] for task in tasks)}
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        results = pool.imap_unordered(run_task, tasks)
        for done in range(len(tasks)):
            try:
                task, found = results.next(timeout=max(1.0, deadline - time.time()))
            except multiprocessing.TimeoutError:
                print(f"out of time after {done} of {len(tasks)} small cases", flush=True)
                break
            sections[task[:2]].note(task[2], found)
        pool.terminate()
    for section in sections.values():
        section.close()
    return sum(len(section.failed) for section in sections.values())


def loaded(case: Case, experts_cls: type, device: str = "cuda") -> Any:
    """An experts object with the case's weights on `device`."""
    to = lambda t: None if t is None else t.to(device)
    q = case.quant_config
    moved = FusedMoEQuantConfig(
        q.weight_key, q.activation_key, to(q.w1_scale), to(q.w2_scale), to(q.w1_bias), to(q.w2_bias)
    )
    experts = experts_cls(case.config, moved)
    experts.process_weights_after_loading(types.SimpleNamespace(w13_weight=to(case.w13), w2_weight=to(case.w2)))
    return experts


def check_correctness(record: Record, deadline: float, workers: int) -> int:
    """All sections; returns the number of failures."""
    failures = check_small(record, deadline, workers)
    section = Section("weight-only, tolerance", record)
    for experts_cls in (TritonExperts, BatchedTritonExperts):
        for dtype, tolerance in (("bfloat16", 4e-3), ("float16", 5e-4), ("float32", 1e-5)):
            for shape in (dict(H=70, I=96, M=12), dict(H=512, I=256, M=300, E=4)):
                case = build(scheme="w8a16", dtype=dtype, bias=True, **shape)

                def close(case: Case = case, cls: type = experts_cls, tolerance: float = tolerance) -> Any:
                    got, want = case.run(cls, "cuda").double(), case.reference_output().double()
                    error = float((got - want).norm() / want.norm())
                    return None if error <= tolerance else {"relative_error": error, "tolerance": tolerance}

                section.check(f"{experts_cls.__name__} {dtype} {shape}", close)
    section.close()
    failures += len(section.failed)

    section = Section("invalid ids become NaN", record)
    for bad in (-1, 8, 2**40):

        def invalid(bad: int = bad) -> Any:
            case = build(M=6)
            want = case.reference_output()
            case.topk_ids[2, 1], want[2] = bad, float("nan")
            return difference(case.run(TritonExperts, "cuda"), want)

        section.check(str(bad), invalid)
    section.close()
    failures += len(section.failed)

    section = Section("realistic shapes against the reference on CUDA", record)
    for name, (experts, topk, hidden, intermediate) in SHAPES.items():
        for tokens in (1, 5, 33) if experts > 8 else (1, 5):
            if time.time() > deadline:
                break

            def realistic(tokens: int = tokens, shape: Any = (experts, topk, hidden, intermediate)) -> Any:
                layer = Layer(*shape)
                arguments = layer.arguments(tokens)
                want = layer.experts(ReferenceExperts).apply(*arguments)
                return difference(layer.experts(TritonExperts).apply(*arguments), want)

            section.check(f"{name}, M={tokens}", realistic)
            torch.cuda.empty_cache()
    section.close()
    failures += len(section.failed)

    section = Section("a token alone equals itself among others (Qwen3 shape)", record)
    layer = Layer(*SHAPES["qwen3-30b-a3b"])
    for experts_cls in (TritonExperts, BatchedTritonExperts):
        experts = layer.experts(experts_cls)
        for tokens in (7, 40, 129, 1000) + ((4096,) if experts_cls is TritonExperts else ()):

            def alone(tokens: int = tokens, experts: Any = experts) -> Any:
                arguments = layer.arguments(tokens)
                together = experts.apply(*arguments)
                for token in (0, tokens // 2, tokens - 1):
                    one = experts.apply(*(t[token : token + 1] for t in arguments))
                    if (found := difference(one, together[token : token + 1])) is not None:
                        return {"token": token, **found}
                return None

            section.check(f"{experts_cls.__name__}, M={tokens}", alone)
    section.close()
    failures += len(section.failed)

    section = Section("alignment of many slots", record)
    for experts in (8, 128, 1024, 2000):
        for slots in (257, 5000, 65536):
            section.check(f"E={experts}, slots={slots}", lambda e=experts, s=slots: check_alignment(e, s))
    section.close()
    failures += len(section.failed)

    section = Section("CUDA graph, torch.compile", record)
    section.check("graph", check_graph)
    section.check("compile", check_compile)
    section.close()
    return failures + len(section.failed)


def check_alignment(experts: int, slots: int) -> dict[str, Any] | None:
    ids = torch.randint(0, experts, (slots, 1), device="cuda")
    blocks = launch.align(ids, None, experts, experts, 64)
    order = torch.sort(ids[:, 0], stable=True).indices
    count = int(blocks.count)
    totals = torch.bincount(ids[:, 0], minlength=experts)
    if not torch.equal(blocks.order.long(), order):
        return {"what": "order differs"}
    if count != int(((totals + 63) // 64).sum()) or int(blocks.rows[:count].sum()) != slots:
        return {"what": "block table", "count": count}
    first, rows, expert = (t[:count].long() for t in (blocks.first, blocks.rows, blocks.expert))
    ends = (ids[order[first], 0] == expert) & (ids[order[first + rows - 1], 0] == expert)
    return None if bool(ends.all()) else {"what": "a block spans experts"}


def check_graph() -> dict[str, Any] | None:
    first, second = (build(M=300, E=16, topk=4, H=256, I=128, seed=s) for s in (0, 1))
    second.w13, second.w2, second.quant_config = first.w13, first.w2, first.quant_config
    experts = loaded(first, TritonExperts)
    held = [t.cuda() for t in (first.hidden_states, first.topk_weights, first.topk_ids)]
    graph, out = capture(lambda: experts.apply(*held))
    for case in (second, first):
        for tensor, new in zip(held, (case.hidden_states, case.topk_weights, case.topk_ids), strict=True):
            tensor.copy_(new)
        out.fill_(float("nan"))
        graph.replay()
        if (found := difference(out.cpu(), case.reference_output())) is not None:
            return found
    return None


def check_compile() -> dict[str, Any] | None:
    case = build(M=6)
    experts = loaded(case, TritonExperts)
    step = torch.compile(lambda x, w, i: experts.apply(x + 0, w, i) * 1, fullgraph=True)
    out = step(case.hidden_states.cuda(), case.topk_weights.cuda(), case.topk_ids.cuda())
    return difference(out.cpu(), case.reference_output())


# --- times ---------------------------------------------------------------------------------------------------------


class Layer:
    """Random weights of one shape on the GPU, in int8 and (on demand) bf16."""

    def __init__(self, experts: int, topk: int, hidden: int, intermediate: int, dtype: str = "bfloat16") -> None:
        self.shape = (experts, topk, hidden, intermediate)
        self.config = FusedMoEConfig(experts, topk, hidden, intermediate, in_dtype=dtype)
        self.dtype = getattr(torch, dtype)
        g = torch.Generator("cuda").manual_seed(0)
        self.generator = g
        int8 = lambda *s: torch.randint(-127, 128, s, dtype=torch.int8, device="cuda", generator=g)
        self.w13, self.w2 = int8(experts, 2 * intermediate, hidden), int8(experts, hidden, intermediate)
        scale = lambda *s: (torch.rand(*s, device="cuda", generator=g) + 0.5) * (0.5 / 127)
        self.s13, self.s2 = scale(experts, 2 * intermediate) / hidden**0.5, scale(experts, hidden) / intermediate**0.5

    def experts(self, experts_cls: type) -> Any:
        experts = experts_cls(self.config, int8_w8a8_moe_quant_config(self.s13, self.s2))
        experts.process_weights_after_loading(types.SimpleNamespace(w13_weight=self.w13, w2_weight=self.w2))
        return experts

    def arguments(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        experts, topk, hidden, _ = self.shape
        x = torch.randn(tokens, hidden, device="cuda", generator=self.generator).to(self.dtype)
        logits = torch.randn(tokens, experts, device="cuda", generator=self.generator)
        weights, ids = logits.softmax(-1).topk(topk, dim=-1)
        return x, weights.contiguous(), ids

    def bf16(self) -> TorchGrouped:
        return TorchGrouped(self.config, ExpertWeights(self.w13, self.w2, self.s13, self.s2), torch.bfloat16)

    def floor_us(self, tokens: int, ids: torch.Tensor) -> float:
        _, topk, hidden, intermediate = self.shape
        touched = len(ids.unique())
        memory = touched * 3 * hidden * intermediate / (COPY_TBPS * 1e12)
        operations = tokens * topk * 6 * hidden * intermediate / (INT8_TOPS * 1e12)
        return max(memory, operations) * 1e6


def median_us(bodies: list[Any], seconds: float = 0.4) -> dict[str, float]:
    """Median and quartiles of one call, from replays of a graph that makes one call of each of `bodies`."""
    times = sorted(1e3 * ms for ms in graphs_in_turn({"": bodies}, seconds)[""])
    quarter = len(times) // 4
    return {"median": statistics.median(times), "q1": times[quarter], "q3": times[-1 - quarter], "repeats": len(times)}


def error_against_float(layer: Layer, out: torch.Tensor, arguments: Any) -> float:
    """Relative Frobenius error of a few tokens against the unquantised layer in float32."""
    few = min(8, len(out))
    x, weights, ids = (t[:few] for t in arguments)
    want = torch.zeros(few, x.shape[1], device="cuda")
    for t in range(few):
        for k in range(ids.shape[1]):
            e = int(ids[t, k])
            gate, up = ((layer.w13[e].float() * layer.s13[e, :, None]) @ x[t].float()).chunk(2)
            h = torch.nn.functional.silu(gate) * up
            want[t] += weights[t, k] * ((layer.w2[e].float() * layer.s2[e, :, None]) @ h)
    return float((out[:few].float() - want).norm() / want.norm())


def measure(record: Record, deadline: float) -> None:
    """Layer times. Few tokens touch experts that would fit L2, so that successive calls take other routings there."""
    torch.backends.cuda.matmul.allow_tf32 = False
    for name, shape in SHAPES.items():
        layer = bf16 = None
        torch.cuda.empty_cache()
        layer = Layer(*shape)
        runners: dict[str, Any] = {
            "triton": layer.experts(TritonExperts).apply,
            "triton_batched": layer.experts(BatchedTritonExperts).apply,
        }
        try:
            if grouped_product() is not None:
                bf16 = layer.bf16()
                runners["bf16_grouped_mm"] = bf16.apply
        except Exception as error:
            print(f"no bf16 path: {error}", flush=True)
        for tokens in TOKENS:
            if time.time() > deadline:
                print("out of time", flush=True)
                return
            entry = measure_point(name, layer, runners, tokens)
            record.add(**entry)
            shown = {k: (v["median"] if isinstance(v, dict) and "median" in v else v) for k, v in entry.items()}
            print(json.dumps({k: v for k, v in shown.items() if k not in ("E", "topk", "H", "I", "dtype")}), flush=True)


def measure_point(name: str, layer: Layer, runners: dict[str, Any], tokens: int) -> dict[str, Any]:
    experts, topk, hidden, intermediate = layer.shape
    rotated = [layer.arguments(tokens) for _ in range(8 if tokens <= 8 else 1)]
    fields = launch.Layer(*layer.experts(TritonExperts)._run._layer())
    entry: dict[str, Any] = dict(
        shape=name, E=experts, topk=topk, H=hidden, I=intermediate, M=tokens, dtype="bfloat16", routings=len(rotated),
        floor_us=round(statistics.mean(layer.floor_us(tokens, a[2]) for a in rotated), 1),
        tile=str(launch.tile_for(fields, tokens, topk, rotated[0][0])),
    )  # fmt: skip
    for what, run_layer in runners.items():
        if what == "triton_batched" and tokens > 128:
            continue
        try:
            out = run_layer(*rotated[0])
            entry[f"{what}_error"] = round(error_against_float(layer, out, rotated[0]), 5)
            times = median_us([functools.partial(run_layer, *a) for a in rotated])
            entry[f"{what}_us"] = {k: round(v, 1) for k, v in times.items()}
        except Exception as error:
            entry[f"{what}_failed"] = f"{type(error).__name__}: {str(error)[:300]}"
    try:
        entry["parts_us"] = parts(fields, rotated[0])
    except Exception as error:
        entry["parts_failed"] = f"{type(error).__name__}: {str(error)[:300]}"
    return entry


def parts(fields: launch.Layer, arguments: Any) -> dict[str, float]:
    """Median times of the steps of one call, each in a graph of its own (with few tokens: weights from L2)."""
    x, weights, ids = arguments
    tokens, topk = ids.shape
    tile = launch.tile_for(fields, tokens, topk, x)
    blocks = launch.align(ids, None, fields.num_local, fields.num_local, tile.block_m)
    q, scale = launch.quantize_rows(x, None)
    h = torch.empty(tokens * topk, fields.intermediate, dtype=x.dtype, device="cuda")
    y = torch.empty(tokens * topk, x.shape[1], dtype=x.dtype, device="cuda")
    launch.grouped_gemm(fields, True, q, scale, h, blocks, tile, topk)
    q2, scale2 = launch.quantize_rows(h, blocks.local)
    launch.grouped_gemm(fields, False, q2, scale2, y, blocks, tile, 1, weights)

    def gemm1() -> torch.Tensor:
        launch.grouped_gemm(fields, True, q, scale, h, blocks, tile, topk)
        return h

    def gemm2() -> torch.Tensor:
        launch.grouped_gemm(fields, False, q2, scale2, y, blocks, tile, 1, weights)
        return y

    steps = {
        "align": lambda: launch.align(ids, None, fields.num_local, fields.num_local, tile.block_m).local,
        "quantize_x": lambda: launch.quantize_rows(x, None)[0],
        "gemm1": gemm1,
        "quantize_h": lambda: launch.quantize_rows(h, blocks.local)[0],
        "gemm2": gemm2,
        "combine": lambda: launch.combine(y, blocks.local.view(tokens, topk), x),
    }
    return {name: round(median_us([body], 0.05)["median"], 1) for name, body in steps.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--only", choices=("correctness", "times"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    os.environ.pop(run.VALIDATE_VARIABLE, None)
    start, end = time.time(), time.time() + 60 * arguments.minutes
    if not torch.cuda.is_available() or launch.INTERPRETED:
        print("needs a GPU, without TRITON_INTERPRET")
        return 2
    failures = 0
    if arguments.only != "times":
        try:
            failures = check_correctness(
                Record(arguments.out / "triton_correctness.json"), start + (end - start) * 0.5, arguments.workers
            )
        except Exception:
            failures = 1
            traceback.print_exc()
        print(f"correctness: {failures} failures, {time.time() - start:.0f} s", flush=True)
    if arguments.only != "correctness":
        try:
            measure(Record(arguments.out / "triton_times.json"), end)
        except Exception:
            traceback.print_exc()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
