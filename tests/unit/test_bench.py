"""The parts of `int8moe bench`: limits, copies in turn, weights, rows, records, the picture. No time is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from int8moe.backends.cpu import native
from int8moe.backends.cpu.support import CPUExpertsInt8
from int8moe.backends.reference.support import ReferenceExperts
from int8moe.bench import BENCHES, cpu, find_bench
from int8moe.bench import limits as machine_limits
from int8moe.bench.base import Limits, Options, Row, Timing
from int8moe.bench.plot import check_plot, draw
from int8moe.bench.record import commit, layer_times, make_record, write_record
from int8moe.bench.shapes import SHAPES, BenchShape, model_shape, named_shape
from int8moe.bench.torch_loop import FORMS, TorchLoop
from int8moe.config import FusedMoEConfig, MoEActivation
from int8moe.device import Platform
from int8moe.errors import ConfigError, Int8MoeError
from int8moe.model_config import ModelExperts
from int8moe.records import append_records, load_records, user_folder

LIMITS = Limits(10.0, 100.0, "chain", {"chain": 100.0, "slower": 50.0})
SMALL = BenchShape("small", ModelExperts("test", 4, 2, 64, 32, num_layers=1))
GIB = 1 << 30


pytestmark = pytest.mark.usefixtures("one_thread")


def config_of(shape: BenchShape) -> FusedMoEConfig:
    return shape.config(Platform.cpu())


def draw_quietly(config: FusedMoEConfig, uniform: bool = False):
    return cpu.draw_weights(config, uniform, lambda share: None)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few copies of a layer are enough, and the limits are given: nothing here depends on the machine."""
    monkeypatch.setattr(cpu, "COLD_BYTES", 1 << 17)
    monkeypatch.setattr(machine_limits, "last_level_cache_bytes", lambda: 0)
    monkeypatch.setattr(machine_limits, "measure_limits", lambda isa, threads, megabytes: LIMITS)
    monkeypatch.setattr(machine_limits, "busy_cores", lambda: 0.0)


def run_small(**options) -> tuple[cpu.CPUBench, list[Row], list[tuple[str, float]]]:
    bench = cpu.CPUBench([SMALL], Options(**{"tokens": (1, 20), "seconds": 0.0, "threads": 1, **options}))
    bench.measure_limits()
    ticks: list[tuple[str, float]] = []
    rows = list(bench.rows(lambda text, at: ticks.append((text, at))))
    return bench, rows, ticks


def row(M: int = 4, ms: float = 2.0, count: float = 10e6, operations: float = 50e6, **compared: Timing) -> Row:
    time = Timing(ms, (0.9 * ms, 1.1 * ms), 10)
    return Row("small", config_of(SMALL), M, time, 3.0, count, operations, LIMITS, compared)


# --- limits ---------------------------------------------------------------------------------------------------------


def test_the_floor_is_the_slower_of_reading_and_computing() -> None:
    assert LIMITS.floor_ms(10e6, 50e6) == pytest.approx(1.0)
    assert LIMITS.floor_ms(10e6, 400e6) == pytest.approx(4.0)
    r = row()
    assert (r.gbps, r.read_percent) == (pytest.approx(5.0), pytest.approx(50.0))
    assert (r.gops, r.peak_percent) == (pytest.approx(25.0), pytest.approx(25.0))
    assert (r.floor_ms, r.floor_by, r.floor_percent) == (pytest.approx(1.0), "read", pytest.approx(50.0))
    assert row(operations=400e6).floor_by == "compute"


@pytest.mark.parametrize("isa", [i for i, (_, runs, _) in enumerate(native.load().kernels()) if runs])
def test_measured_limits_are_numbers_above_zero(isa: int) -> None:
    found = machine_limits.measure_limits(isa, 1, 8)
    assert found.read_gbps > 0 and found.peak_gops == max(found.chains.values()) == found.chains[found.chain] > 0


def test_no_memory_to_measure_with_says_so() -> None:
    with pytest.raises(Int8MoeError, match="no memory for the buffer of 1099511627776 MiB"):
        machine_limits.measure_limits(native.select_isa(), 1, 1 << 40)


def test_last_level_caches_are_counted_once_each(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(machine_limits.os, "sched_getaffinity", lambda pid: {0, 1, 2})
    for cpu_, level, size, shared in [
        (0, 1, "32K", "0"), (0, 3, "32768K", "0-1"), (1, 1, "32K", "1"), (1, 3, "32768K", "0-1"), (2, 3, "16M", "2-3"),
        (3, 3, "16M", "2-3"),
    ]:  # fmt: skip
        index = tmp_path / f"cpu{cpu_}" / "cache" / f"index{level}"
        index.mkdir(parents=True)
        for name, text in (("level", str(level)), ("size", size), ("shared_cpu_list", shared)):
            (index / name).write_text(text + "\n")
    assert machine_limits.last_level_cache_bytes(str(tmp_path)) == 48 << 20
    assert machine_limits.last_level_cache_bytes(str(tmp_path / "nothing")) == 0


def test_available_memory_heeds_a_containers_limit(tmp_path) -> None:
    info = tmp_path / "meminfo"
    info.write_text("MemTotal: 9 kB\nMemAvailable:    2048 kB\n")
    ask = lambda: machine_limits.available_memory_bytes(str(info), str(tmp_path))
    assert ask() == 2 << 20
    for name, text in (("max", "max"), ("current", "700000"), ("stat", "anon 5\ninactive_file 200000\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert ask() == 2 << 20
    (tmp_path / "memory.max").write_text("1000000\n")
    assert ask() == 500_000
    assert machine_limits.available_memory_bytes("/no/such", "/no/such") is None


def test_busy_cores_are_counted_from_ticks(tmp_path, monkeypatch) -> None:
    stat = tmp_path / "stat"
    text = lambda busy, idle: f"cpu  9 9\ncpu0 {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu1 5 0 0 {idle + busy} 0 0 0 0 0 0\n"
    monkeypatch.setattr(machine_limits.os, "sched_getaffinity", lambda pid: {0, 1, 7})
    stat.write_text(text(100, 1000))
    monkeypatch.setattr(machine_limits.time, "sleep", lambda seconds: stat.write_text(text(175, 1025)))
    assert machine_limits.busy_cores(stat=str(stat)) == 0.75
    assert machine_limits.busy_cores(stat="/no/such") is None


# --- shapes and backends --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_the_cpu_runs_every_named_shape(name: str, monkeypatch) -> None:
    monkeypatch.setattr(machine_limits, "available_memory_bytes", lambda: 1 << 40)
    monkeypatch.setattr(machine_limits, "busy_cores", lambda: 0.0)
    bench = cpu.CPUBench([named_shape(name), named_shape(name, tp=2)], Options())
    assert bench.method()["layers_in_turn"][name]["int8moe"] >= 2


def test_named_shapes_and_models(tmp_path) -> None:
    c = config_of(named_shape("mixtral", tp=2))
    assert (c.num_experts, c.experts_per_token, c.hidden_dim, c.intermediate_size_per_partition) == (8, 2, 4096, 7168)
    with pytest.raises(ConfigError, match="shape is 'olmo', needs one of: tiny, olmoe"):
        named_shape("olmo")
    with pytest.raises(ConfigError, match="olmoe: tp is 3, needs a divisor of the intermediate size 1024"):
        config_of(named_shape("olmoe", tp=3))
    folder = tmp_path / "my-model"
    folder.mkdir()
    text = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "hidden_size": 64,
            "intermediate_size": 32, "num_hidden_layers": 3}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(text))
    assert model_shape(folder) == model_shape(folder / "config.json")
    assert model_shape(folder).name == "my-model" and config_of(model_shape(folder)).hidden_dim == 64


def test_a_backend_without_a_bench_is_refused() -> None:
    assert find_bench("cpu") is cpu.CPUBench and all(find_bench(name).backend == name.upper() for name in BENCHES)
    with pytest.raises(ConfigError, match="backend is 'reference', which has no bench; needs one of: cpu"):
        find_bench("reference")


def test_a_layer_the_cpu_cannot_run_is_refused_with_the_reason() -> None:
    huge = BenchShape("huge", ModelExperts("test", 1, 1, 1 << 18, 16, num_layers=1))
    with pytest.raises(ConfigError, match="huge: the CPU backend cannot run this layer since hidden"):
        cpu.CPUBench([huge], Options())


# --- copies in turn -------------------------------------------------------------------------------------------------


def test_copies_are_cold_together(monkeypatch) -> None:
    monkeypatch.setattr(machine_limits, "last_level_cache_bytes", lambda: 100 << 20)
    c = config_of(named_shape("tiny"))
    turns = cpu.plan_turns("tiny", c, ("torch-bf16",), None)
    assert turns.cold and turns.copies["int8moe"] * c.experts_bytes(1) > 390 << 20
    assert turns.copies["torch-bf16"] < turns.copies["int8moe"]
    assert cpu.plan_turns("mixtral", config_of(named_shape("mixtral")), (), None).copies == {"int8moe": 2}


def test_copies_fit_the_memory(monkeypatch) -> None:
    monkeypatch.setattr(machine_limits, "last_level_cache_bytes", lambda: 0)
    c = config_of(named_shape("tiny"))
    one = c.experts_bytes(1, scale_bytes=4)
    turns = cpu.plan_turns("tiny", c, (), 12 * one)
    assert 1 <= turns.copies["int8moe"] < 12 and not turns.cold
    big = config_of(named_shape("deepseek-v3"))
    with pytest.raises(
        Int8MoeError, match=r"deepseek-v3: one layer takes .* GiB .*, and 18.0 GiB of memory can be used"
    ):
        cpu.plan_turns("deepseek-v3", big, (), 20 * GIB)
    with pytest.raises(Int8MoeError, match="or fewer forms in --compare"):
        cpu.plan_turns("deepseek-v3", big, ("torch-fp32",), 40 * GIB)


# --- weights, routing, correctness ----------------------------------------------------------------------------------


def test_weights_are_quantised_normal_ones_and_experts_differ() -> None:
    c = FusedMoEConfig(20, 2, 256, 64, platform=Platform.cpu())
    w = draw_quietly(c)
    for codes in (w.w13, w.w2):
        assert (codes.abs().amax(-1) == 127).all()
        assert 25 < codes.float().std() < 60  # a row's largest of 64 to 256 normal values is 2.4 to 3 deviations
        assert len({e.numpy().tobytes() for e in codes}) == 20
    uniform = draw_quietly(c, uniform=True)
    assert 70 < uniform.w13.float().std() < 77 and uniform.w13.abs().max() == 127


def test_routing_takes_distinct_experts() -> None:
    c = FusedMoEConfig(20, 8, 64, 64, platform=Platform.cpu())
    weights, ids = cpu.draw_call(c, 50, seed=3)
    assert weights.dtype is torch.float32 and ids.shape == (50, 8)
    assert all(len(set(line)) == 8 for line in ids.tolist())
    assert not torch.equal(ids, cpu.draw_call(c, 50, seed=4)[1])


def test_a_wrong_kernel_is_found_before_the_clock_starts(quick, monkeypatch) -> None:
    right = CPUExpertsInt8.apply

    def wrong_at_16(self, x, *rest, **named):
        y = right(self, x, *rest, **named)
        if len(x) == 16:
            y[3, 5] += 1
        return y

    monkeypatch.setattr(CPUExpertsInt8, "apply", wrong_at_16)
    monkeypatch.setattr(cpu, "_timed", lambda *_: pytest.fail("timed before it was checked"))
    for tokens in ((1, 16), (64,)):  # 16 is checked where no row is small enough
        with pytest.raises(Int8MoeError, match=r"small at M=16: the CPU kernel \(\w+\) differs .* in 1 of 1024 values"):
            run_small(tokens=tokens)


@pytest.mark.parametrize("activation", [a for a in MoEActivation])
@pytest.mark.parametrize("form", FORMS)
def test_the_torch_loop_computes_the_same_layer(activation: MoEActivation, form: str) -> None:
    c = FusedMoEConfig(6, 2, 64, 48, activation=activation, has_bias=True, swiglu_limit=0.5, platform=Platform.cpu())
    w = draw_quietly(c)
    x, call = cpu.draw_hidden(c, 9), cpu.draw_call(c, 9, 0)
    want = cpu.packed_layer(ReferenceExperts, c, w).apply(x, *call).float()
    got = TorchLoop(c, w, FORMS[form]).apply(x, *call).float()
    assert (got - want).norm() < 0.03 * want.norm()


# --- rows and records -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("between", [False, True])
def test_rows_of_a_small_layer(quick, between: bool) -> None:
    before = torch.get_num_threads()
    bench, rows, ticks = run_small(compare=("torch-fp32", "torch-bf16"), between=between)
    assert torch.get_num_threads() == before
    assert [r.M for r in rows] == [1, 20]
    one = 3 * 64 * 32 + 4 * (2 * 32 + 64)
    assert (rows[0].experts_touched, rows[0].bytes, rows[0].operations) == (2, 2 * one, 2 * 2 * 3 * 64 * 32)
    assert rows[1].experts_touched == 4 and rows[1].operations == 20 * rows[0].operations
    for r in rows:
        assert r.time.calls == cpu.MIN_TURNS and list(r.compared) == ["torch-fp32", "torch-bf16"]
        assert 0 < r.time.quartiles_ms[0] <= r.time.median_ms <= r.time.quartiles_ms[1]
    at = [spent for _, spent in ticks]
    assert at == sorted(at) and at[-1] == pytest.approx(bench.planned_seconds())


def test_the_record_is_plain_json(quick, tmp_path) -> None:
    bench, rows, _ = run_small(compare=("torch-bf16",))
    record = make_record(bench, LIMITS, rows)
    write_record(record, tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text()) == json.loads(json.dumps(record))
    assert record["schema"] == 1 and record["machine"]["isa"] == bench.isa
    assert record["limits"] == {
        "read_gbps": 10.0, "peak_gops": 100.0, "chain": "chain", "chains": LIMITS.chains, "traffic": "read",
        "products": "int8", "others": {},
    }  # fmt: skip
    assert "kernels_us" not in record["rows"][0]
    assert record["method"]["layers_in_turn"]["small"]["int8moe"] >= 2
    assert {"int8moe", "torch", "python"} <= set(record["versions"])
    assert set(record["rows"][0]["compared"]["torch-bf16"]) == {"median_ms", "quartiles_ms", "calls", "times_as_long"}


def test_saved_times_are_read_back(quick, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("INT8MOE_RECORDS", str(tmp_path / "new" / "folder"))
    bench, rows, _ = run_small()
    file = append_records(layer_times(bench, rows), "bench-cpu")
    append_records(layer_times(bench, rows[:1]), "bench-cpu")  # measured again: the later line counts
    assert file.parent == user_folder() and len(file.read_text().splitlines()) == 3
    found = [r for r in load_records() if r.fits(config_of(SMALL))]
    assert [(r.M, r.backend, r.experts_class, r.source) for r in found] == [
        (1, "CPU", "CPUExpertsInt8", "bench-cpu.jsonl:3"),
        (20, "CPU", "CPUExpertsInt8", "bench-cpu.jsonl:2"),
    ]
    assert found[0].latency_us == pytest.approx(1e3 * rows[0].time.median_ms, rel=1e-2)


def test_no_commit_outside_a_checkout(tmp_path) -> None:
    package = tmp_path / "lib" / "int8moe"
    package.mkdir(parents=True)
    assert commit(package) is None


# --- the picture ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_picture_is_made(tmp_path, suffix: str, quick) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    other = {"torch-bf16": Timing(5.0, (4.0, 6.0), 10)}
    rows = [row(M, ms, operations=M * 20e6, **other) for M, ms in ((64, 20.0), (1, 2.0), (8, 3.0))]
    file = tmp_path / f"a{suffix}"
    draw(rows, cpu.CPUBench([SMALL], Options()), LIMITS, file)
    if suffix == ".svg":
        text = file.read_text()
        assert "<svg" in text and text.count("<path") > 20
    else:
        from matplotlib.image import imread

        picture = imread(file)
        assert picture.shape[0] > 400 and picture.shape[1] > 1000
        assert len({tuple(pixel) for pixel in picture[::5, ::5].reshape(-1, 4).round(2).tolist()}) > 20


def test_one_row_is_enough_for_a_picture(tmp_path, quick) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    draw([row()], cpu.CPUBench([SMALL], Options()), LIMITS, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000


@pytest.mark.parametrize("name", ["a.jpg", "a", "png"])
def test_an_unknown_suffix_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"needs a file name that ends in \.png or \.svg"):
        check_plot(Path(name))
