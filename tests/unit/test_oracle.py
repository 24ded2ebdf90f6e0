"""The oracle: every rule across its boundary, selection order, errors, and answers for machines not here."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from int8moe.backends.base import FusedMoEExperts
from int8moe.backends.cpu.support import CPUExpertsInt8
from int8moe.backends.reference.support import ReferenceExperts
from int8moe.config import FusedMoEConfig, FusedMoEParallelConfig
from int8moe.device import CATALOGUE, Platform
from int8moe.errors import NoBackendSupported, UnsupportedDeployment
from int8moe.oracle import base as oracle_base
from int8moe.oracle.base import MoEKernelOracle
from int8moe.oracle.int8 import (
    KERNEL_CLASSES,
    Int8MoeBackend,
    Int8MoEKernelOracle,
    backend_to_kernel_cls,
    convert_to_int8_moe_kernel_format,
    map_int8_backend,
    select_int8_moe_backend,
)
from int8moe.rules import INT32_SAFE_K, Deployment
from int8moe.schemes import (
    SCHEMES_BY_FLAG,
    W8A8_CHANNEL_TOKEN,
    kInt8DynamicTensorSym,
    kInt8DynamicTokenSym,
    kInt8StaticChannelSym,
    kInt8StaticTensorSym,
)

QWEN3 = dict(num_experts=128, experts_per_token=8, hidden_dim=2048, intermediate_size_per_partition=768)
BATCHED = FusedMoEParallelConfig(use_batched_activation_format=True)
ALL_CLASSES = [ReferenceExperts, *(c for classes in KERNEL_CLASSES.values() for c in classes)]


def config(device: str | Platform = "h200", **other: Any) -> FusedMoEConfig:
    platform = Platform.named(device) if isinstance(device, str) else device
    return FusedMoEConfig(**{**QWEN3, "platform": platform, **other})  # type: ignore[arg-type]


def oracle(c: FusedMoEConfig, scheme: str = "w8a8") -> Int8MoEKernelOracle:
    return Int8MoEKernelOracle(c, *SCHEMES_BY_FLAG[scheme])


def test_enum_values_are_their_names() -> None:
    assert [(b.name, b.value) for b in Int8MoeBackend] == [(n, n) for n in ("TRITON", "HUMMING", "CPU")]


def test_map_int8_backend() -> None:
    assert map_int8_backend("humming") is Int8MoeBackend.HUMMING
    for wrong in ("marlin", "TRITON", "", "auto"):
        with pytest.raises(ValueError, match=r"triton.*humming.*cpu") as caught:
            map_int8_backend(wrong)
        assert repr(wrong) in str(caught.value)


def test_unknown_backend_has_no_classes() -> None:
    with pytest.raises(ValueError, match="MARLIN"):
        backend_to_kernel_cls("MARLIN")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="MARLIN"):
        convert_to_int8_moe_kernel_format("MARLIN", None, None)  # type: ignore[arg-type]


def test_class_order_is_the_contract() -> None:
    names = {b.name: [c.__name__ for c in backend_to_kernel_cls(b)] for b in Int8MoeBackend}
    assert names == {
        "TRITON": ["TritonExperts", "BatchedTritonExperts"],
        "HUMMING": ["BatchedHummingGroupedExperts", "HummingGroupedExperts", "HummingIndexedExperts"],
        "CPU": ["CPUExpertsInt8"],
    }


@pytest.mark.parametrize(
    ("device", "backend", "cls"),
    [
        ("t4", "TRITON", "TritonExperts"),
        ("a100", "TRITON", "TritonExperts"),
        ("rtx-3090", "TRITON", "TritonExperts"),
        ("rtx-4090", "TRITON", "TritonExperts"),
        ("l40s", "TRITON", "TritonExperts"),
        ("h100", "TRITON", "TritonExperts"),
        ("h200", "TRITON", "TritonExperts"),
        ("b200", "TRITON", "TritonExperts"),
        ("mi300x", "TRITON", "TritonExperts"),
        ("zen3", "CPU", "CPUExpertsInt8"),
        ("zen4", "CPU", "CPUExpertsInt8"),
        ("sapphire-rapids", "CPU", "CPUExpertsInt8"),
        ("graviton3", "CPU", "CPUExpertsInt8"),
        ("v100", None, None),
    ],
)
def test_every_catalogue_machine_gets_a_sensible_answer(device: str, backend: str | None, cls: str | None) -> None:
    report = oracle(config(device)).explain()
    assert (report.chosen_backend, report.chosen_class) == (backend, cls), str(report)


def test_the_catalogue_test_covers_the_catalogue() -> None:
    marks = test_every_catalogue_machine_gets_a_sensible_answer.pytestmark  # type: ignore[attr-defined]
    assert {row[0] for row in marks[0].args[1]} == set(CATALOGUE)


def test_batched_format_gets_the_batched_class() -> None:
    assert oracle(config(moe_parallel_config=BATCHED)).explain().chosen_class == "BatchedTritonExperts"


def test_hidden_2880_is_judged_by_rules() -> None:
    """gpt-oss: each class's answer follows from a rule that names hidden_dim, or there is none."""
    report = oracle(config(hidden_dim=2880, intermediate_size_per_partition=2880)).explain()
    assert report.chosen_backend == "TRITON"
    for backend in report.backends:
        for entry in backend.classes:
            for verdict in entry.verdicts:
                if not verdict.ok and verdict.fact == "hidden_dim":
                    assert "2880" in verdict.reason and "needs" in verdict.reason


# --- each rule of each class, across its boundary ------------------------------------------------------------------


def _deployment(c: FusedMoEConfig, weight_key: Any, activation_key: Any) -> Deployment:
    return Deployment(c, weight_key, activation_key, c.moe_parallel_config.activation_format)


def _fitting(cls: type[FusedMoEExperts]) -> Deployment:
    """A deployment that every rule of `cls` accepts."""
    batched = cls.__name__.startswith("Batched")
    for device in ("h200", "zen3"):
        c = config(device, **(dict(moe_parallel_config=BATCHED) if batched else {}))
        d = _deployment(c, *W8A8_CHANNEL_TOKEN)
        if all(v.ok for v in cls.verdicts(d)):
            return d
    pytest.skip(f"{cls.__name__} accepts no deployment; each refusal: {cls.verdicts(d)}")


def _with(d: Deployment, **changes: Any) -> Deployment:
    keys = {k: changes.pop(k) for k in ("weight_key", "activation_key") if k in changes}
    c = replace(d.config, **changes)
    return Deployment(
        c, keys.get("weight_key", d.weight_key), keys.get("activation_key", d.activation_key),
        c.moe_parallel_config.activation_format,
    )  # fmt: skip


def _platform(d: Deployment, **changes: Any) -> Deployment:
    return _with(d, platform=replace(d.config.platform, **changes))


def _breaks(d: Deployment) -> dict[str, list[Deployment]]:
    """For each fact, deployments just outside what some class accepts."""
    flipped = replace(
        d.config.moe_parallel_config,
        use_batched_activation_format=not d.config.moe_parallel_config.use_batched_activation_format,
    )
    return {
        "platform": [_platform(d, kind=k) for k in ("xpu", "cpu", "cuda")],
        "compute capability": [_platform(d, capability=c) for c in ((7, 4), (7, 9), (13, 0))],
        "CUDA toolkit": [
            _platform(d, cuda_toolkit=d.config.platform.cuda_toolkit - gone)
            for gone in ({"nvrtc", "nvcc"}, {"cuda_runtime.h"}, {"CCCL headers"})
        ],
        "installed packages": [_platform(d, packages=frozenset({"torch"})), _platform(d, packages=frozenset())],
        "instruction set": [_platform(d, isa=frozenset())],
        "scheme": [
            _with(d, weight_key=kInt8StaticChannelSym, activation_key=kInt8DynamicTensorSym),
            _with(d, weight_key=kInt8StaticTensorSym, activation_key=kInt8DynamicTokenSym),
        ],
        "activation format": [_with(d, moe_parallel_config=flipped)],
        "in_dtype": [_with(d, in_dtype="float64"), _with(d, in_dtype="bfloat16", activation_key=None)],
        "activation": [_with(d, activation=a) for a in ("gelu", "gelu_tanh", "relu2", "swigluoai")],
        "is_act_and_mul": [
            _with(d, is_act_and_mul=False, activation="swigluoai"),
            _with(d, is_act_and_mul=False),
        ],
        "swiglu_limit": [_with(d, swiglu_limit=1.0)],
        "has_bias": [_with(d, has_bias=True)],
        "is_lora_enabled": [_with(d, is_lora_enabled=True)],
        "use_ep": [
            _with(d, moe_parallel_config=replace(d.config.moe_parallel_config, use_ep=True, ep_size=2))
        ],
        "hidden_dim": [_with(d, hidden_dim=h) for h in (INT32_SAFE_K + 1, 2049, 2048 + 16, 2048 + 32, 2048 + 64)],
        "intermediate_size_per_partition": [
            _with(d, intermediate_size_per_partition=i) for i in (INT32_SAFE_K + 1, 769, 768 + 16, 768 + 32, 768 + 64)
        ],
    }  # fmt: skip


@pytest.mark.parametrize("cls", ALL_CLASSES, ids=lambda c: c.__name__)
def test_each_rule_has_a_deployment_that_only_just_fails_it(cls: type[FusedMoEExperts]) -> None:
    good = _fitting(cls)
    breaks = _breaks(good)
    for index, rule in enumerate(cls.rules):
        assert rule.check(good).ok
        candidates = breaks[rule.fact.name]
        failing = [d for d in candidates if not rule.check(d).ok]
        if not failing and rule.guards:  # a rule for other deployments: break it inside its guard
            inside = [e for row in breaks.values() for d in row for e in _breaks(d)[rule.fact.name] if rule.applies(e)]
            failing = [d for d in inside if not rule.check(d).ok]
        assert failing, f"{cls.__name__}, rule {index} on {rule.fact.name}: nothing tried here fails it"
        verdict = rule.check(failing[0])
        assert verdict.reason.startswith(f"{rule.fact.name} is ") and f"needs {rule.needs}" in verdict.reason
        supported, reason = cls.is_supported_config(
            failing[0].config, failing[0].weight_key, failing[0].activation_key, failing[0].activation_format
        )
        assert not supported and verdict.reason in (reason or "")


def test_int32_bound_is_exact() -> None:
    fits, _ = CPUExpertsInt8.is_supported_config(config("zen3", hidden_dim=INT32_SAFE_K), *W8A8_CHANNEL_TOKEN)
    over, reason = CPUExpertsInt8.is_supported_config(config("zen3", hidden_dim=INT32_SAFE_K + 1), *W8A8_CHANNEL_TOKEN)
    assert fits and not over and f"hidden_dim is {INT32_SAFE_K + 1}, needs at most {INT32_SAFE_K}" in (reason or "")
    assert 127 * 127 * INT32_SAFE_K < 2**31 <= 127 * 127 * (INT32_SAFE_K + 1)


def test_an_unknown_fact_counts_as_failing() -> None:
    bare = replace(Platform.named("a100"), capability=None)
    report = oracle(config(bare)).explain()
    assert report.chosen_backend is None
    assert any("compute capability is unknown, needs at least" in r for r in report.backends[0].classes[0].reasons)


# --- deciding ------------------------------------------------------------------------------------------------------


def test_select_returns_backend_and_class() -> None:
    backend, cls = select_int8_moe_backend(config("zen3"))
    assert backend is Int8MoeBackend.CPU and cls is CPUExpertsInt8


def test_a_named_backend_is_never_replaced() -> None:
    with pytest.raises(ValueError, match="platform is cuda, needs cpu") as caught:
        select_int8_moe_backend(config("h200", moe_backend="cpu"))
    assert isinstance(caught.value, UnsupportedDeployment)
    assert "CPU" in str(caught.value) and "Would work: triton" in str(caught.value)
    assert caught.value.report.requested == "cpu"


def test_an_unknown_name_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'marlin'.*triton.*humming.*cpu"):
        select_int8_moe_backend(config(moe_backend="marlin"))


def test_nothing_fits() -> None:
    with pytest.raises(NotImplementedError, match=r"INT8MOE_LOGGING_LEVEL=DEBUG.*int8moe explain") as caught:
        select_int8_moe_backend(config("v100"))
    assert isinstance(caught.value, NoBackendSupported)
    text = str(caught.value)
    assert str(kInt8StaticChannelSym) in text and str(kInt8DynamicTokenSym) in text
    assert {b.backend for b in caught.value.report.backends} == {"TRITON", "HUMMING", "CPU"}


def test_logs_once(caplog: pytest.LogCaptureFixture) -> None:
    oracle_base._logged.clear()
    with caplog.at_level(logging.DEBUG, logger="int8moe"):
        for _ in range(3):
            select_int8_moe_backend(config("zen3"))
    info = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    debug = [r.getMessage() for r in caplog.records if r.levelno == logging.DEBUG]
    assert info == ["Using CPU Int8 MoE backend out of potential backends: ['TRITON', 'HUMMING', 'CPU']."]
    assert len(debug) == 2 and all("does not support the deployment configuration since" in line for line in debug)
    assert "platform is cpu, needs cuda" in debug[0]


def test_a_log_line_suppressed_by_its_level_is_not_spent(caplog: pytest.LogCaptureFixture) -> None:
    oracle_base._logged.clear()
    with caplog.at_level(logging.WARNING, logger="int8moe"):
        select_int8_moe_backend(config("zen3"))
    with caplog.at_level(logging.INFO, logger="int8moe"):
        select_int8_moe_backend(config("zen3"))
    assert len(caplog.records) == 1


def test_try_backend_gives_class_or_reason() -> None:
    o = oracle(config("h200"))
    assert o.try_backend(Int8MoeBackend.TRITON)[1] is None
    cls, reason = o.try_backend(Int8MoeBackend.CPU)
    assert cls is None and "platform is cuda, needs cpu" in (reason or "")


@pytest.mark.parametrize("device", list(CATALOGUE))
@pytest.mark.parametrize("scheme", list(SCHEMES_BY_FLAG))
@pytest.mark.parametrize("asked", ["auto", "triton", "humming", "cpu"])
def test_explain_and_select_agree(device: str, scheme: str, asked: str) -> None:
    o = oracle(config(device, moe_backend=asked), scheme)
    report = o.explain()
    try:
        backend, cls = o.select()
    except (ValueError, NotImplementedError):
        assert report.chosen_backend is None
    else:
        assert (report.chosen_backend, report.chosen_class) == (backend.value, cls.__name__)
    for entry in report.backends:
        for c in entry.classes:
            assert c.supported == (not c.reasons)
    json.dumps(report.to_dict())
    assert str(report)


def test_a_second_oracle_is_small() -> None:
    """What another scheme's oracle has to write."""

    class Toy(MoEKernelOracle[Int8MoeBackend]):
        name = "Toy"

        def backend_to_kernel_cls(self, backend):
            return [CPUExpertsInt8]

        def priority_backends(self):
            return [Int8MoeBackend.CPU], "only one"

        def map_backend(self, runner_backend):
            return map_int8_backend(runner_backend)

    assert Toy(config("zen3"), *W8A8_CHANNEL_TOKEN).select() == (Int8MoeBackend.CPU, CPUExpertsInt8)
    assert "Toy" in Toy(config("zen3"), *W8A8_CHANNEL_TOKEN).make_log_backend(Int8MoeBackend.CPU, [])


def test_choosing_imports_no_framework() -> None:
    code = (
        "import sys; sys.argv = ['int8moe', 'explain', '--experts', '8', '--topk', '2', '--hidden', '64',"
        " '--intermediate', '64', '--device', 'a100', '--json']\n"
        "from int8moe.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as e: assert e.code == 0, e.code\n"
        "bad = {'torch', 'triton', 'humming', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
