"""What a run says of itself: figures of what is published, and causes for the operator alone."""

from collections.abc import Callable, Iterator
from pathlib import Path

import duckdb
import msgspec
import pyarrow as pa
import pytest

from dpstream.pipelines.connectors.registry import sink_of
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.stream import summary
from dpstream.pipelines.stream.begin import begin
from dpstream.pipelines.stream.run import run_job
from dpstream.pipelines.stream.summary import Part, Released, causes_of, records_of, tally
from dpstream.state import open as stores
from tests.growing import arrive, place

REASONS = ("unit", "key", "time", "late", "value", "not_public", "record_id", "source")
MakeJob = Callable[..., Job]


@pytest.fixture(autouse=True)
def closed_stores() -> Iterator[None]:
    yield
    stores.close_all()


def rows(keys: list[str], values: list[float | None], sd: float) -> pa.Table:
    """Rows of a release of the count and the sum of `make_job`."""
    sds = pa.array([sd] * len(keys))
    return pa.table(
        {
            "key": pa.array(keys, pa.string()),
            "records": pa.array(values, pa.float64()), "records_sd": sds,
            "total": pa.array([1000.0] * len(keys)), "total_sd": sds,
        }
    )  # fmt: skip


def test_figures_of_releases(make_job: MakeJob) -> None:
    plan = make_job().plan
    none = rows([], [], 1.0)
    parts = [
        Part(0, 1, rows(["a"], [1.0], 50.0)),  # not the last of its window: its sd is not counted
        Part(0, 2, rows(["a", "b"], [10.0, -40.0], 5.0)),
        Part(0, 2, rows(["c"], [0.0], 5.0)),  # a further part of the release
        Part(0, 3, none),
        Part(1, 1, none),
        Part(2, 1, rows(["a"], [None], 3.0)),
    ]
    assert tally(plan, parts) == Released(3, 1, 5, 5, 3, 0.5, 0.005)
    assert tally(plan, []) == Released(0, 0, 0, 0, 0, None)


def test_keys_are_counted_once_in_bounded_memory(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summary, "_HELD_KEYS", 100)
    names = [f"k{n}" for n in range(70)]
    parts = [Part(0, n, rows(names, [1.0] * 70, 1.0)) for n in range(1, 30)]
    assert tally(make_job().plan, parts).keys == 70


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_a_runs_own_summary(tmp_path: Path, kind: str) -> None:
    """Against a question to the files; the same from the store, and when nothing is read again."""
    folder = place(tmp_path)
    arrive(folder, 2)
    text = (folder / "dpstream.toml").read_text()
    sink = 'sink = { kind = "parquet"'
    assert sink in text
    text = text.replace(sink, sink.replace("parquet", kind))
    # With known keys no window would be empty.
    (folder / "dpstream.toml").write_text(text + 'remember_keys = "never"\n')
    job = load_job(folder / "dpstream.toml")
    first, again = run_job(job).summary, run_job(job).summary
    assert first is not None and again is not None and first.released == again.released
    files = f"'{folder}/out/*/*.{kind}'"
    count, keys, largest, middle = duckdb.execute(
        f"""WITH all_rows AS (FROM read_{kind}({files})), last AS (FROM all_rows QUALIFY trigger =
        max(trigger) OVER (PARTITION BY window_start))
        SELECT count(*), count(DISTINCT page), (SELECT max(greatest(abs(visits_sd / visits),
        abs(spent_sd / spent))) FROM last),
        (SELECT median(abs(sd)) FROM (SELECT visits_sd / visits AS sd FROM last UNION ALL
        SELECT spent_sd / spent FROM last)) FROM all_rows"""
    ).fetchall()[0]
    released = first.released
    assert (released.rows, released.keys) == (count, keys) and released.rows > 20
    assert released.relative_sd == pytest.approx(largest)
    assert released.median_relative_sd == pytest.approx(middle)
    assert (released.windows, released.releases, released.empty_windows) == (4, 16, 2)
    records = first.operator_only
    assert (records.read, records.dead, records.dead_share, records.cause) == (3_000, 0, 0.0, None)
    assert again.operator_only.read == 0 and again.operator_only.dead_share is None
    run, _ = begin(job)
    assert tally(job.plan, summary._published(job.plan, sink_of(job))) == released
    assert tally(job.plan, summary._committed(run)) == released


def test_nothing_private_is_written(tmp_path: Path) -> None:
    """The share of dead letters is said, and stands in no file of the releases."""
    folder = place(tmp_path)
    arrive(folder, 1)
    job = load_job(folder / "dpstream.toml")
    run_job(job)
    texts = b"".join(p.read_bytes() for p in (folder / "out").rglob("*") if p.is_file())
    assert b"dead" not in texts and b"operator" not in texts
    assert sink_of(job).place == str(folder / "out")


@pytest.mark.parametrize("reason", REASONS)
def test_each_reason_has_a_cause(make_job: MakeJob, reason: str) -> None:
    released = Released(1, 1, 4, 0, 0, None)
    dead = {"operator_dead_record_id": 1, f"operator_dead_{reason}": 7, "operator_dead_letters": 9}
    dead["operator_records_in"] = 9 - dead.get("operator_dead_source", 0)
    records = records_of(make_job(), released, dead)
    of_reason = causes_of(make_job())[reason]
    assert records.cause is not None and records.cause.fix == of_reason.fix
    assert of_reason.problem in records.cause.problem and "7 of them" in records.cause.problem
    assert records.dead_share == 1.0 and records.read == 9


def test_why_nothing_is_there(make_job: MakeJob) -> None:
    job, empty, released = make_job(), Released(1, 1, 4, 0, 0, None), Released(1, 0, 4, 9, 3, 0.1)
    read = {"operator_records_in": 10, "operator_dead_letters": 3}
    cause = records_of(job, empty, read).cause
    assert cause is not None and "enough units" in cause.problem and "dpstream" in cause.fix
    assert records_of(job, released, read).cause is None
    nothing = records_of(job, empty, {"steps_committed": 4}).cause
    assert nothing is not None and "no record" in nothing.problem
    ended = records_of(job, empty, {}).cause
    assert ended is not None and "the reason is not known" in ended.problem
    assert records_of(job, Released(0, 0, 0, 0, 0, None), read).cause is None  # let go of
    assert msgspec.json.encode(records_of(job, released, read))
