"""Which files a table has, when its content is another, and where it lies."""

import os
from pathlib import Path

import msgspec
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.sql.load import load_catalog
from dpstream.pipelines.tables.catalog import Catalog, Table
from dpstream.pipelines.tables.inputs import (
    files_of,
    place_of,
    sqlite_path,
    stamps,
    table_parts,
)
from tests.pipelines.sql.asking import data_set


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return load_catalog(data_set(tmp_path))


def first(catalog: Catalog) -> Table:
    return next(t for t in catalog.tables.values() if files_of(t))


def test_a_changed_byte_is_another_content(catalog: Catalog) -> None:
    table = first(catalog)
    [path, *_] = files_of(table)
    before, at = table_parts(table), stamps(catalog, [table.name])
    assert before == table_parts(table) and at == stamps(catalog, [table.name])
    data = bytearray(Path(path).read_bytes())
    data[len(data) // 2] ^= 1
    Path(path).write_bytes(data)
    os.utime(path, ns=(at[0][2], at[0][2]))
    assert table_parts(table) != before  # though time and size are the same
    Path(path).write_bytes(data + b"x")
    assert stamps(catalog, [table.name]) != at


def test_what_is_no_file_is_refused(catalog: Catalog, tmp_path: Path) -> None:
    table = first(catalog)
    os.mkfifo(tmp_path / "pipe.parquet")
    for place in (f"{tmp_path}/none-*.parquet", f"{tmp_path}/pipe.parquet", str(tmp_path)):
        with pytest.raises(UsageError, match=table.name):
            files_of(msgspec.structs.replace(table, place=place))


def test_a_sqlite_address_is_a_path(catalog: Catalog) -> None:
    table = first(catalog)
    for place in ("sqlite:///a/b.db", "sqlite:a/b.db", "a/b.db"):
        assert sqlite_path(msgspec.structs.replace(table, place=place)) == "a/b.db"


def test_a_place_is_the_same_in_every_spelling_and_in_a_moved_folder(catalog: Catalog) -> None:
    table, home = first(catalog), catalog.folder
    for kind, spelled in (
        ("csv", ["{}/a.csv", "{}/./b/../a.csv"]),
        ("sqlite", ["sqlite:///{}/a.db", "sqlite:{}/b/../a.db"]),
    ):
        places = {
            place_of(msgspec.structs.replace(table, kind=kind, place=text.format(folder)), folder)
            for text in spelled
            for folder in (home, home / "moved")
        }
        assert len(places) == 1
    assert place_of(table, home) != place_of(table, home / "other")


def test_a_server_s_address_is_its_place_but_for_how_to_get_in(catalog: Catalog) -> None:
    def parts(place: str) -> list[bytes]:
        table = msgspec.structs.replace(first(catalog), kind="postgresql", place=place)
        return [*table_parts(table), place_of(table, catalog.folder)]

    plain = "postgresql://h:5/d"
    others = ["postgresql://bob@h:5/d", f"{plain}?options=-csearch_path%3Dx", f"{plain}?user=al",
              "postgresql://h:6/d", "postgresql://h:5/e", "postgresql://h:5,i:6/d"]  # fmt: skip
    identities = [parts(place) for place in [plain, *others]]
    assert len({tuple(p) for p in identities}) == len(identities)
    assert parts("postgresql://bob:secret@h:5/d") == parts("postgresql://bob@h:5/d")
    assert parts(f"{plain}?password=secret&sslmode=require") == parts(plain)
    assert b"secret" not in b"".join(parts("postgresql://bob:secret@h:5,i:6/d?password=secret"))
