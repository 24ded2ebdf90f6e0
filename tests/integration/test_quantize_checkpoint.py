"""Checkpoints of real Transformers classes, converted: layout, resuming, damage, memory."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
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

import families
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


# --- layouts of all families ------------------------------------------------------------------------------------------

OUTSIDE = [k for k, f in families.FAMILIES.items() if f.refusal]  # tests/integration/test_families.py has their words


def matrices(model) -> list[torch.Tensor]:
    """What a conversion has to make of a model's experts: codes [out, in] of every matrix, and biases."""
    out = []
    for module in model.modules():
        plain = type(module).__name__ in ("Llama4TextExperts", "Step3p7Experts")  # without the decorator
        if not plain and not isinstance(getattr(module, "is_transposed", None), bool):
            continue
        flag = lambda name, otherwise, module=module: getattr(module, name, otherwise)
        gated = flag("has_gate", True)
        up = module.gate_up_proj if gated else module.up_proj
        split = (lambda t: list(t.chunk(2))) if gated else (lambda t: [t])
        if gated and not flag("is_concatenated", True):
            split = lambda t: [t[0::2], t[1::2]]
        transposed = flag("is_transposed", type(module).__name__ == "Llama4TextExperts")
        turn = (lambda t: t.T) if transposed else (lambda t: t)
        for e in range(len(up)):
            out += [quantize_weight(w)[0] for w in (*split(turn(up[e])), turn(module.down_proj[e]))]
            if flag("has_bias", False):
                out += [*split(module.gate_up_proj_bias[e]), module.down_proj_bias[e]]
    return out


def of_experts(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for n, t in tensors(folder).items() if re.search(r"\.experts\.\d+\.", f".{n}")}


def multiset(values) -> Counter:
    return Counter((str(t.dtype), tuple(t.shape), t.contiguous().view(torch.uint8).numpy().tobytes()) for t in values)


@pytest.mark.parametrize("kind", sorted(set(families.FAMILIES) - set(OUTSIDE)))
def test_every_family(kind: str, tmp_path: Path) -> None:
    with torch.no_grad():
        want = matrices(families.make_model(kind, tmp_path / "source"))
    report = quantize_checkpoint(tmp_path / "source", tmp_path / "out")
    after = of_experts(tmp_path / "out")
    assert want and report.expert_matrices == sum(t.dtype is torch.int8 for t in want)
    assert multiset(want) == multiset(t for n, t in after.items() if not n.endswith("_scale"))
    codes = [n for n, t in after.items() if t.dtype is torch.int8]
    assert all(after[f"{n}_scale"].shape == (len(after[n]), 1) for n in codes)


def test_names_of_stacked_experts(tmp_path: Path) -> None:
    for kind, block, biases in (("gpt_oss", "mlp", True), ("granitemoe", "block_sparse_moe", False)):
        prefix = f"model.layers.0.{block}.experts"
        families.make_model(kind, tmp_path / kind)
        quantize_checkpoint(tmp_path / kind, tmp_path / f"{kind}-out")
        ends = ("weight", "weight_scale", "bias") if biases else ("weight", "weight_scale")
        want = {f"{prefix}.3.{leaf}_proj.{end}" for leaf in ("gate", "up", "down") for end in ends}
        assert {n for n in tensors(tmp_path / f"{kind}-out") if n.startswith(f"{prefix}.3.")} == want


@pytest.mark.parametrize("kind", ["gpt_oss", "aria_text", "granitemoe"])
def test_square_matrices_whose_shape_says_nothing(kind: str, tmp_path: Path) -> None:
    with torch.no_grad():
        want = matrices(families.make_model(kind, tmp_path / "source", hidden_size=48, intermediate_size=24))
    quantize_checkpoint(tmp_path / "source", tmp_path / "out")
    assert multiset(want) == multiset(t for n, t in of_experts(tmp_path / "out").items() if not n.endswith("_scale"))


def test_a_stacked_tensor_that_the_mapping_turns(tmp_path: Path) -> None:
    """Checkpoints of qwen3_vl_moe come as [E, H, 2*I]; Transformers saves them as [E, 2*I, H]."""
    families.make_model("qwen3_vl_moe", tmp_path / "source")
    quantize_checkpoint(tmp_path / "source", tmp_path / "plain")

    def turn(t: dict[str, torch.Tensor]) -> None:
        for name in [n for n in t if ".experts." in n]:
            t[name] = t[name].transpose(1, 2)

    edit(tmp_path / "source", turn)
    quantize_checkpoint(tmp_path / "source", tmp_path / "turned")
    a, b = tensors(tmp_path / "plain"), tensors(tmp_path / "turned")
    assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def test_stacked_experts_that_lack_one_tensor(tmp_path: Path) -> None:
    families.make_model("gpt_oss", tmp_path / "source")
    edit(tmp_path / "source", lambda t: t.pop("model.layers.1.mlp.experts.down_proj_bias"))
    refused(tmp_path / "source", tmp_path, r"lacks the weights of model\.layers\.1\.mlp\.experts\.down_proj_bias")


def test_a_stacked_tensor_of_another_shape(tmp_path: Path) -> None:
    families.make_model("granitemoe", tmp_path / "source")
    name = "model.layers.0.block_sparse_moe.input_linear.weight"
    edit(tmp_path / "source", lambda t: t.update({name: t[name][:, :-1]}))
    refused(tmp_path / "source", tmp_path, r"has shape \(4, 47, 32\), needs \(4, 48, 32\)")


def test_stacked_experts_of_an_unknown_model(tmp_path: Path) -> None:
    families.make_model("granitemoe", tmp_path / "source")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    (tmp_path / "source" / "config.json").write_text(json.dumps({**config, "model_type": "granite_of_tomorrow"}))
    refused(tmp_path / "source", tmp_path, "cannot build model_type 'granite_of_tomorrow'")


def test_layers_beyond_those_of_the_config(source: Path, tmp_path: Path) -> None:
    """DeepSeek-V3 ships a layer for multi-token prediction, with experts, that num_hidden_layers does not count."""

    def add(t: dict[str, torch.Tensor]) -> None:
        t |= {n.replace("layers.1.", "layers.2."): w.clone() for n, w in list(t.items()) if "layers.1." in n}

    edit(source, add)
    assert quantize_checkpoint(source, tmp_path / "out").expert_matrices == 3 * 4 * 3


def test_the_number_of_threads_changes_no_byte(source: Path, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    for threads in (1, 5):
        quantize_checkpoint(source, tmp_path / str(threads), threads=threads)
    assert torch.get_num_threads() == before
    for file in (tmp_path / "1").iterdir():
        assert file.read_bytes() == (tmp_path / "5" / file.name).read_bytes()
    with pytest.raises(CheckpointError, match="threads is 0, needs at least 1"):
        quantize_checkpoint(source, tmp_path / "0", threads=0)


# --- shared experts and dense layers ----------------------------------------------------------------------------------


def test_targets(tmp_path: Path) -> None:
    families.make_model("qwen2_moe", tmp_path / "source")
    before = tensors(tmp_path / "source")
    linears = {n for n, t in before.items() if t.dim() == 2 and ".experts." not in n and "embed" not in n}
    shared = {n for n in linears if ".shared_expert." in n}
    stay = {n for n in linears if n.endswith(("mlp.gate.weight", "shared_expert_gate.weight")) or "lm_head" in n}
    assert len(shared) == 6 and len(stay) == 5
    for targets, wanted in (("experts", set()), ("experts+shared", shared), ("all-linear", linears - stay)):
        report = quantize_checkpoint(tmp_path / "source", tmp_path / targets, targets=targets)
        after = tensors(tmp_path / targets)
        assert {n for n in linears if after[n].dtype is torch.int8} == wanted
        assert report.dense_matrices == len(wanted) and report.expert_matrices == 2 * 8 * 3
        for name in wanted:
            codes, scale = quantize_weight(before[name])
            assert torch.equal(after[name], codes) and torch.equal(after[f"{name}_scale"], scale[:, None])
        config = json.loads((tmp_path / targets / "config.json").read_text())["quantization_config"]
        assert set(config["ignore"]) == {n.removesuffix(".weight") for n in linears - wanted}
    with pytest.raises(CheckpointError, match="targets is 'everything', needs one of: experts, experts"):
        quantize_checkpoint(tmp_path / "source", tmp_path / "out", targets="everything")


@pytest.mark.parametrize("kind", ["qwen2_moe", "lara_mini", "qwen4_exp_text", "deepseek_v32"])
def test_all_linear_is_read_back(kind: str, tmp_path: Path) -> None:
    """Linears that the model fuses or splits while loading stay as they are: a scale would be lost there."""
    import int8moe

    families.make_model(kind, tmp_path / "source")
    quantize_checkpoint(tmp_path / "source", tmp_path / "out", targets="all-linear")
    plain = families.FAMILIES[kind].model_class.from_pretrained(tmp_path / "source", dtype=torch.bfloat16).state_dict()
    back = int8moe.load(tmp_path / "out", "reference").state_dict()
    changed = 0
    for name, want in plain.items():
        if ".experts." not in name and want.is_floating_point():
            error = (back[name].float() - want.float()).norm() / want.float().norm().clamp_min(1e-9)
            assert error < 0.02, name
            changed += bool(error > 0)
    assert changed > 4


# --- FP8 with a scale per block ---------------------------------------------------------------------------------------

BLOCK = [32, 20]  # divides neither 48 rows nor 32 columns


def to_fp8(folder: Path, block: list[int] = BLOCK, **fields) -> dict[str, torch.Tensor]:
    """Turn a checkpoint's matrices into FP8, with all scales in a shard of their own; returns what they stand for."""
    values, kept, scales = {}, {}, {}
    for name, w in tensors(folder).items():
        fits = w.dim() in (2, 3) and not re.search("embed|lm_head|gate.weight|router|norm|bias|sinks", name)
        if not fits:
            kept[name] = w
            continue
        shape = (*w.shape[:-2], -(-w.shape[-2] // block[0]), -(-w.shape[-1] // block[1]))
        scale = torch.rand(shape) + 0.5
        wide = scale.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)[..., : w.shape[-2], : w.shape[-1]]
        kept[name] = (w.float() / wide).to(torch.float8_e4m3fn)
        scales[f"{name}_scale_inv"] = scale
        values[name] = kept[name].float() * wide
    for file in folder.glob("model*"):
        file.unlink()
    save_file(kept, folder / "model-1.safetensors")
    save_file(scales, folder / "model-2.safetensors")
    where = dict.fromkeys(kept, "model-1.safetensors") | dict.fromkeys(scales, "model-2.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    config = json.loads((folder / "config.json").read_text())
    quant = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": block}
    config["quantization_config"] = quant | fields
    (folder / "config.json").write_text(json.dumps(config))
    return values


@pytest.mark.parametrize("targets", ["experts", "all-linear"])
def test_fp8_blocks(targets: str, source: Path, tmp_path: Path) -> None:
    values = to_fp8(source)
    report = quantize_checkpoint(source, tmp_path / "out", targets=targets)
    after = tensors(tmp_path / "out")
    assert report.verified and report.expert_matrices == 24 and report.dense_matrices == (targets != "experts") * 8
    assert not [n for n in after if n.endswith("_scale_inv")] and len(values) == 24 + 8
    for name, value in values.items():
        if ".experts." in name or targets == "all-linear":
            codes, scale = quantize_weight(value)
            assert torch.equal(after[name], codes) and torch.equal(after[f"{name}_scale"], scale[:, None])
        else:
            assert after[name].dtype is torch.bfloat16 and torch.equal(after[name], value.bfloat16())
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"
    assert ("model.layers.0.self_attn.q_proj" in config["ignore"]) == (targets == "experts")


@pytest.mark.parametrize("kind", ["gpt_oss", "granitemoe"])
def test_fp8_blocks_of_stacked_experts(kind: str, tmp_path: Path) -> None:
    families.make_model(kind, tmp_path / "source")
    values = to_fp8(tmp_path / "source")
    quantize_checkpoint(tmp_path / "source", tmp_path / "out")
    after = tensors(tmp_path / "out")
    if kind == "gpt_oss":
        name, made = "model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.2.up_proj.weight"
        want = values[name][2].T[1::2]
    else:
        name = "model.layers.1.block_sparse_moe.output_linear.weight"
        made = "model.layers.1.block_sparse_moe.experts.2.down_proj.weight"
        want = values[name][2]
    codes, scale = quantize_weight(want)
    assert torch.equal(after[made], codes) and torch.equal(after[f"{made}_scale"], scale[:, None])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"weight_block_size": None}, "weight_block_size is None, needs two sizes.*a scale per tensor or row"),
        ({"activation_scheme": "static"}, "activation_scheme is 'static', needs 'dynamic'"),
        ({"fmt": "e5m2"}, "fmt is 'e5m2', needs 'e4m3'"),
        ({"quant_method": "mxfp4"}, r"is quantised already \(mxfp4\)"),
        ({"weight_block_size": [16, 16]}, r"_scale_inv is F32 of shape .*one for 16 x 16 weights"),
    ],
)
def test_other_fp8_is_refused(fields: dict, says: str, source: Path, tmp_path: Path) -> None:
    to_fp8(source, **fields)
    refused(source, tmp_path, says)


def test_fp8_without_its_scale(source: Path, tmp_path: Path) -> None:
    to_fp8(source)
    edit(source, lambda t: t.pop("model.layers.0.self_attn.q_proj.weight_scale_inv"))
    refused(source, tmp_path, r"q_proj\.weight has dtype F8_E4M3.*q_proj\.weight_scale_inv beside it")


# --- stopping and going on -----------------------------------------------------------------------------------------


def test_goes_on_where_it_stopped(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = len(make_plan(source).shards)
    assert shards > 3
    real, calls = checkpoint._convert_shard, []

    def stop_at_third(plan, shard, *args):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(shard)
        return real(plan, shard, *args)

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
    out, real = tmp_path / "out", checkpoint._convert_shard

    def spoilt(plan, shard, target, *args):
        sizes = real(plan, shard, target, *args)
        data = load_file(target)
        for name in [n for n in data if n.endswith(".weight_scale")]:
            weight = name.removesuffix("_scale")
            q, scale = spoil(data[weight], data[name])
            data[weight], data[name] = q.contiguous(), scale.contiguous()
        save_file(data, target, metadata={"format": "pt"})
        return sizes

    monkeypatch.setattr(checkpoint, "_convert_shard", spoilt)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        quantize_checkpoint(source, out)
    assert not (out / "config.json").exists()
    monkeypatch.undo()
    assert quantize_checkpoint(source, out).verified


def test_killed_at_any_moment_nothing_half_written_has_a_final_name(source: Path, tmp_path: Path) -> None:
    code = (
        "import os, random, signal, sys, time\n"
        "from int8moe.quantize.checkpoint import quantize_checkpoint\n"
        "def start(out):\n"
        "    if child := os.fork(): return child\n"
        "    quantize_checkpoint(sys.argv[1], out, threads=2, progress=lambda *a: time.sleep(0.002))\n"
        "    os._exit(0)\n"
        "begin = time.monotonic(); os.waitpid(start(sys.argv[2] + '/whole'), 0); whole = time.monotonic() - begin\n"
        "moments = random.Random(7)\n"
        "for i in range(8):\n"
        "    child = start(sys.argv[2] + f'/{i}')\n"
        "    time.sleep(moments.uniform(0, whole))\n"
        "    os.kill(child, signal.SIGKILL); os.waitpid(child, 0)\n"
    )
    (tmp_path / "out").mkdir()
    subprocess.run([sys.executable, "-c", code, str(source), str(tmp_path / "out")], check=True)
    whole, unfinished = tensors(tmp_path / "out" / "whole"), 0
    assert len(whole) == len(tensors(source)) + 24
    for out in (tmp_path / "out" / str(i) for i in range(8)):
        for file in out.glob("[!.]*.safetensors"):
            with safe_open(file, framework="pt") as shard:
                assert all(torch.equal(shard.get_tensor(n), whole[n]) for n in shard.keys())  # noqa: SIM118
        if not (out / "config.json").exists():
            unfinished += 1
            quantize_checkpoint(source, out)
        assert not list(out.glob(".*.tmp")) and not (out / STATE).exists()
        after = tensors(out)
        assert after.keys() == whole.keys() and all(torch.equal(after[n], whole[n]) for n in whole)
    assert unfinished > 3


_RUN = (
    "import sys, time\n"
    "from int8moe.quantize.checkpoint import quantize_checkpoint\n"
    "def slow(*_):\n"
    "    print('running', flush=True); sys.stdin.read(1)\n"  # until told to go on, or killed
    "quantize_checkpoint(sys.argv[1], sys.argv[2], threads=1, progress=slow)\n"
)


def _running(source: Path, out: Path) -> subprocess.Popen[str]:
    """A conversion in a process of its own that stands still after its first tensor."""
    command = [sys.executable, "-c", _RUN, str(source), str(out)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "running\n"
    return child


def test_two_conversions_into_one_folder(source: Path, tmp_path: Path) -> None:
    """The second is refused and touches nothing; the first one ends as if it were alone."""
    out = tmp_path / "out"
    with _running(source, out) as child:
        assert list(out.glob(".*.tmp"))
        before = {f.name: f.stat().st_size for f in out.iterdir()}
        for overwrite in (False, True):
            with pytest.raises(CheckpointError, match=r"another conversion into .*/out is running"):
                quantize_checkpoint(source, out, overwrite=overwrite)
        assert {f.name: f.stat().st_size for f in out.iterdir()} == before
        quantize_checkpoint(source, tmp_path / "beside")
        child.communicate()
    assert child.returncode == 0
    want, got = tensors(tmp_path / "beside"), tensors(out)
    assert want.keys() == got.keys() and all(torch.equal(want[n], got[n]) for n in want)
    assert {f.name for f in out.iterdir()} == {f.name for f in (tmp_path / "beside").iterdir()}


def test_a_killed_conversion_leaves_no_lock(source: Path, tmp_path: Path) -> None:
    with _running(source, tmp_path / "out") as child:
        child.kill()
    assert quantize_checkpoint(source, tmp_path / "out").verified
    assert not list((tmp_path / "out").glob(".*"))


def test_a_file_system_without_locks(source: Path, tmp_path: Path, monkeypatch, caplog) -> None:
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(checkpoint.fcntl, "flock", refuse)
    assert quantize_checkpoint(source, tmp_path / "out").verified
    assert "cannot be locked (No locks available)" in caplog.text
    monkeypatch.setattr(checkpoint, "fcntl", None)
    assert quantize_checkpoint(source, tmp_path / "other").verified


def test_full_disk_half_way(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, files = tmp_path / "out", []

    class Full(checkpoint.ShardFile):
        def __init__(self, path, outputs):
            files.append(path)
            super().__init__(path, outputs)

        def put(self, *args):
            if len(files) == 3:
                raise OSError(28, "No space left on device")
            super().put(*args)

    monkeypatch.setattr(checkpoint, "ShardFile", Full)
    with pytest.raises(CheckpointError, match="could not be written: No space left on device"):
        quantize_checkpoint(source, out)
    names = [f.name for f in out.iterdir()]
    assert len([n for n in names if n.endswith(".safetensors")]) == 2
    assert "config.json" not in names and not [n for n in names if n.endswith(".tmp")]
    monkeypatch.undo()
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


def test_nothing_of_others_is_removed(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where the folder is refused, nor where the disk turns out too small for replacing what is there."""
    folder = tmp_path / "out"
    folder.mkdir()
    for name in (".notes.tmp", "thesis.txt"):
        (folder / name).write_text("mine")
    with pytest.raises(CheckpointError, match="is not empty"):
        quantize_checkpoint(source, folder)
    assert {f.name for f in folder.iterdir()} == {".notes.tmp", "thesis.txt"}
    quantize_checkpoint(source, tmp_path / "done")
    before = {f.name for f in (tmp_path / "done").iterdir()}
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: usage._replace(free=-(10**9)))
    with pytest.raises(CheckpointError, match="bytes free"):
        quantize_checkpoint(source, tmp_path / "done", overwrite=True)
    assert {f.name for f in (tmp_path / "done").iterdir()} == before


@pytest.mark.parametrize("state", ["[1]", "{}", '{"done": 3}', "null"])
def test_a_damaged_state_is_not_ours(state: str, source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / STATE).write_text(state)
    with pytest.raises(CheckpointError, match="is not empty"):
        quantize_checkpoint(source, tmp_path / "out")


def test_a_damaged_result_is_seen(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = checkpoint.quantize_rows

    def off_by_one(*args):
        codes, scale = real(*args)
        codes[0, 0] += 1 if codes[0, 0] < 0 else -1
        return codes, scale

    monkeypatch.setattr(checkpoint, "quantize_rows", off_by_one)
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
        "quantize_checkpoint(sys.argv[1], sys.argv[2], threads=2)\n"
        "stop.append(1); thread.join()\n"
        "print(peak[0] - start)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(source), str(tmp_path / "out")], check=True, capture_output=True, text=True
    )
    # A few blocks of rows in float32 a thread (4 MiB each) and what the allocator keeps; source and result are pages
    # of files.
    assert int(run.stdout) < shard
