"""The tiles of a quick search: those that won for other layers on the same GPU. Imports no framework."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from int8moe.backends.triton import configs
from int8moe.backends.triton.configs import TileConfig, Won
from int8moe.config import FusedMoEConfig
from int8moe.errors import ConfigError
from int8moe.tuning import space
from int8moe.tuning.files import dtype_name

MOST = 6  # tiles of a GEMM, and of slots by themselves, that are tried for a token count

Tiles = tuple[list[TileConfig], dict[tuple[int, bool], list[TileConfig]], dict[int, list[TileConfig]]]
"""As in `tune.Search`: of slots by themselves, of GEMM 1 by (block_m, rows sorted beforehand), of GEMM 2 by block_m."""
T = TypeVar("T", bound=Hashable)


def winners(config: FusedMoEConfig, device_name: str, weight_only: bool = False) -> tuple[Won, ...]:
    """The plans of other layers than `config` for this GPU and scheme, at least one.

    Raises:
        ConfigError: no file has any.
    """
    dtype = dtype_name(weight_only)
    found = tuple(won for won in configs.won_plans(device_name, dtype) if _layer(won) != _own(config))
    if not found:
        raise ConfigError(
            f"quick finds no plans of another layer for {device_name} and {dtype} in {configs.user_tuned_folder()} or"
            f" {configs.PACKAGED}, needs those of one at least: it tries nothing but their tiles. Would work: the same"
            " command without --quick."
        )
    return found


def _layer(won: Won) -> tuple[int, int, int, int]:
    return won.experts, won.topk, won.hidden, won.intermediate


def _own(config: FusedMoEConfig) -> tuple[int, int, int, int]:
    experts = int(config.num_local_experts or 0)
    return experts, config.experts_per_token, config.hidden_dim, config.intermediate_size_per_partition


def tiles(
    won: Sequence[Won], config: FusedMoEConfig, tokens: int, gemm1: space.Gemm, gemm2: space.Gemm, special: bool
) -> Tiles:  # fmt: skip
    """The tiles to try for `tokens`: of the plans that were tuned for the most similar number of slots per expert (for
    slots by themselves: of tokens), and of those for the most similar size of an expert, the MOST first of each GEMM.

    Of an expert-parallel rank's file the slots per expert count as if its experts were all; see `Won`.

    Args:
        special: specialised tiles run here.
    """
    slots = tokens * config.experts_per_token
    size = config.hidden_dim * config.intermediate_size_per_partition

    def nearest(plans: Iterable[Won], amount: Callable[[Won], float], wanted: float) -> list[Won]:
        return sorted(plans, key=lambda w: (_apart(amount(w), wanted), _apart(w.hidden * w.intermediate, size)))

    rows: list[TileConfig] = []
    if slots <= space.ROW_SLOTS:
        near = nearest((w for w in won if w.plan.rows), lambda w: w.tokens, tokens)
        pairs = (tile for w in near for tile in (w.plan.gemm1, w.plan.gemm2))
        rows = _first(tile for tile in pairs if space.row_fits(tile, min(gemm1.k, gemm2.k)))

    def runs(gemm: space.Gemm, tile: TileConfig) -> bool:
        return space.fits(gemm, tile) and (special or not tile.specialized)

    # W8A16 quantises no rows, so that none are sorted on the way.
    in_blocks = (w for w in won if not w.plan.rows and (gemm1.a_bytes == 1 or not w.plan.sort_rows))
    near = nearest(in_blocks, lambda w: w.tokens * w.topk / w.experts, slots / config.num_experts)
    ones = [(w.plan.sort_rows, w.plan.gemm1) for w in near if runs(gemm1, w.plan.gemm1)]
    twos = [w.plan.gemm2 for w in near if runs(gemm2, w.plan.gemm2)]
    firsts: dict[tuple[int, bool], list[TileConfig]] = {}
    seconds: dict[int, list[TileConfig]] = {}
    for sort_rows, tile in _first(ones):
        firsts.setdefault((tile.block_m, sort_rows), []).append(tile)
    heights = {block_m for block_m, _ in firsts}
    # GEMM 2 is timed on what a GEMM 1 of equal height leaves: where none of those is that high, on one's further away;
    # without any, on what its own tile leaves.
    stand_ins = ones + [(tile.specialized, tile) for tile in twos if runs(gemm1, tile)]
    for tile in _first(twos):
        if tile.block_m not in heights:
            one = next(((s, t) for s, t in stand_ins if t.block_m == tile.block_m), None)
            if one is None:
                continue
            firsts[tile.block_m, one[0]] = [one[1]]
            heights.add(tile.block_m)
        seconds.setdefault(tile.block_m, []).append(tile)
    return rows, firsts, seconds


def _apart(a: float, b: float) -> float:
    """How far apart two amounts are, as a ratio."""
    return abs(math.log(a / b))


def _first(found: Iterable[T]) -> list[T]:
    """The MOST first, each once."""
    return list(dict.fromkeys(found))[:MOST]
