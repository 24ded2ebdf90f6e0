"""One weight's quantisation: the formula, its bound, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from int8moe.errors import NonFiniteWeight
from int8moe.numerics import RINT_MAGIC
from int8moe.quantize import int8
from int8moe.quantize.int8 import dequantize_weight, quantize_weight


@given(
    seed=st.integers(0, 9999),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 40)),
    exponent=st.integers(-40, 30),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
)
def test_codes_are_within_half_a_step(
    seed: int, shape: tuple[int, int, int], exponent: int, dtype: torch.dtype
) -> None:
    w = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 10.0**exponent).to(dtype)
    if not torch.isfinite(w.float()).all():
        return
    q, scale = quantize_weight(w)
    assert q.dtype is torch.int8 and scale.dtype is torch.float32 and scale.shape == shape[:2]
    assert q.abs().max() <= 127 and torch.isfinite(scale).all() and (scale > 0).all()
    zero = w.float().abs().amax(-1) / 127 < torch.finfo(torch.float32).tiny
    error = (w.double() - q.double() * scale[..., None].double()).abs()
    assert (error <= scale[..., None].double() * (0.5 + 2e-5))[~zero].all()
    assert (scale[zero] == 1).all() and not q[zero].any()
    again, scale_again = quantize_weight(dequantize_weight(q, scale))
    assert torch.equal(again[~zero], q[~zero]) and torch.allclose(scale_again[~zero], scale[~zero], rtol=1e-6)


def test_the_formula_by_hand() -> None:
    q, scale = quantize_weight(torch.tensor([[127.0, -63.5, 0.5, 1.5, -127.0], [0.0, 0.0, 0.0, 0.0, -0.0]]))
    assert scale.tolist() == [1.0, 1.0]
    assert q.tolist() == [[127, -64, 0, 2, -127], [0, 0, 0, 0, 0]]


def test_division_is_by_the_scale_not_by_its_reciprocal() -> None:
    w = torch.randn(64, 512, generator=torch.Generator().manual_seed(1))
    q, scale = quantize_weight(w)
    want = torch.round((w.double() / scale.double()[:, None]).float())
    assert torch.equal(q.float(), want)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_rows_are_the_formula_of_the_whole(scale_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """numerics, step 1, as it stands there; rows from subnormal to huge, of zeros, and of one sign."""
    monkeypatch.setattr(int8, "BLOCK", 7000)
    weight = torch.randn(600, 700, generator=torch.Generator().manual_seed(0)) * torch.logspace(-45, 30, 600)[:, None]
    weight[3], weight[4, 1:] = 0.0, 0.0
    weight[5] = -weight[5].abs()
    for w in (weight, weight.bfloat16().float()):
        scale = torch.div(w.abs().amax(-1), torch.full((600,), 127.0))
        small = scale < torch.finfo(torch.float32).tiny
        scale = torch.where(small, 1.0, scale).to(scale_dtype)
        codes = ((w / scale.float()[:, None] + RINT_MAGIC) - RINT_MAGIC).clamp(-127, 127).masked_fill(small[:, None], 0)
        got = quantize_weight(w, scale_dtype=scale_dtype)
        assert small.any() and torch.equal(got[0], codes.to(torch.int8)) and torch.equal(got[1], scale)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_is_refused_with_its_place(bad: float) -> None:
    w = torch.ones(4, 3, 8, dtype=torch.bfloat16)
    w[2, 1, 5] = bad
    with pytest.raises(NonFiniteWeight, match=r"layer\.w holds NaN or infinity \(expert 2, row 1\)"):
        quantize_weight(w, "layer.w")


def test_bfloat16_scales_are_rounded_before_the_codes_are_made() -> None:
    w = torch.randn(32, 64, generator=torch.Generator().manual_seed(2))
    q, scale = quantize_weight(w, scale_dtype=torch.bfloat16)
    assert scale.dtype is torch.bfloat16
    error = (w - q.float() * scale.float()[:, None]).abs() / scale.float()[:, None]
    assert error.max() < 0.75
    inside = (w / scale.float()[:, None]).abs() <= 127
    assert error[inside].max() <= 0.5001
