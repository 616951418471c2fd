"""``run --fresh`` typed again: a run that failed goes on, uncharged; behind its end a new one
begins."""

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.parquet as pq
import pytest

from dpstream.accounting.errors import RunError
from dpstream.pipelines.connectors.sink import Sink
from dpstream.pipelines.jobs.job import TEST_RUN_IDS, load_job
from dpstream.pipelines.stream.run import run_job
from dpstream.state import open as stores
from dpstream.state.sqlite.file import connect
from tests import accounts, growing
from tests.golden.refusals import Refused
from tests.pipelines.cli.called import call
from tests.pipelines.cli.mistakes import PROJECT, visits, with_account
from tests.pipelines.jobs.test_charging import job as limited_job
from tests.pipelines.jobs.test_charging import ran


@pytest.fixture(autouse=True)
def closed_stores() -> Iterator[None]:
    yield
    stores.close_all()


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """The sink cannot be written; all before it can."""
    error = RunError("sink.path", "cannot be written: the disk is full", "run it again")
    with mock.patch.object(Sink, "write", side_effect=error):
        yield


def charged(folder: Path) -> list[str]:
    """Run ids of the account's charges."""
    return [charge.run_id for charge in accounts.charges(folder / "ledger.db")]


def typed(folder: Path, *words: str, code: int = 0) -> str:
    """The run id that ``run --fresh`` prints; empty if it fails."""
    done = call("run", "--project", folder, "--fresh", "--quiet", "--json", *words)
    stores.close_all()
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)["run_id"] if code == 0 else ""


def set_aside(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("daily.store-*.db"))


def released(folder: Path) -> dict[str, bytes]:
    out = folder / "releases"
    return {p.relative_to(out).as_posix(): p.read_bytes() for p in out.rglob("window-*/*")}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a run that has ended."""
    ran(limited_job(tmp_path, 60.0))
    return tmp_path


def test_a_full_disk_is_charged_once(place: Path) -> None:
    """Typed three times on the full disk, and once more; then it is a run that has ended."""
    [first] = charged(place)
    old = released(place)
    for _ in range(3):
        with full_disk():
            typed(place, code=4)
        assert len(charged(place)) == 2 and released(place) == {}
    second = typed(place)
    assert charged(place) == [first, second]
    assert set_aside(place) == [f"daily.store-{first[:12]}.db"]
    new = released(place)
    assert new.keys() == old.keys() and new != old
    typed_plainly = call("run", "--project", place, "--json")
    assert json.loads(typed_plainly.stdout)["run_id"] == second and released(place) == new
    third = typed(place)
    assert charged(place) == [first, second, third]


def test_the_plan_says_that_it_goes_on(place: Path) -> None:
    def planned() -> dict[str, Any]:
        done = call("plan", "--project", place, "--fresh", "--json")
        accepted: dict[str, Any] = json.loads(done.stdout)["acceptance"]
        return accepted

    assert planned()["charged"] and planned()["run_id"] is None
    with full_disk():
        typed(place, code=4)
    second = charged(place)[-1]
    assert planned()["charged"] is None and planned()["run_id"] == second
    assert typed(place) == second
    assert planned()["charged"]


def test_it_goes_on_beyond_a_limit_that_allows_no_other(place: Path) -> None:
    """What is charged is never refused by what it has spent."""
    with full_disk():
        typed(place, code=4)
    limit = ("--epsilon", "7", "--delta", "1e-5")
    assert call("account", "limit", place / "ledger.db", *limit).exit_code == 0
    assert typed(place) == charged(place)[-1]
    typed(place, code=3)


def another_plan(folder: Path) -> None:
    limited_job(folder, 60.0, contributions=3)


def another_secret(folder: Path) -> None:
    (folder / "noise.secret").unlink()
    assert call("secret", "new", folder / "noise.secret").exit_code == 0


def other_shards(folder: Path) -> None:
    with open(folder / "dpstream.toml", "a") as file:
        file.write("shards = 3\n")


def damage(folder: Path) -> None:
    """A table of the store is lost."""
    with contextlib.closing(connect(folder / "daily.store.db")) as db, db:
        db.execute("DROP TABLE selections")


def another_input(folder: Path) -> None:
    table = pq.read_table(folder / "visits.parquet")
    pq.write_table(table.slice(1), folder / "visits.parquet")


@pytest.mark.parametrize(
    "change", [another_plan, another_secret, other_shards, another_input, damage]
)
def test_what_is_another_run_begins_one(place: Path, change: Callable[[Path], None]) -> None:
    """One noise, one input, one charge: the run that failed is kept, and the new one is charged."""
    with full_disk():
        typed(place, code=4)
    first, second = charged(place)
    change(place)
    third = typed(place)
    assert charged(place) == [first, second, third] and len(set(charged(place))) == 3
    assert f"daily.store-{second[:12]}.db" in set_aside(place)


def test_the_fix_of_a_refusal_works_for_a_run_that_fresh_began(place: Path) -> None:
    """The input of the unfinished run is another one: plain `run` says --fresh, which begins."""
    with full_disk():
        typed(place, code=4)
    another_input(place)
    refused = call("run", "--project", place, "--quiet")
    assert refused.exit_code == 3 and "--fresh" in refused.output
    stores.close_all()
    typed(place)
    assert len(charged(place)) == 3


def test_a_plain_run_goes_on_and_ends_it(place: Path) -> None:
    with full_disk():
        typed(place, code=4)
    second = charged(place)[-1]
    assert ran(load_job(place)) == second
    assert typed(place) not in charged(place)[:2]


def test_one_that_was_stopped_goes_on(place: Path) -> None:
    """As it says: run it again to go on.  Stopped without the flag it is a run like any other."""
    stop = threading.Event()
    stop.set()
    result = run_job(load_job(place), fresh=True, stop=stop)
    stores.close_all()
    assert result.stopped
    assert typed(place) == result.run_id and len(charged(place)) == 2
    run_job(load_job(place), fresh=True, stop=stop)
    run_job(load_job(place), stop=stop)
    stores.close_all()
    assert len(charged(place)) == 3 and typed(place) not in charged(place)[:3]


def test_it_goes_on_in_a_copy_of_its_store(place: Path) -> None:
    with full_disk():
        typed(place, code=4)
    assert call("state", "reshard", "--project", place, "--shards", "3").exit_code == 0
    other_shards(place)
    assert typed(place) == charged(place)[-1] and len(charged(place)) == 2


def test_what_cannot_be_delivered_goes_on(place: Path, refused: Refused) -> None:
    """A workload's answers are written when the run has ended."""

    def fail(_: object) -> None:
        raise RunError("--out", "cannot be written: the disk is full", "run it again")

    job = load_job(place)
    for _ in range(2):
        refused(run_job, job, fresh=True, deliver=fail)
        stores.close_all()
    os.rename(place / "visits.parquet", place / "gone")  # the run has ended
    assert typed(place) == charged(place)[-1] and len(charged(place)) == 2


def test_with_another_secret_what_was_not_delivered_is_another_run(
    place: Path, refused: Refused
) -> None:
    """Although nothing is read any more."""
    refused(
        lambda: run_job(
            load_job(place), fresh=True, deliver=mock.Mock(side_effect=RunError("", "", ""))
        )
    )
    stores.close_all()
    another_secret(place)
    typed(place)
    assert len(charged(place)) == 3


def test_a_run_that_released_nothing_is_not_charged_by_repetition(tmp_path: Path) -> None:
    """A supervisor repeats what fails; the message says how another run begins."""
    pq.write_table(visits().slice(0, 3), tmp_path / "visits.parquet")
    assert call("secret", "new", tmp_path / "noise.secret").exit_code == 0
    accounts.write(tmp_path / "dpstream.toml", with_account(60.0, PROJECT))
    for _ in range(3):
        typed(tmp_path, "--fail-if-empty", code=4)
    assert len(charged(tmp_path)) == 1
    again = call("run", "--project", tmp_path, "--fresh", "--fail-if-empty")
    assert "`dpstream run daily` once" in again.output
    assert call("run", "--project", tmp_path).exit_code == 0
    typed(tmp_path, "--fail-if-empty", code=4)
    assert len(charged(tmp_path)) == 2


@pytest.fixture
def grows(tmp_path: Path) -> Path:
    """A folder with a job whose files grow, and its account."""
    folder = growing.place(tmp_path)
    text = (folder / "dpstream.toml").read_text()
    limit = 'account = { path = "ledger.db", limit = { epsilon = 200.0, delta = 0.5 } }\n'
    unit = 'unit = { name = "user", type = "int" }\n'
    assert unit in text
    accounts.write(folder / "dpstream.toml", text.replace(unit, unit + limit))
    TEST_RUN_IDS.clear()  # each run has an id of its own
    growing.arrive(folder, 1)
    return folder


def test_passes_are_charged_once(grows: Path) -> None:
    day_1, day_2 = ("--through", "2024-01-02"), ("--through", "2024-01-03")
    for _ in range(3):
        with full_disk():
            typed(grows, *day_1, code=4)
    first = typed(grows, *day_1)
    assert charged(grows) == [first]
    growing.arrive(grows, 2)
    # The next night without the flag continues the run; with it, that is a new run.
    assert call("run", "--project", grows, "--quiet", *day_2).exit_code == 0
    stores.close_all()
    for _ in range(2):
        with full_disk():
            typed(grows, *day_2, code=4)
    assert typed(grows, *day_2) == charged(grows)[-1] and len(charged(grows)) == 2


def test_a_run_that_reads_its_input_otherwise_is_another(grows: Path) -> None:
    """As a whole, or in passes: a run that was begun in the one way cannot go on in the other."""
    with full_disk():
        typed(grows, code=4)
    second = typed(grows, "--through", "2024-01-02")
    assert len(set(charged(grows))) == 2 and second == charged(grows)[-1]
