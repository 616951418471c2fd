"""kill -9 at every commit point: one charge, and the bytes of an undisturbed execution."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.pipelines.tabulation.office import (
    Office,
    charges,
    content,
    executed,
    ledger_of,
    left_over,
)

_CHILD = """
import os, pathlib, signal, sys
from dpstream.pipelines.ask import folder as folders
from dpstream.pipelines.tabulation import execute as home
from dpstream.state.ledger.contract import AnswerLog
from tests.pipelines.tabulation.office import executed, ledger_of
from tests.pipelines.tabulation.office import Office
parameters, data, folder, point, kept = sys.argv[1:]
folder = pathlib.Path(folder)

def stop():
    os.kill(os.getpid(), signal.SIGKILL)

def instead(home, name, when="after", skip=0):
    real, left = getattr(home, name), [skip]
    def call(*args, **more):
        left[0] -= 1
        if when == "before" and left[0] < 0:
            stop()
        out = real(*args, **more)
        if left[0] < 0:
            stop()
        return out
    setattr(home, name, call)

if point == "before the charge":
    instead(home, "check_dead_letters")
elif point == "after the charge":
    instead(AnswerLog, "begin") if kept == "yes" else instead(home, "read_records", "before")
elif point == "half of the files":
    instead(home, "write_file", skip=9)
elif point == "after the draw":
    instead(folders.Archive, "seal")
elif point == "before the receipt":
    instead(folders.Archive, "keep")
elif point == "after the receipt":
    instead(AnswerLog, "commit") if kept == "yes" else instead(folders.Output, "publish", "before")
elif point == "before the rename":
    instead(folders, "publish_folder", "before")
elif point == "after the rename":
    instead(folders, "publish_folder")
place = ledger_of(folder) if kept == "yes" else None
executed(Office(pathlib.Path(parameters), pathlib.Path(data)), folder / "out", ledger=place)
"""

POINTS = (
    "before the charge",
    "after the charge",
    "half of the files",
    "after the draw",
    "before the receipt",
    "after the receipt",
    "before the rename",
    "after the rename",
)


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("remaining", ["yes", "no"])
def test_whoever_is_killed_is_charged_once_and_publishes_once(
    point: str, remaining: str, made: Office, tmp_path: Path
) -> None:
    place, out = ledger_of(tmp_path) if remaining == "yes" else None, tmp_path / "out"
    killed = subprocess.run(
        [sys.executable, "-c", _CHILD, made.parameters, made.data, tmp_path, point, remaining],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert killed.returncode == -9, killed.stderr
    assert out.exists() == (point == "after the rename")
    charged = charges(tmp_path)
    assert len(charged) == (remaining == "yes" and point != "before the charge")
    execution = executed(made, out, ledger=place)
    committed = POINTS.index(point) >= POINTS.index("after the receipt")
    assert execution.drawn != (committed if remaining == "yes" else point == "after the rename")
    assert left_over(tmp_path) == []
    if remaining == "yes":
        [charge] = charges(tmp_path)
        assert charged in ([], [charge]) and charge.run_id == execution.manifest.run_id
        elsewhere = executed(made, tmp_path / "again", ledger=place)
        assert not elsewhere.drawn and content(tmp_path / "again") == content(out)
        assert charges(tmp_path) == [charge]
    assert not executed(made, out, ledger=place).drawn


@pytest.mark.slow
def test_killed_again_and_again_it_comes_to_its_end(made: Office, tmp_path: Path) -> None:
    """Each attempt is killed a little later; none is charged again."""
    for point in POINTS[1:]:
        subprocess.run(
            [sys.executable, "-c", _CHILD, made.parameters, made.data, tmp_path, point, "yes"],
            capture_output=True, timeout=300, check=False,
        )  # fmt: skip
        assert len(charges(tmp_path)) == 1
    execution = executed(made, tmp_path / "out", ledger=ledger_of(tmp_path))
    assert [charge.run_id for charge in charges(tmp_path)] == [execution.manifest.run_id]
    again = executed(made, tmp_path / "again", ledger=ledger_of(tmp_path))
    assert not again.drawn and content(tmp_path / "again") == content(tmp_path / "out")
