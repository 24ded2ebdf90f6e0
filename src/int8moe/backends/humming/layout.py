"""Weights, scales and biases in the layout that the humming-kernels package computes on.

The package's own code converts; this module feeds it one tensor at a time and keeps the books. Nothing of the
package is imported until a tensor is converted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from int8moe.backends.humming.cache import prepare_folders, use_compiler_that_is_here
from int8moe.errors import AlreadyConverted, ConfigError, MissingPackage, ShapeMismatch

Schema = dict[str, Any]
SchemaFn = Callable[[torch.Tensor, torch.Tensor], Schema]

SUBLAYERS = ("w13", "w2")
NATIVE_DTYPE = torch.int32
"""Native weights hold four codes a word: int32 [E, rows padded to 64, columns padded to 64 / 4]; canonical are int8."""
TILE = 64
CHUNK_BYTES = 256 << 20
"""Weights converted at once: the package makes about three copies of what it converts."""

CHANNEL_SCHEMA: Schema = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "type": "int",
    "num_bits": 8,
    "symmetric": True,
    "strategy": "channel",
}
INPUT_SCHEMA: Schema = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "type": "int",
    "num_bits": 8,
    "symmetric": True,
    "dynamic": True,
}


def require_humming() -> Any:
    """The humming package, with folders it can write to. Raises MissingPackage, naming the extra that installs it."""
    prepare_folders()
    use_compiler_that_is_here()
    try:
        import humming
        import humming.schema
        import humming.transform
    except ImportError as error:
        raise MissingPackage(
            f"The humming backend needs the humming-kernels package ({error}): pip install 'int8moe[humming]'."
        ) from error
    return humming


def is_native(weight: torch.Tensor) -> bool:
    """Whether a weight is already in Humming's layout."""
    return weight.dtype is NATIVE_DTYPE


def padded(size: int) -> int:
    return -(-size // TILE) * TILE


def convert_layer(layer: Any, schema_fn: SchemaFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert a layer's weights in place and return them.

    Args:
        layer: holds int8 `w13_weight` [E, 2*I, H] and `w2_weight` [E, H, I], and their scales, either as
            `w13_scale` and `w2_scale` [E, N] or as `w13_weight_scale` and `w2_weight_scale` [E, N, 1].
        schema_fn: (weight, scale) to the package's description of both.
    Returns:
        `layer.w13_weight` and `layer.w2_weight`, native. Scales keep their float32 values, as `w13_weight_scale` and
        `w2_weight_scale` [E, N, 1]: their native form depends on the activations' dtype, which the runner knows.
    Raises:
        ConfigError: no layer, or one that lacks a tensor (a ValueError).
        AlreadyConverted: the weights are native already. MissingPackage: no humming-kernels.
    """
    if layer is None:
        raise ConfigError(
            "layer is None, needs the layer that holds w13_weight, w2_weight and their scales:"
            " Humming converts its tensors in place."
        )
    for sub in SUBLAYERS:
        weight = getattr(layer, f"{sub}_weight", None)
        if weight is None:
            raise ConfigError(f"layer has no {sub}_weight, needs an int8 tensor [experts, rows, columns].")
        if is_native(weight):
            raise AlreadyConverted(f"{sub}_weight is in Humming's layout already, needs the canonical int8 tensor.")
    for sub in SUBLAYERS:
        rename_scale(layer, sub)
    require_humming()
    for sub in SUBLAYERS:
        weight, scale = getattr(layer, f"{sub}_weight").data, getattr(layer, f"{sub}_weight_scale").data
        replace(layer, f"{sub}_weight", to_native(sub, weight, scale, schema_fn(weight, scale)))
        del weight
    return layer.w13_weight, layer.w2_weight


def rename_scale(layer: Any, sub: str) -> None:
    """`w13_scale` [E, N] becomes `w13_weight_scale` [E, N, 1], and the old attribute goes; done before, nothing."""
    old, new = f"{sub}_scale", f"{sub}_weight_scale"
    source = new if getattr(layer, new, None) is not None else old
    scale = getattr(layer, source, None)
    if scale is None:
        raise ConfigError(f"layer has neither {new} nor {old}, needs one scale per output row of {sub}_weight.")
    if scale.dim() < 3:
        replace(layer, new, scale.data.unsqueeze(-1), like=scale)
    elif source == old:
        replace(layer, new, scale.data, like=scale)
    if hasattr(layer, old):
        delattr(layer, old)


def replace(layer: Any, name: str, tensor: torch.Tensor, like: Any = None) -> None:
    """Set an attribute, as a parameter if the one it replaces (or `like`) is one; the old tensor is let go first."""
    old = getattr(layer, name, None) if like is None else like
    as_parameter = isinstance(old, torch.nn.Parameter)
    del old, like
    if hasattr(layer, name):
        delattr(layer, name)
    setattr(layer, name, torch.nn.Parameter(tensor, requires_grad=False) if as_parameter else tensor)


def to_native(name: str, weight: torch.Tensor, scale: torch.Tensor, schema: Schema) -> torch.Tensor:
    """Canonical int8 [E, N, K] to native int32 [E, N padded to 64, K padded to 64 / 4], some experts at a time.

    Raises:
        ShapeMismatch: not an int8 tensor on a CUDA device, or K is no multiple of 16.
    """
    if weight.dtype is not torch.int8 or weight.dim() != 3:
        raise ShapeMismatch(
            f"{name}_weight is {weight.dtype} {tuple(weight.shape)}, needs int8 [experts, rows, columns]."
        )
    experts, rows, columns = weight.shape
    if columns % 16:
        raise ShapeMismatch(f"{name}_weight has {columns} columns, needs a multiple of 16.")
    out = torch.empty((experts, padded(rows), padded(columns) // 4), dtype=NATIVE_DTYPE, device=weight.device)
    step = max(1, CHUNK_BYTES // max(1, rows * columns))
    for start in range(0, experts, step):
        part = slice(start, start + step)
        out[part] = _convert(weight[part], scale[part], schema)
    return out


def _convert(weight: torch.Tensor, scale: torch.Tensor, schema: Schema) -> torch.Tensor:
    """What the package makes of a few experts: signed to offset codes and back, tiling.

    Padding comes first, with zeros; the package itself would pad offset codes, that is, with -128.
    """
    from humming.schema import BaseInputSchema, BaseWeightSchema
    from humming.transform import prepare_and_transform_humming_tensors

    experts, rows, columns = weight.shape[0], padded(weight.shape[1]), padded(weight.shape[2])
    dtype = torch.bfloat16  # of the scale, which is not kept; the weight's layout does not depend on it
    extra = (0, columns - weight.shape[2], 0, rows - weight.shape[1])
    if schema["strategy"] == "tensor":
        scale = scale.reshape(experts)
    else:
        scale = torch.nn.functional.pad(scale, (0, 0, *extra[2:]))
    native_schema, tensors = BaseWeightSchema.from_config(schema).convert_humming(
        tensors={"weight": torch.nn.functional.pad(weight, extra), "weight_scale": scale.float()},
        shape_n_stacks=[rows],
        shape_k_stacks=[columns],
        param_dtype=dtype,
        num_experts=experts,
        device=weight.device,
        convert_symmetric_integer=False,
    )
    _, tensors = prepare_and_transform_humming_tensors(
        tensors,
        rows,
        columns,
        native_schema,
        BaseInputSchema.from_config(INPUT_SCHEMA).to_humming_schema(dtype),
        num_experts=experts,
        torch_dtype=dtype,
        device=weight.device,
    )
    return tensors["weight"]


def from_native(weight: torch.Tensor, rows: int, columns: int, flat: bool) -> torch.Tensor:
    """Canonical int8 [E, N, K], exactly, from what `to_native` returned; `flat` as in the layer's configuration.

    Flat weights are stored [E, K / 16, N / 64, 64, 16]; without it, row by row.
    """
    experts, n, words = weight.shape
    if flat:
        tiles = weight.reshape(experts, words // 4, n // TILE, TILE, 4)
        weight = tiles.permute(0, 2, 3, 1, 4).reshape(experts, n, words)
    return weight.contiguous().view(torch.int8)[:, :rows, :columns].contiguous()


def layer_config(
    rows: int, columns: int, experts: int, dtype: torch.dtype, has_bias: bool, device: torch.device
) -> Any:
    """The package's `LayerConfig` of one GEMM: int8 weights with channel scales, int8 activations per token.

    float16 layers get a second, float32 scale per expert: the GEMM's epilogue multiplies the int32 sum by the
    activation's scale and that one, rounds to 16 bits, and then multiplies by the row's scale. Without it the rounded
    value exceeds float16's range where the result does not, and small row scales are subnormal.
    """
    from humming.config import WeightScale2Type
    from humming.schema import BaseInputSchema, BaseWeightSchema
    from humming.transform import prepare_layer_config

    schema = BaseWeightSchema.from_config(CHANNEL_SCHEMA).to_humming_schema(dtype)
    if dtype is torch.float16:
        schema = dataclasses.replace(schema, weight_scale_2_type=WeightScale2Type.TENSOR)
    return prepare_layer_config(
        rows,
        columns,
        schema,
        BaseInputSchema.from_config(INPUT_SCHEMA).to_humming_schema(dtype),
        num_experts=experts,
        pad_n_to_multiple=TILE,
        pad_k_to_multiple=TILE,
        has_bias=has_bias,
        torch_dtype=dtype,
        device=device,
    )


def split_scale(scale: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Row scales float32 [E, N] as Humming holds them: [E, N] in `dtype`, and float32 [E] for float16 (else None).

    The second one is the power of two just above the expert's largest scale, so dividing by it is exact.
    """
    if dtype is not torch.float16:
        return scale.to(dtype), None
    exponent = torch.frexp(scale.amax(-1)).exponent
    common = torch.ldexp(torch.ones_like(scale[:, 0]), exponent)
    return (scale / common.unsqueeze(-1)).to(dtype), common


def native_scale(scale: torch.Tensor, config: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`split_scale`, with the row scales in native order [E, 1, N padded to 64]."""
    from humming.transform import transform_humming_weight_scale

    rows, common = split_scale(scale, config.param_dtype)
    rows = torch.nn.functional.pad(rows, (0, config.pad_shape_n)).unsqueeze(-1)
    return transform_humming_weight_scale(rows, to_apply_on_c=config.should_apply_bs_on_c), common


def native_bias(bias: torch.Tensor | None, config: Any) -> torch.Tensor | None:
    """Biases [E, N] of any float dtype in native order [E, N padded to 64], in the layer's dtype."""
    from humming.transform import transform_humming_bias

    if bias is None:
        return None
    return transform_humming_bias(torch.nn.functional.pad(bias.to(config.param_dtype), (0, config.pad_shape_n)))
