"""Opt-in: plain `from_pretrained` reads the INT8 experts of compressed-tensors checkpoints into INT8 kernels.

Transformers asks its registry for the quantizer of "compressed-tensors". The entry is replaced by a subclass of what
stood there, which looks at the checkpoint's tensors once the model's skeleton is made: with INT8 experts it becomes an
`Int8MoeQuantizer`, otherwise it stays what it was.
"""

from __future__ import annotations

import logging
from typing import Any

from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer

from int8moe.errors import MissingPackage
from int8moe.integrations.transformers.experts import is_experts
from int8moe.integrations.transformers.quantizer import Int8MoeConfig, Int8MoeQuantizer
from int8moe.quantize.compressed_tensors import has_int8_experts, read_scheme, read_tensors

logger = logging.getLogger(__name__)
METHOD = "compressed-tensors"


class _Int8OrStock(HfQuantizer):
    """Put in front of the quantizer that Transformers has for compressed-tensors."""

    stock: type
    backend: str

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        self._dequantize = bool(getattr(quantization_config, "dequantize", False))  # before Transformers changes it
        super().__init__(quantization_config, **kwargs)

    def preprocess_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Called with the model on the meta device and the names of the checkpoint's files.

        Raises:
            CheckpointError: experts in INT8 that cannot be read as they are. Transformers cannot read them either, and
                would stop or leave them random.
        """
        found = self._int8_config(model, kwargs.get("checkpoint_files"))
        if found is not None:
            quantizer = Int8MoeQuantizer(found, pre_quantized=True)
            quantizer.validate_environment(device_map=kwargs.get("device_map"))
            self.__class__ = type(quantizer)  # type: ignore[assignment]  # callers hold this object
            self.__dict__ = quantizer.__dict__
            return self.preprocess_model(model, *args, **kwargs)
        return super().preprocess_model(model, *args, **kwargs)

    def _int8_config(self, model: Any, files: Any) -> Int8MoeConfig | None:
        """What our quantizer needs to know, or None where the checkpoint is not for it."""
        reason = None
        if self._dequantize:
            reason = "dequantize=True was asked for"
        elif not self.pre_quantized or not files or not all(f.endswith(".safetensors") for f in files):
            reason = "it has no safetensors files"
        elif not any(is_experts(m) for m in model.modules()):
            reason = "it has no experts"
        else:
            layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
            tensors = read_tensors(files, layers)
            if has_int8_experts(self.quantization_config, tensors):
                where = model.config._name_or_path or type(model).__name__
                scheme = read_scheme(self.quantization_config, where, tensors)
                return Int8MoeConfig(self.backend, scheme)
            reason = "its experts are not int-quantized with 8 bits"
        logger.info("Left to Transformers' own compressed-tensors quantizer: %s.", reason)
        return None


def enable_compressed_tensors(backend: str = "auto") -> None:
    """From now on `from_pretrained` and pipelines run the INT8 experts of compressed-tensors checkpoints in INT8.

    Other compressed-tensors checkpoints load as before. A second call replaces the first one's backend.

    Args:
        backend: "auto", or a backend by name, which then runs or raises.
    Raises:
        ConfigError: no such backend.
        MissingPackage: Transformers needs compressed-tensors to read the configuration. (`load` does not.)
    """
    from transformers.utils import is_compressed_tensors_available

    Int8MoeConfig(backend)  # checks the name
    if not is_compressed_tensors_available():
        raise MissingPackage("Transformers needs it for these checkpoints: pip install compressed-tensors.")
    disable_compressed_tensors()
    stock = auto.AUTO_QUANTIZER_MAPPING[METHOD]
    name = f"Int8Or{stock.__name__}"
    auto.AUTO_QUANTIZER_MAPPING[METHOD] = type(
        name, (_Int8OrStock, stock), {"stock": stock, "backend": backend, "__module__": __name__}
    )


def disable_compressed_tensors() -> None:
    """Undo `enable_compressed_tensors`; models that were loaded stay as they are."""
    current = auto.AUTO_QUANTIZER_MAPPING[METHOD]
    if issubclass(current, _Int8OrStock):
        auto.AUTO_QUANTIZER_MAPPING[METHOD] = current.stock
