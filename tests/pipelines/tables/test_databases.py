"""Tables of databases, and the locked engine that has them and nothing else."""

import contextlib
import decimal
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.pipelines.ask.question import Asking
from dpstream.pipelines.render.answer import python_values
from dpstream.pipelines.sql.ask import ask
from dpstream.pipelines.sql.load import catalog_of, load_catalog
from dpstream.pipelines.statements.statement import statement_of
from dpstream.pipelines.tables.catalog import Catalog
from dpstream.pipelines.tables.engine import Engine
from dpstream.pipelines.tables.registration import register
from dpstream.state.ledger.contract import AnswerLog
from dpstream.state.sqlite.database import sqlite3
from tests import accounts, projects
from tests.faults.journals import leave_journal
from tests.golden.pinned import refusal
from tests.golden.refusals import Refused
from tests.lanes import few_first
from tests.pipelines.sql.asking import (
    COUNTED,
    FRESH,
    KEY,
    OPTIONS,
    answer_to,
    charges,
    data_set,
    dp,
)
from tests.pipelines.sql.test_ask import BEFORE_NOISE

_COLUMNS = {"uid": "INT64", "page": "STRING", "f": "FLOAT64", "d": "NUMERIC", "b": "BYTES",
            "day": "DATE", "at": "TIMESTAMP"}  # fmt: skip
_WIDE = OPTIONS.replace("epsilon = 2", "epsilon = 50")


def _catalog(folder: Path, uri: str, remote: str = "Visits") -> Catalog:
    table = {"uri": uri, "remote": remote, "unit_column": "uid", "columns": _COLUMNS}
    return _made(folder, {"visits": table})


def _made(folder: Path, tables: dict[str, dict[str, Any]]) -> Catalog:
    unit = ("uid", "int")
    project = projects.of_tables(folder, unit, tables, insecure_test_secret=KEY)
    return accounts.of_catalog(catalog_of(project))


def exact_rows(catalog: Catalog) -> int:
    """How many there are now, without noise."""
    with Engine(catalog, ["visits"]) as engine:
        return int(engine.run("SELECT COUNT(*) AS n FROM visits")["n"][0].as_py())


def _rows(size: int = 3_000) -> list[tuple[Any, ...]]:
    days = ["2024-01-05", None, "2024-02-29"]
    return [
        (i % 500 if i % 11 else None, f"p{i % 3}", i / 8, f"{i}.25", b"\x00x", days[i % 3],
         "2024-01-05 01:02:03+00")
        for i in range(size)
    ]  # fmt: skip


def _database(path: Path, size: int, *more: str) -> None:
    """A file of SQLite with so many rows, and what more statements make of them."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        for text in (text for text in more if text.startswith("PRAGMA")):
            db.execute(text)
        db.execute("CREATE TABLE Visits (UID, page, f, d, b, day, at)")
        db.executemany("INSERT INTO Visits VALUES (?, ?, ?, ?, ?, ?, ?)", _rows(size))
        for text in (text for text in more if not text.startswith("PRAGMA")):
            db.execute(text)
        db.commit()


@pytest.fixture
def run(server: str) -> Callable[..., None]:
    """Commits statements in a transaction; ``rows`` are for the one with parameters."""
    import adbc_driver_postgresql.dbapi as postgresql

    def committed(*texts: str, rows: Sequence[tuple[Any, ...]] = ()) -> None:
        with postgresql.connect(server) as connection, connection.cursor() as cursor:
            for text in texts:
                cursor.executemany(text, rows) if "$1" in text else cursor.execute(text)
            connection.commit()

    return committed


def _check(catalog: Catalog) -> None:
    answer = ask(catalog, dp(f"page, {COUNTED} AS n, AVG(d, contribution_bounds_per_row => "
                            "(0, 3000)) AS a", options=_WIDE) + " ORDER BY page")  # fmt: skip
    rows = answer.table.to_pylist()
    assert [row["page"] for row in rows] == ["p0", "p1", "p2"] and answer.insecure
    assert all(abs(row["n"] - 909) < 250 and abs(row["a"] - 1500) < 500 for row in rows)
    again = ask(catalog, dp("day, COUNT(DISTINCT uid) AS u", "FROM visits GROUP BY day", _WIDE))
    assert {None if d is None else str(d) for d in again.table["day"].to_pylist()} == {
        None, "2024-01-05", "2024-02-29",
    }  # fmt: skip


def test_sqlite_s_path_starts_from_the_catalog_s_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, rows in (("catalog", 7), ("elsewhere", 9)):
        (tmp_path / folder).mkdir()
        _database(tmp_path / folder / "shop.db", rows)
    monkeypatch.chdir(tmp_path / "elsewhere")
    with Engine(_catalog(tmp_path / "catalog", "sqlite:///shop.db"), ["visits"]) as engine:
        assert engine.run("SELECT COUNT(*) AS n FROM visits")["n"][0].as_py() == 7


def test_a_log_that_reading_makes_is_no_change(tmp_path: Path) -> None:
    """Of a database in WAL mode, which its writer has closed."""
    _database(tmp_path / "shop.db", 3_000, "PRAGMA journal_mode = wal")
    catalog = _catalog(tmp_path, "sqlite:///shop.db")
    text = dp(f"page, {COUNTED} AS n", options=_WIDE)
    first = ask(catalog, text)
    again = ask(catalog, text)
    assert first.charged and not again.charged and again.receipt == first.receipt
    db = sqlite3.connect(tmp_path / "shop.db")  # a commit that stands in the log alone
    before = exact_rows(catalog)
    db.execute("INSERT INTO Visits SELECT * FROM Visits LIMIT 1")
    db.commit()
    assert exact_rows(catalog) == before + 1
    assert ask(catalog, text).receipt == first.receipt
    assert ask(catalog, text, FRESH).charged  # in a run, the log is no change
    db.close()


def test_a_journal_of_a_killed_program_is_rolled_back(tmp_path: Path) -> None:
    """Its uncommitted rows are in the file, and in no answer."""
    path = tmp_path / "shop.db"
    _database(path, 3_000)
    catalog, text = _catalog(tmp_path, "sqlite:///shop.db"), dp(f"page, {COUNTED} AS n")
    before = exact_rows(catalog)
    journal = leave_journal(path)
    assert ask(catalog, text).charged
    assert not journal.exists() and exact_rows(catalog) == before


def test_a_text_of_sqlite_that_is_none_is_null(tmp_path: Path) -> None:
    odd = "INSERT INTO Visits (UID, page) VALUES (77, CAST(x'fffe' AS TEXT))"
    _database(tmp_path / "shop.db", 30, odd)
    with Engine(_catalog(tmp_path, "sqlite:///shop.db"), ["visits"]) as engine:
        rows = engine.run("SELECT page, UPPER(page) AS p FROM visits WHERE uid = 77").to_pylist()
        assert rows == [{"page": None, "p": None}]
        assert engine.run("SELECT COUNT(UPPER(page)) AS n FROM visits")["n"][0].as_py() == 30


def test_sqlite(tmp_path: Path) -> None:
    # A column has no type of its own there: whatever stands in it, nothing fails.
    strange = "INSERT INTO Visits VALUES ('x', 5, 'y', 'z', 3, 'd', 4)"
    _database(tmp_path / "shop.db", 3_000, strange)
    catalog = _catalog(tmp_path, f"sqlite:///{tmp_path}/shop.db")
    _check(catalog)
    with Engine(catalog, ["visits"]) as engine:
        odd = engine.run("SELECT * FROM visits WHERE page = '5'").to_pylist()
        assert odd == [dict.fromkeys(_COLUMNS) | {"page": "5"}]
        assert engine.run("SELECT COUNT(*) AS n FROM visits")["n"][0].as_py() == 3_001
    question = dp(f"page, {COUNTED} AS n", options=_WIDE)
    first = ask(catalog, question)
    assert ask(catalog, question).receipt == first.receipt
    with contextlib.closing(sqlite3.connect(tmp_path / "shop.db")) as db:
        db.execute("DELETE FROM Visits WHERE page = 5")
        db.commit()
    again = ask(catalog, question)  # whatever the file is now
    assert (again.receipt, again.charged) == (first.receipt, False)
    assert ask(catalog, question, Asking(as_of="later")).charged


def test_a_database_that_is_not_there_is_a_coded_error(tmp_path: Path) -> None:
    assert (
        refusal(
            ask, _catalog(tmp_path, f"sqlite:///{tmp_path}/none.db"), dp(f"page, {COUNTED} AS n")
        )
        == "RunError table visits"
    )


_COLUMNS_THERE = "(uid bigint, page text, f float8, d numeric, b bytea, day date, at timestamptz)"


def test_postgresql(server: str, run: Callable[..., None], tmp_path: Path) -> None:
    run(
        "CREATE SCHEMA s",
        f'CREATE TABLE s."Visits" {_COLUMNS_THERE}',
        'INSERT INTO s."Visits" VALUES ($1, $2, $3, $4::text::numeric, $5, $6::text::date, '
        "$7::text::timestamptz)",
        "INSERT INTO s.\"Visits\" VALUES (1, 'odd', 'NaN', 'NaN', '', 'infinity', 'infinity')",
        rows=_rows(),
    )
    catalog = _catalog(tmp_path, server, "s.Visits")
    _check(catalog)
    with Engine(catalog, ["visits"]) as engine:
        [odd] = engine.run("SELECT uid, d, b FROM visits WHERE page = 'odd'").to_pylist()
        assert odd == {"uid": 1, "d": None, "b": b""}
        day = engine.run("SELECT day FROM visits WHERE page = 'odd'").column("day")
        assert python_values(day) == ["-5877611-06-21"]  # the driver wraps PostgreSQL's infinity
    question = dp(f"page, {COUNTED} AS n", options=_WIDE)
    first = ask(catalog, question)
    run("DELETE FROM s.\"Visits\" WHERE page = 'odd'")
    again = ask(catalog, question)
    assert (again.receipt, again.charged) == (first.receipt, False)
    assert ask(catalog, question, FRESH).charged


def test_rows_of_a_server_that_change_get_other_noise(
    server: str, run: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under one run id, of a charge whose receipt was lost; and over the same rows the same."""
    run(f'CREATE TABLE "Visits" {_COLUMNS_THERE}')
    run("INSERT INTO \"Visits\" (uid, page) SELECT i, 'a' FROM generate_series(1, 900) i")
    catalog = _catalog(tmp_path, server)
    text = dp(f"{COUNTED} AS n", "FROM visits", "epsilon = 1e-3, mechanism = GEOMETRIC")
    commit = AnswerLog.commit

    def lost(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(AnswerLog, "commit", lost)
    with pytest.raises(KeyboardInterrupt):
        ask(catalog, text)
    monkeypatch.setattr(AnswerLog, "commit", commit)
    account, noise = (tmp_path / "ledger.db").read_bytes(), list[float]()
    [head] = tmp_path.rglob("*.head")
    seen = head.read_bytes()
    for change in ("SELECT 1", 'CREATE TABLE t AS SELECT * FROM "Visits"',
                   'DELETE FROM "Visits" WHERE uid = 7'):  # fmt: skip
        (tmp_path / "ledger.db").write_bytes(account)
        head.write_bytes(seen)  # restored with the account, which nobody can notice
        run(change)
        answer = ask(catalog, text)
        assert not answer.charged and len(accounts.charges(tmp_path / "ledger.db")) == 1
        noise.append(answer.table["n"][0].as_py() - exact_rows(catalog))
    assert noise[0] == noise[1]
    assert noise[2] not in (noise[0], noise[0] + 1)


@pytest.mark.parametrize("name", few_first(BEFORE_NOISE))
def test_public_rows_of_a_server_are_part_of_a_question_by_content(
    server: str, run: Callable[..., None], name: str, tmp_path: Path
) -> None:
    """Whatever their order, schema and way of storage; another row is another question."""
    path, place = data_set(tmp_path), f"{name}_pages"
    config, text = path.read_text(), BEFORE_NOISE[name]

    def at(remote: str) -> None:
        there = f'uri = "{server}"\nremote = "{remote}"'
        path.write_text(config.replace('path = "pages.csv"', there))

    def charged(*changes: str) -> list[bool]:
        """Of the question after each change."""
        out = list[bool]()
        for change in changes:
            run(change)
            out.append(answer_to(tmp_path, text).charged)
        return out

    run(f"CREATE TABLE {place} (page text, title text)")
    at(place)
    fill = f"INSERT INTO {place} SELECT 'p' || i, 'Title ' || i % 3 FROM generate_series(0, 11) i"
    assert charged(fill, f"UPDATE {place} SET title = title WHERE page < 'p3'") == [True, False]
    first = answer_to(tmp_path, text)
    more = f"INSERT INTO {place} VALUES ('p3', 'Title 0')"  # a row that is there already
    assert charged(more) == [True]
    run(f"CREATE SCHEMA {name}",
        f"CREATE VIEW {name}.v AS SELECT title::varchar(9), page FROM (SELECT DISTINCT * FROM "
        f"{place}) AS t ORDER BY page DESC")  # fmt: skip
    at(f"{name}.v")
    again = answer_to(tmp_path, text)
    assert not again.charged and again.receipt == first.receipt and len(charges(tmp_path)) == 2
    odd = (f"UPDATE {place} SET title = {to} WHERE page = 'p1'" for to in ("NULL", "''", "'NULL'"))
    assert charged(*odd, f"DELETE FROM {place}") == [True] * 4
    assert charged(fill) == [False] and len(charges(tmp_path)) == 6


@pytest.mark.parametrize("name", few_first(BEFORE_NOISE))
def test_public_rows_of_a_server_that_change_before_they_are_read(
    server: str, run: Callable[..., None], name: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, refused: Refused,
) -> None:  # fmt: skip
    """Between the digest, the charge and the scan: the answer would be of another question."""
    path, place = data_set(tmp_path), f"{name}_late"
    there = f'uri = "{server}"\nremote = "{place}"'
    path.write_text(path.read_text().replace('path = "pages.csv"', there))
    run(f"CREATE TABLE {place} AS SELECT 'p' || i AS page, 'Title' AS title "
        "FROM generate_series(0, 11) i")  # fmt: skip
    begin = AnswerLog.begin

    def late(*of: Any) -> Any:
        begun = begin(*of)
        run(f"INSERT INTO {place} VALUES ('p99', 'Title')")
        return begun

    monkeypatch.setattr(AnswerLog, "begin", late)
    caught = refused(answer_to, tmp_path, BEFORE_NOISE[name])
    monkeypatch.setattr(AnswerLog, "begin", begin)
    assert caught.field == "input" and len(charges(tmp_path)) == 1
    run(f"DELETE FROM {place} WHERE page = 'p99'")
    assert not answer_to(tmp_path, BEFORE_NOISE[name]).charged and len(charges(tmp_path)) == 1


def test_postgresql_keeps_a_declared_key_unique(
    server: str, run: Callable[..., None], tmp_path: Path
) -> None:
    """Its rows may change unseen, so that only a constraint will do."""
    run('CREATE TABLE "People" (uid bigint, code bigint)',
        "CREATE TABLE orders (person bigint, item text)",
        'INSERT INTO "People" SELECT i, i + 1 FROM generate_series(1, 300) i',
        "INSERT INTO orders SELECT 1 + i % 299, 'a' FROM generate_series(1, 900) i")  # fmt: skip
    catalog = _made(tmp_path, {
        "people": {"uri": server, "remote": "People", "unit_column": "uid",
                   "columns": {"uid": "INT64", "code": "INT64"}},
        "orders": {"uri": server, "columns": {"person": "INT64", "item": "STRING"},
                   "unit_via": {"table": "people", "on": [["person", "code"]]}},
    })  # fmt: skip
    question = dp(f"item, {COUNTED} AS n", "FROM orders GROUP BY item", _WIDE)
    for text in ("SELECT 1", 'CREATE UNIQUE INDEX ON "People" (code) WHERE uid > 3',
                 'CREATE UNIQUE INDEX ON "People" (code, uid)'):  # fmt: skip
        run(text)
        assert refusal(register, catalog) == "PolicyError table people"
        assert refusal(ask, catalog, question) == "PolicyError table people"
    run('ALTER TABLE "People" ADD PRIMARY KEY (code)')
    register(catalog)
    assert abs(ask(catalog, question).table["n"][0].as_py() - 900) < 250


_FORBIDDEN = [
    "ATTACH '{folder}/other.db'",
    "COPY (SELECT 1) TO '{folder}/out.csv'",
    "COPY visits TO '{folder}/out.csv'",
    "PRAGMA threads = 4",
    "SET enable_external_access = true",
    "SET lock_configuration = false",
    "RESET allowed_paths",
    "INSTALL httpfs",
    "LOAD httpfs",
    "EXPORT DATABASE '{folder}/out'",
    "SELECT * FROM '{folder}/secret.csv'",
    "SELECT * FROM read_csv('{folder}/secret.csv')",
    "SELECT * FROM read_parquet('{folder}/*.parquet')",
    "SELECT * FROM read_text('{folder}/noise.secret')",
    "SELECT * FROM glob('{folder}/*')",
    "SELECT * FROM local_table",
    "CREATE SECRET s (TYPE http)",
]


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    (tmp_path / "secret.csv").write_text("a\n1\n")
    return load_catalog(data_set(tmp_path))


@pytest.mark.parametrize("text", _FORBIDDEN)
def test_the_engine_itself_refuses(text: str, catalog: Catalog, tmp_path: Path) -> None:
    local_table = pa.table({"a": [1]})  # not found through Python either
    before = sorted(p.name for p in tmp_path.iterdir())
    with Engine(catalog, ["visits"]) as engine:
        assert engine.run("SELECT COUNT(*) AS n FROM visits")["n"][0].as_py() == 4_000
        assert refusal(engine.run, text.format(folder=tmp_path)) == "RunError statement"
    assert sorted(p.name for p in tmp_path.iterdir()) == before and local_table.num_rows == 1


@pytest.mark.parametrize("text", _FORBIDDEN)
def test_the_parser_refuses(text: str, catalog: Catalog, tmp_path: Path) -> None:
    assert refusal(statement_of, text.format(folder=tmp_path), catalog).startswith("Statement")


def test_errors_say_nothing_of_the_rows(catalog: Catalog, refused: Refused) -> None:
    with Engine(catalog, ["visits"]) as engine:
        failed = refused(engine.run, "SELECT CAST(page AS BIGINT) FROM visits")
    text = "".join(traceback.format_exception(failed))
    assert "p0" not in text and "duckdb." not in text.lower().split("raise found")[-1]
    assert failed.__cause__ is None and failed.__suppress_context__


def test_only_the_named_tables_are_there(catalog: Catalog, refused: Refused) -> None:
    with Engine(catalog, ["pages"]) as engine:
        refused(engine.run, "SELECT * FROM visits")


def test_empty_tables_have_the_types_of_the_full_ones(catalog: Catalog) -> None:
    with Engine(catalog, ["visits"]) as full, Engine(catalog, ["visits"], empty=True) as empty:
        query = "SELECT * FROM visits"
        assert full.run(query).schema == empty.run(query).schema
        assert empty.run(query).num_rows == 0 and full.rows == 4_000


def _types(folder: Path, file: str, columns: dict[str, str]) -> Catalog:
    table = {"path": file, "unit_column": "u", "columns": columns}
    return catalog_of(projects.of_tables(folder, ("u", "string"), {"t": table}))


def test_columns_have_the_catalog_s_types_and_misfits_are_null(tmp_path: Path) -> None:
    columns = {"u": "STRING", "i": "INT64", "f": "FLOAT64", "d": "NUMERIC", "b": "BOOL",
               "y": "DATE", "t": "TIMESTAMP", "l": "DATETIME"}  # fmt: skip
    (tmp_path / "t.csv").write_text(
        "T,U,i,f,d,b,y,l\n"  # in another order, and case
        "2024-01-05 01:02:03+01,e\u0301,5,2.5,1.25,true,2024-01-05,2024-01-05 01:02:03\n"
        "x,\u00e9,5.x,z,q,maybe,31st,noon\n"
    )
    with Engine(_types(tmp_path, "t.csv", columns), ["t"]) as engine:
        first, second = engine.run("SELECT * FROM t ORDER BY i NULLS LAST").to_pylist()
    assert first["u"] == second["u"] == "\u00e9"  # one unit in both spellings
    assert (first["i"], first["f"], first["d"]) == (5, 2.5, decimal.Decimal("1.25"))
    assert str(first["t"]) == "2024-01-05 00:02:03+00:00" and first["b"] is True
    assert [second[c] for c in "ifdbytl"] == [None] * 7


def test_parquet_decimals_keep_their_width(tmp_path: Path) -> None:
    price = pa.array([decimal.Decimal("1.25")], pa.decimal128(10, 2))
    pq.write_table(pa.table({"U": ["a"], "d": price}), tmp_path / "t.parquet")
    with Engine(_types(tmp_path, "t.parquet", {"u": "STRING", "d": "NUMERIC"}), ["t"]) as engine:
        assert engine.run("SELECT d FROM t").schema.field("d").type == pa.decimal128(10, 2)


def test_given_rows_take_the_place_of_files(catalog: Catalog) -> None:
    """What is not given is NULL of its type, and no file is read."""
    visits = pa.table({"uid": pa.array([1, 2]), "page": ["a", None]})
    with Engine(catalog, ["visits", "pages"], rows={"visits": visits, "pages": None}) as engine:
        rows = engine.run("SELECT * FROM visits")
        assert rows.to_pylist() == [
            {"uid": 1, "page": "a", "seconds": None, "n": None},
            {"uid": 2, "page": None, "seconds": None, "n": None},
        ]
        assert engine.run("SELECT * FROM pages").num_rows == 0
        assert (
            refusal(engine.run, f"SELECT * FROM '{catalog.tables['visits'].place}'")
            == "RunError statement"
        )
    with Engine(catalog, ["visits"], empty=True) as empty:
        assert empty.run("SELECT * FROM visits").schema == rows.schema


@pytest.mark.parametrize("kind", ["INT64", "FLOAT64", "NUMERIC", "BOOL", "DATE", "TIMESTAMP"])
def test_a_value_of_another_type_is_null_and_its_row_stays(kind: str, tmp_path: Path) -> None:
    """A cast that DuckDB moves into its reader of CSV would drop the row."""
    data_set(tmp_path)
    (tmp_path / "t.csv").write_text("page,v\na,zz\nb,2024-02-31\nc,\n")
    table = {"path": "t.csv", "public": True, "columns": {"page": "STRING", "v": kind}}
    tables = {"t": table, "s": {**table, "columns": {"page": "STRING", "v": "STRING"}}}
    project = projects.of_tables(tmp_path, ("uid", "int"), tables)
    with Engine(catalog_of(project), ["t", "s"], ordered=True) as engine:
        assert engine.run("SELECT v FROM t").column("v").to_pylist() == [None, None, None]
        own = engine.run("SELECT TRY_CAST(v AS DATE) AS v FROM s").column("v").to_pylist()
    assert own == [None, None, None]
