"""The dialect reads both spellings and writes what it reads."""

import pytest
import sqlglot

from dpstream.pipelines.statements.dialect import (
    Clamped,
    DpSql,
    PrivacyOptions,
    Private,
    WithReport,
)
from tests.pipelines.sql.pairs import PAIRS

_FORMS = [
    "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 1.5, delta = 1e-9, mechanism = geometric, "
    "privacy_unit_column = t.uid, group_selection_strategy = PUBLIC_GROUPS) k, "
    "COUNT(*, contribution_bounds_per_group => (0, 5)) AS n FROM t GROUP BY k HAVING n > 5",
    "SELECT WITH ANONYMIZATION OPTIONS(epsilon = 1) ANON_COUNT(* CLAMPED BETWEEN 0 AND 5) FROM t",
    "SELECT WITH ANONYMIZATION ANON_SUM(x CLAMPED BETWEEN -1 AND 2.5 WITH REPORT) FROM t",
    "SELECT WITH ANONYMIZATION ANON_NTILE(x, 0.9, 0, 10), ANON_MEDIAN(x WITH REPORT) FROM t",
    "SELECT COUNT(DISTINCT uid, contribution_bounds_per_group => (0, 1)) FROM t",
    "SELECT SUM(x + 1, contribution_bounds_per_row => (-1, 2.5)), SUM(x) FROM t",
    "SELECT PERCENTILE_CONT(x, 0.5, contribution_bounds_per_row => (0, 1)) FROM t",
    "SELECT APPROX_QUANTILES(x, 4), MEDIAN(x), VAR(x), STDDEV_POP(x), VARIANCE(x) FROM t",
    "SELECT AVG(x, contribution_norm => 4.64) FROM t",
    "SELECT MIN(x WITH REPORT), MAX(x), COUNT(DISTINCT a, b) FROM t",
]


@pytest.mark.parametrize("text", _FORMS)
def test_forms_round_trip(text: str) -> None:
    tree = sqlglot.parse_one(text, dialect=DpSql)
    written = tree.sql(dialect=DpSql)
    assert sqlglot.parse_one(written, dialect=DpSql) == tree
    assert written == sqlglot.parse_one(written, dialect=DpSql).sql(dialect=DpSql)
    assert written == text  # the forms are in the generator's own words


def test_every_accepted_statement_round_trips() -> None:
    for text in {good for good, _, _ in PAIRS}:
        tree = sqlglot.parse_one(text, dialect=DpSql)
        assert sqlglot.parse_one(tree.sql(dialect=DpSql), dialect=DpSql) == tree


def test_parts_are_nodes_of_their_own() -> None:
    tree = sqlglot.parse_one(
        "SELECT WITH ANONYMIZATION OPTIONS(epsilon = 1) ANON_SUM(x CLAMPED BETWEEN 0 AND 1), "
        "SUM(y), ANON_AVG(z WITH REPORT) FROM t",
        dialect=DpSql,
    )
    assert tree.args["hint"].name == "ANONYMIZATION"
    assert len(list(tree.find_all(PrivacyOptions))) == 1
    assert [p.name for p in tree.find_all(Private)] == ["ANON_SUM", "ANON_AVG"]
    assert len(list(tree.find_all(Clamped))) == len(list(tree.find_all(WithReport))) == 1


@pytest.mark.parametrize("text", [
    "SELECT WITH SOMETHING OPTIONS(epsilon = 1) x FROM t",
    "SELECT WITH ANONYMIZATION OPTIONS(epsilon) x FROM t",
    "SELECT ANON_SUM(x CLAMPED BETWEEN 0) FROM t",
    "SELECT ANON_SUM(x CLAMPED BETWEEN 0 OR 1) FROM t",
])  # fmt: skip
def test_broken_forms_are_syntax_errors(text: str) -> None:
    with pytest.raises(sqlglot.ParseError):
        sqlglot.parse_one(text, dialect=DpSql)
