"""The runnable layer: a selected experts class, its weights, and prepare/finalize around it.

`build_kernel` does the whole job for one layer: select, check once against the reference, convert, pack. Needs torch.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from int8moe.backends.base import FusedMoEExperts
from int8moe.backends.reference.support import ReferenceExperts
from int8moe.config import FusedMoEConfig, FusedMoEParallelConfig
from int8moe.errors import NoBackendSupported, SelfCheckFailed, UnsupportedDeployment
from int8moe.oracle.base import SelectionReport
from int8moe.oracle.int8 import (
    Int8MoeBackend,
    Int8MoEKernelOracle,
    convert_to_int8_moe_kernel_format,
    make_int8_moe_quant_config,
)
from int8moe.quant_config import FusedMoEQuantConfig
from int8moe.schemes import QuantKey, kInt8DynamicTokenSym, kInt8StaticChannelSym
from int8moe.weights import ExpertWeights

logger = logging.getLogger(__name__)

SELF_CHECK_TOLERANCE = 2e-2
"""Relative Frobenius error that a first use may show: two right implementations that round at different places
differ by 1.2 to 1.6 % (flipped int8 codes of the intermediate); a wrong layout or scale differs by far more."""
SELF_CHECK_ROWS = 4
_checked: dict[tuple[Any, ...], str | None] = {}


class Int8MoEKernel:
    """One MoE layer, ready to run: `kernel(hidden_states, topk_weights, topk_ids)`.

    Args:
        backend: the oracle's choice, or None for the reference.
        experts_cls: the class to run.
        config: the layer on this rank.
        quant_config: scales and biases.
        layer: holds `w13_weight` and `w2_weight`; they are taken over, packed, and the sources freed.
    """

    def __init__(
        self,
        backend: Int8MoeBackend | None,
        experts_cls: type[FusedMoEExperts],
        config: FusedMoEConfig,
        quant_config: FusedMoEQuantConfig,
        layer: Any,
        report: SelectionReport | None = None,
    ) -> None:
        self.backend = backend
        self.config = config
        self.report = report
        self.experts = experts_cls(config, quant_config)
        self.experts.process_weights_after_loading(layer)

    def __call__(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *,
        expert_map: torch.Tensor | None = None,
        apply_router_weight_on_input: bool = False,
    ) -> torch.Tensor:
        """[M, H] from hidden_states [M, H], topk_weights float32 [M, topk] and topk_ids [M, topk]
        (see `FusedMoEExperts.apply`)."""
        return self.experts.apply(
            hidden_states,
            topk_weights,
            topk_ids,
            expert_map=expert_map,
            apply_router_weight_on_input=apply_router_weight_on_input,
        )

    def unpack_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Canonical int8 w13 [E, 2*I, H] and w2 [E, H, I], exactly as they were given."""
        return self.experts.unpack_weights()


def build_kernel(
    weights: ExpertWeights,
    config: FusedMoEConfig,
    *,
    weight_key: QuantKey = kInt8StaticChannelSym,
    activation_key: QuantKey | None = kInt8DynamicTokenSym,
    free_source: bool = True,
    reuse_source: bool = False,
) -> Int8MoEKernel:
    """Select a backend for `config`, check it once against the reference, and give it the weights.

    Under `config.moe_backend == "auto"` a backend that fails the check is skipped with a WARNING and a note in the
    report; asked for by name it raises. "reference" runs `ReferenceExperts`.

    Args:
        weights: canonical tensors on the device that `config.platform` describes.
        free_source: drop `weights.w13` and `weights.w2` as soon as they are packed (they are None afterwards).
        reuse_source: let a backend pack in the memory of the tensors given, which nobody may read afterwards: the peak
            is one expert more than the weights, not one tensor more.
    Raises:
        UnsupportedDeployment, NoBackendSupported: no kernel for this (both carry the report).
        SelfCheckFailed: the named backend computes something else than the reference.
        ShapeMismatch: weights do not have the shapes of `config`.
    """
    weights.check_fits(config)
    quant = make_int8_moe_quant_config(
        weights.w13_scale,
        weights.w2_scale,
        w13_bias=weights.w13_bias,
        w2_bias=weights.w2_bias,
        activation_key=activation_key,
    )
    quant.weight_key = weight_key
    layer = SimpleNamespace(
        w13_weight=weights.w13,
        w2_weight=weights.w2,
        w13_weight_scale=weights.w13_scale.unsqueeze(-1),
        w2_weight_scale=weights.w2_scale.unsqueeze(-1),
        int8moe_reuse_source=reuse_source,
    )
    if config.moe_backend == "reference":
        supported, reason = ReferenceExperts.is_supported_config(config, weight_key, activation_key)
        if not supported:
            raise UnsupportedDeployment(f"The reference backend does not support this deployment since {reason}.")
        return Int8MoEKernel(None, ReferenceExperts, config, quant, layer)

    oracle = Int8MoEKernelOracle(config, weight_key, activation_key)
    backend, experts_cls = oracle.select()
    report = oracle.explain()
    mismatch = self_check(experts_cls, config, quant, weights)
    if mismatch:
        backend, experts_cls = _next_that_passes(oracle, report, config, quant, weights, mismatch)
        report.chosen_backend, report.chosen_class = backend.value, experts_cls.__name__
    layer.w13_weight, layer.w2_weight = convert_to_int8_moe_kernel_format(
        backend, weights.w13, weights.w2, layer=layer, w13_scale=weights.w13_scale
    )
    if free_source:
        weights.w13 = weights.w2 = None  # type: ignore[assignment]
    return Int8MoEKernel(backend, experts_cls, config, quant, layer, report)


def _next_that_passes(
    oracle: Int8MoEKernelOracle,
    report: SelectionReport,
    config: FusedMoEConfig,
    quant: FusedMoEQuantConfig,
    weights: ExpertWeights,
    mismatch: str,
) -> tuple[Int8MoeBackend, type[FusedMoEExperts]]:
    """After a failed self-check under "auto": the next supported class that agrees with the reference."""
    failed = (report.chosen_backend, report.chosen_class)
    if config.moe_backend != "auto":
        raise SelfCheckFailed(f"moe_backend {config.moe_backend!r} was asked for, and {failed[1]} {mismatch}")
    skipped = set()
    while True:
        report.notes.append(f"{failed[0]} ({failed[1]}) was skipped: it {mismatch}")
        logger.warning("%s", report.notes[-1])
        skipped.add(failed)
        for entry in report.backends:
            classes = [c for c in entry.classes if c.supported and (entry.backend, c.name) not in skipped]
            if classes:
                break
        else:
            raise NoBackendSupported(
                f"No Int8 MoE backend is left after the self-check: {'; '.join(report.notes)}.", report
            )
        chosen = classes[0].experts_class
        found = self_check(chosen, config, quant, weights)
        if not found:
            return Int8MoeBackend(entry.backend), chosen
        failed, mismatch = (entry.backend, chosen.__name__), found


def self_check(
    experts_cls: type[FusedMoEExperts], config: FusedMoEConfig, quant: FusedMoEQuantConfig, weights: ExpertWeights
) -> str | None:
    """Run one expert of the real weights on a few rows and compare with the reference.

    Done once per class, machine and layer shape. Returns None when they agree, else a clause with both numbers.
    """
    key = (experts_cls, replace(config, moe_backend="auto"), quant.weight_key, quant.activation_key)
    if key not in _checked:
        _checked[key] = _compare_with_reference(experts_cls, config, quant, weights)
    return _checked[key]


def _compare_with_reference(
    experts_cls: type[FusedMoEExperts], config: FusedMoEConfig, quant: FusedMoEQuantConfig, weights: ExpertWeights
) -> str | None:
    if not weights.num_experts:
        return None
    one = replace(
        config,
        num_experts=1,
        num_local_experts=1,
        experts_per_token=1,
        moe_parallel_config=FusedMoEParallelConfig(
            use_batched_activation_format=config.moe_parallel_config.use_batched_activation_format
        ),
    )
    first = lambda t: None if t is None else t[:1].clone()
    part = FusedMoEQuantConfig(
        quant.weight_key, quant.activation_key, first(quant.w1_scale), first(quant.w2_scale), first(quant.w1_bias),
        first(quant.w2_bias),
    )  # fmt: skip
    device = weights.w13.device
    dtype = getattr(torch, str(config.in_dtype))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SELF_CHECK_ROWS, config.hidden_dim, generator=generator).to(device=device, dtype=dtype)
    ids = torch.zeros(SELF_CHECK_ROWS, 1, dtype=torch.int64, device=device)
    weight = torch.linspace(0.25, 1.0, SELF_CHECK_ROWS).reshape(-1, 1).to(device)

    def output(cls: type[FusedMoEExperts]) -> torch.Tensor:
        layer = SimpleNamespace(
            w13_weight=first(weights.w13),
            w2_weight=first(weights.w2),
            w13_weight_scale=weights.w13_scale[:1].clone().unsqueeze(-1),
            w2_weight_scale=weights.w2_scale[:1].clone().unsqueeze(-1),
        )
        experts = cls(one, part)
        experts.process_weights_after_loading(layer)
        return experts.apply(x, weight, ids).double()

    want, got = output(ReferenceExperts), output(experts_cls)
    size = float(want.norm())
    error = float((got - want).norm())
    if error <= SELF_CHECK_TOLERANCE * size or (size != size and torch.equal(want.isnan(), got.isnan())):
        return None
    return (
        f"differs from the reference at first use: relative error {error / size if size else float('inf'):.3g}, at most"
        f" {SELF_CHECK_TOLERANCE} expected (output norm {float(got.norm()):.6g}, reference {size:.6g})"
    )
