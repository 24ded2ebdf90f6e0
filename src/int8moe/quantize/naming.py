"""Which tensors of a checkpoint are routed experts, shared experts or other Linears. Names and shapes; opens nothing.

Experts stored one matrix each are known by their place, `...experts.<number>.<leaf>.weight`, whatever the leaf is
called. Experts stored stacked are not known by name: `quantize.fused` asks the model's class about them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

ROLES = {
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down",
    "fc1": "gate", "fc3": "up", "fc2": "down",
}  # fmt: skip
"""What the leaves of an expert do, as families spell them; another spelling is its own role."""

TARGETS = ("experts", "experts+shared", "all-linear")

_PER_EXPERT = re.compile(r"^(?P<module>(?:.*\.)?experts)\.(?P<expert>\d+)\.(?P<leaf>[^.]+)\.weight$")
_SHARED = re.compile(r"(?:^|\.)(?:shared_experts?|share_expert|shared_mlp)\.")
_HEADS = {"lm_head", "output", "score", "classifier", "head"}
# `weights_proj` and the like make the weights of a sum, as routers do.
_NO_LINEAR = re.compile(r"embed|router|weight|norm|conv|wte$|wpe$|position|relative_attention_bias")
_EMBEDDINGS = {
    "embed_tokens", "wte", "wpe", "word_embeddings", "tok_embeddings", "position_embedding", "position_embeddings"
}  # fmt: skip


@dataclass(frozen=True)
class ExpertTensor:
    """One matrix of one expert.

    Args:
        module: name of the experts module, `...mlp.experts`.
        leaf: the matrix as the family spells it; `role` is "gate", "up", "down", or the leaf where that is unknown.
    """

    module: str
    expert: int
    leaf: str

    @property
    def role(self) -> str:
        return ROLES.get(self.leaf, self.leaf)


def parse(name: str) -> ExpertTensor | None:
    """The expert's matrix that `name` names, or None for any other tensor."""
    found = _PER_EXPERT.match(name)
    return ExpertTensor(found["module"], int(found["expert"]), found["leaf"]) if found else None


def stacked_prefix(name: str) -> str | None:
    """`<P>.experts` of a tensor that holds all experts of a module, or None where its name has no `experts`.

    >>> stacked_prefix("model.layers.0.mlp.experts.gate_up_proj")
    'model.layers.0.mlp.experts'
    """
    parts = name.split(".")
    if "experts" not in parts:
        return None
    last = len(parts) - 1 - parts[::-1].index("experts")
    return ".".join(parts[: last + 1])


def is_target(name: str, shape: tuple[int, ...], targets: str, vocab_size: int | None) -> bool:
    """Whether `targets` wants this matrix, which is no routed expert's, in int8.

    Never: output heads, embeddings, routers and gates, norms, convolutions. What a name leaves in doubt stays.
    """
    if targets == "experts" or len(shape) != 2 or not name.endswith(".weight") or 1 in shape:
        return False
    parts = name.removesuffix(".weight").split(".")
    if _SHARED.search(name):
        return parts[-1] != "gate"
    if targets == "experts+shared" or shape[0] == vocab_size:
        return False
    if parts[-1] in _HEADS or "gate" in parts or parts[-1].endswith("_gate"):
        return False
    return not any(_NO_LINEAR.search(part) for part in parts)


def is_linear(name: str, shape: tuple[int, ...]) -> bool:
    """A matrix that a loader takes for a Linear's, unless it is told to ignore it. Token embeddings are none."""
    return len(shape) == 2 and name.endswith(".weight") and name.split(".")[-2:][0] not in _EMBEDDINGS
