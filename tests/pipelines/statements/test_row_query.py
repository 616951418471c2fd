"""Queries of a job: row-local or refused, unique keys, the digest, and batches cut in any way."""

import csv
import pickle
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.accounting.errors import RunError
from dpstream.accounting.plan.plan import declared
from dpstream.accounting.plan.unit import UnitIdentity
from dpstream.dp_transforms.ingest.records import positions
from dpstream.pipelines.connectors.query import query_of
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.project.source import LookUp
from dpstream.pipelines.statements.row_query import (
    RowEngine,
    RowTables,
    content,
    look_up,
    look_up_rows,
    numbered,
    row_query,
    typed,
)
from dpstream.pipelines.tables.catalog import ROW, TYPES, Table
from tests.golden.pinned import check, of_refusals, refusal
from tests.pipelines.sql.shop import PROJECT, SECTIONS, all_rows, one_by_one, through, with_text

HERE = Path(__file__).parent
_COLUMNS = {"K": "STRING", "n": "INT64", "d": "DATE", "m": "NUMERIC", "f": "FLOAT64", "b": "BOOL"}
_LINES = ["b,2,2024-01-02,1.5,0.5,true", "a,1,,,nan,no", "a,3,2024-02-31,2,1e400,false"]


def _rows(
    folder: Path,
    *lines: str,
    key: tuple[str, ...] = ("K", "n"),
    name: str = "T",
    path: str = "t.csv",
) -> pa.Table:
    (folder / "t.csv").write_text("\n".join(["K,n,d,m,f,b", *lines]) + "\n")
    config = LookUp(name, path, key, _COLUMNS)
    table, columns = look_up(config, folder)
    tables = RowTables(UnitIdentity("u", "int"), {"t": table}, keys={"t": columns})
    return look_up_rows(tables, "t")


def test_rows_are_canonical_and_in_order_of_the_key(tmp_path: Path) -> None:
    table = _rows(tmp_path, *_LINES)
    assert table.column("k").to_pylist() == ["a", "a", "b"]
    assert table.column("n").to_pylist() == [1, 3, 2]
    assert [v and str(v) for v in table.column("d").to_pylist()] == [None, None, "2024-01-02"]
    assert table.column("f").to_pylist() == [None, None, 0.5]
    assert table.column("b").to_pylist() == [False, False, True]


def test_look_ups_that_are_refused(tmp_path: Path) -> None:
    lines, spelled = _LINES, ["e\u0301,1,,,,", "\u00e9,1,,,,"]
    calls: dict[str, Callable[[], object]] = {"spelled": lambda: _rows(tmp_path, *spelled)}
    for key in [("k",), (), ("x",), ("f",), ("m",), ("n", "f")]:
        calls[f"key {key}"] = partial(_rows, tmp_path, *lines, key=key)
    for name, path in [("my t", "t.csv"), ("t", "t.txt"), ("t", "none.csv"), ("t", "sqlite:x")]:
        calls[f"{name} at {path}"] = partial(_rows, tmp_path, *lines, name=name, path=path)
    text = of_refusals(calls)
    assert "2024" not in text
    check(HERE / "look_ups.txt", text)
    assert _rows(tmp_path, "a,,,,,", "a,,,,,", ",1,,,,", "a,1,,,,").num_rows == 1


def test_the_digest_is_of_the_rows(tmp_path: Path) -> None:
    first = content(_rows(tmp_path, *_LINES))
    assert first == content(_rows(tmp_path, *reversed(_LINES)))
    others = [
        content(_rows(tmp_path, *_LINES[:2])),
        content(_rows(tmp_path, *_LINES[:2], "a,3,2024-02-31,2,0,false")),
        content(_rows(tmp_path, *_LINES[:2], "a,3,2024-02-29,2,1e400,false")),
        content(_rows(tmp_path, *_LINES[:2], "a,3,2024-02-31,3,1e400,false")),
        content(_rows(tmp_path, *_LINES[:2], "a,3,2024-02-31,2,1e400,")),
        content(pa.table({"k": ["ab", "c"]})), content(pa.table({"k": ["a", "bc"]})),
        content(pa.table({"k": ["a", None]})), content(pa.table({"k": ["a", ""]})),
        content(pa.table({"k": [b"a", b"\xff"]})), content(pa.table({"j": ["a", ""]})),
    ]  # fmt: skip
    assert len({first, *others}) == len(others) + 1


def test_the_digest_stays_what_it_is(tmp_path: Path) -> None:
    """It is part of plans that are in stores."""
    assert content(_rows(tmp_path, *_LINES)) == "44b73eb4aab8f4c1dd3c473c1d470abf"


_TEXT = "SELECT s.section AS page, v.n AS x FROM visits AS v JOIN sections AS s ON v.page = s.page"


def _changed(path: Path, *pairs: tuple[str, str], text: str = _TEXT) -> str:
    """The plan's hash of the job in another project file, or with another text of its query."""
    (path / "live.sql").write_text(text)
    return _edited(path, *pairs).plan.hash


def _edited(path: Path, *pairs: tuple[str, str]) -> Job:
    """The job of the project file with parts replaced, in a file beside it."""
    text = (path / "dpstream.toml").read_text()
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new, 1)
    (path / "other.toml").write_text(text)
    return load_job(path / "other.toml")


def test_text_types_and_public_rows_are_part_of_the_plan(tmp_path: Path) -> None:
    job = with_text(tmp_path, _TEXT)
    hashes = [
        job.plan.hash,
        _changed(tmp_path, text=_TEXT.replace("v.n AS x", "v.n + 1 AS x")),
        _changed(tmp_path, ('n = "INT64"', 'n = "FLOAT64"')),
        _changed(tmp_path, ('n = "INT64"', 'N = "INT64"')),  # another column of the source
    ]
    body = SECTIONS.splitlines(keepends=True)
    (tmp_path / "sections.csv").write_text(body[0] + "".join(reversed(body[1:])))
    assert _changed(tmp_path) == hashes[0]  # the order of public rows says nothing
    (tmp_path / "sections.csv").write_text(SECTIONS.replace("help", "aid"))
    hashes.append(_changed(tmp_path))
    (tmp_path / "sections.csv").write_text(SECTIONS + "p9,jobs,1\n")
    hashes.append(_changed(tmp_path))
    (tmp_path / "sections.csv").write_text(SECTIONS.replace("p2,shop,", "p2,shop,0"))
    hashes.append(_changed(tmp_path))
    assert len(set(hashes)) == len(hashes)


def test_what_runs_is_part_of_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that makes other SQL of a text, or another DuckDB, may give other rows."""
    real, plan = numbered, with_text(tmp_path, _TEXT).plan.hash
    with monkeypatch.context() as other:
        other.setattr(f"{row_query.__module__}.numbered", lambda *of: real(*of) + " -- other")
        assert _changed(tmp_path) != plan
    monkeypatch.setattr(duckdb, "__version__", "0")
    assert _changed(tmp_path) != plan


#: What stands in the query's file.
TEXTS_REFUSED = [
    "",
    _TEXT.replace("AS x FROM", "AS y FROM"),
    _TEXT.replace("AS x FROM", "AS at FROM"),
    _TEXT.replace("AS x FROM", "AS user FROM"),
    "SELECT page, seconds AS x, page AS user FROM visits",
    "SELECT page, seconds AS x FROM visits WHERE REGEXP_CONTAINS(page, '(Quitte')",
]
#: Parts of the project file, and what replaces them.
PROJECTS_REFUSED = [
    ('query = "live.sql"', 'query = "none.sql"'),
    ("[table.visits]", '[table."my visits"]'),
    ('key_columns = ["page"]', 'key_columns = ["pag"]'),
    ('key_columns = ["page"]', 'key_columns = ["weight"]'),
    ("[table.sections]", "[table.VISITS]"),
    ('path = "sections.csv"', 'path = "sections.txt"'),
    ('n = "INT64"', 'n = "NUMBER"'),
    ('n = "INT64"', 'n = "INT64", user = "INT64"'),
    ('n = "INT64"', 'n = "INT64", User = "STRING"'),
]


def test_jobs_that_are_refused(tmp_path: Path) -> None:
    job = with_text(tmp_path, _TEXT)
    calls: dict[str, Callable[[], object]] = {
        f"{old} -> {new}": partial(_edited, tmp_path, (old, new)) for old, new in PROJECTS_REFUSED
    }
    for text in TEXTS_REFUSED:
        calls[text] = partial(_changed, tmp_path, text=text)
    refusals = of_refusals(calls)
    _changed(tmp_path)
    (tmp_path / "sections.csv").write_text(SECTIONS.replace("help", "aid"))
    changed: dict[str, Callable[[], object]] = {"public rows that changed": lambda: query_of(job)}
    refusals += of_refusals(changed)
    (tmp_path / "sections.csv").write_text(SECTIONS + "p1,again,1\n")
    refusals += of_refusals({"a key that is there twice": lambda: load_job(tmp_path)})
    assert refusals.count("Quitte") == 1  # in the text itself
    check(HERE / "jobs.txt", refusals.replace(str(tmp_path), "FOLDER"))


def test_the_plan_stays_what_it_is(tmp_path: Path) -> None:
    """Stores go on with it: who changes this digest stops every stream in SQL, and says so."""
    job = with_text(tmp_path, _TEXT)
    assert job.plan.query == "b9bcfdc9bc25803713b5d057a56bb068"


def test_it_travels_to_workers(tmp_path: Path) -> None:
    job = with_text(tmp_path, _TEXT)
    query = pickle.loads(pickle.dumps(query_of(job)))  # noqa: S301
    (tmp_path / "sections.csv").unlink()
    with RowEngine(query) as engine:
        assert engine(all_rows(job)).num_rows > 0


def test_a_job_without_query_has_the_plan_it_had(tmp_path: Path) -> None:
    plan = with_text(tmp_path, _TEXT).plan
    assert plan.query is not None and len(plan.query) == 32
    without = msgspec.structs.replace(plan, query=None)
    assert without.hash != plan.hash
    assert "query" not in declared(without) and declared(plan)["query"] == plan.query


def test_columns_of_parquet_are_known(tmp_path: Path) -> None:
    """Those that the query reads, and the unit's own type is the data set's."""
    with_text(tmp_path, _TEXT)
    columns = next(line for line in PROJECT.splitlines() if line.startswith("columns"))
    parquet = ((f"{columns}\n", ""), ("in/*.csv", "in/*.parquet"))
    pq.write_table(
        pa.table({"user": ["a"], "page": ["p1"], "at": ["x"], "n": [1]}), tmp_path / "in/a.parquet"
    )
    query = _edited(tmp_path, *parquet).source.query
    assert query is not None and query.columns == {"page": "STRING", "n": "INT64"}
    (tmp_path / "live.sql").write_text(_TEXT.replace("v.page = s.page", "v.n > s.weight"))
    assert (
        refusal(_edited, tmp_path, *parquet) == "StatementPrivacyError statement, line 1, column 58"
    )


#: Row-local texts and, where it is said otherwise, the same for DuckDB over the typed table.
TEXTS = [
    "SELECT page, seconds AS x FROM visits",
    "SELECT UPPER(page) AS page, seconds / n AS x FROM visits WHERE flag AND n <> 3",
    "SELECT s.section AS page, v.n * s.weight AS x FROM visits AS v JOIN sections AS s "
    "ON v.page = s.page WHERE v.seconds > 2",
    "SELECT COALESCE(s.section, 'none') AS page, v.n AS x FROM visits AS v LEFT JOIN sections AS s "
    "ON v.page = s.page AND s.weight > 0.7",
    "SELECT t.page, t.m AS x FROM (SELECT user, page, n + 1 AS m FROM visits WHERE n > 0) AS t",
    "SELECT page, EXTRACT(DAY FROM day) AS x FROM visits WHERE day < DATE '2024-01-15'",
]


def _records(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


@pytest.mark.parametrize("text", TEXTS)
def test_as_duckdb_over_the_whole_table(text: str, tmp_path: Path) -> None:
    job = with_text(tmp_path, text)
    rows = through(job, [all_rows(job)])
    lines = [r for f in sorted((tmp_path / "in").iterdir()) for r in _records(f)]
    table = pa.Table.from_pylist([{k: v or None for k, v in r.items()} for r in lines])
    con = duckdb.connect()
    con.register("raw", table)
    con.register("texts", pa.Table.from_pylist(_records(tmp_path / "sections.csv")))
    con.execute(
        'CREATE TABLE visits AS SELECT "user", "at", page, TRY_CAST(n AS BIGINT) AS n, '
        "TRY_CAST(flag AS BOOLEAN) AS flag, TRY_CAST(day AS DATE) AS day, "
        "TRY_CAST(NULLIF(seconds, 'NaN') AS DOUBLE) AS seconds FROM raw"
    )
    con.execute(
        "CREATE TABLE sections AS SELECT page, NULLIF(section, '') AS section, "
        "TRY_CAST(weight AS DOUBLE) AS weight FROM texts"
    )
    plain = text.replace("seconds / n ", "seconds / NULLIF(n, 0) ").replace("user,", '"user",')
    wanted = con.sql(plain).fetchall()
    con.close()
    assert len(wanted) > 20
    key = lambda row: tuple((v is None, v) for v in row)  # noqa: E731
    assert sorted(((r["page"], r["x"]) for r in rows), key=key) == sorted(wanted, key=key)


@pytest.mark.parametrize("text", TEXTS)
def test_however_batches_are_cut(text: str, tmp_path: Path) -> None:
    job = with_text(tmp_path, text)
    batch = all_rows(job).slice(0, 150)
    assert through(job, list(one_by_one(batch))) == through(job, [batch])


def test_units_times_and_positions_are_those_of_the_row(tmp_path: Path) -> None:
    job = with_text(tmp_path, TEXTS[2])
    batch = all_rows(job)
    with RowEngine(query_of(job)) as engine:
        selected = engine(batch)
    partition, offset = positions(selected)
    assert (partition == 0).all() and 0 < selected.num_rows < batch.num_rows
    for name in ("user", "at"):  # as they arrived: also where they are none
        assert selected.column(name) == batch.column(name).take(pa.array(offset))
    assert selected.column("user").null_count and "noon" in selected.column("at").to_pylist()


#: Each is a text that no validator passes: what it gives depends on other rows, or rows multiply.
#: A text that reads the columns of those below.
_READ = "SELECT page, n AS x FROM visits"
_BASE = 'SELECT "row number", page, TRY_CAST(n AS BIGINT) AS x FROM "arrived rows" AS v'
_MULTIPLIED = _BASE + " JOIN (VALUES (1), (2)) AS t(a) ON true"
_STRANGE = 'SELECT "row number" + 100000, page, 1 AS x FROM "arrived rows"'
_WINDOW = (
    'SELECT "row number", page, SUM(TRY_CAST(n AS BIGINT)) OVER (ORDER BY "row number") AS x '
    'FROM "arrived rows"'
)


@pytest.mark.parametrize(
    "sql", [_MULTIPLIED, _STRANGE, _BASE.replace('"row number"', "NULL::BIGINT")]
)
def test_a_query_that_multiplies_rows_is_caught(sql: str, tmp_path: Path) -> None:
    job = with_text(tmp_path, _READ)
    assert len(through(job, [all_rows(job)], _BASE)) == all_rows(job).num_rows
    assert refusal(through, job, [all_rows(job)], sql) == "PolicyError query"


@pytest.mark.parametrize("on", ["v.page > s.page", "v.seconds = s.weight", "v.page = v.page"])
def test_a_look_up_that_no_rule_refused_is_caught(
    on: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"SELECT v.page, v.n AS x FROM visits AS v JOIN sections AS s ON {on}"
    assert refusal(with_text, tmp_path, text).startswith("StatementPrivacyError")
    monkeypatch.setattr(f"{row_query.__module__}._looks_up", lambda join, tables: True)
    job = with_text(tmp_path, text)
    (tmp_path / "sections.csv").write_text(SECTIONS.replace("p4,,2", "p9,,1"))
    job = load_job(job.path)
    assert refusal(through, job, [all_rows(job)]) == "PolicyError query"


def test_the_cut_shows_a_query_that_reads_other_rows(tmp_path: Path) -> None:
    job = with_text(tmp_path, _READ)
    batch = all_rows(job).slice(0, 40)
    assert through(job, list(one_by_one(batch)), _BASE) == through(job, [batch], _BASE)
    assert through(job, list(one_by_one(batch)), _WINDOW) != through(job, [batch], _WINDOW)


@pytest.mark.parametrize(
    "sql",
    ["SELECT * FROM read_csv('sections.csv')", "SELECT * FROM read_text('/etc/hostname')",
     "ATTACH 'x.db'", "COPY \"arrived rows\" TO 'x.csv'", "INSTALL httpfs", "SET threads = 4"],
)  # fmt: skip
def test_duckdb_is_locked(sql: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = with_text(tmp_path, TEXTS[0])
    with pytest.raises(RunError) as caught:
        through(job, [all_rows(job)], sql)
    assert "sections" not in str(caught.value) and not (tmp_path / "x.csv").exists()


def test_nothing_left_and_nothing_there(tmp_path: Path) -> None:
    job = with_text(tmp_path, "SELECT page, n AS x FROM visits WHERE n > 1000")
    with RowEngine(query_of(job)) as engine:
        assert engine(all_rows(job)).num_rows == 0
        empty = engine(all_rows(job).slice(0, 0))
    assert empty.num_rows == 0 and empty.schema.names == ["user", "at", "page", "x"]


_NOON = datetime(2024, 1, 1, 12, tzinfo=UTC)
_CASES: list[tuple[str, list[Any], list[Any]]] = [
    ("INT64", ["7", " 7", "x", None, "-0"], [7, None, None, None, 0]),
    ("INT64", [7.0, 7.5, float("nan"), 2.0**60], [7, None, None, None]),
    ("FLOAT64", ["1.5", "nan", "1e400", None, "2"], [1.5, None, None, None, 2.0]),
    ("FLOAT64", [float("inf"), float("nan"), 0.25], [None, None, 0.25]),
    ("BOOL", ["true", "FALSE", "1", None], [True, False, None, None]),
    ("STRING", ["e\u0301", "y" * 1025, "", None], ["\u00e9", None, "", None]),
    ("BYTES", [b"\xff", None], [b"\xff", None]),
    ("TIMESTAMP", ["2024-01-01T12:00:00Z", "2024-13-01T12:00:00Z", None], [_NOON, None, None]),
    ("TIMESTAMP", [_NOON], [_NOON]),
    ("DATETIME", ["2024-01-01T12:00:00"], [_NOON.replace(tzinfo=None)]),
    ("DATE", [date(2024, 1, 1), None], [date(2024, 1, 1), None]),
    ("DATE", ["2024-01-01", "2024-02-31"], ["2024-01-01", "2024-02-31"]),
    ("DATE", [1, 2], [None, None]),
    ("NUMERIC", [Decimal("1.25"), None], [Decimal("1.25"), None]),
    ("NUMERIC", [3], [Decimal(3)]),
    ("NUMERIC", ["1.25", None], ["1.25", None]),
]


@pytest.mark.parametrize(("kind", "values", "wanted"), _CASES)
def test_values(kind: str, values: list[Any], wanted: list[Any]) -> None:
    assert typed(pa.array(values), kind).to_pylist() == wanted
    alone = [typed(pa.chunked_array([pa.array([v], pa.array(values).type)]), kind) for v in values]
    assert [one.to_pylist()[0] for one in alone] == wanted


def test_text_that_is_not_utf8_is_null() -> None:
    raw = pa.array([b"a", b"\xff"], pa.binary()).view(pa.string())
    assert typed(raw, "STRING").to_pylist() == ["a", None]


def test_decimals_of_256_bits_are_counted(tmp_path: Path) -> None:
    """A schema allows them and DuckDB reads none: what fails on rows fails after the charge."""
    with_text(tmp_path, "SELECT page, day + 1 AS x FROM visits")
    job = _edited(tmp_path, ('day = "DATE"', 'day = "NUMERIC"'))
    rows, wide = all_rows(job).slice(0, 4), pa.decimal256(60, 2)
    values = [Decimal("1.25"), Decimal(10) ** 50, None, Decimal(-3)]
    for day in (pa.array(values, wide), pa.array(values, wide).dictionary_encode()):
        batch = rows.set_column(rows.schema.get_field_index("day"), "day", day)
        answers = [row["x"] for row in through(job, [batch])]
        assert answers == [Decimal("2.25"), None, None, Decimal(-2)]
        assert [row["x"] for row in through(job, list(one_by_one(batch)))] == answers


_ROWS = {"uid": "INT64", "page": "STRING", "x": "FLOAT64", "n": "INT64", "d": "NUMERIC"}
_TABLES = RowTables(
    UnitIdentity("uid", "int"),
    {
        "visits": Table("visits", "stream", "", _ROWS, "uid", units=("uid",)),
        "pages": Table("pages", "csv", "", {"page": "STRING", "lang": "STRING", "w": "FLOAT64"}),
        "floors": Table("floors", "csv", "", {"n": "INT64", "x": "FLOAT64"}),
        "loose": Table("loose", "csv", "", {"page": "STRING"}),
    },
    source="visits",
    keys={"pages": ("lang", "page"), "floors": ("n",)},
)
_SUB = "SELECT uid, page, n + 1 AS m, 'en' AS lang FROM visits WHERE n > 0"

ACCEPTED = [
    "SELECT page FROM visits",
    "SELECT UPPER(page) AS p, x / n AS q FROM visits AS v WHERE v.x > 1 AND n IN (1, 2)",
    "SELECT f.x AS fx, v.page FROM visits AS v JOIN floors AS f ON v.n = f.n",
    "SELECT COALESCE(f.x, 0) AS fx FROM visits AS v LEFT JOIN floors AS f ON f.n = v.n AND f.x > 1",
    "SELECT page, visits.x FROM visits JOIN floors USING (n)",
    f"SELECT s.page, p.w FROM ({_SUB}) AS s JOIN pages AS p ON s.page = p.page AND s.lang = p.lang",
    f"WITH s AS ({_SUB}) SELECT a.page, f.x FROM s AS a JOIN floors AS f ON f.n = a.m",
    "SELECT * FROM (SELECT * FROM visits WHERE x > 0) AS v ORDER BY page",
    "SELECT f.x AS a, g.x AS b FROM visits v JOIN floors f ON v.n = f.n JOIN floors g ON f.n = g.n",
]
REFUSED = [
    "SELECT page FROM visits GROUP BY page",
    "SELECT DISTINCT page FROM visits",
    "SELECT SUM(x) AS s FROM visits",
    "SELECT uid, n FROM visits UNION ALL SELECT uid, n FROM visits",
    "SELECT s FROM (SELECT uid, SUM(x) AS s FROM visits GROUP BY uid) AS t",
    "SELECT page FROM (SELECT DISTINCT uid, page FROM visits) AS t",
    "SELECT n FROM (SELECT uid, n FROM visits UNION ALL SELECT uid, n FROM visits)"
     " AS t",
    "SELECT a.n FROM visits AS a JOIN visits AS b ON a.uid = b.uid",
    f"SELECT a.n FROM visits AS a JOIN ({_SUB}) AS b ON a.uid = b.uid",
    "SELECT v.n FROM visits AS v JOIN (SELECT DISTINCT n FROM floors) AS f "
     "ON v.n = f.n",
    "SELECT page FROM visits, floors",
    "SELECT page FROM visits CROSS JOIN floors",
    "SELECT v.page FROM visits AS v JOIN floors AS f ON v.n <= f.n",
    "SELECT v.page FROM visits AS v JOIN floors AS f ON v.x = f.x",
    "SELECT v.page FROM visits AS v JOIN floors AS f ON v.n = f.n OR v.x > 1",
    "SELECT v.page FROM visits AS v JOIN floors AS f ON v.n + 0 = f.n",
    "SELECT v.page FROM visits AS v JOIN floors AS f ON v.x = f.n",
    "SELECT v.page FROM visits AS v JOIN floors AS f ON f.n = f.n",
    "SELECT v.page FROM visits AS v JOIN pages AS p ON v.page = p.page",
    "SELECT v.page FROM visits AS v JOIN loose AS p ON v.page = p.page",
    "SELECT v.n FROM visits AS v RIGHT JOIN floors AS f ON v.n = f.n",
    "SELECT v.n FROM visits AS v FULL JOIN floors AS f ON v.n = f.n",
    "SELECT v.n FROM floors AS f JOIN visits AS v ON v.n = f.n",
    "SELECT n FROM floors",
    "SELECT page FROM visits LIMIT 5",
    "SELECT page FROM (SELECT uid, page FROM visits LIMIT 5) AS t",
    "SELECT ROW_NUMBER() OVER (ORDER BY x) AS r FROM visits",
    "SELECT r FROM (SELECT uid, ROW_NUMBER() OVER (PARTITION BY uid ORDER BY n) AS r FROM visits)",
    "SELECT page FROM visits CROSS JOIN UNNEST([1, 2]) AS x",
    "SELECT SUM(x) OVER (PARTITION BY page) AS r FROM visits",
    "SELECT page FROM visits WHERE n IN (SELECT n FROM floors)",
    "SELECT RAND() AS r FROM visits",
    "SELECT page FROM visits TABLESAMPLE SYSTEM (10 PERCENT)",
    "SELECT page FROM (SELECT page FROM visits) AS t",
    "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 1) page FROM visits",
    "SELECT page FROM other",
    "SELECT missing FROM visits",
    "SELECT page, UPPER(page) AS page FROM visits",
    "DROP TABLE visits",
    "SELECT 1 AS one",
]  # fmt: skip


@pytest.mark.parametrize("text", ACCEPTED)
def test_accepted_and_numbered(text: str) -> None:
    types = {name: TYPES[kind] for name, kind in _ROWS.items()}
    sql = numbered(row_query(text, _TABLES), "arrived", types)
    assert sql.startswith('SELECT "') and f'"{ROW}"' in sql.partition(" FROM ")[0]
    assert sql.count('FROM "arrived"') == 1


def test_texts_that_are_not_row_local_are_refused() -> None:
    calls = {text: partial(row_query, text, _TABLES) for text in REFUSED}
    check(HERE / "row_queries.txt", of_refusals(calls))
