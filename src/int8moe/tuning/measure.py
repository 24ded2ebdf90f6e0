"""One MoE layer of random int8 weights on the GPU, and the time of its kernels inside CUDA graphs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from int8moe.backends.triton import launch
from int8moe.backends.triton.configs import Plan, TileConfig
from int8moe.bench.cuda import graphs_in_turn
from int8moe.config import FusedMoEConfig, MoEActivation

Body = Callable[[], Any]


def layer_of(config: FusedMoEConfig, device: str, weight_only: bool = False) -> launch.Layer:
    """A layer of `config`: evenly drawn codes on a GPU; unwritten memory (which costs nothing) on a CPU."""
    experts, hidden = int(config.num_local_experts or 0), config.hidden_dim
    inter = config.intermediate_size_per_partition
    rows = inter * (2 if config.is_act_and_mul else 1)
    kind = MoEActivation(config.activation)
    generator = torch.Generator(device).manual_seed(0)

    def codes(*shape: int) -> torch.Tensor:
        w = torch.empty(shape, dtype=torch.int8, device=device)
        return w if device == "cpu" else w.random_(-127, 128, generator=generator)

    def floats(*shape: int, scale: float) -> torch.Tensor:
        return (torch.rand(shape, device=device, generator=generator) + 0.5) * scale

    w2 = codes(experts, hidden, inter + -inter % launch.ALIGNED)
    w2[:, :, inter:] = 0
    return launch.Layer(
        w13=codes(experts, rows, hidden),
        w2=w2,
        w13_scale=floats(experts, rows, scale=0.5 / 127 / hidden**0.5),
        w2_scale=floats(experts, hidden, scale=0.5 / 127 / inter**0.5),
        w13_bias=floats(experts, rows, scale=0.1) if config.has_bias else None,
        w2_bias=floats(experts, hidden, scale=0.1) if config.has_bias else None,
        activation="swigluoai" if kind.is_swigluoai else kind.value,
        gated=config.is_act_and_mul,
        interleaved=kind.is_interleaved,
        alpha=float(config.swiglu_alpha),
        limit=None if config.swiglu_limit is None else float(config.swiglu_limit),
        activations="float" if weight_only else "token",
    )


class Call:
    """Inputs of one layer call with M tokens: routing drawn from softmax of normal logits."""

    def __init__(self, config: FusedMoEConfig, layer: launch.Layer, tokens: int, seed: int) -> None:
        device = layer.w13.device
        generator = torch.Generator(device).manual_seed(seed)
        self.num_experts = config.num_experts
        dtype = getattr(torch, str(config.in_dtype))
        self.x = torch.randn(tokens, config.hidden_dim, device=device, generator=generator).to(dtype)
        logits = torch.randn(tokens, config.num_experts, device=device, generator=generator)
        weights, self.ids = logits.softmax(-1).topk(config.experts_per_token, dim=-1)
        self.weights = weights.contiguous()
        self.expert_map = None
        local = layer.num_local
        if local < config.num_experts:  # this rank's share: the first ones
            self.expert_map = torch.full((config.num_experts,), -1, dtype=torch.int32, device=device)
            self.expert_map[:local] = torch.arange(local, dtype=torch.int32, device=device)

    def rows(self, num_local: int) -> tuple[int, ...]:
        """Slots of each local expert that has any."""
        counts = torch.bincount(self.ids.flatten(), minlength=num_local)[:num_local].tolist()
        return tuple(c for c in counts if c)


def median_us(bodies: Sequence[Body], seconds: float) -> float:
    """Median time of one body, from replays of a graph that runs each of `bodies` once."""
    times = graphs_in_turn({"": bodies}, seconds)[""]
    return statistics.median(times) * 1e3


class Stage:
    """One call, stopped before a GEMM: what `tile` is timed on, and what it must compute."""

    def __init__(self, layer: launch.Layer, call: Call, topk: int, block_m: int, sort_rows: bool) -> None:
        self.layer, self.call, self.topk, self.sort_rows = layer, call, topk, sort_rows
        token = layer.activations == "token"
        here = call.x if token and not sort_rows else None
        self.blocks, codes = launch.align(
            call.ids, call.expert_map, call.num_experts, layer.num_local, block_m, here, places=sort_rows
        )
        self.a, self.scale = call.x, None
        if token:
            self.a, self.scale = codes or launch.quantize_rows(call.x, self.blocks, spread=topk)
        slots, dtype = call.ids.numel(), call.x.dtype
        self.h = torch.empty(slots, layer.intermediate, dtype=dtype, device=call.x.device)
        self.y = torch.empty(slots, call.x.shape[1], dtype=dtype, device=call.x.device)
        self.h_codes: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def gemm1(self, tile: TileConfig) -> torch.Tensor:
        rows = None if self.sort_rows else self.topk
        launch.grouped_gemm(self.layer, True, self.a, self.scale, self.h, self.blocks, tile, rows)
        return self.h

    def gemm2(self, tile: TileConfig) -> torch.Tensor:
        """After one `gemm1`."""
        if self.h_codes is None:
            token = self.layer.activations == "token"
            wide = self.layer.w2.shape[2]
            self.h_codes = launch.quantize_rows(self.h, self.blocks, columns=wide) if token else (self.h, None)
        a, scale = self.h_codes
        launch.grouped_gemm(self.layer, False, a, scale, self.y, self.blocks, tile, None, self.call.weights)
        return self.y

    def held(self, first: bool) -> torch.Tensor:
        """Which rows of `h` or `y` a GEMM writes, as indices."""
        count = int(self.blocks.totals[1])
        order = self.blocks.order
        assert order is not None
        return torch.arange(count, device=order.device) if first else order[:count].long()


def run_layer(layer: launch.Layer, call: Call, plan: Plan) -> torch.Tensor:
    """A whole call under `plan`."""
    from int8moe.backends.triton.run import run_standard

    return run_standard(layer, call.x, call.weights, call.ids, call.expert_map, call.num_experts, False, plan)
