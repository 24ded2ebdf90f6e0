"""The command line: `int8moe COMMAND`. Each command parses, calls the library, prints.

Commands load on use, so that `explain` answers without importing a framework. Exit codes: 0 done or yes,
1 failure or no, 2 wrong usage.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from typing import Any

import click

from int8moe.errors import Int8MoeError

COMMANDS = {
    "explain": "Which INT8 MoE backend runs a model on a machine, and why not the others.",
    "quantize": "Convert a bf16 checkpoint into a compressed-tensors INT8 one, shard by shard.",
    "generate": "Write text with a model's experts in INT8.",
    "eval": "Perplexity of a text, bf16 and INT8 side by side.",
    "bench": "Time one MoE layer, beside the limits of this machine.",
    "warmup": "Compile a model's kernels before it is served.",
    "tune": "Find the fastest tiles of the Triton kernels for a layer, on this machine's GPU.",
}


EXTRAS = {
    "torch": "transformers",
    "numpy": "transformers",
    "safetensors": "transformers",
    "transformers": "transformers",
    "tokenizers": "transformers",
    "triton": "triton",
    "humming": "humming",
    "matplotlib": "bench",
}
"""The extra that installs a package which a command may find missing."""


class _LazyGroup(click.Group):
    """A group whose commands live in `int8moe.cli.<name>` and load when called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        return importlib.import_module(f"int8moe.cli.{cmd_name}").command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.command(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(package_name="int8moe", prog_name="int8moe")
def cli(debug: bool) -> None:
    """INT8 experts for Mixture-of-Experts models: choose a kernel, convert the weights, run."""


def setup_logging(level: str | None = None) -> None:
    """Show the library's log on stderr at INT8MOE_LOGGING_LEVEL (default WARNING)."""
    wanted = (level or os.environ.get("INT8MOE_LOGGING_LEVEL", "WARNING")).upper()
    logger = logging.getLogger("int8moe")
    if not isinstance(logging.getLevelName(wanted), int):
        raise click.UsageError(f"INT8MOE_LOGGING_LEVEL is {wanted!r}, needs DEBUG, INFO, WARNING or ERROR.")
    logger.setLevel(wanted)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s int8moe: %(message)s"))
        logger.addHandler(handler)


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit."""
    arguments = sys.argv[1:] if argv is None else argv
    debug = "--debug" in arguments
    arguments = [a for a in arguments if a != "--debug"]
    try:
        setup_logging()
        code: Any = cli.main(arguments, prog_name="int8moe", standalone_mode=False)
    except click.ClickException as error:
        if debug:
            raise
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        click.echo("stopped.", err=True)
        sys.exit(130)
    except ModuleNotFoundError as error:
        if debug or (error.name or "").partition(".")[0] not in EXTRAS:
            raise
        package = (error.name or "").partition(".")[0]
        click.echo(f"error: this needs {package}: pip install 'int8moe[{EXTRAS[package]}]'", err=True)
        sys.exit(1)
    except (Int8MoeError, OSError, ImportError) as error:
        if debug:
            raise
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)
