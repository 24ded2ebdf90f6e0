"""The compiled module `int8moe._cpu`, and which of its instruction sets to run."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

from int8moe.errors import NativeExtensionError


def load() -> ModuleType:
    """The compiled module. Raises NativeExtensionError where it was not built."""
    try:
        return importlib.import_module("int8moe._cpu")
    except ImportError as error:
        raise NativeExtensionError(
            f"the native CPU kernel is not built ({error}); needs a C++ compiler at install time: pip install ."
        ) from None


def select_isa(name: str | None = None) -> int:
    """Index of the kernel to run: the best runnable one, or the one that `name` (or INT8MOE_CPU_ISA) forces.

    Raises:
        NativeExtensionError: no such kernel, or this CPU lacks what it needs.
    """
    kernels = load().kernels()
    wanted = os.environ.get("INT8MOE_CPU_ISA", "") if name is None else name
    runnable = [kernel for kernel, runs, _ in kernels if runs]
    if not wanted:
        return next(i for i, (_, runs, _) in enumerate(kernels) if runs)
    for index, (kernel, runs, missing) in enumerate(kernels):
        if kernel == wanted:
            if not runs:
                raise NativeExtensionError(
                    f"INT8MOE_CPU_ISA is {wanted!r}, and this CPU lacks {missing}; runnable: {', '.join(runnable)}."
                )
            return index
    compiled = ", ".join(kernel for kernel, _, _ in kernels)
    raise NativeExtensionError(
        f"INT8MOE_CPU_ISA is {wanted!r}, needs one of those compiled: {compiled} (runnable: {', '.join(runnable)})."
    )


def isa_name(index: int) -> str:
    return load().kernels()[index][0]
