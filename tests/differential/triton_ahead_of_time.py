"""Compiles every Triton kernel as a layer call would launch it, for GPUs that are not here: what the interpreter hides.

Run as `python triton_ahead_of_time.py 80 90 [--few]`, without TRITON_INTERPRET. Launch code runs on CPU tensors with
each kernel replaced by a recorder, so that signatures, specialisations and tiles are the real ones.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from int8moe.backends.triton import configs, kernels, launch, run
from int8moe.tuning import space

POINTERS = {
    torch.int8: "*i8", torch.int32: "*i32", torch.int64: "*i64", torch.float32: "*fp32", torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
}  # fmt: skip
LAUNCH_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "launch_pdl")
KERNELS = {
    name: module for module in (kernels, launch.specialized) for name in vars(module) if name.endswith("_kernel")
}


class Recorder:
    """Stands for a kernel: a launch compiles instead of running."""

    def __init__(self, function: Any, capability: int, compiled: dict[str, Any]) -> None:
        self.function, self.capability, self.compiled = function, capability, compiled

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert all(0 < n < 2**31 for n in grid) and all(n < 65536 for n in grid[1:]), grid
        return self.launch

    def launch(self, *args: Any, **named: Any) -> None:
        options = {k: named.pop(k) for k in LAUNCH_OPTIONS if k in named}
        values = {**dict(zip(self.function.arg_names, args, strict=False)), **named}
        constants = {p.name for p in self.function.params if p.is_constexpr}
        general = {p.name for p in self.function.params if p.do_not_specialize}
        signature, constexprs, attributes = {}, {}, {}
        for index, name in enumerate(self.function.arg_names):
            value = values[name]
            aligned = False
            if isinstance(value, (TensorDescriptor, launch.LaidOutDescriptor)):
                block = ",".join(map(str, value.block_shape))
                layout = f",{value.layout!r}" if isinstance(value, launch.LaidOutDescriptor) else ""
                signature[name] = f"tensordesc<{POINTERS[value.base.dtype][1:]}[{block}]{layout}>"
            elif isinstance(value, torch.Tensor):
                signature[name], aligned = POINTERS[value.dtype], value.data_ptr() % 16 == 0
            elif name in constants or value is None or (value == 1 and name not in general):
                signature[name], constexprs[name] = "constexpr", value
            else:
                assert isinstance(value, int) and not isinstance(value, bool), (name, value)
                signature[name], aligned = (
                    "i32" if -(2**31) <= value < 2**31 else "i64",
                    value % 16 == 0 and name not in general,
                )
            if aligned:
                attributes[(index,)] = [["tt.divisibility", 16]]
        key = f"{self.function.__name__} {signature} {constexprs} {attributes} {options}"
        if key not in self.compiled:
            language = GluonASTSource if self.function.is_gluon() else ASTSource
            source = language(fn=self.function, signature=signature, constexprs=constexprs, attrs=attributes)
            self.compiled[key] = triton.compile(source, target=GPUTarget("cuda", self.capability, 32), options=options)
            self.check(key, constexprs, options)

    def check(self, key: str, constexprs: dict[str, Any], options: dict[str, Any]) -> None:
        """The float steps are those of docs/numerics.md, products are the intended ones, and the tile fits."""
        kernel = self.compiled[key]
        ptx = kernel.asm["ptx"]
        float_steps = re.sub(r"// begin inline asm.*?// end inline asm", "", ptx, flags=re.DOTALL)  # written as meant
        limit = configs.SHARED_MEMORY[divmod(self.capability, 10)]
        assert kernel.metadata.shared <= limit, f"{kernel.metadata.shared} bytes of shared memory: {key}"
        inexact = re.findall(r"div\.(?:full|approx)\S*|(?:add|sub|mul)\S*\.ftz\S*", float_steps)
        assert not inexact, (inexact, key)
        a = re.search(r"'A': '(?:\*|tensordesc<)(\w+)", key)  # its elements, by pointer or by descriptor
        int8 = "_gemm" in key and a is not None and a[1] == "i8"
        float_products = "_gemm" in key and (
            (a is not None and a[1] == "fp32") or self.capability < 80 or constexprs.get("BLOCK_M") == 1
        )
        assert float_products or not re.search(r"fma\.rn\S*\.f32", float_steps), f"a fused multiply-add: {key}"
        if int8 and self.capability >= 80:
            assert re.search(r"mma\S*\.s32\.s8\.s8|tcgen05\.mma\S*kind::i8", ptx), (
                f"no int8 tensor-core instruction: {key}"
            )
        if int8 and self.capability == 90 and constexprs.get("BLOCK_M", 64) >= 64:
            assert "wgmma" in ptx, f"no wgmma: {key}"


def layer(
    hidden: int, intermediate: int, experts: int, *, activation: str = "silu", gated: bool = True, bias: bool = False,
    interleaved: bool = False, limit: float | None = None, activations: str = "token",
) -> launch.Layer:  # fmt: skip
    n = intermediate * (2 if gated else 1)
    int8 = lambda *shape: torch.empty(shape, dtype=torch.int8)
    floats = lambda *shape: torch.empty(shape)
    return launch.Layer(
        int8(experts, n, hidden), launch.aligned(int8(experts, hidden, intermediate)), floats(experts, n),
        floats(experts, hidden), floats(experts, n) if bias else None, floats(experts, hidden) if bias else None,
        activation, gated, interleaved, 1.702, limit, activations,
    )  # fmt: skip


def call(
    weights: launch.Layer, tokens: int, topk: int, dtype: torch.dtype, *, mapped: bool = False, on_input: bool = False
) -> None:
    experts = weights.num_local
    x = torch.empty(tokens, weights.w13.shape[2], dtype=dtype)
    ids = torch.empty(tokens, topk, dtype=torch.int32 if mapped else torch.int64)
    expert_map = torch.empty(2 * experts, dtype=torch.int32) if mapped else None
    run.run_standard(
        weights, x, torch.empty(tokens, topk), ids, expert_map, 2 * experts if mapped else experts, on_input
    )


def call_specialized(weights: launch.Layer, dtype: torch.dtype, every: int = 1) -> None:
    """Both GEMMs of a call under every specialised tile of tuning, or every so many."""
    x, ids = torch.empty(700, weights.w13.shape[2], dtype=dtype), torch.empty(700, 2, dtype=torch.int64)
    tiles = [(m, *values) for m, of_height in space._SPECIALIZED.items() for values in of_height]
    for m, n, k, warps, stages in tiles[::every]:
        tile = configs.TileConfig(m, n, k, 8, warps, stages, specialized=True)
        tile = configs.fitted(tile, (9, 0), 1, dtype.itemsize)
        plan = configs.Plan(tile, tile, sort_rows=True)
        run.run_standard(weights, x, torch.empty(700, 2), ids, None, weights.num_local, False, plan)


def call_batched(weights: launch.Layer, tokens: int, topk: int, dtype: torch.dtype) -> None:
    """The parts of a batched call whose host code looks at no values; its plan is that of `batched_plan`."""
    experts, hidden = weights.num_local, weights.w13.shape[2]
    local = launch.local_experts(torch.empty(tokens, topk, dtype=torch.int64), None, experts, experts)
    rows = torch.empty(experts * tokens, hidden, dtype=dtype)
    y = run._batch(weights, rows, torch.zeros(experts, dtype=torch.int32), tokens, torch.float32)
    launch.combine(y, local, rows, torch.empty(tokens, topk, dtype=torch.int32), torch.empty(tokens, topk))


def batched_plan(weights: launch.Layer, tokens: int, dtype: torch.dtype) -> configs.Plan:
    x = torch.empty(0, weights.w13.shape[2], dtype=dtype)
    return launch.plan_for(weights, tokens, 1, x, y_bytes=torch.float32.itemsize, rows=False)


def compile_all(capability: int, few: bool) -> int:
    """Compile for one compute capability; returns the number of kernels."""
    compiled: dict[str, Any] = {}
    originals = {name: getattr(module, name) for name, module in KERNELS.items()}
    for name, function in originals.items():
        setattr(KERNELS[name], name, Recorder(function, capability, compiled))
    launch.device_facts = lambda device: ("NVIDIA Anything", divmod(capability, 10))  # type: ignore[assignment]
    try:
        bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
        qwen3 = layer(2048, 768, 128)
        for tokens in (1, 8192) if few else (1, 32, 256, 512, 8192):
            call(qwen3, tokens, 8, bf16)
        call(layer(72, 40, 6, activation="swigluoai", interleaved=True, limit=7.0, bias=True), 9, 2, fp16, mapped=True)
        call(layer(2048, 768, 8, activations="float"), 64, 2, fp16)
        if not few:
            call(layer(64, 96, 8, activation="gelu", bias=True), 40, 2, fp32)
            call(layer(64, 96, 8, activation="gelu_tanh", gated=False), 5, 2, bf16, on_input=True)
            for tokens in (8, 600):  # rows of w2 that are no multiple of 16 bytes
                call(layer(2880, 360, 4, activation="swigluoai", interleaved=True, bias=True), tokens, 2, bf16)
            call(layer(33, 31, 8, activation="relu2", gated=False, activations="tensor"), 5, 3, bf16)
            call_batched(layer(64, 96, 8, activations="tensor"), 20, 2, bf16)
            call(layer(2048, 768, 8, activations="float", bias=True), 2, 2, fp32)
            if capability >= 80:
                call(layer(2048, 768, 8, activations="float"), 512, 2, bf16)
        if capability >= 80:
            tile = configs.TileConfig(8, 64, 128, 1, 2, 3)
            for dtype in (bf16, fp16):
                weights, x = layer(2048, 768, 8, activations="float"), torch.empty(5, 2048, dtype=dtype)
                ids = torch.empty(5, 2, dtype=torch.int64)
                run.run_standard(weights, x, torch.empty(5, 2), ids, None, 8, False, configs.Plan(tile, tile))
        one = configs.TileConfig(1, 32, 512, 1, 4, 3)  # without tensor cores
        for dtype in (bf16,) if few else (bf16, fp16, fp32):
            weights, x = layer(2048, 768, 8, activations="float"), torch.empty(1, 2048, dtype=dtype)
            ids = torch.empty(1, 2, dtype=torch.int64)
            run.run_standard(weights, x, torch.empty(1, 2), ids, None, 8, False, configs.Plan(one, one, rows=True))
        call_batched(layer(2048, 768, 16), 32, 2, bf16)
        if capability == 90:
            # Specialised in the plan and plain at launch, where its outputs in float32 do not fit beside its stages.
            second, limit = batched_plan(layer(2048, 768, 8), 2048, bf16).gemm2, configs.SHARED_MEMORY[9, 0]
            assert second.specialized and second.plain().shared_bytes(1, 4) > limit, second
            call_batched(layer(2048, 768, 8), 2048, 2, bf16)
            call_specialized(qwen3, bf16, 3 if few else 1)
            if not few:
                call_specialized(layer(96, 160, 4, activation="swigluoai", interleaved=True, bias=True), fp16, 2)
                call_specialized(layer(64, 96, 4, activation="relu2", gated=False), fp32, 2)
                call_specialized(layer(64, 96, 4, activation="gelu", limit=7.0, bias=True), bf16, 4)
                call_specialized(layer(64, 96, 4, activation="gelu_tanh", gated=False), fp32, 4)
    finally:
        for name, function in originals.items():
            setattr(KERNELS[name], name, function)
    launched = {key.split()[0] for key in compiled}
    missing = set(KERNELS) - launched - ({"specialized_gemm_kernel"} if capability != 90 else set())
    assert few or not missing, f"never compiled: {missing}"
    return len(compiled)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        if argument != "--few":
            print(
                argument,
                compile_all(int(argument), "--few" in sys.argv),
                "kernels, triton",
                triton.__version__,
                flush=True,
            )
