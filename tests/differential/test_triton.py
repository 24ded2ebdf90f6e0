"""The Triton backend against the reference, bit for bit: on a GPU where there is one, else in Triton's interpreter.

The interpreter has to be chosen before triton is first imported. Where another test module of this process did that
already, this file runs itself in a fresh process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
TOO_LATE = DEVICE == "cpu" and "triton" in sys.modules and not _interpreted
if DEVICE == "cpu" and not TOO_LATE:
    os.environ["TRITON_INTERPRET"] = "1"

if TOO_LATE:

    def test_in_a_fresh_process() -> None:
        """Everything else in this file."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        root = Path(__file__).parents[2]
        done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]

else:
    pytest.importorskip("triton")
    from hypothesis import given, settings

    from cases import ADVERSARIAL, Case, assert_same_bits, build, layer_cases
    from int8moe.backends import arguments
    from int8moe.backends.triton import configs, launch, run
    from int8moe.backends.triton.support import BatchedTritonExperts, TritonExperts
    from int8moe.config import FusedMoEConfig, MoEActivation
    from int8moe.errors import ConfigError, InvalidRouting, ShapeMismatch

    if not _interpreted:
        # Kernels are bound by now; other test modules see what they would have seen.
        os.environ.pop("TRITON_INTERPRET", None)

    @pytest.fixture(scope="module", autouse=True)
    def _interpreter_while_tests_run() -> Iterator[None]:
        """Triton loads parts of itself at the first launch."""
        with pytest.MonkeyPatch.context() as patch:
            if DEVICE == "cpu":
                patch.setenv("TRITON_INTERPRET", "1")
            yield

    pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy, on NaN and overflow

    BOTH = pytest.mark.parametrize("experts_cls", [TritonExperts, BatchedTritonExperts], ids=["standard", "batched"])
    BATCHED_IN_INTERPRETER = (
        "activation_silu_bfloat16", "activation_gelu_float16", "activation_swigluoai_float32", "not_gated_gelu_tanh",
        "bias", "no_tokens", "one_token", "all_on_one_expert", "expert_map", "expert_map_none_local", "zero_rows",
        "nan_and_inf_rows", "huge_rows_fp16_overflow", "ragged_7_5", "router_weight_on_input",
        "router_weight_on_input_topk3",
    )  # fmt: skip

    # --- bits --------------------------------------------------------------------------------------------------------

    # In the interpreter each activation once, in the dtype whose rounding Triton would do differently there.
    STANDARD = [n for n in ADVERSARIAL if DEVICE == "cuda" or not n.startswith("activation_") or n.endswith("bfloat16")]

    @pytest.mark.parametrize("name", STANDARD)
    def test_bits(name: str) -> None:
        if DEVICE == "cpu" and name == "two_thousand_experts":
            pytest.skip("thousands of programs are slow in the interpreter; many_experts is 1024")
        case = build(**ADVERSARIAL[name])
        assert_same_bits(case.run(TritonExperts, DEVICE), case.reference_output())

    @pytest.mark.parametrize("name", list(ADVERSARIAL) if DEVICE == "cuda" else BATCHED_IN_INTERPRETER)
    def test_bits_of_the_batched_format(name: str) -> None:
        case = build(**ADVERSARIAL[name])
        assert_same_bits(case.run(BatchedTritonExperts, DEVICE), case.reference_output())

    @given(layer_cases())
    @settings(max_examples=200 if DEVICE == "cuda" else 6)
    def test_bits_of_any_layer(case: Case) -> None:
        assert_same_bits(case.run(TritonExperts, DEVICE), case.reference_output())

    @pytest.mark.gpu
    @given(layer_cases())
    @settings(max_examples=200)
    def test_bits_of_any_batched_layer(case: Case) -> None:
        assert_same_bits(case.run(BatchedTritonExperts, DEVICE), case.reference_output())

    @BOTH
    @pytest.mark.parametrize(
        "changes",
        [
            dict(M=7),
            dict(M=9, local=[0, 3, 6], dtype="float32", rows="spread"),  # amax over the rows of local slots only
            dict(M=5, rows="nan_one"),  # all of it NaN
            dict(M=6, local=[5], rows="nan_one", dtype="float16"),
            dict(M=4, on_input=True, bias=True, activation=MoEActivation.GELU_TANH, gated=False),
        ],
    )
    def test_bits_of_one_scale_per_tensor(experts_cls: type, changes: dict[str, Any]) -> None:
        case = build(scheme="w8a8-tensor", **changes)
        assert_same_bits(case.run(experts_cls, DEVICE), case.reference_output())

    # More columns than eight pieces of 32 hold, as that test sets them.
    WIDE_ROWS = dict(H=259, I=40, M=9, rows="spread", dtype="float32")

    @pytest.mark.parametrize("name", ["expert_map", "ragged_33_65", "topk_is_all", "nan_and_inf_rows", "wide_rows"])
    def test_bits_of_the_alignment_for_many_slots(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Slots in chunks, as from CHUNK on, and rows in pieces, or too wide for them."""
        monkeypatch.setattr(launch, "CHUNK", 16)
        monkeypatch.setattr(launch, "SMALL_CHUNK", 16)
        monkeypatch.setattr(launch, "PIECE", 16)
        monkeypatch.setattr(launch, "WIDEST_PIECE", 32)
        monkeypatch.setattr(launch, "SCANNED", (16, 2))
        case = build(**{**ADVERSARIAL, "wide_rows": WIDE_ROWS}[name])
        width = case.hidden_states.shape[1]
        assert (launch._pieces(width)[1]["CHUNKS"] == 0) == (name == "wide_rows")
        assert_same_bits(case.run(TritonExperts, DEVICE), case.reference_output())

    @pytest.mark.parametrize(
        ("height", "rows"), [(8, True), (8, False), (1, True)], ids=["rows", "blocks", "without tensor cores"]
    )
    @pytest.mark.parametrize("scheme", ["w8a8", "w8a16", "w8a8-tensor"])
    @pytest.mark.parametrize(
        "layer",
        [
            dict(),
            dict(gated=False, activation=MoEActivation.GELU_TANH, bias=True),
            dict(activation=MoEActivation.SWIGLUOAI, bias=True),
        ],
        ids=["silu", "gelu_tanh", "swigluoai"],
    )
    def test_other_products_give_the_same_bits(
        height: int, rows: bool, scheme: str, layer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Transposed; without tensor cores. A batch and one scale for all rows take blocks, whatever a plan says."""
        tile = configs.TileConfig(height, 32, 64, 1, 2, 2)
        case = build(E=4, M=5, H=72, I=40, scheme=scheme, **layer)
        usual = case.run(TritonExperts, DEVICE)
        launched = []
        monkeypatch.setattr(
            launch, "choose_plan", lambda *a, **k: launched.append(a) or configs.Plan(tile, tile, rows=rows)
        )
        for cls in (TritonExperts, BatchedTritonExperts):
            launched.clear()
            got = case.run(cls, DEVICE)
            assert launched
            if scheme != "w8a16":
                assert_same_bits(got, case.reference_output())
            else:
                assert (got.float() - usual.float()).abs().max() <= 4e-3 * usual.float().abs().max()

    def test_sums_that_float32_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
        """Without tensor cores 1,100 products of 127 and 127 pass 2**24, from where on odd sums are lost."""
        tile = configs.TileConfig(1, 16, 32, 1, 2, 2)
        case = build(E=2, topk=1, M=1, H=32 * 1100, I=16, dtype="float32")
        case.hidden_states.fill_(1.0)
        case.w13.fill_(127)
        monkeypatch.setattr(launch, "choose_plan", lambda *a, **k: configs.Plan(tile, tile, rows=True))
        assert_same_bits(case.run(TritonExperts, DEVICE), case.reference_output())

    @pytest.mark.parametrize(
        "tile", [(8, 32, 64, 4), (16, 32, 32, 1), (32, 64, 256, 8), (64, 16, 64, 2), (128, 128, 128, 3)]
    )
    def test_bits_do_not_depend_on_the_tile(
        tile: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        case = build(E=3, M=40, H=160, I=72, bias=True)
        name = configs.file_name(3, 72, launch.device_facts(torch.device(DEVICE))[0], "int8_w8a8")
        keys = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M")
        entry = {**dict(zip(keys, tile, strict=True)), "num_warps": 4, "num_stages": 2}
        (tmp_path / name).write_text(json.dumps({"triton_version": "3.6.0", "64": entry}))
        monkeypatch.setenv(configs.FOLDER_VARIABLE, str(tmp_path))
        seen = []
        original = launch.choose_plan
        monkeypatch.setattr(launch, "choose_plan", lambda *a: seen.append(original(*a)) or seen[-1])
        assert_same_bits(case.run(TritonExperts, DEVICE), case.reference_output())
        assert [(t.block_m, t.block_n, t.block_k, t.group_m) for p in seen for t in (p.gemm1, p.gemm2)] == [tile] * 2

    def test_bits_without_int8_products(monkeypatch: pytest.MonkeyPatch) -> None:
        """The float32 products of compute capability 7.5; the longest sums and the largest codes."""
        monkeypatch.setattr(launch, "in_float32", lambda a: True)
        case = build(weights="extreme", M=4, H=512, I=320)
        assert_same_bits(case.run(TritonExperts, DEVICE), case.reference_output())

    @BOTH
    def test_a_token_does_not_see_its_batch(experts_cls: type) -> None:
        case = build(M=24, E=4, dtype="bfloat16")
        together = case.run(experts_cls, DEVICE)
        for token in (0, 11, 23):
            part = slice(token, token + 1)
            alone = Case(
                case.config, case.w13, case.w2, case.quant_config, case.hidden_states[part], case.topk_weights[part],
                case.topk_ids[part],
            )  # fmt: skip
            assert_same_bits(alone.run(experts_cls, DEVICE), together[part])

    def test_hidden_states_may_be_a_view() -> None:
        case = build(M=5, dtype="float16")
        want = case.reference_output()
        padded = torch.full((5, 3 * 64), float("nan"), dtype=torch.float16)
        padded[:, 64:128] = case.hidden_states
        experts = _loaded(case, TritonExperts)
        for view in (padded.to(DEVICE)[:, 64:128], case.hidden_states.T.contiguous().to(DEVICE).T):
            got = experts.apply(view, case.topk_weights.to(DEVICE), case.topk_ids.to(DEVICE))
            assert_same_bits(got.cpu(), want)

    # --- weight-only: a tolerance ----------------------------------------------------------------------------------

    @BOTH
    @pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 4e-3), ("float16", 5e-4), ("float32", 1e-5)])
    def test_weight_only(experts_cls: type, dtype: str, tolerance: float) -> None:
        case = build(scheme="w8a16", dtype=dtype, M=12, H=70, bias=True, activation=MoEActivation.SWIGLUOAI)
        got, want = case.run(experts_cls, DEVICE).double(), case.reference_output().double()
        assert (got - want).norm() <= tolerance * want.norm()

    # --- the batched class's own call --------------------------------------------------------------------------------

    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_batched_outputs_are_the_experts_before_the_router_weight(dtype: str) -> None:
        case = build(E=4, topk=1, M=7, dtype=dtype, bias=True)
        batch = case.hidden_states[None].repeat(4, 1, 1).clone()
        counts = torch.tensor([7, 0, 3, 5], dtype=torch.int32)
        for e, n in enumerate(counts.tolist()):
            batch[e, n:] = float("nan")  # not read
        got = _loaded(case, BatchedTritonExperts)._run.apply_batched(batch.to(DEVICE), counts.to(DEVICE)).cpu()
        for e, n in enumerate(counts.tolist()):
            assert not got[e, n:].any()
            rows = Case(
                case.config, case.w13, case.w2, case.quant_config, batch[e, :n], torch.ones(n, 1),
                torch.full((n, 1), e),
            )  # fmt: skip
            assert_same_bits(got[e, :n] + 0.0, rows.reference_output())

    def test_batched_shapes_are_checked() -> None:
        runner = _loaded(build(E=4), BatchedTritonExperts)._run
        with pytest.raises(ShapeMismatch, match=r"hidden_states has shape \(3, 5, 64\), needs \(4, tokens, 64\)"):
            runner.apply_batched(torch.zeros(3, 5, 64), torch.zeros(3))
        with pytest.raises(ShapeMismatch, match=r"expert_num_tokens has shape \(3,\), needs \(4,\)"):
            runner.apply_batched(torch.zeros(4, 5, 64), torch.zeros(3))

    # --- ids ---------------------------------------------------------------------------------------------------------

    @BOTH
    @pytest.mark.parametrize("mapped", [False, True])
    @pytest.mark.parametrize("bad", [-1, 8, 2**31 + 1, -(2**40)])
    def test_an_invalid_id_is_refused_or_makes_its_token_nan(
        experts_cls: type, mapped: bool, bad: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        case = build(M=4, local=[1, 2, 5, 6] if mapped else None)
        want = case.reference_output()
        case.topk_ids[2, 1] = bad
        monkeypatch.setenv(arguments.VALIDATE_VARIABLE, "1")
        with pytest.raises(InvalidRouting, match=f"holds {bad}, needs 0 to 7"):
            case.run(experts_cls, DEVICE)
        monkeypatch.setattr(run, "validates", lambda: False)
        want[2] = float("nan")
        assert_same_bits(case.run(experts_cls, DEVICE), want)

    def test_an_invalid_map_entry_makes_its_tokens_nan(monkeypatch: pytest.MonkeyPatch) -> None:
        case = build(M=6, local=[1, 2, 5, 6])
        assert case.expert_map is not None
        want = case.reference_output()
        case.expert_map[5], case.expert_map[0] = 4, -7
        with pytest.raises(InvalidRouting, match="expert_map holds"):
            monkeypatch.setenv(arguments.VALIDATE_VARIABLE, "1")
            case.run(TritonExperts, DEVICE)
        monkeypatch.setattr(run, "validates", lambda: False)
        want[((case.topk_ids == 5) | (case.topk_ids == 0)).any(1)] = float("nan")
        assert_same_bits(case.run(TritonExperts, DEVICE), want)

    # --- alignment ---------------------------------------------------------------------------------------------------

    def _check_alignment(
        slots: int, num_experts: int, num_local: int, block_m: int, ids: np.ndarray, expert_map: np.ndarray | None
    ) -> None:
        """Against a plain statement in numpy."""
        to = lambda a: None if a is None else torch.from_numpy(a).to(DEVICE)
        got, _ = launch.align(
            to(ids.reshape(-1, 1)), to(expert_map), num_experts, num_local, block_m, second_block_m=2 * block_m,
            places=True,
        )  # fmt: skip
        known = (ids >= 0) & (ids < num_experts)
        local = np.where(known, ids, 0)
        local = local if expert_map is None else expert_map[local]
        local = np.where(known, local, -2)
        assert np.array_equal(got.local.cpu().numpy(), local)
        order = np.argsort(np.where(local < 0, num_local, local), kind="stable")[: (local >= 0).sum()]
        assert got.order is not None
        assert np.array_equal(got.order.cpu().numpy()[: len(order)], order)
        place = np.where(local < 0, local, 0)
        place[order] = np.arange(len(order))
        assert got.place is not None and np.array_equal(got.place.cpu().numpy(), place)
        for blocks, height in ((got, block_m), (got.second, 2 * block_m)):
            assert blocks is not None
            table = []
            for expert in np.unique(local[local >= 0]):
                first, rows = int(np.searchsorted(local[order], expert)), int((local == expert).sum())
                table += [(int(expert), first + r, min(height, rows - r)) for r in range(0, rows, height)]
            count, held = blocks.totals.tolist()
            assert held == len(order)
            assert count == len(table) <= blocks.capacity
            columns = (t.cpu()[:count].tolist() for t in (blocks.expert, blocks.first, blocks.rows))
            assert list(zip(*columns, strict=True)) == table

    @pytest.mark.parametrize("slots", [1, 2, 31, 256, 257, 1000, 3000])
    @pytest.mark.parametrize(("num_experts", "block_m"), [(1, 16), (8, 128), (130, 16), (2000, 64)])
    @pytest.mark.parametrize("kind", ["all", "mapped", "skewed"])
    def test_alignment(slots: int, num_experts: int, block_m: int, kind: str) -> None:
        if DEVICE == "cpu" and num_experts == 2000 and (slots, kind) != (31, "mapped"):
            pytest.skip("thousands of programs are slow in the interpreter")
        rng = np.random.default_rng(slots + num_experts)
        ids = rng.integers(0, num_experts, slots)
        expert_map, num_local = None, num_experts
        if kind == "mapped":
            num_local = (num_experts + 1) // 2
            expert_map = np.full(num_experts, -1, np.int32)
            expert_map[rng.permutation(num_experts)[:num_local]] = np.arange(num_local)
            ids[rng.random(slots) < 0.1] = rng.choice([-1, -5, num_experts, 2**33])
        elif kind == "skewed":
            ids = np.minimum(ids, rng.integers(0, 3, slots)).astype(np.int32)
        _check_alignment(slots, num_experts, num_local, block_m, ids, expert_map)

    @pytest.mark.parametrize("slots", [16, 17, 100, 250])
    def test_alignment_in_chunks(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(launch, "CHUNK", 16)
        monkeypatch.setattr(launch, "SMALL_CHUNK", 16 if slots < 200 else 64)
        _check_alignment(slots, 40, 40, 16, np.random.default_rng(slots).integers(-1, 41, slots), None)

    @pytest.mark.gpu
    @pytest.mark.parametrize("num_experts", [8, 128, 1024, 2000])
    def test_alignment_of_a_long_prefill(num_experts: int) -> None:
        rng = np.random.default_rng(0)
        _check_alignment(65536, num_experts, num_experts, 128, rng.integers(0, num_experts, 65536), None)

    # --- loading, tiles ----------------------------------------------------------------------------------------------

    def _loaded(case: Case, experts_cls: type) -> Any:
        """The experts object of a case, with its weights."""
        kept = []

        class Keep(experts_cls):  # type: ignore[misc]
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                kept.append(self)

        case.run(Keep, DEVICE)
        return kept[0]

    def test_weights_come_back() -> None:
        case = build()
        w13, w2 = _loaded(case, TritonExperts).unpack_weights()
        assert torch.equal(w13.cpu(), case.w13) and torch.equal(w2.cpu(), case.w2)

    def test_rows_of_w2_get_zeros_up_to_16_bytes_and_what_stands_before_them_does_not_matter(
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        real = launch._empty_codes

        def poisoned(*shape: Any) -> tuple[torch.Tensor, torch.Tensor]:
            q, scale = real(*shape)
            return q.fill_(99), scale

        monkeypatch.setattr(launch, "_empty_codes", poisoned)
        for tokens in (2, 40):
            for scheme in ("w8a8", "w8a8-tensor"):
                case = build(scheme=scheme, M=tokens, H=64, I=40)
                given = case.w2.clone()
                want = case.reference_output()
                experts = _loaded(case, TritonExperts)
                assert experts._run._loaded().w2.shape[2] == 48
                assert_same_bits(case.run(TritonExperts, DEVICE), want)
                assert torch.equal(experts.unpack_weights()[1].cpu(), given)

    def test_weights_that_do_not_fit_are_refused() -> None:
        case = build()
        case.w2 = case.w2[:, :-1]
        with pytest.raises(ShapeMismatch, match="w2 has shape"):
            case.run(TritonExperts, DEVICE)

    def test_default_tiles_fit_every_device() -> None:
        for capability, limit in configs.SHARED_MEMORY.items():
            for a_bytes in (1, 2, 4):
                for tokens in (1, 8, 64, 512, 8192):
                    plan = configs.default_plan(tokens, 8, 2, capability, a_bytes)
                    for tile in (plan.gemm1, plan.gemm2):
                        assert tile.shared_bytes(a_bytes) <= limit, (capability, a_bytes, tile)
                        assert tile.block_k >= 32 and tile.num_stages >= 2
        assert configs.default_plan(1, 128, 8, (9, 0)).rows
        assert configs.default_plan(8192, 128, 8, (9, 0)).gemm1.block_m == 128
        # Expert parallel: 512 tokens give 16 rows to each of 256 experts, wherever those are.
        assert configs.default_plan(512, 32, 8, (9, 0), all_experts=256) == configs.default_plan(512, 256, 8, (9, 0))

    def test_tile_files_have_the_names_that_vllm_reads() -> None:
        name = configs.file_name(128, 768, "NVIDIA H200 SXM", "int8_w8a8")
        assert name == "E=128,N=768,device_name=NVIDIA_H200,dtype=int8_w8a8.json"
        assert "device_name=NVIDIA_A100-SXM4-80GB," in configs.file_name(8, 7, "NVIDIA A100-SXM4-80GB", "int8_w8a16")

    def test_the_nearest_token_count_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        entry = dict(BLOCK_SIZE_N=64, BLOCK_SIZE_K=64, GROUP_SIZE_M=1, num_warps=4, num_stages=3, waves_per_eu=0)
        content = {
            "triton_version": "3.6.0",
            **{m: {**entry, "BLOCK_SIZE_M": b} for m, b in (("1", 16), ("64", 32), ("512", 64))},
        }
        (tmp_path / configs.file_name(8, 96, "Some GPU", "int8_w8a8")).write_text(json.dumps(content))
        monkeypatch.setenv(configs.FOLDER_VARIABLE, str(tmp_path))
        chosen = [
            configs.choose_plan(m, 8, 2, 64, 96, "Some GPU", (9, 0)).gemm1.block_m for m in (1, 30, 40, 300, 2048)
        ]
        assert chosen == [16, 16, 32, 64, 64]
        far = configs.choose_plan(2049, 8, 2, 64, 96, "Some GPU", (9, 0))
        default = partial(configs.default_plan, capability=(9, 0), intermediate=96)
        assert far == default(2049, 8, 2), "more than four times as many tokens as were tuned"
        assert configs.choose_plan(1, 9, 2, 64, 96, "Some GPU", (9, 0)) == default(1, 9, 2)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{", "not a tile file"),
            ("[]", "not a tile file"),
            ('{"1": 3}', "not a tile file"),
            ('{"1": {"BLOCK_SIZE_M": 48}}', "entry '1': BLOCK_SIZE_M is 48, needs a power of two of at least 8"),
            ('{"1": {"BLOCK_SIZE_M": 16}}', "BLOCK_SIZE_N is None"),
        ],
    )
    def test_a_bad_tile_file_is_refused_by_name(text: str, message: str, tmp_path: Path) -> None:
        path = tmp_path / "bad.json"
        path.write_text(text)
        with pytest.raises(ConfigError, match=message) as caught:
            configs.read_file(path)
        assert "bad.json" in str(caught.value)

    # --- torch.compile, graphs, other GPUs ---------------------------------------------------------------------------

    def _compiled_equals_eager(experts_cls: type, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(run, "validates", lambda: False)
        case = build(M=6, local=[0, 2, 5])
        experts = _loaded(case, experts_cls)

        def step(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, expert_map: torch.Tensor) -> torch.Tensor:
            return experts.apply(x + 0, weights, ids, expert_map=expert_map) * 1

        arguments = [t.to(DEVICE) for t in (case.hidden_states, case.topk_weights, case.topk_ids, case.expert_map)]
        compiled: Callable[..., torch.Tensor] = torch.compile(step, fullgraph=True, backend=backend)
        assert_same_bits(compiled(*arguments).cpu(), case.reference_output())

    @BOTH
    def test_compiles_to_one_graph(experts_cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
        _compiled_equals_eager(experts_cls, "aot_eager", monkeypatch)

    @pytest.mark.gpu
    @BOTH
    def test_inductor_compiles_to_one_graph(experts_cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
        _compiled_equals_eager(experts_cls, "inductor", monkeypatch)

    @pytest.mark.gpu
    @BOTH
    @pytest.mark.parametrize("scheme", ["w8a8", "w8a8-tensor"])
    @pytest.mark.parametrize("tokens", [1, 300])
    def test_a_cuda_graph_replays_with_new_inputs(experts_cls: type, scheme: str, tokens: int) -> None:
        first, second = (build(M=tokens, E=16, topk=4, H=256, I=128, scheme=scheme, seed=s) for s in (0, 1))
        second.w13, second.w2, second.quant_config = first.w13, first.w2, first.quant_config
        experts = _loaded(first, experts_cls)
        inputs = [t.cuda() for t in (first.hidden_states, first.topk_weights, first.topk_ids)]
        experts.apply(*inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = experts.apply(*inputs)
        for case in (second, first, second):
            for held, new in zip(inputs, (case.hidden_states, case.topk_weights, case.topk_ids), strict=True):
                held.copy_(new)
            out.fill_(float("nan"))
            graph.replay()
            assert_same_bits(out.cpu(), case.reference_output())

    @pytest.mark.gpu
    @BOTH
    def test_a_token_alone_equals_itself_among_a_thousand(experts_cls: type) -> None:
        case = build(M=1000, E=128, topk=8, H=2048, I=768)
        experts = _loaded(case, experts_cls)
        arguments = [t.cuda() for t in (case.hidden_states, case.topk_weights, case.topk_ids)]
        together = experts.apply(*arguments)
        for token in (0, 1, 499, 999):
            assert_same_bits(experts.apply(*(t[token : token + 1] for t in arguments)), together[token : token + 1])

    @pytest.mark.gpu
    def test_a_second_gpu() -> None:
        if torch.cuda.device_count() < 2:
            pytest.skip("one GPU here")
        case = build(M=5)
        assert_same_bits(case.run(TritonExperts, "cuda:1"), case.reference_output())

    def test_compiles_ahead_of_time() -> None:
        """For GPUs that are not here, with the float steps and the tensor-core instructions that were meant."""
        script = Path(__file__).with_name("triton_ahead_of_time.py")
        command = [sys.executable, str(script), "--few", "75", "80", "86", "89", "90", "100"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]

    def test_canonical_weights_on_a_cpu_need_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(launch, "INTERPRETED", False)
        with pytest.raises(ConfigError, match="w13_weight is on cpu, needs a GPU"):
            build().run(TritonExperts)

    def test_a_rank_without_experts() -> None:
        case = build(M=3, local=[])
        assert isinstance(case.config, FusedMoEConfig) and case.config.num_local_experts == 0
        assert_same_bits(case.run(TritonExperts, DEVICE), torch.zeros(3, 64, dtype=torch.bfloat16))
