"""Small random models of real Transformers classes, made by the tests, with a byte-level tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as tf

SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"moe_intermediate_size": 24, "intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {
        "intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2, "eos_token_id": 0, "pad_token_id": 1
    },
    "gpt_oss": {"intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "nemotron_h": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 24, "layers_block_type": ["moe", "attention"], "head_dim": 8,
    },
    "deepseek_v4": {"moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {"intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2},
    "llama": {"intermediate_size": 48},
    "llama4_text": {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size": 24, "head_dim": 8},
}  # fmt: skip


def make_model(kind: str, path: Path | str, dtype: torch.dtype = torch.bfloat16, seed: int = 0, **changes: Any) -> Any:
    """Save a random model of `kind` at `path` and return it. Weights are large enough that INT8 shows."""
    config = tf.AutoConfig.for_model(kind, **(SIZES | EXPERTS[kind] | changes))
    torch.manual_seed(seed)
    model = tf.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.2)
    model.eval()
    model.save_pretrained(path)
    return model


def make_tokenizer(path: Path | str) -> Any:
    """Save a byte-level tokenizer of 256 bytes and two special tokens at `path`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<eos>": 0, "<pad>": 1} | {c: i + 2 for i, c in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = tf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.save_pretrained(path)
    return fast
