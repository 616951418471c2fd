"""What a run costs, and whether it would be accepted: asked by plans, before a run, of files."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.fields import Field
from dpstream.accounting.limits import COMMIT_MUTATIONS, MAX_SHARDS
from dpstream.accounting.workloads.attributes import of_edges, of_values
from dpstream.pipelines.connectors.files.sink import FileSink
from dpstream.pipelines.jobs import charging
from dpstream.pipelines.jobs.charging import Expected, check_begin, check_charge, folder_used
from dpstream.pipelines.jobs.committed import (
    check_tuning,
    committed,
    store_identity,
    tuned_of,
    unit_of,
)
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.jobs.keys import (
    CellDomain,
    cell_key,
    domain_digest,
    public_key_digest,
    read_public_keys,
)
from dpstream.pipelines.jobs.secret import new_secret
from dpstream.pipelines.jobs.shards import keys_of_a_commit, shard_figures, shards_for
from dpstream.pipelines.project.job_section import ChoiceSection
from dpstream.pipelines.render.job_plan import shards_lines
from dpstream.pipelines.stream.run import run_job
from dpstream.state import open as stores
from dpstream.state.ledger.open import AccountPlace
from tests import accounts
from tests.golden.refusals import Refused
from tests.pipelines.cli.mistakes import PROJECT, visits, with_account
from tests.projects import write_project


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


# A job's figures against those that were committed; the life of tunings is in tuning/.


@pytest.fixture
def tuned_job(make_job: Callable[..., Job]) -> Job:
    return make_job()


def tuned(tuned_job: Job, **fields: Any) -> Job:
    section = msgspec.structs.replace(tuned_job.section, choice=ChoiceSection(**fields))
    return msgspec.structs.replace(tuned_job, section=section)


def test_the_unit_by_name(tuned_job: Job, refused: Refused) -> None:
    ledger = AccountPlace("book.db", "data", accounts.ID, unit="person", unit_columns=("user",))
    assert unit_of(tuned_job).name == "user"
    assert unit_of(msgspec.structs.replace(tuned_job, ledger=ledger)).name == "person"
    other = AccountPlace("book.db", "data", accounts.ID, unit="person", unit_columns=("visitor",))
    refused(lambda: unit_of(msgspec.structs.replace(tuned_job, ledger=other)))


@pytest.mark.parametrize(
    "fields",
    [
        {"how": "data"},
        {"how": "public", "run_id": "0" * 32},
        {"how": "proxy", "mu": 1.0},
        {"how": "private"},
    ],
)
def test_figures_that_nobody_paid_for(
    fields: dict[str, Any], tuned_job: Job, refused: Refused
) -> None:
    refused(lambda: check_tuning(tuned(tuned_job, **fields)))


def test_public_figures_need_no_charge(tuned_job: Job) -> None:
    for free in (
        tuned_job,
        tuned(tuned_job),
        tuned(tuned_job, how="proxy", first="1d"),
    ):
        check_tuning(free)
    assert tuned_of(tuned_job) is None
    tuning = tuned_of(tuned(tuned_job, how="proxy", bounds=("total",)))
    assert tuning is not None and (tuning.how, tuning.bounds, tuning.run_id) == (
        "proxy", ("total",), "",
    )  # fmt: skip


def test_a_ledger_that_is_not_there_is_not_made(
    tuned_job: Job, tmp_path: Path, refused: Refused
) -> None:
    path = tmp_path / "book.db"
    ledger = AccountPlace(str(path), "data", accounts.ID)
    private = msgspec.structs.replace(
        tuned(tuned_job, how="private", run_id="0" * 32), ledger=ledger
    )
    error = refused(check_tuning, private)
    assert error.field == "account.path" and not path.exists()


def test_without_a_store_nothing_is_committed(tuned_job: Job, tmp_path: Path) -> None:
    assert committed(tuned_job) is None
    path = tmp_path / "state.db"
    path.write_bytes(b"no store")
    state = msgspec.structs.replace(tuned_job.state, store=f"sqlite:{path}")
    assert committed(msgspec.structs.replace(tuned_job, state=state)) is None


# The public key list: a set of typed rows, told by its digest; errors show a line's number.


FIELDS = (Field("city"), Field("zone", "int"))


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_the_digest_is_of_the_set_of_keys(tmp_path: Path) -> None:
    one = public_key_digest(written(tmp_path / "a.csv", "city,zone\nx,1\ny,2\n"), FIELDS)
    same = written(tmp_path / "b.csv", "\ufeffzone,more,city\n2,?,y\n1,?,x\n1,!,x\n")
    assert public_key_digest(same, FIELDS) == one
    other = public_key_digest(written(tmp_path / "c.csv", "city,zone\nx,1\ny,3\n"), FIELDS)
    text = public_key_digest(tmp_path / "a.csv", (Field("city"), Field("zone", "string")))
    assert len({one, other, text}) == 3


@pytest.mark.parametrize(
    "text",
    ["", "city\nx\n", "city,zone,city\nx,1,x\n", "city,zone\n", "city,zone\nx,01\n",
     "city,zone\nx,SECRET\n", "city,zone\nx,9223372036854775808\n", 'city,zone\n"x,1\n'],
)  # fmt: skip
def test_what_is_no_list(text: str, tmp_path: Path, refused: Refused) -> None:
    error = refused(lambda: public_key_digest(written(tmp_path / "keys.csv", text), FIELDS))
    assert error.field == "public_keys" and "SECRET" not in str(error)


def test_a_line_that_does_not_end_is_no_key(tmp_path: Path, refused: Refused) -> None:
    path = written(tmp_path / "keys.csv", "city,zone\nx,1\n")
    with open(path, "ab") as file:
        file.truncate(1 << 36)  # more than there is memory
    refused(public_key_digest, path, FIELDS)


def test_a_job_reads_the_list_that_it_was_planned_with(
    tmp_path: Path, make_job: Callable[..., Job], refused: Refused
) -> None:
    job, path = make_job(), written(tmp_path / "keys.csv", "key\nb\na\nb\n")
    refused(read_public_keys, job)
    plan = msgspec.structs.replace(job.plan, public_keys=public_key_digest(path, job.plan.key))
    job = msgspec.structs.replace(job, public_keys=str(path), plan=plan)
    assert read_public_keys(job).to_pydict() == {"key": ["a", "b"]}
    written(path, "key\na\n")
    refused(read_public_keys, job)


AGE, SEX = of_edges("age", [0, 10, 20.5]), of_values("sex", ["f", "m", "é"])
LEVEL = of_values("cell", [7, -1, 3])


def domain(*attributes: object) -> CellDomain:
    types = {"age": "int", "sex": "string", "cell": "int"}
    key = tuple(Field(a.name, types[a.name]) for a in attributes)  # type: ignore
    return CellDomain(attributes, key)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "ages",
    [pa.array([0, 9.99, 10, 20.5, -0.1, None, float("nan"), 20.4, 5]),
     pa.array(["0", "9.99", "10", "20.5", "-0.1", None, "x", "20.4", "5"])],
    ids=["numbers", "text"],
)  # fmt: skip
def test_bins_and_values(ages: pa.Array) -> None:
    sex = pa.array(["f", "m", "e\u0301", "f", "f", "f", "f", "x", None])
    batch = pa.record_batch({"age": ages, "sex": sex}).replace_schema_metadata({b"k": b"v"})
    cells = domain(AGE, SEX).of(batch)
    assert cells.column("cell").to_pylist() == [0, 1, 5] + [None] * 6
    assert cells.schema.metadata == {b"k": b"v"} and cells.num_columns == 3


def test_a_column_that_is_called_so(tmp_path: object) -> None:
    batch = pa.record_batch({"cell": pa.array([3, 7, 8, None], pa.int32())})
    assert domain(LEVEL).of(batch).column("cell").to_pylist() == [2, 0, None, None]
    assert domain(LEVEL).of(batch.slice(4)).num_rows == 0


def test_a_key_of_other_columns_is_named_beside_the_attributes(refused: Refused) -> None:
    refused(lambda: cell_key((AGE, SEX), (Field("agge", "int"), Field("sex", "string"))))


def test_a_key_may_leave_out_attributes() -> None:
    """A job has few key columns, and a workload may have many attributes."""
    fields = cell_key((AGE, SEX), (Field("sex", "string"), Field("age", "int")))
    assert cell_key((AGE, SEX), (Field("sex", "string"),)) == fields


def test_every_cell_is_listed_once() -> None:
    table = domain(AGE, SEX, LEVEL).table
    assert np.array_equal(table.column("cell").to_numpy(), np.arange(18))


def test_digests_tell_domains_apart() -> None:
    others = [
        [AGE, SEX], [SEX, AGE], [AGE], [of_edges("age", [0, 10, 20])],
        [of_edges("Age", [0, 10, 20.5])], [of_values("age", [0, 10])],
        [of_values("age", ["0", "10"])], [of_values("age", ["01", "0"])],
    ]  # fmt: skip
    assert len({domain_digest(attributes) for attributes in others}) == len(others)


# A job of the project file: what its sections mean, and where an error about it stands.


DAY, HOUR = 86_400_000_000, 3_600_000_000


def test_sections_make_one_job(tmp_path: Path) -> None:
    job = load_job(write_project(tmp_path), "daily")
    plan = job.plan
    assert (job.name, job.path) == ("daily", tmp_path / "dpstream.toml")
    assert (plan.unit, plan.key, plan.event_time) == (Field("user"), (Field("page"),), "time")
    assert [aggregate.name for aggregate in plan.aggregates] == ["views", "seconds"]
    assert (plan.timeline.window, plan.timeline.trigger_every) == (DAY, 6 * HOUR)
    assert (plan.timeline.period, plan.privacy.contributions) == (DAY, 8)
    assert job.source.path == str(tmp_path / "visits/*.parquet")
    assert job.state.store == f"sqlite:{tmp_path / 'daily.store.db'}"
    assert job.ledger is None


@pytest.mark.parametrize(
    ("covers", "period"),
    [("window", DAY), ("lifetime", None), ("week", 7 * DAY), ("7 days", 7 * DAY), ("7d", 7 * DAY)],
)
def test_what_the_budget_covers(tmp_path: Path, covers: str, period: int | None) -> None:
    job = load_job(write_project(tmp_path, ('covers = "window"', f'covers = "{covers}"')))
    assert job.plan.timeline.period == period


def test_the_plan_is_the_same_wherever_the_places_are(tmp_path: Path) -> None:
    path = write_project(tmp_path, more='[env.prod]\ntable.visits.path = "/data/*.parquet"\n')
    here, there = load_job(path), load_job(path, environment="prod")
    assert here.plan == there.plan and here.plan.hash == there.plan.hash
    assert there.source.path == "/data/*.parquet"
    set_here = load_job(path, settings=["job.daily.store=spanner://pro/inst/daily"])
    assert set_here.plan == here.plan and set_here.state.path is None


def test_an_account_is_of_the_data_set_and_its_unit(tmp_path: Path) -> None:
    account = 'account = { id = "7f3a0c5d9e1b2846", path = "shop.db" }\n\n[table.visits]'
    job = load_job(write_project(tmp_path, ("\n[table.visits]", account)))
    assert job.ledger is not None
    assert (job.ledger.data_set, job.ledger.unit) == ("shop", "customer")
    assert job.ledger.path == str(tmp_path / "shop.db")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("epsilon = 4", "epsilon = -4"),
        ("delta = 1e-6", "delta = 2.0"),
        ('covers = "window"', 'covers = "windows"'),
        ("contributions = 8", "contributions = 0"),
        ("[0, 120]", "[120, 0]"),
        ('release_every = "6 hours"', 'release_every = "a while"'),
        ('end = "2024-01-08T00:00:00Z"\n', ""),
        ('table = "visits"', 'table = "visit"'),
        ('time_column = "time"\n', ""),
        ('unit_column = "user"', "public = true"),
        ('"visits/*.parquet"', '"visits/*.xlsx"'),
        ('path = "visits/*.parquet"', 'folder = "visits"'),
        ('path = "visits/*.parquet"', ""),
        ("insecure_test_secret", "secret"),
        ("contributions = 8", 'contributions = 8\npublic_keys = "no.csv"'),
        ("contributions = 8", "contributions = 8\nshards = 0"),
        ("contributions = 8", "contributions = 8\nthreads = 0"),
        ("contributions = 8", "contributions = 8\nmechanism.pre_threshold = 3.5"),
        ("contributions = 8", 'contributions = 8\nquery = "no.sql"'),
        ('path = "releases"', 'path = ""'),
    ],
)
def test_an_error_names_the_section_that_it_is_about(
    tmp_path: Path, old: str, new: str, refused: Refused
) -> None:
    refused(lambda: load_job(write_project(tmp_path, (old, new))))


# Shards of a job on Spanner: as many as keep a step to one commit.


@pytest.mark.parametrize("changed", [1, 10_000, 1_000_000])
def test_shards_have_room_for_their_keys(changed: int, spanner_job: Job) -> None:
    most, shards = keys_of_a_commit(spanner_job), shards_for(spanner_job, changed)
    assert 6 * most < COMMIT_MUTATIONS
    mean = changed / shards
    assert mean + 6 * math.sqrt(mean) <= most
    # About the least number: a tenth fewer would not do.
    fewer = changed / (0.9 * shards)
    assert shards == 1 or fewer + 6 * math.sqrt(fewer) > most


def test_there_are_never_more_than_allowed(spanner_job: Job) -> None:
    assert shards_for(spanner_job, 10**15) == MAX_SHARDS


def test_words_say_whether_there_are_enough(spanner_job: Job, make_job: Callable[..., Job]) -> None:
    assert shard_figures(make_job(), 10) == {} and shards_lines({}) == []
    assert "enough here" in "\n".join(shards_lines(shard_figures(spanner_job, 10)))
    many = shard_figures(spanner_job, 2_000_000)
    assert f"set shards = {many['shards_needed']}" in "\n".join(shards_lines(many))
    assert "--changed-keys" in "\n".join(shards_lines(shard_figures(spanner_job, None)))
