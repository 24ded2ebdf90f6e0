"""`int8moe tune` as a user types it, with a stand-in for the search: output, files, going on, wrong input, no GPU."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from int8moe.backends.triton import configs
from int8moe.backends.triton.configs import Plan, TileConfig, default_plan
from int8moe.bench import cuda
from int8moe.bench.base import Limits
from int8moe.bench.cuda import Gpu
from int8moe.cli.main import main

GPU = Gpu("NVIDIA H200", (9, 0), 132, 60 << 20, 141 << 30, "570.1")
TILE = TileConfig(16, 64, 128, 1, 4, 3)
LAYER = ("--layer", "8,2,512,1024")


@dataclass
class Search:
    """What the stand-in saw, and when it stops."""

    made: list[dict] = field(default_factory=list)
    tuned: list[int] = field(default_factory=list)
    left: int = 0
    stops_at: int | None = None


@pytest.fixture
def search(tmp_path, monkeypatch) -> Search:
    """A GPU and a tuner, both made up; files and times go below tmp_path."""
    pytest.importorskip("triton")
    from int8moe.tuning import tune

    seen = Search()

    class Tuner:
        def __init__(self, config, **more) -> None:
            seen.made.append({"config": config, **more})

        def __enter__(self):
            return self

        def __exit__(self, *_) -> None:
            seen.left += 1

        def search(self, tokens: int) -> int:
            return tokens

        def compile(self, searches, tick) -> None:
            tick(len(searches), len(searches))

        def tune(self, tokens: int, tick):
            tick(f"M={tokens}", 0.5)
            if tokens == seen.stops_at:
                raise KeyboardInterrupt
            seen.tuned.append(tokens)
            best = tokens >= 16
            refused = {"GEMM 1, gathered, a tile": "other bits than the default plan"} if best else {}
            return tune.Found(
                tokens, Plan(TILE, TILE) if best else default_plan(tokens, 8, 2, (9, 0)), 75.0 if best else 100.0,
                100.0, 12, refused, {"default": 100.0},
            )  # fmt: skip

    monkeypatch.setattr(tune, "Tuner", Tuner)
    monkeypatch.setattr(cuda, "find_gpu", lambda: GPU)
    monkeypatch.setattr(cuda, "measure_limits", lambda gpu, weight_only: Limits(4000.0, 1.2e6, "triton"))
    monkeypatch.setenv(configs.FOLDER_VARIABLE, str(tmp_path / "tuned"))
    monkeypatch.setenv("INT8MOE_RECORDS", str(tmp_path / "records"))
    for name in ("INT8MOE_VALIDATE", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)
    configs.read_plans.cache_clear()
    return seen


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["tune", *arguments])
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def test_what_is_said_and_kept(search, tmp_path, capsys) -> None:
    code, out, err = run(*LAYER, "--tokens", "1,64", "--workers", "3", capsys=capsys)
    plans = tmp_path / "tuned" / "E=8,N=1024,device_name=NVIDIA_H200,dtype=int8_w8a8.plans.json"
    assert code == 0 and not err
    assert "layer  8,2,512,1024: 8 experts, top-2, 512 x 1024, NVIDIA H200" in out
    assert f"file   {str(plans).replace('.plans', '')}" in out and "tokens 1, 64\n" in out
    assert "M=1: 100.0 us, the default is the fastest (12 tiles measured)" in out
    assert "M=64: 75.0 us, 25 % less than the default (12 tiles measured, 1 refused)" in out
    assert configs.read_plans(plans) == {1: default_plan(1, 8, 2, (9, 0)), 64: Plan(TILE, TILE)}
    (made,) = search.made
    assert (made["gbps"], made["tops"], made["check"], made["workers"], made["weight_only"]) == (
        4000.0, 1200.0, True, 3, False,
    )  # fmt: skip
    saved = [json.loads(line) for line in (tmp_path / "records" / "tune-triton.jsonl").read_text().splitlines()]
    assert [(r["backend"], r["device"], r["M"], r["latency_us"]) for r in saved] == [
        ("TRITON", "NVIDIA H200", 1, 100.0),
        ("TRITON", "NVIDIA H200", 64, 75.0),
    ]
    assert search.left == 1


def test_json_is_alone_on_stdout(search, tmp_path, capsys) -> None:
    code, out, err = run(*LAYER, "--tokens", "1,16", "--json", "--no-save", "--no-check", capsys=capsys)
    record = json.loads(out)
    assert code == 0 and "NVIDIA H200" in err and not (tmp_path / "records").exists()
    assert record["layer"] == "8,2,512,1024" and record["device"] == "NVIDIA H200" and Path(record["file"]).is_file()
    assert [(r["M"], r["gain_percent"], r["tried"]) for r in record["results"]] == [(1, 0.0, 12), (16, 25.0, 12)]
    assert record["results"][1]["refused"] and record["results"][1]["plan"] == configs.plan_entry(Plan(TILE, TILE))
    assert search.made[0]["check"] is False
    code, out, _ = run(*LAYER, "--tokens", "1,16", "--json", capsys=capsys)
    assert code == 0 and json.loads(out)["results"] == []


def test_a_second_run_does_what_is_left(search, capsys) -> None:
    run(*LAYER, "--tokens", "1,16", capsys=capsys)
    code, out, _ = run(*LAYER, "--tokens", "1,8,16", capsys=capsys)
    assert code == 0 and "tokens 8 (in the file already: 1, 16)" in out and search.tuned == [1, 16, 8]
    code, out, _ = run(*LAYER, "--tokens", "1,8,16", capsys=capsys)
    assert code == 0 and "tokens none (in the file already: 1, 8, 16)" in out and len(search.made) == 2
    run(*LAYER, "--tokens", "16", "--again", capsys=capsys)
    assert search.tuned == [1, 16, 8, 16]


def test_a_quick_run_and_a_full_one_after_it(search, tmp_path, monkeypatch, capsys) -> None:
    """With the plans that ship for this GPU. The full run does the counts of the quick one again; not the reverse."""
    limits = cuda.measure_limits
    monkeypatch.setattr(cuda, "measure_limits", lambda *_: pytest.fail("a quick search has no use for limits"))
    search.stops_at = 16
    code, _, _ = run(*LAYER, "--tokens", "1,16", "--quick", capsys=capsys)
    assert code == 130 and search.tuned == [1]
    search.stops_at = None
    code, out, _ = run(*LAYER, "--tokens", "1,16", "--quick", "--json", capsys=capsys)
    assert code == 0 and json.loads(out)["quick"] is True and search.tuned == [1, 16]
    assert {won.plan for won in search.made[-1]["won"]} and search.made[-1]["check"] is True
    code, out, _ = run(*LAYER, "--tokens", "1,16", "--quick", capsys=capsys)
    assert code == 0 and "tokens none (in the file already: 1, 16)" in out
    monkeypatch.setattr(cuda, "measure_limits", limits)
    code, out, _ = run(*LAYER, "--tokens", "1,16", capsys=capsys)
    assert code == 0 and "tokens 1, 16\n" in out and search.tuned == [1, 16, 1, 16] and search.made[-1]["won"] == ()
    code, out, _ = run(*LAYER, "--tokens", "1,16,64", "--quick", capsys=capsys)
    assert code == 0 and "tokens 64 (in the file already: 1, 16)" in out


def test_a_quick_run_of_w8a16_takes_plans_of_w8a16(search, capsys) -> None:
    code, _, _ = run("--shape", "qwen3-30b", "--tokens", "1", "--quick", "--weight-only", capsys=capsys)
    (made,) = search.made
    assert code == 0 and {(won.experts, won.intermediate) for won in made["won"]} == {(8, 14336)}, "not its own"


def test_a_quick_run_without_plans_for_the_gpu_says_what_would_work(search, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(cuda, "find_gpu", lambda: replace(GPU, name="NVIDIA L4"))
    code, out, err = run(*LAYER, "--tokens", "1", "--quick", capsys=capsys)
    assert code == 1 and not out and "Traceback" not in err and not search.made and not (tmp_path / "tuned").exists()
    assert "quick finds no plans of another layer for NVIDIA L4 and int8_w8a8" in err
    assert "needs those of one at least" in err and "Would work: the same command without --quick." in err
    assert run(*LAYER, "--tokens", "1", capsys=capsys)[0] == 0, "what it says would work"
    code, _, _ = run("--layer", "8,2,256,512", "--tokens", "1", "--quick", capsys=capsys)
    assert code == 0, "now there is one"


def test_help_says_what_quick_does(capsys) -> None:
    code, out, _ = run("--help", capsys=capsys)
    assert (
        code == 0
        and "--quick" in out
        and "Try only tiles that won for other layers on this GPU." in " ".join(out.split())
    )


@pytest.mark.parametrize("more", [(), ("--json",)], ids=["table", "json"])
def test_stopping_keeps_what_is_done_and_says_how_to_go_on(search, more, capsys) -> None:
    search.stops_at = 8
    code, out, err = run(*LAYER, "--tokens", "1,8,16", *more, capsys=capsys)
    assert code == 130 and search.tuned == [1] and search.left == 1
    assert "stopped; what is done is kept, and the same command goes on after it." in (err if more else out)
    assert not (more and out)
    search.stops_at = None
    code, out, _ = run(*LAYER, "--tokens", "1,8,16", capsys=capsys)
    assert code == 0 and "tokens 8, 16 (in the file already: 1)" in out and search.tuned == [1, 8, 16]


def test_when_the_minutes_are_over(search, capsys) -> None:
    code, out, _ = run(*LAYER, "--tokens", "1,8", "--minutes", "0", capsys=capsys)
    assert code == 0 and "0 minutes are over; the same command goes on with the rest." in out and search.tuned == []
    assert search.left == 1


def test_ranks_and_models(search, tmp_path, capsys) -> None:
    code, out, _ = run("--shape", "qwen3-30b", "--tp", "2", "--tokens", "1", capsys=capsys)
    assert code == 0 and "qwen3-30b, a rank of tp 2: 128 experts, top-8, 2048 x 384" in out
    code, out, _ = run("--shape", "qwen3-30b", "--ep", "4", "--tokens", "1", "--weight-only", capsys=capsys)
    assert code == 0 and "qwen3-30b, a rank of ep 4: 32 experts, top-8, 2048 x 768" in out
    assert "dtype=int8_w8a16.json" in out and search.made[-1]["weight_only"] is True
    folder = tmp_path / "[bold]moe"
    folder.mkdir()
    text = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "hidden_size": 64,
            "moe_intermediate_size": 48, "num_hidden_layers": 2}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(text))
    code, out, _ = run("--model", str(folder), "--tokens", "1", "--out", str(folder), capsys=capsys)
    assert code == 0 and "[bold]moe: 8 experts, top-2, 64 x 48" in out and len(list(folder.iterdir())) == 3


def test_another_layer_of_the_same_file_name_is_named_before_it_is_replaced(search, capsys) -> None:
    run(*LAYER, "--tokens", "1", capsys=capsys)
    code, out, _ = run("--layer", "8,2,256,1024", "--tokens", "1", capsys=capsys)
    assert code == 0 and "what the file holds now is replaced: hidden size 512, top-2" in out
    assert search.tuned == [1, 1]


@pytest.mark.parametrize("option", ["--out", "records"])
def test_folders_are_refused_before_anything_is_timed(option, search, monkeypatch, capsys) -> None:
    monkeypatch.setattr(cuda, "measure_limits", lambda *_: pytest.fail("measured before refusing"))
    more = ("--out", "/dev/null/here") if option == "--out" else ()
    if not more:
        monkeypatch.setenv("INT8MOE_RECORDS", "/dev/null/records")
    code, out, err = run(*LAYER, *more, capsys=capsys)
    assert code == 1 and not out and not search.made
    says = "/dev/null/here/E=8" if more else "/dev/null/records, cannot be made"
    assert says in err and "(Not a directory)" in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ((), 2, "needs one of --model, --shape and --layer"),
        ((*LAYER, "--shape", "olmoe"), 2, "needs one of --model, --shape and --layer"),
        (("--shape", "olmo"), 2, "shape is 'olmo', needs one of: tiny, olmoe"),
        (("--layer", "8,2,512"), 2, "layer is '8,2,512', needs four whole numbers: E,TOPK,H,I as 128,8,2048,768"),
        (("--layer", "8,2,512,x"), 2, "needs four whole numbers"),
        (("--layer", "8,2,512,0"), 2, "needs four whole numbers"),
        (("--layer", "8,2,512,²"), 2, "needs four whole numbers"),
        (("--layer", "8,9,512,64"), 2, "experts_per_token is 9, needs an integer of 1 to 8"),
        ((*LAYER, "--tokens", "1,x"), 2, "tokens is '1,x', needs whole numbers above 0"),
        ((*LAYER, "--tokens", ""), 2, "tokens is '', needs whole numbers above 0"),
        ((*LAYER, "--tp", "3"), 2, "tp is 3, needs a divisor of the intermediate size 1024"),
        ((*LAYER, "--tp", "0"), 2, "0"),
        ((*LAYER, "--ep", "9"), 2, "ep is 9, needs 1 to 8"),
        ((*LAYER, "--minutes", "nan"), 2, "minutes is nan, needs a number"),
        ((*LAYER, "--minutes", "-1"), 2, "-1"),
        ((*LAYER, "--workers", "0"), 2, "0"),
        (("--model", "no/such/place"), 1, "no/such/place does not exist"),
    ],
)
def test_wrong_input_gets_one_line(arguments, code, says, monkeypatch, capsys) -> None:
    monkeypatch.setattr(cuda, "find_gpu", lambda: pytest.fail("looked for a GPU before refusing"))
    found, out, err = run(*arguments, capsys=capsys)
    assert found == code and says in err and not out and "Traceback" not in err


def test_without_a_gpu_it_says_what_is_needed(monkeypatch, capsys) -> None:
    monkeypatch.setattr(cuda, "find_gpu", lambda: None)
    code, out, err = run(*LAYER, capsys=capsys)
    assert code == 1 and not out and "Traceback" not in err
    assert "sees no GPU" in err and "tuning, which times the Triton kernels" in err and "CUDA or ROCm GPU" in err
    assert "start it on that machine" in err and "int8moe bench" not in err


@pytest.mark.parametrize("name", ["INT8MOE_VALIDATE", "TRITON_INTERPRET"])
def test_settings_by_which_times_say_nothing_are_refused(name, search, monkeypatch, capsys) -> None:
    monkeypatch.setenv(name, "1")
    code, out, err = run(*LAYER, capsys=capsys)
    assert code == 1 and not out and f"{name} is '1', needs to be unset" in err and not search.made


def test_the_default_folder_is_where_the_kernels_look(search, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.delenv(configs.FOLDER_VARIABLE)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    code, _, _ = run(*LAYER, "--tokens", "16", capsys=capsys)
    assert code == 0 and sorted(os.listdir(tmp_path / "data" / "int8moe" / "tuned")) == [
        "E=8,N=1024,device_name=NVIDIA_H200,dtype=int8_w8a8.json",
        "E=8,N=1024,device_name=NVIDIA_H200,dtype=int8_w8a8.plans.json",
    ]
    configs._tuned.cache_clear()
    assert configs.choose_plan(20, 8, 2, 512, 1024, GPU.name, (9, 0)) == Plan(TILE, TILE)
