"""The native kernel without Python (scripts/native_tests.sh): sanitizers, and emulation of processors not here."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SIMDE = Path("/usr/include/simde/x86/avx512.h")
X86 = platform.machine() == "x86_64"
NEEDS = {
    "sanitize": (X86 and shutil.which("g++"), "needs g++ on x86-64"),
    "emulate-x86": (X86 and shutil.which("g++") and SIMDE.exists(), "needs g++ and libsimde-dev"),
    "emulate-arm": (
        shutil.which("aarch64-linux-gnu-g++") and shutil.which("qemu-aarch64"),
        "needs g++-aarch64-linux-gnu and qemu-user",
    ),
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("native") / "cases.bin"
    subprocess.run([sys.executable, str(Path(__file__).parent / "write_cases.py"), str(path)], check=True)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("how", NEEDS)
def test_bits_of_the_reference(how: str, cases: Path) -> None:
    there, reason = NEEDS[how]
    if not there:
        pytest.skip(reason)
    run = subprocess.run(
        ["bash", str(ROOT / "scripts" / "native_tests.sh"), str(cases), how],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "2"},
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    last = run.stdout.strip().splitlines()[-1]
    assert last.endswith(", 0 failed"), last
    wanted = {
        "sanitize": "portable",
        "emulate-x86": "amx avx512vnni avxvnni",
        "emulate-arm": "neon_i8mm neon_dotprod portable",
    }
    assert wanted[how] in last


def test_a_wrong_result_is_noticed(cases: Path, tmp_path: Path) -> None:
    if not (X86 and shutil.which("g++")):
        pytest.skip("needs g++ on x86-64")
    data = bytearray(cases.read_bytes())
    data[-1] ^= 0x40  # the last byte of the last case's expected output
    spoilt = tmp_path / "spoilt.bin"
    spoilt.write_bytes(data)
    run = subprocess.run(
        ["bash", str(ROOT / "scripts" / "native_tests.sh"), str(spoilt), "portable"], capture_output=True, text=True
    )
    assert run.returncode == 1 and "1 of" in run.stdout, run.stdout[-2000:] + run.stderr[-2000:]
