"""A job's stream over a user's own rows: begun, charged, numbered, or refused uncharged.

Rows of a table stand where they stand; others get numbers that come with them, or none.  A value
becomes what it is by itself, whatever stands beside it.
"""

import datetime
import decimal
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import apache_beam as beam
import msgspec
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from apache_beam.testing.util import assert_that
from apache_beam.utils.timestamp import Timestamp
from hypothesis import given
from hypothesis import strategies as st

import dpstream
from dpstream.dp_transforms.batches import OFFSET, PARTITION, position_runs
from dpstream.dp_transforms.flow import run_in_memory
from dpstream.dp_transforms.ingest.records import positions
from dpstream.pipelines.frames.stream import (
    INSTANT,
    Gather,
    ToBatch,
    column_of,
    instants_of,
    kinds_of,
)
from dpstream.pipelines.stream.begin import begin
from dpstream.state import open as stores
from tests import accounts
from tests.golden.pinned import check, of_refusals, refusal
from tests.pipelines.frames.visits import ACCOUNT, a_job, batches, dicts


def test_batches_are_numbered_through(tmp_path: Path) -> None:
    job, rows = msgspec.structs.replace(a_job(tmp_path), batch_rows=100), dicts(250)

    def check(batches: list[pa.RecordBatch]) -> None:
        places = dict[int, Any]()
        for batch in batches:
            partition, offset = positions(batch)
            assert not partition.any()
            places |= dict(zip(offset.tolist(), batch.column("user").to_pylist(), strict=True))
        assert places == {row["id"]: row["user"] for row in rows} and len(batches) == 3

    with beam.Pipeline(runner="FnApiRunner") as p:
        assert_that(p | dpstream.ReadTable(pd.DataFrame(rows), job), check)


def test_the_identity_is_of_the_rows_in_their_order(tmp_path: Path) -> None:
    job, rows = a_job(tmp_path), dicts(50)

    def identity(data: object) -> list[bytes]:
        return dpstream.ReadTable(data, job).identity

    first = identity(pd.DataFrame(rows))
    assert identity(pd.DataFrame(rows)) == first and len(first[1]) == 16
    changed = [dict(row) for row in rows]
    changed[7]["seconds"] += 1
    others = (rows[::-1], rows[1:], changed)
    assert first not in [identity(pd.DataFrame(other)) for other in others]
    # A column that no plan reads is no part of it.
    assert identity(pd.DataFrame(rows).assign(more=1)) == first
    assert identity(pl.DataFrame(rows)) != identity(pl.DataFrame(rows[1:]))


#: Arguments of `DPStream`, and the rows.
REFUSED: list[tuple[dict[str, Any], Any]] = [
    ({"source": "v1"}, beam.Create(dicts(5))),
    *(
        (given, beam.Create(batches([0])))
        for given in (
            {}, {"source": ""}, {"source": "v1", "store": "sqlite:x.db"},
            {"source": "v1", "secret": "env:K"}, {"source": "v1", "shards": 2},
            {"source": "v1", "public_keys": [7]}, {"source": "v1", "public_keys": []},
        )
    ),
]  # fmt: skip
NO_JOBS: list[Any] = ["dpstream.toml", None, 7]
#: Positions that are none.
PLACES = [("line", None), ("line", -1), ("line", "x"), ("part", 1 << 31), ("part", None)]


def test_what_is_refused_is_not_charged(tmp_path: Path) -> None:
    job, numbered = a_job(tmp_path, account=ACCOUNT), a_job(tmp_path / "numbered", record_id=True)
    calls: dict[str, Callable[[], object]] = {
        f"{given} of {'batches' if number else 'rows'}": partial(released, job, read, **given)
        for number, (given, read) in enumerate(REFUSED)
    }
    calls |= {f"{given}": partial(dpstream.DPStream, given) for given in NO_JOBS}
    for name, columns in (("rows", {}), ("partitions", {"partition": "part"})):
        calls[f"{name} of a job"] = partial(dpstream.Rows, job, **columns)
        calls[f"{name} of a plan"] = partial(dpstream.Rows, job.plan, **columns)
    for argument in ("offset", "partition"):
        calls[f"{argument} and a record id"] = partial(dpstream.Rows, numbered, **{argument: "x"})
    for column, value in PLACES:
        rows = dicts(5)
        rows[3][column] = value
        calls[f"{column} {value}"] = partial(ToBatch(job.plan, "part", "line"), rows)
    renamed = pd.DataFrame(dicts(5)).rename(columns={"page": "pag"})
    calls["a DataFrame of rows"] = partial(ToBatch(job.plan, None, "line"), renamed)
    calls["a table"] = partial(dpstream.ReadTable, renamed, job)
    calls["a path"] = partial(dpstream.ReadTable, "visits.csv", job)
    check(Path(__file__).with_name("streams.txt"), of_refusals(calls))
    assert accounts.charges(tmp_path / "book.db") == [] and not (tmp_path / "s.db").exists()


def test_no_rows_are_no_batches(tmp_path: Path) -> None:
    empty = pd.DataFrame(dicts(3)).iloc[:0]
    with beam.Pipeline(runner="FnApiRunner") as p:
        assert_that(
            p | dpstream.ReadTable(empty, a_job(tmp_path)), lambda batches: batches == [] or 1 / 0
        )


GOT: list[pa.RecordBatch] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    GOT.clear()
    yield
    stores.close_all()


def _same(row: Any) -> Any:
    return row


def _keep(batch: pa.RecordBatch) -> None:
    GOT.append(batch)


def released(job: dpstream.Job, read: Any, **given: Any) -> pa.Table:
    """What a pipeline releases, by what its releases are named by."""
    GOT.clear()
    try:
        with beam.Pipeline(runner="FnApiRunner") as p:
            out = p | read if isinstance(read, beam.PTransform) else read(p)
            done = out | dpstream.DPStream(job, **given)
            _ = done.releases | beam.Map(_keep)
    finally:
        stores.close_all()
    table = pa.Table.from_batches([b.replace_schema_metadata(None) for b in GOT])
    order = [("window_start", "ascending"), ("trigger", "ascending"), ("page", "ascending")]
    return table.sort_by(order).drop(["plan_hash"])


def clean(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name.startswith(("s.db", "book.db", "out")):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


KINDS: dict[str, Any] = {
    "rows": lambda p, job: p | beam.Create([beam.Row(**row) for row in dicts()]),
    "dicts": lambda p, job: p | beam.Create(dicts()),
    "pandas": lambda p, job: p | beam.Create([pd.DataFrame(d) for d in (dicts()[:9], dicts()[9:])]),
    "polars": lambda p, job: p | beam.Create([pl.DataFrame(dicts())]) | dpstream.Rows(job),
    "twice": lambda p, job: p | beam.Create(dicts() + dicts()[:50]),
    "untyped": lambda p, job: p | beam.Create(dicts()) | beam.Map(_same) | dpstream.Rows(job),
    "untyped, as they are": lambda p, job: p | beam.Create(dicts()) | beam.Map(_same),
    "untyped batches": lambda p, job: (
        p | beam.Create(pa.Table.from_pylist(dicts()).to_batches(100)) | beam.Map(_same)
    ),
}  # fmt: skip


def test_all_kinds_of_rows_are_one_stream(tmp_path: Path) -> None:
    """Byte for byte what the flow makes of the rows without Beam; a row delivered twice is one."""
    job = a_job(tmp_path / "wanted", record_id=True)
    run, _ = begin(job, [b"rows", b"v1"])
    table = pa.Table.from_pylist(dicts()).select(list(job.columns))
    [batch] = table.combine_chunks().to_batches()
    where = {"dpstream.partition": "0", "dpstream.offset": "0"}
    made, _ = run_in_memory(run, [batch.replace_schema_metadata(where)])
    stores.close_all()
    wanted = pa.Table.from_batches([b.replace_schema_metadata(None) for b in made])
    assert wanted.num_rows > 4
    for kind, read in KINDS.items():
        job = a_job(tmp_path / kind, record_id=True)
        releases = released(job, lambda p, read=read, job=job: read(p, job), source="v1")
        order = [("window_start", "ascending"), ("trigger", "ascending"), ("page", "ascending")]
        assert releases.equals(wanted.sort_by(order).drop(["plan_hash"])), kind


def test_a_table_says_what_it_is_and_positions_may_come_with_rows(tmp_path: Path) -> None:
    job = a_job(tmp_path)
    first = released(job, dpstream.ReadTable(pd.DataFrame(dicts()), job))
    assert first.num_rows > 4
    assert released(job, dpstream.ReadTable(pd.DataFrame(dicts()), job)).equals(first)  # goes on
    assert (
        refusal(released, job, dpstream.ReadTable(pd.DataFrame(dicts()[1:]), job))
        == "PolicyError source"
    )
    clean(tmp_path)
    placed = released(
        job, lambda p: p | beam.Create(dicts()) | dpstream.Rows(job, offset="id"), source="v1"
    )
    assert placed.equals(first)


def test_a_jobs_own_files_need_no_name(tmp_path: Path) -> None:
    job = a_job(tmp_path, account=ACCOUNT)
    pq.write_table(pa.Table.from_pylist(dicts()), tmp_path / "visits-1.parquet")
    releases = released(job, lambda p: (p | dpstream.ReadFiles(job)).records)
    assert releases.num_rows > 4 and len(accounts.charges(tmp_path / "book.db")) == 1
    assert released(job, lambda p: (p | dpstream.ReadFiles(job)).records).equals(releases)
    assert len(accounts.charges(tmp_path / "book.db")) == 1


def test_the_files_of_another_job_are_not_the_jobs_own(tmp_path: Path) -> None:
    """Its store would take their rows for its own files', and name the noise of both alike."""
    job, other = a_job(tmp_path / "one"), a_job(tmp_path / "two")
    for folder, rows in (("one", dicts()), ("two", dicts()[1:])):
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / folder / "visits-1.parquet")
    assert (
        refusal(released, job, lambda p: (p | dpstream.ReadFiles(other)).records)
        == "UsageError source"
    )
    assert not (tmp_path / "one" / "s.db").exists()


@pytest.mark.parametrize("offsets", [[0, 0, 400], [0, 200, 100], [200, 0, 200]])
def test_positions_that_are_there_twice_end_the_run(offsets: list[int], tmp_path: Path) -> None:
    """One batch forgot to go on where the one before ended: rows would be lost without a word."""
    job = a_job(tmp_path)
    with pytest.raises(Exception, match=r"share a position.*dpstream\.Rows"):
        released(job, beam.Create(batches(list(offsets))), source="v1")
    assert released(job, beam.Create(batches([0, 200, 400])), source="v1").num_rows > 4


def test_batches_without_positions_and_what_is_no_batch_name_the_adapter(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"where its first row stands.*dpstream\.Rows"):
        released(a_job(tmp_path / "one"), beam.Create(batches([0, None, 400])), source="v1")

    def untyped(p: Any) -> Any:
        return p | beam.Create(dicts()) | beam.Map(lambda row: row).with_output_types(Any)

    with pytest.raises(Exception, match=r"no.* Arrow record batches.*dpstream\.Rows"):
        released(a_job(tmp_path / "two"), untyped, source="v1")


def test_public_keys_are_published_with_or_without_records(tmp_path: Path) -> None:
    job = a_job(tmp_path)

    def read() -> Any:
        return dpstream.ReadTable(pd.DataFrame(dicts()), job)

    releases = released(job, read(), public_keys=["p1", "zz"])
    assert releases["page"].to_pylist() == ["p1", "zz"] * 4
    assert refusal(released, job, read(), public_keys=["p1"]) == "PolicyError store"
    (tmp_path / "keys.csv").write_text("page\nzz\np1\n")
    listed = a_job(tmp_path, more='public_keys = "keys.csv"\n')
    again = released(listed, dpstream.ReadTable(pd.DataFrame(dicts()), listed))
    assert again.equals(releases)
    assert refusal(dpstream.DPStream, listed, public_keys=["p1"]) == "UsageError public_keys"


@pytest.mark.parametrize(
    "settings", ['mechanism.strategy = "auto"', "", 'mechanism.optimise = "lifetime"']
)
def test_public_keys_of_a_call_have_the_strategy_of_those_of_a_file(
    tmp_path: Path, settings: str
) -> None:
    path = a_job(tmp_path).path
    (tmp_path / "keys.csv").write_text("page\nzz\np1\n")
    text = f"{path.read_text()}{settings}\n"
    path.write_text(text)
    called = dpstream.DPStream(dpstream.load_job(path), public_keys=["p1", "zz"])._job
    path.write_text(text + 'public_keys = "keys.csv"\n')
    assert called is not None and called.plan == dpstream.load_job(path).plan


def test_a_plan_takes_public_keys_and_a_store(tmp_path: Path) -> None:
    dpstream_key = tmp_path / "noise.secret"
    dpstream_key.write_text("3f7a91c4d2e85b60718293a4b5c6d7e8f90a1b2c3d4e5f60718293a4b5c6d7e8")
    dpstream_key.chmod(0o600)
    transform = dpstream.DPStream(
        a_job(tmp_path).plan, secret=f"file:{dpstream_key}", store=f"sqlite:{tmp_path / 'own.db'}",
        source="v1", public_keys=pl.DataFrame({"page": ["b", "a", "b"]}),
    )  # fmt: skip
    assert transform._run.public is not None
    assert transform._run.public.column("page").to_pylist() == ["a", "b"]
    assert transform._run.plan.public_keys is not None


def test_a_begun_run_has_its_keys(tmp_path: Path) -> None:
    job = a_job(tmp_path)
    run, _ = dpstream.begin(job, [b"x"])
    assert dpstream.DPStream(job, run)._run is run
    assert refusal(dpstream.DPStream, job, run, public_keys=["p1"]) == "UsageError public_keys"


_NOON = datetime.datetime(2024, 1, 2, 12)
_EAST = datetime.timezone(datetime.timedelta(hours=5))
#: Each of them and what it is: noon of that day, or nothing.
TIMES: list[tuple[Any, bool]] = [
    (_NOON, True), (_NOON.replace(tzinfo=datetime.UTC), True),
    (_NOON.replace(hour=17, tzinfo=_EAST), True), (pd.Timestamp(_NOON), True),
    (np.datetime64("2024-01-02T12:00:00"), True), (np.datetime64("2024-01-02T12", "ns"), True),
    (Timestamp.from_rfc3339("2024-01-02T12:00:00Z"), True), ("2024-01-02T12:00:00Z", True),
    ("2024-01-02 17:00:00+05:00", True), (1704196800000000, True),
    (np.int64(1704196800000000), True), (None, False), (pd.NaT, False), (True, False),
    (1.5, False), ("noon", False), ("\ud800", False), (1 << 80, False), (object(), False),
]  # fmt: skip


def test_times_of_every_kind_are_instants_together() -> None:
    values = [value for value, _ in TIMES]
    instants = instants_of(values)
    assert instants.type == INSTANT
    noon = _NOON.replace(tzinfo=datetime.UTC)
    assert instants.to_pylist() == [noon if good else None for _, good in TIMES]


@pytest.mark.parametrize("place", range(len(TIMES)))
def test_a_time_by_itself_is_what_it_is_among_others(place: int) -> None:
    value, good = TIMES[place]
    assert instants_of([value]).null_count == (not good)
    assert (
        instants_of([value, value]).to_pylist() == instants_of([value, value, "x"]).to_pylist()[:2]
    )


def test_stamps_are_times_as_event_times_are(tmp_path: Path) -> None:
    plan = msgspec.structs.replace(a_job(tmp_path).plan, stamp="arrived")
    row = {"user": 1, "page": "a", "seconds": 2.0, "at": _NOON, "arrived": "2024-01-02T12:00:00Z"}
    batch = ToBatch(plan, None, None)([row])
    assert batch["arrived"].equals(batch["at"]) and batch["at"].null_count == 0


@pytest.mark.parametrize(
    ("kind", "value", "becomes"),
    [
        (pa.string(), "x", "x"), (pa.string(), 7, None), (pa.int64(), "7", None),
        (pa.int64(), np.int64(7), 7), (pa.int64(), True, None), (pa.float64(), 7, 7.0),
        (pa.float64(), decimal.Decimal("7"), None), (pa.bool_(), 1, None), (pa.binary(), "x", None),
        (pa.float64(), np.float32(1.5), 1.5), (pa.int64(), 1 << 70, None),
    ],
)  # fmt: skip
def test_neighbours_decide_nothing(kind: pa.DataType, value: Any, becomes: Any) -> None:
    for around in ([], [None], ["other", 3, 2.5]):
        assert column_of([value, *around], kind).to_pylist()[0] == becomes


def bundle(gather: Gather, elements: list[Any]) -> list[tuple[pa.RecordBatch, Any]]:
    """The batches of one bundle with their times; elements come at times that fall."""
    gather.start_bundle()
    made = [sent for number, element in enumerate(elements)
            for sent in gather.process(element, Timestamp(1_000 - number))]  # fmt: skip
    made += list(gather.finish_bundle())
    return [(getattr(sent, "value", sent), getattr(sent, "timestamp", None)) for sent in made]


def test_a_batch_is_as_early_as_its_earliest_row(tmp_path: Path) -> None:
    """So that no step that waits for one of its rows runs before it is there."""
    gather = Gather(ToBatch(a_job(tmp_path).plan, None, "id"), 20)
    sizes = [(batch.num_rows, int(at)) for batch, at in bundle(gather, dicts(50))]
    assert sizes == [(20, 981), (20, 961), (10, 951)]


ELEMENTS: dict[str, Any] = {
    "dicts": lambda rows: rows, "rows": lambda rows: [beam.Row(**row) for row in rows],
    "pandas": lambda rows: [pd.DataFrame(rows[:7]), pd.DataFrame(rows[7:])],
    "polars": lambda rows: [pl.DataFrame(rows)],
    "batches": lambda rows: pa.Table.from_pylist(rows).to_batches(),
}  # fmt: skip


@pytest.mark.parametrize("kind", ELEMENTS)
def test_every_kind_of_element_is_the_same_batch(kind: str, tmp_path: Path) -> None:
    rows, plan = dicts(60), a_job(tmp_path).plan
    gather = Gather(ToBatch(plan, "part", "line"), 25)
    made = [batch for batch, _ in bundle(gather, ELEMENTS[kind](rows))]
    placed_rows = []
    for batch in made:
        assert batch.schema.names == list(kinds_of(plan))
        partition, offset = positions(batch)
        for row, part, line in zip(batch.to_pylist(), partition, offset, strict=True):
            placed_rows.append({**row, "part": part, "line": line})
    wanted = [{name: row[name] for name in (*kinds_of(plan), "part", "line")} for row in rows]
    by = lambda row: (row["part"], row["line"])  # noqa: E731
    at = [{**row, "at": pd.Timestamp(row["at"]).tz_convert("UTC") if row["at"].tzinfo else None}
          for row in placed_rows]  # fmt: skip
    assert sorted(at, key=by) == sorted(wanted, key=by)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), max_size=20))
def test_runs_say_where_every_row_stands(places: list[tuple[int, int]]) -> None:
    partition = np.array([p for p, _ in places], np.int64)
    offset = np.array([o for _, o in places], np.int64)
    batch = pa.record_batch({"x": pa.array([0] * len(places))})
    if places:
        row_positions = positions(batch.replace_schema_metadata(position_runs(partition, offset)))
        assert [tuple(p) for p in np.stack(row_positions, axis=1)] == places


def test_with_a_record_id_a_bundle_cut_otherwise_is_the_same_records(tmp_path: Path) -> None:
    plan, rows = a_job(tmp_path, True).plan, dicts(40)

    def batches(elements: list[Any], size: int) -> list[Any]:
        return [batch for batch, _ in bundle(Gather(ToBatch(plan, None, None), size), elements)]

    once = batches(rows, 40)
    again = batches(rows[:13], 5) + batches(rows[13:], 9)
    assert [row for b in again for row in b.to_pylist()] == once[0].to_pylist()
    assert {b.schema.metadata[PARTITION] for b in again} == {b"0"}
    assert [int(b.schema.metadata[OFFSET]) for b in batches(rows, 15)] == [0, 15, 30]


def test_missing_and_mistyped_cells_are_null(tmp_path: Path) -> None:
    rows = dicts(4)
    del rows[0]["page"]
    rows[1]["user"], rows[2]["at"], rows[3]["seconds"] = "seven", "noon", None
    batch = ToBatch(a_job(tmp_path).plan, None, "id")(rows)
    nulls = {
        name: batch.column(name).is_null().to_pylist().index(True) for name in batch.schema.names
    }
    assert nulls == {"page": 0, "user": 1, "at": 2, "seconds": 3}
