"""The compressed-tensors description of INT8 experts, in `config.json`: written and read."""

from __future__ import annotations

from typing import Any

from int8moe.errors import CheckpointError

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


def read_scheme(quantization: Any, where: str) -> str:
    """ "w8a8" or "w8a16", of a checkpoint's `quantization_config`.

    Raises:
        CheckpointError: it is quantised in a way that INT8 experts cannot take as it is; says which field.
    """
    if not isinstance(quantization, dict):
        quantization = quantization.to_dict()
    method = quantization.get("quant_method")
    if method == "int8moe":
        return str(quantization.get("scheme", "w8a8"))
    if method != "compressed-tensors":
        raise CheckpointError(
            f"{where} is quantised with {method!r}; needs a bf16, fp16 or fp32 checkpoint, or INT8 in"
            " compressed-tensors int-quantized form."
        )
    groups = quantization.get("config_groups") or {}
    if not isinstance(groups, dict) or not groups:
        raise CheckpointError(f"{where}: quantization_config has no config_groups, needs one with INT8 weights.")
    schemes = {_group_scheme(group, quantization, f"{where}: {name}") for name, group in groups.items()}
    if len(schemes) > 1:
        raise CheckpointError(f"{where} mixes {' and '.join(sorted(schemes))}, needs one scheme for all layers.")
    return schemes.pop()


def _group_scheme(group: Any, quantization: dict[str, Any], where: str) -> str:
    if not isinstance(group, dict):
        raise CheckpointError(f"{where} is {group!r}, needs an object.")
    form = group.get("format") or quantization.get("format")
    if form != "int-quantized":
        raise CheckpointError(f"{where} has format {form!r}, needs 'int-quantized'.")
    weights, activations = group.get("weights") or {}, group.get("input_activations")
    needs = {"num_bits": (8,), "type": ("int",), "symmetric": (True,), "strategy": ("channel", "tensor")}
    _need(weights, needs, f"{where}.weights")
    if activations is None:
        return "w8a16"
    needs = {"num_bits": (8,), "type": ("int",), "symmetric": (True,), "strategy": ("token",), "dynamic": (True,)}
    _need(activations, needs, f"{where}.input_activations")
    return "w8a8"


def _need(found: dict[str, Any], needs: dict[str, tuple[Any, ...]], where: str) -> None:
    for field, accepted in needs.items():
        if found.get(field) not in accepted:
            wanted = " or ".join(repr(a) for a in accepted)
            raise CheckpointError(f"{where}.{field} is {found.get(field)!r}, needs {wanted}.")
