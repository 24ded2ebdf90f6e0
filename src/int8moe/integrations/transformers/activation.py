"""Which activation an experts module computes, found by asking the module.

The module's own gate function runs on a grid of values and is compared with each activation that the kernels know
(docs/numerics.md, step 4). Class names and configuration fields decide nothing, so a clamp or an offset that is
not known is left to the module's own code instead of dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from int8moe.backends.reference.run import activate
from int8moe.config import FusedMoEConfig, MoEActivation
from int8moe.device import Platform

logger = logging.getLogger(__name__)
_WIDTH = 8  # wide enough to tell interleaved from concatenated


@dataclass(frozen=True)
class Activation:
    """An activation of the kernels with its constants, as `FusedMoEConfig` takes them."""

    kind: MoEActivation
    limit: float | None = None
    alpha: float = 1.702


def gate_of(module: Any, gated: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """The module's own function from GEMM 1's output [R, rows] to GEMM 2's input [R, I]."""
    if not gated:
        return module.act_fn
    if hasattr(module, "_apply_gate"):
        return module._apply_gate
    halves = lambda y: y.chunk(2, dim=-1)
    return lambda y: module.act_fn(halves(y)[0]) * halves(y)[1]


def identify_activation(module: Any, gated: bool) -> Activation | None:
    """The activation of an experts module, in the row order that the module itself uses; None if no kernel has it.

    Args:
        module: see `gate_of`. May be on the meta device.
    """
    y = _grid(gated)
    try:
        with torch.device("cpu"), torch.no_grad():
            want = gate_of(module, gated)(y.clone())
    except Exception as error:
        logger.debug("%s: its activation cannot be evaluated on its own (%s)", type(module).__name__, error)
        return None
    if not torch.isfinite(want).all() or want.shape != (len(y), y.shape[1] // (2 if gated else 1)):
        return None
    for candidate in _candidates(module):
        with torch.device("cpu"):
            got = activate(_config(candidate, gated), y)
        if bool((got - want.float()).abs().le(_tolerance(want.float(), y)).all()):
            return candidate
    return None


def _grid(gated: bool) -> torch.Tensor:
    """float32 [R, 8]: moderate values that tell the functions apart, then large ones that show a clamp."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    y = torch.randn(256, _WIDTH, generator=generator, dtype=torch.float32, device="cpu")
    y[:192] *= 2.0
    y[192:] *= 20.0
    return y if gated else y.clamp(-60, 60)


def _tolerance(want: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    # The contract's erf is within 5e-7 absolute; times gate and up that is this much. gelu and gelu_tanh are
    # 4.7e-4 apart.
    return want.abs() * 2e-5 + 2e-5 + 1e-6 * y.abs().amax(-1, keepdim=True) ** 2


def _config(a: Activation, gated: bool) -> FusedMoEConfig:
    return replace(
        FusedMoEConfig(1, 1, 1, 1, platform=Platform.cpu(), is_act_and_mul=gated),
        activation=a.kind,
        swiglu_limit=a.limit,
        swiglu_alpha=a.alpha,
    )


def _candidates(module: Any) -> Iterator[Activation]:
    """Every kind with the constants found on the module; first without a clamp."""
    numbers = {k: float(v) for k, v in vars(module).items() if isinstance(v, int | float) and not isinstance(v, bool)}
    limits = [v for k, v in numbers.items() if ("limit" in k or "clamp" in k) and v > 0]
    alphas = [v for k, v in numbers.items() if "alpha" in k] or [1.702]
    for kind in MoEActivation:
        for limit in ([] if kind.is_swigluoai else [None]) + sorted(set(limits)):
            for alpha in alphas if kind.is_swigluoai else [1.702]:
                yield Activation(kind, limit, alpha)
