"""Streams, questions and tables on a ledger in Spanner: by its URL alone, the same answers."""

import contextlib
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.csv
import pytest
from click.testing import CliRunner

import dpstream
from dpstream.accounting.errors import DpstreamError, UsageError
from dpstream.pipelines.cli.main import cli
from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.operate.account_view import view
from dpstream.pipelines.runners.bounded import Runner
from dpstream.pipelines.session.ask import close_before
from dpstream.pipelines.session.config import load_config
from dpstream.pipelines.sql.ask import ask
from dpstream.pipelines.sql.load import load_catalog
from dpstream.pipelines.tables.registration import register
from dpstream.state import open as stores
from dpstream.state.ledger.contract import AnswerLog
from dpstream.state.ledger.events import Charge, TableNamed
from tests import accounts, emulator
from tests.faults.filecalls.commands import COMMANDS, STATEMENT
from tests.faults.processes import files
from tests.golden.refusals import Refused
from tests.pipelines.ask.kinds import Outcome, typed
from tests.pipelines.operate.test_state_admin import with_account
from tests.pipelines.session import tables as small
from tests.pipelines.session.statements import Session
from tests.pipelines.sql.asking import COUNTED, FRESH, dp
from tests.pipelines.tables import test_registration
from tests.pipelines.tabulation.office import content, executed, office
from tests.pipelines.test_spanner_job import call, write_job
from tests.pipelines.tuning import asking as tuning
from tests.state.ledger.places import Contents, in_database

LIMIT = (21.0, 0.011)


@pytest.fixture(scope="module", autouse=True)
def running() -> Iterator[None]:
    with emulator.running():
        yield


@pytest.fixture
def url() -> Iterator[str]:
    made = emulator.fresh_url()
    yield made
    stores.close_all()
    emulator.drop(made)


def charges(url: str) -> list[Charge]:
    return accounts.charges(url)


def charged_job(folder: Path, account: str, made: bool = True) -> Path:
    """A job, and its account unless it is not to be made."""
    job = write_job(folder, "state/s.db")
    text = with_account(LIMIT, account, job.read_text())
    if made:
        accounts.write(job, text)
    else:
        given = f"limit = {{ epsilon = {LIMIT[0]!r}, delta = {LIMIT[1]!r} }}"
        assert given in text
        job.write_text(text.replace(given, f'id = "{accounts.ID}"'))
    return job


def test_a_stream(tmp_path: Path, url: str) -> None:
    """Charged once, the bytes of a ledger in a file; beyond the limit and copies are refused."""
    here, there = charged_job(tmp_path / "a", "ledger.db"), charged_job(tmp_path / "b", url)
    call("run", here)
    assert call("state", "init", there)["new"] is True and charges(url) == []
    shutil.copytree(tmp_path / "b", tmp_path / "copy")
    for resumed in (True, True):
        assert call("run", there)["resumed"] is resumed
        assert len(charges(url)) == 1
    expected = files(tmp_path / "a" / "out")
    assert len(expected) >= 8 and files(tmp_path / "b" / "out") == expected
    assert "older or forked" in str(
        call("run", tmp_path / "copy" / "dpstream.toml", code=3)["rule"]
    )
    for account in (call("account", "show", there), call("account", "show", url)):
        assert account["data_set"] == "d" and account["charges"] == 1
    text = (tmp_path / "b" / "dpstream.toml").read_text()
    accounts.write(
        tmp_path / "copy" / "dpstream.toml",
        text.replace("s.db", "new.db").replace("2222222222", "3333333333"),
    )
    shutil.rmtree(tmp_path / "copy" / "out", ignore_errors=True)
    error = call("run", tmp_path / "copy" / "dpstream.toml", code=3)
    assert error["field"] == "account.limit" and len(charges(url)) == 1


def test_an_account_that_is_not_made(tmp_path: Path) -> None:
    """Nothing begins, and the error says what makes it."""
    url = emulator.fresh_url()
    job = charged_job(tmp_path / "job", url, made=False)
    error = call("run", job, code=2)
    assert str(error["field"]).endswith("account.path") and "dpstream account create" in str(
        error["fix"]
    )
    assert not (tmp_path / "job" / "out").exists()
    given = ("--data-set", "d", "--unit", "user", "--type", "int")
    made = call("account", "create", url, *given, "--epsilon", "30", "--delta", "1e-2")
    assert str(call("run", job, code=3)["field"]).endswith("account.id")
    accounts.write(job, job.read_text().replace(accounts.ID, str(made["id"])))
    call("run", job)
    assert len(charges(url)) == 1
    again = call("account", "create", url, *given, "--epsilon", "30", "--delta", "1e-2", code=2)
    assert again["field"] == "account.path" and len(charges(url)) == 1
    changed = call("account", "limit", job, "--epsilon", "40", "--delta", "1e-2")
    assert changed["old"] == {"epsilon": 30.0, "delta": 1e-2}
    assert call("account", "show", url)["limit"] == {"epsilon": 40.0, "delta": 1e-2}
    emulator.drop(url)


@pytest.mark.parametrize("path", ["spanner:p/i/d", "spanner://p/i", "postgres://p/i/d"])
def test_urls_that_name_no_ledger(tmp_path: Path, path: str, refused: Refused) -> None:
    for attempt in (
        lambda: load_job(charged_job(tmp_path / "job", path, made=False)),
        lambda: dpstream.account(path, "visits", id=accounts.ID),
    ):
        caught = refused(attempt)
        assert path not in str(caught)
    assert call("account", "show", path, code=2)["field"] == "account.path"


def test_a_store_and_its_ledger_are_two_databases(tmp_path: Path) -> None:
    job = charged_job(tmp_path / "job", "spanner://p/i/d", made=False)
    accounts.write(job, job.read_text().replace("state/s.db", "spanner://p/i/d"))
    error = call("run", job, code=2)
    assert str(error["field"]).endswith("account.path") and "of its own" in str(error["fix"])


def test_a_question(tmp_path: Path, url: str, refused: Refused) -> None:
    """Paid once; sums of workers are handed over beside the catalog, and notes lie there."""
    path = test_registration.shop_files(tmp_path)
    accounts.write(path, path.read_text().replace("ledger.db", url))
    catalog = load_catalog(path)
    unit = catalog.unit
    accounts.create(url, catalog.ledger.data_set, (100.0, 1e-5), unit.name, unit.type)
    text = dp(f"page, {COUNTED} AS n")
    first = ask(catalog, text)
    assert first.charged and [c.kind for c in charges(url)] == ["sql"]
    again = ask(catalog, text)
    assert not again.charged and again.receipt == first.receipt
    account = view(catalog.ledger)
    assert account["charges"] == 1 and account["spent"]["epsilon"] > 0
    refused(ask, catalog, test_registration._TEXT)
    register(catalog)
    assert catalog.notebook.parent == tmp_path and catalog.notebook.stat().st_mode & 0o077 == 0
    assert ask(catalog, test_registration._TEXT, FRESH).charged and len(charges(url)) == 2
    spread = ask(catalog, dp("COUNT(*) AS n", "FROM visits"), runner=Runner("DirectRunner"))
    assert spread.charged and len(charges(url)) == 3
    assert not list(tmp_path.glob(".dpstream-work-*"))


def test_a_table(tmp_path: Path, url: str) -> None:
    made = office(tmp_path / "office")
    place = accounts.create(url, "people", (1e3, 1e-9), "person")
    first = executed(made, tmp_path / "out", ledger=place)
    assert first.charged and [c.kind for c in charges(url)] == ["table"]
    again = executed(made, tmp_path / "again", ledger=place)
    assert first.drawn and not again.drawn and not again.charged  # restored from the archive
    assert content(tmp_path / "out") == content(tmp_path / "again")
    assert len(charges(url)) == 1


def test_a_tuning(tmp_path: Path, url: str) -> None:
    """Its receipt is read from the ledger by the job that it is written to."""
    (tmp_path / "in").mkdir()
    tuning_key(tmp_path)
    (tmp_path / "in" / "a.csv").write_text(tuning.records(tuning.USERS))
    project = tmp_path / "dpstream.toml"
    tuning.write(project, ("deliveries.account.db", url))
    tuning.done(tuning.choose(project))
    assert [c.kind for c in charges(url)] == ["choice"]
    assert tuning.load(project) == ""
    project.write_text(project.read_text().replace(url, emulator.url("none-there")))
    with pytest.raises(UsageError) as refused:
        load_job(project, "new")
    assert refused.value.field == "data_set.deliveries.account.path"


def tuning_key(folder: Path) -> None:
    (folder / "keys").mkdir()
    made = CliRunner().invoke(cli, ["secret", "new", str(folder / "keys" / "noise.secret")])
    assert made.exit_code == 0, made.output


def test_a_session(tmp_path: Path, url: str, refused: Refused) -> None:
    """Questions, allotments, re-asks and closed ranges, from two places at once."""
    config = small.small_config_at(tmp_path)
    text = (tmp_path / "dpstream.toml").read_text()
    (tmp_path / "dpstream.toml").write_text(text.replace("ledger.db", url))
    with contextlib.closing(accounts.of_records(url, config.account.data_set)) as ledger:
        for event in accounts.events(config.base / "ledger.db"):
            if isinstance(event, TableNamed):
                ledger.name_table(event.id)
    for head_file in tmp_path.glob("dpstream-*.head"):
        head_file.unlink()  # of the account of the same id that the file named before
    config = load_config(tmp_path)
    with Session(config, analyst="alice") as mine, Session(config, analyst="bob") as other:
        first = mine.where("epsilon >= 1").count(0.5)
        assert other.where("epsilon >= 1").count(0.5).receipt == first.receipt
        allotment = other.where("epsilon >= 1").as_pinq(0.5)
        assert allotment.count(0.5).charged and allotment.left == 0
        refused(lambda: mine.where("epsilon >= 1").count(0.75))
        assert close_before(mine.open_table, "b", "5")
        refused(lambda: other.where("b < 5 AND epsilon = 2").count(0.1))
    assert [charge.kind for charge in charges(url)] == ["session"] * 4
    assert accounts.charges(config.base / "ledger.db") == []


def by_a_function(url: str, *options: str) -> Outcome:
    """A DataFrame function, whose account no file names."""
    types = {"user": pa.int64(), "page": pa.string(), "time": pa.string()}
    read = pa.csv.ConvertOptions(column_types=types)
    try:
        answer = dpstream.count(
            pa.csv.read_csv("in.csv", convert_options=read), unit="user", key="page",
            epsilon=5.0, max_keys=4, max_rows=5,
            account=dpstream.account(url, "d", id=accounts.ID, secret="file:noise.secret"),
            fresh="--fresh" in options,
            as_of="May" if "May" in options else "",
        )  # fmt: skip
    except DpstreamError as error:
        return Outcome(error.exit_code, "", str(error))
    return Outcome(0, str(answer.table.to_pylist()), "")


def by_a_catalog(_: str, *options: str) -> Outcome:
    """A statement, whose account the project file names."""
    return typed("sql", STATEMENT, *options)


@pytest.mark.parametrize(
    ("ask", "head"),
    [(by_a_function, "home/dpstream"), (by_a_catalog, "shop")],
)
def test_a_database_that_was_restored(
    ask: Callable[..., Outcome],
    head: str,
    tmp_path: Path,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Refused, recovered as the refusal says, and asked again: no charge has two answers."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    (tmp_path / "shop").mkdir()
    monkeypatch.chdir(tmp_path / "shop")
    COMMANDS["sql"].world(Path())
    project = Path("dpstream.toml")
    project.write_text(project.read_text().replace("account/ledger.db", url))
    accounts.create(url, "d", (40.0, 1e-5), "user", "int")
    first = ask(url)
    assert first.code == 0, first.stderr
    commit, exported = AnswerLog.commit, list[Contents]()

    def exporting(register: AnswerLog, *answer: Any) -> None:
        """Between the charge and its receipt."""
        exported.append(in_database(url).contents())
        commit(register, *answer)

    with mock.patch.object(AnswerLog, "commit", exporting):
        assert ask(url, "--as-of", "May").code == 0
    assert ask(url, "--fresh").code == 0 and len(charges(url)) == 3
    assert [path.parent for path in tmp_path.rglob("*.head")] == [tmp_path / head]
    in_database(url).put_back(exported[0])
    assert len(charges(url)) == 2
    refused = ask(url)
    command = re.search(r"`(dpstream account recover [^`]+)`", refused.stderr)
    assert refused.code == 3 and command is not None, refused
    recovered = typed(*shlex.split(command[1])[1:])
    assert recovered.code == 0, recovered.stderr
    assert len(charges(url)) == 3
    assert ask(url).stdout == first.stdout and len(charges(url)) == 3  # its answer was exported
    for number, options in enumerate((("--as-of", "May"), ("--fresh",)), 4):
        assert ask(url, *options).code == 0
        assert len(charges(url)) == number
