"""`int8moe explain`: which backend runs a model on a machine, why not the others, and whether it fits."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from int8moe.config import DTYPE_BYTES, DTYPES, MOE_BACKENDS, FusedMoEConfig, MoEActivation
from int8moe.device import CATALOGUE, GIB, Platform
from int8moe.errors import CheckpointError, ConfigError
from int8moe.model_config import ModelExperts, read_model_experts
from int8moe.oracle.base import SelectionReport
from int8moe.oracle.int8 import Int8MoEKernelOracle
from int8moe.schemes import SCHEMES_BY_FLAG

BACKENDS = [b for b in MOE_BACKENDS if b != "reference"]


@click.command()
@click.argument("model", required=False)
@click.option("--device", default="current", metavar="NAME", help=f"current, cpu, or one of: {', '.join(CATALOGUE)}.")
@click.option("--tp", default=1, type=click.IntRange(1), help="Tensor-parallel size.")
@click.option("--ep", default=1, type=click.IntRange(1), help="Expert-parallel size.")
@click.option("--backend", default="auto", type=click.Choice(BACKENDS), help="Ask for one backend by name.")
@click.option("--scheme", type=click.Choice(list(SCHEMES_BY_FLAG)), help="Default: the checkpoint's own, else w8a8.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Dtype of hidden states; default: the model's.")
@click.option("--batched", is_flag=True, help="Batched activation format (one padded batch per expert).")
@click.option("--experts", type=click.IntRange(1), help="Without MODEL: number of experts.")
@click.option("--topk", type=click.IntRange(1), help="Without MODEL: experts per token.")
@click.option("--hidden", type=click.IntRange(1), help="Without MODEL: hidden size.")
@click.option("--intermediate", type=click.IntRange(1), help="Without MODEL: intermediate size of one expert.")
@click.option(
    "--layers", type=click.IntRange(1), default=1, show_default=True, help="Without MODEL: layers with experts."
)
@click.option(
    "--activation", type=click.Choice([a.value for a in MoEActivation]), default="silu", help="Without MODEL."
)
@click.option("--no-gate", is_flag=True, help="Without MODEL: experts without an up projection.")
@click.option("--bias", is_flag=True, help="Without MODEL: experts with biases.")
@click.option("--json", "as_json", is_flag=True, help="Print the whole report as JSON.")
def command(
    model: str | None, device: str, tp: int, ep: int, backend: str, scheme: str | None, dtype: str | None,
    batched: bool, experts: int | None, topk: int | None, hidden: int | None, intermediate: int | None, layers: int,
    activation: str, no_gate: bool, bias: bool, as_json: bool,
) -> int:  # fmt: skip
    """Say which INT8 MoE backend and class run MODEL on a machine, and why each other one does not.

    MODEL is a Transformers config.json, or a folder with one; or describe a layer with flags:

        int8moe explain --experts 128 --topk 8 --hidden 2048 --intermediate 768 --layers 48 --device a100

    Exit code 0 when a backend runs it and the experts fit the device, 1 when not.
    """
    flags = {"--experts": experts, "--topk": topk, "--hidden": hidden, "--intermediate": intermediate}
    if model is not None:
        given = [name for name, value in flags.items() if value is not None]
        if given:
            raise click.UsageError(f"{', '.join(given)} cannot go with MODEL, whose config.json says it.")
        shape = read_model_experts(model)
    else:
        missing = [name for name, value in flags.items() if value is None]
        if missing:
            raise click.UsageError(f"needs MODEL, or these flags too: {', '.join(missing)}.")
        assert experts and topk and hidden and intermediate
        shape = ModelExperts(
            "flags", experts, topk, hidden, intermediate, layers, MoEActivation(activation), not no_gate, bias
        )
    try:
        platform = Platform.named(device)
        config = shape.layer_config(platform, tp=tp, ep=ep, backend=backend, dtype=dtype, batched=batched)
    except ConfigError as error:
        if model is not None and not any(word in str(error) for word in ("device is", "tp is", "ep is")):
            raise CheckpointError(f"{model}: {error}") from None
        raise click.UsageError(str(error)) from None
    weight_key, activation_key = SCHEMES_BY_FLAG[scheme or shape.scheme or "w8a8"]
    report = Int8MoEKernelOracle(config, weight_key, activation_key).explain()
    memory = _memory(shape, config)
    ok = report.chosen_backend is not None and memory["fits"] is not False
    if as_json:
        click.echo(json.dumps(_json(shape, config, report, memory), indent=2))
    else:
        _show(shape, config, report, memory)
    return 0 if ok else 1


def _memory(shape: ModelExperts, config: FusedMoEConfig) -> dict[str, Any]:
    """Bytes of all layers' experts on one rank, bf16 (or the model's dtype) and INT8, and whether INT8 fits."""
    bf16 = shape.num_layers * config.experts_bytes(DTYPE_BYTES.get(str(config.in_dtype), 2))
    int8 = shape.num_layers * config.experts_bytes(1, scale_bytes=4)
    have = config.platform.memory_bytes
    return {
        "dtype": str(config.in_dtype),
        "experts_16bit_bytes": bf16,
        "experts_int8_bytes": int8,
        "device_bytes": have,
        "fits_16bit": None if have is None else bf16 <= have,
        "fits": None if have is None else int8 <= have,
    }


def _json(
    shape: ModelExperts, config: FusedMoEConfig, report: SelectionReport, memory: dict[str, Any]
) -> dict[str, Any]:
    parallel = config.moe_parallel_config
    return {
        "model": {
            "model_type": shape.model_type,
            "num_experts": shape.num_experts,
            "experts_per_token": shape.experts_per_token,
            "hidden_size": shape.hidden_dim,
            "intermediate_size": shape.intermediate_size,
            "moe_layers": shape.num_layers,
            "activation": shape.activation.value,
        },
        "rank": {
            "tp_size": parallel.tp_size,
            "ep_size": parallel.ep_size,
            "num_local_experts": config.num_local_experts,
            "intermediate_size_per_partition": config.intermediate_size_per_partition,
        },
        "device": config.platform.to_dict(),
        "memory": memory,
        "selection": report.to_dict(),
    }


def _size(count: float) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB / 10 else f"{count / (1 << 20):.1f} MiB"


def _show(shape: ModelExperts, config: FusedMoEConfig, report: SelectionReport, memory: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape

    out = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    platform, parallel = config.platform, config.moe_parallel_config
    extra = f", compute capability {platform.capability[0]}.{platform.capability[1]}" if platform.capability else ""
    isa = f" ({', '.join(sorted(platform.isa))})" if platform.isa else ""
    out.print(
        f"[bold]model[/]   {escape(shape.model_type)}: {shape.num_layers} layers x {shape.num_experts} experts,"
        f" top-{shape.experts_per_token}, hidden {shape.hidden_dim}, intermediate {shape.intermediate_size},"
        f" {shape.activation.value}, {config.in_dtype}"
    )
    out.print(f"[bold]device[/]  {escape(platform.name)} ({platform.kind}{extra}){escape(isa)}")
    if parallel.tp_size > 1 or parallel.ep_size > 1:
        out.print(
            f"[bold]rank[/]    tp {parallel.tp_size}, ep {parallel.ep_size}: {config.num_local_experts} experts,"
            f" intermediate {config.intermediate_size_per_partition} on each"
        )
    out.print(f"[bold]scheme[/]  {report.deployment.scheme}")
    if report.chosen_backend:
        asked = "" if report.requested == "auto" else " (asked for by name)"
        out.print(f"[bold]chosen[/]  [green]{report.chosen_backend}[/] with {report.chosen_class}{asked}")
    else:
        work = [n for n in report.would_work if n != report.requested]
        advice = f"; would work: {', '.join(work)}" if work else ""
        out.print(f"[bold]chosen[/]  [red]none[/] (asked for: {report.requested}){advice}")
    out.print(f"[bold]order[/]   {', '.join(b.backend for b in report.backends)}: {escape(report.order_reason)}")
    for backend in report.backends:
        if backend.order_reason:
            out.print(f"  {backend.backend:8s}{escape(backend.order_reason)}")
        for entry in backend.classes:
            chosen = backend.backend == report.chosen_backend and entry.name == report.chosen_class
            state = "[green]runs[/]" if chosen else "could run" if entry.supported else "[red]refused[/]"
            out.print(f"  {backend.backend:8s}{entry.name}: {state}")
            for reason in entry.reasons:
                out.print(f"    - {escape(reason)}")
    for note in report.notes:
        out.print(f"[bold]note[/]    {escape(note)}")
    has = "unknown" if memory["device_bytes"] is None else _size(memory["device_bytes"])
    verdict = {None: "fit unknown", True: "fits", False: "[red]does not fit[/]"}
    out.print(
        f"[bold]experts[/] {memory['dtype']} {_size(memory['experts_16bit_bytes'])} ({verdict[memory['fits_16bit']]}),"
        f" INT8 {_size(memory['experts_int8_bytes'])} ({verdict[memory['fits']]}) on each rank; device memory {has}"
    )
