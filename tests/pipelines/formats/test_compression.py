"""Compressed text files: the same rows as the text's, or refused before anything is charged."""

import bz2
import gzip
import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, cast

import pyarrow as pa
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.connectors.files.source import ReadFiles, recorded
from dpstream.pipelines.connectors.files.stream import StreamFiles
from dpstream.pipelines.formats import compression
from dpstream.pipelines.formats import lines as source_lines
from dpstream.pipelines.formats.compression import (
    Unpacked,
    codec_of,
    plain_by_name,
)
from dpstream.pipelines.formats.lines import BrokenFileError
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.jobs.keys import read_public_keys
from dpstream.pipelines.stream.run import run_job
from dpstream.pipelines.tuning.choose import refuse_own_data
from dpstream.state import open as stores
from tests.audit.replays import new_place
from tests.drive import Drive, letters_of, rows_of
from tests.folders import START, FolderReader, MakeFolderJob, data, line, make_folder_job, mark
from tests.folders import write as write_rows
from tests.golden.refusals import Refused
from tests.pipelines.conftest import TEMPLATE
from tests.pipelines.connectors.files.test_source import CANARY, by_hand, run_in_beam, table, write

__all__ = ["make_folder_job"]
MakeJob = Callable[..., Job]
NAMES = {"gzip": ".gz", "bz2": ".bz2", "zstd": ".zst"}
#: First bytes of compressions that are not read.
FOREIGN = {
    "xz": b"\xfd7zXZ\0\0\4", "zip": b"PK\3\4\24\0", "lz4": b"\4\x22\x4d\x18\x64",
    "snappy": b"\xff\6\0\0sNaPpY", "7z": b"7z\xbc\xaf\x27\x1c", "compress": b"\x1f\x9d\x90",
}  # fmt: skip


def pack(codec: str, text: bytes) -> bytes:
    if codec == "zstd":
        return pa.Codec("zstd").compress(text).to_pybytes()
    return gzip.compress(text) if codec == "gzip" else bz2.compress(text)


def halves(codec: str, text: bytes) -> bytes:
    """Two members, the border inside a row, and empty ones around them."""
    parts = [b"", text[: len(text) // 2], text[len(text) // 2 :], b""]
    return b"".join(pack(codec, part) for part in parts)


def put(folder: Path, kind: str, rows: int = 90) -> bytes:
    """A plain file; its text."""
    path = folder / f"a.{kind}"
    write(path, kind, table(rows))
    return path.read_bytes()


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
@pytest.mark.parametrize("codec", NAMES)
@pytest.mark.parametrize("named", [True, False])
def test_the_same_rows_at_the_same_positions(
    tmp_path: Path, make_job: MakeJob, kind: str, codec: str, named: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    job = make_job(kind, pattern="in/*")
    text = put(tmp_path / "in", kind) + b"\xff no row\n"
    (tmp_path / "in" / f"a.{kind}").write_bytes(text)
    expected = by_hand(job)
    assert len(expected[0]) == 90 and len(expected[1]) == 1
    (tmp_path / "in" / f"a.{kind}").unlink()
    packed = tmp_path / "in" / f"a.{kind}{NAMES[codec] if named else ''}"
    for block in (source_lines.BLOCK_BYTES, 64):
        monkeypatch.setattr(source_lines, "BLOCK_BYTES", block)
        for content in (pack(codec, text), halves(codec, text)):
            packed.write_bytes(content)
            assert by_hand(job) == expected
    assert run_in_beam(job) == expected
    bundles = list(Drive(StreamFiles(job).reader, "time", begin=0).all())
    rows = rows_of([batch for bundle in bundles for batch in bundle.records])
    dead = letters_of([batch for bundle in bundles for batch in bundle.dead])
    assert (rows, dead) == expected


def broken(codec: str, text: bytes) -> dict[str, bytes]:
    packed = pack(codec, text)
    middle = bytearray(packed)
    for at in range(len(packed) // 2, len(packed) // 2 + 8):
        middle[at] ^= 0x5A
    damage = {} if codec == "zstd" else {"damaged": bytes(middle)}  # it need not have checksums
    return {
        **damage,
        "cut off": packed[: len(packed) // 2],
        "cut off at its end": packed[:-1],
        "followed by text": packed + text,
        "followed by zeros": packed + bytes(512),
        "followed by half a member": packed + packed[:20],
    }


def refusal_of(job: Job) -> UsageError:
    with pytest.raises(UsageError) as caught:
        ReadFiles(job)
    assert CANARY not in str(caught.value) and caught.value.field == "table.path"
    return caught.value


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
@pytest.mark.parametrize("codec", NAMES)
def test_what_is_not_whole_is_refused(
    tmp_path: Path, make_job: MakeJob, kind: str, codec: str
) -> None:
    job = make_job(kind, pattern="in/*")
    text = put(tmp_path / "in", kind)
    for suffix in ("", NAMES[codec]):
        packed = tmp_path / "in" / f"b.{kind}{suffix}"
        for how, content in broken(codec, text).items():
            packed.write_bytes(content)
            assert f"file {packed.name!r} is no whole {codec} file" in str(refusal_of(job)), how
        packed.write_bytes(pack(codec, text))
        assert len(by_hand(job)[0]) == 180, "it is read again once it has changed"
        packed.unlink()


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_other_compressions_are_refused(tmp_path: Path, make_job: MakeJob, kind: str) -> None:
    job = make_job(kind, pattern="in/*")
    text = put(tmp_path / "in", kind)
    noise = random.Random(9).randbytes(999)
    contents = [(f"b.{kind}", content + noise + text) for content in FOREIGN.values()]
    named = {f"b.{kind}{suffix}": text for suffix in (".gz", ".xz", ".zip", ".br", ".zst", ".GZ")}
    listed = [(f"b.{kind}", content + text) for content in FOREIGN.values() if kind == "csv"]
    for name, content in [*listed, *contents, *named.items(), (f"b.{kind}.gz", b"")]:
        (tmp_path / "in" / name).write_bytes(content)
        words = "is no whole xz file" if b"7zXZ" in content else "but not with gzip, bzip2, zstd"
        assert words in str(refusal_of(job))
        (tmp_path / "in" / name).unlink()


def test_parquet_that_was_compressed_again(tmp_path: Path, make_job: MakeJob) -> None:
    job = make_job("parquet", pattern="in/*")
    write(tmp_path / "in" / "a.gz", "parquet", table(9))
    assert len(by_hand(job)[0]) == 9, "a name alone does not matter here"
    (tmp_path / "in" / "b.parquet").write_bytes(
        gzip.compress((tmp_path / "in" / "a.gz").read_bytes())
    )
    assert "Parquet is compressed inside" in str(refusal_of(job))


def test_nothing_is_charged(tmp_path: Path, refused: Refused) -> None:
    place = new_place(tmp_path / "place")
    source = place.folder / "in.csv"
    text = source.read_bytes()
    source.write_bytes(gzip.compress(text)[:-4])
    refused(lambda: run_job(place.job()))
    assert not any((place.folder / name).exists() for name in ("state", "out"))
    assert place.entries() == []
    source.write_bytes(text)
    run_job(place.job())
    stores.close_all()
    assert len(place.entries()) == 1


@pytest.mark.parametrize("codec", ["gzip", "bz2"])
def test_mutated_files_are_refused_or_whole(tmp_path: Path, make_job: MakeJob, codec: str) -> None:
    """No damage changes a row: checksums tell.  (In zstd they are the writer's choice.)"""
    job, rng, refused = make_job("csv", pattern="in/*"), random.Random(7743), 0
    text = put(tmp_path / "in", "csv")
    expected, packed = by_hand(job), pack(codec, text)
    for number in range(150):
        content = bytearray(packed)
        for _ in range(rng.randrange(1, 4)):
            content[rng.randrange(10, len(content))] ^= 1 << rng.randrange(8)
        for old in (tmp_path / "in").iterdir():
            old.unlink()
        (tmp_path / "in" / f"{number}.csv").write_bytes(bytes(content))
        try:
            assert by_hand(job) == expected
        except UsageError as error:
            assert CANARY not in str(error)
            refused += 1
    assert refused > 100


HEADS = {
    "gzip": b"\x1f\x8b\x08\0 hello",
    "bzip2": b"BZh91AY&SY hello",
    "zstd": b"\x28\xb5\x2f\xfd hello",
    "xz": b"\xfd7zXZ\0 hello",
    "a whole member": gzip.compress(b'{"user": "x"}\n'),
}


@pytest.mark.parametrize("head", HEADS)
def test_no_row_can_make_a_file_a_compressed_one(
    tmp_path: Path, make_folder_job: MakeFolderJob, head: str
) -> None:
    """The first bytes of JSON Lines are a row's: it is malformed, and the others are read."""
    assert b"\n" not in HEADS[head]
    write_rows(tmp_path / "in" / "a.jsonl", data(50))
    text = (tmp_path / "in" / "a.jsonl").read_bytes()
    rows = []
    for first in (b"hello", HEADS[head]):
        (tmp_path / "in" / "a.jsonl").write_bytes(first + b"\n" + text)
        run = FolderReader(make_folder_job("jsonl"))
        mark(tmp_path / "in", START + 1, line("a.jsonl", START))
        run.look()
        assert run.letters("a.jsonl") == [(0, "malformed")]
        rows.append(run.rows_read())
    assert len(rows[0]) == 50 and rows[0] == rows[1]


#: First bytes of compressions that a program could write as text, as it writes rows.
TEXTS = {
    "bzip2": b"BZh91AY&SY", "lzip": b"LZIP\x01", "zip": b"PK\3\4", "lz4": b"\4\x22\x4d\x18",
}  # fmt: skip


@pytest.mark.parametrize("head", TEXTS)
def test_no_row_stops_a_job(tmp_path: Path, make_job: MakeJob, head: str) -> None:
    """A user who chooses a row's text cannot have the file of all users refused."""
    job, text = make_job("jsonl"), put(tmp_path / "in", "jsonl")
    for more in ("", "é" * 5_000):
        first = TEXTS[head] + more.encode() + b'", "x": 1}\n'
        (tmp_path / "in" / "a.jsonl").write_bytes(first + text)
        rows, dead = by_hand(job)
        assert len(rows) == 90 and dead == {(0, 0, "malformed")}
        (tmp_path / "in" / "a.jsonl").write_bytes(TEXTS[head] + random.Random(7).randbytes(999))
        refusal_of(job)
        (tmp_path / "in" / "a.jsonl").unlink()
        (tmp_path / "in" / "a.jsonl.bz2").write_bytes(first + text)
        refusal_of(make_job("jsonl", pattern="in/*"))
        (tmp_path / "in" / "a.jsonl.bz2").unlink()
        job = make_job("jsonl")


def test_broken_files_of_any_length_are_no_text(tmp_path: Path, make_job: MakeJob) -> None:
    """What is cut off is refused where a reader could tell it from text at all."""
    job, text = make_job("jsonl"), put(tmp_path / "in", "jsonl")
    for codec in NAMES:
        packed = pack(codec, text)
        for size in range(len(TEXTS["bzip2"]) + 16, len(packed), 7):
            (tmp_path / "in" / "a.jsonl").write_bytes(packed[:size])
            refusal_of(job)


def test_a_sabotaged_one_that_believes_the_first_row(
    tmp_path: Path, make_folder_job: MakeFolderJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compression, "is_complete", lambda *_: True)
    with pytest.raises(AssertionError):
        test_no_row_can_make_a_file_a_compressed_one(tmp_path, make_folder_job, "gzip")


@pytest.mark.parametrize("stamp", ["manifest", "closed"])
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_folders_that_grow(
    tmp_path: Path, make_folder_job: MakeFolderJob, kind: str, stamp: str
) -> None:
    folder, plain = tmp_path / "in", tmp_path / f"plain.{kind}"
    job = make_folder_job(kind, stamp)
    write_rows(plain, data(3_000))
    text = plain.read_bytes()
    for codec, suffix in NAMES.items():
        (folder / f"{codec}.{kind}{suffix}").write_bytes(halves(codec, text))
    (folder / f"cut.{kind}.gz").write_bytes(gzip.compress(text)[:-3])
    (folder / f"none.{kind}.gz").write_bytes(text)
    names = sorted(path.name for path in folder.iterdir())
    mark(folder, START + 1, *(line(name, START, rows=3_000) for name in names))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source_lines, "BLOCK_BYTES", 4096)
        if stamp == "closed":
            patch.setattr("dpstream.pipelines.connectors.folder.store.MARGIN", 0)
            patch.setattr(
                "dpstream.pipelines.connectors.folder.source.wall_micros", lambda: 1 << 60
            )
        runs = [FolderReader(job) for _ in range(2)]
        for run in runs:
            run.look()
    rows = runs[0].rows_read()
    assert rows == runs[1].rows_read()
    by_file = {name: runs[0].letters(name) for name in names}
    for codec, suffix in NAMES.items():
        assert by_file[f"{codec}.{kind}{suffix}"] == []
    cut = by_file[f"cut.{kind}.gz"]
    assert cut[0][1] == "unreadable_rest" and 0 < cut[0][0] < 3_000
    assert len(rows) == 3 * 3_000 + cut[0][0]
    assert by_file[f"none.{kind}.gz"][0] == (0, "unreadable_file")
    assert cut == runs[1].letters(f"cut.{kind}.gz")


@pytest.mark.parametrize("codec", NAMES)
def test_a_bomb_is_read_in_bounded_memory(codec: str) -> None:
    bomb = pack(codec, bytes(16 << 20)) * 16
    assert len(bomb) < 1 << 20
    text, most, before = Unpacked(io.BytesIO(bomb), codec), 0, pa.total_allocated_bytes()
    for _ in source_lines.line_blocks(cast(BinaryIO, text)):
        most = max(most, pa.total_allocated_bytes() - before)
    assert text.read(1) == b"" and most < 64 << 20


def test_public_key_lists(tmp_path: Path, make_job: MakeJob, refused: Refused) -> None:
    text = b"\xef\xbb\xbfkey,note\n" + "".join(f"k{i},é\n" for i in range(500)).encode()
    job_text = TEMPLATE.format(kind="csv", pattern="x", sink="csv") + 'public_keys = "keys.csv"\n'
    (tmp_path / "dpstream.toml").write_text(job_text)
    jobs = []
    for codec in ("", *NAMES):
        (tmp_path / "keys.csv").write_bytes(halves(codec, text) if codec else text)
        jobs.append(load_job(tmp_path / "dpstream.toml"))
        assert read_public_keys(jobs[-1]).num_rows == 500
    assert len({job.plan.hash for job in jobs}) == 1
    for content in (*broken("gzip", text).values(), *FOREIGN.values()):
        (tmp_path / "keys.csv").write_bytes(content)
        refused(load_job, tmp_path / "dpstream.toml")


def test_recorded_files_of_a_source_without_end(make_folder_job: MakeFolderJob) -> None:
    job = make_folder_job("parquet")
    for name, kind in (("x.csv.gz", "csv"), ("x.JSONL.ZST", "jsonl"), ("*.parquet", "parquet")):
        assert recorded(job, f"/data/{name}", "--proxy").source.kind == kind


def test_a_compressed_copy_is_the_jobs_own_data(
    tmp_path: Path, make_job: MakeJob, refused: Refused
) -> None:
    job = make_job("csv")
    text = put(tmp_path / "in", "csv")
    for codec in NAMES:
        (tmp_path / "copy.csv").write_bytes(halves(codec, text))
        refused(refuse_own_data, job, recorded(job, str(tmp_path / "copy.csv"), "--proxy"))
    (tmp_path / "copy.csv").write_bytes(gzip.compress(text + b"a,b,c\n"))
    refuse_own_data(job, recorded(job, str(tmp_path / "copy.csv"), "--proxy"))


def test_a_compressed_copy_is_the_folders_own_data(
    tmp_path: Path, make_folder_job: MakeFolderJob, refused: Refused
) -> None:
    job = make_folder_job("jsonl")
    write_rows(tmp_path / "in" / "a.jsonl", data(50))
    text = (tmp_path / "in" / "a.jsonl").read_bytes()
    for own, copy in ((text, gzip.compress(text)), (gzip.compress(text), text)):
        (tmp_path / "in" / "a.jsonl").write_bytes(own)
        (tmp_path / "copy.jsonl").write_bytes(copy)
        refused(refuse_own_data, job, recorded(job, str(tmp_path / "copy.jsonl"), "--proxy"))


def test_faults_of_the_system_are_not_the_files() -> None:
    class Failing(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError(5, "of the disk")

    with pytest.raises(OSError, match="of the disk") as caught:
        Unpacked(Failing(b""), "gzip").read(10)
    assert caught.value.errno == 5
    with pytest.raises(BrokenFileError):
        Unpacked(io.BytesIO(b"\x1f\x8b"), "gzip").read(10)


def test_a_sabotaged_one_that_trusts_the_name_alone(
    tmp_path: Path, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job("jsonl")
    text = put(tmp_path / "in", "jsonl")
    (tmp_path / "in" / "a.jsonl").write_bytes(gzip.compress(text))
    assert len(by_hand(job)[0]) == 90
    monkeypatch.setattr(compression, "_READ", {})
    assert len(by_hand(job)[0]) == 0 and len(by_hand(job)[1]) > 0


def test_magic_numbers_are_no_text() -> None:
    for text in (
        b"",
        b"a,b\n",
        b'{"a": 1}',
        b"BZh9 columns,b\n",
        b"PK,b\n",
        b"Rar,b\n",
        b"LZIP,b\n",
    ):
        assert codec_of(text, "a.csv") is None
    assert plain_by_name(io.BytesIO(b"a,b\n"), "x.csv", "csv").read() == b"a,b\n"
