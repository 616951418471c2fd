"""Answers of statements about points: of questions, of unions, and of allotments.

A question follows the common sequence (`pipelines.ask`); what surrounds its private SELECT runs on
the released rows at each asking, as for all statements (`sql.ask`).
"""

import contextlib
from collections.abc import Callable, Iterator

import pyarrow as pa
from sqlglot import exp

from dpstream.accounting.errors import DpstreamError, PolicyError, RunError
from dpstream.accounting.regions.amounts import MICRO
from dpstream.pipelines.formats.receipt import header_of
from dpstream.pipelines.session.ask import (
    AllotmentQuestion,
    DroppedAllotment,
    SessionQuestion,
    committed,
    order_of,
)
from dpstream.pipelines.session.open_table import OpenTable
from dpstream.pipelines.session.plan import decision_as_builtins
from dpstream.pipelines.session.statement import PointQuestion
from dpstream.pipelines.session.union import assembled
from dpstream.pipelines.sql.receipt import MARK, Header, SqlAnswer, free, presented, read
from dpstream.pipelines.sql.stage import named_rows, outer_rows
from dpstream.pipelines.tables.catalog import RELEASED, Tables
from dpstream.pipelines.tables.engine import Engine
from dpstream.state.ledger.contract import Answer
from dpstream.state.ledger.orders import SessionRefusedError

Show = Callable[[SqlAnswer], object]


def ask(
    open_table: OpenTable, tables: Tables, question: PointQuestion, show: Show = lambda _: None
) -> SqlAnswer:
    """Return the answer of a question.

    Args:
        show: shows the answer; if it fails, asking ``fresh`` again continues this answer.

    Raises:
        SessionRefusedError: points lack budget; its ``decision`` lists them, and is public.
        DpstreamError: the question has no meaning, or its answer cannot be had.
    """
    check_outer(tables, question)
    if question.union:
        answer = _united(open_table, question)
        show(answer)
        return answer
    answers = list[SqlAnswer]()

    def present(one: Answer) -> None:
        header, drawn = read(one.receipt)
        try:
            rows = _outer(tables, question, question.released(drawn))
        except DpstreamError as error:
            rule = f"{error.rule}; the answer is committed, and what follows the noise is not done"
            raise RunError(error.field, rule, f"{error.fix}; asking again is free") from None
        reports = {f.name: f.report for f in question.statement.functions if f.report}
        answers.append(presented(one, header, rows, reports, open_table.insecure, {}))
        show(answers[0])

    with _with_boxes(open_table):
        points = SessionQuestion(open_table, question.request)
        committed(open_table, points, question.request.how, present, points)
    return answers[0]


@contextlib.contextmanager
def _with_boxes(open_table: OpenTable) -> Iterator[None]:
    """Give a refusal the boxes that lack budget, as predicates."""
    try:
        yield
    except SessionRefusedError as error:
        figures = decision_as_builtins(open_table.space, error.decision)
        error.figures = {name: figures[name] for name in ("lacking", "lacking_boxes", "largest")}
        raise


def check_outer(tables: Tables, question: PointQuestion) -> None:
    """Run the outer query on no rows, before anything is charged.

    Raises:
        RunError: DuckDB refuses it.
    """
    columns = {name: values.type for name, (_, values) in question.groups.items()}
    for function in question.statement.functions:
        kind = pa.list_(pa.float64()) if function.many else pa.float64()
        columns |= {f"{function.name}{end}": kind for end in _ENDS}
    _outer(tables, question, pa.table({n: pa.nulls(0, kind) for n, kind in columns.items()}))


#: What stands behind a column's name for its value and the parts of its interval.
_ENDS = ("", f"{MARK}sd", f"{MARK}low", f"{MARK}high")


def _outer(tables: Tables, question: PointQuestion, released: pa.Table) -> pa.Table:
    """Return the rows of the outer query; one that only names columns needs no DuckDB."""
    outer = question.statement.outer
    plain = named_rows(outer, released)
    if plain is not None:
        return plain
    public = {table.name for table in outer.find_all(exp.Table)} - {RELEASED}
    with Engine(tables, public, ordered=True) as engine:
        return outer_rows(question.statement, engine, [released])


def _united(open_table: OpenTable, question: PointQuestion) -> SqlAnswer:
    """Return a count or sum from earlier answers of disjoint parts.

    Raises:
        PolicyError: the answers do not cover the points.
    """
    request = question.request
    [figure] = request.question.aggregates
    union = assembled(open_table, request.selection.boxes(open_table.account), figure)
    [function] = question.statement.functions
    row = dict(zip(_ENDS, (union.value, union.sd, union.low, union.high), strict=True))
    table = pa.table({function.name + end: [value] for end, value in row.items()})
    return free(table, union.last)


def allot(open_table: OpenTable, question: PointQuestion, name: str) -> SqlAnswer:
    """Charge the budget of a question now, for later ones of the same analyst.

    Raises:
        SessionRefusedError: ANY point has less left.
        PolicyError: another allotment of the analyst has the name.
    """
    request = question.request
    order = order_of(open_table, request)._replace(allot=True, drop=False)
    earlier = open_table.given_up(name)
    allotment = AllotmentQuestion(open_table, order, request.selection, name, earlier)
    with _with_boxes(open_table):
        return _allotment(open_table, name, committed(open_table, allotment))


def give_up(open_table: OpenTable, name: str) -> SqlAnswer:
    """End an allotment of the analyst: what is left of it can no longer be drawn.

    Raises:
        PolicyError: there is none, or nothing is left of it.
    """
    run_id, paid = open_table.allotment(name)
    if not open_table.account.left_of(run_id):
        raise PolicyError("allotment", "has nothing left", "it needs no end: leave it")
    ended = DroppedAllotment(open_table, name, run_id, paid)
    return _allotment(open_table, name, committed(open_table, ended))


def _allotment(open_table: OpenTable, name: str, answer: Answer) -> SqlAnswer:
    header = header_of(answer.receipt, Header)
    paid = header.points.question if header.points else None
    made = open_table.allotments().get(name)
    remaining = 0 if made is None else open_table.account.left_of(made[0])
    columns = {
        "allotment": [name],
        "kind": [paid and paid.kind],
        "amount": [0 if paid is None else paid.amount / MICRO],
        "left": [remaining / MICRO],
    }
    return presented(answer, header, pa.table(columns), {}, open_table.insecure, {})
