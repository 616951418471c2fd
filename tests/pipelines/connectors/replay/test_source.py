"""A replay gives what a bounded read gives, in time, and never before its watermark allows.

The index of a recording: due times never fall in a piece, parts follow them across pieces.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.accounting.errors import RunError, UsageError
from dpstream.pipelines.connectors.files.source import pieces, read_piece
from dpstream.pipelines.connectors.inputs import positioned, refusal
from dpstream.pipelines.connectors.replay import source as replay
from dpstream.pipelines.connectors.replay import source as replay_index
from dpstream.pipelines.connectors.replay.source import (
    NEVER,
    Replay,
    due_times,
    index_of,
    parse_speed,
    part_at,
    recording_of,
    replay_bounds,
)
from dpstream.pipelines.formats.rows import Refused
from dpstream.pipelines.jobs.job import Job
from tests.drive import Drive, letters_of, rows_of

HOUR = 3_600_000_000


@pytest.mark.parametrize(
    ("least", "behind", "due"),
    [([3, 1, 2], NEVER, [1, 1, 2]), ([1, 2, 3], 2, [1, 2, 2]), ([5, NEVER], NEVER, [5, 5]),
     ([NEVER], NEVER, [0]), ([NEVER, 4], NEVER, [4, 4])],
)  # fmt: skip
def test_due_is_the_least_of_all_that_follows(
    least: list[int], behind: int, due: list[int]
) -> None:
    assert due_times(np.array(least), behind, 0).tolist() == due


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
    index, start = index_of(recording_of(job, 3600.0)), job.plan.timeline.start
    assert (np.diff(index.due) >= 0).all()
    for piece in (0, 1):  # of one piece, from front to back
        assert (np.diff(index.row[index.piece == piece]) > 0).all()
    assert index.start.tolist() == [0, *np.cumsum(index.end - index.row)[:-1].tolist()]
    end = job.plan.timeline.instant_of(job.plan.timeline.last_trigger_time)
    assert index.bounds == (start, end)  # what lies beyond the job's time is clipped
    assert replay_bounds(job) == index.bounds


def test_every_global_row_has_its_part(job: Job) -> None:
    index = index_of(recording_of(job, None))
    for row in range(index.rows):
        at = part_at(index, row)
        assert index.start[at] <= row < index.start[at] + index.end[at] - index.row[at]


MakeJob = Callable[..., Job]
START = 1_704_067_200_000_000
SECOND = 1_000_000


@pytest.fixture(autouse=True)
def _no_index_of_old_files() -> None:
    replay_index.index_of.cache_clear()


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
                records += positioned(part, piece[1], job.performance.batch_rows)
    return rows_of(records), letters_of(dead)


def drive(job: Job, speed: float | None = None, fresh: bool = False) -> Drive:
    return Drive(Replay(job, speed)._dofn, "time", fresh, begin=START)


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
    monkeypatch.setattr("dpstream.pipelines.connectors.unbounded.BUNDLE_ROWS", 150)
    rows, dead = bounded(job)
    assert len(rows) > 500 and dead
    run = drive(job, fresh=fresh)
    assert everything(run) == (rows, dead)


@pytest.mark.parametrize("speed", [60.0, 1000.0])
def test_paced_rows_are_the_same_too(
    tmp_path: Path, make_job: MakeJob, speed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job("jsonl")
    messy(tmp_path / "in", "jsonl")
    clock = Clock(monkeypatch)
    run, records, dead = drive(job, speed), [], []
    while not run.ended:
        bundle = run.bundle()
        records += bundle.records
        dead += bundle.dead
        clock.now += 7_770_000
    assert (rows_of(records), letters_of(dead)) == bounded(job)


class Clock:
    """The wall clock of a replay, set by the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_900_000_000_000_000
        monkeypatch.setattr("dpstream.pipelines.connectors.unbounded.wall_micros", lambda: self.now)
        monkeypatch.setattr(
            "dpstream.pipelines.connectors.replay.source.wall_micros", lambda: self.now
        )


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_rows_leave_when_their_stamps_are_due(
    tmp_path: Path, make_job: MakeJob, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two files of one hour side by side, uneven rows: a minute of stream a second."""
    job = make_job(kind)
    rng = np.random.default_rng(3)
    stamps: list[int] = []
    for name in "ab":
        mine = np.sort(rng.integers(0, 3600 * SECOND, 700))
        mine[300:] += 1800 * SECOND
        stamps += mine.tolist()
        write(tmp_path / "in" / f"{name}.{kind}", kind, table(mine.tolist()), group=1000)
    first, last = START + min(stamps), START + max(stamps)
    assert replay_bounds(job) == (first, last)
    clock = Clock(monkeypatch)
    run, begun, left = drive(job, 60.0), clock.now, 0
    while not run.ended:
        bundle = run.bundle()
        due = first + (clock.now - begun) * 60
        for batch in bundle.records:
            left += batch.num_rows
        expected = sum(START + s <= due for s in stamps)
        # A part spans a tenth of a second, 6 s of stream, and the two files take turns.
        before = sum(START + s <= due - 6 * SECOND for s in stamps)
        assert before <= left <= expected
        if not run.ended:
            assert bundle.watermark is not None
            assert due - 7 * SECOND <= bundle.watermark <= due
        clock.now += 50_000
    assert left == 1400
    assert (clock.now - begun) * 60 == pytest.approx(last - first, abs=12 * SECOND)


def test_a_slow_stream_keeps_its_watermark_going(
    tmp_path: Path, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job("csv")
    write(tmp_path / "in" / "a.csv", "csv", table([0, 3600 * SECOND]))
    clock = Clock(monkeypatch)
    run, watermarks = drive(job, 1.0), []
    for _ in range(50):
        bundle = run.bundle()
        assert bundle.delay and bundle.delay <= 0.1
        watermarks.append(bundle.watermark)
        clock.now += SECOND
    assert watermarks == [START + i * SECOND for i in range(50)]


def test_the_promise_is_kept_only_by_looking_ahead(
    tmp_path: Path, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sabotaged variant: a watermark that follows what was read."""
    job = make_job("parquet", batch_rows=16)
    write(tmp_path / "in" / "a.parquet", "parquet", table([i * SECOND for i in [*range(64), 0]]))
    everything(drive(job))
    monkeypatch.setattr(
        replay.OpenPieces, "_next", lambda self, number: int(self.index.last[number])
    )
    with pytest.raises(AssertionError, match="stamp"):
        everything(drive(job))


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
        replay_index.index_of.cache_clear()
        rows, dead = everything(drive(job))
        assert (rows, dead) == bounded(job)
        assert dead == {(0, 40, "unreadable_rest")} and len(rows) == 80
        pq.write_table(data, path, row_group_size=40, write_page_checksum=True)


def test_a_file_that_vanishes_is_a_coded_error(tmp_path: Path, make_job: MakeJob) -> None:
    job = make_job("csv")
    write(tmp_path / "in" / "a.csv", "csv", table([0, 1]))
    source = Replay(job)
    (tmp_path / "in" / "a.csv").unlink()
    with pytest.raises(RunError, match="file 0 of the manifest"):
        Drive(source._dofn, "time").bundle()


def test_speeds() -> None:
    assert parse_speed("max") is None and parse_speed("60") == 60.0
    for text in ("", "fast", "0", "-1", "nan", "inf", "1e10"):
        with pytest.raises(UsageError, match="--speed"):
            parse_speed(text)


def test_only_files_are_recordings(tmp_path: Path, make_job: MakeJob) -> None:
    job = make_job("csv")
    write(tmp_path / "in" / "a.csv", "csv", table([0]))
    with pytest.raises(UsageError, match="--speed"):
        Replay(job, 0.0)
    live = msgspec.structs.replace(job.source, kind="folder")
    with pytest.raises(UsageError, match="not a recording"):
        Replay(msgspec.structs.replace(job, source=live))


def test_nothing_to_replay(tmp_path: Path, make_job: MakeJob) -> None:
    job = make_job("csv")
    write(tmp_path / "in" / "a.csv", "csv", table([]))
    assert everything(drive(job)) == ({}, set())
    assert replay_bounds(job) == (START, START)


def test_pieces_stay_open_up_to_a_limit(
    tmp_path: Path, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job("jsonl", batch_rows=16)
    for i in range(5):
        rows = [i + 10 * n for n in range(200)]
        write(tmp_path / "in" / f"{i}.jsonl", "jsonl", table(rows))
    monkeypatch.setattr(replay, "OPEN_PIECES", 2)
    assert everything(drive(job)) == bounded(job)


def test_a_long_piece_keeps_fewer_stamps(
    tmp_path: Path, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job("jsonl", batch_rows=16)
    messy(tmp_path / "in", "jsonl")
    monkeypatch.setattr(replay_index, "MAX_GRAINS", 8)
    assert everything(drive(job)) == bounded(job)
    few = len(replay_index.index_of(replay_index.recording_of(job, None)).due)
    monkeypatch.undo()
    replay_index.index_of.cache_clear()
    assert 0 < few < len(replay_index.index_of(replay_index.recording_of(job, None)).due)
