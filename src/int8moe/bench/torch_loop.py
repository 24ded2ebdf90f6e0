"""PyTorch's usual expert loop in bf16 or fp32: what the INT8 layer is compared with."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from int8moe.config import FusedMoEConfig, MoEActivation
from int8moe.weights import ExpertWeights

FORMS = {"torch-bf16": torch.bfloat16, "torch-fp32": torch.float32}

_ACTIVATIONS: dict[MoEActivation, Callable[[torch.Tensor], torch.Tensor]] = {
    MoEActivation.SILU: F.silu,
    MoEActivation.GELU: F.gelu,
    MoEActivation.GELU_TANH: lambda g: F.gelu(g, approximate="tanh"),
    MoEActivation.RELU2: lambda g: F.relu(g).square(),
}


def activate(config: FusedMoEConfig, y: torch.Tensor) -> torch.Tensor:
    """Gate, clamp and multiply, in the dtype of y: [rows, 2*I] (or [rows, I] when not gated) to [rows, I]."""
    kind, limit = MoEActivation(config.activation), config.swiglu_limit
    if not config.is_act_and_mul:
        return _ACTIVATIONS[kind](y)
    gate, up = (y[:, 0::2], y[:, 1::2]) if kind.is_interleaved else y.chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if kind.is_swigluoai:
        return (up + 1) * (gate * torch.sigmoid(gate * config.swiglu_alpha))
    return _ACTIVATIONS[kind](gate) * up


class TorchLoop:
    """One layer's weights in a float dtype, and the loop over its experts."""

    def __init__(self, config: FusedMoEConfig, weights: ExpertWeights, dtype: torch.dtype) -> None:
        def dequantised(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
            for expert in range(len(codes)):  # one float32 copy of one expert at a time
                out[expert] = codes[expert].float() * scale[expert][:, None]
            return out

        self.config = config
        self.w13, self.w2 = dequantised(weights.w13, weights.w13_scale), dequantised(weights.w2, weights.w2_scale)
        as_dtype = lambda bias: None if bias is None else bias.to(dtype)
        self.w13_bias, self.w2_bias = as_dtype(weights.w13_bias), as_dtype(weights.w2_bias)

    def apply(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        """Rows sorted by expert, two linears each, index_add: [M, H] in the dtype of the weights."""
        flat, w13 = topk_ids.flatten(), self.w13
        order = flat.argsort()
        token = order // topk_ids.shape[1]
        counts = torch.bincount(flat, minlength=w13.shape[0]).tolist()
        x = x.to(w13.dtype)
        out, start = torch.zeros_like(x), 0
        bias = lambda b, expert: None if b is None else b[expert]
        for expert, count in enumerate(counts):
            if count:
                rows = token[start : start + count]
                h = activate(self.config, F.linear(x[rows], w13[expert], bias(self.w13_bias, expert)))
                y = F.linear(h, self.w2[expert], bias(self.w2_bias, expert))
                out.index_add_(0, rows, y * topk_weights.flatten()[order[start : start + count], None].to(y.dtype))
                start += count
        return out
