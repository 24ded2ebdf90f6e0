"""The rule language: facts of a deployment, one-line rules on them, verdicts with derived reasons.

A `Fact` is declared once, with its name, its reader and how to show its value. A `Rule` is a fact and
what it must be; the refusal's text is built from both, so it cannot say anything else than was tested.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from int8moe.config import FusedMoEActivationFormat, FusedMoEConfig
from int8moe.schemes import QuantKey, Scheme

T = TypeVar("T")


@dataclass(frozen=True)
class Deployment:
    """What rules judge: one layer's configuration with its scheme and activation format."""

    config: FusedMoEConfig
    weight_key: QuantKey | None
    activation_key: QuantKey | None
    activation_format: FusedMoEActivationFormat

    @property
    def scheme(self) -> Scheme:
        return Scheme(self.weight_key, self.activation_key)


@dataclass(frozen=True)
class Verdict:
    """One rule's answer. `status`: "holds", "fails", "unknown" (the fact is not known, which counts as
    failing) or "does not apply"."""

    fact: str
    seen: str
    needs: str
    why: str
    status: str

    @property
    def ok(self) -> bool:
        return self.status in ("holds", "does not apply")

    @property
    def reason(self) -> str:
        """The refusal (or the fact that holds) as one clause."""
        why = f" ({self.why})" if self.why else ""
        seen = "unknown" if self.status == "unknown" else self.seen
        if self.ok:
            return f"{self.fact} is {seen}"
        return f"{self.fact} is {seen}, needs {self.needs}{why}"


@dataclass(frozen=True)
class Rule:
    """A fact and what a kernel needs it to be."""

    fact: Fact[Any]
    needs: str
    test: Callable[[Any], bool] = field(repr=False, compare=False)
    why: str = ""
    guards: tuple[Rule, ...] = ()

    def because(self, why: str) -> Rule:
        return replace(self, why=why)

    def when(self, *guards: Rule) -> Rule:
        """This rule, only where all `guards` hold."""
        return replace(self, guards=(*self.guards, *guards))

    def applies(self, deployment: Deployment) -> bool:
        return all(guard.check(deployment).ok for guard in self.guards)

    def check(self, deployment: Deployment) -> Verdict:
        value = self.fact.read(deployment)
        if not self.applies(deployment):
            status = "does not apply"
        elif value is None and not self.fact.none_is_a_value:
            status = "unknown"
        else:
            status = "holds" if self.test(value) else "fails"
        return Verdict(self.fact.name, self.fact.show(value), self.needs, self.why, status)


@dataclass(frozen=True)
class Fact(Generic[T]):
    """Something a deployment is: a name, a reader, and a way to show the value."""

    name: str
    read: Callable[[Deployment], T | None]
    show: Callable[[Any], str] = str
    none_is_a_value: bool = False

    def one_of(self, *allowed: T) -> Rule:
        return Rule(self, " or ".join(self.show(a) for a in allowed), lambda v: v in allowed)

    def at_least(self, low: T) -> Rule:
        return Rule(self, f"at least {self.show(low)}", lambda v: v >= low)

    def at_most(self, high: T) -> Rule:
        return Rule(self, f"at most {self.show(high)}", lambda v: v <= high)

    def multiple_of(self, n: int) -> Rule:
        return Rule(self, f"a multiple of {n}", lambda v: v % n == 0)

    def includes(self, item: Any) -> Rule:
        return Rule(self, f"{item} among them", lambda v: item in v)

    def is_true(self) -> Rule:
        return Rule(self, "yes", bool)

    def is_false(self) -> Rule:
        return Rule(self, "no", lambda v: not v)

    def satisfies(self, test: Callable[[Any], bool], needs: str) -> Rule:
        return Rule(self, needs, test)


def _dotted(version: tuple[int, int] | None) -> str:
    return "unknown" if version is None else f"{version[0]}.{version[1]}"


def _listed(items: Any) -> str:
    return items if isinstance(items, str) else ", ".join(sorted(items)) or "none"


def _yes_no(value: bool) -> str:
    return "yes" if value else "no"


def _value(member: Any) -> str:
    return str(getattr(member, "value", member))


PLATFORM = Fact("platform", lambda d: d.config.platform.kind)
CAPABILITY = Fact("compute capability", lambda d: d.config.platform.capability, _dotted)
ISA = Fact("instruction set", lambda d: d.config.platform.isa, _listed)
PACKAGES = Fact("installed packages", lambda d: d.config.platform.packages, _listed)
CUDA_TOOLKIT = Fact("CUDA toolkit", lambda d: d.config.platform.cuda_toolkit, _listed)
SCHEME = Fact("scheme", lambda d: d.scheme)
ACTIVATION_FORMAT = Fact("activation format", lambda d: d.activation_format, _value)
IN_DTYPE = Fact("in_dtype", lambda d: str(d.config.in_dtype))
ACTIVATION = Fact("activation", lambda d: d.config.activation, _value)
GATED = Fact("is_act_and_mul", lambda d: d.config.is_act_and_mul, _yes_no)
SWIGLU_LIMIT = Fact("swiglu_limit", lambda d: d.config.swiglu_limit, none_is_a_value=True)
HAS_BIAS = Fact("has_bias", lambda d: d.config.has_bias, _yes_no)
LORA = Fact("is_lora_enabled", lambda d: d.config.is_lora_enabled, _yes_no)
HIDDEN_DIM = Fact("hidden_dim", lambda d: d.config.hidden_dim)
INTERMEDIATE = Fact("intermediate_size_per_partition", lambda d: d.config.intermediate_size_per_partition)
NUM_EXPERTS = Fact("num_experts", lambda d: d.config.num_experts)
NUM_LOCAL_EXPERTS = Fact("num_local_experts", lambda d: d.config.num_local_experts)
TOPK = Fact("experts_per_token", lambda d: d.config.experts_per_token)
USE_EP = Fact("use_ep", lambda d: d.config.moe_parallel_config.use_ep, _yes_no)
ALL2ALL = Fact("all2all_backend", lambda d: d.config.moe_parallel_config.all2all_backend)

INT32_SAFE_K = 133_144
"""Longest K whose int8 products surely fit int32: 127 * 127 * K < 2**31 (docs/numerics.md). A loaded row of -128 alone
would reach the bound at K = 132,104 already; no real K comes near either."""

EXACT_INT32 = (
    HIDDEN_DIM.at_most(INT32_SAFE_K).because("int32 sums of int8 products must not overflow"),
    INTERMEDIATE.at_most(INT32_SAFE_K).because("int32 sums of int8 products must not overflow"),
)
"""Rules of every backend that sums int8 products in int32."""

GATED_INTERLEAVE = (
    GATED.is_true().when(Rule(ACTIVATION, "", lambda a: a.is_swigluoai)).because("swigluoai is a gated activation")
)
"""The swigluoai activations make no sense without an up projection."""
