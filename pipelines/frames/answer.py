"""The answer of a question about a table in memory: an Arrow table with its guarantee.

It follows the common sequence of charge and answer (`pipelines.ask`).  With an account, the same
question gets the same bytes at no charge, whatever rows the table has now.  ``as_of`` names the
state of the data that is asked about; ``fresh`` asks again at a new charge.  Without an account
nothing is stored: the secret and the run id are drawn for this answer alone, and asking again
spends epsilon again.
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from dpstream.accounting.errors import required
from dpstream.accounting.extras import require
from dpstream.accounting.figures import guarantee_pair, human
from dpstream.accounting.query.bounds import Cut, Settled, not_estimated
from dpstream.accounting.query.grids import regridded
from dpstream.accounting.query.plan import GROUPS
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.one_shot import aggregated, answer, bounded, choose_bounds, counted
from dpstream.pipelines.ask import sequence
from dpstream.pipelines.ask.acceptance import room_of
from dpstream.pipelines.ask.question import Asking
from dpstream.pipelines.ask.sequence import ask_uncharged
from dpstream.pipelines.formats.receipt import answered_now, encoded, sorted_rows
from dpstream.pipelines.frames.project_file import DataSetAccount, checked_account
from dpstream.pipelines.frames.question import Question
from dpstream.pipelines.frames.rows import Rows, histogram_values, partials_of, rows_of
from dpstream.pipelines.render.answer import cut_lines, python_values, rows_text
from dpstream.pipelines.sql.receipt import Header, SqlAnswer, estimated, presented, read
from dpstream.state.ledger.contract import Answer, Decision
from dpstream.state.ledger.events import Charge, ChargeKind
from dpstream.state.ledger.history import History
from dpstream.state.ledger.open import open_ledger
from dpstream.state.numbers import arrow_numbers

#: Rows that a repr shows.
_PRINTED_ROWS = 10
_ASKED_BEFORE = "today's rows were not read: ask with fresh=True, or name their state by as_of."
_NOT_CHARGED = (
    "Charged to no account: the same question again spends epsilon again, and no account adds it "
    "up (account=dpstream.project().account() does)."
)
_INSECURE = "NOT PRIVATE: drawn with a fixed test secret, which whoever knows it subtracts."


class PrivateTable:
    """A differentially private answer.

    All of it may be published, once.  ``charged`` says whether the question was asked before, on
    whatever rows, and nothing of the rows.

    pandas, Polars and Arrow convert it as any object with an Arrow stream:
    ``answer.to_pandas()``, ``polars.DataFrame(answer)``, ``pyarrow.table(answer)``.

    Attributes:
        table: the key's columns, the figure, its noise's sd, and ``noise_low`` and ``noise_high``
            (the ends of the noise's 95% interval), sorted by key; the schema's metadata hold the
            guarantee and estimates of what bounds leave out.
        header: the answer's cost, and when it was first given.
        guarantee: the guarantee as text.
        charged: whether this very call was charged; ``None``: there is no account.
        receipt: the committed bytes.
        digest: binds the receipt to its charge (empty without an account).
    """

    def __init__(
        self,
        table: pa.Table,
        header: Header,
        guarantee: str,
        charged: bool | None,
        receipt: bytes,
        digest: str,
    ) -> None:
        self.table, self.header, self.guarantee = table, header, guarantee
        self.charged, self.receipt, self.digest = charged, receipt, digest

    @property
    def cuts(self) -> dict[str, Cut]:
        """Private estimates of what the chosen bounds leave out, by the name of the bound."""
        return self.header.cuts

    @property
    def epsilon(self) -> float:
        """The epsilon that the answer cost."""
        return self.header.epsilon

    @property
    def delta(self) -> float:
        """The delta that the answer cost."""
        return self.header.delta

    def to_pandas(self, **options: Any) -> Any:
        """Return a DataFrame of pandas; options are those of ``pyarrow.Table.to_pandas``.

        A column of days with one outside of years 1 to 9999, which pandas cannot convert, has
        that day as a text.
        """
        require("pandas", "to_pandas")
        names = self.table.column_names
        dated = [field.name for field in self.table.schema if pa.types.is_date(field.type)]
        days = {name: python_values(self.table[name]) for name in dated}
        texts = {name: v for name, v in days.items() if any(isinstance(day, str) for day in v)}
        frame = self.table.drop_columns(list(texts)).to_pandas(**options)
        for name, values in texts.items():
            frame.insert(names.index(name), name, values)
        return frame

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Return the table as a capsule of Arrow's C stream interface."""
        return self.table.__arrow_c_stream__(requested_schema)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __repr__(self) -> str:
        """Return the guarantee and the first rows as text."""
        lines = rows_text(self.table.slice(0, _PRINTED_ROWS), {}).splitlines()
        more = len(self) - _PRINTED_ROWS
        lines += [f"... {more:,} more rows"] if more > 0 else []
        return "\n".join([self.guarantee, "", *lines])


def private_table(
    question: Question, committed: Answer, insecure: bool, data_set: str | None
) -> PrivateTable:
    """Return the answer of a question in the form that the caller gets.

    Args:
        insecure: whether its secret is a fixed test secret.
        data_set: the data set in whose account it was charged; ``None``: it was not charged.
    """
    header, released = read(committed.receipt)
    others = [name for name in released.column_names if name not in question.key_order]
    rows = sorted_rows(released.select([*question.key_order, *others]), question.key_order)
    figures = [] if question.column is None else [question.column.name]
    answer = presented(committed, header, rows, figures, insecure)
    charged = None if data_set is None else answer.charged
    question = question.taking(question.families.of(header.mu))
    guarantee = _promise_text(question, answer, data_set)
    metadata = header.metadata | {
        "dpstream.guarantee": guarantee,
        "dpstream.epsilon": repr(header.epsilon),
        "dpstream.delta": repr(header.delta),
        "dpstream.mechanism": question.gridded.plan.mechanism,
        "dpstream.unit": question.unit,
        "dpstream.run_id": header.run_id,
        "dpstream.answered": header.answered,
    }
    table = answer.table.replace_schema_metadata(metadata)
    return PrivateTable(table, header, guarantee, charged, answer.receipt, answer.digest)


def _promise_text(question: Question, answer: SqlAnswer, data_set: str | None) -> str:
    """Return the guarantee, the contribution bounds of a unit, and the account as text."""
    header, column, plan = answer.header, question.column, question.gridded.plan
    claim = (
        f"{guarantee_pair(header.epsilon, header.delta)}-differential privacy of this answer, for "
        f"all rows of each {question.unit!r} together."
    )
    words = [claim]
    bounds = []
    if question.key and not plan.automatic_groups:
        bounds.append(f"at most {plan.groups} of its keys count, drawn at random")
    each = " in each" if question.key else ""
    if column is None:
        pass
    elif column.kind == "count" and not column.automatic:
        bounds.append(f"at most {human(column.high)} of its rows{each}")
    elif column.kind in ("sum", "mean") and not column.automatic:
        rows = "" if column.automatic_rows else f"at most {column.rows} of its rows{each}, with "
        bounds.append(f"{rows}values within {human(column.low)} and {human(column.high)}")
    if bounds:
        words.append(f"Of one {question.unit!r}: {'; '.join(bounds)}.")
    words += cut_lines(
        header.cuts,
        header.not_estimated,
        question.unit,
        "key" * bool(question.key),
        bool(answer.intervals),
    )
    words += [
        f"Too few units to choose {name} privately: the default bound {bound} applies."
        for name, bound in _public(question, header).items()
    ]
    if header.nulls:
        words.append(
            "The figures are missing: too few units have a value to choose bounds by. Give bounds."
        )
    if plan.selects:
        words.append("A key is here if enough units have it.")
    elif question.key:
        words.append("The keys are the public ones: all are here.")
    words.append(_NOT_CHARGED if data_set is None else f"Charged to data set {data_set!r}.")
    if data_set is not None and not answer.charged:
        words.append(f"First answered {header.answered}; {_ASKED_BEFORE}")
    return "\n".join([_INSECURE, *words] if answer.insecure else words)


def _public(question: Question, header: Header) -> dict[str, int]:
    """Return the public default bounds, used where a histogram had too few units to choose."""
    design, plan, column = question.gridded.design, question.gridded.plan, question.column
    names = set() if design is None else {histogram.name for histogram in design.histograms}
    constants = {GROUPS: plan.groups or 0}
    if column is not None:
        constants[column.rows_histogram] = column.rows
        constants |= {column.name: column.rows} if column.kind == "count" else {}
    return {name: n for name, n in constants.items() if name in names - header.cuts.keys()}


class TableQuestion(NamedTuple):
    """A question about a table in memory, for `ask.sequence`.

    Attributes:
        question: the checked question.
        columns: PRIVATE; the table's columns.
        unit: the name of the privacy unit in the account.
    """

    question: Question
    columns: Mapping[str, pa.ChunkedArray]
    unit: str

    @property
    def kind(self) -> ChargeKind:
        """The kind of the charge; see `ask.question.Question`."""
        return self.question.kind

    @property
    def identity(self) -> Sequence[bytes]:
        """The canonical parts of the question; see `ask.question.Question`."""
        return self.question.request

    def check(self, ring: KeyRing) -> None:
        """Do nothing: `question_of` has already checked the question."""

    def decide(self, run_id: str, account: History) -> Decision:
        """Choose the family of noise by the account's limit, and return the charge."""
        identity = self.question.identity(self.unit)
        room = room_of(account, identity)
        question = self.question.taking(self.question.families.taken(room))
        return Decision(question.charge(run_id, identity))

    def stamp(self) -> object:
        """Return ``None``: Arrow arrays cannot change while they are read."""
        return None

    def draw(self, charge: Charge, ring: KeyRing) -> bytes:
        """Read the rows, draw the noise and return the receipt; see `ask.question.Question`."""
        question = self.question.taking(self.question.families.of(charge.mu))
        return _drawn(question, rows_of(question, self.columns, ring), ring, charge)


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
        DpstreamError: the unit's column is not declared to hold the account's unit, the charge
            exceeds the limit, or the secret cannot be read.
    """
    account = checked_account(account, how)
    if account is None:
        receipt = ask_uncharged(TableQuestion(question, columns, question.unit))
        return private_table(question, Answer("", receipt, "", False), False, None)
    place, source = account.place, account.secret
    table_question = TableQuestion(question, columns, place.unit_in(question.unit))
    with (
        source.ring() as ring,
        contextlib.closing(open_ledger(place)) as opened,
    ):
        answer = sequence.ask(table_question, opened, ring, how)
    insecure = source.insecure_test_secret is not None
    return private_table(question, answer, insecure, place.data_set)


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
        chosen = required(values, "values is there").take(arrow_numbers(estimates.group))
        table = dict(zip(chosen.column_names, chosen.columns, strict=True))
    for column, estimate in estimates.columns.items():
        table |= estimated(column, estimate, absent=null)
    released = sorted_rows(pa.table(table), question.key)
    return encoded(_header(question, charge, settled), released)


def _bounds(question: Question, rows: Rows, ring: KeyRing, name: tuple[bytes, bytes]) -> Settled:
    """Return the plan with all bounds; those that the question chooses come from histograms."""
    plan, design, bits = question.gridded
    if design is None:
        return Settled(plan, frozenset(), {})
    column, ids = question.column, (rows.unit_ids, rows.groups.ids)
    counts = {}
    for histogram in design.histograms:
        values = histogram_values(histogram.name, column, rows)
        counts[histogram.name] = counted(histogram, values, ids, ring, name)
    settled = choose_bounds(plan, design, counts, ring, name)
    if column is None:
        return settled
    [chosen] = settled.plan.columns
    low, high = chosen.low, chosen.high
    bounds = {} if low is None or high is None else {column.name: (low, high)}
    return settled._replace(plan=regridded(settled.plan, bounds, bits))


def _header(question: Question, charge: Charge, settled: Settled) -> Header:
    columns = settled.plan.columns if question.automatic and not settled.nulls else ()
    return Header(
        **answered_now(charge),
        epsilon=charge.epsilon,
        delta=charge.delta,
        mu=charge.mu,
        threshold_delta=charge.threshold_delta,
        bounds={column.name: (column.low or 0.0, column.high or 0.0) for column in columns},
        nulls=tuple(settled.nulls),
        cuts=settled.cuts,
        not_estimated=not_estimated(
            settled.plan, settled.cuts.keys() | settled.nulls, bool(question.key)
        ),
    )
