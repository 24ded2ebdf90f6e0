"""Runs the native CPU kernel: takes over a layer's weights, and calls it through one torch operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import library

from int8moe.backends.arguments import check_call
from int8moe.backends.cpu import layout
from int8moe.backends.cpu.native import isa_name, load, select_isa
from int8moe.config import FusedMoEConfig, MoEActivation
from int8moe.errors import AlreadyConverted, InvalidRouting
from int8moe.quant_config import FusedMoEQuantConfig
from int8moe.weights import ExpertWeights

_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_ACTIVATIONS = {
    MoEActivation.SILU: 0,
    MoEActivation.GELU: 1,
    MoEActivation.GELU_TANH: 2,
    MoEActivation.RELU2: 3,
    MoEActivation.SWIGLUOAI: 4,
    MoEActivation.SWIGLUOAI_UNINTERLEAVE: 4,
}

_library = library.Library("int8moe", "FRAGMENT")
_SCHEMA = (
    "(Tensor hidden_states, Tensor topk_weights, Tensor topk_ids, Tensor? expert_map, Tensor w13, Tensor w2,"
    " Tensor? w13_hints, Tensor? w2_hints, Tensor w13_scale, Tensor w2_scale, Tensor? w13_bias, Tensor? w2_bias,"
    " int num_experts, int intermediate,"
    " int activation, bool gated, bool interleaved, float alpha, float? limit, bool weight_on_input, int isa) -> Tensor"
)


def _cpu_experts(
    hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, expert_map: torch.Tensor | None,
    w13: torch.Tensor, w2: torch.Tensor, w13_hints: torch.Tensor | None, w2_hints: torch.Tensor | None,
    w13_scale: torch.Tensor, w2_scale: torch.Tensor,
    w13_bias: torch.Tensor | None, w2_bias: torch.Tensor | None, num_experts: int, intermediate: int, activation: int,
    gated: bool, interleaved: bool, alpha: float, limit: float | None, weight_on_input: bool, isa: int,
) -> torch.Tensor:  # fmt: skip
    hidden_states, topk_weights, topk_ids = hidden_states.contiguous(), topk_weights.contiguous(), topk_ids.contiguous()
    out = torch.empty_like(hidden_states)
    tokens, hidden = hidden_states.shape
    where = lambda t: 0 if t is None else t.data_ptr()
    status, bad = load().layer(
        isa, torch.get_num_threads(), where(hidden_states), where(topk_weights), where(topk_ids),
        topk_ids.dtype is torch.int64, where(expert_map), tokens, topk_ids.shape[1], num_experts, w13.shape[0], hidden,
        intermediate, where(w13), where(w2), where(w13_hints), where(w2_hints), where(w13_scale), where(w2_scale),
        where(w13_bias), where(w2_bias),
        _DTYPES[hidden_states.dtype], activation, gated, interleaved, limit is not None, alpha, limit or 0.0,
        weight_on_input, where(out),
    )  # fmt: skip
    if status == 1:
        raise InvalidRouting(f"topk_ids holds {bad}, needs 0 to {num_experts - 1}.")
    if status == 2:
        raise InvalidRouting(f"expert_map holds {bad}, needs -1 (elsewhere) or 0 to {w13.shape[0] - 1}.")
    if status:
        raise MemoryError(f"no memory for the workspace of {tokens} tokens.")
    return out


def _fake(hidden_states: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(hidden_states, memory_format=torch.contiguous_format)


def _no_backward(ctx: Any, *_: Any) -> Any:
    raise NotImplementedError(
        "cpu_experts has no backward: INT8 experts are for inference; run them under torch.no_grad()."
    )


# `cpu_experts` is for calls that autograd follows, whose bookkeeping costs 10 us.
for _name in ("cpu_experts", "cpu_experts_inference"):
    _library.define(_name + _SCHEMA)
    _library.impl(_name, _cpu_experts, "CPU")
    library.register_fake(f"int8moe::{_name}", _fake, lib=_library)
library.register_autograd("int8moe::cpu_experts", _no_backward, lib=_library)


class CPURunner:
    """The weights of one layer, packed, and the call. `isa` is the kernel's name."""

    def __init__(self, config: FusedMoEConfig, quant_config: FusedMoEQuantConfig) -> None:
        self.config, self.quant_config = config, quant_config
        self._isa = select_isa()
        self.isa = isa_name(self._isa)
        activation = MoEActivation(config.activation)
        self._activation = _ACTIVATIONS[activation]
        self._interleaved = activation.is_interleaved
        self._w13: torch.Tensor | None = None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack `layer.w13_weight`, then `layer.w2_weight`; each source is released before the next is touched.

        Where the layer says `int8moe_reuse_source`, they are packed in their own memory (`layout.pack`).

        Raises:
            AlreadyConverted: called a second time, or the layer's weights are packed ones.
            ShapeMismatch: weights, scales or biases do not fit the configuration.
        """
        if self._w13 is not None or getattr(layer, "int8moe_packed", False):
            raise AlreadyConverted(
                "the layer's weights are packed already; unpack_weights gives the canonical ones back."
            )
        q, c = self.quant_config, self.config
        weights = ExpertWeights(
            _tensor(layer.w13_weight), _tensor(layer.w2_weight), q.w1_scale, q.w2_scale, q.w1_bias, q.w2_bias
        )
        weights.check_fits(c)
        # Copies of our own: `layer.to(bfloat16)` would round scales that a module holds.
        as_float = lambda b: None if b is None else b.detach().to(torch.float32, copy=True).contiguous()
        self._w13_scale, self._w2_scale = as_float(weights.w13_scale), as_float(weights.w2_scale)
        self._w13_bias, self._w2_bias = as_float(weights.w13_bias), as_float(weights.w2_bias)
        self._order = layout.w13_order(c.is_act_and_mul, self._interleaved)
        del weights
        self._w13 = _replace(layer, "w13_weight", self._order)
        self._w2 = _replace(layer, "w2_weight", layout.PLAIN)
        self._w13_hints = layout.make_hints(self._isa, self._w13, c.w13_rows, c.hidden_dim, self._order)
        self._w2_hints = layout.make_hints(
            self._isa, self._w2, c.hidden_dim, c.intermediate_size_per_partition, layout.PLAIN
        )
        layer.int8moe_packed = True

    def unpack_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Canonical int8 w13 and w2, exactly as they were given."""
        assert self._w13 is not None, "process_weights_after_loading comes first"
        c = self.config
        return (
            layout.unpack(self._w13, c.w13_rows, c.hidden_dim, self._order),
            layout.unpack(self._w2, c.hidden_dim, c.intermediate_size_per_partition, layout.PLAIN),
        )

    def apply(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *,
        expert_map: torch.Tensor | None = None,
        apply_router_weight_on_input: bool = False,
    ) -> torch.Tensor:
        assert self._w13 is not None, "process_weights_after_loading comes first"
        c = self.config
        check_call(c, hidden_states, topk_weights, topk_ids, expert_map)
        if expert_map is not None:
            if expert_map.dtype is not torch.int32:  # values that int32 cannot hold stay recognisably wrong
                expert_map = expert_map.clamp(-2, 2**31 - 1).to(torch.int32)
            expert_map = expert_map.contiguous()
        followed = torch.is_grad_enabled() and (hidden_states.requires_grad or topk_weights.requires_grad)
        operator = torch.ops.int8moe.cpu_experts if followed else torch.ops.int8moe.cpu_experts_inference
        return operator(
            hidden_states, topk_weights, topk_ids, expert_map, self._w13, self._w2, self._w13_hints, self._w2_hints,
            self._w13_scale, self._w2_scale, self._w13_bias, self._w2_bias, c.num_experts,
            c.intermediate_size_per_partition, self._activation,
            c.is_act_and_mul, self._interleaved, c.swiglu_alpha, c.swiglu_limit, apply_router_weight_on_input,
            self._isa,
        )  # fmt: skip


def _tensor(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach() if isinstance(weight, torch.nn.Parameter) else weight


def _replace(layer: Any, name: str, order: int) -> torch.Tensor:
    """Put the packed form of `layer.<name>` in its place; the source is dropped with its last reference."""
    source = getattr(layer, name)
    packed = layout.pack(_tensor(source), order, getattr(layer, "int8moe_reuse_source", False))
    if isinstance(source, torch.nn.Parameter):
        setattr(layer, name, torch.nn.Parameter(packed, requires_grad=False))
    else:
        setattr(layer, name, packed)
    return packed
