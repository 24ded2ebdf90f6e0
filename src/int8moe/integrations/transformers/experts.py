"""INT8 experts modules: a subclass of the model's own experts class that runs the selected kernel.

Modules are found by the flags that Transformers' experts decorator sets, never by class names.
"""

from __future__ import annotations

import functools
import itertools
import logging
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import library, nn

from int8moe.config import FusedMoEConfig, MoEActivation
from int8moe.device import Platform
from int8moe.errors import UnsupportedDeployment
from int8moe.integrations.transformers.activation import Activation, gate_of, identify_activation
from int8moe.integrations.transformers.staged import StagedExperts
from int8moe.layer import Int8MoEKernel, build_kernel
from int8moe.model_config import _TOPK
from int8moe.quantize.experts_class import LEAVES, flags_of
from int8moe.quantize.int8 import dequantize_weight
from int8moe.schemes import Scheme
from int8moe.weights import ExpertWeights

logger = logging.getLogger(__name__)


def up_name(module: Any) -> str:
    """The parameter of the first GEMM: `gate_up_proj`, or `up_proj` without a gate."""
    flags = flags_of(module)
    assert flags is not None, "is_experts comes first"
    return flags.up


def is_experts(module: nn.Module) -> bool:
    """A module that holds stacked expert weights in a form that `flags_of` knows."""
    return flags_of(module) is not None


def sizes_of(module: Any) -> tuple[int, int, int]:
    """Experts, hidden and intermediate size of an experts module, INT8 or not."""
    if isinstance(module, Int8Experts):
        layout = module._int8.layout
        return layout.num_experts, layout.hidden, layout.intermediate
    flags = flags_of(module)
    assert flags is not None, "is_experts comes first"
    return _canonical(module.down_proj, flags.transposed)


@dataclass(frozen=True)
class ExpertsLayout:
    """What one experts module holds, and in which order.

    Args:
        up: name of the first GEMM's parameter. The second is always `down_proj`.
        num_experts, hidden, intermediate: E, H, I.
        transposed: parameters are [E, K, N] in the module, against the canonical [E, N, K].
        interleaved: gate and up rows alternate.
        activation: None where no kernel computes it. normed: something comes between GEMM 2 and the router weight.
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
    activation: Activation | None
    experts_per_token: int | None
    interleaved: bool = False
    normed: bool = False
    sorted_rows: bool = False

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

    @property
    def staged(self) -> bool:
        """Whether the model's own code has to run between or after the GEMMs."""
        return self.activation is None or self.normed

    def leaves(self, local: str) -> tuple[str, ...]:
        """What the matrices of parameter `local` are called on disk, expert by expert, in the order of their rows."""
        return LEAVES[local]

    def part(self, local: str, which: int) -> slice:
        """Rows of `local` [E, rows, K] that belong to the matrix `which` of `leaves`."""
        if len(self.leaves(local)) == 1:
            return slice(None)
        half = self.intermediate
        return slice(which, None, 2) if self.interleaved else slice(which * half, (which + 1) * half)


def describe(module: Any, name: str, model_config: Any = None) -> ExpertsLayout:
    """Layout and activation of an experts module.

    Args:
        model_config: says the top-k where the module holds no configuration of its own.
    Raises:
        UnsupportedDeployment: its parameters or its own functions contradict each other.
    """
    flags = flags_of(module)
    assert flags is not None, "is_experts comes first"
    activation = identify_activation(module, flags.gated)
    if activation and flags.gated and activation.kind.is_interleaved == flags.concatenated:
        raise UnsupportedDeployment(
            f"{name} ({type(module).__name__}) says is_concatenated={flags.concatenated}, but its gate function"
            f" takes {activation.kind.value} rows."
        )
    up, down = getattr(module, flags.up), module.down_proj
    experts, rows, hidden = _canonical(up, flags.transposed)
    experts2, hidden2, intermediate = _canonical(down, flags.transposed)
    if (experts, hidden, rows) != (experts2, hidden2, intermediate * (2 if flags.gated else 1)):
        raise UnsupportedDeployment(
            f"{name} ({type(module).__name__}): {flags.up} {tuple(up.shape)} and down_proj"
            f" {tuple(down.shape)} do not fit each other."
        )
    text = getattr(module, "config", model_config)
    topk = next((v for v in (getattr(text, n, None) for n in _TOPK) if isinstance(v, int) and v > 0), None)
    layout = ExpertsLayout(
        name, flags.up, experts, hidden, intermediate, flags.gated, flags.transposed, flags.bias, activation,
        1 if flags.sorted_rows else min(topk, experts) if topk else None,
        interleaved=flags.gated and not flags.concatenated,
        normed=bool(getattr(module, "has_post_expert_norm", False)),
        sorted_rows=flags.sorted_rows,
    )  # fmt: skip
    if layout.staged:
        _warn_staged(type(module).__name__, layout.normed)
    return layout


@functools.cache
def _warn_staged(cls: str, normed: bool) -> None:
    logger.warning(
        "%s %s: its products are INT8, but the rest runs in PyTorch, expert by expert, which is slow.",
        cls,
        "normalises each expert's output" if normed else "computes an activation that no INT8 kernel has",
    )


def _canonical(weight: torch.Tensor, transposed: bool) -> tuple[int, int, int]:
    e, n, k = weight.shape
    return (e, k, n) if transposed else (e, n, k)


def _local(parameter: Any) -> torch.Tensor:
    """A parameter's tensor: of one divided over ranks, this rank's share."""
    tensor = parameter.data
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@dataclass
class Int8State:
    """What a converted module keeps beside its parameters. The kernel holds the packed weights once it is built.

    Args:
        device: where the kernel runs. expert_map: see `Int8MoEKernel`.
        scales, biases: by parameter, as the module had them.
        number: by which the differentiable operator finds the module.
    """

    layout: ExpertsLayout
    backend: str
    scheme: Scheme
    in_dtype: torch.dtype
    kernel: Int8MoEKernel | StagedExperts | None = None
    expert_map: torch.Tensor | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    scales: dict[str, torch.Tensor] = field(default_factory=dict)
    biases: dict[str, torch.Tensor] = field(default_factory=dict)
    number: int | None = None

    def unbuilt(self) -> Int8State:
        """The same without a kernel, and without what goes with one."""
        return replace(self, kernel=None, expert_map=None, scales={}, biases={}, number=None)


class Int8Experts(nn.Module):
    """Mixin that turns an experts class into one whose forward runs an INT8 kernel.

    Before the kernel is built the module holds int8 [E, N, K] parameters under the names of the original class,
    float32 `<name>_scale` [E, N, 1] and the class's own biases; afterwards the kernel holds them, packed, and
    `state_dict()` unpacks. To change them: `unpack()`, which makes them parameters again until the next forward.
    """

    _int8: Int8State

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, H] in the dtype of hidden_states; as the original class, whichever experts implementation is set.

        Gradients reach hidden_states and top_k_weights through the dequantised weights; these have none.
        """
        state = self._int8
        if state.kernel is None or state.number is None:  # moved or copied, or a family that does not name its top-k
            disable: Any = torch.compiler.disable
            disable(self.build)(top_k_index.shape[-1])
        shape, dtype, top_k = hidden_states.shape, hidden_states.dtype, top_k_index.shape[-1]
        rows = hidden_states.reshape(-1, shape[-1]).to(state.in_dtype)
        weights, ids = top_k_weights.reshape(-1, top_k).float(), top_k_index.reshape(-1, top_k)
        here, there = rows.device, state.device
        if here != there:  # a model on a GPU whose device_map leaves these experts on the CPU
            rows, weights, ids = rows.to(there), weights.to(there), ids.to(there)
        if torch.is_grad_enabled() and (rows.requires_grad or weights.requires_grad):
            out = differentiable_experts(rows, weights, ids, state.number)
        else:
            out = self.run(rows, weights, ids)
        return out.to(here, dtype).reshape(shape)

    def run(self, rows: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The kernel on rows [T, H] with weights float32 [T, k] and ids [T, k]."""
        state = self._int8
        assert state.kernel is not None
        return state.kernel(rows, weights, ids, expert_map=state.expert_map)

    def build(self, top_k: int | None = None) -> Int8MoEKernel | StagedExperts:
        """Select a backend for the device that holds the weights and hand them over; frees the parameters.

        Raises:
            UnsupportedDeployment, NoBackendSupported, SelfCheckFailed: as `int8moe.layer.build_kernel`.
        """
        state = self._int8
        layout = state.layout
        if state.number is None:
            state.number = next(_numbers)
            _modules[state.number] = self
        if state.kernel is not None:
            return state.kernel
        device = getattr(self, layout.up).device
        sentinel = layout.sorted_rows or bool(getattr(self, "_is_expert_parallel", False))
        config = layer_config(state, device, top_k or layout.experts_per_token or 1, sentinel)
        names = (layout.up, "down_proj")
        w13, w2 = (_local(self._parameters.pop(n)) for n in names)
        for n in names:
            state.scales[n] = _local(self._parameters.pop(f"{n}_scale")).to(device, torch.float32)
            if layout.has_bias:  # the kernel has a copy of its own, which a change of the parameter would not reach
                state.biases[n] = _local(self._parameters.pop(f"{n}_bias")).to(device)
        state.device = device
        last = torch.full((1,), -1, dtype=torch.int32, device=device)
        held = torch.arange(layout.num_experts, dtype=torch.int32, device=device)
        state.expert_map = torch.cat([held, last]) if sentinel else None
        weights = ExpertWeights(w13, w2, *map(state.scales.get, names), *map(state.biases.get, names))  # type: ignore[arg-type]
        del w13, w2
        try:
            state.kernel = self._kernel(weights, config)
        except Exception:
            if weights.w13 is not None and weights.w2 is not None:
                self._restore(weights.w13, weights.w2)
            raise
        return state.kernel

    def _kernel(self, weights: ExpertWeights, config: FusedMoEConfig) -> Int8MoEKernel | StagedExperts:
        state = self._int8
        key = state.scheme
        if state.layout.staged:
            after = getattr(self, "post_expert_norm", None) if state.layout.normed else None
            return StagedExperts(weights, config, key.activation_key, gate_of(self, state.layout.gated), after)
        return build_kernel(
            weights,
            config,
            weight_key=key.weight_key,  # type: ignore[arg-type]
            activation_key=key.activation_key,
            reuse_source=True,
        )

    def unpack(self) -> None:
        """Take the weights back from the kernel as parameters; the next forward builds a kernel anew."""
        state = self._int8
        if state.kernel is not None:
            w13, w2 = state.kernel.unpack_weights()
            state.kernel = state.expert_map = None
            self._restore(w13, w2)

    def _held(self, w13: torch.Tensor, w2: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """What the kernel was made of, by parameter name."""
        state = self._int8
        for n, w in ((state.layout.up, w13), ("down_proj", w2)):
            yield n, w
            yield f"{n}_scale", state.scales[n].reshape(*w.shape[:2], 1)
            if n in state.biases:
                yield f"{n}_bias", state.biases[n]

    def _restore(self, w13: torch.Tensor, w2: torch.Tensor) -> None:
        for n, tensor in list(self._held(w13, w2)):
            self.register_parameter(n, nn.Parameter(tensor, requires_grad=False))
        self._int8.scales, self._int8.biases = {}, {}

    def __getattr__(self, name: str) -> Any:
        """
        Raises:
            AttributeError: also of a parameter that is packed in the kernel; says how to have it.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            state = self.__dict__.get("_int8")
            if state is None or state.kernel is None or not name.startswith(tuple(state.layout.shapes)):
                raise
            raise AttributeError(
                f"{name} of {state.layout.name} is packed in its kernel; state_dict() holds a copy, and after unpack()"
                " it is a parameter that can be changed, until the next forward packs it again."
            ) from None

    # A copy, or a file: the weights as parameters and no kernel, which is built again where they arrive.

    def __reduce_ex__(self, protocol: Any) -> Any:
        state, layout = self._int8, self._int8.layout
        kept = self.__dict__ | {"_int8": state.unbuilt()}
        top_k = None
        if state.kernel is not None:
            top_k = state.kernel.config.experts_per_token
            tensors = self._held(*state.kernel.unpack_weights())
            kept["_parameters"] = self._parameters | {n: nn.Parameter(t, requires_grad=False) for n, t in tensors}
        return _new, (type(self).__bases__[1], layout.sorted_rows), (kept, top_k)

    def __setstate__(self, state: Any) -> None:
        kept, top_k = state
        super().__setstate__(kept)
        if top_k is not None and not any(p.is_meta for p in self._parameters.values() if p is not None):
            self.build(top_k)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """`.to()` and its kind: for another device or dtype a kernel is built anew; scales stay float32.

        Raises:
            UnsupportedDeployment, NoBackendSupported: as `build`, where the backend cannot run there.
        """
        state = self._int8
        up = self._parameters.get(state.layout.up)
        device = state.device if up is None else up.device
        target = fn(torch.empty(0, dtype=torch.int8, device=device)).device
        dtype = fn(torch.empty(0, dtype=state.in_dtype, device=device)).dtype
        top_k = None
        if state.kernel is not None and (target != device or dtype != state.in_dtype):
            top_k = state.kernel.config.experts_per_token
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
        if top_k is not None and target.type != "meta":
            self.build(top_k)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        state = self._int8
        if state.kernel is not None:
            for n, tensor in self._held(*state.kernel.unpack_weights()):
                destination[f"{prefix}{n}"] = tensor

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Weights that come are taken; the kernel is built anew at the next forward."""
        names = [f"{prefix}{n}{kind}" for n in self._int8.layout.shapes for kind in ("", "_scale", "_bias")]
        if any(n in state_dict for n in names):
            self.unpack()
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        state, layout = self._int8, self._int8.layout
        ran = "not built yet" if state.kernel is None else type(state.kernel.experts).__name__
        shape = f"E={layout.num_experts}, H={layout.hidden}, I={layout.intermediate}"
        return f"{shape}, {state.scheme}, backend={state.backend} ({ran})"


class SortedInt8Experts(Int8Experts):
    """For a class whose forward takes rows that are repeated for each expert (E groups of T, zero where the expert was
    not chosen), multiplied by the router weight: Llama 4."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """[E*T, H] from [E*T, H]; rows of zeros are skipped, since experts without biases make zeros of them."""
        experts = self._int8.layout.num_experts
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        owner = torch.arange(experts, device=rows.device).repeat_interleave(len(rows) // experts)
        ids = torch.where((rows != 0).any(-1), owner, experts).unsqueeze(-1)
        return super().forward(rows, ids, torch.ones(len(rows), 1, device=rows.device))


@functools.cache
def int8_class(experts_cls: type[nn.Module], sorted_rows: bool = False) -> type[nn.Module]:
    """`Int8<Name>`, a subclass of the model's class, so that `isinstance` checks in the model still hold."""
    mixin = SortedInt8Experts if sorted_rows else Int8Experts
    return type(f"Int8{experts_cls.__name__}", (mixin, experts_cls), {"__module__": __name__})


def _new(experts_cls: type[nn.Module], sorted_rows: bool) -> Any:
    """An empty module of `int8_class`, for a pickle or a copy to fill. The class itself has no name to find it by."""
    cls: Any = int8_class(experts_cls, sorted_rows)  # type: ignore[arg-type]
    return cls.__new__(cls)


# -- gradients -------------------------------------------------------------------------------------------------------
# An operator of its own, so that a compiled training step sees one node. It finds its module by a number.

_modules: weakref.WeakValueDictionary[int, Int8Experts] = weakref.WeakValueDictionary()
_numbers = itertools.count()


@library.custom_op("int8moe::differentiable_experts", mutates_args=())
def differentiable_experts(rows: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, number: int) -> torch.Tensor:
    return _modules[number].run(rows, weights, ids)


@differentiable_experts.register_fake
def _(rows: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, number: int) -> torch.Tensor:
    return torch.empty_like(rows)


@library.custom_op("int8moe::experts_backward", mutates_args=())
def experts_backward(
    grad: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, number: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients by rows [T, H] and weights [T, k], of the float layer that the INT8 one stands for."""
    module = _modules[number]
    state = module._int8
    layout, names = state.layout, (state.layout.up, "down_proj")
    if state.kernel is None:  # moved between forward and backward
        module.build(ids.shape[-1])
    assert state.kernel is not None
    codes = dict(zip(names, state.kernel.unpack_weights(), strict=True))
    between = gate_of(module, layout.gated)
    after = getattr(module, "post_expert_norm", None) if layout.normed else None
    grad_rows = torch.zeros_like(rows, dtype=torch.float32)
    grad_weights = torch.zeros_like(weights)

    def linear(x: torch.Tensor, name: str, e: int) -> torch.Tensor:
        w = dequantize_weight(codes[name][e], state.scales[name].reshape(codes[name].shape[:2])[e])
        return torch.nn.functional.linear(x, w, state.biases[name][e].float() if layout.has_bias else None)

    for e in range(layout.num_experts):
        token, slot = (ids == e).nonzero(as_tuple=True)
        if not len(token):
            continue

        def layer(x: torch.Tensor, w: torch.Tensor, e: int = e) -> torch.Tensor:
            y = linear(between(linear(x, names[0], e)), "down_proj", e)
            return (y if after is None else after(y)) * w[:, None]

        # Inside an operator autograd records nothing; torch.func has its own way.
        _, pull = torch.func.vjp(layer, rows[token].float(), weights[token, slot])
        grad_x, grad_w = pull(grad[token].float())
        grad_rows.index_add_(0, token, grad_x)
        grad_weights[token, slot] = grad_w
    return grad_rows.to(rows.dtype), grad_weights


@experts_backward.register_fake
def _(
    grad: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, number: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(rows), torch.empty_like(weights)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.number = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return *experts_backward(grad, *ctx.saved_tensors, ctx.number), None, None


differentiable_experts.register_autograd(_backward, setup_context=_keep)


def convert_module(module: nn.Module, layout: ExpertsLayout, state: Int8State, *, int8_placeholders: bool) -> None:
    """Turn a module on the meta device into INT8 experts that wait for their weights.

    With `int8_placeholders` the weights are int8 [E, N, K]; otherwise they keep their dtype, because Transformers
    before 5.23 casts a tensor to its placeholder's dtype before it can be quantised.

    Raises:
        UnsupportedDeployment: a backend was named, and only the model's own code can run these experts.
    """
    if layout.staged and state.backend not in ("auto", "reference"):
        raise UnsupportedDeployment(
            f"{layout.name} ({type(module).__name__}) needs the model's own code between or after its GEMMs, which"
            f" backend {state.backend!r} cannot run; needs 'auto' or 'reference', or list it in modules_to_not_convert."
        )
    for n, shape in layout.shapes.items():
        if int8_placeholders:
            module.register_parameter(
                n, nn.Parameter(torch.empty(shape, dtype=torch.int8, device="meta"), requires_grad=False)
            )
        scale = torch.empty((*shape[:2], 1), dtype=torch.float32, device="meta")
        module.register_parameter(f"{n}_scale", nn.Parameter(scale, requires_grad=False))
    module.__class__ = int8_class(type(module), layout.sorted_rows)  # type: ignore[arg-type]
    module._int8 = state  # type: ignore[assignment]


def layer_config(state: Int8State, device: torch.device, top_k: int, sentinel: bool = False) -> FusedMoEConfig:
    """The layer as the oracle sees it, on the machine part that holds the weights.

    With `sentinel` there is one expert id more, for which nothing is done.
    """
    layout = state.layout
    activation = layout.activation or Activation(MoEActivation.SILU)
    return FusedMoEConfig(
        layout.num_experts + sentinel,
        top_k,
        layout.hidden,
        layout.intermediate,
        in_dtype=state.in_dtype,
        activation=activation.kind,
        is_act_and_mul=layout.gated,
        has_bias=layout.has_bias,
        moe_backend=state.backend,
        platform=platform_of(device),
        swiglu_alpha=activation.alpha,
        swiglu_limit=activation.limit,
        num_local_experts=layout.num_experts,
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
