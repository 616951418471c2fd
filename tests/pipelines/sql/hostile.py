"""Statements over new forms, generated from a seed, and rows of two tables, ugly on purpose.

Each relation gives ``uid``, a text ``g``, a whole number ``v`` and a float ``w``.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.pipelines.sql.load import catalog_of
from dpstream.pipelines.tables.catalog import Catalog
from tests import projects
from tests.pipelines.sql.asking import KEY

UNITS = 12
_FLOATS = [0.0, -0.0, 0.5, -0.5, 1.5, float("nan"), float("inf"), None, 1e300, 2.0]
_TEXTS = ["a", "b", "c", None, ""]


def tables(seed: int, size: int = 90) -> dict[str, pa.Table]:
    """Visits and users; some rows have no unit."""
    draw = random.Random(seed)
    uid = lambda: draw.choice([*range(UNITS), *range(3), None])  # noqa: E731
    visit = [
        (uid(), draw.choice(_TEXTS), draw.choice([*range(-2, 6), None]), draw.choice(_FLOATS),
         draw.choice([True, False, None])) for _ in range(size)
    ]  # fmt: skip
    user = [(i, draw.choice(_TEXTS), draw.randrange(4), draw.choice(_FLOATS)) for i in range(UNITS)]
    types = [pa.int64(), pa.string(), pa.int64(), pa.float64()]
    return {
        "visits": _table(visit, ["uid", "page", "n", "x", "flag"], [*types, pa.bool_()]),
        "users": _table(user, ["uid", "dept", "age", "score"], types),
    }


def _table(rows: list[tuple[Any, ...]], names: list[str], types: list[pa.DataType]) -> pa.Table:
    columns = [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in names]
    arrays = [pa.array(c, t) for c, t in zip(columns, types, strict=True)]
    return pa.table(arrays, names=names)


def catalog(folder: Path, rows: dict[str, pa.Table]) -> Catalog:
    """The catalog of the tables, written to a folder, and of public pages."""
    folder.mkdir(exist_ok=True)
    for name, table in rows.items():
        pq.write_table(table, folder / f"{name}.parquet")
    (folder / "pages.csv").write_text("page,part,weight\n" + "a,x,1\nb,x,2\nc,y,\nd,y,4\n")
    sections = {name: {"path": f"{name}.parquet", "unit_column": "uid"} for name in rows}
    columns = {"page": "STRING", "part": "STRING", "weight": "INT64"}
    pages = {"path": "pages.csv", "public": True, "columns": columns}
    return catalog_of(
        projects.of_tables(
            folder, ("uid", "int"), {**sections, "pages": pages}, insecure_test_secret=KEY
        )
    )


_SOURCES = (
    "SELECT uid, page AS g, n AS v, x AS w FROM visits",
    "SELECT uid, dept AS g, age AS v, score AS w FROM users",
    "SELECT uid, page AS g, n * 2 AS v, x * 0 AS w FROM visits WHERE flag",
    "SELECT uid, page AS g, ROW_NUMBER() OVER (PARTITION BY uid ORDER BY n) AS v, x AS w FROM "
    "visits",
    "SELECT t.uid, p.part AS g, t.n AS v, t.x AS w FROM visits AS t JOIN pages AS p ON t.page = "
    "p.page",
    "SELECT uid, page AS g, n + (SELECT MAX(weight) FROM pages) AS v, x AS w FROM visits",
    "SELECT uid, page AS g, COUNT(*) AS v, MAX(x) AS w FROM visits GROUP BY uid, page",
    "SELECT uid, page AS g, n AS v, x AS w FROM visits AS o WHERE EXISTS (SELECT 1 FROM users AS u "
    "WHERE u.uid = o.uid AND u.age > 1)",
)
_SETS = ("UNION ALL", "UNION DISTINCT", "INTERSECT ALL", "INTERSECT DISTINCT", "EXCEPT ALL",
         "EXCEPT DISTINCT")  # fmt: skip
_VALUES = ("v", "w", "g", "v + w", "CONCAT(g, CAST(v AS STRING))", "IF(v > 1, w, -0.0)", "v * 0")
_PER = "contribution_bounds_per_group => ({}, {})"
_ROW = "contribution_bounds_per_row => (-3, 9)"


class _Writer:
    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def relation(self, depth: int = 2) -> str:
        """A relation with the four columns."""
        if depth == 0:
            return self.draw.choice(_SOURCES)
        inner = self.relation(depth - 1)
        made = self.draw.randrange(5)
        if made == 0:
            return f"SELECT DISTINCT uid, g, v, w FROM ({inner}) AS d"
        if made == 1:
            return f"SELECT uid, g, v, w FROM ({inner}) AS d WHERE v > {self.draw.randrange(3)}"
        if made == 2:
            return (f"SELECT d.uid, d.g, d.v, e.w FROM ({inner}) AS d JOIN "
                    f"({self.relation(0)}) AS e ON d.uid = e.uid")  # fmt: skip
        return (f"SELECT uid, g, v, w FROM (({inner}) {self.draw.choice(_SETS)} "
                f"({self.relation(depth - 1)})) AS d")  # fmt: skip

    def functions(self) -> str:
        """A select list of one to three functions."""
        few, low = self.draw.choice([1, 2, 5]), self.draw.choice([-4, -2])
        value = self.draw.choice(_VALUES)
        calls = [
            f"COUNT(DISTINCT {value}, {_PER.format(0, few)})",
            f"COUNT(DISTINCT {self.draw.choice(_VALUES)}, {_PER.format(-1, 1)})",
            f"COUNT(*, {_PER.format(0, few)})", f"COUNT({value}, {_PER.format(low, -1)})",
            f"SUM(v, {_PER.format(low, few)})", f"AVG(w, {_ROW})", f"MEDIAN(v, {_ROW})",
            f"COUNTIF(v > 1, {_PER.format(0, few)})", "COUNT(DISTINCT uid)",
        ]  # fmt: skip
        chosen = self.draw.sample(calls, self.draw.randint(1, 3))
        if not any("DISTINCT v" in call for call in chosen):
            chosen = [calls[0], *chosen[1:]] if self.draw.random() < 0.5 else chosen
        return ", ".join(f"{call} AS f{i}" for i, call in enumerate(chosen))

    def statement(self) -> str:
        """A private SELECT, or two of them beside each other."""
        if self.draw.random() < 0.8:
            return self.private()
        return f"SELECT a.f0, b.f0 AS f1 FROM ({self.private()}) AS a, ({self.private()}) AS b"

    def private(self) -> str:
        """A private SELECT, without groups, with public ones or with thresholds."""
        kind, relation = self.draw.randrange(5), self.relation(self.draw.randint(0, 2))
        options = f"epsilon = 3, delta = 1e-6, max_rows_contributed = {self.draw.randint(1, 4)}"
        head = f"SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS({options}"
        if kind == 0:
            return f"{head}) {self.functions()} FROM ({relation}) AS r"
        head = f"{head}, max_groups_contributed = {self.draw.randint(1, 3)}"
        if kind == 1:
            return f"{head}) g, {self.functions()} FROM ({relation}) AS r GROUP BY g"
        if kind == 2:
            sets = self.draw.choice(["ROLLUP(g, v)", "CUBE(v, g)", "GROUPING SETS ((g, v), ())"])
            grouped = f"{head}) g, v, {self.functions()}, GROUPING(g) AS s FROM ({relation}) AS r"
            return f"{grouped} GROUP BY {sets}"
        if kind == 3:
            few = _PER.format(0, self.draw.choice([1, 3]))
            return (f"{head}, group_selection_strategy = PUBLIC_GROUPS) p.page, p.part, COUNT(*, "
                    f"{few}) AS f0, SUM(r.v, {few}) AS f1 FROM ({relation}) AS r RIGHT JOIN pages "
                    "AS p ON r.g = p.page AND r.g = p.part GROUP BY ROLLUP(p.part, p.page)"
                    )  # fmt: skip
        return (f"{head}, group_selection_strategy = PUBLIC_GROUPS) p, {self.functions()} FROM "
                f"({relation}) AS r RIGHT JOIN UNNEST(['a', 'b', 'x', 'none']) AS p ON r.g = p "
                "GROUP BY p")  # fmt: skip


def statements(seeds: range) -> Iterator[str]:
    """The statements of seeds."""
    return (_Writer(seed).statement() for seed in seeds)
