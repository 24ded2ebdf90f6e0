"""Errors of the experts modules as a picture: one point a layer and scheme, and its experts around it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from int8moe.layer_errors import LayerSums

_COLOURS = ("#1f5fa8", "#c8582a")
_TICKS = 24  # layer names along the axis; more would run into each other


def draw(layers: Mapping[str, LayerSums], title: str, path: str | Path) -> None:
    """Layers in the model's order against the relative error in %: line and points of the layers, small points of their
    experts, a bar from the best to the worst expert."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = list(layers.values())
    schemes = list(dict.fromkeys(scheme for row in rows for scheme in row.error))
    figure = Figure(figsize=(max(7.0, min(16.0, 2 + 0.5 * len(rows))), 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for i, (scheme, colour) in enumerate(zip(schemes, _COLOURS, strict=False)):
        place = [n + 0.16 * (i - (len(schemes) - 1) / 2) for n in range(len(rows))]
        for x, row in zip(place, rows, strict=True):
            every = [100 * row.expert_errors(e).get(scheme, math.nan) for e in range(len(row.tokens))]
            every = [v for v in every if math.isfinite(v)]
            if every:
                axes.vlines(x, min(every), max(every), color=colour, alpha=0.35, linewidth=1.2)
                axes.plot([x] * len(every), every, ".", color=colour, alpha=0.45, markersize=4)
        errors = [100 * row.errors().get(scheme, math.nan) for row in rows]
        axes.plot(
            place, errors, color=colour, marker="o", markersize=6, linewidth=1.4, label=f"{scheme}, layer", zorder=3
        )
    step = math.ceil(len(rows) / _TICKS)
    axes.set_xticks(range(0, len(rows), step), [_short(row.name) for row in rows[::step]])
    axes.set_xlabel("layer (small points: its experts)")
    axes.set_ylabel("error of the experts' output, %")
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(True, axis="y", color="0.85", linewidth=0.7)
    axes.legend(frameon=False, fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=150)


def _short(name: str) -> str:
    """The number of the layer, where its name holds one."""
    return next((part for part in name.split(".") if part.isdigit()), name)
