"""`FusedMoEExperts`: what every experts class states (its rules) and does (load weights, run).

Imports no framework: an experts class is data until its `runner` module is loaded at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, ClassVar

from int8moe.config import FusedMoEActivationFormat, FusedMoEConfig
from int8moe.quant_config import FusedMoEQuantConfig
from int8moe.rules import Deployment, Rule, Verdict
from int8moe.schemes import QuantKey

if TYPE_CHECKING:
    import torch


class FusedMoEExperts:
    """Experts of one MoE layer on one rank, for one backend.

    A subclass states `rules` (its needs, one line each), `activation_format`, and `runner`, the module that
    defines `Runner`: `Runner(config, quant_config)` with `process_weights_after_loading(layer)` and `apply`.
    """

    rules: ClassVar[tuple[Rule, ...]] = ()
    runner: ClassVar[str] = ""
    activation_format: ClassVar[FusedMoEActivationFormat] = FusedMoEActivationFormat.Standard

    def __init__(self, config: FusedMoEConfig, quant_config: FusedMoEQuantConfig) -> None:
        self.config = config
        self.quant_config = quant_config
        module, _, name = self.runner.partition(":")
        self._run = getattr(importlib.import_module(module), name or "Runner")(config, quant_config)

    @classmethod
    def verdicts(cls, deployment: Deployment) -> tuple[Verdict, ...]:
        """Every rule's verdict, in the order of `rules`."""
        return tuple(rule.check(deployment) for rule in cls.rules)

    @classmethod
    def is_supported_config(
        cls,
        config: FusedMoEConfig,
        weight_key: QuantKey | None,
        activation_key: QuantKey | None,
        activation_format: FusedMoEActivationFormat | None = None,
    ) -> tuple[bool, str | None]:
        """Whether this class can run the deployment, and if not, every reason in one line."""
        if activation_format is None:
            activation_format = config.moe_parallel_config.activation_format
        deployment = Deployment(config, weight_key, activation_key, activation_format)
        failed = [v.reason for v in cls.verdicts(deployment) if not v.ok]
        return (False, "; ".join(failed)) if failed else (True, None)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Take the weights from `layer` (`w13_weight`, `w2_weight`), packed for this backend, once.

        Source tensors are released one by one; afterwards the layer holds the packed ones.
        """
        self._run.process_weights_after_loading(layer)

    def apply(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *,
        expert_map: torch.Tensor | None = None,
        apply_router_weight_on_input: bool = False,
    ) -> torch.Tensor:
        """Send each token through its experts and mix the results (numerics, steps 2 to 7).

        Args:
            hidden_states: [M, H] bf16, fp16 or fp32.
            topk_weights: float32 [M, topk].
            topk_ids: int32 or int64 [M, topk], global expert ids.
            expert_map: int32 [num_experts], global id to local index, -1 for experts that live elsewhere.
            apply_router_weight_on_input: multiply the input, not the output, by the router weight.
        Returns:
            [M, H] in the dtype of hidden_states.
        Raises:
            ShapeMismatch: shapes do not fit.
            InvalidRouting: an id outside the experts (CPU, reference). A GPU cannot know without a synchronisation:
                there such an id is never read through and its token's output is NaN; `INT8MOE_VALIDATE=1` raises.
        """
        return self._run.apply(
            hidden_states,
            topk_weights,
            topk_ids,
            expert_map=expert_map,
            apply_router_weight_on_input=apply_router_weight_on_input,
        )

    def unpack_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Canonical int8 w13 [E, 2*I, H] and w2 [E, H, I], exactly as they were given."""
        return self._run.unpack_weights()
