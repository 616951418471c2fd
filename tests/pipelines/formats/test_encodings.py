"""Bytes of releases: the same for the same content, and the same rows again."""

import os
from pathlib import Path

import pyarrow as pa
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.formats.encodings import (
    KINDS,
    as_hex,
    encode,
    encode_all,
    name_of,
    read_parts,
    read_releases,
    release_files,
    remove_drafts,
    table_of_text,
)
from tests.pipelines.connectors.files.test_sink import SCHEMA, release
from tests.written import write_release


@pytest.mark.parametrize("kind", KINDS)
def test_rows_come_back_with_their_types(kind: str, tmp_path: Path) -> None:
    batch = release(3, 2, ["007", "", "=x", "a\nb"])
    write_release(tmp_path, kind, batch)
    table = pa.Table.from_batches([batch]).replace_schema_metadata(None)
    assert read_releases(tmp_path, SCHEMA).equals(table)
    [file] = release_files(tmp_path)
    columns = pa.schema([SCHEMA.field("records"), SCHEMA.field("key")])
    assert pa.concat_tables(read_parts(file, columns)).equals(table.select(["records", "key"]))


@pytest.mark.parametrize("kind", KINDS)
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


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_release_is_named_by_its_file(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "window-000001" / f"trigger-000002.{kind}"
    file.parent.mkdir()
    file.write_bytes(b'{"SECRET": \xff')
    with pytest.raises(UsageError) as error:
        list(read_parts(file, SCHEMA))
    assert error.value.field == f"release window-000001/{file.name}"
    with pytest.raises(UsageError) as error:
        read_releases(tmp_path, SCHEMA)
    assert "SECRET" not in str(error.value)


def test_drafts_of_writers_that_died_go_and_releases_stay(tmp_path: Path) -> None:
    write_release(tmp_path, "csv", release(0, 1, ["a"]))
    draft = tmp_path / "window-000000" / ".trigger-000002.csv.0a0b.dpstream-draft"
    draft.write_bytes(b"")
    os.utime(draft, (0, 0))
    remove_drafts(tmp_path)
    assert not draft.exists() and len(list(release_files(tmp_path))) == 1
