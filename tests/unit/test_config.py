"""Configurations refuse values that make no sense, naming field, value and need."""

from __future__ import annotations

import pytest

from int8moe.config import FusedMoEConfig, FusedMoEParallelConfig, MoEActivation
from int8moe.device import Platform
from int8moe.errors import ConfigError

GOOD = dict(num_experts=8, experts_per_token=2, hidden_dim=64, intermediate_size_per_partition=32)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("num_experts", 0, "num_experts is 0, needs an integer of 1"),
        ("num_experts", True, "num_experts is True"),
        ("experts_per_token", 9, "experts_per_token is 9, needs an integer of 1 to 8"),
        ("hidden_dim", 64.0, "hidden_dim is 64.0"),
        ("intermediate_size_per_partition", -1, "intermediate_size_per_partition is -1"),
        ("num_local_experts", 9, "num_local_experts is 9, needs an integer of 0 to 8"),
        ("activation", "mish", "activation is 'mish', needs one of: silu"),
        ("activation", 3, "activation is 3"),
        ("is_act_and_mul", 1, "is_act_and_mul is 1, needs True or False"),
        ("swiglu_limit", -2.0, "swiglu_limit is -2.0"),
        ("moe_backend", None, "moe_backend is None, needs one of: auto"),
        ("platform", "a100", "platform is 'a100', needs a Platform"),
        ("routing_method", "softmax", "routing_method is 'softmax'"),
        ("moe_parallel_config", None, "moe_parallel_config is None"),
    ],
)
def test_wrong_value_is_refused(field: str, value: object, says: str) -> None:
    with pytest.raises(ValueError, match="needs") as caught:
        FusedMoEConfig(**{**GOOD, field: value})  # type: ignore[arg-type]
    assert isinstance(caught.value, ConfigError)
    assert says in str(caught.value)


def test_names_and_torch_dtypes_are_accepted() -> None:
    torch = pytest.importorskip("torch")
    config = FusedMoEConfig(**GOOD, in_dtype=torch.float16, activation="gelu_pytorch_tanh")
    assert config.in_dtype == "float16"
    assert config.activation is MoEActivation.GELU_TANH


def test_local_experts_default_to_the_even_share() -> None:
    counts = [
        FusedMoEConfig(
            **{**GOOD, "num_experts": 10},
            moe_parallel_config=FusedMoEParallelConfig(ep_size=4, ep_rank=rank, use_ep=True),
        ).num_local_experts
        for rank in range(4)
    ]
    assert counts == [3, 3, 2, 2]


def test_parallel_sizes_and_ranks() -> None:
    with pytest.raises(ValueError, match="tp_rank is 2, needs 0 to 1"):
        FusedMoEParallelConfig(tp_size=2, tp_rank=2)
    with pytest.raises(ValueError, match="ep_size is 2 with use_ep False"):
        FusedMoEParallelConfig(ep_size=2)


def test_swigluoai_has_its_own_limit() -> None:
    assert FusedMoEConfig(**GOOD, activation="swigluoai").swiglu_limit == 7.0
    assert FusedMoEConfig(**GOOD).swiglu_limit is None


def test_experts_bytes() -> None:
    config = FusedMoEConfig(**GOOD)
    assert config.experts_bytes(2) == 8 * (64 * 64 + 64 * 32) * 2
    assert config.experts_bytes(1, scale_bytes=4) == 8 * (64 * 64 + 64 * 32 + (64 + 64) * 4)


def test_named_platforms() -> None:
    assert Platform.named("RTX 3090") is Platform.named("rtx-3090")
    assert Platform.named("NVIDIA GeForce RTX 3090").capability == (8, 6)
    with pytest.raises(ValueError, match="device is 'nonsense', needs one of: current, cpu, t4"):
        Platform.named("nonsense")


def test_current_platform_can_be_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INT8MOE_DEVICE", "h200")
    assert Platform.current().name == "NVIDIA H200"
    monkeypatch.setenv("INT8MOE_DEVICE", "cpu")
    assert Platform.current().kind == "cpu"
    assert Platform.current() is Platform.current()


def test_rocm_is_read_from_topology_files(tmp_path) -> None:
    from int8moe.device import _probe_rocm

    cpu, gpu = tmp_path / "0", tmp_path / "1"
    (gpu / "mem_banks" / "0").mkdir(parents=True)
    cpu.mkdir()
    (cpu / "properties").write_text("simd_count 0\n")
    (gpu / "properties").write_text("simd_count 1216\ngfx_target_version 90402\n")
    (gpu / "mem_banks" / "0" / "properties").write_text("heap_type 1\nsize_in_bytes 206141652992\n")
    found = _probe_rocm(str(tmp_path))
    assert found is not None and (found.kind, found.name) == ("rocm", "AMD Instinct MI300X")
    assert found.memory_bytes == 206141652992
    assert _probe_rocm(str(tmp_path / "absent")) is None
