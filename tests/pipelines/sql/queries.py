"""Queries over three tables, and ways of showing an answer, generated from a seed."""

import functools
import itertools
import operator
import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple

_TABLES = (
    "SELECT uid, age AS v, score AS w, dept AS g FROM users",
    "SELECT uid, n AS v, seconds AS w, page AS g FROM visits",
    "SELECT uid, EXTRACT(MONTH FROM day) AS v, CAST(cost AS FLOAT64) AS w, page AS g FROM visits",
    "SELECT customer_id AS uid, order_id AS v, price AS w, CAST(day AS STRING) AS g FROM orders",
    "SELECT uid, qty AS v, qty / line AS w, product AS g FROM items",
    "SELECT o.uid, i.qty AS v, o.price * i.qty AS w, i.product AS g FROM orders AS o "
    "JOIN items AS i ON o.order_id = i.order_id",
)
_CONDITIONS = (
    "v > 1", "w < 3.5", "g IS NOT NULL", "v / (v - 2) > 0.5", "CAST(g AS INT64) > 0", "v * 9 < 40",
    "g LIKE '%a%' OR w > 0", "NOT v = 3", "LENGTH(g) = 1 AND v BETWEEN 0 AND 4", "MOD(v, 3) = 1",
)  # fmt: skip
_INTEGERS = ("v", "v + 1", "v * v", "DIV(v, 2)", "CAST(g AS INT64)", "IF(w > 0, v, -v)",
             "COALESCE(v, 7)", "CAST(w AS INT64)", "v * 4611686018427387904")  # fmt: skip
_FLOAT = ("w", "w / v", "w * 10", "SQRT(w)", "v / 3", "LN(w)", "w + 1e300 * w", "1 / w",
          "CAST(g AS FLOAT64)")  # fmt: skip
_TEXT = ("g", "CONCAT(g, 'x')", "UPPER(g)", "CAST(v AS STRING)", "SUBSTR(g, 1, 1)",
         "IF(v > 2, g, NULL)")  # fmt: skip
_OVER_G = ("COUNT(*)", "MAX(v)", "COUNT(DISTINCT g)", "COUNTIF(w > 0)", "MIN(v)")
_OVER_W = ("SUM(w)", "AVG(w)", "MIN(w)", "MAX(w)", "SUM(w) / COUNT(w)", "SUM(w * w)", "AVG(v)")
_FUNCTIONS = (
    "COUNT(*)", "COUNT(w)", "COUNT(DISTINCT {r}.uid)", "SUM({r}.w)",
    "SUM({r}.w, contribution_bounds_per_row => (-5, 10))", "AVG({r}.w)",
    "AVG({r}.v, contribution_bounds_per_row => (-5, 10))", "MEDIAN({r}.w)", "VAR({r}.v)",
    "SUM({r}.v / {r}.w)", "COUNT(DISTINCT {r}.w, contribution_bounds_per_group => (0, 2))",
)  # fmt: skip


class _Writer:
    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.names = iter(f"t{i}" for i in range(1_000))

    def relation(self, tables: int, depth: int = 2) -> str:
        """A relation of so many tables."""
        if tables > 1:
            left = self.draw.randint(1, tables - 1)
            made = self.together(self.relation(left, 1), self.relation(tables - left, 1))
        else:
            made = self.draw.choice(_TABLES)
        for _ in range(self.draw.randint(0, depth)):
            made = self.draw.choice((self.filtered, self.projected, self.grouped, self.distinct,
                                     self.published))(made)  # fmt: skip
        return made

    def together(self, left: str, right: str) -> str:
        a, b = next(self.names), next(self.names)
        kind = self.draw.choice(("JOIN", "LEFT JOIN", "RIGHT JOIN", "FULL JOIN", "UNION", "SET"))
        if kind == "UNION":
            return f"{left} UNION ALL {right}" if " UNION " not in right else left
        if kind == "SET":
            how = self.draw.choice(("UNION DISTINCT", "EXCEPT DISTINCT", "INTERSECT DISTINCT"))
            both = (f"SELECT uid, v, g FROM ({left}) AS {a} {how} "
                    f"SELECT uid, v, g FROM ({right}) AS {b}")  # fmt: skip
            return (f"SELECT uid, v, CAST(v AS FLOAT64) AS w, g FROM ({both}) "
                    f"AS {next(self.names)}")  # fmt: skip
        unit = {"LEFT JOIN": f"{a}.uid", "RIGHT JOIN": f"{b}.uid"}.get(
            kind, f"COALESCE({a}.uid, {b}.uid)"
        )
        more = self.draw.choice(("", f" AND {a}.v < {b}.v", f" AND {a}.g = {b}.g",
                                 f" AND {a}.w / {b}.w > 0.1"))  # fmt: skip
        w = self.draw.choice((f"{a}.w", f"{b}.w", f"{a}.w + {b}.w"))
        return (f"SELECT {unit} AS uid, {a}.v, {w} AS w, {b}.g FROM ({left}) AS {a} {kind} "
                f"({right}) AS {b} ON {a}.uid = {b}.uid{more}")  # fmt: skip

    def filtered(self, of: str) -> str:
        return (f"SELECT * FROM ({of}) AS {next(self.names)} "
                f"WHERE {self.draw.choice(_CONDITIONS)}")  # fmt: skip

    def projected(self, of: str) -> str:
        pick = self.draw.choice
        return (f"SELECT uid, {pick(_INTEGERS)} AS v, {pick(_FLOAT)} AS w, {pick(_TEXT)} AS g "
                f"FROM ({of}) AS {next(self.names)}")  # fmt: skip

    def grouped(self, of: str) -> str:
        pick, by = self.draw.choice, self.draw.choice(("uid, g", "g, uid"))
        having = pick(("", " HAVING COUNT(*) > 1", " HAVING SUM(w) > 0"))
        return (f"SELECT uid, {pick(_OVER_G)} AS v, {pick(_OVER_W)} AS w, g "
                f"FROM ({of}) AS {next(self.names)} GROUP BY {by}{having}")  # fmt: skip

    def distinct(self, of: str) -> str:
        return (f"SELECT uid, v, CAST(v AS FLOAT64) AS w, g FROM (SELECT DISTINCT uid, v, g "
                f"FROM ({of}) AS {next(self.names)}) AS {next(self.names)}")  # fmt: skip

    def published(self, of: str) -> str:
        a, p = next(self.names), next(self.names)
        kind = self.draw.choice(("JOIN", "LEFT JOIN"))
        on = self.draw.choice((f"{a}.g = {p}.page", f"{a}.v < {p}.uid", f"{a}.w < {p}.weight"))
        return (f"SELECT {a}.uid, {a}.v, {p}.weight AS w, {p}.title AS g FROM ({of}) AS {a} "
                f"{kind} pages AS {p} ON {on}")  # fmt: skip


def generated(seed: int) -> str:
    """A differentially private statement over three tables."""
    writer = _Writer(seed)
    functions = writer.draw.sample(_FUNCTIONS, 3)
    items = ", ".join(f"{f.format(r='r')} AS f{i}" for i, f in enumerate(functions))
    group = writer.draw.choice(("r.g", "r.v", "r.g, r.v", "SUBSTR(r.g, 1, 1)"))
    return (
        "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 1, delta = 1e-9, "
        f"max_groups_contributed = 4) {items} FROM ({writer.relation(3)}) AS r GROUP BY {group}"
    )


FIGURES = ("count", "sum", "users", "middle")
#: The ways to write each figure.
_CALLS = {
    "count": (
        "COUNT(*, contribution_bounds_per_group => (0, 30))",
        "COUNT(* CLAMPED BETWEEN 0 AND 30.0)",
        "ANON_COUNT(* CLAMPED BETWEEN 0 AND 30)",
    ),
    "sum": (
        "SUM({s}, contribution_bounds_per_group => (0, 900))",
        "SUM({s} CLAMPED BETWEEN 0.0 AND 9e2)",
        "ANON_SUM({s} CLAMPED BETWEEN 0 AND 900)",
        "SUM({s} WITH REPORT, contribution_bounds_per_group => (0, 900))",
    ),
    "users": ("COUNT(DISTINCT {u})", "count(distinct  {u} )"),
    "middle": (
        "MEDIAN({s}, contribution_bounds_per_row => (0, 100))",
        "PERCENTILE_CONT({s}, 0.50, contribution_bounds_per_row => (0, 1e2))",
    ),
}
_OPTIONS = ["epsilon = 40", "delta = 1e-9", "max_groups_contributed = 12", "mechanism = gaussian"]
_MORE_OPTIONS = ["privacy_unit_column = uid", "max_rows_contributed = 5", "optimise = LIMIT"]
#: By figure and group the released value.
Row = dict[str, Any]


class Presented(NamedTuple):
    """A statement, and what its columns show.

    Attributes:
        columns: by label a function from a released row to the value.
        groups: the labels of ``page`` and ``late``; ``None`` if figures are shown without them.
    """

    text: str
    columns: dict[str, Callable[[Row], Any]]
    groups: tuple[str, str] | None


def presentations(seed: int) -> Presented:
    """Return a way of showing four figures of (page, n > 2)."""
    return _Presenter(seed).statement()


def _twice(figure: str, row: Row) -> Any:
    """What a computed column has; nothing where its figure is missing."""
    return None if row[figure] is None else row[figure] * 2 + row["count"]


class _Presenter:
    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        words = ("x", "released", "t0", "group_0", "function_1", "c0")
        self._labels = (f"{word}{n}" for n in itertools.count() for word in words)

    def statement(self) -> Presented:
        source, with_, columns = self._source()
        draw, late, groups = self._draw, f"{columns['n']} > 2", (self._label(), self._label())
        items = [f"{columns['page']} AS {groups[0]}", f"{late} AS {groups[1]}"]
        figures: dict[str, Callable[[Row], Any]] = {}
        for figure in (*FIGURES, *draw.choices(FIGURES, k=draw.randrange(3))):
            label, call = self._label(), self._call(figure, columns)
            figures[label] = operator.itemgetter(figure)
            if draw.random() < 0.2:
                call = f"{call} * 2 + {self._call('count', columns)}"
                figures[label] = functools.partial(_twice, figure)
            items.append(f"{call} AS {label}")
        by = [draw.choice([columns["page"], groups[0]]), draw.choice([late, groups[1]])]
        items, by = draw.sample(items, len(items)), draw.sample(by, 2)
        word = draw.choice(["DIFFERENTIAL_PRIVACY", "ANONYMIZATION"])
        given = _OPTIONS + draw.sample(_MORE_OPTIONS, draw.randrange(4))
        options = ", ".join(draw.sample(given, len(given)))
        text = f"SELECT WITH {word} OPTIONS({options}) {', '.join(items)} FROM {source}"
        text += f" GROUP BY {', '.join(by)}"
        if draw.random() < 0.3:
            text += f" HAVING {self._call('count', columns)} > {draw.choice([-1000, 50])}"
        if draw.random() < 0.4:
            key = draw.choice([*groups, *figures, self._call("sum", columns)])
            text += f" ORDER BY {key} DESC"
        text, figures, labels = self._around(text, with_, figures, groups)
        return Presented(self._spelled(text), figures, labels)

    def _source(self) -> tuple[str, list[str], dict[str, str]]:
        """The private relation, the parts of WITH that it needs, and the names of its columns."""
        columns = {"page": "page", "n": "n", "s": "seconds", "u": "uid"}
        way, label, query = self._draw.randrange(6), self._label(), "SELECT * FROM visits"
        if way == 0:
            return "visits", [], columns
        if way == 1:
            return f"visits AS {label}", [], {k: f"{label}.{c}" for k, c in columns.items()}
        if way in (3, 5):
            new = {name: self._label() for name in ("page", "n", "s")} | {"u": "uid"}
            items = [f"{columns[name]} AS {new[name]}" for name in self._draw.sample(list(new), 4)]
            query, columns = f"SELECT {', '.join(items)} FROM visits", new
        if way in (4, 5):
            return label, [f"{label} AS ({query})"], columns
        return f"({query}) AS {label}", [], columns

    def _around(
        self,
        text: str,
        with_: list[str],
        figures: dict[str, Callable[[Row], Any]],
        groups: tuple[str, str],
    ) -> tuple[str, dict[str, Callable[[Row], Any]], tuple[str, str] | None]:
        """A statement around the private SELECT."""
        draw, way, label = self._draw, self._draw.randrange(6), self._label()
        if way in (1, 2):
            with_, inner = [*with_, f"{label} AS ({text})"], label
        else:
            inner = f"({text}) AS {label}"
        head = f"WITH {', '.join(with_)} " if with_ else ""
        if way == 0:  # elsewhere the outermost query alone may have LIMIT
            return head + text + draw.choice(["", " LIMIT 1", " LIMIT 50"]), figures, groups
        if way in (1, 3):
            tail = draw.choice(["", " LIMIT 3", f" ORDER BY {groups[1]}, {groups[0]} LIMIT 5"])
            return f"{head}SELECT * FROM {inner}{tail}", figures, groups
        if way == 4:  # without groups
            items = [f"MAX({name}) AS {self._label()}" for name in draw.sample(list(figures), 2)]
            return f"{head}SELECT {', '.join(items)} FROM {inner}", {}, None
        new = {name: self._label() for name in (*groups, *figures)}
        items = [f"{label}.{old} AS {name}" for old, name in new.items()]
        text = f"{head}SELECT {', '.join(draw.sample(items, len(items)))} FROM {inner}"
        if way == 5:
            text += f" JOIN pages AS p ON p.page = {label}.{groups[0]}"
        figures = {new[old]: value for old, value in figures.items()}
        return text, figures, (new[groups[0]], new[groups[1]])

    def _call(self, figure: str, columns: dict[str, str]) -> str:
        return self._draw.choice(_CALLS[figure]).format(**columns)

    def _label(self) -> str:
        label = next(self._labels)
        return f"`{label}`" if self._draw.random() < 0.2 else label

    def _spelled(self, text: str) -> str:
        """The text in another case and with other space; it has no literal that has either."""
        cases: list[Callable[[str], str]] = [str, str.lower, str.upper]
        case = self._draw.choice(cases)
        space = self._draw.choice([" ", "\n", "\t ", " /* a comment */ ", " -- a comment\n"])
        return case(re.sub(" (?!BY)", space, text))  # sqlglot: no comment in GROUP BY
