"""The query of a job: its tables, its digest, and what is refused."""

import pickle
from pathlib import Path

import duckdb
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.accounting.errors import DpstreamError, PolicyError, RunError
from dpstream.accounting.plan.plan import canonical
from dpstream.pipelines.connectors.query import query_of
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.statements import row_local, row_query
from dpstream.pipelines.statements.row_engine import RowEngine
from tests.pipelines.sql.visited import PROJECT, SECTIONS, all_rows, with_text

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
    real, plan = row_local.numbered, with_text(tmp_path, _TEXT).plan.hash
    with monkeypatch.context() as other:
        other.setattr(row_query, "numbered", lambda *of: real(*of) + " -- other")
        assert _changed(tmp_path) != plan
    monkeypatch.setattr(duckdb, "__version__", "0")
    assert _changed(tmp_path) != plan


def test_public_rows_that_change_under_a_job_are_refused(tmp_path: Path) -> None:
    job = with_text(tmp_path, _TEXT)
    (tmp_path / "sections.csv").write_text(SECTIONS.replace("help", "aid"))
    with pytest.raises(PolicyError, match="changed since the plan was made"):
        query_of(job)


def test_a_key_that_is_not_unique_is_refused(tmp_path: Path) -> None:
    with_text(tmp_path, _TEXT)
    (tmp_path / "sections.csv").write_text(SECTIONS + "p1,again,1\n")
    with pytest.raises(PolicyError, match="rows with one key"):
        load_job(tmp_path)


def test_what_duckdb_cannot_run_is_said_when_the_job_is_loaded(tmp_path: Path) -> None:
    text = "SELECT page, seconds AS x FROM visits WHERE REGEXP_CONTAINS(page, '(Quitte')"
    with pytest.raises(RunError, match="cannot be run") as caught:
        with_text(tmp_path, text)
    assert "Quitte" not in str(caught.value)


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


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("", "job.daily.query"),
        (_TEXT.replace("AS x FROM", "AS y FROM"), "job.daily.query"),
        (_TEXT.replace("AS x FROM", "AS at FROM"), "statement"),
        (_TEXT.replace("AS x FROM", "AS user FROM"), "statement"),
    ],
)
def test_texts_that_are_refused(text: str, field: str, tmp_path: Path) -> None:
    with_text(tmp_path, _TEXT)
    with pytest.raises(DpstreamError) as caught:
        _changed(tmp_path, text=text)
    assert field in caught.value.field and caught.value.fix


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ('query = "live.sql"', 'query = "none.sql"', "job.daily.query"),
        ("[table.visits]", '[table."my visits"]', "table"),
        ('key_columns = ["page"]', 'key_columns = ["pag"]', "table.sections.key_columns"),
        ('key_columns = ["page"]', 'key_columns = ["weight"]', "statement"),
        ("[table.sections]", "[table.VISITS]", "table.VISITS"),
        ('path = "sections.csv"', 'path = "sections.txt"', "table.sections"),
        ('n = "INT64"', 'n = "NUMBER"', "columns"),
        ('n = "INT64"', 'n = "INT64", user = "INT64"', "table.visits.columns"),
        ('n = "INT64"', 'n = "INT64", User = "STRING"', "table.visits.columns"),
        ("key_columns", "key_column", "table.sections.key_column"),
    ],
)
def test_project_files_that_are_refused(old: str, new: str, field: str, tmp_path: Path) -> None:
    with_text(tmp_path, _TEXT)
    with pytest.raises(DpstreamError) as caught:
        _edited(tmp_path, (old, new))
    assert field in caught.value.field and caught.value.fix


def test_a_job_without_query_has_the_plan_it_had(tmp_path: Path) -> None:
    plan = with_text(tmp_path, _TEXT).plan
    assert plan.query is not None and len(plan.query) == 32
    without = msgspec.structs.replace(plan, query=None)
    assert without.hash != plan.hash
    assert "query" not in canonical(without) and canonical(plan)["query"] == plan.query


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
    with pytest.raises(PolicyError, match="stream-look-up"):
        _edited(tmp_path, *parquet)
