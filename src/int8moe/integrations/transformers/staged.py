"""Experts whose activation no kernel has: both GEMMs in INT8, the model's own code between and after them.

Slow (PyTorch, expert by expert) and exact: steps 2, 3 and 6 of docs/numerics.md are the reference's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from int8moe.backends.reference.run import gemm, quantize_activations
from int8moe.config import FusedMoEConfig
from int8moe.schemes import QuantKey
from int8moe.weights import ExpertWeights


class StagedExperts:
    """Runs like an `Int8MoEKernel`.

    Args:
        weights: canonical; taken over.
        config: the layer; its activation is not used.
        between: float [R, rows of GEMM 1] to [R, I], in the dtype of the hidden states (`_apply_gate`, `act_fn`).
        after: [R, H] to [R, H] before the router weight (`post_expert_norm`), or None.
    """

    backend = None
    report = None

    def __init__(
        self,
        weights: ExpertWeights,
        config: FusedMoEConfig,
        activation_key: QuantKey | None,
        between: Callable[[torch.Tensor], torch.Tensor],
        after: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> None:
        self.weights, self.config, self.activation_key = weights, config, activation_key
        self.between, self.after = between, after
        self.experts = self  # what explain_model names

    def __call__(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *,
        expert_map: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[M, H], as `Int8MoEKernel`; slots are added in order."""
        w, (tokens, topk), dtype = self.weights, topk_ids.shape, hidden_states.dtype
        local = topk_ids if expert_map is None else expert_map.to(topk_ids.device)[topk_ids.long()]
        slots = hidden_states.new_zeros(tokens * topk, w.hidden_size, dtype=torch.float32)
        flat = local.reshape(-1)
        pick = lambda t, e: None if t is None else t[e]
        for e in flat[flat >= 0].unique().tolist():
            mine = (flat == e).nonzero().squeeze(1)
            x, x_scale = self._quantize(hidden_states[mine // topk])
            y = gemm(x, x_scale, w.w13[e], w.w13_scale[e], pick(w.w13_bias, e))
            h, h_scale = self._quantize(self.between(y.to(dtype)))
            y = gemm(h, h_scale, w.w2[e], w.w2_scale[e], pick(w.w2_bias, e))
            if self.after is not None:
                y = self.after(y.to(dtype)).float()
            slots[mine] = (y * topk_weights.reshape(-1, 1)[mine]).to(dtype).float()
        slots = slots.view(tokens, topk, w.hidden_size)
        out = torch.zeros_like(slots[:, 0])
        for k in range(topk):
            out = out + slots[:, k]
        return out.to(dtype)

    def unpack_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Canonical int8 w13 [E, rows, H] and w2 [E, H, I]."""
        return self.weights.w13, self.weights.w2

    def _quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return (x, None) if self.activation_key is None else quantize_activations(x)
