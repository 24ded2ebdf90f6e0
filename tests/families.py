"""Tiny random models of the MoE families of Transformers: their configurations, as data, and `make_model`.

Every entry builds the family's real class: two layers, hidden size 32, a few experts of width 16 or 24.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers as tf

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
}


@dataclass(frozen=True)
class Family:
    """One MoE family.

    Args:
        changes: configuration fields; they go over `SIZES`, into `text_config` where `vision` is given.
        auto: the class of Transformers that builds the model.
        model_type: as Transformers names it; empty: the family's name in `FAMILIES`.
        vision: the vision tower's fields of a model of images and text, whose experts are in its text model.
        top: fields of such a model beside `text_config` and `vision_config`.
        sizes: False where `SIZES` does not apply.
        refusal: what the message of `load` says, where INT8 experts cannot replace this family's.
        staged: the model's own code runs between or after the GEMMs, so no backend but "auto" and "reference" takes it.
        since: the first Transformers that these fields were seen to work with; empty: the first that has the family.
        generates: False for a model that does not write text.
        why: a note about the entry.
    """

    changes: dict[str, Any]
    auto: str = "AutoModelForCausalLM"
    model_type: str = ""
    vision: dict[str, Any] | None = None
    top: dict[str, Any] = field(default_factory=dict)
    sizes: bool = True
    refusal: str | None = None
    staged: bool = False
    since: tuple[int, ...] = ()
    generates: bool = True
    why: str = ""

    @property
    def model_class(self) -> Any:
        return getattr(tf, self.auto)


def _mla(**more: Any) -> dict[str, Any]:
    """Multi-head latent attention: low-rank queries, keys and values."""
    return {
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8, **more,
    }  # fmt: skip


_IMAGES = "AutoModelForImageTextToText"
_SPARSE = {"mlp_layer_types": ["dense", "sparse"]}
_FULL = {"layer_types": ["full_attention", "full_attention"]}
_TOPK = {"num_experts_per_tok": 2}
_ROUTED = {"n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 24, "intermediate_size": 48, **_TOPK}
_EXPERTS = {"num_experts": 8, "moe_intermediate_size": 24, "intermediate_size": 48, **_TOPK}
_LOCAL = {"num_local_experts": 4, "intermediate_size": 24, **_TOPK}
_GROUPS = {"n_group": 2, "topk_group": 1}
_INDEX = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 2}
_SHARED = {"shared_expert_intermediate_size": 24}
_DELTA = {
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_KIMI = {
    "linear_head_dim": 8, "linear_num_heads": 4, "num_experts": 8, "num_experts_per_token": 2,
    "moe_intermediate_size": 24, "intermediate_size": 48, "q_lora_rank": None, "rope_theta": 10000.0,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_QWEN_TOWER = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32,
    "num_position_embeddings": 16,
}  # fmt: skip
_GLM_TOWER = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32, "image_size": 28,
}  # fmt: skip
_TOWER = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
_INKLING = {
    "num_experts_per_tok": 2, "n_routed_experts": 8, "moe_intermediate_size": 24, "head_dim": 8,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "d_rel": 4, "rel_extent": 16,
    "sliding_window_size": 16, "unpadded_vocab_size": 320, "layer_types": ["hybrid_sliding", "hybrid"],
}  # fmt: skip

FAMILIES: dict[str, Family] = {
    "afmoe": Family(_EXPERTS | {"num_dense_layers": 1, "head_dim": 8, "num_shared_experts": 1}),
    "aria": Family(
        {"moe_num_experts": 4, "moe_topk": 2, "intermediate_size": 24, "moe_num_shared_experts": 1, "head_dim": 8},
        _IMAGES, vision={**_TOWER, "model_type": "idefics3_vision"}, top={"projector_patch_to_query_dict": {"4": 2}},
        since=(5, 22),
    ),
    "aria_text": Family(
        {"moe_num_experts": 4, "moe_topk": 2, "intermediate_size": 24, "moe_num_shared_experts": 1, "head_dim": 8},
        since=(5, 19), why="without the decorator's flags before",
    ),
    "axk1": Family(_mla(**_ROUTED, **_GROUPS, **_SPARSE)),
    "axk2": Family(_mla(**_ROUTED, **_SPARSE, **_INDEX, gated_norm_rank=4)),
    "bailing_hybrid": Family(
        _mla(**_KIMI, num_expert_group=2, topk_group=1, first_k_dense_replace=1, **_SPARSE)
        | {"q_lora_rank": None},
    ),
    "beam": Family(_EXPERTS | _GROUPS | _SPARSE | _FULL | {"head_dim": 8}),
    "cohere2_moe": Family({"num_experts": 8, "intermediate_size": 24, "head_dim": 8, **_TOPK}),
    "dbrx": Family(
        {
            "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128, "vocab_size": 320, "pad_token_id": 1,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
            "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
        },
        sizes=False, refusal="DbrxExpertGLU keeps all experts",
        why="flat [E*I, H] matrices, outside of the common experts interface",
    ),
    "deepseek_v2": Family(_mla(**_ROUTED, first_k_dense_replace=1)),
    "deepseek_v3": Family(_mla(**_ROUTED, **_GROUPS, first_k_dense_replace=1)),
    "deepseek_v32": Family(_mla(**_ROUTED, **_GROUPS, **_SPARSE, **_INDEX)),
    "deepseek_v4": Family({
        "moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 1,
        "head_dim": 16, "q_lora_rank": 16, "o_lora_rank": 16, "o_groups": 2, "qk_rope_head_dim": 8,
        "partial_rotary_factor": 0.5, "hc_mult": 2,
        "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8,
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
        "mlp_layer_types": ["hash_moe", "moe"],
    }, since=(5, 22), why="before, Transformers cannot run its own bf16 model once it is loaded"),
    "dots1": Family(_ROUTED | {"first_k_dense_replace": 1, **_FULL}),
    "dots3_note_text": Family(_mla(
        **_ROUTED, **_SPARSE, **_INDEX, head_dim=16, shared_experts_intermediate_size=24, sliding_window=16,
        layer_types=["indexed_attention", "sliding_attention"], swa_num_attention_heads=4, swa_num_key_value_heads=4,
        swa_q_lora_rank=16, swa_kv_lora_rank=16, swa_head_dim=16, swa_qk_nope_head_dim=8, swa_v_head_dim=8,
    )),
    "ernie4_5_moe": Family({
        "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 24, "intermediate_size": 48,
        "moe_num_shared_experts": 1, "moe_layer_start_index": 1, "moe_layer_end_index": 1,
    }),
    "ernie4_5_vl_moe": Family(
        {
            "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": [24, 16], "intermediate_size": 48,
            "moe_num_shared_experts": 1, **_SPARSE,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
        },
        _IMAGES, vision={**_TOWER, "depth": 1, "num_heads": 2},
        why="two sets of experts, for text and for images, numbered through on disk and of two widths",
    ),
    "exaone_moe": Family(_EXPERTS | _SPARSE | _FULL | {"num_shared_experts": 1, "sliding_window_pattern": None}),
    "flex_olmo": Family({"num_experts": 8, "intermediate_size": 24, **_TOPK}),
    "flint": Family(_EXPERTS | _SHARED | _FULL | {"mlp_only_layers": [0], "head_dim": 8}),
    "gemma4": Family(
        {
            "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 24, "intermediate_size": 48,
            "enable_moe_block": True, "head_dim": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 0,
            "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16,
        },
        _IMAGES, vision={
            "model_type": "gemma4_vision", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 16,
        },
    ),
    "gemma4_text": Family({
        "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 24, "intermediate_size": 48,
        "enable_moe_block": True, "head_dim": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16,
    }),
    "glm4_moe": Family(_ROUTED | {"first_k_dense_replace": 1, "head_dim": 8}),
    "glm4_moe_lite": Family(_mla(**_ROUTED, **_SPARSE)),
    "glm4v_moe": Family(
        _ROUTED | {
            "first_k_dense_replace": 1, "head_dim": 8,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2], "partial_rotary_factor": 1.0,
            },
        },
        _IMAGES, vision=_GLM_TOWER,
    ),
    "glm5_next": Family(
        _mla(**_ROUTED, **_SPARSE, **_INDEX) | {
            "qk_rope_head_dim": 0, "linear_head_dim": 8, "linear_num_heads": 4, "hc_mult": 2, "swiglu_limit": 1.0,
            "layer_types": ["linear_attention", "indexed_attention"], "indexer_types": ["full", "full"],
            "index_kpool": 2,
        },
        _IMAGES, vision={**_GLM_TOWER, "projection_intermediate_size": 32}, since=(5, 24),
        why="before, a bf16 model that was made and one that was loaded keep other parameters in float32",
    ),
    "glm_moe_dsa": Family(_mla(**_ROUTED, **_SPARSE, **_INDEX)),
    "gpt_oss": Family(_LOCAL | {"head_dim": 8}),
    "granitemoe": Family(_LOCAL),
    "granitemoe_swa": Family(_LOCAL | {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 16}),
    "granitemoehybrid": Family(_LOCAL | {
        "shared_intermediate_size": 24, "layer_types": ["linear_attention", "full_attention"], "mamba_n_heads": 4,
        "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16,
    }),
    "granitemoeshared": Family(_LOCAL | {"shared_intermediate_size": 24}),
    "hunyuan_v1_moe": Family({"num_experts": 8, "moe_topk": 2, "intermediate_size": 24, "head_dim": 8}),
    "hy_v3": Family(_EXPERTS | _SPARSE | {"head_dim": 8, "num_shared_experts": 1}),
    "hy_v4": Family(
        _mla(**_ROUTED, **_SPARSE, **_INDEX, head_dim=8, hc_mult=2, swiglu_limit=1.0),
        since=(5, 22), why="in 5.19 Transformers renames every gate_proj when it saves",
    ),
    "inkling_text": Family(_INKLING | {"mlp_layer_types": ["dense", "sparse"], "intermediate_size": 48}),
    "inkling2_text": Family(
        _INKLING, staged=True, since=(5, 24), why="softcapped gate and up; in 5.23 its own bf16 router cannot run",
    ),
    "inkling2_loop_text": Family(_INKLING | {
        "num_hidden_layers": 3, "layer_types": ["hybrid_sliding", "hybrid_sliding", "hybrid"],
        "loop_layer_index_start": 1, "loop_layer_index_end": 2, "loop_num_passes": 2, "loop_gate_rank": 4,
        "n_layers_per_attn_res_block": 1,
    }, staged=True),
    "jamba": Family({
        "num_experts": 4, "intermediate_size": 24, "expert_layer_period": 2, "expert_layer_offset": 1,
        "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4,
        **_TOPK,
    }),
    "jetmoe": Family(
        {"num_local_experts": 4, "intermediate_size": 24, "kv_channels": 8, "num_key_value_heads": 2, **_TOPK},
        refusal="JetMoeParallelExperts are single products", why="its own ParallelExperts, also in the attention",
    ),
    "kimi_linear": Family(_mla(**_KIMI, **_SPARSE) | {"q_lora_rank": None}),
    "kolibri1": Family({
        "num_local_experts": 8, "moe_intermediate_size": 24, "head_dim": 8, **_TOPK, **_SHARED, **_FULL,
    }),
    "laguna": Family(_EXPERTS | _SHARED | _SPARSE | _FULL | {
        "head_dim": 8, "num_attention_heads_per_layer": [4, 4],
    }),
    "lara_mini": Family({"num_experts": 8, "moe_intermediate_size": 24, **_TOPK, **_SHARED, **_DELTA}),
    "lfm2_moe": Family(_EXPERTS | {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"]}),
    "llama4_text": Family(
        {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size": 24, "intermediate_size_mlp": 48,
         "head_dim": 8},
        why="rows arrive sorted by expert, outside of the common experts interface",
    ),
    "longcat_flash": Family(
        _mla(num_layers=1, head_dim=8, ffn_hidden_size=48, moe_topk=2, n_routed_experts=8, zero_expert_num=2,
             expert_ffn_hidden_size=24),
        refusal="LongcatFlashExperts has identity experts", why="identity experts beyond the stacked ones",
    ),
    "mellum": Family(_LOCAL | {
        "num_local_experts": 8, "moe_intermediate_size": 24, "intermediate_size": 48, "head_dim": 8,
        "mlp_layer_types": ["sparse", "sparse"], **_FULL,
    }),
    "mimo_v2_flash": Family(_ROUTED | _SPARSE | {
        "head_dim": 8, "v_head_dim": 8, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 16,
    }),
    "minimax": Family(_LOCAL | {
        "layer_types": ["linear_attention", "full_attention"], "head_dim": 8, "block_size": 16,
    }),
    "minimax_m2": Family(_LOCAL | {"head_dim": 8}),
    "minimax_m3_vl_text": Family(_LOCAL | _SPARSE | _FULL | {
        "head_dim": 8, "dense_intermediate_size": 48, "shared_intermediate_size": 24, "rotary_dim": 4,
        "swiglu_limit": 1.0, "index_head_dim": 8, "index_n_heads": 2,
    }),
    "mistral4": Family(_mla(**_ROUTED, first_k_dense_replace=1), _IMAGES),
    "mistral_large4": Family(
        _mla(**_ROUTED, **_SPARSE, **_INDEX), _IMAGES, vision={**_TOWER, "model_type": "pixtral", "head_dim": 16},
    ),
    "mixtral": Family(_LOCAL),
    "muse_spark": Family(
        _LOCAL | {
            "moe_intermediate_size": 24, "moe_hidden_size": 16, "head_dim": 8, "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"], "layer_rope_theta": [10000.0, 0.0],
            "mlp_layer_types": ["sparse", "sparse"],
        },
        _IMAGES, vision={
            "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
            "pos_emb_height": 4, "pos_emb_width": 4, "layer_types": ["window_attention"],
        },
        top={
            "audio_config": {"hidden_sizes": [8, 8, 8], "depths": [1, 1, 1], "num_hidden_layers": 3,
                             "patch_sizes": [16, 6, 5],
                             "out_hidden_size": 32},
            "out_hidden_size": 32, "projector_hidden_size": 32,
        },
        staged=True, why="a norm between an expert's output and its routing weight",
    ),
    "nemotron_h": Family({
        "n_routed_experts": 4, "moe_intermediate_size": 24, "intermediate_size": 24, "head_dim": 8,
        "moe_shared_expert_intermediate_size": 24, "layers_block_type": ["moe", "attention"], **_TOPK,
    }),
    "olmoe": Family({"intermediate_size": 24, "num_experts": 8, **_TOPK}),
    "openai_privacy_filter": Family(
        _LOCAL | {"head_dim": 8, "sliding_window": 16}, "AutoModelForTokenClassification", generates=False,
    ),
    "phimoe": Family(_LOCAL),
    "qwen2_moe": Family(_EXPERTS | _SHARED),
    "qwen3_5_moe": Family(
        {"num_experts": 8, "moe_intermediate_size": 24, **_TOPK, **_SHARED, **_DELTA, "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5,
        }},
        _IMAGES, vision=_QWEN_TOWER,
    ),
    "qwen3_5_moe_text": Family({"num_experts": 8, "moe_intermediate_size": 24, **_TOPK, **_SHARED, **_DELTA}),
    "qwen3_moe": Family(_EXPERTS),
    "qwen3_next": Family(_EXPERTS | _SHARED | _DELTA),
    "qwen3_omni_moe_thinker": Family(
        _EXPERTS | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}},
        _IMAGES,
        vision={**_QWEN_TOWER, "deepstack_visual_indexes": [0]},
        top={"vision_start_token_id": 318, "audio_config": {
            "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "d_model": 32, "output_dim": 32,
            "downsample_hidden_size": 8, "num_mel_bins": 16,
        }},
    ),
    "qwen3_vl_moe": Family(
        _EXPERTS | {
            "head_dim": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
        },
        _IMAGES, vision={**_QWEN_TOWER, "deepstack_visual_indexes": [0]},
    ),
    "qwen4_exp_text": Family({
        "num_experts": 8, "moe_intermediate_size": 24, **_TOPK, **_SHARED, **_DELTA, "hc_count": 2, "hc_lowrank": 4,
        "layer_types": ["linear_attention", "indexed_attention"], "indexer_n_heads": 2, "indexer_kv_heads": 1,
        "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 4,
    }, since=(5, 19)),
    "solar_open": Family(_ROUTED | {"head_dim": 8}),
    "step3p7": Family(
        _ROUTED | _SPARSE | {
            "share_expert_dim": 24, "head_dim": 8, "layer_types": ["full_attention", "full_attention"],
            "swiglu_limits": [0.0, 1.0], "swiglu_limits_shared": [0.0, 1.0], "num_sliding_attention_heads": 4,
            "sliding_window": 16,
            "query_pre_attn_scalar": 8,
        },
        _IMAGES, vision=_TOWER, staged=True, why="clamps after the activation, outside of the common interface",
    ),
    "zaya": Family({
        "num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8, "router_hidden_size": 16,
        "num_experts_per_tok": 1,
    }),
}  # fmt: skip
DENSE = {"llama": Family({"intermediate_size": 48}, refusal="dense model")}

# Families of Transformers 5.24 that are left out, with the reason.
LEFT_OUT = {
    "deepseek_ocr2": "the experts of deepseek_v2 behind a SAM tower and a Qwen2 encoder, which need sizes of their own",
    "diffusion_gemma": "the experts of gemma4; writes blocks by diffusion, so its call has no logits of a plain prompt",
    "hy_v4_vl": "the experts of hy_v4",
    "nllb_moe": "a dictionary of experts that are modules; encoder and decoder",
    "qwen3_omni_moe": "its thinker is here; the talker has the experts of qwen2_moe and takes the thinker's states",
    "switch_transformers": "as nllb_moe",
    "unlimited_ocr": "as deepseek_ocr2",
}


def make_config(kind: str, **changes: Any) -> Any:
    """The tiny configuration of a family; `changes` go where the family's own do."""
    family = (FAMILIES | DENSE)[kind]
    text = (SIZES if family.sizes else {}) | family.changes | changes
    if family.vision is not None:
        tokens = {k: text[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if k in text}
        text = {"text_config": text, "vision_config": dict(family.vision), **tokens, **family.top}
    return tf.AutoConfig.for_model(family.model_type or kind, **text)


def make_model(kind: str, path: Path | str, dtype: torch.dtype = torch.bfloat16, seed: int = 0, **changes: Any) -> Any:
    """Save a random model of `kind` at `path` and return it. Weights are large enough that INT8 shows."""
    config = make_config(kind, **changes)
    torch.manual_seed(seed)
    model = (FAMILIES | DENSE)[kind].model_class.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.2)
        for name, bias in [*model.named_parameters(), *model.named_buffers()]:  # zero in a new model, so without effect
            if name.endswith(("correction_bias", "expert_bias")):
                bias.normal_(0.0, 0.1)
    model.eval()
    model.save_pretrained(path)
    return model
