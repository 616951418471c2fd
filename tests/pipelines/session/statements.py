"""What a test asks of points, written as statements, and the figures of their answers."""

import secrets
from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import partial
from typing import Any

import pyarrow as pa

from dpstream.accounting.arrays import Int64
from dpstream.accounting.regions.space import Integer, Space
from dpstream.accounting.sessions.aggregates import COUNT, Aggregate
from dpstream.pipelines.ask.question import Asking
from dpstream.pipelines.door.route import Door
from dpstream.pipelines.project.project import load_project
from dpstream.pipelines.runners.bounded import Runner
from dpstream.pipelines.session.ask import SessionRequest, order_of
from dpstream.pipelines.session.conditions import Reader
from dpstream.pipelines.session.config import Config
from dpstream.pipelines.session.selection import Selection
from dpstream.pipelines.session.statement import (
    PointQuestion,
    checked_statement,
    question_of,
    tables_of,
)
from dpstream.pipelines.session.union import Union, assembled
from dpstream.pipelines.sql.receipt import SqlAnswer
from dpstream.state.connecting import Closing
from dpstream.state.ledger.orders import Planned
from tests.sessions import average, quantiles, sum_of

_CALLS = {"count": "COUNT(*)", "sum": "SUM({})", "average": "AVG({})"}
By = Mapping[str, Sequence[Any] | int | None]


def call_of(figure: Aggregate) -> str:
    """A figure as items of a select list."""
    if figure.what != "quantiles":
        return f"{_CALLS[figure.what].format(figure.column)} AS {figure.name}"
    texts = (f"PERCENTILE_CONT({figure.column}, {q}) AS `{name}`"
             for q, name in zip(figure.at, figure.outputs, strict=True))  # fmt: skip
    return ", ".join(texts)


def selected(text: str, space: Space) -> Selection:
    """Where the condition of a statement is true."""
    tables = tables_of("rows", space.dimensions, {}, {})
    where = f" WHERE {text}" if text.strip() else ""
    text = f"SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 1) COUNT(*) AS n FROM rows{where}"
    return Selection(
        space, Reader(space, tables, checked_statement(text, tables).source).selected()
    )


class Figures:
    """An answer, and the one figure of it."""

    def __init__(self, answer: SqlAnswer) -> None:
        self.answer, self.table = answer, answer.table
        self.receipt, self.digest, self.header = answer.receipt, answer.digest, answer.header
        self.charged, self.insecure = answer.charged, answer.insecure

    def column(self, name: str, part: str = "") -> list[Any]:
        """The values of a column, or a part of its interval."""
        columns: pa.Table = self.answer.intervals[name] if part else self.table
        values: list[Any] = columns[part or name].to_pylist()
        return values

    @property
    def value(self) -> Any:
        return self.table[0][0].as_py()

    @property
    def sd(self) -> Any:
        return self.column(self.table.column_names[0], "sd")[0]

    @property
    def interval(self) -> tuple[Any, Any]:
        low, high = (self.column(self.table.column_names[0], end)[0] for end in ("low", "high"))
        return low, high


class Part:
    """Points of a table, and who pays for questions about them."""

    def __init__(self, session: "Session", where: str = "", allotment: str = "") -> None:
        self.session, self.text, self.allotment = session, where, allotment

    def where(self, text: str) -> "Part":
        both = f"({self.text}) AND ({text})" if self.text and text else self.text or text
        return Part(self.session, both, self.allotment)

    def statement(
        self,
        figures: Sequence[Aggregate] = (COUNT,),
        budget: Any = 1,
        by: By | None = None,
        kind: str = "epsilon",
        drop: bool = False,
        cover: Sequence[str] | str = (),
    ) -> str:
        """The question as a statement."""
        amount = budget if isinstance(budget, str) else format(Decimal(repr(budget)), "f")
        cover = [cover] if isinstance(cover, str) else list(cover)
        options = [
            f"{kind} = {amount}",
            *(["drop = TRUE"] if drop else []),
            *([f"cover = {cover}"] if cover else []),
            *([f"allotment = '{self.allotment}'"] if self.allotment else []),
        ]
        items, wheres = (
            [call_of(figure) for figure in figures],
            [f"({self.text})"] if self.text else [],
        )
        for name, ranges in (by or {}).items():
            if ranges is None:
                items.append(name)
                continue
            edges = self.session.ranges(name, ranges) if isinstance(ranges, int) else ranges
            wheres.append(f"({name} >= {edges[0]} AND {name} < {edges[-1]})")
            items.append(f"RANGE_BUCKET({name}, {list(edges)}) AS {name}")
        return (
            f"SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS({', '.join(options)}) {', '.join(items)}"
            f" FROM {self.session.name}{' WHERE ' if wheres else ''}{' AND '.join(wheres)}"
            f"{' GROUP BY ' if by else ''}{', '.join(by or ())}"
        )

    def question(
        self, *given: Any, fresh: bool = False, as_of: str = "", **how: Any
    ) -> PointQuestion:
        session, text = self.session, self.statement(*given, **how)
        statement = checked_statement(text, session.tables)
        return question_of(statement, session.open_table, session.tables, Asking(fresh, as_of))

    def request(self, *given: Any, **how: Any) -> SessionRequest:
        return self.question(*given, **how).request

    def ask(self, *given: Any, fresh: bool = False, as_of: str = "", **how: Any) -> Figures:
        return self.session.ask(self.statement(*given, **how), fresh, as_of)

    def count(self, budget: Any, **how: Any) -> Figures:
        return self.ask((COUNT,), budget, **how)

    def sum(self, column: str, budget: Any, **how: Any) -> Figures:
        return self.ask((sum_of(column),), budget, **how)

    def average(self, column: str, budget: Any, **how: Any) -> Figures:
        return self.ask((average(column),), budget, **how)

    def median(self, column: str, budget: Any, **how: Any) -> Figures:
        return self.ask((quantiles(column, (0.5,)),), budget, **how)

    def boxes(self) -> Int64:
        return self.request().selection.boxes(self.session.open_table.account)

    def max_consumed(self, kind: Any = "epsilon") -> float:
        return self.session.open_table.account.spent(kind).most_in(self.boxes()) / 1_000_000

    def plan(self, budget: Any, **how: Any) -> Planned:
        open_table = self.session.open_table
        request = self.request((COUNT,), budget, **how)
        return open_table.account.plan(order_of(open_table, request))

    def union(self, figure: Aggregate = COUNT) -> Union:
        """The answer of ``union = TRUE``, with what it is made of."""
        text = self.statement((figure,)).replace("epsilon = 1", "union = TRUE", 1)
        answer = self.session.ask(text)
        union = assembled(self.session.open_table, self.boxes(), figure)
        assert (answer.value, answer.sd, *answer.interval) == (*union[:4],) and not answer.charged
        return union

    def as_pinq(
        self, budget: Any, name: str = "", kind: str = "epsilon", cover: Sequence[str] = ()
    ) -> "Allotment":
        name = name or f"n{secrets.token_hex(4)}"
        text = self.statement((), budget, kind=kind, cover=cover).replace(")  FROM", ") * FROM", 1)
        made = self.session.ask(f"CREATE ALLOTMENT {name} AS {text}")
        return Allotment(self.session, name, made.charged)


class Allotment(Part):
    """An allotment, of which the points are asked that paid."""

    def __init__(self, session: "Session", name: str, charged: bool = False) -> None:
        super().__init__(session, "", name)
        self.run_id, self.paid = session.open_table.allotment(name)
        self.charged = charged

    @property
    def left(self) -> float:
        return self.session.open_table.account.left_of(self.run_id) / 1_000_000


class Session(Closing):
    """The door of an analyst to one table; a context that closes it."""

    def __init__(
        self,
        config: Config,
        analyst: str = "analyst",
        runner: Runner | None = None,
        held: bool = False,
    ) -> None:
        self.door = Door(load_project(config.base), None, analyst, runner, held)
        self.name = config.name
        self.open_table, self.tables = self.door.opened(config.name.lower())
        self.table, self.where = Part(self), partial(Part, self)

    def ranges(self, name: str, parts: int) -> list[int]:
        """Edges of equal ranges of a dimension."""
        space = self.open_table.space
        dimension = space.dimensions[space.place(name)]
        assert isinstance(dimension, Integer)
        low, size = dimension.low, dimension.values
        return [low + size * i // parts for i in range(parts + 1)]

    def ask(self, text: str, fresh: bool = False, as_of: str = "") -> Figures:
        return Figures(self.door.answer(text, Asking(fresh, as_of)))

    def allotment(self, name: str) -> Allotment:
        return Allotment(self, name)

    def close(self) -> None:
        self.door.close()
