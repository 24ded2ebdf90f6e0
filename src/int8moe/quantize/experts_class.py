"""What an experts class of Transformers says of its parameters, and which ones INT8 experts cannot replace. Imports no
framework."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

FLAGS = ("is_transposed", "is_concatenated", "has_gate", "has_bias")
LEAVES = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}
"""What the matrices of a parameter are called on disk, expert by expert, in the order of their rows."""


_OUTSIDE = {
    "dbrx": "DbrxExpertGLU keeps all experts of a layer in flat matrices w1, v1 and w2 [E * I, H]",
    "jetmoe": "JetMoeParallelExperts are single products, input_linear and output_linear, in the attention too",
    "longcat_flash": "LongcatFlashExperts has identity experts, which have no weights, beside the stacked ones",
}
"""By model_type: the families whose experts INT8 ones cannot replace, with the class and what is in the way. Any other
class is judged by its own flags and parameters."""


def why_outside(model_type: Any) -> str | None:
    """One line that refuses a family by name, or None."""
    reason = _OUTSIDE.get(model_type)
    return reason and (
        f"model_type {model_type!r} cannot have INT8 experts: its {reason}. Needs experts as Transformers' common"
        " interface has them: gate_up_proj (or up_proj) and down_proj, stacked."
    )


@dataclass(frozen=True)
class Flags:
    """What Transformers' decorator says of an experts class.

    Args:
        transposed: parameters are [E, K, N]. concatenated: gate rows over up rows; else they alternate.
        sorted_rows: forward takes only rows, already repeated for and sorted by expert (Llama 4).
    """

    transposed: bool
    concatenated: bool
    gated: bool
    bias: bool
    sorted_rows: bool = False

    @property
    def up(self) -> str:
        """The parameter of the first GEMM."""
        return "gate_up_proj" if self.gated else "up_proj"


def flags_of(module: Any) -> Flags | None:
    """The flags of a module that holds stacked expert weights, or None for any other module.

    They are the decorator's, or those of a class without it whose parameters and forward say the same.
    """
    marked = all(isinstance(getattr(module, flag, None), bool) for flag in FLAGS)
    gated = module.has_gate if marked else True
    up, down = (getattr(module, n, None) for n in ("gate_up_proj" if gated else "up_proj", "down_proj"))
    if any(len(getattr(w, "shape", ())) != 3 for w in (up, down)):
        return None
    if marked:
        return Flags(module.is_transposed, module.is_concatenated, module.has_gate, module.has_bias)
    if len(up) != len(down):  # type: ignore[arg-type]
        return None
    arguments = list(inspect.signature(type(module).forward).parameters)[1:]
    if arguments == ["hidden_states", "top_k_index", "top_k_weights"] and hasattr(module, "_apply_gate"):
        return Flags(False, True, True, False)  # Step-3
    if arguments == ["hidden_states"] and hasattr(module, "act_fn"):
        return Flags(True, True, True, False, sorted_rows=True)  # Llama 4
    return None
