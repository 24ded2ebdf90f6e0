"""`build_kernel`: selection, self-check, conversion and what each does when something is wrong."""

from __future__ import annotations

import logging

import pytest
import torch

from cases import assert_same_bits, build
from int8moe import layer
from int8moe.backends.base import FusedMoEExperts
from int8moe.backends.cpu.support import CPUExpertsInt8
from int8moe.backends.reference.support import ReferenceExperts
from int8moe.config import FusedMoEConfig
from int8moe.device import Platform
from int8moe.errors import NoBackendSupported, NonFiniteWeight, SelfCheckFailed, ShapeMismatch, UnsupportedDeployment
from int8moe.layer import build_kernel
from int8moe.oracle import int8
from int8moe.oracle.int8 import Int8MoeBackend, convert_to_int8_moe_kernel_format
from int8moe.weights import ExpertWeights


def weights_of(case) -> ExpertWeights:
    q = case.quant_config
    return ExpertWeights(case.w13.clone(), case.w2.clone(), q.w1_scale, q.w2_scale, q.w1_bias, q.w2_bias)


@pytest.fixture(autouse=True)
def _fresh_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "_checked", {})


class WrongRunner:
    """A kernel that forgets the second half of its output."""

    def __init__(self, config, quant_config) -> None:
        self.right = ReferenceExperts(config, quant_config)

    def process_weights_after_loading(self, holder) -> None:
        self.right.process_weights_after_loading(holder)

    def apply(self, *args, **kwargs):
        out = self.right.apply(*args, **kwargs)
        out[:, out.shape[1] // 2 :] = 0
        return out


class WrongExperts(FusedMoEExperts):
    runner = "test_layer:WrongRunner"


@pytest.fixture
def wrong_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRITON, the first backend, is a class that supports everything and computes something else."""
    monkeypatch.setitem(int8.KERNEL_CLASSES, Int8MoeBackend.TRITON, [WrongExperts])
    monkeypatch.syspath_prepend(__file__.rsplit("/", 1)[0])


def test_the_kernel_runs_what_the_report_says() -> None:
    case = build(M=7, bias=True)
    kernel = build_kernel(weights_of(case), case.config)
    assert kernel.backend is Int8MoeBackend.CPU and isinstance(kernel.experts, CPUExpertsInt8)
    assert (kernel.report.chosen_backend, kernel.report.chosen_class) == ("CPU", "CPUExpertsInt8")
    got = kernel(case.hidden_states, case.topk_weights, case.topk_ids)
    assert_same_bits(got, case.reference_output())
    w13, w2 = kernel.unpack_weights()
    assert torch.equal(w13, case.w13) and torch.equal(w2, case.w2)


def test_the_source_is_freed() -> None:
    weights = weights_of(build())
    build_kernel(weights, build().config)
    assert weights.w13 is None and weights.w2 is None


def test_reference_by_name() -> None:
    case = build(M=3)
    config = FusedMoEConfig(8, 2, 64, 96, moe_backend="reference")
    kernel = build_kernel(weights_of(case), config)
    assert kernel.backend is None and isinstance(kernel.experts, ReferenceExperts)
    assert_same_bits(kernel(case.hidden_states, case.topk_weights, case.topk_ids), case.reference_output())


def test_auto_skips_a_backend_that_computes_something_else(wrong_first, caplog: pytest.LogCaptureFixture) -> None:
    case = build(M=5)
    with caplog.at_level(logging.WARNING, logger="int8moe"):
        kernel = build_kernel(weights_of(case), case.config)
    assert kernel.backend is Int8MoeBackend.CPU
    assert kernel.report.chosen_backend == "CPU"
    (note,) = kernel.report.notes
    assert "TRITON (WrongExperts) was skipped" in note and "relative error 0." in note and "0.02 expected" in note
    assert [r.getMessage() for r in caplog.records] == [note]
    assert note in str(kernel.report)
    assert_same_bits(kernel(case.hidden_states, case.topk_weights, case.topk_ids), case.reference_output())


def test_asked_for_by_name_it_raises(wrong_first) -> None:
    case = build()
    config = FusedMoEConfig(8, 2, 64, 96, moe_backend="triton")
    with pytest.raises(SelfCheckFailed, match=r"'triton' was asked for, and WrongExperts differs from the reference"):
        build_kernel(weights_of(case), config)


def test_nothing_is_left_after_the_check(wrong_first, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(int8.KERNEL_CLASSES, Int8MoeBackend.CPU, [WrongExperts])
    monkeypatch.setitem(int8.KERNEL_CLASSES, Int8MoeBackend.HUMMING, [])
    with pytest.raises(NoBackendSupported, match="No Int8 MoE backend is left after the self-check"):
        build_kernel(weights_of(build()), build().config)


def test_the_check_is_done_once_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = layer._compare_with_reference
    monkeypatch.setattr(layer, "_compare_with_reference", lambda *a: calls.append(1) or real(*a))
    for _ in range(3):
        build_kernel(weights_of(build()), build().config)
    build_kernel(weights_of(build(H=32)), build(H=32).config)
    assert len(calls) == 2


def test_weights_that_do_not_fit_the_configuration() -> None:
    case = build()
    with pytest.raises(ShapeMismatch, match=r"w13 has shape \(8, 192, 64\), needs \(8, 200, 64\)"):
        build_kernel(weights_of(case), FusedMoEConfig(8, 2, 64, 100))
    with pytest.raises(ShapeMismatch, match="w13_bias is missing"):
        build_kernel(weights_of(case), FusedMoEConfig(8, 2, 64, 96, has_bias=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_scale_that_is_not_finite(bad: float) -> None:
    weights = build()
    weights.quant_config.w2_scale[3, 7] = bad
    with pytest.raises(NonFiniteWeight, match=r"w2_scale holds NaN or infinity \(expert 3, row 7\)"):
        weights_of(weights)


def test_a_named_backend_that_cannot_run_here() -> None:
    case = build()
    config = FusedMoEConfig(8, 2, 64, 96, moe_backend="triton", platform=Platform.cpu())
    with pytest.raises(UnsupportedDeployment, match=r"platform is cpu, needs cuda or rocm.*Would work: cpu"):
        build_kernel(weights_of(case), config)


@pytest.mark.parametrize("backend", [Int8MoeBackend.TRITON, Int8MoeBackend.CPU])
def test_conversion_returns_canonical_tensors_as_they_are(backend: Int8MoeBackend) -> None:
    case = build()
    w13, w2 = convert_to_int8_moe_kernel_format(backend, case.w13, case.w2)
    assert w13 is case.w13 and w2 is case.w2
