"""The Humming backend without a GPU: rules at their boundary, conversion's bookkeeping, routing, activations.

The package's own kernels run in the `gpu` tests only. Its Python code runs here where it is installed, with the
device's description and its one conversion kernel replaced.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import humming_offline
import humming_rounding
from cases import ADVERSARIAL, Case, build
from int8moe.backends.humming import cache, layout
from int8moe.backends.humming.support import (
    BatchedHummingGroupedExperts,
    HummingGroupedExperts,
    HummingIndexedExperts,
)
from int8moe.backends.reference.run import activate
from int8moe.config import FusedMoEConfig, FusedMoEParallelConfig, MoEActivation
from int8moe.device import Platform
from int8moe.errors import AlreadyConverted, MissingPackage, NoBackendSupported, SelfCheckFailed, ShapeMismatch
from int8moe.oracle.int8 import Int8MoeBackend, _humming_int8_weight_schema, convert_to_int8_moe_kernel_format
from int8moe.rules import INT32_SAFE_K, Deployment
from int8moe.schemes import W8A8_CHANNEL_TOKEN, W8A8_TENSOR_TENSOR, W8A16_CHANNEL, Scheme

CLASSES = (BatchedHummingGroupedExperts, HummingGroupedExperts, HummingIndexedExperts)
H200 = Platform.named("h200")
TRITON_RUNS = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"


# --- rules ---------------------------------------------------------------------------------------------------------


def reasons(cls: type, scheme: Scheme = W8A8_CHANNEL_TOKEN, batched: bool | None = None, **changes: Any) -> list[str]:
    """Why `cls` refuses a layer that it accepts without `changes`."""
    batched = cls.__name__.startswith("Batched") if batched is None else batched
    base: dict[str, Any] = dict(
        num_experts=8, experts_per_token=2, hidden_dim=64, intermediate_size_per_partition=96, platform=H200,
        moe_parallel_config=FusedMoEParallelConfig(use_batched_activation_format=batched),
    )  # fmt: skip
    config = FusedMoEConfig(**{**base, **changes})
    deployment = Deployment(config, *scheme, config.moe_parallel_config.activation_format)
    return [v.reason for v in cls.verdicts(deployment) if not v.ok]


def on(**changes: Any) -> dict[str, Any]:
    return dict(platform=replace(H200, **changes))


WIDE = 16 * 1024  # with odd multiples of 16, 1024 threads of 16 values each
BOUNDARIES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "platform": (on(kind="cuda"), on(kind="rocm"), "platform is rocm, needs cuda"),
    "capability": (
        on(capability=(7, 5)) | dict(in_dtype="float16"),
        on(capability=(7, 4)) | dict(in_dtype="float16"),
        "compute capability is 7.4, needs at least 7.5",
    ),
    "bfloat16": (on(capability=(8, 0)), on(capability=(7, 5)), "needs at least 8.0 (bfloat16"),
    "newest": (on(capability=(12, 1)), on(capability=(13, 0)), "compute capability is 13.0, needs at most 12.9"),
    "compiler": (
        on(cuda_toolkit=H200.cuda_toolkit - {"nvrtc"}),
        on(cuda_toolkit=H200.cuda_toolkit - {"nvrtc", "nvcc"}),
        "needs nvrtc or nvcc among them (Humming compiles its kernels",
    ),
    "cuda_headers": (
        on(cuda_toolkit=H200.cuda_toolkit),
        on(cuda_toolkit=H200.cuda_toolkit - {"cuda_runtime.h"}),
        "needs cuda_runtime.h among them",
    ),
    "cccl_headers": (
        on(cuda_toolkit=H200.cuda_toolkit),
        on(cuda_toolkit=H200.cuda_toolkit - {"CCCL headers"}),
        "needs CCCL headers among them",
    ),
    "package": (
        on(packages=frozenset({"humming-kernels"})),
        on(packages=frozenset({"torch", "triton"})),
        "pip install 'int8moe[humming]'",
    ),
    "scheme": (dict(scheme=W8A8_CHANNEL_TOKEN), dict(scheme=W8A8_TENSOR_TENSOR), "scheme is w8a8 (tensor"),
    "weight_only": (dict(scheme=W8A8_CHANNEL_TOKEN), dict(scheme=W8A16_CHANNEL), "scheme is w8a16"),
    "dtype": (dict(in_dtype="float16"), dict(in_dtype="float32"), "in_dtype is float32, needs bfloat16 or float16"),
    "hidden": (dict(hidden_dim=2048 + 16), dict(hidden_dim=2048 + 8), "hidden_dim is 2056, needs a multiple of 16"),
    "intermediate": (
        dict(intermediate_size_per_partition=16),
        dict(intermediate_size_per_partition=24),
        "intermediate_size_per_partition is 24, needs a multiple of 16",
    ),
    "wide_hidden": (dict(hidden_dim=WIDE - 16), dict(hidden_dim=WIDE + 16), "at most 1024 times its largest power"),
    "wide_intermediate": (
        dict(intermediate_size_per_partition=WIDE + 64),
        dict(intermediate_size_per_partition=WIDE + 16),
        "at most 1024 times its largest power",
    ),
    "int32": (dict(hidden_dim=131_072), dict(hidden_dim=INT32_SAFE_K + 8), f"needs at most {INT32_SAFE_K}"),
    "lora": (dict(is_lora_enabled=False), dict(is_lora_enabled=True), "is_lora_enabled is yes, needs no"),
    "gated": (
        dict(is_act_and_mul=False, activation="relu2"),
        dict(is_act_and_mul=False, activation="swigluoai"),
        "is_act_and_mul is no, needs yes",
    ),
}


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
@pytest.mark.parametrize("name", BOUNDARIES)
def test_each_rule_passes_and_fails_at_its_boundary(cls: type, name: str) -> None:
    passes, fails, reason = BOUNDARIES[name]
    assert not reasons(cls, **passes)
    assert any(reason in r for r in reasons(cls, **fails)), reasons(cls, **fails)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_each_class_has_one_activation_format(cls: type) -> None:
    batched = cls is BatchedHummingGroupedExperts
    assert not reasons(cls, batched=batched)
    assert any("activation format" in r for r in reasons(cls, batched=not batched))


@pytest.mark.parametrize("activation", MoEActivation)
def test_every_activation_bias_and_limit_is_accepted(activation: MoEActivation) -> None:
    for cls in CLASSES:
        assert not reasons(cls, activation=activation, has_bias=True, swiglu_limit=2.0)


# --- schema and conversion -----------------------------------------------------------------------------------------


def test_schema_says_channel_or_tensor() -> None:
    weight = torch.zeros(3, 64, 32, dtype=torch.int8)
    channel = _humming_int8_weight_schema(weight, torch.ones(3, 64, 1))
    assert channel == layout.CHANNEL_SCHEMA
    for one_a_tensor in (torch.ones(3, 1), torch.ones(3, 1, 1), torch.ones(3, 63)):
        assert _humming_int8_weight_schema(weight, one_a_tensor) == {**channel, "strategy": "tensor"}


def some_layer(kind: str = "namespace", scale_name: str = "{}_scale", E: int = 2, H: int = 64, I: int = 96) -> Any:
    """A holder of canonical tensors, as plain attributes or as a module's parameters."""
    g = torch.Generator().manual_seed(0)
    tensors = {
        "w13_weight": torch.randint(-128, 128, (E, 2 * I, H), dtype=torch.int8, generator=g),
        "w2_weight": torch.randint(-128, 128, (E, H, I), dtype=torch.int8, generator=g),
        scale_name.format("w13"): torch.rand(E, 2 * I, generator=g),
        scale_name.format("w2"): torch.rand(E, H, generator=g),
    }
    if kind == "namespace":
        return SimpleNamespace(**tensors)
    module = torch.nn.Module()
    for name, tensor in tensors.items():
        module.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    return module


def convert(layer: Any) -> Any:
    w13, w2 = getattr(layer, "w13_weight", None), getattr(layer, "w2_weight", None)
    return convert_to_int8_moe_kernel_format(Int8MoeBackend.HUMMING, w13, w2, layer=layer)  # type: ignore[arg-type]


def test_conversion_needs_a_layer() -> None:
    with pytest.raises(ValueError, match="layer is None, needs the layer that holds w13_weight"):
        convert(None)


def test_conversion_names_what_is_missing() -> None:
    layer = some_layer()
    del layer.w2_weight
    with pytest.raises(ValueError, match="layer has no w2_weight"):
        convert(layer)
    layer = some_layer()
    del layer.w2_scale
    with pytest.raises(ValueError, match="neither w2_weight_scale nor w2_scale"):
        convert(layer)


def test_converted_weights_are_not_converted_again() -> None:
    layer = some_layer()
    layer.w13_weight = torch.zeros(2, 192, 16, dtype=torch.int32)
    with pytest.raises(AlreadyConverted, match="w13_weight is in Humming's layout already"):
        convert(layer)


def test_absent_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "humming", None)
    layer = some_layer()
    before = layer.w13_weight
    with pytest.raises(MissingPackage, match=r"pip install 'int8moe\[humming\]'") as caught:
        convert(layer)
    assert isinstance(caught.value, ImportError)
    assert layer.w13_weight is before and before.dtype is torch.int8


@pytest.mark.parametrize("kind", ["namespace", "module"])
def test_scales_are_renamed_once(kind: str) -> None:
    layer = some_layer(kind)
    values = layer.w13_scale.clone()
    for _ in range(2):
        layout.rename_scale(layer, "w13")
        assert layer.w13_weight_scale.shape == (2, 192, 1) and torch.equal(layer.w13_weight_scale[..., 0], values)
        assert not hasattr(layer, "w13_scale") and hasattr(layer, "w2_scale")
    assert isinstance(layer.w13_weight_scale, torch.nn.Parameter) == (kind == "module")


def test_scales_of_either_name_get_three_dimensions() -> None:
    layer = some_layer(scale_name="{}_weight_scale")
    layer.w13_scale = torch.zeros(1)  # the old name beside the new one: the new one counts
    values = layer.w13_weight_scale.clone()
    layout.rename_scale(layer, "w13")
    assert torch.equal(layer.w13_weight_scale, values.unsqueeze(-1)) and not hasattr(layer, "w13_scale")


def test_weights_of_a_wrong_kind_are_refused() -> None:
    with pytest.raises(ShapeMismatch, match=r"w2_weight is torch.float32 \(2, 64, 64\), needs int8"):
        layout.to_native("w2", torch.zeros(2, 64, 64), torch.ones(2, 64, 1), layout.CHANNEL_SCHEMA)
    with pytest.raises(ShapeMismatch, match="w2_weight has 40 columns, needs a multiple of 16"):
        layout.to_native("w2", torch.zeros(2, 64, 40, dtype=torch.int8), torch.ones(2, 64, 1), layout.CHANNEL_SCHEMA)


def flat(weight: torch.Tensor) -> torch.Tensor:
    """Humming's flat layout, restated: pieces of 16 columns outermost, then tiles of 64 rows, then rows."""
    experts, rows, columns = weight.shape
    n, k = layout.padded(rows), layout.padded(columns)
    tiles = torch.nn.functional.pad(weight, (0, k - columns, 0, n - rows)).reshape(experts, n // 64, 64, k // 16, 16)
    return tiles.permute(0, 3, 1, 2, 4).contiguous().reshape(experts, n, k).view(torch.int32)


@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), st.booleans())
def test_unpacking_inverts_packing(experts: int, rows: int, columns: int, is_flat: bool) -> None:
    rows, columns = rows * 16, columns * 16
    weight = torch.randint(-128, 128, (experts, rows, columns), dtype=torch.int8)
    if is_flat:
        native = flat(weight)
    else:
        pad = (0, layout.padded(columns) - columns, 0, layout.padded(rows) - rows)
        native = torch.nn.functional.pad(weight, pad).view(torch.int32)
    assert torch.equal(layout.from_native(native, rows, columns, is_flat), weight)


def test_float16_scales_keep_their_precision() -> None:
    scale = torch.tensor([[1e-7, 3e-7, 2e-6], [0.5, 1.0, 0.25], [0.0, 0.0, 0.0], [1e5, 2e5, 3e5]])
    rows, common = layout.split_scale(scale, torch.float16)
    assert common is not None and rows.isfinite().all() and (rows <= 1).all()
    assert torch.allclose(rows.float() * common[:, None], scale, rtol=2**-11, atol=0)
    rows, common = layout.split_scale(scale, torch.bfloat16)
    assert common is None and torch.allclose(rows.float(), scale, rtol=2**-8, atol=0)


# --- the package's own Python code, where it is installed ------------------------------------------------------------


def pretend(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package believes in a device of this compute capability."""
    pytest.importorskip("humming", reason="humming-kernels is not installed")
    if torch.cuda.is_available():
        pytest.skip("a real device answers; the gpu tests use it")
    humming_offline.pretend(version, monkeypatch.setattr)


@pytest.fixture(params=[75, 80, 89, 90, 100, 120])
def sm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    pretend(request.param, monkeypatch)
    return request.param


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(90, monkeypatch)


@pytest.mark.parametrize("kind", ["namespace", "module"])
def test_the_package_converts_and_we_invert(sm: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "CHUNK_BYTES", 2 * 96 * 64)  # two experts of w2 at a time, one of w13
    layer = some_layer(kind, E=5)
    canonical = {"w13": layer.w13_weight.data.clone(), "w2": layer.w2_weight.data.clone()}
    scales = layer.w13_scale.data.clone()
    w13, w2 = convert(layer)
    assert w13 is layer.w13_weight and w2 is layer.w2_weight
    assert w13.shape == (5, 192, 16) and w2.shape == (5, 64, 32) and w13.dtype is torch.int32
    assert torch.equal(layer.w13_weight_scale[..., 0], scales) and not hasattr(layer, "w13_scale")
    for name, weight in canonical.items():
        rows, columns = weight.shape[1:]
        config = layout.layer_config(rows, columns, 5, torch.bfloat16, False, torch.device("cpu"))
        native = getattr(layer, f"{name}_weight").data
        if config.use_flat_weight:
            assert torch.equal(native, flat(weight))
        assert torch.equal(layout.from_native(native, rows, columns, bool(config.use_flat_weight)), weight)
    with pytest.raises(AlreadyConverted):
        convert(layer)


def test_the_package_converts_with_one_scale_a_tensor(sm: int) -> None:
    layer = some_layer()
    layer.w13_scale, layer.w2_scale = torch.ones(2), torch.ones(2, 1)
    w13, _ = convert(layer)
    assert w13.shape == (2, 192, 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_and_biases_are_padded_and_permuted(sm: int, dtype: torch.dtype) -> None:
    config = layout.layer_config(96, 48, 3, dtype, True, torch.device("cpu"))
    assert (config.shape_n, config.shape_k, config.pad_shape_n, config.pad_shape_k) == (128, 64, 32, 16)
    scale = torch.rand(3, 96) + 0.5
    native, common = layout.native_scale(scale, config)
    assert native.shape == (3, 1, 128) and native.dtype is dtype and native.is_contiguous()
    rows, want = layout.split_scale(scale, dtype)
    assert common is want or torch.equal(common, want)  # type: ignore[arg-type]
    padded = torch.nn.functional.pad(rows, (0, 32))
    assert torch.equal(native[:, 0].sort(-1).values, padded.sort(-1).values)
    bias = layout.native_bias(torch.rand(3, 96), config)
    assert bias is not None and bias.shape == (3, 128) and bias.dtype is dtype and bias.is_contiguous()
    assert layout.native_bias(None, config) is None


# --- kernel choices, from the package's own heuristics ---------------------------------------------------------------


def plan_of(gemm_type: str, *shape: int, dtype: str = "float16", **changes: Any) -> Any:
    run = pytest.importorskip("int8moe.backends.humming.run", reason="triton is not installed")
    config = FusedMoEConfig(*(shape or (8, 2, 64, 96)), in_dtype=dtype, platform=H200, **changes)
    return run.make_plan(config, gemm_type, torch.device("cuda", 0))


@pytest.mark.parametrize("gemm_type", ["indexed", "grouped_contiguous", "grouped_masked"])
def test_no_kernel_splits_k_over_blocks(sm: int, gemm_type: str) -> None:
    plan = plan_of(gemm_type, 8, 2, 4096, 1408)
    for gemm in (plan.w13, plan.w2):
        tunings = [json.loads(t.text) for t in gemm.tunings]
        assert not any(t["use_stream_k"] for t in tunings)
        assert gemm.tunings[0].low == 0 and gemm.tunings[-1].high > 2**31
        assert all(a.high == b.low and a.text != b.text for a, b in pairwise(gemm.tunings))
        assert all(t.block_m == json.loads(t.text)["block_shape"][0] for t in gemm.tunings)
        assert gemm.tuning(1) is gemm.tunings[0] and gemm.tuning(10**7) is gemm.tunings[-1]
        assert (gemm.rows, gemm.columns) in ((2816, 4096), (4096, 1408))


def test_the_package_itself_splits_k(hopper: None) -> None:
    """If it stops, `unsplit` can go."""
    from humming.tune import get_heuristics_config

    config = layout.layer_config(2048, 768, 128, torch.bfloat16, False, torch.device("cuda", 0))
    assert get_heuristics_config(config, shape_m=8, gemm_type="indexed", device=0)["use_stream_k"]


def test_few_rows_get_narrower_tiles_where_these_fill_the_gpu(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from int8moe.backends.humming import launch

    width = lambda plan, rows: json.loads(plan.w2.tuning(rows).text)["block_shape"][1]
    plan = plan_of("indexed", 8, 2, 4096, 14336, dtype="bfloat16")
    assert (width(plan, 2), width(plan, 4096)) == (64, 256)  # 2 experts x 4096 rows: 32 tiles of 128 for 132 SMs
    first = json.loads(plan.w2.tuning(2).text)
    assert first["warp_shape"][1] == 16 and first["num_stages"] == 8
    monkeypatch.setattr(launch, "NARROWER", False)
    assert width(plan_of("indexed", 8, 2, 4096, 14336, dtype="bfloat16"), 2) == 128


def test_plans_of_one_shape_share_a_key(hopper: None) -> None:
    one, same = plan_of("indexed"), plan_of("indexed")
    keys = {one.key(), plan_of("grouped_contiguous").key(), plan_of("indexed", dtype="bfloat16").key()}
    keys |= {plan_of("indexed", activation="gelu").key(), plan_of("indexed", 16, 2, 64, 96).key()}
    assert one.key() == same.key() and len(keys) == 5


# --- rules against what the package says -----------------------------------------------------------------------------


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 1)])
def test_the_package_has_heuristics_for_each_gpu_the_rules_admit(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    pretend(capability[0] * 10 + capability[1], monkeypatch)
    from humming.tune import get_heuristics_class

    assert not reasons(HummingGroupedExperts, **on(capability=capability), in_dtype="float16")
    assert get_heuristics_class(0)


def test_the_package_has_none_for_a_newer_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(130, monkeypatch)
    from humming.tune import get_heuristics_class

    assert reasons(HummingGroupedExperts, **on(capability=(13, 0)))
    with pytest.raises(KeyError):
        get_heuristics_class(0)


@pytest.mark.parametrize("width", [16, 768, WIDE - 16, WIDE + 16, WIDE + 64, 2 * WIDE - 32, 2 * WIDE + 32, 131_072])
def test_the_package_quantises_the_rows_that_the_rules_admit(hopper: None, width: int) -> None:
    from humming import dtypes
    from humming.config import ProcessInputProblemConfig
    from humming.tune.process_input import get_process_input_tuning_intervals

    problem = ProcessInputProblemConfig(
        input_dtype=dtypes.bfloat16, hidden_size=width, quant_mode="dynamic_token", quant_dtype="int8"
    )
    admitted = not reasons(HummingGroupedExperts, hidden_dim=width)
    try:
        intervals = get_process_input_tuning_intervals(problem, False)
    except Exception:
        intervals = []
    assert bool(intervals) == admitted


# --- what is compiled, and where it is kept --------------------------------------------------------------------------


def test_kernels_are_compiled_ahead_once_each(
    hopper: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from humming.kernel.humming import HummingKernel

    from int8moe.backends.humming import compile as ahead

    plan = plan_of("indexed", 8, 2, 4096, 14336)
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(HummingKernel, "prepare_kernels", lambda *a: asked.append(a))
    monkeypatch.setattr(ahead, "_load_quantizers", lambda *_: None)
    monkeypatch.setattr(ahead, "REPORT_SECONDS", -1.0)
    ticks: list[tuple[int, int]] = []
    with caplog.at_level("INFO", logger="int8moe"):
        done = ahead.compile_ahead(plan, 2 * 8192, torch.device("cuda", 0), lambda *t: ticks.append(t))
    assert len(asked) == len(set(asked)) == done.kernels == len(ticks) and ticks[-1] == (len(asked), len(asked))
    assert "compiling Humming kernels: 1 of" in caplog.text
    assert len(ahead.jobs(plan, [2])) == 2 and len(ahead.jobs(plan, 1)) == 2 < done.kernels
    assert all(json.loads(compute) == {"gemm_type": "indexed"} for _, compute, _, _ in asked)


def test_what_the_package_keeps_under_its_folders(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables are the package's own."""
    jit = pytest.importorskip("humming.utils.jit", reason="humming-kernels is not installed")
    for variable, name in (("HUMMING_CACHE_DIR", "cache"), ("HUMMING_TMP_DIR", "tmp")):
        monkeypatch.setenv(variable, str(tmp_path / name))
    cache._forget_folders()
    assert (jit.get_humming_cache_dir(), jit.get_humming_tmp_dir()) == (str(tmp_path / "cache"), str(tmp_path / "tmp"))
    assert jit.get_humming_lock_dir().startswith(str(tmp_path / "tmp"))
    monkeypatch.undo()
    cache._forget_folders()


@pytest.mark.parametrize("broken", ["a file in its place", "no right to write"])
def test_a_folder_that_cannot_be_used_is_named_once_and_replaced(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    folder = tmp_path / "kernels"
    if broken == "a file in its place":
        folder.write_text("")
        reason = "File exists"
    else:
        reason = "Read-only file system"
        real = cache.why_unusable
        monkeypatch.setattr(cache, "why_unusable", lambda f: reason if f == folder else real(f))
    monkeypatch.setenv("HUMMING_CACHE_DIR", str(folder))
    monkeypatch.setenv("HUMMING_TMP_DIR", str(tmp_path / "locks"))
    with caplog.at_level("WARNING"):
        cache.prepare_folders()
        cache.prepare_folders()
    (record,) = caplog.records
    text = record.getMessage()
    assert str(folder) in text and reason in text and "HUMMING_CACHE_DIR names another folder" in text
    instead = Path(os.environ["HUMMING_CACHE_DIR"])
    assert instead != folder and instead.is_dir() and cache.cache_folder() == instead
    cache._remove(str(instead), os.getpid() + 1)
    assert instead.is_dir()
    cache._remove(str(instead), os.getpid())
    assert not instead.exists()
    monkeypatch.undo()
    cache._forget_folders()


def test_only_nvcc_is_named_where_nvrtc_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for pieces, want in (({"nvcc"}, "nvcc"), ({"nvcc", "nvrtc"}, None), (set(), None)):
        monkeypatch.delenv("HUMMING_COMPILER", raising=False)
        here = replace(H200, cuda_toolkit=frozenset(pieces))
        monkeypatch.setattr(Platform, "current", staticmethod(lambda here=here: here))
        cache.use_compiler_that_is_here()
        assert os.environ.get("HUMMING_COMPILER") == want
    monkeypatch.delenv("HUMMING_COMPILER", raising=False)


# --- the operators ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not TRITON_RUNS or torch.cuda.is_available(), reason="runs in the interpreter's process")
@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_emulated_calls_are_one_node_of_torch_compile(cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
    case = build(M=6, dtype="float16")
    experts = emulate(cls, case, monkeypatch)
    nodes: list[str] = []

    def backend(module: Any, _: Any) -> Any:
        nodes.extend(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return module.forward

    compiled = torch.compile(lambda x, w, i: experts.apply(x * 2, w, i), backend=backend, fullgraph=True)
    arguments = case.hidden_states, case.topk_weights, case.topk_ids
    got = compiled(*arguments)
    assert torch.equal(got, experts.apply(case.hidden_states * 2, case.topk_weights, case.topk_ids))
    assert sum("humming_experts" in name for name in nodes) == 1 and len(nodes) == 2


# --- first use -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not TRITON_RUNS or torch.cuda.is_available(), reason="runs in the interpreter's process")
@pytest.mark.parametrize("asked", ["humming", "auto"])
def test_emulated_first_use_refuses_a_wrong_layer_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, asked: str
) -> None:
    """Weights in a wrong order: by name it raises; under "auto" the WARNING names it, and the next one is taken."""
    from int8moe import layer
    from int8moe.backends.base import FusedMoEExperts
    from int8moe.weights import ExpertWeights

    case = build(dtype="float16", E=3)
    real = FusedMoEExperts.process_weights_after_loading

    def load(self: Any, held: Any) -> None:
        if type(self) not in CLASSES:
            return real(self, held)
        q = self.quant_config
        part = replace(
            case, config=self.config, w13=held.w13_weight.roll(1, 1), w2=held.w2_weight, quant_config=q
        )  # fmt: skip
        self._run = emulate(type(self), part, monkeypatch)._run

    monkeypatch.setattr(FusedMoEExperts, "process_weights_after_loading", load)
    monkeypatch.setattr(layer, "_checked", {})
    monkeypatch.setattr(
        "int8moe.oracle.int8.Int8MoEKernelOracle.priority_backends",
        lambda self: ([Int8MoeBackend.HUMMING], "for this test"),
    )
    q = case.quant_config
    weights = ExpertWeights(case.w13, case.w2, q.w1_scale, q.w2_scale, None, None)
    config = replace(case.config, platform=H200, moe_backend=asked)
    if asked == "humming":
        with pytest.raises(SelfCheckFailed) as caught:
            layer.build_kernel(weights, config)
        text = str(caught.value)
        assert "moe_backend 'humming' was asked for, and HummingGroupedExperts differs from the reference" in text
    else:
        with pytest.raises(NoBackendSupported), caplog.at_level("WARNING"):
            layer.build_kernel(weights, config)
        assert len(caplog.records) == 2
        text = caplog.records[0].getMessage()
        assert "HUMMING (HummingGroupedExperts) was skipped" in text
    numbers = re.search(r"relative error ([\d.]+), at most ([\d.]+) expected", text)
    assert numbers and float(numbers[1]) > float(numbers[2]) == layer.SELF_CHECK_TOLERANCE


# --- activations: the C++ expressions, compiled for the host ---------------------------------------------------------


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function of (config, gate, up) that evaluates `activation_source` in C++."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    run = pytest.importorskip("int8moe.backends.humming.run", reason="triton is not installed")
    folder = tmp_path_factory.mktemp("activation")
    made: dict[str, Any] = {}

    def evaluate(config: FusedMoEConfig, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        source = run.activation_source(config)["activation_impl"]
        if source not in made:
            path = folder / f"{len(made)}.so"
            code = (
                "#include <cmath>\n#include <cstring>\nusing namespace std;\n"
                "static float __int_as_float(int i) { float f; memcpy(&f, &i, 4); return f; }\n"
                f"static float one(float a, float b) {{ return {source}; }}\n"
                'extern "C" void all(const float* a, const float* b, float* h, long n)'
                " { for (long i = 0; i < n; i++) h[i] = one(a[i], b[i]); }\n"
            )
            command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(path)]
            subprocess.run(command, input=code, text=True, check=True)
            made[source] = ctypes.CDLL(str(path))
        gate, up, h = gate.contiguous(), up.contiguous(), torch.empty_like(gate)
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (gate, up, h)]
        made[source].all(*pointers, ctypes.c_long(gate.numel()))
        return h

    return evaluate


@pytest.mark.parametrize("limit", [None, 1.0, 7.0])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", MoEActivation)
def test_expressions_compute_the_contract(compiled: Any, activation: MoEActivation, gated: bool, limit: Any) -> None:
    if activation.is_swigluoai and not gated:
        pytest.skip("swigluoai is a gated activation")
    config = FusedMoEConfig(
        8, 2, 64, 64, activation=activation, is_act_and_mul=gated, swiglu_limit=limit, platform=H200
    )
    gate = torch.linspace(-30, 30, 4001)
    up = torch.linspace(-9, 11, 4001).flip(0)
    if not gated:
        y = gate[None]
    elif activation.is_interleaved:
        y = torch.stack([gate, up], -1).reshape(1, -1)
    else:
        y = torch.cat([gate, up])[None]
    torch.testing.assert_close(compiled(config, gate, up), activate(config, y)[0], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("activation", MoEActivation)
def test_expressions_turn_nan_into_infinity(compiled: Any, activation: MoEActivation) -> None:
    config = FusedMoEConfig(8, 2, 64, 64, activation=activation, swiglu_limit=1.0, platform=H200)
    nan, one = torch.tensor([float("nan")]), torch.ones(1)
    assert compiled(config, nan, one).isinf().all() and compiled(config, one, nan).isinf().all()


# --- routing, in Triton's interpreter or on a GPU --------------------------------------------------------------------


@pytest.mark.skipif(TRITON_RUNS, reason="the routing tests run in this process")
def test_routing_in_the_interpreter() -> None:
    """The routing tests below, in a process of their own: the interpreter is chosen before Triton is imported."""
    pytest.importorskip("triton", reason="triton is not installed")
    command = [
        sys.executable,
        *("-m", "pytest", "-q", "-p", "no:cacheprovider"),
        *("-k", "slots or sum_over or emulated"),
        __file__,
    ]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, text=True, capture_output=True)
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


def route(
    M: int, topk: int, E: int, dtype: torch.dtype, local: list[int] | None, wrong: bool
) -> tuple[Any, torch.Tensor]:
    """A route, and each slot's local expert (-1 where it lives elsewhere, -2 where the id or the map is wrong)."""
    from int8moe.backends.humming.kernels import Route

    device = "cuda" if torch.cuda.is_available() else "cpu"
    g = torch.Generator().manual_seed(M)
    ids = torch.rand(M, E, generator=g).topk(topk, dim=-1).indices.to(dtype)
    if wrong:
        ids[0, 0], ids[-1, -1] = -1, E + 91
    index = torch.arange(E, dtype=torch.int32)
    if local is not None:
        index = torch.full((E,), -1, dtype=torch.int32)
        index[local] = torch.arange(len(local), dtype=torch.int32)
        if wrong:
            index[local[0]] = len(local)
    inside = (ids >= 0) & (ids < E)
    expert = torch.where(inside, index[ids.clamp(0, E - 1).long()].long(), -2).flatten()
    if local is not None:
        expert[expert == len(local)] = -2
    expert_map = None if local is None else index.to(device)
    return Route(ids.to(device), expert_map, E, E if local is None else len(local)), expert


ROUTES: dict[str, tuple[Any, ...]] = {
    "one_slot": (1, 1, 1, torch.int64, None, False),
    "wrong_ids": (5, 2, 8, torch.int32, None, True),
    "many": (20, 8, 12, torch.int64, None, False),
    "elsewhere": (19, 2, 8, torch.int32, [1, 4, 6], False),
    "wrong_map": (19, 2, 8, torch.int64, [1, 4, 6], True),
    "all_elsewhere": (3, 1, 50, torch.int64, [49], False),
    "more_than_a_block": (300, 4, 5, torch.int64, None, False),
    "many_experts": (6, 4, 40, torch.int64, None, False),
}


@pytest.mark.skipif(not TRITON_RUNS, reason="runs in the interpreter's process")
@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize("block_m", [8, 144])
def test_slots_are_tiled_by_expert(name: str, block_m: int) -> None:
    from int8moe.backends.humming.kernels import align, count

    r, expert = route(*ROUTES[name])
    counts = count(r)
    tiles = align(r, counts, block_m)
    want_ids, want_experts = [], []
    for e in range(r.num_local_experts):
        slots = (expert == e).nonzero().flatten().tolist()
        assert int(counts[e]) == len(slots)
        blocks = -(-len(slots) // block_m)
        want_ids += slots + [r.slots] * (blocks * block_m - len(slots))
        want_experts += [e] * blocks
    assert int(tiles["num_tokens_padded"]) == len(want_ids) <= len(tiles["sorted_ids"])
    assert tiles["sorted_ids"][: len(want_ids)].tolist() == want_ids
    assert tiles["expert_ids"][: len(want_experts)].tolist() == want_experts


@pytest.mark.skipif(not TRITON_RUNS, reason="runs in the interpreter's process")
@pytest.mark.parametrize("name", ROUTES)
def test_slots_get_rows_in_expert_order(name: str) -> None:
    from int8moe.backends.humming.kernels import count, group

    r, expert = route(*ROUTES[name])
    counts = count(r)
    order = [s for e in range(r.num_local_experts) for s in (expert == e).nonzero().flatten().tolist()]
    want = torch.full((r.slots,), -1)
    want[order] = torch.arange(len(order))
    first = torch.cat([torch.zeros(1, dtype=torch.long), counts.cpu().long().cumsum(0)])
    rows, offsets = group(r, counts)
    assert torch.equal(rows.flatten().cpu().long(), want) and torch.equal(offsets.cpu().long(), first)


@pytest.mark.skipif(not TRITON_RUNS, reason="runs in the interpreter's process")
@pytest.mark.parametrize("name", [n for n in ROUTES if n != "more_than_a_block"])
@pytest.mark.parametrize("weighted", [True, False])
def test_sum_over_slots_is_in_order_skips_absent_ones_and_marks_wrong_ones(name: str, weighted: bool) -> None:
    from int8moe.backends.humming.kernels import combine, count, group

    r, expert = route(*ROUTES[name])
    tokens, topk = r.ids.shape
    g = torch.Generator().manual_seed(1)
    values = torch.randn(r.slots, 1040, generator=g).half()
    values[expert < 0] = float("nan")  # never written by the GEMM
    weights = torch.rand(tokens, topk, generator=g)
    want = torch.zeros(tokens, 1040)
    for k in range(topk):
        term = values.view(tokens, topk, -1)[:, k].float() * (weights[:, k : k + 1] if weighted else 1.0)
        absent, wrong = ((expert.view(tokens, topk)[:, k] == e)[:, None] for e in (-1, -2))
        want = torch.where(wrong, torch.nan, torch.where(absent, want, want + term))
    to = lambda t: t.to(r.ids.device)
    given_weights = to(weights) if weighted else None
    got = combine(r, to(values), None, given_weights).cpu()
    torch.testing.assert_close(
        got, want.half(), rtol=1e-3, atol=1e-6, equal_nan=True
    )  # a GPU may fuse multiply and add
    rows, _ = group(r, count(r))
    moved = torch.full_like(values, float("nan"))
    for slot, row in enumerate(rows.flatten().tolist()):
        if row >= 0:
            moved[row] = values[slot]
    moved_sum = combine(r, to(moved), rows, given_weights).cpu()
    torch.testing.assert_close(moved_sum, got, rtol=0, atol=0, equal_nan=True)


# --- the three layouts, with the package's two operations restated in torch ------------------------------------------


@dataclass(frozen=True)
class EmulatedPlan:
    """What the layouts ask of a GEMM's plan."""

    rows: int
    block_m: int

    def tuning(self, slots: int) -> Any:
        return SimpleNamespace(block_m=self.block_m)


def emulate(cls: type, case: Case, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The experts of `case`, with process_input and the GEMMs done by torch; what they leave unwritten is NaN or 77."""
    from int8moe.backends.humming import launch, run

    def quantize(gemm: EmulatedPlan, x: torch.Tensor, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
        assert x.is_contiguous()
        y = x.float() if how["activation_impl"] == launch.NAN_TO_INFINITY else activate(case.config, x.float())
        codes, scale = humming_rounding.quantize(y)
        codes = codes.to(torch.int8)
        written = torch.arange(len(x))
        if how.get("layout") == "scatter":
            target = how["scatter_idx"].flatten().long()
            source = torch.arange(len(x)).repeat_interleave(how["scatter_idx"].shape[1])
            keep = (target >= 0) & (target < len(target))
            out, out_scale = (
                torch.full((len(target), y.shape[1]), 77, dtype=torch.int8),
                torch.full((len(target), 1), torch.nan),
            )
            out[target[keep]], out_scale[target[keep]] = codes[source[keep]], scale[source[keep]]
            return out, out_scale
        if how.get("layout") == "grouped_mask":
            per_expert = len(x) // len(how["expert_tokens"])
            written = written[written % per_expert < how["expert_tokens"].repeat_interleave(per_expert)]
        if "num_valid_tokens" in how:
            written = written[: int(how["num_valid_tokens"])]
        out, out_scale = torch.full_like(codes, 77), torch.full_like(scale, torch.nan)
        out[written], out_scale[written] = codes[written], scale[written]
        return out, out_scale

    def multiply(
        plan: Any, gemm: Any, codes: torch.Tensor, scale: torch.Tensor, slots: int, tuning: Any,
        out: torch.Tensor | None = None, top_k: int = 1, **meta: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        out = torch.full((slots, gemm.plan.rows), torch.nan, dtype=plan.dtype) if out is None else out
        jobs: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        if plan.gemm_type == "indexed":
            assert len(codes) * top_k == slots
            for tile in range(int(meta["num_tokens_padded"]) // tuning.block_m):
                ids = meta["sorted_ids"][tile * tuning.block_m : (tile + 1) * tuning.block_m].long()
                ids = ids[ids < slots]
                jobs.append((int(meta["expert_ids"][tile]), ids // top_k, ids))
        elif plan.gemm_type == "grouped_contiguous":
            bounds = meta["expert_layout"].tolist()
            rows = [torch.arange(a, b) for a, b in pairwise(bounds)]
            jobs = [(e, r, r) for e, r in enumerate(rows)]
        else:
            per_expert = slots // len(meta["expert_layout"])
            rows = [e * per_expert + torch.arange(n) for e, n in enumerate(meta["expert_layout"].tolist())]
            jobs = [(e, r, r) for e, r in enumerate(rows)]
        for e, source, target in jobs:
            y = (codes[source].double() @ gemm.weight[e].double().T).float() * scale[source] * gemm.scale[e]
            out[target] = (y if gemm.bias is None else y + gemm.bias[e]).to(out.dtype)
        return out

    monkeypatch.setattr(launch, "quantize", quantize)
    monkeypatch.setattr(launch, "multiply", multiply)
    experts, q = cls(case.config, case.quant_config), case.quant_config
    runner = experts._run
    w13, w2 = EmulatedPlan(case.w13.shape[1], 16), EmulatedPlan(case.w2.shape[1], 24)
    local, hidden = int(case.config.num_local_experts or 0), case.config.hidden_dim
    plan = launch.LayerPlan(runner.gemm_type, w13, w2, run.activation_source(case.config), runner.dtype, local, hidden)
    monkeypatch.setitem(run.PLANS, "emulated", plan)
    runner.plan_key = "emulated"
    runner.gemms = (
        launch.Gemm(w13, case.w13, q.w1_scale, None, q.w1_bias),
        launch.Gemm(w2, case.w2, q.w2_scale, None, q.w2_bias),
    )
    return experts


EMULATED = (
    "bias", "limit_swigluoai", "not_gated_relu2", "one_token", "no_tokens", "all_on_one_expert", "empty_experts",
    "topk_is_all", "one_expert_only", "int32_ids", "expert_map", "expert_map_none_local", "zero_rows",
    "nan_and_inf_rows", "router_weight_on_input", "router_weight_on_input_topk3",
)  # fmt: skip


@pytest.mark.skipif(not TRITON_RUNS or torch.cuda.is_available(), reason="runs in the interpreter's process")
@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
@pytest.mark.parametrize("name", EMULATED)
def test_emulated_layouts_agree_with_the_reference(cls: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # bfloat16 is left out: Triton's interpreter truncates where it should round
    case = build(**{**ADVERSARIAL[name], "dtype": "float16"})
    got = case.call(emulate(cls, case, monkeypatch))
    assert got.dtype is torch.float16 and relative_error(got, case.reference_output()) <= 2e-2


@pytest.mark.skipif(not TRITON_RUNS or torch.cuda.is_available(), reason="runs in the interpreter's process")
@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_emulated_wrong_ids_mark_their_token_or_raise(cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
    case = build(M=6, dtype="float16")
    experts = emulate(cls, case, monkeypatch)
    want = case.call(experts)
    case.topk_ids[1, 0], case.topk_ids[4, 1] = 8, -1
    got = case.call(experts)
    assert got[[1, 4]].isnan().all() and torch.equal(got[[0, 2, 3, 5]], want[[0, 2, 3, 5]])
    monkeypatch.setenv("INT8MOE_VALIDATE", "1")
    with pytest.raises(ValueError, match="topk_ids holds -1, needs 0 to 7"):
        case.call(experts)


@pytest.mark.skipif(not TRITON_RUNS or torch.cuda.is_available(), reason="runs in the interpreter's process")
def test_emulated_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    case = build(M=5, topk=1, dtype="float16", E=3)
    experts = emulate(BatchedHummingGroupedExperts, case, monkeypatch)
    counts = torch.tensor([2, 0, 5])
    x = torch.randn(3, 5, 64).half()
    x[torch.arange(5) >= counts[:, None]] = torch.nan
    got = experts._run.apply_batched(x, counts)
    assert got.shape == x.shape and not got[torch.arange(5) >= counts[:, None]].any()
    for e, n in enumerate(counts.tolist()):
        alone = experts.apply(x[e, :n], torch.ones(n, 1), torch.full((n, 1), e))
        assert torch.equal(got[e, :n], alone)
    with pytest.raises(ShapeMismatch, match=r"hidden_states has shape \(5, 64\), needs \(3, tokens, 64\)"):
        experts._run.apply_batched(x[0], counts)
    with pytest.raises(ShapeMismatch, match=r"expert_num_tokens has shape \(2,\), needs \(3,\)"):
        experts._run.apply_batched(x, counts[:2])
    with pytest.raises(ShapeMismatch, match=r"hidden_states has dtype torch\.float32, needs torch\.float16"):
        experts._run.apply_batched(x.float(), counts)


# --- on a GPU, with the package --------------------------------------------------------------------------------------


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    assert torch.equal(got.isnan(), want.isnan()), "NaN in different places"
    got, want = got.double().nan_to_num(0.0), want.double().nan_to_num(0.0)
    return float((got - want).norm() / want.norm()) if want.norm() else float(got.norm())


GPU_CASES = ("bias", "limit_swigluoai", "expert_map", "empty_experts", "nan_and_inf_rows", "no_tokens")


@pytest.mark.gpu
@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
@pytest.mark.parametrize("name", GPU_CASES)
def test_agrees_with_the_reference(cls: type, name: str) -> None:
    pytest.importorskip("humming", reason="humming-kernels is not installed")
    case = build(**ADVERSARIAL[name])
    assert relative_error(case.run(cls, "cuda"), case.reference_output()) <= 2e-2
