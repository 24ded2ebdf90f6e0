"""Layer cases that break kernels, made the same for every backend's differential tests.

`Case` holds a configuration, canonical weights and one call; `reference_output` is what `ReferenceExperts`
makes of it. `ADVERSARIAL` names cases; `build` makes one; `layer_cases` is a Hypothesis strategy.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import strategies as st

from int8moe.backends.reference.support import ReferenceExperts
from int8moe.config import FusedMoEConfig, FusedMoEParallelConfig, MoEActivation
from int8moe.device import Platform
from int8moe.quant_config import FusedMoEQuantConfig, int8_w8a8_moe_quant_config, int8_w8a16_moe_quant_config

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


# Of two groups of four columns, the weights at one half of each: sizes sum to 256.
_EDGE = (
    (-128, -128, 0, 0), (0, 0, -128, -128), (-128, 0, -128, 0), (0, -128, 0, -128), (127, 1, 127, 1),
    (-1, -127, 127, 1), (-64, -64, -64, -64), (127, 127, 2, 0), (-85, 86, 85, 0),
)  # fmt: skip


def edge_codes(shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    """Weights [E, rows, K] whose products with 127 and -127 just fit where AVX2 adds four of them in 16 bits: they meet
    as `_EDGE` says. Every eighth pair of groups has rows one beyond, which do not fit."""
    experts, rows, columns = shape
    meet = torch.tensor(_EDGE, dtype=torch.int8)[
        torch.randint(len(_EDGE), (experts, rows, -(-columns // 8), 2), generator=g)
    ]
    meet[:, ::11, 5::8, 0] = torch.tensor((-128, -128, -1, 0), dtype=torch.int8)
    # [E, rows, pair of groups, half, group, column of the half]
    return meet.unflatten(-1, (2, 2)).transpose(3, 4).flatten(2)[..., :columns].contiguous()


@dataclass
class Case:
    config: FusedMoEConfig
    w13: torch.Tensor
    w2: torch.Tensor
    quant_config: FusedMoEQuantConfig
    hidden_states: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    expert_map: torch.Tensor | None = None
    apply_router_weight_on_input: bool = False

    def run(self, experts_cls: type, device: str = "cpu") -> torch.Tensor:
        """Output of `experts_cls` on copies of the tensors, on `device`, brought back to the CPU."""
        to = lambda t: None if t is None else t.clone().to(device)
        q = self.quant_config
        moved = FusedMoEQuantConfig(
            q.weight_key, q.activation_key, to(q.w1_scale), to(q.w2_scale), to(q.w1_bias), to(q.w2_bias)
        )
        experts = experts_cls(self.config, moved)
        experts.process_weights_after_loading(SimpleNamespace(w13_weight=to(self.w13), w2_weight=to(self.w2)))
        return self.call(experts, device)

    def call(self, experts: Any, device: str = "cpu") -> torch.Tensor:
        to = lambda t: None if t is None else t.to(device)
        return experts.apply(
            to(self.hidden_states), to(self.topk_weights), to(self.topk_ids), expert_map=to(self.expert_map),
            apply_router_weight_on_input=self.apply_router_weight_on_input,
        ).cpu()  # fmt: skip

    def reference_output(self) -> torch.Tensor:
        return self.run(ReferenceExperts)


def build(
    *,
    seed: int = 0,
    E: int = 8,
    topk: int = 2,
    H: int = 64,
    I: int = 96,
    M: int = 5,
    dtype: str = "bfloat16",
    activation: MoEActivation = MoEActivation.SILU,
    gated: bool = True,
    bias: bool = False,
    limit: float | None = None,
    ids_dtype: torch.dtype = torch.int64,
    local: list[int] | None = None,
    routing: str = "random",
    weights: str = "random",
    rows: str = "normal",
    on_input: bool = False,
    scheme: str = "w8a8",
    platform: Platform | None = None,
) -> Case:
    """One case. `local`: global ids this rank holds (makes an expert_map). `routing`: random, one_expert,
    first_experts. `weights`: random, extreme (only -128 and 127), zero_rows, normal (as quantised from a normal
    distribution), edge (see `edge_codes`). `rows`: normal, zeros, nan, inf, tiny, huge, spread (rows of very different
    size), nan_one (only token 0 holds NaN), signs (1 and -1: codes 127 and -127)."""
    g = torch.Generator().manual_seed(seed)
    el = E if local is None else len(local)
    n = 2 * I if gated else I
    if weights == "normal":
        codes = lambda *s: (torch.randn(*s, generator=g) * 36).round().clamp(-128, 127).to(torch.int8)
    elif weights == "edge":
        codes = lambda *s: edge_codes(s, g)
    elif weights == "extreme":
        codes = lambda *s: torch.where(torch.rand(*s, generator=g) < 0.5, -128, 127).to(torch.int8)
    else:
        codes = lambda *s: torch.randint(-128, 128, s, dtype=torch.int8, generator=g)
    w13, w2 = codes(el, n, H), codes(el, H, I)
    if weights == "zero_rows":
        w13[:, ::3] = 0
        w2[:, 1::2] = 0
    scale = lambda *s: torch.rand(*s, generator=g) * 4e-3 + 1e-4
    shapes = ((el, 1), (el, 1)) if scheme == "w8a8-tensor" else ((el, n), (el, H))
    s13, s2 = scale(*shapes[0]), scale(*shapes[1])
    b13 = torch.randn(el, n, generator=g) if bias else None
    b2 = torch.randn(el, H, generator=g) if bias else None
    x = torch.randn(M, H, generator=g)
    if rows == "zeros":
        x.zero_()
    elif rows == "tiny":
        x *= 1e-38
    elif rows == "huge":
        x *= 3e4
    elif rows == "spread":
        x *= 10 ** (torch.rand(M, 1, generator=g) * 8 - 5)
    elif rows == "signs":
        x = torch.where(x < 0, -1.0, 1.0)
    elif rows in ("nan", "nan_one") and M:
        x[0, H // 2] = float("nan")
        if rows == "nan":
            x[M // 2, 0] = float("inf")
    elif rows == "inf" and M:
        x[-1, -1] = float("-inf")
    x = x.to(DTYPES[dtype])
    if routing == "one_expert":
        ids = torch.full((M, topk), E - 1)
    elif routing == "first_experts":
        ids = torch.arange(topk).expand(M, topk).contiguous()
    else:
        ids = torch.rand(M, E, generator=g).topk(topk, dim=-1).indices if M else torch.zeros(0, topk, dtype=torch.long)
    tw = torch.rand(M, topk, generator=g)
    expert_map = None
    parallel = FusedMoEParallelConfig()
    if local is not None:
        expert_map = torch.full((E,), -1, dtype=torch.int32)
        for index, expert in enumerate(local):
            expert_map[expert] = index
        parallel = FusedMoEParallelConfig(ep_size=2, use_ep=True)
    config = FusedMoEConfig(
        E, topk, H, I, el, dtype, activation, gated, bias, moe_parallel_config=parallel, swiglu_limit=limit,
        **({"platform": platform} if platform else {}),
    )  # fmt: skip
    if scheme == "w8a16":
        quant = int8_w8a16_moe_quant_config(s13, s2, b13, b2)
    else:
        quant = int8_w8a8_moe_quant_config(s13, s2, b13, b2, per_act_token_quant=scheme == "w8a8")
    return Case(config, w13, w2, quant, x, tw, ids.to(ids_dtype), expert_map, on_input)


_SWIGLU, _SWIGLU_SPLIT = MoEActivation.SWIGLUOAI, MoEActivation.SWIGLUOAI_UNINTERLEAVE
ADVERSARIAL: dict[str, dict[str, Any]] = {
    **{f"activation_{a.value}_{d}": dict(activation=a, dtype=d, M=9) for a in MoEActivation for d in DTYPES},
    **{
        f"not_gated_{a.value}": dict(activation=a, gated=False, bias=True)
        for a in (MoEActivation.SILU, MoEActivation.GELU, MoEActivation.GELU_TANH, MoEActivation.RELU2)
    },
    "bias": dict(bias=True, dtype="float16"),
    "limit_silu": dict(limit=0.5, M=7),
    "limit_swigluoai": dict(activation=_SWIGLU, limit=1.0, bias=True, M=7),
    "limit_swigluoai_split": dict(activation=_SWIGLU_SPLIT, limit=0.25, dtype="float32"),
    "no_tokens": dict(M=0),
    "one_token": dict(M=1),
    "all_on_one_expert": dict(routing="one_expert", M=33),
    "empty_experts": dict(routing="first_experts", M=17, E=16),
    "topk_is_all": dict(E=4, topk=4, M=6),
    "one_expert_only": dict(E=1, topk=1, M=6),
    "int32_ids": dict(ids_dtype=torch.int32),
    "expert_map": dict(local=[1, 4, 6], M=19, dtype="float16"),
    "expert_map_none_local": dict(local=[7], routing="first_experts", M=8),
    "extreme_codes": dict(weights="extreme", M=8, H=512, I=320),
    "extreme_codes_fp32": dict(weights="extreme", M=3, dtype="float32", rows="huge"),
    # As AVX2 takes real weights: most pairs of groups with one widening, over more than a chunk, rows by eights.
    "normal_codes": dict(weights="normal", E=1, topk=1, M=30, H=648, I=536),
    "edge_codes": dict(weights="edge", rows="signs", E=1, topk=1, M=30, H=648, I=536),
    "edge_codes_few_rows": dict(weights="edge", rows="signs", E=3, topk=1, M=20, H=648, I=16, dtype="float32"),
    "zero_weight_rows": dict(weights="zero_rows"),
    "zero_rows": dict(rows="zeros"),
    "tiny_rows": dict(rows="tiny", dtype="float32"),
    "huge_rows_fp16_overflow": dict(rows="huge", dtype="float16", M=8),
    "spread_rows": dict(rows="spread", dtype="float32", M=20),
    "nan_and_inf_rows": dict(rows="nan", M=8),
    "minus_inf_row": dict(rows="inf", M=8, dtype="float16"),
    "nan_swigluoai_limit": dict(rows="nan", M=8, activation=_SWIGLU, limit=2.0),
    "nan_relu2": dict(rows="nan", M=8, activation=MoEActivation.RELU2, gated=False),
    "ragged_1": dict(H=1, I=1, M=3),
    "ragged_7_5": dict(H=7, I=5, M=4, dtype="float32"),
    "ragged_33_65": dict(H=33, I=65, M=6),
    "ragged_129_31": dict(H=129, I=31, M=35, bias=True),
    "router_weight_on_input": dict(on_input=True, topk=1, M=9),
    "router_weight_on_input_topk3": dict(on_input=True, topk=3, M=9, dtype="float16"),
    "many_experts": dict(E=1024, topk=8, H=32, I=16, M=10),
    "two_thousand_experts": dict(E=2000, topk=4, H=16, I=16, M=5),
    "mixed_rows_per_expert": dict(E=3, topk=2, M=130, H=96, I=64),
}


@st.composite
def layer_cases(draw: st.DrawFn, scheme: str = "w8a8") -> Case:
    """Any small layer: shapes off every tile, any activation, dtype, bias, expert map and routing."""
    experts = draw(st.integers(1, 12))
    activation = draw(st.sampled_from(list(MoEActivation)))
    local = draw(st.none() | st.lists(st.integers(0, experts - 1), unique=True, min_size=1, max_size=experts))
    return build(
        seed=draw(st.integers(0, 2**31 - 1)),
        E=experts,
        topk=draw(st.integers(1, experts)),
        H=draw(st.integers(1, 140)),
        I=draw(st.integers(1, 140)),
        M=draw(st.integers(0, 40)),
        dtype=draw(st.sampled_from(sorted(DTYPES))),
        activation=activation,
        gated=activation.is_swigluoai or draw(st.booleans()),
        bias=draw(st.booleans()),
        limit=draw(st.none() | st.sampled_from([0.1, 1.0, 7.0])),
        local=local,
        routing=draw(st.sampled_from(["random", "one_expert", "first_experts"])),
        weights=draw(st.sampled_from(["random", "normal", "edge", "extreme", "zero_rows"])),
        rows=draw(st.sampled_from(["normal", "signs", "zeros", "nan", "inf", "tiny", "huge", "spread"])),
        on_input=draw(st.booleans()),
        scheme=scheme,
    )


def assert_same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal shape, dtype and bits; two NaNs are equal whatever their payload."""
    assert got.shape == want.shape and got.dtype == want.dtype, (got.shape, got.dtype, want.shape, want.dtype)
    nan = torch.isnan(want)
    assert torch.equal(torch.isnan(got), nan), "NaN in different places"
    ints = {2: torch.int16, 4: torch.int32}[want.element_size()]
    a = torch.where(nan, torch.zeros_like(got), got).contiguous().view(ints)
    b = torch.where(nan, torch.zeros_like(want), want).contiguous().view(ints)
    different = (a != b).nonzero()
    assert not len(different), (
        f"{len(different)} of {a.numel()} values differ, first at {different[0].tolist()}:"
        f" {got[tuple(different[0])].item()!r} against {want[tuple(different[0])].item()!r}"
    )
