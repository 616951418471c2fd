"""File sources: positions, dead letters, and independence of every row from its neighbours.

Recorded files in the place of a source: their kind by their names, errors by their option.
"""

import hashlib
import io
import json
import random
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import apache_beam as beam
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from dpstream.accounting.errors import DpstreamError, RunError, UsageError
from dpstream.dp_transforms.batches import (
    DEAD_LETTER_SCHEMA,
    OFFSET,
    PARTITION,
    ROWS,
    ArrowBatchCoder,
)
from dpstream.pipelines.connectors.files.source import (
    ReadFiles,
    named_by,
    pieces,
    read_piece,
    recorded,
)
from dpstream.pipelines.connectors.input_files import fingerprint_parts, manifest
from dpstream.pipelines.connectors.inputs import positioned, refusal
from dpstream.pipelines.formats import lines as source_lines
from dpstream.pipelines.formats.rows import Reason, Refused, Rows
from dpstream.pipelines.formats.texts import read_csv, read_jsonl
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.project.source import Source
from tests.golden import refusals

MakeJob = Callable[..., Job]
COLUMNS = ("user", "key", "time", "value")
CANARY = "CANARY7741"
BOM = b"\xef\xbb\xbf"


def table(rows: int, first: int = 0) -> pa.Table:
    numbers = range(first, first + rows)
    return pa.table(
        {
            "user": [f"{CANARY}u{i % 7}" for i in numbers],
            "note": ["not needed"] * rows,
            "key": [f"{CANARY}k{i % 3}" for i in numbers],
            "time": pa.array([1_704_067_200_000_000 + i for i in numbers], pa.timestamp("us")),
            "value": [float(i % 11) for i in numbers],
        }
    )


def write(path: Path, kind: str, data: pa.Table) -> None:
    if kind == "parquet":
        pq.write_table(data, path, row_group_size=40, write_page_checksum=True)
        return
    rows = data.to_pylist()
    for row in rows:
        row["time"] = row["time"].isoformat() + "Z"
    if kind == "csv":
        lines = [",".join(data.column_names)]
        lines += [",".join(f'"{v}"' if i % 2 else str(v) for i, v in enumerate(r.values()))
                  for r in rows]  # fmt: skip
    else:
        lines = [json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")


def by_hand(job: Job) -> tuple[dict[tuple[int, int], dict[str, Any]], set[tuple[int, int, str]]]:
    """Rows by position and dead letters, read without Beam."""
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    dead: set[tuple[int, int, str]] = set()
    for piece in pieces(job):
        for part in read_piece(piece, job.columns):
            if isinstance(part, Refused):
                letters = refusal(part, piece[1]).to_pylist()
                dead |= {(x["partition"], x["offset"], x["reason"]) for x in letters}
                continue
            for batch in positioned(part, piece[1], job.batch_rows):
                collect(batch, job, rows)
    return rows, dead


def collect(batch: pa.RecordBatch, job: Job, into: dict[tuple[int, int], dict[str, Any]]) -> None:
    assert batch.schema.names == list(job.columns)
    assert 0 < batch.num_rows <= job.batch_rows
    runs = [list(map(int, batch.schema.metadata[k].split(b","))) for k in (PARTITION, OFFSET)]
    rows = batch.schema.metadata.get(ROWS, str(batch.num_rows).encode())
    runs.append(list(map(int, rows.split(b","))))
    places = [(p, o + i) for p, o, n in zip(*runs, strict=True) for i in range(n)]
    for place, row in zip(places, batch.to_pylist(), strict=True):
        assert place not in into, "a position is given once"
        into[place] = row


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_every_row_has_one_position_whatever_the_batch_size(
    tmp_path: Path, make_job: MakeJob, kind: str
) -> None:
    make_job(kind)
    for name, count, first in (("b", 105, 500), ("a", 90, 0), ("c", 1, 900)):
        write(tmp_path / "in" / f"{name}.{kind}", kind, table(count, first))
    seen = [by_hand(make_job(kind, batch_rows=n)) for n in (1, 7, 1000)]
    rows, dead = seen[0]
    assert not dead and seen[1] == seen[0] and seen[2] == seen[0]
    assert sorted(rows) == [(0, i) for i in range(90)] + [(1, i) for i in range(105)] + [(2, 0)]
    assert rows[1, 3]["user"] == f"{CANARY}u{503 % 7}"
    assert float(rows[1, 3]["value"]) == 503 % 11
    assert str(rows[2, 0]["time"]).startswith("2024-01-01")


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_through_beam(tmp_path: Path, make_job: MakeJob, kind: str) -> None:
    job = make_job(kind, batch_rows=33)
    write(tmp_path / "in" / f"a.{kind}", kind, table(90))
    broken = b"" if kind == "csv" else b"\xff broken \xff\n"
    (tmp_path / "in" / f"b.{kind}").write_bytes(broken)
    rows, dead = run_in_beam(job)
    assert (rows, dead) == by_hand(job)
    assert len(rows) == 90 and len(dead) == 1


def run_in_beam(job: Job) -> tuple[Any, Any]:
    """What `ReadFiles` gives; workers hand it over in files."""

    def keep(batch: pa.RecordBatch, folder: str) -> None:
        data = ArrowBatchCoder().encode(batch)
        (Path(folder) / hashlib.sha256(data).hexdigest()).write_bytes(data)

    out = {name: tempfile.mkdtemp(dir=job.path.parent) for name in ("records", "dead_letter")}
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        read = pipeline | ReadFiles(job)
        for name, folder in out.items():
            _ = read[name] | name >> beam.Map(keep, folder)
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    dead: set[tuple[int, int, str]] = set()
    for path in Path(out["records"]).iterdir():
        collect(ArrowBatchCoder().decode(path.read_bytes()), job, rows)
    for path in Path(out["dead_letter"]).iterdir():
        batch = ArrowBatchCoder().decode(path.read_bytes())
        assert batch.schema.equals(DEAD_LETTER_SCHEMA)
        dead |= {tuple(r.values()) for r in batch.to_pylist()}
    return rows, dead


def test_manifest_order_and_identity(tmp_path: Path, make_job: MakeJob) -> None:
    job = make_job("csv", pattern="in/**/*.csv")
    names = ["b/2.csv", "a.csv", "b/10.csv", "Z.csv", "ä.csv"]
    for name in names:
        (tmp_path / "in" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_text(f"user,key,time,value\n{name},k,t,1\n")
    files = manifest(job)
    assert [f.name for f in files] == sorted(names)
    assert [f.partition for f in files] == list(range(5))
    first = fingerprint_parts(job)
    assert first == fingerprint_parts(job)
    assert [p[0] for p in first] == sorted(names)
    assert first[0][1] == (tmp_path / "in" / "Z.csv").stat().st_size
    (tmp_path / "in" / "a.csv").write_text("user,key,time,value\na.csv,k,t,2\n")
    changed = [a != b for a, b in zip(first, fingerprint_parts(job), strict=True)]
    assert changed == [False, True, False, False, False]


def test_folders_with_wildcard_characters(tmp_path: Path, make_job: MakeJob) -> None:
    make_job("csv")
    odd = tmp_path / "a[b]*c"
    (odd / "in").mkdir(parents=True)
    (odd / "in" / "x.csv").write_text("user,key,time,value\n")
    (odd / "dpstream.toml").write_bytes((tmp_path / "dpstream.toml").read_bytes())
    assert [f.name for f in manifest(load_job(odd / "dpstream.toml"))] == ["x.csv"]


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_missing_columns_are_refused_at_construction(
    tmp_path: Path, make_job: MakeJob, kind: str, refused: refusals.Refused
) -> None:
    write(tmp_path / f"x.{kind}", kind, table(5).drop_columns(["key"]))
    job = make_job(kind, pattern=f"x.{kind}")
    caught = refused(ReadFiles, job)
    assert CANARY not in str(caught)


def test_a_csv_without_a_header_shows_no_data(
    tmp_path: Path, make_job: MakeJob, refused: refusals.Refused
) -> None:
    (tmp_path / "x.csv").write_text(f"{CANARY},b,c,d\n")
    caught = refused(lambda: ReadFiles(make_job("csv", pattern="x.csv")))
    assert CANARY not in str(caught)


def csv_rows(data: bytes, columns: tuple[str, ...] = ("a", "b")) -> tuple[dict[int, Any], Any]:
    return gather(read_csv(io.BytesIO(data), columns))


def json_rows(data: bytes, columns: tuple[str, ...] = ("a", "b")) -> tuple[dict[int, Any], Any]:
    return gather(read_jsonl(io.BytesIO(data), columns))


def gather(parts: Any) -> tuple[dict[int, Any], Any]:
    rows, dead = {}, []
    for part in parts:
        if isinstance(part, Rows):
            values = part.batch.to_pylist()
            rows.update({part.offset + i: tuple(v.values()) for i, v in enumerate(values)})
        else:
            dead += list(zip(part.offsets.tolist(), part.reasons, strict=True))
    return rows, dead


CSV_LINES: list[tuple[bytes, Any]] = [
    (b"x,y", ("x", "y")),
    (b'"x","y"', ("x", "y")),
    (b'"x, 1",y', ("x, 1", "y")),
    (b'"x""1",y', ('x"1', "y")),
    (b",", (None, None)),
    (b'"",y', ("", "y")),
    (b"x,y\r", ("x", "y")),
    (b" x , y ", (" x ", " y ")),
    (b"NA,null", ("NA", "null")),
    (b"x\0,1e5", Reason.MALFORMED),
    (b'"x\0",y', Reason.MALFORMED),
    (b"\xff,y", (None, "y")),
    ("é,日本".encode(), ("é", "日本")),
    (b"x", Reason.FIELD_COUNT),
    (b"x,y,z", Reason.FIELD_COUNT),
    (b'"x,y"', Reason.FIELD_COUNT),
    (b'"x,y', Reason.MALFORMED),
    (b'a"b,"c', Reason.MALFORMED),
    (b'"a"b,c', Reason.MALFORMED),
    (b"a\rb,c", Reason.MALFORMED),
    (b'"a\rb",c', Reason.MALFORMED),
    (BOM + b"x,y", ("\ufeffx", "y")),
    (BOM + BOM + b"x," + BOM, ("\ufeff\ufeffx", "\ufeff")),
    (BOM + b",y\r", ("\ufeff", "y")),
    (b'"' + BOM + b'x",y', ("\ufeffx", "y")),
    (BOM + b'"x",y', Reason.MALFORMED),
    (BOM[:2] + b",y", (None, "y")),
    (BOM, Reason.FIELD_COUNT),
    (b"x" * ((1 << 20) + 1) + b",y", Reason.LINE_TOO_LONG),
]

JSON_LINES: list[tuple[bytes, Any]] = [
    (b'{"a": "x", "b": "y"}', ("x", "y")),
    (b' {"b":"y","a":"x"} \r', ("x", "y")),
    (b'{"a": 1, "b": 1.0}', ("1", "1.0")),
    (b'{"a": true, "b": null}', ("true", None)),
    (b'{"a": "1", "c": [1, {"d": 2}]}', ("1", None)),
    (b'{"a": -0.0, "b": 1.50}', ("-0.0", "1.5")),
    (b'{"a": 12345678901234567890123}', ("12345678901234567890123", None)),
    (b'{"a": "\\u00e9\\u0000"}', ("é\0", None)),
    (b"{}", (None, None)),
    (b'{"a": 1, "a": 2}', ("2", None)),
    (b'{"a": [1]}', Reason.MALFORMED),
    (b'{"a": {"b": 1}}', Reason.MALFORMED),
    (b'{"a": 1}{"a": 2}', Reason.MALFORMED),
    (b'{"a": 1', Reason.MALFORMED),
    (b"}", Reason.MALFORMED),
    (b"[1, 2]", Reason.MALFORMED),
    (b"null", Reason.MALFORMED),
    (b'{"a": NaN}', Reason.MALFORMED),
    (b'{"a": 1e999}', Reason.MALFORMED),
    (b'{"a": 01}', Reason.MALFORMED),
    (b'{"a": "\xff"}', Reason.MALFORMED),
    (b'{"a": "\\ud800"}', Reason.MALFORMED),
    (b'{"c": ' + b"[" * 5000 + b"]" * 5000 + b"}", Reason.MALFORMED),
    (b'{"c": ' + b"[" * 250 + b"]" * 250 + b"}", Reason.MALFORMED),
    (b'{"a": "x", "c": [' + b"[1]," * 500 + b"[1]]}", ("x", None)),
    (BOM + b'{"a": "x"}', ("x", None)),
    (BOM + b' {"a": 1}\r', ("1", None)),
    (b'{"a": "' + BOM + b'x"}', ("\ufeffx", None)),
    (BOM + BOM + b'{"a": "x"}', Reason.MALFORMED),
    (b" " + BOM + b'{"a": "x"}', Reason.MALFORMED),
    (BOM, Reason.MALFORMED),
    (b'{"a": "' + b"x" * (1 << 20) + b'"}', Reason.LINE_TOO_LONG),
]


def check_lines(read: Any, head: bytes, lines: list[tuple[bytes, Any]]) -> None:
    rows, dead = read(head + b"\n".join(line for line, _ in lines))
    expected = dict(enumerate(outcome for _, outcome in lines))
    by_offset = {**rows, **{offset: Reason(reason) for offset, reason in dead}}
    assert len(by_offset) == len(rows) + len(dead)
    assert by_offset == expected


@pytest.mark.parametrize("line", CSV_LINES, ids=range(len(CSV_LINES)))
def test_a_csv_line_on_its_own(line: tuple[bytes, Any]) -> None:
    check_lines(csv_rows, b"a,b\n", [line])


@pytest.mark.parametrize("line", JSON_LINES, ids=range(len(JSON_LINES)))
def test_a_json_line_on_its_own(line: tuple[bytes, Any]) -> None:
    check_lines(json_rows, b"", [line])


@given(st.lists(st.sampled_from(CSV_LINES), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_a_csv_line_means_the_same_in_any_company(lines: list[tuple[bytes, Any]]) -> None:
    check_lines(csv_rows, b"a,b\n", lines)


@given(st.lists(st.sampled_from(JSON_LINES), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_a_json_line_means_the_same_in_any_company(lines: list[tuple[bytes, Any]]) -> None:
    check_lines(json_rows, b"", lines)


@pytest.mark.parametrize("block", [1, 7, 64])
def test_blocks_never_show(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(source_lines, "MAX_LINE_BYTES", 60)
    monkeypatch.setattr("dpstream.pipelines.formats.texts.MAX_LINE_BYTES", 60)
    text = b"a,b\n" + b"\n".join(line for line, _ in CSV_LINES[:-1]) + b"\n\n\r\n"
    text += b"x" * 61 + b",y\nlast,one"
    objects = b"\xef\xbb\xbf" + b"\n".join(line for line, _ in JSON_LINES) + b'\n\n{"a":"z"}'
    uncut_rows = csv_rows(text), json_rows(objects)
    monkeypatch.setattr(source_lines, "BLOCK_BYTES", block)
    assert (csv_rows(text), json_rows(objects)) == uncut_rows
    assert uncut_rows[0][0][len(CSV_LINES)] == ("last", "one")
    assert uncut_rows[1][0][len(JSON_LINES)] == ("z", None)
    assert (len(CSV_LINES) - 1, "line_too_long") in uncut_rows[0][1]


def test_memory_of_an_endless_line_is_bounded() -> None:
    class Endless(io.RawIOBase):
        blocks = 30  # of 8 MiB, less than any that is read no further

        def readable(self) -> bool:
            return True

        def read(self, size: int = -1) -> bytes:  # type: ignore[override]
            self.blocks -= 1
            return b"x" * size if self.blocks > 0 else b""

    import tracemalloc

    tracemalloc.start()
    blocks = list(source_lines.line_blocks(Endless()))  # type: ignore[arg-type]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(blocks) == 1 and len(blocks[0][1]) == 1
    assert peak < 64 << 20


def test_header_edge_cases(refused: refusals.Refused) -> None:
    assert csv_rows(b'\xef\xbb\xbf"a",b\r\n1,2\r\n') == ({0: ("1", "2")}, [])
    assert csv_rows(b"a,b") == ({}, [])
    for broken in (b"", b'"a,b\n1,2', b"\xff,b\n", b"\n1,2\n", b"x" * (2 << 20)):
        assert csv_rows(broken) == ({}, [(0, "unreadable_file")])
    refused(csv_rows, b"a,b,a\n1,2,3\n")


def test_parquet_types_and_bad_text(tmp_path: Path, make_job: MakeJob) -> None:
    raw = pa.array([b"ok", b"\xff\xfe", None, b"fine"], pa.binary())
    bad = pa.Array.from_buffers(pa.string(), 4, raw.buffers(), null_count=1)
    columns = {
        "user": bad,
        "key": pa.array(["a", "b", "a", None]).dictionary_encode(),
        "time": pa.array([1, 2, 3, 4], pa.timestamp("ns")),
        "value": pa.array([1.5, None, float("nan"), 2.5]),
    }
    job = make_job("parquet")
    pq.write_table(pa.table(columns), tmp_path / "in" / "x.parquet")
    rows, dead = by_hand(job)
    assert not dead
    assert [r["user"] for r in rows.values()] == ["ok", None, None, "fine"]
    assert [r["key"] for r in rows.values()] == ["a", "b", "a", None]


def test_a_parquet_group_that_breaks_off(tmp_path: Path, make_job: MakeJob) -> None:
    path = tmp_path / "in" / "x.parquet"
    job = make_job("parquet")
    write(path, "parquet", table(120))
    chunk = pq.ParquetFile(path).metadata.row_group(1).column(0)
    data = bytearray(path.read_bytes())
    at = chunk.data_page_offset + chunk.total_compressed_size // 2
    data[at] ^= 0xFF
    path.write_bytes(bytes(data))
    for batch_rows in (3, 1000):
        rows, dead = by_hand(make_job("parquet", batch_rows=batch_rows))
        assert dead == {(0, 40, "unreadable_rest")}
        assert sorted(offset for _, offset in rows) == [*range(40), *range(80, 120)]
    rows, dead = run_in_beam(job)
    assert len(rows) == 80


def test_a_file_that_vanishes_fails_the_run_and_loses_nothing(
    tmp_path: Path, make_job: MakeJob, refused: refusals.Refused
) -> None:
    job = make_job("csv")
    write(tmp_path / "in" / "x.csv", "csv", table(3))
    source = ReadFiles(job)
    (tmp_path / "in" / "x.csv").unlink()
    with pytest.raises(Exception) as caught, beam.Pipeline(runner=FnApiRunner()) as pipeline:
        _ = pipeline | source
    assert "file 0 of the manifest cannot be read" in str(caught.value)
    refused(lambda: list(source._dofn.process((("csv", 0, str(tmp_path / "none.csv"), 0, 0),))))


def test_unforeseen_failures_show_their_class_only(
    tmp_path: Path, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, refused: refusals.Refused
) -> None:
    def fail(*_: object) -> None:
        raise ValueError(CANARY)

    job = make_job("csv")
    write(tmp_path / "in" / "x.csv", "csv", table(3))
    source = ReadFiles(job)
    monkeypatch.setattr("dpstream.pipelines.connectors.files.source.read_piece", fail)
    caught = refused(lambda: list(source._dofn.process((pieces(job)[0],))))
    trace = "".join(traceback.format_exception(caught))
    assert CANARY not in trace


def mutate(data: bytes, rng: random.Random) -> bytes:
    """One of: flipped bytes, a cut, a doubled piece, a removed piece, junk put in."""
    out = bytearray(data)
    a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    match rng.randrange(5):
        case 0:
            for _ in range(rng.randrange(1, 20)):
                out[rng.randrange(len(out))] = rng.randrange(256)
        case 1:
            del out[a:]
        case 2:
            out[a:a] = out[a:b]
        case 3:
            del out[a : min(b, a + 50)]
        case _:
            out[a:a] = rng.randbytes(rng.randrange(1, 200))
    return bytes(out)


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_200_mutated_files_neither_crash_nor_leak(
    tmp_path: Path, make_job: MakeJob, kind: str
) -> None:
    job = make_job(kind)
    sound, path = tmp_path / "in" / f"a.{kind}", tmp_path / "in" / f"b.{kind}"
    write(sound, kind, table(90))
    untouched = by_hand(job)[0]
    original = sound.read_bytes()
    rng, refused, dead_files = random.Random(7741), 0, 0
    for _ in range(200):
        path.write_bytes(mutate(original, rng))
        try:
            rows, dead = by_hand(job)
        except DpstreamError as error:
            assert isinstance(error, UsageError), "only a broken header is refused"
            assert CANARY not in str(error)
            refused += 1
            continue
        assert {k: v for k, v in rows.items() if k[0] == 0} == untouched
        assert {reason for _, _, reason in dead} <= {r.value for r in Reason}
        assert by_hand(job) == (rows, dead), "alike every time"
        dead_files += bool(dead)
    assert dead_files > 40
    assert refused < 60


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_mutated_files_in_beam(tmp_path: Path, make_job: MakeJob, kind: str) -> None:
    job = make_job(kind)
    write(tmp_path / "in" / f"a.{kind}", kind, table(90))
    original = (tmp_path / "in" / f"a.{kind}").read_bytes()
    rng = random.Random(7742)
    head = 200 if kind == "csv" else 0
    for i in range(20):
        data = original[:head] + mutate(original[head:], rng)
        (tmp_path / "in" / f"m{i:02d}.{kind}").write_bytes(data)
    assert run_in_beam(job) == by_hand(job)


def endless(job: Job, form: Literal["parquet", "csv", "jsonl", "json"] | None = None) -> Job:
    source = Source("folder", "/in", format=form)
    plan = msgspec.structs.replace(job.plan, stamp="_manifest")
    return msgspec.structs.replace(job, source=source, plan=plan)


@pytest.mark.parametrize(
    ("pattern", "kind"),
    [("/x/*.parquet", "parquet"), ("/x/a.CSV", "csv"), ("/x/a.jsonl.gz", "jsonl"),
     ("/x/a.jsonl", "jsonl")],
)  # fmt: skip
def test_the_kind_is_the_names(pattern: str, kind: str, make_job: Callable[..., Job]) -> None:
    files_job = recorded(endless(make_job()), pattern, "--proxy")
    assert (files_job.source.kind, files_job.source.path) == (kind, pattern)
    # No file has a stamp of the source's own: there the event time is the stamp.
    assert files_job.plan.stamp == files_job.source.stamp == "event_time"


def test_without_an_ending_the_folders_format_counts(
    make_job: Callable[..., Job], refused: refusals.Refused
) -> None:
    assert recorded(endless(make_job(), "csv"), "/x/*", "--proxy").source.kind == "csv"
    refused(lambda: recorded(endless(make_job()), "/x/*", "--proxy"))


def test_a_job_of_files_keeps_its_kind(make_job: Callable[..., Job]) -> None:
    job = make_job("csv")
    files_job = recorded(job, "/y/*.parquet", "--truth")
    assert files_job.source == msgspec.structs.replace(job.source, path="/y/*.parquet")
    assert files_job.plan is job.plan


def test_errors_of_the_path_are_the_options() -> None:
    with pytest.raises(RunError) as error, named_by("--truth"):
        raise RunError("table.path", "rule", "fix")
    assert (error.value.field, error.value.rule) == ("--truth", "rule")
    with pytest.raises(UsageError) as unchanged, named_by("--truth"):
        raise UsageError("table.unit_column", "rule", "fix")
    assert unchanged.value.field == "table.unit_column"
