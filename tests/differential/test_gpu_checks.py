"""benchmarks/gpu_checks.py, as far as a machine without a GPU can tell. Its parts run in processes of their own, since
triton is bound to its interpreter, or not, when it is first imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]


def run(script: str, interpreted: bool, *arguments: str) -> str:
    """Standard output of `script`, which may import gpu_checks."""
    path = [str(ROOT / part) for part in ("src", "tests", "tests/differential", "benchmarks")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "TRITON_INTERPRET": "1" if interpreted else "0"}
    command = [sys.executable, "-W", "ignore", "-c", script, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_command_needs_a_gpu() -> None:
    script = "import torch, gpu_checks; torch.cuda.is_available = lambda: False; print(gpu_checks.main([]))"
    assert run(script, False).splitlines() == ["needs a CUDA GPU, without TRITON_INTERPRET", "2"]


def test_plans_fit_the_gpu_and_cover_what_there_is() -> None:
    run(
        """
from int8moe.backends.triton.configs import device_shared_memory
from int8moe.tuning import space
import gpu_checks as g

for capability in ((8, 0), (9, 0)):
    drawn = [g.random_plan(seed, capability) for seed in range(200)]
    tiles = g.tile_plans(capability)
    for plan in [*drawn, *(plan for _, _, plan in tiles)]:
        for tile in (plan.gemm1, plan.gemm2):
            assert tile.shared_bytes(1) <= device_shared_memory(capability), tile
    blocks = [p for p in drawn if not p.rows]
    assert {p.rows for p in drawn} == {p.sort_rows for p in blocks} == {p.gemm1.tma for p in blocks} == {True, False}
    assert {p.gemm1.block_m for p in blocks} == {8, 16, 32, 64, 128}
    assert {p.gemm1.persistent for p in blocks} == {0, 1, 2}
    assert {p.gemm1.block_m == p.gemm2.block_m for p in blocks} == {True, False}
    given = {p.gemm1 for _, _, p in tiles}
    case, _ = g.tile_case("silu", g.MANY_TOKENS)
    for w in (case.w13, case.w2):
        gemm = space.Gemm((200,) * 6, w.shape[1], w.shape[2], 1, capability, 3, 1.0, 1.0)
        assert all(set(space.all_tiles(gemm, m)) <= given for m in space.BLOCK_MS)
    assert set(space.row_tiles(10**6, (9, 0), 2)) <= given
    assert {p.gemm1.persistent > 0 for _, _, p in tiles} == {True, False}
    sample = g.tile_plans(capability, "sample")
    assert set(sample) <= set(tiles) and 3 * len(sample) >= len(tiles) and sample == g.tile_plans(capability, "sample")
first, then = g.bundles((9, 0), "sample")
names = [(c.section, c.name) for bundle in first + then for c in bundle]
assert len(names) == len(set(names))
""",
        False,
    )


@pytest.mark.slow
def test_checks_run_in_the_interpreter() -> None:
    """A forced plan is taken, and what is wrong is found."""
    run(
        """
import torch
import gpu_checks as g
from dataclasses import replace
from int8moe.backends.triton import kernels, launch, run

run.validates = lambda: False
for name in ("rows", "copy engine, persistent, rows sorted", "ragged, mapped", "batched"):
    assert g.check_sanitized(name) is None, name
case = g.build(M=3, E=4, H=48, I=32)
want = case.reference_output()
plan = g.random_plan(0, None)
assert g.check_forced(case, "standard", plan, want) is None
wrong = g.check_forced(case, "standard", plan, want + 1)
assert wrong["values_that_differ"] == want.numel() and wrong["plan"] == str(plan)
with g.forced(plan) as asked:
    case.run(g.CLASSES["standard"])
assert asked == [3] and launch.choose_plan.__name__ == "choose_plan"
launch.plan_for = lambda *_, **__: plan
assert "did not ask" in g.check_forced(case, "standard", plan, want)["what"]
assert g.check_poison("standard", "ragged", 1, "NaN") is None
assert g.check_alignment(8, 257, True) is None and g.check_alignment(8, 257, False) is None
assert g.check_invalid("batched", 8, True) is None

# Something that is never written is found: the last row of the result.
combine = launch.combine
def forgets(y, local, like, *more):
    out = torch.empty(like.shape[0], y.shape[1], dtype=like.dtype)
    out[:-1] = combine(y, local, like, *more)[:-1]
    return out
launch.combine = forgets
assert g.check_poison("standard", "all local", 2, "huge") is not None
""",
        True,
    )


@pytest.mark.slow
def test_processes_that_fail_die_or_hang_cost_one_check(tmp_path: Path) -> None:
    script = """
import functools, os, sys, time
from pathlib import Path
import gpu_checks as g

if __name__ == "__main__":
    g.CHECK_SECONDS = 3.0
    bodies = {"right": (print,), "raises": (int, "x"), "dies": (os._exit, 3), "hangs": (time.sleep, 100)}
    each = [g.Check("s", name, functools.partial(*body)) for name, body in bodies.items()]
    more = ("after", "right", (print,)), ("cut", "slow", (time.sleep, 100)), ("cut", "never", (print,))
    for section, name, body in more:
        each.append(g.Check(section, name, functools.partial(*body)))
    report = g.Report(Path(sys.argv[1]) / "r.json", each, {})
    g.make_all([each[:4], each[4:5]], report, 1, time.time() + 300)
    g.CHECK_SECONDS = 100.0
    g.make_all([each[5:]], report, 1, time.time() + 8)
    print("exit", report.close())
"""
    out = run(script, False, str(tmp_path))
    sections = json.loads((tmp_path / "r.json").read_text())["sections"]
    assert {name: (s["right"], s["wrong"], s["not_run"]) for name, s in sections.items()} == {
        "s": (1, 3, 0),
        "after": (1, 0, 0),
        "cut": (0, 0, 2),
    }
    errors = [wrong["error"] for wrong in sections["s"]["first_wrong"]]
    assert errors[0].startswith("ValueError") and errors[1:] == [
        "the process died with exit code 3",
        "no answer in 3 s",
    ]
    assert "cut by the time limit while they ran: cut / slow" in out and out.endswith("exit 1\n")


def test_the_quotient_kernel_compiles() -> None:
    run(
        """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import gpu_checks as g

types = {"COUNT": "*i64", "SHOWN": "*i32", "start": "i32", "shown": "i32"}
for name, alpha in g.QUOTIENTS.items():
    constants = {"ACTIVATION": name.split(",")[0], "ALPHA": alpha, "SIZE": 1024}
    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(fn=g.quotient_kernel, signature=signature, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8, **g.launch.EXACT})
    assert "div.rn.f32" in made.asm["ptx"] and "rcp.approx.ftz" in made.asm["ptx"]
""",
        False,
    )
