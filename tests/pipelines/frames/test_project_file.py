"""The project file in Python: the same answers and charges as of the commands.

A run that is begun in Python is charged as a job's is: once, before any draw, or refused.
"""

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest

import dpstream
from dpstream.accounting.fields import Field
from dpstream.accounting.plan.unit import UnitIdentity
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.pipelines.ask.question import ONCE, Asking
from dpstream.pipelines.frames.project_file import DataSetAccount, checked_account
from dpstream.pipelines.jobs.secret import new_secret
from dpstream.pipelines.stream.begin import begin
from dpstream.state import open as stores
from dpstream.state.retention_store import BEGIN, RESTORE
from tests import accounts
from tests.audit.replays import Place, new_place
from tests.golden.pinned import check, of_refusals, refusal
from tests.golden.refusals import Refused
from tests.pipelines.cli.called import call
from tests.pipelines.frames.visits import a_job
from tests.pipelines.sql import asking
from tests.pipelines.stream.test_begin import CutOff, cut_off


@pytest.fixture(autouse=True)
def closed_stores() -> Iterator[None]:
    yield
    stores.close_all()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    place = new_place(tmp_path / "place")
    (place.folder / "book").mkdir()
    new_secret(place.folder / "noise.secret")
    return place


def account(place: Place, epsilon: float = 30.0) -> DataSetAccount:
    path = place.folder / "book" / "ledger.db"
    made = accounts.create(path, "visits", (epsilon, 0.01), type_="int")
    return dpstream.account(path, "visits", id=made.id)


def stream(
    place: Place, store: str = "own.db", epsilon: float = 30.0, **options: Any
) -> dpstream.DPStream:
    """As a program does it, each time in a process of its own."""
    try:
        plan = place.job().plan
        accounts.set_limit(place.folder / "book" / "ledger.db", (epsilon, 0.01))
        return dpstream.DPStream(
            plan, secret=f"file:{place.folder / 'noise.secret'}", source="visits, version 1",
            store=f"sqlite:{place.folder / store}", **options,
        )  # fmt: skip
    finally:
        stores.close_all()


def test_it_is_charged_once(place: Place) -> None:
    run = stream(place, account=account(place))._run
    assert [entry.run_id for entry in place.entries()] == [run.run_id]
    assert stream(place, account=account(place))._run.run_id == run.run_id
    assert len(place.entries()) == 1


def test_it_costs_what_the_jobs_run_costs(place: Place) -> None:
    """But for run ids and the job's name the two entries are the same."""
    stream(place, account=account(place))
    (one,) = place.entries()
    shutil.rmtree(place.folder / "book")
    begin(place.job())
    (other,) = place.entries()
    assert one.run_id != other.run_id
    own = {name: getattr(other, name) for name in ("run_id", "at", "label")}
    assert msgspec.structs.replace(one, **own) == other


def test_the_secret_comes_with_the_account(place: Place) -> None:
    path = place.folder / "noise.secret"
    given = dataclasses.replace(account(place), secret=SecretSource(f"file:{path}"))
    try:
        run = dpstream.DPStream(
            place.job().plan, source="visits, version 1", account=given,
            store=f"sqlite:{place.folder / 'own.db'}",
        )._run  # fmt: skip
    finally:
        stores.close_all()
    assert stream(place, account=account(place))._run.run_id == run.run_id


def test_a_refused_charge_leaves_nothing(place: Place) -> None:
    assert (
        refusal(stream, place, epsilon=10.0, account=account(place)) == "PolicyError account.limit"
    )
    assert not (place.folder / "own.db").exists() and place.entries() == []


@pytest.mark.parametrize("after", [False, True])
def test_cut_off_at_the_charge_it_is_charged_once(place: Place, after: bool) -> None:
    with cut_off(DataSetAccount, "charge", 1, after), pytest.raises(CutOff):
        stream(place, account=account(place))
    assert len(place.entries()) == after
    run = stream(place, account=account(place))._run
    assert [entry.run_id for entry in place.entries()] == [run.run_id]


def test_a_charged_run_names_its_ledger_again(place: Place) -> None:
    stream(place, account=account(place))
    assert refusal(stream, place) == "PolicyError ledger"


def test_a_copy_of_the_store_is_refused(place: Place) -> None:
    stream(place, account=account(place))
    shutil.copy(place.folder / "own.db", place.folder / "copy.db")
    stream(place, account=account(place))
    assert refusal(stream, place, "copy.db", account=account(place)) == "PolicyError store"


def test_a_restored_store_goes_on_as_a_job(place: Place) -> None:
    run = stream(place, account=account(place))._run
    run.open().set_metadata(RESTORE, BEGIN)
    assert refusal(stream, place, account=account(place)) == "PolicyError store"


def test_a_begun_run_is_charged_by_who_began_it(place: Place) -> None:
    run, _ = dpstream.begin(place.job())
    dpstream.DPStream(run.plan, run)
    assert len(place.entries()) == 1
    assert refusal(dpstream.DPStream, run.plan, run, account=account(place)) == "UsageError account"


def named(folder: Path, secret: Any = None) -> DataSetAccount:
    return dpstream.account(folder / "ledger.db", "visits", id=accounts.ID, secret=secret)


def test_a_question_needs_the_secret_and_makes_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = checked_account(named(tmp_path, "file:noise.secret"), ONCE)
    assert given is not None and given.place.data_set == "visits"
    assert given.secret.file == str(tmp_path / "noise.secret")  # wherever the program goes then
    source = SecretSource(None, "11" * 32)
    assert named(tmp_path, source).secret is source
    assert checked_account(None, ONCE) is None
    wrong: Any = "l.db"
    calls: dict[str, Callable[[], object]] = {
        "no secret": partial(checked_account, named(tmp_path), ONCE),
        "another secret": partial(named, tmp_path, b"7"),
        "a path": partial(checked_account, wrong, ONCE),
        "fresh alone": partial(checked_account, None, Asking(fresh=True)),
        "as_of alone": partial(checked_account, None, Asking(as_of="May")),
        "no id": partial(dpstream.account, "l.db", "visits"),
        "a wrong id": partial(dpstream.account, "l.db", "visits", id="7"),
    }
    check(Path(__file__).with_name("accounts.txt"), of_refusals(calls))
    assert list(tmp_path.iterdir()) == []


def test_it_is_found_and_its_jobs_are_those_of_load_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = a_job(tmp_path)
    monkeypatch.chdir(tmp_path)
    project = dpstream.project()
    assert project.path == job.path
    assert project.job().plan.hash == dpstream.project(tmp_path).job(job.name).plan.hash
    assert refusal(project.job, "none") == "UsageError job"
    assert refusal(dpstream.project, tmp_path / "none.toml") == "UsageError none.toml"


def test_a_statement_is_charged_once_whoever_asks_it(tmp_path: Path) -> None:
    file, statement = asking.data_set(tmp_path), asking.dp("page, COUNT(*) AS n")
    project = dpstream.project(file)
    first = project.sql(statement)
    assert first.charged and not project.sql(statement).charged
    outcome = call("sql", "--project", file, statement, "--json")
    assert outcome.exit_code == 0 and len(asking.charges(tmp_path)) == 1
    assert project.connect().execute(statement).fetch_arrow_table() == first.table
    assert project.sql(statement, fresh=True).charged and len(asking.charges(tmp_path)) == 2


def test_a_table_in_memory_is_charged_in_the_data_set(tmp_path: Path) -> None:
    project = dpstream.project(asking.data_set(tmp_path))
    account = project.account()
    answer = dpstream.count(
        asking.visits(), unit="uid", key="page", epsilon=1.0, max_keys=2, max_rows=2,
        account=account,
    )  # fmt: skip
    assert answer.charged and len(asking.charges(tmp_path)) == 1
    assert refusal(project.account, "none") == "UsageError data_set"


@pytest.mark.parametrize("described", [True, False])
def test_a_column_that_is_not_the_unit_is_not_charged_as_it(
    tmp_path: Path, described: bool, refused: Refused
) -> None:
    """As the unit's it would protect one row of a user, and its charge would say all of them."""
    project, path = dpstream.project(asking.data_set(tmp_path)), tmp_path / "ledger.db"
    account = project.account()
    if not described:
        account = dpstream.account(path, "shop", id=accounts.ID, secret=account.secret)
    visits = asking.visits()
    rows = visits.append_column("visit", [list(range(len(visits)))])
    given: dict[str, Any] = {"unit": "visit", "epsilon": 1.0, "account": account}
    caught = refused(dpstream.count, rows, **given)
    assert "unit_column" in caught.fix and asking.charges(tmp_path) == []
    refusal = dpstream.plan("count", rows, **given).refusal
    assert refusal is not None and str(refusal) == str(caught)
    assert dpstream.plan("count", rows, **given | {"unit": "uid"}).accepted


def test_a_column_of_another_name_holds_the_unit_if_a_table_says_so(tmp_path: Path) -> None:
    file = asking.data_set(tmp_path)
    pq.write_table(asking.visits().rename_columns({"uid": "member"}), tmp_path / "visits.parquet")
    declared = file.read_text().replace('unit_column = "uid"', 'unit_column = "member"')
    file.write_text(declared)
    answer = dpstream.count(
        pq.read_table(tmp_path / "visits.parquet"), unit="member", epsilon=1.0,
        account=dpstream.project(file).account(),
    )  # fmt: skip
    [charge] = asking.charges(tmp_path)
    assert answer.charged and UnitIdentity.read(charge.identity).name == "uid"


def test_a_stream_of_another_unit_is_not_charged_as_it(place: Place) -> None:
    plan, store = place.job().plan, f"sqlite:{place.folder / 'own.db'}"
    other = msgspec.structs.replace(plan, unit=Field("page2", plan.unit.type))
    given: dict[str, Any] = {
        "secret": f"file:{place.folder / 'noise.secret'}", "store": store,
        "source": "visits, version 1", "account": dpstream.project(place.folder).account(),
    }  # fmt: skip
    assert refusal(dpstream.DPStream, other, **given) == "PolicyError unit"
    assert place.entries() == [] and not (place.folder / "own.db").exists()
    dpstream.DPStream(plan, **given)
    assert len(place.entries()) == 1


def test_a_setting_moves_a_place(tmp_path: Path) -> None:
    job = a_job(tmp_path)
    moved = dpstream.project(
        tmp_path, settings=[f"job.{job.name}.store=sqlite:{tmp_path / 'moved.db'}"]
    )
    assert moved.job().state.path == tmp_path / "moved.db"
    assert moved.job().plan.hash == job.plan.hash
