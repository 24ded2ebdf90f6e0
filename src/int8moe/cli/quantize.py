"""`int8moe quantize`: a float checkpoint becomes a compressed-tensors INT8 one."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from int8moe.errors import CheckpointError

MB = 1e6


@click.command()
@click.argument("source")
@click.argument("destination")
@click.option("--scale-dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option(
    "--targets",
    type=click.Choice(["experts", "experts+shared", "all-linear"]),
    default="experts",
    show_default=True,
    help="What becomes int8: routed experts; shared experts too; all Linears but heads, routers and gates.",
)
@click.option("--threads", type=click.IntRange(min=1), default=None, help="Default: the processor's cores.")
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint that is in DESTINATION.")
@click.option("--verify/--no-verify", default=True, show_default=True, help="Read the result back and compare.")
@click.option("--dry-run", is_flag=True, help="Check the source and print the sizes; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(
    source: str,
    destination: str,
    scale_dtype: str,
    targets: str,
    threads: int | None,
    overwrite: bool,
    verify: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Convert the checkpoint folder SOURCE (safetensors in bf16, fp16, fp32, or FP8 with a scale per block) into
    DESTINATION.

    Experts become int8 with one scale per output row, in the compressed-tensors int-quantized format; all else is
    copied (FP8 becomes bf16).
    Interrupted, a second run goes on where the first stopped.
    """
    from int8moe.quantize.checkpoint import make_plan, quantize_checkpoint

    if dry_run:
        plan = make_plan(source, scale_dtype, targets)
        sizes = plan.bytes()
        if as_json:
            click.echo(json.dumps({"shards": len(plan.shards), **sizes}))
        else:
            click.echo(
                f"{source}: {len(plan.shards)} shards, {sizes['before'] / MB:.1f} MB -> {sizes['after'] / MB:.1f} MB"
                f" (experts {sizes['experts_before'] / MB:.1f} -> {sizes['experts_after'] / MB:.1f})"
            )
        return 0
    try:
        with _Bar() as bar:
            report = quantize_checkpoint(
                source, destination, scale_dtype=scale_dtype, targets=targets, threads=threads, overwrite=overwrite,
                verify=verify, progress=bar.update,
            )  # fmt: skip
    except KeyboardInterrupt:
        raise CheckpointError(f"stopped; the same command goes on where it stopped ({destination}).") from None
    if as_json:
        click.echo(json.dumps(report.to_dict()))
        return 0
    again = f", {len(report.resumed_shards)} of them from an earlier run" if report.resumed_shards else ""
    click.echo(f"{source} -> {destination}: {report.shards} shards{again}, {report.seconds:.1f} s")
    click.echo(
        f"tensors  {report.bytes_before / MB:.2f} MB -> {report.bytes_after / MB:.2f} MB"
        f" ({report.bytes_after / report.bytes_before - 1:+.1%})"
    )
    dense = f" and {report.dense_matrices} of other layers" if report.dense_matrices else ""
    click.echo(
        f"experts  {report.experts_before / MB:.2f} MB -> {report.experts_after / MB:.2f} MB,"
        f" {report.expert_matrices} matrices{dense}; {report.other_tensors} other tensors copied"
    )
    if report.verified:
        click.echo(f"verified every code is within {report.worst_error:.3f} steps of its weight, the rest is equal")
    return 0


class _Bar:
    """A progress bar with time left on a terminal; silent elsewhere."""

    def __init__(self) -> None:
        self._progress: Any = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

            self._progress = Progress(
                TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn(),
                console=Console(stderr=True), transient=True,
            )  # fmt: skip
            self._task = self._progress.add_task("reading headers", total=None)

    def __enter__(self) -> _Bar:
        if self._progress:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress:
            self._progress.stop()

    def update(self, what: str, done: int, total: int) -> None:
        if self._progress:
            self._progress.update(self._task, description=what, completed=done, total=total)
