"""Expert layers and shapes as Transformers' configurations describe them."""

from __future__ import annotations

import pytest

from int8moe.config import MoEActivation
from int8moe.model_config import expert_groups, parse_model_experts

BASE = {"num_experts": 4, "num_experts_per_tok": 2, "hidden_size": 8, "moe_intermediate_size": 6}


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({"num_hidden_layers": 10}, 10),
        ({"num_hidden_layers": 10, "first_k_dense_replace": 3}, 7),
        ({"num_hidden_layers": 10, "num_dense_layers": 3}, 7),
        ({"num_hidden_layers": 10, "mlp_only_layers": [0, 4]}, 8),
        ({"num_hidden_layers": 10, "decoder_sparse_step": 2}, 5),
        ({"num_hidden_layers": 10, "expert_layer_period": 2, "expert_layer_offset": 1}, 5),
        ({"num_hidden_layers": 10, "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1}, 9),
        ({"num_hidden_layers": 10, "moe_layers": [1, 3]}, 2),
        ({"num_hidden_layers": 4, "hybrid_override_pattern": "MEM*E"}, 2),
        ({"layers_block_type": ["moe", "attention", "moe"]}, 2),
        ({"num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "sparse"]}, 2),
    ],
)
def test_layers_with_experts(fields: dict, layers: int) -> None:
    assert parse_model_experts({**BASE, **fields}).num_layers == layers


def test_nested_text_config_and_families() -> None:
    nested = parse_model_experts(
        {"model_type": "x_vl", "text_config": {**BASE, "num_hidden_layers": 2, "model_type": "x"}}
    )
    assert (nested.model_type, nested.num_experts, nested.intermediate_size) == ("x", 4, 6)
    oss = parse_model_experts(
        {
            "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "hidden_size": 8,
            "intermediate_size": 6, "num_hidden_layers": 2, "swiglu_limit": 7.0, "hidden_act": "silu",
        }
    )  # fmt: skip
    assert oss.activation is MoEActivation.SWIGLUOAI and oss.has_bias and oss.swiglu_limit == 7.0
    nemotron = parse_model_experts(
        {**BASE, "model_type": "nemotron_h", "num_hidden_layers": 2, "mlp_hidden_act": "relu2"}
    )
    assert nemotron.activation is MoEActivation.RELU2 and not nemotron.is_act_and_mul


def test_experts_deeper_inside_and_of_two_kinds() -> None:
    text = {**BASE, "num_hidden_layers": 2, "model_type": "x_text"}
    omni = parse_model_experts({"model_type": "x", "thinker_config": {"audio_config": {}, "text_config": text}})
    assert (omni.model_type, omni.num_experts, omni.num_layers) == ("x_text", 4, 2)
    ernie = {**BASE, "num_hidden_layers": 2, "moe_intermediate_size": [6, 2]}
    assert parse_model_experts(ernie).intermediate_size == 6
    assert expert_groups(ernie) == 2 and expert_groups(BASE) == expert_groups({"text_config": BASE}) == 1


def test_quantised_checkpoints_name_their_scheme() -> None:
    quant = {"format": "int-quantized", "config_groups": {"group_0": {"input_activations": {"num_bits": 8}}}}
    config = {**BASE, "num_hidden_layers": 1}
    assert parse_model_experts({**config, "quantization_config": quant}).scheme == "w8a8"
    quant["config_groups"]["group_0"]["input_activations"] = None
    assert parse_model_experts({**config, "quantization_config": quant}).scheme == "w8a16"
    assert parse_model_experts(config).scheme is None
