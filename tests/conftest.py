"""Shared test settings: Hypothesis profiles, a clean environment, GPU skips with a reason."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "default", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("default")

for _name in ("INT8MOE_DEVICE", "INT8MOE_CPU_ISA", "INT8MOE_LOGGING_LEVEL"):
    os.environ.pop(_name, None)


@pytest.fixture(autouse=True)
def _no_user_records(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own measured records must not change what the tests choose."""
    monkeypatch.setenv("INT8MOE_RECORDS", str(tmp_path_factory.getbasetemp() / "no-records"))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny matrices only lose by more threads, and by far where others use the cores too."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def quiet_transformers(one_thread: None) -> None:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture
def on_the_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is a GPU `load` would take it; only tests marked `gpu` want that."""
    if "gpu" not in request.keywords:
        monkeypatch.setenv("INT8MOE_DEVICE", "cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not any("gpu" in item.keywords for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device here"))
