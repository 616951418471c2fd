"""Ask a statement, by the one sequence of charge and answer (`pipelines.ask`).

The statement is parsed, validated and planned from public parts, and its rewritten form is tried on
tables without rows before it is charged.  HAVING, ORDER BY, LIMIT, arithmetic and public tables
come after the noise.

An outer query that fails (memory, or a public table that went away or changed meanwhile) does not
undo the draw: what it was asked about, the released rows, is committed as the receipt, and whoever
asks again asks the outer query alone.
"""

import contextlib
from collections.abc import Sequence
from datetime import UTC, datetime

from dpstream.accounting.errors import DpstreamError
from dpstream.accounting.query.bounds import not_estimated
from dpstream.accounting.query.grids import grids_of
from dpstream.dp_transforms.noise.key_source import KeySource
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.pipelines.ask import sequence
from dpstream.pipelines.ask.question import ONCE, Asking
from dpstream.pipelines.runners.bounded import Runner
from dpstream.pipelines.sql.catalog import Catalog
from dpstream.pipelines.sql.engine import Engine
from dpstream.pipelines.sql.fitting import require_fitting
from dpstream.pipelines.sql.inputs import place_of, stamps, table_parts
from dpstream.pipelines.sql.query_plan import Question, named_tables, question_of
from dpstream.pipelines.sql.receipt import Header, SqlAnswer, decoded, encoded
from dpstream.pipelines.sql.registration import require_registered
from dpstream.pipelines.sql.released import empty, outer, released
from dpstream.pipelines.sql.rewrite import stage_one
from dpstream.pipelines.sql.spread import Spread
from dpstream.pipelines.sql.stage import Found, Place, Stage, Turns
from dpstream.pipelines.sql.work import typed_public
from dpstream.state.ledger.answers import Decision
from dpstream.state.ledger.book import Book
from dpstream.state.ledger.charges import Charge, ChargeKind
from dpstream.state.ledger.open import open_ledger
from dpstream.state.private_folders import sweep


class StatementQuestion:
    """A statement about a catalog's tables, for `ask.sequence`.

    Args:
        source: where the secret is; ``keys`` of ``draw`` are its own.
        shards: of units; no released byte depends on it (default: by the size of the files).
        runner: whose workers do stage 1; ``None``: this process.  No released byte depends on it.
    """

    kind: ChargeKind = "sql"

    def __init__(
        self,
        question: Question,
        catalog: Catalog,
        source: KeySource,
        shards: int | None = None,
        runner: Runner | None = None,
    ) -> None:
        self._question, self._catalog, self._source = question, catalog, source
        self._shards, self._runner = shards, runner
        self._tables = inputs_of(question, catalog)
        self._declared = sorted({name for name, _ in catalog.declared_keys} & self._tables)
        self._checked: object = None

    @property
    def identity(self) -> Sequence[bytes]:
        """As `ask.question.Question` says: the statement, the catalog, and where its tables lie."""
        return identity_of(self._question, self._catalog)

    def check(self, keys: KeyRing) -> None:
        """As `ask.question.Question` says: on tables without rows.

        Declared keys are checked in the files as they are now: ``draw`` refuses others.
        """
        check(self._question, self._catalog)
        self._workers()
        self._checked = stamps(self._catalog, self._declared)
        contents = {name: table_parts(self._catalog.tables[name]) for name in self._declared}
        require_registered(self._catalog, self._tables, keys, contents)
        require_fitting(self._catalog, self._tables)

    def decide(self, run_id: str, book: Book) -> Decision:
        """As `ask.question.Question` says."""
        return Decision(self._question.charge(self._catalog, run_id))

    def stamp(self) -> object:
        """As `ask.question.Question` says: of tables that are read before the noise."""
        return stamps(self._catalog, _before_noise(self._question, self._catalog))

    def draw(self, charge: Charge, keys: KeyRing) -> bytes:
        """As `ask.question.Question` says."""
        if stamps(self._catalog, self._declared) != self._checked:
            raise sequence.changed()
        spread = self._workers()  # lists the pieces of files, behind the first stamp
        place = None if spread is None else spread.place(self._source, keys, charge.run_id)
        return drawn(self._question, self._catalog, keys, charge, self._shards, place)

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
    """The private answer of a statement.

    Args:
        how: whether it is asked anew, and of which state of the data.
        shards, runner: see `StatementQuestion`.

    Raises:
        DpstreamError: not usable or not private as written; beyond the ledger's limit; no key; a
            table that cannot be read, or has a declared key that was not checked.
    """
    question, ledger = question_of(text, catalog), catalog.ledger
    source = KeySource(catalog.key.key, catalog.key.insecure_test_key)
    asked = StatementQuestion(question, catalog, source, shards, runner)
    sweep(catalog.beside)
    with (
        source.ring() as keys,
        contextlib.closing(open_ledger(ledger)) as opened,
    ):
        answer = sequence.ask(asked, opened, keys, how)
    insecure = source.insecure_test_key is not None
    return decoded(
        answer.receipt,
        answer.digest,
        answer.charged,
        insecure,
        lambda rows: outer(question, catalog, rows),
    )


def identity_of(question: Question, catalog: Catalog) -> list[bytes]:
    """The statement, the catalog, and where the tables lie that it reads: nothing of their rows."""
    tables = [catalog.tables[name] for name in sorted(inputs_of(question, catalog))]
    return [question.digest.encode(), *(place_of(table, catalog.folder) for table in tables)]


def request_of(question: Question, catalog: Catalog, as_of: str = "") -> str:
    """The request by which a statement's answer is given again.

    Raises:
        DpstreamError: there is no key.
    """
    with KeySource(catalog.key.key, catalog.key.insecure_test_key).ring() as keys:
        return sequence.request_of("sql", identity_of(question, catalog), keys, as_of)


def inputs_of(question: Question, catalog: Catalog) -> set[str]:
    """Tables that a statement reads, public ones too."""
    statement = question.statement
    return named_tables([statement.source, statement.public, statement.outer], catalog)


def check(question: Question, catalog: Catalog) -> None:
    """Run every rewritten query on tables without rows: nobody pays for one that cannot run.

    Raises:
        RunError: DuckDB does not take it.
    """
    statement, names = question.statement, _before_noise(question, catalog)
    query = stage_one(question.asked, catalog, grids_of(question.sketched()))
    with Engine(catalog, names, empty=True) as engine:
        found = engine.run(query)
        if statement.public is not None:
            engine.run(typed_public(statement))
    kinds = [found.schema.field(f"group_{i}").type for i in range(len(statement.groups))]
    outer(question, catalog, empty(question, kinds), check=True)


def drawn(
    question: Question,
    catalog: Catalog,
    ring: KeyRing,
    charge: Charge,
    shards: int | None = None,
    place: Place | None = None,
) -> bytes:
    """Read and draw under a run id that is charged: the receipt."""
    names = _before_noise(question, catalog)
    with contextlib.ExitStack() as stack:
        if place is None:
            place = Turns(stack.enter_context(Engine(catalog, names)), ring, shards)
        found = Stage(question, catalog, place, ring, charge.run_id).run()
    header = _header(question, charge, found)
    rows, public = released(question, found), named_tables([question.statement.outer], catalog)
    with contextlib.suppress(DpstreamError):
        before = stamps(catalog, public)
        answer = outer(question, catalog, rows)
        if stamps(catalog, public) == before:
            return encoded(header, answer)
    return encoded(header, rows, outer=False)


def _before_noise(question: Question, catalog: Catalog) -> set[str]:
    """Tables that are read before the noise is drawn."""
    return named_tables([question.statement.source, question.statement.public], catalog)


def _header(question: Question, charge: Charge, found: Found) -> Header:
    nulls = found.nulls
    chosen = {c.name: (c.low or 0.0, c.high or 0.0) for c in found.plan.columns}
    automatic = [c.name for c in question.plan.columns if c.automatic]
    return Header(
        run_id=charge.run_id,
        question=question.digest,
        answered=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        epsilon=charge.epsilon,
        delta=charge.delta,
        mu=charge.mu,
        threshold_delta=charge.threshold_delta,
        reports=tuple(f.name for f in question.statement.functions if f.report),
        bounds={name: chosen[name] for name in automatic if name not in nulls},
        nulls=tuple(name for name in automatic if name in nulls),
        cuts=found.cuts,
        not_estimated=not_estimated(
            question.plan, found.cuts.keys() | nulls, bool(question.statement.groups)
        ),
    )
