"""A run's rows as a picture: times beside the floor, and how much of the floor's speed is reached."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from int8moe.bench.base import Bench, Limits, Row
from int8moe.errors import ConfigError, MissingPackage

SUFFIXES = (".png", ".svg")
_OURS, _FLOOR, _BY = "#1f5fa8", "#222222", {"read": "#e8f1e4", "compute": "#fbeee0"}
_OTHERS = ("#c8582a", "#7a5ba6", "#5b8a3c")
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
    """One line of two panels for each shape: M against milliseconds, M against % of the floor's speed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    by_shape: dict[str, list[Row]] = {}
    for row in rows:
        by_shape.setdefault(row.shape, []).append(row)
    count = max(1, len(by_shape))
    figure = Figure(figsize=(11, 0.8 + 3.9 * count), layout="constrained")
    FigureCanvasAgg(figure)
    machine = bench.machine()
    where = f"{machine['device']}, {machine.get('threads', '?')} threads, {machine.get('isa', bench.experts_class)}"
    rates = f"read {limits.read_gbps:.1f} GB/s, int8 {limits.peak_gops:.0f} GOP/s"
    figure.suptitle(f"INT8 MoE layer, {where}\nmeasured limits: {rates}", fontsize=11)
    panels = figure.subplots(count, 2, squeeze=False, width_ratios=(3, 2))
    for (name, group), (left, right) in zip(by_shape.items(), panels, strict=True):
        group.sort(key=lambda row: row.M)
        _times(left, name, group)
        _percent(right, group)
    figure.savefig(path, dpi=150)


def _times(axes: Any, name: str, rows: list[Row]) -> None:
    tokens = [row.M for row in rows]
    forms = list(rows[0].compared)
    for form, colour in zip(forms, _OTHERS, strict=False):
        _line(axes, tokens, [row.compared[form] for row in rows], colour, form, "s")
    _line(axes, tokens, [row.time for row in rows], _OURS, "int8moe", "o")
    floor = [row.floor_ms for row in rows]
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
    axes.set_ylabel("ms a call (median, quartiles)")
    axes.grid(True, which="major", color="0.85", linewidth=0.7)
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    _token_axis(axes, tokens)
    _plain_numbers(axes.yaxis)


def _line(axes: Any, tokens: list[int], times: list[Any], colour: str, label: str, marker: str) -> None:
    axes.fill_between(
        tokens, [t.quartiles_ms[0] for t in times], [t.quartiles_ms[1] for t in times], color=colour, alpha=0.2,
        linewidth=0,
    )  # fmt: skip
    axes.plot(
        tokens, [t.median_ms for t in times], color=colour, marker=marker, markersize=4.5, linewidth=1.8, label=label,
        zorder=3,
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
