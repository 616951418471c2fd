"""``make nightly``: slices that remember what ran, and go on with what ran longest ago."""

import os
import subprocess
import sys
from pathlib import Path

from tests.nightly import NEVER, ROOT, Last, in_turn, last_runs, summary

TESTS = """
import os, pytest
pytestmark = pytest.mark.slow
def test_one(): pass
def test_two(): assert False
def test_three(): os._exit(7)
def test_four(): pass
"""


def test_what_never_ran_and_ran_longest_ago_comes_first() -> None:
    last = {"a::1": Last(5.0), "a::2": Last(3.0), "b::1": Last(2.0), "b::2": Last(9.0)}
    turns = in_turn(["a::1", "a::2", "b::1", "b::2", "c::1"], last)
    assert turns == ["c::1", "b::1", "b::2", "a::2", "a::1"]


def test_slices_go_on_where_the_last_one_broke_off(tmp_path: Path) -> None:
    """A test that ends its process is noted as killed, and the next slice begins behind it."""
    (tmp_path / "test_some.py").write_text(TESTS)
    log = tmp_path / "log" / "nightly.jsonl"
    command = [sys.executable, "-m", "tests.nightly", ".", f"--log={log}", "--minutes=0.5"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for _ in range(2):
        ended = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 1
    last = {test.partition("::")[2]: run.outcome for test, run in last_runs(log).items()}
    assert last == {"test_one": "passed", "test_two": "failed", "test_three": "killed",
                    "test_four": "passed"}  # fmt: skip
    assert "4 slow tests, 2 failed, 0 never run" in ended.stdout


def test_the_summary_names_what_never_ran() -> None:
    text = summary(["a", "b"], {"a": Last(1.0, "passed", 2.0)})
    assert text.startswith("2 slow tests, 0 failed, 1 never run") and "never run: 1 of b" in text
    assert NEVER.began < 1.0
