"""How the stacked experts tensors of a checkpoint lie: asked of the model's class, built without memory.

Shapes do not say whether gate and up rows are interleaved, and a square matrix not whether it is transposed. The
experts class of Transformers says both (`is_concatenated`, `is_transposed`, `has_gate`, `has_bias`), and its
conversion mapping says which checkpoint tensor becomes which parameter, through which operations. Both are read here,
so that no list of families has to be kept. Checkpoints with one matrix an expert do not need this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from int8moe.errors import CheckpointError
from int8moe.quantize.experts_class import LEAVES, Flags, flags_of
from int8moe.quantize.naming import stacked_prefix


@dataclass(frozen=True)
class Fused:
    """One tensor that holds a matrix (or bias) of every expert of a module.

    Args:
        parameter: the model's parameter that it becomes.
        shape: canonical, [E, N, K], or [E, N] of a bias.
        transposed: the tensor is [E, K, N].
        interleaved: its rows are gate 0, up 0, gate 1, ..., against gate rows, then up.
        leaves: gate_proj and up_proj, or the one matrix of each expert that it holds.
        prefix: `<P>.experts` of what it becomes.
    """

    parameter: str
    shape: tuple[int, ...]
    transposed: bool
    interleaved: bool
    leaves: tuple[str, ...]
    prefix: str = ""

    @property
    def bias(self) -> bool:
        return len(self.shape) == 2

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape on disk."""
        return (self.shape[0], self.shape[2], self.shape[1]) if self.transposed else self.shape


def read_fused(
    config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]], source: Path
) -> tuple[dict[str, Fused], set[str]]:
    """Those of the tensors `shapes` (by checkpoint name) that hold stacked experts; and those others that go through
    an operation before they are the model's parameters, to which a scale beside them would not belong.

    Raises:
        CheckpointError: Transformers is not there or does not know the model, a stacked tensor goes through an
            operation that is not known here, or a module lacks one.
    """
    model = _meta_model(config, source)
    from transformers import core_model_loading as hf
    from transformers.conversion_mapping import get_model_conversion_mapping

    flags = {name: flags_of(module) for name, module in model.named_modules()}
    experts = {name: found for name, found in flags.items() if found is not None}
    conversions = [deepcopy(c) for c in get_model_conversion_mapping(model)]
    renamings = [c for c in conversions if isinstance(c, hf.WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, hf.WeightConverter)]
    known = model.state_dict()
    found: dict[str, Fused] = {}
    changed: set[str] = set()
    for key in shapes:
        name, pattern = hf.rename_source_key(key, renamings, converters, model.base_model_prefix, known)
        if name not in known and key in known:
            name, pattern = key, None
        module, _, leaf = name.rpartition(".")
        if name not in known or module not in experts or leaf.removesuffix("_bias") not in LEAVES:
            if pattern is not None:
                changed.add(key)
            continue
        target = _of_parameter(name, tuple(known[name].shape), experts[module])
        used = next((c for c in converters if pattern is not None and pattern in c.source_patterns), None)
        if used is not None:
            target = _of_source(key, shapes, target, used.operations, used.source_patterns.index(pattern))
        if shapes[key] != target.stored:
            raise CheckpointError(f"{key} has shape {shapes[key]}, needs {target.stored} from config.json.")
        found[key] = replace(target, prefix=stacked_prefix(key) or module)
    _check_whole(found, experts, source)
    return found, changed


def _meta_model(config: dict[str, Any], source: Path) -> Any:
    try:
        import torch
        import transformers
    except ImportError:
        raise CheckpointError(
            f"{source}: how its tensors lie only the model's class says (stacked experts, fused Linears); this needs"
            " transformers: pip install 'int8moe[transformers]'."
        ) from None
    model_type = config.get("model_type")
    try:
        parsed = transformers.AutoConfig.from_pretrained(str(source), trust_remote_code=False)
        for part in (parsed, parsed.get_text_config()):  # the model is built as a float one
            if hasattr(part, "quantization_config"):
                del part.quantization_config
        architecture = next(iter(config.get("architectures") or ()), "")
        model_class = getattr(transformers, architecture, None)
        with torch.device("meta"):
            if model_class is not None and issubclass(model_class, transformers.PreTrainedModel):
                return model_class._from_config(parsed)
            for auto in (transformers.AutoModelForCausalLM, transformers.AutoModel):
                if type(parsed) in auto._model_mapping:
                    return auto.from_config(parsed)
    except Exception as error:  # any of Transformers' own, on a configuration it does not take
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{source}: how its tensors lie only the model's class says (stacked experts, fused Linears), and"
            f" Transformers {transformers.__version__} cannot build model_type {model_type!r}: {reason}"
        ) from error
    raise CheckpointError(
        f"{source}: how its tensors lie only the model's class says (stacked experts, fused Linears), and Transformers"
        f" {transformers.__version__} has none for model_type {model_type!r}."
    )


def _of_parameter(name: str, shape: tuple[int, ...], flags: Flags) -> Fused:
    """A tensor that lies as the parameter does."""
    transposed = flags.transposed and len(shape) == 3
    canonical = (shape[0], shape[2], shape[1]) if transposed else shape
    leaves = LEAVES[name.rpartition(".")[2].removesuffix("_bias")]
    return Fused(name, canonical, transposed, len(leaves) > 1 and not flags.concatenated, leaves)


def _of_source(
    key: str, tensors: Mapping[str, tuple[int, ...]], target: Fused, operations: list[Any], index: int
) -> Fused:
    """Undo the operations that make the parameter from the tensor `key`, which is the source `index` of them."""
    out, shape = target, tensors[key]
    for op in operations:
        kind = type(op).__name__
        if kind == "Transpose" and {op.dim0, op.dim1} == {1, 2}:
            if not op.check_dims or shape != target.stored:
                out = replace(out, transposed=not out.transposed)
        elif kind == "Interleave" and op.dim == 1 and not out.transposed:
            out = replace(out, interleaved=not op.inverse)
        elif kind == "Concatenate" and op.dim == 1 and not (out.transposed or out.interleaved) and len(out.leaves) > 1:
            rows = out.shape[1] // len(out.leaves)
            out = replace(out, leaves=(out.leaves[index],), shape=(out.shape[0], rows, *out.shape[2:]))
        elif kind == "Inkling2LoopDequantizeExperts" and f"{key}_scale" not in tensors:
            pass  # float weights go through it as they are
        else:
            raise CheckpointError(f"{key} becomes {target.parameter} through {kind}, which is not known here.")
    return out


def _check_whole(found: dict[str, Fused], experts: dict[str, Flags], source: Path) -> None:
    """A module that has one of its matrices has all."""
    fed = {(fused.parameter, leaf) for fused in found.values() for leaf in fused.leaves}
    for name, flags in experts.items():
        kinds = ("", "_bias") if flags.bias else ("",)
        needed = [(f"{name}.{w}{kind}", leaf) for w in (flags.up, "down_proj") for kind in kinds for leaf in LEAVES[w]]
        missing = [n for n in needed if n not in fed]
        if missing and len(missing) < len(needed):
            raise CheckpointError(f"{source} lacks the weights of {missing[0][0]} ({missing[0][1]}).")
