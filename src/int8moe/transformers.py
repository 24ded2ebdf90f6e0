"""Transformers models with INT8 experts. Importing this registers the quantization method "int8moe" with Transformers.

model = int8moe.transformers.load("path/to/checkpoint"), of a bf16 or an INT8 checkpoint, or
model = AutoModelForCausalLM.from_pretrained("path/to/checkpoint", quantization_config=Int8MoeConfig()).
After `enable_compressed_tensors()`, `from_pretrained` alone does it for INT8 checkpoints of compressed-tensors.
"""

from __future__ import annotations

from int8moe.errors import MissingPackage

try:
    import transformers as _transformers  # noqa: F401  (the package, not this module)
except ImportError as error:
    raise MissingPackage("Transformers is needed: pip install 'int8moe[transformers]'.") from error

from int8moe.integrations.transformers.compressed_tensors import (
    disable_compressed_tensors,
    enable_compressed_tensors,
)
from int8moe.integrations.transformers.experts import Int8Experts
from int8moe.integrations.transformers.loading import (
    LayerReport,
    adapt_config,
    default_device,
    experts_bytes,
    explain_model,
    is_int8_checkpoint,
    load,
)
from int8moe.integrations.transformers.quantizer import Int8MoeConfig, Int8MoeQuantizer

__all__ = [
    "Int8Experts",
    "Int8MoeConfig",
    "Int8MoeQuantizer",
    "LayerReport",
    "adapt_config",
    "default_device",
    "disable_compressed_tensors",
    "enable_compressed_tensors",
    "experts_bytes",
    "explain_model",
    "is_int8_checkpoint",
    "load",
]
