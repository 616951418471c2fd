"""A folder that grows, on Prism: rows come soon, the watermark waits for them, bad files pass."""

import time
from pathlib import Path
from typing import Any

import pytest

from dpstream.pipelines.connectors.folder.source import Files
from dpstream.pipelines.connectors.folder.store import place
from dpstream.pipelines.connectors.folder.watch import close_files
from dpstream.pipelines.connectors.registry import input_of
from tests.drive import letters_of, rows_of
from tests.folders import MakeFolderJob, data, make_folder_job, positions, write
from tests.runners.prism import running, wait_for

__all__ = ["make_folder_job"]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_growing_folder(tmp_path: Path, make_folder_job: MakeFolderJob, kind: str) -> None:
    job, folder = make_folder_job(kind, batch_rows=30), tmp_path / "in"
    write(folder / f"0.{kind}", data(90))
    close_files(folder, [f"0.{kind}"])
    with running(input_of(job).read()) as (seen, _):
        wait_for(lambda: seen.rows() == 90)
        (folder / f"bad.{kind}").write_bytes(b"\xff\xfe\n")
        latencies = []
        for i in range(1, 4):
            write(folder / f"{i}.{kind}", data(90, i))
            names = [f"{i}.{kind}", *([f"bad.{kind}"] if i == 2 else [])]
            begin = time.monotonic()
            close_files(folder, names)

            def come(rows: int = 90 * (i + 1)) -> bool:
                return seen.rows() == rows

            wait_for(come)
            latencies.append(time.monotonic() - begin)
        wait_for(lambda: len(seen.batches("dead")) == 1)
        rows, letters = rows_of(seen.batches()), letters_of(seen.batches("dead"))
    assert set(rows) == set().union(*(positions(f"{i}.{kind}", 90) for i in range(4)))
    spot, reason = place(f"bad.{kind}"), "unreadable_file" if kind == "parquet" else "malformed"
    assert letters == {(spot.partition, spot.base, reason)}
    assert min(latencies) < 15, "soon, on a busy machine too"


def test_the_watermark_waits_for_slow_readers(
    tmp_path: Path, make_folder_job: MakeFolderJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A marker is done when its files are read, not when it is."""
    job, folder, parts = make_folder_job("jsonl"), tmp_path / "in", Files.parts

    def slow(self: Files, piece: Any) -> Any:
        time.sleep(0.7)
        yield from parts(self, piece)

    monkeypatch.setattr(Files, "parts", slow)
    bell = time.time_ns() // 1000 + 500_000
    with running(input_of(job).read(), bell) as (seen, _):
        for i in range(3):
            write(folder / f"{i}.jsonl", data(50, i))
        time.sleep(0.2)
        close_files(folder, [f"{i}.jsonl" for i in range(3)])
        time.sleep(0.4)
        close_files(folder)
        assert seen.rung is None
        wait_for(lambda: seen.rung is not None)
        assert seen.rung == 150
