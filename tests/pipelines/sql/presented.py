"""One private SELECT in many ways: names, order, spelling, and what follows the noise."""

import functools
import itertools
import operator
import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple

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


def presented(seed: int) -> Presented:
    """Return a way of showing four figures of (page, n > 2)."""
    return _Writer(seed).statement()


def _twice(figure: str, row: Row) -> Any:
    """What a computed column has; nothing where its figure is missing."""
    return None if row[figure] is None else row[figure] * 2 + row["count"]


class _Writer:
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
