"""Releases as bytes: files of each kind, text that is read back, and receipts of answers."""

import csv
import datetime as dt
import decimal
import io
import json
import math
import os
import struct
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyarrow import csv as pacsv

from dpstream.accounting.places import RELEASE_KINDS
from dpstream.pipelines.connectors.files.sink import FileSink
from dpstream.pipelines.formats import encodings
from dpstream.pipelines.formats.encodings import (
    ambiguous,
    as_hex,
    csv_lines,
    encode,
    encode_all,
    guarded,
    hex_digits,
    json_lines,
    name_of,
    read_parts,
    read_releases,
    release_files,
    remove_drafts,
    table_of_text,
    unguarded,
)
from dpstream.pipelines.formats.receipt import Header, answered_now, encoded, header_of, table_of
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.operate.state_admin import export, publish
from dpstream.pipelines.report.data import collect, inventory, newest
from dpstream.pipelines.stream.run import run_job
from tests.golden.refusals import Refused
from tests.pipelines.conftest import TEMPLATE
from tests.pipelines.connectors.files.test_sink import SCHEMA, files, release
from tests.state.ledger.conformance import charge
from tests.written import write_release

STARTS = ["=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠"]
TEXTS = st.text(st.sampled_from(["'", "a", " ", '"', ",", *STARTS]), max_size=6)
KEYS = ["=1+1", "'=1+1", "''@x", "@user", "-", "'tis", "a=b", "", " =x"]


def keys_of(table: pa.Table) -> list[str]:
    return [str(key) for key in table["key"].to_pylist()]


@given(st.lists(TEXTS | st.none(), max_size=8))
@settings(deadline=None)
def test_a_guard_is_taken_away_again(texts: list[str | None]) -> None:
    table = pa.table({"key": pa.array(texts, pa.string()), "n": list(range(len(texts)))})
    marked = guarded(table)
    assert unguarded(marked).equals(table)
    for text, cell in zip(texts, marked["key"].to_pylist(), strict=True):
        formula = text is not None and text.lstrip("'")[:1] in STARTS and text.lstrip("'")
        assert cell == (f"'{text}" if formula else text)
    unguarded_texts = unguarded(table)["key"].to_pylist()
    assert ambiguous(table) == (unguarded_texts != texts)


@given(st.lists(TEXTS, min_size=1, max_size=8))
@settings(max_examples=50, deadline=None)
def test_no_cell_begins_with_a_formula(texts: list[str]) -> None:
    batch = release(0, 1, texts)
    text = encode(batch, "csv").decode()
    cells = [cell for row in csv.reader(io.StringIO(text, newline="")) for cell in row]
    assert not any(cell[:1] in STARTS for cell in cells if cell)
    assert encode(batch, "csv", guard=False) == encode(batch, "csv") or any(
        text.lstrip("'")[:1] in STARTS for text in texts
    )


@pytest.mark.parametrize("guard", [True, False])
def test_what_is_written_is_read(tmp_path: Path, guard: bool) -> None:
    sink = FileSink(tmp_path, "csv", guard)
    sink.write([release(0, 1, KEYS), release(0, 2, ["b"])])
    assert keys_of(read_releases(tmp_path, SCHEMA, guard)) == [*KEYS, "b"]
    assert keys_of(read_releases(tmp_path, guard=guard)) == [*KEYS, "b"]
    one = tmp_path / "window-000000" / "trigger-000001.csv"
    assert [k for part in read_parts(one, SCHEMA, guard) for k in keys_of(part)] == KEYS
    assert (b"\"''=1+1\"" in one.read_bytes()) is guard


def test_the_same_release_guarded_or_not(tmp_path: Path, refused: Refused) -> None:
    """A sink that was begun before there was a guard goes on."""
    plain = [key for key in KEYS if not key.startswith("'")]
    FileSink(tmp_path, "csv", False).write([release(0, 1, plain)])
    before = files(tmp_path)
    for guard in (True, False):
        sink = FileSink(tmp_path, "csv", guard)
        assert sink.holds(release(0, 1, plain)) and all(
            sink.same(one, release(0, 1, plain)) for one in sink.published()
        )
        sink.write([release(0, 1, plain)])
        refused(sink.write, [release(0, 1, ["x", *plain[1:]])])
    assert files(tmp_path) == before


def test_another_release_is_not_taken_for_a_guarded_one(tmp_path: Path, refused: Refused) -> None:
    write_release(tmp_path, "csv", release(0, 1, ["=x"]))
    refused(lambda: write_release(tmp_path, "csv", release(0, 1, ["'=x"])))


def job_in(folder: Path, option: str = "", sink: str = "csv") -> Job:
    (folder / "in").mkdir(parents=True, exist_ok=True)
    rows = [
        f'u{i}{n},"{key}",2024-01-01T01:00:00Z,1' for i in range(200) for n, key in enumerate(
            ["=1+1", "@sum", "'=1+1", "plain"]
        )
    ]  # fmt: skip
    (folder / "in" / "a.csv").write_text("\n".join(["user,key,time,value", *rows]) + "\n")
    text = TEMPLATE.format(kind="csv", pattern="in/*", sink=sink)
    text = text.replace('path = "releases"', f'path = "releases"{option and ", "}{option}')
    (folder / "dpstream.toml").write_text(text)
    return load_job(folder / "dpstream.toml")


@pytest.mark.parametrize("option", ["", 'formulas = "guard"', 'formulas = "keep"'])
def test_a_job_from_end_to_end(tmp_path: Path, option: str) -> None:
    """Run, run again, a lost file, an export and the report agree about a key's text."""
    job = job_in(tmp_path, option)
    expected = ["'=1+1", "=1+1", "@sum", "plain"]
    run_job(job)
    first = files(tmp_path / "releases")
    text = b"".join(data for name, data in first.items() if name.endswith(".csv")).decode()
    cells = {cell for row in csv.reader(io.StringIO(text)) for cell in row}
    formula_cells = {cell for cell in cells if "1+1" in cell or "@sum" in cell}
    unmarked, marked = {"=1+1", "'=1+1", "@sum"}, {"'=1+1", "''=1+1", "'@sum"}
    assert formula_cells == (unmarked if "keep" in option else marked)
    run_job(job)
    (tmp_path / "releases" / "window-000000" / "trigger-000002.csv").unlink()
    publish(job)
    assert files(tmp_path / "releases") == first
    export(job, tmp_path / "out", "csv")
    assert files(tmp_path / "out") | {"_final.csv": first["_final.csv"]} == first
    found_in = inventory(job)
    for _, group in found_in.by_window():
        table = pa.concat_tables(newest(job.plan, group))
        assert sorted(keys_of(table)) == expected
    assert collect(job.plan, found_in).windows.tolist() == [0]


def test_the_option_is_of_csv(tmp_path: Path, refused: Refused) -> None:
    refused(job_in, tmp_path, 'formulas = "keep"', "parquet")
    refused(job_in, tmp_path, 'formulas = "drop"')


UTC = dt.UTC
CHARACTERS = st.one_of(
    st.characters(exclude_categories=["Cs"]),
    st.sampled_from("\0\x01\b\t\n\f\r\x1f\x7f\"\\/'=,\x85\u2028é\ufeff\U0001f600"),
)
MICROS = st.integers(-62_135_596_800_000_000, 253_402_300_799_999_999)
FLOATS = st.floats() | st.sampled_from([0.0, -0.0, 1e16, 1e-5, 5e-324, 0.1, 123456789.0, 1e22])
COLUMNS = [
    ("text", pa.string(), st.text(CHARACTERS, max_size=5)),
    ("bytes", pa.binary(), st.binary(max_size=4)),
    ("id", pa.binary(16), st.binary(min_size=16, max_size=16)),
    ("int", pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    ("small", pa.int32(), st.integers(-2, 2)),
    ("unsigned", pa.uint64(), st.integers(0, 2**64 - 1)),
    ("float", pa.float64(), FLOATS),
    ("single", pa.float32(), st.floats(width=32)),
    ("bool", pa.bool_(), st.booleans()),
    ("time", pa.timestamp("us", "UTC"), MICROS),
    ("local", pa.timestamp("us"), MICROS),
    ("day", pa.date32(), st.dates()),
    ("price", pa.decimal128(9, 2), st.decimals(-9999, 9999, places=2)),
    ("none", pa.null(), st.none()),
    ('na"me\n,é', pa.int8(), st.integers(-128, 127)),
    ("code", pa.dictionary(pa.int32(), pa.string()), st.sampled_from(["a,b", "c\nd", 'e"f'])),
]  # fmt: skip
ROWS_SCHEMA = pa.schema([(name, kind) for name, kind, _ in COLUMNS])
#: Few distinct values come up often, so that columns of one value do.
ROWS = st.lists(st.tuples(*(st.none() | values for *_, values in COLUMNS)), max_size=6)


def batch_of(rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True)) or [()] * len(ROWS_SCHEMA)
    arrays = [pa.array(list(c), kind) for c, kind in zip(columns, ROWS_SCHEMA.types, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=ROWS_SCHEMA)


def json_text(value: Any) -> str:
    """The text of a value that is no float, by definition."""
    if isinstance(value, dt.datetime):
        return json_text(value.isoformat().replace("+00:00", "Z"))
    if isinstance(value, bytes):
        return f'"{value.hex()}"'
    if isinstance(value, dt.date | decimal.Decimal):
        return f'"{value}"'
    return json.dumps(value, ensure_ascii=False)


def digits(text: str) -> str:
    """Significant digits of a number's text."""
    return text.lower().partition("e")[0].replace(".", "").lstrip("-0").rstrip("0")


def check_float(text: str, value: float | None) -> None:
    """The shortest text that reads back as the number; null where there is none."""
    if value is None or not math.isfinite(value):
        assert text == "null"
    else:
        assert struct.pack("d", float(text)) == struct.pack("d", value)
        assert digits(text) == digits(repr(value)) and len(text) <= 24


@given(ROWS, st.sampled_from([1, 2, 3, 100]))
@example([], 1)
@example([(None,) * len(ROWS_SCHEMA)] * 2, 100)
@settings(deadline=None)
def test_json_is_what_pythons_json_writes(rows: list[tuple[Any, ...]], at_once: int) -> None:
    batch = batch_of(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encodings, "_ROWS", at_once)
        written = json_lines(batch)
    assert written == json_lines(batch)
    lines = written.decode().split("\n")
    assert lines.pop() == "" and len(lines) == len(rows)
    for line, row in zip(lines, batch.to_pylist(), strict=True):
        fields = json.loads(line, parse_float=lambda text: f"#{text}")
        texts = []
        for name, value in row.items():
            read = fields[name]
            if pa.types.is_floating(ROWS_SCHEMA.field(name).type):
                text = "null" if read is None else str(read).removeprefix("#")
                check_float(text, value)
            else:
                text = json_text(value)
            texts.append(f"{json_text(name)}:{text}")
        assert line == "{" + ",".join(texts) + "}"


@given(ROWS, st.sampled_from([1, 2, 3, 100]))
@example([], 1)
@settings(deadline=None)
def test_csv_is_what_arrow_writes(rows: list[tuple[Any, ...]], at_once: int) -> None:
    batch = batch_of(rows)
    columns = [hex_digits(c) if encodings.is_bytes(c.type) else c for c in batch.columns]
    buffer = io.BytesIO()
    pacsv.write_csv(pa.RecordBatch.from_arrays(columns, ROWS_SCHEMA.names), buffer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encodings, "_ROWS", at_once)
        assert csv_lines(batch) == buffer.getvalue()


@pytest.mark.parametrize("write", [json_lines, csv_lines])
def test_rows_of_a_slice_are_written_alone(write: Any) -> None:
    rows = [(f"k{n}", b"%d" % n, bytes([n]) * 16, *[None] * 13) for n in range(9)]
    part = batch_of(rows).slice(3, 4)
    assert write(part) == write(batch_of(rows[3:7]))


def test_zeros_keep_their_signs() -> None:
    batch = pa.record_batch({"x": [0.0, -0.0, 0.0]})
    assert json_lines(batch) == b'{"x":0.0}\n{"x":-0.0}\n{"x":0.0}\n'


@pytest.mark.parametrize("write", [json_lines, csv_lines])
@pytest.mark.parametrize("text", [b"\xed\xa0\x80", b"\xff", b"a\xc3"])
def test_what_is_not_utf8_is_refused(write: Any, text: bytes) -> None:
    for texts in ([text], [b"a", text]):
        column = pa.array(texts, pa.binary()).view(pa.string())
        with pytest.raises(ValueError, match=r"(?i)utf-?8"):
            write(pa.record_batch({"key": column}))


@given(st.lists(st.none() | st.binary(max_size=5)), st.integers(0, 3))
@settings(deadline=None)
def test_hex_digits(values: list[bytes | None], begin: int) -> None:
    texts = hex_digits(pa.array(values, pa.binary())[begin:])
    texts.validate(full=True)
    assert texts.to_pylist() == [v if v is None else v.hex() for v in values[begin:]]


@pytest.mark.parametrize("kind", RELEASE_KINDS)
def test_rows_come_back_with_their_types(kind: str, tmp_path: Path) -> None:
    batch = release(3, 2, ["007", "", "=x", "a\nb"])
    write_release(tmp_path, kind, batch)
    table = pa.Table.from_batches([batch]).replace_schema_metadata(None)
    assert read_releases(tmp_path, SCHEMA).equals(table)
    [file] = release_files(tmp_path)
    columns = pa.schema([SCHEMA.field("records"), SCHEMA.field("key")])
    assert pa.concat_tables(read_parts(file, columns)).equals(table.select(["records", "key"]))


@pytest.mark.parametrize("kind", RELEASE_KINDS)
def test_many_are_encoded_as_one_is(kind: str) -> None:
    batches = [release(0, 1, [f"k{n}" for n in range(size)]) for size in (15_000, 15_000, 1)]
    assert encode_all(batches, kind) == [encode(batch, kind) for batch in batches]


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_texts_are_read_back(kind: str) -> None:
    batch = release(0, 1, ["a", "b"])
    assert table_of_text(encode(batch, kind), kind, SCHEMA).equals(
        pa.Table.from_batches([batch]).replace_schema_metadata(None)
    )


def test_bytes_are_hex_digits() -> None:
    hex_table = as_hex(pa.table({"x": pa.array([b"\x00\xff", None]), "y": [1, 2]}))
    assert hex_table.to_pydict() == {"x": ["00ff", None], "y": [1, 2]}


def test_releases_are_in_the_order_of_numbers(tmp_path: Path) -> None:
    for window, trigger in ((10, 1), (9, 10), (9, 9)):
        write_release(tmp_path, "csv", release(window, trigger, ["a"]))
    assert [name_of(file) for file in release_files(tmp_path)] == [(9, 9), (9, 10), (10, 1)]
    assert name_of(Path("window-x/trigger.csv")) == (-1, -1)
    assert read_releases(tmp_path / "none", SCHEMA).equals(SCHEMA.empty_table())


@pytest.mark.parametrize("kind", RELEASE_KINDS)
def test_what_is_no_release_is_named_by_its_file(
    kind: str, tmp_path: Path, refused: Refused
) -> None:
    file = tmp_path / "window-000001" / f"trigger-000002.{kind}"
    file.parent.mkdir()
    file.write_bytes(b'{"SECRET": \xff')
    refused(lambda: list(read_parts(file, SCHEMA)))
    error = refused(read_releases, tmp_path, SCHEMA)
    assert "SECRET" not in str(error)


def test_drafts_of_writers_that_died_go_and_releases_stay(tmp_path: Path) -> None:
    write_release(tmp_path, "csv", release(0, 1, ["a"]))
    draft = tmp_path / "window-000000" / ".trigger-000002.csv.0a0b.dpstream-draft"
    draft.write_bytes(b"")
    os.utime(draft, (0, 0))
    remove_drafts(tmp_path)
    assert not draft.exists() and len(list(release_files(tmp_path))) == 1


class Own(Header, frozen=True, kw_only=True):
    """The header of a kind."""

    note: str


HEADER = Own(**answered_now(charge(7)), note="two\nlines\0and a NUL")
RECEIPT_ROWS = pa.table({"page": ["a", None], "n": [1.5, 2.5]})


def test_header_and_table_are_read_back() -> None:
    made = charge(7)
    receipt = encoded(HEADER, RECEIPT_ROWS)
    assert header_of(receipt, Own) == HEADER and table_of(receipt).equals(RECEIPT_ROWS)
    assert (HEADER.run_id, HEADER.plan_hash) == (made.run_id, made.plan_hash)
    assert encoded(HEADER, RECEIPT_ROWS.slice(0, 1).combine_chunks()) != receipt
    parts = pa.concat_tables([RECEIPT_ROWS.slice(0, 1), RECEIPT_ROWS.slice(1)])
    assert encoded(HEADER, parts) == receipt  # whatever chunks the table has


def test_a_receipt_without_a_table_is_json_that_people_can_read(refused: Refused) -> None:
    receipt = encoded(HEADER)
    assert msgspec.json.decode(receipt)["note"] == HEADER.note and receipt.count(b"\n") > 4
    assert header_of(receipt, Own) == HEADER
    refused(table_of, receipt)


def test_bytes_of_another_form_are_refused(refused: Refused) -> None:
    receipt = encoded(HEADER, RECEIPT_ROWS)
    of_version_2 = receipt.replace(b'"format": 1', b'"format": 2')
    other_field = receipt.replace(b'"note"', b'"mote"')
    assert len({receipt, of_version_2, other_field}) == 3
    for bad in (b"", b"{}", receipt[:20], b"x" + receipt, of_version_2, other_field):
        refused(header_of, bad, Own, "a field")
    for bad in (receipt[:-40], receipt[: receipt.index(b"\0") + 1]):
        refused(table_of, bad)
