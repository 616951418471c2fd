"""Statements that no stream can answer: each class of them has a code, a place and a fix."""

import re
from pathlib import Path

import pytest
from pyarrow import csv as pacsv

from dpstream.accounting.errors import DpstreamError
from dpstream.pipelines.project.project import load_project
from dpstream.pipelines.sql.stream import stream_job
from dpstream.pipelines.statements.rules import RULES
from tests.pipelines.sql.pairs import PAIRS
from tests.pipelines.sql.visited import (
    OPTIONS,
    PROJECT,
    all_rows,
    dp,
    folder,
    one_by_one,
    rows,
    through,
)

_COUNT = "page, COUNT(*) AS n FROM visits GROUP BY page"
#: (code, options, what follows them)
REFUSED = [
    ("stream-option", f"{OPTIONS}, max_groups_contributed = 3", _COUNT),
    ("stream-option", f"{OPTIONS}, contribution_norm = 3", _COUNT),
    ("stream-option", f"{OPTIONS}, mechanism = GEOMETRIC", _COUNT),
    ("stream-option", f"{OPTIONS}, group_selection_strategy = PUBLIC_GROUPS", _COUNT),
    ("option-unknown", f"{OPTIONS}, rows = 3", _COUNT),
    ("epsilon", "delta = 1e-9, max_rows_contributed = 4", _COUNT),
    ("delta", "epsilon = 1, max_rows_contributed = 4", _COUNT),
    ("max-rows", "epsilon = 1, delta = 1e-9, max_rows_contributed = 0", _COUNT),
    ("stream-contributions", "epsilon = 1, delta = 1e-9", _COUNT),
    ("unit-column", f"{OPTIONS}, privacy_unit_column = page", _COUNT),
    ("stream-join", OPTIONS, "a.page, COUNT(*) AS n FROM visits a JOIN visits b ON a.user = b.user "
     "GROUP BY a.page"),
    ("join-without-unit", OPTIONS, "a.page, COUNT(*) AS n FROM visits a JOIN visits b ON a.n = b.n "
     "GROUP BY a.page"),
    ("stream-look-up", OPTIONS, "page, COUNT(*) AS n FROM visits, sections AS s GROUP BY page"
     .replace("page,", "visits.page,").replace("BY page", "BY visits.page")),
    ("stream-look-up", OPTIONS, "s.section, COUNT(*) AS n FROM visits v JOIN sections s "
     "ON v.page < s.page GROUP BY s.section"),
    ("outer-join-public", OPTIONS, "s.section, COUNT(*) AS n FROM visits v RIGHT JOIN sections s "
     "ON v.page = s.page GROUP BY s.section"),
    ("stream-rows", OPTIONS, "page, COUNT(*) AS n FROM (SELECT user, page FROM visits "
     "GROUP BY user, page) AS t GROUP BY page"),
    ("stream-rows", OPTIONS, "page, COUNT(*) AS n FROM (SELECT user, page FROM visits UNION ALL "
     "SELECT user, page FROM visits) AS t GROUP BY page"),
    ("stream-rows", OPTIONS, "page, COUNT(*) AS n FROM (SELECT DISTINCT user, page FROM visits) "
     "AS t GROUP BY page"),
    ("stream-rows", OPTIONS, "k, COUNT(*) AS n FROM (SELECT user, SUM(n) AS k FROM visits "
     "GROUP BY user) AS t GROUP BY k"),
    ("limit", OPTIONS, "page, COUNT(*) AS n FROM (SELECT user, page FROM visits LIMIT 9) AS t "
     "GROUP BY page"),
    ("window", OPTIONS, "page, COUNT(*) AS n FROM (SELECT user, page, SUM(n) OVER () AS w "
     "FROM visits) AS t GROUP BY page"),
    ("stream-function", OPTIONS, "page, COUNT(n) AS c FROM visits GROUP BY page"),
    ("stream-function", OPTIONS, "page, MEDIAN(n, contribution_bounds_per_row => (0, 1)) AS m "
     "FROM visits GROUP BY page"),
    ("stream-function", OPTIONS, "page, MAX(n, contribution_bounds_per_row => (0, 1)) AS m "
     "FROM visits GROUP BY page"),
    ("stream-function", OPTIONS, "page, STDDEV(n, contribution_bounds_per_row => (0, 1)) AS m "
     "FROM visits GROUP BY page"),
    ("count-distinct", OPTIONS, "page, COUNT(DISTINCT n) AS c FROM visits GROUP BY page"),
    ("stream-bounds", OPTIONS, "page, SUM(n) AS s FROM visits GROUP BY page"),
    ("stream-bounds", OPTIONS, "page, AVG(n) AS s FROM visits GROUP BY page"),
    ("stream-bounds", OPTIONS, "page, COUNT(*, contribution_bounds_per_group => (0, 5)) AS c "
     "FROM visits GROUP BY page"),
    ("stream-bounds", OPTIONS, "page, COUNT(*, contribution_norm => 5) AS c FROM visits "
     "GROUP BY page"),
    ("stream-answer", OPTIONS, f"{_COUNT} HAVING n > 5"),
    ("stream-answer", OPTIONS, f"{_COUNT} ORDER BY n"),
    ("stream-answer", OPTIONS, f"{_COUNT} LIMIT 5"),
    ("stream-answer", OPTIONS, "page, COUNT(*) / 2 AS c FROM visits GROUP BY page"),
    ("stream-answer", OPTIONS, "page, COUNT(*) AS n, 1 AS one FROM visits GROUP BY page"),
    ("stream-answer", OPTIONS, "page, COUNT(*) AS n, COUNT(*) AS m FROM visits GROUP BY page"),
    ("stream-answer", OPTIONS, "COUNT(*) AS n FROM visits GROUP BY page"),
    ("stream-answer", OPTIONS, "page, COUNT(* WITH REPORT) AS n FROM visits GROUP BY page"),
    ("stream-groups", OPTIONS, "COUNT(*) AS n FROM visits"),
    ("stream-groups", OPTIONS, "day, COUNT(*) AS n FROM visits GROUP BY day"),
    ("group-type", OPTIONS, "seconds, COUNT(*) AS n FROM visits GROUP BY seconds"),
    ("group-by-unit", OPTIONS, "user, COUNT(*) AS n FROM visits GROUP BY user"),
    ("stream-name", OPTIONS, "UPPER(page) AS at, COUNT(*) AS n FROM visits GROUP BY at"),
    ("unknown-table", OPTIONS, "page, COUNT(*) AS n FROM orders GROUP BY page"),
    ("no-private-table", OPTIONS, "page, COUNT(*) AS n FROM sections GROUP BY page"),
]  # fmt: skip


def test_every_rule_of_streams_has_a_statement_that_breaks_it() -> None:
    ours = {rule for rule in RULES if rule.startswith("stream-")}
    assert ours == {code for code, _, _ in REFUSED if code.startswith("stream-")}


@pytest.mark.parametrize(("code", "options", "items"), REFUSED)
def test_refused(code: str, options: str, items: str, tmp_path: Path) -> None:
    with pytest.raises(DpstreamError) as caught:
        stream_job(load_project(folder(tmp_path)), None, dp(items, options))
    assert f"[{code}]" in caught.value.rule, caught.value.rule
    assert caught.value.field.startswith("statement") and caught.value.fix
    assert sorted(f.name for f in tmp_path.iterdir()) == ["dpstream.toml", "in", "sections.csv"]


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("stream-answer", f"SELECT page FROM ({dp(_COUNT)}) AS t"),
        ("stream-answer", f"WITH t AS ({dp(_COUNT)}) SELECT page, n FROM t"),
        ("no-dp-select", "SELECT page FROM visits"),
        ("select-only", "DELETE FROM visits WHERE true"),
        ("one-statement", f"{dp(_COUNT)}; {dp(_COUNT)}"),
        ("syntax", f"{dp(_COUNT)} GROUP"),
    ],
)
def test_whole_statements_that_are_refused(code: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(DpstreamError) as caught:
        stream_job(load_project(folder(tmp_path)), None, text)
    assert f"[{code}]" in caught.value.rule, caught.value.rule


def test_no_literal_enters_an_error(tmp_path: Path) -> None:
    project = load_project(folder(tmp_path))
    for code, options, items in REFUSED:
        text = dp(items.replace("FROM visits", "FROM visits /* Quitte */"), options)
        text = text.replace("GROUP BY", "GROUP BY", 1)
        with pytest.raises(DpstreamError) as caught:
            stream_job(project, None, text)
        assert "Quitte" not in str(caught.value), code


_TABLES = """
[table.visits]
path = "in/*.csv"
unit_column = "uid"
time_column = "at"
columns.uid = "INT64"
columns.page = "STRING"
columns.seconds = "FLOAT64"
columns.at = "TIMESTAMP"
columns.day = "DATE"
columns.cost = "NUMERIC"
columns.flag = "BOOL"
columns.n = "INT64"

[table.pages]
public = true
path = "sections.csv"
key_columns = ["page"]
columns = { page = "STRING", title = "STRING", weight = "FLOAT64", uid = "INT64" }

[job.daily]
"""


def test_whatever_the_tables_front_is_asked_is_refused_or_local(tmp_path: Path) -> None:
    """Statements on tables, as streams: coded refusals, or a query that no cut of batches shows."""
    head, job = PROJECT.partition("[table.visits]")[0], PROJECT.partition("[job.daily]\n")[2]
    head = head.replace('name = "user"', 'name = "uid", type = "int"')
    project = load_project(folder(tmp_path, head + _TABLES + job))
    (tmp_path / "sections.csv").write_text("page,title,weight,uid\np1,T,1,2\np2,U,,3\n")
    table = rows(16).rename_columns(["uid", "page", "at", "seconds", "n", "flag", "day"])
    pacsv.write_csv(table.append_column("cost", table["n"]), tmp_path / "in" / "0.csv")
    (tmp_path / "in" / "1.csv").unlink()
    texts = sorted({text for pair in PAIRS for text in pair[:2] if "visits" in text})
    accepted = 0
    for text in texts[::9]:
        statement = re.sub(r"max_groups_contributed = \d+", "max_rows_contributed = 4", text)
        try:
            stream = stream_job(project, None, statement).job
        except DpstreamError as error:
            assert error.fix
            continue
        accepted += 1
        if stream.source.query is not None:
            batch = all_rows(stream)
            assert through(stream, list(one_by_one(batch))) == through(stream, [batch]), text
    assert accepted >= 3
