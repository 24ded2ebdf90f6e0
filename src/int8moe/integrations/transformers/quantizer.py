"""`Int8MoeConfig`, and the quantizer that Transformers calls for it.

Works through Transformers' own hooks on 5.16 to 5.24: a bf16 checkpoint is quantised while it loads, an INT8 one
(`int-quantized`, W8A8 or W8A16) is read as it is.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from int8moe.config import MOE_BACKENDS
from int8moe.errors import CheckpointError, ConfigError, UnsupportedDeployment
from int8moe.integrations.transformers import conversion
from int8moe.integrations.transformers.experts import Int8Experts, Int8State, convert_module, describe, is_experts
from int8moe.model_config import _EXPERTS
from int8moe.quantize.compressed_tensors import read_tensors, to_compressed_tensors
from int8moe.quantize.experts_class import why_outside
from int8moe.schemes import SCHEMES_BY_FLAG

logger = logging.getLogger(__name__)
SCHEMES = ("w8a8", "w8a16")


class Int8MoeConfig(QuantizationConfigMixin):
    """Quantise a model's experts to INT8 while it loads: `from_pretrained(..., quantization_config=Int8MoeConfig())`.

    Args:
        backend: "auto", or a backend by name ("triton", "humming", "cpu", "reference"), which then runs or raises.
        scheme: "w8a8" (INT8 products) or "w8a16" (INT8 weights, activations as they are).
        modules_to_not_convert: names (or regular expressions, or endings) of experts modules that stay as they are.
        device: where the experts go when no `device_map` says it; None is the CPU.
        dtype: of the hidden states that the kernels will be given; None is the model's.

    Raises:
        ConfigError: a value that makes no sense.
    """

    def __init__(
        self,
        backend: str = "auto",
        scheme: str = "w8a8",
        modules_to_not_convert: list[str] | None = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.pop("quant_method", None)
        if kwargs:
            raise ConfigError(f"Int8MoeConfig has no field {sorted(kwargs)[0]!r}.")
        if backend not in MOE_BACKENDS:
            raise ConfigError(f"backend is {backend!r}, needs one of: {', '.join(MOE_BACKENDS)}.")
        if scheme not in SCHEMES:
            raise ConfigError(f"scheme is {scheme!r}, needs one of: {', '.join(SCHEMES)}.")
        self.quant_method = "int8moe"  # type: ignore[assignment]
        self.backend = backend
        self.scheme = scheme
        if isinstance(modules_to_not_convert, str):
            modules_to_not_convert = [modules_to_not_convert]
        self.modules_to_not_convert = list(modules_to_not_convert or [])
        self.device = None if device is None else str(device)
        self.dtype = None if dtype is None else str(dtype).removeprefix("torch.")
        self.ignore: list[str] = []

    def to_dict(self) -> dict[str, Any]:
        """What `save_pretrained` writes into config.json: compressed-tensors, as engines read it."""
        return to_compressed_tensors(self.scheme, self.ignore)


class Int8MoeQuantizer(HfQuantizer):
    """Replaces experts modules, feeds them int8 tensors, and gives each its kernel once all weights are there."""

    requires_calibration = False

    def __init__(self, quantization_config: Int8MoeConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.options = quantization_config
        self.params: conversion.Params = {}
        self.loading = conversion.Loading(self.params, self._device_of)
        self._device_map: Any = None
        self._model: Any = None
        self._files: list[str] | None = None
        self._conversions: conversion.Conversions | None = None

    # -- before loading

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Called twice where `device_map` is a word: with that, then with the devices it came to."""
        device_map = kwargs.get("device_map")
        if isinstance(device_map, dict):
            self._device_map = device_map
            if "disk" in device_map.values():
                name = next(n for n, device in device_map.items() if device == "disk")
                raise ConfigError(
                    f"device_map puts {name or 'the model'} on the disk; a model with INT8 experts has to fit in the"
                    " memory of the GPUs and the CPU together."
                )

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        self._model = model
        self._files = kwargs.get("checkpoint_files")
        if self._device_map is None:
            self._device_map = kwargs.get("device_map")
        config = self.options
        skip = config.modules_to_not_convert
        found = [(n, m) for n, m in model.named_modules() if is_experts(m)]
        chosen = [(n, m) for n, m in found if should_convert_module(n, skip)] if skip else found
        if not chosen:
            raise CheckpointError(_why_nothing(model, bool(found)))
        for pattern in skip:
            if all(should_convert_module(n, [pattern]) for n, _ in model.named_modules()):
                logger.warning("modules_to_not_convert: %r names no module of %s.", pattern, type(model).__name__)
        for name, module in chosen:
            layout = describe(module, name, model.config.get_text_config())
            state = Int8State(layout, config.backend, SCHEMES_BY_FLAG[config.scheme], torch.get_default_dtype())
            convert_module(module, layout, state, int8_placeholders=self.pre_quantized)
            self.params.update({f"{name}.{local}": (layout, local) for local in layout.shapes})
        return model

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any = None) -> list[Any]:
        model, self._model = model if model is not None else self._model, None  # not given up to Transformers 5.20
        self._conversions = conversion.Conversions(
            self.loading, pre_quantized=self.pre_quantized, force_cpu=self._device_map is not None
        )
        updated = self._conversions.build(weight_conversions)
        if self._files and all(f.endswith(".safetensors") for f in self._files):
            headers = {name: dtype for name, (dtype, _) in read_tensors(self._files).items()}
            if self.pre_quantized and conversion.dense_int8(headers):
                updated.append(conversion.dequantize_linears())
                conversion.check_dense(headers, updated, model)
            conversion.check_experts(headers, updated, model, self.params, pre_quantized=self.pre_quantized)
        elif self.pre_quantized:
            raise CheckpointError("an INT8 checkpoint needs safetensors files; this one has none.")
        return updated

    def _device_of(self, name: str) -> torch.device | None:
        """Where a parameter goes, or None to leave it where the checkpoint's tensor is."""
        if isinstance(self._device_map, dict):
            from transformers.integrations.accelerate import get_device

            target = torch.device(get_device(self._device_map, name, valid_torch_device=True))
            return None if target.type == "meta" else target
        device = self.options.device
        return torch.device(device) if device and self._device_map is None else None

    # -- while loading

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        return not self.pre_quantized and param_name in self.params

    def get_quantize_ops(self) -> Any:
        return conversion.QuantizeFused(self.loading)

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        if any(isinstance(op, conversion.DequantizeLinear) for op in getattr(converter, "operations", ())):
            return None
        name = param.get_dtype() if hasattr(param, "get_dtype") else str(param.dtype)
        return dtype if name.startswith(("F", "BF", "torch.float", "torch.bfloat")) else None

    @property
    def quantized_element_size(self) -> float | None:
        return 1.0

    def update_parallel_plan(self, model: Any, plan: dict[str, str]) -> None:
        """Scales are divided as their weights are: by experts, or by the rows of GEMM 1. Those of GEMM 2, whose columns
        are divided, stay whole. Called by Transformers 5.21 and later."""
        for key, style in list(plan.items()):
            pattern = re.compile(re.escape(key).replace(r"\*", r"\w+") + "$")
            if style in ("grouped_gemm", "packed_colwise", "colwise") and any(map(pattern.search, self.params)):
                plan[f"{key}_scale"] = style

    # -- after loading

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        modules = [(n, m) for n, m in model.named_modules() if isinstance(m, Int8Experts)]
        if not self.pre_quantized:
            lost = sorted(set(self.params) - self.loading.arrived)
            if lost:
                raise CheckpointError(f"{len(lost)} expert tensors were not loaded: {conversion._some(lost)}.")
        wanted = self.options.dtype
        dtype = getattr(torch, wanted) if wanted else _model_dtype(model)
        if self._conversions is not None and getattr(model, "_weight_conversions", None) is not None:
            model._weight_conversions = self._conversions.used_for_saving(model._weight_conversions)
        converted = {m for _, m in modules}
        self.options.ignore = _not_quantised(model, converted)
        for name, module in modules:
            state = module._int8
            if getattr(module, "_is_expert_parallel", False) and not hasattr(HfQuantizer, "update_parallel_plan"):
                raise UnsupportedDeployment(
                    f"{name} is divided by expert parallelism; for INT8 experts that needs Transformers 5.21 or newer."
                )
            state.layout = self.params[f"{name}.{state.layout.up}"][0]
            if any(p.is_meta for p in module.parameters(recurse=False)):
                _keep_on_cpu(name, module)
            module._int8.in_dtype = dtype
            if module._int8.layout.experts_per_token is not None:
                module.build()
        return model

    @property
    def is_trainable(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Adapters on other layers train; the experts pass gradients on."""
        return True

    @property
    def is_compileable(self) -> bool:
        return True

    def get_state_dict_and_metadata(self, model: Any) -> Any:
        """Called by `save_pretrained`.

        Raises:
            UnsupportedDeployment: each rank holds only its share of the experts.
        """
        if self.loading.sharded:
            raise UnsupportedDeployment(
                "INT8 experts that are divided over ranks cannot be saved; load the model in one process for that, or"
                " convert the checkpoint with int8moe quantize."
            )
        return None, {}

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return True


def _keep_on_cpu(name: str, module: Any) -> None:
    """Where `device_map` says "cpu" beside a GPU, accelerate keeps weights on the CPU and copies them to the GPU for
    every call. Of experts that would be all of them for a few tokens, so they get a CPU kernel instead: the hidden
    states go there and come back.

    Raises:
        ConfigError: the weights are not in the memory of the CPU.
    """
    from accelerate.hooks import AlignDevicesHook, SequentialHook, remove_hook_from_module  # type: ignore[import-untyped]

    hook = getattr(module, "_hf_hook", None)
    for each in hook.hooks if isinstance(hook, SequentialHook) else [hook]:
        if isinstance(each, AlignDevicesHook) and each.offload:
            remove_hook_from_module(module)  # puts the weights back where they were
            prefixed = each.weights_map
            held = getattr(getattr(prefixed, "dataset", None), "state_dict", {})
            for local, _ in module.named_parameters(recurse=False):  # which would keep a second copy alive
                held.pop(f"{prefixed.prefix}{local}", None)
            break
    if any(p.is_meta for p in module.parameters(recurse=False)):
        raise ConfigError(f"{name} was offloaded by device_map; INT8 experts need their weights in memory.")


def _model_dtype(model: Any) -> torch.dtype:
    """Of the first dense parameter."""
    return next(p.dtype for n, p in model.named_parameters() if p.is_floating_point() and not n.endswith("_scale"))


def _why_nothing(model: Any, all_excluded: bool) -> str:
    config = model.config.get_text_config()
    if refusal := why_outside(model.config.model_type):
        return f"{type(model).__name__}: {refusal} quantize=False loads it as it is."
    kind = f"{type(model).__name__} (model_type {model.config.model_type!r})"
    if all_excluded:
        return f"{kind}: modules_to_not_convert excludes all of its experts, so there is nothing to quantise."
    if any(getattr(config, n, None) for n in _EXPERTS) or any(n.endswith("experts") for n, _ in model.named_modules()):
        return (
            f"{kind} has experts, but none in the stacked form that Transformers' experts decorator marks"
            " (gate_up_proj or up_proj, and down_proj); INT8 experts cannot replace them yet."
        )
    return (
        f"{kind} is a dense model: it has no experts to quantise. Needs a Mixture-of-Experts model, or quantize=False."
    )


def _not_quantised(model: Any, converted: set[Any]) -> list[str]:
    """What compressed-tensors calls `ignore`: every layer with a matrix that is not INT8, as the file names it."""
    matrices = {
        f"{name}.{leaf}": torch.empty_like(parameter, device="meta")
        for name, module in model.named_modules()
        if module not in converted and not isinstance(module, torch.nn.Embedding)
        for leaf, parameter in module.named_parameters(recurse=False)
        if (leaf == "weight" and parameter.dim() == 2) or (is_experts(module) and parameter.dim() == 3)
    }
    return [name.removesuffix(".weight") for name in revert_weight_conversion(model, matrices)]


register_quantization_config("int8moe")(Int8MoeConfig)
register_quantizer("int8moe")(Int8MoeQuantizer)
