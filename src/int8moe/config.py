"""What a deployment is: model shapes, parallelism, routing and the machine, as frozen values.

Import-light on purpose (no framework), since `int8moe explain` reads these on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, get_args

from int8moe.device import Platform
from int8moe.errors import ConfigError

MoEBackend = Literal["auto", "triton", "humming", "cpu", "reference"]
"""Values of `FusedMoEConfig.moe_backend`; any other string is refused when a backend is selected."""

MOE_BACKENDS: tuple[str, ...] = get_args(MoEBackend)
DTYPES = ("bfloat16", "float16", "float32")
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


class MoEActivation(Enum):
    """The function between the two GEMMs, of gate `g` and up `u` (numerics section 4 gives the bits).

    `is_act_and_mul=False` in the configuration drops the multiplication by `u`.
    """

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU2 = "relu2"
    SWIGLUOAI = "swigluoai"
    SWIGLUOAI_UNINTERLEAVE = "swigluoai_uninterleave"

    @property
    def is_interleaved(self) -> bool:
        """Rows of w13 alternate gate, up, gate, up instead of all gates, then all ups."""
        return self is MoEActivation.SWIGLUOAI

    @property
    def is_swigluoai(self) -> bool:
        return self in (MoEActivation.SWIGLUOAI, MoEActivation.SWIGLUOAI_UNINTERLEAVE)

    @classmethod
    def from_str(cls, name: str) -> MoEActivation:
        """The activation that a Transformers `hidden_act` names.

        Raises:
            ConfigError: no activation of that name.
        """
        aliases = {
            "swish": "silu",
            "gelu_pytorch_tanh": "gelu_tanh",
            "gelu_new": "gelu_tanh",
            "gelu_python": "gelu",
            "relu_squared": "relu2",
        }
        key = aliases.get(name, name)
        for member in cls:
            if member.value == key:
                return member
        known = ", ".join(m.value for m in cls)
        raise ConfigError(f"activation is {name!r}, needs one of: {known}.")


class RoutingMethodType(Enum):
    """How logits become `topk_weights`; the experts see the result only."""

    Default = "softmax then topk"
    Renormalize = "topk then softmax"
    RenormalizeNaive = "softmax then topk then renormalize"
    DeepSeekV3 = "sigmoid, bias, grouped topk, renormalize"
    Llama4 = "top1 sigmoid on the input"
    TopK = "topk only"
    Custom = "a function of the model"


class FusedMoEActivationFormat(Enum):
    """Standard: `hidden_states [M, H]`. Batched: `[E_local, max_tokens, H]` with a count per expert."""

    Standard = "standard"
    BatchedExperts = "batched_experts"


@dataclass(frozen=True)
class FusedMoEParallelConfig:
    """Sizes and ranks of tensor, data and expert parallelism.

    With `use_ep` the experts are divided over `ep_size` ranks and each expert is whole; without it
    every rank holds all experts and a slice of the intermediate size.
    """

    tp_size: int = 1
    tp_rank: int = 0
    dp_size: int = 1
    dp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0
    use_ep: bool = False
    all2all_backend: str = "none"
    use_batched_activation_format: bool = False

    def __post_init__(self) -> None:
        for kind in ("tp", "dp", "ep"):
            size, rank = getattr(self, f"{kind}_size"), getattr(self, f"{kind}_rank")
            _need_int(f"{kind}_size", size, 1)
            _need_int(f"{kind}_rank", rank, 0)
            if rank >= size:
                raise ConfigError(f"{kind}_rank is {rank}, needs 0 to {size - 1} ({kind}_size is {size}).")
        if self.ep_size > 1 and not self.use_ep:
            raise ConfigError(f"ep_size is {self.ep_size} with use_ep False, needs use_ep True or ep_size 1.")

    @property
    def activation_format(self) -> FusedMoEActivationFormat:
        batched = self.use_batched_activation_format
        return FusedMoEActivationFormat.BatchedExperts if batched else FusedMoEActivationFormat.Standard


def _need_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    bad = isinstance(value, bool) or not isinstance(value, int) or value < low
    if bad or (high is not None and value > high):
        top = f" to {high}" if high is not None else " or more"
        raise ConfigError(f"{name} is {value!r}, needs an integer of {low}{top}.")


@dataclass(frozen=True)
class FusedMoEConfig:
    """One MoE layer on one rank: everything the oracle decides on.

    Args:
        num_experts: experts of the model (global), E.
        num_local_experts: experts on this rank; defaults to the even share under EP, else all.
        experts_per_token: top-k.
        hidden_dim: H, the width of `hidden_states`.
        intermediate_size_per_partition: I on this rank, after tensor parallelism.
        in_dtype: dtype of `hidden_states`: "bfloat16", "float16" or "float32" (a torch dtype is accepted).
        activation: function between the GEMMs (a member, or its name).
        is_act_and_mul: gated (w13 has 2*I rows) or not (I rows).
        has_bias: both GEMMs add a bias per output row.
        swiglu_alpha: alpha of the swigluoai activations.
        swiglu_limit: clamp of gate (above) and up (both sides) before the activation; `None` is no
            clamp, except for the swigluoai activations, whose own default is 7.0.
        platform: the machine; defaults to this one.

    Raises:
        ConfigError: a value makes no sense; the message says field, value and need.
    """

    num_experts: int
    experts_per_token: int
    hidden_dim: int
    intermediate_size_per_partition: int
    num_local_experts: int | None = None
    in_dtype: Any = "bfloat16"
    activation: MoEActivation | str = MoEActivation.SILU
    is_act_and_mul: bool = True
    has_bias: bool = False
    routing_method: RoutingMethodType = RoutingMethodType.Default
    moe_parallel_config: FusedMoEParallelConfig = field(default_factory=FusedMoEParallelConfig)
    moe_backend: str = "auto"
    is_lora_enabled: bool = False
    platform: Platform = field(default_factory=Platform.current)
    swiglu_alpha: float = 1.702
    swiglu_limit: float | None = None

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)
        _need_int("num_experts", self.num_experts, 1)
        _need_int("experts_per_token", self.experts_per_token, 1, self.num_experts)
        _need_int("hidden_dim", self.hidden_dim, 1)
        _need_int("intermediate_size_per_partition", self.intermediate_size_per_partition, 1)
        parallel = self.moe_parallel_config
        if not isinstance(parallel, FusedMoEParallelConfig):
            raise ConfigError(f"moe_parallel_config is {parallel!r}, needs a FusedMoEParallelConfig.")
        if self.num_local_experts is None:
            share, left = divmod(self.num_experts, parallel.ep_size)
            put("num_local_experts", share + (parallel.ep_rank < left) if parallel.use_ep else self.num_experts)
        _need_int("num_local_experts", self.num_local_experts, 0, self.num_experts)
        dtype = str(self.in_dtype).removeprefix("torch.")
        put("in_dtype", {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(dtype, dtype))
        if isinstance(self.activation, str):
            put("activation", MoEActivation.from_str(self.activation))
        if not isinstance(self.activation, MoEActivation):
            raise ConfigError(f"activation is {self.activation!r}, needs a MoEActivation.")
        if not isinstance(self.routing_method, RoutingMethodType):
            raise ConfigError(f"routing_method is {self.routing_method!r}, needs a RoutingMethodType.")
        for name in ("is_act_and_mul", "has_bias", "is_lora_enabled"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}, needs True or False.")
        if not isinstance(self.moe_backend, str):
            raise ConfigError(f"moe_backend is {self.moe_backend!r}, needs one of: {', '.join(MOE_BACKENDS)}.")
        if not isinstance(self.platform, Platform):
            raise ConfigError(f"platform is {self.platform!r}, needs a Platform (Platform.named lists them).")
        if self.activation.is_swigluoai and self.swiglu_limit is None:
            put("swiglu_limit", 7.0)
        if self.swiglu_limit is not None and not self.swiglu_limit > 0:
            raise ConfigError(f"swiglu_limit is {self.swiglu_limit!r}, needs a number above 0, or None.")

    @property
    def w13_rows(self) -> int:
        """Rows of one expert's w13: 2*I when gated, else I."""
        return self.intermediate_size_per_partition * (2 if self.is_act_and_mul else 1)

    def experts_bytes(self, element_bytes: float, scale_bytes: int = 0) -> int:
        """Bytes of one layer's local experts with `element_bytes` a weight and a scale per output row."""
        rows = self.w13_rows + self.hidden_dim
        weights = self.hidden_dim * (self.w13_rows + self.intermediate_size_per_partition)
        return int((self.num_local_experts or 0) * (weights * element_bytes + rows * scale_bytes))
