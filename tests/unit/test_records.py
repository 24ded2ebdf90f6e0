"""Measured records reorder backends only where they fit and the gain is clear."""

from __future__ import annotations

import json

import pytest

from int8moe.config import FusedMoEConfig
from int8moe.device import Platform
from int8moe.oracle.int8 import Int8MoeBackend, Int8MoEKernelOracle, _get_priority_backends
from int8moe.records import load_records, rank
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
