"""Measured records reorder backends only where they fit and the gain is clear."""

from __future__ import annotations

import json
from importlib import resources

import pytest

from int8moe.config import FusedMoEConfig, FusedMoEParallelConfig
from int8moe.device import Platform
from int8moe.oracle.int8 import (
    Int8MoeBackend,
    Int8MoEKernelOracle,
    _get_priority_backends,
    backend_to_kernel_cls,
    select_int8_moe_backend,
)
from int8moe.records import load_records, rank, read_records
from int8moe.schemes import kInt8DynamicTokenSym, kInt8StaticChannelSym

T, H, C = Int8MoeBackend.TRITON, Int8MoeBackend.HUMMING, Int8MoeBackend.CPU
CONFIG = FusedMoEConfig(99, 8, 2048, 768, platform=Platform.named("h200"))


def line(backend: str, tokens: int, us: float, **other: object) -> str:
    row = dict(
        device="NVIDIA H200", backend=backend, experts_class="X", E=99, topk=8, H=2048, I=768, dtype="bfloat16",
        M=tokens, latency_us=us,
    )  # fmt: skip
    return json.dumps(row | other)


@pytest.fixture
def write(tmp_path, monkeypatch):
    def put(*lines: str) -> None:
        (tmp_path / "a.jsonl").write_text("\n".join(lines))
        monkeypatch.setenv("INT8MOE_RECORDS", str(tmp_path))

    return put


def test_without_records_the_static_order_holds() -> None:
    assert _get_priority_backends(CONFIG) == [T, H, C]


def test_a_faster_measured_backend_moves_ahead(write) -> None:
    write(line("TRITON", 1, 30), line("HUMMING", 1, 33), line("TRITON", 2048, 700), line("HUMMING", 2048, 317))
    assert _get_priority_backends(CONFIG) == [H, T, C]
    report = Int8MoEKernelOracle(CONFIG, kInt8StaticChannelSym, kInt8DynamicTokenSym).explain()
    assert report.chosen_backend == "HUMMING"
    assert "measured" in report.order_reason and "a.jsonl" in report.order_reason


def test_a_difference_within_noise_changes_nothing(write) -> None:
    write(line("TRITON", 1, 100), line("HUMMING", 1, 98))
    assert _get_priority_backends(CONFIG) == [T, H, C]


@pytest.mark.parametrize(
    "other", [dict(device="NVIDIA A100"), dict(E=64), dict(dtype="float16"), dict(I=1536), dict(topk=2), dict(H=4096)]
)
def test_a_record_of_something_else_does_not_count(write, other) -> None:
    write(line("TRITON", 1, 100, **other), line("HUMMING", 1, 10, **other))
    assert _get_priority_backends(CONFIG) == [T, H, C]


def test_only_common_token_counts_are_compared(write) -> None:
    write(line("TRITON", 1, 100), line("HUMMING", 2048, 10))
    assert rank(CONFIG) is None


def test_lines_that_are_not_records_are_skipped_with_a_warning(write, caplog) -> None:
    write("{", '{"M": 1}', "[]", line("TRITON", 1, -5), line("TRITON", 1, 7))
    with caplog.at_level("WARNING"):
        mine = [r for r in load_records() if r.E == 99]
    assert [r.latency_us for r in mine] == [7]
    assert len(caplog.records) == 4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (line("TRITON", 1, float("nan")), "latency_us is nan, needs a number above 0"),
        (line("TRITON", 1, float("inf")), "latency_us is inf, needs a number above 0"),
        (line("TRITON", "1", 5), "M is '1', needs a whole number above 0"),
        (line("TRITON", True, 5), "M is True, needs a whole number above 0"),
        (line("TRITON", 1, 5, experts_class=3), "experts_class is 3, needs text"),
        ('{"device": "NVIDIA H200"}', "it has no backend"),
        ("[1]", "it is no JSON object"),
    ],
)
def test_a_wrong_line_is_said_once_with_what_it_needs(write, caplog, wrong, message) -> None:
    """However many questions one explanation asks of the records."""
    write(wrong)
    with caplog.at_level("WARNING"):
        explained()
    (warning,) = caplog.records
    assert warning.getMessage().endswith(f"line 1 is not a layer record, skipped: {message}")


# --- classes within a backend, and bfloat16 --------------------------------------------------------------------------

INDEXED, GROUPED, BATCHED = "HummingIndexedExperts", "HummingGroupedExperts", "BatchedHummingGroupedExperts"


def explained(**changes: object):
    config = FusedMoEConfig(99, 8, 2048, 768, platform=Platform.named("h200"), **changes)
    return config, Int8MoEKernelOracle(config, kInt8StaticChannelSym, kInt8DynamicTokenSym).explain()


def test_without_records_classes_keep_the_contract_order() -> None:
    config, report = explained(moe_backend="humming")
    assert select_int8_moe_backend(config)[1].__name__ == report.chosen_class == GROUPED
    assert [b.order_reason for b in report.backends] == ["", "", ""]


def test_the_fastest_measured_class_is_chosen(write) -> None:
    write(
        line("HUMMING", 1, 44, experts_class=GROUPED), line("HUMMING", 1, 37, experts_class=INDEXED),
        line("HUMMING", 512, 209, experts_class=GROUPED), line("HUMMING", 512, 210, experts_class=INDEXED),
        line("HUMMING", 2048, 1, experts_class=GROUPED),
    )  # fmt: skip
    config, report = explained(moe_backend="humming")
    assert select_int8_moe_backend(config)[1].__name__ == report.chosen_class == INDEXED
    humming = next(b for b in report.backends if b.backend == "HUMMING")
    assert f"over M=[1, 512]: {INDEXED} 1.00, {GROUPED} 1.09" in humming.order_reason and "a.jsonl" in str(report)
    assert [c.__name__ for c in backend_to_kernel_cls(H)] == [BATCHED, GROUPED, INDEXED]  # the contract's order
    assert report.to_dict()["backends"][1]["order_reason"] == humming.order_reason


def test_a_faster_class_that_cannot_run_is_not_chosen(write) -> None:
    write(line("HUMMING", 1, 10, experts_class=INDEXED), line("HUMMING", 1, 20, experts_class=BATCHED))
    _, report = explained(
        moe_backend="humming", moe_parallel_config=FusedMoEParallelConfig(use_batched_activation_format=True)
    )
    assert report.chosen_class == BATCHED


def test_a_class_of_another_format_does_not_speak_for_its_backend(write) -> None:
    write(
        line("TRITON", 1, 100, experts_class="BatchedTritonExperts"), line("HUMMING", 1, 10, experts_class=INDEXED)
    )  # fmt: skip
    assert _get_priority_backends(CONFIG) == [T, H, C]
    write(line("TRITON", 1, 100, experts_class="TritonExperts"), line("HUMMING", 1, 10, experts_class=INDEXED))
    assert _get_priority_backends(CONFIG) == [H, T, C]


def test_bf16_is_no_backend_but_explain_says_where_it_is_faster(write) -> None:
    write(
        line("TRITON", 1, 30, experts_class="TritonExperts"), line("BF16", 1, 40, experts_class="TorchGrouped"),
        line("TRITON", 8192, 120, experts_class="TritonExperts"), line("BF16", 8192, 100, experts_class="TorchGrouped"),
    )  # fmt: skip
    assert rank(CONFIG) is None and _get_priority_backends(CONFIG) == [T, H, C]
    _, report = explained()
    assert report.chosen_backend == "TRITON"
    (note,) = report.notes
    assert "TRITON (TritonExperts) was measured slower than the same layer in bfloat16 at M=8192 (1.20 times" in note


def test_explain_says_where_another_backend_is_faster(write) -> None:
    """The choice holds for all token counts, by their mean; what it costs at some of them is said."""
    times = []
    for m, triton, humming in ((1, 30, 60), (8, 50, 49), (64, 90, 60)):
        times.append(line("TRITON", m, triton, experts_class="TritonExperts"))
        times.append(line("HUMMING", m, humming, experts_class="HummingIndexedExperts"))
    write(*times)
    _, report = explained()
    assert report.chosen_backend == "TRITON"
    (note,) = report.notes
    assert note == "TRITON (TritonExperts) was measured slower than HUMMING at M=64 (1.50 times as long)"


def test_shipped_records_are_records() -> None:
    """The package's folder of measured times is installed with it, and every line in it counts."""
    folder = resources.files("int8moe") / "measured"
    assert folder.is_dir()
    lines = [t for f in folder.iterdir() if f.name.endswith(".jsonl") for t in f.read_text().splitlines() if t.strip()]
    assert len(read_records(folder)) == len(lines)
