"""Layer shapes to time: those of known models by name, or a model's own from its `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from int8moe.config import FusedMoEConfig, MoEActivation
from int8moe.device import Platform
from int8moe.errors import ConfigError
from int8moe.model_config import ModelExperts, read_model_experts


@dataclass(frozen=True)
class BenchShape:
    """One layer to time, by the name that tables and records show."""

    name: str
    experts: ModelExperts
    tp: int = 1

    def config(self, platform: Platform) -> FusedMoEConfig:
        """The layer on one rank. Raises ConfigError where `tp` does not fit; the message names the shape."""
        try:
            return self.experts.layer_config(platform, tp=self.tp)
        except ConfigError as error:
            raise ConfigError(f"{self.name}: {error}") from None


def _plain(experts: int, topk: int, hidden: int, intermediate: int) -> ModelExperts:
    return ModelExperts("named", experts, topk, hidden, intermediate, num_layers=1)


SHAPES = {
    "tiny": _plain(8, 2, 512, 1024),
    "olmoe": _plain(64, 8, 2048, 1024),
    "qwen3-30b": _plain(128, 8, 2048, 768),
    "qwen3-235b": _plain(128, 8, 4096, 1536),
    "mixtral": _plain(8, 2, 4096, 14336),
    "mixtral-half": _plain(8, 2, 4096, 7168),
    "glm-4.5-air": _plain(128, 8, 4096, 1408),
    "gpt-oss-120b": ModelExperts(
        "named", 128, 4, 2880, 2880, num_layers=1, activation=MoEActivation.SWIGLUOAI, has_bias=True
    ),
    "deepseek-v3": _plain(256, 8, 7168, 2048),
    "llama-4-scout": _plain(16, 1, 5120, 8192),
}


def named_shape(name: str, tp: int = 1) -> BenchShape:
    """Raises ConfigError where there is no such name; the message lists those known."""
    if name not in SHAPES:
        raise ConfigError(f"shape is {name!r}, needs one of: {', '.join(SHAPES)} (or --model PATH for another).")
    return BenchShape(name, SHAPES[name], tp)


def model_shape(path: str | Path, tp: int = 1) -> BenchShape:
    """The layer of a Transformers model, called after its folder. Raises CheckpointError as `read_model_experts`."""
    file = Path(path)
    folder = file if file.is_dir() else file.parent
    return BenchShape(folder.resolve().name or str(path), read_model_experts(file), tp)
