"""`int8moe generate`: text from a model with INT8 experts, written as it comes."""

from __future__ import annotations

import json
import time
from typing import Any

import click

from int8moe.config import DTYPES, MOE_BACKENDS


@click.command()
@click.argument("model")
@click.option("--prompt", required=True, metavar="TEXT", help="The text to continue.")
@click.option(
    "--max-new-tokens", default=64, show_default=True, type=click.IntRange(1), help="Tokens to write at most."
)
@click.option(
    "--temperature", default=0.0, show_default=True, type=click.FloatRange(0.0), help="0 takes the likeliest token."
)
@click.option("--seed", default=0, show_default=True, help="Of the random choices.")
@click.option("--backend", default="auto", show_default=True, type=click.Choice(MOE_BACKENDS), help="Of the experts.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Of everything but the experts; default: the checkpoint's.")
@click.option("--no-int8", is_flag=True, help="Run the original checkpoint as it is.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end instead of the text.")
def command(
    model: str, prompt: str, max_new_tokens: int, temperature: float, seed: int, backend: str, dtype: str | None,
    no_int8: bool, as_json: bool,
) -> int:  # fmt: skip
    """Continue a prompt with the experts of MODEL in INT8.

    MODEL is a Transformers checkpoint: a bf16 one is quantised while it loads, an INT8 one is read as it is. The
    text goes to stdout as it is written; backend and speed go to stderr.
    """
    if no_int8 and backend != "auto":
        raise click.UsageError(f"--backend {backend} cannot go with --no-int8, which runs no INT8 experts.")
    if not prompt:
        raise click.UsageError("--prompt has no tokens, needs some text.")
    from int8moe.cli.quiet import quiet_transformers

    quiet_transformers()
    import torch

    from int8moe.evaluate import load_tokenizer
    from int8moe.transformers import explain_model, load

    began = time.perf_counter()
    lm = load(model, backend, quantize=False if no_int8 else None, dtype=dtype)
    load_s = time.perf_counter() - began
    tokenizer = load_tokenizer(model)
    inputs = tokenizer(prompt, return_tensors="pt")
    if not inputs["input_ids"].numel():
        raise click.UsageError("--prompt has no tokens, needs some text.")
    inputs = {k: v.to(lm.device) for k, v in inputs.items() if k in ("input_ids", "attention_mask")}
    stream = _Stream(tokenizer, write=None if as_json else lambda text: click.echo(text, nl=False))
    sampling: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        sampling["temperature"] = temperature
    if lm.generation_config.pad_token_id is None:
        eos = lm.generation_config.eos_token_id
        sampling["pad_token_id"] = eos[0] if isinstance(eos, list) else 0 if eos is None else eos
    torch.manual_seed(seed)
    stream.begin()
    with torch.inference_mode():
        lm.generate(**inputs, streamer=stream, max_new_tokens=max_new_tokens, **sampling)
    if not as_json:
        click.echo()
    prompt_tokens = inputs["input_ids"].shape[1]
    speed = stream.speed(prompt_tokens)
    layers = [] if no_int8 else explain_model(lm)
    if as_json:
        report = {
            "model": model,
            "prompt": prompt,
            "text": stream.text,
            "prompt_tokens": prompt_tokens,
            "new_tokens": stream.count,
            "load_s": load_s,
            **speed,
            "layers": [
                {"backend": r.backend, "experts_class": r.experts_class, "count": len(r.layers)} for r in layers
            ],
        }
        click.echo(json.dumps(report, indent=2))
        return 0
    names = sorted({f"{r.backend} ({r.experts_class})" for r in layers}) or ["none: the original checkpoint"]
    decode = f", decode {speed['decode_tokens_per_s']:.1f} tokens/s" if speed["decode_tokens_per_s"] else ""
    click.echo(
        f"INT8 experts: {', '.join(names)}; prefill {prompt_tokens} tokens at {speed['prefill_tokens_per_s']:.1f}"
        f" tokens/s{decode}; loaded in {load_s:.1f} s",
        err=True,
    )
    return 0


class _Stream:
    """A streamer for `generate`: decodes whole words as they complete, and clocks each token."""

    def __init__(self, tokenizer: Any, write: Any = None) -> None:
        from transformers import TextStreamer

        self.text, self.count = "", 0
        self._began = self._first = self._last = 0.0
        self._write = write
        outer = self

        class Text(TextStreamer):
            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                outer.text += text
                if outer._write is not None:
                    outer._write(text)

        self._inner = Text(tokenizer, skip_prompt=True, skip_special_tokens=True)

    def begin(self) -> None:
        self._began = time.perf_counter()

    def put(self, value: Any) -> None:
        """Called by `generate` with the prompt first, then with each token."""
        prompt = self._inner.next_tokens_are_prompt
        self._inner.put(value)
        if not prompt:
            self._last = time.perf_counter()
            self.count += 1
            if self.count == 1:
                self._first = self._last

    def end(self) -> None:
        self._inner.end()

    def speed(self, prompt_tokens: int) -> dict[str, float | None]:
        """Tokens per second up to the first new token, and after it (None with fewer than two)."""
        prefill = prompt_tokens / max(self._first - self._began, 1e-9)
        decode = (self.count - 1) / max(self._last - self._first, 1e-9) if self.count > 1 else None
        return {"prefill_tokens_per_s": prefill, "decode_tokens_per_s": decode}
