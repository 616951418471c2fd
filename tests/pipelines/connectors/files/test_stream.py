"""Files as a stream give what a bounded read gives, never before the watermark allows.

The index of a recording: due times never fall in a piece, parts follow them across pieces.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.dp_transforms.ingest.columns import instant
from dpstream.pipelines.connectors.files import stream
from dpstream.pipelines.connectors.files.source import pieces, read_piece
from dpstream.pipelines.connectors.files.stream import (
    NEVER,
    OpenPieces,
    Slice,
    StreamFiles,
    StreamReader,
    due_times,
    index_of,
    recording_of,
)
from dpstream.pipelines.connectors.inputs import positioned, refusal
from dpstream.pipelines.formats.rows import Refused, Rows
from dpstream.pipelines.jobs.job import Job
from tests.drive import Drive, letters_of, rows_of
from tests.golden import refusals

HOUR = 3_600_000_000


@pytest.mark.parametrize(
    ("least", "due"),
    [([3, 1, 2], [1, 1, 2]), ([5, NEVER], [5, 5]), ([NEVER], [0]), ([NEVER, 4], [4, 4])],
)
def test_due_is_the_least_of_all_that_follows(least: list[int], due: list[int]) -> None:
    assert due_times(np.array(least), 0).tolist() == due


@pytest.fixture
def job(make_job: Callable[..., Job], tmp_path: Path) -> Job:
    made = make_job("parquet", batch_rows=2)
    start = made.plan.timeline.start
    for name, hours in (("a", [1, 2, 8, 9]), ("b", [0, 7, 3, 30])):
        stamps = pa.array([start + h * HOUR for h in hours]).view(pa.timestamp("us", "UTC"))
        columns = {"user": ["u"] * 4, "key": ["k"] * 4, "value": [1.0] * 4, "time": stamps}
        pq.write_table(pa.table(columns), tmp_path / "in" / f"{name}.parquet")
    return made


def test_parts_are_in_the_order_of_their_due_times(job: Job) -> None:
    index, timeline = index_of(recording_of(job)), job.plan.timeline
    assert (np.diff(index.due) >= 0).all()
    for piece in (0, 1):  # of one piece, from front to back
        assert (np.diff(index.row[index.piece == piece]) > 0).all()
    # What lies beyond the job's time is clipped.
    assert timeline.start <= index.due.min() <= index.due.max()
    assert index.due.max() <= timeline.instant_of(timeline.last_trigger_time)


MakeJob = Callable[..., Job]
START = 1_704_067_200_000_000
SECOND = 1_000_000


@pytest.fixture(autouse=True)
def _no_index_of_old_files() -> None:
    index_of.cache_clear()


def table(stamps: list[int]) -> pa.Table:
    """Rows with stamps (micros after the job's start)."""
    number = range(len(stamps))
    return pa.table(
        {
            "user": [f"u{i % 7}" for i in number],
            "key": [f"k{i % 3}" for i in number],
            "time": pa.array([START + s for s in stamps], pa.timestamp("us")),
            "value": [float(i % 11) for i in number],
        }
    )


def write(path: Path, kind: str, data: pa.Table, group: int = 40) -> None:
    if kind == "parquet":
        pq.write_table(data, path, row_group_size=group)
        return
    rows = [{**row, "time": row["time"].isoformat() + "Z"} for row in data.to_pylist()]
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        lines = [",".join(data.column_names), *(",".join(map(str, r.values())) for r in rows)]
        path.write_text("\n".join(lines) + "\n")


def bounded(job: Job) -> tuple[dict[tuple[int, int], Any], set[tuple[int, int, str]]]:
    """What the bounded source reads, without Beam."""
    records, dead = list[pa.RecordBatch](), list[pa.RecordBatch]()
    for piece in pieces(job):
        for part in read_piece(piece, job.columns):
            if isinstance(part, Refused):
                dead.append(refusal(part, piece[1]))
            else:
                records += positioned(part, piece[1], job.batch_rows)
    return rows_of(records), letters_of(dead)


def drive(job: Job, fresh: bool = False) -> Drive:
    return Drive(StreamFiles(job).reader, "time", fresh, begin=START)


def everything(run: Drive) -> tuple[dict[tuple[int, int], Any], set[tuple[int, int, str]]]:
    bundles = list(run.all())
    records = [batch for bundle in bundles for batch in bundle.records]
    return rows_of(records), letters_of([batch for bundle in bundles for batch in bundle.dead])


def messy(folder: Path, kind: str) -> None:
    """Files that overlap in time: sorted, unsorted, with bad times, with bad rows."""
    rng = np.random.default_rng(5)
    write(folder / f"a.{kind}", kind, table([i * SECOND for i in range(500)]))
    shuffled = rng.integers(0, 3600 * SECOND, 333).tolist()
    write(folder / f"b.{kind}", kind, table(shuffled))
    write(folder / f"c.{kind}", kind, table([7 * 3600 * SECOND + i for i in range(90)]))
    write(folder / f"d.{kind}", kind, table([]))
    write(folder / f"e.{kind}", kind, table([-(10**15), 90 * 86_400 * SECOND, 5 * SECOND]))
    if kind == "parquet":
        (folder / "f.parquet").write_bytes(b"no Parquet")
        return
    bad = b"\xff no row \xff\n"
    lines = (folder / f"a.{kind}").read_bytes().splitlines(keepends=True)
    damaged_lines = [bad if i and rng.random() < 0.2 else line for i, line in enumerate(lines)]
    (folder / f"f.{kind}").write_bytes(b"".join([*damaged_lines, bad, bad]))
    no_time = [line.replace(b"2024-01", b"2024-13") if i else line for i, line in enumerate(lines)]
    (folder / f"g.{kind}").write_bytes(b"".join(no_time))


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
@pytest.mark.parametrize("batch_rows", [7, 100, 20_000])
@pytest.mark.parametrize("fresh", [False, True], ids=["one worker", "many workers"])
def test_the_same_rows_as_the_bounded_source(
    tmp_path: Path, make_job: MakeJob, kind: str, batch_rows: int, fresh: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    job = make_job(kind, batch_rows=batch_rows)
    messy(tmp_path / "in", kind)
    monkeypatch.setattr("dpstream.pipelines.connectors.inputs.BUNDLE_ROWS", 150)
    rows, dead = bounded(job)
    assert len(rows) > 500 and dead
    run = drive(job, fresh=fresh)
    assert everything(run) == (rows, dead)


class Hasty(OpenPieces):
    """Slices that promise what follows their own last stamp, whatever is still to come."""

    def slices(self, first: int) -> Iterator[Slice]:
        for part in super().slices(first):
            stamps = [instant(each.batch.column("time"))[0] for each in part.parts
                      if isinstance(each, Rows)]  # fmt: skip
            yield part._replace(rest=int(np.concatenate(stamps).max()))


class HastyReader(StreamReader):
    def open(self) -> OpenPieces:
        return Hasty(self.recording)


def test_the_promise_is_kept_only_by_looking_ahead(tmp_path: Path, make_job: MakeJob) -> None:
    """The sabotaged variant: a watermark that follows what was read."""
    job = make_job("parquet", batch_rows=16)
    write(tmp_path / "in" / "a.parquet", "parquet", table([i * SECOND for i in [*range(64), 0]]))
    everything(drive(job))
    with pytest.raises(AssertionError, match="stamp"):
        everything(Drive(HastyReader(recording_of(job)), "time", begin=START))


def test_a_group_that_breaks_off(tmp_path: Path, make_job: MakeJob) -> None:
    job = make_job("parquet", batch_rows=20)
    path = tmp_path / "in" / "a.parquet"
    data = table([i * SECOND for i in range(120)])
    pq.write_table(data, path, row_group_size=40, write_page_checksum=True)
    for column in ("user", "time"):
        meta = pq.ParquetFile(path).metadata.row_group(1)
        index = data.column_names.index(column)
        chunk = meta.column(index)
        broken = bytearray(path.read_bytes())
        broken[chunk.data_page_offset + chunk.total_compressed_size // 2] ^= 0xFF
        path.write_bytes(broken)
        index_of.cache_clear()
        rows, dead = everything(drive(job))
        assert (rows, dead) == bounded(job)
        assert dead == {(0, 40, "unreadable_rest")} and len(rows) == 80
        pq.write_table(data, path, row_group_size=40, write_page_checksum=True)


def test_a_file_that_vanishes_is_a_coded_error(
    tmp_path: Path, make_job: MakeJob, refused: refusals.Refused
) -> None:
    job = make_job("csv")
    write(tmp_path / "in" / "a.csv", "csv", table([0, 1]))
    source = StreamFiles(job)
    (tmp_path / "in" / "a.csv").unlink()
    refused(lambda: Drive(source.reader, "time").bundle())


def test_nothing_to_read(tmp_path: Path, make_job: MakeJob) -> None:
    job = make_job("csv")
    write(tmp_path / "in" / "a.csv", "csv", table([]))
    assert everything(drive(job)) == ({}, set())


def test_pieces_stay_open_up_to_a_limit(
    tmp_path: Path, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job("jsonl", batch_rows=16)
    for i in range(5):
        rows = [i + 10 * n for n in range(200)]
        write(tmp_path / "in" / f"{i}.jsonl", "jsonl", table(rows))
    monkeypatch.setattr(stream, "OPEN_PIECES", 2)
    assert everything(drive(job)) == bounded(job)


def test_a_long_piece_keeps_fewer_stamps(
    tmp_path: Path, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job("jsonl", batch_rows=16)
    messy(tmp_path / "in", "jsonl")
    monkeypatch.setattr(stream, "MAX_GRAINS", 8)
    assert everything(drive(job)) == bounded(job)
    few = len(index_of(recording_of(job)).due)
    monkeypatch.undo()
    index_of.cache_clear()
    assert 0 < few < len(index_of(recording_of(job)).due)
