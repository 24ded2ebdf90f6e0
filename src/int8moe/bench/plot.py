"""A run's rows as a picture: times beside the floor, how much of the floor's speed is reached, and a roofline."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from int8moe.bench.base import Bench, Limits, Row, Timing, Units
from int8moe.errors import ConfigError, MissingPackage

SUFFIXES = (".png", ".svg")
_OURS, _FLOOR, _BY = "#1f5fa8", "#222222", {"read": "#e8f1e4", "compute": "#fbeee0"}
_OTHERS = ("#c8582a", "#7a5ba6", "#5b8a3c")
_SHAPES = (_OURS, *_OTHERS, "#b0862b", "#2a8f8f", "#a8456b", "#6b6b6b", "#3c4fa0")
_SAYS = {"read": "memory bound", "compute": "compute bound"}


def check_plot(path: str | Path) -> None:
    """Refuse before anything is measured what cannot be drawn.

    Raises:
        ConfigError: another suffix than those of `SUFFIXES`.
        MissingPackage: matplotlib is not installed.
    """
    suffix = Path(path).suffix
    if suffix.lower() not in SUFFIXES:
        raise ConfigError(f"plot is {str(path)!r}, needs a file name that ends in {' or '.join(SUFFIXES)}.")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingPackage("a plot needs matplotlib: pip install 'int8moe[bench]'") from None


def draw(rows: Sequence[Row], bench: Bench, limits: Limits, path: str | Path) -> None:
    """One line of two panels for each shape: M against time, M against % of the floor's speed. Above them, where the
    bench asks for it, all shapes under the roof that the limits make."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    by_shape: dict[str, list[Row]] = {}
    for row in rows:
        by_shape.setdefault(row.shape, []).append(row)
    for group in by_shape.values():
        group.sort(key=lambda row: row.M)
    count, roofs = max(1, len(by_shape)), int(bench.roofline)
    figure = Figure(figsize=(11, 0.8 + 3.9 * count + 4.6 * roofs), layout="constrained")
    FigureCanvasAgg(figure)
    rates = limits.shown(bench.units)
    figure.suptitle(f"INT8 MoE layer, {bench.summary()}\nmeasured limits: {rates}", fontsize=11)
    grid = figure.add_gridspec(count + roofs, 2, width_ratios=(3, 2), height_ratios=[4.6] * roofs + [3.9] * count)
    if roofs:
        _roofline(figure.add_subplot(grid[0, :]), by_shape, limits, bench.units)
    for line, (name, group) in enumerate(by_shape.items(), roofs):
        _times(figure.add_subplot(grid[line, 0]), name, group, bench.units)
        _percent(figure.add_subplot(grid[line, 1]), group)
    figure.savefig(path, dpi=150)


def _roofline(axes: Any, by_shape: dict[str, list[Row]], limits: Limits, units: Units) -> None:
    """Operations a byte of the experts touched against operations a second; points are labelled with M. Other forms of
    a layer are hollow, at the same place of the first axis: the distance upwards is how much faster one is."""
    everything = [row for rows in by_shape.values() for row in rows]
    intensity = lambda row: row.operations / row.bytes
    ridge = limits.peak_gops / limits.read_gbps
    low, high = min(*map(intensity, everything), ridge) / 1.6, max(*map(intensity, everything), ridge) * 1.6
    roof = lambda x: min(x * limits.read_gbps, limits.peak_gops) * units.per_gops
    axes.plot([low, ridge, high], [roof(x) for x in (low, ridge, high)], color=_FLOOR, linewidth=1.6, label="limits")
    for n, ((name, rows), colour) in enumerate(zip(by_shape.items(), _SHAPES * len(by_shape), strict=False)):
        x = [intensity(row) for row in rows]
        axes.plot(x, [row.gops * units.per_gops for row in rows], color=colour, marker="o", markersize=5,
                  linewidth=1.2, label=name, zorder=3)  # fmt: skip
        offset, side = ((5, -10), "left") if n % 2 == 0 else ((-5, 6), "right")  # neighbours' labels stay apart
        for row in rows:
            axes.annotate(
                str(row.M), (intensity(row), row.gops * units.per_gops), offset, textcoords="offset points",
                fontsize=7.5, color=colour, ha=side,
            )  # fmt: skip
        for form in rows[0].compared:
            rates = [row.operations / row.compared[form].median_ms / 1e6 * units.per_gops for row in rows]
            axes.plot(x, rates, color=colour, marker="o", markersize=5, markerfacecolor="white", linestyle=":",
                      linewidth=1, label=f"{name}, {form}", zorder=2)  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_xlabel("operations a byte of the experts touched (numbers at points: tokens M)")
    axes.set_ylabel(units.rate)
    axes.set_title(f"roofline: measured {limits.traffic} and {limits.products} limits", fontsize=10, loc="left")
    axes.grid(True, which="major", color="0.85", linewidth=0.7)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    _plain_numbers(axes.xaxis)
    _plain_numbers(axes.yaxis)


def _times(axes: Any, name: str, rows: list[Row], units: Units) -> None:
    tokens = [row.M for row in rows]
    forms = list(rows[0].compared)
    for form, colour in zip(forms, _OTHERS, strict=False):
        _line(axes, tokens, [row.compared[form] for row in rows], colour, form, "s", units.per_ms)
    _line(axes, tokens, [row.time for row in rows], _OURS, "int8moe", "o", units.per_ms)
    floor = [row.floor_ms * units.per_ms for row in rows]
    axes.plot(tokens, floor, color=_FLOOR, linestyle="--", linewidth=1.3, label="floor", zorder=2)
    axes.fill_between(tokens, floor, [min(floor) / 4] * len(floor), color="0.93", zorder=0)
    c = rows[0].config
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, min(floor) / 1.8), high)
    axes.set_title(
        f"{name}: {c.num_local_experts} experts, top-{c.experts_per_token}, {c.hidden_dim} x"
        f" {c.intermediate_size_per_partition}",
        fontsize=10, loc="left",
    )  # fmt: skip
    axes.set_ylabel(f"{units.time} a call (median, quartiles)")
    axes.grid(True, which="major", color="0.85", linewidth=0.7)
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    _token_axis(axes, tokens)
    _plain_numbers(axes.yaxis)


def _line(
    axes: Any, tokens: list[int], times: list[Timing], colour: str, label: str, marker: str, per_ms: float
) -> None:
    low, high = ([t.quartiles_ms[side] * per_ms for t in times] for side in (0, 1))
    axes.fill_between(tokens, low, high, color=colour, alpha=0.2, linewidth=0)
    axes.plot(
        tokens, [t.median_ms * per_ms for t in times], color=colour, marker=marker, markersize=4.5, linewidth=1.8,
        label=label, zorder=3,
    )  # fmt: skip


def _percent(axes: Any, rows: list[Row]) -> None:
    tokens, percent = [row.M for row in rows], [row.floor_percent for row in rows]
    axes.plot(tokens, percent, color=_OURS, marker="o", markersize=4.5, linewidth=1.8, zorder=3)
    for m, value in zip(tokens, percent, strict=True):
        axes.annotate(f"{value:.0f}", (m, value), (0, 7), textcoords="offset points", ha="center", fontsize=8)
    axes.axhline(100, color=_FLOOR, linestyle="--", linewidth=1.3, zorder=2)
    axes.set_ylim(0, max(122.0, 1.22 * max(percent)))
    axes.set_ylabel("% of the floor's speed")
    axes.set_title("100 % = the machine's limit", fontsize=10, loc="left")
    axes.grid(True, axis="y", color="0.85", linewidth=0.7)
    _token_axis(axes, tokens)
    low, high = axes.get_xlim()
    edges = [low]
    bounds = []
    for before, after in pairwise(rows):
        if before.floor_by != after.floor_by:
            edges.append((before.M * after.M) ** 0.5)
            bounds.append(before.floor_by)
    bounds.append(rows[-1].floor_by)
    edges.append(high)
    for (start, end), by in zip(pairwise(edges), bounds, strict=True):
        axes.axvspan(start, end, color=_BY[by], zorder=0, linewidth=0)
        axes.text(
            (start * end) ** 0.5, 0.94, _SAYS[by], transform=axes.get_xaxis_transform(), ha="center", fontsize=8.5,
            color="0.35",
        )  # fmt: skip


def _token_axis(axes: Any, tokens: list[int]) -> None:
    """A tick at every M measured; room on both sides, also around a single one."""
    from matplotlib.ticker import FixedLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_xlim(tokens[0] / 1.5, tokens[-1] * 1.5)
    axes.xaxis.set_major_locator(FixedLocator(tokens))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
    axes.set_xlabel("tokens M")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _plain_numbers(axis: Any) -> None:
    """0.5 and 20 instead of powers of ten; minor ticks are labelled where there are few decades."""
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0) if high < 2000 * low else (1.0,), numticks=30))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(NullFormatter())
