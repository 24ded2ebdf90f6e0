"""`MoEKernelOracle`: pick the first experts class whose rules all hold, and be able to say everything about it.

Pure: it asks no machine, runs no kernel and imports no framework. A scheme's oracle is a subclass that names its
backends, their classes and their order.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Generic, TypeVar

from int8moe.backends.base import FusedMoEExperts
from int8moe.config import FusedMoEConfig
from int8moe.errors import NoBackendSupported, UnsupportedDeployment
from int8moe.rules import Deployment, Verdict
from int8moe.schemes import QuantKey

logger = logging.getLogger("int8moe.oracle")
B = TypeVar("B", bound=Enum)
_logged: set[tuple[int, str]] = set()


def _log_once(level: int, message: str) -> None:
    if logger.isEnabledFor(level) and (level, message) not in _logged:
        _logged.add((level, message))
        logger.log(level, message)


@dataclass(frozen=True)
class ClassReport:
    """All verdicts on one experts class."""

    experts_class: type[FusedMoEExperts]
    verdicts: tuple[Verdict, ...]

    @property
    def name(self) -> str:
        return self.experts_class.__name__

    @property
    def supported(self) -> bool:
        return all(v.ok for v in self.verdicts)

    @property
    def reasons(self) -> list[str]:
        return [v.reason for v in self.verdicts if not v.ok]


@dataclass(frozen=True)
class BackendReport:
    """All classes of one backend, best first; `order_reason` where measured times put them in this order."""

    backend: str
    classes: tuple[ClassReport, ...]
    order_reason: str = ""

    @property
    def supported(self) -> bool:
        return any(c.supported for c in self.classes)


@dataclass
class SelectionReport:
    """Every verdict for every class of every backend, and what was chosen.

    `order_reason` says why the backends stand in this order; `notes` what else is known of the choice (where it is
    slower than bfloat16, say) and what happened afterwards (a failed self-check).
    `str()` is the text that people read, `to_dict()` the same for programs.
    """

    oracle: str
    deployment: Deployment
    requested: str
    backends: tuple[BackendReport, ...]
    order_reason: str = "static order"
    chosen_backend: str | None = None
    chosen_class: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def would_work(self) -> list[str]:
        """Names of the backends that can run this deployment, in order."""
        return [b.backend.lower() for b in self.backends if b.supported]

    def to_dict(self) -> dict[str, Any]:
        d = self.deployment
        return {
            "oracle": self.oracle,
            "scheme": str(d.scheme),
            "requested": self.requested,
            "chosen": {"backend": self.chosen_backend, "experts_class": self.chosen_class},
            "order_reason": self.order_reason,
            "would_work": self.would_work,
            "notes": self.notes,
            "backends": [
                {
                    "backend": b.backend,
                    "supported": b.supported,
                    "order_reason": b.order_reason,
                    "classes": [
                        {
                            "name": c.name,
                            "supported": c.supported,
                            "reasons": c.reasons,
                            "rules": [
                                {"fact": v.fact, "seen": v.seen, "needs": v.needs, "why": v.why, "status": v.status}
                                for v in c.verdicts
                            ],
                        }
                        for c in b.classes
                    ],
                }
                for b in self.backends
            ],
        }

    def __str__(self) -> str:
        if self.chosen_backend:
            lines = [f"chosen: {self.chosen_backend} ({self.chosen_class})"]
        else:
            lines = [f"chosen: none (requested: {self.requested})"]
        lines.append(f"order: {self.order_reason}")
        for b in self.backends:
            if b.order_reason:
                lines.append(f"{b.backend} order: {b.order_reason}")
            for c in b.classes:
                state = "supported" if c.supported else "not supported"
                lines.append(f"{b.backend} {c.name}: {state}")
                lines += [f"  - {reason}" for reason in c.reasons]
        return "\n".join(lines + [f"note: {note}" for note in self.notes])


class MoEKernelOracle(ABC, Generic[B]):
    """Backend selection of one quantisation scheme for one deployment.

    Args:
        config: the layer on one rank.
        weight_key, activation_key: how weights and activations are quantised.
    """

    name: ClassVar[str]

    def __init__(self, config: FusedMoEConfig, weight_key: QuantKey | None, activation_key: QuantKey | None) -> None:
        self.config = config
        self.weight_key = weight_key
        self.activation_key = activation_key
        activation_format = config.moe_parallel_config.activation_format
        self.deployment = Deployment(config, weight_key, activation_key, activation_format)

    @abstractmethod
    def backend_to_kernel_cls(self, backend: B) -> list[type[FusedMoEExperts]]:
        """The experts classes of a backend, best first."""

    @abstractmethod
    def priority_backends(self) -> tuple[list[B], str]:
        """Backends in the order "auto" tries them, and why in that order."""

    def ordered_classes(self, backend: B) -> tuple[list[type[FusedMoEExperts]], str]:
        """The experts classes of a backend in the order they are tried, and why, where it is not the static one."""
        return self.backend_to_kernel_cls(backend), ""

    def remarks(self, backend: str, experts_class: str) -> list[str]:
        """What a user of this choice should know."""
        return []

    @abstractmethod
    def map_backend(self, runner_backend: str) -> B:
        """The backend that `config.moe_backend` names; raises ValueError for an unknown one."""

    def try_backend(self, backend: B) -> tuple[type[FusedMoEExperts] | None, str | None]:
        """The first class of `backend` that can run this, or None and every class's reasons."""
        report = self._report_backend(backend)
        for entry in report.classes:
            if entry.supported:
                return entry.experts_class, None
        return None, "; ".join(f"{c.name}: {', '.join(c.reasons)}" for c in report.classes)

    def make_log_backend(self, backend: B, available: list[B]) -> str:
        """The line that says what was chosen, out of what."""
        names = [b.value for b in available]
        return f"Using {backend.value} {self.name} MoE backend out of potential backends: {names}."

    def make_log_unsupported(self, backend: B, reason: str | None) -> str:
        """The line that says why a backend was refused."""
        head = f"{self.name} MoE backend {backend.value} does not support the deployment configuration"
        return f"{head} since {reason}." if reason else f"{head}."

    def return_or_raise(self, backend: B, available: list[B]) -> tuple[B, type[FusedMoEExperts]]:
        """`backend` with its first supported class, for a backend asked for by name.

        Raises:
            UnsupportedDeployment: with the backend's name, every reason, and what would work.
        """
        experts_cls, reason = self.try_backend(backend)
        if experts_cls is None:
            report = self.explain()
            work = [name for name in report.would_work if name != backend.value.lower()]
            advice = f" Would work: {', '.join(work)}." if work else " No other backend would work either."
            raise UnsupportedDeployment(self.make_log_unsupported(backend, reason) + advice, report)
        _log_once(logging.INFO, self.make_log_backend(backend, available))
        return backend, experts_cls

    def select(self) -> tuple[B, type[FusedMoEExperts]]:
        """Decide: the backend asked for by name or an error; under "auto" the first that fits.

        Raises:
            ValueError: the named backend is unknown or cannot run this.
            NoBackendSupported: "auto", and nothing fits (a NotImplementedError that carries the report).
        """
        order, _ = self.priority_backends()
        if self.config.moe_backend != "auto":
            return self.return_or_raise(self.map_backend(self.config.moe_backend), order)
        for backend in order:
            experts_cls, reason = self.try_backend(backend)
            if experts_cls is not None:
                _log_once(logging.INFO, self.make_log_backend(backend, order))
                return backend, experts_cls
            _log_once(logging.DEBUG, self.make_log_unsupported(backend, reason))
        raise NoBackendSupported(
            f"No {self.name} MoE backend supports the deployment configuration (weight_key={self.weight_key},"
            f" activation_key={self.activation_key}). Every reason: set INT8MOE_LOGGING_LEVEL=DEBUG, or run"
            " `int8moe explain`.",
            self.explain(),
        )

    def explain(self) -> SelectionReport:
        """Every rule of every class of every backend, evaluated; decides as `select` does, raises nothing for
        a deployment that does not fit (an unknown backend name still raises)."""
        order, why = self.priority_backends()
        requested = self.config.moe_backend
        named = None if requested == "auto" else self.map_backend(requested)
        listed = order if named is None or named in order else [named, *order]
        report = SelectionReport(
            self.name, self.deployment, requested, tuple(self._report_backend(b) for b in listed), why
        )
        candidates = listed if named is None else [named]
        for entry in report.backends:
            if entry.supported and entry.backend in {b.value for b in candidates}:
                report.chosen_backend = entry.backend
                report.chosen_class = next(c.name for c in entry.classes if c.supported)
                report.notes += self.remarks(entry.backend, report.chosen_class)
                break
        return report

    def _report_backend(self, backend: B) -> BackendReport:
        classes, why = self.ordered_classes(backend)
        return BackendReport(backend.value, tuple(ClassReport(c, c.verdicts(self.deployment)) for c in classes), why)
