"""The main job on the shipped model, with the commands a user would type: explain, quantise, evaluate, generate.

Run by `make demo`. Prints each command and what it said, then one report; the last lines of the report also go to
`.demo/report.json`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
MODEL = "models/sotu-moe"
QUANTIZED = ".demo/sotu-moe-int8"
PROMPT = "The people of the United States"
SAMPLING = ("--max-new-tokens", "100", "--temperature", "0.6", "--seed", "3")
EVAL_TOKENS = 16_384
console = Console(highlight=False, soft_wrap=True)


def run(*arguments: str, show: bool = True) -> str:
    """One `int8moe` command, shown and run; its standard output is returned. Stops the demo when it fails."""
    console.print(f"\n[bold cyan]$ int8moe {' '.join(repr(a) if ' ' in a else a for a in arguments)}[/]")
    command = [sys.executable, "-m", "int8moe", *arguments]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert child.stdout is not None
    said = bytearray()
    while chunk := child.stdout.read1(4096):  # shown as it is written, so that text streams
        said += chunk
        if show:
            sys.stdout.write(chunk.decode(errors="replace"))
            sys.stdout.flush()
    if child.wait() != 0:
        console.print(f"[red]int8moe {arguments[0]} failed with exit code {child.returncode}[/]")
        sys.exit(1)
    return said.decode(errors="replace")


def run_json(*arguments: str) -> dict[str, Any]:
    return json.loads(run(*arguments, "--json", show=False))


def folder_bytes(path: Path) -> int:
    return sum(f.stat().st_size for f in path.glob("*.safetensors"))


def main() -> None:
    start = time.monotonic()
    shutil.rmtree(ROOT / ".demo", ignore_errors=True)
    (ROOT / ".demo").mkdir()
    console.rule("1. choose: which INT8 backend runs this model here, and why")
    run("explain", MODEL)
    chosen = run_json("explain", MODEL)["selection"]
    console.rule("2. convert: a bf16 checkpoint to INT8, streamed and verified")
    run("quantize", MODEL, QUANTIZED)
    console.rule("3. compare: perplexity of held-out text, bf16 and INT8")
    quality = run_json(
        "eval", QUANTIZED, "--baseline", MODEL, "--text", f"{MODEL}/heldout.txt", "--max-tokens", str(EVAL_TOKENS)
    )
    console.rule("4. run: the same prompt and seed in bf16 and in INT8")
    texts = {}
    for name, arguments in (("bf16", (MODEL, "--no-int8")), ("INT8", (QUANTIZED,))):
        texts[name] = run_json("generate", *arguments, "--prompt", PROMPT, *SAMPLING)
        console.print(f"[bold]{name}:[/] {escape(PROMPT + texts[name]['text'])}")
    report(chosen, quality, texts, time.monotonic() - start)


def report(chosen: dict[str, Any], quality: dict[str, Any], texts: dict[str, Any], seconds: float) -> None:
    """The page at the end: what ran and why, sizes, quality, speed."""
    console.rule("report")
    backend = chosen["chosen"]
    console.print(f"backend   {backend['backend']} ({backend['experts_class']}), {chosen['order_reason']}")
    for entry in chosen["backends"]:
        for cls in entry["classes"]:
            if cls["reasons"]:
                reasons = escape("; ".join(cls["reasons"]))
                console.print(f"          not {entry['backend']} {cls['name']}: {reasons}")
    table = Table()
    for column in ("", "bf16", "INT8", "difference"):
        table.add_column(column, justify="left" if not column else "right")
    before, after = folder_bytes(ROOT / MODEL), folder_bytes(ROOT / QUANTIZED)
    memory = {"baseline": quality["baseline_experts_bytes"], "int8": quality["int8_experts_bytes"]}
    table.add_row("checkpoint, MB", f"{before / 1e6:.2f}", f"{after / 1e6:.2f}", f"{after / before - 1:+.1%}")
    table.add_row(
        "experts in memory, MB", f"{memory['baseline'] / 1e6:.2f}", f"{memory['int8'] / 1e6:.2f}",
        f"{memory['int8'] / memory['baseline'] - 1:+.1%}",
    )  # fmt: skip
    before, after = quality["baseline"]["perplexity"], quality["int8"]["perplexity"]
    difference = f"{quality['perplexity_difference_percent']:+.3f} %"
    table.add_row("perplexity, held-out text", f"{before:.3f}", f"{after:.3f}", difference)
    table.add_row("same next token", "", "", f"{100 * quality['agreement']:.2f} %")
    speed = {name: texts[name]["decode_tokens_per_s"] for name in texts}
    table.add_row(
        "decode, tokens/s", f"{speed['bf16']:.1f}", f"{speed['INT8']:.1f}", f"{speed['INT8'] / speed['bf16']:.2f}x"
    )
    console.print(table)
    console.print(f"measured on {quality['int8']['tokens']} tokens; everything above took {seconds:.0f} s")
    (ROOT / ".demo" / "report.json").write_text(
        json.dumps({"chosen": backend, "quality": quality, "decode_tokens_per_s": speed}, indent=2)
    )


if __name__ == "__main__":
    main()
