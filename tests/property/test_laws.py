"""Laws that hold for any layer and any deployment."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import Case, assert_same_bits, build, layer_cases
from int8moe.backends.cpu.support import CPUExpertsInt8
from int8moe.backends.reference.support import ReferenceExperts
from int8moe.config import DTYPES, FusedMoEConfig, FusedMoEParallelConfig, MoEActivation
from int8moe.device import CATALOGUE
from int8moe.oracle.int8 import Int8MoEKernelOracle
from int8moe.quant_config import FusedMoEQuantConfig
from int8moe.schemes import SCHEMES_BY_FLAG


def loaded(case: Case, cls: type = CPUExpertsInt8):
    experts = cls(case.config, case.quant_config)
    experts.process_weights_after_loading(SimpleNamespace(w13_weight=case.w13, w2_weight=case.w2))
    return experts


@given(case=layer_cases(), seed=st.integers(0, 999))
def test_permuting_tokens_permutes_outputs(case: Case, seed: int) -> None:
    experts = loaded(case)
    order = torch.randperm(len(case.hidden_states), generator=torch.Generator().manual_seed(seed))
    shuffled = experts.apply(
        case.hidden_states[order], case.topk_weights[order], case.topk_ids[order], expert_map=case.expert_map,
        apply_router_weight_on_input=case.apply_router_weight_on_input,
    )  # fmt: skip
    assert_same_bits(shuffled, case.call(experts)[order])


@given(seed=st.integers(0, 9999), dtype=st.sampled_from(DTYPES), M=st.integers(0, 20))
def test_renaming_experts_changes_nothing(seed: int, dtype: str, M: int) -> None:
    case = build(seed=seed, E=6, topk=3, H=40, I=24, M=M, dtype=dtype, bias=True)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    q = case.quant_config
    renamed = FusedMoEQuantConfig(
        q.weight_key, q.activation_key, q.w1_scale[order], q.w2_scale[order], q.w1_bias[order], q.w2_bias[order]
    )
    other = CPUExpertsInt8(case.config, renamed)
    other.process_weights_after_loading(SimpleNamespace(w13_weight=case.w13[order], w2_weight=case.w2[order]))
    new_name = order.argsort()
    got = other.apply(case.hidden_states, case.topk_weights, new_name[case.topk_ids])
    assert_same_bits(got, case.call(loaded(case)))


@given(seed=st.integers(0, 9999), cut=st.integers(0, 8), M=st.integers(1, 20))
def test_expert_parallel_ranks_add_up(seed: int, cut: int, M: int) -> None:
    """float32, so that each rank's output is its unrounded partial sum."""
    case = build(seed=seed, E=8, topk=2, H=40, I=24, M=M, dtype="float32")
    total = torch.zeros_like(case.hidden_states)
    q = case.quant_config
    for mine in (list(range(cut)), list(range(cut, 8))):
        config = FusedMoEConfig(
            8, 2, 40, 24, len(mine), "float32", moe_parallel_config=FusedMoEParallelConfig(ep_size=2, use_ep=True)
        )
        part = FusedMoEQuantConfig(q.weight_key, q.activation_key, q.w1_scale[mine], q.w2_scale[mine])
        rank = CPUExpertsInt8(config, part)
        rank.process_weights_after_loading(SimpleNamespace(w13_weight=case.w13[mine], w2_weight=case.w2[mine]))
        expert_map = torch.full((8,), -1, dtype=torch.int32)
        expert_map[mine] = torch.arange(len(mine), dtype=torch.int32)
        total += rank.apply(case.hidden_states, case.topk_weights, case.topk_ids, expert_map=expert_map)
    torch.testing.assert_close(total, case.call(loaded(case)), rtol=1e-5, atol=1e-6)


@given(case=layer_cases())
def test_a_token_of_zero_weight_gives_zero(case: Case) -> None:
    case.hidden_states = torch.nan_to_num(case.hidden_states, nan=1.0, posinf=1.0, neginf=1.0)
    case.topk_weights.zero_()
    if case.apply_router_weight_on_input and (case.config.has_bias or case.config.activation.is_swigluoai):
        return
    out = case.call(loaded(case))
    assert not torch.nan_to_num(out).any()  # fp16 may overflow to infinity times zero


@settings(max_examples=200)
@given(
    device=st.sampled_from(sorted(CATALOGUE)),
    scheme=st.sampled_from(sorted(SCHEMES_BY_FLAG)),
    activation=st.sampled_from(list(MoEActivation)),
    gated=st.booleans(),
    dtype=st.sampled_from([*DTYPES, "float64"]),
    hidden=st.integers(1, 200_000),
    batched=st.booleans(),
    lora=st.booleans(),
)
def test_the_choice_is_supported_or_everything_is_refused(
    device, scheme, activation, gated, dtype, hidden, batched, lora
) -> None:
    config = FusedMoEConfig(
        8, 2, hidden, 768, in_dtype=dtype, activation=activation, is_act_and_mul=gated, is_lora_enabled=lora,
        moe_parallel_config=FusedMoEParallelConfig(use_batched_activation_format=batched),
        platform=CATALOGUE[device],
    )  # fmt: skip
    report = Int8MoEKernelOracle(config, *SCHEMES_BY_FLAG[scheme]).explain()
    classes = [c for b in report.backends for c in b.classes]
    if report.chosen_class is None:
        assert all(c.reasons for c in classes)
    else:
        first = next(c for c in classes if c.supported)
        assert first.name == report.chosen_class and not first.reasons
    for c in classes:
        for v in c.verdicts:
            assert v.ok or (v.reason in c.reasons and "needs" in v.reason)


@settings(max_examples=15)
@given(case=layer_cases())
def test_cpu_and_reference_keep_their_inputs(case: Case) -> None:
    before = [t.clone() for t in (case.hidden_states, case.topk_weights, case.topk_ids, case.w13, case.w2)]
    for cls in (CPUExpertsInt8, ReferenceExperts):
        case.call(loaded(case, cls))
    after = (case.hidden_states, case.topk_weights, case.topk_ids, case.w13, case.w2)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num()) if a.is_floating_point() else torch.equal(a, b)
