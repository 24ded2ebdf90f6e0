"""The reference's own functions, against float64."""

from __future__ import annotations

import torch

from int8moe.backends.reference import run as ref


def test_exp_is_within_0_7_ulp_on_the_whole_range() -> None:
    x = torch.linspace(-87, 88, 2_000_003)
    true = torch.exp(x.double())
    assert ((ref.exp(x).double() - true).abs() / true).max().item() * 2**23 < 0.7


def test_exp_clamps_and_keeps_nan() -> None:
    x = torch.tensor([-1e30, -87.0, 88.0, 1e30, float("inf"), float("-inf"), float("nan")])
    y = ref.exp(x)
    assert y[0] == y[1] == y[5] and y[2] == y[3] == y[4] and y[6].isnan()


def test_erf_and_tanh_errors() -> None:
    x = torch.linspace(-6, 6, 400_001)
    assert (ref.erf(x).double() - torch.erf(x.double())).abs().max() < 5e-7
    assert (ref.tanh(x).double() - torch.tanh(x.double())).abs().max() < 5e-7


def test_rint_is_round_half_to_even() -> None:
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -126.5, 3.4999998])
    assert torch.equal(ref.rint(x), torch.round(x))


def test_division_is_true_division() -> None:
    a = torch.rand(100_000) * 100 + 1e-3
    assert torch.equal(ref.div(127.0, a), (127.0 / a.double()).float())


def test_row_with_nan_gets_nan_scale_and_zero_codes() -> None:
    x = torch.ones(3, 4)
    x[1, 2] = float("nan")
    x[2, 0] = float("-inf")
    q, scale = ref.quantize_activations(x)
    assert q[0].tolist() == [127] * 4 and not q[1:].any()
    assert scale.isnan().squeeze(1).tolist() == [False, True, True]
