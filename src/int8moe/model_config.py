"""What a Transformers `config.json` says about a model's routed experts. Reads JSON; imports no framework."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from int8moe.config import DTYPE_BYTES, FusedMoEConfig, FusedMoEParallelConfig, MoEActivation
from int8moe.device import Platform
from int8moe.errors import CheckpointError, ConfigError

# Field names seen in Transformers' MoE configurations, in the order they are tried.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")
_TOPK = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "moe_top_k")
_INTERMEDIATE = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size", "ffn_hidden_size")
_ACTIVATION = ("hidden_act", "hidden_activation", "mlp_hidden_act", "activation_function")


@dataclass(frozen=True)
class ModelExperts:
    """The routed experts of one model (whole model, not per rank).

    Args:
        model_type: as `config.json` names it.
        num_layers: layers that have routed experts; the others are dense.
        swiglu_limit, swiglu_alpha: of clamped activations.
        scheme: "w8a8" or "w8a16" where the checkpoint is already INT8, else None.
    """

    model_type: str
    num_experts: int
    experts_per_token: int
    hidden_dim: int
    intermediate_size: int
    num_layers: int
    activation: MoEActivation = MoEActivation.SILU
    is_act_and_mul: bool = True
    has_bias: bool = False
    swiglu_alpha: float = 1.702
    swiglu_limit: float | None = None
    dtype: str = "bfloat16"
    scheme: str | None = None

    def layer_config(
        self,
        platform: Platform,
        *,
        tp: int = 1,
        ep: int = 1,
        backend: str = "auto",
        dtype: str | None = None,
        batched: bool = False,
    ) -> FusedMoEConfig:
        """One layer on rank 0 of `tp` x `ep`.

        Raises:
            ConfigError: `tp` does not divide the intermediate size, or a size makes no sense.
        """
        for name, size, limit in (("tp", tp, self.intermediate_size), ("ep", ep, self.num_experts)):
            if not 1 <= size <= limit:
                raise ConfigError(f"{name} is {size}, needs 1 to {limit}.")
        if self.intermediate_size % tp:
            raise ConfigError(f"tp is {tp}, needs a divisor of the intermediate size {self.intermediate_size}.")
        parallel = FusedMoEParallelConfig(tp_size=tp, ep_size=ep, use_ep=ep > 1, use_batched_activation_format=batched)
        return FusedMoEConfig(
            self.num_experts,
            self.experts_per_token,
            self.hidden_dim,
            self.intermediate_size // tp,
            in_dtype=dtype or self.dtype,
            activation=self.activation,
            is_act_and_mul=self.is_act_and_mul,
            has_bias=self.has_bias,
            moe_parallel_config=parallel,
            moe_backend=backend,
            platform=platform,
            swiglu_alpha=self.swiglu_alpha,
            swiglu_limit=self.swiglu_limit,
        )


def read_model_experts(path: str | Path) -> ModelExperts:
    """Read `config.json` (the file, or a folder that holds it).

    Raises:
        CheckpointError: no such file, not JSON, a dense model, or a needed field is missing.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    config = read_json(file, "needs a Transformers config.json, or a folder with one")
    return parse_model_experts(config, str(file))


def read_json(file: Path, needs: str) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        CheckpointError: no such file (with what it `needs`), not readable, or something else in it.
    """
    try:
        value = json.loads(file.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{file} does not exist; {needs}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from None
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds a {type(value).__name__}, needs a JSON object.")
    return value


def parse_model_experts(config: dict[str, Any], where: str = "config.json") -> ModelExperts:
    """The experts that a parsed configuration describes; errors as `read_model_experts`."""
    text = _experts_part(config)
    model_type = str(text.get("model_type") or config.get("model_type") or "unknown")
    experts = _first(text, _EXPERTS)
    if not experts:
        raise CheckpointError(
            f"{where} describes a dense model (model_type {model_type!r}, none of {', '.join(_EXPERTS)});"
            " needs a Mixture-of-Experts model."
        )

    def need(names: tuple[str, ...]) -> int:
        value = _first(text, names)
        if isinstance(value, list) and value:  # ERNIE VL: of the text experts, then of the vision experts
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(
                f"{where} has {names[0]} = {value!r}, needs a positive integer in one of {', '.join(names)}."
            )
        return value

    blocks = text.get("layers_block_type")
    named = ("num_hidden_layers", "n_layer", "num_layers")
    layers = len(blocks) if isinstance(blocks, list) and _first(text, named) is None else need(named)
    act = next((text[n] for n in _ACTIVATION if isinstance(text.get(n), str)), "silu")
    oai = model_type in ("gpt_oss", "openai_privacy_filter")
    try:
        activation = MoEActivation.SWIGLUOAI if oai else MoEActivation.from_str(act)
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from None
    limit = text.get("swiglu_limit")
    dtype = str(
        text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    )
    return ModelExperts(
        model_type=model_type,
        num_experts=need(_EXPERTS),
        experts_per_token=need(_TOPK),
        hidden_dim=need(("hidden_size", "d_model")),
        intermediate_size=need(_INTERMEDIATE),
        num_layers=_moe_layers(text, layers),
        activation=activation,
        is_act_and_mul=model_type != "nemotron_h",
        has_bias=oai,
        swiglu_alpha=float(text.get("swiglu_alpha") or 1.702),
        swiglu_limit=float(limit) if isinstance(limit, int | float) else None,
        dtype=dtype if dtype in DTYPE_BYTES else "bfloat16",
        scheme=_scheme(config),
    )


def expert_groups(config: dict[str, Any]) -> int:
    """How many kinds of experts a layer has, each `num_experts` of them: ERNIE VL has text and vision experts."""
    sizes = _first(_experts_part(config), _INTERMEDIATE)
    return len(sizes) if isinstance(sizes, list) and sizes else 1


def _experts_part(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration that describes the experts: itself, or the first one inside it (`text_config`, ...)."""
    parts = [config]
    for part in parts:
        if _first(part, _EXPERTS):
            return part
        inside = sorted(part.items(), key=lambda item: item[0] != "text_config")
        parts += [v for k, v in inside if isinstance(v, dict) and k.endswith("_config")]
    return config.get("text_config") if isinstance(config.get("text_config"), dict) else config  # type: ignore[return-value]


def _first(config: dict[str, Any], names: tuple[str, ...]) -> Any:
    return next((config[n] for n in names if config.get(n) is not None), None)


def _moe_layers(text: dict[str, Any], layers: int) -> int:
    """How many of the layers have routed experts."""
    kinds = text.get("mlp_layer_types") or text.get("layers_block_type")
    if isinstance(kinds, list) and any(k in ("sparse", "moe") for k in kinds):
        return sum(k in ("sparse", "moe") for k in kinds)
    pattern = text.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return pattern.count("E")
    moe = set(range(layers))
    for dense_first in ("first_k_dense_replace", "num_dense_layers"):
        moe -= set(range(int(text.get(dense_first) or 0)))
    moe -= set(text.get("mlp_only_layers") or ())
    step = int(text.get("decoder_sparse_step") or text.get("interleave_moe_layer_step") or 1)
    if step > 1:
        moe = {i for i in moe if (i + 1) % step == 0}
    if period := int(text.get("expert_layer_period") or 0):  # Jamba
        moe = {i for i in moe if i % period == int(text.get("expert_layer_offset") or 0)}
    if text.get("moe_layer_start_index") is not None:  # ERNIE 4.5
        first, last = int(text["moe_layer_start_index"]), int(text.get("moe_layer_end_index") or -1)
        interval = int(text.get("moe_layer_interval") or 1)
        last = layers - 1 if last < 0 else last
        moe = {i for i in moe if first <= i <= last and (i + 1) % interval == 0}
    listed = text.get("moe_layers")
    if isinstance(listed, list) and listed:
        moe = set(listed)
    return len(moe)


def _scheme(config: dict[str, Any]) -> str | None:
    quant = config.get("quantization_config")
    if not isinstance(quant, dict) or quant.get("format") not in ("int-quantized",):
        return None
    groups = quant.get("config_groups") or {}
    activations = any(isinstance(g, dict) and g.get("input_activations") for g in groups.values())
    return "w8a8" if activations else "w8a16"
