"""Rows through a query: what DuckDB gives of the whole table, however batches are cut."""

import csv
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

from dpstream.accounting.errors import PolicyError, RunError
from dpstream.dp_transforms.ingest.records import positions
from dpstream.pipelines.connectors.query import query_of
from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.statements import row_local
from dpstream.pipelines.statements.row_engine import RowEngine
from tests.pipelines.sql.visited import SECTIONS, all_rows, one_by_one, through, with_text

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
    with pytest.raises(PolicyError, match="twice, or rows that are none"):
        through(job, [all_rows(job)], sql)


@pytest.mark.parametrize("on", ["v.page > s.page", "v.seconds = s.weight", "v.page = v.page"])
def test_a_look_up_that_no_rule_refused_is_caught(
    on: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"SELECT v.page, v.n AS x FROM visits AS v JOIN sections AS s ON {on}"
    with pytest.raises(PolicyError, match="stream-look-up"):
        with_text(tmp_path, text)
    monkeypatch.setattr(row_local, "_looks_up", lambda join, tables: True)
    job = with_text(tmp_path, text)
    (tmp_path / "sections.csv").write_text(SECTIONS.replace("p4,,2", "p9,,1"))
    job = load_job(job.path)
    with pytest.raises(PolicyError, match="twice, or rows that are none"):
        through(job, [all_rows(job)])


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
