"""P7: forced failures in every command that touches a job, its store, its releases or its data."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner

from dpstream.accounting import guarantee
from dpstream.pipelines.cli import main as module
from dpstream.pipelines.connectors.files import source as files_source
from dpstream.pipelines.jobs import secret
from dpstream.pipelines.operate import account_view, doctor, state_admin
from dpstream.pipelines.render import job_plan
from dpstream.pipelines.report import data as report_releases
from dpstream.pipelines.report import report
from dpstream.pipelines.report import view as report_view
from dpstream.pipelines.stream import begin as beginning
from dpstream.pipelines.stream.run import run_job
from dpstream.pipelines.tuning import choose
from dpstream.state import open as stores
from dpstream.state.ledger.contract import AnswerLog, Ledger
from dpstream.state.sqlite.store import SqliteStore
from tests.audit.leaks import Logs, hits, leaked_files, make_job
from tests.audit.test_leaks import ERRORS, Forced
from tests.audit.test_leaks import PLACES as FORCED_PLACES

JOB = ("--project", "{job}")
REPORT = ("report", *JOB, "--out", "{out}/page.html")
TRUTH = (*REPORT, "--truth", "{job}/in/*.csv")
INFO = ("state", "info", *JOB)
EXPORT = ("state", "releases", *JOB, "--out", "{out}/again")
CHOOSE = ("choose", *JOB, "--first", "12h", "--epsilon", "1", "--as", "chosen")

#: A command, and the function that fails in it.
PLACES: list[tuple[tuple[str, ...], Any, str]] = [
    (("plan", *JOB), job_plan, "summary_text"),
    (("plan", *JOB), guarantee, "describe"),
    (REPORT, report, "inventory"),
    (REPORT, report, "collect"),
    (REPORT, report_releases, "read_parts"),
    (REPORT, report_view, "render"),
    (REPORT, report, "write"),
    (TRUTH, report, "by_size"),
    (INFO, stores, "open_store"),
    (INFO, SqliteStore, "completed"),
    (EXPORT, SqliteStore, "committed_releases"),
    (EXPORT, state_admin, "publish_committed"),
    (EXPORT, state_admin, "secret_source"),
    (CHOOSE, choose, "tally"),
    (CHOOSE, choose, "noisy"),
    (CHOOSE, choose, "pieces"),
    (CHOOSE, choose, "read_off"),
    (CHOOSE, AnswerLog, "find"),
    (("run", *JOB), files_source, "fingerprint_parts"),
    (("run", *JOB), beginning, "begin_run"),
    (("run", *JOB), Ledger, "charge_within"),
    (("run", *JOB), beginning, "check_sink"),
    (("run", *JOB), beginning, "write_manifest"),
    (("account", "show", *JOB), account_view, "read_history"),
    (("secret", "new", "{out}/noise.secret"), secret, "new_secret"),
    (("doctor",), doctor, "examine"),
]


@pytest.fixture(autouse=True)
def clean_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    # The command line turns logging off; what it would have logged is searched all the same.
    monkeypatch.setattr(module, "silence", lambda: None)
    yield
    stores.close_all()
    logging.disable(logging.NOTSET)


def command(folder: Path, arguments: tuple[str, ...], *more: str) -> Any:
    places = {"job": folder / "job", "out": folder / "out"}
    (folder / "out").mkdir(exist_ok=True)
    return CliRunner().invoke(module.cli, [*(a.format(**places) for a in arguments), *more])


def test_all_places_are_there() -> None:
    """Those of the tests of failures too, which mostly run at night."""
    owners = [(owner, name) for _, owner, name in PLACES] + FORCED_PLACES
    assert [name for owner, name in owners if not hasattr(owner, name)] == []


@pytest.mark.parametrize("number", range(len(PLACES)))
def test_failed_commands_show_nothing(tmp_path: Path, number: int) -> None:
    arguments, owner, name = PLACES[number]
    job = make_job(tmp_path / "job")
    if arguments[0] in ("report", "state", "account"):
        run_job(job)
    make: Callable[[], BaseException] = ERRORS[number % len(ERRORS)]
    forced = Forced(make)
    more = ("--json",) if number % 2 else ()
    with Logs() as logs, mock.patch.object(owner, name, forced):
        result = command(tmp_path, arguments, *more)
    assert forced.calls, "the place was never reached"
    assert result.exit_code in (2, 3, 4), result.output
    assert not hits(result.output) and not hits(result.stderr) and not hits(logs.text)
    assert result.stderr.splitlines() and not result.exception.__context__
    for folder in (tmp_path / "job", tmp_path / "out", tmp_path / "tmp"):
        assert list(leaked_files(folder)) == []


def test_commands_that_succeed_show_no_more_than_releases(tmp_path: Path) -> None:
    run_job(make_job(tmp_path / "job"))
    for arguments in (("plan", *JOB), INFO, EXPORT):
        with Logs() as logs:
            result = command(tmp_path, arguments, "--json")
        assert result.exit_code == 0, result.output
        assert not hits(result.output) and not hits(result.stderr) and not hits(logs.text)
    assert list(leaked_files(tmp_path / "tmp")) == []
