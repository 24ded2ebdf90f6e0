"""The compiled module `int8moe._cpu`, and which of its instruction sets to run."""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
from types import ModuleType

from int8moe.errors import NativeExtensionError


@functools.cache
def load() -> ModuleType:
    """The compiled module, sharing PyTorch's OpenMP threads. Raises NativeExtensionError where it was not built."""
    try:
        module = importlib.import_module("int8moe._cpu")
    except ImportError as error:
        raise NativeExtensionError(
            f"the native CPU kernel is not built ({error}); needs a C++ compiler at install time: pip install ."
        ) from None
    runtime = _openmp_of_torch()
    if runtime is not None:
        names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
        module.use_openmp(*(ctypes.cast(getattr(runtime, n), ctypes.c_void_p).value for n in names))
    return module


def _openmp_of_torch() -> ctypes.CDLL | None:
    """The OpenMP runtime that PyTorch has loaded (GNU's, or another with its entry points), or None.

    A copy that belongs to torch is preferred over one that another package brought along.
    """
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split()[-1] for line in maps if "omp" in os.path.basename(line.split()[-1])}
    except OSError:
        return None
    found = [p for p in paths if os.path.basename(p).startswith(("libgomp", "libiomp5", "libomp"))]
    for path in sorted(found, key=lambda p: (f"{os.sep}torch" not in p, p)):
        try:
            library = ctypes.CDLL(path)
            if library.GOMP_parallel and library.omp_get_thread_num and library.omp_get_num_threads:
                return library
        except (OSError, AttributeError):
            continue
    return None


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
