"""Streams, questions and tables on a ledger in Spanner: by its URL alone, the same answers."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.pipelines.account import LedgerAccount
from dpstream.pipelines.cli.main import cli
from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.jobs.tables import LedgerConfig, Limit
from dpstream.pipelines.runners.bounded import Runner
from dpstream.pipelines.session.session import Session
from dpstream.pipelines.session.standing import close_before
from dpstream.pipelines.sql.ask import ask
from dpstream.pipelines.sql.catalog_file import load_catalog
from dpstream.pipelines.sql.explain import budget
from dpstream.pipelines.sql.registration import register
from dpstream.state import open as stores
from dpstream.state.ledger.charges import Charge
from dpstream.state.ledger.open import create_ledger, read_ledger
from tests import emulator
from tests.faults.processes import files
from tests.pipelines.session import small
from tests.pipelines.sql import test_registration
from tests.pipelines.sql.asking import COUNTED, FRESH, data_set, dp
from tests.pipelines.tabulation.executing import content, executed
from tests.pipelines.tabulation.office import office
from tests.pipelines.test_spanner_job import call, write_job
from tests.pipelines.tuning import asking as tuning

LIMIT = "limit = { epsilon = 21.0, delta = 0.011, allow_large_delta = true }\n"


@pytest.fixture(scope="module", autouse=True)
def running() -> Iterator[None]:
    with emulator.running():
        yield


@pytest.fixture
def url() -> Iterator[str]:
    made = emulator.fresh_url()
    create_ledger(made)
    yield made
    stores.close_all()
    emulator.drop(made)


def charges(url: str) -> list[Charge]:
    return [entry.charge for entry in read_ledger(url)]


def charged_job(folder: Path, ledger: str) -> Path:
    job = write_job(folder, "sqlite:state/s.db")
    book = f'[ledger]\npath = "{ledger}"\ndata_set = "visits"\n{LIMIT}'
    job.write_text(job.read_text() + book)
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
    assert "older or forked" in str(call("run", tmp_path / "copy" / "job.toml", code=3)["rule"])
    for shown in (call("ledger", "show", there), call("ledger", "show", url)):
        [found] = shown["data_sets"]  # type: ignore[misc]
        assert found["data_set"] == "visits" and len(found["entries"]) == 1
    text = (tmp_path / "b" / "job.toml").read_text()
    (tmp_path / "copy" / "job.toml").write_text(
        text.replace("s.db", "new.db").replace("2222222222", "3333333333")
    )
    shutil.rmtree(tmp_path / "copy" / "out", ignore_errors=True)
    error = call("run", tmp_path / "copy" / "job.toml", code=3)
    assert error["field"] == "ledger.limit" and len(charges(url)) == 1


def test_a_ledger_that_is_not_made(tmp_path: Path) -> None:
    """Nothing begins, and the error says what makes it: by a job, a catalog or its URL."""
    made = emulator.fresh_url()
    job = charged_job(tmp_path / "job", made)
    error = call("run", job, code=2)
    assert error["field"] == "ledger.path" and "dpstream ledger init" in str(error["fix"])
    assert not (tmp_path / "job" / "out").exists()
    catalog = data_set(tmp_path)
    catalog.write_text(catalog.read_text().replace("ledger.db", made))
    assert budget(load_catalog(catalog))["charges"] == 0
    assert call("ledger", "init", catalog) == {"new": True}
    for named in (job, made):
        assert call("ledger", "init", named) == {"new": False}
    call("run", job)
    assert len(charges(made)) == 1
    emulator.drop(made)
    assert call("ledger", "init", charged_job(tmp_path / "file", "ledger.db")) == {"new": True}
    assert (tmp_path / "file" / "ledger.db").exists()
    (tmp_path / "none.toml").write_text("[ledger]\n")
    assert call("ledger", "init", tmp_path / "none.toml", code=2)["field"] == "ledger"


@pytest.mark.parametrize("path", ["spanner:p/i/d", "spanner://p/i", "postgres://p/i/d"])
def test_urls_that_name_no_ledger(tmp_path: Path, path: str) -> None:
    for attempt in (
        lambda: load_job(charged_job(tmp_path / "job", path)),
        lambda: LedgerAccount(path, "visits", epsilon=1.0, delta=1e-9),
    ):
        with pytest.raises(UsageError, match=r"ledger\.path") as caught:
            attempt()
        assert path not in str(caught.value)
    assert call("ledger", "show", path, code=2)["field"] == "ledger.path"


def test_a_store_and_its_ledger_are_two_databases(tmp_path: Path) -> None:
    job = charged_job(tmp_path / "job", "spanner://p/i/d")
    job.write_text(job.read_text().replace("sqlite:state/s.db", "spanner://p/i/d"))
    error = call("run", job, code=2)
    assert error["field"] == "ledger.path" and "of its own" in str(error["fix"])


def test_a_question(tmp_path: Path, url: str) -> None:
    """Paid once; sums of workers are handed over beside the catalog, and notes lie there."""
    path = test_registration.shop(tmp_path)
    path.write_text(path.read_text().replace("ledger.db", url))
    catalog = load_catalog(path)
    text = dp(f"page, {COUNTED} AS n")
    first = ask(catalog, text)
    assert first.charged and [c.kind for c in charges(url)] == ["sql"]
    again = ask(catalog, text)
    assert not again.charged and again.receipt == first.receipt
    found = budget(catalog)
    assert found["charges"] == 1 and found["spent"]["epsilon"] > 0
    with pytest.raises(PolicyError, match="dpstream sql check CATALOG"):
        ask(catalog, test_registration._TEXT)
    register(catalog)
    assert catalog.notebook.parent == tmp_path and catalog.notebook.stat().st_mode & 0o077 == 0
    assert ask(catalog, test_registration._TEXT, FRESH).charged and len(charges(url)) == 2
    spread = ask(catalog, dp("COUNT(*) AS n", "FROM visits"), runner=Runner("DirectRunner"))
    assert spread.charged and len(charges(url)) == 3
    assert not list(tmp_path.glob(".dpstream-work-*"))


def test_a_table(tmp_path: Path, url: str) -> None:
    made = office(tmp_path / "office")
    place = LedgerConfig(url, "people", Limit(1e3, 1e-9))
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
    job = tmp_path / "job.toml"
    job.write_text(tuning.JOB.replace("ledger.db", url))
    tuning.done(tuning.choose(job))
    assert [c.kind for c in charges(url)] == ["choice"]
    assert tuning.load(tmp_path / "new.toml") == ""
    edited = (tmp_path / "new.toml").read_text().replace(url, emulator.url("none-there"))
    (tmp_path / "other.toml").write_text(edited)
    assert tuning.load(tmp_path / "other.toml") == "choice.run_id"


def tuning_key(folder: Path) -> None:
    (folder / "keys").mkdir()
    made = CliRunner().invoke(cli, ["key", "new", str(folder / "keys" / "noise.key")])
    assert made.exit_code == 0, made.output


def test_a_session(tmp_path: Path, url: str) -> None:
    """Questions, allotments, re-asks and closed ranges, from two places at once."""
    config = small.config_at(tmp_path)
    text = (tmp_path / "TABLE.toml").read_text()
    (tmp_path / "TABLE.toml").write_text(text.replace("ledger.db", url))
    with Session(tmp_path / "TABLE.toml", "alice") as mine, \
            Session(tmp_path / "TABLE.toml", "bob") as other:  # fmt: skip
        first = mine.where("epsilon >= 1").count(0.5)
        assert other.where("epsilon >= 1").count(0.5).receipt == first.receipt
        allotment = other.where("epsilon >= 1").as_pinq(0.5)
        assert allotment.count(0.5).charged and allotment.left == 0
        with pytest.raises(PolicyError, match="too little left"):
            mine.where("epsilon >= 1").count(0.25)
        assert close_before(mine.desk, "b", 5)
        with pytest.raises(PolicyError, match="too little left"):
            other.where("b < 5 AND epsilon = 2").count(0.1)
    assert [charge.kind for charge in charges(url)] == ["session"] * 4
    assert not (config.base / "ledger.db").exists()
