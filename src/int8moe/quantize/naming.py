"""Which tensors of a checkpoint are routed-expert weights. Names and shapes only; opens nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Leaf names of gate, up and down, as families spell them.
_ROLES = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
_PER_EXPERT = re.compile(
    r"^(?P<module>.*\.experts)\.(?P<expert>\d+)\.(?P<leaf>gate_proj|up_proj|down_proj|w1|w2|w3)\.weight$"
)
_FUSED = re.compile(r"^(?P<module>.*\.experts)\.(?P<leaf>gate_up_proj|down_proj)(\.weight)?$")

FUSED_FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
"""model_types whose fused tensors are known to be [E, 2*I, H] (gate rows, then up) and [E, H, I]."""


@dataclass(frozen=True)
class ExpertTensor:
    """One tensor that holds expert weights.

    Args:
        module: name of the experts module, `...mlp.experts`.
        expert: index, or None for a fused tensor that holds all of them.
        role: "gate", "up", "down", or "gate_up" (fused).
    """

    name: str
    module: str
    expert: int | None
    role: str

    def output_names(self, num_experts: int) -> list[list[str]]:
        """Module names of the quantised matrices: for each expert, one (or gate and up of a fused tensor)."""
        if self.expert is not None:
            return [[self.name.removesuffix(".weight")]]
        leaves = ["gate_proj", "up_proj"] if self.role == "gate_up" else ["down_proj"]
        return [[f"{self.module}.{e}.{leaf}" for leaf in leaves] for e in range(num_experts)]


def parse(name: str) -> ExpertTensor | None:
    """The expert tensor that `name` names, or None for any other tensor."""
    if found := _PER_EXPERT.match(name):
        return ExpertTensor(name, found["module"], int(found["expert"]), _ROLES[found["leaf"]])
    if found := _FUSED.match(name):
        role = "gate_up" if found["leaf"] == "gate_up_proj" else "down"
        return ExpertTensor(name, found["module"], None, role)
    return None
