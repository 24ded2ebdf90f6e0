"""`int8moe bench --backend triton` without a GPU: plans, checks, rows, record, picture, refusals. Times are made up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from int8moe.backends.reference.support import ReferenceExperts
from int8moe.bench import cuda, find_bench, layer, triton
from int8moe.bench.base import GPU_UNITS, Limits, Options, Row
from int8moe.bench.cuda import Gpu
from int8moe.bench.humming import HummingBench
from int8moe.bench.plot import draw
from int8moe.bench.record import layer_times, make_record
from int8moe.bench.shapes import BenchShape, named_shape
from int8moe.bench.torch_grouped import TorchGrouped, grouped_product
from int8moe.bench.triton import TritonBench, calls_in_graph, cold_bytes, plan_layer, touched_bytes
from int8moe.cli.main import main
from int8moe.config import FusedMoEConfig, MoEActivation
from int8moe.device import Platform
from int8moe.errors import ConfigError, Int8MoeError
from int8moe.model_config import ModelExperts

GIB = 1 << 30
GPU = Gpu("NVIDIA H200", (9, 0), 132, 60 << 20, 141 * GIB, "570.1")
LIMITS = Limits(4000.0, 1.2e6, "triton 128x256x128", {"triton 128x256x128": 1.2e6, "torch._int_mm": 9e5}, "copy")
SMALL = BenchShape("small", ModelExperts("test", 8, 2, 64, 32, num_layers=1))
KERNELS = {"grouped_gemm_kernel": 5.25, "combine_kernel": 1.5}

pytestmark = pytest.mark.usefixtures("one_thread")


def _grouped_runs_on_cpu() -> bool:
    try:
        ends = torch.tensor([16], dtype=torch.int32)
        grouped_product()(torch.ones(16, 16).bfloat16(), torch.ones(1, 16, 16).bfloat16(), offs=ends)
    except (TypeError, RuntimeError):
        return False
    return True


has_grouped = pytest.mark.skipif(
    not _grouped_runs_on_cpu(), reason="this torch has no grouped matrix product that runs on a CPU"
)


class OnCPU(TritonBench):
    """The reference stands for the kernels, and this machine's memory for the GPU's."""

    device, experts = "cpu", ReferenceExperts


class Timer:
    """Stands for the GPU's clock: makes every call once, and a call of the form at place n takes n + 1 microseconds."""

    def __init__(self) -> None:
        self.calls: list[dict[str, int]] = []

    def __call__(self, forms, seconds):
        for bodies in forms.values():
            for body in bodies:
                body()
        self.calls.append({form: len(bodies) for form, bodies in forms.items()})
        return {form: [0.001 * (n + 1) * f for f in (0.9, 1, 1.1)] for n, form in enumerate(forms)}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Timer:
    timer = Timer()
    monkeypatch.setattr(cuda, "find_gpu", lambda: GPU)
    monkeypatch.setattr(cuda, "free_bytes", lambda: 100 * GIB)
    monkeypatch.setattr(cuda, "measure_limits", lambda gpu, weight_only: LIMITS)
    monkeypatch.setattr(cuda, "graphs_in_turn", timer)
    monkeypatch.setattr(cuda, "kernel_times_us", lambda bodies: dict(KERNELS))
    monkeypatch.setattr(triton, "COLD_BYTES", 1 << 16)
    monkeypatch.setattr(triton, "COLD_CACHES", 0)
    monkeypatch.setattr(Platform, "current", staticmethod(lambda: Platform.named("h200")))
    for name in ("INT8MOE_VALIDATE", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)
    return timer


def config_of(shape: BenchShape) -> FusedMoEConfig:
    return shape.config(Platform.named("h200"))


def run_small(shape: BenchShape = SMALL, **options) -> tuple[OnCPU, list[Row]]:
    bench = OnCPU([shape], Options(**{"tokens": (1, 20), "seconds": 0.0, **options}))
    bench.measure_limits()
    return bench, list(bench.rows(lambda text, at: None))


# --- how many calls and copies ---------------------------------------------------------------------------------------


def test_expected_bytes_of_a_call() -> None:
    c = config_of(named_shape("mixtral"))
    one = 3 * 4096 * 14336 + 4 * (2 * 14336 + 4096)
    assert layer.expert_bytes(c) == one and c.experts_bytes(1, scale_bytes=4) == 8 * one
    assert touched_bytes(c, 1) == pytest.approx(2 * one)
    assert touched_bytes(c, 2) == pytest.approx((8 - 8 * 0.75**2) * one)
    assert touched_bytes(c, 1000) == pytest.approx(8 * one)


@pytest.mark.parametrize("name", ["olmoe", "qwen3-30b", "mixtral", "deepseek-v3"])
def test_a_graph_touches_several_times_l2(name: str) -> None:
    c, cold = config_of(named_shape(name)), cold_bytes(GPU.l2_bytes)
    assert cold == 256 << 20 and cold_bytes(100 << 20) == 400 << 20
    for tokens in triton.GPU_TOKENS:
        calls = calls_in_graph(c, tokens, cold)
        assert calls * touched_bytes(c, tokens) >= cold and triton.LEAST_CALLS <= calls <= triton.MAX_CALLS
    assert calls_in_graph(c, 8192, cold) == triton.LEAST_CALLS and calls_in_graph(c, 1, cold) >= triton.FEW_CALLS
    plan = plan_layer(name, c, Options(tokens=triton.GPU_TOKENS, compare=("bf16",)), GPU.l2_bytes, 130 * GIB)
    # A copy is met again only after other weights of that many bytes.
    assert plan.cold and plan.copies["int8moe"] * touched_bytes(c, 1) >= cold
    assert 1 <= plan.copies["bf16"] <= plan.copies["int8moe"]
    assert list(plan.calls) == list(triton.GPU_TOKENS)


def test_a_layer_smaller_than_l2_gets_many_calls_and_copies() -> None:
    c, cold = config_of(named_shape("tiny")), cold_bytes(GPU.l2_bytes)
    plan = plan_layer("tiny", c, Options(tokens=(1,)), GPU.l2_bytes, 130 * GIB)
    assert plan.calls[1] == plan.copies["int8moe"] > 80 and plan.cold
    assert plan.calls[1] * touched_bytes(c, 1) >= cold


def test_plans_fit_the_memory() -> None:
    c = config_of(named_shape("tiny"))
    plan = plan_layer("tiny", c, Options(tokens=(1,)), GPU.l2_bytes, 300 << 20)
    assert 1 < plan.copies["int8moe"] < 25 and not plan.cold
    big = config_of(named_shape("deepseek-v3"))
    with pytest.raises(Int8MoeError, match=r"deepseek-v3: one layer takes .* or fewer forms in --compare"):
        plan_layer("deepseek-v3", big, Options(tokens=(1,), compare=("bf16",)), GPU.l2_bytes, 30 * GIB)
    with pytest.raises(Int8MoeError, match="a call of 8,192 tokens takes about"):
        plan_layer("deepseek-v3", big, Options(tokens=(8192,)), GPU.l2_bytes, 2 * GIB)


# --- refusals --------------------------------------------------------------------------------------------------------


def test_without_a_gpu(monkeypatch) -> None:
    monkeypatch.setattr(cuda, "find_gpu", lambda: None)
    with pytest.raises(ConfigError, match=r"torch \S+ sees no GPU .* needs a CUDA or ROCm GPU; here: .*--backend cpu"):
        TritonBench([SMALL], Options())


@pytest.mark.parametrize(("name", "value"), [
    ("INT8MOE_DEVICE", "a100"), ("INT8MOE_VALIDATE", "1"), ("TRITON_INTERPRET", "1"),
])  # fmt: skip
def test_settings_that_spoil_times_are_refused(gpu, monkeypatch, name: str, value: str) -> None:
    TritonBench([SMALL], Options())
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name} is '{value}', needs to be unset"):
        TritonBench([SMALL], Options())


@pytest.mark.parametrize("option", [{"threads": 2}, {"isa": "avx2"}, {"between": True}])
def test_options_of_the_cpu_are_refused(gpu, option: dict) -> None:
    (name,) = option
    with pytest.raises(ConfigError, match=f"{name} is .* which does not apply to the triton backend"):
        TritonBench([SMALL], Options(**option))


def test_what_cannot_run_is_refused(gpu, monkeypatch) -> None:
    with pytest.raises(ConfigError, match="compare is 'torch-bf16', needs one of: bf16"):
        TritonBench([SMALL], Options(compare=("torch-bf16",)))
    huge = BenchShape("huge", ModelExperts("test", 1, 1, 1 << 18, 16, num_layers=1))
    with pytest.raises(ConfigError, match="huge: the Triton backend cannot run this layer since hidden"):
        TritonBench([huge], Options())
    monkeypatch.setattr(triton, "grouped_product", lambda: None)
    TritonBench([SMALL], Options())
    with pytest.raises(ConfigError, match=r"compare is 'bf16', .* torch \S+ has none; needs a newer torch"):
        TritonBench([SMALL], Options(compare=("bf16",)))


# --- the check before the clock --------------------------------------------------------------------------------------


class LastTokenWrong(ReferenceExperts):
    """Off by one bit, in the last token of a call of 200."""

    def apply(self, x, *rest, **named):
        y = super().apply(x, *rest, **named)
        if len(x) == 200:
            y.view(torch.int16)[-1, 5] ^= 1
        return y


def test_a_wrong_kernel_is_found_before_the_clock_starts(gpu, monkeypatch) -> None:
    monkeypatch.setattr(OnCPU, "experts", LastTokenWrong)
    with pytest.raises(Int8MoeError, match=r"small at M=200: the Triton kernels differ .* in 1 of 1024 values"):
        run_small(tokens=(1, 200))
    assert not gpu.calls
    run_small(tokens=(1, 20))
    assert len(gpu.calls) == 2


class SlightlyOff(ReferenceExperts):
    def apply(self, x, *rest, **named):
        return (super().apply(x, *rest, **named).float() * 1.01).to(x.dtype)


def test_weight_only_is_held_to_a_tolerance(gpu, monkeypatch) -> None:
    bench, rows = run_small(weight_only=True)
    assert len(rows) == 2 and bench.method()["scheme"] == "w8a16 (channel scales)"
    monkeypatch.setattr(OnCPU, "experts", SlightlyOff)
    with pytest.raises(Int8MoeError, match=r"small at M=1: .* by \d\.\de-0\d, more than 4e-03; nothing was timed"):
        run_small(weight_only=True)


@has_grouped
@pytest.mark.parametrize("activation", list(MoEActivation))
def test_the_grouped_bf16_layer_computes_the_same(activation: MoEActivation) -> None:
    c = FusedMoEConfig(6, 2, 64, 48, activation=activation, has_bias=True, swiglu_limit=0.5, platform=Platform.cpu())
    w = layer.draw_weights(c, False, lambda share: None)
    x, (weights, ids) = layer.draw_hidden(c, 9), layer.draw_call(c, 9, 0)
    ids[ids == 3] = 4  # an expert without tokens
    want = layer.packed_layer(ReferenceExperts, c, w).apply(x, weights, ids).float()
    got = TorchGrouped(c, w, torch.bfloat16).apply(x, weights, ids).float()
    assert (got - want).norm() < 0.03 * want.norm()


@has_grouped
def test_another_form_must_compute_the_same_layer(gpu, monkeypatch) -> None:
    right = TorchGrouped.apply
    monkeypatch.setattr(TorchGrouped, "apply", lambda self, *call: right(self, *call) * 1.1)
    with pytest.raises(Int8MoeError, match=r"small at M=1: bf16 differs from the reference by \d\.\de-01"):
        run_small(compare=("bf16",))

    def fails(self, *call):
        raise RuntimeError("no such instruction\nmore")

    monkeypatch.setattr(TorchGrouped, "apply", fails)
    with pytest.raises(Int8MoeError, match="torch cannot run bf16 here: no such instruction; leave out --compare"):
        run_small(compare=("bf16",))


# --- rows and records ------------------------------------------------------------------------------------------------


@has_grouped
def test_rows_of_a_small_layer(gpu) -> None:
    bench, rows = run_small(compare=("bf16",))
    one = 3 * 64 * 32 + 4 * (2 * 32 + 64)
    calls = [bench._plans[0].calls[m] for m in (1, 20)]
    assert gpu.calls == [{"int8moe": n, "bf16": n} for n in calls]
    assert (rows[0].experts_touched, rows[0].bytes, rows[0].operations) == (2, 2 * one, 2 * 2 * 3 * 64 * 32)
    assert rows[1].operations == 20 * rows[0].operations and 7 < rows[1].experts_touched <= 8
    for r, n in zip(rows, calls, strict=True):
        assert (r.time.median_ms, r.time.calls, r.kernels_us) == (0.001, 3 * n, KERNELS)
        assert r.compared["bf16"].median_ms == 0.002


def test_calls_in_turn_use_other_routings_and_copies(gpu, monkeypatch) -> None:
    seen: list[tuple[int, bytes]] = []

    def record(forms, seconds):
        for body in forms["int8moe"]:
            seen.append((body.func.__self__.unpack_weights()[0].data_ptr(), body.args[2].numpy().tobytes()))
        return {"int8moe": [1.0, 1.0]}

    monkeypatch.setattr(cuda, "graphs_in_turn", record)
    bench, _ = run_small(tokens=(1,))
    copies = bench._plans[0].copies["int8moe"]
    assert 1 < copies == len({at for at, _ in seen}) and len(seen) >= triton.FEW_CALLS
    assert all(a[0] != b[0] for a, b in pairwise(seen))
    assert len({ids for _, ids in seen}) > copies / 2


def test_the_record_and_the_saved_times(gpu) -> None:
    bench, rows = run_small()
    record = json.loads(json.dumps(make_record(bench, LIMITS, rows)))
    assert record["machine"] == {
        "device": "NVIDIA H200", "compute_capability": "9.0", "multiprocessors": 132, "l2_bytes": 60 << 20,
        "memory_bytes": 141 * GIB, "driver": "570.1", "cuda": torch.version.cuda, "hip": torch.version.hip,
    }  # fmt: skip
    assert "triton" in record["versions"] and record["rows"][0]["kernels_us"] == KERNELS
    assert record["method"]["calls_in_a_graph"]["small"] == {str(m): n for m, n in bench._plans[0].calls.items()}
    times = layer_times(bench, rows)
    assert [(t.backend, t.experts_class, t.M, t.latency_us) for t in times] == [
        ("TRITON", "TritonExperts", 1, 1.0), ("TRITON", "TritonExperts", 20, 1.0),
    ]  # fmt: skip
    assert all(t.fits(config_of(SMALL)) for t in times)


# --- times and limits from a GPU that is not here --------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Milliseconds that pass only when a body says so."""
    now = SimpleNamespace(ms=0.0)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = now.ms

        def elapsed_time(self, other: Event) -> float:
            return other.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return now


def test_bodies_take_turns_for_about_the_seconds_asked(clock) -> None:
    order: list[str] = []

    def body(name: str, ms: float) -> None:
        order.append(name)
        clock.ms += ms

    bodies = {"a": lambda: body("a", 2.0), "b": lambda: body("b", 3.0)}
    times = cuda.timed_in_turn(bodies, 0.1)
    assert times == {"a": [2.0] * 20, "b": [3.0] * 20} and order[-4:] == ["a", "b", "a", "b"]
    assert len(cuda.timed_in_turn(bodies, 0.0)["a"]) == cuda.MIN_TURNS
    assert len(cuda.timed_in_turn(bodies, 1e9)["a"]) == cuda.MAX_TURNS


def test_a_graph_makes_one_call_of_each_body(clock, monkeypatch) -> None:
    def body(ms: float) -> None:
        clock.ms += ms

    monkeypatch.setattr(cuda, "capture", lambda whole: (SimpleNamespace(replay=whole), None))
    times = cuda.graphs_in_turn({"a": [lambda: body(2.0), lambda: body(4.0)], "b": [lambda: body(1.0)]}, 0.0)
    assert times == {"a": [3.0] * cuda.MIN_TURNS, "b": [1.0] * cuda.MIN_TURNS}


def test_kernel_times_are_means_over_the_calls(clock, monkeypatch, caplog) -> None:
    from torch.autograd import DeviceType

    event = lambda name, us, device=DeviceType.CUDA: SimpleNamespace(
        name=name, device_type=device, time_range=SimpleNamespace(elapsed_us=lambda: us)
    )
    found = [event("gemm", 4.0), event("combine", 9.0), event("cudaLaunchKernel", 50.0, DeviceType.CPU),
             event("gemm", 8.0)]  # fmt: skip

    class Profile:
        def __init__(self, activities) -> None:
            assert activities == [torch.profiler.ProfilerActivity.CUDA]

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def events(self):
            return found

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    made: list[int] = []
    assert cuda.kernel_times_us([lambda: made.append(0), lambda: made.append(1)]) == {"gemm": 6.0, "combine": 4.5}
    assert made == [0, 0, 1]
    found.clear()
    assert cuda.kernel_times_us([lambda: None]) == {} and "saw none on this GPU" in caplog.text


def test_corners_of_a_dense_product_are_checked() -> None:
    a, w = (torch.randint(-127, 128, (600, 4096), dtype=torch.int8) for _ in range(2))
    exact = a.double() @ w.double().T
    for c in (exact.int(), exact.float().bfloat16()):
        cuda._check_corners(a, w, c, "any")
        for at in ((0, 0), (255, 3), (599, 599)):
            wrong = c.clone()
            wrong[at] = wrong[at] * 2 + 512
            with pytest.raises(Int8MoeError, match="the dense int8 product any is wrong"):
                cuda._check_corners(a, w, wrong, "any")


def test_limits_are_the_best_of_what_ran(monkeypatch) -> None:
    sizes: list[int] = []
    rates = {"torch._int_mm": 9e5, "triton a": 1.2e6, "triton b": 1e6}
    monkeypatch.setattr(cuda, "free_bytes", lambda: 100 * GIB)
    monkeypatch.setattr(cuda, "traffic_rates", lambda count: {"copy": 4000.0, "bitwise_not": 4100.0, "sum": 4500.0})
    monkeypatch.setattr(cuda, "bf16_rate", lambda size: 6e5)
    monkeypatch.setattr(cuda, "int8_rates", lambda size: sizes.append(size) or dict(rates))
    found = cuda.measure_limits(GPU, False)
    assert (found.read_gbps, found.peak_gops, found.chain, found.chains) == (4100.0, 1.2e6, "triton a", rates)
    assert found.others == {"copy_gbps": 4000.0, "bitwise_not_gbps": 4100.0, "sum_gbps": 4500.0,
                            "bf16_matmul_gops": 600000}  # fmt: skip
    assert found.shown(GPU_UNITS) == "copy 4100.0 GB/s, int8 1200 TOPS"
    half = cuda.measure_limits(GPU, True)
    assert (half.peak_gops, half.chain) == (6e5, "torch.matmul") and half.shown(GPU_UNITS).endswith("bf16 600 TOPS")
    monkeypatch.setattr(cuda, "free_bytes", lambda: 300 << 20)
    cuda.measure_limits(GPU, False)
    assert sizes == [8192, 8192, 4096]
    rates.clear()
    with pytest.raises(Int8MoeError, match="no dense int8 product runs on NVIDIA H200"):
        cuda.measure_limits(GPU, False)


@pytest.mark.parametrize("arguments", [("interpret",), ("compile", "80", "90")], ids=["interpret", "compile"])
def test_the_dense_triton_product(arguments: tuple[str, ...]) -> None:
    pytest.importorskip("triton", reason="the kernel needs triton")
    command = [sys.executable, str(Path(__file__).with_name("triton_peak_checks.py")), *arguments]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == (["24", "products"] if arguments[0] == "interpret" else ["10", "kernels"])


# --- Humming, and Triton beside it -----------------------------------------------------------------------------------


def humming_on_cpu(monkeypatch, off: float = 0.0, **options):
    """The reference stands for every INT8 class; `off` is by how much the grouped one is wrong."""

    def form(name: str, config: FusedMoEConfig, weights):
        experts = layer.packed_layer(ReferenceExperts, config, weights).apply
        wrong = 1 + off if name == "humming-grouped" else 1.0
        return lambda *call: experts(*call) * wrong

    monkeypatch.setattr(triton, "_form", form)

    class OnCPUToo(HummingBench):
        device, experts = "cpu", ReferenceExperts

    bench = OnCPUToo([SMALL], Options(**{"tokens": (1, 20), "seconds": 0.0, **options}))
    bench.measure_limits()
    return bench, list(bench.rows(lambda text, at: None))


def test_both_humming_classes_are_timed_and_kept_beside_triton_and_bf16(gpu, monkeypatch) -> None:
    bench, rows = humming_on_cpu(monkeypatch, compare=("triton", "bf16"))
    assert [list(row.compared) for row in rows] == [["humming-grouped", "triton", "bf16"]] * 2
    kept = [(t.backend, t.experts_class, t.M, t.latency_us) for t in layer_times(bench, rows)]
    assert kept[:4] == [
        ("HUMMING", "HummingIndexedExperts", 1, 1.0), ("HUMMING", "HummingGroupedExperts", 1, 2.0),
        ("TRITON", "TritonExperts", 1, 3.0), ("BF16", "TorchGrouped", 1, 4.0),
    ]  # fmt: skip
    assert len(kept) == 8 and all(t.device == "NVIDIA H200" for t in layer_times(bench, rows))


def test_humming_is_held_to_its_tolerance(gpu, monkeypatch) -> None:
    assert len(humming_on_cpu(monkeypatch, off=0.019)[1]) == 2
    with pytest.raises(
        Int8MoeError,
        match=r"small at M=1: HummingGroupedExperts differs from the reference by 2\.\de-02, more than 2e-02",
    ):
        humming_on_cpu(monkeypatch, off=0.025)


def test_a_form_that_cannot_run_the_layer_is_refused(gpu) -> None:
    with pytest.raises(ConfigError, match=r"compare is 'humming', which cannot run this layer since scheme is w8a16"):
        TritonBench([SMALL], Options(compare=("humming",), weight_only=True))


# --- the picture and the command line --------------------------------------------------------------------------------


@has_grouped
def test_the_roofline_shows_every_point(gpu, tmp_path) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    other = BenchShape("other", SMALL.experts)
    bench = OnCPU([SMALL, other], Options(tokens=(1, 20), seconds=0.0, compare=("bf16",)))
    bench.measure_limits()
    rows = list(bench.rows(lambda text, at: None))
    draw(rows, bench, LIMITS, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    for says in ("roofline: measured copy and int8 limits", "other, bf16", "TOPS", "µs a call (median, quartiles)",
                 "measured limits: copy 4000.0 GB/s, int8 1200 TOPS"):  # fmt: skip
        assert f"<!-- {says}" in text, says
    bench.roofline = False
    draw(rows, bench, LIMITS, tmp_path / "b.svg")
    assert "roofline" not in (tmp_path / "b.svg").read_text()


def run(*arguments: str, capsys) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["bench", "--backend", "triton", *arguments])
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


@has_grouped
def test_the_tables(gpu, monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr("int8moe.bench.triton.TritonBench", OnCPU)
    monkeypatch.setenv("INT8MOE_RECORDS", str(tmp_path))
    code, out, _ = run("--shape", "tiny", "--tokens", "1,16", "--compare", "bf16", "--save", capsys=capsys)
    assert code == 0 and "grouped_gemm_kernel" not in out
    assert "NVIDIA H200, compute capability 9.0, 132 multiprocessors, w8a8 (channel scales, token activations)" in out
    assert "copy 4000.0 GB/s, int8 1200 TOPS (triton 128x256x128)" in out
    for head in ("median µs", "GB/s", "% copy", "TOPS", "% int8", "floor µs", "% floor", "bf16"):
        assert head in out
    lines = [line.split() for line in out.splitlines() if line.strip()[:2] in ("1 ", "16")]
    assert [(line[0], line[1], line[-1]) for line in lines] == [("1", "1.00", "2.0x"), ("16", "1.00", "2.0x")]
    assert "(bytes of the experts touched / copy limit)" in out
    saved = [json.loads(line) for line in (tmp_path / "bench-triton.jsonl").read_text().splitlines()]
    assert [(s["device"], s["backend"], s["M"], s["latency_us"]) for s in saved] == [
        ("NVIDIA H200", "TRITON", 1, 1.0), ("NVIDIA H200", "BF16", 1, 2.0),
        ("NVIDIA H200", "TRITON", 16, 1.0), ("NVIDIA H200", "BF16", 16, 2.0),
    ]  # fmt: skip
    code, out, _ = run("--shape", "tiny", "--tokens", "1,16", "--kernels", capsys=capsys)
    lines = [line.split() for line in out.splitlines() if "_kernel" in line]
    assert code == 0 and lines == [["grouped_gemm_kernel", "5.25", "5.25"], ["combine_kernel", "1.50", "1.50"]]


def test_the_default_tokens_are_those_of_the_backend(gpu, monkeypatch, capsys) -> None:
    asked: list[tuple[int, ...]] = []

    def stop(self) -> Limits:
        asked.append(self.options.tokens)
        raise Int8MoeError("enough.")

    monkeypatch.setattr(TritonBench, "measure_limits", stop)
    assert run("--shape", "tiny", capsys=capsys)[0] == 1
    assert asked == [(1, 8, 32, 128, 512, 2048, 8192)]


def test_no_gpu_on_the_command_line(monkeypatch, capsys) -> None:
    monkeypatch.setattr(cuda, "find_gpu", lambda: None)
    code, out, err = run(capsys=capsys)
    assert code == 2 and not out and "needs a CUDA or ROCm GPU; here: int8moe bench --backend cpu" in err
    assert find_bench("triton") is TritonBench


@pytest.mark.gpu
def test_on_a_gpu(tmp_path, capsys) -> None:
    """A small layer, all that there is: limits, check, graphs, kernels, the other form."""
    compare = ["--compare", "bf16"] if grouped_product() is not None else []
    arguments = ["--shape", "tiny", "--tokens", "1,40", "--seconds", "0.05", *compare, "--kernels", "--json"]
    code, out, err = run(*arguments, capsys=capsys)
    assert code == 0, err
    record = json.loads(out)
    assert record["machine"]["device"] == Platform.current().name and len(record["rows"]) == 2
    assert record["limits"]["chain"] in record["limits"]["chains"]
    assert all(row["median_ms"] > 0 and row["kernels_us"] for row in record["rows"])
