"""Small files that are read together give what each gives alone, at the same positions."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.accounting.errors import RunError
from dpstream.dp_transforms.batches import OFFSET, PARTITION, ROWS
from dpstream.dp_transforms.ingest.records import positions
from dpstream.pipelines.connectors.files import source as sources
from dpstream.pipelines.connectors.files.source import ReadFiles, groups, read_group
from dpstream.pipelines.connectors.inputs import refusal
from dpstream.pipelines.formats import small
from dpstream.pipelines.jobs.job import Job
from tests.golden.refusals import Refused
from tests.pipelines.connectors.files.test_source import (
    BOM,
    CSV_LINES,
    JSON_LINES,
    by_hand,
    collect,
    run_in_beam,
    table,
    write,
)

MakeJob = Callable[..., Job]
HEADS = (b"user,key,time,value\n", b"value,user,x,time,key\r\n", BOM + b'"user",key,time,value\n')


def together(job: Job) -> Any:
    """Rows by position and dead letters, read in groups, without Beam."""
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    dead: set[tuple[int, int, str]] = set()
    for group in groups(job):
        for part in read_group(group, job.columns, job.batch_rows):
            if isinstance(part, pa.RecordBatch):
                collect(part, job, rows)
            else:
                letters = refusal(*part).to_pylist()
                assert not dead & {tuple(x.values()) for x in letters}, "each is given once"
                dead |= {tuple(x.values()) for x in letters}
    return rows, dead


def csv_text(rng: random.Random) -> bytes:
    """A file: some headers, rows good and bad, blank lines, line ends, no end."""
    if rng.random() < 0.1:
        return rng.choice([b"", b"\n", b'"user,key\n', b"user,key,time,value"])
    head = rng.choice(HEADS)
    rest = b"," + b",".join(b"%d" % rng.randrange(99) for _ in range(2 + (b"x" in head)))
    good = [line + rest for line, _ in CSV_LINES[:-1] if line.count(b",") == 1]
    bad = [line for line, _ in CSV_LINES[:-1]] + [b"", b"\r", b" "]
    lines = [rng.choice(good if rng.random() < 0.8 else bad) for _ in range(rng.randrange(12))]
    return head + b"\n".join(lines) + rng.choice([b"\n", b"", b"\n\n"])


def json_text(rng: random.Random) -> bytes:
    good = [b'{"user": "u%d", "key": "k", "value": %d}' % (i, i) for i in range(9)]
    bad = [line for line, _ in JSON_LINES[:-1]] + [b"", b"\r"]
    lines = [rng.choice(good if rng.random() < 0.8 else bad) for _ in range(rng.randrange(12))]
    return b"\n".join(lines) + rng.choice([b"\n", b"", b"\n\n"])


@pytest.mark.parametrize("batch_rows", [1, 7, 1000])
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_texts(tmp_path: Path, make_job: MakeJob, kind: str, batch_rows: int) -> None:
    job, rng = make_job(kind, batch_rows=batch_rows), random.Random(f"{kind}{batch_rows}")
    for number in range(120):
        text = csv_text(rng) if kind == "csv" else json_text(rng)
        (tmp_path / "in" / f"{number:03d}.{kind}").write_bytes(text)
    alone = by_hand(job)
    assert len(alone[0]) > 200 and len(alone[1]) > 20
    assert together(job) == alone


@pytest.mark.parametrize("batch_rows", [1, 7, 1000])
def test_parquet(tmp_path: Path, make_job: MakeJob, batch_rows: int) -> None:
    job = make_job("parquet", batch_rows=batch_rows)
    for number in range(30):
        data = table(number * 3, number)
        if number % 5 == 3:
            data = data.set_column(4, "value", data["value"].cast(pa.int32()))
        if number % 7 == 4:
            data = data.set_column(2, "key", data["key"].dictionary_encode())
        path = tmp_path / "in" / f"{number:03d}.parquet"
        pq.write_table(data, path, row_group_size=20, write_page_checksum=True)
        if number % 9 == 8:
            content = bytearray(path.read_bytes())
            content[len(content) // 3] ^= 0xFF
            path.write_bytes(bytes(content))
    (tmp_path / "in" / "999.parquet").write_bytes(b"none")
    alone = by_hand(job)
    assert len(alone[0]) > 800 and {"unreadable_rest", "unreadable_file"} <= {
        reason for _, _, reason in alone[1]
    }
    assert together(job) == alone


def test_files_of_all_sizes_through_beam(
    tmp_path: Path, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job("csv", batch_rows=50)
    for number, rows in enumerate([3, 200, 1, 4, 90, 0, 2, 2, 2]):
        write(tmp_path / "in" / f"{number}.csv", "csv", table(rows, 1000 * number))
    monkeypatch.setattr(sources, "SMALL_BYTES", 1_000)
    monkeypatch.setattr(sources, "TOGETHER_FILES", 2)
    assert [len(group) for group in groups(job)] == [1, 1, 2, 1, 2, 2]
    assert run_in_beam(job) == by_hand(job) == together(job)


def test_many_files_make_few_elements_and_batches(tmp_path: Path, make_job: MakeJob) -> None:
    """What an element and a batch cost does not come for every file."""
    for kind in ("csv", "jsonl", "parquet"):
        job = make_job(kind, batch_rows=1000)
        for number in range(300):
            write(tmp_path / "in" / f"{number}.{kind}", kind, table(10))
        batches = [list(read_group(g, job.columns, 1000)) for g in ReadFiles(job)._groups]
        assert len(batches) == 1 and len(batches[0]) == 3


def test_a_file_that_vanishes_is_named_by_its_number(tmp_path: Path, make_job: MakeJob) -> None:
    for kind in ("csv", "parquet"):
        job = make_job(kind)
        for number in range(5):
            write(tmp_path / "in" / f"{number}.{kind}", kind, table(3))
        group = groups(job)[0]
        (tmp_path / "in" / f"3.{kind}").unlink()
        with pytest.raises(RunError, match="file 3 of the manifest cannot be read"):
            list(read_group(group, job.columns, 10))


def test_a_sabotaged_one_that_numbers_rows_over_files(
    tmp_path: Path, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = small._lines

    def numbered(texts: list[bytes]) -> Any:
        lines, file, row = real(texts)
        return lines, file, np.arange(len(row))

    monkeypatch.setattr(small, "_lines", numbered)
    with pytest.raises(AssertionError):
        test_texts(tmp_path, make_job, "csv", 7)


def batch_of(count: int, **where: str) -> pa.RecordBatch:
    names = {"partition": PARTITION, "offset": OFFSET, "rows": ROWS}
    metadata = {names[name]: text for name, text in where.items()}
    return pa.RecordBatch.from_pydict({"a": list(range(count))}).replace_schema_metadata(metadata)


def test_positions_of_runs(refused: Refused) -> None:
    partition, offset = positions(batch_of(6, partition="4,4,7", offset="9,20,0", rows="2,1,3"))
    assert partition.tolist() == [4, 4, 4, 7, 7, 7] and offset.tolist() == [9, 10, 20, 0, 1, 2]
    partition, offset = positions(batch_of(3, partition="4", offset="9"))
    assert partition.tolist() == [4] * 3 and offset.tolist() == [9, 10, 11]
    for where in (
        {"partition": "4,5", "offset": "9"}, {"partition": "4", "offset": "9", "rows": "2"},
        {"partition": "4", "offset": "9,8", "rows": "1,2"}, {"offset": "9", "rows": "3"},
    ):  # fmt: skip
        refused(positions, batch_of(3, **where))
