"""The README's Python blocks run as they stand, and the commands it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from int8moe.cli.main import cli

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_python_block(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    code = BLOCKS[number].replace("path/to/model", "models/sotu-moe")
    exec(compile(code, f"README block {number}", "exec"), {"__name__": "readme"})


def test_there_are_blocks() -> None:
    assert len(BLOCKS) >= 2


def test_commands_and_options_exist() -> None:
    for line in re.findall(r"^int8moe .*$", README, re.M):
        words = line.split("#")[0].split()
        text = CliRunner().invoke(cli, [words[1], "--help"]).output
        for option in (w for w in words if w.startswith("--")):
            assert option in text, (line, option)


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for document in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"^make ([a-z-]+)", (ROOT / document).read_text(), re.M):
            assert re.search(rf"^{target}:", makefile, re.M), target
