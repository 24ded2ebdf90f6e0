"""Transformers' own progress bars and notes, switched off for commands that report themselves."""

from __future__ import annotations


def quiet_transformers() -> None:
    """Leave errors only. What matters of the rest (missing or unused tensors) `int8moe.load` checks and says itself."""
    try:
        from transformers.utils import logging
    except ImportError:
        return
    logging.set_verbosity_error()
    logging.disable_progress_bar()
