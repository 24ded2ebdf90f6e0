"""Where tuned plans are kept: the tile file that vLLM reads, and the plans file beside it."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from int8moe.backends.triton import configs
from int8moe.backends.triton.configs import Plan
from int8moe.config import FusedMoEConfig
from int8moe.errors import ConfigError

SCHEMA = 1


def dtype_name(weight_only: bool) -> str:
    """How file names call the scheme."""
    return "int8_w8a16" if weight_only else "int8_w8a8"


class TunedFile:
    """The two files of one layer on one GPU, read when made and written whole after every token count.

    Args:
        folder: where they are; made when first written.

    Raises:
        ConfigError: a file that is there is not of its format.
    """

    def __init__(self, folder: Path, config: FusedMoEConfig, device_name: str, weight_only: bool = False) -> None:
        self.config = config
        name = configs.file_name(
            int(config.num_local_experts or 0), config.intermediate_size_per_partition, device_name,
            dtype_name(weight_only),
        )  # fmt: skip
        self.tiles, self.plans = folder / name, folder / configs.plans_name(name)
        self.entries: dict[str, dict[str, Any]] = {}
        self.replaces: str | None = None
        """Another layer, whose plans have these files' names, too; writing replaces them."""
        if self.plans.is_file():
            configs.read_plans(self.plans)
            content = json.loads(self.plans.read_text())
            hidden, topk = content.get("hidden"), content.get("topk")
            if (hidden, topk) == (config.hidden_dim, config.experts_per_token):
                self.entries = content["plans"]
            elif content["plans"]:
                self.replaces = f"hidden size {hidden}, top-{topk}"
        elif self.tiles.is_file():
            self.replaces = "tiles without plans"

    def make_folder(self) -> None:
        """Make the folder, so that one that cannot be written to is refused before hours of tuning.

        Raises:
            ConfigError: it cannot be made, or be written to.
        """
        folder = self.tiles.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise _cannot_write(self.tiles, error) from None

    def has(self, tokens: int, quick: bool = False) -> bool:
        """Whether `tokens` was tuned with the Triton that is installed; what a quick search found counts only where
        `quick` asks for no more."""
        entry = self.entries.get(str(tokens), {})
        return entry.get("triton_version") == _version("triton") and (quick or not entry.get("quick", False))

    def add(self, tokens: int, plan: Plan, latency_us: float, default_us: float, quick: bool = False) -> None:
        """Keep a result, and write both files; a reader sees the old ones or the new ones.

        Args:
            quick: a quick search found it; a full one does it again.

        Raises:
            ConfigError: they cannot be written.
        """
        self.entries[str(tokens)] = configs.plan_entry(plan) | {
            "latency_us": round(latency_us, 2),
            "default_us": round(default_us, 2),
            "triton_version": _version("triton"),
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        }
        if quick:
            self.entries[str(tokens)]["quick"] = True
        self.entries = dict(sorted(self.entries.items(), key=lambda item: int(item[0])))
        c = self.config
        head = {
            "schema": SCHEMA, "experts": c.num_local_experts, "topk": c.experts_per_token, "hidden": c.hidden_dim,
            "intermediate": c.intermediate_size_per_partition,
        }  # fmt: skip
        _replace(self.plans, head | {"plans": self.entries})
        # One tile for both GEMMs and six keys, of 16 rows at least: all that vLLM takes.
        plans = {m: configs.plan_of_entry(self.plans, m, entry) for m, entry in self.entries.items()}
        tiles = {m: plan.gemm1.plain() for m, plan in plans.items()}
        rows = {m: configs.tile_entry(replace(tile, block_m=max(16, tile.block_m))) for m, tile in tiles.items()}
        _replace(self.tiles, {"triton_version": _version("triton")} | rows)


def _replace(path: Path, content: dict[str, Any]) -> None:
    """Write a file whole: a reader, and a crash, see the old one or the new one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(json.dumps(content, indent=1) + "\n")
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(part, 0o666 & ~umask)  # the usual mode; mkstemp's own lets nobody else read it
            os.replace(part, path)
        except BaseException:
            os.unlink(part)
            raise
    except OSError as error:
        raise _cannot_write(path, error) from None


def _cannot_write(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path} cannot be written ({error.strerror}); needs a folder that can: --out FOLDER.")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
