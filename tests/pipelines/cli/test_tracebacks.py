"""An unexpected error in every system: its values are in the private log and nowhere else."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.stream.run import run_job
from dpstream.state import open as stores
from dpstream.state.private_log import DEBUG, NAME
from tests import accounts
from tests.golden.refusals import Refused
from tests.growing import arrive, place
from tests.pipelines.cli import test_private_counts as commands
from tests.pipelines.cli.called import call

CANARY = "CANARY7741"
Prepared = Callable[[Path, bool], list[str | Path]]


def job(folder: Path, more: bool) -> list[str | Path]:
    place(folder)
    arrive(folder, 1)
    return ["run", "--project", folder]


def ledger(folder: Path, more: bool) -> list[str | Path]:
    project = place(folder) / "dpstream.toml"
    account = '[data_set.shop]\naccount = { path = "l.db", limit = { epsilon = 9.0, delta = 0.1 } }'
    accounts.write(project, project.read_text().replace("[data_set.shop]", account))
    return ["account", "show", "--project", folder]


#: How a command is called, and what fails in it.
FAULTS: list[tuple[Prepared, str]] = [
    (job, "dpstream.dp_transforms.ingest.records.Canonicaliser.__call__"),
    (job, "dpstream.dp_transforms.step.Stepper.steps"),
    (job, "dpstream.pipelines.stream.summary.tally"),
    (commands.run_statement, "dpstream.pipelines.statements.row_query.RowEngine.__call__"),
    (commands.statement, "dpstream.pipelines.tables.engine.Engine.__init__"),
    (commands.session_init, "dpstream.pipelines.session.records.load.records_of"),
    (commands.session_add, "dpstream.pipelines.session.records.load.records_of"),
    (commands.tables, "dpstream.pipelines.tabulation.execute.read_records"),
    (commands.workload_once, "dpstream.pipelines.workload.registered.answer_once"),
    (commands.tuning, "dpstream.pipelines.tuning.choose.choose"),
    (ledger, "dpstream.pipelines.operate.account_view.view"),
]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "user"))
    yield
    stores.close_all()


def fail(*_: object, **__: object) -> None:
    raise ValueError(CANARY)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[1].rpartition("pipelines.")[2])
def test_the_canary_is_in_the_log_only(
    fault: tuple[Prepared, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    args = fault[0](folder, False)
    with monkeypatch.context() as patched:
        patched.setattr(fault[1], fail)
        done = call(*args)
    assert done.exit_code == 4 and CANARY not in done.output, done.output
    [named] = re.findall(r"read the traceback in (\S+),", done.stderr)
    log = Path(named)
    assert log == folder / NAME and log.stat().st_mode & 0o777 == 0o600
    assert CANARY in log.read_text() and "Traceback" in log.read_text()
    others = [p for p in folder.rglob("*") if p.is_file() and p != log]
    assert not [p for p in others if CANARY.encode() in p.read_bytes()]


def test_the_log_is_beside_an_account_that_a_path_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger(tmp_path, False)
    monkeypatch.setattr("dpstream.pipelines.operate.account_view.view", fail)
    assert call("account", "show", tmp_path / "l.db").exit_code == 4
    assert CANARY in (tmp_path / NAME).read_text()


def test_a_run_of_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    """`dpstream.run_job` raises a coded error; what it hides is in the log."""
    job(tmp_path, False)
    loaded = load_job(tmp_path / "dpstream.toml")
    monkeypatch.setattr(FAULTS[0][1], fail)
    raised = refused(run_job, loaded)
    assert CANARY not in str(raised) and CANARY in (tmp_path / NAME).read_text()


def test_debug_in_a_real_process(tmp_path: Path) -> None:
    """The traceback comes after the warning, and only with the variable."""
    job(tmp_path, False)
    code = (
        "from dpstream.pipelines.jobs import job\n"
        f"def fail(*_, **__): raise ValueError({CANARY!r})\n"
        "job.source_path = fail\n"
        "from dpstream.pipelines.cli.main import main; main()"
    )
    command = [sys.executable, "-c", code, "plan", "--project", str(tmp_path)]
    for debug in ("", "1"):
        done = subprocess.run(command, capture_output=True, text=True, check=False,
                              env={**os.environ, DEBUG: debug})  # fmt: skip
        assert done.returncode == 4 and NAME in done.stderr
        assert (CANARY in done.stderr) is bool(debug) and CANARY not in done.stdout
    assert done.stderr.index("may hold private values") < done.stderr.index(CANARY)
