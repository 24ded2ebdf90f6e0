"""`int8moe eval`: what INT8 experts cost in quality, on a text, beside the original."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import click

from int8moe.config import DTYPES, MOE_BACKENDS
from int8moe.errors import CheckpointError


@click.command()
@click.argument("model")
@click.option("--text", required=True, type=click.Path(exists=True, dir_okay=False), help="UTF-8 text to score.")
@click.option("--baseline", metavar="MODEL", help="The original, where MODEL is an INT8 checkpoint.")
@click.option("--max-tokens", type=click.IntRange(2), help="Score only the first N tokens of the text.")
@click.option("--context", type=click.IntRange(2), help="Window length; default: the model's positions, at most 1024.")
@click.option("--stride", type=click.IntRange(1), help="Tokens a window moves by; default: half the context.")
@click.option("--backend", default="auto", show_default=True, type=click.Choice(MOE_BACKENDS), help="Of the experts.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Of everything but the experts; default: the checkpoint's.")
@click.option(
    "--one-by-one", is_flag=True, help="Never hold both models in memory (no KL). Default: when they do not fit."
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def command(
    model: str, text: str, baseline: str | None, max_tokens: int | None, context: int | None, stride: int | None,
    backend: str, dtype: str | None, one_by_one: bool, as_json: bool,
) -> int:  # fmt: skip
    """Perplexity of a text under MODEL as it is and with INT8 experts, and how often both choose the same token.

    MODEL is a bf16 checkpoint, compared with its own INT8 form, or an INT8 checkpoint with --baseline.

    Exit code 1 when a model's logits hold NaN or infinity.
    """
    from int8moe.cli.quiet import quiet_transformers

    quiet_transformers()
    from int8moe import evaluate
    from int8moe.transformers import default_device, experts_bytes, explain_model, is_int8_checkpoint, load

    quantised = is_int8_checkpoint(model)
    if quantised and baseline is None:
        raise click.UsageError(f"{model} is INT8, so its original has to be named: --baseline MODEL.")
    original = baseline or model
    if is_int8_checkpoint(original):
        raise CheckpointError(f"{original} is INT8, and the baseline needs a bf16, fp16 or fp32 checkpoint.")
    content = evaluate.read_text(text)
    tokens = evaluate.tokenize(evaluate.load_tokenizer(original), content, max_tokens, where=text)
    details: dict[str, Any] = {"model": model, "original": original, "text": text}

    def load_original() -> Any:
        lm = load(original, backend, quantize=False, dtype=dtype)
        details["baseline_dtype"] = str(lm.dtype).removeprefix("torch.")
        details["baseline_experts_bytes"] = experts_bytes(lm)
        return lm

    def load_int8() -> Any:
        lm = load(model, backend, dtype=dtype)
        reports = explain_model(lm)
        details["int8_experts_bytes"] = experts_bytes(lm)
        details["backend"] = ", ".join(sorted({f"{r.backend} ({r.experts_class})" for r in reports}))
        return lm

    together = not one_by_one and evaluate.fits_together(evaluate.checkpoint_bytes(original), default_device(backend))
    with _progress(as_json) as tick:
        result = evaluate.compare(
            load_original, load_int8, tokens, context=context, stride=stride, together=together, progress=tick
        )
    result.details = details
    bad = {"baseline": result.baseline.non_finite, "INT8 model": result.candidate.non_finite}
    if as_json:
        click.echo(json.dumps(_finite(result.to_dict()), indent=2))
    else:
        _table(result)
    for name, count in bad.items():
        if count:
            click.echo(
                f"error: the {name}'s logits hold NaN or infinity at {count} of {len(tokens.ids) - 1} tokens.", err=True
            )
    return 1 if any(bad.values()) else 0


def _finite(value: Any) -> Any:
    """JSON has no NaN: such numbers become null."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def _table(result: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    a, b, d = result.baseline, result.candidate, result.details
    name = os.path.basename(os.path.normpath(d["model"])) or d["model"]
    table = Table(title=f"{name} on {os.path.basename(d['text'])}: {a.tokens} tokens, context {result.context}")
    table.add_column("")
    for head in (d["baseline_dtype"], "INT8 experts", "difference"):
        table.add_column(head, justify="right")
    percent = lambda x, y: f"{100 * (y / x - 1):+.3f} %" if x else ""
    rows = [
        ("perplexity", f"{a.perplexity:.4f}", f"{b.perplexity:.4f}", f"{result.difference_percent:+.3f} %"),
        ("bits per byte", f"{a.nll_per_byte / math.log(2):.4f}", f"{b.nll_per_byte / math.log(2):.4f}",
         percent(a.nll_per_byte, b.nll_per_byte)),
        ("same next token", "", f"{100 * result.agreement:.2f} %", ""),
        ("KL per token", "", "not measured" if result.kl is None else f"{result.kl:.6f} nats", ""),
        ("tokens/s", f"{a.tokens_per_second:.0f}", f"{b.tokens_per_second:.0f}",
         percent(a.tokens_per_second, b.tokens_per_second)),
        ("experts' memory", _size(d["baseline_experts_bytes"]), _size(d["int8_experts_bytes"]),
         percent(d["baseline_experts_bytes"], d["int8_experts_bytes"])),
    ]  # fmt: skip
    for row in rows:
        table.add_row(*row)
    console = Console()
    console.print(table)
    console.print(f"INT8 experts: {d['backend']}", highlight=False)


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
