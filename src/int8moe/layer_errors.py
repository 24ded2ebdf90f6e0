"""How far each INT8 experts module is from the original it stands for, on the original's own inputs.

A hook on every experts module of the original gives its hidden states and routing to the INT8 module of the same name,
so each layer is judged alone: errors of the layers before it do not reach it. Only sums are kept.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from int8moe.errors import ConfigError

ROWS = 4096  # of (token, expert) pairs whose outputs are held at once


def relative(error: float, size: float) -> float:
    """Square root of error / size, both sums of squares. Of an output that is all zero: 0 if reproduced, else inf."""
    if size:
        return math.sqrt(error / size)
    return math.inf if error > 0 else error  # 0.0, or NaN of an INT8 output that holds NaN


@dataclass
class LayerSums:
    """One experts module: sums of squares over its outputs, float64.

    Args:
        tokens: int64 [E], how many tokens chose each expert.
        size, expert_size: of the original's output y, of the layer and [E] of each expert alone.
        error, expert_error: by scheme, of (INT8 output - y).
    """

    name: str
    tokens: torch.Tensor
    expert_size: torch.Tensor
    size: float = 0.0
    error: dict[str, float] = field(default_factory=dict)
    expert_error: dict[str, torch.Tensor] = field(default_factory=dict)

    def errors(self) -> dict[str, float]:
        """||y_int8 - y|| / ||y|| by scheme."""
        seen = bool(self.tokens.any())
        return {scheme: relative(e, self.size) if seen else math.nan for scheme, e in self.error.items()}

    def expert_errors(self, expert: int) -> dict[str, float]:
        """As `errors`, of one expert alone; NaN where no token chose it."""
        size, seen = float(self.expert_size[expert]), bool(self.tokens[expert])
        return {s: relative(float(e[expert]), size) if seen else math.nan for s, e in self.expert_error.items()}

    @property
    def unseen(self) -> list[int]:
        return (self.tokens == 0).nonzero().flatten().tolist()

    def to_dict(self) -> dict[str, Any]:
        experts = [
            {"expert": e, "tokens": int(n)} | _figures(self.expert_errors(e))
            for e, n in enumerate(self.tokens.tolist())
            if n
        ]
        experts.sort(key=lambda row: _worst(row["error"]), reverse=True)
        return {"name": self.name} | _figures(self.errors()) | {"unseen": self.unseen, "experts": experts}


def _figures(errors: dict[str, float]) -> dict[str, Any]:
    weights, activations = split(errors)
    return {"error": errors, "from_weights": weights, "from_activations": activations}


def _worst(errors: Mapping[str, float]) -> float:
    """The error to sort by: of W8A8 where it was measured. NaN counts as the worst."""
    value = errors.get("w8a8", next(iter(errors.values())))
    return math.inf if math.isnan(value) else value


def split(errors: Mapping[str, float]) -> tuple[float, float]:
    """What weights and activations contribute to W8A8's error: W8A16's error, and the rest as sqrt(a² - w²). NaN where
    one of the two schemes was not measured. The rest is 0 where W8A8 is not the larger."""
    both, weights = errors.get("w8a8", math.nan), errors.get("w8a16", math.nan)
    rest = both * both - weights * weights
    return weights, rest if math.isnan(rest) else math.sqrt(max(0.0, rest))


class LayerErrors:
    """Collects `LayerSums` while the original runs: `with errors.attached(original, {"w8a8": model}): original(...)`.

    Args:
        seconds: time that the comparison took, inside the original's forward.
    """

    def __init__(self) -> None:
        self.layers: dict[str, LayerSums] = {}
        self.seconds = 0.0

    @contextmanager
    def attached(self, baseline: Any, candidates: Mapping[str, Any]) -> Iterator[None]:
        """Hooks on `baseline` as long as the block lasts.

        Raises:
            ConfigError: the candidates share no experts module with the original, or theirs have other sizes.
        """
        from int8moe.integrations.transformers.experts import Int8Experts, is_experts

        hooks = []
        try:
            for name, module in baseline.named_modules():
                if not is_experts(module):
                    continue
                pairs = {s: m for s, c in candidates.items() if isinstance(m := _module(c, name), Int8Experts)}
                for scheme, int8 in pairs.items():
                    _check_sizes(name, module, int8, baseline, candidates[scheme])
                if pairs:
                    run = lambda m, args, kwargs, out, name=name, pairs=pairs: self._add(
                        name, m, pairs, _in_order(m, args, kwargs), out
                    )
                    hooks.append(module.register_forward_hook(run, with_kwargs=True))
            if not hooks:
                classes = ", ".join(dict.fromkeys(type(c).__name__ for c in candidates.values()))
                raise ConfigError(
                    f"the original ({type(baseline).__name__}) and the INT8 model ({classes}) have no experts modules"
                    " of the same name, so no layer can be compared."
                )
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def to_list(self) -> list[dict[str, Any]]:
        """The layers, the worst first; in each its experts, the worst first."""
        rows = [layer.to_dict() for layer in self.layers.values()]
        return sorted(rows, key=lambda row: _worst(row["error"]), reverse=True)

    @torch.inference_mode()
    def _add(self, name: str, module: Any, pairs: dict[str, Any], inputs: list[torch.Tensor], out: Any) -> None:
        began = time.perf_counter()
        sums = self.layers.get(name)
        if sums is None:
            experts = next(iter(pairs.values()))._int8.layout.num_experts
            zeros = lambda: torch.zeros(experts, dtype=torch.float64)
            sums = LayerSums(name, torch.zeros(experts, dtype=torch.int64), zeros())
            sums.error = dict.fromkeys(pairs, 0.0)
            sums.expert_error = {scheme: zeros() for scheme in pairs}
            self.layers[name] = sums
        if len(inputs) == 3:
            self._layer(sums, pairs, inputs, out)
            self._experts(sums, module, pairs, *inputs)
        else:  # Llama 4: rows come sorted by expert, so the rows of the output are the experts' own
            self._sorted(sums, pairs, inputs[0], out)
        if out.is_cuda:
            torch.cuda.synchronize(out.device)
        self.seconds += time.perf_counter() - began

    def _layer(self, sums: LayerSums, pairs: dict[str, Any], inputs: list[torch.Tensor], out: torch.Tensor) -> None:
        y = out.double()
        sums.size += float(y.square().sum())
        for scheme, int8 in pairs.items():
            sums.error[scheme] += float((int8(*inputs).double() - y).square().sum())

    def _experts(
        self, sums: LayerSums, module: Any, pairs: dict[str, Any], hidden: torch.Tensor, ids: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:  # fmt: skip
        """Every (token, slot) as a row of its own with one expert: what each expert adds, without the others."""
        rows, top_k = hidden.reshape(-1, hidden.shape[-1]), ids.shape[-1]
        ids, weights = ids.reshape(-1, 1), weights.reshape(-1, 1)
        here = ((ids >= 0) & (ids < len(sums.tokens))).flatten().nonzero().flatten()
        for at in range(0, len(here), ROWS):
            slots = here[at : at + ROWS]
            inputs = (rows[slots // top_k], ids[slots], weights[slots])
            y = module.forward(*inputs)  # not module(...), which would call the hook again
            self._sum(sums, ids[slots].flatten(), y, {scheme: int8(*inputs) for scheme, int8 in pairs.items()})

    def _sorted(self, sums: LayerSums, pairs: dict[str, Any], hidden: torch.Tensor, out: torch.Tensor) -> None:
        experts = len(sums.tokens)
        rows, y = hidden.reshape(-1, hidden.shape[-1]), out.reshape(-1, out.shape[-1])
        owner = torch.arange(experts, device=rows.device).repeat_interleave(len(rows) // experts)
        total = y.double().view(experts, -1, y.shape[-1]).sum(0)
        sums.size += float(total.square().sum())
        results = {scheme: int8(rows) for scheme, int8 in pairs.items()}
        for scheme, result in results.items():
            mine = result.double().view(experts, -1, y.shape[-1]).sum(0)
            sums.error[scheme] += float((mine - total).square().sum())
        used = (rows != 0).any(-1)
        self._sum(sums, owner[used], y[used], {scheme: result[used] for scheme, result in results.items()})

    def _sum(self, sums: LayerSums, owner: torch.Tensor, y: torch.Tensor, results: dict[str, torch.Tensor]) -> None:
        owner, y = owner.cpu().long(), y.double()
        sums.tokens += torch.bincount(owner, minlength=len(sums.tokens))
        sums.expert_size.index_add_(0, owner, y.square().sum(-1).cpu())
        for scheme, result in results.items():
            sums.expert_error[scheme].index_add_(0, owner, (result.double() - y).square().sum(-1).cpu())


def _check_sizes(name: str, module: Any, int8: Any, baseline: Any, candidate: Any) -> None:
    """The two experts modules stand for each other: equal numbers of experts, hidden and intermediate sizes."""
    from int8moe.integrations.transformers.experts import sizes_of

    got, want = sizes_of(int8), sizes_of(module)
    if got != want:
        models = [f"{type(m).__name__} ({m.config.model_type})" for m in (baseline, candidate)]
        raise ConfigError(
            f"the original is {models[0]} and the INT8 model {models[1]}, and {name} has (experts, hidden size,"
            f" intermediate size) {want} in the one and {got} in the other; needs the original of the INT8 model."
        )


def _in_order(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments of a call in the order of the module's forward, however the caller named them."""
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    return [*bound.args, *bound.kwargs.values()]


def _module(model: Any, name: str) -> Any:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None
