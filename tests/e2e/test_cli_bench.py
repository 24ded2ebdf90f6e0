"""`int8moe bench` as a user types it, on a small layer: table, record, picture, saved times, wrong input."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from int8moe.backends.cpu import native
from int8moe.bench import cpu
from int8moe.bench import limits as machine_limits
from int8moe.bench.base import Limits
from int8moe.cli.main import main
from int8moe.errors import Int8MoeError

QUICK = ("--seconds", "0", "--threads", "1", "--tokens", "1,16")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "little-moe"
    folder.mkdir()
    text = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "hidden_size": 64,
            "moe_intermediate_size": 48, "num_hidden_layers": 2, "hidden_act": "silu", "dtype": "float32"}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(text))
    return str(folder)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few copies of a layer, limits given; INT8MOE_CPU_ISA, which --isa sets, is put back afterwards."""
    monkeypatch.setattr(cpu, "COLD_BYTES", 1 << 18)
    monkeypatch.setattr(machine_limits, "last_level_cache_bytes", lambda: 0)
    monkeypatch.setattr(machine_limits, "measure_limits", lambda isa, threads, megabytes: Limits(1e3, 1e5, "chain"))
    monkeypatch.setattr(machine_limits, "busy_cores", lambda: 0.0)
    monkeypatch.setenv("INT8MOE_CPU_ISA", "")


@pytest.fixture
def never_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong input is refused before anything is measured."""
    monkeypatch.setattr(machine_limits, "measure_limits", lambda *_: pytest.fail("measured before refusing"))
    monkeypatch.setenv("INT8MOE_CPU_ISA", "")


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["bench", *arguments])
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def test_the_table(quick, model, capsys) -> None:
    code, out, _ = run("--model", model, *QUICK, "--compare", "torch-bf16", capsys=capsys)
    assert code == 0
    assert "read 1000.0 GB/s, int8 100000 GOP/s (chain)" in out and "1 thread of" in out
    assert "little-moe: 8 experts, top-2, 64 x 48, float32" in out
    for head in ("median ms", "quartiles", "GB/s", "% read", "GOP/s", "% int8", "floor ms", "% floor", "torch-bf16"):
        assert head in out
    lines = [line.split() for line in out.splitlines() if line.strip()[:2] in ("1 ", "16")]
    assert [line[0] for line in lines] == ["1", "16"] and all(line[-1].endswith("x") for line in lines)


def test_json_is_alone_on_stdout(quick, model, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("INT8MOE_RECORDS", str(tmp_path / "mine"))
    out_file, plot = tmp_path / "a.json", tmp_path / "a.svg"
    more = ["--out", str(out_file), "--save", "--between", "--uniform-codes"]
    if _has_matplotlib():
        more += ["--plot", str(plot)]
    code, out, err = run("--model", model, "--tp", "2", *QUICK, "--json", *more, capsys=capsys)
    record = json.loads(out)
    assert code == 0 and record["rows"] == json.loads(out_file.read_text())["rows"]
    assert [(r["shape"], r["M"], r["I"], r["tp"]) for r in record["rows"]] == [
        ("little-moe", 1, 24, 2),
        ("little-moe", 16, 24, 2),
    ]
    assert record["method"]["between_torch_operations"] is True and record["method"]["weights"] == "uniform codes"
    assert record["machine"]["threads"] == 1
    saved = tmp_path / "mine" / "bench-cpu.jsonl"
    assert f"saved 2 layer times for choosing a backend: {saved}" in err
    assert [json.loads(line)["M"] for line in saved.read_text().splitlines()] == [1, 16]
    if _has_matplotlib():
        assert plot.read_text().count("<path") > 20


def test_two_shapes_and_a_picture(quick, model, tmp_path, capsys) -> None:
    if not _has_matplotlib():
        pytest.skip("the plot needs matplotlib")
    plot = tmp_path / "a.png"
    code, out, _ = run("--model", model, "--shape", "tiny", *QUICK, "--plot", str(plot), capsys=capsys)
    assert code == 0 and f"plot: {plot}" in out
    assert plot.read_bytes().startswith(b"\x89PNG") and plot.stat().st_size > 20_000


def test_isa_forces_one_instruction_set(quick, model, capsys) -> None:
    code, out, _ = run("--model", model, *QUICK, "--isa", "portable", "--json", capsys=capsys)
    assert code == 0 and json.loads(out)["machine"]["isa"] == "portable"
    assert os.environ["INT8MOE_CPU_ISA"] == "portable"


def test_with_this_machines_own_limits(model, monkeypatch, capsys) -> None:
    if not hasattr(native.load(), "measure_read"):
        pytest.skip("the native module was built without measure_read and measure_peak")
    monkeypatch.setattr(cpu, "COLD_BYTES", 1 << 23)
    monkeypatch.setattr(machine_limits, "last_level_cache_bytes", lambda: 0)
    monkeypatch.setattr(cpu, "MAX_COPIES", 4)
    code, out, _ = run("--model", model, *QUICK, "--json", capsys=capsys)
    limits = json.loads(out)["limits"]
    assert code == 0 and limits["read_gbps"] > 0 and limits["peak_gops"] > 0 and limits["chain"] in limits["chains"]


def test_save_where_no_folder_can_be_made_is_refused_before_anything_is_timed(never_timed, monkeypatch, capsys) -> None:
    monkeypatch.setenv("INT8MOE_RECORDS", "/dev/null/records")
    code, out, err = run("--save", capsys=capsys)
    assert code == 2 and not out and "/dev/null/records, cannot be made (Not a directory)" in err


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--shape", "olmo"), 2, "shape is 'olmo', needs one of: tiny, olmoe, qwen3-30b"),
        (("--backend", "humming"), 2, "the humming backend needs a CUDA or ROCm GPU"),
        (("--backend", "nonsense"), 2, "backend is 'nonsense', which has no bench; needs one of: cpu, triton"),
        (("--weight-only",), 2, "weight_only is True, which does not apply to the cpu backend; needs to be left out"),
        (("--kernels",), 2, "kernels is True, which does not apply to the cpu backend"),
        (("--backend", "triton", "--threads", "4"), 2, "threads is 4, which does not apply to the triton backend"),
        (("--backend", "triton", "--isa", "avx2"), 2, "isa is 'avx2', which does not apply to the triton backend"),
        (("--backend", "triton", "--between"), 2, "between is True, which does not apply to the triton backend"),
        (("--backend", "triton", "--compare", "torch-bf16"), 2, "compare is 'torch-bf16', needs one of: bf16"),
        (("--backend", "triton", "--save", "--weight-only"), 2, "needs a run without --weight-only"),
        (("--tokens", "1,x"), 2, "tokens is '1,x', needs whole numbers above 0 with commas between"),
        (("--tokens", "0"), 2, "tokens is '0', needs whole numbers above 0"),
        (("--tokens", ""), 2, "tokens is '', needs whole numbers above 0"),
        (("--compare", "torch-bf16,numpy"), 2, "compare is 'numpy', needs one of: torch-bf16, torch-fp32"),
        (("--shape", "olmoe", "--tp", "3"), 2, "olmoe: tp is 3, needs a divisor of the intermediate size 1024"),
        (("--plot", "a.jpg"), 2, "plot is 'a.jpg', needs a file name that ends in .png or .svg"),
        (("--out", "no/such/folder/a.json"), 2, "needs a folder that exists: no/such/folder does not"),
        (("--seconds", "-1"), 2, "-1"),
        (("--threads", "0"), 2, "0"),
        (("--threads", "100000"), 2, "threads is 100000, needs at most "),
        (("--seconds", "nan"), 2, "seconds is nan, needs a number of seconds"),
        (("--seconds", "inf"), 2, "seconds is inf, needs a number of seconds"),
        (("--shape", "tiny", "--tokens", "99999999999"), 1, "tiny: a call of 99,999,999,999 tokens takes about "),
        (("--model", "no/such/place"), 1, "no/such/place does not exist"),
        (("--isa", "sse9"), 1, "INT8MOE_CPU_ISA is 'sse9', needs one of those compiled: "),
    ],
)
def test_wrong_input_gets_one_line_before_anything_is_timed(never_timed, arguments, code, says, capsys) -> None:
    found, out, err = run(*arguments, capsys=capsys)
    assert found == code and not out
    assert says in err and "Traceback" not in err


def test_a_layer_too_large_for_the_memory_is_refused(never_timed, monkeypatch, capsys) -> None:
    monkeypatch.setattr(machine_limits, "available_memory_bytes", lambda: 4 << 30)
    code, out, err = run("--shape", "deepseek-v3", capsys=capsys)
    assert code == 1 and not out
    assert "error: deepseek-v3: one layer takes" in err and "a larger --tp" in err


def test_a_row_that_fails_leaves_those_before_it(quick, model, tmp_path, monkeypatch, capsys) -> None:
    timed = cpu.CPUBench._time_row

    def fails_at_16(self, name, config, layers, tokens, tick):
        if tokens == 16:
            raise Int8MoeError("no more.")
        return timed(self, name, config, layers, tokens, tick)

    monkeypatch.setattr(cpu.CPUBench, "_time_row", fails_at_16)
    code, _, err = run("--model", model, *QUICK, "--out", str(tmp_path / "a.json"), capsys=capsys)
    assert code == 1 and "error: no more." in err
    assert [r["M"] for r in json.loads((tmp_path / "a.json").read_text())["rows"]] == [1]


def _has_matplotlib() -> bool:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True
