"""Checks of a layer call's arguments, the same for every backend."""

from __future__ import annotations

import os

import torch

from int8moe.config import FusedMoEConfig
from int8moe.errors import InvalidRouting, ShapeMismatch

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

VALIDATE_VARIABLE = "INT8MOE_VALIDATE"

CALL_SCHEMA = (
    "Tensor hidden_states, Tensor topk_weights, Tensor topk_ids, Tensor? expert_map, int num_experts, bool on_input"
)
"""The leading arguments of a GPU backend's operator."""


def validates() -> bool:
    """Whether a call on a GPU looks at the expert ids before it runs."""
    return os.environ.get(VALIDATE_VARIABLE) == "1"


def check_call(
    config: FusedMoEConfig,
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
) -> None:
    """Shapes and dtypes of one call; looks at no values, so it neither syncs nor breaks tracing.

    Raises:
        ShapeMismatch: what was seen and what is needed.
    """
    if hidden_states.dim() != 2 or hidden_states.shape[1] != config.hidden_dim:
        raise ShapeMismatch(
            f"hidden_states has shape {tuple(hidden_states.shape)}, needs (tokens, {config.hidden_dim})."
        )
    if hidden_states.dtype not in FLOAT_DTYPES:
        raise ShapeMismatch(f"hidden_states has dtype {hidden_states.dtype}, needs bfloat16, float16 or float32.")
    want = (hidden_states.shape[0], topk_ids.shape[-1] if topk_ids.dim() else 0)
    for name, tensor in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        if tuple(tensor.shape) != want:
            raise ShapeMismatch(f"{name} has shape {tuple(tensor.shape)}, needs {want}: tokens, experts per token.")
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise ShapeMismatch(f"topk_ids has dtype {topk_ids.dtype}, needs int32 or int64.")
    if topk_weights.dtype is not torch.float32:
        raise ShapeMismatch(f"topk_weights has dtype {topk_weights.dtype}, needs float32.")
    if expert_map is None and config.num_local_experts != config.num_experts:
        raise ShapeMismatch(
            f"expert_map is missing: this rank holds {config.num_local_experts} of {config.num_experts} experts."
        )
    if expert_map is not None and tuple(expert_map.shape) != (config.num_experts,):
        raise ShapeMismatch(
            f"expert_map has shape {tuple(expert_map.shape)}, needs ({config.num_experts},): a local index for each"
            " global expert, -1 where it lives elsewhere."
        )


def check_routing_values(config: FusedMoEConfig, topk_ids: torch.Tensor, expert_map: torch.Tensor | None) -> None:
    """Look at the ids themselves (a device sync on a GPU).

    Raises:
        InvalidRouting: an id outside 0..num_experts-1, or a map entry outside -1..num_local_experts-1.
    """
    if topk_ids.numel():
        low, high = topk_ids.aminmax()
        if low < 0 or high >= config.num_experts:
            bad = int(low) if low < 0 else int(high)
            raise InvalidRouting(f"topk_ids holds {bad}, needs 0 to {config.num_experts - 1}.")
    if expert_map is not None and expert_map.numel():
        low, high = expert_map.aminmax()
        if low < -1 or high >= (config.num_local_experts or 0):
            bad = int(low) if low < -1 else int(high)
            raise InvalidRouting(
                f"expert_map holds {bad}, needs -1 (elsewhere) or 0 to {(config.num_local_experts or 0) - 1}."
            )
