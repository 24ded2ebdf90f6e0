"""The INT8 oracle: which INT8 MoE backend runs a deployment, and the conversion into its format."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any

from int8moe.backends.base import FusedMoEExperts
from int8moe.backends.cpu.support import CPUExpertsInt8
from int8moe.backends.humming.support import (
    BatchedHummingGroupedExperts,
    HummingGroupedExperts,
    HummingIndexedExperts,
)
from int8moe.backends.triton.support import BatchedTritonExperts, TritonExperts
from int8moe.config import FusedMoEConfig
from int8moe.errors import UnknownBackend
from int8moe.oracle.base import MoEKernelOracle
from int8moe.quant_config import FusedMoEQuantConfig, int8_w8a8_moe_quant_config, int8_w8a16_moe_quant_config
from int8moe.records import BF16, MIN_GAIN, LayerTime, load_records, rank, rank_classes, slower_than
from int8moe.schemes import QuantKey, kInt8DynamicTokenSym, kInt8StaticChannelSym

if TYPE_CHECKING:
    import torch


class Int8MoeBackend(Enum):
    """The INT8 MoE backends, in the static order of preference."""

    TRITON = "TRITON"
    HUMMING = "HUMMING"
    CPU = "CPU"


KERNEL_CLASSES: dict[Int8MoeBackend, list[type[FusedMoEExperts]]] = {
    Int8MoeBackend.TRITON: [TritonExperts, BatchedTritonExperts],
    Int8MoeBackend.HUMMING: [BatchedHummingGroupedExperts, HummingGroupedExperts, HummingIndexedExperts],
    Int8MoeBackend.CPU: [CPUExpertsInt8],
}


def backend_to_kernel_cls(backend: Int8MoeBackend) -> list[type[FusedMoEExperts]]:
    """The experts classes of `backend`, best first. Raises ValueError for anything else."""
    try:
        return list(KERNEL_CLASSES[backend])
    except (KeyError, TypeError):
        raise UnknownBackend(f"Unknown Int8 MoE backend: {backend!r}, needs {_named(Int8MoeBackend)}.") from None


def map_int8_backend(runner_backend: str) -> Int8MoeBackend:
    """ "triton", "humming" or "cpu" to the enum. Raises ValueError, naming the value and those accepted."""
    for backend in Int8MoeBackend:
        if runner_backend == backend.value.lower():
            return backend
    accepted = [b.value.lower() for b in Int8MoeBackend]
    raise UnknownBackend(f"moe_backend is {runner_backend!r}, which has no Int8 MoE; needs one of {accepted}.")


def _named(members: Any) -> str:
    return ", ".join(str(m) for m in members)


def _priority(
    moe_config: FusedMoEConfig, records: Iterable[LayerTime] | None = None
) -> tuple[list[Int8MoeBackend], str]:
    """The order, and why. A measured backend moves ahead of slower measured ones; the rest keep their places."""
    order = list(Int8MoeBackend)
    wanted = moe_config.moe_parallel_config.activation_format
    others = {c.__name__ for row in KERNEL_CLASSES.values() for c in row if c.activation_format is not wanted}
    ranking = rank(moe_config, records, usable=lambda _, experts_class: experts_class not in others)
    if ranking is None:
        return order, "static order (no measured record of two backends fits this device and shape)"
    return [Int8MoeBackend(name) for name in ranking.reorder([b.value for b in order], MIN_GAIN)], str(ranking)


def _get_priority_backends(moe_config: FusedMoEConfig) -> list[Int8MoeBackend]:
    """[TRITON, HUMMING, CPU], reordered only by a measured record that fits this device and shape."""
    return _priority(moe_config)[0]


class Int8MoEKernelOracle(MoEKernelOracle[Int8MoeBackend]):
    """INT8 backend selection for one deployment configuration."""

    name = "Int8"

    @cached_property
    def records(self) -> list[LayerTime]:
        """Measured layer times: read once, so that all that is said of one deployment rests on the same."""
        return load_records()

    def backend_to_kernel_cls(self, backend: Int8MoeBackend) -> list[type[FusedMoEExperts]]:
        return backend_to_kernel_cls(backend)

    def priority_backends(self) -> tuple[list[Int8MoeBackend], str]:
        return _priority(self.config, self.records)

    def map_backend(self, runner_backend: str) -> Int8MoeBackend:
        return map_int8_backend(runner_backend)

    def ordered_classes(self, backend: Int8MoeBackend) -> tuple[list[type[FusedMoEExperts]], str]:
        """A measured class moves ahead of slower measured ones; the rest keep their places."""
        classes = self.backend_to_kernel_cls(backend)
        ranking = rank_classes(self.config, backend.value, self.records)
        if ranking is None:
            return classes, ""
        named = {c.__name__: c for c in classes}
        return [named[name] for name in ranking.reorder(list(named))], str(ranking)

    def remarks(self, backend: str, experts_class: str) -> list[str]:
        found = []
        for other in (BF16, *(b.value for b in self.priority_backends()[0] if b.value != backend)):
            gain = 1.0 if other == BF16 else MIN_GAIN
            slower = slower_than(self.config, backend, experts_class, other, gain, self.records)
            if slower:
                what = "the same layer in bfloat16" if other == BF16 else other
                where = ", ".join(f"M={m} ({ratio:.2f} times as long)" for m, ratio in slower.items())
                found.append(f"{backend} ({experts_class}) was measured slower than {what} at {where}")
        return found


def select_int8_moe_backend(
    config: FusedMoEConfig,
    weight_key: QuantKey | None = kInt8StaticChannelSym,
    activation_key: QuantKey | None = kInt8DynamicTokenSym,
) -> tuple[Int8MoeBackend, type[FusedMoEExperts]]:
    """The backend that runs `config`, with its experts class (see `MoEKernelOracle.select` for the errors)."""
    return Int8MoEKernelOracle(config, weight_key, activation_key).select()


def _humming_int8_weight_schema(weight: torch.Tensor, weight_scale: torch.Tensor) -> dict[str, Any]:
    """The compressed-tensors description of canonical int8 tensors, for the humming package.

    Args:
        weight: int8 [E, N, K].
        weight_scale: [E, N, 1], or fewer elements for one scale a tensor.
    """
    per_row = weight_scale.numel() >= weight.shape[0] * weight.shape[1]
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "type": "int",
        "num_bits": 8,
        "symmetric": True,
        "strategy": "channel" if per_row else "tensor",
    }


def convert_to_int8_moe_kernel_format(
    int8_backend: Int8MoeBackend,
    w13: torch.Tensor,
    w2: torch.Tensor,
    layer: Any = None,
    w13_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights in the backend's format.

    TRITON and CPU take the canonical tensors as they are (the CPU packs in `process_weights_after_loading`). HUMMING
    converts the layer's own tensors with the humming-kernels package and returns those.

    Args:
        w13: int8 [E, 2*I, H] (or [E, I, H]). w2: int8 [E, H, I].
        layer: holder of `w13_weight`, `w2_weight` and their scales; needed by HUMMING.
        w13_scale: unused where the layer holds its scales; kept for callers that pass it.
    Raises:
        ValueError: HUMMING without a layer, a layer that was converted before, or an unknown backend.
    """
    if int8_backend in (Int8MoeBackend.TRITON, Int8MoeBackend.CPU):
        return w13, w2
    if int8_backend is Int8MoeBackend.HUMMING:
        from int8moe.backends.humming.layout import convert_layer

        return convert_layer(layer, _humming_int8_weight_schema)
    raise UnknownBackend(f"Unsupported Int8 MoE backend: {int8_backend!r}, needs {_named(Int8MoeBackend)}.")


def make_int8_moe_quant_config(
    w13_scale: torch.Tensor,
    w2_scale: torch.Tensor,
    *,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    activation_key: QuantKey | None = kInt8DynamicTokenSym,
) -> FusedMoEQuantConfig:
    """The quantisation description of a layer: W8A8 with the activation key's granularity, W8A16 when it is None."""
    if activation_key is None:
        return int8_w8a16_moe_quant_config(w13_scale, w2_scale, w13_bias, w2_bias)
    per_token = activation_key == kInt8DynamicTokenSym
    return int8_w8a8_moe_quant_config(w13_scale, w2_scale, w13_bias, w2_bias, per_act_token_quant=per_token)


def make_int8_moe_kernel(
    moe_quant_config: FusedMoEQuantConfig,
    moe_config: FusedMoEConfig,
    experts_cls: type[FusedMoEExperts],
    layer: Any,
    int8_backend: Int8MoeBackend | None = None,
) -> Any:
    """The runnable kernel (prepare/finalize + experts) of a selected backend.

    `layer` holds `w13_weight` and `w2_weight` in the backend's format (`convert_to_int8_moe_kernel_format`); the
    experts take them over. Returns an `int8moe.layer.Int8MoEKernel`.
    """
    from int8moe.layer import Int8MoEKernel

    return Int8MoEKernel(int8_backend, experts_cls, moe_config, moe_quant_config, layer)
