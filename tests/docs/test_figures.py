"""Every figure of README and docs has a command, and the commands run in a clean clone."""

import copy
import os
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.docs.figures import BENCHMARKS, expected, faults, figures, recorded
from tests.docs.pages import PAGES, README, ROOT, named

CONTENT = recorded()
#: Seconds that the small form of a command may take on a busy machine.
MOST_SECONDS = 900


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_every_figure_has_a_command(path: Path) -> None:
    """Where this fails: name the command of a new figure in tests/bench/figures.json (`documents`),
    or the page's constant (`constants`), or measure a changed one again."""
    assert faults(CONTENT, named(path), path.read_text()) == []


def test_the_file_is_whole() -> None:
    """Each command says when it was recorded and how it is run small; no page is gone."""
    used = {command for commands in CONTENT["documents"].values() for command in commands}
    assert used == set(CONTENT["commands"])
    for command, entry in CONTENT["commands"].items():
        assert set(entry) == {"recorded", "small"} and all(entry.values()), command
    assert {*CONTENT["documents"], *CONTENT["constants"]} <= set(map(named, PAGES))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("5.0 times its keys", "5.2 times its keys"),
        ("1,034,000 records/s", "1,134,000 records/s"),
        ("median 0.16 s", "median 0.15 s"),
        ("54% less", "57% less"),
        ("## Documentation", "A run takes 12 seconds and 3 GiB.\n\n## Documentation"),
        ("## Documentation", "It is 20 times faster.\n\n## Documentation"),
        ("## Documentation", "|a|CPU|\n|---|---|\n|b|7|\n\n## Documentation"),
    ],
)
def test_a_changed_or_new_figure_is_seen(old: str, new: str) -> None:
    page = README.read_text()
    assert faults(CONTENT, "README.md", page) == [] and old in page
    assert faults(CONTENT, "README.md", page.replace(old, new))


def test_a_figure_that_is_gone_is_seen() -> None:
    content = copy.deepcopy(CONTENT)
    content["constants"].setdefault("README.md", []).append("12 s")
    assert faults(content, "README.md", README.read_text()) == ["README.md: '12 s' is not there"]


def test_what_counts_as_a_figure() -> None:
    page = (
        "It is 3 times as fast, 40% smaller and takes 0.2 CPU seconds; `5 times` is code, C = 3 a "
        "parameter, [2 GiB](x-3%.md) a link.\n\n```sh\nsleep 9 s\n```\n\n| a | b |\n|---|---|\n"
        "| 1 % | 2 |\n\n| of | seconds |\n|---|---|\n| 7 users | 1.5 / 2 |\n"
    )
    assert figures(page) == Counter(
        ["3 times", "40%", "0.2 CPU seconds", "2 GiB", "1 %", "1.5 / 2"]
    )
    assert figures(page, all_tables=True)["2"] == 1
    assert sum(expected(CONTENT, BENCHMARKS).values()) > 200


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of HEAD with an environment of its own, and the Prism that it builds."""
    folder = tmp_path_factory.mktemp("clean") / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    env = {**os.environ, "PYTHONPATH": ""}
    python = sys.executable
    for target in (".venv/.ready", "prism"):
        subprocess.run(["make", target, f"PYTHON={python}"], cwd=folder, env=env, check=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("command", CONTENT["commands"])
def test_commands_run_in_a_clean_clone(clone: Path, command: str) -> None:
    """In a small form, which prints the figures in seconds: that they can be had, not their
    values, which are of one machine."""
    words = shlex.split(CONTENT["commands"][command]["small"])
    env = {**os.environ, "PATH": os.pathsep.join([str(clone / ".venv/bin"), os.environ["PATH"]])}
    env.pop("PYTHONPATH", None)
    ran = subprocess.run(
        words, cwd=clone, env=env, capture_output=True, text=True, check=False, timeout=MOST_SECONDS
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
