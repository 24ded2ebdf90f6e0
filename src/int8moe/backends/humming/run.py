"""Runs a layer on the humming-kernels package: the indexed, the contiguous and the masked grouped GEMM.

Held to a tolerance, not to bits (docs/numerics.md): row scales and biases are 16-bit, a GEMM's result is rounded to 16
bits before and after the row's scale, and h is re-quantised without being rounded to 16 bits first.

Expert ids outside the experts are never read through. Looking at them on the host would cost a synchronisation, so such
a token's output is NaN; with INT8MOE_VALIDATE=1 the call raises InvalidRouting instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import library

from int8moe import numerics as c
from int8moe.backends.arguments import CALL_SCHEMA, check_call, check_routing_values, validates
from int8moe.backends.humming import compile as ahead
from int8moe.backends.humming import launch, layout
from int8moe.backends.humming.kernels import Route, combine
from int8moe.backends.humming.launch import Gemm, GemmPlan, LayerPlan
from int8moe.backends.rows import weighted_rows
from int8moe.config import FusedMoEConfig, MoEActivation
from int8moe.errors import ConfigError, ShapeMismatch
from int8moe.quant_config import FusedMoEQuantConfig
from int8moe.weights import ExpertWeights, per_row_scale


def _float(value: float) -> str:
    """A C++ float literal."""
    text = f"{value:.9g}"
    return f"{text}f" if "." in text or "e" in text else f"{text}.0f"


def activation_source(config: FusedMoEConfig) -> dict[str, str]:
    """The activation as the package's `process_input` takes it: the pairing of gate and up, and a C++ expression.

    `a` is the gate and `b` the up projection. NaN becomes infinity (see `launch.NAN_TO_INFINITY`).
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


# --- the operators: torch.compile sees one node -----------------------------------------------------------------------

PLANS: dict[str, LayerPlan] = {}
"""Plans by their key. An operator takes tensors and plain values only, so it is told the key; a plan's key is the same
in every process, and layers of one shape share it."""

_LAYER = (
    "Tensor w13, Tensor w13_scale, Tensor? w13_expert_scale, Tensor? w13_bias,"
    " Tensor w2, Tensor w2_scale, Tensor? w2_expert_scale, Tensor? w2_bias"
)


def _layer(plan: str, tensors: tuple[Any, ...]) -> tuple[LayerPlan, Gemm, Gemm]:
    found = PLANS[plan]
    return found, Gemm(found.w13, *tensors[:4]), Gemm(found.w2, *tensors[4:])


@library.custom_op(
    "int8moe::humming_experts",
    mutates_args=(),
    schema=f"({CALL_SCHEMA}, str plan, {_LAYER}) -> Tensor",
)
def humming_experts(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    num_experts: int,
    on_input: bool,
    plan: str,
    *tensors: Any,
) -> torch.Tensor:
    """A whole layer call, [M, H]. `plan` is a key of `PLANS`, `tensors` are those of both GEMMs."""
    if not len(topk_ids):
        return torch.zeros_like(hidden_states, memory_format=torch.contiguous_format)
    layer, w13, w2 = _layer(plan, tensors)
    x, weights, ids = hidden_states, topk_weights.contiguous(), topk_ids.contiguous()
    if on_input:  # each slot has a row of its own
        x = weighted_rows(x, topk_weights)
    if expert_map is not None:
        expert_map = expert_map.to(ids.device).contiguous()
    with launch.on_device(x):
        slots = Route(ids.reshape(-1, 1) if on_input else ids, expert_map, num_experts, layer.experts)
        rows, slot_rows = launch.LAYOUTS[layer.gemm_type](layer, w13, w2, _aligned(x), slots)
        by_token = Route(ids, expert_map, num_experts, layer.experts)
        return combine(by_token, rows, slot_rows, None if on_input else weights)


@humming_experts.register_fake
def _(hidden_states: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(hidden_states, memory_format=torch.contiguous_format)


@library.custom_op(
    "int8moe::humming_batched_experts",
    mutates_args=(),
    schema=f"(Tensor hidden_states, Tensor expert_num_tokens, str plan, {_LAYER}) -> Tensor",
)
def humming_batched_experts(
    hidden_states: torch.Tensor, expert_num_tokens: torch.Tensor, plan: str, *tensors: Any
) -> torch.Tensor:
    """[E_local, T, H] of a batch [E_local, T, H]; see `BatchedGroupedRunner.apply_batched`."""
    out = torch.zeros_like(hidden_states, memory_format=torch.contiguous_format)
    if out.numel():
        layer, w13, w2 = _layer(plan, tensors)
        x = _aligned(hidden_states.reshape(-1, hidden_states.shape[2]))
        with launch.on_device(x):
            launch.run_batches(layer, w13, w2, x, expert_num_tokens.contiguous(), x.shape[0], out.view(x.shape))
    return out


@humming_batched_experts.register_fake
def _(hidden_states: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(hidden_states, memory_format=torch.contiguous_format)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """`x` contiguous and starting at a multiple of 16 bytes, copied only if it must be."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


# --- plans and runners ------------------------------------------------------------------------------------------------


def make_plan(config: FusedMoEConfig, gemm_type: str, device: torch.device) -> LayerPlan:
    """How a layer of `config` runs on `device`; needs no weights."""
    dtype = getattr(torch, str(config.in_dtype))
    experts, hidden = int(config.num_local_experts or 0), config.hidden_dim
    index = torch.cuda.current_device() if device.index is None else device.index

    def gemm(rows: int, columns: int) -> GemmPlan:
        described = layout.layer_config(rows, columns, experts, dtype, config.has_bias, device)
        return GemmPlan(described, launch.choose_tunings(described, gemm_type, index))

    w13, w2 = gemm(config.w13_rows, hidden), gemm(hidden, config.intermediate_size_per_partition)
    return LayerPlan(gemm_type, w13, w2, activation_source(config), dtype, experts, hidden, config.experts_per_token)


def slots_here(config: FusedMoEConfig, tokens: int) -> int:
    """Slots of a call of so many tokens that have their expert on this rank, on average."""
    return max(1, tokens * config.experts_per_token * int(config.num_local_experts or 0) // config.num_experts)


class HummingRunner:
    """What the three layouts share: loading, checking, quantising, launching, combining."""

    gemm_type = ""

    def __init__(self, config: FusedMoEConfig, quant_config: FusedMoEQuantConfig) -> None:
        self.config, self.quant_config = config, quant_config
        self.dtype = getattr(torch, str(config.in_dtype))
        self.plan_key = ""
        self.gemms: tuple[Gemm, ...] = ()

    def process_weights_after_loading(self, layer: Any) -> None:
        """Take `layer.w13_weight` and `layer.w2_weight`, canonical or native already, and the scales and biases of the
        quantisation description. Canonical weights are converted one by one; the layer holds the native ones then.
        Kernels for calls of up to `MOST_TOKENS` tokens are compiled, or found in the package's cache.

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
            plan = make_plan(self.config, self.gemm_type, device)
            self.gemms = (
                self._load(layer, "w13", plan.w13, q.w1_scale, q.w1_bias),
                self._load(layer, "w2", plan.w2, q.w2_scale, q.w2_bias),
            )
            self.plan_key = plan.key()
            if self.plan_key not in PLANS:
                ahead.compile_ahead(plan, slots_here(self.config, ahead.MOST_TOKENS), device)
                PLANS[self.plan_key] = plan

    def _load(self, layer: Any, name: str, plan: GemmPlan, scale: torch.Tensor, bias: torch.Tensor | None) -> Gemm:
        rows, columns, experts = plan.rows, plan.columns, int(self.config.num_local_experts or 0)
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
        native_scale, expert_scale = layout.native_scale(scale, plan.config)
        native_bias = layout.native_bias(None if bias is None else bias.to(weight.device), plan.config)
        return Gemm(plan, weight, native_scale, expert_scale, native_bias)

    def unpack_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Canonical int8 w13 [E, 2*I, H] and w2 [E, H, I], exactly as they were given."""
        assert self.gemms, "process_weights_after_loading comes first, with at least one expert"
        w13, w2 = (
            layout.from_native(g.weight, g.plan.rows, g.plan.columns, bool(g.plan.config.use_flat_weight))
            for g in self.gemms
        )
        return w13, w2

    def _operands(self) -> tuple[Any, ...]:
        """The last arguments of the operators."""
        w13, w2 = self.gemms  # empty before process_weights_after_loading
        return (self.plan_key, *w13.tensors(), *w2.tensors())

    # --- one call --------------------------------------------------------------------------------------------------

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
        if validates():
            check_routing_values(self.config, topk_ids, expert_map)
        self._check_dtype(hidden_states)
        if not self.config.num_local_experts:
            return torch.zeros_like(hidden_states, memory_format=torch.contiguous_format)
        return humming_experts(
            hidden_states, topk_weights, topk_ids, expert_map, self.config.num_experts, apply_router_weight_on_input,
            *self._operands(),
        )  # fmt: skip

    def _check_dtype(self, hidden_states: torch.Tensor) -> None:
        if hidden_states.dtype is not self.dtype:
            raise ShapeMismatch(
                f"hidden_states has dtype {hidden_states.dtype}, needs {self.dtype}, the layer's in_dtype."
            )


class IndexedRunner(HummingRunner):
    """Tokens are quantised once; the GEMM gathers the rows of each tile by slot number."""

    gemm_type = "indexed"


class GroupedRunner(HummingRunner):
    """Rows are scattered into expert order while they are quantised, and stay there until the sum."""

    gemm_type = "grouped_contiguous"


class BatchedGroupedRunner(HummingRunner):
    """A padded batch per expert. `apply_batched` is the format's own entry; `apply` makes the batches itself."""

    gemm_type = "grouped_masked"

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
        return humming_batched_experts(hidden_states, expert_num_tokens, *self._operands())
