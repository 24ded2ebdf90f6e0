"""Checkpoint tensors into INT8 experts, one expert at a time, and the check that all of them are there.

The operations run inside Transformers' own weight loading. They write into preallocated int8 tensors, so a load
needs the final size and one expert beside it (safetensors slices are memory-mapped until they are touched).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from transformers import core_model_loading as hf

from int8moe.errors import CheckpointError, Int8MoeError, ShapeMismatch
from int8moe.integrations.transformers.experts import ExpertsLayout, _canonical
from int8moe.quantize.int8 import quantize_weight

Params = dict[str, tuple[ExpertsLayout, str]]
"""Full parameter name -> the layout it belongs to and its name inside the module."""


_watched: ContextVar[list[Loading] | None] = ContextVar("int8moe_watched_loads", default=None)


@contextmanager
def watch(loads: list[Loading]) -> Iterator[None]:
    """Collect the `Loading` of every load that starts inside, so that its first error can be raised as it was."""
    token = _watched.set(loads)
    try:
        yield
    finally:
        _watched.reset(token)


class Loading:
    """What the operations of one load share: where parameters go, what arrived, and what went wrong."""

    def __init__(self, params: Params, device_of: Callable[[str], torch.device | None]) -> None:
        self.params = params
        self.device_of = device_of
        self.arrived: set[str] = set()
        self.sharded: set[str] = set()
        self.error: Int8MoeError | None = None
        if (watchers := _watched.get()) is not None:
            watchers.append(self)

    def localise(self, name: str, model: Any) -> None:
        """Where Transformers' parallel plan divides the parameter `name`, keep the layout of this rank's share."""
        if name not in self.params or name in self.sharded or model is None:
            return
        share = getattr(model.get_parameter(name), "_local_tensor", None)
        if share is None:
            return
        layout, local = self.params[name]
        experts, rows, columns = _canonical(share, layout.transposed and share.dtype != torch.int8)
        intermediate = columns if local == "down_proj" else rows // len(layout.leaves(local))
        self.params[name] = replace(layout, num_experts=experts, intermediate=intermediate), local
        self.sharded.add(name)

    def fail(self, error: Int8MoeError) -> Int8MoeError:
        """Transformers turns an operation's error into a log entry; keep the first one for the caller."""
        self.error = self.error or error
        return error


class _ExpertsOp(hf.ConversionOps):
    """Base of our operations. They are shared, not copied, when Transformers copies a converter.

    `original` are the operations that one of ours replaces; they run for modules that are not converted.
    """

    def __init__(self, loading: Loading, original: Iterable[Any] = ()) -> None:
        self.loading = loading
        self.original = tuple(original)

    def __deepcopy__(self, memo: dict[int, Any]) -> _ExpertsOp:
        return self

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        name = kwargs["full_layer_name"]
        if self.original and name.removesuffix("_scale") not in self.loading.params:
            for operation in self.original:
                input_dict = operation.convert(input_dict, source_patterns, target_patterns, **kwargs)
            return input_dict
        self.loading.localise(re.sub("_(scale|bias)$", "", name), kwargs.get("model"))
        try:
            return self.run(input_dict, source_patterns, target_patterns[0], name)
        except Int8MoeError as error:
            raise self.loading.fail(error) from error

    def run(self, input_dict: dict[str, Any], sources: list[str], target: str, name: str) -> dict[str, Any]:
        """The parameter `name` from the tensors collected for each of `sources`, under the key `target`."""
        raise NotImplementedError


def _parts(
    input_dict: dict[str, Any], source_patterns: list[str], layout: ExpertsLayout, name: str
) -> list[list[torch.Tensor | None]]:
    """Per source (gate, then up) the list of its experts' tensors; they leave `input_dict`."""
    parts = []
    for pattern in source_patterns:
        tensors = input_dict.pop(pattern, [])
        tensors = list(tensors) if isinstance(tensors, list) else [tensors]
        if len(tensors) != layout.num_experts:
            raise CheckpointError(
                f"{name}: {len(tensors)} tensors match {pattern}, needs {layout.num_experts}, one an expert."
            )
        parts.append(tensors)
    return parts


def _check(name: str, got: Iterable[int], want: tuple[int, ...], what: str) -> None:
    if tuple(got) != want:
        raise ShapeMismatch(f"{name}: {what} has shape {tuple(got)}, needs {want}.")


class _MergeExperts(_ExpertsOp):
    """One tensor [rows, K] an expert and source into int8 [E, N, K]; subclasses say what becomes of a tensor."""

    def allocate(self, name: str, parts: list[list[torch.Tensor | None]]) -> tuple[torch.Tensor, torch.device]:
        layout, local = self.loading.params[name]
        first = parts[0][0]
        assert first is not None
        device = self.loading.device_of(name) or first.device
        return torch.empty(layout.shapes[local], dtype=torch.int8, device=device), device

    def each(self, name: str, parts: list[list[torch.Tensor | None]]) -> Iterable[tuple[int, slice, torch.Tensor, str]]:
        """(expert, rows of the target, tensor, what it is), dropping each tensor once it was given out."""
        layout, local = self.loading.params[name]
        _, total, columns = layout.shapes[local]
        for e in range(layout.num_experts):
            for p, tensors in enumerate(parts):
                tensor = tensors[e]
                tensors[e] = None
                assert tensor is not None
                what = f"expert {e}" + (f", {('gate', 'up')[p]}" if len(parts) == 2 else "")
                _check(name, tensor.shape, (total // len(parts), columns), what)
                yield e, layout.part(local, p), tensor, what


class QuantizeMerge(_MergeExperts):
    """bf16 experts into int8 and scales, each expert alone (numerics, step 1)."""

    def run(self, input_dict: dict[str, Any], sources: list[str], target: str, name: str) -> dict[str, Any]:
        layout, _ = self.loading.params[name]
        parts = _parts(input_dict, sources, layout, name)
        codes, device = self.allocate(name, parts)
        scales = torch.empty((*codes.shape[:2], 1), dtype=torch.float32, device=device)
        for e, rows, tensor, what in self.each(name, parts):
            quantize_into(codes[e, rows], scales[e, rows, 0], tensor, f"{name}, {what}")
        self.loading.arrived.add(name)
        return {target: codes, f"{target}_scale": scales}


class MergeCodes(_MergeExperts):
    """int8 experts of a quantised checkpoint."""

    @property
    def reverse_op(self) -> hf.ConversionOps:
        return SplitExperts(self.loading)

    def run(self, input_dict: dict[str, Any], sources: list[str], target: str, name: str) -> dict[str, Any]:
        layout, _ = self.loading.params[name]
        parts = _parts(input_dict, sources, layout, name)
        codes, _ = self.allocate(name, parts)
        for e, rows, tensor, what in self.each(name, parts):
            if tensor.dtype is not torch.int8:
                raise CheckpointError(f"{name}: {what} has dtype {tensor.dtype}, needs torch.int8.")
            codes[e, rows] = tensor
        self.loading.arrived.add(name)
        return {target: codes}


class MergeScales(_ExpertsOp):
    """[rows, 1], [rows] or one element an expert and source into float32 [E, N, 1]."""

    @property
    def reverse_op(self) -> hf.ConversionOps:
        return SplitExperts(self.loading)

    def run(self, input_dict: dict[str, Any], sources: list[str], target: str, name: str) -> dict[str, Any]:
        weight = name.removesuffix("_scale")
        layout, local = self.loading.params[weight]
        parts = _parts(input_dict, sources, layout, name)
        experts, total, _ = layout.shapes[local]
        rows = total // len(parts)
        first = parts[0][0]
        assert first is not None
        device = self.loading.device_of(weight) or first.device
        out = torch.empty((experts, total, 1), dtype=torch.float32, device=device)
        for p, tensors in enumerate(parts):
            for e, tensor in enumerate(tensors):
                assert tensor is not None
                if tensor.numel() != 1 and tuple(tensor.shape) not in ((rows, 1), (rows,)):
                    raise ShapeMismatch(
                        f"{name}: expert {e} has a scale of shape {tuple(tensor.shape)}, needs ({rows}, 1):"
                        " one a row (or one for the whole tensor)."
                    )
                out[e, layout.part(local, p), 0] = tensor.reshape(-1).float()
        self.loading.arrived.add(name)
        return {target: out}


class MergeBiases(_ExpertsOp):
    """[rows] an expert and source into [E, N]."""

    @property
    def reverse_op(self) -> hf.ConversionOps:
        return SplitExperts(self.loading)

    def run(self, input_dict: dict[str, Any], sources: list[str], target: str, name: str) -> dict[str, Any]:
        layout, local = self.loading.params[name.removesuffix("_bias")]
        parts = _parts(input_dict, sources, layout, name)
        experts, total, _ = layout.shapes[local]
        first = parts[0][0]
        assert first is not None
        out = torch.empty((experts, total), dtype=first.dtype, device=first.device)
        for p, tensors in enumerate(parts):
            for e, tensor in enumerate(tensors):
                assert tensor is not None
                _check(name, tensor.shape, (total // len(parts),), f"expert {e}")
                out[e, layout.part(local, p)] = tensor
        return {target: out}


class SplitExperts(hf.ConversionOps):
    """A parameter [E, rows, ...] of INT8 experts into one tensor an expert and matrix: what saving does where the
    family's own checkpoints hold all experts in one tensor. Of other experts the parameter stays whole."""

    def __init__(self, loading: Loading) -> None:
        self.loading = loading

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        (source, tensors) = next(iter(input_dict.items()))
        tensor = tensors[0] if isinstance(tensors, list) else tensors
        module = kwargs["full_layer_name"].split(".*.")[0]
        parameter = source.rpartition(".")[2]
        local = parameter.removesuffix("_scale").removesuffix("_bias")
        found = self.loading.params.get(f"{module}.{local}")
        if found is None:
            return {f"{module}.{parameter}": tensor}
        return {
            pattern.replace("*", str(e)): tensor[e, found[0].part(local, p)].contiguous()
            for p, pattern in enumerate(target_patterns)
            for e in range(len(tensor))
        }


class QuantizeFused(_ExpertsOp):
    """Experts that reach the model as one float tensor [E, ...]; int8 ones pass unchanged."""

    def run(self, input_dict: dict[str, Any], sources: list[str], target: str, name: str) -> dict[str, Any]:
        out = {}
        for name in list(input_dict):
            tensor = input_dict.pop(name)
            tensor = tensor[0] if isinstance(tensor, list) else tensor
            out[name] = tensor
            if name not in self.loading.params or not tensor.is_floating_point():
                continue
            layout, local = self.loading.params[name]
            shape = layout.shapes[local]
            here = (shape[0], shape[2], shape[1]) if layout.transposed else shape
            _check(name, tensor.shape, here, "the checkpoint's tensor")
            device = self.loading.device_of(name) or tensor.device
            codes = torch.empty(shape, dtype=torch.int8, device=device)
            scales = torch.empty((*shape[:2], 1), dtype=torch.float32, device=device)
            for e in range(shape[0]):
                expert = tensor[e].T if layout.transposed else tensor[e]
                quantize_into(codes[e], scales[e, :, 0], expert, f"{name}, expert {e}")
            out[name], out[f"{name}_scale"] = codes, scales
            self.loading.arrived.add(name)
        return out


class DequantizeLinear(hf.ConversionOps):
    """int8 weight [N, K] of a dense layer times its scale, in the parameter's dtype; others only get that dtype."""

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        full_layer_name, model = kwargs["full_layer_name"], kwargs["model"]
        one = {k: v[0] if isinstance(v, list) else v for k, v in input_dict.items()}
        weight = next(v for k, v in one.items() if not k.endswith("_scale"))
        scale = next((v for k, v in one.items() if k.endswith("_scale")), None)
        if scale is not None:
            weight = weight.float() * scale.float().reshape(-1, 1)
        module, _, leaf = full_layer_name.rpartition(".")
        return {full_layer_name: weight.to(getattr(model.get_submodule(module), leaf).dtype)}


def dequantize_linears() -> Any:
    """The converter for dense layers of a quantised checkpoint; comes last, so that all others match before it."""
    return hf.WeightConverter([r"\.weight_scale", r"\.weight"], ".weight", operations=[DequantizeLinear()])


def dense_int8(headers: dict[str, str]) -> list[str]:
    """Names of int8 weights outside of expert modules that have a scale beside them."""
    return [
        key
        for key, dtype in headers.items()
        if dtype == "I8" and key.endswith(".weight") and f"{key}_scale" in headers and ".experts." not in key
    ]


def check_dense(headers: dict[str, str], conversions: list[Any], model: Any) -> None:
    """Dense int8 layers reach the model through `DequantizeLinear` alone.

    Raises:
        CheckpointError: the model fuses or splits one while loading, and so would separate it from its scales.
    """
    mapping = [deepcopy(c) for c in conversions]
    renamings = [c for c in mapping if isinstance(c, hf.WeightRenaming)]
    converters = [c for c in mapping if isinstance(c, hf.WeightConverter)]
    bad = []
    for key in dense_int8(headers):
        _, pattern = hf.rename_source_key(key, renamings, converters, model.base_model_prefix, model.state_dict())
        used = next((c for c in converters if pattern in c.source_patterns), None)
        if used is None or not any(isinstance(op, DequantizeLinear) for op in used.operations):
            bad.append(key)
    if bad:
        raise CheckpointError(
            f"{len(bad)} dense int8 weights are fused or split by {type(model).__name__} while it loads, which their"
            f" scales are not made for: {_some(bad)}. Needs those layers in the original dtype."
        )


def quantize_into(codes: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, what: str) -> None:
    """Quantise weight [N, K] into int8 codes [N, K] and float32 scale [N], on the device of `codes`."""
    q, s = quantize_weight(weight.to(codes.device), name=what)
    codes.copy_(q)
    scale.copy_(s)


# -- converters ------------------------------------------------------------------------------------------------------


def _patterns(transform: Any, which: str) -> list[str]:
    return list(getattr(transform, f"_original_{which}_patterns", None) or getattr(transform, f"{which}_patterns"))


def _plain(pattern: str) -> str:
    """A pattern without its anchor and escapes: the end of a parameter's name."""
    return pattern.removeprefix("^").replace("\\", "")


def _converter(
    like: Any, sources: list[str], targets: list[str], operations: list[Any], force_cpu: bool = False
) -> Any:
    new = hf.WeightConverter(sources, targets, operations=operations, force_cpu=force_cpu)
    for attribute in ("scope_prefix", "base_model_prefix"):  # Transformers 5.21 and later
        if hasattr(like, attribute):
            setattr(new, attribute, getattr(like, attribute))
    return new


def _is_merge(operations: list[Any]) -> bool:
    """Stack the experts, then put gate over up: the chain that the streaming operations replace."""
    names = [type(op).__name__ for op in operations]
    dims = [getattr(op, "dim", None) for op in operations]
    return (names, dims) in ((["MergeModulelist"], [0]), (["MergeModulelist", "Concatenate"], [0, 1]))


_LEAVES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def _aliases(sources: list[str]) -> list[str] | None:
    """Mixtral-style sources under the names that llm-compressor writes, or None."""
    renamed = [re.sub(r"\.(w[123])\.weight$", lambda m: f".{_LEAVES[m[1]]}.weight", s) for s in sources]
    return renamed if renamed != sources else None


class Conversions:
    """The converters of one load, and those that a later `save_pretrained` reverses.

    Experts that a family's checkpoints hold one by one keep those names; all others get a converter of our own, from
    `<module>.<expert>.<gate_proj, up_proj or down_proj>.{weight,weight_scale,bias}`.
    """

    def __init__(self, loading: Loading, *, pre_quantized: bool, force_cpu: bool) -> None:
        self.loading, self.pre_quantized, self.force_cpu = loading, pre_quantized, force_cpu
        self.for_saving: dict[int, list[Any]] = {}
        self.own: list[Any] = []

    def build(self, conversions: list[Any]) -> list[Any]:
        """Transformers' own transforms with those of the experts replaced."""
        out: list[Any] = []
        merged: set[str] = set()
        for transform in conversions:
            fed = self._feeds(transform)
            if fed and _is_merge(transform.operations):
                merged |= fed
                out.extend(self._replace(transform))
                continue
            out.append(transform)  # a quantise operation runs after the chain, on the whole layer
            if fed and all("*" in p for p in _patterns(transform, "source")):
                merged |= fed  # expert by expert, in an order of its own: codes and scales alike
                twin = self._twin(transform)
                self.for_saving[id(transform)] = [transform, twin]
                out.insert(len(out) - 1, twin)
            elif fed:
                self.for_saving[id(transform)] = []
        self.own = self._own(set(self.loading.params) - merged)
        # Scales first: up to Transformers 5.20 the pattern of a weight matches its scale's name as well.
        return out + (self.own[::-1] if self.pre_quantized else [])

    def _feeds(self, transform: Any) -> set[str]:
        """The expert parameters that a converter makes."""
        if not isinstance(transform, hf.WeightConverter):
            return set()
        targets = [_plain(t) for t in _patterns(transform, "target")]
        return {name for name in self.loading.params for t in targets if name.endswith(t)}

    def _own(self, names: set[str]) -> list[Any]:
        """Converters for these parameters: weights, their scales, their biases."""
        wanted = dict.fromkeys(
            (_tail(layout.name), local, layout.leaves(local), layout.has_bias)
            for name, (layout, local) in self.loading.params.items()
            if name in names
        )
        out = []
        for tail, local, leaves, has_bias in wanted:
            kinds: list[tuple[str, str, _ExpertsOp]] = [
                ("weight", "", MergeCodes(self.loading)),
                ("weight_scale", "_scale", MergeScales(self.loading)),
            ]
            if has_bias:
                kinds.append(("bias", "_bias", MergeBiases(self.loading)))
            for leaf, suffix, operation in kinds:
                sources = [f"{tail}.*.{matrix}.{leaf}" for matrix in leaves]
                out.append(
                    hf.WeightConverter(
                        sources, f"{tail}.{local}{suffix}", operations=[operation], force_cpu=self.force_cpu
                    )
                )
        return out

    def _twin(self, transform: Any) -> Any:
        """The same converter for the scales."""
        sources, targets = ([f"{p}_scale" for p in _patterns(transform, which)] for which in ("source", "target"))
        twin = _converter(transform, sources, targets, list(transform.operations), self.force_cpu)
        twin._was_used = True
        return twin

    def _replace(self, transform: Any) -> list[Any]:
        sources, targets = _patterns(transform, "source"), _patterns(transform, "target")
        chain, twin = list(transform.operations), self._twin(transform)
        if not self.pre_quantized:
            new = _converter(transform, sources, targets, [QuantizeMerge(self.loading, chain)], self.force_cpu)
            self.for_saving[id(new)] = [transform, twin]
            return [new]
        new = []
        for names in (sources, _aliases(sources)):
            if names is None:
                continue
            scales, scaled = [f"{n}_scale" for n in names], [f"{n}_scale" for n in targets]
            new.append(_converter(transform, scales, scaled, [MergeScales(self.loading, chain)], self.force_cpu))
            new.append(_converter(transform, names, targets, [MergeCodes(self.loading, chain)], self.force_cpu))
            self.for_saving[id(new[-2])] = [twin]
            self.for_saving[id(new[-1])] = [transform]
        return new

    def used_for_saving(self, used: list[Any]) -> list[Any]:
        """`used`, the converters that matched while loading, as `save_pretrained` has to reverse them."""
        out: list[Any] = []
        own = {id(c) for c in self.own}
        for transform in used:
            if id(transform) in own or any(
                isinstance(op, DequantizeLinear) for op in getattr(transform, "operations", ())
            ):
                continue
            for kept in self.for_saving.get(id(transform), [transform]):
                kept._was_used = True
                if not any(kept is known for known in out):
                    out.append(kept)
        for transform in self.own:
            transform._was_used = True
        return out + self.own


def _tail(module: str) -> str:
    """The end of a module's name that its siblings in other layers share: `mlp.experts`."""
    return ".".join(module.split(".")[-2:])


# -- the check before loading ----------------------------------------------------------------------------------------


def check_experts(
    headers: dict[str, str], conversions: list[Any], model: Any, params: Params, *, pre_quantized: bool
) -> None:
    """Every expert parameter must be fed by exactly the tensors it needs.

    Raises:
        CheckpointError: names the tensors that are missing, of a wrong dtype, or that nothing takes.
    """
    mapping = [deepcopy(c) for c in conversions]
    renamings = [c for c in mapping if isinstance(c, hf.WeightRenaming)]
    converters = [c for c in mapping if isinstance(c, hf.WeightConverter)]
    known = model.state_dict()
    prefix = model.base_model_prefix
    fed: dict[str, dict[str | None, list[str]]] = defaultdict(lambda: defaultdict(list))
    homeless = []
    for key in headers:
        name, pattern = hf.rename_source_key(key, renamings, converters, prefix, known)
        if name not in known and key in known:
            name, pattern = key, None
        if name in known:
            fed[name][pattern].append(key)
        elif any(name.startswith(f"{layout.name}.") for layout, _ in params.values()):
            homeless.append(key)
    _feed_siblings(fed, converters, known)
    missing: list[str] = []
    wrong: list[str] = []
    floats = ("BF16", "F16", "F32", "F64")
    for name, (layout, _) in params.items():
        targets = [name, *([f"{name}_scale"] if pre_quantized else []), *([f"{name}_bias"] if layout.has_bias else [])]
        for target in targets:
            missing += _missing(target, fed.get(target, {}), converters, layout)
            want = floats if not pre_quantized or target != name else ("I8",)
            keys = [k for keys in fed.get(target, {}).values() for k in keys]
            wrong += [f"{k} ({headers[k]})" for k in keys if headers[k] not in want]
    if wrong:
        need = "int8 codes and float scales" if pre_quantized else "float weights"
        raise CheckpointError(f"{len(wrong)} expert tensors have a wrong dtype, needs {need}: {_some(wrong)}.")
    if missing:
        raise CheckpointError(f"{len(missing)} expert tensors are missing in the checkpoint: {_some(missing)}.")
    if homeless:
        raise CheckpointError(
            f"{len(homeless)} tensors belong to experts, but nothing in the INT8 model takes them: {_some(homeless)}."
        )


def _feed_siblings(fed: dict[str, dict[str | None, list[str]]], converters: list[Any], known: dict[str, Any]) -> None:
    """A converter with several targets counts as feeding the first; what it reads makes the others, too."""
    for converter in (c for c in converters if len(c.target_patterns) > 1):
        first, *others = map(_plain, converter.target_patterns)
        for name in [n for n, patterns in fed.items() if set(patterns) & set(converter.source_patterns)]:
            for other in (name.removesuffix(first) + o for o in others):
                if name.endswith(first) and other in known:
                    fed[other] = fed[name]


def _missing(target: str, fed: dict[str | None, list[str]], converters: list[Any], layout: ExpertsLayout) -> list[str]:
    if None in fed:  # under its own name, already stacked
        return []
    used = next((c for c in converters if any(p in c.source_patterns for p in fed)), None)
    if used is None:
        used = next((c for c in converters if any(target.endswith(_plain(t)) for t in c.target_patterns)), None)
    if used is None:
        return [target]
    end = next((t for t in map(_plain, used.target_patterns) if target.endswith(t)), "")
    experts = range(layout.num_experts * len(used.target_patterns))
    whole = [p for p in used.source_patterns if "*" not in p]
    absent = [target] if whole and not any(fed.get(p) for p in whole) else []  # some of them may be optional
    for pattern in (p for p in used.source_patterns if "*" in p):
        number = re.compile(re.escape(pattern).replace(r"\*", r"(\d+)"))
        seen = {int(m[1]) for m in map(number.search, fed.get(pattern, ())) if m}
        if not seen and len(fed.get(pattern, ())) == len(experts):
            continue
        base = target.removesuffix(end)
        absent += [base + _plain(pattern).replace("*", str(e)) for e in sorted(set(experts) - seen)]
    return absent


def _some(names: list[str], show: int = 4) -> str:
    return ", ".join(names[:show]) + (f", and {len(names) - show} more" if len(names) > show else "")
