"""Checkpoints of real Transformers classes, converted: layout, resuming, damage, memory."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from int8moe.errors import CheckpointError, NonFiniteWeight
from int8moe.quantize import checkpoint
from int8moe.quantize.checkpoint import INDEX, STATE, make_plan, quantize_checkpoint
from int8moe.quantize.int8 import quantize_weight

COMMON = dict(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64,
)  # fmt: skip
FAMILIES = {
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(**COMMON, intermediate_size=48, num_local_experts=4, num_experts_per_tok=2)
    ),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**COMMON, moe_intermediate_size=48, num_experts=4, num_experts_per_tok=2, head_dim=8)
    ),
    "olmoe": lambda: OlmoeForCausalLM(
        OlmoeConfig(**COMMON, intermediate_size=48, num_experts=4, num_experts_per_tok=2)
    ),
}


def saved(folder: Path, family: str = "qwen3_moe", shard: str = "20KB") -> Path:
    torch.manual_seed(0)
    FAMILIES[family]().to(torch.bfloat16).save_pretrained(folder, max_shard_size=shard)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return saved(tmp_path / "source")


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        out |= load_file(file)
    return out


def edit(folder: Path, change) -> None:
    """Rewrite a checkpoint as one file, with `change` applied to its tensors."""
    everything = tensors(folder)
    for file in folder.glob("model*"):
        file.unlink()
    change(everything)
    save_file(
        {k: v.contiguous() for k, v in everything.items()}, folder / "model.safetensors", metadata={"format": "pt"}
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shard", ["20KB", "1GB"])
def test_each_family_becomes_int_quantized(family: str, shard: str, tmp_path: Path) -> None:
    src = saved(tmp_path / "source", family, shard)
    report = quantize_checkpoint(src, tmp_path / "out")
    before, after = tensors(src), tensors(tmp_path / "out")
    experts = [n for n in before if ".experts." in n]
    assert len(experts) == 2 * 4 * 3 == report.expert_matrices
    for name, weight in before.items():
        if name in experts:
            codes, scale = quantize_weight(weight)
            assert torch.equal(after[name], codes)
            assert torch.equal(after[f"{name}_scale"], scale[:, None])
        else:
            assert after[name].dtype is weight.dtype and torch.equal(after[name], weight)
    assert len(after) == len(before) + len(experts)
    assert report.verified and report.worst_error is not None and report.worst_error <= 0.5001
    left = {f.name for f in (tmp_path / "out").iterdir()}
    assert STATE not in left and not [n for n in left if n.endswith(".tmp")]
    assert (INDEX in left) == (shard == "20KB")
    if INDEX in left:
        index = json.loads((tmp_path / "out" / INDEX).read_text())
        assert set(index["weight_map"]) == set(after)
        assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in after.values())
        assert report.bytes_after == index["metadata"]["total_size"]


@pytest.mark.parametrize("family", FAMILIES)
def test_config_means_exactly_our_experts_to_compressed_tensors(family: str, tmp_path: Path) -> None:
    from compressed_tensors.quantization import QuantizationConfig, QuantizationType
    from compressed_tensors.utils import is_match

    src = saved(tmp_path / "source", family)
    quantize_checkpoint(src, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(written)
    group = config.config_groups["group_0"]
    assert group.weights.num_bits == 8 and group.weights.type == QuantizationType.INT and group.weights.symmetric
    assert group.weights.strategy == "channel" and group.input_activations.strategy == "token"
    assert group.input_activations.dynamic and config.format == "int-quantized"
    linear = torch.nn.Linear(2, 2)
    for name in tensors(tmp_path / "out"):
        if name.endswith(".weight") and "norm" not in name and "embed" not in name:
            module = name.removesuffix(".weight")
            ignored = any(is_match(module, linear, i) for i in config.ignore)
            assert ignored == (".experts." not in name), name


def test_fused_tensors_are_split(source: Path, tmp_path: Path) -> None:
    plain = tensors(source)

    def fuse(t: dict[str, torch.Tensor]) -> None:
        for layer in range(2):
            p = f"model.layers.{layer}.mlp.experts"
            pop = lambda e, n: t.pop(f"{p}.{e}.{n}_proj.weight")  # noqa: B023
            t[f"{p}.gate_up_proj"] = torch.stack([torch.cat([pop(e, "gate"), pop(e, "up")]) for e in range(4)])
            t[f"{p}.down_proj"] = torch.stack([pop(e, "down") for e in range(4)])

    edit(source, fuse)
    quantize_checkpoint(source, tmp_path / "out")
    after = tensors(tmp_path / "out")
    for name, weight in plain.items():
        if ".experts." in name:
            assert torch.equal(after[name], quantize_weight(weight)[0])


def test_bfloat16_scales(source: Path, tmp_path: Path) -> None:
    quantize_checkpoint(source, tmp_path / "out", scale_dtype="bfloat16")
    scales = [t for n, t in tensors(tmp_path / "out").items() if n.endswith("_scale")]
    assert scales and all(s.dtype is torch.bfloat16 for s in scales)


@pytest.mark.parametrize("family", FAMILIES)
def test_read_from_disk_equals_quantised_while_loading(family: str, tmp_path: Path) -> None:
    import int8moe

    src = saved(tmp_path / "source", family)
    quantize_checkpoint(src, tmp_path / "out")
    ids = torch.arange(24).reshape(2, 12) % 64
    with torch.no_grad():
        online, from_disk = (int8moe.load(p)(ids).logits for p in (src, tmp_path / "out"))
    assert torch.equal(online, from_disk)


# --- stopping and going on -----------------------------------------------------------------------------------------


def test_goes_on_where_it_stopped(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = len(make_plan(source).shards)
    assert shards > 3
    real, calls = checkpoint._convert_shard, []

    def stop_at_third(plan, shard, target, report):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(shard)
        return real(plan, shard, target, report)

    out = tmp_path / "out"
    monkeypatch.setattr(checkpoint, "_convert_shard", stop_at_third)
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(source, out)
    assert not (out / "config.json").exists()
    monkeypatch.setattr(checkpoint, "_convert_shard", real)
    report = quantize_checkpoint(source, out)
    assert report.resumed_shards == calls and report.shards == shards
    quantize_checkpoint(source, tmp_path / "direct")
    a, b = tensors(out), tensors(tmp_path / "direct")
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_a_changed_source_or_option_does_not_go_on(source: Path, tmp_path: Path, monkeypatch) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr(checkpoint, "_verify", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(source, out)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="unfinished conversion of another source, or with other options"):
        quantize_checkpoint(source, out, scale_dtype="bfloat16")
    quantize_checkpoint(source, out, scale_dtype="bfloat16", overwrite=True)


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda q, s: (torch.zeros_like(q), s), "off by 127 steps"),
        (lambda q, s: (torch.zeros_like(q), torch.full_like(s, 1e6)), "is not max|w| / 127"),
        (lambda q, s: (q, s * 1.001), "is not max|w| / 127"),
        (lambda q, s: (q, torch.full_like(s, float("nan"))), "is not max|w| / 127"),
        (lambda q, s: (q + 2, s), "off by 2"),
        (lambda q, s: (q, s.squeeze(-1)), "wrong dtype or shape"),
    ],
)
def test_a_wrong_result_is_refused_and_made_again(spoil, message, source: Path, tmp_path: Path, monkeypatch) -> None:
    out, real = tmp_path / "out", checkpoint.save_file

    def spoilt(data, path, metadata=None):
        for name in [n for n in data if n.endswith(".weight_scale")]:
            weight = name.removesuffix("_scale")
            q, scale = spoil(data[weight], data[name])
            data[weight], data[name] = q.contiguous(), scale.contiguous()
        real(data, path, metadata=metadata)

    monkeypatch.setattr(checkpoint, "save_file", spoilt)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        quantize_checkpoint(source, out)
    assert not (out / "config.json").exists()
    monkeypatch.undo()
    assert quantize_checkpoint(source, out).verified


@pytest.mark.parametrize("moment", [0.02, 0.2, 0.5])
def test_killed_at_any_moment_nothing_half_written_has_a_final_name(
    moment: float, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    code = (
        "import sys, time\n"
        "from int8moe.quantize.checkpoint import quantize_checkpoint\n"
        "print('go', flush=True)\n"
        "quantize_checkpoint(sys.argv[1], sys.argv[2], progress=lambda *a: time.sleep(0.005))\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(source), str(out)], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"go\n"
    time.sleep(moment)
    child.send_signal(signal.SIGKILL)
    child.wait()
    for file in out.glob("[!.]*.safetensors") if out.exists() else []:
        with safe_open(file, framework="pt") as whole:
            assert list(whole.keys())
    if not (out / "config.json").exists():
        quantize_checkpoint(source, out)
    assert not list(out.glob(".*.tmp"))
    assert len(tensors(out)) == len(tensors(source)) + 24


def test_full_disk_half_way(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, real, calls = tmp_path / "out", checkpoint.save_file, []

    def full(data, path, metadata=None):
        if len(calls) == 2:
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        calls.append(path)
        return real(data, path, metadata=metadata)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(CheckpointError, match="could not be written: No space left on device"):
        quantize_checkpoint(source, out)
    names = [f.name for f in out.iterdir()]
    assert len([n for n in names if n.endswith(".safetensors")]) == 2
    assert "config.json" not in names and not [n for n in names if n.endswith(".tmp")]
    monkeypatch.setattr(checkpoint, "save_file", real)
    assert len(quantize_checkpoint(source, out).resumed_shards) == 2


def test_too_small_a_disk_is_seen_before_anything_is_written(source: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda p: os.terminal_size((0, 0)) and _Usage())
    with pytest.raises(CheckpointError, match="has 1,000 bytes free, and the conversion writes"):
        quantize_checkpoint(source, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


class _Usage:
    free = 1000


# --- wrong input ---------------------------------------------------------------------------------------------------


def refused(source: Path, tmp_path: Path, says: str, error: type[Exception] = CheckpointError) -> None:
    with pytest.raises(error, match=says):
        quantize_checkpoint(source, tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()


def test_missing_source(tmp_path: Path) -> None:
    refused(tmp_path / "absent", tmp_path, "is not a folder")


def test_no_weights(source: Path, tmp_path: Path) -> None:
    for file in source.glob("model*"):
        file.unlink()
    refused(source, tmp_path, "holds neither")


def test_truncated_shard(source: Path, tmp_path: Path) -> None:
    shard = next(source.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    refused(source, tmp_path, f"{shard.name} is not a whole safetensors file")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x10",
        b"\xff" * 8 + b"{}",
        (100).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (80).to_bytes(8, "little")
        + json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 99]}}).ljust(80).encode()
        + b"\0" * 16,
    ],
)
def test_lying_header(content: bytes, source: Path, tmp_path: Path) -> None:
    shard = next(source.glob("*.safetensors"))
    shard.write_bytes(content)
    refused(source, tmp_path, "is not a whole safetensors file")


def test_missing_shard(source: Path, tmp_path: Path) -> None:
    next(source.glob("*.safetensors")).unlink()
    refused(source, tmp_path, "does not exist")


def test_index_names_a_tensor_that_is_not_there(source: Path, tmp_path: Path) -> None:
    index = json.loads((source / INDEX).read_text())
    index["weight_map"]["ghost.weight"] = next(iter(index["weight_map"].values()))
    (source / INDEX).write_text(json.dumps(index))
    refused(source, tmp_path, r"lacks ghost\.weight")


def test_index_that_points_outside(source: Path, tmp_path: Path) -> None:
    index = json.loads((source / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = "../elsewhere.safetensors"
    (source / INDEX).write_text(json.dumps(index))
    refused(source, tmp_path, "outside the folder")


def test_dense_model(source: Path, tmp_path: Path) -> None:
    (source / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2}))
    refused(source, tmp_path, "describes a dense model.*'llama'")


@pytest.mark.parametrize("text", ["{", "[]", "null"])
def test_config_that_is_not_an_object(text: str, source: Path, tmp_path: Path) -> None:
    (source / "config.json").write_text(text)
    refused(source, tmp_path, r"config\.json")


def test_missing_expert_matrix(source: Path, tmp_path: Path) -> None:
    edit(source, lambda t: t.pop("model.layers.1.mlp.experts.3.up_proj.weight"))
    refused(source, tmp_path, r"lacks the weights of model\.layers\.1\.mlp\.experts\.3 \(up\)")


def test_expert_that_the_config_does_not_know(source: Path, tmp_path: Path) -> None:
    edit(source, lambda t: t.update({"model.layers.1.mlp.experts.9.up_proj.weight": torch.zeros(48, 32)}))
    refused(source, tmp_path, "holds expert 9, and config.json has num_experts 4")


def test_layer_without_experts(source: Path, tmp_path: Path) -> None:
    edit(source, lambda t: [t.pop(k) for k in list(t) if "layers.1.mlp.experts" in k])
    refused(source, tmp_path, "has experts in 1 layers, and config.json describes 2")


def test_wrong_shape(source: Path, tmp_path: Path) -> None:
    edit(source, lambda t: t.update({"model.layers.0.mlp.experts.0.up_proj.weight": torch.zeros(47, 32)}))
    refused(source, tmp_path, r"has shape \(47, 32\), needs \(48, 32\)")


def test_nan_weight(source: Path, tmp_path: Path) -> None:
    def poison(t: dict[str, torch.Tensor]) -> None:
        t["model.layers.1.mlp.experts.2.down_proj.weight"][7, 3] = float("nan")

    edit(source, poison)
    refused(source, tmp_path, r"layers\.1\.mlp\.experts\.2\.down_proj\.weight holds NaN.*row 7", NonFiniteWeight)


def test_quantised_already(source: Path, tmp_path: Path) -> None:
    quantize_checkpoint(source, tmp_path / "once")
    refused(tmp_path / "once", tmp_path, "quantised already \\(compressed-tensors\\)")


def test_destinations_that_are_refused(source: Path, tmp_path: Path) -> None:
    for bad in (source, source / "inside", tmp_path):
        with pytest.raises(CheckpointError, match="needs two apart"):
            quantize_checkpoint(source, bad)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="is not empty"):
        quantize_checkpoint(source, tmp_path / "full")
    quantize_checkpoint(source, tmp_path / "full", overwrite=True)
    assert (tmp_path / "full" / "thesis.txt").read_text() == "mine"
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="is a file"):
        quantize_checkpoint(source, tmp_path / "file")


def test_a_damaged_result_is_seen(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = checkpoint.quantize_weight

    def off_by_one(*args):
        codes, scale = real(*args)
        codes[0, 0] += 1 if codes[0, 0] < 0 else -1
        return codes, scale

    monkeypatch.setattr(checkpoint, "quantize_weight", off_by_one)
    refused(source, tmp_path, "is off by")


def test_peak_memory_is_about_one_shard(tmp_path: Path) -> None:
    """Four shards of about 48 MB: the peak of anonymous memory stays near one, not near the whole."""
    source = tmp_path / "big"
    source.mkdir()
    experts, inter, hidden, layers = 8, 1024, 1024, 4
    (source / "config.json").write_text(
        json.dumps(
            {
                "model_type": "qwen3_moe", "num_experts": experts, "num_experts_per_tok": 2, "hidden_size": hidden,
                "moe_intermediate_size": inter, "num_hidden_layers": layers,
            }
        )
    )  # fmt: skip
    weight_map = {}
    for layer in range(layers):
        shapes = {"gate": (inter, hidden), "up": (inter, hidden), "down": (hidden, inter)}
        part = {
            f"model.layers.{layer}.mlp.experts.{e}.{n}_proj.weight": torch.randn(s).bfloat16()
            for e in range(experts)
            for n, s in shapes.items()
        }
        save_file(part, source / f"model-{layer}.safetensors")
        weight_map |= dict.fromkeys(part, f"model-{layer}.safetensors")
    (source / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    shard = 3 * experts * inter * hidden * 2
    code = (
        "import sys, threading, time\n"
        "from int8moe.quantize.checkpoint import quantize_checkpoint\n"
        "def anonymous():\n"
        "    for line in open('/proc/self/status'):\n"
        "        if line.startswith('RssAnon'): return int(line.split()[1]) * 1024\n"
        "start, peak, stop = anonymous(), [0], []\n"
        "def watch():\n"
        "    while not stop: peak[0] = max(peak[0], anonymous()); time.sleep(0.001)\n"
        "thread = threading.Thread(target=watch); thread.start()\n"
        "quantize_checkpoint(sys.argv[1], sys.argv[2])\n"
        "stop.append(1); thread.join()\n"
        "print(peak[0] - start)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(source), str(tmp_path / "out")], check=True, capture_output=True, text=True
    )
    # The int8 shard and its serialised copy are together one source shard; then a matrix in float32, and the heap's.
    assert int(run.stdout) < 1.5 * shard
