"""`int8moe generate` and `int8moe eval`, as a user calls them, on tiny models."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys

import pytest
import torch

tf = pytest.importorskip("transformers")
import int8moe.transformers as it  # noqa: E402
from int8moe import evaluate  # noqa: E402
from int8moe.cli.main import main  # noqa: E402
from int8moe.errors import ConfigError  # noqa: E402
from int8moe.layer_errors import LayerErrors  # noqa: E402
from tiny_models import make_model, make_tokenizer  # noqa: E402

TEXT = "The experts were asked for numbers, é and ß included.\n" * 12


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def on_the_cpu(request, monkeypatch):
    """Where there is a GPU `load` would take it; only tests marked `gpu` want that."""
    if "gpu" not in request.keywords:
        monkeypatch.setenv("INT8MOE_DEVICE", "cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model("qwen3_moe", folder, dtype=torch.float32)
    make_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def int8_folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("int8")
    it.load(model, "reference", device="cpu").save_pretrained(folder)
    return folder


def run(capsys, *arguments) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return int(stopped.value.code or 0), captured.out, captured.err


# -- generate


def test_generate_streams_and_reports(model, capsys):
    code, out, err = run(
        capsys, "generate", model, "--prompt", "The experts", "--max-new-tokens", 8, "--backend", "reference"
    )
    assert code == 0, err
    lm, tokenizer = it.load(model, "reference"), evaluate.load_tokenizer(model)
    ids = tokenizer("The experts", return_tensors="pt").input_ids
    want = lm.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    assert out == tokenizer.decode(want, skip_special_tokens=True) + "\n"
    (line,) = err.strip().splitlines()
    assert line.startswith("INT8 experts: REFERENCE (ReferenceExperts); prefill 11 tokens at ")
    assert "decode" in line


def test_generate_writes_before_it_is_done(model):
    """In a process of its own: the first text arrives while the model still runs."""
    script = (
        "import sys, time\n"
        "import int8moe.transformers as it\n"
        "from int8moe.integrations.transformers.experts import Int8Experts as E\n"
        "forward = E.forward\n"
        "def slow(self, *a):\n"
        "    time.sleep(0.02); return forward(self, *a)\n"
        "E.forward = slow\n"
        "from int8moe.cli.main import main\n"
        "main()\n"
    )
    command = [sys.executable, "-c", script, "generate", str(model), "--prompt", "a b c", "--backend", "reference",
               "--max-new-tokens", "40", "--temperature", "3"]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None and process.stderr is not None
        first = process.stdout.read(1)
        running = process.poll() is None
        rest, err = process.communicate()
    assert process.returncode == 0, err
    assert first and running and rest


def test_generate_json_seed_and_temperature(model, capsys):
    arguments = ["generate", model, "--prompt", "x", "--max-new-tokens", 12, "--backend", "reference", "--json"]
    texts = []
    for seed in (1, 1, 2):
        code, out, _ = run(capsys, *arguments, "--temperature", 2.0, "--seed", seed)
        assert code == 0
        texts.append(json.loads(out)["text"])
    assert texts[0] == texts[1] != texts[2]
    _, out, _ = run(capsys, *arguments)
    report = json.loads(out)
    assert report["layers"] == [{"backend": "REFERENCE", "experts_class": "ReferenceExperts", "count": 2}]
    assert 1 <= report["new_tokens"] <= 12 and report["prefill_tokens_per_s"] > 0


def test_generate_original_and_int8_checkpoint(model, int8_folder, capsys):
    code, _, err = run(capsys, "generate", model, "--prompt", "x", "--max-new-tokens", 4, "--no-int8")
    assert code == 0 and "none: the original checkpoint" in err
    make_tokenizer(int8_folder)
    outs = [
        run(capsys, "generate", m, "--prompt", "x", "--max-new-tokens", 9, "--backend", "reference")[1]
        for m in (model, int8_folder)
    ]
    assert outs[0] == outs[1]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--prompt", "x", "--backend", "marlin"], 2, "'marlin' is not one of 'auto', 'triton', 'humming', 'cpu'"),
        ([], 2, "--prompt"),
        (["--prompt", ""], 2, "--prompt has no tokens"),
        (["--prompt", "x", "--max-new-tokens", "0"], 2, "--max-new-tokens"),
        (["--prompt", "x", "--no-int8", "--backend", "cpu"], 2, "--no-int8"),
    ],
)
def test_generate_wrong_usage(arguments, code, says, model, capsys):
    got, _, err = run(capsys, "generate", model, *arguments)
    assert (got, says in err) == (code, True), err


def test_generate_failures_are_one_line(model, tmp_path, capsys):
    code, _, err = run(capsys, "generate", tmp_path / "absent", "--prompt", "x")
    assert code == 1 and err.count("\n") == 1 and "is not a folder" in err
    make_model("llama", tmp_path)
    code, _, err = run(capsys, "generate", tmp_path, "--prompt", "x")
    assert code == 1 and err.count("\n") == 1 and "dense model" in err
    make_model("qwen3_moe", tmp_path)
    code, _, err = run(capsys, "generate", tmp_path, "--prompt", "x", "--backend", "reference")
    assert code == 1 and err.count("\n") == 1 and "no tokenizer" in err


def test_what_quantize_writes_gives_the_same_answers(model, text, tmp_path, capsys):
    """The file that `int8moe quantize` makes against quantising while loading: the same sums, to the last bit."""
    folder = tmp_path / "int8"
    code, _, err = run(capsys, "quantize", model, folder)
    assert code == 0, err
    common = ["--text", text, "--max-tokens", 60, "--context", 16, "--json"]
    online = json.loads(run(capsys, "eval", model, *common)[1])
    from_disk = json.loads(run(capsys, "eval", folder, "--baseline", model, *common)[1])
    for key in ("nll", "tokens", "perplexity"):
        assert online["int8"][key] == from_disk["int8"][key]
    code, out, err = run(capsys, "generate", folder, "--prompt", "x", "--max-new-tokens", 6)
    assert code == 0, err  # the tokenizer travels with the weights
    assert out == run(capsys, "generate", model, "--prompt", "x", "--max-new-tokens", 6)[1]
    it.load(model, "reference").save_pretrained(tmp_path / "saved")
    saved, written = (json.loads((tmp_path / f / "config.json").read_text()) for f in ("saved", "int8"))
    assert saved["quantization_config"] == written["quantization_config"]


# -- eval


def independent(models, ids, context, stride):
    """Perplexity, agreement and KL token by token: each token scored by the first window that holds it."""
    nll, tops, kl = [0.0, 0.0], [], 0.0
    for t in range(1, len(ids)):
        start = 0 if t < context else stride * math.ceil((t - context + 1) / stride)
        logp = []
        for m in models:
            with torch.inference_mode():
                logp.append(torch.log_softmax(m(ids[None, start:t]).logits[0, -1].double(), -1))
        nll = [n - float(p[ids[t]]) for n, p in zip(nll, logp, strict=True)]
        tops.append(int(logp[0].argmax()) == int(logp[1].argmax()))
        kl += float((logp[0].exp() * (logp[0] - logp[1])).sum())
    n = len(ids) - 1
    return [math.exp(x / n) for x in nll], sum(tops) / n, kl / n


def test_eval_equals_an_independent_computation(model, text, capsys):
    code, out, err = run(
        capsys, "eval", model, "--text", text, "--max-tokens", 75, "--context", 24, "--stride", 10,
        "--backend", "reference", "--json",
    )  # fmt: skip
    assert code == 0, err
    got = json.loads(out)
    ids = torch.tensor(evaluate.load_tokenizer(model)(TEXT)["input_ids"][:75])
    pair = [it.load(model, quantize=False), it.load(model, "reference")]
    (plain, int8), agreement, kl = independent(pair, ids, 24, 10)
    assert got["baseline"]["perplexity"] == pytest.approx(plain, rel=1e-4)
    assert got["int8"]["perplexity"] == pytest.approx(int8, rel=1e-4)
    assert got["perplexity_difference_percent"] == pytest.approx(100 * (int8 / plain - 1), abs=0.02)
    assert got["agreement"] == pytest.approx(agreement, abs=1.01 / 74)
    assert got["kl"] == pytest.approx(kl, rel=1e-3)
    assert got["baseline"]["tokens"] == got["int8"]["tokens"] == 74
    assert got["baseline"]["scored_bytes"] == len(TEXT.encode()[1:75])
    assert got["int8_experts_bytes"] < 0.4 * got["baseline_experts_bytes"]  # float32 against int8


def test_eval_one_by_one_and_from_an_int8_folder(model, int8_folder, text, capsys):
    common = ["--text", text, "--max-tokens", 60, "--context", 16, "--backend", "reference", "--json"]
    together = json.loads(run(capsys, "eval", model, *common)[1])
    apart = json.loads(run(capsys, "eval", model, *common, "--one-by-one")[1])
    folder = json.loads(run(capsys, "eval", int8_folder, "--baseline", model, *common)[1])
    assert together["kl"] is not None and apart["kl"] is None
    for other in (apart, folder):
        assert other["agreement"] == together["agreement"]
        for side in ("baseline", "int8"):
            assert other[side]["nll"] == together[side]["nll"]


def test_eval_table(model, text, capsys):
    code, out, err = run(capsys, "eval", model, "--text", text, "--max-tokens", 40, "--backend", "reference")
    assert code == 0 and err == ""
    for word in ("perplexity", "float32", "INT8", "same next token", "KL", "tokens/s", "memory", "REFERENCE", "%"):
        assert word in out


def test_eval_refusals(model, int8_folder, text, tmp_path, capsys):
    code, _, err = run(capsys, "eval", int8_folder, "--text", text)
    assert code == 2 and "--baseline" in err
    code, _, err = run(capsys, "eval", model, "--baseline", int8_folder, "--text", text)
    assert code == 1 and "is INT8" in err
    code, _, err = run(capsys, "eval", model, "--text", tmp_path / "absent")
    assert code == 2
    for content, says in (
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"a", "at least 2"),
        (b"ab\xff", "not UTF-8: byte 0xff at offset 2"),
    ):
        (tmp_path / "t").write_bytes(content)
        code, _, err = run(capsys, "eval", model, "--text", tmp_path / "t", "--backend", "reference")
        assert (code, says in err, err.count("\n")) == (1, True, 1), err
    code, _, err = run(capsys, "eval", model, "--text", text, "--context", 4096, "--backend", "reference")
    assert code == 1 and "at most 128" in err
    code, _, err = run(capsys, "eval", model, "--text", text, "--context", 16, "--stride", 16, "--backend", "reference")
    assert code == 1 and "stride is 16, needs 1 to 15" in err


def test_eval_reports_nan(model, text, tmp_path, capsys):
    broken = it.load(model, quantize=False)
    with torch.no_grad():
        broken.model.norm.weight[3] = float("nan")
    broken.save_pretrained(tmp_path)
    make_tokenizer(tmp_path)
    code, _, err = run(capsys, "eval", tmp_path, "--text", text, "--max-tokens", 30, "--backend", "reference")
    assert code == 1 and "NaN or infinity at 29 of 29 tokens" in err


def test_eval_two_schemes_in_one_run_equal_a_run_each(model, text, capsys):
    common = ["--text", text, "--max-tokens", 60, "--context", 16, "--json"]
    code, out, err = run(capsys, "eval", model, *common, "--scheme", "w8a8,w8a16")
    assert code == 0, err
    both = json.loads(out)
    assert list(both["schemes"]) == ["w8a8", "w8a16"] and both["scheme"] == "w8a8"
    assert both["schemes"]["w8a16"]["backend"] == "REFERENCE (ReferenceExperts)"  # no CPU kernel runs it
    for scheme in ("w8a8", "w8a16"):
        for order in ([], ["--one-by-one"]):
            alone = json.loads(run(capsys, "eval", model, *common, "--scheme", scheme, *order)[1])
            assert alone["scheme"] == scheme
            assert alone["int8"]["nll"] == both["schemes"][scheme]["int8"]["nll"]
            assert alone["agreement"] == both["schemes"][scheme]["agreement"]
            assert alone["baseline"]["nll"] == both["baseline"]["nll"]
    assert both["int8"] == both["schemes"]["w8a8"]["int8"]
    assert 0 < both["schemes"]["w8a16"]["kl"] < both["kl"]


def test_eval_layers(model, text, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "layers.svg"
    common = ["--text", text, "--max-tokens", 40, "--context", 39, "--stride", 38]
    code, out, err = run(capsys, "eval", model, *common, "--plot", plot, "--json")
    assert code == 0, err
    assert "<svg" in plot.read_text()
    got = json.loads(out)
    assert list(got["schemes"]) == ["w8a8"]  # w8a16 only splits the error of layers
    layers = got["layers"]
    assert {row["name"] for row in layers} == {f"model.layers.{i}.mlp.experts" for i in (0, 1)}
    assert [r["error"]["w8a8"] for r in layers] == sorted((r["error"]["w8a8"] for r in layers), reverse=True)
    for row in layers:
        assert 0 < row["from_weights"] == row["error"]["w8a16"] < row["error"]["w8a8"]
        assert row["from_weights"] ** 2 + row["from_activations"] ** 2 == pytest.approx(row["error"]["w8a8"] ** 2)
        assert sum(e["tokens"] for e in row["experts"]) == 2 * got["baseline"]["model_tokens"]
        assert sorted([*row["unseen"], *(e["expert"] for e in row["experts"])]) == list(range(8))
    code, out, err = run(capsys, "eval", model, *common, "--layers", "--worst", 1)
    assert code == 0, err
    assert "worst 1 of 2 layers" in out and "worst 1 of " in out and "activations" in out


NAME = "model.layers.0.mlp.experts"


def test_eval_layers_in_a_pipe_is_as_wide_as_it_needs(model, text, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    code, out, err = run(capsys, "eval", model, "--text", text, "--max-tokens", 20, "--layers")
    assert code == 0, err
    heads = [line for line in out.splitlines() if "activations" in line and "layer" in line]
    assert len(heads) == 2 and all("w8a16 = weights" in h for h in heads) and "tokens" in heads[1]
    assert NAME in out and "left out" not in out


@pytest.mark.parametrize(
    ("width", "layers", "experts"),
    [
        (
            100,
            ["w8a8", "w8a16 = weights", "activations"],
            ["expert", "tokens", "w8a8", "w8a16 = weights", "activations"],
        ),
        (80, ["w8a8", "w8a16 = weights", "activations"], ["expert", "tokens", "w8a8", "w8a16 = weights"]),
        (60, ["w8a8", "w8a16 = weights"], ["expert", "tokens", "w8a8"]),
        (50, ["w8a8"], ["expert", "w8a8"]),
    ],
)
def test_eval_layers_drops_columns_before_it_folds_a_name(width, layers, experts):
    """On a terminal: the table of layers and that of experts, both with whole names and figures."""
    from rich.console import Console

    from int8moe.cli.eval import _print_table

    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=width, color_system=None)
    everything = ["w8a8", "w8a16 = weights", "activations"]
    expendable = ["activations", "w8a16 = weights", "tokens"]
    figures = ["1.443 %", "1.149 %", "0.873 %"]
    for first, cells, want in ((["layer"], [NAME], layers), (["layer", "expert", "tokens"], [NAME, "5", "7"], experts)):
        stream.seek(0)
        stream.truncate()
        heads = first + everything
        gone = _print_table(console, "errors", heads, [cells + figures], expendable)
        assert [h for h in heads if h not in gone] == ["layer", *want]
        lines = stream.getvalue().splitlines()
        assert max(map(len, lines)) <= width
        (row,) = [line for line in lines if "model" in line]
        assert NAME in row and figures[0] in row and all(h in stream.getvalue() for h in want)


def test_eval_of_two_architectures_names_the_models(model, text, tmp_path, capsys):
    """At once, from their configurations; from Python, by their classes."""
    make_model("mixtral", tmp_path / "bf16", dtype=torch.float32)
    it.load(tmp_path / "bf16", "reference").save_pretrained(tmp_path / "int8")
    code, _, err = run(capsys, "eval", tmp_path / "int8", "--baseline", model, "--text", text)
    assert code == 1 and err.count("\n") == 1
    assert f"{model} has model_type 'qwen3_moe' and {tmp_path / 'int8'} 'mixtral'" in err
    make_model("qwen3_moe", tmp_path / "wide", dtype=torch.float32, hidden_size=64)
    it.load(tmp_path / "wide", "reference").save_pretrained(tmp_path / "wide8")
    code, _, err = run(capsys, "eval", tmp_path / "wide8", "--baseline", model, "--text", text)
    assert code == 1 and f"{model} has hidden_size 32 and {tmp_path / 'wide8'} 64" in err
    tokens = evaluate.Text(torch.arange(9), 9)
    original = lambda: it.load(model, quantize=False)
    wide = lambda: it.load(tmp_path / "wide", "reference")
    with pytest.raises(
        ConfigError, match=r"original is Qwen3MoeForCausalLM \(qwen3_moe\).*\(8, 32, 24\).*\(8, 64, 24\)"
    ):
        evaluate.compare(original, {"w8a8": wide}, tokens, layers=LayerErrors())
    make_model("mixtral", tmp_path / "other", dtype=torch.float32, vocab_size=300)
    other = lambda: it.load(tmp_path / "other", "reference")
    for together in (True, False):
        with pytest.raises(
            evaluate.EvaluationError,
            match=r"Qwen3MoeForCausalLM \(qwen3_moe\), has 320 logits.*MixtralForCausalLM \(mixtral\), has 300",
        ):
            evaluate.compare(original, {"w8a8": other}, tokens, together=together)


def test_eval_layers_refusals(model, text, tmp_path, capsys, monkeypatch):
    for arguments, says in (
        (["--layers", "--one-by-one"], "not possible with --one-by-one"),
        (["--plot", tmp_path / "a.svg", "--one-by-one"], "not possible with --one-by-one"),
        (["--scheme", "w8a8,w4a16"], "'w4a16' is not one of 'w8a8', 'w8a16'"),
        (["--scheme", ""], "'' is not one of"),
        (["--plot", "a.jpg"], "ends in .png or .svg"),
        (["--plot", tmp_path / "absent" / "a.svg"], "folder does not exist"),
    ):
        code, _, err = run(capsys, "eval", model, "--text", text, *arguments)
        assert code != 0 and says in err, err
    code, _, err = run(capsys, "eval", model, "--text", text, "--backend", "cpu", "--scheme", "w8a16")
    assert code == 1 and "does not support" in err  # asked for by name: runs or raises
    monkeypatch.setattr(evaluate, "fits_together", lambda *_: False)
    code, _, err = run(capsys, "eval", model, "--text", text, "--layers")
    assert code == 1 and "they do not fit" in err


def test_eval_an_int8_folder_in_its_own_scheme(model, text, tmp_path, capsys):
    it.load(model, "reference", scheme="w8a16", device="cpu").save_pretrained(tmp_path)
    common = ["--baseline", model, "--text", text, "--max-tokens", 30, "--json"]
    code, out, err = run(capsys, "eval", tmp_path, *common)
    assert code == 0, err
    assert json.loads(out)["scheme"] == "w8a16"
    code, _, err = run(capsys, "eval", tmp_path, *common, "--scheme", "w8a8")
    assert code == 1 and "made for w8a16" in err


@pytest.mark.parametrize(
    ("tokens", "context", "stride"), [(2, 2, 1), (3, 2, 1), (50, 7, 3), (50, 50, 25), (51, 50, 49), (9, 20, 4)]
)
def test_every_token_is_scored_once(tokens, context, stride):
    scored = []
    for w in evaluate.windows(tokens, context, stride):
        assert w.length <= context and 1 <= w.scored < w.length
        scored += range(w.start + w.length - w.scored, w.start + w.length)
    assert scored == list(range(1, tokens))
