"""What a bench makes of one layer: drawn weights, routing and hidden states, and the memory that these take."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from int8moe.backends.base import FusedMoEExperts
from int8moe.config import FusedMoEConfig
from int8moe.device import GIB
from int8moe.errors import Int8MoeError
from int8moe.quant_config import int8_w8a8_moe_quant_config, int8_w8a16_moe_quant_config
from int8moe.quantize.int8 import quantize_weight
from int8moe.weights import ExpertWeights

OURS = "int8moe"
DRAWN_EXPERTS = 8
_MEMORY_SHARE = 0.9
Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def operations(config: FusedMoEConfig, tokens: int) -> float:
    """2 for each weight that a token's experts multiply with."""
    weights = config.hidden_dim * (config.w13_rows + config.intermediate_size_per_partition)
    return 2.0 * tokens * config.experts_per_token * weights


def expert_bytes(config: FusedMoEConfig) -> int:
    """int8 weights and float32 scales of one expert."""
    rows = config.w13_rows + config.hidden_dim
    return config.hidden_dim * (config.w13_rows + config.intermediate_size_per_partition) + 4 * rows


def call_bytes(config: FusedMoEConfig, tokens: int) -> int:
    """About what one call's tensors take: drawing its routing, hidden states in and out, PyTorch's intermediates."""
    hidden, topk = config.hidden_dim, config.experts_per_token
    return tokens * (16 * config.num_experts + 16 * hidden + topk * (8 * hidden + 8 * config.w13_rows))


def left_for_layers(name: str, config: FusedMoEConfig, tokens: int, available: int | None) -> int | None:
    """What of the available memory a call of so many tokens leaves. Raises Int8MoeError where it leaves none."""
    if available is None:
        return None
    call = call_bytes(config, tokens)
    if call >= available:
        raise Int8MoeError(
            f"{name}: a call of {tokens:,} tokens takes about {call / GIB:,.1f} GiB, and {available / GIB:.1f} GiB of"
            " memory can be used; needs fewer in --tokens."
        )
    return available - call


def fit_copies(
    name: str, wanted: dict[str, int], size: dict[str, int], fixed: int, available: int | None
) -> dict[str, int]:
    """Copies of each form, as `wanted`, or as many as the memory holds; one of each at least.

    Args:
        size: bytes of one copy, by form. fixed: bytes needed besides.
        available: bytes of memory; None where nobody says.
    Raises:
        Int8MoeError: not even one copy of each form fits.
    """
    budget = math.inf if available is None else _MEMORY_SHARE * available
    need = lambda copies: fixed + sum(copies[form] * size[form] for form in copies)
    least = need(dict.fromkeys(size, 1))
    if least > budget:
        advice = "a smaller shape, or a part of it with a larger --tp"
        advice = f"{advice}, or fewer forms in --compare" if len(size) > 1 else advice
        raise Int8MoeError(
            f"{name}: one layer takes {least / GIB:.1f} GiB while it is packed and checked, and {budget / GIB:.1f} GiB"
            f" of memory can be used; needs {advice}."
        )
    copies = dict(wanted)
    while need(copies) > budget:
        largest = max((f for f in copies if copies[f] > 1), key=lambda f: copies[f] * size[f])
        copies[largest] -= 1
    return copies


def draw_weights(
    config: FusedMoEConfig, uniform_codes: bool, tick: Callable[[float], None], device: str = "cpu"
) -> ExpertWeights:
    """Canonical weights of one layer.

    Normally distributed, and quantised as a checkpoint is; `DRAWN_EXPERTS` are drawn, the others are those with
    their rows in another order (drawing all of a large layer takes minutes, and only its memory has to be its own).

    Args:
        uniform_codes: int8 codes evenly from -127 to 127 instead.
        tick: told the share that is done.
    """
    g = torch.Generator(device).manual_seed(0)
    on: dict[str, Any] = {"device": device, "generator": g}
    experts, rows, hidden = int(config.num_local_experts or 0), config.w13_rows, config.hidden_dim
    made: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    drawn = min(experts, DRAWN_EXPERTS)
    for part, (name, n, k) in enumerate(
        (("w13", rows, hidden), ("w2", hidden, config.intermediate_size_per_partition))
    ):
        codes = torch.empty(experts, n, k, dtype=torch.int8, device=device)
        scale = torch.empty(experts, n, device=device)
        for e in range(experts):
            if e >= drawn:
                shift = 1 + e // drawn
                codes[e], scale[e] = (torch.roll(t[e % drawn], shift, 0) for t in (codes, scale))
            elif uniform_codes:
                codes[e] = torch.randint(-127, 128, (n, k), dtype=torch.int8, **on)
                scale[e] = torch.rand(n, **on) * 1e-3
            else:
                codes[e], scale[e] = quantize_weight(torch.randn(n, k, **on) * 0.02)
            tick((part + min(1.0, (e + 1) / drawn)) / 2)
        made[name] = codes, scale
    bias = lambda n: torch.randn(experts, n, **on) * 0.02 if config.has_bias else None
    (w13, s13), (w2, s2) = made["w13"], made["w2"]
    return ExpertWeights(w13, w2, s13, s2, bias(rows), bias(hidden))


def packed_layer(
    cls: type[FusedMoEExperts], config: FusedMoEConfig, weights: ExpertWeights, weight_only: bool = False
) -> FusedMoEExperts:
    """A layer of `cls` with its own copy of the weights (Triton and the reference keep those they are given)."""
    quantised = int8_w8a16_moe_quant_config if weight_only else int8_w8a8_moe_quant_config
    quant = quantised(weights.w13_scale, weights.w2_scale, weights.w13_bias, weights.w2_bias)
    experts = cls(config, quant)
    experts.process_weights_after_loading(SimpleNamespace(w13_weight=weights.w13, w2_weight=weights.w2))
    return experts


def draw_call(config: FusedMoEConfig, tokens: int, seed: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """topk_weights float32 [M, topk] and topk_ids int64 [M, topk]: distinct experts, evenly drawn."""
    g = torch.Generator(device).manual_seed(seed)
    logits = torch.rand(tokens, config.num_experts, device=device, generator=g)
    weights, ids = logits.softmax(-1).topk(config.experts_per_token)
    return weights.float().contiguous(), ids


def draw_hidden(config: FusedMoEConfig, tokens: int, device: str = "cpu") -> torch.Tensor:
    """Hidden states [M, H] in the layer's dtype."""
    g = torch.Generator(device).manual_seed(tokens)
    return torch.randn(tokens, config.hidden_dim, device=device, generator=g).to(getattr(torch, str(config.in_dtype)))
