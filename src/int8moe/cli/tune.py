"""`int8moe tune`: the fastest tiles of the Triton kernels for a layer, on this machine's GPU."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from int8moe.bench.shapes import SHAPES, model_shape, named_shape
from int8moe.cli.bench import parse_tokens
from int8moe.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from int8moe.backends.triton.configs import Won
    from int8moe.bench.base import Tick
    from int8moe.bench.cuda import Gpu
    from int8moe.config import FusedMoEConfig
    from int8moe.tuning.files import TunedFile
    from int8moe.tuning.tune import Found

DEFAULT_TOKENS = "1,2,4,8,16,32,64,128,256,512,1024,2048,4096,8192"
COMPILING = 0.3  # share of the whole time that compiling the first tiles takes, about


@dataclass(frozen=True)
class Options:
    """What the command line asks for.

    Args:
        title: the layer in words. minutes, workers, out: None for no limit, as many as cores, where the kernels look.
    """

    config: FusedMoEConfig
    title: str
    tokens: tuple[int, ...]
    weight_only: bool
    quick: bool
    minutes: float | None
    check: bool
    again: bool
    workers: int | None
    out: str | None
    save: bool
    as_json: bool


@click.command()
@click.option("--model", metavar="PATH", help="A Transformers config.json, or its folder.")
@click.option("--shape", metavar="NAME", help=f"A known layer: {', '.join(SHAPES)}.")
@click.option(
    "--layer", metavar="E,TOPK,H,I", help="Any layer: experts, experts of a token, hidden, intermediate size."
)
@click.option("--tp", default=1, type=click.IntRange(1), help="Tune one rank of this tensor-parallel size.")
@click.option("--ep", default=1, type=click.IntRange(1), help="Tune one rank of this expert-parallel size.")
@click.option("--tokens", default=DEFAULT_TOKENS, show_default=True, metavar="M,M,...", help="Token counts.")
@click.option("--weight-only", is_flag=True, help="Tune W8A16 instead of W8A8.")
@click.option("--quick", is_flag=True, help="Try only tiles that won for other layers on this GPU.")
@click.option("--minutes", type=click.FloatRange(0), help="Begin no further token count after this time.")
@click.option("--check/--no-check", default=True, help="Compare the bits of every tile before it is timed.")
@click.option("--again", is_flag=True, help="Tune token counts that are in the file already, too.")
@click.option("--workers", type=click.IntRange(1), help="Processes that compile; default: as many as cores.")
@click.option(
    "--out", metavar="FOLDER", help="Where the files go; default: where the kernels look (INT8MOE_TUNED_CONFIG_FOLDER)."
)
@click.option("--save/--no-save", default=True, help="Keep layer times for choosing a backend (INT8MOE_RECORDS).")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON, and nothing else on stdout.")
def command(
    model: str | None, shape: str | None, layer: str | None, tp: int, ep: int, tokens: str, **more: Any
) -> None:
    """Find the fastest launch of the Triton kernels for one layer, for several token counts.

    Likely tiles are compiled in several processes, checked for equal bits and timed; the best plans are timed as whole
    layers against the default, and kept where they are faster. Stop at any time: what is done is in the file, and the
    same command goes on after it. The tile file is one that vLLM reads, too.

    --quick takes the tiles from tuned plans of other layers on this GPU instead, the nearest ones; a later run without
    it tunes the same token counts again, in full.

        int8moe tune --model ./Qwen3-30B-A3B --tp 2
    """
    try:
        config, title = _layer(model, shape, layer, tp, ep)
        options = Options(config, title, parse_tokens(tokens), **more)
        if options.minutes is not None and not math.isfinite(options.minutes):
            raise ConfigError(f"minutes is {options.minutes}, needs a number.")
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    _run(options)


def _layer(
    model: str | None, shape: str | None, layer: str | None, tp: int, ep: int
) -> tuple[FusedMoEConfig, str]:  # fmt: skip
    """The layer on one rank, and what to call it."""
    from int8moe.device import Platform
    from int8moe.model_config import ModelExperts

    if sum(given is not None for given in (model, shape, layer)) != 1:
        raise ConfigError("needs one of --model, --shape and --layer.")
    if layer is not None:
        parts = [part.strip() for part in layer.split(",")]
        if len(parts) != 4 or not all(p.isascii() and p.isdigit() and int(p) > 0 for p in parts):
            raise ConfigError(f"layer is {layer!r}, needs four whole numbers: E,TOPK,H,I as 128,8,2048,768.")
        experts, topk, hidden, inter = map(int, parts)
        found, name = ModelExperts("layer", experts, topk, hidden, inter, num_layers=1), layer
    else:
        known = model_shape(model) if model is not None else named_shape(str(shape))
        found, name = known.experts, known.name
    ranks = "".join(f", a rank of {what} {size}" for what, size in (("tp", tp), ("ep", ep)) if size > 1)
    return found.layer_config(Platform.current(), tp=tp, ep=ep), name + ranks


def _run(options: Options) -> None:
    from rich.console import Console

    from int8moe.backends.triton.configs import user_tuned_folder
    from int8moe.bench.triton import check_surroundings
    from int8moe.records import make_user_folder
    from int8moe.tuning.files import TunedFile
    from int8moe.tuning.winners import winners

    gpu = check_surroundings(
        "tuning, which times the Triton kernels on the GPU that will run them,",
        "start it on that machine (other backends have nothing to tune)",
    )
    console = Console(file=sys.stderr if options.as_json else sys.stdout, highlight=False, soft_wrap=True)
    folder = Path(options.out) if options.out else user_tuned_folder()
    kept = TunedFile(folder, options.config, gpu.name, options.weight_only)
    todo = [m for m in options.tokens if options.again or not kept.has(m, options.quick)]
    won = winners(options.config, gpu.name, options.weight_only) if options.quick and todo else ()
    if todo:
        kept.make_folder()
    if _saves(options):
        make_user_folder()
    _heading(console, options, gpu, kept, todo)
    results: list[dict[str, Any]] = []
    try:
        with closing(_search(options, gpu, todo, won, console)) as search:
            for found in search:
                kept.add(found.tokens, found.plan, found.latency_us, found.default_us, options.quick)
                results.append(_row(found))
                if not options.as_json:
                    console.print(_line(found))
                if _saves(options):
                    _save(options.config, gpu.name, found)
    except KeyboardInterrupt:
        console.print("stopped; what is done is kept, and the same command goes on after it.")
        raise click.Abort from None
    if options.as_json:
        record = {
            "layer": options.title, "file": str(kept.tiles), "device": gpu.name, "quick": options.quick,
            "results": results,
        }  # fmt: skip
        click.echo(json.dumps(record, indent=2))


def _search(
    options: Options, gpu: Gpu, todo: list[int], won: Sequence[Won], console: Console
) -> Generator[Found, None, None]:
    """The result for each token count, in order, until the time is over."""
    if not todo:
        return
    from int8moe.bench import cuda
    from int8moe.tuning.tune import Tuner

    start = time.monotonic()
    with _progress() as tick:
        gbps = tops = 1.0  # a quick search estimates nothing
        if not options.quick:
            tick("measuring this GPU's limits", 0.0)
            limits = cuda.measure_limits(gpu, options.weight_only)
            gbps, tops = limits.read_gbps, limits.peak_gops / 1e3
        with Tuner(
            options.config, weight_only=options.weight_only, gbps=gbps, tops=tops, check=options.check,
            workers=options.workers, won=won,
        ) as tuner:  # fmt: skip
            searches = [tuner.search(m) for m in todo]
            tuner.compile(searches, lambda n, of: tick(f"compiling: {n} of {of} kernels", COMPILING * n / of))
            share = (1 - COMPILING) / len(searches)
            for number, search in enumerate(searches):
                if options.minutes is not None and time.monotonic() - start > 60 * options.minutes:
                    console.print(f"{options.minutes:g} minutes are over; the same command goes on with the rest.")
                    return
                yield tuner.tune(search, _within(tick, COMPILING + share * number, share))


def _within(tick: Tick, start: float, share: float) -> Tick:
    """A tick for a part of the bar."""
    return lambda text, part: tick(text, start + share * part)


def _saves(options: Options) -> bool:
    """Whether times are kept for choosing a backend, which ranks W8A8 ones."""
    return options.save and not options.weight_only


def _save(config: FusedMoEConfig, device: str, found: Found) -> None:
    from int8moe.records import LayerTime, append_records

    row = LayerTime(
        device, "TRITON", "TritonExperts", int(config.num_local_experts or 0), config.experts_per_token,
        config.hidden_dim, config.intermediate_size_per_partition, str(config.in_dtype), found.tokens,
        round(found.latency_us, 3),
    )  # fmt: skip
    append_records([row], "tune-triton")


def _heading(console: Console, options: Options, gpu: Gpu, kept: TunedFile, todo: list[int]) -> None:
    from rich.markup import escape

    config = options.config
    sizes = f"{config.hidden_dim} x {config.intermediate_size_per_partition}"
    experts = f"{config.num_local_experts} experts, top-{config.experts_per_token}"
    console.print(f"[bold]layer[/]  {escape(options.title)}: {experts}, {sizes}, {gpu.name}")
    console.print(f"[bold]file[/]   {escape(str(kept.tiles))}")
    done = [m for m in options.tokens if m not in todo]
    console.print(
        f"[bold]tokens[/] {_list(todo) or 'none'}" + (f" (in the file already: {_list(done)})" if done else "")
    )
    if todo and kept.replaces:
        console.print(f"[bold]note[/]   what the file holds now is replaced: {escape(kept.replaces)}")


def _row(found: Found) -> dict[str, Any]:
    from int8moe.backends.triton.configs import plan_entry

    return {
        "M": found.tokens, "latency_us": round(found.latency_us, 2), "default_us": round(found.default_us, 2),
        "gain_percent": round(100 * found.gain, 1), "tried": found.tried, "refused": found.refused,
        "layers_us": {name: round(us, 2) for name, us in found.layers_us.items()}, "plan": plan_entry(found.plan),
    }  # fmt: skip


def _line(found: Found) -> str:
    what = f"{100 * found.gain:.0f} % less than the default" if found.gain > 0 else "the default is the fastest"
    refused = f", {len(found.refused)} refused" if found.refused else ""
    return f"M={found.tokens}: {found.latency_us:.1f} us, {what} ({found.tried} tiles measured{refused})"


def _list(counts: Iterable[int]) -> str:
    return ", ".join(map(str, counts))


@contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
    """A bar with the time left on stderr, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text, share: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(compact=True), TextColumn("left"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda text, share: bar.update(task, description=text, completed=share)
