"""One layer's GEMMs on the humming-kernels package: which kernels, and the three layouts that call them.

A GEMM never splits K over blocks. The package's own choice often does, and its blocks then add their partial sums in
16 bits, with more than three of them in no fixed order. Without the split every int8 product is summed in int32 before
anything is rounded, so a row's result depends on neither tile nor batch, no lock is shared between calls, and calls on
several streams cannot meet.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from int8moe.backends.humming.kernels import Route, align, count, group
from int8moe.backends.rows import make_batches

NAN_TO_INFINITY = "a == a ? a : __int_as_float(0x7f800000)"
"""Before the input is quantised: the maximum would skip NaN, whereas infinity makes the row's scale infinite and with
it the token's output NaN, as the contract wants."""

NARROWER = True
"""Whether few rows may get narrower tiles than the package's, so that they fill the GPU without a split of K."""
NARROW_GAIN = 0.9
NARROWEST, NARROW_ROWS, NARROW_SLOTS = 64, 16, 16
"""Narrowest width, tallest tile and most slots of a call to narrow. On an H200 it saves 3 to 7 % of a layer's time with
2 and 8 slots, and costs 6 to 17 % of it with 64 and 256 (Qwen3-30B-A3B and Mixtral-8x7B, 2026-12-02)."""
MOST_STAGES = 8
ROW_COUNTS = tuple(sorted({q << k >> 2 for k in range(17) for q in (4, 5, 6, 7)}))
"""Where kernels may change: four steps to each doubling, up to 114,688 rows."""


@dataclass(frozen=True)
class Tuning:
    """A kernel choice for (low, high] rows; its tile height; the choice as the package takes it (JSON)."""

    low: int
    high: int
    block_m: int
    text: str


@dataclass(frozen=True)
class GemmPlan:
    """One GEMM without its tensors: the package's `LayerConfig`, and kernels by number of rows."""

    config: Any
    tunings: tuple[Tuning, ...]

    @property
    def rows(self) -> int:
        """Rows of the canonical weight (N); the native one has padding."""
        return int(self.config.shape_n - self.config.pad_shape_n)

    @property
    def columns(self) -> int:
        """Columns of the canonical weight (K)."""
        return int(self.config.shape_k - self.config.pad_shape_k)

    def tuning(self, slots: int) -> Tuning:
        return next((t for t in self.tunings if t.low < slots <= t.high), self.tunings[-1])


@dataclass(frozen=True)
class LayerPlan:
    """One layer without its tensors.

    Args:
        gemm_type: "indexed", "grouped_contiguous" or "grouped_masked".
        activation: how the package's `process_input` takes the activation.
        dtype: of hidden states and outputs. experts: local ones. hidden: columns of the output. topk: slots a token.
    """

    gemm_type: str
    w13: GemmPlan
    w2: GemmPlan
    activation: dict[str, str]
    dtype: torch.dtype
    experts: int
    hidden: int
    topk: int = 1

    @property
    def compute_config(self) -> str:
        return json.dumps({"gemm_type": self.gemm_type})

    def key(self) -> str:
        """The same for every layer that runs the same kernels in the same way."""
        parts = [self.gemm_type, self.dtype, self.experts, self.hidden, self.topk, sorted(self.activation.items())]
        parts += [(g.config.to_str(), g.tunings) for g in (self.w13, self.w2)]
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


@dataclass(frozen=True)
class Gemm:
    """A GEMM and its native tensors."""

    plan: GemmPlan
    weight: torch.Tensor
    scale: torch.Tensor
    expert_scale: torch.Tensor | None
    bias: torch.Tensor | None

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.weight, self.scale, self.expert_scale, self.bias


# --- which kernels ---------------------------------------------------------------------------------------------------


def choose_tunings(config: Any, gemm_type: str, device: torch.device | int) -> tuple[Tuning, ...]:
    """The package's kernel choices by number of rows, none of which splits K over blocks, few rows on narrower tiles
    where that fills the GPU better.

    The package is asked at `ROW_COUNTS`: its own table has one entry for eight rows more, and takes seconds to make.
    """
    from humming.device import DeviceInfo
    from humming.tune import get_heuristics_config

    chosen = [
        (rows, get_heuristics_config(config, shape_m=rows, gemm_type=gemm_type, device=device)) for rows in ROW_COUNTS
    ]
    return unsplit(chosen, config, DeviceInfo(device).sm_count)


def unsplit(chosen: Sequence[tuple[int, dict[str, Any]]], config: Any, multiprocessors: int) -> tuple[Tuning, ...]:
    """Intervals that end at the row counts of `chosen`, without a split of K; equal neighbours are joined."""
    made: list[Tuning] = []
    for rows, tuning in chosen:
        whole = {**tuning, "use_stream_k": False}
        if NARROWER and rows <= NARROW_SLOTS:
            whole = _narrowed(whole, config, rows, multiprocessors)
        text = json.dumps(whole)
        if made and made[-1].text == text:
            made[-1] = replace(made[-1], high=rows)
        else:
            made.append(Tuning(made[-1].high if made else 0, rows, int(whole["block_shape"][0]), text))
    made[-1] = replace(made[-1], high=1 << 62)
    return tuple(made)


def _narrowed(tuning: dict[str, Any], config: Any, rows: int, multiprocessors: int) -> dict[str, Any]:
    """`tuning` with the tile width that needs the least time by waves of tiles, each as long as it is wide.

    Only where a tile holds few rows, so that reading weights takes the time, and for the instructions of 9.0, whose
    kernels take any of these widths. Narrower tiles get more stages: as many bytes are under way.
    """
    block_m, block_n, block_k = tuning["block_shape"]
    warp_m, warp_n, warp_k = tuning["warp_shape"]
    if tuning.get("mma_type") != "wgmma" or block_m > NARROW_ROWS or block_k != warp_k:
        return tuning
    experts = config.num_experts * (1 - (1 - 1 / config.num_experts) ** rows)
    columns = experts * math.ceil(rows / experts / block_m) * config.shape_n

    def cost(width: int) -> int:
        return math.ceil(columns / width / multiprocessors) * width

    widths = [w for w in (block_n, block_n // 2, block_n // 4) if w >= NARROWEST and config.shape_n % w == 0]
    best = min(widths, key=lambda w: (cost(w), -w), default=block_n)
    if best == block_n or cost(best) > NARROW_GAIN * cost(block_n):
        return tuning
    stages = min(MOST_STAGES, tuning["num_stages"] * block_n // best, max(3, config.shape_k // block_k))
    narrow = {k: v for k, v in tuning.items() if k != "num_sms"}
    narrow |= {
        "block_shape": [block_m, best, block_k],
        "warp_shape": [warp_m, max(16, warp_n * best // block_n), warp_k],
        "num_stages": max(stages, tuning["num_stages"]),
    }
    return narrow


# --- what the package does -------------------------------------------------------------------------------------------


def on_device(x: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def quantize(gemm: GemmPlan, x: torch.Tensor, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 codes [R, K] and float32 scales [R, 1], after the activation that `how` names."""
    from humming.forward import may_process_input

    codes, _, scale = may_process_input(gemm.config, x, **how)
    assert scale is not None
    return codes, scale


def multiply(
    plan: LayerPlan,
    gemm: Gemm,
    codes: torch.Tensor,
    scale: torch.Tensor,
    slots: int,
    tuning: Tuning,
    out: torch.Tensor | None = None,
    top_k: int = 1,
    **meta: torch.Tensor,
) -> torch.Tensor:
    """The GEMM: [slots, N] in the layer's dtype. `meta` says which rows are which expert's."""
    from humming.forward import humming_forward

    if out is None:
        out = torch.empty((slots, gemm.plan.rows), dtype=plan.dtype, device=codes.device)
    humming_forward(
        gemm.plan.config,
        inputs=codes,
        weight=gemm.weight,
        weight_scale=gemm.scale,
        weight_scale_2=gemm.expert_scale,
        bias=gemm.bias,
        outputs=out,
        input_scale=scale,
        top_k=top_k,
        valid_shape_m=slots,
        compute_config=plan.compute_config,
        tuning_config=tuning.text,
        **meta,
    )
    return out


# --- the three layouts: results [R, H] before the router weight, and the row of each slot (None for row = slot) ------


def _busy(route: Route) -> int:
    """Slots that will have an expert here, as far as the host can know; chooses the kernel, not the result."""
    return max(1, math.ceil(route.slots * route.num_local_experts / route.num_experts))


def indexed(plan: LayerPlan, w13: Gemm, w2: Gemm, x: torch.Tensor, route: Route) -> tuple[torch.Tensor, None]:
    """Tokens are quantised once; the GEMM gathers the rows of each tile by slot number."""
    first, second = w13.plan.tuning(_busy(route)), w2.plan.tuning(_busy(route))
    counts = count(route)
    tiles = {height: align(route, counts, height) for height in {first.block_m, second.block_m}}
    codes, scale = quantize(w13.plan, x, activation_type="unary", activation_impl=NAN_TO_INFINITY)
    y = multiply(plan, w13, codes, scale, route.slots, first, top_k=route.topk, **tiles[first.block_m])
    codes, scale = quantize(w2.plan, y, **plan.activation)
    return multiply(plan, w2, codes, scale, route.slots, second, **tiles[second.block_m]), None


def grouped(plan: LayerPlan, w13: Gemm, w2: Gemm, x: torch.Tensor, route: Route) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows are scattered into expert order while they are quantised, and stay there until the sum."""
    first, second = w13.plan.tuning(_busy(route)), w2.plan.tuning(_busy(route))
    slot_rows, offsets = group(route, count(route))
    codes, scale = quantize(
        w13.plan, x, activation_type="unary", activation_impl=NAN_TO_INFINITY, layout="scatter", scatter_idx=slot_rows
    )
    y = multiply(plan, w13, codes, scale, route.slots, first, expert_layout=offsets)
    codes, scale = quantize(w2.plan, y, num_valid_tokens=offsets[-1:], **plan.activation)
    return multiply(plan, w2, codes, scale, route.slots, second, expert_layout=offsets), slot_rows


def masked(plan: LayerPlan, w13: Gemm, w2: Gemm, x: torch.Tensor, route: Route) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes a padded batch for each expert."""
    experts = route.num_local_experts
    batches, counts, slot_rows = make_batches(x, _local_experts(route), experts)
    y = torch.empty((len(batches), plan.hidden), dtype=x.dtype, device=x.device)
    return run_batches(plan, w13, w2, batches, counts, _busy(route), y), slot_rows


def run_batches(
    plan: LayerPlan, w13: Gemm, w2: Gemm, x: torch.Tensor, counts: torch.Tensor, busy: int, out: torch.Tensor
) -> torch.Tensor:
    """Experts on padded batches [E * T, H] into `out`; rows past an expert's count are neither read nor written."""
    rows = {"layout": "grouped_mask", "expert_tokens": counts}
    codes, scale = quantize(w13.plan, x, activation_type="unary", activation_impl=NAN_TO_INFINITY, **rows)
    y = multiply(plan, w13, codes, scale, x.shape[0], w13.plan.tuning(busy), expert_layout=counts)
    codes, scale = quantize(w2.plan, y, **rows, **plan.activation)
    return multiply(plan, w2, codes, scale, x.shape[0], w2.plan.tuning(busy), out, expert_layout=counts)


LAYOUTS = {"indexed": indexed, "grouped_contiguous": grouped, "grouped_masked": masked}


def _local_experts(route: Route) -> torch.Tensor:
    """int64 [tokens, topk]: the local expert of each slot, num_local_experts where there is none."""
    ids, none = route.ids.long(), route.num_local_experts
    valid = (ids >= 0) & (ids < route.num_experts)
    if route.expert_map is not None:
        ids = route.expert_map.long()[torch.where(valid, ids, 0)]
        valid = valid & (ids >= 0) & (ids < none)
    return torch.where(valid, ids, none)
