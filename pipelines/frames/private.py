"""A private answer about a table: an Arrow table with its guarantee."""

from typing import Any

import pyarrow as pa

from dpstream.accounting.extras import require
from dpstream.accounting.figures import guarantee_pair, human
from dpstream.accounting.query.cuts import Cut
from dpstream.accounting.query.plan import GROUPS
from dpstream.pipelines.frames.question import Question
from dpstream.pipelines.sql.receipt import Header, SqlAnswer, lines_of

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

    All of it may be published, once, except ``charged``: that an answer was given before shows,
    without noise, that no row has changed since.

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
        """Return a DataFrame of pandas; options are those of ``pyarrow.Table.to_pandas``."""
        require("pandas", "to_pandas")
        return self.table.to_pandas(**options)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Return the table as a capsule of Arrow's C stream interface."""
        return self.table.__arrow_c_stream__(requested_schema)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __repr__(self) -> str:
        """Return the guarantee and the first rows as text."""
        names, rows = self.table.column_names, self.table.slice(0, _PRINTED_ROWS).to_pylist()
        cells = [names, *([_cell_text(row[name]) for name in names] for row in rows)]
        widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
        lines = ["  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in cells]
        more = len(self) - len(rows)
        lines += [f"... {more} more rows"] if more else []
        return "\n".join([self.guarantee, "", *lines])


def private_table(question: Question, answer: SqlAnswer, data_set: str | None) -> PrivateTable:
    """Return the answer of a question in the form that the caller gets.

    Args:
        data_set: the data set in whose account it was charged; ``None``: it was not charged.
    """
    header, charged = answer.header, None if data_set is None else answer.charged
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
    words += lines_of(header, question.unit, "key" * bool(question.key), bool(answer.intervals))
    for name, bound in _public(question, header).items():
        words.append(
            f"Too few units to choose {name} privately: the default bound {bound} applies."
        )
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
    names = set() if design is None else {of.name for of in design.histograms}
    constants = {GROUPS: plan.groups or 0}
    if column is not None:
        constants[column.rows_histogram] = column.rows
        constants |= {column.name: column.rows} if column.kind == "count" else {}
    return {name: n for name, n in constants.items() if name in names - header.cuts.keys()}


def _cell_text(value: object) -> str:
    return human(value) if isinstance(value, float) else "–" if value is None else str(value)
