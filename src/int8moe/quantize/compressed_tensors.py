"""The compressed-tensors description of INT8 experts, in `config.json`: written and read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from int8moe.errors import CheckpointError

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]
"""Of a checkpoint: tensor name -> dtype as safetensors names it ("I8", "BF16", ...) and shape."""

_WEIGHTS = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": "channel",
    "dynamic": False,
    "group_size": None,
}
_ACTIVATIONS = {**_WEIGHTS, "strategy": "token", "dynamic": True}


def to_compressed_tensors(scheme: str, ignore: list[str]) -> dict[str, Any]:
    """`quantization_config` of a checkpoint whose experts are int8 with a scale per output row."""
    group = {
        "targets": ["Linear"],
        "weights": dict(_WEIGHTS),
        "input_activations": dict(_ACTIVATIONS) if scheme == "w8a8" else None,
        "output_activations": None,
        "format": "int-quantized",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": sorted({*ignore, "lm_head"}),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def read_scheme(
    quantization: Any, where: str, tensors: Tensors | None = None, skip: Callable[[str], bool] | None = None
) -> str:
    """ "w8a8" or "w8a16", of a checkpoint's `quantization_config`.

    With `tensors` only the groups that the experts in the file fall under decide, dense layers need int8 weights too
    (they are dequantised), and the tensors have to be what the groups say. Without, every group decides.

    Args:
        skip: whether an experts module, by its name in the file, is left as it is.
    Raises:
        CheckpointError: it is quantised in a way that INT8 experts cannot take as it is; says which field.
    """
    quantization = _plain(quantization)
    method = quantization.get("quant_method")
    if method == "int8moe":
        return str(quantization.get("scheme", "w8a8"))
    if method != "compressed-tensors":
        raise CheckpointError(
            f"{where} is quantised with {method!r}; needs a bf16, fp16 or fp32 checkpoint, or INT8 in"
            " compressed-tensors int-quantized form."
        )
    groups = _groups(quantization, where)
    _refuse_whole(quantization, where)
    rules = _Rules(quantization, groups)
    deciding = set(groups) if tensors is None else _groups_of_experts(rules, where, tensors, skip)
    schemes = {_experts_scheme(groups[name], quantization, f"{where}: {name}") for name in deciding}
    if len(schemes) > 1:
        raise CheckpointError(f"{where} mixes {' and '.join(sorted(schemes))}, needs one scheme for all layers.")
    if tensors is not None:
        _check_tensors(where, tensors)
        for name, layers in _dense_layers(rules, tensors).items():
            try:
                _check_weights(groups[name], quantization, f"{where}: {name}")
            except CheckpointError as error:
                raise CheckpointError(f"{error} Dense layers use it: {_some(layers)}.") from error
    return schemes.pop()


def has_int8_experts(quantization: Any, tensors: Tensors) -> bool:
    """Whether a compressed-tensors checkpoint has experts with 8-bit integer weights, readable as they are or not."""
    quantization = _plain(quantization)
    if quantization.get("quant_method") != "compressed-tensors":
        return False
    try:
        groups = _groups(quantization, "")
    except CheckpointError:
        return False
    rules, layers = _Rules(quantization, groups), _expert_layers(tensors)
    stacked = not layers and any(dtype == "I8" and len(shape) == 3 for dtype, shape in tensors.values())
    for name in set(groups) if stacked else {rules.group(layer) for layer in layers}:
        if name is None or name == _IGNORED:
            continue
        weights = groups[name].get("weights") or {}
        kind = (str(weights.get("type") or "int").lower(), weights.get("num_bits", 8))
        if _format(groups[name], quantization) == "int-quantized" and kind == ("int", 8):
            return True
    return False


def read_tensors(files: Iterable[Any], num_layers: int | None = None) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype, shape) of the tensors in safetensors files, reading the headers only.

    Args:
        num_layers: leave out layers from this one on, such as those for multi-token prediction, which models skip.
    """
    from safetensors import SafetensorError, safe_open

    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as f:
                for key in f.keys():  # noqa: SIM118
                    layer = _LAYER.search(key)
                    if num_layers is not None and layer is not None and int(layer[1]) >= num_layers:
                        continue
                    part = f.get_slice(key)
                    found[key] = part.get_dtype(), tuple(part.get_shape())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is damaged or no safetensors file: {error}.") from error
    return found


# -- the configuration -----------------------------------------------------------------------------------------------

_PRESETS: dict[str, dict[str, Any]] = {
    name: {"weights": _WEIGHTS, "input_activations": _ACTIVATIONS} for name in ("W8A8", "INT8")
}
_IGNORED = "\0ignored"


def _plain(quantization: Any) -> dict[str, Any]:
    """The dictionary; of an old `compression_config` the quantisation inside, beside its sparsity."""
    if not isinstance(quantization, dict):
        quantization = quantization.to_dict()
    inner = quantization.get("quantization_config")
    if isinstance(inner, dict):
        outside = {k: v for k, v in quantization.items() if k != "quantization_config"}
        quantization = {"quant_method": "compressed-tensors", **outside, **inner}
    return dict(quantization)


def _groups(quantization: dict[str, Any], where: str) -> dict[str, dict[str, Any]]:
    groups = quantization.get("config_groups") or {}
    if not isinstance(groups, dict) or not groups:
        raise CheckpointError(f"{where}: quantization_config has no config_groups, needs one with INT8 weights.")
    out = {}
    for name, group in groups.items():
        if isinstance(group, list) and name in _PRESETS:
            group = {"targets": group, **_PRESETS[name]}
        if not isinstance(group, dict):
            raise CheckpointError(
                f"{where}: {name} is {group!r}, needs an object"
                f"{' or a list under the name of: ' + ', '.join(_PRESETS) if isinstance(group, list) else ''}."
            )
        out[name] = group
    return out


def _refuse_whole(quantization: dict[str, Any], where: str) -> None:
    """Fields that change what the model computes beside its weights, and that nothing here would honour."""
    reasons = {
        "kv_cache_scheme": "the KV cache stays in the model's dtype",
        "transform_config": "rotations of activations are not applied",
        "moe_sparsity_config": "pruned experts have no INT8 form",
        "sparsity_config": "compressed sparse weights are not read",
    }
    for field, reason in reasons.items():
        value = quantization.get(field)
        parts = value if isinstance(value, dict) else {"": value}
        if any(parts.values()) and not (field == "sparsity_config" and parts.get("format") == "dense"):
            raise CheckpointError(f"{where}: {field} is {value!r}, needs null: {reason}.")


def _format(group: dict[str, Any], quantization: dict[str, Any]) -> Any:
    return group.get("format") or quantization.get("format")


def _experts_scheme(group: dict[str, Any], quantization: dict[str, Any], where: str) -> str:
    _check_weights(group, quantization, where)
    if group.get("output_activations"):
        raise CheckpointError(f"{where}.output_activations is {group['output_activations']!r}, needs null.")
    activations = group.get("input_activations")
    if activations is None:
        return "w8a16"
    needs = {"num_bits": (8,), "type": ("int",), "symmetric": (True,), "dynamic": (True,), "strategy": ("token",)}
    _need(_filled(activations), needs, f"{where}.input_activations")
    return "w8a8"


def _check_weights(group: dict[str, Any], quantization: dict[str, Any], where: str) -> None:
    form = _format(group, quantization)
    if form != "int-quantized":
        raise CheckpointError(f"{where} has format {form!r}, needs 'int-quantized'.")
    needs = {
        "num_bits": (8,), "type": ("int",), "symmetric": (True,), "strategy": ("channel", "tensor"),
        "dynamic": (False,), "group_size": (None, -1), "block_structure": (None,),
        "actorder": (None, False, "weight", "static"),  # these two leave the columns where they are
    }  # fmt: skip
    _need(_filled(group.get("weights") or {"strategy": None}), needs, f"{where}.weights")


def _filled(args: dict[str, Any]) -> dict[str, Any]:
    """With the defaults of compressed-tensors, whose newer versions leave them out."""
    strategy = args.get("strategy")
    if strategy is None and "strategy" not in args:
        strategy = {None: "tensor", -1: "channel"}.get(args.get("group_size"), "group")
    kind = str(args.get("type") or "int").lower()
    return {"num_bits": 8, "symmetric": True, "dynamic": False, **args, "type": kind, "strategy": strategy}


_WHY = {
    "symmetric": "zero points are not read",
    "dynamic": "each token is quantised as it comes, with no scale of the file",
    "strategy": "one scale a row of a weight, and one a token",
    "num_bits": "INT8",
    "actorder": "columns in another order are not read",
}


def _need(found: dict[str, Any], needs: dict[str, tuple[Any, ...]], where: str) -> None:
    for field, accepted in needs.items():
        if found.get(field) not in accepted:
            wanted = " or ".join(repr(a) for a in accepted)
            why = f" ({_WHY[field]})" if field in _WHY else ""
            raise CheckpointError(f"{where}.{field} is {found.get(field)!r}, needs {wanted}{why}.")


# -- which group a layer falls under, by compressed-tensors' rules ----------------------------------------------------

_LEAVES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def _spellings(name: str) -> Iterator[str]:
    """A layer as the file names it and as the Transformers model does, which recipes are written against."""
    yield name
    renamed = name.replace(".block_sparse_moe.", ".mlp.")
    yield renamed
    head, _, leaf = renamed.rpartition(".")
    if leaf in _LEAVES:
        yield f"{head}.{_LEAVES[leaf]}"


class _Matcher:
    """A list of layer names, `re:` expressions and class names; the layers of a checkpoint are Linears."""

    def __init__(self, patterns: Any) -> None:
        patterns = [patterns] if isinstance(patterns, str) else [str(p) for p in patterns or ()]
        self.names = {p for p in patterns if not p.startswith("re:")}
        try:
            self.expressions = [re.compile(p[3:]) for p in patterns if p.startswith("re:")]
        except re.error as error:
            raise CheckpointError(f"{error.pattern!r} in a quantization_config is no expression: {error}.") from None

    def rank(self, name: str) -> int | None:
        """0 exact name, 1 expression, 2 class name, None no match."""
        spellings = set(_spellings(name))
        if not self.names.isdisjoint(spellings):
            return 0
        if any(e.match(n) for e in self.expressions for n in spellings):
            return 1
        return None if self.names.isdisjoint(("Linear", "Module")) else 2


class _Rules:
    """Which group of a configuration a layer falls under."""

    def __init__(self, quantization: dict[str, Any], groups: dict[str, dict[str, Any]]) -> None:
        self.ignore = _Matcher(quantization.get("ignore"))
        self.targets = {name: _Matcher(group.get("targets")) for name, group in groups.items()}

    def group(self, layer: str) -> str | None:
        """The name of the group whose target is the most exact, `_IGNORED`, or None."""
        if self.ignore.rank(layer) is not None:
            return _IGNORED
        ranks = {name: rank for name, m in self.targets.items() if (rank := m.rank(layer)) is not None}
        return min(ranks, key=lambda name: ranks[name]) if ranks else None


# -- the tensors -----------------------------------------------------------------------------------------------------

_EXPERT = re.compile(r"(?P<linear>(?P<module>.*\.experts)\.\d+\.\w+)\.(?P<kind>\w+)")
_FUSED = re.compile(r"(?P<module>.*\.experts)\.(?:gate_up|gate|up|down)_proj(?:\.weight)?")
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def _expert_layers(tensors: Tensors) -> dict[str, str]:
    """Linear of one expert, or stacked weight of all, as the file names it -> its experts module."""
    layers = {m["linear"]: m["module"] for m in map(_EXPERT.fullmatch, tensors) if m and m["kind"] != "bias"}
    return layers | {m.group(): m["module"] for m in map(_FUSED.fullmatch, tensors) if m}


def _groups_of_experts(rules: _Rules, where: str, tensors: Tensors, skip: Callable[[str], bool] | None) -> set[str]:
    """The groups that the experts fall under.

    Raises:
        CheckpointError: the configuration leaves some of them in float.
    """
    layers = _expert_layers(tensors)
    if not layers:
        return set(rules.targets)  # a family with other names; its tensors are checked where the model is known
    deciding: set[str] = set()
    lost: dict[str | None, list[str]] = {}
    skipped = 0
    for layer, module in layers.items():
        if skip is not None and any(skip(name) for name in _spellings(module)):
            skipped += 1
            if any(tensors.get(name, ("",))[0] == "I8" for name in (layer, f"{layer}.weight")):
                raise CheckpointError(f"{where}: {layer} is INT8 in the file, so {module} cannot be left as it is.")
            continue
        group = rules.group(layer)
        if group is None or group == _IGNORED:
            lost.setdefault(group, []).append(layer)
        else:
            deciding.add(group)
    for group, names in lost.items():
        why = "are in `ignore`" if group == _IGNORED else "are no target of a config group"
        raise CheckpointError(
            f"{where}: {len(names)} of {len(layers) - skipped} layers of experts {why}, so they are float, a wrong"
            f" dtype for an INT8 checkpoint: {_some(names)}. Give their modules to `load` as modules_to_not_convert,"
            " or quantise the original checkpoint."
        )
    if not deciding:
        raise CheckpointError(f"{where}: modules_to_not_convert excludes all experts, so there is nothing in INT8.")
    return deciding


def _dense_layers(rules: _Rules, tensors: Tensors) -> dict[str, list[str]]:
    """Group -> the quantised layers outside of experts that fall under it."""
    ends = (".weight_scale", ".weight_packed")
    layers = {name.removesuffix(end) for name in tensors for end in ends if name.endswith(end)}
    out: dict[str, list[str]] = {}
    for layer in sorted(layers - _expert_layers(tensors).keys()):
        group = rules.group(layer)
        if group is not None and group != _IGNORED:
            out.setdefault(group, []).append(layer)
    return out


def _check_tensors(where: str, tensors: Tensors) -> None:
    """No tensors of other schemes, and scales that fit their int8 weight. Missing ones are found where the model is
    known."""
    for end, why in (
        (".weight_zero_point", "asymmetric weights, and zero points are not read"),
        (".weight_g_idx", "columns in another order, which is not read"),
    ):
        found = [name for name in tensors if name.endswith(end)]
        if found:
            raise CheckpointError(
                f"{where}: {len(found)} tensors belong to experts or dense layers, but nothing in the INT8 model takes"
                f" them: {_some(found)} ({why})."
            )
    for name, (dtype, shape) in tensors.items():
        scale = tensors.get(f"{name}_scale")
        if dtype != "I8" or scale is None:
            continue
        accepted = {(*shape[:-1], 1), shape[:-1]} | ({(1, 1), (1,), ()} if len(shape) == 2 else set())
        if scale[1] not in accepted:
            raise CheckpointError(
                f"{where}: {name}_scale has shape {scale[1]} and {name} {shape}; needs {(*shape[:-1], 1)}, one scale"
                " an output row. llm-compressor's repack_moe writes such files; quantise without it."
            )


def _some(names: list[str], show: int = 4) -> str:
    return ", ".join(names[:show]) + (f", and {len(names) - show} more" if len(names) > show else "")
