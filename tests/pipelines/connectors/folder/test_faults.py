"""Bad files in a folder that grows, and a store that is away."""

import errno
import json
import time
import traceback
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.accounting.errors import RunError
from dpstream.pipelines.connectors.folder import store as folder_store
from dpstream.pipelines.connectors.folder.source import Files, ReadFolder
from dpstream.pipelines.connectors.folder.store import Folder, Markers, patiently, place
from tests.drive import Drive
from tests.folders import (
    CANARY,
    SECOND,
    START,
    FolderReader,
    MakeFolderJob,
    data,
    line,
    make_folder_job,
    mark,
    positions,
    write,
)
from tests.golden.refusals import Refused

__all__ = ["make_folder_job"]


@pytest.fixture(autouse=True)
def _now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "dpstream.pipelines.connectors.folder.source.wall_micros", lambda: START + 86_400 * SECOND
    )


def test_corrupt_files(tmp_path: Path, make_folder_job: MakeFolderJob) -> None:
    folder, run = tmp_path / "in", FolderReader(make_folder_job("parquet"))
    write(folder / "good.parquet", data(80))
    (folder / "bad.parquet").write_bytes(b"no Parquet")
    pq.write_table(pa.table({"user": ["x"]}), folder / "other.parquet")
    table = pa.Table.from_pylist(data(120))
    pq.write_table(table, folder / "torn.parquet", row_group_size=40, write_page_checksum=True)
    torn = bytearray((folder / "torn.parquet").read_bytes())
    chunk = pq.ParquetFile(folder / "torn.parquet").metadata.row_group(1).column(0)
    torn[chunk.data_page_offset + chunk.total_compressed_size // 2] ^= 0xFF
    (folder / "torn.parquet").write_bytes(torn)
    (folder / "folder.parquet").mkdir()
    (folder / "loop.parquet").symlink_to("loop.parquet")
    names = ["bad", "torn", "other", "folder", "loop", "good"]
    mark(folder, START + 1, *(line(f"{n}.parquet", START) for n in names))
    run.look()
    at = place("torn.parquet")
    expected = positions("good.parquet", 80) | positions("torn.parquet", 40)
    expected |= {(at.partition, at.base + row) for row in range(80, 120)}
    assert set(run.rows_read()) == expected
    assert run.letters("torn.parquet") == [(40, "unreadable_rest")]
    assert run.letters("other.parquet") == [(0, "missing_column")]
    for name in ("bad", "folder", "loop"):
        assert run.letters(f"{name}.parquet") == [(0, "unreadable_file")]


def test_a_csv_without_a_column(tmp_path: Path, make_folder_job: MakeFolderJob) -> None:
    run = FolderReader(make_folder_job("csv"))
    (tmp_path / "in" / "a.csv").write_text(f"{CANARY},b\n1,2\n")
    mark(tmp_path / "in", START + 1, line("a.csv", START))
    run.look()
    assert run.letters("a.csv") == [(0, "missing_column")]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_counts_and_sizes_that_are_not_as_listed(
    tmp_path: Path, make_folder_job: MakeFolderJob, kind: str
) -> None:
    folder, run = tmp_path / "in", FolderReader(make_folder_job(kind))
    for name in "ab":
        write(folder / f"{name}.{kind}", data(50))
    mark(folder, START + 1, line(f"a.{kind}", START, rows=49), line(f"b.{kind}", START, rows=50))
    run.look()
    assert run.letters(f"a.{kind}") == [(50, "row_count")] and not run.letters(f"b.{kind}")
    assert len(run.rows_read()) == 100
    pieces = list(run.files.pieces((f"b.{kind}", START, -1, -1)))
    if kind == "jsonl":
        with open(folder / "b.jsonl", "a") as file:
            file.write(json.dumps(data(1)[0]) + "\n")
        run.records.clear()
        run.read(pieces[0])
        assert run.letters("b.jsonl") == [(51, "file_changed")]
    (folder / f"b.{kind}").unlink()
    run.dead.clear()
    for piece in pieces:
        run.read(piece)
    assert [reason for _, reason in run.letters(f"b.{kind}")] == ["unreadable_rest"] * len(pieces)


class Shaky(Folder):
    """A remote store over a local folder that fails now and then."""

    faults = 0

    @property
    def local(self) -> bool:
        return False

    def open(self) -> Any:
        return _Shaky(super().open(), self)


class _Shaky:
    def __init__(self, system: Any, folder: Shaky) -> None:
        self.system, self.folder = system, folder

    def get_file_info(self, what: Any) -> Any:
        self._fail()
        return self.system.get_file_info(what)

    def open_input_file(self, path: str) -> Any:
        self._fail()
        return _ShakyFile(self.system.open_input_file(path), self)

    def _fail(self) -> None:
        if self.folder.faults > 0:
            self.folder.faults -= 1
            raise OSError(f"AWS Error [code 99]: {CANARY}")


class _ShakyFile:
    def __init__(self, file: Any, store: _Shaky) -> None:
        self.file, self.store, self.reads = file, store, 0

    def read(self, size: int | None) -> Any:
        self.reads += 1
        if self.reads % 3 == 2:
            self.store._fail()
        return self.file.read(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_store, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(folder_store, "LAST_PAUSE_SECONDS", 0.002)


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_a_store_that_comes_back_gives_every_row_once(
    tmp_path: Path, make_folder_job: MakeFolderJob, kind: str, quick: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("dpstream.pipelines.formats.lines.BLOCK_BYTES", 500)
    job = make_folder_job(kind)
    write(tmp_path / "in" / f"a.{kind}", data(100))
    if kind != "parquet":
        with open(tmp_path / "in" / f"a.{kind}", "a") as file:
            file.write("\xff no row\n")
    expected = FolderReader(job)
    for piece in expected.files.pieces((f"a.{kind}", START, -1, -1)):
        expected.read(piece)
    assert len(expected.rows_read()) == 100
    for faults in range(1, 30, 4):
        run = FolderReader(job)
        folder = Shaky(job.source.path)
        run.files = run.files._replace(folder=folder)
        folder.faults = faults
        for piece in run.files.pieces((f"a.{kind}", START, -1, -1)):
            run.read(piece)
        assert folder.faults < faults
        assert run.rows_read() == expected.rows_read()
        assert run.letters(f"a.{kind}") == expected.letters(f"a.{kind}")


def test_a_store_that_stays_away(
    tmp_path: Path,
    make_folder_job: MakeFolderJob,
    quick: None,
    monkeypatch: pytest.MonkeyPatch,
    refused: Refused,
) -> None:
    job = make_folder_job("jsonl")
    folder = Shaky(job.source.path)
    folder.faults = 10**6
    files = Files(folder, "jsonl", job.columns)
    monkeypatch.setattr(folder_store, "PATIENCE_SECONDS", 0.05)
    caught = refused(lambda: list(files.pieces(("a.jsonl", START, -1, -1))))
    assert CANARY not in "".join(traceback.format_exception(caught))
    run = Drive(ReadFolder(job)._watch, None)
    run.dofn._watch = Markers(folder)
    monkeypatch.setattr("dpstream.pipelines.connectors.folder.source.PATIENCE_SECONDS", 0.05)
    assert run.bundle().records == [], "a look that fails is looked again"
    with pytest.raises(RunError, match="cannot be read"):
        for _ in range(100):
            run.bundle()
            time.sleep(0.01)


def test_faults_of_a_name_are_not_waited_for() -> None:
    calls = []

    def gone() -> None:
        calls.append(1)
        raise FileNotFoundError(errno.ENOENT, "gone")

    with pytest.raises(FileNotFoundError):
        patiently(gone)
    assert len(calls) == 1
