"""Folders that grow, for tests: files, markers, and the source driven without Beam."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.pipelines.connectors.folder.source import ReadFolder
from dpstream.pipelines.connectors.folder.store import place, rfc3339
from dpstream.pipelines.connectors.inputs import placed, refusal
from dpstream.pipelines.formats.rows import Refused
from dpstream.pipelines.jobs.job import Job, load_job
from tests.drive import Drive, letters_of, rows_of

START = 1_704_067_200_000_000
SECOND = 1_000_000
CANARY = "CANARY7741"
JOB = """
version = 1

[data_set.shop]
unit = { name = "user" }
insecure_test_secret = "0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f"

[table.visits]
folder = "in"
format = "FORMAT"
stamp = "STAMP"
unit_column = "user"
time_column = "time"

[job.daily]
table = "visits"
key = ["key"]
aggregate.records = { kind = "count" }
aggregate.total = { kind = "sum", column = "value", bounds = [0, 10] }
start = "2024-01-01T00:00:00Z"
end = "2024-01-02T00:00:00Z"
window = "1d"
release_every = "6h"
budget = { epsilon = 6.0, delta = 1e-9, covers = "lifetime" }
contributions = 4
sink = { kind = "parquet", path = "releases" }
"""
MakeFolderJob = Callable[..., Job]


def job_text(kind: str, stamp: str = "manifest") -> str:
    """A job on the folder ``in``, whose files have a format."""
    return JOB.replace("FORMAT", kind).replace("STAMP", stamp)


@pytest.fixture
def make_folder_job(tmp_path: Path) -> MakeFolderJob:
    """``make(format, stamp=..., batch_rows=...)`` writes and loads a job on the folder ``in``."""

    def make(kind: str = "jsonl", stamp: str = "manifest", batch_rows: int = 1000) -> Job:
        (tmp_path / "dpstream.toml").write_text(job_text(kind, stamp))
        (tmp_path / "in").mkdir(exist_ok=True)
        return msgspec.structs.replace(load_job(tmp_path), batch_rows=batch_rows)

    return make


def data(rows: int, first: int = 0) -> list[dict[str, Any]]:
    return [
        {"user": f"{CANARY}{i % 5}", "key": f"k{i % 3}", "time": rfc3339(START + i), "value": i % 7}
        for i in range(first, first + rows)
    ]


def write(path: Path, rows: list[dict[str, Any]], group: int = 40) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=group)
    elif path.suffix == ".csv":
        lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
        path.write_text("\n".join(lines) + "\n")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def mark(folder: Path, at: int, *lines: Any, name: str = "", day: bool = False) -> None:
    """A marker written by hand."""
    below = folder / "_closed" / (rfc3339(at)[:10] if day else "")
    below.mkdir(parents=True, exist_ok=True)
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (below / (name or f"{rfc3339(at)}.jsonl")).write_text("".join(t + "\n" for t in texts))


def line(name: str, at: int, **more: Any) -> dict[str, Any]:
    return {"file": name, "closed": rfc3339(at), **more}


class FolderReader:
    """The source without Beam: watch, pieces and rows, look after look."""

    def __init__(self, job: Job, begin: int = 0, fresh: bool = False) -> None:
        source = ReadFolder(job, begin)
        self.files, self.rows = source._files, source._batch_rows
        self.watch = Drive(source._watch, None, fresh)
        self.records: list[pa.RecordBatch] = []
        self.dead: list[pa.RecordBatch] = []

    def look(self) -> int | None:
        """One look; the watermark after it."""
        bundle = self.watch.bundle()
        for element in bundle.records:
            if isinstance(element, pa.RecordBatch):
                self.dead.append(element)
                continue
            at = place(element[0])
            for piece in self.files.pieces(element):
                if isinstance(piece, Refused):
                    moved = Refused(piece.offsets + at.base, piece.reasons)
                    self.dead.append(refusal(moved, at.partition))
                    continue
                self.read(piece)
        return bundle.watermark

    def read(self, piece: Any) -> None:
        for rows in placed(self.files.parts(piece), place(piece[0]).partition, self.rows):
            if isinstance(rows, pa.RecordBatch):
                self.records.append(rows)
            else:
                self.dead.append(refusal(*rows))

    def rows_read(self) -> dict[tuple[int, int], dict[str, Any]]:
        return rows_of(self.records)

    def letters(self, name: str) -> list[tuple[int, str]]:
        """Rows and reasons of the dead letters of a file."""
        all_of = letters_of(self.dead)
        return sorted((o - place(name).base, r) for p, o, r in all_of if p == place(name).partition)


def positions(name: str, rows: int) -> set[tuple[int, int]]:
    at = place(name)
    return {(at.partition, at.base + row) for row in range(rows)}
