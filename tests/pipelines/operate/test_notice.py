"""The commands of a job that tell others how its run has ended."""

import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.operate.notice import announcing
from dpstream.pipelines.stream.run import run_job
from dpstream.state import open as stores
from tests.pipelines.cli.called import call, printed
from tests.pipelines.stream.test_completeness import DAYS, WEEK, week, write


@pytest.fixture(autouse=True)
def closed_stores() -> Iterator[None]:
    yield
    stores.close_all()


def test_what_a_command_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Job, window and state, and nothing of this process's environment."""
    folder = week(tmp_path / "job", days=DAYS[:6])
    script, log = folder / "tell.sh", folder / "log"
    script.write_text(
        '#!/bin/sh\necho "$1"\nenv | grep -v "^PWD=\\|^_=\\|^SHLVL=" >> log\nexit $2\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    project = folder / "dpstream.toml"
    job = 'success = ["./tell.sh", "$(id)", "0"]\nfailure = ["./tell.sh", "no", "0"]\nstore ='
    project.write_text(project.read_text().replace("store =", job))
    monkeypatch.setenv("A_SECRET", "of this process")

    def ended(through: str, *flags: str) -> tuple[int, list[str]]:
        log.unlink(missing_ok=True)
        outcome = call("run", "--project", folder, "--through", through, "--json", *flags)
        stores.close_all()
        if outcome.exit_code == 0:
            assert printed(outcome.stdout)["run_id"]
        return outcome.exit_code, sorted(log.read_text().split())

    window = "DPSTREAM_WINDOW=2024-01-01T00:00:00Z/2024-01-08T00:00:00Z"
    failed = ["DPSTREAM_JOB=daily", "DPSTREAM_STATE=failed", window]
    assert ended(WEEK) == (4, failed)
    assert ended(WEEK, "--operator-report", str(project)) == (2, failed)
    incomplete = ["DPSTREAM_JOB=daily", "DPSTREAM_STATE=incomplete", window]
    assert ended(WEEK, "--incomplete") == (0, incomplete)
    for day in range(8, 15):
        write(folder, f"2024-01-{day:02d}", rows=9)
    window = "DPSTREAM_WINDOW=2024-01-08T00:00:00Z/2024-01-15T00:00:00Z"
    complete = ["DPSTREAM_JOB=daily", "DPSTREAM_STATE=complete", window]
    assert ended("2024-01-15") == (0, complete)
    for command, words in (('"./tell.sh", "", "3"', "exit code 3"), ('"./none"', "be started")):
        text = project.read_text()
        project.write_text(text.replace('"./tell.sh", "$(id)", "0"', command))
        outcome = call("run", "--project", folder, "--through", WEEK)
        assert (
            outcome.exit_code == 4
            and words in outcome.stderr
            and "job.daily.success" in outcome.stderr
        )
        project.write_text(text)
        stores.close_all()


def test_a_run_that_was_stopped_tells_nobody(tmp_path: Path) -> None:
    folder = week(tmp_path / "job")
    project, stop = folder / "dpstream.toml", threading.Event()
    command = 'success = ["touch", "told"]\nstore ='
    project.write_text(project.read_text().replace("store =", command))
    job = load_job(folder)
    for stopped in (True, False):
        stop.set() if stopped else stop.clear()
        with announcing(job, WEEK) as ended:
            run_job(job, stop=stop, through=WEEK, deliver=ended)
        stores.close_all()
        assert (folder / "told").exists() is not stopped
