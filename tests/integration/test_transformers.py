"""Models loaded by Transformers with INT8 experts: same bits from bf16 and from INT8, nothing random, little memory."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

tf = pytest.importorskip("transformers")
import int8moe.transformers as it  # noqa: E402
from int8moe.backends.reference.support import ReferenceExperts  # noqa: E402
from int8moe.config import MoEActivation  # noqa: E402
from int8moe.errors import CheckpointError, ConfigError, NonFiniteWeight, UnsupportedDeployment  # noqa: E402
from int8moe.integrations.transformers.experts import is_experts  # noqa: E402
from int8moe.quantize.checkpoint import quantize_checkpoint  # noqa: E402
from int8moe.quantize.int8 import quantize_weight  # noqa: E402
from tiny_models import EXPERTS, SIZES, make_model  # noqa: E402

FAMILIES = ["mixtral", "qwen3_moe", "olmoe"]
IDS = torch.arange(2 * 17).reshape(2, 17) * 7 % 320
NAMES = {"mixtral": ("block_sparse_moe.experts", ("w1", "w3", "w2"))}


pytestmark = pytest.mark.usefixtures("quiet_transformers", "on_the_cpu")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Family -> (folder, model), made once."""
    made = {}

    def get(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            made[kind] = folder, make_model(kind, folder)
        return made[kind]

    return get


def logits(model, ids=IDS):
    with torch.inference_mode():
        return model(ids).logits


def quantise_by_hand(source: Path, target: Path, kind: str, leaves: tuple[str, str, str] | None = None) -> None:
    """A compressed-tensors checkpoint made tensor by tensor, without any loader."""
    target.mkdir(exist_ok=True)
    out = {}
    _, own = NAMES.get(kind, ("", ("gate_proj", "up_proj", "down_proj")))
    rename = dict(zip(own, leaves or own, strict=True))
    for name, tensor in load_file(source / "model.safetensors").items():
        if ".experts." in name:
            head, leaf, _ = name.rsplit(".", 2)
            codes, scale = quantize_weight(tensor)
            out[f"{head}.{rename[leaf]}.weight"] = codes
            out[f"{head}.{rename[leaf]}.weight_scale"] = scale.unsqueeze(-1)
        else:
            out[name] = tensor
    save_file(out, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = it.Int8MoeConfig().to_dict()
    (target / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("kind", FAMILIES)
def test_online_from_disk_and_saved_agree_bit_for_bit(kind, checkpoints, tmp_path):
    folder, plain = checkpoints(kind)
    online = it.load(folder, "reference")
    quantise_by_hand(folder, tmp_path / "int8", kind)
    from_disk = it.load(tmp_path / "int8", "reference")
    online.save_pretrained(tmp_path / "saved")
    saved = it.load(tmp_path / "saved", "reference")
    want = logits(online)
    assert torch.equal(logits(from_disk), want)
    assert torch.equal(logits(saved), want)
    error = (want - logits(plain)).float().norm() / logits(plain).float().norm()
    assert 0 < error < 0.1
    names = {n: t for n, t in load_file(tmp_path / "saved" / "model.safetensors").items() if ".experts." in n}
    assert names.keys() == {n for n in load_file(tmp_path / "int8" / "model.safetensors") if ".experts." in n}
    assert {t.dtype for t in names.values()} == {torch.int8, torch.float32}
    quantization = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert (quantization["quant_method"], quantization["format"]) == ("compressed-tensors", "int-quantized")
    gate = NAMES.get(kind, ("mlp.",))[0].removesuffix("experts") + "gate"
    assert {"lm_head", f"model.layers.1.{gate}", "model.layers.0.self_attn.q_proj"} <= set(quantization["ignore"])
    assert not any("experts" in name for name in quantization["ignore"])


@pytest.mark.parametrize("kind", FAMILIES)
def test_auto_backend_is_the_reference_bit_for_bit(kind, checkpoints):
    folder, _ = checkpoints(kind)
    model = it.load(folder, device="cpu")
    (report,) = it.explain_model(model)
    assert report.backend == "CPU" and report.report is not None
    assert len(report.layers) == 2
    assert torch.equal(logits(model), logits(it.load(folder, "reference", device="cpu")))


def test_experts_compute_what_the_reference_layer_computes(checkpoints):
    """One module against `ReferenceExperts` fed by hand from the file."""
    folder, _ = checkpoints("qwen3_moe")
    module = it.load(folder, "reference").model.layers[1].mlp.experts
    file = load_file(folder / "model.safetensors")
    stack = lambda leaf: [file[f"model.layers.1.mlp.experts.{e}.{leaf}.weight"] for e in range(8)]
    w13 = torch.stack([torch.cat(p) for p in zip(stack("gate_proj"), stack("up_proj"), strict=True)])
    w2 = torch.stack(stack("down_proj"))
    (q13, s13), (q2, s2) = quantize_weight(w13), quantize_weight(w2)
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    ids = torch.tensor([[0, 7], [3, 1], [2, 6], [5, 4], [7, 0]])
    weights = torch.rand(5, 2, generator=torch.Generator().manual_seed(2))
    kernel = module._int8.kernel
    assert isinstance(kernel.experts, ReferenceExperts)
    for got, want in zip(kernel.unpack_weights(), (q13, q2), strict=True):
        assert torch.equal(got, want)
    from types import SimpleNamespace

    from int8moe.quant_config import int8_w8a8_moe_quant_config

    experts = ReferenceExperts(kernel.config, int8_w8a8_moe_quant_config(s13, s2))
    experts.process_weights_after_loading(SimpleNamespace(w13_weight=q13, w2_weight=q2))
    assert torch.equal(module(x, ids, weights), experts.apply(x, weights, ids))


def test_from_pretrained_with_a_config_is_the_same(checkpoints):
    folder, _ = checkpoints("qwen3_moe")
    model = tf.AutoModelForCausalLM.from_pretrained(folder, quantization_config=it.Int8MoeConfig("reference"))
    assert torch.equal(logits(model), logits(it.load(folder, "reference")))


def test_names_of_llm_compressor_for_mixtral(checkpoints, tmp_path):
    folder, _ = checkpoints("mixtral")
    quantise_by_hand(folder, tmp_path, "mixtral", ("gate_proj", "up_proj", "down_proj"))
    assert torch.equal(logits(it.load(tmp_path, "reference")), logits(it.load(folder, "reference")))


def test_int8_dense_layers_are_dequantised(checkpoints, tmp_path):
    """llm-compressor quantises attention as well by default; those layers run in the model's dtype."""
    folder, _ = checkpoints("olmoe")
    quantise_by_hand(folder, tmp_path, "olmoe")
    tensors = load_file(tmp_path / "model.safetensors")
    expected = {}
    for name in [n for n in tensors if n.endswith("_proj.weight") and ".self_attn." in n]:
        codes, scale = quantize_weight(tensors[name])
        tensors[name], tensors[f"{name}_scale"] = codes, scale.unsqueeze(-1).bfloat16()
        expected[name] = (codes.float() * scale.unsqueeze(-1).bfloat16().float()).bfloat16()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = it.load(tmp_path, "reference")
    assert expected
    for name, want in expected.items():
        assert torch.equal(model.get_parameter(name), want)
    assert torch.equal(model.model.norm.weight, tensors["model.norm.weight"])


@pytest.mark.parametrize(
    ("kind", "activation", "gated", "limit"),
    [
        ("gpt_oss", MoEActivation.SWIGLUOAI, True, 7.0),
        ("nemotron_h", MoEActivation.RELU2, False, None),
        ("deepseek_v4", MoEActivation.SILU, True, 10.0),
        ("granitemoe", MoEActivation.SILU, True, None),
    ],
)
def test_flags_and_activations_are_honoured(kind, activation, gated, limit, checkpoints):
    folder, plain = checkpoints(kind)
    try:
        logits(it.load(folder, quantize=False))
    except RuntimeError as error:  # DeepSeek-V4 up to Transformers 5.19
        pytest.skip(f"Transformers {tf.__version__} cannot run its own bf16 model: {error}")
    model = it.load(folder, "reference")
    config = it.explain_model(model)[0].config
    assert (config.activation, config.is_act_and_mul, config.swiglu_limit) == (activation, gated, limit)
    error = (logits(model) - logits(plain)).float().norm() / logits(plain).float().norm()
    assert error < 0.05


@pytest.mark.parametrize("act", ["gelu", "gelu_pytorch_tanh", "silu"])
def test_hidden_act_is_found_by_asking_the_module(act, tmp_path):
    make_model("qwen3_moe", tmp_path, hidden_act=act)
    found = it.explain_model(it.load(tmp_path, "reference"))[0].config.activation
    assert found is MoEActivation.from_str(act)


def test_an_activation_without_a_kernel_is_the_models_own(tmp_path):
    """Its products are INT8 all the same: logits are about as near to the float model's as with a kernel's."""
    plain = make_model("qwen3_moe", tmp_path, dtype=torch.float32, hidden_act="mish")
    loaded = it.load(tmp_path)
    assert type(loaded.model.layers[0].mlp.experts._int8.kernel).__name__ == "StagedExperts"
    want, got = logits(plain, IDS), logits(loaded, IDS)
    assert 1e-4 < float((want - got).norm() / want.norm()) < 0.05
    (report,) = it.explain_model(loaded)
    assert (report.backend, report.experts_class) == ("REFERENCE", "StagedExperts")
    loaded.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(it.load(tmp_path / "saved"), IDS), got)
    with pytest.raises(UnsupportedDeployment, match=r"mlp\.experts .*needs the model's own code"):
        it.load(tmp_path, "cpu")


def test_staged_experts_are_the_reference_where_both_can(checkpoints):
    """The same layer through the module's own silu, and through the contract's."""
    from int8moe.integrations.transformers.activation import gate_of
    from int8moe.integrations.transformers.staged import StagedExperts

    folder, _ = checkpoints("qwen3_moe")
    module = it.load(folder, "reference").model.layers[0].mlp.experts
    kernel = module._int8.kernel
    staged = StagedExperts(
        kernel.experts._run.weights, kernel.config, module._int8.scheme.activation_key, gate_of(module, True), None
    )
    x = torch.randn(9, 32, generator=torch.Generator().manual_seed(1))
    ids, weights = torch.stack([torch.randperm(8)[:2] for _ in range(9)]), torch.rand(9, 2)
    want, got = kernel(x, weights, ids), staged(x, weights, ids)
    assert float((want - got).norm() / want.norm()) < 1e-3  # an exponential's last bit may move a code
    assert staged(x[:0], weights[:0], ids[:0]).shape == (0, 32)
    held = torch.tensor([0, 1, -1, 3, -1, 5, 6, 7], dtype=torch.int32)
    here = torch.where(held[ids] >= 0, weights, 0.0)
    assert torch.equal(staged(x, weights, ids, expert_map=held), staged(x, here, ids))


@pytest.mark.parametrize(("kind", "match"), [("llama", "dense model"), ("dbrx", "DbrxExpertGLU keeps all experts")])
def test_models_without_usable_experts_are_refused(kind, match, checkpoints):
    folder, _ = checkpoints(kind)
    with pytest.raises(CheckpointError, match=match):
        it.load(folder)
    assert it.load(folder, quantize=False).num_parameters() > 0


def _damage(source: Path, target: Path, change) -> Path:
    target.mkdir(exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text((source / "config.json").read_text())
    return target


E3 = "model.layers.1.mlp.experts.3.up_proj.weight"


def test_a_missing_expert_is_named(checkpoints, tmp_path):
    folder, _ = checkpoints("qwen3_moe")
    broken = _damage(folder, tmp_path / "a", lambda t: t.pop(E3))
    with pytest.raises(CheckpointError, match=f"1 expert tensors are missing in the checkpoint: {E3}"):
        it.load(broken, "reference")
    quantise_by_hand(folder, tmp_path / "q", "qwen3_moe")
    for gone in (E3, f"{E3}_scale"):
        broken = _damage(tmp_path / "q", tmp_path / "b", lambda t, gone=gone: t.pop(gone))
        with pytest.raises(CheckpointError, match=f"missing in the checkpoint: {gone}\\."):
            it.load(broken, "reference")


def test_a_layer_without_experts_is_named(checkpoints, tmp_path):
    def drop(tensors):
        for name in [n for n in tensors if "layers.0.mlp.experts" in n]:
            del tensors[name]

    folder, _ = checkpoints("qwen3_moe")
    with pytest.raises(CheckpointError, match=r"24 expert tensors are missing.*layers\.0\.mlp\.experts\.0\.gate_proj"):
        it.load(_damage(folder, tmp_path, drop), "reference")


def test_tensors_that_do_not_belong_are_named(checkpoints, tmp_path):
    folder, _ = checkpoints("qwen3_moe")
    quantise_by_hand(folder, tmp_path / "q", "qwen3_moe")
    zero_point = E3 + "_zero_point"
    more = _damage(
        tmp_path / "q", tmp_path / "z", lambda t: t.update({zero_point: torch.zeros(24, 1, dtype=torch.int8)})
    )
    with pytest.raises(CheckpointError, match=f"nothing in the INT8 model takes them: {zero_point}"):
        it.load(more, "reference")
    half = _damage(tmp_path / "q", tmp_path / "h", lambda t: t.update({E3: t[E3].bfloat16()}))
    with pytest.raises(CheckpointError, match=rf"wrong dtype.*{E3} \(BF16\)"):
        it.load(half, "reference")


def test_wrong_shapes_and_nan_are_named(checkpoints, tmp_path):
    folder, _ = checkpoints("qwen3_moe")
    short = _damage(folder, tmp_path / "s", lambda t: t.update({E3: t[E3][:20].contiguous()}))
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.gate_up_proj: expert 3, up has shape \(20, 32\)"):
        it.load(short, "reference")

    def poison(tensors):
        tensors[E3][5, 7] = float("nan")

    with pytest.raises(NonFiniteWeight, match=r"layers\.1\.mlp\.experts\.gate_up_proj, expert 3, up"):
        it.load(_damage(folder, tmp_path / "n", poison), "reference")


def _cached(folder: Path, cache: Path, name: str = "someone/tiny-moe") -> str:
    """Lay a checkpoint into a folder as the Hub's client keeps what it fetched; returns the repository's name."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / ("0" * 40)
    shutil.copytree(folder, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    return name


def test_a_repository_is_checked_as_a_folder_is(checkpoints, tmp_path):
    """A group that no expert falls under decides nothing, and int8 that no group covers is an error: both need the
    tensors' headers."""
    folder, plain = checkpoints("qwen3_moe")
    quantise_by_hand(folder, tmp_path / "int8", "qwen3_moe")
    config = json.loads((tmp_path / "int8" / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    other = copy.deepcopy(groups["group_0"]) | {"targets": ["re:.*nothing.*"], "format": "pack-quantized"}
    other["weights"]["num_bits"] = 4
    groups["group_0"]["targets"] = ["re:.*experts.*"]
    (tmp_path / "int8" / "config.json").write_text(json.dumps(config))
    plain.save_pretrained(tmp_path / "bf16", max_shard_size="20KB")
    want = logits(it.load(tmp_path / "int8", "reference"))
    groups["group_1"] = other
    (tmp_path / "int8" / "config.json").write_text(json.dumps(config))
    hub = {"cache_dir": tmp_path / "hub", "local_files_only": True}
    name = _cached(tmp_path / "int8", tmp_path / "hub")
    for source, where in ((tmp_path / "int8", {}), (name, hub)):
        assert torch.equal(logits(it.load(source, "reference", **where)), want)
    float_name = _cached(tmp_path / "bf16", tmp_path / "hub", "someone/tiny-bf16")
    assert torch.equal(logits(it.load(float_name, "reference", **hub)), want)

    groups["group_0"]["targets"] = ["re:.*self_attn.*"]  # nobody's scales say what the experts' codes are
    (tmp_path / "int8" / "config.json").write_text(json.dumps(config))
    wrong = _cached(tmp_path / "int8", tmp_path / "hub", "someone/wrong")
    said = []
    for source, where in ((tmp_path / "int8", {}), (wrong, hub)):
        with pytest.raises(CheckpointError) as refused:
            it.load(source, "reference", **where)
        said.append(str(refused.value).replace(str(source), "HERE"))
    assert said[0] == said[1]


def test_shards_of_a_repository(checkpoints, tmp_path):
    folder, _ = checkpoints("qwen3_moe")
    it.load(folder, "reference").save_pretrained(tmp_path / "int8", max_shard_size="20KB")
    assert (tmp_path / "int8" / "model.safetensors.index.json").exists()
    hub = {"cache_dir": tmp_path / "hub", "local_files_only": True}
    name = _cached(tmp_path / "int8", tmp_path / "hub")
    assert torch.equal(logits(it.load(name, "reference", **hub)), logits(it.load(folder, "reference")))
    gone = sorted((tmp_path / "int8").glob("*.safetensors"))[0]
    gone.unlink()
    lost = _cached(tmp_path / "int8", tmp_path / "hub", "someone/lost")
    for source, where in ((tmp_path / "int8", {}), (lost, hub)):
        with pytest.raises(CheckpointError, match=rf"lacks {re.escape(gone.name)}, which its index names"):
            it.load(source, "reference", **where)


def test_missing_dense_tensors_are_refused_too(checkpoints, tmp_path):
    folder, _ = checkpoints("qwen3_moe")
    broken = _damage(folder, tmp_path, lambda t: t.pop("model.layers.0.self_attn.q_proj.weight"))
    with pytest.raises(CheckpointError, match="q_proj"):
        it.load(broken, "reference")


def test_damaged_and_absent_checkpoints(checkpoints, tmp_path):
    folder, _ = checkpoints("qwen3_moe")
    with pytest.raises(CheckpointError, match="is not a folder"):
        it.load(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        it.load(tmp_path)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:5000])
    for quantize in (None, False):
        with pytest.raises(CheckpointError):
            it.load(tmp_path, quantize=quantize)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"quant_method": "fp8"}, "quantised with 'fp8'"),
        ({"format": "pack-quantized"}, "'pack-quantized'.*needs 'int-quantized'"),
        ({"weights": {"symmetric": False}}, r"weights\.symmetric is False"),
        ({"weights": {"strategy": "group"}}, r"weights\.strategy is 'group'"),
        ({"input_activations": {"dynamic": False}}, r"input_activations\.dynamic is False"),
    ],
)
def test_other_quantisations_are_refused(change, match, checkpoints, tmp_path):
    folder, _ = checkpoints("qwen3_moe")
    config = json.loads((folder / "config.json").read_text())
    quantization = it.Int8MoeConfig().to_dict()
    for key, value in change.items():
        if isinstance(value, dict):
            quantization["config_groups"]["group_0"][key].update(value)
        else:
            quantization[key] = value
            quantization["config_groups"]["group_0"].pop(key, None)
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    with pytest.raises(CheckpointError, match=match):
        it.load(tmp_path)


def test_arguments_are_checked(checkpoints, tmp_path):
    folder, _ = checkpoints("qwen3_moe")
    with pytest.raises(ConfigError, match="marlin"):
        it.load(folder, "marlin")
    with pytest.raises(ConfigError, match="w4a4"):
        it.load(folder, scheme="w4a4")
    quantise_by_hand(folder, tmp_path, "qwen3_moe")
    with pytest.raises(CheckpointError, match="quantize=False"):
        it.load(tmp_path, quantize=False)
    assert it.is_int8_checkpoint(tmp_path) and not it.is_int8_checkpoint(folder)
    with pytest.raises(ConfigError, match="no INT8 experts"):
        it.explain_model(it.load(folder, quantize=False))


def test_modules_to_not_convert(checkpoints, tmp_path):
    folder, _ = checkpoints("qwen3_moe")
    model = it.load(folder, "reference", modules_to_not_convert=[r"model\.layers\.0"])
    assert it.explain_model(model)[0].layers == ("model.layers.1.mlp.experts",)
    assert model.model.layers[0].mlp.experts.gate_up_proj.dtype is torch.bfloat16
    model.save_pretrained(tmp_path)
    again = it.load(tmp_path, "reference", modules_to_not_convert=[r"model\.layers\.0"])
    assert torch.equal(logits(again), logits(model))
    with pytest.raises(CheckpointError, match=r"wrong dtype|missing"):
        it.load(tmp_path, "reference")
    with pytest.raises(CheckpointError, match="excludes all"):
        it.load(folder, modules_to_not_convert=["experts"])


def test_weights_are_held_once(checkpoints):
    folder, _ = checkpoints("qwen3_moe")
    module = it.load(folder, "reference").model.layers[0].mlp.experts
    assert not list(module.parameters()) and not list(module.buffers())
    state = module.state_dict()
    assert {k: tuple(v.shape) for k, v in state.items()} == {
        "gate_up_proj": (8, 48, 32), "gate_up_proj_scale": (8, 48, 1),
        "down_proj": (8, 32, 24), "down_proj_scale": (8, 32, 1),
    }  # fmt: skip


def test_other_dtype_after_loading_keeps_the_weights(checkpoints):
    """Experts come from the checkpoint's values, and scales stay float32, whatever dtype the rest runs in."""
    folder, _ = checkpoints("qwen3_moe")
    model = it.load(folder, "reference", dtype="float32")
    assert logits(model).dtype is torch.float32
    module = model.model.layers[0].mlp.experts
    assert module._int8.kernel.config.in_dtype == "float32"
    original = it.load(folder, "reference")
    for name, want in original.model.layers[0].mlp.experts.state_dict().items():
        assert torch.equal(module.state_dict()[name], want)
    model.to(torch.bfloat16)
    logits(model)
    assert module._int8.kernel.config.in_dtype == "bfloat16"
    for name, want in original.model.layers[0].mlp.experts.state_dict().items():
        assert torch.equal(module.state_dict()[name], want)


def test_dtype_while_loading_is_that_of_a_plain_load(tmp_path):
    """float32 file, run in bf16: dense parameters as Transformers casts them, experts from the float32 values."""
    make_model("qwen3_moe", tmp_path, dtype=torch.float32)
    model, plain = it.load(tmp_path, "reference", dtype="bfloat16"), it.load(tmp_path, quantize=False, dtype="bfloat16")
    for (name, got), (_, want) in zip(
        [p for p in model.named_parameters()],
        [p for p in plain.named_parameters() if ".experts." not in p[0]],
        strict=True,
    ):
        assert torch.equal(got, want) and got.dtype is torch.bfloat16, name
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, plain.get_buffer(name)), name
    full = it.load(tmp_path, "reference").model.layers[0].mlp.experts.state_dict()
    got = model.model.layers[0].mlp.experts.state_dict()
    assert all(torch.equal(got[k], full[k]) for k in full)
    quantise_by_hand(tmp_path, tmp_path / "q", "qwen3_moe")
    assert torch.equal(logits(it.load(tmp_path / "q", "reference", dtype="bfloat16")), logits(model))


def test_per_tensor_and_bf16_scales_load(checkpoints, tmp_path):
    folder, _ = checkpoints("qwen3_moe")
    quantise_by_hand(folder, tmp_path / "q", "qwen3_moe")

    def coarse(tensors):
        for name in [n for n in tensors if n.endswith("_scale")]:
            tensors[name] = tensors[name].bfloat16() if "up_proj" in name else tensors[name][:1, 0].contiguous()

    model = it.load(_damage(tmp_path / "q", tmp_path / "c", coarse), "reference")
    scale = model.model.layers[0].mlp.experts.state_dict()["down_proj_scale"]
    assert scale.dtype is torch.float32 and (scale == scale[:, :1]).all()


def test_generate_greedy_and_sampling(checkpoints):
    folder, _ = checkpoints("qwen3_moe")
    model = it.load(folder, "reference", dtype="float32")  # in bf16 a cached step may round attention otherwise
    arguments = {"max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None}
    greedy = model.generate(IDS[:, :5], do_sample=False, **arguments)
    rows = IDS[:, :5]
    for _ in range(6):
        rows = torch.cat([rows, logits(model, rows)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(greedy, rows)
    torch.manual_seed(1)
    assert model.generate(IDS[:, :5], do_sample=True, **arguments).shape == (2, 11)


def test_w8a16_and_the_experts_implementation_do_not_mix_up(checkpoints):
    folder, plain = checkpoints("qwen3_moe")
    model = it.load(folder, "reference", scheme="w8a16")
    error = lambda m: float((logits(m) - logits(plain)).float().norm())
    assert 0 < error(model) < error(it.load(folder, "reference"))
    want = logits(model)
    for name in ("eager", "batched_mm", "grouped_mm"):
        model.set_experts_implementation(name)
        assert torch.equal(logits(model), want)


def test_float_experts_beside_int8_ones_keep_their_form(checkpoints, tmp_path):
    """gpt-oss: a layer that is not converted is saved as the family has it, the other expert by expert."""
    folder, plain = checkpoints("gpt_oss")
    loaded = it.load(folder, "reference", modules_to_not_convert=["model.layers.0.mlp.experts"])
    loaded.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    first, second = (f"model.layers.{n}.mlp.experts" for n in (0, 1))
    original = plain.model.layers[0].mlp.experts
    assert torch.equal(saved[f"{first}.gate_up_proj"], original.gate_up_proj)
    assert f"{second}.gate_up_proj" not in saved and saved[f"{second}.3.up_proj.weight"].shape == (24, 32)
    bias = plain.model.layers[1].mlp.experts.gate_up_proj_bias
    assert torch.equal(saved[f"{second}.3.up_proj.bias"], bias[3, 1::2]), "gate and up alternate in the family"
    again = it.load(tmp_path, "reference", modules_to_not_convert=["model.layers.0.mlp.experts"])
    assert torch.equal(logits(again, IDS), logits(loaded, IDS))


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_gradients_pass_through_the_experts(kind, checkpoints):
    """Of the input and of the router weights; near the float model's, and equal when compiled."""
    folder, _ = checkpoints(kind)
    plain, loaded = it.load(folder, quantize=False, dtype="float32"), it.load(folder, "reference", dtype="float32")

    def gradients(model, module):
        experts = module(model)
        x = torch.randn(9, 32, generator=torch.Generator().manual_seed(2)).requires_grad_()
        weights = torch.linspace(0.1, 0.9, 18).reshape(9, 2).requires_grad_()
        ids = torch.arange(18).reshape(9, 2) % 4
        run = lambda *a: experts(*a).square().sum()
        run(x, ids, weights).backward()
        assert all(p.grad is None for p in experts.parameters())
        eager = (x.grad, weights.grad)
        x.grad = weights.grad = None
        if isinstance(experts, it.Int8Experts):
            torch.compile(run, fullgraph=True, backend="aot_eager")(x, ids, weights).backward()
            assert torch.equal(x.grad, eager[0]) and torch.equal(weights.grad, eager[1])
        return eager

    experts_of = lambda m: next(e for _, e in m.named_modules() if is_experts(e))
    for p in plain.parameters():
        p.requires_grad_(False)
    int8_of = lambda m: next(e for e in m.modules() if isinstance(e, it.Int8Experts))
    for want, got in zip(gradients(plain, experts_of), gradients(loaded, int8_of), strict=True):
        assert float((want - got).norm() / want.norm()) < 0.05


@pytest.mark.parametrize(("kind", "backend"), [("qwen3_moe", "cpu"), ("gpt_oss", "cpu"), ("llama4_text", "reference")])
def test_a_model_is_copied_and_pickled(kind, backend, checkpoints, tmp_path):
    """The same bits, backend and files; `torch.save` in one process, `torch.load` in another."""
    folder, _ = checkpoints(kind)
    loaded = it.load(folder, backend)
    want = logits(loaded)
    torch.save(loaded, tmp_path / "model.pt")
    for made in (copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))):
        assert [str(r) for r in it.explain_model(made)] == [str(r) for r in it.explain_model(loaded)]
        assert torch.equal(logits(made), want)
        made.save_pretrained(tmp_path / "saved")
        assert torch.equal(logits(it.load(tmp_path / "saved", backend)), want)
    assert torch.equal(logits(loaded), want)
    torch.save(want, tmp_path / "want.pt")
    code = (
        "import sys, torch\n"
        "model = torch.load(sys.argv[1] + '/model.pt', weights_only=False)\n"
        "ids = torch.arange(2 * 17).reshape(2, 17) * 7 % 320\n"
        "with torch.inference_mode():\n"
        "    assert torch.equal(model(ids).logits, torch.load(sys.argv[1] + '/want.pt'))\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr


def test_biases_are_packed_with_the_weights(checkpoints):
    """What is not a parameter cannot be changed without effect; unpacked, a change counts."""
    folder, _ = checkpoints("gpt_oss")
    loaded = it.load(folder, "cpu")
    want = logits(loaded)
    experts = loaded.model.layers[0].mlp.experts
    assert not list(experts.parameters())
    for name in ("gate_up_proj_bias", "down_proj", "down_proj_scale"):
        with pytest.raises(AttributeError, match=rf"{name} of model\.layers\.0\.mlp\.experts is packed.*unpack\(\)"):
            getattr(experts, name)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        experts.nothing  # noqa: B018
    experts.unpack()
    experts.down_proj_bias.data.add_(1.0)
    changed = logits(loaded)
    assert not torch.equal(changed, want)
    reference = it.load(folder, "reference")
    biases = {k: v for k, v in loaded.state_dict().items() if k.endswith("_bias")}
    assert len(biases) == 4 and "router" not in str(list(biases))
    reference.load_state_dict(biases, strict=False)
    assert torch.equal(logits(reference), changed)


def test_to_another_dtype_builds_the_kernels_at_once(checkpoints):
    """So that a compiled call may come next, and a backend that cannot run there says so here."""
    folder, _ = checkpoints("qwen3_moe")
    loaded = it.load(folder, "cpu")
    loaded.to(torch.float32)
    assert it.explain_model(loaded)[0].config.in_dtype == "float32"
    with torch.no_grad():
        got = torch.compile(loaded, fullgraph=True, backend="aot_eager")(IDS).logits
        assert torch.equal(got, it.load(folder, "cpu", dtype="float32")(IDS).logits)
    with pytest.raises(ValueError, match="float64"):
        loaded.to(torch.float64)


@pytest.fixture
def second_cpu(monkeypatch):
    """`cpu:0` as accelerate sees a GPU: modules that a device_map puts on `cpu` are offloaded, away from it."""
    hooks = pytest.importorskip("accelerate.hooks")
    move = hooks.set_module_tensor_to_device
    plain = lambda device: (
        "cpu" if str(device) == "cpu:0" else device
    )  # tensors of the one compare unequal to the other
    monkeypatch.setattr(hooks, "set_module_tensor_to_device", lambda m, n, d, **k: move(m, n, plain(d), **k))
    return "cpu:0"


def _mapped(gpu: str, cpu: str) -> dict[str, str]:
    """Everything on `gpu`, but what `cpu` names."""
    names = ["model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head", "model.layers.1"]
    parts = ["self_attn", "mlp", "input_layernorm", "post_attention_layernorm"]
    names += [f"model.layers.0.{p}" for p in parts] if cpu.count(".") > 2 else ["model.layers.0"]
    if cpu.endswith(".experts"):
        names.remove("model.layers.0.mlp")
        names += ["model.layers.0.mlp.experts", "model.layers.0.mlp.router", "model.layers.0.mlp.gate"]
    return {n: gpu for n in names} | {cpu: "cpu"}


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("cpu", ["model.layers.0", "model.layers.0.mlp.experts"])
def test_experts_that_a_device_map_leaves_on_the_cpu_run_there(kind, cpu, second_cpu, checkpoints, tmp_path):
    folder, _ = checkpoints(kind)
    quantize_checkpoint(folder, tmp_path / "int8")
    want = logits(it.load(folder, "cpu"))
    for source in (folder, tmp_path / "int8"):
        model = it.load(source, device_map=_mapped(second_cpu, cpu))
        experts = model.model.layers[0].mlp.experts
        assert not hasattr(experts, "_hf_hook") and not list(experts.parameters())
        hooks = [getattr(m, "_hf_hook", None) for m in model.modules()]
        held = [h.weights_map.dataset.state_dict for h in hooks if getattr(h, "weights_map", None) is not None]
        assert not any(".experts." in name for names in held for name in names), "a second copy stays in memory"
        assert {r.backend for r in it.explain_model(model)} == {"CPU"}
        assert torch.equal(logits(model), want)
        assert model.generate(IDS[:, :4], max_new_tokens=3, do_sample=False, pad_token_id=0).shape == (2, 7)
        model.save_pretrained(tmp_path / "saved")
        assert torch.equal(logits(it.load(tmp_path / "saved", "cpu")), want)


def test_device_maps_that_a_plain_machine_knows(second_cpu, checkpoints):
    folder, _ = checkpoints("qwen3_moe")
    want = logits(it.load(folder, "cpu"))
    for device_map in ("auto", "cpu", {"": "cpu"}):
        assert torch.equal(logits(it.load(folder, device_map=device_map)), want)
    on_disk = _mapped(second_cpu, "model.layers.0") | {"model.layers.0": "disk"}
    with pytest.raises(ConfigError, match=r"device_map puts model\.layers\.0 on the disk") as refused:
        it.load(folder, device_map=on_disk, offload_folder="unused")
    assert "\n" not in str(refused.value)


def test_a_copied_model_has_gradients_of_its_own(checkpoints):
    folder, _ = checkpoints("qwen3_moe")
    loaded = it.load(folder, "reference", dtype="float32")
    copied = copy.deepcopy(loaded)
    del loaded
    copied.model.embed_tokens.weight.requires_grad_(True)
    copied(IDS).logits.sum().backward()
    assert copied.model.embed_tokens.weight.grad.abs().sum() > 0


def test_compiled_whole_and_generating_with_a_static_cache(checkpoints):
    folder, _ = checkpoints("qwen3_moe")
    loaded = it.load(folder, "cpu")
    with torch.no_grad():
        want = loaded(IDS).logits
        got = torch.compile(loaded, fullgraph=True, backend="aot_eager")(IDS).logits
    assert torch.equal(want, got)
    config = tf.CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    config._compile_all_devices = True
    plain = loaded.generate(IDS, max_new_tokens=6, do_sample=False)
    static = loaded.generate(
        IDS, max_new_tokens=6, do_sample=False, cache_implementation="static", compile_config=config
    )
    assert torch.equal(plain, static)


def test_a_state_dict_goes_back_in(checkpoints, tmp_path):
    folder, _ = checkpoints("gpt_oss")
    make_model("gpt_oss", tmp_path, seed=3)
    one, other = it.load(folder, "cpu"), it.load(tmp_path, "cpu")
    want = logits(one, IDS)
    assert not torch.equal(logits(other, IDS), want)
    other.load_state_dict(one.state_dict())
    assert torch.equal(logits(other, IDS), want)


def test_backward_after_a_change_of_dtype(checkpoints):
    folder, _ = checkpoints("qwen3_moe")
    loaded = it.load(folder, "reference")
    loss = loaded(IDS).logits.float().sum()
    loaded.model.layers[0].mlp.experts.unpack()
    loss.backward()
    assert torch.isfinite(loaded.model.embed_tokens.weight.grad).all()


def test_a_single_file_is_read_whatever_index_stands_beside_it(checkpoints, tmp_path):
    """As Transformers leaves it where a sharded checkpoint is saved over."""
    folder, plain = checkpoints("qwen3_moe")
    plain.save_pretrained(tmp_path, max_shard_size="20KB")
    it.load(tmp_path, "reference").save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors.index.json").exists() and (tmp_path / "model.safetensors").exists()
    assert torch.equal(logits(it.load(tmp_path, "reference"), IDS), logits(it.load(folder, "reference"), IDS))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"quantization_config": it.Int8MoeConfig()}, "takes no quantization_config"),
        ({"torch_dtype": torch.float16, "dtype": "float32"}, "both given"),
        ({"quantize": False, "scheme": "w8a16"}, "quantize=False"),
        ({"dtype": "bf16"}, "dtype is 'bf16'"),
        ({"dtype": torch.int8}, "dtype is torch.int8"),
    ],
)
def test_arguments_that_contradict_are_refused(arguments, match, checkpoints):
    folder, _ = checkpoints("qwen3_moe")
    with pytest.raises(ConfigError, match=match):
        it.load(folder, **arguments)


def test_names_of_modules_not_to_convert(checkpoints, caplog):
    folder, _ = checkpoints("qwen3_moe")
    one = "model.layers.0.mlp.experts"
    assert not isinstance(
        it.load(folder, "reference", modules_to_not_convert=one).model.layers[0].mlp.experts, it.Int8Experts
    )
    it.load(folder, "reference", modules_to_not_convert=["model.layers.7.mlp.experts"])
    assert "'model.layers.7.mlp.experts' names no module" in caplog.text


def test_ids_of_other_ranks_are_skipped(checkpoints):
    """Under expert parallelism an id equal to the number of experts, with weight 0, stands for another rank's."""
    folder, _ = checkpoints("qwen3_moe")
    loaded = it.load(folder, "cpu")
    experts = loaded.model.layers[0].mlp.experts
    x = torch.randn(7, 32, dtype=torch.bfloat16)
    ids, weights = torch.arange(14).reshape(7, 2) % 8, torch.rand(7, 2)
    other = ids >= 4
    weights = weights.masked_fill(other, 0.0)
    want = experts(x, ids, weights)
    experts.unpack()
    experts._is_expert_parallel = True
    assert torch.equal(experts(x, ids.masked_fill(other, 8), weights), want)
    assert torch.equal(experts(x[:0], ids[:0], weights[:0]), want[:0])


@pytest.mark.gpu
def test_on_a_gpu_the_same_weights_and_bits(tmp_path):
    """Quantised on the GPU as on the CPU; the chosen backend gives the reference's bits there."""
    make_model("qwen3_moe", tmp_path, hidden_size=128, moe_intermediate_size=64, head_dim=32)
    on_gpu, cpu = it.load(tmp_path), it.load(tmp_path, "reference", device="cpu")
    assert on_gpu.device.type == "cuda"
    (report,) = it.explain_model(on_gpu)
    assert report.backend == "TRITON", str(report)
    for layer in range(2):
        got, want = (m.model.layers[layer].mlp.experts.state_dict() for m in (on_gpu, cpu))
        assert all(torch.equal(got[k].cpu(), want[k]) for k in want)
    reference = it.load(tmp_path, "reference", device="cuda")
    assert torch.equal(logits(on_gpu, IDS.cuda()), logits(reference, IDS.cuda()))
    assert torch.equal(logits(reference.to("cpu")), logits(cpu))
    ids = IDS[:, :5].cuda()
    tokens = on_gpu.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert tokens.device.type == "cuda" and torch.equal(tokens[:, :5], ids)


WIDE = {"hidden_size": 768, "moe_intermediate_size": 512, "num_experts": 32}
_PEAK = """
import sys, threading, time
import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401
import int8moe.transformers as it
def anonymous():
    return next(int(l.split()[1]) for l in open("/proc/self/smaps_rollup") if l.startswith("Anonymous:")) / 1024
it.load(sys.argv[1], "reference")
start, peak, stop = anonymous(), [0.0], []
def watch():
    while not stop:
        peak[0] = max(peak[0], anonymous()); time.sleep(0.002)
thread = threading.Thread(target=watch); thread.start()
model = it.load(sys.argv[2], "reference")
stop.append(1); thread.join()
print(peak[0] - start, anonymous() - start, it.experts_bytes(model) / 2**20)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="needs /proc/self/smaps_rollup")
def test_online_peak_memory_is_the_final_size_and_one_expert(checkpoints, tmp_path):
    small, _ = checkpoints("qwen3_moe")
    config = tf.AutoConfig.for_model("qwen3_moe", **(SIZES | EXPERTS["qwen3_moe"] | WIDE))
    with torch.device("meta"):
        wide = tf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    wide.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in wide.parameters():  # any finite values do
            parameter.view(-1).copy_(torch.arange(251.0).repeat(parameter.numel() // 251 + 1)[: parameter.numel()])
    wide.save_pretrained(tmp_path)
    del wide
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", _PEAK, str(small), str(tmp_path)], capture_output=True, text=True, env=environment
    )
    assert run.returncode == 0, run.stderr
    peak, final, experts = map(float, run.stdout.split()[-3:])
    bf16_file = (tmp_path / "model.safetensors").stat().st_size / 2**20
    assert bf16_file > 140 and experts < 0.52 * bf16_file
    # One expert is 2.25 MiB in bf16; quantising it takes a few float32 copies of one projection.
    assert peak <= final + 12, (peak, final, experts)
    assert final <= experts + 20, (peak, final, experts)
