"""`int8moe warmup`: compile a model's kernels before it is served, so that no first request waits for a compiler."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from int8moe.config import DTYPES, FusedMoEConfig, MoEActivation
from int8moe.device import Platform
from int8moe.errors import CheckpointError, ConfigError, UnsupportedDeployment
from int8moe.model_config import ModelExperts, read_model_experts
from int8moe.oracle.int8 import Int8MoEKernelOracle
from int8moe.schemes import SCHEMES_BY_FLAG, kInt8DynamicTokenSym, kInt8StaticChannelSym

BACKENDS = ("humming", "triton")
Tick = Callable[[int, int], None]


@click.command()
@click.option("--model", metavar="PATH", help="A Transformers config.json, or its folder.")
@click.option("--layer", metavar="E,topk,H,I", help="Instead of --model: experts, per token, hidden, intermediate.")
@click.option("--tp", default=1, type=click.IntRange(1), help="Tensor-parallel size.")
@click.option("--ep", default=1, type=click.IntRange(1), help="Expert-parallel size.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Dtype of hidden states; default: the model's, or bfloat16.")
@click.option("--backend", type=click.Choice(BACKENDS), help="Default: the one that would be chosen here.")
@click.option(
    "--max-tokens", default=8192, show_default=True, type=click.IntRange(1), help="Of the largest call to expect."
)
@click.option("--json", "as_json", is_flag=True, help="Print what was done as JSON, and nothing else on stdout.")
def command(
    model: str | None, layer: str | None, tp: int, ep: int, dtype: str | None, backend: str | None, max_tokens: int,
    as_json: bool,
) -> None:  # fmt: skip
    """Compile the kernels of one layer of MODEL on this machine's GPU and keep them where serving finds them.

        int8moe warmup --model Qwen3-30B-A3B --tp 2
        int8moe warmup --layer 128,8,2048,768 --backend humming --json

    Humming's kernels go to HUMMING_CACHE_DIR (~/.humming/cache), Triton's to TRITON_CACHE_DIR (~/.triton/cache). All
    layers of a model share them.
    """
    try:
        shape = read_shape(model, layer)
        platform = Platform.current()
        if platform.kind not in ("cuda", "rocm"):
            raise ConfigError(f"this machine is {platform.name}, needs a GPU: kernels are compiled for the one here.")
        config = shape.layer_config(platform, tp=tp, ep=ep, backend=backend or "auto", dtype=dtype)
    except (ConfigError, CheckpointError) as error:
        raise click.UsageError(str(error)) from None
    scheme = SCHEMES_BY_FLAG[shape.scheme] if shape.scheme else (kInt8StaticChannelSym, kInt8DynamicTokenSym)
    chosen, experts_class = Int8MoEKernelOracle(config, *scheme).select()
    if chosen.value.lower() not in BACKENDS:
        raise UnsupportedDeployment(f"{chosen.value} is what runs this layer here, and it has nothing to compile.")
    started = time.monotonic()
    with _progress() as tick:
        if chosen.value == "HUMMING":
            done = warm_humming(config, experts_class.runner, max_tokens, tick)
        else:
            done = warm_triton(config, experts_class, scheme, max_tokens, tick)
    result = {
        "backend": chosen.value,
        "experts_class": experts_class.__name__,
        "E": config.num_local_experts,
        "topk": config.experts_per_token,
        "H": config.hidden_dim,
        "I": config.intermediate_size_per_partition,
        "dtype": config.in_dtype,
        "device": platform.name,
        "max_tokens": max_tokens,
        **done,
        "seconds": round(time.monotonic() - started, 2),
    }
    if as_json:
        click.echo(json.dumps(result, indent=2))
        return
    where = f", kept in {result['cache']}" if result.get("cache") else ""
    click.echo(
        f"{chosen.value} ({experts_class.__name__}) is ready for calls of up to {max_tokens} tokens:"
        f" {done['what']}, {result['seconds']:.1f} s{where}"
    )


def read_shape(model: str | None, layer: str | None) -> ModelExperts:
    """Raises ConfigError unless exactly one is given, and well."""
    if (model is None) == (layer is None):
        raise ConfigError("needs one of --model PATH and --layer E,topk,H,I.")
    if model is not None:
        return read_model_experts(model)
    assert layer is not None
    parts = [part.strip() for part in layer.split(",")]
    if len(parts) != 4 or not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise ConfigError(f"layer is {layer!r}, needs four whole numbers above 0, as 128,8,2048,768: E,topk,H,I.")
    experts, topk, hidden, intermediate = map(int, parts)
    return ModelExperts("flags", experts, topk, hidden, intermediate, 1, MoEActivation.SILU)


def warm_humming(config: FusedMoEConfig, runner: str, max_tokens: int, tick: Tick) -> dict[str, Any]:
    """Needs no weights: the package compiles from shapes."""
    import importlib

    import torch

    from int8moe.backends.humming import compile as ahead
    from int8moe.backends.humming import layout, run

    layout.require_humming()
    gemm_type = getattr(importlib.import_module(runner.partition(":")[0]), runner.partition(":")[2]).gemm_type
    device = torch.device("cuda", torch.cuda.current_device())
    plan = run.make_plan(config, gemm_type, device)
    warmed = ahead.compile_ahead(plan, run.slots_here(config, max_tokens), device, tick)
    return {
        "what": f"{warmed.kernels} kernels",
        "kernels": warmed.kernels,
        "compiled": warmed.compiled,
        "cache": warmed.cache,
    }


def warm_triton(config: FusedMoEConfig, experts_class: Any, scheme: Any, max_tokens: int, tick: Tick) -> dict[str, Any]:
    """Calls a layer of zeros at every power of two up to `max_tokens`: Triton compiles what is called."""
    from types import SimpleNamespace

    import torch

    from int8moe.quant_config import int8_w8a8_moe_quant_config, int8_w8a16_moe_quant_config

    experts, hidden = int(config.num_local_experts or 0), config.hidden_dim
    new = lambda *s, dtype=torch.float32: torch.zeros(s, dtype=dtype, device="cuda")
    make = int8_w8a16_moe_quant_config if scheme[1] is None else int8_w8a8_moe_quant_config
    bias = (new(experts, config.w13_rows), new(experts, hidden)) if config.has_bias else (None, None)
    layer = experts_class(config, make(new(experts, config.w13_rows) + 1, new(experts, hidden) + 1, *bias))
    w13 = new(experts, config.w13_rows, hidden, dtype=torch.int8)
    w2 = new(experts, hidden, config.intermediate_size_per_partition, dtype=torch.int8)
    layer.process_weights_after_loading(SimpleNamespace(w13_weight=w13, w2_weight=w2))
    tokens = [1 << n for n in range(max_tokens.bit_length()) if 1 << n < max_tokens] + [max_tokens]
    local = torch.arange(config.num_experts, device="cuda", dtype=torch.int32)
    expert_map = None if experts == config.num_experts else torch.where(local < experts, local, -1)
    for done, m in enumerate(tokens, 1):
        x = new(m, hidden, dtype=getattr(torch, str(config.in_dtype)))
        ids = torch.rand(m, config.num_experts, device="cuda").topk(config.experts_per_token).indices
        layer.apply(x, new(m, config.experts_per_token), ids, expert_map=expert_map)
        torch.cuda.synchronize()
        tick(done, len(tokens))
    return {"what": f"called with {len(tokens)} token counts"}


@contextmanager
def _progress() -> Iterator[Tick]:
    """A bar on stderr where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, total: None
        return
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
