"""Where the humming-kernels package keeps what it compiles, and what it compiles with.

The package keeps kernels under HUMMING_CACHE_DIR (~/.humming/cache) and locks under HUMMING_TMP_DIR (~/.humming/tmp);
other processes find them there.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from int8moe.device import Platform

logger = logging.getLogger(__name__)

FOLDERS = {"HUMMING_CACHE_DIR": ("~/.humming/cache/", "kernels"), "HUMMING_TMP_DIR": ("~/.humming/tmp/", "locks")}


def why_unusable(folder: Path) -> str | None:
    """Why nothing can be kept in `folder` (made where it is missing), or None."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)


def prepare_folders() -> None:
    """Make sure that the package can keep its kernels and locks: a folder that cannot be used is named in one WARNING,
    and a temporary one, removed when this process ends, takes its place."""
    for variable, (default, what) in FOLDERS.items():
        folder = Path(os.environ.get(variable) or os.path.expanduser(default))
        if (reason := why_unusable(folder)) is None:
            continue
        instead = tempfile.mkdtemp(prefix="int8moe-humming-")
        atexit.register(_remove, instead, os.getpid())
        logger.warning(
            "Humming's folder for %s, %s, cannot be used (%s): %s is used instead and removed when this process ends,"
            " so that kernels are compiled again next time. %s names another folder.",
            what, folder, reason, instead, variable,
        )  # fmt: skip
        os.environ[variable] = instead
        _forget_folders()


def _remove(folder: str, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def _forget_folders() -> None:
    """The package asks the environment once; make it ask again."""
    with suppress(ImportError):
        from humming.utils import jit

        for name in ("cache", "tmp", "module", "lock"):
            getattr(jit, f"get_humming_{name}_dir").cache_clear()
        jit.get_humming_lock_filename.cache_clear()


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    return Path(os.environ.get("HUMMING_CACHE_DIR") or os.path.expanduser(FOLDERS["HUMMING_CACHE_DIR"][0]))


def use_compiler_that_is_here() -> None:
    """The package prefers NVRTC and does not look whether it is there: name nvcc where only that one is."""
    toolkit = Platform.current().cuda_toolkit
    if "nvcc" in toolkit and "nvrtc" not in toolkit:
        os.environ.setdefault("HUMMING_COMPILER", "nvcc")
