"""Rows of hidden states as the GPU backends pass them on: one for each slot, or a padded batch for each expert."""

from __future__ import annotations

import torch


def weighted_rows(hidden_states: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """apply_router_weight_on_input: [M * topk, H], a row for each slot, round(float(x) * weight)."""
    rows = hidden_states.float()[:, None, :] * topk_weights[:, :, None]
    return rows.to(hidden_states.dtype).reshape(-1, hidden_states.shape[1])


def make_batches(
    x: torch.Tensor, experts_of: torch.Tensor, experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A padded batch for each expert, without a look at the ids.

    Args:
        x: [R, H]. experts_of: int64 [R, k], the local experts of each row; `experts` where there is none.
    Returns:
        [experts * R, H], of which each expert's R rows begin with those of its own, in their order; how many those are,
        int32 [experts]; and the row of each slot in the first, int32 [R, k], experts * R where there is none. A row
        that names an expert twice is there once, so that R rows always suffice.
    """
    rows = len(x)
    takes = torch.zeros(rows, experts + 1, dtype=torch.int32, device=x.device).scatter_(1, experts_of, 1)
    place = (takes.cumsum(0, dtype=torch.int32) - 1).gather(1, experts_of)
    slot_row = torch.where(experts_of < experts, experts_of * rows + place, experts * rows)
    batches = torch.empty(experts * rows + 1, x.shape[1], dtype=x.dtype, device=x.device)  # the last for absent experts
    batches.index_copy_(0, slot_row.flatten(), x.repeat_interleave(experts_of.shape[1], 0))
    return batches[:-1], takes[:, :experts].sum(0, dtype=torch.int32), slot_row.to(torch.int32)
