"""`int8moe explain` and `int8moe quantize` as a user types them: output, exit codes, one clear line for wrong input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from int8moe.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "sotu-moe"
SHAPE = ("--experts", "128", "--topk", "8", "--hidden", "2048", "--intermediate", "768", "--layers", "48")


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def test_explain_names_the_choice_and_every_refusal(capsys) -> None:
    code, out, err = run("explain", str(MODEL), "--device", "zen3", capsys=capsys)
    assert code == 0 and not err
    assert "CPU with CPUExpertsInt8" in out
    for name in ("TritonExperts", "BatchedTritonExperts", "HummingIndexedExperts", "HummingGroupedExperts"):
        assert f"{name}: refused" in out
    assert "platform is cpu, needs cuda or rocm" in out
    assert "bfloat16 11.2 MiB" in out and "INT8 5.8 MiB" in out


def test_explain_json_and_parallelism(capsys) -> None:
    code, out, _ = run("explain", *SHAPE, "--device", "a100", "--tp", "2", "--ep", "4", "--json", capsys=capsys)
    report = json.loads(out)
    assert code == 0
    assert report["selection"]["chosen"] == {"backend": "TRITON", "experts_class": "TritonExperts"}
    assert report["rank"]["num_local_experts"] == 32 and report["rank"]["intermediate_size_per_partition"] == 384
    weights = 48 * 32 * 3 * 2048 * 384
    assert report["memory"]["experts_16bit_bytes"] == 2 * weights
    assert report["memory"]["experts_int8_bytes"] == weights + 48 * 32 * (768 + 2048) * 4
    assert report["memory"]["fits"] is True


def test_explain_says_no_when_it_does_not_fit_or_run(capsys) -> None:
    big = ("--experts", "256", "--topk", "8", "--hidden", "7168", "--intermediate", "2048", "--layers", "58")
    code, out, _ = run("explain", *big, "--device", "rtx-3090", capsys=capsys)
    assert code == 1 and "does not fit" in out
    code, out, _ = run("explain", *SHAPE, "--device", "v100", capsys=capsys)
    assert code == 1 and "none" in out and "compute capability is 7.0, needs at least 7.5" in out
    code, out, _ = run("explain", *SHAPE, "--device", "h200", "--backend", "cpu", capsys=capsys)
    assert code == 1 and "would work: triton" in out


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (
            ("explain", str(MODEL), "--backend", "marlin"),
            2,
            "'marlin' is not one of 'auto', 'triton', 'humming', 'cpu'",
        ),
        (("explain", str(MODEL), "--device", "nonsense"), 2, "device is 'nonsense', needs one of: current, cpu, t4"),
        (("explain", str(MODEL), "--tp", "3"), 2, "tp is 3, needs a divisor of the intermediate size 128"),
        (("explain", str(MODEL), "--ep", "99"), 2, "ep is 99, needs 1 to 16"),
        (("explain", str(MODEL), "--topk", "2"), 2, "--topk cannot go with MODEL"),
        (("explain",), 2, "needs MODEL, or these flags too: --experts, --topk, --hidden, --intermediate"),
        (("explain", "--experts", "8"), 2, "needs MODEL, or these flags too: --topk, --hidden, --intermediate"),
        (
            ("explain", "--experts", "4", "--topk", "8", "--hidden", "8", "--intermediate", "8"),
            2,
            "experts_per_token is 8",
        ),
        (("explain", "no/such/place"), 1, "no/such/place does not exist"),
        (("quantize", "no/such/place", "out"), 1, "no/such/place is not a folder"),
        (("quantize", "only-one"), 2, "Missing argument 'DESTINATION'"),
        (
            ("quantize", "a", "b", "--targets", "all"),
            2,
            "'all' is not one of 'experts', 'experts+shared', 'all-linear'",
        ),
        (("quantize", "a", "b", "--threads", "0"), 2, "0 is not in the range x>=1"),
        (("nonsense",), 2, "No such command 'nonsense'"),
    ],
)
def test_wrong_input_is_one_clear_line(arguments, code, says, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    got, out, err = run(*arguments, capsys=capsys)
    assert got == code and says in err.replace("\n", " "), (got, err)
    assert not out and "Traceback" not in err


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "is not JSON"),
        ("[1]", "holds a list"),
        ('{"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 2}', "describes a dense model"),
        ('{"num_experts": 4, "num_hidden_layers": 1}', "num_experts_per_tok = None"),
        ('{"num_experts": -4, "num_hidden_layers": 1}', "num_experts = -4"),
        (
            '{"num_experts": 4, "num_experts_per_tok": 9, "hidden_size": 8, "moe_intermediate_size": 8,'
            ' "num_hidden_layers": 1}',
            "experts_per_token is 9",
        ),
        (
            '{"num_experts": 4, "num_experts_per_tok": 2, "hidden_size": 8, "moe_intermediate_size": 8,'
            ' "num_hidden_layers": 1, "hidden_act": "mish"}',
            "activation is 'mish'",
        ),
    ],
)
def test_configs_that_describe_nothing_usable(content: str, says: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "config.json").write_text(content)
    code, _, err = run("explain", str(tmp_path), capsys=capsys)
    assert code == 1 and says in err and len(err.strip().splitlines()) == 1


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "int8moe", "--debug", "explain", str(tmp_path)]
    child = subprocess.run(command, capture_output=True, text=True)
    assert child.returncode == 1 and "Traceback" in child.stderr


def test_a_wrong_logging_level_is_usage(monkeypatch, capsys) -> None:
    monkeypatch.setenv("INT8MOE_LOGGING_LEVEL", "LOUD")
    code, _, err = run("explain", str(MODEL), capsys=capsys)
    assert code == 2 and "INT8MOE_LOGGING_LEVEL is 'LOUD'" in err


def test_quantize_the_shipped_model(tmp_path: Path, capsys) -> None:
    out_dir = tmp_path / "out"
    code, out, _ = run("quantize", str(MODEL), str(out_dir), "--dry-run", "--json", capsys=capsys)
    sizes = json.loads(out)
    assert code == 0 and not out_dir.exists()
    code, out, err = run("quantize", str(MODEL), str(out_dir), "--json", capsys=capsys)
    report = json.loads(out)
    assert code == 0 and report["verified"] and report["bytes_after"] == sizes["after"]
    assert report["experts_before"] == 2 * 5898240
    assert report["experts_after"] == 5898240 + 5 * 16 * (256 + 192) * 4
    code, out, err = run("quantize", str(MODEL), str(out_dir), capsys=capsys)
    assert code == 1 and "is not empty" in err
    code, out, _ = run("quantize", str(MODEL), str(out_dir), "--overwrite", capsys=capsys)
    assert code == 0 and "240 matrices" in out and "verified every code" in out


def test_quantize_all_linears_of_the_shipped_model(tmp_path: Path, capsys) -> None:
    sizes = {}
    for targets in ("experts", "all-linear"):
        arguments = ("quantize", str(MODEL), str(tmp_path / targets), "--targets", targets)
        code, out, _ = run(*arguments, "--dry-run", "--json", capsys=capsys)
        sizes[targets] = json.loads(out)["after"]
        code, out, _ = run(*arguments, "--threads", "2", capsys=capsys)
        assert code == 0 and ("of other layers" in out) == (targets == "all-linear")
        written = sum(f.stat().st_size for f in (tmp_path / targets).glob("*.safetensors"))
        assert sizes[targets] < written < sizes[targets] * 1.02
    assert sizes["all-linear"] < sizes["experts"]


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from int8moe.cli.main import main\n"
        f"main(['quantize', {str(MODEL)!r}, {str(tmp_path / 'out')!r}])\n"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert child.returncode == 1
    assert child.stderr.strip() == "error: this needs torch: pip install 'int8moe[transformers]'"


def test_help_lists_the_commands() -> None:
    from int8moe.cli.main import cli

    text = CliRunner().invoke(cli, ["--help"]).output
    for name in ("explain", "quantize", "generate", "eval"):
        assert name in text
