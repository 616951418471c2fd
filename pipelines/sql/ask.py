"""Ask a statement, by the common sequence of charge and answer (`pipelines.ask`).

The statement is parsed, validated and planned from public parts, and its rewritten form is tried on
tables without rows before it is charged.  HAVING, ORDER BY, LIMIT, arithmetic and public tables
come after the noise.

**The identity of a statement** is its private part in canonical form (`statements.canonical`), the
unit, the tables that it reads before the noise, the places of the private ones, and the content of
the public ones (public groups, and look-ups in the private relation): with a changed public table
it is another question.

Labels, the outer query and the public tables that it alone reads are presentation.  The receipt has
the released rows by canonical names; each asking gives them the statement's labels, runs the outer
query on them and on the present public tables, and stores nothing.  So every way of showing the
same figures is one charge and one draw.  An outer query that fails (memory, or a public table that
was removed or changed meanwhile) does not undo the draw: asking again runs the outer query alone.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence

import pyarrow as pa

from dpstream.accounting.errors import DpstreamError, PolicyError, RunError
from dpstream.accounting.places import FILE_KINDS
from dpstream.accounting.query.bounds import not_estimated
from dpstream.accounting.query.grids import grids_of
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.pipelines.ask import sequence
from dpstream.pipelines.ask.acceptance import room_of
from dpstream.pipelines.ask.question import ONCE, Asking
from dpstream.pipelines.formats.receipt import answered_now, encoded
from dpstream.pipelines.runners.bounded import Runner
from dpstream.pipelines.sql.covering import StatementIdentity, figures_for
from dpstream.pipelines.sql.query_plan import (
    Question,
    named_tables,
    question_of,
    stage_one,
    tables_read,
)
from dpstream.pipelines.sql.receipt import (
    Header,
    SqlAnswer,
    presented,
    widths_of_means,
)
from dpstream.pipelines.sql.stage import (
    LocalShards,
    Spread,
    StageAnswer,
    Workers,
    empty,
    outer,
    passed_on,
    private_answer,
    released,
)
from dpstream.pipelines.sql.work import typed_public
from dpstream.pipelines.tables.catalog import Catalog
from dpstream.pipelines.tables.engine import Engine, contents_of
from dpstream.pipelines.tables.files import stamps, table_parts
from dpstream.pipelines.tables.registration import require_fitting, require_registered
from dpstream.state.ledger.contract import Answer, AnswerLog, Decision
from dpstream.state.ledger.events import Charge, ChargeKind
from dpstream.state.ledger.history import History
from dpstream.state.ledger.open import open_ledger
from dpstream.state.locks import sweep


class StatementQuestion(StatementIdentity):
    """A statement about a catalog's tables, for `ask.sequence`.

    Args:
        account: see `covering.StatementIdentity`.
        source: the reference to the secret; ``keys`` of ``draw`` belong to it.
        shards: number of shards of units; no released byte depends on it (default: by the size of
            the files).
        runner: the runner whose workers do stage 1; ``None``: this process.  No released byte
            depends on it.
    """

    def __init__(
        self,
        question: Question,
        catalog: Catalog,
        source: SecretSource,
        shards: int | None = None,
        runner: Runner | None = None,
        account: Callable[[], History] | None = None,
    ) -> None:
        super().__init__(question, catalog, account)
        self._source = source
        self.kind: ChargeKind = question.kind
        self._shards, self._runner = shards, runner
        self._tables = inputs_of(question, catalog)
        self._declared = sorted({name for name, _ in catalog.declared_keys} & self._tables)
        self._public = _public_before_noise(question, catalog)
        self._checked: object = None

    @functools.cached_property
    def inputs(self) -> Sequence[bytes]:
        """Places and contents of its tables; ``draw`` refuses a public table that changed."""
        self._digested = self._public_state()
        return super().inputs

    def check(self, ring: KeyRing) -> None:
        """Run the rewritten statement on tables without rows; see `ask.question.Question`.

        Declared keys are checked in the present files: ``draw`` refuses other files.
        """
        check(self._question, self._catalog)
        self._workers()
        self._checked = stamps(self._catalog, self._declared)
        contents = {name: table_parts(self._catalog.tables[name]) for name in self._declared}
        require_registered(self._catalog, self._tables, ring, contents)
        require_fitting(self._catalog, self._tables)

    def decide(self, run_id: str, account: History) -> Decision:
        """Choose the family of noise by the account's limit, and return the charge."""
        families = self._question.families
        question = self._question.taking(families.taken(room_of(account, self._catalog.unit)))
        return Decision(question.charge(self._catalog, run_id))

    def stamp(self) -> object:
        """Return the state of the tables that are read before the noise."""
        names = tables_read(self._question.select, self._catalog)
        return stamps(self._catalog, names), self._public_state()

    def _public_state(self) -> object:
        """Return a value that differs if a public table changes that is read before the noise."""
        tables = [self._catalog.tables[name] for name in self._public]
        databases = [contents_of(self._catalog, t.name) for t in tables if t.kind not in FILE_KINDS]
        return stamps(self._catalog, self._public), databases

    def draw(self, charge: Charge, ring: KeyRing) -> bytes:
        """Read the rows, draw the noise and return the receipt; see `ask.question.Question`."""
        now = stamps(self._catalog, self._declared), self._public_state()
        if now != (self._checked, self._digested):
            raise sequence.changed()
        spread = self._workers()  # lists the pieces of files, behind the first stamp
        executor = None if spread is None else spread.executor(self._source, ring, charge.run_id)
        question = self._question.taking(self._question.families.of(charge.mu))
        return drawn(question, self._catalog, ring, charge, self._shards, executor)

    def _workers(self) -> Spread | None:
        if self._runner is None:
            return None
        return Spread(self._runner, self._question, self._catalog, self._shards)


def ask(
    catalog: Catalog,
    text: str,
    how: Asking = ONCE,
    shards: int | None = None,
    runner: Runner | None = None,
) -> SqlAnswer:
    """Return the private answer of a statement.

    Args:
        how: whether to ask again at a new charge, and about which state of the data.
        shards, runner: see `StatementQuestion`.

    Raises:
        DpstreamError: the statement cannot be used, or not privately as it is written; its charge
            exceeds the account's limit; there is no secret; or a table cannot be read, or has a
            declared key that was not checked.
    """
    answers = list[SqlAnswer]()
    ask_each(catalog, [question_of(text, catalog)], answers.append, how, shards, runner)
    return answers[0]


def ask_each(
    catalog: Catalog,
    questions: Iterable[Question],
    show: Callable[[SqlAnswer], object],
    how: Asking = ONCE,
    shards: int | None = None,
    runner: Runner | None = None,
) -> None:
    """Ask the questions of one command, and show each answer before the next question is asked.

    The answers are delivered together, at the end: if a later question fails, asking all of them
    ``fresh`` again continues those that were answered.  So a question that is asked twice is
    charged once.

    Args:
        questions: at least one; each is taken when the ones before it were shown.
        how, shards, runner: see `ask`.

    Raises:
        DpstreamError: see `ask`.
    """
    source, run_ids = catalog.secret, set[str]()
    insecure = source.insecure_test_secret is not None
    sweep(catalog.beside)
    with (
        source.ring() as keys,
        contextlib.closing(open_ledger(catalog.ledger)) as ledger,
    ):
        for question in questions:
            if question.parts:
                check(question, catalog)  # as a whole, before a part of it is charged
            parts = [
                StatementQuestion(part, catalog, source, shards, runner, ledger.history)
                for part in question.singles
            ]
            answers = sequence.answered_together(
                [(part, part) for part in parts], ledger, keys, how
            )
            show(_presented(question, catalog, answers, insecure))
            run_ids |= {answer.run_id for answer in answers}
        AnswerLog(ledger, question.kind).deliver(run_ids)


def _presented(
    question: Question, catalog: Catalog, answers: Sequence[Answer], insecure: bool
) -> SqlAnswer:
    """Return the committed answers of a statement's private SELECTs as it shows them.

    Raises:
        RunError: the outer query fails, or a public table changed meanwhile.
    """
    figures = [
        figures_for(part, answer.receipt, catalog)
        for part, answer in zip(question.singles, answers, strict=True)
    ]
    try:
        rows = _outer_rows(question, catalog, [relation for _, relation in figures])
    except DpstreamError as error:
        failed = RunError(
            error.field,
            f"{error.rule}; the answer is committed, and what follows the noise is not done yet",
            f"{error.fix}; then ask the same again: nothing more is charged",
        )
    else:
        reports, widths, headers = dict[str, str](), dict[str, float](), list[Header]()
        for part, (header, _) in zip(question.singles, figures, strict=True):
            reports |= {f.name: f.report for f in part.statement.functions if f.report}
            by_column = widths_of_means(part.plan, header)
            widths |= {label: w for c, w in by_column.items() for label in part.columns[c]}
            headers.append(header.renamed({c: names[0] for c, names in part.columns.items()}))
        new = [answer.charged for answer in answers]
        together = headers[0].together(headers[1:], new if any(new) else [True for _ in new])
        answer = answers[0]._replace(charged=any(new))
        return presented(answer, together, rows, reports, insecure, widths)
    raise failed


def _outer_rows(question: Question, catalog: Catalog, released: Sequence[pa.Table]) -> pa.Table:
    plain = None if question.parts else passed_on(question, released[0])
    if plain is not None:
        return plain
    public = named_tables([question.statement.outer], catalog)
    before = stamps(catalog, public)
    with Engine(catalog, public, ordered=True) as engine:
        rows = outer(question, engine, released)
    if stamps(catalog, public) != before:
        raise PolicyError(
            "input",
            "changed while the outer query read it; its rows were not shown",
            "wait until the public tables are at rest",
        )
    return rows


def inputs_of(question: Question, catalog: Catalog) -> set[str]:
    """Return the tables that a statement reads, including public ones."""
    names = named_tables([question.statement.outer], catalog)
    return names.union(*(tables_read(part.select, catalog) for part in question.singles))


def check(question: Question, catalog: Catalog) -> None:
    """Run every rewritten query on tables without rows, before the statement is charged.

    One engine runs the queries before the noise and after it: none of its tables has a row.

    Raises:
        RunError: DuckDB refuses a query.
    """
    relations = list[pa.Table]()
    with Engine(catalog, inputs_of(question, catalog), empty=True, ordered=True) as engine:
        for part in question.singles:
            grids = grids_of(part.gridded.sketched())
            table = engine.run(stage_one(part.per_column, catalog, grids))
            if part.select.public is not None:
                engine.run(typed_public(part.select))
            kinds = [table.schema.field(group.name).type for group in part.select.groups]
            relations.append(empty(part, kinds))
        outer(question, engine, relations)


def drawn(
    question: Question,
    catalog: Catalog,
    ring: KeyRing,
    charge: Charge,
    shards: int | None = None,
    executor: LocalShards | Workers | None = None,
) -> bytes:
    """Read rows and draw noise under the charge's run id; return the receipt."""
    names = tables_read(question.select, catalog)
    with contextlib.ExitStack() as stack:
        if executor is None:
            executor = LocalShards(stack.enter_context(Engine(catalog, names)), ring, shards)
        answered = private_answer(question, catalog, executor, ring, charge.run_id)
    return encoded(_header(question, charge, answered), released(question, answered))


def _public_before_noise(question: Question, catalog: Catalog) -> list[str]:
    names = tables_read(question.select, catalog)
    return sorted(name for name in names if catalog.tables[name].unit is None)


def _header(question: Question, charge: Charge, answered: StageAnswer) -> Header:
    nulls = answered.nulls
    chosen = {c.name: (c.low or 0.0, c.high or 0.0) for c in answered.plan.columns}
    automatic = [c.name for c in question.plan.columns if c.automatic]
    return Header(
        **answered_now(charge),
        epsilon=charge.epsilon,
        delta=charge.delta,
        mu=charge.mu,
        threshold_delta=charge.threshold_delta,
        bounds={name: chosen[name] for name in automatic if name not in nulls},
        nulls=tuple(name for name in automatic if name in nulls),
        cuts=answered.cuts,
        not_estimated=not_estimated(
            question.plan, answered.cuts.keys() | nulls, bool(question.select.groups)
        ),
        statement=question.statement.text,
    )
