"""A private answer about a table: an Arrow table that carries its guarantee."""

from typing import Any

import pyarrow as pa

from dpstream.accounting.extras import require
from dpstream.accounting.figures import human, up
from dpstream.accounting.query.cuts import Cut
from dpstream.accounting.query.plan import GROUPS
from dpstream.pipelines.frames.question import Question
from dpstream.pipelines.sql.cut_text import lines_of
from dpstream.pipelines.sql.receipt import Header, SqlAnswer

#: Rows that a repr shows.
_PRINTED_ROWS = 10
_ASKED_BEFORE = "today's rows were not read: ask with fresh=True, or name their state by as_of."
_NOT_CHARGED = (
    "Charged to no account: whoever asks again spends epsilon again, and only you add it up "
    "(account=dpstream.project().account() does)."
)
_INSECURE = "NOT PRIVATE: drawn with a fixed test secret, which whoever knows it subtracts."


class PrivateTable:
    """A differentially private answer.  All of it may be published, once, but ``charged``: that an
    answer was given before says without noise that no row has changed since.

    Tables of pandas, Polars and Arrow are made of it as of any with an Arrow stream:
    ``answer.to_pandas()``, ``polars.DataFrame(answer)``, ``pyarrow.table(answer)``.

    Attributes:
        table: the key's columns, the figure, its noise's sd, and ``noise_low`` and ``noise_high``
            (the ends of the noise's 95% interval), sorted by key; the schema's metadata have the
            guarantee and what bounds cut.
        header: what it cost and when it was first given.
        guarantee: in words.
        charged: this very call was charged for it; ``None``: there is no ledger.
        receipt: the committed bytes; digest: binds them to their charge (empty without a ledger).
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
        """Private estimates of what the bounds that were chosen leave out, by what was chosen."""
        return self.header.cuts

    @property
    def epsilon(self) -> float:
        """What it cost."""
        return self.header.epsilon

    @property
    def delta(self) -> float:
        """What it cost."""
        return self.header.delta

    def to_pandas(self, **options: Any) -> Any:
        """A DataFrame of pandas; options are those of ``pyarrow.Table.to_pandas``."""
        require("pandas", "to_pandas")
        return self.table.to_pandas(**options)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """The table as Arrow's protocol of capsules has it."""
        return self.table.__arrow_c_stream__(requested_schema)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __repr__(self) -> str:
        """The guarantee, and the first rows."""
        names, rows = self.table.column_names, self.table.slice(0, _PRINTED_ROWS).to_pylist()
        cells = [names, *([_cell_text(row[name]) for name in names] for row in rows)]
        widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
        lines = ["  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in cells]
        more = len(self) - len(rows)
        lines += [f"... {more} more rows"] if more else []
        return "\n".join([self.guarantee, "", *lines])


def private_table(question: Question, answer: SqlAnswer, data_set: str | None) -> PrivateTable:
    """The answer of a question as its asker gets it.

    Args:
        data_set: in whose ledger it was charged; ``None``: nowhere.
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
    """The guarantee, what of a unit counts, and where it was charged."""
    header, column, plan = answer.header, question.column, question.gridded.plan
    claim = (
        f"({up(header.epsilon)}, {up(header.delta)})-differential privacy of this answer, for all "
        f"rows of each {question.unit!r} together."
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
    """Default bounds of histograms that had too few units to choose by."""
    design, plan, column = question.gridded.design, question.gridded.plan, question.column
    names = set() if design is None else {of.name for of in design.histograms}
    constants = {GROUPS: plan.groups or 0}
    if column is not None:
        constants[column.rows_histogram] = column.rows
        constants |= {column.name: column.rows} if column.kind == "count" else {}
    return {name: n for name, n in constants.items() if name in names - header.cuts.keys()}


def _cell_text(value: object) -> str:
    return human(value) if isinstance(value, float) else "–" if value is None else str(value)
