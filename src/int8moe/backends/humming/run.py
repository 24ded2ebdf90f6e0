"""Runs a layer on the humming-kernels package: the indexed, the contiguous and the masked grouped GEMM.

Held to a tolerance, not to bits (docs/numerics.md): row scales and biases are 16-bit, a GEMM's result is rounded to 16
bits before and after the row's scale, and h is re-quantised without being rounded to 16 bits first.

Expert ids outside the experts are never read through. Looking at them on the host would cost a synchronisation, so such
a token's output is NaN; with INT8MOE_VALIDATE=1 the call raises InvalidRouting instead.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from typing import Any

import torch

from int8moe import numerics as c
from int8moe.backends.arguments import check_call, check_routing_values
from int8moe.backends.humming import layout
from int8moe.backends.humming.kernels import Route, align, combine, count, group
from int8moe.config import FusedMoEConfig, MoEActivation
from int8moe.errors import ConfigError, ShapeMismatch
from int8moe.quant_config import FusedMoEQuantConfig
from int8moe.weights import ExpertWeights, per_row_scale

BATCH_INVARIANT = False
"""True: no split of K over blocks (whose partial sums meet in 16 bits, in no fixed order), so that a row's result does
not depend on the batch; slower where few tokens leave most of the GPU idle."""

VALIDATE_VARIABLE = "INT8MOE_VALIDATE"

LOCKS = 4096
"""int32 words for blocks that share an output tile; the launcher checks that they suffice."""

NAN_TO_INFINITY = "a == a ? a : __int_as_float(0x7f800000)"
"""Before the input is quantised: the maximum would skip NaN, whereas infinity makes the row's scale infinite and with
it the token's output NaN, as the contract wants."""


def _float(value: float) -> str:
    """A C++ float literal."""
    text = f"{value:.9g}"
    return f"{text}f" if "." in text or "e" in text else f"{text}.0f"


def activation_source(config: FusedMoEConfig) -> dict[str, str]:
    """The activation as the package's `process_input` takes it: the pairing of gate and up, and a C++ expression.

    `a` is the gate and `b` the up projection. NaN becomes infinity (see `NAN_TO_INFINITY`).
    """
    kind, limit = MoEActivation(config.activation), config.swiglu_limit
    gate, up = "a", "b"
    if limit is not None:
        high, low = _float(limit), _float(-limit)
        gate = f"(a > {high} ? {high} : a)"
        up = f"(b > {high} ? {high} : (b < {low} ? {low} : b))"
    body = {
        MoEActivation.SILU: "g / (1.0f + expf(-g))",
        MoEActivation.GELU: f"0.5f * g * (1.0f + erff(g * {_float(c.SQRT_HALF)}))",
        MoEActivation.GELU_TANH: (
            f"0.5f * g * (1.0f + tanhf({_float(c.GELU_TANH_SCALE)} * (g + {_float(c.GELU_TANH_CUBIC)} * g * g * g)))"
        ),
        MoEActivation.RELU2: "g < 0.0f ? 0.0f : g * g",
        MoEActivation.SWIGLUOAI: f"g / (1.0f + expf(-(g * {_float(config.swiglu_alpha)})))",
        MoEActivation.SWIGLUOAI_UNINTERLEAVE: f"g / (1.0f + expf(-(g * {_float(config.swiglu_alpha)})))",
    }[kind]
    if not config.is_act_and_mul:
        up, pairing = "1.0f", "unary"
    else:
        pairing = "binary_interleaved" if kind.is_interleaved else "binary_split"
    factor = "u + 1.0f" if kind.is_swigluoai else "u"
    expression = (
        f"([](float g, float u) {{ float h = ({body}) * ({factor});"
        f" return h == h ? h : __int_as_float(0x7f800000); }})({gate}, {up})"
    )
    return {"activation_type": pairing, "activation_impl": expression}


@dataclass
class _Tuning:
    """A kernel choice for (low, high] rows, and its tile height."""

    low: int
    high: int
    block_m: int
    text: str


@dataclass
class _Gemm:
    """One of the two GEMMs: native tensors, the package's description, kernel choices by number of rows."""

    config: Any
    weight: torch.Tensor
    scale: torch.Tensor
    expert_scale: torch.Tensor | None
    bias: torch.Tensor | None
    tunings: list[_Tuning]

    @property
    def rows(self) -> int:
        """Rows of the canonical weight (N); the native one has padding."""
        return int(self.config.shape_n - self.config.pad_shape_n)

    @property
    def columns(self) -> int:
        """Columns of the canonical weight (K)."""
        return int(self.config.shape_k - self.config.pad_shape_k)

    def tuning(self, slots: int) -> _Tuning:
        return next((t for t in self.tunings if t.low < slots <= t.high), self.tunings[-1])


class HummingRunner:
    """What the three layouts share: loading, checking, quantising, launching, combining."""

    gemm_type = ""

    def __init__(self, config: FusedMoEConfig, quant_config: FusedMoEQuantConfig) -> None:
        self.config, self.quant_config = config, quant_config
        self.dtype = getattr(torch, str(config.in_dtype))
        self.activation = activation_source(config)
        self.compute_config = json.dumps({"gemm_type": self.gemm_type, "use_batch_invariant": BATCH_INVARIANT})
        self.gemms: list[_Gemm] = []
        self.locks = torch.empty(0)

    # --- weights ---------------------------------------------------------------------------------------------------

    def process_weights_after_loading(self, layer: Any) -> None:
        """Take `layer.w13_weight` and `layer.w2_weight`, canonical or native already, and the scales and biases of the
        quantisation description. Canonical weights are converted one by one; the layer holds the native ones then.

        Raises:
            ShapeMismatch: a tensor does not fit the configuration. ConfigError: the layer is not on a CUDA device.
            MissingPackage: no humming-kernels.
        """
        if not self.config.num_local_experts:
            return
        layout.require_humming()
        device = layer.w13_weight.device
        if device.type != "cuda":
            raise ConfigError(f"w13_weight is on {device}, needs a CUDA device: Humming runs on NVIDIA GPUs.")
        if layout.is_native(layer.w13_weight) != layout.is_native(layer.w2_weight):
            raise ShapeMismatch(
                f"w13_weight is {layer.w13_weight.dtype} and w2_weight {layer.w2_weight.dtype}, needs both canonical or"
                " both in Humming's layout."
            )
        q = self.quant_config
        if not layout.is_native(layer.w13_weight):
            ExpertWeights(
                layer.w13_weight.data, layer.w2_weight.data, q.w1_scale, q.w2_scale, q.w1_bias, q.w2_bias
            ).check_fits(self.config)
        with torch.cuda.device(device):
            hidden, inner = self.config.hidden_dim, self.config.intermediate_size_per_partition
            self.gemms = [
                self._load(layer, "w13", self.config.w13_rows, hidden, q.w1_scale, q.w1_bias),
                self._load(layer, "w2", hidden, inner, q.w2_scale, q.w2_bias),
            ]
            self.locks = torch.zeros(LOCKS, dtype=torch.int32, device=device)

    def _load(
        self, layer: Any, name: str, rows: int, columns: int, scale: torch.Tensor, bias: torch.Tensor | None
    ) -> _Gemm:
        from humming.tune import get_heuristics_config

        experts = int(self.config.num_local_experts or 0)
        weight = getattr(layer, f"{name}_weight").data
        canonical = torch.empty((experts, rows, columns), device="meta")
        scale = per_row_scale(f"{name}_scale", scale, name, canonical).to(weight.device)
        if (bias is not None) != self.config.has_bias:
            has = "is missing" if self.config.has_bias else "is given"
            raise ShapeMismatch(f"{name}_bias {has}, and the configuration has has_bias={self.config.has_bias}.")
        if bias is not None and tuple(bias.shape) != (experts, rows):
            raise ShapeMismatch(f"{name}_bias has shape {tuple(bias.shape)}, needs {(experts, rows)}.")
        if not layout.is_native(weight):
            native = layout.to_native(name, weight, scale.unsqueeze(-1), layout.CHANNEL_SCHEMA)
            layout.replace(layer, f"{name}_weight", native)
            weight = native
        want = (experts, layout.padded(rows), layout.padded(columns) // 4)
        if tuple(weight.shape) != want:
            raise ShapeMismatch(f"{name}_weight (native) has shape {tuple(weight.shape)}, needs {want}.")
        config = layout.layer_config(rows, columns, experts, self.dtype, self.config.has_bias, weight.device)
        native_scale, expert_scale = layout.native_scale(scale, config)
        tunings = get_heuristics_config(
            config, gemm_type=self.gemm_type, use_batch_invariant=BATCH_INVARIANT, device=weight.device
        )
        return _Gemm(
            config,
            weight,
            native_scale,
            expert_scale,
            layout.native_bias(None if bias is None else bias.to(weight.device), config),
            [_Tuning(low, high, t["block_shape"][0], json.dumps(t)) for low, high, t in tunings],
        )

    def unpack_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Canonical int8 w13 [E, 2*I, H] and w2 [E, H, I], exactly as they were given."""
        assert self.gemms, "process_weights_after_loading comes first, with at least one expert"
        w13, w2 = (layout.from_native(g.weight, g.rows, g.columns, bool(g.config.use_flat_weight)) for g in self.gemms)
        return w13, w2

    # --- one call --------------------------------------------------------------------------------------------------

    @torch.compiler.disable
    def apply(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *,
        expert_map: torch.Tensor | None = None,
        apply_router_weight_on_input: bool = False,
    ) -> torch.Tensor:
        """See `FusedMoEExperts.apply`. An id outside the experts makes its token NaN, or raises (module docstring)."""
        check_call(self.config, hidden_states, topk_weights, topk_ids, expert_map)
        if os.environ.get(VALIDATE_VARIABLE) == "1":
            check_routing_values(self.config, topk_ids, expert_map)
        self._check_dtype(hidden_states)
        tokens, topk = topk_ids.shape
        if not tokens or not self.config.num_local_experts:
            return torch.zeros_like(hidden_states)
        assert self.gemms, "process_weights_after_loading comes first"
        x, weights, route_ids = hidden_states, topk_weights.contiguous(), topk_ids.contiguous()
        if apply_router_weight_on_input:  # each slot has a row of its own
            x = (x.unsqueeze(1).float() * topk_weights.unsqueeze(-1)).to(x.dtype).reshape(tokens * topk, -1)
            route_ids = route_ids.reshape(-1, 1)
        if expert_map is not None:
            expert_map = expert_map.to(topk_ids.device).contiguous()
        experts = int(self.config.num_local_experts)
        with torch.cuda.device(hidden_states.device):
            slots = Route(route_ids, expert_map, self.config.num_experts, experts)
            rows, slot_rows = self._experts(_aligned(x), slots)
            by_token = Route(route_ids.reshape(tokens, topk), expert_map, self.config.num_experts, experts)
            return combine(by_token, rows, slot_rows, None if apply_router_weight_on_input else weights)

    def _check_dtype(self, hidden_states: torch.Tensor) -> None:
        if hidden_states.dtype is not self.dtype:
            raise ShapeMismatch(
                f"hidden_states has dtype {hidden_states.dtype}, needs {self.dtype}, the layer's in_dtype."
            )

    def _experts(self, x: torch.Tensor, route: Route) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Results [R, H] before the router weight, of x [tokens, H]; and the row of each slot, None for row = slot."""
        raise NotImplementedError

    def _busy(self, route: Route) -> int:
        """Slots that will have an expert here, as far as the host can know; chooses the kernel, not the result."""
        return max(1, math.ceil(route.slots * route.num_local_experts / route.num_experts))

    def _quantize(self, gemm: _Gemm, x: torch.Tensor, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """int8 codes [R, K] and float32 scales [R, 1], after the activation that `how` names."""
        from humming.forward import may_process_input

        codes, _, scale = may_process_input(gemm.config, x, **how)
        assert scale is not None
        return codes, scale

    def _multiply(
        self,
        gemm: _Gemm,
        codes: torch.Tensor,
        scale: torch.Tensor,
        slots: int,
        tuning: _Tuning,
        out: torch.Tensor | None = None,
        top_k: int = 1,
        **meta: torch.Tensor,
    ) -> torch.Tensor:
        """The GEMM: [slots, N] in the layer's dtype. `meta` says which rows are which expert's."""
        from humming.forward import humming_forward

        if out is None:
            out = torch.empty((slots, gemm.rows), dtype=self.dtype, device=codes.device)
        humming_forward(
            gemm.config,
            inputs=codes,
            weight=gemm.weight,
            weight_scale=gemm.scale,
            weight_scale_2=gemm.expert_scale,
            bias=gemm.bias,
            outputs=out,
            input_scale=scale,
            locks=self.locks,
            top_k=top_k,
            valid_shape_m=slots,
            compute_config=self.compute_config,
            tuning_config=tuning.text,
            **meta,
        )
        return out


class IndexedRunner(HummingRunner):
    """Tokens are quantised once; the GEMM gathers the rows of each tile by slot number."""

    gemm_type = "indexed"

    def _experts(self, x: torch.Tensor, route: Route) -> tuple[torch.Tensor, torch.Tensor | None]:
        w13, w2 = self.gemms
        first, second = w13.tuning(self._busy(route)), w2.tuning(self._busy(route))
        counts = count(route)
        tiles = {height: align(route, counts, height) for height in {first.block_m, second.block_m}}
        codes, scale = self._quantize(w13, x, activation_type="unary", activation_impl=NAN_TO_INFINITY)
        y = self._multiply(w13, codes, scale, route.slots, first, top_k=route.topk, **tiles[first.block_m])
        codes, scale = self._quantize(w2, y, **self.activation)
        return self._multiply(w2, codes, scale, route.slots, second, **tiles[second.block_m]), None


class GroupedRunner(HummingRunner):
    """Rows are scattered into expert order while they are quantised, and stay there until the sum."""

    gemm_type = "grouped_contiguous"

    def _experts(self, x: torch.Tensor, route: Route) -> tuple[torch.Tensor, torch.Tensor | None]:
        w13, w2 = self.gemms
        first, second = w13.tuning(self._busy(route)), w2.tuning(self._busy(route))
        slot_rows, offsets = group(route, count(route))
        codes, scale = self._quantize(
            w13, x, activation_type="unary", activation_impl=NAN_TO_INFINITY, layout="scatter", scatter_idx=slot_rows
        )
        y = self._multiply(w13, codes, scale, route.slots, first, expert_layout=offsets)
        codes, scale = self._quantize(w2, y, num_valid_tokens=offsets[-1:], **self.activation)
        return self._multiply(w2, codes, scale, route.slots, second, expert_layout=offsets), slot_rows


class BatchedGroupedRunner(HummingRunner):
    """A padded batch per expert. `apply_batched` is the format's own entry; `apply` makes the batches itself."""

    gemm_type = "grouped_masked"

    def _experts(self, x: torch.Tensor, route: Route) -> tuple[torch.Tensor, torch.Tensor | None]:
        tokens, experts = len(x), route.num_local_experts
        column = _local_experts(route)
        # A token that names an expert twice takes one row of its batch, so that `tokens` rows always suffice.
        takes = torch.zeros(tokens, experts + 1, dtype=torch.int32, device=x.device).scatter_(1, column, 1)
        place = (takes.cumsum(0, dtype=torch.int32) - 1).gather(1, column)
        rows = torch.where(
            column < experts, column * tokens + place, experts * tokens
        )  # one row more for absent experts
        batches = torch.empty((experts * tokens + 1, x.shape[1]), dtype=x.dtype, device=x.device)
        batches.index_copy_(0, rows.flatten(), x.repeat_interleave(route.topk, dim=0))
        counts = takes[:, :experts].sum(0, dtype=torch.int32)
        y = torch.empty((experts * tokens, self.config.hidden_dim), dtype=x.dtype, device=x.device)
        return self._batches(batches[:-1], counts, self._busy(route), y), rows.to(torch.int32)

    @torch.compiler.disable
    def apply_batched(self, hidden_states: torch.Tensor, expert_num_tokens: torch.Tensor) -> torch.Tensor:
        """Outputs of the experts before the router weight, rounded to the dtype of hidden_states.

        Args:
            hidden_states: [E_local, T_max, H]; rows past an expert's count are not read.
            expert_num_tokens: int32 or int64 [E_local], each at most T_max.
        Returns:
            [E_local, T_max, H]; rows past the count are zero.
        Raises:
            ShapeMismatch: shapes or dtypes do not fit.
        """
        want = (self.config.num_local_experts, self.config.hidden_dim)
        if hidden_states.dim() != 3 or (hidden_states.shape[0], hidden_states.shape[2]) != want:
            raise ShapeMismatch(
                f"hidden_states has shape {tuple(hidden_states.shape)}, needs ({want[0]}, tokens, {want[1]}):"
                " local experts, rows of each, hidden size."
            )
        if tuple(expert_num_tokens.shape) != want[:1]:
            raise ShapeMismatch(f"expert_num_tokens has shape {tuple(expert_num_tokens.shape)}, needs ({want[0]},).")
        self._check_dtype(hidden_states)
        out = torch.zeros_like(hidden_states, memory_format=torch.contiguous_format)
        if out.numel():
            x = _aligned(hidden_states.reshape(-1, want[1]))
            with torch.cuda.device(x.device):
                self._batches(x, expert_num_tokens.contiguous(), x.shape[0], out.view(x.shape))
        return out

    def _batches(self, x: torch.Tensor, counts: torch.Tensor, busy: int, out: torch.Tensor) -> torch.Tensor:
        w13, w2 = self.gemms
        masked = {"layout": "grouped_mask", "expert_tokens": counts}
        codes, scale = self._quantize(w13, x, activation_type="unary", activation_impl=NAN_TO_INFINITY, **masked)
        y = self._multiply(w13, codes, scale, x.shape[0], w13.tuning(busy), expert_layout=counts)
        codes, scale = self._quantize(w2, y, **masked, **self.activation)
        return self._multiply(w2, codes, scale, x.shape[0], w2.tuning(busy), out, expert_layout=counts)


def _local_experts(route: Route) -> torch.Tensor:
    """int64 [tokens, topk]: the local expert of each slot, num_local_experts where there is none."""
    ids, none = route.ids.long(), route.num_local_experts
    valid = (ids >= 0) & (ids < route.num_experts)
    if route.expert_map is not None:
        ids = route.expert_map.long()[torch.where(valid, ids, 0)]
        valid = valid & (ids >= 0) & (ids < none)
    return torch.where(valid, ids, none)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """`x` contiguous and starting at a multiple of 16 bytes, copied only if it must be."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()
