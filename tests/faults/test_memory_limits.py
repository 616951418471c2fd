"""Commands that read data, under real limits of address space: a coded error, and no charge."""

import subprocess
import sys
from pathlib import Path

import pytest

from dpstream.state.disk_errors import MIN_ADDRESS_SPACE
from tests.faults.filecalls.commands import COMMANDS, Command

DPSTREAM = (sys.executable, "-m", "dpstream")
PRISM = ("--runner", "PrismRunner")
#: Commands, and what is added to them.
NAMES = ("run", "run on Prism", "sql", "session ask", "census execute", "workload answer")


def command_of(name: str) -> tuple[Command, tuple[str, ...]]:
    """A command, and its words."""
    command = COMMANDS[name.removesuffix(" on Prism")]
    return command, (*command.words, *(PRISM if name.endswith("Prism") else ()))


def limited(folder: Path, limit: int, *words: str) -> subprocess.CompletedProcess[str]:
    """A command whose process may have so many bytes of address space."""
    program = (
        "import os, resource, sys; "
        f"resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit})); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    return subprocess.run(
        [sys.executable, "-S", "-c", program, *DPSTREAM, *words],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("mebibytes", [850, 2048])
@pytest.mark.parametrize("name", NAMES)
def test_too_little_memory_is_refused_before_a_charge(
    tmp_path: Path, name: str, mebibytes: int
) -> None:
    command, words = command_of(name)
    command.world(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    ended = limited(tmp_path, mebibytes << 20, *words)
    assert ended.returncode == 4, ended.stderr
    assert "memory" in ended.stderr and f"ulimit -v {MIN_ADDRESS_SPACE >> 10}" in ended.stderr
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_help_and_plans_need_less(tmp_path: Path) -> None:
    COMMANDS["run"].world(tmp_path)
    for words in (("run", "--help"), ("plan",)):
        assert limited(tmp_path, 850 << 20, *words).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_limit_that_the_fix_names_is_enough(tmp_path: Path, name: str) -> None:
    command, arguments = command_of(name)
    command.world(tmp_path)
    for words in command.before:
        assert not callable(words)
        subprocess.run([*DPSTREAM, *words], cwd=tmp_path, check=True, capture_output=True)
    ended = limited(tmp_path, MIN_ADDRESS_SPACE, *arguments)
    assert ended.returncode == 0, ended.stderr
