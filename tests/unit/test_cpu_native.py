"""The native module's own parts: constants, float functions, features."""

from __future__ import annotations

import struct

import pytest
import torch

from int8moe import numerics
from int8moe.backends.cpu.native import load
from int8moe.backends.reference import run as ref

KERNELS = [(i, name) for i, (name, runs, _) in enumerate(load().kernels()) if runs]


def bits(value: float) -> bytes:
    return struct.pack("f", value)


def test_constants_have_the_same_bits_in_python_and_cpp() -> None:
    native = load().constants()
    for name, value in native.items():
        ours = getattr(numerics, name)
        if isinstance(value, list):
            assert [bits(v) for v in value] == [bits(v) for v in ours], name
        else:
            assert bits(value) == bits(ours), name
    python = {n for n in vars(numerics) if n.isupper()}
    assert python == set(native)


@pytest.mark.parametrize(("index", "name"), KERNELS)
@pytest.mark.parametrize("kind", ["exp", "erf", "tanh", "bfloat16", "float16"])
def test_float_functions_equal_the_reference(index: int, name: str, kind: str) -> None:
    patterns = torch.arange(0, 2**32, 40961, dtype=torch.int64).to(torch.int32).view(torch.float32)
    edges = torch.tensor(
        [0.0, -0.0, 65504.0, 65519.9, 65520.0, 6e-8, 2.9e-8, 2.98e-8, 1e-45, float("inf"), float("nan")]
    )
    x = torch.cat([torch.linspace(-90, 90, 100_003), patterns, edges, -edges])
    out = torch.empty_like(x)
    load().map(index, ["exp", "erf", "tanh", "bfloat16", "float16"].index(kind), x.data_ptr(), out.data_ptr(), len(x))
    want = x.to(getattr(torch, kind)).float() if hasattr(torch, kind) and "float" in kind else getattr(ref, kind)(x)
    nan = want.isnan()
    assert torch.equal(out.isnan(), nan)
    assert torch.equal(out[~nan].view(torch.int32), want[~nan].view(torch.int32))


def test_features_agree_with_the_kernel() -> None:
    with open("/proc/cpuinfo") as lines:
        flags = next((line.split(":")[1].split() for line in lines if line.startswith("flags")), [])
    for feature in ("avx2", "fma", "f16c", "avx_vnni", "avx512_vnni", "asimddp", "i8mm"):
        assert (feature in load().features()) == (feature in flags), feature


def test_kernels_are_listed_best_first() -> None:
    """A compiler that does not know an instruction set leaves its kernel out; the order stays."""
    order = ["amx", "avx512vnni", "avxvnni", "avx2", "neon_i8mm", "neon_dotprod", "portable"]
    names = [name for name, _, _ in load().kernels()]
    assert names == [name for name in order if name in names]
    assert names[-1] == "portable"


def test_limits_are_measured() -> None:
    native = load()
    assert native.measure_read(2, 16, 1) > 1e8
    for index, name in KERNELS:
        peaks = native.measure_peak(index, 2, 5)
        assert peaks and all(rate > 1e8 for _, rate in peaks), name


def test_portable_is_always_there_and_last() -> None:
    assert load().kernels()[-1][:2] == ("portable", True)
