"""Runs a layer on the Triton kernels, as torch custom operators: the standard and the batched activation format.

Expert ids outside the experts are never read through. On a GPU, where looking would cost a synchronisation, such a
token's output is NaN; with INT8MOE_VALIDATE=1, and always in Triton's interpreter, the call raises InvalidRouting.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import library

from int8moe.backends import arguments
from int8moe.backends.arguments import CALL_SCHEMA, check_call, check_routing_values
from int8moe.backends.rows import make_batches, weighted_rows
from int8moe.backends.triton import launch
from int8moe.backends.triton.configs import Plan
from int8moe.config import FusedMoEConfig, MoEActivation
from int8moe.errors import ConfigError, ShapeMismatch
from int8moe.quant_config import FusedMoEQuantConfig
from int8moe.schemes import kInt8DynamicTensorSym
from int8moe.weights import ExpertWeights

_LAYER = (
    "Tensor w13, Tensor w2, Tensor w13_scale, Tensor w2_scale, Tensor? w13_bias, Tensor? w2_bias, str activation,"
    " bool gated, bool interleaved, float alpha, float? limit, str activations"
)


def validates() -> bool:
    """Whether a call looks at the expert ids before it runs."""
    return launch.INTERPRETED or arguments.validates()


def _prepared(hidden_states: torch.Tensor) -> torch.Tensor:
    return hidden_states if hidden_states.stride(-1) == 1 else hidden_states.contiguous()


@library.custom_op(
    "int8moe::triton_experts",
    mutates_args=(),
    schema=f"({CALL_SCHEMA}, bool batched, {_LAYER}) -> Tensor",
)
def triton_experts(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    num_experts: int,
    on_input: bool,
    batched: bool,
    *layer: Any,
) -> torch.Tensor:
    """A whole layer call, [M, H]. `batched` goes through a padded batch per expert; `layer` fills `launch.Layer`."""
    weights = launch.Layer(*layer)
    if not topk_ids.numel() or not weights.num_local:
        return torch.zeros_like(hidden_states, memory_format=torch.contiguous_format)
    with launch.on_device(hidden_states):
        x, ids = _prepared(hidden_states), topk_ids.contiguous()
        if expert_map is not None:
            expert_map = expert_map.to(device=ids.device, dtype=torch.int32).contiguous()
        run = _batched_layer if batched else run_standard
        return run(weights, x, topk_weights.contiguous(), ids, expert_map, num_experts, on_input)


@triton_experts.register_fake
def _(hidden_states: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(hidden_states, memory_format=torch.contiguous_format)


def run_standard(
    layer: launch.Layer,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    num_experts: int,
    on_input: bool,
    plan: Plan | None = None,
) -> torch.Tensor:
    """A layer call in the standard format, [M, H]; by the plan that is chosen for it, or by `plan`."""
    tokens, topk = ids.shape
    plan = plan or launch.plan_for(layer, tokens, topk, x, num_experts, rows=layer.activations != "tensor")
    rows, slots_per_row = (weighted_rows(x, topk_weights), 1) if on_input else (x, topk)
    weight = None if on_input else topk_weights
    if plan.rows:
        return launch.run_rows(layer, rows, ids, expert_map, num_experts, plan, slots_per_row, weight)
    y = torch.empty(tokens * topk, x.shape[1], dtype=x.dtype, device=x.device)
    here = None if plan.sort_rows or layer.activations != "token" else rows
    blocks, codes = launch.align(
        ids, expert_map, num_experts, layer.num_local, plan.gemm1.block_m, here, plan.gemm2.block_m, plan.sort_rows
    )
    launch.run_blocks(layer, rows, blocks, codes, plan, slots_per_row, weight, y)
    return launch.combine(y, blocks.local.view(tokens, topk), x)


def _batched_layer(
    layer: launch.Layer,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    num_experts: int,
    on_input: bool,
) -> torch.Tensor:
    """Prepare, run, finalise. The experts' outputs stay float32 until finalise has applied the router weight: the
    contract rounds after that product, not before it."""
    experts = layer.num_local
    local = launch.local_experts(ids, expert_map, num_experts, experts)
    rows, chosen = (weighted_rows(x, topk_weights), local.reshape(-1, 1)) if on_input else (x, local)
    batch, counts, batch_row = make_batches(rows, torch.where(chosen >= 0, chosen, experts).long(), experts)
    y = _batch(layer, batch, counts, len(rows), torch.float32)
    return launch.combine(y, local, x, batch_row, None if on_input else topk_weights)


def _batch(
    layer: launch.Layer,
    rows: torch.Tensor,
    counts: torch.Tensor,
    max_tokens: int,
    dtype: torch.dtype,
    zero: bool = False,
) -> torch.Tensor:
    """Steps 2 to 6 without router weight, of rows [E * max_tokens, H]; past the counts unwritten, or zero."""
    plan = launch.plan_for(layer, max_tokens, 1, rows, y_bytes=dtype.itemsize, rows=False)
    blocks = launch.align_batched(counts, max_tokens, plan.gemm1.block_m, plan.gemm2.block_m)
    make = torch.zeros if zero else torch.empty
    y = make(len(rows), rows.shape[1], dtype=dtype, device=rows.device)
    launch.run_blocks(layer, rows, blocks, None, plan, 1, None, y)
    return y


@library.custom_op(
    "int8moe::triton_batched_experts",
    mutates_args=(),
    schema=f"(Tensor hidden_states, Tensor expert_num_tokens, {_LAYER}) -> Tensor",
)
def triton_batched_experts(hidden_states: torch.Tensor, expert_num_tokens: torch.Tensor, *layer: Any) -> torch.Tensor:
    """[E_local, T, H] of a batch [E_local, T, H]; see `BatchedTritonRunner.apply_batched`."""
    if not hidden_states.numel():
        return torch.zeros_like(hidden_states)
    with launch.on_device(hidden_states):
        rows = hidden_states.reshape(-1, hidden_states.shape[2])
        y = _batch(
            launch.Layer(*layer), _prepared(rows), expert_num_tokens, hidden_states.shape[1], rows.dtype, zero=True
        )
        return y.view(hidden_states.shape)


@triton_batched_experts.register_fake
def _(hidden_states: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(hidden_states, memory_format=torch.contiguous_format)


class TritonRunner:
    """Canonical weights, standard activation format."""

    batched = False

    def __init__(self, config: FusedMoEConfig, quant_config: FusedMoEQuantConfig) -> None:
        self.config, self.quant_config = config, quant_config
        self.weights: ExpertWeights | None = None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Keep the canonical tensors of `layer`; w2 with rows of a multiple of 16 bytes (`launch.aligned`).

        Raises:
            ShapeMismatch: a tensor does not fit the configuration. ConfigError: the tensors are not on a GPU.
        """
        q = self.quant_config
        w13, w2 = layer.w13_weight.data, layer.w2_weight.data
        if not w13.is_cuda and not launch.INTERPRETED:
            raise ConfigError(
                f"w13_weight is on {w13.device}, needs a GPU: Triton's kernels run there (or, for tests,"
                " with TRITON_INTERPRET=1)."
            )
        weights = ExpertWeights(w13, w2, q.w1_scale, q.w2_scale, q.w1_bias, q.w2_bias)
        weights.check_fits(self.config)
        weights.w13, weights.w2 = weights.w13.contiguous(), launch.aligned(weights.w2)
        if weights.w2.shape != w2.shape:  # the layer's own becomes a part of it, so that nothing is held twice
            layer.w2_weight.data = weights.w2[:, :, : w2.shape[2]]
        for name in ("w13_scale", "w2_scale", "w13_bias", "w2_bias"):
            rows = getattr(weights, name)
            setattr(weights, name, None if rows is None else rows.to(w13.device, torch.float32).contiguous())
        self.weights = weights

    def unpack_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The canonical tensors."""
        weights = self._loaded()
        return weights.w13, weights.w2[:, :, : self.config.intermediate_size_per_partition].contiguous()

    def _loaded(self) -> ExpertWeights:
        assert self.weights is not None, "process_weights_after_loading comes first"
        return self.weights

    def _layer(self) -> tuple[Any, ...]:
        """The fields of `launch.Layer`."""
        w, c, key = self._loaded(), self.config, self.quant_config.activation_key
        kind = MoEActivation(c.activation)
        name = "swigluoai" if kind.is_swigluoai else kind.value
        activations = "float" if key is None else "tensor" if key == kInt8DynamicTensorSym else "token"
        return (
            w.w13, w.w2, w.w13_scale, w.w2_scale, w.w13_bias, w.w2_bias, name, c.is_act_and_mul, kind.is_interleaved,
            float(c.swiglu_alpha), None if c.swiglu_limit is None else float(c.swiglu_limit), activations,
        )  # fmt: skip

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
        return triton_experts(
            hidden_states, topk_weights, topk_ids, expert_map, self.config.num_experts, apply_router_weight_on_input,
            self.batched, *self._layer(),
        )  # fmt: skip


class BatchedTritonRunner(TritonRunner):
    """The batched activation format: a padded batch per expert."""

    batched = True

    def apply_batched(self, hidden_states: torch.Tensor, expert_num_tokens: torch.Tensor) -> torch.Tensor:
        """Outputs of the experts before the router weight (step 6 without it), rounded to the dtype of hidden_states.

        Args:
            hidden_states: [E_local, T_max, H]; rows past an expert's count are not read.
            expert_num_tokens: int32 or int64 [E_local].
        Returns:
            [E_local, T_max, H]; rows past the count are zero.
        Raises:
            ShapeMismatch: shapes do not fit.
        """
        want = (
            self.config.num_local_experts,
            hidden_states.shape[1] if hidden_states.dim() == 3 else 0,
            self.config.hidden_dim,
        )
        if tuple(hidden_states.shape) != want:
            raise ShapeMismatch(
                f"hidden_states has shape {tuple(hidden_states.shape)}, needs ({want[0]}, tokens, {want[2]}):"
                " local experts, rows of each, hidden size."
            )
        if tuple(expert_num_tokens.shape) != want[:1]:
            raise ShapeMismatch(f"expert_num_tokens has shape {tuple(expert_num_tokens.shape)}, needs ({want[0]},).")
        return triton_batched_experts(hidden_states, expert_num_tokens, *self._layer())
