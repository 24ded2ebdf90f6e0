"""`int8moe bench`: layer times beside what the machine can do at best."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from int8moe.bench import BENCHES, check_backend, find_bench
from int8moe.bench.base import DEFAULT_TOKENS, GPU_TOKENS, Bench, Limits, Options, Row, Tick, Units
from int8moe.bench.shapes import SHAPES, BenchShape, model_shape, named_shape
from int8moe.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

DEFAULT_SHAPE = "olmoe"
BUSY_CORES = 0.3
KERNEL_NAME = 48
TOO_FAST = 108.0
"""Percent of the floor's speed above which the limits must have been measured wrong, not only noisily."""


@click.command()
@click.option(
    "--backend", default="cpu", show_default=True, metavar="NAME", help=f"What to time: {', '.join(BENCHES)}."
)
@click.option(
    "--shape", "names", multiple=True, metavar="NAME",
    help=f"Of a known layer, several times for several: {', '.join(SHAPES)}. Default: {DEFAULT_SHAPE}.",
)  # fmt: skip
@click.option("--model", "models", multiple=True, metavar="PATH", help="A Transformers config.json, or its folder.")
@click.option("--tp", default=1, type=click.IntRange(1), help="Time one rank of this tensor-parallel size.")
@click.option(
    "--tokens", metavar="M,M,...",
    help=f"Token counts, one row each. Default: {','.join(map(str, DEFAULT_TOKENS))}; on a GPU"
    f" {','.join(map(str, GPU_TOKENS))}.",
)  # fmt: skip
@click.option("--threads", type=click.IntRange(1), help="cpu: threads; default: as many as PyTorch takes.")
@click.option("--isa", metavar="NAME", help="cpu: force one instruction set of the kernel (INT8MOE_CPU_ISA).")
@click.option(
    "--compare", default="", metavar="FORM,...",
    help="Time these in turn with it (cpu: torch-bf16, torch-fp32; triton: bf16, humming,"
    " humming-grouped; humming: bf16, triton).",
)  # fmt: skip
@click.option(
    "--seconds", default=2.0, show_default=True, type=click.FloatRange(0), help="For one row, all forms together."
)
@click.option("--weight-only", is_flag=True, help="triton: W8A16 instead of W8A8.")
@click.option("--kernels", is_flag=True, help="triton, humming: show what each kernel of a call takes.")
@click.option("--between", is_flag=True, help="cpu: time each call between PyTorch operations, as a model runs it.")
@click.option("--uniform-codes", is_flag=True, help="Evenly drawn int8 codes instead of quantised normal weights.")
@click.option("--save", is_flag=True, help="Keep the times where choosing a backend reads them (INT8MOE_RECORDS).")
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON, and nothing else on stdout.")
@click.option("--out", metavar="FILE.json", help="Write the record here, anew after every row.")
@click.option("--plot", metavar="FILE.png|.svg", help="Draw times and floor (needs the extra int8moe[bench]).")
def command(
    backend: str, names: tuple[str, ...], models: tuple[str, ...], tp: int, tokens: str | None, threads: int | None,
    isa: str | None, compare: str, seconds: float, weight_only: bool, kernels: bool, between: bool,
    uniform_codes: bool, save: bool, as_json: bool, out: str | None, plot: str | None,
) -> None:  # fmt: skip
    """Time one MoE layer in INT8 and say how near it comes to this machine's own limits.

    The limits (memory, int8 operations) are measured first. The result is checked against the reference
    before the clock starts; weights are cold, experts random; medians and quartiles.

        int8moe bench --shape qwen3-30b --tokens 1,16,256 --compare torch-bf16 --plot bench.png
        int8moe bench --backend triton --shape qwen3-30b --compare bf16 --kernels --plot bench.png
        int8moe bench --backend humming --shape qwen3-30b --compare triton,bf16 --save

    "floor" is the least time these limits allow: the larger of (bytes of the experts touched / memory limit) and
    (operations / int8 limit).
    """
    try:
        check_backend(backend)
        if not math.isfinite(seconds):
            raise ConfigError(f"seconds is {seconds}, needs a number of seconds.")
        if save and weight_only:
            raise ConfigError("save keeps W8A8 times, by which backends are ranked; needs a run without --weight-only.")
        found = find_bench(backend)
        options = Options(
            found.default_tokens if tokens is None else parse_tokens(tokens), threads, _forms(compare), seconds,
            between, uniform_codes, isa, weight_only, kernels,
        )  # fmt: skip
        shapes = [named_shape(name, tp) for name in dict.fromkeys(names)]
        shapes += [model_shape(path, tp) for path in dict.fromkeys(models)]
        shapes = shapes or [named_shape(DEFAULT_SHAPE, tp)]
        if plot:
            from int8moe.bench.plot import check_plot

            check_plot(plot)
        for name, path in (("out", out), ("plot", plot)):
            if path and not Path(path).absolute().parent.is_dir():
                raise ConfigError(f"{name} is {path!r}, needs a folder that exists: {Path(path).parent} does not.")
        if save:
            from int8moe.records import make_user_folder

            make_user_folder()
        if isa is not None:
            os.environ["INT8MOE_CPU_ISA"] = isa
        bench = found(shapes, options)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    _run(bench, shapes, save=save, as_json=as_json, out=out, plot=plot)


def parse_tokens(text: str) -> tuple[int, ...]:
    """ "1,4,16" as numbers, each once. Raises ConfigError where one is not a whole number above 0."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not (part.isascii() and part.isdigit() and int(part) > 0):
            raise ConfigError(f"tokens is {text!r}, needs whole numbers above 0 with commas between, as 1,16,256.")
    return tuple(dict.fromkeys(map(int, parts)))


def _forms(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _run(
    bench: Bench, shapes: list[BenchShape], *, save: bool, as_json: bool, out: str | None, plot: str | None
) -> None:
    from rich.console import Console
    from rich.markup import escape

    from int8moe.bench.record import layer_times, make_record, write_record

    # Words go where the record does not: to stderr under --json.
    console = Console(file=sys.stderr if as_json else sys.stdout, highlight=False, soft_wrap=True)
    if warning := _busy(bench):
        click.echo(f"warning: {warning}", err=True)
    with _progress(bench) as (tick, plan):
        tick("measuring this machine's limits", 0.0)
        limits = bench.measure_limits()
        plan()
        if not as_json:
            console.print(_heading(bench, limits))
        rows: list[Row] = []
        for row in bench.rows(tick):
            rows.append(row)
            if out:
                write_record(make_record(bench, limits, rows), out)
            if not as_json and len([r for r in rows if r.shape == row.shape]) == len(bench.options.tokens):
                done = [r for r in rows if r.shape == row.shape]
                for table in [_table(done, bench.units), *([_kernel_table(done)] if bench.options.kernels else [])]:
                    wide = max(console.width, _width(table))
                    Console(file=console.file, highlight=False, width=wide).print(table)
    if as_json:
        click.echo(json.dumps(make_record(bench, limits, rows), indent=2))
    else:
        console.print(
            f"floor: the larger of (bytes of the experts touched / {limits.traffic} limit) and (operations /"
            f" {limits.products} limit); 100 % of it is as fast as this machine can be."
        )
    fast = [row for row in rows if row.floor_percent > TOO_FAST]
    if fast:
        click.echo(
            f"warning: {fast[0].shape} at M={fast[0].M} reached {fast[0].floor_percent:.0f} % of the floor's speed, and"
            " no call can pass 100: the limits were measured too low, as happens while other work runs; measure again.",
            err=True,
        )
    if out:
        console.print(f"record: {escape(out)}")
    if plot:
        from int8moe.bench.plot import draw

        draw(rows, bench, limits, plot)
        console.print(f"plot: {escape(plot)}")
    if save:
        from int8moe.records import append_records

        times = layer_times(bench, rows)
        file = append_records(times, f"bench-{bench.backend.lower()}")
        console.print(f"saved {len(times)} layer times for choosing a backend: {escape(str(file))}")


def _busy(bench: Bench) -> str | None:
    """A warning where other work keeps this machine's cores."""
    machine = bench.machine()
    busy = machine.get("busy_cores_before") or 0.0
    if busy < BUSY_CORES:
        return None
    return f"other work holds {busy:.1f} of {machine['cores']} cores: times will be too long, and limits too low."


def _heading(bench: Bench, limits: Limits) -> str:
    from rich.markup import escape

    chain = f" ({limits.chain})" if limits.chain else ""
    return f"[bold]machine[/] {escape(bench.summary())}\n[bold]limits[/]  {limits.shown(bench.units)}{escape(chain)}"


def _table(rows: list[Row], units: Units) -> Table:
    from rich import box
    from rich.table import Table

    first = rows[0]
    c = first.config
    tp = c.moe_parallel_config.tp_size
    title = (
        f"{first.shape}: {c.num_local_experts} experts, top-{c.experts_per_token}, {c.hidden_dim} x"
        f" {c.intermediate_size_per_partition}{f' (a rank of tp {tp})' if tp > 1 else ''}, {c.in_dtype}"
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    time, limits = units.time, first.limits
    heads = ["M", f"median {time}", "quartiles", "GB/s", f"% {limits.traffic}", units.rate, f"% {limits.products}",
             f"floor {time}", "% floor"]  # fmt: skip
    shown = lambda ms: _figures(ms * units.per_ms)
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for form in first.compared:
        table.add_column(form, justify="right", no_wrap=True)
    for row in rows:
        low, high = row.time.quartiles_ms
        colour = "green" if row.floor_percent >= 75 else "yellow" if row.floor_percent >= 40 else "red"
        binding = {"read": ("bold", "dim"), "compute": ("dim", "bold")}[row.floor_by]
        table.add_row(
            str(row.M), f"[bold]{shown(row.time.median_ms)}[/]", f"{shown(low)} - {shown(high)}",
            f"{row.gbps:.1f}", f"[{binding[0]}]{row.read_percent:.0f}[/]",
            f"{row.gops:.0f}" if units.per_gops == 1 else _figures(row.gops * units.per_gops),
            f"[{binding[1]}]{row.peak_percent:.0f}[/]",
            shown(row.floor_ms), f"[{colour}]{row.floor_percent:.0f}[/]",
            *(f"{shown(t.median_ms)} {t.median_ms / row.time.median_ms:.1f}x" for t in row.compared.values()),
        )  # fmt: skip
    return table


def _kernel_table(rows: list[Row]) -> Table:
    """What each kernel of a call takes, by M; those that take longest first."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="µs in each kernel, by M (kernels may overlap)", title_justify="left", box=box.SIMPLE_HEAD,
                  pad_edge=False, padding=(0, 1, 0, 0))  # fmt: skip
    table.add_column("kernel", no_wrap=True)
    for row in rows:
        table.add_column(str(row.M), justify="right", no_wrap=True)
    longest: dict[str, float] = {}
    for row in rows:
        for name, us in row.kernels_us.items():
            longest[name] = max(us, longest.get(name, 0.0))
    for name in sorted(longest, key=lambda name: -longest[name]):
        shown = name if len(name) <= KERNEL_NAME else f"{name[: KERNEL_NAME - 3]}..."
        times = (row.kernels_us.get(name) for row in rows)
        table.add_row(escape(shown), *("-" if us is None else _figures(us) for us in times))
    return table


def _width(table: Table) -> int:
    """What the table needs, so that no figure is cut on a narrow terminal or in a pipe."""
    from rich.console import Console

    return int(Console(width=1000).measure(table).maximum)


def _figures(value: float) -> str:
    """Three figures that count."""
    return (
        f"{value:.3f}"
        if value < 1
        else f"{value:.2f}"
        if value < 10
        else f"{value:.1f}"
        if value < 100
        else f"{value:.0f}"
    )


@contextmanager
def _progress(bench: Bench) -> Iterator[tuple[Tick, Any]]:
    """A bar with the time left on stderr where that is a terminal; yields its tick, and a call that sets its length."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield (lambda text, at: None), (lambda: None)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(compact=True), TextColumn("left"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        tick: Tick = lambda text, at: bar.update(task, description=text, completed=at)
        yield tick, lambda: bar.update(task, total=bench.planned_seconds())
