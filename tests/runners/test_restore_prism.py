"""A live stream on Prism that loses its store: restored, it compares while it runs, and goes on."""

import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.dp_transforms import batches
from dpstream.pipelines.connectors.folder.store import close_files
from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.operate.state_admin import info, restore
from tests.folders import write
from tests.runners.prism import binary, run_while, wait_for

JOB = """
version = 1

[data_set.shop]
unit = {{ name = "user" }}
insecure_test_secret = "{secret}"

[table.visits]
folder = "in"
format = "jsonl"
unit_column = "user"
time_column = "time"

[job.live]
table = "visits"
key = ["key"]
aggregate.records = {{ kind = "count" }}
start = "{start}"
window = "2s"
release_every = "1s"
allowed_lateness = "2s"
budget = {{ epsilon = 1000.0, delta = 0.1, covers = "lifetime" }}
mechanism.allow_large_delta = true
contributions = 1
public_keys = "keys.csv"
shards = 2
keep_releases = "1d"
sink = {{ kind = "parquet", path = "releases" }}
"""
Files = dict[str, bytes]


class Producer:
    """Writes a file of new users' records every 0.3 s and closes it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder / "in", 0
        self.folder.mkdir()

    def produce(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            at = datetime.now(UTC).isoformat()
            users = range(20 * self.number, 20 * self.number + 20)
            rows = [{"user": f"u{i}", "key": "ab"[i % 2], "time": at} for i in users]
            write(self.folder / f"{self.number}.jsonl", rows)
            close_files(self.folder, [f"{self.number}.jsonl"])
            self.number += 1
            time.sleep(0.3)


def files(folder: Path) -> Files:
    return {p.as_posix(): p.read_bytes() for p in (folder / "releases").rglob("window-*/*")}


def records(folder: Path) -> int:
    """Records of the last release of each window."""
    last: dict[str, int] = {}
    for path in sorted((folder / "releases").rglob("window-*/*.parquet")):
        last[path.parent.name] = round(sum(pq.read_table(path)["records"].to_pylist()))
    return sum(last.values())


@pytest.fixture(autouse=True)
def no_batch_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """All pass by reference."""
    monkeypatch.setattr(batches, "HAND_OVER_ROWS", 1)


def files_after(producer: Producer, folder: Path) -> int:
    """How many files there are after some more records."""
    producer.produce(0.3)
    return len(files(folder))


@pytest.mark.parametrize("tampered", [False, True])
def test_a_live_stream_is_restored(tmp_path: Path, tampered: bool) -> None:
    binary()
    start = datetime.fromtimestamp(time.time() // 2 * 2, UTC).isoformat().replace("+00:00", "Z")
    (tmp_path / "keys.csv").write_text("key\na\nb\n")
    path, saved = tmp_path / "dpstream.toml", tmp_path / "backup"
    path.write_text(JOB.format(start=start, secret="0f" * 32))
    job, producer = load_job(path), Producer(tmp_path)

    def first() -> None:
        producer.produce(3)
        command = [
            sys.executable,
            "-m",
            "dpstream",
            "state",
            "backup",
            "--project",
            path,
            "--out",
            saved,
        ]
        subprocess.run([str(part) for part in command], check=True, capture_output=True)
        done = len(files(tmp_path))
        wait_for(lambda: files_after(producer, tmp_path) >= done + 5, 60)

    run_while(job, first)
    before = files(tmp_path)
    restore(job, saved, replace=True)
    assert info(job)["restoring"]
    if tampered:
        other, one = sorted(before)[-2:]  # released after the backup
        Path(one).write_bytes(before[other])

    def second() -> None:
        wait_for(lambda: files_after(producer, tmp_path) > 5 + len(before))

    if tampered:
        with pytest.raises(PolicyError, match="restored store does not lead to what is published"):
            run_while(job, lambda: producer.produce(8))
        assert files(tmp_path) == {**before, one: before[other]}
        return
    assert run_while(job, second).resumed
    after = files(tmp_path)
    assert before.items() < after.items()
    assert not info(job)["restoring"]
    # To the last window everything is counted once, whatever was read twice.
    run_while(job, lambda: time.sleep(0.1))

    def third() -> None:
        close_files(producer.folder)
        wait_for(lambda: records(tmp_path) == 20 * producer.number, 60)

    def markers() -> None:
        ended = threading.Thread(target=third)
        ended.start()
        while ended.is_alive():
            time.sleep(0.5)
            close_files(producer.folder)

    run_while(job, markers)
    assert records(tmp_path) == 20 * producer.number > 300
