"""INT8 experts for Mixture-of-Experts language models: choose a kernel, convert the weights, run.

Public names load on first use, so `import int8moe` is quick and needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "FusedMoEConfig": "int8moe.config",
    "FusedMoEParallelConfig": "int8moe.config",
    "MoEActivation": "int8moe.config",
    "RoutingMethodType": "int8moe.config",
    "Platform": "int8moe.device",
    "ExpertWeights": "int8moe.weights",
    "Int8MoeBackend": "int8moe.oracle.int8",
    "Int8MoEKernelOracle": "int8moe.oracle.int8",
    "select_int8_moe_backend": "int8moe.oracle.int8",
    "Int8MoEKernel": "int8moe.layer",
    "build_kernel": "int8moe.layer",
    "quantize_checkpoint": "int8moe.quantize.checkpoint",
    "load": "int8moe.transformers",
    "Int8MoeConfig": "int8moe.transformers",
}
__all__ = [
    "FusedMoEConfig",
    "FusedMoEParallelConfig",
    "MoEActivation",
    "RoutingMethodType",
    "Platform",
    "ExpertWeights",
    "Int8MoeBackend",
    "Int8MoEKernelOracle",
    "select_int8_moe_backend",
    "Int8MoEKernel",
    "build_kernel",
    "quantize_checkpoint",
    "load",
    "Int8MoeConfig",
    "__version__",
]

if TYPE_CHECKING:
    from int8moe.config import FusedMoEConfig, FusedMoEParallelConfig, MoEActivation, RoutingMethodType
    from int8moe.device import Platform
    from int8moe.layer import Int8MoEKernel, build_kernel
    from int8moe.oracle.int8 import Int8MoeBackend, Int8MoEKernelOracle, select_int8_moe_backend
    from int8moe.quantize.checkpoint import quantize_checkpoint
    from int8moe.transformers import Int8MoeConfig, load
    from int8moe.weights import ExpertWeights


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'int8moe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
