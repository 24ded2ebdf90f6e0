"""benchmarks/gpu_profile.py: what it reads of ncu's table."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

STALL = "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio"
TABLE = f"""==PROF== Connected
"ID","Kernel Name","gpu__time_duration.sum","dram__bytes_read.sum","dram__bytes.sum.per_second","{STALL}"
"","","ns","Mbyte","Tbyte/s","inst"
"0","gemm_kernel","12,096","25.2","2.1","1.5"
"1","combine_kernel","800","0.1","","0.1"
"""


@pytest.fixture(scope="module")
def profile() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "gpu_profile.py"
    spec = importlib.util.spec_from_file_location("gpu_profile", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_units_and_stalls(profile: ModuleType, tmp_path: Path) -> None:
    (raw := tmp_path / "raw.csv").write_text(TABLE)
    gemm, combine = profile.read(raw)
    assert gemm == {
        "kernel": "gemm_kernel", "us": 12.1, "dram_read_bytes": 25.2e6, "dram_bytes_per_second": 2.1e12,
        "stalls": {"wait": 1.5},
    }  # fmt: skip
    assert combine == {"kernel": "combine_kernel", "us": 0.8, "dram_read_bytes": 1e5, "stalls": {}}


@pytest.mark.parametrize(
    ("content", "says"),
    [("", "holds no kernels"), ("\0\xff" * 100, "holds no kernels"), (TABLE[:-25], "kernel 2: .* the file is cut")],
    ids=["empty", "no text", "half"],
)
def test_a_file_that_is_no_table(profile: ModuleType, content: str, says: str, tmp_path: Path) -> None:
    (raw := tmp_path / "raw.csv").write_text(content, encoding="latin-1")
    with pytest.raises(SystemExit, match=says):
        profile.read(raw)
