"""Importing the package, or a benchmark, writes nothing to stderr; warnings of others go there."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = """
import importlib, pkgutil, {package}
for module in pkgutil.walk_packages({package}.__path__, "{package}."):
    if not module.name.endswith("__main__") and "test_" not in module.name:
        importlib.import_module(module.name)
"""
NAMES = "import dpstream\nfor name in dpstream.__all__: getattr(dpstream, name)"


def stderr_of(*words: str) -> str:
    command = [sys.executable, *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    return done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("-c", NAMES),
        ("-c", "import dpstream.pipelines.demo"),
        ("-c", MODULES.format(package="dpstream")),
        ("-c", MODULES.format(package="tests.bench")),
        ("-m", "tests.bench.stream", "--help"),
        ("-m", "dpstream", "demo", "--help"),
    ],
    ids=["names", "demo", "modules", "benchmarks", "benchmark", "command"],
)
def test_stderr_is_empty(words: tuple[str, ...]) -> None:
    assert stderr_of(*words) == ""


def test_other_warnings_are_shown() -> None:
    """Of the program's own loggers, also in Beam's words, and of Beam's later ones."""
    text = (
        "import logging, warnings, dpstream.pipelines.demo\n"
        "logging.warning('apitools not found, mine')\n"
        "logging.getLogger('apache_beam.io.filesystems').warning('other')\n"
        "warnings.warn('own')\n"
    )
    shown_lines = stderr_of("-c", text)
    for words in ("apitools not found, mine", "other", "UserWarning: own"):
        assert words in shown_lines
