"""PyTorch's grouped bf16 matrix product as an MoE layer: what the INT8 layer is compared with on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from int8moe.bench.torch_loop import TorchLoop, activate


def grouped_product() -> Callable[..., Any] | None:
    """torch's grouped matrix product, or None where this torch has none."""
    found: Callable[..., Any] | None = getattr(torch, "_grouped_mm", None)
    return found or getattr(torch.nn.functional, "grouped_mm", None)


class TorchGrouped(TorchLoop):
    """One layer's weights in bf16, all experts in one product."""

    def apply(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        """Rows sorted by expert inside the call, as a user would: [M, H] in bf16. Waits for nothing on the device."""
        grouped, topk, experts = grouped_product(), topk_ids.shape[1], self.w13.shape[0]
        assert grouped is not None, "the bench asks first"
        x = x.to(self.w13.dtype)
        expert, order = topk_ids.reshape(-1).sort(stable=True)
        each = torch.arange(experts, device=expert.device, dtype=expert.dtype)
        ends = torch.searchsorted(expert, each, right=True).to(torch.int32)
        y = grouped(x[order // topk], self.w13.transpose(1, 2), offs=ends)
        h = activate(self.config, y if self.w13_bias is None else y + self.w13_bias[expert])
        y = grouped(h, self.w2.transpose(1, 2), offs=ends)
        y = y if self.w2_bias is None else y + self.w2_bias[expert]
        slots = torch.empty_like(y)
        slots[order] = y * topk_weights.reshape(-1)[order, None].to(y.dtype)
        return slots.view(-1, topk, slots.shape[1]).sum(1)
