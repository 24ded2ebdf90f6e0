"""`int8moe warmup` as a user types it: wrong input, no GPU, and what it does on a made-up one."""

from __future__ import annotations

import json

import pytest

from int8moe.cli.main import main
from int8moe.device import Platform

LAYER = ("--layer", "128,8,2048,768")


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(["warmup", *arguments])
    out, err = capsys.readouterr()
    return int(stopped.value.code or 0), out, err


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Platform, "current", staticmethod(lambda: Platform.named("h200")))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "needs one of --model PATH and --layer E,topk,H,I"),
        (("--model", "x", *LAYER), "needs one of --model PATH and --layer E,topk,H,I"),
        (("--layer", "8,2,64"), "layer is '8,2,64', needs four whole numbers above 0"),
        (("--layer", "8,0,64,64"), "needs four whole numbers above 0"),
        (("--model", "/nowhere"), "/nowhere"),
        ((*LAYER, "--tp", "5"), "tp is 5, needs a divisor of the intermediate size 768"),
    ],
)
def test_wrong_input_gets_one_line(h200, arguments, says, capsys) -> None:
    code, out, err = run(*arguments, capsys=capsys)
    assert code == 2 and not out and says in err and "Traceback" not in err


def test_without_a_gpu(monkeypatch, capsys) -> None:
    monkeypatch.setattr(Platform, "current", staticmethod(lambda: Platform.named("zen3")))
    code, _, err = run(*LAYER, capsys=capsys)
    assert code == 2 and "this machine is zen3, needs a GPU" in err


def test_a_backend_that_cannot_run_the_layer_says_why(h200, capsys) -> None:
    code, _, err = run("--layer", "8,2,2056,768", "--backend", "humming", capsys=capsys)
    assert code == 1 and "hidden_dim is 2056, needs a multiple of 16" in err


def test_humming_compiles_what_calls_of_that_size_need(h200, monkeypatch, capsys) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("humming", reason="humming-kernels is not installed")
    if torch.cuda.is_available():
        pytest.skip("a real device answers")
    from humming.kernel.humming import HummingKernel

    import humming_offline
    from int8moe.backends.humming import compile as ahead

    humming_offline.pretend(90, monkeypatch.setattr)
    asked: list[tuple] = []
    monkeypatch.setattr(HummingKernel, "prepare_kernels", lambda *a: asked.append(a))
    monkeypatch.setattr(ahead, "_load_quantizers", lambda *_: None)
    code, out, _ = run(*LAYER, "--backend", "humming", "--json", "--max-tokens", "64", capsys=capsys)
    found = json.loads(out)
    assert code == 0 and found["kernels"] == len(asked) > 2
    assert (found["backend"], found["experts_class"], found["E"], found["I"]) == (
        "HUMMING", "HummingIndexedExperts", 128, 768,
    )  # fmt: skip
    # The class measured fastest at this shape; no record fits the next one.
    asked.clear()
    code, out, _ = run(*LAYER, "--backend", "humming", "--tp", "2", "--ep", "4", capsys=capsys)
    assert code == 0 and "HUMMING (HummingGroupedExperts) is ready for calls of up to 8192 tokens" in out
    assert {json.loads(layer)["num_experts"] for layer, *_ in asked} == {32}
