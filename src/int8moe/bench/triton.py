"""Triton layer times on a GPU: checked against the reference first, then timed in CUDA graphs, all forms in turn.

A call is hidden states and routing in, combined output out. One graph makes a call for each of several drawn routings;
weights are cold since these calls use other experts and other copies of the layer, together several times the L2 cache.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from int8moe.backends.base import FusedMoEExperts
from int8moe.backends.humming.support import HummingGroupedExperts, HummingIndexedExperts
from int8moe.backends.reference.support import ReferenceExperts
from int8moe.backends.triton.support import TritonExperts
from int8moe.bench import cuda
from int8moe.bench.base import GPU_TOKENS, GPU_UNITS, Bench, Limits, Options, Row, Tick, Timing
from int8moe.bench.layer import (
    OURS,
    Call,
    draw_call,
    draw_hidden,
    draw_weights,
    expert_bytes,
    fit_copies,
    left_for_layers,
    operations,
    packed_layer,
)
from int8moe.bench.shapes import BenchShape
from int8moe.bench.torch_grouped import TorchGrouped, grouped_product
from int8moe.config import FusedMoEConfig
from int8moe.device import Platform
from int8moe.errors import ConfigError, Int8MoeError
from int8moe.schemes import W8A8_CHANNEL_TOKEN, W8A16_CHANNEL
from int8moe.weights import ExpertWeights

BF16, TRITON, HUMMING, HUMMING_GROUPED = "bf16", "triton", "humming", "humming-grouped"
INT8_FORMS: dict[str, type[FusedMoEExperts]] = {
    TRITON: TritonExperts, HUMMING: HummingIndexedExperts, HUMMING_GROUPED: HummingGroupedExperts
}  # fmt: skip
COLD_BYTES, COLD_CACHES = 256 << 20, 4
FEW_CALLS, LEAST_CALLS, MAX_CALLS = 8, 4, 128
CHECKED_TOKENS = 16
"""The reference is slow: of larger calls, only this many tokens are compared with it, evenly spread."""
WEIGHT_ONLY_ERROR = {"bfloat16": 4e-3, "float16": 5e-4, "float32": 1e-5}
"""W8A16 sums floats in another order than the reference: largest relative error, Frobenius."""
HUMMING_ERROR = 2e-2
"""Humming rounds at other places than the reference (docs/numerics.md): largest relative error, Frobenius."""
BF16_ERROR = 0.05  # activations of our layer are rounded to 8 bits, those of this form are not
SETUP_SECONDS, ROW_SECONDS = 5.0, 0.5


@dataclass(frozen=True)
class Plan:
    """Copies of one layer by form, and calls in a graph by number of tokens; `cold`: no weights are found in L2."""

    copies: dict[str, int]
    calls: dict[int, int]
    cold: bool


def cold_bytes(l2_bytes: int) -> int:
    """Weights together this large do not stay in L2."""
    return max(COLD_BYTES, COLD_CACHES * l2_bytes)


def touched_bytes(config: FusedMoEConfig, tokens: int) -> float:
    """Weights and scales of the experts that a call of so many tokens touches, on average over evenly drawn ones."""
    missed = (1 - config.experts_per_token / config.num_experts) ** tokens
    return (config.num_local_experts or 0) * (1 - missed) * expert_bytes(config)


def calls_in_graph(config: FusedMoEConfig, tokens: int, cold: int) -> int:
    """Enough that they touch `cold` bytes, and some more where few tokens make the routings differ."""
    few = tokens * config.experts_per_token < 4 * config.num_experts
    calls = math.ceil(cold / max(1.0, touched_bytes(config, tokens)))
    return min(MAX_CALLS, max(FEW_CALLS if few else LEAST_CALLS, calls))


def plan_layer(name: str, config: FusedMoEConfig, options: Options, l2_bytes: int, available: int | None) -> Plan:
    """Copies enough that calls of one copy are `cold_bytes` apart, as far as memory allows.

    Raises:
        Int8MoeError: the GPU's memory does not hold one copy of each form, or one call.
    """
    cold = cold_bytes(l2_bytes)
    touched = touched_bytes(config, min(options.tokens))
    size = {OURS: config.experts_bytes(1, scale_bytes=4)}
    size |= {form: config.experts_bytes(2) if form == BF16 else size[OURS] for form in options.compare}
    wanted = {
        form: min(MAX_CALLS, math.ceil(cold / (touched * (2 if form == BF16 else 1))))
        for form in (OURS, *options.compare)
    }
    # The reference holds one expert's w13 in float64; drawn ones exist in float32 for a moment.
    fixed = 20 * config.w13_rows * config.hidden_dim
    left = left_for_layers(name, config, max(options.tokens), available)
    copies = fit_copies(name, wanted, size, fixed, left)
    calls = {tokens: calls_in_graph(config, tokens, cold) for tokens in options.tokens}
    distinct = (min(copies[OURS] * size[OURS], n * touched_bytes(config, m)) for m, n in calls.items())
    return Plan(copies, calls, all(count >= cold for count in distinct))


def copied(weights: ExpertWeights) -> ExpertWeights:
    """The same values in memory of their own: the Triton runner keeps the tensors that it is given."""
    tensors = {f.name: getattr(weights, f.name) for f in dataclasses.fields(weights)}
    return ExpertWeights(**{name: t if t is None else t.clone() for name, t in tensors.items()})


def _form(form: str, config: FusedMoEConfig, weights: ExpertWeights) -> Call:
    """A layer in another form, with weights in memory of its own."""
    if form == BF16:
        return TorchGrouped(config, weights, torch.bfloat16).apply
    return packed_layer(INT8_FORMS[form], config, copied(weights)).apply


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def check_surroundings(
    what: str = "the triton backend", instead: str = "here: int8moe bench --backend cpu"
) -> cuda.Gpu:
    """The GPU. Raises ConfigError where there is none, or where a setting makes times say nothing.

    Args:
        what: that needs a GPU. instead: what to do where there is none.
    """
    gpu = cuda.find_gpu()
    if gpu is None:
        raise ConfigError(
            f"torch {torch.__version__} sees no GPU (this machine: {Platform.current().name}), and {what}"
            f" needs a CUDA or ROCm GPU; {instead}."
        )
    for name, reason in (
        ("INT8MOE_DEVICE", "times are those of the GPU that is here"),
        ("INT8MOE_VALIDATE", "looking at expert ids waits for the GPU, which a CUDA graph cannot hold"),
        ("TRITON_INTERPRET", "kernels would run in Triton's interpreter"),
    ):
        if os.environ.get(name, "0") not in ("", "0"):
            raise ConfigError(f"{name} is {os.environ[name]!r}, needs to be unset: {reason}.")
    return gpu


class TritonBench(Bench):
    """Times `TritonExperts`, beside Humming and torch's grouped bf16 product where asked."""

    backend, experts_class = "TRITON", "TritonExperts"
    forms: tuple[str, ...] = (BF16, HUMMING, HUMMING_GROUPED)
    measured_as: Mapping[str, tuple[str, str]] = MappingProxyType(
        {
            BF16: ("BF16", "TorchGrouped"),
            TRITON: ("TRITON", "TritonExperts"),
            HUMMING: ("HUMMING", "HummingIndexedExperts"),
            HUMMING_GROUPED: ("HUMMING", "HummingGroupedExperts"),
        }
    )
    takes: tuple[str, ...] = ("weight_only", "kernels")
    packages: tuple[str, ...] = ("int8moe", "torch", "triton")
    default_tokens = GPU_TOKENS
    units = GPU_UNITS
    roofline = True
    device = "cuda"
    experts: type[FusedMoEExperts] = TritonExperts

    def __init__(self, shapes: Sequence[BenchShape], options: Options) -> None:
        super().__init__(shapes, options)
        self.gpu = check_surroundings(f"the {self.backend.lower()} backend")
        self.platform = Platform.current()
        self.limits: Limits | None = None
        if BF16 in options.compare and grouped_product() is None:
            raise ConfigError(
                f"compare is {BF16!r}, which is torch's grouped matrix product, and torch {torch.__version__} has none;"
                " needs a newer torch."
            )
        self.scheme = W8A16_CHANNEL if options.weight_only else W8A8_CHANNEL_TOKEN
        available = cuda.free_bytes()
        self._configs: list[FusedMoEConfig] = []
        self._plans: list[Plan] = []
        for shape in self.shapes:
            config = shape.config(self.platform)
            ok, reason = self.experts.is_supported_config(config, *self.scheme)
            if not ok:
                name = self.backend.capitalize()
                raise ConfigError(f"{shape.name}: the {name} backend cannot run this layer since {reason}.")
            for form in (f for f in options.compare if f in INT8_FORMS):
                ok, reason = INT8_FORMS[form].is_supported_config(config, *self.scheme)
                if not ok:
                    raise ConfigError(f"{shape.name}: compare is {form!r}, which cannot run this layer since {reason}.")
            self._configs.append(config)
            self._plans.append(plan_layer(shape.name, config, options, self.gpu.l2_bytes, available))

    def machine(self) -> dict[str, Any]:
        capability = self.gpu.capability
        return {
            "device": self.platform.name,
            "compute_capability": None if capability is None else ".".join(map(str, capability)),
            "multiprocessors": self.gpu.multiprocessors,
            "l2_bytes": self.gpu.l2_bytes,
            "memory_bytes": self.gpu.memory_bytes,
            "driver": self.gpu.driver,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
        }

    def summary(self) -> str:
        machine = self.machine()
        capability = machine["compute_capability"]
        parts = [machine["device"], f"compute capability {capability}" if capability else None,
                 f"{machine['multiprocessors']} multiprocessors", str(self.scheme)]  # fmt: skip
        return ", ".join(part for part in parts if part)

    def method(self) -> dict[str, Any]:
        o = self.options
        return {
            "seconds": o.seconds,
            "scheme": str(self.scheme),
            "a_call": "apply, in a CUDA graph of calls with different routings; events around replays",
            "weights": "uniform codes" if o.uniform_codes else "normal, quantised per row",
            "routing": "random distinct experts",
            "cold_bytes": cold_bytes(self.gpu.l2_bytes),
            "layers_in_turn": {
                s.name: p.copies | {"cold": p.cold} for s, p in zip(self.shapes, self._plans, strict=True)
            },
            "calls_in_a_graph": {
                s.name: {str(m): n for m, n in p.calls.items()} for s, p in zip(self.shapes, self._plans, strict=True)
            },
        }

    def measure_limits(self) -> Limits:
        self.limits = cuda.measure_limits(self.gpu, self.options.weight_only)
        return self.limits

    def planned_seconds(self) -> float:
        return len(self.shapes) * (SETUP_SECONDS + len(self.options.tokens) * self._row_seconds())

    def _row_seconds(self) -> float:
        return self.options.seconds + ROW_SECONDS

    def rows(self, tick: Tick) -> Iterator[Row]:
        assert self.limits is not None, "measure_limits comes first"
        at = 0.0
        with torch.no_grad():
            for shape, config, plan in zip(self.shapes, self._configs, self._plans, strict=True):
                tick(f"{shape.name}: weights, and the check of them", at)
                layers = self._make_layers(shape.name, config, plan)
                at += SETUP_SECONDS
                for tokens in self.options.tokens:
                    tick(f"{shape.name}: M={tokens}", at)
                    yield self._time_row(shape.name, config, plan, layers, tokens)
                    at += self._row_seconds()
                del layers
        tick("done", at)

    def _make_layers(self, name: str, config: FusedMoEConfig, plan: Plan) -> dict[str, list[Call]]:
        """The copies of every form, after one was checked. They hold the same values, each in its own memory."""
        weights = draw_weights(config, self.options.uniform_codes, lambda share: None, self.device)
        weight_only = self.options.weight_only
        first = packed_layer(self.experts, config, weights, weight_only).apply
        reference = packed_layer(ReferenceExperts, config, weights, weight_only).apply
        layers: dict[str, list[Call]] = {OURS: [first]}
        for form in self.options.compare:
            layers[form] = [_form(form, config, weights)]
        for tokens in self.options.tokens:
            self._check(name, config, tokens, layers, reference)
        for _ in range(1, plan.copies[OURS]):
            layers[OURS].append(packed_layer(self.experts, config, copied(weights), weight_only).apply)
        for form in self.options.compare:
            more = range(1, plan.copies[form])
            layers[form] += [_form(form, config, weights) for _ in more]
        return layers

    def _check(
        self, name: str, config: FusedMoEConfig, tokens: int, layers: dict[str, list[Call]], reference: Call
    ) -> None:
        """Raises Int8MoeError where the layer's bits are not the reference's, or another form computes another layer.

        Bits do not depend on the batch, so that a few tokens of a large call can be compared with the reference alone.
        """
        x, (weights, ids) = draw_hidden(config, tokens, self.device), draw_call(config, tokens, 0, self.device)
        few = torch.linspace(0, tokens - 1, min(tokens, CHECKED_TOKENS), device=x.device).round().long()
        want = reference(x[few], weights[few], ids[few])
        got = layers[OURS][0](x, weights, ids)[few]
        at = f"{name} at M={tokens}"
        self._compare(at, self.experts, got, want, str(config.in_dtype))
        for form in self.options.compare:
            try:
                other = layers[form][0](x, weights, ids)[few]
            except RuntimeError as failed:
                who = "torch" if form == BF16 else "the machine"
                first_line = (str(failed).splitlines() or [type(failed).__name__])[0]
                raise Int8MoeError(f"{at}: {who} cannot run {form} here: {first_line}; leave out --compare.") from None
            if form in INT8_FORMS:
                self._compare(at, INT8_FORMS[form], other, want, str(config.in_dtype))
            elif not (error := relative_error(other, want)) <= BF16_ERROR:
                raise Int8MoeError(f"{at}: {form} differs from the reference by {error:.1e}; nothing was timed.")

    def _compare(
        self, at: str, experts: type[FusedMoEExperts], got: torch.Tensor, want: torch.Tensor, dtype: str
    ) -> None:
        """Bits in W8A8, but a tolerance for Humming and in W8A16. Raises Int8MoeError."""
        exact = experts not in (HummingIndexedExperts, HummingGroupedExperts)
        what = "the Triton kernels differ" if exact else f"{experts.__name__} differs"
        if exact and not self.options.weight_only:
            if not torch.equal(got, want):
                raise Int8MoeError(
                    f"{at}: {what} from the reference in {int((got != want).sum())} of {want.numel()} values; nothing"
                    " was timed."
                )
            return
        most = WEIGHT_ONLY_ERROR[dtype] if self.options.weight_only else HUMMING_ERROR
        if not (error := relative_error(got, want)) <= most:
            raise Int8MoeError(
                f"{at}: {what} from the reference by {error:.1e}, more than {most:.0e}; nothing was timed."
            )

    def _time_row(
        self, name: str, config: FusedMoEConfig, plan: Plan, layers: dict[str, list[Call]], tokens: int
    ) -> Row:
        assert self.limits is not None
        calls = plan.calls[tokens]
        x = draw_hidden(config, tokens, self.device)
        routings = [draw_call(config, tokens, seed, self.device) for seed in range(calls)]
        bodies: dict[str, Sequence[Callable[[], Any]]] = {
            form: [functools.partial(copies[n % len(copies)], x, *routings[n]) for n in range(calls)]
            for form, copies in layers.items()
        }
        times = cuda.graphs_in_turn(bodies, self.options.seconds)
        timing = {form: Timing.of(values, calls) for form, values in times.items()}
        kernels = cuda.kernel_times_us(bodies[OURS])
        experts = statistics.mean(len(ids.unique()) for _, ids in routings)
        return Row(
            name, config, tokens, timing.pop(OURS), experts, experts * expert_bytes(config),
            operations(config, tokens), self.limits, timing, kernels,
        )  # fmt: skip
