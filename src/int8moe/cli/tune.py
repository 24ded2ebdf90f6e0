"""`int8moe tune`: the fastest tiles of the Triton kernels for a layer, on this machine's GPU."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from int8moe.bench.shapes import SHAPES, model_shape, named_shape
from int8moe.cli.bench import parse_tokens
from int8moe.errors import ConfigError

DEFAULT_TOKENS = "1,2,4,8,16,32,64,128,256,512,1024,2048,4096,8192"
COMPILING = 0.3  # share of the whole time that compiling the first tiles takes, about


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
    model: str | None, shape: str | None, layer: str | None, tp: int, ep: int, tokens: str, weight_only: bool,
    minutes: float | None, check: bool, again: bool, workers: int | None, out: str | None, save: bool, as_json: bool,
) -> None:  # fmt: skip
    """Find the fastest launch of the Triton kernels for one layer, for several token counts.

    Likely tiles are compiled in several processes, checked for equal bits and timed; the best plans are timed as whole
    layers against the default, and kept where they are faster. Stop at any time: what is done is in the file, and the
    same command goes on after it. The tile file is one that vLLM reads, too.

        int8moe tune --model ./Qwen3-30B-A3B --tp 2
    """
    try:
        config, title = _config(model, shape, layer, tp, ep)
        counts = parse_tokens(tokens)
        if minutes is not None and not math.isfinite(minutes):
            raise ConfigError(f"minutes is {minutes}, needs a number.")
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    _tune(config, title, counts, weight_only, minutes, check, again, workers, out, save, as_json)


def _config(model: str | None, shape: str | None, layer: str | None, tp: int, ep: int) -> tuple[Any, str]:
    from int8moe.device import Platform
    from int8moe.model_config import ModelExperts

    if sum(given is not None for given in (model, shape, layer)) != 1:
        raise ConfigError("needs one of --model, --shape and --layer.")
    if layer is not None:
        parts = layer.split(",")
        if len(parts) != 4 or not all(p.strip().isdigit() and int(p) > 0 for p in parts):
            raise ConfigError(f"layer is {layer!r}, needs four whole numbers: E,TOPK,H,I as 128,8,2048,768.")
        experts, topk, hidden, inter = map(int, parts)
        found, name = ModelExperts("layer", experts, topk, hidden, inter, num_layers=1), layer
    else:
        known = model_shape(model) if model is not None else named_shape(str(shape))
        found, name = known.experts, known.name
    ranks = "".join(f", a rank of {what} {size}" for what, size in (("tp", tp), ("ep", ep)) if size > 1)
    return found.layer_config(Platform.current(), tp=tp, ep=ep), name + ranks


def _tune(
    config: Any, title: str, counts: tuple[int, ...], weight_only: bool, minutes: float | None, check: bool, again: bool,
    workers: int | None, out: str | None, save: bool, as_json: bool,
) -> None:  # fmt: skip
    from rich.console import Console

    from int8moe.backends.triton.configs import user_tuned_folder
    from int8moe.bench import cuda
    from int8moe.bench.triton import check_surroundings
    from int8moe.records import make_user_folder
    from int8moe.tuning.files import TunedFile
    from int8moe.tuning.tune import Tuner

    gpu = check_surroundings()
    console = Console(file=sys.stderr if as_json else sys.stdout, highlight=False, soft_wrap=True)
    kept = TunedFile(Path(out) if out else user_tuned_folder(), config, gpu.name, weight_only)
    if save and not weight_only:
        make_user_folder()
    todo = [m for m in counts if again or not kept.has(m)]
    console.print(f"[bold]layer[/]  {title}: {config.num_local_experts} experts, top-{config.experts_per_token},"
                  f" {config.hidden_dim} x {config.intermediate_size_per_partition}, {gpu.name}")  # fmt: skip
    console.print(f"[bold]file[/]   {kept.tiles}\n[bold]tokens[/] {_list(todo) or 'none'}"
                  + (f" (in the file already: {_list(m for m in counts if m not in todo)})" if len(todo) < len(counts) else ""))  # fmt: skip
    results: list[dict[str, Any]] = []
    if todo:
        start = time.monotonic()
        with _progress() as tick:
            tick("measuring this GPU's limits", 0.0)
            limits = cuda.measure_limits(gpu, weight_only)
            try:
                with Tuner(
                    config, weight_only=weight_only, gbps=limits.read_gbps, tops=limits.peak_gops / 1e3, check=check,
                    workers=workers,
                ) as tuner:  # fmt: skip
                    searches = [tuner.search(m) for m in todo]
                    tuner.compile(searches, lambda n, of: tick(f"compiling: {n} of {of} kernels", COMPILING * n / of))
                    for number, search in enumerate(searches):
                        if minutes is not None and time.monotonic() - start > 60 * minutes:
                            console.print(f"{minutes:g} minutes are over; the same command goes on with the rest.")
                            break
                        share = (1 - COMPILING) / len(searches)
                        found = tuner.tune(
                            search, lambda text, part, n=number: tick(text, COMPILING + share * (n + part))
                        )
                        kept.add(found.tokens, found.plan, found.latency_us, found.default_us)
                        results.append(_row(found))
                        if not as_json:
                            console.print(_line(found))
                        if save and not weight_only:
                            _save(config, gpu.name, found)
            except KeyboardInterrupt:
                console.print("stopped; what is done is kept, and the same command goes on after it.")
                raise click.Abort from None
    if as_json:
        click.echo(
            json.dumps({"layer": title, "file": str(kept.tiles), "device": gpu.name, "results": results}, indent=2)
        )


def _save(config: Any, device: str, found: Any) -> None:
    from int8moe.records import LayerTime, append_records

    append_records(
        [
            LayerTime(
                device, "TRITON", "TritonExperts", int(config.num_local_experts), config.experts_per_token,
                config.hidden_dim, config.intermediate_size_per_partition, str(config.in_dtype), found.tokens,
                round(found.latency_us, 3),
            )
        ],
        "tune-triton",
    )  # fmt: skip


def _row(found: Any) -> dict[str, Any]:
    from int8moe.backends.triton.configs import plan_entry

    return {
        "M": found.tokens, "latency_us": round(found.latency_us, 2), "default_us": round(found.default_us, 2),
        "gain_percent": round(100 * found.gain, 1), "tried": found.tried, "refused": found.refused,
        "layers_us": {name: round(us, 2) for name, us in found.layers_us.items()}, "plan": plan_entry(found.plan),
    }  # fmt: skip


def _line(found: Any) -> str:
    what = f"{100 * found.gain:.0f} % less than the default" if found.gain > 0 else "the default is the fastest"
    refused = f", {len(found.refused)} refused" if found.refused else ""
    return f"M={found.tokens}: {found.latency_us:.1f} us, {what} ({found.tried} tiles measured{refused})"


def _list(counts: Any) -> str:
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
