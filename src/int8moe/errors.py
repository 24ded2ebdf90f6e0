"""Every exception the library raises on purpose, each derived from the built-in that users catch."""

from __future__ import annotations

from typing import Any


class Int8MoeError(Exception):
    """Base of all exceptions raised on purpose; carries an optional selection report."""

    report: Any = None


class UnsupportedDeployment(Int8MoeError, ValueError):
    """A backend asked for by name cannot run the deployment."""

    def __init__(self, message: str, report: Any = None) -> None:
        super().__init__(message)
        self.report = report


class NoBackendSupported(Int8MoeError, NotImplementedError):
    """No backend at all can run the deployment; `report` holds every verdict."""

    def __init__(self, message: str, report: Any = None) -> None:
        super().__init__(message)
        self.report = report


class UnknownBackend(Int8MoeError, ValueError):
    """A backend name or member that does not exist."""


class ConfigError(Int8MoeError, ValueError):
    """A field of a configuration has a value that makes no sense."""


class ShapeMismatch(Int8MoeError, ValueError):
    """Tensors that belong together do not fit each other."""


class InvalidRouting(Int8MoeError, ValueError):
    """Expert ids that name no expert."""


class NonFiniteWeight(Int8MoeError, ValueError):
    """A weight holds NaN or infinity and cannot be quantised."""


class CheckpointError(Int8MoeError, ValueError):
    """A checkpoint is missing, damaged, or of a kind that cannot be converted."""


class AlreadyConverted(Int8MoeError, ValueError):
    """Weights that are in a backend's format were given where canonical ones are needed."""


class SelfCheckFailed(Int8MoeError, RuntimeError):
    """A backend's result differs from the reference at first use."""


class MissingPackage(Int8MoeError, ImportError):
    """An optional package is needed; the message names the extra that installs it."""


class NativeExtensionError(Int8MoeError, RuntimeError):
    """The native CPU extension is absent, or the instruction set asked for cannot run."""
