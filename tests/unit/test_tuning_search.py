"""The search from end to end, in Triton's interpreter with made-up times. Runs in a process of its own: the interpreter
has to be chosen before triton is first imported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":

    def test_in_a_fresh_process() -> None:
        """Everything else in this file."""
        pytest.importorskip("triton")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
        environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        root = Path(__file__).parents[2]
        done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]

else:
    pytest.importorskip("triton")
    import torch

    from int8moe.backends.triton import configs, launch
    from int8moe.backends.triton.configs import Plan, TileConfig, Won
    from int8moe.config import FusedMoEConfig, FusedMoEParallelConfig
    from int8moe.device import Platform
    from int8moe.errors import ConfigError, Int8MoeError
    from int8moe.tuning import precompile, space, winners
    from int8moe.tuning import tune as search
    from int8moe.tuning.files import TunedFile
    from int8moe.tuning.measure import Stage, layer_of
    from int8moe.tuning.tune import Found, Tuner

    CONFIG = FusedMoEConfig(4, 2, 64, 32, platform=Platform.cpu())
    NARROW, WIDE = (16, 128, 4, 2), (32, 32, 4, 2)  # block_n, block_k, warps, stages
    DEEP = (32, 64, 4, 2)

    pytestmark = pytest.mark.usefixtures("one_thread")

    @pytest.fixture(autouse=True)
    def few_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(space, "_TILES", {m: [NARROW, WIDE] if m == 32 else [NARROW] for m in space.BLOCK_MS})
        monkeypatch.setattr(space, "_ROW_TILES", (NARROW, DEEP))
        monkeypatch.setattr(space, "TOO_SLOW", 1e9)
        monkeypatch.setattr(space, "likely_block_ms", lambda gemm, keep=2: [16, 32])
        monkeypatch.setattr(space, "variants", lambda gemm, tile: [])
        monkeypatch.setattr(space, "ROW_SLOTS", 2)  # small calls: the interpreter takes long

    @pytest.fixture
    def layers_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
        """Whole layers take long here; where a test is not about them, all give the same."""
        monkeypatch.setattr(search, "run_layer", lambda *_: torch.zeros(1))

    class Timer:
        """Says how long calls took: `us` of their tile or plan. Makes them first, where `runs`."""

        def __init__(self, us: Callable[[TileConfig | Plan], float], runs: bool = False) -> None:
            self.us, self.runs = us, runs
            self.timed: list[TileConfig | Plan] = []

        def __call__(self, bodies: Sequence[Callable[[], object]], seconds: float) -> float:
            for body in bodies if self.runs else ():
                body()
            (what,) = {a for body in bodies for a in body.args if isinstance(a, TileConfig | Plan)}
            self.timed.append(what)
            self.of = bodies[0].func
            return self.us(what)

    def tuned(timer: Timer, tokens: int, config: FusedMoEConfig = CONFIG, **more: object) -> Found:
        with Tuner(config, gbps=1000.0, tops=1000.0, device="cpu", timer=timer, **more) as tuner:
            found = tuner.search(tokens)
            tuner.compile([found], lambda *_: None)
            return tuner.tune(found, lambda text, share: None)

    def prefers(*wanted: TileConfig, rows: bool = False) -> Callable[[TileConfig | Plan], float]:
        """Times by which these tiles, and the plan that they make, are the fastest."""

        def us(what: TileConfig | Plan) -> float:
            if isinstance(what, Plan):
                return 10.0 if what.rows is rows and what.gemm1 in wanted and what.gemm2 in wanted else 20.0
            return 1.0 if what in wanted else 5.0

        return us

    def tile(block_m: int, values: tuple[int, ...]) -> TileConfig:
        return TileConfig(block_m, *values[:2], 1, *values[2:], False)

    def test_the_plan_of_the_fastest_tiles_wins() -> None:
        timer = Timer(prefers(tile(32, WIDE)))
        found = tuned(timer, 2)
        assert found.plan == Plan(tile(32, WIDE), tile(32, WIDE))
        assert (found.tokens, found.latency_us, found.default_us, found.gain) == (2, 10.0, 20.0, 0.5)
        assert found.refused == {} and not any(p.rows for p in timer.timed if isinstance(p, Plan))
        assert found.tried == sum(isinstance(t, TileConfig) for t in timer.timed) >= 6
        sizes = (
            "16 x 16 by 4 warps",
            "32 x 32 by 4 warps",
        )  # the fastest of each height, and the next one in the place of each of the best
        other, best = "32 x 16 by 4 warps", sizes[1]
        pairs = {(a, b) for a in sizes for b in sizes} | {(other, best), (best, other)}
        times = {f"gathered, {a} and {b}": 10.0 if a == b == best else 20.0 for a, b in pairs}
        assert found.layers_us == {"default": 20.0, **times}

    def test_slots_by_themselves_are_tried_for_few(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(space, "ROW_SLOTS", 64)
        many_experts = FusedMoEConfig(16, 2, 64, 32, platform=Platform.cpu())
        with Tuner(many_experts, gbps=1000.0, tops=1000.0, device="cpu") as tuner:
            few, many = tuner.search(3), tuner.search(40)
        assert few.rows and not many.rows and tuner.search(1).default.rows and not many.default.rows
        assert set(many.gemm1) == {(16, False), (32, False)} and set(many.gemm2) == {16, 32}
        assert len(many.calls) == 1 and many.calls[0].ids.shape == (40, 2)

    @pytest.mark.usefixtures("layers_unchecked")
    def test_each_gemm_has_a_tile_of_its_own() -> None:
        seen: list[tuple[int, TileConfig]] = []

        def note(tokens: int, gemm: int, kind: str, tile: TileConfig, us: float) -> None:
            assert (tokens, kind) == (2, "gathered")
            seen.append((gemm, tile))

        wanted = (tile(32, WIDE), tile(32, NARROW))

        def us(what: TileConfig | Plan) -> float:
            if isinstance(what, Plan):
                return 10.0 if (what.gemm1, what.gemm2) == wanted else 20.0
            return 1.0 if what == wanted[timer.of is Stage.gemm2] else 5.0

        timer = Timer(us)
        found = tuned(timer, 2, note=note, check=False)
        assert found.plan == Plan(tile(32, WIDE), tile(32, NARROW)) and {gemm for gemm, _ in seen} == {1, 2}

    def test_few_slots_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(space, "likely_block_ms", lambda gemm, keep=2: [16])
        found = tuned(Timer(prefers(tile(16, DEEP), rows=True), runs=True), 1)
        assert found.plan == Plan(tile(16, DEEP), tile(16, DEEP), rows=True) and found.refused == {}
        assert found.latency_us == 10.0 and set(found.layers_us) == {
            "default",
            "gathered, 16 x 16 by 4 warps and 16 x 16 by 4 warps",
            "rows, 16 x 32 by 4 warps and 16 x 32 by 4 warps",
            "rows, 16 x 16 by 4 warps and 16 x 32 by 4 warps",
            "rows, 16 x 32 by 4 warps and 16 x 16 by 4 warps",
        }

    def test_a_slower_tile_of_slots_by_themselves_may_make_a_faster_layer(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(space, "likely_block_ms", lambda gemm, keep=2: [])
        best = Plan(tile(16, NARROW), tile(16, DEEP), rows=True)

        def us(what: TileConfig | Plan) -> float:
            if isinstance(what, Plan):
                return {best: 10.0}.get(
                    what, 12.0 if what.rows and what.gemm1 == what.gemm2 == tile(16, DEEP) else 20.0
                )
            return 1.0 if what == tile(16, DEEP) else 5.0

        found = tuned(Timer(us, runs=True), 1)
        assert found.plan == best and found.latency_us == 10.0

    @pytest.mark.usefixtures("layers_unchecked")
    def test_many_slots_may_be_sorted_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(search, "SORTED_SLOTS", 4)
        monkeypatch.setattr(space, "likely_block_ms", lambda gemm, keep=2: [64])
        us = lambda what: 10.0 if isinstance(what, Plan) and what.sort_rows else 20.0
        found = tuned(Timer(us), 2)
        assert found.plan.sort_rows and found.plan.gemm1.block_m == 64 and found.refused == {}

    @pytest.mark.usefixtures("layers_unchecked")
    def test_a_slower_tile_that_makes_a_faster_layer_wins() -> None:
        """As where the power limit slows the clock under what is fastest for a moment."""
        wanted = Plan(tile(32, NARROW), tile(32, WIDE))
        layers = {wanted: 10.0, replace(wanted, gemm1=wanted.gemm2): 12.0}
        us = lambda what: layers.get(what, 15.0) if isinstance(what, Plan) else 5.0 + (what.block_n == 16)
        found = tuned(Timer(us), 2, check=False)
        assert found.plan == wanted and found.latency_us == 10.0

    @pytest.mark.usefixtures("layers_unchecked")
    def test_of_equal_blocks_other_warps_are_tried_in_layers(monkeypatch: pytest.MonkeyPatch) -> None:
        """Four warps are faster for a moment, eight in a whole layer; and no more layers are timed than before."""
        monkeypatch.setattr(space, "_TILES", {32: [NARROW, (16, 128, 8, 2)]})
        monkeypatch.setattr(space, "likely_block_ms", lambda gemm, keep=2: [32])
        wanted = Plan(tile(32, (16, 128, 8, 2)), tile(32, NARROW))
        layers = {wanted: 10.0, configs.default_plan(2, 4, 2, None): 20.0}
        us = lambda what: layers.get(what, 15.0) if isinstance(what, Plan) else float(what.num_warps)
        found = tuned(Timer(us), 2, check=False)
        assert found.plan == wanted
        assert found.layers_us["gathered, 32 x 16 by 8 warps and 32 x 16 by 4 warps"] == 10.0
        many = [
            (float(n), TileConfig(m, n, 64, 1, warps, 3)) for m in (16, 32, 64) for n in (16, 32) for warps in (4, 8)
        ]
        assert len(search._leaders([many])) == search.LEADERS < len(many)

    def test_what_tiles_must_compute_comes_from_kernels_compiled_before(monkeypatch: pytest.MonkeyPatch) -> None:
        """On 9.0 the default plan is specialised and sorted; the plan to compare with is neither, in equal blocks."""
        monkeypatch.setattr(launch, "device_facts", lambda device: ("NVIDIA H200", (9, 0)))
        launched: list[tuple[bool, str, TileConfig]] = []

        def grouped_gemm(layer: launch.Layer, first: bool, *arguments: Any) -> None:
            _, _, y, blocks, tile, rows = arguments[:6]
            assert blocks.capacity == launch.block_capacity(400, 4, tile.block_m)
            y.zero_()
            launched.append((first, "gathered" if rows or not first else "sorted", tile))

        monkeypatch.setattr(launch, "grouped_gemm", grouped_gemm)
        two_heights = Plan(TileConfig(64, 256, 128, 8, 8, 4, specialized=True), TileConfig(128, 256, 128, 8, 8, 4))
        with Tuner(CONFIG, gbps=1000.0, tops=1000.0, device="cpu") as tuner:
            for default in (None, two_heights):
                found = tuner.search(200)
                assert found.default.sort_rows and found.default.gemm1.specialized
                found = replace(found, default=default or found.default)
                tuner.compile([found], lambda *_: None)
                search._Measured(tuner, found).expect(tuner._in_blocks(found.default))
                assert [(first, kind) for first, kind, _ in launched] == [(True, "gathered"), (False, "gathered")]
                assert not any(tile.specialized for _, _, tile in launched), "as it would be launched"
                assert {precompile.Task(CONFIG, False, *one) for one in launched} <= tuner.compiled
                launched.clear()

    @pytest.mark.usefixtures("layers_unchecked")
    def test_specialised_tiles_where_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(search, "SORTED_SLOTS", 4)
        monkeypatch.setattr(search, "TALL_ROWS", 4)
        monkeypatch.setattr(launch, "device_facts", lambda device: ("NVIDIA H200", (9, 0)))
        monkeypatch.setattr(space, "likely_block_ms", lambda gemm, keep=2: [64])
        big = FusedMoEConfig(4, 2, 256, 256, platform=Platform.cpu())
        with Tuner(big, gbps=1000.0, tops=1000.0, device="cpu") as tuner:
            few, many = tuner.search(2), tuner.search(200)
        x = torch.empty(200, 256, dtype=torch.bfloat16)
        assert launch.plan_for(tuner.layer, 200, 2, x) == many.default
        assert many.default.gemm1.specialized and many.default.sort_rows
        special = lambda tiles: {(t.block_m, t.block_n) for t in tiles if t.specialized}
        assert set(few.gemm1) == {(64, False), (64, True)} and set(many.gemm1) == {*few.gemm1, (256, True)}
        assert not special(few.gemm1[64, False]) and special(few.gemm1[64, True]) == {(64, 128), (64, 256)}
        assert special(many.gemm1[256, True]) == special(many.gemm2[256]) == {(256, 128)}
        monkeypatch.setattr(launch, "specialized", None)  # an older Triton
        with Tuner(big, gbps=1000.0, tops=1000.0, device="cpu") as tuner:
            older = tuner.search(200)
        assert not any(special(tiles) for tiles in older.gemm1.values())
        assert launch.plan_for(tuner.layer, 200, 2, x) == older.default != many.default
        assert not older.default.sort_rows

    @pytest.mark.usefixtures("layers_unchecked")
    def test_equal_times_are_no_problem() -> None:
        found = tuned(Timer(lambda what: 7.0), 3, check=False)
        assert found.plan == configs.default_plan(3, 4, 2, None) and found.gain == 0.0

    @pytest.mark.usefixtures("layers_unchecked")
    @pytest.mark.parametrize(("share", "kept"), [(0.5, False), (1.5, True)])
    def test_the_default_stays_where_the_gain_is_noise(share: float, kept: bool) -> None:
        default = configs.default_plan(2, 4, 2, None)
        best = 100.0 * (1 - share * search.LEAST_GAIN)
        found = tuned(Timer(lambda what: 100.0 if what == default else best), 2, check=False)
        assert (found.plan != default) is kept
        assert found.latency_us == (best if kept else 100.0) and found.default_us == 100.0

    @pytest.mark.usefixtures("layers_unchecked")
    @pytest.mark.parametrize(
        ("first", "bad"), [(True, tile(16, NARROW)), (False, tile(32, WIDE))], ids=["first", "last"]
    )
    def test_a_tile_that_gives_other_bits_is_refused(
        first: bool, bad: TileConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whichever is measured first: what is right comes from the default plan."""
        name = "gemm1" if first else "gemm2"
        original = getattr(Stage, name)

        def wrong(stage: Stage, tile: TileConfig) -> torch.Tensor:
            out = original(stage, tile)
            return out.mul_(1.01) if tile == bad else out

        monkeypatch.setattr(Stage, name, wrong)
        found = tuned(Timer(prefers(bad)), 2)
        assert found.refused == {f"GEMM {1 if first else 2}, gathered, {bad}": "other bits than the default plan"}
        assert bad != (found.plan.gemm1 if first else found.plan.gemm2)
        assert tuned(Timer(prefers(bad)), 2, check=False).refused == {}

    def test_a_plan_that_gives_other_bits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
        bad = Plan(tile(32, WIDE), tile(32, WIDE))
        monkeypatch.setattr(search, "run_layer", lambda layer, call, plan: torch.full((1,), float(plan == bad)))
        monkeypatch.setattr(space, "likely_block_ms", lambda gemm, keep=2: [32])
        found = tuned(Timer(prefers(tile(32, WIDE))), 2)
        assert found.refused == {str(bad): "other bits than the default plan"} and found.plan != bad

    @pytest.mark.usefixtures("layers_unchecked")
    def test_tiles_that_do_not_compile_or_run_are_refused() -> None:
        bad, timer = tile(32, WIDE), Timer(prefers(tile(32, WIDE)))
        with Tuner(CONFIG, gbps=1000.0, tops=1000.0, device="cpu", timer=timer, check=False) as tuner:
            tuner.broken[precompile.Task(CONFIG, False, True, "gathered", bad)] = "PTXASError: too much"
            found = tuner.tune(tuner.search(2), lambda text, share: None)
        assert found.refused == {f"GEMM 1, gathered, {bad}": "PTXASError: too much"} and found.plan.gemm1 != bad

        def us(what: TileConfig | Plan) -> float:
            if what == bad:
                raise RuntimeError("out of resource: shared memory")
            return 5.0

        found = tuned(Timer(us), 2, check=False)
        assert len(found.refused) == 2 and set(found.refused.values()) == {
            "RuntimeError: out of resource: shared memory"
        }

    @pytest.mark.usefixtures("layers_unchecked")
    def test_variants_are_compiled_in_one_go_and_win_where_they_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
        other = lambda tile: replace(tile, num_stages=7)
        monkeypatch.setattr(space, "variants", lambda gemm, tile: [other(tile)])
        bad = {tile(16, NARROW), other(tile(16, NARROW))}  # of a whole height: nothing of GEMM 1 runs

        def us(what: TileConfig | Plan) -> float:
            tiles = [what] if isinstance(what, TileConfig) else [what.gemm1, what.gemm2]
            return sum(3.0 if t.num_stages == 7 else 5.0 for t in tiles)

        together, shares = [], []
        with Tuner(CONFIG, gbps=1000.0, tops=1000.0, device="cpu", timer=Timer(us), check=False) as tuner:
            tuner.broken |= {precompile.Task(CONFIG, False, True, "gathered", t): "no room" for t in bad}
            monkeypatch.setattr(tuner, "_compile", lambda tasks, tick: together.append(tasks))
            found = tuner.tune(tuner.search(2), lambda text, share: shares.append(share))
        (tasks,) = together
        made = {(task.first, task.tile.block_m) for task in tasks if task.tile.num_stages == 7}
        assert made == {(True, 32), (False, 32)}
        assert found.plan.gemm1.num_stages == found.plan.gemm2.num_stages == 7
        assert found.plan.gemm1.block_m == 32 and set(found.refused.values()) == {"no room"}
        assert shares == sorted(shares) and shares[0] == 0 and shares[-1] < 1

    def test_where_the_default_does_not_run_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(Int8MoeError, match=r"the default plan does not run at M=3: ValueError: no clock"):
            tuned(
                Timer(lambda what: 5.0 if isinstance(what, TileConfig) else _raise(ValueError("no clock"))),
                3,
                check=False,
            )
        monkeypatch.setattr(search, "run_layer", lambda *_: _raise(RuntimeError("no memory")))
        with pytest.raises(Int8MoeError, match=r"the default plan does not run at M=3: RuntimeError: no memory"):
            tuned(Timer(lambda what: 5.0), 3)

    def _raise(problem: Exception) -> float:
        raise problem

    def test_weight_only_and_a_rank_of_the_experts(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(space, "likely_block_ms", lambda gemm, keep=2: [16])
        parallel = FusedMoEParallelConfig(ep_size=2, use_ep=True)
        config = replace(CONFIG, moe_parallel_config=parallel, num_local_experts=2, in_dtype="float32")
        for weight_only in (False, True):  # the second has no bits to compare
            found = tuned(
                Timer(lambda what: 5.0 if isinstance(what, TileConfig) else 9.0), 2, config, weight_only=weight_only
            )
            assert found.refused == {} and found.latency_us == 9.0

    @pytest.mark.usefixtures("layers_unchecked")
    def test_a_second_run_goes_on_after_the_first(tmp_path: Path) -> None:
        """The counts that are in the file are done, and the kernels find what was tuned."""
        wanted = Plan(tile(32, WIDE), tile(32, WIDE))
        kept = TunedFile(tmp_path, CONFIG, "cpu")
        found = tuned(Timer(prefers(tile(32, WIDE))), 2, check=False)
        kept.add(found.tokens, found.plan, found.latency_us, found.default_us)
        again = TunedFile(tmp_path, CONFIG, "cpu")
        assert [m for m in (3, 2) if not again.has(m)] == [3]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(configs.FOLDER_VARIABLE, str(tmp_path))
            x = torch.empty(2, 64, dtype=torch.bfloat16)
            assert launch.plan_for(layer_of(CONFIG, "cpu"), 2, 2, x) == wanted

    # --- quick ---

    OTHER = replace(CONFIG, num_experts=8, num_local_experts=8)

    def won(*plans: Plan, tokens: int = 4, of: FusedMoEConfig = OTHER) -> list[Won]:
        return [
            Won(of.num_experts, of.experts_per_token, of.hidden_dim, of.intermediate_size_per_partition, tokens, plan)
            for plan in plans
        ]

    @pytest.fixture
    def tuned_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """Where the kernels look, and nothing shipped."""
        monkeypatch.setenv(configs.FOLDER_VARIABLE, str(tmp_path))
        monkeypatch.setattr(configs, "PACKAGED", tmp_path / "none")
        return tmp_path

    def test_a_quick_search_tries_what_won_for_other_layers_on_this_gpu(
        tuned_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing else: no likely tile, no variant, nothing of other GPUs, of W8A16 or of this layer."""
        for name in ("variants", "likely_tiles", "row_tiles", "likely_block_ms"):
            monkeypatch.setattr(space, name, lambda *_: pytest.fail("a quick search lists no tiles"))
        wanted = Plan(tile(32, WIDE), tile(16, DEEP))
        elsewhere = Plan(tile(16, NARROW), tile(16, NARROW))
        TunedFile(tuned_folder, OTHER, "cpu").add(4, wanted, 1.0, 2.0)
        TunedFile(tuned_folder, OTHER, "another GPU").add(4, elsewhere, 1.0, 2.0)
        TunedFile(tuned_folder, OTHER, "cpu", weight_only=True).add(4, elsewhere, 1.0, 2.0)
        TunedFile(tuned_folder, CONFIG, "cpu").add(2, elsewhere, 1.0, 2.0)
        timer = Timer(lambda what: 10.0 if what == wanted else 20.0)
        found = tuned(timer, 2, won=winners.winners(CONFIG, "cpu"))
        assert found.plan == wanted and found.refused == {} and found.latency_us == 10.0
        tiles = [t for t in timer.timed if isinstance(t, TileConfig)]
        assert set(tiles) == {wanted.gemm1, wanted.gemm2} and found.tried == len(tiles) == 3, (
            "GEMM 2's once more, as the GEMM 1 of its height"
        )

    @pytest.mark.parametrize("first", [True, False])
    def test_a_quick_search_refuses_tiles_that_give_other_bits(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        bad, name = tile(32, WIDE), "gemm1" if first else "gemm2"
        original = getattr(Stage, name)
        wrong = lambda stage, tile: original(stage, tile).mul_(1.01 if tile == bad else 1)
        monkeypatch.setattr(Stage, name, wrong)
        monkeypatch.setattr(search, "run_layer", lambda *_: torch.zeros(1))
        good = Plan(tile(32, NARROW), tile(32, NARROW))
        found = tuned(Timer(prefers(bad)), 2, won=won(Plan(bad, bad), good))
        assert found.refused == {f"GEMM {1 if first else 2}, gathered, {bad}": "other bits than the default plan"}
        assert bad != (found.plan.gemm1 if first else found.plan.gemm2)

    def test_a_quick_search_refuses_plans_that_give_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
        bad = Plan(tile(32, WIDE), tile(32, WIDE))
        monkeypatch.setattr(search, "run_layer", lambda layer, call, plan: torch.full((1,), float(plan == bad)))
        found = tuned(Timer(prefers(tile(32, WIDE))), 2, won=won(bad))
        assert found.refused == {str(bad): "other bits than the default plan"}
        assert found.plan == configs.default_plan(2, 4, 2, None)

    @pytest.mark.usefixtures("layers_unchecked")
    def test_a_quick_search_keeps_the_default_where_nothing_beats_it() -> None:
        found = tuned(Timer(lambda what: 7.0), 2, check=False, won=won(Plan(tile(32, WIDE), tile(32, WIDE))))
        assert found.plan == configs.default_plan(2, 4, 2, None) and found.gain == 0.0 and len(found.layers_us) > 1

    def test_slots_by_themselves_of_a_quick_search() -> None:
        """A tile of either GEMM is tried for both."""
        rows = Plan(tile(16, DEEP), tile(16, NARROW), rows=True)
        found = tuned(Timer(prefers(tile(16, NARROW), rows=True), runs=True), 1, won=won(rows, tokens=1))
        assert found.plan == replace(rows, gemm1=rows.gemm2) and found.refused == {} and found.tried == 4
        with Tuner(CONFIG, gbps=1.0, tops=1.0, device="cpu", won=won(rows, tokens=1)) as tuner:
            assert tuner.search(2).rows == [] == list(tuner.search(2).gemm1), "more slots than are tried so"

    def test_a_quick_search_leaves_out_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(launch, "device_facts", lambda device: ("NVIDIA H200", (9, 0)))
        config = FusedMoEConfig(4, 2, 256, 128, platform=Platform.cpu())
        long, plain = TileConfig(16, 64, 256, 1, 4, 4), TileConfig(64, 128, 128, 8, 4, 3)
        special = TileConfig(128, 128, 128, 16, 8, 4, specialized=True)
        large, in_order = TileConfig(128, 256, 128, 8, 8, 5), TileConfig(64, 128, 64, 8, 4, 3)
        tiles = (long, plain, special, large, in_order)
        plans = won(*(Plan(t, t, sort_rows=t in (special, in_order)) for t in tiles), of=config)

        def tried(weight_only: bool = False) -> tuple[set[TileConfig], set[TileConfig]]:
            with Tuner(config, gbps=1.0, tops=1.0, device="cpu", won=plans, weight_only=weight_only) as tuner:
                found = tuner.search(64)
            one, two = found.gemm1, found.gemm2
            assert all(t.block_m == m and (t in (special, in_order)) is s for (m, s), ts in one.items() for t in ts)
            assert all(t.block_m == m for m, tiles in two.items() for t in tiles)
            return {t for tiles in one.values() for t in tiles}, {t for tiles in two.values() for t in tiles}

        right = {plain, special, in_order}
        assert tried() == (right | {long}, right), "a step of 256 along a K of 128; too much memory"
        assert tried(weight_only=True) == ({long, plain}, {plain}), "which sorts no rows"
        monkeypatch.setattr(launch, "specialized", None)  # an older Triton
        assert tried() == ({long, plain, in_order}, {plain, in_order})

    @pytest.mark.parametrize("quick", [False, True])
    @pytest.mark.usefixtures("layers_unchecked")
    def test_the_bar_of_a_search_comes_near_its_end(quick: bool) -> None:
        plans = won(Plan(tile(32, WIDE), tile(32, WIDE)), Plan(tile(16, WIDE), tile(16, WIDE))) if quick else []
        shares: list[float] = []
        with Tuner(CONFIG, gbps=1.0, tops=1.0, device="cpu", timer=Timer(lambda _: 1.0), check=False, won=plans) as it:
            it.tune(it.search(3), lambda text, share: shares.append(share))
        assert shares == sorted(shares) and shares[0] == 0 and 0.75 < shares[-1] < 1

    def test_a_quick_search_without_plans_says_what_would_work(tuned_folder: Path) -> None:
        own = Plan(tile(16, NARROW), tile(16, NARROW))
        TunedFile(tuned_folder, CONFIG, "cpu").add(2, own, 1.0, 2.0)
        TunedFile(tuned_folder, OTHER, "another GPU").add(2, own, 1.0, 2.0)
        says = rf"no plans of another layer for cpu and int8_w8a8 in {tuned_folder} or .* without --quick"
        with pytest.raises(ConfigError, match=says):
            winners.winners(CONFIG, "cpu")
        assert winners.winners(CONFIG, "another GPU") == tuple(won(own, tokens=2))

    @pytest.mark.usefixtures("layers_unchecked")
    def test_progress_goes_from_nothing_to_all() -> None:
        seen: list[tuple[str, float]] = []
        with Tuner(CONFIG, gbps=1000.0, tops=1000.0, device="cpu", timer=Timer(lambda what: 1.0), check=False) as tuner:
            tuner.tune(tuner.search(3), lambda text, share: seen.append((text, share)))
        shares = [share for _, share in seen]
        assert shares == sorted(shares) and shares[0] == 0 and shares[-1] < 1 and seen[-1][0] == "M=3: whole layers"

    @pytest.mark.parametrize("fails", ["layer_of", "Compiler", None])
    def test_a_tuner_starts_nothing_before_there_is_work(fails: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("started a process"))
        if fails:
            monkeypatch.setattr(search, fails, lambda *a: _raise(RuntimeError("no memory")))
            with pytest.raises(RuntimeError, match="no memory"):
                Tuner(CONFIG, gbps=1.0, tops=1.0, device="cpu")
        else:
            with Tuner(CONFIG, gbps=1.0, tops=1.0, device="cpu") as tuner:
                tuner.search(3)
