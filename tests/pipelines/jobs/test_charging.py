"""What a run costs, and whether it would be accepted: asked by plans, before a run, of files."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.pipelines.connectors.files.sink import FileSink
from dpstream.pipelines.jobs import charging
from dpstream.pipelines.jobs.charging import Expected, check_begin, check_charge, folder_used
from dpstream.pipelines.jobs.committed import store_identity
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.jobs.secret import new_secret
from dpstream.pipelines.stream.run import run_job
from dpstream.state import open as stores
from tests import accounts
from tests.golden.refusals import Refused
from tests.pipelines.cli.mistakes import PROJECT, visits, with_account


def job(folder: Path, limit: float | None = 8.0, contributions: int = 4) -> Job:
    """A job on real visits; without a limit, it has no account."""
    if not (folder / "noise.secret").exists():
        pq.write_table(visits(), folder / "visits.parquet")
        new_secret(folder / "noise.secret")
    text = PROJECT if limit is None else with_account(limit)
    text = text.replace("contributions = 4", f"contributions = {contributions}")
    accounts.write(folder / "dpstream.toml", text)
    return load_job(folder)


def id_of(expected: Expected) -> str | None:
    """The id of the run that would go on."""
    return None if expected.identity is None else expected.identity.run_id


def ran(one: Job) -> str:
    try:
        return run_job(one).run_id
    finally:
        stores.close_all()


def test_nothing_is_written(tmp_path: Path) -> None:
    one = job(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    decision = check_begin(one)
    assert (decision.identity, decision.charged) == (None, False)
    assert (decision.charge.epsilon, decision.charge.delta) == (6.0, 1e-6)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_same_decision_as_the_run(tmp_path: Path, refused: Refused) -> None:
    """Whatever the limit, a run begins if and only if this says so."""
    decisions = list[bool]()
    for number, limit in enumerate((5.0, 5.29, 5.3, 6.0, 8.0)):
        folder = tmp_path / str(number)
        folder.mkdir()
        one = job(folder, limit)
        try:
            check_begin(one)
            accepted = True
        except PolicyError:
            accepted = False
        if accepted:
            ran(one)
        else:
            refused(ran, one)
            assert not (folder / "daily.store.db").exists()
            assert accounts.charges(folder / "ledger.db") == []
        decisions.append(accepted)
    assert True in decisions and False in decisions


def test_a_run_that_was_begun_costs_nothing_more(tmp_path: Path, refused: Refused) -> None:
    one = job(tmp_path)
    run_id = ran(one)
    decision = check_begin(one)
    assert (id_of(decision), decision.charged) == (run_id, True)
    assert store_identity(one) is not None and folder_used(tmp_path / "releases")
    # A lower limit refuses no run that was charged, but a new one.
    tight = job(tmp_path, 6.0)
    assert check_begin(tight).charged
    refused(check_begin, tight, fresh=True)
    refused(check_charge, tight)
    assert len(accounts.charges(tmp_path / "ledger.db")) == 1


@pytest.mark.parametrize("limit", [6.1, None])
@pytest.mark.parametrize("place", [(charging, "store_identity"), (FileSink, "used")])
def test_another_process_begins_the_run_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: tuple[object, str], limit: float | None
) -> None:
    """Its charge, and its releases, are this run's own and refuse nothing."""
    one, begun = job(tmp_path, limit), list[str]()
    look = getattr(*place)

    def look_while_another_begins(*arguments: object) -> object:
        before = look(*arguments)
        monkeypatch.undo()
        begun.append(ran(one))
        return before if place[1] == "store_identity" else look(*arguments)

    monkeypatch.setattr(*place, look_while_another_begins)
    assert id_of(check_begin(one)) in (None, *begun)
    assert ran(one) == begun[0]


def test_a_changed_job_and_a_lost_store(tmp_path: Path, refused: Refused) -> None:
    ran(job(tmp_path, 30.0))
    changed = job(tmp_path, 30.0, contributions=5)
    for act in (check_begin, ran):
        refused(act, changed)
    assert check_begin(changed, fresh=True).identity is None
    (tmp_path / "daily.store.db").unlink()
    for act in (check_begin, ran):
        refused(act, changed)


@pytest.mark.parametrize("dangling", [False, True])
def test_a_folder_that_cannot_be_made_is_refused_before_the_charge(
    tmp_path: Path, dangling: bool, refused: Refused
) -> None:
    """A file, or a link to nothing, is where the files would be written, or above."""
    one = job(tmp_path)
    at = tmp_path / "releases"
    at.symlink_to(tmp_path / "nowhere") if dangling else at.write_text("")
    for act in (check_begin, ran):
        refused(act, one)
    assert one.ledger is not None and accounts.charges(one.ledger.path) == []
    at.unlink()
    assert check_begin(one).identity is None


def test_a_ledger_that_cannot_be_read(tmp_path: Path, refused: Refused) -> None:
    one = job(tmp_path)
    (tmp_path / "ledger.db").write_bytes(b"no ledger" * 100)
    refused(check_begin, one)


@pytest.mark.parametrize("damage", ["lost", "older"])
def test_a_ledger_without_what_the_store_has_seen_is_refused(tmp_path: Path, damage: str) -> None:
    """Also for a new run in the place of the old one: it would be charged to an empty account."""
    file, older = tmp_path / "ledger.db", b""
    if damage == "older":
        ran(job(tmp_path, 60.0))
        older = file.read_bytes()
        (tmp_path / "daily.store.db").unlink()
        (tmp_path / "releases").rename(tmp_path / "first")
    one = job(tmp_path, 60.0)
    ran(one)
    file.unlink()
    if older:
        file.write_bytes(older)
    before = sorted(tmp_path.rglob("*"))
    for fresh in (False, True):
        with pytest.raises((PolicyError, UsageError)) as refused:
            check_begin(one, fresh)
        assert refused.value.field == "account.path"
        with pytest.raises((PolicyError, UsageError)) as refused:
            run_job(one, fresh=fresh)
        stores.close_all()
        assert refused.value.field == "account.path"
    assert sorted(tmp_path.rglob("*")) == before


def test_a_charged_run_needs_its_ledger(tmp_path: Path) -> None:
    ran(job(tmp_path, 60.0))
    named = (tmp_path / "dpstream.toml").read_text()
    for text, field in (
        (PROJECT, "account"),
        (named.replace("[data_set.v]", "[data_set.w]"), "data_set"),
    ):
        (tmp_path / "dpstream.toml").write_text(text)
        one = load_job(tmp_path)
        with pytest.raises(PolicyError) as refused:
            check_begin(one)
        assert refused.value.field == field
        with pytest.raises(PolicyError) as refused:
            ran(one)
        assert refused.value.field == field
    (tmp_path / "dpstream.toml").write_text(PROJECT)
    check_begin(load_job(tmp_path), fresh=True)


def test_geometric_noise_is_charged_plain(tmp_path: Path) -> None:
    """(epsilon, 0): nothing of it composes, and nothing of delta is spent."""
    (tmp_path / "keys.csv").write_text("page\na\n")
    path = tmp_path / "dpstream.toml"
    path.write_text(PROJECT + 'public_keys = "keys.csv"\nmechanism.strategy = "geometric"\n')
    charge = check_charge(load_job(path)).charge
    assert charge.mu is None and charge.delta == charge.threshold_delta == 0
    assert charge.epsilon == load_job(path).plan.privacy.epsilon
