"""Statements as stream jobs: the job that one would write by hand, or a refusal with its code."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.fields import Aggregate, Field
from dpstream.dp_transforms import step
from dpstream.pipelines.connectors.files.source import batches
from dpstream.pipelines.connectors.query import apply_query, query_of
from dpstream.pipelines.formats.encodings import read_releases
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.project.project import load_project
from dpstream.pipelines.sql.stream import StreamJob, stream_job, write_job
from dpstream.pipelines.statements.errors import StatementError
from dpstream.pipelines.stream.run import run_job
from dpstream.state import open as stores
from tests.budgets import budgeted
from tests.dp_transforms.runs import Silent, without_noise
from tests.golden.pinned import check, of_refusals, refusal
from tests.pipelines.sql.shop import BUDGET, LOOKED_UP, PROJECT, dp, folder, rows, with_fields

_PLAIN = (
    "page, COUNT(*) AS n, SUM(n, contribution_bounds_per_group => (0, 5)) AS s, "
    "AVG(seconds, contribution_bounds_per_row => (0, 10)) AS m, COUNT(DISTINCT user) AS u "
    "FROM visits GROUP BY page"
)
_PLAIN_BY_HAND = (
    'aggregate.n = { kind = "count" }',
    'aggregate.s = { kind = "sum", column = "n", bounds = [0, 5] }',
    'aggregate.m = { kind = "mean", column = "seconds", bounds = [0, 10], grid = 0.000244140625 }',
    'aggregate.u = { kind = "units" }',
)
_LOOKED_UP_BY_HAND = (
    'aggregate.n = { kind = "count" }',
    'aggregate.t = { kind = "sum", column = "_x0", bounds = [0, 10], grid = 0.000244140625 }',
)


def _releases(job: Job) -> dict[str, bytes]:
    """Bytes of every released file."""
    run_job(job)
    stores.close_all()
    root = Path(job.sink.path)
    return {f.relative_to(root).as_posix(): f.read_bytes() for f in root.rglob("trigger-*")}


def _by_hand(path: Path, key: str, aggregates: tuple[str, ...], query: str | None = None) -> Job:
    """A job written by hand."""
    path.mkdir()
    fields = [f'key = ["{key}"]', *aggregates, BUDGET]
    if query is not None:
        (path / "live.sql").write_text(query)
        fields.append('query = "live.sql"')
    return load_job(folder(path, with_fields(*fields)))


def _translation(path: Path, items: str, **more: str) -> StreamJob:
    path.mkdir()
    return stream_job(load_project(folder(path)), "daily", dp(items, **more))


def test_a_plain_statement_is_the_job_written_by_hand(tmp_path: Path) -> None:
    translation = _translation(tmp_path / "asked", _PLAIN)
    assert translation.job.plan.query is None is translation.query
    hand = _by_hand(tmp_path / "hand", "page", _PLAIN_BY_HAND)
    assert translation.job.plan == hand.plan and translation.job.plan.hash == hand.plan.hash
    first = _releases(translation.job)
    assert len(first) == 4 and first == _releases(hand)


def test_a_statement_with_filter_and_look_up_is_the_job_written_by_hand(tmp_path: Path) -> None:
    translation = _translation(tmp_path / "asked", LOOKED_UP)
    hand = _by_hand(tmp_path / "hand", "section", _LOOKED_UP_BY_HAND, translation.query)
    query = query_of(hand)
    assert query_of(translation.job).sql == query.sql and hand.plan == translation.job.plan
    assert "day" not in query.types and set(query.reads) == set(query.types)
    first = _releases(translation.job)
    assert len(first) == 4 and first == _releases(hand)


@pytest.mark.parametrize("items", [_PLAIN, LOOKED_UP])
def test_what_is_emitted_runs_and_gives_the_same_bytes(items: str, tmp_path: Path) -> None:
    """It is written once; the rest of the file stays, and another statement is refused."""
    translation, path = (
        _translation(tmp_path / "asked", items),
        folder_with(tmp_path / "b", PROJECT),
    )
    project = load_project(path)
    other = stream_job(project, None, dp(items))
    for _ in range(2):
        write_job(load_project(path), other, "live")
    assert path.read_text().startswith(PROJECT.rstrip("\n"))
    assert (tmp_path / "b" / "live.sql").exists() == (translation.query is not None)
    emitted = load_job(path, "live")
    assert emitted.plan == translation.job.plan
    assert emitted.sink.path == f"{tmp_path}/b/releases-live"
    assert _releases(translation.job) == _releases(emitted)
    changed = stream_job(project, None, dp(items.replace("COUNT(*) AS n", "COUNT(*) AS k")))
    before = path.read_bytes()
    assert refusal(write_job, load_project(path), changed, "live") == "UsageError --emit"
    assert path.read_bytes() == before


def test_a_missing_number_in_parquet_changes_no_job(tmp_path: Path) -> None:
    """Of pandas it makes DOUBLE of INT64."""
    columns = next(line for line in PROJECT.splitlines() if line.startswith("columns"))
    text = PROJECT.replace(f"{columns}\n", "", 1).replace("in/*.csv", "in/*.parquet")
    path, plans = folder_with(tmp_path / "a", text), []
    for n in (pa.int64(), pa.float64()):
        table = pa.table({"user": ["u"], "page": ["p"], "at": ["x"], "n": pa.array([1], n)})
        pq.write_table(table, tmp_path / "a" / "in" / "a.parquet")
        items = "page, SUM(n, contribution_bounds_per_row => (0, 5)) AS s FROM visits GROUP BY page"
        plans.append(stream_job(load_project(path), "daily", dp(items)).job.plan)
    assert plans[0] == plans[1]


def folder_with(path: Path, text: str) -> Path:
    path.mkdir()
    return folder(path, text)


@pytest.mark.parametrize(
    ("argument", "column"),
    [
        ("n", "n"),
        ("seconds", "seconds"),
        ("CAST(flag AS INT64)", "_x0"),
        ("n + 1", "_x0"),
        ("CAST(page AS FLOAT64)", "_x0"),
    ],
)
def test_columns_that_are_numbers_are_taken_as_they_are(
    argument: str, column: str, tmp_path: Path
) -> None:
    items = f"page, SUM({argument}, contribution_bounds_per_row => (0, 1)) AS s FROM visits"
    job = _translation(tmp_path / "a", f"{items} GROUP BY page").job
    assert job.plan.aggregates[0].column == column
    assert (job.source.query is None) == (column == argument)
    sums = [row[column] for b in apply_query(job, batches(job)) for row in b.to_pylist()]
    assert sum(v is not None for v in sums) > (-1 if "page" in argument else 500)


def test_what_the_statement_says(tmp_path: Path) -> None:
    options = (
        "epsilon = 2, delta = 1e-6, max_rows_contributed = 3, min_privacy_units_per_group = 5, "
        "privacy_unit_column = user, mechanism = GAUSSIAN"
    )
    items = "UPPER(page) AS p, n, flag, COUNT(DISTINCT user) AS u FROM visits GROUP BY p, n, flag"
    plan = _translation(tmp_path / "a", items, options=options).job.plan
    assert plan.key == (Field("p"), Field("n", "int"), Field("flag", "bool"))
    assert plan.aggregates == (Aggregate("u", "units"),)
    privacy = plan.privacy
    assert (privacy.epsilon, privacy.delta, privacy.contributions) == (2.0, 1e-6, 3)
    assert privacy.pre_threshold == 4


def test_the_job_and_the_statement_may_say_the_same(tmp_path: Path) -> None:
    own = ("contributions = 8  # mine", 'budget = { epsilon = 50.0, covers = "lifetime" }')
    path = folder(tmp_path, with_fields(*own))
    translation = stream_job(load_project(path), "daily", dp(LOOKED_UP))
    write_job(load_project(path), translation, "live")
    assert path.read_text().count("# mine") == 2
    without = dp(LOOKED_UP, "epsilon = 50, delta = 1e-6")
    assert stream_job(load_project(path), "daily", without).section == translation.section


def test_columns_of_parquet_need_no_types(tmp_path: Path) -> None:
    columns = next(line for line in PROJECT.splitlines() if line.startswith("columns"))
    text = PROJECT.replace(f"{columns}\n", "", 1).replace("in/*.csv", "in/*.parquet")
    path = folder(tmp_path, text)
    pq.write_table(rows(), tmp_path / "in" / "a.parquet")
    statement = dp("page, COUNT(*) AS n FROM visits WHERE n > '3' GROUP BY page")
    translation = stream_job(load_project(path), "daily", statement)
    write_job(load_project(path), translation, "live")
    job = load_job(path, "live")
    assert job.plan == translation.job.plan and job.source.query is not None
    assert job.source.query.columns == {"page": "STRING", "n": "STRING"}


#: Parts of the project file, and what replaces them.
REFUSED = [
    ("start =", 'key = ["page"]\nstart ='),
    ("start =", 'aggregate.n = { kind = "count" }\nstart ='),
    ("start =", 'query = "a.sql"\nstart ='),
    ('path = "in/*.csv"', 'path = "in/*.cvs"'),
    ('columns = { page = "STRING", seconds = "FLOAT64", n = "INT64", flag = "BOOL", '
     'day = "DATE" }', ""),
    ('table = "visits"', 'table = "visit"'),
    ('table = "visits"', ""),
    ('sink =', 'contributions = 18\nsink ='),
    ('sink =', 'budget = { epsilon = 150.0, covers = "lifetime" }\nsink ='),
]  # fmt: skip


def test_jobs_that_are_refused(tmp_path: Path) -> None:
    calls: dict[str, Callable[[], object]] = {}
    for number, (old, new) in enumerate(REFUSED):
        assert old in PROJECT
        project = load_project(folder_with(tmp_path / f"{number}", PROJECT.replace(old, new, 1)))
        calls[f"{old} -> {new}"] = partial(stream_job, project, "daily", dp(LOOKED_UP))
    check(Path(__file__).with_name("stream_jobs.txt"), of_refusals(calls))


@pytest.mark.parametrize("text_of", [
    "seconds", "GREATEST(seconds, '0')", "CAST(seconds AS STRING)", "COALESCE(seconds, '0')",
    "(NULLIF(seconds, ''))",
    "IF(n > 1, seconds, '1')", "CASE WHEN n > 1 THEN seconds ELSE '1' END",
])  # fmt: skip
@pytest.mark.parametrize("inside", [False, True])
def test_text_of_a_table_with_number_signs_is_not_cast(
    tmp_path: Path, text_of: str, inside: bool
) -> None:
    rows_of = "visits"
    if inside:
        rows_of, text_of = f"(SELECT user, page, {text_of} AS s FROM visits) AS v", "s"
    cast = f"SUM(CAST({text_of} AS FLOAT64), contribution_bounds_per_row => (0, 10)) AS t"
    statement = dp(f"page, {cast} FROM {rows_of} GROUP BY page")
    text = PROJECT.replace('seconds = "FLOAT64"', 'seconds = "STRING"')
    plain = load_project(folder_with(tmp_path / "plain", text))
    assert stream_job(plain, "daily", statement).query is not None
    text = text.replace('path = "in/*.csv"', 'path = "in/*.csv"\ncsv = { thousands = "," }')
    with pytest.raises(StatementError) as error:
        stream_job(load_project(folder_with(tmp_path / "signed", text)), "daily", statement)
    assert error.value.code == "number-signs"


def test_a_query_of_a_job_gets_instants_of_a_declared_time(tmp_path: Path) -> None:
    """As a number it would be NULL in each row, and nothing would be counted after a charge."""
    hours = "SELECT page, EXTRACT(HOUR FROM at) AS hour FROM visits"
    text = with_fields(
        'query = "live.sql"', 'key = ["page"]', 'aggregate.n = { kind = "count" }', BUDGET,
        text=PROJECT.replace('"at"', '{ column = "at", unit = "s" }'),
    )  # fmt: skip
    with pytest.raises(UsageError) as error:
        load_query(tmp_path / "number", text, "INT64", "SELECT page FROM visits WHERE at > 0")
    fixed = re.findall(r'at = "(\w+)"', str(error.value))[0]
    assert load_query(tmp_path / "instant", text, fixed, hours).plan.query is not None


def load_query(path: Path, text: str, kind: str, query: str) -> Job:
    """The job of a query, whose table declares its times of a type."""
    path.mkdir()
    (path / "live.sql").write_text(query)
    return load_job(folder(path, text.replace("columns = {", f'columns = {{ at = "{kind}",')))


def test_a_grid_is_coarser_where_noise_would_leave_its_range(tmp_path: Path) -> None:
    items = (
        "page, SUM(seconds, contribution_bounds_per_row => (0, 1)) AS s FROM visits GROUP BY page"
    )
    usual = _translation(tmp_path / "a", items).job.plan.aggregates[0].grid
    path = folder_with(tmp_path / "b", with_fields('mechanism.strategy = "tree"'))
    statement = dp(items, "epsilon = 1, delta = 1e-6, max_rows_contributed = 64")
    coarse = stream_job(load_project(path), "daily", statement)
    assert coarse.job.plan.aggregates[0].grid > usual


def test_without_noise_it_is_duckdbs_answer_over_the_whole_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last trigger's release, of rows that are records, none of them over C."""
    monkeypatch.setattr(step, "sampler_of", Silent)
    monkeypatch.setattr(step, "calibrated", budgeted(without_noise))
    text = with_fields('mechanism = { strategy = "tree", weights = "uniform" }')
    items = (
        "s.section, v.flag, COUNT(*) AS c, COUNT(DISTINCT user) AS u, "
        "SUM(v.n * 2, contribution_bounds_per_row => (-8, 20)) AS t, "
        "AVG(v.n + 1, contribution_bounds_per_row => (-8, 16)) AS m "
        "FROM (SELECT user, page, seconds, n, flag FROM visits WHERE n <> 4) AS v "
        "LEFT JOIN sections AS s ON v.page = s.page AND s.weight > 0.7 WHERE v.seconds > 1 "
        "GROUP BY s.section, v.flag"
    )
    options = "epsilon = 50, delta = 1e-6, max_rows_contributed = 60"
    project = load_project(folder(tmp_path, text))
    sql_job = stream_job(project, "daily", dp(items, options)).job
    run_job(sql_job)
    stores.close_all()
    table = read_releases(sql_job.sink.path)
    last = table.filter(pc.equal(table["trigger"], 4))
    names = ["section", "flag", "c", "u", "t", "m", "c_sd"]
    con = duckdb.connect()
    con.register("raw", rows())
    con.execute("CREATE TABLE sections AS SELECT 'p0' AS page, 'shop' AS section, 1.0 AS weight")
    wanted = con.sql(
        "SELECT section, flag = 'true' AS flag, COUNT(*)::DOUBLE AS c, "
        'COUNT(DISTINCT "user")::DOUBLE AS u, SUM(n::INT * 2)::DOUBLE AS t, '
        "AVG(n::INT + 1) AS m FROM raw JOIN sections USING (page) "
        "WHERE n NOT IN ('4', 'many') AND seconds <> 'NaN' AND seconds::DOUBLE > 1 AND flag <> '?' "
        'AND "user" IS NOT NULL AND "at" <> \'noon\' GROUP BY ALL ORDER BY ALL'
    ).fetchall()
    con.close()
    got = sorted(tuple(row[name] for name in names) for row in last.to_pylist())
    assert len(got) == len(wanted) == 2
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine[:5] == theirs[:5]
        # The quotient weighs the count against the noise that it would have.
        weight = mine[2] ** 2 / (mine[2] ** 2 + mine[6] ** 2)
        assert mine[5] == pytest.approx(4 + (theirs[5] - 4) * weight)
