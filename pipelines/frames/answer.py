"""Answer a question about a table in memory, by the common sequence of charge and answer
(`pipelines.ask`).

With an account, the same question gets the same bytes at no charge, whatever rows the table has
now.  ``as_of`` names the state of the data that is asked about; ``fresh`` asks again at a new
charge.  Without an account nothing is stored: the secret and the run id are drawn for this answer
alone, and asking again spends epsilon again.
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa

from dpstream.accounting.errors import required
from dpstream.accounting.query.bounds import Settled, not_estimated
from dpstream.accounting.query.grids import regridded
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.one_shot import aggregated, answer, bounded, choose_bounds, counted
from dpstream.pipelines.ask import sequence
from dpstream.pipelines.ask.limit import limit_of
from dpstream.pipelines.ask.question import Asking
from dpstream.pipelines.ask.sequence import ask_uncharged
from dpstream.pipelines.formats.receipt import answered_now, encoded
from dpstream.pipelines.frames.account import DataSetAccount, checked_account
from dpstream.pipelines.frames.private import PrivateTable, private_table
from dpstream.pipelines.frames.question import Question
from dpstream.pipelines.frames.rows import Rows, histogram_values, partials_of, rows_of
from dpstream.pipelines.sql.receipt import Header, decoded, estimated
from dpstream.state.ledger.answers import Answer, Decision
from dpstream.state.ledger.charges import Charge, ChargeKind
from dpstream.state.ledger.history import History
from dpstream.state.ledger.open import open_ledger
from dpstream.state.numbers import numbers


class TableQuestion(NamedTuple):
    """A question about a table in memory, for `ask.sequence`.

    Attributes:
        question: the checked question.
        columns: PRIVATE; the table's columns.
        unit: the name of the privacy unit in the account; ``None``: the column's name.
    """

    question: Question
    columns: Mapping[str, pa.ChunkedArray]
    unit: str | None = None

    @property
    def kind(self) -> ChargeKind:
        """The kind of the charge; see `ask.question.Question`."""
        return self.question.kind

    @property
    def identity(self) -> Sequence[bytes]:
        """The canonical parts of the question; see `ask.question.Question`."""
        return self.question.request

    def check(self, keys: KeyRing) -> None:
        """Do nothing: `question_of` has already checked the question."""

    def decide(self, run_id: str, account: History) -> Decision:
        """Choose the family of noise by the account's limit, and return the charge."""
        question = self.question
        question = question.taking(question.families.taken(limit_of(account)))
        return Decision(question.charge(run_id, question.identity(self.unit)))

    def stamp(self) -> object:
        """Return ``None``: Arrow arrays cannot change while they are read."""
        return None

    def draw(self, charge: Charge, keys: KeyRing) -> bytes:
        """Read the rows, draw the noise and return the receipt; see `ask.question.Question`."""
        question = self.question.taking(self.question.families.of(charge.mu))
        return _drawn(question, rows_of(question, self.columns, keys), keys, charge)


def ask(
    question: Question,
    columns: Mapping[str, pa.ChunkedArray],
    account: DataSetAccount | None,
    how: Asking,
) -> PrivateTable:
    """Return the private answer of a question.

    Args:
        account: the data set's account; ``None``: the question is charged nowhere.
        how: whether to ask again at a new charge, and about which state of the data.

    Raises:
        DpstreamError: the charge exceeds the limit, or the secret cannot be read.
    """
    account = checked_account(account, how)
    if account is None:
        receipt = ask_uncharged(TableQuestion(question, columns))
        return private_table(question, decoded(Answer("", receipt, "", False), False), None)
    place, source = account.place, account.secret
    table_question = TableQuestion(question, columns, place.unit)
    with (
        source.ring() as ring,
        contextlib.closing(open_ledger(place)) as opened,
    ):
        answer = sequence.ask(table_question, opened, ring, how)
    insecure = source.insecure_test_secret is not None
    return private_table(question, decoded(answer, insecure), place.data_set)


def _drawn(question: Question, rows: Rows, ring: KeyRing, charge: Charge) -> bytes:
    """Count the rows, draw the noise under the charge's run id, and return the receipt."""
    name = (bytes.fromhex(charge.run_id), question.digest.encode())
    settled = _bounds(question, rows, ring, name)
    plan, null = settled.plan, bool(settled.nulls)
    budget = question.gridded.budget(plan)
    shard = bounded(plan, partials_of(plan, rows), ring, name)
    ids = rows.groups.ids
    totals = aggregated(shard, len(ids), budget.weights)
    estimates = answer(plan, budget, totals, [shard], ids, ring, name)
    table: dict[str, pa.Array | pa.ChunkedArray] = {}
    if question.key:
        values = rows.groups.values
        chosen = required(values, "values is there").take(numbers(estimates.group))
        table = dict(zip(chosen.column_names, chosen.columns, strict=True))
    for column, estimate in estimates.columns.items():
        table |= estimated(column, estimate, absent=null)
    released = pa.table(table)
    if question.key:
        released = released.sort_by([(name, "ascending") for name in question.key])
    return encoded(_header(question, charge, settled), released)


def _bounds(question: Question, rows: Rows, ring: KeyRing, name: tuple[bytes, bytes]) -> Settled:
    """Return the plan with all bounds; the bounds that the question chooses come from histograms.

    If too few units have rows to choose the rows of a unit privately, a count gets the public
    default bound.
    """
    plan, design, bits = question.gridded
    if design is None:
        return Settled(plan, frozenset(), {})
    column, ids = question.column, (rows.unit_ids, rows.groups.ids)
    counts = {}
    for of in design.histograms:
        values = histogram_values(of.name, column, rows)
        counts[of.name] = counted(of, values, ids, ring, name)
    settled = choose_bounds(plan, design, counts, ring, name)
    if column is None:
        return settled
    [chosen] = settled.plan.columns
    low, high, nulls = chosen.low, chosen.high, settled.nulls
    if nulls and column.kind == "count":
        low, high, nulls = 0.0, float(column.rows), frozenset()
    bounds = {} if low is None or high is None else {column.name: (low, high)}
    return settled._replace(plan=regridded(settled.plan, bounds, bits), nulls=nulls)


def _header(question: Question, charge: Charge, settled: Settled) -> Header:
    columns = settled.plan.columns if question.automatic and not settled.nulls else ()
    return Header(
        **answered_now(charge),
        epsilon=charge.epsilon,
        delta=charge.delta,
        mu=charge.mu,
        threshold_delta=charge.threshold_delta,
        reports=tuple(column.name for column in settled.plan.columns),
        bounds={column.name: (column.low or 0.0, column.high or 0.0) for column in columns},
        nulls=tuple(settled.nulls),
        cuts=settled.cuts,
        not_estimated=not_estimated(
            settled.plan, settled.cuts.keys() | settled.nulls, bool(question.key)
        ),
    )
