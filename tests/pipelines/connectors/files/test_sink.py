"""The sink of files: releases are written once, compared, and repaired where they are damaged."""

import hashlib
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from dpstream.accounting.errors import PolicyError
from dpstream.dp_transforms.batches import (
    DEAD_LETTER_SCHEMA,
    TRIGGER,
    WINDOW,
    ArrowBatchCoder,
)
from dpstream.pipelines.connectors import write as sinks
from dpstream.pipelines.connectors.files.sink import FileSink, Verdict, compare_file, release_path
from dpstream.pipelines.connectors.registry import sink_of
from dpstream.pipelines.connectors.sink import PublishedRelease, name_of_release
from dpstream.pipelines.connectors.write import (
    WriteDeadLetters,
    WriteReleases,
    dead_letter_folder,
    write_dead_letters,
)
from dpstream.pipelines.formats import encodings as sink_formats
from dpstream.pipelines.formats.encodings import encode, name_of, read_releases
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.project.job_section import SinkKind
from dpstream.state.durable import drafted, put_entry, put_once
from tests.golden.refusals import Refused
from tests.written import read_dead_letters, write_release, write_releases

KINDS = ("parquet", "csv", "jsonl")


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bytes_and_other_values(kind: str) -> None:
    assert compare_file(encode(BATCH, kind), BATCH, kind) is Verdict.SAME
    assert compare_file(encode(release(0, 1, ["a", "b"], 0.2), kind), BATCH, kind) is Verdict.OTHER
    assert compare_file(encode(release(0, 1, ["a"]), kind), BATCH, kind) is Verdict.OTHER


@pytest.mark.parametrize("kind", KINDS)
def test_what_no_run_can_have_written_is_damaged(kind: str) -> None:
    data = encode(BATCH, kind)
    for broken in (data[:-9], b"", b"\xff" * 40):
        other = kind == "jsonl" and not broken  # a release without rows
        assert compare_file(broken, BATCH, kind) is (Verdict.OTHER if other else Verdict.DAMAGED)


def test_what_says_the_same_in_other_bytes_is_damaged() -> None:
    data = encode(BATCH, "jsonl")
    assert compare_file(data.replace(b'":', b'" :'), BATCH, "jsonl") is Verdict.DAMAGED


def test_other_bytes_are_the_same_only_of_another_version_of_the_library() -> None:
    written = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_batches([BATCH]), written, compression="gzip")
    other = written.getvalue().to_pybytes()
    assert compare_file(other, BATCH, "parquet") is Verdict.DAMAGED
    version = pa.__version__.encode()
    older = other.replace(b"version " + version, b"version " + b"1" * (len(version) - 4) + b".1.1")
    assert len(older) == len(other) and older != other
    assert compare_file(older, BATCH, "parquet") is Verdict.SAME
    foreign = other.replace(b"parquet-cpp-arrow", b"parquet-cpp-ARROW")
    assert compare_file(foreign, BATCH, "parquet") is Verdict.DAMAGED


def test_a_sink_that_was_begun_without_a_guard_goes_on() -> None:
    batch = release(0, 1, ["=1+1"])
    for guard in (True, False):
        other = encode(batch, "csv", not guard)
        assert other != encode(batch, "csv", guard)
        assert compare_file(other, batch, "csv", guard) is Verdict.SAME


MakeJob = Callable[..., Job]

SCHEMA = pa.schema(
    [
        ("release_id", pa.binary(16)),
        ("window_start", pa.timestamp("us", "UTC")),
        ("trigger", pa.int32()),
        ("key", pa.string()),
        ("records", pa.float64()),
    ]
)


def release(window: int, trigger: int, keys: list[str], value: float = 0.1) -> pa.RecordBatch:
    rows = [
        {
            "release_id": bytes(range(7, 23)),
            "window_start": 10**15 + window,
            "trigger": trigger,
            "key": k,
            "records": value + i,
        }
        for i, k in enumerate(keys)
    ]
    metadata = {WINDOW: str(window), TRIGGER: str(trigger)}
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA).replace_schema_metadata(metadata)


BATCH = release(0, 1, ["a", "b"])


def files(folder: Path) -> dict[str, bytes]:
    paths = (p for p in folder.rglob("*") if p.is_file())
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in paths}


@pytest.mark.parametrize("kind", KINDS)
def test_one_file_per_window_and_trigger_also_when_empty(tmp_path: Path, kind: str) -> None:
    for window, trigger, keys in ((12, 5, ["a", "b"]), (12, 6, []), (0, 1, ["x,\"\n'"])):
        assert write_release(tmp_path, kind, release(window, trigger, keys)) == (window, trigger)
    assert sorted(files(tmp_path)) == [
        f"window-000000/trigger-000001.{kind}",
        f"window-000012/trigger-000005.{kind}",
        f"window-000012/trigger-000006.{kind}",
    ]
    table = read_releases(tmp_path)
    assert table.column("key").to_pylist() == ["x,\"\n'", "a", "b"]
    assert table.column("records").to_pylist() == [0.1, 0.1, 1.1]
    assert table.column("trigger").to_pylist() == [1, 5, 5]


@pytest.mark.parametrize("kind", KINDS)
def test_many_at_once_are_the_same_files(tmp_path: Path, kind: str, refused: Refused) -> None:
    batches = [release(n % 3, n, [f"k{i}" for i in range(n)]) for n in range(20)]
    names = [write_release(tmp_path / "one", kind, batch) for batch in batches]
    assert write_releases(tmp_path / "all", kind, batches[:7]) == names[:7]
    assert write_releases(tmp_path / "all", kind, batches) == names  # some are there already
    assert files(tmp_path / "all") == files(tmp_path / "one")
    other = [*batches[:-1], release(19 % 3, 19, ["z"])]
    refused(write_releases, tmp_path / "all", kind, other)
    assert files(tmp_path / "all") == files(tmp_path / "one")


def test_a_bundle_writes_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "SINK_RELEASES", 4)
    monkeypatch.setattr(sinks, "SINK_ROWS", 9)
    calls = []
    real = FileSink.write

    def counted(*args: Any) -> Any:
        calls.append(len(args[1]))
        return real(*args)

    monkeypatch.setattr(FileSink, "write", counted)
    writer = sinks._WriteRelease(FileSink(tmp_path, "parquet"))
    writer.start_bundle()
    out = [name for n in range(10) for name in writer.process(release(0, n, ["k"] * n))]
    out += [late.value for late in writer.finish_bundle()]
    assert out == [(0, n) for n in range(10)]
    assert calls == [4, 2, 2, 2] and len(files(tmp_path)) == 10


@pytest.mark.parametrize("kind", KINDS)
def test_with_a_schema_types_survive_every_format(tmp_path: Path, kind: str) -> None:
    write_release(tmp_path, kind, release(1, 1, []))
    write_release(tmp_path, kind, release(1, 2, ["007", "true", "2024-01-01"]))
    table = read_releases(tmp_path, SCHEMA)
    assert table.schema.equals(SCHEMA)
    assert table.column("key").to_pylist() == ["007", "true", "2024-01-01"]
    assert table.column("release_id").to_pylist() == [bytes(range(7, 23))] * 3
    assert read_releases(tmp_path / "none", SCHEMA).num_rows == 0
    assert read_releases(tmp_path / "none").num_rows == 0


@pytest.mark.parametrize("kind", KINDS)
def test_writing_again_is_a_no_op_and_other_content_is_refused(
    tmp_path: Path, kind: str, refused: Refused
) -> None:
    first = release(3, 4, ["CANARY"])
    write_release(tmp_path, kind, first)
    path = tmp_path / release_path(3, 4, kind)
    before = path.stat()
    write_release(tmp_path, kind, first)
    after = path.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    content = path.read_bytes()
    for other in (release(3, 4, ["CANARY"], 0.2), release(3, 4, []), release(3, 4, ["D"])):
        caught = refused(write_release, tmp_path, kind, other)
        assert "CANARY" not in str(caught)
    assert path.read_bytes() == content
    assert list(files(tmp_path)) == [f"window-000003/trigger-000004.{kind}"]


def test_parquet_of_another_library_version_is_the_same_content(
    tmp_path: Path, refused: Refused
) -> None:
    batch = release(3, 4, ["a"])
    path = tmp_path / release_path(3, 4, "parquet")
    path.parent.mkdir()
    here = f"version {pa.__version__}".encode()
    for version in (b"version 19.0.0", b"version 99.0.0"):
        there = encode(batch, "parquet").replace(here, version)
        assert there.count(version) == 1
        path.write_bytes(there)
        write_release(tmp_path, "parquet", batch)
        assert path.read_bytes() == there
        refused(write_release, tmp_path, "parquet", release(3, 4, ["a"], 0.2))
        assert path.read_bytes() == there


def flipped(data: bytes, bit: int) -> bytes:
    """The bytes with one bit changed."""
    out = bytearray(data)
    out[bit // 8] ^= 1 << bit % 8
    return bytes(out)


def test_every_bit_of_a_parquet_release_is_noticed_and_mended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = release(3, 4, ["a", "b"])
    write_release(tmp_path, "parquet", batch)
    path = tmp_path / release_path(3, 4, "parquet")
    content, tally = path.read_bytes(), Counter[str]()
    for bit in range(0, 8 * len(content), 5):  # odd steps: every bit of a byte in turn
        damaged = flipped(content, bit)
        tally[compare_file(damaged, batch, "parquet").value] += 1
        assert damaged != content
    # "same" is a flip that makes the version of the library another one; nothing else is.
    assert tally["other"] == 0 and tally["same"] <= 20 and tally["damaged"] > 2_000, tally
    path.write_bytes(flipped(content, 100))
    assert not FileSink(tmp_path, "parquet").holds(batch)
    assert FileSink(tmp_path, "parquet").same(PublishedRelease(3, 4, path), batch)
    assert path.read_bytes() == content
    assert "window 3, trigger 4 was damaged" in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_a_release_that_was_cut_is_written_again_or_refused(
    tmp_path: Path, kind: SinkKind, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = release(3, 4, ["a", "b"])
    write_release(tmp_path, kind, batch)
    path = tmp_path / release_path(3, 4, kind)
    content, mended = path.read_bytes(), 0
    for left in range(0, len(content), max(1, len(content) // 60)):
        path.write_bytes(content[:left])
        try:
            write_release(tmp_path, kind, batch)
        except PolicyError as error:
            assert "remove it and run again" in error.fix and kind != "parquet"
            assert path.read_bytes() == content[:left]
        else:
            mended += 1
            assert path.read_bytes() == content
            assert "is written again" in capsys.readouterr().err
    assert mended >= 20


def test_a_flipped_number_of_a_text_is_noticed(tmp_path: Path, refused: Refused) -> None:
    """It may be another release: that is for a person to tell."""
    batch = release(3, 4, ["a"], 0.25)
    for kind in ("csv", "jsonl"):
        write_release(tmp_path, kind, batch)
        path = tmp_path / release_path(3, 4, kind)
        path.write_bytes(path.read_bytes().replace(b"0.25", b"0.35"))
        refused(write_release, tmp_path, kind, batch)
        path.write_bytes(path.read_bytes().replace(b"0.35", b"0.\xb5"))
        write_release(tmp_path, kind, batch)
        assert b"0.25" in path.read_bytes()


def test_what_a_restored_store_is_compared_with_is_not_mended(
    tmp_path: Path, refused: Refused
) -> None:
    batch = release(3, 4, ["a"])
    write_release(tmp_path, "parquet", batch)
    path = tmp_path / release_path(3, 4, "parquet")
    damaged = flipped(path.read_bytes(), 100)
    path.write_bytes(damaged)
    sink = FileSink(tmp_path, "parquet")
    sink.prepare(restoring=True)
    for attempt in (
        lambda: sink.same(PublishedRelease(3, 4, path), batch),
        lambda: sink.write([batch], only_compare=True),
    ):
        refused(attempt)
    assert path.read_bytes() == damaged


def test_bytes_depend_on_the_content_only() -> None:
    code = (
        "import sys, pyarrow as pa\n"
        "from dpstream.pipelines.formats.encodings import encode\n"
        "batch = pa.ipc.open_stream(sys.stdin.buffer).read_next_batch()\n"
        "for k in ('parquet', 'csv', 'jsonl'): sys.stdout.buffer.write(encode(batch, k))\n"
    )
    batch = release(1, 2, ["a", "b"])
    for seed, zone in (("0", "UTC"), ("1", "Asia/Tokyo")):
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=ArrowBatchCoder().encode(batch),
            env={**os.environ, "PYTHONHASHSEED": seed, "TZ": zone},
            capture_output=True,
            check=True,
        )
        assert done.stdout == b"".join(sink_formats.encode(batch, k) for k in KINDS)
    sliced = release(1, 2, ["0", "a", "b"], -0.9).slice(1)
    for kind in KINDS:
        assert sink_formats.encode(sliced, kind) == sink_formats.encode(
            pa.RecordBatch.from_pylist(sliced.to_pylist(), schema=sliced.schema), kind
        )


def test_two_writers_at_once_agree_on_one(tmp_path: Path) -> None:
    outcomes: list[str] = []

    def work(value: float) -> None:
        try:
            write_release(tmp_path, "jsonl", release(1, 1, ["a"] * 2000, value))
            outcomes.append("written")
        except PolicyError:
            outcomes.append("refused")

    threads = [threading.Thread(target=work, args=(float(i % 2),)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("written") == 4
    assert len(files(tmp_path)) == 1


def test_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    write_release(tmp_path, "csv", release(1, 1, ["a"]))
    write_release(tmp_path, "csv", release(1, 1, ["a"]))
    refused(lambda: write_release(tmp_path, "csv", release(1, 1, ["b"])))
    assert list(files(tmp_path)) == ["window-000001/trigger-000001.csv"]


def test_without_hard_links_the_first_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    theirs = encode(release(1, 1, ["b"]), "csv")

    def beaten(_: object, path: Path) -> None:
        path.write_bytes(theirs)
        raise PermissionError(1, "no links here")

    monkeypatch.setattr(os, "link", beaten)
    refused(lambda: write_release(tmp_path, "csv", release(1, 1, ["a"])))
    assert files(tmp_path) == {"window-000001/trigger-000001.csv": theirs}


def test_a_failed_link_is_no_reason_to_overwrite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "link", fail)
    refused(lambda: write_release(tmp_path, "csv", release(1, 1, ["a"])))
    assert files(tmp_path) == {}


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What was flushed to disk."""
    paths, real = [], os.fsync

    def fsync(descriptor: int) -> None:
        paths.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return paths


def test_files_of_a_writer_that_died_are_flushed_by_the_next(
    tmp_path: Path, flushed: list[Path]
) -> None:
    """It was killed between the file's entry and the folder's flush."""
    batches, folder = [release(1, 1, ["a"]), release(2, 1, ["a"])], tmp_path / "out"
    for batch in batches:
        put_entry(
            folder / release_path(*name_of_release(batch), "csv"),
            sink_formats.encode(batch, "csv"),
        )
    flushed.clear()
    write_releases(folder, "csv", batches)
    assert set(flushed) == {folder, folder / "window-000001", folder / "window-000002"}


def test_a_manifest_is_flushed_with_the_folders_above_it(
    tmp_path: Path, flushed: list[Path]
) -> None:
    path = tmp_path / "new" / "also" / "out" / "run.json"
    above = {tmp_path, tmp_path / "new", tmp_path / "new" / "also", path.parent}
    for fresh in (True, False):
        flushed.clear()
        assert put_once(path, b"x") == fresh
        assert above <= set(flushed)


def test_drafts_of_the_dead_are_removed(tmp_path: Path) -> None:
    """Those of the living stay, and so does what is no draft of this program."""
    write_release(tmp_path, "csv", release(1, 1, ["a"]))
    window = tmp_path / "window-000001"
    foreign = window / ".trigger-000001.csv.0.tmp"
    dead = [
        window / ".trigger-000002.csv.0.dpstream-draft",
        tmp_path / ".run.json.0.dpstream-draft",
    ]
    for draft in (foreign, *dead):
        draft.write_bytes(b"half")
    os.utime(foreign, (0, 0))
    with drafted(window / "trigger-000003.csv") as alive:
        FileSink(tmp_path, "csv").prepare()
        assert sorted(window.iterdir()) == [foreign, alive, window / "trigger-000001.csv"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["window-000001"]


@pytest.mark.parametrize("call", ["fsync", "link", "mkdir"])
def test_disk_errors_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, refused: Refused
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        if call == "link":
            patch.setattr(os, "replace", fail)
        refused(lambda: write_release(tmp_path, "parquet", release(1, 1, ["a"])))
    assert files(tmp_path) == {}
    write_release(tmp_path, "parquet", release(1, 1, ["a"]))
    assert len(files(tmp_path)) == 1


def test_a_release_without_a_name_is_a_bug(tmp_path: Path, refused: Refused) -> None:
    refused(
        lambda: write_release(tmp_path, "csv", release(1, 1, ["a"]).replace_schema_metadata(None))
    )


def test_unreadable_releases_are_named(tmp_path: Path, refused: Refused) -> None:
    write_release(tmp_path, "parquet", release(1, 1, ["a"]))
    (tmp_path / release_path(1, 1, "parquet")).write_bytes(b"CANARY")
    caught = refused(read_releases, tmp_path)
    assert "CANARY" not in str(caught)


def letters(*rows: tuple[int, int, str]) -> pa.RecordBatch:
    names = DEAD_LETTER_SCHEMA.names
    return pa.RecordBatch.from_pylist(
        [dict(zip(names, r, strict=True)) for r in rows], schema=DEAD_LETTER_SCHEMA
    )


def test_dead_letters_are_counted_once(tmp_path: Path) -> None:
    one, two = letters((0, 5, "malformed"), (0, 2, "time")), letters((1, 0, "unit"))
    assert write_dead_letters(tmp_path, []) is None
    assert write_dead_letters(tmp_path, [one.slice(0, 0)]) is None
    first = write_dead_letters(tmp_path, [one, two])
    assert write_dead_letters(tmp_path, [two, one]) == first
    assert write_dead_letters(tmp_path, [one]) != first
    assert len(files(tmp_path)) == 2
    assert [tuple(r.values()) for r in read_dead_letters(tmp_path).to_pylist()] == [
        (0, 2, "time"),
        (0, 5, "malformed"),
        (1, 0, "unit"),
    ]
    assert read_dead_letters(tmp_path / "none").num_rows == 0


@pytest.mark.parametrize("kind", KINDS)
def test_through_beam(make_job: MakeJob, kind: str) -> None:
    job = make_job(sink=kind)
    batches = [release(w, t, ["a", "b"][: t - 1]) for w in range(3) for t in (1, 2, 3)]
    dead = [letters((0, i, "malformed")) for i in range(20)]
    for _ in range(2):
        with beam.Pipeline(runner=FnApiRunner()) as pipeline:
            _ = pipeline | "R" >> create(batches) | WriteReleases(sink_of(job))
            _ = pipeline | "D" >> create(dead) | WriteDeadLetters(job)
    sink = Path(job.sink.path)
    assert len(files(sink)) == 9
    assert read_releases(sink).num_rows == 3 * (0 + 1 + 2)
    folder = dead_letter_folder(job)
    assert folder == sink.parent / "dead_letter" / job.name
    assert read_dead_letters(folder).num_rows == 20


def test_a_changed_release_stops_a_pipeline(make_job: MakeJob) -> None:
    job = make_job(sink="jsonl")
    write_release(Path(job.sink.path), "jsonl", release(0, 1, ["CANARY"]))
    with pytest.raises(Exception) as caught, beam.Pipeline(runner=FnApiRunner()) as pipeline:
        _ = pipeline | create([release(0, 1, ["CANARY", "b"])]) | WriteReleases(sink_of(job))
    assert "PolicyError: sink.path: holds another release" in str(caught.value)
    assert "CANARY" not in str(caught.value)


def create(batches: list[pa.RecordBatch]) -> Any:
    encoded = [ArrowBatchCoder().encode(b) for b in batches]
    decode = beam.Map(ArrowBatchCoder().decode).with_output_types(pa.RecordBatch)
    return f"Create{hashlib.sha256(encoded[0]).hexdigest()}" >> beam.Create(encoded) | decode


STRANGE = [
    "window-000001.bak/trigger-000002.parquet",
    "window-000001-000003/trigger-000002.parquet",
    "window-1/trigger-000002.parquet",
    "window-000003/trigger-2.parquet",
    "window-000003/trigger-old-000002.parquet",
    "window-000003/trigger-000002.000001.parquet",
    "window-000003/trigger-٠٠٠٠٠٢.parquet",
]


def released(folder: Path, window: int, trigger: int) -> Path:
    batch = pa.record_batch({"records": [1.0]})
    where = {WINDOW: str(window), TRIGGER: str(trigger)}
    write_release(folder, "parquet", batch.replace_schema_metadata(where))
    return folder / release_path(window, trigger, "parquet")


@pytest.mark.parametrize("name", STRANGE)
def test_a_copy_beside_a_release_is_no_release_of_this_run(
    tmp_path: Path, name: str, refused: Refused
) -> None:
    path = released(tmp_path, 1, 2)
    sink = FileSink(tmp_path, "parquet")
    assert [tuple(one) for one in sink.published()] == [(1, 2, path)]
    copy = tmp_path / name
    copy.parent.mkdir(exist_ok=True)
    shutil.copy(path, copy)
    refused(lambda: list(sink.published()))


def test_names_of_large_numbers_are_longer(tmp_path: Path) -> None:
    released(tmp_path, 12_345_678, 1_000_000)
    sink = FileSink(tmp_path, "parquet")
    assert [one[:2] for one in sink.published()] == [(12_345_678, 1_000_000)]


def test_a_copied_folder_has_no_number() -> None:
    assert name_of(Path("out/window-000001/trigger-000002.csv")) == (1, 2)
    assert name_of(Path("out/window-000001.bak/trigger-000002.csv")) == (-1, 2)
    assert name_of(Path("out/window-000001/trigger-x.csv")) == (1, -1)
