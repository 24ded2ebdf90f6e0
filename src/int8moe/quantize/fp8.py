"""FP8 checkpoints with a scale per block (DeepSeek-V3's form): which they are, and their weights as float32."""

from __future__ import annotations

from typing import Any

import torch

from int8moe.errors import CheckpointError

DTYPE = "F8_E4M3"
SUFFIX = "_scale_inv"


def read_block(quantization: dict[str, Any], where: str) -> tuple[int, int]:
    """Rows and columns that share a scale.

    Raises:
        CheckpointError: the checkpoint is quantised in another form; says which field.
    """
    method = quantization.get("quant_method", "unknown")
    if method != "fp8":
        raise CheckpointError(
            f"{where} is quantised already ({method}); needs a bf16, fp16 or fp32 checkpoint, or FP8 with a scale per"
            " block."
        )
    block = quantization.get("weight_block_size")
    whole = isinstance(block, list | tuple) and len(block) == 2 and all(type(b) is int and b > 0 for b in block)
    needs: tuple[tuple[str, Any, bool, str], ...] = (
        ("weight_block_size", block, whole, "two sizes, as [128, 128] (a scale per tensor or row is not read)"),
        ("fmt", quantization.get("fmt"), quantization.get("fmt") in (None, "e4m3"), "'e4m3'"),
        (
            "activation_scheme", quantization.get("activation_scheme"),
            quantization.get("activation_scheme") in (None, "dynamic"), "'dynamic'",
        ),
    )  # fmt: skip
    for field, value, fits, need in needs:
        if not fits:
            raise CheckpointError(f"{where}: quantization_config.{field} is {value!r}, needs {need}.")
    assert block is not None
    return block[0], block[1]


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Of the scales of a weight [..., N, K]: [..., ceil(N / rows), ceil(K / columns)]."""
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def dequantize_rows(
    weight: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor, block: tuple[int, int]
) -> torch.Tensor:
    """float32 [n, K] of weight [n, K], which are the `rows` (indices) of the matrix that `scale` [N/b0, K/b1] is of."""
    out, scale = weight.float(), scale.float()[rows // block[0]]
    whole = out.shape[1] // block[1] * block[1]  # the last block may be a part of one
    out[:, :whole].unflatten(1, (-1, block[1])).mul_(scale[:, : whole // block[1], None])
    out[:, whole:].mul_(scale[:, whole // block[1] :])
    return out
