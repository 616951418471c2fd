"""Declared keys are checked by the owner, before anybody asks, and again when files changed.

The owner is told of a malformed file, with no value of it.

What a catalog says of columns that is not so is refused before anything is charged.
"""

import contextlib
import json
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlglot import exp

from dpstream.accounting.errors import DpstreamError, PolicyError, RunError, UsageError
from dpstream.pipelines.formats.parquet import MAX_UNPACKED
from dpstream.pipelines.project.dialect import Reading
from dpstream.pipelines.project.sections import CsvSection, TimeColumn, Via
from dpstream.pipelines.sql.ask import ask
from dpstream.pipelines.sql.load import catalog_of, load_catalog
from dpstream.pipelines.tables import registration
from dpstream.pipelines.tables.catalog import (
    MAX_COLUMNS,
    Catalog,
    Table,
    canonical,
    file_columns,
    kind_of,
    sql_type,
)
from dpstream.pipelines.tables.registration import (
    check_files,
    check_keys,
    register,
    require_fitting,
)
from dpstream.state.sqlite.database import sqlite3
from tests import accounts, projects
from tests.golden.pinned import check, of_refusals, refusal
from tests.pipelines.formats.test_parquet import plain_bomb, small_bomb
from tests.pipelines.sql.asking import (
    FRESH,
    KEY,
    PACKED,
    catalog,
    charges,
    data_set,
    dp,
    not_utf8,
    visits,
)
from tests.pipelines.sql.shop import SHOP, shop
from tests.structs import changed as changed_field
from tests.structs import leaves

_GOOD = [b'u1,"a""b"', b'u2,""', b'"u3","a,b"\r', b'u4,""""', b"u5,\xc3\xa9", b"", b"u6,"]
_BAD = {
    b'u7,"secret': "well-formed",
    b'u7,"secret" x': "well-formed",
    b'u7,secret"x"': "well-formed",
    b'u7,"secret"b"': "well-formed",
    b'u7,"secret""': "well-formed",
    b'u7,"secret\nx"': "well-formed",
    b"u7,secret\xff": "not UTF-8",
    b"secret": "number of fields",
    b"u7," + b"secret" * (1 << 22): "longer",
}


@pytest.fixture(params=[7, 1 << 22])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "_BLOCK", request.param)


def malformed(folder: Path, path: str) -> str:
    declared = catalog(folder, path)
    for call in (lambda: check_files(declared.tables["t"]), lambda: register(declared)):
        with pytest.raises(RunError, match="has a malformed file") as refused:
            call()
        assert "secret" not in str(refused.value) and "u7" not in str(refused.value)
    return str(refused.value)


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("packing", PACKED)
def test_a_good_file_of_csv_passes(packing: str, tmp_path: Path) -> None:
    for first in (b"", b"\xef\xbb\xbf"):
        for last in (b"", b"\n"):
            text = b"\n".join([first + b'"user",page', *_GOOD]) + last
            (tmp_path / f"t.csv{packing}").write_bytes(PACKED[packing](text))
            register(catalog(tmp_path, f"t.csv{packing}"))


@pytest.mark.parametrize("bad", _BAD, ids=range(len(_BAD)))
def test_a_bad_row_of_csv_is_told(bad: bytes, tmp_path: Path) -> None:
    for rest in ([], _GOOD):
        (tmp_path / "t.csv").write_bytes(b"\n".join([b"user,page", *_GOOD, bad, *rest]))
        assert _BAD[bad] in malformed(tmp_path, "t.csv") or rest


@pytest.mark.usefixtures("block")
def test_a_bad_quote_is_told_wherever_blocks_end(tmp_path: Path) -> None:
    for bad in list(_BAD)[:6]:
        (tmp_path / "t.csv").write_bytes(b"\n".join([b"user,page", *_GOOD, bad]))
        assert _BAD[bad] in malformed(tmp_path, "t.csv")


@pytest.mark.parametrize("packing", PACKED)
def test_json_lines_are_objects(packing: str, tmp_path: Path) -> None:
    path = tmp_path / f"t.jsonl{packing}"
    good = [b'{"user":"u%d", "page":1, "x":[1]}' % i for i in range(9)] + [b"", b"\r"]
    path.write_bytes(PACKED[packing](b"\n".join(good)))
    register(catalog(tmp_path, path.name))
    for bad in (b"[]", b'{"user":"secret', b"secret", b'{"page":"\xffsecret"}'):
        path.write_bytes(PACKED[packing](b"\n".join([*good, bad, *good])))
        malformed(tmp_path, path.name)


def test_texts_of_parquet_and_whole_archives(tmp_path: Path) -> None:
    not_utf8(tmp_path, pa.string())
    assert "UTF-8" in malformed(tmp_path, "*.parquet")
    register(catalog(tmp_path, "b.parquet", {"user": "STRING"}))
    packed = PACKED[".gz"](b"user,page\n" + b"u1,secret\n" * 500_000)
    (tmp_path / "t.csv.gz").write_bytes(packed[:-20])
    assert refusal(register, catalog(tmp_path, "t.csv.gz")) == "UsageError table t"


_PEAK = """
import re, sys
from pathlib import Path
from dpstream.pipelines.tables.registration import check_files
from tests.pipelines.sql.asking import catalog
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10
tables = catalog(Path(sys.argv[1]), "t.parquet", {"user": "STRING", "a": "STRING"})
before = peak()
check_files(tables.tables["t"])
print(peak() - before)
"""


def test_the_check_of_parquet_takes_little_memory(tmp_path: Path) -> None:
    small_bomb(tmp_path / "t.parquet", "dictionary")
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 300


def test_parquet_that_unpacks_to_much_more_is_refused(tmp_path: Path) -> None:
    plain_bomb(tmp_path / "t.parquet")
    tables = catalog(tmp_path, "t.parquet", {"user": "STRING", "a": "STRING"})
    with pytest.raises(UsageError) as error:
        check_files(tables.tables["t"])
    assert error.value.field == "table t"


def test_memory_that_ends_is_no_malformed_file(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": ["x"]}), tmp_path / "t.parquet")
    tables = catalog(tmp_path, "t.parquet", {"user": "STRING", "a": "STRING"})
    ends = mock.patch.object(pq, "ParquetFile", side_effect=pa.ArrowMemoryError())
    with ends, pytest.raises(MemoryError):
        check_files(tables.tables["t"])


_COUNT = dp("COUNT(*) AS n", "FROM visits", "epsilon = 50, delta = 1e-9")


def declared(folder: Path, columns: str) -> Catalog:
    """The data set with columns that its catalog declares."""
    path = data_set(folder)
    text = path.read_text().replace('unit_column = "uid"\n', f'unit_column = "uid"\n{columns}\n', 1)
    accounts.write(path, text)
    return load_catalog(path)


@pytest.mark.parametrize("own", ["file_row_number", "filename", "file_index", "elsewhere"])
def test_a_column_that_no_parquet_file_has_is_refused(own: str, tmp_path: Path) -> None:
    """DuckDB has some of its own: a row's number in its file depends on other units' rows."""
    columns = f'columns = {{ uid = "INT64", {own} = "INT64" }}'
    text = dp(f"SUM({own}, contribution_bounds_per_group => (0, 9)) AS n", "FROM visits")
    with pytest.raises(RunError, match="without the column") as failed:
        ask(declared(tmp_path, columns), text)
    assert failed.value.field == "table visits" and charges(tmp_path) == []
    table = visits().append_column(own, visits().column("n"))
    declaration = declared(tmp_path, columns)
    pq.write_table(table, tmp_path / "visits.parquet")
    assert ask(declaration, text).charged


def test_pages_that_unpack_too_far_are_refused_before_a_charge(tmp_path: Path) -> None:
    """DuckDB would decode them whole, after the charge."""
    path = data_set(tmp_path)
    plain = tmp_path / "visits.parquet"
    long = pa.array(["x" * (1 << 20)] * ((MAX_UNPACKED >> 20) + 2))
    rows = visits().slice(0, len(long))
    at = rows.schema.get_field_index("page")
    table = rows.set_column(at, "page", long)
    pq.write_table(table, plain, compression="zstd", use_dictionary=False, write_statistics=False)
    with pytest.raises(UsageError) as refused:
        ask(load_catalog(path), _COUNT)
    assert refused.value.field == "table visits" and charges(tmp_path) == []


def test_a_header_without_a_column_is_refused_and_an_old_answer_is_not(tmp_path: Path) -> None:
    path = data_set(tmp_path, kind="csv")
    first = ask(load_catalog(path), _COUNT)
    lines = (tmp_path / "visits.csv").read_text().splitlines()
    (tmp_path / "visits.csv").write_text("\n".join(['"uid","page","seconds","m"', *lines[1:]]))
    assert refusal(ask, load_catalog(path), _COUNT, FRESH) == "RunError table visits"
    assert len(charges(tmp_path)) == 1
    assert ask(load_catalog(path), _COUNT).receipt == first.receipt


def database(folder: Path, uri: str, key: str = "INT64", **columns: str) -> Catalog:
    """People and what they ordered, by a key."""
    tables = {
        "people": {"uri": uri, "unit_column": "uid",
                   "columns": {"uid": "INT64", "code": key, **columns}},
        "orders": {"uri": uri, "columns": {"person": key},
                   "unit_via": {"table": "people", "on": [["person", "code"]]}},
    }  # fmt: skip
    unit = ("uid", "int")
    return catalog_of(projects.of_tables(folder, unit, tables, insecure_test_secret=KEY))


def refused(catalog: Catalog) -> DpstreamError:
    """Of a question and of the owner's check alike; nothing is charged."""
    with pytest.raises(DpstreamError) as register_error:
        register(catalog)
    with pytest.raises(DpstreamError) as fitting_error:
        require_fitting(catalog, catalog.tables)
    assert (type(fitting_error.value), str(fitting_error.value)) == (
        type(register_error.value),
        str(register_error.value),
    )
    return register_error.value


def test_sqlite_types(tmp_path: Path) -> None:
    def made(columns: str) -> Catalog:
        with contextlib.closing(sqlite3.connect(tmp_path / "shop.db")) as db:
            db.executescript(
                "DROP TABLE IF EXISTS people; DROP TABLE IF EXISTS orders;"
                f"CREATE TABLE people ({columns}); CREATE TABLE orders (person)"
            )
        return database(tmp_path, "sqlite:///shop.db")

    for columns in ("UID, code", "uid INTEGER, code BIGINT", "uid, code NUMERIC"):
        require_fitting(made(columns), ["people", "orders"])
    for columns, fits in (("uid, code VARCHAR(9)", "STRING"), ("uid REAL, code", "FLOAT64")):
        error = refused(made(columns))
        assert isinstance(error, UsageError) and error.fix == f"declare it as {fits}"
        assert error.field.startswith("table people, column ")
    assert "is not there" in str(refused(made("uid, kode")))


def test_postgresql_types(server: str, tmp_path: Path) -> None:
    import adbc_driver_postgresql.dbapi as postgresql

    def made(columns: str, **declared: Any) -> Catalog:
        person = "numeric(9, 0)" if declared.get("key") else "int"
        with postgresql.connect(server) as connection, connection.cursor() as cursor:
            for text in ("DROP TABLE IF EXISTS people", "DROP TABLE IF EXISTS orders",
                         "DROP DOMAIN IF EXISTS d", "CREATE DOMAIN d AS numeric(9, 2)",
                         f"CREATE TABLE people ({columns})",
                         f"CREATE TABLE orders (person {person})"):  # fmt: skip
                cursor.execute(text)
            connection.commit()
        return database(tmp_path, server, **declared)

    key = "uid bigint, code int PRIMARY KEY"
    register(made(key))
    register(made(f"{key}, x d, y numeric, z uuid", x="NUMERIC", y="FLOAT64", z="STRING"))
    for columns, more, fits in (
        ("uid bigint, code text PRIMARY KEY", {}, "STRING"),
        ("uid bigint, code numeric PRIMARY KEY", {}, "NUMERIC"),
        ("uid varchar(9), code int PRIMARY KEY", {}, "STRING"),
        (f"{key}, x timestamp", {"x": "DATE"}, "DATETIME"),
        (f"{key}, x int", {"x": "BOOL"}, "INT64"),
    ):
        error = refused(made(columns, **more))
        assert isinstance(error, UsageError) and error.fix == f"declare it as {fits}"
    assert "is not there" in str(refused(made("uid bigint, kode int")))
    for kind, usable in (("d", True), ("numeric(9, 9)", True), ("numeric(12, 10)", False),
                         ("numeric", False), ("bigint", True)):  # fmt: skip
        catalog = made(f"uid bigint, code {kind} PRIMARY KEY", key="NUMERIC")
        if usable:
            register(catalog)
        else:
            assert isinstance(refused(catalog), PolicyError)


_ORDERS = """
[table.people]
path = "people.csv"
unit_column = "uid"
columns = { uid = "INT64", code = "STRING" }
[table.orders]
path = "orders.csv"
columns = { person = "STRING", item = "STRING" }
unit_via = { table = "people", on = [["person", "code"]] }
"""
_TEXT = dp("item, COUNT(*, contribution_bounds_per_group => (0, 5)) AS n",
           "FROM orders GROUP BY item")  # fmt: skip


def shop_files(folder: Path) -> Path:
    path = data_set(folder, visits(200))
    accounts.write(path, path.read_text() + _ORDERS)
    people(folder)
    lines = "".join(f"c{i % 300},{'ab'[i % 2]}\n" for i in range(900))
    (folder / "orders.csv").write_text("person,item\n" + lines)
    return path


def people(folder: Path, more: str = "") -> None:
    lines = "".join(f"{i},c{i}\n" for i in range(300))
    (folder / "people.csv").write_text(f"uid,code\n{lines}{more}")


def test_a_key_is_checked_before_anybody_asks(tmp_path: Path) -> None:
    shop_files(tmp_path)
    ask(load_catalog(tmp_path), dp("COUNT(*) AS n", "FROM visits"))  # has no declared key
    assert refusal(ask, load_catalog(tmp_path), _TEXT) == "PolicyError table people"
    assert len(charges(tmp_path)) == 1
    registered = register(load_catalog(tmp_path))
    assert registered == (
        [{"table": "visits", "kind": "parquet", "rows_of": {"unit_column": "uid"}},
         {"table": "pages", "kind": "csv", "rows_of": "public"},
         {"table": "people", "kind": "csv", "rows_of": {"unit_column": "uid"}},
         {"table": "orders", "kind": "csv",
          "rows_of": {"unit_via": "people", "on": [["person", "code"]]}}],
        [("people", ("code",))],
    )  # fmt: skip
    assert ask(load_catalog(tmp_path), _TEXT).table.num_rows == 2
    with open(tmp_path / "orders.csv", "a") as file:  # its rows are nobody's key
        file.write("c1,b\n")
    assert ask(load_catalog(tmp_path), _TEXT, FRESH).charged


def test_a_changed_file_is_checked_anew_and_a_double_key_refused(tmp_path: Path) -> None:
    shop_files(tmp_path)
    register(load_catalog(tmp_path))
    first = ask(load_catalog(tmp_path), _TEXT)
    people(tmp_path, "77123,c77\n")
    assert ask(load_catalog(tmp_path), _TEXT).receipt == first.receipt  # reads no file
    for _ in range(2):  # the check that fails leaves no note
        with pytest.raises(PolicyError, match="was not checked") as refused:
            ask(load_catalog(tmp_path), _TEXT, FRESH)
        assert "77" not in str(refused.value)
        with pytest.raises(PolicyError, match="share a key") as error:
            register(load_catalog(tmp_path))
        assert "77" not in str(error.value) and error.value.field == "table people"
    people(tmp_path)
    assert ask(load_catalog(tmp_path), _TEXT, FRESH).charged  # these were checked
    assert len(charges(tmp_path)) == 2


def test_the_values_that_statements_see_are_checked(tmp_path: Path) -> None:
    """Two spellings that the catalog's type makes one number are one key."""
    path = shop_files(tmp_path)
    text = path.read_text().replace('code = "STRING"', 'code = "INT64"')
    accounts.write(path, text.replace('person = "STRING"', 'person = "INT64"'))
    (tmp_path / "people.csv").write_text("uid,code\n1,7\n2,07\n3,x\n4,y\n")
    assert refusal(register, load_catalog(tmp_path)) == "PolicyError table people"
    (tmp_path / "people.csv").write_text("uid,code\n1,7\n2,8\n3,x\n4,y\n")
    register(load_catalog(tmp_path))  # what is no number is no key


def test_a_note_is_of_these_keys_only_and_cannot_be_made_up(tmp_path: Path) -> None:
    path = shop_files(tmp_path)
    register(load_catalog(tmp_path))
    notes = tmp_path / "ledger.db.keys"
    [note] = json.loads(notes.read_text())
    assert len(note) == 32 and stat.S_IMODE(notes.stat().st_mode) == 0o600
    register(load_catalog(tmp_path))
    assert json.loads(notes.read_text()) == [note]
    before = path.read_text()
    wider = before.replace('[["person", "code"]]', '[["person", "code"], ["item", "kind"]]')
    accounts.write(path, wider.replace('code = "STRING"', 'code = "STRING", kind = "STRING"'))
    assert refusal(ask, load_catalog(tmp_path), _TEXT) == "PolicyError table people"
    accounts.write(path, before)
    (tmp_path / "noise.secret").write_text(KEY[::-1])
    assert refusal(ask, load_catalog(tmp_path), _TEXT) == "PolicyError table people"
    for broken in ("", "{}", "[1, null]", '["' + "0" * 32 + '"]'):
        notes.write_text(broken)
        assert refusal(ask, load_catalog(tmp_path), _TEXT) == "PolicyError table people"
    assert charges(tmp_path) == []


def test_of_two_checks_at_once_neither_loses_the_other_s_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have read the notes before either writes, unless one waits for the other."""
    both, real = threading.Barrier(2), registration._read

    def read(path: Path) -> list[str]:
        note_lines = real(path)
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(timeout=0.3)
        return note_lines

    monkeypatch.setattr(registration, "_read", read)
    notes = tmp_path / "ledger.db.keys"
    changes = [
        threading.Thread(target=registration._change_notes, args=(notes, set(), [letter * 32]))
        for letter in "ab"
    ]
    for change in changes:
        change.start()
    for change in changes:
        change.join()
    assert sorted(real(notes)) == ["a" * 32, "b" * 32]


Row = dict[str, int | None]
SCHEMA = pa.schema([("UID", pa.int64()), ("age", pa.int64())])


def reader(rows: dict[str, list[Row]]) -> Callable[[str], Iterator[pa.RecordBatch]]:
    def read(table: str) -> Iterator[pa.RecordBatch]:
        for row in rows.get(table, []):  # a batch each: keys meet across batches
            yield pa.RecordBatch.from_pylist([row], schema=SCHEMA)

    return read


def test_keys_of_the_shop() -> None:
    assert ("users", ("uid",)) in [(t, tuple(c)) for t, c in shop().declared_keys]
    users: list[Row] = [{"UID": 1, "age": 3}, {"UID": 2, "age": 3}, {"UID": None, "age": 1}]
    check_keys(shop(), reader({"users": [*users, {"UID": None, "age": 2}]}))
    with pytest.raises(PolicyError) as error:
        check_keys(shop(), reader({"users": [*users, {"UID": 77123, "age": 1}] * 2}))
    assert error.value.field == "table users" and "77123" not in str(error.value)


# Catalogs: places, columns, types and owners of tables, and their digest.


def changed(**account: Any) -> Catalog:
    data_set = SHOP["data_set"]["shop"]
    sections = {"shop": {**data_set, "account": {**data_set["account"], **account}}}
    return elsewhere({**SHOP, "data_set": sections})


def elsewhere(sections: dict[str, Any]) -> Catalog:
    return catalog_of(projects.of_sections(Path("/elsewhere"), sections))


def test_a_path_adds_the_unit_s_column() -> None:
    catalog = shop()
    assert catalog.schema["orders"] == catalog.tables["orders"].columns | {"uid": "INT64"}
    assert catalog.schema["users"] == catalog.tables["users"].columns
    assert catalog.types["items"]["uid"] == exp.DType.BIGINT
    assert catalog.types["visits"]["at"] == exp.DType.TIMESTAMPTZ
    assert catalog.declared_keys == [("orders", ("order_id",)), ("users", ("uid",))]


def test_a_digest_is_of_tables_and_not_of_their_place() -> None:
    one, there = shop(), elsewhere(SHOP)
    assert one.digest(SHOP["table"]) == there.digest(SHOP["table"]) and one.tables != there.tables
    more = {"n": "BOOL"}
    tables = {k: {**t, "columns": t["columns"] | more} for k, t in SHOP["table"].items()}
    other = elsewhere({**SHOP, "table": tables})
    assert all(other.digest([name]) != one.digest([name]) for name in tables)
    assert one.digest(["users"]) != one.digest(["users", "visits"]) != one.digest(["visits"])


@pytest.mark.parametrize(
    ("path", "beside", "notebook"),
    [("books/ledger.db", "/elsewhere/books", "/elsewhere/books/ledger.db.keys"),
     ("spanner://project/instance/database", "/elsewhere", "/elsewhere/database.keys")],
    ids=["file", "database"],
)  # fmt: skip
def test_notes_lie_beside_the_ledger(path: str, beside: str, notebook: str) -> None:
    catalog = changed(path=path)
    assert (str(catalog.beside), str(catalog.notebook)) == (beside, notebook)


READING = '{"csv":{"names":["day"]},"time":{"column":"day","unit":"s"}}'
FULL = Table(
    "orders", "postgresql", "postgresql://host/shop", {"order_id": "INT64", "day": "DATE"},
    "uid", Via("users", (("customer_id", "uid"),)), "public.orders", ("uid", "owner"),
    reading=Reading(CsvSection(names=("day",)), TimeColumn("day", "s")),
)  # fmt: skip


def test_the_canonical_form_of_a_table_has_frozen_names() -> None:
    """Digests of catalogs and notes on keys are computed from this form: a renamed field keeps its
    name here."""
    assert canonical(FULL) == {
        "name": "orders", "kind": "postgresql", "remote": "public.orders",
        "columns": {"order_id": "INT64", "day": "DATE"}, "unit": "uid", "units": ["uid", "owner"],
        "via": {"table": "users", "on": [["customer_id", "uid"]]},
        "reading": READING,
    }  # fmt: skip


@pytest.mark.parametrize("path", [p for p in leaves(FULL) if p[-1] != "zone"], ids=str)
def test_every_field_but_the_place_is_in_the_canonical_form(path: tuple[object, ...]) -> None:
    same = canonical(changed_field(FULL, path)) == canonical(FULL)
    assert same == (path == ("place",))


HERE = Path("/data")


@pytest.mark.parametrize(
    ("path", "uri", "expected"),
    [
        ("a.parquet", None, ("parquet", "/data/a.parquet")),
        ("a.CSV.gz", None, ("csv", "/data/a.CSV.gz")),
        ("/x/*.ndjson.zst", None, ("jsonl", "/x/*.ndjson.zst")),
        (None, "postgres://h/d", ("postgresql", "postgres://h/d")),
        (None, "sqlite:///x.db", ("sqlite", "sqlite:////data/x.db")),
        (None, "SQLite:x.db", ("sqlite", "sqlite:////data/x.db")),
        (None, "sqlite:////x/y.db", ("sqlite", "sqlite:////x/y.db")),
    ],
)
def test_kind_and_place(path: str | None, uri: str | None, expected: tuple[str, str]) -> None:
    assert kind_of("table t", path, uri, HERE) == expected


def test_declared_types_are_in_one_case() -> None:
    assert file_columns("t", "csv", "", {"Uid": "int64"}) == {"uid": "INT64"}


PLACES = [(None, None), ("a.csv", "sqlite:x"), ("a.xls", None), ("a\0.csv", None),
          (None, "mysql://h/d")]  # fmt: skip
COLUMNS: dict[str, dict[str, str] | None] = {
    "none": None, "no columns": {}, "differ in case": {"a": "INT64", "A": "INT64"},
    "a.b": {"a.b": "INT64"}, "JSON": {"a": "JSON"}, "a:b": {"a:b": "STRING"},
    "empty": {"": "INT64"},
    "a space first": {" a": "INT64"}, 'a"b': {'a"b': "INT64"}, "a`b": {"a`b": "INT64"},
    "the program's": {"Row Number": "INT64"}, "upper case": {"Ärzte": "INT64"},
    "too many": {f"c{n}": "BOOL" for n in range(MAX_COLUMNS + 1)},
}  # fmt: skip


def test_places_and_columns_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    calls: dict[str, Callable[[], object]] = {
        f"{path!r} {uri!r}": partial(kind_of, "table.t", path, uri, HERE) for path, uri in PLACES
    }
    for name, declared in COLUMNS.items():
        calls[name] = partial(file_columns, "table.t", "csv", "", declared)
    for file in ("a.parquet", "none.parquet"):
        calls[file] = partial(file_columns, "table.t", "parquet", f"{tmp_path / file}", None)
    check(Path(__file__).with_name("columns.txt"), of_refusals(calls))


def test_parquet_says_its_own_types(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    columns = {
        "n": pa.array([1]),
        "list": pa.array([[1]]),
        "s": pa.array(["x"]).dictionary_encode(),
        "Bike Type": pa.array(["x"]),
        "cost €": pa.array([1]),
        "bike.type": pa.array(["x"]),
        "event": pa.array([{"page": "x", "geo": {"city": b"x"}}]),
        "Ärzte": pa.array([1]),
        "Id": pa.array([1]),  # no statement can write these three
        "id": pa.array([1]),
    }
    pq.write_table(pa.table(columns), path)
    assert file_columns("t", "parquet", str(path), None) == {
        "n": "INT64", "s": "STRING", "bike type": "STRING", "cost €": "INT64",
        "bike.type": "STRING", "event.page": "STRING", "event.geo.city": "BYTES",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (pa.int8(), "INT64"),
        (pa.uint64(), "NUMERIC"),
        (pa.float32(), "FLOAT64"),
        (pa.bool_(), "BOOL"),
        (pa.large_string(), "STRING"),
        (pa.binary(), "BYTES"),
        (pa.date32(), "DATE"),
        (pa.timestamp("us", "UTC"), "TIMESTAMP"),
        (pa.timestamp("us"), "DATETIME"),
        (pa.decimal128(9, 2), "NUMERIC"),
        (pa.struct([]), None),
    ],
)
def test_types_of_arrow(kind: pa.DataType, name: str | None) -> None:
    assert sql_type(kind) == name
