"""The cost of statements, whether they would be answered, and the errors of their answers.

Nothing is charged, and no private row is read.  All of the result is public: plans, noise and
thresholds are fixed before a row is read, the account has only figures of guarantees, and of files
the names of columns are looked at, as an answer would before its charge.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from sqlglot import exp
from sqlglot.tokens import TokenType

from dpstream.accounting.composition import epsilon_spent, total_of
from dpstream.accounting.errors import DpstreamError
from dpstream.accounting.periods import Room
from dpstream.accounting.query.families import outlook
from dpstream.accounting.query.grids import grids_of
from dpstream.accounting.strength import weaknesses
from dpstream.pipelines.ask.acceptance import (
    Acceptance,
    Request,
    request_for,
    requests_acceptance,
    room_of,
)
from dpstream.pipelines.ask.question import ONCE, Asking
from dpstream.pipelines.ask.sequence import keys_of
from dpstream.pipelines.sql.ask import inputs_of
from dpstream.pipelines.sql.covering import Offer, StatementIdentity, offers
from dpstream.pipelines.sql.query_plan import Question, question_of, stage_one, tables_read
from dpstream.pipelines.statements.allowed import tokens_of
from dpstream.pipelines.statements.errors import position_in
from dpstream.pipelines.tables.catalog import Catalog
from dpstream.pipelines.tables.registration import require_fitting
from dpstream.state.ledger.contract import AnswerLog
from dpstream.state.ledger.events import Charge
from dpstream.state.ledger.history import History
from dpstream.state.ledger.open import open_ledger, read_history

_EXPLAIN = "EXPLAIN"
#: Offers that a plan shows.
_MOST_OFFERS = 2


def split(text: str) -> list[str]:
    """Return the statements of a text, divided by semicolons outside literals and comments, each
    behind as many empty lines and spaces as it has lines and columns before it.

    Raises:
        DpstreamError: the text cannot be read as SQL.
    """
    out, begin, has_token = [], 0, False
    for token in tokens_of(text):
        if token.token_type == TokenType.SEMICOLON:
            out += [_after(text[: token.start], begin)] if has_token else []
            begin, has_token = token.end + 1, False
        else:
            has_token = True
    return [*out, *([_after(text, begin)] if has_token else [])]


def _after(text: str, begin: int) -> str:
    """Return the text from a character on, at the same lines and columns as in the whole."""
    at = position_in(text, begin)
    return "\n" * (at.line - 1) + " " * (at.column - 1) + text[begin:]


def explained(text: str) -> str | None:
    """Return the text after EXPLAIN, at its place; ``None`` if it does not begin with that."""
    begin = len(text) - len(text.lstrip()) + len(_EXPLAIN)
    if text[:begin].lstrip().upper() == _EXPLAIN and text[begin : begin + 1].isspace():
        return _after(text, begin)
    return None


class Explained(NamedTuple):
    """The explanation of one statement.

    Attributes:
        plan: the query that DuckDB would run, in its dialect.
        columns: the noise of each column, as in `accounting.query.families.Outlook`.
        cost: epsilon, delta, mu and threshold_delta of its charge.
        warnings: about what its guarantee promises.
        selection: thresholds, as there; ``None`` if no groups are selected.
        families: each family of noise that it can use, as in `families.Families.described`.
        by_epsilon: the noise of each column at other epsilons (`query.accuracy.by_epsilon`).
        offers: free statements about stored answers (`covering.Offer`); the last few.
    """

    plan: str
    columns: list[dict[str, Any]]
    cost: dict[str, Any]
    warnings: list[str]
    selection: dict[str, float] | None
    families: list[dict[str, Any]]
    by_epsilon: list[dict[str, Any]]
    offers: list[Offer]


class Explanation(NamedTuple):
    """The explanation of several statements together.

    Attributes:
        together: epsilon that all of them alone would spend at the limit's delta.
        acceptance: whether they would be answered now, one after the other.
    """

    statements: list[Explained]
    together: dict[str, float]
    acceptance: Acceptance


def explain(catalog: Catalog, statements: str | Sequence[str], how: Asking = ONCE) -> Explanation:
    """Explain one statement or several.

    Args:
        how: whether they would be asked again at a new charge, and about which state of the data.

    Raises:
        DpstreamError: a statement cannot be used, or not privately as it is written.
    """
    texts = [statements] if isinstance(statements, str) else list(statements)
    parts = [part for text in texts for part in question_of(text, catalog).singles]
    decided = _decided(parts, catalog, how)
    questions, charges = [one.question for one in decided], [one.charge for one in decided]
    requests = [
        _request(question, charge, catalog, how.as_of)
        for question, charge in zip(questions, charges, strict=True)
    ]
    try:
        delta = read_history(catalog.ledger).persons_limit()[1]
    except DpstreamError:  # which is the refusal below
        delta = max((charge.delta for charge in charges), default=0.0)
    alone = epsilon_spent(total_of(charges), delta) if charges else 0.0
    acceptance = requests_acceptance(catalog.ledger, requests, how.fresh)
    if not acceptance.answered:
        names = set[str]().union(*(inputs_of(question, catalog) for question in questions))
        acceptance = acceptance.unless(lambda: require_fitting(catalog, names, unpacked=False))
    return Explanation(
        [_explained(one, catalog, how.as_of) for one in decided],
        {"epsilon": alone, "delta": delta},
        acceptance,
    )


class _Decided(NamedTuple):
    """A question in the family that it would use after the charges of the questions before it."""

    question: Question
    charge: Charge
    room: Room | None


def _decided(questions: Sequence[Question], catalog: Catalog, how: Asking) -> list[_Decided]:
    """Decide questions as `ask.StatementQuestion.decide` would, one after the other."""
    account, more, out = History(), list[Charge](), list[_Decided]()
    with contextlib.suppress(DpstreamError):  # which is the refusal of `explain`
        account = read_history(catalog.ledger)
    charged = {charge.plan_hash for charge in account.charges}
    for number, question in enumerate(questions):
        room = room_of(account, catalog.unit, more) if account.digests else None
        run_id = None
        if question.digest in charged:
            charge = question.charge(catalog, f"{number:032x}")
            request = _request(question, charge, catalog, how.as_of)._replace(covering=None)
            run_id = requests_acceptance(catalog.ledger, [request], how.fresh).run_id
        before = None if run_id is None else account.find(run_id)
        families = question.families
        gridded = families.taken(room) if before is None else families.of(before.mu)
        decided = question.taking(gridded)
        charge = decided.charge(catalog, f"{number:032x}")
        out.append(_Decided(decided, charge, room))
        more += [charge] if before is None else []
    return out


def _request(question: Question, charge: Charge, catalog: Catalog, as_of: str) -> Request:
    statement = StatementIdentity(question, catalog)
    return request_for(charge, lambda: statement.identity, catalog.secret, as_of, statement)


def _offers(question: Question, catalog: Catalog, as_of: str) -> list[Offer]:
    statement = StatementIdentity(question, catalog)
    with contextlib.suppress(DpstreamError):  # which is the refusal of `explain`
        account = read_history(catalog.ledger)
        if account.charges:
            with catalog.secret.ring() as ring:
                keys = keys_of(question.kind, statement.identity, ring, as_of, statement)
            with contextlib.closing(open_ledger(catalog.ledger, looking=True)) as ledger:
                answers = AnswerLog(ledger, question.kind).alike(keys.families[1])
            return list(offers(question, catalog, answers))[-_MOST_OFFERS:]
    return []


def _explained(decided: _Decided, catalog: Catalog, as_of: str) -> Explained:
    question, charge, room = decided
    query: exp.Select = stage_one(
        question.per_column, catalog, grids_of(question.gridded.sketched())
    )
    columns, selections = outlook(question.gridded)
    families = question.families.described(question.gridded, room)
    others = list(question.by_epsilon(catalog))
    for each in (columns, *(row["columns"] for row in (*families, *others))):
        _label(each, question.columns)
    cost = {key: getattr(charge, key) for key in ("epsilon", "delta", "mu", "threshold_delta")}
    text = query.sql("duckdb", pretty=True, comments=False)
    warnings = weaknesses(charge.epsilon, charge.delta) + [
        f"{name}.{time.column} is in UTC, and so are its days; declared as DATETIME or DATE it has "
        "the clock of its files"
        for name in sorted(tables_read(question.select, catalog))
        if (time := catalog.tables[name].reading.time) and time.zone
        if catalog.tables[name].columns[time.column] == "TIMESTAMP"
    ]
    selection = selections[0] if selections else None
    free = _offers(question, catalog, as_of)
    return Explained(text, columns, cost, warnings, selection, families, others, free)


def _label(columns: list[dict[str, Any]], labels: dict[str, list[str]]) -> None:
    """Give the columns of a plan the statement's labels and order."""
    order = list(labels)
    columns.sort(key=lambda column: order.index(column["name"]))
    for column in columns:
        column["name"] = ", ".join(labels[column["name"]])


def as_builtins(explanation: Explanation) -> dict[str, Any]:
    """Return the explanation as values for JSON."""
    out = explanation._asdict()
    out["statements"] = [
        {**one._asdict(), "offers": [offer._asdict() for offer in one.offers]}
        for one in explanation.statements
    ]
    out["acceptance"] = explanation.acceptance.as_dict()
    out["warnings"] = list(explanation.acceptance.warnings)
    return dict(msgspec.to_builtins(out))
