"""The canonical form of a private part is the same relation, groups and functions by other names.

It is what is executed; that it has nothing of a presentation is tested in
``tests/pipelines/sql/test_presentation.py``.
"""

from typing import Any

import duckdb
import pytest

from dpstream.pipelines.statements.canonical import canonical_form, function_text, group_text
from dpstream.pipelines.statements.statement import PrivateSelect, statement_of
from tests.pipelines.sql.pairs import AROUND, RELATIONS
from tests.pipelines.sql.queries import generated
from tests.pipelines.sql.rows import database, stage_text, ugly_rows
from tests.pipelines.sql.shop import shop

_CATALOG = shop()
#: Relations, and renamings in them, that the generator does not write.
_MORE = (
    "a.uid, SUM(b.v) AS s FROM (SELECT uid, n AS v, page AS b FROM visits) AS b JOIN (SELECT uid "
    "AS v, age AS uid, uid AS u FROM users) AS a ON a.v = b.uid GROUP BY a.uid",
    "v, COUNT(*) AS k, SUM(v) AS s FROM (SELECT uid, u AS v FROM (SELECT uid, n AS u, n AS w FROM "
    "visits WHERE n > 0) AS x) AS y GROUP BY v",
    "v, SUM(s) AS a, SUM(u) AS b FROM (SELECT uid, n AS v, n AS s, 1 AS u FROM visits UNION ALL "
    "SELECT uid, age AS u, 1 AS v, age AS s FROM users) AS x GROUP BY v",
    "t1.g, SUM(t0.n) AS s, COUNT(*) AS k FROM visits AS t1x JOIN visits AS t0 ON t1x.uid = t0.uid "
    "JOIN (SELECT uid, page AS g FROM visits) AS t1 ON t1.uid = t0.uid GROUP BY t1.g",
)
_DP = (
    "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 1, delta = 1e-9, "
    "max_groups_contributed = 4, max_rows_contributed = 2) "
)


@pytest.fixture(scope="module")
def rows() -> duckdb.DuckDBPyConnection:
    return database(_CATALOG, ugly_rows(5))


def _columns(connection: duckdb.DuckDBPyConnection, select: PrivateSelect) -> dict[str, list[Any]]:
    """Stage 1: of each unit's row the partials, by group and function."""
    table = connection.sql(stage_text(select, _CATALOG)).to_arrow_table().to_pydict()
    out = {"unit": table["unit"]}
    out |= {group.name: table[f"group_{i}"] for i, group in enumerate(select.groups)}
    for i, function in enumerate(select.functions):
        for part in ("value", "count", "rows"):
            if f"{part}_{i}" in table:
                out[f"{part} of {function.name}"] = table[f"{part}_{i}"]
    return out


@pytest.mark.parametrize(
    "text",
    [
        *map(generated, range(40)),
        *(AROUND[i % len(AROUND)].format(r) for i, (r, _, _) in enumerate(RELATIONS)),
        *(_DP + more for more in _MORE),
    ],
)
def test_the_canonical_form_has_the_same_rows(text: str, rows: duckdb.DuckDBPyConnection) -> None:
    statement = statement_of(text, _CATALOG)
    select, names = canonical_form(statement)
    written, canonical = _columns(rows, statement), _columns(rows, select)
    named = {}
    for name in written:
        part, of, label = name.rpartition(" of ")
        named[name] = f"{part}{of}{names.get(label, label)}"
    one = zip(*written.values(), strict=True)
    other = zip(*(canonical[name] for name in named.values()), strict=True)
    assert sorted(map(repr, one)) == sorted(map(repr, other))


def test_groups_and_functions_are_sorted_sets() -> None:
    def form(items: str, by: str) -> PrivateSelect:
        text = f"{_DP} {items} FROM visits AS v GROUP BY {by}"
        return canonical_form(statement_of(text, _CATALOG)).select

    first = form("page, n, COUNT(*) AS k, SUM(n) AS s, SUM(n) AS r", "page, n")
    second = form("SUM(v.n) AS a, v.n AS b, COUNT(*) AS c, v.page", "v.n, v.page, v.page")
    for select in (first, second):
        assert [g.name for g in select.groups] == ["group_0", "group_1"]
        assert [f.name for f in select.functions] == ["function_0", "function_1"]
    assert list(map(group_text, first.groups)) == list(map(group_text, second.groups))
    assert list(map(function_text, first.functions)) == list(map(function_text, second.functions))
