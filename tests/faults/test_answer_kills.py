"""`dpstream answer --mechanism=geometric` and `--tables`, killed with -9 between charge, draw and
receipt: one charge, one answer."""

import contextlib
import multiprocessing
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from dpstream.pipelines.workload.release import read_release
from tests import accounts
from tests.faults.answering import CHARGED, DRAWN, NOTES, POINTS, answer, digest
from tests.faults.processes import LONGEST, files
from tests.pipelines.workload.survey import survey, write

QUERIES: dict[str, list[dict[str, Any]]] = {
    "--mechanism=geometric": [{"factors": {"age": "range", "sex": "identity"}}],
    "--tables": [{"ways": 2}, {"ways": 1}],
}


def attempt(folder: Path, option: str, point: str | None) -> int:
    """Exit code of one try."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.faults.answering"])
    process = context.Process(target=answer, args=(folder, option, point), daemon=True)
    process.start()
    process.join(LONGEST)
    code = process.exitcode
    process.kill()
    assert code is not None, "a child process hung"
    return code


def charges(folder: Path) -> list[str]:
    if not (folder / "ledger.db").exists():
        return []
    with contextlib.closing(accounts.opened(folder / "ledger.db", "people")) as ledger:
        return [charge.kind for charge in ledger.entries()]


def killed(folder: Path, option: str, points: tuple[str, ...]) -> None:
    """A try that dies at each of the points, then one that does not."""
    survey(folder, 300)
    write(folder / "asked.json", QUERIES[option])
    most = -1
    for point in points:
        assert attempt(folder, option, point) == -signal.SIGKILL
        most = max(most, POINTS.index(point))
        assert charges(folder) == ["workload"] * (most >= CHARGED)
        assert (folder / "out").exists() == (most == len(POINTS) - 1)
    assert attempt(folder, option, None) == 0
    assert charges(folder) == ["workload"]
    drawn = (folder / NOTES).read_text().split()
    committed = POINTS.index("after commit")
    deaths = sum(DRAWN <= POINTS.index(point) < committed for point in points)
    assert len(drawn) == deaths + 1 and set(drawn) == {
        digest(read_release(folder / "out").estimate)
    }
    contents = files(folder / "out")
    shutil.rmtree(folder / "out")
    assert attempt(folder, option, None) == 0
    assert files(folder / "out") == contents and charges(folder) == ["workload"]


def test_between_charge_and_draw_and_before_the_receipt(tmp_path: Path) -> None:
    killed(tmp_path, "--tables", ("after begin", "before commit"))


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("option", QUERIES)
def test_anywhere(option: str, point: str, tmp_path: Path) -> None:
    killed(tmp_path, option, (point,))


@pytest.mark.slow
@pytest.mark.parametrize("option", QUERIES)
def test_again_and_again(option: str, tmp_path: Path) -> None:
    killed(tmp_path, option, POINTS)


def test_another_draw_would_be_seen(tmp_path: Path) -> None:
    """What is noted differs where the noise is not that of the first try."""
    survey(tmp_path, 300)
    write(tmp_path / "asked.json", QUERIES["--tables"])
    assert attempt(tmp_path, "--tables", "after draw") == -signal.SIGKILL
    accounts.emptied(tmp_path / "ledger.db")  # another run id: a program that forgot its charge
    assert attempt(tmp_path, "--tables", None) == 0
    first, second = (tmp_path / NOTES).read_text().split()
    assert first != second
