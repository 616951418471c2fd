"""Several private SELECTs in one statement: a charge of all or of none, an identity of each."""

from collections import Counter
from pathlib import Path
from typing import Any

import duckdb
import pytest

from dpstream.accounting.errors import PolicyError, RunError
from dpstream.pipelines.sql import ask as asking
from dpstream.pipelines.sql.ask import ask
from dpstream.pipelines.sql.explain import explain
from dpstream.pipelines.sql.load import load_catalog
from dpstream.pipelines.sql.query_plan import question_of
from tests.pipelines.sql.asking import (
    COUNTED,
    FRESH,
    answer_to,
    charges,
    data_set,
    dp,
    without_noise,
)

_COUNT = dp(f"page, {COUNTED} AS n")
_LONG = dp(f"page, {COUNTED} AS n", "FROM visits WHERE page <> 'p8' GROUP BY page")
_TOTAL = dp("COUNT(*, contribution_bounds_per_group => (0, 90)) AS n", "FROM visits")
_OWN = "SELECT page, CAST(COUNT(*) AS DOUBLE) AS n FROM visits {} GROUP BY page"
#: (a statement, DuckDB's own, its private SELECTs)
STATEMENTS = [
    (f"SELECT a.page, b.n / a.n AS share FROM ({_COUNT}) AS a JOIN ({_LONG}) AS b "
     "ON a.page = b.page",
     "SELECT a.page, b.n / a.n FROM a JOIN b ON a.page = b.page", 2),
    (f"{_COUNT} UNION ALL {_LONG}", "SELECT * FROM a UNION ALL SELECT * FROM b", 2),
    (f"WITH a AS ({_COUNT}), c AS ({_TOTAL}) SELECT page, n / (SELECT n FROM c) FROM a WHERE n > "
     "(SELECT AVG(n) FROM a)",
     "SELECT page, n / (SELECT n FROM c) FROM a WHERE n > (SELECT AVG(n) FROM a)", 2),
    (f"WITH a AS ({_COUNT}), b AS ({_LONG}), c AS ({_TOTAL}) SELECT t.page, n FROM (SELECT * FROM a"
     " EXCEPT DISTINCT SELECT * FROM b UNION ALL SELECT 'all', n FROM c) AS t JOIN pages AS p ON "
     "t.page = p.page",
     "SELECT t.page, n FROM ((SELECT * FROM a EXCEPT SELECT * FROM b) UNION ALL SELECT 'all', n "
     "FROM c) AS t JOIN pages AS p ON t.page = p.page", 3),
    (f"SELECT a.page, b.n FROM ({_COUNT}) AS a CROSS JOIN ({_TOTAL}) AS b WHERE a.page IN (SELECT "
     f"page FROM ({_LONG}) AS l WHERE l.n > 100)",
     "SELECT a.page, c.n FROM a CROSS JOIN c WHERE a.page IN (SELECT page FROM b WHERE n > 100)",
     3),
]  # fmt: skip


@pytest.mark.parametrize(("text", "own", "parts"), STATEMENTS)
def test_values_are_those_of_duckdb(
    text: str, own: str, parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_noise(monkeypatch)
    data_set(tmp_path)
    base = duckdb.connect()
    base.execute(f"CREATE VIEW visits AS SELECT * FROM '{tmp_path}/visits.parquet'")
    base.execute(f"CREATE VIEW pages AS SELECT * FROM '{tmp_path}/pages.csv'")
    views = {"a": _OWN.format(""), "b": _OWN.format("WHERE page <> 'p8'"),
             "c": "SELECT CAST(COUNT(*) AS DOUBLE) AS n FROM visits"}  # fmt: skip
    for name, query in views.items():
        base.execute(f"CREATE VIEW {name} AS {query}")
    answer = answer_to(tmp_path, text)
    rows = list(zip(*answer.table.to_pydict().values(), strict=True))
    assert Counter(rows) == Counter(base.execute(own).fetchall()) and rows
    spent = charges(tmp_path)
    assert len(spent) == parts == len(question_of(text, load_catalog(tmp_path)).singles)
    assert answer.header.epsilon == sum(charge.epsilon for charge in spent)
    again = answer_to(tmp_path, text)
    assert not again.charged and again.table == answer.table and charges(tmp_path) == spent


def test_a_part_that_was_asked_is_free_and_has_the_same_figures(tmp_path: Path) -> None:
    data_set(tmp_path)
    alone = answer_to(tmp_path, _COUNT)
    both = answer_to(tmp_path, f"{_LONG} UNION ALL {_COUNT}")
    assert both.charged and len(charges(tmp_path)) == 2 and both.header.epsilon == 2
    rows = both.table.to_pylist()
    assert rows[-alone.table.num_rows :] == alone.table.to_pylist()
    answer_to(tmp_path, _LONG.replace("AS n", "AS m"))
    assert len(charges(tmp_path)) == 2
    answer_to(tmp_path, f"{_LONG} UNION ALL {_COUNT}", FRESH)
    assert len(charges(tmp_path)) == 4


def test_two_spellings_of_one_part_are_one_charge(tmp_path: Path) -> None:
    data_set(tmp_path)
    other = _COUNT.replace("AS n", "AS m")
    answer = answer_to(tmp_path, f"SELECT a.n, b.m FROM ({_COUNT}) AS a JOIN ({other}) AS b "
                       "ON a.page = b.page")  # fmt: skip
    assert len(charges(tmp_path)) == 1
    assert answer.table["n"] == answer.table["m"] and answer.intervals.keys() == {"n", "m"}
    assert answer.intervals["n"] == answer.intervals["m"]


def test_all_is_charged_or_nothing(tmp_path: Path) -> None:
    data_set(tmp_path, epsilon=3.0)
    count, long = (
        one.replace("OPTIONS(", "OPTIONS(mechanism = GEOMETRIC, ") for one in (_COUNT, _LONG)
    )
    text = f"{count} UNION ALL {long}"
    plan = explain(load_catalog(tmp_path), text)
    assert plan.acceptance.refusal is not None and len(plan.statements) == 2
    with pytest.raises(PolicyError):
        answer_to(tmp_path, text)
    assert not charges(tmp_path)
    answer_to(tmp_path, long)  # each alone fits


def test_a_statement_that_failed_half_way_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_set(tmp_path)
    text, honest, calls = f"{_COUNT} UNION ALL {_LONG}", asking.drawn, []

    def drawn(*arguments: Any, **more: Any) -> bytes:
        calls.append(1)
        if len(calls) == 2:
            raise RunError("x", "is broken", "mend it")
        return honest(*arguments, **more)

    monkeypatch.setattr(asking, "drawn", drawn)
    answers = list[object]()
    with pytest.raises(RunError):
        answers.append(ask(load_catalog(tmp_path), text))
    assert not answers and len(charges(tmp_path)) == 2
    assert answer_to(tmp_path, text).table.num_rows and len(calls) == 3
    assert len(charges(tmp_path)) == 2
