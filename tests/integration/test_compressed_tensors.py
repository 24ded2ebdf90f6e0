"""INT8 checkpoints of compressed-tensors: what llm-compressor wrote is read exactly, the rest is refused by name."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

tf = pytest.importorskip("transformers")
import int8moe.transformers as it  # noqa: E402
from int8moe.errors import CheckpointError, ConfigError  # noqa: E402
from int8moe.integrations.transformers.loading import quantization_of  # noqa: E402
from int8moe.quantize.compressed_tensors import has_int8_experts, read_scheme, read_tensors  # noqa: E402
from int8moe.quantize.int8 import quantize_weight  # noqa: E402
from tiny_models import make_model, make_tokenizer  # noqa: E402

FIXTURES = Path(__file__).parents[1] / "fixtures" / "llm_compressor"
KINDS = ["mixtral", "olmoe", "qwen3_moe"]
IDS = torch.arange(2 * 17).reshape(2, 17) * 7 % 320
MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
E3 = "model.layers.1.mlp.experts.3.up_proj"
QUANTIZATION = json.loads((FIXTURES / "qwen3_moe" / "config.json").read_text())["quantization_config"]


pytestmark = pytest.mark.usefixtures("quiet_transformers", "on_the_cpu")


@pytest.fixture
def enabled():
    pytest.importorskip("compressed_tensors")
    it.enable_compressed_tensors("reference")
    yield
    it.disable_compressed_tensors()


def logits(model, ids=IDS):
    with torch.inference_mode():
        return model(ids).logits.float()


def distance(got, want):
    return float((got - want).norm() / want.norm())


def edit(kind: str, target: Path, tensors=None, quantization=None) -> Path:
    """A copy of a fixture, changed."""
    loaded = load_file(FIXTURES / kind / "model.safetensors")
    config = json.loads((FIXTURES / kind / "config.json").read_text())
    if tensors is not None:
        loaded = tensors(loaded) or loaded
    if quantization is not None:
        config["quantization_config"] = quantization(config["quantization_config"]) or config["quantization_config"]
    target.mkdir(exist_ok=True)
    save_file(loaded, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config))
    return target


# -- what llm-compressor wrote ---------------------------------------------------------------------------------------


def dequantised(kind: str, target: Path):
    """The float32 model of the real class whose weights are int8 * scale; nothing missing, nothing left over."""
    loaded = load_file(FIXTURES / kind / "model.safetensors")
    out = {}
    for name, tensor in loaded.items():
        if name.endswith("_scale"):
            continue
        value = tensor.float() * loaded[f"{name}_scale"].float() if tensor.dtype is torch.int8 else tensor.float()
        if kind == "mixtral" and ".experts." in name:
            name = re.sub(r"(\w+)\.weight$", lambda m: f"{MIXTRAL[m[1]]}.weight", name)
        out[name] = value
    target.mkdir()
    save_file(out, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((FIXTURES / kind / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    model, info = tf.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


def rounded(x):
    """Each row on its own 8-bit grid, in float."""
    step = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return (x / step).round().clamp(-127, 127) * step


def with_rounded_activations(model):
    """The same float model, its experts' GEMM inputs rounded as W8A8 does: an independent statement of the scheme."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for t in range(len(hidden_states)):
            for slot, e in enumerate(top_k_index[t].tolist()):
                gate, up = (rounded(hidden_states[t]) @ self.gate_up_proj[e].T).chunk(2)
                middle = torch.nn.functional.silu(gate) * up
                out[t] += top_k_weights[t, slot] * (rounded(middle) @ self.down_proj[e].T)
        return out

    for layer in model.model.layers:
        layer.mlp.experts.forward = forward.__get__(layer.mlp.experts)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_real_files_give_the_model_they_describe(kind, tmp_path):
    """All in float32, so that only what is read can differ and routes do not flip.

    Weight-only, the INT8 model is the dequantised one up to float32 rounding: measured 3e-7. W8A8 also rounds each
    GEMM's input; with that rounding done to the dequantised model it agrees again, up to values that two ways of
    summing put on other sides of a rounding step (one step of one value is 1/127 of it): 0.5 %. Without it the
    distance is the rounding itself. With n values of a row uniform within a step of amax/127, one GEMM errs by
    amax/rms / (127 sqrt(12)) = 0.5 to 0.9 %; the first one counts twice, through gate and up: 1.2 % measured, 2 %.
    """
    plain = dequantised(kind, tmp_path / "float")
    want = logits(plain)
    weights = it.load(FIXTURES / kind, "reference", scheme="w8a16", dtype=torch.float32)
    assert distance(logits(weights), want) < 1e-5
    both = it.load(FIXTURES / kind, "reference", dtype=torch.float32)
    assert it.explain_model(both)[0].layers == ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")
    got = logits(both)
    assert 1e-4 < distance(got, want) < 0.02
    assert distance(got, logits(with_rounded_activations(plain))) < 0.005


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_of_a_real_file_arrives(kind):
    """Experts hold the file's codes and scales; attention is int8 * scale in bf16; the rest is as it is."""
    model = it.load(FIXTURES / kind, "reference")
    loaded = load_file(FIXTURES / kind / "model.safetensors")
    for layer in range(2):
        held = model.model.layers[layer].mlp.experts.state_dict()
        prefix = f"model.layers.{layer}.{'block_sparse_moe' if kind == 'mixtral' else 'mlp'}.experts"
        for e in range(len(held["down_proj"])):
            for leaf, name, part in (
                ("gate_proj", "gate_up_proj", 0),
                ("up_proj", "gate_up_proj", 1),
                ("down_proj",) * 2 + (0,),
            ):
                codes = loaded.pop(f"{prefix}.{e}.{leaf}.weight")
                rows = slice(part * len(codes), (part + 1) * len(codes))
                assert torch.equal(held[name][e, rows], codes)
                scale = loaded.pop(f"{prefix}.{e}.{leaf}.weight_scale").float()
                assert torch.equal(held[f"{name}_scale"][e, rows], scale)
    for name in [n for n in loaded if n.endswith("_scale")]:
        weight = loaded.pop(name.removesuffix("_scale")).float() * loaded.pop(name).float()
        assert torch.equal(model.get_parameter(name.removesuffix("_scale")), weight.bfloat16())
    for name, tensor in loaded.items():
        assert torch.equal(model.get_parameter(name.replace("block_sparse_moe", "mlp")), tensor), name


@pytest.mark.parametrize("kind", KINDS)
def test_enabled_from_pretrained_is_load(kind, enabled):
    model, info = tf.AutoModelForCausalLM.from_pretrained(FIXTURES / kind, output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    (report,) = it.explain_model(model)
    assert report.backend == "REFERENCE" and len(report.layers) == 2
    assert torch.equal(logits(model), logits(it.load(FIXTURES / kind, "reference")))


def test_enabled_models_save_and_load_again(enabled, tmp_path):
    model = tf.AutoModelForCausalLM.from_pretrained(FIXTURES / "mixtral")
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert (saved["quant_method"], saved["format"]) == ("compressed-tensors", "int-quantized")
    for again in (it.load(tmp_path, "reference"), tf.AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert torch.equal(logits(again), logits(model))


def test_enabled_pipeline_and_dtype(enabled, tmp_path):
    folder = edit("qwen3_moe", tmp_path / "m")
    make_tokenizer(folder)
    pipe = tf.pipeline("text-generation", model=str(folder), dtype=torch.float32)
    assert it.explain_model(pipe.model)[0].backend == "REFERENCE"
    assert pipe.model.dtype is torch.float32
    (out,) = pipe("hello", max_new_tokens=4, do_sample=False)
    assert out["generated_text"].startswith("hello")


def test_enabling_twice_and_undoing():
    pytest.importorskip("compressed_tensors")
    registry = tf.quantizers.auto.AUTO_QUANTIZER_MAPPING
    stock = registry["compressed-tensors"]
    it.disable_compressed_tensors()  # nothing to undo
    it.enable_compressed_tensors()
    it.enable_compressed_tensors("reference")
    assert registry["compressed-tensors"].stock is stock
    assert issubclass(registry["compressed-tensors"], stock)
    with pytest.raises(ConfigError, match="marlin"):
        it.enable_compressed_tensors("marlin")
    it.disable_compressed_tensors()
    assert registry["compressed-tensors"] is stock


@pytest.mark.parametrize(("kind", "ignore"), [("llama", ["lm_head"]), ("qwen3_moe", ["lm_head", "re:.*mlp.*"])])
def test_other_checkpoints_stay_with_transformers(kind, ignore, enabled, tmp_path, caplog):
    """A dense W8A8 model, and a MoE whose experts the recipe left in float: what comes out is what came out before."""
    make_model(kind, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [n for n in tensors if n.endswith("_proj.weight") and ".experts." not in n]:
        tensors[name], scale = quantize_weight(tensors[name])
        tensors[f"{name}_scale"] = scale.unsqueeze(-1).bfloat16()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = QUANTIZATION | {"ignore": ignore}
    (tmp_path / "config.json").write_text(json.dumps(config))

    def outcome():
        try:
            model = tf.AutoModelForCausalLM.from_pretrained(tmp_path)
        except RuntimeError as error:  # Transformers to 5.24 cannot load experts beside int8 layers,
            return str(error)
        assert not isinstance(model.hf_quantizer, it.Int8MoeQuantizer)
        return logits(model).tolist() if kind == "llama" else None  # and 5.16 leaves them random

    with caplog.at_level("INFO", "int8moe"):
        got = outcome()
    assert "Left to Transformers' own" in caplog.text
    it.disable_compressed_tensors()
    assert got == outcome()
    assert kind != "llama" or isinstance(got, list)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("end", ["weight", "weight_scale"])
def test_half_an_expert_is_an_error_in_both_ways_in(kind, end, enabled, tmp_path):
    gone = E3 if kind == "qwen3_moe" else "model.layers.1.block_sparse_moe.experts.3.up_proj"
    folder = edit(kind, tmp_path / "m", lambda t: {k: v for k, v in t.items() if k != f"{gone}.{end}"})
    for read in (lambda: it.load(folder, "reference"), lambda: tf.AutoModelForCausalLM.from_pretrained(folder)):
        with pytest.raises(CheckpointError, match="missing in the checkpoint"):
            read()


def test_a_layer_without_experts_is_an_error_in_both_ways_in(enabled, tmp_path):
    folder = edit(
        "mixtral", tmp_path / "m", lambda t: {k: v for k, v in t.items() if "layers.0.block_sparse_moe.e" not in k}
    )
    for read in (lambda: it.load(folder, "reference"), lambda: tf.AutoModelForCausalLM.from_pretrained(folder)):
        with pytest.raises(CheckpointError, match="missing in the checkpoint"):
            read()


def test_an_expert_of_another_shape_is_an_error_in_both_ways_in(enabled, tmp_path):
    """The whole expert is short, so it fits itself; only the model knows better. Transformers has its own words."""
    short = lambda t: {k: v[:20].clone() if k.startswith(E3) else v for k, v in t.items()}
    folder = edit("qwen3_moe", tmp_path / "m", short)
    with pytest.raises(ValueError, match=r"(\(20, 32\)|\(20, 1\)), needs"):
        it.load(folder, "reference")
    with pytest.raises((ValueError, RuntimeError)):
        tf.AutoModelForCausalLM.from_pretrained(folder)


def test_enabled_refuses_int8_experts_it_cannot_read(enabled, tmp_path):
    def static(q):
        q["config_groups"]["group_0"]["input_activations"].update(dynamic=False, strategy="tensor")

    folder = edit("mixtral", tmp_path / "m", quantization=static)
    with pytest.raises(CheckpointError, match=r"input_activations\.dynamic is False"):
        tf.AutoModelForCausalLM.from_pretrained(folder)


# -- forms of the same thing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_scales_of_any_float_dtype(dtype, tmp_path):
    recast = lambda t: {k: v.to(dtype) if k.endswith("_scale") else v for k, v in t.items()}
    folder = edit("qwen3_moe", tmp_path / "m", recast)
    got, want = logits(it.load(folder, "reference")), logits(it.load(FIXTURES / "qwen3_moe", "reference"))
    same = dtype is torch.float32  # float16 has fewer exponents: small scales move a little
    assert torch.equal(got, want) if same else distance(got, want) < 0.01


@pytest.mark.parametrize("shape", [(1,), (1, 1), ()])
def test_strategy_tensor(shape, tmp_path):
    def coarse(t):
        return {
            k: v[:1].reshape(shape).clone() if k.endswith("_scale") and ".experts." in k else v for k, v in t.items()
        }

    def strategy(q):
        q["config_groups"]["group_0"]["weights"]["strategy"] = "tensor"

    model = it.load(edit("qwen3_moe", tmp_path / "m", coarse, strategy), "reference")
    scale = model.model.layers[0].mlp.experts.state_dict()["down_proj_scale"]
    assert (scale == scale[:, :1]).all() and scale.dtype is torch.float32


@pytest.mark.parametrize("place", ["text", "compression", "old"])
def test_the_configuration_may_stand_elsewhere(place, tmp_path):
    folder = edit("qwen3_moe", tmp_path / "m")
    config = tf.AutoConfig.from_pretrained(folder)
    quantization = config.quantization_config
    del config.quantization_config
    if place == "text":  # of a composite model
        text, config = config, tf.PretrainedConfig()
        text.quantization_config = quantization
        config.get_text_config = lambda *a, **k: text
    elif place == "compression":
        config.compression_config = quantization
    else:
        inner = {k: v for k, v in quantization.items() if k not in ("quant_method", "sparsity_config")}
        config.compression_config = {"quantization_config": inner, "sparsity_config": {"format": "dense"}}
    assert read_scheme(quantization_of(config), "here", read_tensors([folder / "model.safetensors"])) == "w8a8"
    if place != "text":
        (folder / "config.json").write_text(config.to_json_string())
        assert it.is_int8_checkpoint(folder)
        assert torch.equal(logits(it.load(folder, "reference")), logits(it.load(FIXTURES / "qwen3_moe", "reference")))


GROUP = QUANTIZATION["config_groups"]["group_0"]
FOUR_BITS = {
    "targets": ["Linear"],
    "format": "pack-quantized",
    "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
    "input_activations": None,
}


@pytest.fixture(scope="module")
def tensors():
    return read_tensors([FIXTURES / "qwen3_moe" / "model.safetensors"])


def config(groups: dict, **fields):
    """A quantization_config of the groups given; `targets` may be given alone for the int8 group."""
    groups = {n: {**copy.deepcopy(GROUP), "targets": g} if isinstance(g, list) else g for n, g in groups.items()}
    return {**QUANTIZATION, "config_groups": groups, **fields}


@pytest.mark.parametrize(
    "quantization",
    [
        config({"a": ["Linear"]}),
        config({"a": ["re:.*"]}, ignore=["re:.*mlp.gate$", "lm_head"]),
        config({"a": [r"re:.*experts\.\d+\.(gate|up|down)_proj$"]}),
        config({"a": ["re:.*experts.*"], "b": {**GROUP, "input_activations": None, "targets": ["Linear"]}}),
        config({"b": {**FOUR_BITS, "targets": ["re:.*never.*"]}, "a": ["Linear"]}),
        config({"b": {**FOUR_BITS, "targets": ["Linear"]}, "a": ["re:.*proj$"]}),  # an expression goes before a class
        config({"W8A8": []}) | {"config_groups": {"W8A8": ["Linear"]}},
        config({"a": {**GROUP, "format": None}}, format="int-quantized"),
        config({"a": {**GROUP, "format": "int-quantized"}}, format="mixed-precision"),
        config(
            {
                "a": {
                    "targets": ["Linear"],
                    "weights": {"group_size": -1},
                    "input_activations": GROUP["input_activations"],
                }
            }
        ),
        config({"a": ["Linear"]}, sparsity_config={"format": "dense"}, transform_config={"config_groups": {}}),
        config({"a": {**GROUP, "weights": GROUP["weights"] | {"actorder": "static", "type": "INT"}}}),
    ],
)
def test_accepted_configurations(quantization, tensors):
    assert read_scheme(quantization, "here", tensors) == "w8a8"
    assert has_int8_experts(quantization, tensors)


def test_exact_names_and_weight_only(tensors):
    layers = sorted(n.removesuffix(".weight_scale") for n in tensors if n.endswith("_scale"))
    experts = [n for n in layers if ".experts." in n]
    assert read_scheme(config({"a": experts}), "here", tensors) == "w8a8"
    weight_only = {**GROUP, "input_activations": None, "targets": experts}
    assert read_scheme(config({"b": ["Linear"], "a": weight_only}), "here", tensors) == "w8a16"


def test_recipes_written_for_module_names_fit_mixtral():
    """In the file `block_sparse_moe`, in the model `mlp`; either spelling of a target or an ignored layer counts."""
    tensors = read_tensors([FIXTURES / "mixtral" / "model.safetensors"])
    for target in ("re:.*mlp.experts.*", "re:.*block_sparse_moe.experts.*"):
        assert read_scheme(config({"a": [target]}), "here", tensors) == "w8a8"
        with pytest.raises(CheckpointError, match="24 of 24 layers of experts are in `ignore`"):
            read_scheme(config({"a": ["Linear"]}, ignore=[target]), "here", tensors)


def weights(**changes):
    return config({"a": {**GROUP, "weights": GROUP["weights"] | changes}})


def activations(**changes):
    return config({"a": {**GROUP, "input_activations": GROUP["input_activations"] | changes}})


@pytest.mark.parametrize(
    ("quantization", "match"),
    [
        (activations(dynamic=False), r"a\.input_activations\.dynamic is False, needs True \(each token"),
        (activations(dynamic=False, strategy="tensor"), r"input_activations\.dynamic is False"),
        (activations(strategy="tensor"), r"input_activations\.strategy is 'tensor', needs 'token'"),
        (activations(symmetric=False), r"input_activations\.symmetric is False"),
        (activations(num_bits=4), r"input_activations\.num_bits is 4"),
        (weights(symmetric=False), r"weights\.symmetric is False, needs True \(zero points"),
        (weights(strategy="group", group_size=128), r"weights\.strategy is 'group', needs 'channel' or 'tensor'"),
        (weights(strategy="block", block_structure=[128, 128]), r"weights\.strategy is 'block'"),
        (weights(actorder="group"), r"weights\.actorder is 'group'"),
        (weights(num_bits=4), r"weights\.num_bits is 4, needs 8"),
        (weights(type="float"), r"weights\.type is 'float', needs 'int'"),
        (config({"a": {**GROUP, "output_activations": GROUP["input_activations"]}}), "output_activations"),
        (config({"a": FOUR_BITS}), "a has format 'pack-quantized', needs 'int-quantized'"),
        (config({"a": ["Linear"]}, kv_cache_scheme={"num_bits": 8}), r"kv_cache_scheme .*KV cache stays"),
        (config({"a": ["Linear"]}, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config .*sparse"),
        (config({"a": ["Linear"]}, transform_config={"config_groups": {"R1": {}}}), "transform_config .*rotations"),
        (config({"a": ["Linear"]}, ignore=["re:.*experts.*"]), r"48 of 48 layers of experts are in `ignore`.*float"),
        (config({"a": ["Linear"]}, ignore=["re:.*layers.0.mlp.*"]), r"24 of 48 .*model\.layers\.0\.mlp\.experts"),
        (config({"a": ["Linear"]}, ignore=[E3]), rf"1 of 48 .*: {re.escape(E3)}\."),
        (config({"a": ["re:.*self_attn.*"]}), "48 of 48 layers of experts are no target"),
        (config({"a": ["re:.*experts.*"], "b": FOUR_BITS}), r"b has format 'pack-quantized'.*Dense layers .*self_attn"),
        (config({"a": ["re:.*up_proj"], "b": {**GROUP, "input_activations": None}}), "mixes w8a16 and w8a8"),
        (config({"a": "W8A8"}), "a is 'W8A8', needs an object"),
        (config({"a": ["Linear"]}) | {"config_groups": {"W4A16": ["Linear"]}}, "or a list under the name of: W8A8"),
        (config({}), "no config_groups"),
        (config({"a": ["re:*proj"]}), r"'\*proj' in a quantization_config is no expression"),
        ({"quant_method": "gptq"}, "quantised with 'gptq'"),
    ],
)  # fmt: skip
def test_refused_configurations(quantization, match, tensors):
    with pytest.raises(CheckpointError, match=match):
        read_scheme(quantization, "here", tensors)


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({f"{E3}.weight_zero_point": ("I8", (24, 1))}, f"{E3}.weight_zero_point .*asymmetric"),
        ({"model.layers.0.self_attn.q_proj.weight_zero_point": ("I8", (32, 1))}, "q_proj.weight_zero_point"),
        ({f"{E3}.weight_g_idx": ("I32", (32,))}, "another order"),
        ({f"{E3}.weight_scale": ("BF16", (12, 2))}, rf"{E3}.weight_scale has shape \(12, 2\).*\(24, 1\).*repack_moe"),
        (
            {
                "model.layers.0.mlp.experts.gate_up_proj": ("I8", (8, 48, 32)),
                "model.layers.0.mlp.experts.gate_up_proj_scale": ("BF16", (8, 24, 2)),
            },
            r"gate_up_proj_scale has shape \(8, 24, 2\) .*needs \(8, 48, 1\).*repack_moe",
        ),
    ],
)
def test_refused_tensors(more, match, tensors):
    with pytest.raises(CheckpointError, match=match):
        read_scheme(QUANTIZATION, "here", tensors | more)


def test_experts_left_in_float_are_named_and_can_be_skipped(tmp_path):
    """`ignore` of one layer's experts, with float tensors in the file as compressed-tensors says."""

    def floats(t):
        first = [k for k in t if "layers.0.mlp.experts" in k and k.endswith(".weight")]
        return {k: v for k, v in t.items() if not (k.endswith("_scale") and k.removesuffix("_scale") in first)} | {
            k: (t[k].float() * t[f"{k}_scale"].float()).bfloat16() for k in first
        }

    ignore = lambda q: q | {"ignore": [*q["ignore"], r"re:model\.layers\.0\.mlp\.experts\..*"]}
    folder = edit("qwen3_moe", tmp_path / "m", floats, ignore)
    with pytest.raises(CheckpointError, match=r"24 of 48 layers of experts are in `ignore`.*modules_to_not_convert"):
        it.load(folder, "reference")
    model = it.load(folder, "reference", modules_to_not_convert=[r"model\.layers\.0"])
    assert it.explain_model(model)[0].layers == ("model.layers.1.mlp.experts",)
    assert math.isfinite(float(logits(model).sum()))
    with pytest.raises(CheckpointError, match=r"INT8 in the file, so model\.layers\.0.* cannot be left"):
        it.load(FIXTURES / "qwen3_moe", "reference", modules_to_not_convert=[r"model\.layers\.0"])


def test_layers_that_the_model_skips_do_not_count(tmp_path, enabled):
    """Multi-token prediction stands behind the last layer, and recipes leave it in float."""
    more = {f"{E3}.weight".replace("layers.1", "layers.2"): torch.zeros(24, 32, dtype=torch.bfloat16)}
    ignore = lambda q: q | {"ignore": [*q["ignore"], r"re:model\.layers\.2\..*"]}
    folder = edit("qwen3_moe", tmp_path / "m", lambda t: t | more, ignore)
    want = logits(it.load(FIXTURES / "qwen3_moe", "reference"))
    assert torch.equal(logits(it.load(folder, "reference")), want)
    assert torch.equal(logits(tf.AutoModelForCausalLM.from_pretrained(folder)), want)
