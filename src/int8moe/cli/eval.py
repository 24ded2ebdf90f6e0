"""`int8moe eval`: what INT8 experts cost in quality, on a text, beside the original."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click

from int8moe.config import DTYPES, MOE_BACKENDS
from int8moe.errors import CheckpointError, ConfigError, NoBackendSupported

SCHEMES = ("w8a8", "w8a16")


class _Schemes(click.ParamType):  # type: ignore[type-arg]
    """w8a8, w8a16, or both; also as a list with commas."""

    name = "w8a8|w8a16|both"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[str]:
        schemes = (
            value
            if isinstance(value, list)
            else [part.strip() for part in ("w8a8,w8a16" if value == "both" else value).split(",")]
        )
        for scheme in schemes:
            if scheme not in SCHEMES:
                self.fail(f"{scheme!r} is not one of {', '.join(map(repr, SCHEMES))}.", param, ctx)
        return list(dict.fromkeys(schemes))


@click.command()
@click.argument("model")
@click.option("--text", required=True, type=click.Path(exists=True, dir_okay=False), help="UTF-8 text to score.")
@click.option("--baseline", metavar="MODEL", help="The original, where MODEL is an INT8 checkpoint.")
@click.option(
    "--scheme", "schemes", type=_Schemes(), help="w8a8, w8a16, or both; default: the checkpoint's, else w8a8."
)
@click.option("--max-tokens", type=click.IntRange(2), help="Score only the first N tokens of the text.")
@click.option("--context", type=click.IntRange(2), help="Window length; default: the model's positions, at most 1024.")
@click.option("--stride", type=click.IntRange(1), help="Tokens a window moves by; default: half the context.")
@click.option("--backend", default="auto", show_default=True, type=click.Choice(MOE_BACKENDS), help="Of the experts.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Of everything but the experts; default: the checkpoint's.")
@click.option(
    "--one-by-one", is_flag=True, help="Never hold two models in memory (no KL). Default: when they do not fit."
)
@click.option("--layers", "by_layer", is_flag=True, help="Also the error of each layer and expert, judged alone.")
@click.option("--worst", type=click.IntRange(1), default=5, show_default=True, help="Rows in the tables of --layers.")
@click.option("--plot", metavar="FILE.png|.svg", help="Draw the layers' errors (needs the extra int8moe[bench]).")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def command(
    model: str, text: str, baseline: str | None, schemes: list[str] | None, max_tokens: int | None,
    context: int | None, stride: int | None, backend: str, dtype: str | None, one_by_one: bool, by_layer: bool,
    worst: int, plot: str | None, as_json: bool,
) -> int:  # fmt: skip
    """Perplexity of a text under MODEL as it is and with INT8 experts, and how often both choose the same token.

    MODEL is a bf16 checkpoint, compared with its own INT8 form, or an INT8 checkpoint with --baseline.

    \b
        int8moe eval MODEL --text some.txt --scheme both --layers --plot layers.png

    Where no backend runs W8A16, --backend auto takes the reference for it: slow, the same figures. --plot implies
    --layers.

    Exit code 1 when a model's logits hold NaN or infinity.
    """
    from int8moe.cli.quiet import quiet_transformers

    by_layer = by_layer or plot is not None
    if by_layer and one_by_one:
        raise click.UsageError(
            "--layers runs every INT8 layer on the original's hidden states, so all models have to be in memory:"
            " not possible with --one-by-one."
        )
    if plot:
        from int8moe.bench.plot import check_plot

        check_plot(plot)
        if not Path(plot).absolute().parent.is_dir():
            raise ConfigError(f"plot is {plot!r}, and its folder does not exist.")
    quiet_transformers()
    from int8moe import evaluate
    from int8moe.integrations.transformers.loading import read_config, scheme_of
    from int8moe.layer_errors import LayerErrors
    from int8moe.transformers import default_device, is_int8_checkpoint

    own = scheme_of(model)
    quantised = own is not None
    if quantised and baseline is None:
        raise click.UsageError(f"{model} is INT8, so its original has to be named: --baseline MODEL.")
    original = baseline or model
    if is_int8_checkpoint(original):
        raise CheckpointError(f"{original} is INT8, and the baseline needs a bf16, fp16 or fp32 checkpoint.")
    if baseline is not None:
        evaluate.check_pair(original, read_config(original), model, read_config(model))
    content = evaluate.read_text(text)
    tokens = evaluate.tokenize(evaluate.load_tokenizer(original), content, max_tokens, where=text)
    schemes = schemes or [own or "w8a8"]
    # The split of an error into weights and activations needs W8A16 of a layer beside its W8A8.
    extra = ["w8a16"] if by_layer and "w8a16" not in schemes else []
    fits = evaluate.fits_together(
        evaluate.checkpoint_bytes(original), default_device(backend), len(schemes) + len(extra)
    )
    if by_layer and not fits:
        raise ConfigError(
            "--layers needs the original and its INT8 forms in memory together, and they do not fit; without it they"
            " are scored one by one."
        )
    details: dict[str, Any] = {"model": model, "original": original, "text": text}
    per_scheme: dict[str, dict[str, Any]] = {}
    layers = LayerErrors() if by_layer else None
    with _progress(as_json) as tick:
        results = evaluate.compare(
            partial(_load_original, original, backend, dtype, details),
            {s: partial(_load_int8, model, backend, s, dtype, per_scheme) for s in schemes},
            tokens,
            context=context,
            stride=stride,
            together=fits and not one_by_one,
            layers=layers,
            load_for_layers={s: partial(_load_int8, model, "auto", s, dtype, per_scheme, backend) for s in extra},
            progress=tick,
        )
    if as_json:
        click.echo(json.dumps(_finite(_figures(results, details, per_scheme, layers)), indent=2))
    else:
        _table(results, details, per_scheme)
        if layers is not None:
            _layer_tables(layers, worst)
    if plot and layers is not None:
        from int8moe.layer_plot import draw

        draw(layers.layers, f"{_name(model)} on {os.path.basename(text)}: INT8 experts beside the original", plot)
        if not as_json:
            click.echo(f"plot: {plot}")
    names = {s: "INT8 model" if len(results) == 1 else f"{s} model" for s in results}
    bad = {"baseline": next(iter(results.values())).baseline.non_finite}
    bad |= {names[s]: r.candidate.non_finite for s, r in results.items()}
    for name, count in bad.items():
        if count:
            click.echo(
                f"error: the {name}'s logits hold NaN or infinity at {count} of {len(tokens.ids) - 1} tokens.", err=True
            )
    return 1 if any(bad.values()) else 0


def _load_original(original: str, backend: str, dtype: str | None, details: dict[str, Any]) -> Any:
    from int8moe.transformers import experts_bytes, load

    lm = load(original, backend, quantize=False, dtype=dtype)
    details["baseline_dtype"] = str(lm.dtype).removeprefix("torch.")
    details["baseline_experts_bytes"] = experts_bytes(lm)
    return lm


def _load_int8(
    model: str,
    backend: str,
    scheme: str,
    dtype: str | None,
    details: dict[str, dict[str, Any]],
    where: str | None = None,
) -> Any:
    """The model in `scheme`, on the device that the backend `where` would run on (default: `backend`)."""
    from int8moe.transformers import default_device, experts_bytes, explain_model, load

    device = default_device(where or backend)
    try:
        lm = load(model, backend, scheme=scheme, dtype=dtype, device=device)
    except NoBackendSupported:
        if backend != "auto" or scheme != "w8a16":
            raise
        lm = load(model, "reference", scheme=scheme, dtype=dtype, device=device)
    ran = sorted({f"{r.backend} ({r.experts_class})" for r in explain_model(lm)})
    details[scheme] = {"int8_experts_bytes": experts_bytes(lm), "backend": ", ".join(ran)}
    return lm


def _figures(
    results: dict[str, Any], details: dict[str, Any], per_scheme: dict[str, dict[str, Any]], layers: Any
) -> dict[str, Any]:
    """The first scheme's figures at the top, all schemes' under "schemes"."""
    first = next(iter(results))
    shared = ("baseline", "context", "stride")
    figures = results[first].to_dict() | details | per_scheme[first] | {"scheme": first}
    figures["schemes"] = {
        s: {k: v for k, v in r.to_dict().items() if k not in shared} | per_scheme[s] for s, r in results.items()
    }
    if layers is not None:
        figures["layers"] = layers.to_list()
    return figures


def _finite(value: Any) -> Any:
    """JSON has no NaN: such numbers become null."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def _name(model: str) -> str:
    return os.path.basename(os.path.normpath(model)) or model


def _table(results: dict[str, Any], details: dict[str, Any], per_scheme: dict[str, dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    one = next(iter(results.values()))
    a = one.baseline
    where = f"{_name(details['model'])} on {os.path.basename(details['text'])}"
    table = Table(title=f"{where}: {a.tokens} tokens, context {one.context}")
    table.add_column("")
    table.add_column(details["baseline_dtype"], justify="right")
    for scheme in results:
        table.add_column(f"INT8 {scheme}", justify="right")
        table.add_column("difference", justify="right")
    percent = lambda x, y: f"{100 * (y / x - 1):+.3f} %" if x else ""
    bits = lambda score: score.nll_per_byte / math.log(2)
    rows: dict[str, list[str]] = {
        "perplexity": [f"{a.perplexity:.4f}"], "bits per byte": [f"{bits(a):.4f}"], "same next token": [""],
        "KL per token": [""], "tokens/s": [f"{a.tokens_per_second:.0f}"],
        "experts' memory": [_size(details["baseline_experts_bytes"])],
    }  # fmt: skip
    for scheme, r in results.items():
        b, size = r.candidate, per_scheme[scheme]["int8_experts_bytes"]
        rows["perplexity"] += [f"{b.perplexity:.4f}", f"{r.difference_percent:+.3f} %"]
        rows["bits per byte"] += [f"{bits(b):.4f}", percent(a.nll_per_byte, b.nll_per_byte)]
        rows["same next token"] += [f"{100 * r.agreement:.2f} %", ""]
        rows["KL per token"] += ["not measured" if r.kl is None else f"{r.kl:.6f} nats", ""]
        rows["tokens/s"] += [f"{b.tokens_per_second:.0f}", percent(a.tokens_per_second, b.tokens_per_second)]
        rows["experts' memory"] += [_size(size), percent(details["baseline_experts_bytes"], size)]
    for label, cells in rows.items():
        table.add_row(label, *cells)
    console = Console()
    console.print(table)
    for scheme in results:
        console.print(f"INT8 experts, {scheme}: {per_scheme[scheme]['backend']}", highlight=False)


def _layer_tables(layers: Any, worst: int) -> None:
    """The worst layers, then the worst experts of all layers; experts that no token chose by name."""
    from rich.console import Console

    console = Console()
    rows = layers.to_list()
    schemes = list(rows[0]["error"])
    experts = [(row["name"], expert) for row in rows for expert in row["experts"]]
    key = "w8a8" if "w8a8" in schemes else schemes[0]
    experts.sort(key=lambda pair: math.inf if math.isnan(v := pair[1]["error"][key]) else v, reverse=True)
    show = lambda value: "" if math.isnan(value) else f"{100 * value:.3f} %"
    heads = ["w8a16 = weights" if s == "w8a16" else s for s in schemes]
    both = len(schemes) > 1
    cells = lambda row: [show(row["error"][s]) for s in schemes] + ([show(row["from_activations"])] if both else [])
    heads += ["activations"] if both else []
    gone = _print_table(
        console,
        f"error of the experts' output, worst {min(worst, len(rows))} of {len(rows)} layers",
        ["layer", *heads],
        [[row["name"], *cells(row)] for row in rows[:worst]],
        ["activations", "w8a16 = weights"],
    ) + _print_table(
        console,
        f"worst {min(worst, len(experts))} of {len(experts)} experts that saw tokens",
        ["layer", "expert", "tokens", *heads],
        [[name, str(e["expert"]), str(e["tokens"]), *cells(e)] for name, e in experts[:worst]],
        ["activations", "w8a16 = weights", "tokens"],
    )
    if gone:
        names = ", ".join(dict.fromkeys(gone))
        console.print(f"left out, for want of width: {names} (a wider terminal or --json has them)", highlight=False)
    for row in rows:
        if row["unseen"]:
            console.print(f"no token chose, in {row['name']}: {', '.join(map(str, row['unseen']))}", highlight=False)


def _print_table(console: Any, title: str, heads: list[str], rows: list[list[str]], expendable: list[str]) -> list[str]:
    """A table whose names stay whole: where it is too wide for the terminal, columns are left out, the first of
    `expendable` first. Their names are returned. What is written into a file or a pipe is as wide as it needs."""
    from rich.console import Console
    from rich.table import Table

    left = list(range(len(heads)))
    gone: list[str] = []
    while True:
        table = Table(title=title)
        for i in left:
            fold = heads[i] == "layer"  # only where nothing is left to drop
            table.add_column(heads[i], justify="left" if fold else "right", no_wrap=not fold, overflow="fold")
        for row in rows:
            table.add_row(*(row[i] for i in left))
        wide = table.__rich_measure__(console, console.options.update(width=10_000)).maximum
        drop = next((i for name in expendable for i in left if heads[i] == name), None)
        if not console.is_terminal or wide <= console.width or drop is None:
            break
        gone.append(heads[drop])
        left.remove(drop)
    (console if console.is_terminal else Console(width=max(wide, console.width))).print(table)
    return gone


@contextmanager
def _progress(silent: bool) -> Any:
    """A bar on stderr where that is a terminal; yields the callback."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if silent or not console.is_terminal:
        yield None
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("scoring", total=None)
        tick: Callable[[int, int], None] = lambda done, total: bar.update(task, completed=done, total=total)
        yield tick
