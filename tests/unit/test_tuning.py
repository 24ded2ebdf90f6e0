"""What tuning tries, where it keeps results, and the processes that compile; needs no GPU and no triton."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import stat
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest

from int8moe.backends.triton import configs
from int8moe.backends.triton.configs import Plan, TileConfig, Won, default_plan
from int8moe.config import FusedMoEConfig
from int8moe.device import Platform
from int8moe.errors import ConfigError
from int8moe.tuning import files, precompile, space, winners
from int8moe.tuning.files import TunedFile
from int8moe.tuning.precompile import Compiler, Task, plan_tasks

CONFIG = FusedMoEConfig(8, 2, 512, 1024, platform=Platform.cpu())
DEVICE = "NVIDIA A100-SXM4-80GB"
TILE = TileConfig(64, 128, 128, 8, 4, 3, True, 2)
PLAN = Plan(TILE, replace(TILE, block_n=256, persistent=0, tma=False), sort_rows=True)


@pytest.fixture(autouse=True)
def _no_old_files() -> None:
    for cached in (configs.read_file, configs.read_plans, configs._tuned, configs._warn_once):
        cached.cache_clear()


# --- what is tried ---------------------------------------------------------------------------------------------------


def gemm(
    rows: tuple[int, ...], capability: tuple[int, int] | None = (9, 0), a_bytes: int = 1, n: int = 2048, k: int = 1024
) -> space.Gemm:
    return space.Gemm(rows, n, k, a_bytes, capability, 132, 4000.0, 1000.0)


CAPABILITIES = [None, *configs.SHARED_MEMORY]
each_gpu = pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
each_width = pytest.mark.parametrize("a_bytes", [1, 2, 4])


@each_gpu
@each_width
def test_tiles_fit_the_gpu(capability, a_bytes) -> None:
    limit = configs.device_shared_memory(capability)
    for rows in (1, 20, 500):
        wanted = gemm((rows,) * 64, capability, a_bytes)
        heights = space.likely_block_ms(wanted)
        assert 1 <= len(heights) <= 3 and heights == sorted(heights)
        for block_m in heights:
            tiles = space.likely_tiles(wanted, block_m)
            assert tiles and len(set(tiles)) == len(tiles)
            for tile in [*tiles, *(v for t in tiles for v in space.variants(wanted, t))]:
                assert tile.block_m == block_m and tile.shared_bytes(a_bytes) <= limit, tile
                assert tile.block_k >= 32 and tile.block_k * a_bytes <= (512 if a_bytes == 2 else 256)
                assert configs.fitted(tile, capability, a_bytes) == tile  # choose_plan gives back what was measured
                assert tile.tma == (capability is not None and capability >= (9, 0))


@pytest.mark.parametrize(("rows", "heights"), [(1, {16}), (8, {16}), (30, {32}), (60, {64}), (1000, {64, 128})])
def test_heights_follow_the_rows_of_an_expert(rows, heights) -> None:
    wanted = gemm((rows,) * 128)
    assert heights & set(space.likely_block_ms(wanted)), space.likely_block_ms(wanted)
    assert len(space.likely_block_ms(wanted, 1)) == 1
    if rows <= 8:
        assert 128 not in space.likely_block_ms(wanted)
    if rows >= 1000:
        assert 16 not in space.likely_block_ms(wanted)


@pytest.mark.parametrize("rows", [(1,), (3,) * 8, (40,) * 64, (900,) * 128])
@pytest.mark.parametrize("block_m", space.BLOCK_MS)
def test_variants_are_other_legal_tiles(rows, block_m) -> None:
    wanted = gemm(rows)
    for tile in space.all_tiles(wanted, block_m):
        made = space.variants(wanted, tile)
        assert tile not in made and len(set(made)) == len(made)
        count = space.blocks(rows, block_m) * -(-wanted.n // tile.block_n)
        for variant in made:
            assert replace(variant, group_m=tile.group_m, persistent=tile.persistent) == tile
            assert variant.group_m >= 1 and variant.persistent >= 0
            assert variant.persistent * wanted.processors < count, "as many programs as tiles are not persistent"
    if sum(rows) > 10_000 and block_m >= 64:
        assert {v.persistent > 0 for v in made} == {True, False} and len({v.group_m for v in made}) > 1


def test_the_model_prunes_and_keeps_its_best() -> None:
    wanted = gemm((900,) * 128)
    every, likely = space.all_tiles(wanted, 128), space.likely_tiles(wanted, 128)
    estimates = [space.estimate_us(wanted, tile) for tile in every]
    assert estimates == sorted(estimates) and likely == every[: len(likely)]
    assert all(e <= space.TOO_SLOW * estimates[0] for e in estimates[: len(likely)])
    assert all(e > space.TOO_SLOW * estimates[0] for e in estimates[len(likely) :])
    assert len(space.all_tiles(gemm((900,) * 128, n=32), 128)) < len(every), "a narrow layer has no use for wide tiles"


def test_estimates_grow_with_the_work_and_shrink_with_the_gpu() -> None:
    for tile in (TileConfig(16, 64, 128, 1, 4, 3), TileConfig(128, 256, 128, 8, 8, 3)):
        us = [space.estimate_us(gemm((rows,) * 64), tile) for rows in (1, 16, 128, 1024, 8192)]
        assert us == sorted(us) and us[0] < us[-1]
        us = [space.estimate_us(gemm((16,) * experts), tile) for experts in (1, 8, 64, 128)]
        assert us == sorted(us) and us[0] < us[-1]
        for rows in (1, 1024):
            usual = gemm((rows,) * 64)
            assert space.estimate_us(replace(usual, gbps=8000.0, tops=2000.0), tile) * 2 == pytest.approx(
                space.estimate_us(usual, tile)
            )
            assert space.estimate_us(replace(usual, k=2048), tile) > space.estimate_us(usual, tile)
    few, high = gemm((1,) * 8), TileConfig(128, 256, 128, 8, 8, 3)
    assert space.estimate_us(few, high) >= space.estimate_us(few, replace(high, block_m=16, num_warps=4))
    assert space.estimate_us(gemm(()), high) == 0.0  # a rank whose experts get nothing


def test_rows_by_themselves() -> None:
    assert {tile.block_k for tile in space.row_tiles(2048, (9, 0))} == {256, 512}
    assert {tile.block_k for tile in space.row_tiles(256, (9, 0))} == {256}
    assert {(tile.block_m, tile.persistent) for tile in space.row_tiles(2048, (8, 0))} == {(16, 0), (8, 0)}
    assert {tile.block_m for tile in space.row_tiles(2048, None)} == {16}, "AMD"
    assert {tile.block_m for tile in space.row_tiles(2048, None, 2)} == {16, 1}, "without tensor cores under W8A16"


def test_the_fastest_of_equal_times() -> None:
    """Tiles have no order, so that times alone are compared."""
    times = [(2.0, TILE), (1.0, PLAN.gemm2), (1.0, TILE)]
    assert space.best(times, 2) == [PLAN.gemm2, TILE]


# --- what a quick search tries ---------------------------------------------------------------------------------------


def quick(won: list[Won], tokens: int, config: FusedMoEConfig = CONFIG) -> winners.Tiles:
    return winners.tiles(won, config, tokens, gemm((9,) * 8, n=2048, k=512), gemm((9,) * 8, n=512, k=1024), True)


def test_the_nearest_in_slots_of_an_expert_are_tried() -> None:
    """16 tokens of CONFIG are 4 slots for each expert, as 64 of 128 experts, top-8, are."""
    tiles = [replace(TILE, num_stages=n, persistent=0) for n in range(2, 2 + winners.MOST + 1)]
    won = [Won(128, 8, 512, 1024, 64 * 2**n, Plan(tile, tile)) for n, tile in enumerate(tiles)]
    rows, firsts, seconds = quick(won[::-1], 16)
    assert rows == [] and firsts == {(64, False): tiles[:-1]} and seconds == {64: tiles[:-1]}
    as_many_tokens = Won(8192, 2, 512, 1024, 16, Plan(TILE, TILE))
    assert quick([as_many_tokens, *won], 16)[1] == firsts, "a slot for each 256 experts"
    ranks = replace(CONFIG, num_experts=32)
    assert quick(won[::-1], 64, ranks)[1] == firsts, "of a rank, the slots of all experts"


def test_of_equally_near_ones_the_layer_of_similar_size_comes_first() -> None:
    tiles = [replace(TILE, num_stages=n, persistent=0) for n in range(2, 9)]
    won = [Won(8, 2, 512, 1024 * 2**n, 16, Plan(tile, tile)) for n, tile in enumerate(tiles)]
    assert quick(won[::-1], 16)[1] == {(64, False): tiles[:-1]}


def test_slots_by_themselves_are_near_by_tokens() -> None:
    tiles = [TileConfig(16, 64, 256, 1, 4, n) for n in range(2, 10)]
    pairs = [Plan(a, b, rows=True) for a, b in zip(tiles[::2], tiles[1::2], strict=True)]
    won = [Won(8 * 4**n, 2, 512, 1024, 2**n, plan) for n, plan in enumerate(pairs)]
    assert quick(won[::-1], 1) == (tiles[:6], {}, {}) and quick(won, 64) == ([], {}, {})
    step = replace(tiles[0], block_k=1024)
    assert quick([Won(8, 2, 512, 1024, 1, Plan(step, tiles[0], rows=True))], 1)[0] == tiles[:1], "longer than K"


def test_each_height_of_gemm_2_has_a_gemm_1() -> None:
    """Without one its tiles would not be timed."""
    low, high = replace(TILE, block_m=16, persistent=0), replace(TILE, block_m=128, persistent=0)
    near = Won(8, 2, 512, 1024, 16, Plan(low, high))
    assert quick([near], 16)[1:] == ({(16, False): [low], (128, False): [high]}, {128: [high]})
    lows = [near, *(Won(8, 2, 512, 1024, 16, Plan(replace(low, num_stages=n), high)) for n in range(4, 9))]
    other = replace(high, num_stages=2)
    far = Won(8, 2, 512, 1024, 4096, Plan(other, low, sort_rows=True))
    _, firsts, seconds = quick([far, *lows], 16)
    assert firsts[128, True] == [other] and len(firsts[16, False]) == winners.MOST and seconds[128] == [high]
    long = replace(high, block_m=32, block_k=256, num_stages=2)  # along K of GEMM 2 alone
    narrow = gemm((9,) * 8, n=2048, k=128)
    found = winners.tiles([Won(8, 2, 128, 1024, 16, Plan(low, long))], CONFIG, 16, narrow, gemm((9,) * 8), True)
    assert found[1:] == ({(16, False): [low]}, {})


def test_plans_of_every_layer_of_a_gpu(tmp_path, monkeypatch, caplog) -> None:
    """The user's file in place of the shipped one of its name, as in `choose_plan`; broken ones are named."""
    monkeypatch.setenv(configs.FOLDER_VARIABLE, str(tmp_path / "user"))
    monkeypatch.setattr(configs, "PACKAGED", tmp_path / "packaged")
    assert list(configs.won_plans(DEVICE, "int8_w8a8")) == []
    plain = Plan(TILE, TILE)
    other = replace(CONFIG, num_experts=16, num_local_experts=16)
    TunedFile(tmp_path / "user", CONFIG, DEVICE).add(16, PLAN, 1.0, 2.0)
    TunedFile(tmp_path / "packaged", CONFIG, DEVICE).add(32, plain, 1.0, 2.0)
    TunedFile(tmp_path / "packaged", other, DEVICE).add(64, plain, 1.0, 2.0)
    TunedFile(tmp_path / "packaged", other, DEVICE + "-2").add(64, plain, 1.0, 2.0)
    want = [Won(8, 2, 512, 1024, 16, PLAN), Won(16, 2, 512, 1024, 64, plain)]
    assert list(configs.won_plans(DEVICE, "int8_w8a8")) == want
    assert list(configs.won_plans(DEVICE, "int8_w8a16")) == [] and not caplog.records
    head = '{"experts": 4, "topk": 2, "hidden": 64, "intermediate": '
    texts = ("", "[]", '{"plans": {}}', head + '0, "plans": {}}', head + '9, "plans": {"1": {}}}', head + "9}")
    for number, text in enumerate(texts):
        name = configs.plans_name(configs.file_name(100 + number, 9, DEVICE, "int8_w8a8"))
        (tmp_path / "user" / name).write_text(text)
    with caplog.at_level(logging.WARNING, "int8moe"):
        assert list(configs.won_plans(DEVICE, "int8_w8a8")) == want
    said = [record.getMessage() for record in caplog.records]
    assert [f"E={100 + n},N=9" in text and "is left out" in text for n, text in enumerate(said)] == [True] * len(texts)


def test_what_ships_with_the_package_can_be_tried() -> None:
    found = winners.winners(CONFIG, "NVIDIA H200")
    assert len({(won.experts, won.intermediate) for won in found}) > 10
    assert winners.winners(CONFIG, "NVIDIA H200", weight_only=True)


# --- files -----------------------------------------------------------------------------------------------------------


def test_what_was_kept_is_read_back(tmp_path) -> None:
    kept = TunedFile(tmp_path / "new" / "folder", CONFIG, DEVICE)
    assert not kept.has(16) and kept.replaces is None
    kept.add(256, PLAN, 100.123, 150.0)
    kept.add(16, Plan(TILE, TILE, rows=True), 10.0, 10.0)
    assert kept.tiles.name == "E=8,N=1024,device_name=NVIDIA_A100-SXM4-80GB,dtype=int8_w8a8.json"
    assert kept.plans.name == "E=8,N=1024,device_name=NVIDIA_A100-SXM4-80GB,dtype=int8_w8a8.plans.json"
    assert configs.read_plans(kept.plans) == {16: Plan(TILE, TILE, rows=True), 256: PLAN}
    plain = replace(TILE, tma=True, persistent=0)  # what vLLM's format holds
    assert configs.read_file(kept.tiles) == {16: plain, 256: plain}
    again = TunedFile(tmp_path / "new" / "folder", CONFIG, DEVICE)
    assert again.has(16) and again.has(256) and not again.has(32) and again.entries == kept.entries
    assert again.entries["256"]["latency_us"] == 100.12 and again.entries["256"]["default_us"] == 150.0
    assert {p.name for p in kept.tiles.parent.iterdir()} == {kept.tiles.name, kept.plans.name}


def test_the_tile_file_is_as_vllm_reads_it(tmp_path) -> None:
    kept = TunedFile(tmp_path, CONFIG, DEVICE)
    for tokens in (1024, 1, 64):
        kept.add(tokens, PLAN, 1.0, 2.0)
    content = json.loads(kept.tiles.read_text())
    assert isinstance(content.pop("triton_version"), str)
    assert list(map(int, content)) == [1, 64, 1024]
    keys = {"BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages"}
    assert all(set(entry) == keys and all(type(v) is int for v in entry.values()) for entry in content.values())


@pytest.mark.parametrize(("name", "dtype"), [("int8_w8a8", False), ("int8_w8a16", True)])
def test_schemes_have_files_of_their_own(name, dtype, tmp_path) -> None:
    assert f"dtype={name}.json" in TunedFile(tmp_path, CONFIG, DEVICE, dtype).tiles.name


def test_a_specialised_tile_is_kept_and_written_plain_for_vllm(tmp_path) -> None:
    special = TileConfig(128, 256, 128, 16, 8, 4, specialized=True)
    kept = TunedFile(tmp_path, CONFIG, DEVICE)
    kept.add(8192, Plan(special, replace(special, num_warps=4), sort_rows=True), 10.0, 20.0)
    (read,) = configs.read_plans(kept.plans).values()
    assert read == Plan(special, replace(special, num_warps=4), sort_rows=True)
    tile = json.loads(kept.tiles.read_text())["8192"]
    assert tile == configs.tile_entry(special.plain()) and (tile["num_warps"], tile["num_stages"]) == (8, 3)
    assert special.plain().plain() == special.plain() and not special.plain().specialized


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), None])
@pytest.mark.parametrize(
    "tile", [(64, 128, 4, 6), (64, 256, 8, 4), (128, 128, 8, 5), (128, 256, 8, 4), (256, 128, 8, 4)], ids=str
)
@pytest.mark.parametrize("y_bytes", [2, 4])
def test_specialised_tiles_only_where_they_run(capability, tile, y_bytes) -> None:
    m, n, warps, stages = tile
    fitted = configs.fitted(TileConfig(m, n, 128, 8, warps, stages, specialized=True), capability, 1, y_bytes)
    assert fitted.specialized is (capability == (9, 0))
    assert fitted.shared_bytes(1, y_bytes) <= configs.device_shared_memory(capability)
    assert (fitted.block_m, fitted.block_n) == (m, n)  # blocks of a plan stay as high as they were


@pytest.mark.parametrize("other", [dict(hidden_dim=1024), dict(experts_per_token=4)])
def test_another_layer_of_the_same_file_name_is_not_taken_over(other, tmp_path) -> None:
    TunedFile(tmp_path, CONFIG, DEVICE).add(16, PLAN, 1.0, 2.0)
    found = TunedFile(tmp_path, replace(CONFIG, **other), DEVICE)
    assert not found.has(16) and found.entries == {} and found.replaces == "hidden size 512, top-2"
    found.add(32, PLAN, 1.0, 2.0)
    assert set(configs.read_plans.__wrapped__(found.plans)) == {32}


def test_tiles_that_something_else_wrote_are_named_before_they_are_replaced(tmp_path) -> None:
    kept = TunedFile(tmp_path, CONFIG, DEVICE)
    kept.tiles.write_text(json.dumps({"16": configs.tile_entry(TILE)}))
    assert TunedFile(tmp_path, CONFIG, DEVICE).replaces == "tiles without plans"


def test_another_triton_means_tuning_again(tmp_path, monkeypatch) -> None:
    kept = TunedFile(tmp_path, CONFIG, DEVICE)
    kept.add(16, PLAN, 1.0, 2.0)
    assert kept.has(16)
    monkeypatch.setattr(files, "_version", lambda package: "99.0")
    assert not kept.has(16)


def test_what_a_quick_search_found_does_not_pass_for_more(tmp_path) -> None:
    kept = TunedFile(tmp_path, CONFIG, DEVICE)
    kept.add(16, PLAN, 1.0, 2.0, quick=True)
    kept.add(32, PLAN, 1.0, 2.0)
    again = TunedFile(tmp_path, CONFIG, DEVICE)
    assert [again.has(m, quick=True) for m in (16, 32, 64)] == [True, True, False]
    assert [again.has(m) for m in (16, 32, 64)] == [False, True, False]
    assert configs.read_plans(kept.plans) == {16: PLAN, 32: PLAN}, "the kernels take both"
    again.add(16, PLAN, 1.0, 2.0)
    assert TunedFile(tmp_path, CONFIG, DEVICE).has(16)


@pytest.mark.parametrize("where", ["write", "replace"])
@pytest.mark.parametrize("problem", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_write_that_ends_early_leaves_the_old_file_whole(where, problem, tmp_path, monkeypatch) -> None:
    kept = TunedFile(tmp_path, CONFIG, DEVICE)
    kept.add(16, PLAN, 1.0, 2.0)
    before = {p.name: p.read_text() for p in tmp_path.iterdir()}

    def stop(*_: object) -> None:
        raise problem

    if where == "write":
        monkeypatch.setattr(files.os, "chmod", stop)  # after the text, before the name
    else:
        monkeypatch.setattr(files.os, "replace", stop)
    expected = ConfigError if isinstance(problem, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        kept.add(32, PLAN, 1.0, 2.0)
    monkeypatch.undo()
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == before


def test_a_process_killed_while_it_writes_leaves_the_old_file_whole(tmp_path) -> None:
    TunedFile(tmp_path, CONFIG, DEVICE).add(16, PLAN, 1.0, 2.0)
    script = """
        import os, signal, sys
        from pathlib import Path
        sys.path[:0] = [sys.argv[2]]
        import test_tuning as t
        t.files.os.chmod = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        t.TunedFile(Path(sys.argv[1]), t.CONFIG, t.DEVICE).add(32, t.PLAN, 1.0, 2.0)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path), str(Path(__file__).parent)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    kept = TunedFile(tmp_path, CONFIG, DEVICE)
    assert kept.has(16) and not kept.has(32) and set(configs.read_file(kept.tiles)) == {16}


def test_others_may_read_the_files(tmp_path) -> None:
    kept = TunedFile(tmp_path, CONFIG, DEVICE)
    umask = os.umask(0o022)
    try:
        kept.add(16, PLAN, 1.0, 2.0)
    finally:
        os.umask(umask)
    assert [stat.S_IMODE(f.stat().st_mode) for f in (kept.tiles, kept.plans)] == [0o644, 0o644]


@pytest.mark.parametrize("action", ["make_folder", "add"])
def test_a_folder_that_cannot_be_written_is_named(action, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    kept = TunedFile(tmp_path / "file", CONFIG, DEVICE)
    says = r"file/E=8,N=1024\S+json cannot be written \((File exists|Not a directory)\); needs .* --out FOLDER"
    with pytest.raises(ConfigError, match=says):
        kept.make_folder() if action == "make_folder" else kept.add(16, PLAN, 1.0, 2.0)


def test_make_folder_leaves_nothing_in_it(tmp_path) -> None:
    TunedFile(tmp_path / "a" / "b", CONFIG, DEVICE).make_folder()
    assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.mark.parametrize("text", ["", "[]", '{"plans": {"16": {"gemm1": {}}}}', '{"plans": {"x": {}}}'])
def test_a_damaged_file_is_named_and_not_written_over(text, tmp_path) -> None:
    name = configs.plans_name(configs.file_name(8, 1024, DEVICE, "int8_w8a8"))
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=re.escape(name)):
        TunedFile(tmp_path, CONFIG, DEVICE)
    assert (tmp_path / name).read_text() == text


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(num_stages=1), "num_stages is 1, needs at least 2"),
        (dict(num_warps=2), "num_warps is 2, needs 4 or 8"),
        (dict(num_warps=16), "num_warps is 16, needs 4 or 8"),
        (dict(block_m=16), "rows of a group is 16, needs at least 64"),
        (dict(block_m=64, block_n=512), "rows of a group is 32, needs at least 64"),
        (dict(block_n=512), "BLOCK_SIZE_N is 512, needs at most 256"),
        (dict(block_k=256), "BLOCK_SIZE_K is 256, needs 32, 64 or 128"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("gemm", ["gemm1", "gemm2"])
def test_an_impossible_specialised_tile_is_refused(change, says, gemm, tmp_path) -> None:
    """One stage would stop the GPU for ever."""
    good = TileConfig(128, 128, 128, 16, 8, 2, specialized=True)
    path = tmp_path / "some.plans.json"

    def read(tile: TileConfig) -> Plan:
        plan = replace(Plan(good, good, sort_rows=True), **{gemm: tile})
        return configs.plan_of_entry(path, "64", configs.plan_entry(plan))

    with pytest.raises(ConfigError, match=rf"some.plans.json, entry '64.{gemm}': {says} where specialized is true"):
        read(replace(good, **change))
    assert read(good).gemm1 == good
    plain = replace(good, **change, specialized=False)
    assert getattr(read(plain), gemm) == plain, "what another kernel may run is its own matter"


def test_a_block_of_one_is_for_slots_by_themselves(tmp_path) -> None:
    one = replace(TILE, block_m=1, persistent=0)
    plan, path = Plan(one, one, rows=True), tmp_path / "some.plans.json"
    assert configs.plan_of_entry(path, "1", configs.plan_entry(plan)) == plan
    with pytest.raises(ConfigError, match=r"1\.gemm1.: BLOCK_SIZE_M is 1, needs a power of two of at least 8"):
        configs.plan_of_entry(path, "1", configs.plan_entry(replace(plan, rows=False)))
    sorted_slots = configs.in_blocks(plan, (9, 0), 1, 2)
    assert not sorted_slots.rows and sorted_slots.gemm1 == replace(one, block_m=8) == sorted_slots.gemm2
    assert configs.in_blocks(PLAN, (9, 0), 1, 2) == PLAN
    wide = replace(one, block_n=1024, block_k=512)
    with pytest.raises(ConfigError, match="BLOCK_SIZE_N times BLOCK_SIZE_K is 524288, needs at most 65536 where"):
        configs.plan_of_entry(path, "1", configs.plan_entry(Plan(one, wide, rows=True)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(rows="false"), "rows is 'false', needs true or false"),
        (dict(sort_rows=1), "sort_rows is 1, needs true or false"),
        (dict(gemm1={"BLOCK_SIZE_M": True}), "BLOCK_SIZE_M is True, needs a power of two of at least 8"),
    ],
    ids=["rows", "sort_rows", "height"],
)
def test_what_only_looks_like_a_value_is_refused(change, says, tmp_path) -> None:
    entry = configs.plan_entry(Plan(TILE, TILE, rows=True))
    entry |= {key: entry[key] | value if key == "gemm1" else value for key, value in change.items()}
    with pytest.raises(ConfigError, match=says):
        configs.plan_of_entry(tmp_path / "some.plans.json", "1", entry)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(BLOCK_SIZE_M=2**40), "BLOCK_SIZE_M is 1099511627776, needs a power of two of at most 1024"),
        (dict(num_stages=10**9), "num_stages is 1000000000, needs an integer of at most 64"),
        (dict(num_stages=float("nan")), "num_stages is nan, needs an integer of at least 1"),
        (dict(num_warps=2**20), "num_warps is 1048576, needs a power of two of at most 32"),
        (dict(persistent=-1), "gemm1.persistent is -1, needs an integer of at least 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_values_that_no_gpu_has_are_refused(change, says, tmp_path) -> None:
    """A billion stages would be taken away one by one until they fit the shared memory."""
    entry = configs.plan_entry(PLAN)
    entry["gemm1"].update(change)
    (tmp_path / "some.plans.json").write_text(json.dumps({"plans": {"16": entry}}))
    with pytest.raises(ConfigError, match=re.escape(says)):
        configs.read_plans(tmp_path / "some.plans.json")


@pytest.mark.parametrize("tokens", ["0", "-5"])
def test_a_plan_for_no_tokens_is_refused(tokens, tmp_path) -> None:
    (tmp_path / "some.plans.json").write_text(json.dumps({"plans": {tokens: configs.plan_entry(PLAN)}}))
    with pytest.raises(ConfigError, match=f"entry '{tokens}': that is no number of tokens, needs at least 1"):
        configs.read_plans(tmp_path / "some.plans.json")


def test_every_specialised_tile_of_tuning_is_read_back() -> None:
    for block_m, values in space._SPECIALIZED.items():
        for n, k, warps, stages in values:
            for tile in {TileConfig(block_m, n, k, 8, warps, s, specialized=True) for s in (stages, 2)}:
                assert configs.plan_of_entry(Path(), "1", configs.plan_entry(Plan(tile, tile))).gemm1 == tile


# --- found again -----------------------------------------------------------------------------------------------------


def chosen(tokens: int, *, weight_only: bool = False, all_experts: int | None = 8) -> Plan:
    return configs.choose_plan(tokens, 8, 2, 512, 1024, DEVICE, (8, 0), 2 if weight_only else 1, all_experts)


@pytest.mark.parametrize("variable", [configs.FOLDER_VARIABLE, "XDG_DATA_HOME"])
def test_choose_plan_finds_what_was_kept(variable, tmp_path, monkeypatch) -> None:
    monkeypatch.delenv(configs.FOLDER_VARIABLE, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    folder = configs.user_tuned_folder()
    assert folder == (tmp_path if variable == configs.FOLDER_VARIABLE else tmp_path / "int8moe" / "tuned")
    kept = TunedFile(folder, CONFIG, DEVICE)
    kept.add(16, Plan(TILE, TILE, rows=True), 1.0, 2.0)
    kept.add(256, PLAN, 1.0, 2.0)
    assert chosen(1).rows and replace(chosen(136), rows=True) == chosen(1), "of two equally near the smaller"
    assert not chosen(136).rows, "so many slots are sorted, whatever the plan says"
    assert chosen(137) == chosen(1024) == PLAN
    assert chosen(1025) == default_plan(1025, 8, 2, (8, 0)), "far more than were tuned"
    assert chosen(16, weight_only=True) == default_plan(16, 8, 2, (8, 0), 2), "W8A16 has a file of its own"


def test_a_triton_without_specialised_tiles_has_another_default(monkeypatch, tmp_path) -> None:
    """What was measured for it: not the plan with specialised tiles, these made plain."""
    monkeypatch.setenv(configs.FOLDER_VARIABLE, str(tmp_path))
    for tokens in (1, 64, 192, 256, 383, 384, 8192):
        plan = default_plan(tokens, 8, 2, (9, 0), specialized=False)
        assert plan.gemm1 == plan.gemm2 and not plan.gemm1.specialized and not plan.sort_rows
        assert configs.choose_plan(tokens, 8, 2, 512, 1024, "H", (9, 0), specialized=False) == plan
        assert (plan == default_plan(tokens, 8, 2, (9, 0))) == (tokens < 192), "specialised from 48 rows on"
        assert plan.gemm1.block_m <= 64 or plan.gemm1 == TileConfig(128, 128, 128, 8, 4, 3, persistent=2)
    assert default_plan(8192, 8, 2, (8, 0), specialized=False) == default_plan(8192, 8, 2, (8, 0))


def test_a_short_intermediate_size_has_another_default(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv(configs.FOLDER_VARIABLE, str(tmp_path))

    def plan(tokens: int, intermediate: int | None, **more: int) -> Plan:
        return default_plan(tokens, 8, 2, (9, 0), intermediate=intermediate, **more)

    for tokens in (1, 4, 16, 48):  # up to 12 rows an expert
        assert plan(tokens, 384).gemm2 == TileConfig(16, 128, 128, 1, 4, 3)
        assert plan(tokens, 384).gemm1 == plan(tokens, 385).gemm1 == plan(tokens, 385).gemm2
        assert plan(tokens, None) == plan(tokens, 385)
        assert configs.choose_plan(tokens, 8, 2, 512, 384, "H", (9, 0)) == plan(tokens, 384)
        assert plan(tokens, 384, a_bytes=2) == plan(tokens, None, a_bytes=2)
    assert plan(52, 384) == plan(52, None)
    for tokens in (192, 383):  # 48 to 96 rows
        assert plan(tokens, 257).gemm1.specialized and not plan(tokens, 256).gemm1.specialized
    assert plan(384, 256) == plan(384, None)
    assert default_plan(1, 128, 8, (9, 0), intermediate=96).rows, "few slots still go by themselves"
    assert default_plan(4, 8, 2, (8, 0), intermediate=96) == default_plan(4, 8, 2, (8, 0))


def test_a_tile_file_alone_is_found_too(tmp_path, monkeypatch) -> None:
    """As one from vLLM, without plans beside it."""
    monkeypatch.setenv(configs.FOLDER_VARIABLE, str(tmp_path))
    kept = TunedFile(tmp_path, CONFIG, DEVICE)
    kept.add(16, PLAN, 1.0, 2.0)
    kept.plans.unlink()
    plain = replace(TILE, tma=True, persistent=0)
    assert chosen(16) == Plan(plain, plain)


def test_the_warning_of_an_expert_parallel_rank(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setenv(configs.FOLDER_VARIABLE, str(tmp_path))
    with caplog.at_level(logging.WARNING, "int8moe"):
        chosen(1, all_experts=None)  # the batched format: its plans are not tuned
        assert not caplog.records
        chosen(1, all_experts=32)
    assert "int8moe tune --layer 32,2,512,1024 --ep 4" in caplog.text


@pytest.mark.parametrize("weight_only", [False, True])
def test_the_warning_names_a_command_that_makes_this_file(weight_only, tmp_path, monkeypatch, caplog) -> None:
    from int8moe.cli import tune as cli

    monkeypatch.setenv(configs.FOLDER_VARIABLE, str(tmp_path))
    with caplog.at_level(logging.WARNING, "int8moe"):
        for tokens in (1, 16, 16):
            assert chosen(tokens, weight_only=weight_only) == default_plan(
                tokens, 8, 2, (8, 0), 2 if weight_only else 1
            )
    (message,) = [r.getMessage() for r in caplog.records]
    assert message == (
        f"no tuned tiles for 8 experts of 512 x 1024 on {DEVICE}: default tiles are used. To make them:"
        f" int8moe tune --layer 8,2,512,1024{' --weight-only' if weight_only else ''}"
    )
    seen = []
    monkeypatch.setattr(cli, "_run", seen.append)
    words = message.partition("int8moe tune ")[2].split()
    cli.command.main(words, standalone_mode=False)
    options = seen[0]
    assert options.weight_only is weight_only and options.out is None
    TunedFile(configs.user_tuned_folder(), options.config, DEVICE, options.weight_only).add(16, PLAN, 1.0, 2.0)
    configs._tuned.cache_clear()
    assert chosen(16, weight_only=weight_only).gemm1 == TILE


# --- processes that compile ------------------------------------------------------------------------------------------

CHILD = """
    import os, pickle, sys, time
    log = os.environ["CHILD_LOG"]
    with open(log, "a") as file:
        file.write(f"{os.getpid()}\\n")
    if os.environ.get("CHILD_DIES_AT_ONCE"):
        os._exit(1)
    start = pickle.load(sys.stdin.buffer)
    assert start == (("GPU", (9, 0)), 132), start
    while True:
        try:
            task = pickle.load(sys.stdin.buffer)
        except EOFError:
            break
        if task == "dies":
            os._exit(3)
        if task == "hangs":
            time.sleep(60)
        if task == "babbles":
            answer = b"no pickle"
        else:
            answer = pickle.dumps("wrong" if task == "fails" else None)
        os.write(1, answer)
        if task == "babbles":
            time.sleep(60)
"""


@pytest.fixture
def child(tmp_path, monkeypatch) -> Path:
    """A stand-in for the children, which need torch and triton; answers by what a task says. Returns its log of ids."""
    log = tmp_path / "children"
    log.write_text("")
    monkeypatch.setenv("CHILD_LOG", str(log))
    monkeypatch.setattr(Compiler, "command", (sys.executable, "-S", "-c", textwrap.dedent(CHILD)))
    return log


def compiler(workers: int = 2) -> Compiler:
    return Compiler(("GPU", (9, 0)), 132, workers)


def started(log: Path) -> list[int]:
    return [int(line) for line in log.read_text().split()]


def is_gone(pid: int) -> bool:
    """Ended, or ended and only waited for by nobody."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks processes up in /proc")


def test_every_task_is_answered_and_children_are_kept(child) -> None:
    with compiler() as it:
        assert sorted(it.compile(["a", "fails", "b", "c"]), key=str) == [
            ("a", None), ("b", None), ("c", None), ("fails", "wrong"),
        ]  # fmt: skip
        assert list(it.compile(["d"])) == [("d", None)] and list(it.compile([])) == []
        assert len(started(child)) == 2
    assert it.children == {}


@needs_proc
def test_no_more_children_than_tasks_and_none_before_the_first(child) -> None:
    it = compiler(8)
    assert it.children == {}
    with it:
        assert list(it.compile(["a"])) == [("a", None)] and len(it.children) == 1
    assert [is_gone(pid) for pid in started(child)] == [True]
    compiler().__exit__()  # never used


@pytest.mark.parametrize(("bad", "says"), [("dies", "EOFError"), ("babbles", "UnpicklingError")])
@needs_proc
def test_a_child_that_dies_fails_its_task_only(bad, says, child) -> None:
    with compiler(1) as it:
        found = dict(it.compile(["a", bad, "b", "fails", "c"]))
        assert found.pop(bad) == f"the compiling process died ({says})"
        assert found == {"a": None, "b": None, "fails": "wrong", "c": None}
    first, second = started(child)
    assert first != second and is_gone(first) and is_gone(second)


def test_children_that_cannot_start_answer_every_task(child, monkeypatch) -> None:
    """Without an answer the search would wait forever."""
    monkeypatch.setenv("CHILD_DIES_AT_ONCE", "1")
    with compiler() as it:
        found = list(it.compile(["a", "b", "c"]))
    assert sorted(task for task, _ in found) == ["a", "b", "c"]
    assert all(str(error).startswith("the compiling process died") for _, error in found)
    monkeypatch.setattr(Compiler, "command", ("/no/such/python",))
    with compiler() as it:
        assert dict(it.compile(["a"])) == {"a": "the compiling process died (FileNotFoundError)"}


@needs_proc
def test_leaving_in_the_middle_ends_the_children_and_starts_no_others(child) -> None:
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt), compiler() as it:
        for task, _ in it.compile(["a", "hangs", "hangs", "hangs", "hangs"]):
            assert task == "a"
            raise KeyboardInterrupt
    assert time.monotonic() - begin < 30 and it.children == {}
    time.sleep(0.3)
    assert len(started(child)) <= 2 and all(map(is_gone, started(child)))
    assert not any(thread.is_alive() for thread in it.threads)


@needs_proc
def test_children_end_when_their_parent_is_killed(child) -> None:
    script = """
        import os, signal, sys
        from int8moe.tuning.precompile import Compiler
        Compiler.command = (sys.executable, "-S", "-c", sys.argv[1])
        it = Compiler(("GPU", (9, 0)), 132, 2)
        assert len(list(it.compile(["a", "b", "c", "d"]))) == 4
        os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), textwrap.dedent(CHILD)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    until = time.monotonic() + 10
    while not all(map(is_gone, started(child))) and time.monotonic() < until:
        time.sleep(0.05)
    assert started(child) and all(map(is_gone, started(child)))


def test_the_tasks_of_a_plan() -> None:
    assert plan_tasks(CONFIG, False, PLAN) == [
        Task(CONFIG, False, True, "sorted", PLAN.gemm1),
        Task(CONFIG, False, False, "gathered", PLAN.gemm2),
    ]
    assert [t.kind for t in plan_tasks(CONFIG, True, replace(PLAN, sort_rows=False))] == ["gathered", "gathered"]
    assert [t.kind for t in plan_tasks(CONFIG, True, Plan(TILE, TILE, rows=True))] == ["rows", "rows"]


def test_a_real_child_answers(monkeypatch) -> None:
    """Where there is no GPU, with what is missing; each kind of launch goes through, and the child lives on."""
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    tile = TileConfig(16, 64, 128, 1, 4, 3)
    tasks = [
        Task(replace(CONFIG, has_bias=True), weight_only, first, kind, tile)
        for weight_only, first, kind in (
            (False, True, "gathered"), (False, True, "sorted"), (False, False, "gathered"), (True, True, "gathered"),
            (False, True, "rows"), (True, False, "rows"),
        )
    ]  # fmt: skip
    with Compiler(("NVIDIA H200", (9, 0)), 132, 1) as it:
        found = dict(it.compile(tasks))
        assert len(it.children) == 1
    assert set(found) == set(tasks)
    for error in found.values():
        assert error is not None and "driver" in error, error


def test_precompile_runs_as_a_module() -> None:
    assert Compiler.command == (sys.executable, "-m", precompile.__name__)
