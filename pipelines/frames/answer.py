"""The answer of a question about a table in memory: an Arrow table with its guarantee.

It follows the common sequence of charge and answer (`pipelines.ask`).  With an account, the same
question gets the same bytes at no charge, whatever rows the table has now.  ``as_of`` names the
state of the data that is asked about; ``fresh`` asks again at a new charge.  Without an account
nothing is stored: the secret and the run id are drawn for this answer alone, and asking again
spends epsilon again.
"""

import contextlib
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from dpstream.accounting.errors import UsageError, closest, required
from dpstream.accounting.extras import require
from dpstream.accounting.figures import guarantee_pair, human
from dpstream.accounting.query.bounds import Cut, Settled, not_estimated
from dpstream.accounting.query.grids import regridded
from dpstream.accounting.query.plan import GROUPS, QueryColumn
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
from dpstream.pipelines.render.answer import (
    cut_lines,
    python_values,
    rows_html,
    rows_text,
    weak_lines,
)
from dpstream.pipelines.render.layout import count, value_text
from dpstream.pipelines.sql.receipt import (
    Header,
    SqlAnswer,
    estimated,
    presented,
    read,
    widths_of_means,
)
from dpstream.state.ledger.contract import Answer, Decision
from dpstream.state.ledger.events import Charge, ChargeKind
from dpstream.state.ledger.history import History
from dpstream.state.ledger.open import open_ledger
from dpstream.state.numbers import arrow_numbers

#: Rows that a repr shows, and that a picture does.
_PRINTED_ROWS, _DRAWN_ROWS = 10, 40
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
        answer: SqlAnswer,
        guarantee: str,
        charged: bool | None,
    ) -> None:
        self.table, self.guarantee, self.charged = table, guarantee, charged
        self.header, self.receipt, self.digest = answer.header, answer.receipt, answer.digest
        self._answer = answer

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
        above, rows, below = self._printed()
        return "\n".join([*above, "", *rows_text(rows, {}, self._answer.weak).splitlines(), *below])

    def _repr_html_(self) -> str:
        """Return the same for a notebook."""
        above, rows, below = self._printed()
        above_html, below_html = ("<br>".join(map(escape, lines)) for lines in (above, below))
        return f"<p>{above_html}</p>{rows_html(rows, self._answer.weak)}<p>{below_html}</p>"

    def _printed(self) -> tuple[list[str], pa.Table, list[str]]:
        more = len(self) - _PRINTED_ROWS
        below = [f"... {count(more, 'more row')}"] if more > 0 else []
        above = [*self.guarantee.splitlines(), *weak_lines(self._answer.weak)]
        return above, self.table.slice(0, _PRINTED_ROWS), below

    def plot(self, figure: str | None = None, ax: Any = None) -> Any:
        """Draw a figure of each key with the noise's 95% interval; return matplotlib's axes.

        Of many keys those with the largest figures are drawn.

        Args:
            figure: the column; unless given, the first figure.
            ax: the axes to draw on; unless given, those of a new figure.

        Raises:
            UsageError: the answer has no such figure.
        """
        from dpstream.pipelines.render.charts import with_intervals

        intervals = self._answer.intervals
        figure = next(iter(intervals), "") if figure is None else figure
        if figure not in intervals:
            raise UsageError("figure", "is no figure of the answer", closest(figure, intervals))
        first = self.table.column_names.index(next(iter(intervals)))
        order = self.table[figure]
        largest = pc.array_sort_indices(order, order="descending")[:_DRAWN_ROWS].sort()
        rows, ends = self.table.take(largest), intervals[figure].take(largest)
        keys = map(python_values, rows.columns[:first])
        labels = [", ".join(map(value_text, row)) for row in zip(*keys, strict=True)]
        values, lows, highs = (c.to_pylist() for c in (rows[figure], ends["low"], ends["high"]))
        return with_intervals(labels or ["all"], values, (lows, highs), figure, ax)


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
    widths = widths_of_means(question.gridded.plan, header)
    figures = dict.fromkeys((n for labels in question.labels.values() for n in labels), "columns")
    answer = presented(committed, header, rows, figures, insecure, widths)
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
    return PrivateTable(table, answer, guarantee, charged)


def _promise_text(question: Question, answer: SqlAnswer, data_set: str | None) -> str:
    """Return the guarantee, the contribution bounds of a unit, and the account as text."""
    header, plan = answer.header, question.gridded.plan
    claim = (
        f"{guarantee_pair(header.epsilon, header.delta)}-differential privacy of this answer, for "
        f"all rows of each {question.unit!r} together."
    )
    words = [claim]
    bounds = []
    if question.key and not plan.automatic_groups:
        bounds.append(f"at most {plan.groups} of its keys count, drawn at random")
    each = " in each" if question.key else ""
    for column in plan.columns:
        of_column = f"of {column.name} " if len(plan.columns) > 1 else ""
        if column.kind == "units" or column.automatic:
            continue
        if column.kind == "count":
            bounds.append(f"{of_column}at most {human(column.high)} of its rows{each}")
            continue
        rows = "" if column.automatic_rows else f"at most {column.rows} of its rows{each}, with "
        bounds.append(
            f"{of_column}{rows}values within {human(column.low)} and {human(column.high)}"
        )
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
            f"{', '.join(header.nulls)} is missing: too few units have a value to choose bounds "
            "by. Give bounds."
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
    design, plan = question.gridded.design, question.gridded.plan
    names = set() if design is None else {histogram.name for histogram in design.histograms}
    constants = {GROUPS: plan.groups or 0}
    for column in plan.columns:
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
    plan = settled.plan
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
        labels = question.labels[column]
        for place, label in enumerate(labels):
            places = (place,) if estimate.value.ndim > 1 else ()
            table |= estimated(label, estimate, places, absent=column in settled.nulls)
    released = sorted_rows(pa.table(table), question.key)
    return encoded(_header(question, charge, settled), released)


def _bounds(question: Question, rows: Rows, ring: KeyRing, name: tuple[bytes, bytes]) -> Settled:
    """Return the plan with all bounds; those that the question chooses come from histograms."""
    plan, design, bits = question.gridded
    if design is None:
        return Settled(plan, frozenset(), {})
    ids = rows.unit_ids, rows.groups.ids
    of_histogram: dict[str, QueryColumn | None] = {GROUPS: None}
    for column in plan.columns:
        of_histogram |= {column.name: column, column.rows_histogram: column}
    counts = {
        h.name: counted(h, histogram_values(h.name, of_histogram[h.name], rows), ids, ring, name)
        for h in design.histograms
    }
    settled = choose_bounds(plan, design, counts, ring, name)
    chosen = {c.name for c in plan.columns if c.automatic or c.automatic_rows}
    bounds = {c.name: (c.low or 0.0, c.high or 0.0) for c in settled.plan.columns}
    bounds = {name: bounds[name] for name in bounds if name in chosen}
    return settled._replace(plan=regridded(settled.plan, bounds, bits))


def _header(question: Question, charge: Charge, settled: Settled) -> Header:
    automatic = {c.name for c in question.gridded.plan.columns if c.automatic} - settled.nulls
    columns = [column for column in settled.plan.columns if column.name in automatic]
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
