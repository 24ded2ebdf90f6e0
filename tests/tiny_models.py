"""Small random models of real Transformers classes, made by the tests, with a byte-level tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers as tf

from families import DENSE, FAMILIES, SIZES, make_model

__all__ = ["EXPERTS", "SIZES", "make_model", "make_tokenizer"]

EXPERTS: dict[str, dict[str, Any]] = {kind: family.changes for kind, family in (FAMILIES | DENSE).items()}


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
