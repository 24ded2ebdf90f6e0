"""The native CPU kernel equals the reference bit for bit, on each instruction set that runs here."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import library

from cases import ADVERSARIAL, Case, assert_same_bits, build, layer_cases
from int8moe.backends.cpu import layout
from int8moe.backends.cpu.native import load, select_isa
from int8moe.backends.cpu.support import CPUExpertsInt8
from int8moe.errors import AlreadyConverted, InvalidRouting, NativeExtensionError, ShapeMismatch
from int8moe.layer import build_kernel
from int8moe.quant_config import FusedMoEQuantConfig
from int8moe.weights import ExpertWeights

RUNNABLE = [name for name, runs, _ in load().kernels() if runs]


@pytest.fixture(params=RUNNABLE)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("INT8MOE_CPU_ISA", request.param)
    return request.param


def prepared(case: Case, isa: str) -> CPUExpertsInt8:
    q = case.quant_config
    experts = CPUExpertsInt8(case.config, FusedMoEQuantConfig(**vars(q)))
    assert experts._run.isa == isa
    experts.process_weights_after_loading(SimpleNamespace(w13_weight=case.w13, w2_weight=case.w2))
    return experts


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_adversarial(name: str, isa: str) -> None:
    case = build(**ADVERSARIAL[name])
    assert_same_bits(case.call(prepared(case, isa)), case.reference_output())


@pytest.mark.parametrize("name", RUNNABLE)
@settings(max_examples=60)
@given(case=layer_cases())
def test_any_layer(name: str, case: Case) -> None:
    os.environ["INT8MOE_CPU_ISA"] = name
    try:
        experts = prepared(case, name)
    finally:
        del os.environ["INT8MOE_CPU_ISA"]
    assert_same_bits(case.call(experts), case.reference_output())


def test_a_token_alone_and_among_a_thousand(isa: str) -> None:
    case = build(E=16, topk=4, H=96, I=64, M=1000, rows="spread")
    experts = prepared(case, isa)
    together = case.call(experts)
    for t in (0, 1, 499, 998, 999):
        alone = experts.apply(
            case.hidden_states[t : t + 1], case.topk_weights[t : t + 1], case.topk_ids[t : t + 1]
        )  # fmt: skip
        assert_same_bits(alone, together[t : t + 1])


def test_more_slots_than_one_pass_holds(isa: str) -> None:
    case = build(E=8, topk=4, H=16, I=16, M=5000)
    together = case.call(prepared(case, isa))
    assert_same_bits(together, case.reference_output())


def test_thread_count_changes_nothing(isa: str) -> None:
    case = build(E=8, topk=2, H=256, I=320, M=37, bias=True)
    experts, before = prepared(case, isa), torch.get_num_threads()
    try:
        outputs = []
        for threads in (1, 2, 3, 7, 1):
            torch.set_num_threads(threads)
            outputs.append(case.call(experts))
    finally:
        torch.set_num_threads(before)
    for other in outputs[1:]:
        assert_same_bits(other, outputs[0])


def test_python_threads_at_once(isa: str) -> None:
    case = build(E=8, topk=2, H=256, I=320, M=16)
    experts = prepared(case, isa)
    want = case.reference_output()
    wrong: list[int] = []

    def work() -> None:
        for _ in range(60):
            if not torch.equal(case.call(experts), want):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_works_after_fork() -> None:
    code = (
        "import os, sys, torch\n"
        "from types import SimpleNamespace\n"
        "from cases import build\n"
        "from int8moe.backends.cpu.support import CPUExpertsInt8\n"
        "case = build(E=8, topk=2, H=512, I=512, M=16)\n"
        "experts = CPUExpertsInt8(case.config, case.quant_config)\n"
        "experts.process_weights_after_loading(SimpleNamespace(w13_weight=case.w13, w2_weight=case.w2))\n"
        "want = case.call(experts)\n"
        "pid = os.fork()\n"  # the child makes no large torch tensor: PyTorch's own OpenMP pool does not survive a fork
        "if pid == 0:\n"
        "    os._exit(0 if torch.equal(case.call(experts), want) else 3)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0\n"
    )
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={**os.environ, "PYTHONPATH": folder})


@given(
    experts=st.integers(1, 3), pairs=st.integers(1, 40), k=st.integers(1, 70), order=st.sampled_from([0, 1, 2]),
    seed=st.integers(0, 999),
)  # fmt: skip
def test_unpack_inverts_pack(experts: int, pairs: int, k: int, order: int, seed: int) -> None:
    n = 2 * pairs if order else pairs
    w = torch.randint(-128, 128, (experts, n, k), dtype=torch.int8, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(layout.unpack(layout.pack(w, order), n, k, order), w)


def test_pack_is_the_documented_formula() -> None:
    w = torch.arange(40 * 6, dtype=torch.int8).reshape(1, 40, 6)
    packed = layout.pack(w, layout.PAIRS_SPLIT).reshape(3, 2, 16, 4)
    for tile, c, k in ((0, 0, 0), (1, 3, 5), (2, 3, 4), (0, 8, 1), (2, 11, 3)):
        row = 8 * tile + (c & 7) + (20 if c >= 8 else 0)
        assert packed[tile, k // 4, c, k % 4] == w[0, row, k]
    assert not packed[2, :, 4:8].any() and not packed[:, 1, :, 2:].any()


def test_weights_are_taken_over_and_come_back(isa: str) -> None:
    case = build(H=40, I=24)
    layer = torch.nn.Module()
    layer.w13_weight = torch.nn.Parameter(case.w13.clone(), requires_grad=False)
    layer.w2_weight = torch.nn.Parameter(case.w2.clone(), requires_grad=False)
    experts = CPUExpertsInt8(case.config, case.quant_config)
    experts.process_weights_after_loading(layer)
    assert layer.w13_weight.data_ptr() == experts._run._w13.data_ptr()
    w13, w2 = experts.unpack_weights()
    assert torch.equal(w13, case.w13) and torch.equal(w2, case.w2)
    with pytest.raises(AlreadyConverted):
        experts.process_weights_after_loading(layer)
    with pytest.raises(AlreadyConverted):
        CPUExpertsInt8(case.config, case.quant_config).process_weights_after_loading(layer)


def test_weights_are_packed_in_their_own_memory_where_that_is_asked_for(isa: str) -> None:
    case = build(H=64, I=48, M=9)
    want, source = case.reference_output(), SimpleNamespace(w13_weight=case.w13.clone(), w2_weight=case.w2.clone())
    where = source.w13_weight.data_ptr(), source.w2_weight.data_ptr()
    source.int8moe_reuse_source = True
    experts = CPUExpertsInt8(case.config, case.quant_config)
    experts.process_weights_after_loading(source)
    assert (experts._run._w13.data_ptr(), experts._run._w2.data_ptr()) == where
    assert_same_bits(case.call(experts), want)
    w13, w2 = experts.unpack_weights()
    assert torch.equal(w13, case.w13) and torch.equal(w2, case.w2)


def test_ragged_weights_are_packed_into_memory_of_their_own() -> None:
    case = build(H=33, I=65, M=6)
    w13, w2 = case.w13.clone(), case.w2.clone()
    experts = CPUExpertsInt8(case.config, case.quant_config)
    experts.process_weights_after_loading(SimpleNamespace(w13_weight=w13, w2_weight=w2, int8moe_reuse_source=True))
    assert torch.equal(w13, case.w13) and torch.equal(w2, case.w2)
    assert_same_bits(case.call(experts), case.reference_output())


def test_build_kernel_leaves_the_given_tensors_alone_unless_told() -> None:
    case = build(H=64, I=48, M=3)
    q = case.quant_config
    for reuse in (False, True):
        w13, w2 = case.w13.clone(), case.w2.clone()
        kernel = build_kernel(ExpertWeights(w13, w2, q.w1_scale, q.w2_scale), case.config, reuse_source=reuse)
        assert torch.equal(w13, case.w13) is not reuse
        assert_same_bits(kernel(case.hidden_states, case.topk_weights, case.topk_ids), case.reference_output())


def test_hints_say_where_four_weights_are_small() -> None:
    isa = next((i for i, (name, runs, _) in enumerate(load().kernels()) if name == "avx2" and runs), None)
    if isa is None:
        pytest.skip("the avx2 kernel does not run here")
    w = torch.zeros(1, 16, 16, dtype=torch.int8)
    w[0, 3, [0, 1, 4, 5]] = torch.tensor([-128, 125, -3, 0], dtype=torch.int8)  # 256: safe
    w[0, 12, [2, 3, 6, 7]] = torch.tensor([-128, 125, 3, 1], dtype=torch.int8)  # 257: not
    w[0, 5, [8, 10, 12, 14]] = -128  # 256 in each lane of four
    hints = layout.make_hints(isa, layout.pack(w, layout.PLAIN), 16, 16, layout.PLAIN)
    assert hints is not None
    assert hints[0, :2].tolist() == [0b11, 0b10]  # a word each for rows 0-7 and 8-15
    starts = hints[0, 2:].view(torch.int32)  # sizes below zero, summed by row
    assert torch.equal(starts, w[0].int().clamp(max=0).neg().sum(1, dtype=torch.int32))


@pytest.mark.parametrize("bad", [-1, 8, 2**31 - 1, -(2**31), 2**40])
def test_ids_outside_the_experts_are_refused(bad: int, isa: str) -> None:
    case = build()
    ids = case.topk_ids.clone()
    ids[3, 1] = bad
    with pytest.raises(InvalidRouting, match=f"topk_ids holds {bad}, needs 0 to 7"):
        prepared(case, isa).apply(case.hidden_states, case.topk_weights, ids)


def test_map_entries_outside_the_rank_are_refused(isa: str) -> None:
    case = build(local=[0, 3])
    expert_map = case.expert_map.clone()
    expert_map[5] = 2
    with pytest.raises(InvalidRouting, match="expert_map holds 2, needs -1"):
        prepared(case, isa).apply(case.hidden_states, case.topk_weights, case.topk_ids, expert_map=expert_map)


def test_wrong_shapes_and_dtypes_are_refused(isa: str) -> None:
    case = build()
    experts = prepared(case, isa)
    x, w, ids = case.hidden_states, case.topk_weights, case.topk_ids
    for arguments, says in (
        ((x[:, :-1], w, ids), "hidden_states has shape"),
        ((x.double(), w, ids), "hidden_states has dtype"),
        ((x, w[:-1], ids), "topk_weights has shape"),
        ((x, w.double(), ids), "topk_weights has dtype"),
        ((x, w, ids.float()), "topk_ids has dtype"),
        ((x, w, ids.flatten()), "topk_ids has shape|topk_weights has shape"),
    ):
        with pytest.raises(ShapeMismatch, match=says):
            experts.apply(*arguments)
    with pytest.raises(ShapeMismatch, match=r"w13_scale has shape \(8, 5\), needs \(8, 192\)"):
        q = case.quant_config
        wrong = FusedMoEQuantConfig(q.weight_key, q.activation_key, torch.ones(8, 5), q.w2_scale)
        CPUExpertsInt8(case.config, wrong).process_weights_after_loading(
            SimpleNamespace(w13_weight=case.w13, w2_weight=case.w2)
        )


def test_strided_inputs(isa: str) -> None:
    case = build(M=6)
    wide = torch.zeros(6, 128, dtype=torch.bfloat16)
    wide[:, ::2] = case.hidden_states
    assert_same_bits(prepared(case, isa).apply(wide[:, ::2], case.topk_weights, case.topk_ids), case.reference_output())


def test_an_unknown_isa_fails_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INT8MOE_CPU_ISA", "sse9")
    with pytest.raises(NativeExtensionError, match=r"'sse9'.*portable.*runnable") as caught:
        select_isa()
    assert all(name in str(caught.value) for name, _, _ in load().kernels())


def op_arguments(case: Case, isa: str) -> tuple:
    r = prepared(case, isa)._run
    c = case.config
    return (
        case.hidden_states, case.topk_weights, case.topk_ids, case.expert_map, r._w13, r._w2, r._w13_hints,
        r._w2_hints, r._w13_scale, r._w2_scale, r._w13_bias, r._w2_bias, c.num_experts,
        c.intermediate_size_per_partition, r._activation, c.is_act_and_mul, r._interleaved, c.swiglu_alpha,
        c.swiglu_limit, False, r._isa,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["cpu_experts", "cpu_experts_inference"])
def test_opcheck(isa: str, name: str) -> None:
    arguments = op_arguments(build(bias=True), isa)  # the first runner defines the operators
    library.opcheck(getattr(torch.ops.int8moe, name).default, arguments)


def test_compiles_as_one_graph(isa: str) -> None:
    case = build(M=4)
    experts = prepared(case, isa)
    layer = torch.compile(lambda x, w, i: experts.apply(x * 2, w, i) + 1, fullgraph=True, backend="aot_eager")
    got = layer(case.hidden_states, case.topk_weights, case.topk_ids)
    want = experts.apply(case.hidden_states * 2, case.topk_weights, case.topk_ids) + 1
    assert_same_bits(got, want)


def test_scales_survive_a_cast_of_the_layer(isa: str) -> None:
    case = build(M=4)
    layer = torch.nn.Module()
    layer.scale13 = torch.nn.Parameter(case.quant_config.w1_scale.clone(), requires_grad=False)
    layer.scale2 = torch.nn.Parameter(case.quant_config.w2_scale.clone(), requires_grad=False)
    layer.w13_weight = torch.nn.Parameter(case.w13.clone(), requires_grad=False)
    layer.w2_weight = torch.nn.Parameter(case.w2.clone(), requires_grad=False)
    q = case.quant_config
    experts = CPUExpertsInt8(
        case.config, FusedMoEQuantConfig(q.weight_key, q.activation_key, layer.scale13.data, layer.scale2.data)
    )
    experts.process_weights_after_loading(layer)
    layer.to(torch.bfloat16)
    layer.scale13.data.zero_()
    assert_same_bits(case.call(experts), case.reference_output())


def test_flush_to_zero_of_the_caller_changes_nothing(isa: str) -> None:
    case = build(dtype="float32", rows="spread", weights="extreme", M=9)
    case.quant_config.w2_scale.mul_(1e-38)
    experts, want = prepared(case, isa), case.reference_output()
    assert ((want != 0) & (want.abs() < 1e-38)).any(), "the case must have denormal results"
    assert torch.set_flush_denormal(True)
    try:
        got = case.call(experts)
    finally:
        torch.set_flush_denormal(False)
    assert_same_bits(got, want)


def test_backward_is_refused(isa: str) -> None:
    case = build(M=3, dtype="float32")
    x = case.hidden_states.clone().requires_grad_()
    y = prepared(case, isa).apply(x, case.topk_weights, case.topk_ids)
    with pytest.raises(NotImplementedError, match="no backward"):
        y.sum().backward()
