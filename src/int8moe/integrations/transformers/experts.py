"""INT8 experts modules: a subclass of the model's own experts class that runs the selected kernel.

Modules are found by the flags that Transformers' experts decorator sets, never by class names.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from int8moe.config import FusedMoEConfig
from int8moe.device import Platform
from int8moe.errors import UnsupportedDeployment
from int8moe.integrations.transformers.activation import Activation, identify_activation
from int8moe.layer import Int8MoEKernel, build_kernel
from int8moe.model_config import _TOPK
from int8moe.schemes import Scheme
from int8moe.weights import ExpertWeights

logger = logging.getLogger(__name__)
FLAGS = ("is_transposed", "is_concatenated", "has_gate", "has_bias")


def up_name(module: Any) -> str:
    """The parameter of the first GEMM: `gate_up_proj`, or `up_proj` without a gate."""
    return "gate_up_proj" if module.has_gate else "up_proj"


def is_experts(module: nn.Module) -> bool:
    """A module that carries the decorator's flags and holds stacked expert weights."""
    if not all(isinstance(getattr(module, flag, None), bool) for flag in FLAGS):
        return False
    weights = [getattr(module, n, None) for n in (up_name(module), "down_proj")]
    return all(isinstance(w, torch.Tensor) and w.dim() == 3 for w in weights)


@dataclass(frozen=True)
class ExpertsLayout:
    """What one experts module holds, and in which order.

    Args:
        up: name of the first GEMM's parameter. The second is always `down_proj`.
        num_experts, hidden, intermediate: E, H, I.
        transposed: parameters are [E, K, N] in the module, against the canonical [E, N, K].
        experts_per_token: None where the configuration does not say.
    """

    name: str
    up: str
    num_experts: int
    hidden: int
    intermediate: int
    gated: bool
    transposed: bool
    has_bias: bool
    activation: Activation
    experts_per_token: int | None

    @property
    def rows(self) -> int:
        return self.intermediate * (2 if self.gated else 1)

    @property
    def shapes(self) -> dict[str, tuple[int, int, int]]:
        """Canonical shape by parameter name."""
        return {
            self.up: (self.num_experts, self.rows, self.hidden),
            "down_proj": (self.num_experts, self.hidden, self.intermediate),
        }


def describe(module: Any, name: str) -> ExpertsLayout:
    """Layout and activation of an experts module.

    Raises:
        UnsupportedDeployment: it does something between or after the GEMMs that no kernel does.
    """
    if getattr(module, "has_post_expert_norm", False):
        raise UnsupportedDeployment(
            f"{name} ({type(module).__name__}) normalises each expert's output before the router weight, and no INT8"
            " kernel does; list it in modules_to_not_convert."
        )
    activation = identify_activation(module, name)
    if activation.kind.is_interleaved == bool(module.is_concatenated) and module.has_gate:
        raise UnsupportedDeployment(
            f"{name} ({type(module).__name__}) says is_concatenated={module.is_concatenated}, but its gate function"
            f" takes {activation.kind.value} rows."
        )
    up, down = getattr(module, up_name(module)), module.down_proj
    experts, rows, hidden = _canonical(up, module.is_transposed)
    experts2, hidden2, intermediate = _canonical(down, module.is_transposed)
    if (experts, hidden, rows) != (experts2, hidden2, intermediate * (2 if module.has_gate else 1)):
        raise UnsupportedDeployment(
            f"{name} ({type(module).__name__}): {up_name(module)} {tuple(up.shape)} and down_proj"
            f" {tuple(down.shape)} do not fit each other."
        )
    text = getattr(module, "config", None)
    topk = next((v for v in (getattr(text, n, None) for n in _TOPK) if isinstance(v, int) and v > 0), None)
    return ExpertsLayout(
        name, up_name(module), experts, hidden, intermediate, bool(module.has_gate), bool(module.is_transposed),
        bool(module.has_bias), activation, min(topk, experts) if topk else None,
    )  # fmt: skip


def _canonical(weight: torch.Tensor, transposed: bool) -> tuple[int, int, int]:
    e, n, k = weight.shape
    return (e, k, n) if transposed else (e, n, k)


@dataclass
class Int8State:
    """What a converted module keeps beside its parameters. The kernel holds the packed weights once it is built."""

    layout: ExpertsLayout
    backend: str
    scheme: Scheme
    in_dtype: torch.dtype
    kernel: Int8MoEKernel | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    scales: dict[str, torch.Tensor] = field(default_factory=dict)


class Int8Experts(nn.Module):
    """Mixin that turns an experts class into one whose forward runs an INT8 kernel.

    Before the kernel is built the module holds int8 [E, N, K] parameters under the names of the original class and
    float32 `<name>_scale` [E, N, 1]; afterwards the kernel holds them, packed, and `state_dict()` unpacks.
    """

    _int8: Int8State

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, H] in the dtype of hidden_states; as the original class, whichever experts implementation is set."""
        state = self._int8
        if getattr(self, "_is_expert_parallel", False):
            raise UnsupportedDeployment(
                f"{state.layout.name} was sharded by Transformers' expert parallelism, which INT8 experts do not have"
                " yet; load the model without a distributed_config."
            )
        kernel = state.kernel
        if kernel is None:  # moved since it was loaded, or a family whose configuration does not name its top-k
            disable: Any = torch.compiler.disable
            kernel = disable(self.build)(top_k_index.shape[-1])
        shape, dtype = hidden_states.shape, hidden_states.dtype
        rows = hidden_states.reshape(-1, shape[-1]).to(state.in_dtype)
        top_k = top_k_index.shape[-1]
        out = kernel(rows, top_k_weights.reshape(-1, top_k).float(), top_k_index.reshape(-1, top_k))
        return out.to(dtype).reshape(shape)

    def build(self, top_k: int | None = None) -> Int8MoEKernel:
        """Select a backend for the device that holds the weights and hand them over; frees the parameters.

        Raises:
            UnsupportedDeployment, NoBackendSupported, SelfCheckFailed: as `int8moe.layer.build_kernel`.
        """
        state = self._int8
        config = layer_config(
            state, getattr(self, state.layout.up).device, top_k or state.layout.experts_per_token or 1
        )
        names = (state.layout.up, "down_proj")
        w13, w2 = (self._parameters.pop(n).data for n in names)  # type: ignore[union-attr]
        for n in names:
            state.scales[n] = self._parameters.pop(f"{n}_scale").data.float()  # type: ignore[union-attr]
        bias = {n: getattr(self, f"{n}_bias").data if state.layout.has_bias else None for n in names}
        state.device = w13.device
        weights = ExpertWeights(
            w13, w2, state.scales[names[0]], state.scales["down_proj"], bias[names[0]], bias["down_proj"]
        )
        del w13, w2
        key = state.scheme
        try:
            state.kernel = build_kernel(
                weights,
                config,
                weight_key=key.weight_key,  # type: ignore[arg-type]
                activation_key=key.activation_key,
                reuse_source=True,
            )
        except Exception:
            if weights.w13 is not None and weights.w2 is not None:
                self._restore(weights.w13, weights.w2)
            raise
        return state.kernel

    def unpack(self) -> None:
        """Take the weights back from the kernel as parameters; the next forward builds a kernel anew."""
        state = self._int8
        if state.kernel is not None:
            w13, w2 = state.kernel.unpack_weights()
            state.kernel = None
            self._restore(w13, w2)

    def _restore(self, w13: torch.Tensor, w2: torch.Tensor) -> None:
        state = self._int8
        for n, w in ((state.layout.up, w13), ("down_proj", w2)):
            self.register_parameter(n, nn.Parameter(w, requires_grad=False))
            scale = state.scales.pop(n).reshape(*w.shape[:2], 1)
            self.register_parameter(f"{n}_scale", nn.Parameter(scale, requires_grad=False))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """`.to()` and its kind: another device or dtype unpacks; scales stay float32."""
        state = self._int8
        up = self._parameters.get(state.layout.up)
        device = state.device if up is None else up.device
        target = fn(torch.empty(0, dtype=torch.int8, device=device)).device
        dtype = fn(torch.empty(0, dtype=state.in_dtype, device=device)).dtype
        if state.kernel is not None and (target != device or dtype != state.in_dtype):
            self.unpack()
        state.in_dtype = dtype
        names = [f"{n}_scale" for n in (state.layout.up, "down_proj")]
        scales = {n: self._parameters.pop(n) for n in names if n in self._parameters}
        super()._apply(fn, recurse)
        for n, scale in scales.items():
            assert scale is not None
            kept = (
                torch.empty_like(scale, device=target)
                if scale.is_meta or target.type == "meta"
                else scale.data.to(target)
            )
            self.register_parameter(n, nn.Parameter(kept, requires_grad=False))
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        state = self._int8
        if state.kernel is not None:
            for n, w in zip((state.layout.up, "down_proj"), state.kernel.unpack_weights(), strict=True):
                destination[f"{prefix}{n}"] = w
                destination[f"{prefix}{n}_scale"] = state.scales[n].reshape(*w.shape[:2], 1)

    def extra_repr(self) -> str:
        state, layout = self._int8, self._int8.layout
        ran = "not built yet" if state.kernel is None else type(state.kernel.experts).__name__
        shape = f"E={layout.num_experts}, H={layout.hidden}, I={layout.intermediate}"
        return f"{shape}, {state.scheme}, backend={state.backend} ({ran})"


@functools.cache
def int8_class(experts_cls: type[nn.Module]) -> type[nn.Module]:
    """`Int8<Name>`, a subclass of the model's class, so that `isinstance` checks in the model still hold."""
    return type(f"Int8{experts_cls.__name__}", (Int8Experts, experts_cls), {"__module__": __name__})


def convert_module(module: nn.Module, layout: ExpertsLayout, state: Int8State, *, int8_placeholders: bool) -> None:
    """Turn a module on the meta device into INT8 experts that wait for their weights.

    With `int8_placeholders` the weights are int8 [E, N, K]; otherwise they keep their dtype, because Transformers
    before 5.23 casts a tensor to its placeholder's dtype before it can be quantised.
    """
    for n, shape in layout.shapes.items():
        if int8_placeholders:
            module.register_parameter(
                n, nn.Parameter(torch.empty(shape, dtype=torch.int8, device="meta"), requires_grad=False)
            )
        scale = torch.empty((*shape[:2], 1), dtype=torch.float32, device="meta")
        module.register_parameter(f"{n}_scale", nn.Parameter(scale, requires_grad=False))
    module.__class__ = int8_class(type(module))  # type: ignore[arg-type]
    module._int8 = state  # type: ignore[assignment]


def layer_config(state: Int8State, device: torch.device, top_k: int) -> FusedMoEConfig:
    """The layer as the oracle sees it, on the machine part that holds the weights."""
    layout = state.layout
    return FusedMoEConfig(
        layout.num_experts,
        top_k,
        layout.hidden,
        layout.intermediate,
        in_dtype=state.in_dtype,
        activation=layout.activation.kind,
        is_act_and_mul=layout.gated,
        has_bias=layout.has_bias,
        moe_backend=state.backend,
        platform=platform_of(device),
        swiglu_alpha=layout.activation.alpha,
        swiglu_limit=layout.activation.limit,
    )


def platform_of(device: torch.device) -> Platform:
    """The platform whose kernels can read tensors on `device`.

    Raises:
        UnsupportedDeployment: tensors on a device that this machine's probe does not know.
    """
    if device.type == "cpu":
        return Platform.cpu()
    current = Platform.current()
    kinds = ("cuda", "rocm") if device.type == "cuda" else (device.type,)
    if current.kind not in kinds:
        raise UnsupportedDeployment(
            f"the experts' weights are on {device}, and the platform is {current.kind} ({current.name}); needs one of:"
            f" {', '.join(kinds)}, or the weights on the CPU."
        )
    return current
