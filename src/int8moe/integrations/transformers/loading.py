"""`load`: a model with INT8 experts from a bf16 or an INT8 checkpoint, and reports on what runs in it."""

from __future__ import annotations

import copy
import json
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.hub import cached_file

from int8moe.config import FusedMoEConfig
from int8moe.errors import CheckpointError, ConfigError, Int8MoeError
from int8moe.integrations.transformers import conversion
from int8moe.integrations.transformers.experts import Int8Experts, is_experts, up_name
from int8moe.integrations.transformers.quantizer import Int8MoeConfig
from int8moe.oracle.base import SelectionReport
from int8moe.quantize.compressed_tensors import Tensors, read_scheme, read_tensors

logger = logging.getLogger(__name__)
_WHERE = ("revision", "cache_dir", "token", "local_files_only", "subfolder", "force_download", "proxies")
"""Arguments of `from_pretrained` that say where files are found."""


def load(
    path: str | os.PathLike[str],
    backend: str = "auto",
    *,
    quantize: bool | None = None,
    scheme: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    modules_to_not_convert: list[str] | None = None,
    model_class: Any = AutoModelForCausalLM,
    config: Any = None,
    **kwargs: Any,
) -> Any:
    """A Transformers model whose experts run in INT8.

    A float checkpoint is quantised while it loads, one expert at a time; an INT8 checkpoint (compressed-tensors
    int-quantized) is read as it is. Both give the same bits.

    Args:
        path: folder, or a name that Transformers resolves.
        backend: "auto", or a backend by name, which then runs or raises.
        quantize: False loads a float checkpoint as it is; None and True give INT8 experts.
        scheme: "w8a8" (default) or "w8a16"; of an INT8 checkpoint only the one it was made for, or "w8a16".
        dtype: of everything but the experts' weights; default: the checkpoint's. Experts are quantised from the
            checkpoint's values, in the dtype that its configuration names, whatever it is.
        device: of the whole model; default: a GPU if the backend can use one, else the CPU. Not with `device_map`.
        modules_to_not_convert: experts modules that stay as they are.
        model_class: the Auto class (or model class) that builds the model.
        config: the model's configuration, where it was read or changed before.
        kwargs: passed to `from_pretrained` as they are.
    Raises:
        CheckpointError: a dense model, missing or unfitting tensors, another quantisation.
        UnsupportedDeployment, NoBackendSupported: no kernel for this model here.
    """
    for name in ("quantization_config", "output_loading_info"):
        if name in kwargs:
            raise ConfigError(f"load takes no {name}; backend, scheme and modules_to_not_convert say what is INT8.")
    if "torch_dtype" in kwargs:
        if dtype is not None:
            raise ConfigError("dtype and torch_dtype are both given, needs one of them.")
        dtype = kwargs.pop("torch_dtype")
    if quantize is False and (scheme or modules_to_not_convert):
        raise ConfigError(
            "quantize=False leaves the experts as they are, so scheme and modules_to_not_convert say nothing."
        )
    if kwargs.get("device_map", ...) is None:
        del kwargs["device_map"]
    path = _existing(path, kwargs.get("subfolder") or "")
    hub = {k: kwargs[k] for k in _WHERE if k in kwargs}
    if config is None:
        config = read_config(path, hub | {k: kwargs[k] for k in ("trust_remote_code",) if k in kwargs})
    where = str(path)
    has = quantization_of(config)
    target = None if "device_map" in kwargs else torch.device(device or default_device(backend))
    if device is not None and "device_map" in kwargs:
        raise ConfigError("device and device_map are both given, needs one of them.")
    wanted = getattr(torch, dtype, dtype) if isinstance(dtype, str) and dtype != "auto" else dtype
    if wanted not in (None, "auto") and not (isinstance(wanted, torch.dtype) and wanted.is_floating_point):
        raise ConfigError(f"dtype is {dtype!r}, needs a float dtype of torch, its name, or 'auto'.")
    if has is None and quantize is not False:
        kwargs["quantization_config"] = Int8MoeConfig(
            backend, scheme or "w8a8", modules_to_not_convert, device=target, dtype=None if wanted == "auto" else wanted
        )
    elif has is not None:
        if quantize is False:
            raise CheckpointError(
                f"{where} is INT8 already, so it cannot be loaded with quantize=False; name the original."
            )
        tensors = _tensors_of(where, config, hub, kwargs.get("variant"))
        config = adapt_config(config, where, backend, scheme, modules_to_not_convert, target, tensors)
    online = "quantization_config" in kwargs
    # Casting while loading would quantise cast weights; the dense parameters are cast afterwards instead.
    model = _from_pretrained(model_class, path, config, kwargs | {"dtype": "auto" if online else wanted or "auto"})
    if online and isinstance(wanted, torch.dtype):
        _cast_parameters(model, wanted)
    if target is not None:
        model.to(target)
    return model


def _cast_parameters(model: Any, dtype: torch.dtype) -> None:
    """Parameters that had the model's dtype get `dtype`, as if loaded in it. Buffers (rotary frequencies) stay, and so
    do modules that the family keeps in float32."""
    kept = (
        [re.compile(p.replace("*", ".*")) for p in model._get_dtype_plan(dtype)]
        if hasattr(model, "_get_dtype_plan")
        else []
    )
    before = model.dtype
    for name, parameter in model.named_parameters():
        module = model.get_submodule(name.rpartition(".")[0])
        if parameter.dtype == before and not isinstance(module, Int8Experts) and not any(k.search(name) for k in kept):
            parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype


def adapt_config(
    config: Any,
    where: str = "the checkpoint",
    backend: str = "auto",
    scheme: str | None = None,
    modules_to_not_convert: list[str] | None = None,
    device: torch.device | str | None = None,
    tensors: Tensors | None = None,
) -> Any:
    """A copy of an INT8 checkpoint's configuration that makes `from_pretrained(path, config=...)` read it into INT8.

    Args:
        tensors: the checkpoint's, as `read_tensors` gives them; without, every config group has to fit the experts.
    Raises:
        CheckpointError: the checkpoint is quantised in another way.
    """
    skip = modules_to_not_convert or None
    found = read_scheme(
        quantization_of(config), where, tensors, (lambda name: not should_convert_module(name, skip)) if skip else None
    )
    if scheme == "w8a8" and found == "w8a16":
        raise CheckpointError(
            f"{where} was made for w8a16, so scheme 'w8a8' is not what it was checked with; needs w8a16."
        )
    config = copy.deepcopy(config)
    text = config.get_text_config()
    for part in (text, config):
        for name in ("quantization_config", "compression_config"):
            if getattr(part, name, None) is not None:
                delattr(part, name)
    config.quantization_config = {
        "quant_method": "int8moe",
        "backend": backend,
        "scheme": scheme or found,
        "modules_to_not_convert": modules_to_not_convert,
        "device": None if device is None else str(device),
    }
    return config


def is_int8_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether a checkpoint's experts are INT8 already.

    Raises:
        CheckpointError: it is quantised in a way that INT8 experts cannot take, or cannot be read.
    """
    return scheme_of(path) is not None


def scheme_of(path: str | os.PathLike[str]) -> str | None:
    """ "w8a8" or "w8a16" of an INT8 checkpoint, None of a float one; errors as `is_int8_checkpoint`."""
    path = _existing(path)
    config = read_config(path)
    found = quantization_of(config)
    return None if found is None else str(read_scheme(found, path, _tensors_of(path, config)))


def _tensors_of(
    path: str, config: Any, hub: dict[str, Any] | None = None, variant: str | None = None
) -> Tensors | None:
    """The headers of a checkpoint, of a folder or a repository (whose files are fetched here, and found in the cache
    by `from_pretrained`); None where it has no safetensors, or where `config.json` alone says that it is refused.

    Raises:
        CheckpointError: an index is damaged, or names a file that is not there.
    """
    found = quantization_of(config)
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    if method != "compressed-tensors":
        return None

    def find(name: str) -> str | None:
        try:
            return cached_file(path, name, _raise_exceptions_for_missing_entries=False, **(hub or {}))
        except (OSError, ValueError) as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise CheckpointError(f"{path}: {name} cannot be had: {reason}") from error

    suffix = f".{variant}" if variant else ""
    index: str | None
    files: list[str | None]
    if one := find(f"model{suffix}.safetensors"):  # read by Transformers, whatever index stands beside it
        files = [one]
    elif index := find(f"model.safetensors.index{suffix}.json"):
        try:
            names = sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{index} is damaged: {error!r}.") from error
        files = [find(name) for name in names]
        if None in files:
            raise CheckpointError(f"{path} lacks {names[files.index(None)]}, which its index names.")
    else:
        files = [str(f) for f in Path(path).glob("*.safetensors")]
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    return read_tensors([f for f in files if f], layers) if files else None


def quantization_of(config: Any) -> Any:
    """The `quantization_config` of a model configuration, wherever it stands, or None."""
    for part in (config, config.get_text_config()):
        for name in ("quantization_config", "compression_config"):
            if getattr(part, name, None) is not None:
                return getattr(part, name)
    return None


def _existing(path: str | os.PathLike[str], subfolder: str = "") -> str:
    name = os.fspath(path)
    local = (
        os.path.isabs(name)
        or name.startswith((".", "~"))
        or name.count("/") > 1
        or os.path.isdir(os.path.dirname(name))
    )
    if local and not os.path.isdir(name):
        raise CheckpointError(f"{name} is not a folder; needs a Transformers checkpoint (config.json and safetensors).")
    if os.path.isdir(name) and not os.path.isfile(os.path.join(name, subfolder, "config.json")):
        raise CheckpointError(f"{os.path.join(name, subfolder)} has no config.json; needs a Transformers checkpoint.")
    return name


def read_config(path: str, hub: dict[str, Any] | None = None) -> Any:
    """A checkpoint's configuration.

    Raises:
        CheckpointError: Transformers cannot read it.
    """
    try:
        return AutoConfig.from_pretrained(path, **(hub or {}))
    except (OSError, ValueError, KeyError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise CheckpointError(f"{path}: Transformers cannot read its configuration: {reason}") from error


def default_device(backend: str) -> str:
    """ "cuda" where there is a GPU and the backend may use it, else "cpu"."""
    from int8moe.device import Platform

    usable = backend != "cpu" and Platform.current().kind in ("cuda", "rocm") and torch.cuda.is_available()
    return "cuda" if usable else "cpu"


def _from_pretrained(model_class: Any, path: str, config: Any, kwargs: dict[str, Any]) -> Any:
    """`from_pretrained`, with its silent failures made errors."""
    loads: list[conversion.Loading] = []
    with conversion.watch(loads):
        try:
            model, info = model_class.from_pretrained(path, config=config, output_loading_info=True, **kwargs)
        except Int8MoeError:
            raise
        except (OSError, RuntimeError, ValueError, SafetensorError) as error:
            for loading in loads:
                if loading.error is not None:
                    raise loading.error from error
            raise CheckpointError(f"{path} cannot be loaded: {error}") from error
    gone = sorted({str(k) for k in info["missing_keys"]} | {str(k[0]) for k in info["mismatched_keys"]})
    if gone:
        raise CheckpointError(
            f"{len(gone)} tensors of {type(model).__name__} are missing in {path} or have another shape, and would stay"
            f" random: {conversion._some(gone)}."
        )
    extra = sorted(str(k) for k in info["unexpected_keys"])
    if extra:
        logger.warning("%d tensors of %s were not used: %s.", len(extra), path, conversion._some(extra))
    return model


@dataclass(frozen=True)
class LayerReport:
    """What runs in the layers that share one configuration.

    Args:
        layers: names of the experts modules.
        backend: the oracle's choice ("TRITON", ...), "REFERENCE", or None before a kernel is built.
        int8_bytes, bf16_bytes: of these layers' experts together: int8 weights with float32 scales, and bf16.
    """

    layers: tuple[str, ...]
    backend: str | None
    experts_class: str | None
    config: FusedMoEConfig | None
    report: SelectionReport | None
    int8_bytes: int
    bf16_bytes: int

    def __str__(self) -> str:
        ran = f"{self.backend} ({self.experts_class})" if self.backend else "not built yet"
        head = f"{len(self.layers)} layers ({self.layers[0]} ...): {ran}"
        size = f"experts {self.int8_bytes / 2**20:.1f} MiB in INT8, {self.bf16_bytes / 2**20:.1f} MiB in bf16"
        return "\n".join([f"{head}, {size}", *([str(self.report)] if self.report else [])])


def explain_model(model: Any) -> list[LayerReport]:
    """Backend, selection report and memory of a model's INT8 experts, one entry for each distinct layer configuration.

    Raises:
        ConfigError: the model has no INT8 experts.
    """
    groups: dict[Any, list[tuple[str, Int8Experts]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, Int8Experts):
            state = module._int8
            kernel = state.kernel
            chosen = None if kernel is None else (kernel.config, kernel.backend, type(kernel.experts).__name__)
            layout = state.layout
            groups.setdefault((chosen, tuple(layout.shapes.values()), layout.has_bias), []).append((name, module))
    if not groups:
        raise ConfigError(f"{type(model).__name__} has no INT8 experts; load it with int8moe.load.")
    reports = []
    for (chosen, _, _), members in groups.items():
        config, backend, experts_class = chosen or (None, None, None)
        kernel = members[0][1]._int8.kernel
        name = None if config is None else (backend.value if backend is not None else "REFERENCE")
        sizes = [_layer_bytes(m) for _, m in members]
        reports.append(
            LayerReport(
                tuple(n for n, _ in members),
                name,
                experts_class,
                config,
                kernel.report if kernel else None,
                sum(s[0] for s in sizes),
                sum(s[1] for s in sizes),
            )
        )
    return reports


def _layer_bytes(module: Int8Experts) -> tuple[int, int]:
    shapes = module._int8.layout.shapes.values()
    weights = sum(e * n * k for e, n, k in shapes)
    return weights + 4 * sum(e * n for e, n, _ in shapes), 2 * weights


def experts_bytes(model: Any) -> int:
    """Bytes of all expert weights as the model holds them: int8 with scales, or float parameters."""
    total = 0
    for module in model.modules():
        if isinstance(module, Int8Experts):
            total += _layer_bytes(module)[0]
        elif is_experts(module):
            total += sum(getattr(module, n).nbytes for n in (up_name(module), "down_proj"))
    return total
