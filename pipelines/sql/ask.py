"""Ask a statement, by the common sequence of charge and answer (`pipelines.ask`).

The statement is parsed, validated and planned from public parts, and its rewritten form is tried on
tables without rows before it is charged.  HAVING, ORDER BY, LIMIT, arithmetic and public tables
come after the noise.

The outer query's rows are the view of the receipt (`pipelines.ask.sequence`), which is stored: a
repeated statement is answered with it, even if a public table has changed since.  An outer query
that fails (memory, or a public table that was removed or changed meanwhile) does not undo the draw:
asking again runs the outer query alone, on the committed released rows and the present tables.

**The identity of a statement.**  It consists of the statement, the catalog, the paths of its
private
tables, and the content of public tables that are read before the noise (public groups, and look-ups
in the private relation): with a changed public table it is another question.  Public tables that
only the outer query reads are not part of it.
"""

import contextlib
import functools
from collections.abc import Sequence

from dpstream.accounting.errors import PolicyError
from dpstream.accounting.query.bounds import not_estimated
from dpstream.accounting.query.grids import grids_of
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.pipelines.ask import sequence
from dpstream.pipelines.ask.acceptance import room_of
from dpstream.pipelines.ask.question import ONCE, Asking
from dpstream.pipelines.formats.receipt import answered_now, encoded, table_bytes, table_of
from dpstream.pipelines.runners.bounded import Runner
from dpstream.pipelines.sql.query_plan import Question, named_tables, question_of, stage_one
from dpstream.pipelines.sql.receipt import Header, SqlAnswer, decoded
from dpstream.pipelines.sql.spread import Spread
from dpstream.pipelines.sql.stage import (
    Executor,
    LocalShards,
    Stage,
    StageAnswer,
    empty,
    outer,
    released,
)
from dpstream.pipelines.sql.work import typed_public
from dpstream.pipelines.tables.catalog import Catalog
from dpstream.pipelines.tables.engine import Engine, contents_of
from dpstream.pipelines.tables.files import FILES, place_of, stamps, table_parts
from dpstream.pipelines.tables.registration import require_fitting, require_registered
from dpstream.state.ledger.answers import Decision
from dpstream.state.ledger.events import Charge, ChargeKind
from dpstream.state.ledger.history import History
from dpstream.state.ledger.open import open_ledger
from dpstream.state.locks import sweep


class StatementQuestion:
    """A statement about a catalog's tables, for `ask.sequence`.

    Args:
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
    ) -> None:
        self._question, self._catalog, self._source = question, catalog, source
        self.kind: ChargeKind = question.kind
        self._shards, self._runner = shards, runner
        self._tables = inputs_of(question, catalog)
        self._declared = sorted({name for name, _ in catalog.declared_keys} & self._tables)
        self._public = _public_before_noise(question, catalog)
        self._checked: object = None

    @functools.cached_property
    def identity(self) -> Sequence[bytes]:
        """The parts that identify the statement; ``draw`` refuses a public table that changed."""
        self._digested = self._public_state()
        return identity_of(self._question, self._catalog)

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
        names = _before_noise(self._question, self._catalog)
        return stamps(self._catalog, names), self._public_state()

    def _public_state(self) -> object:
        """Return a value that differs if a public table changes that is read before the noise."""
        tables = [self._catalog.tables[name] for name in self._public]
        databases = [contents_of(self._catalog, t.name) for t in tables if t.kind not in FILES]
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
    question, ledger = question_of(text, catalog), catalog.ledger
    source = catalog.secret
    statement_question = StatementQuestion(question, catalog, source, shards, runner)
    sweep(catalog.beside)
    with (
        source.ring() as keys,
        contextlib.closing(open_ledger(ledger)) as opened,
    ):
        answer = sequence.ask(
            statement_question, opened, keys, how, lambda answer: _view(question, catalog, answer)
        )
    return decoded(answer, source.insecure_test_secret is not None)


def identity_of(question: Question, catalog: Catalog) -> list[bytes]:
    """Return the parts that identify a statement; see the module.

    Raises:
        DpstreamError: a public table that is read before the noise cannot be read.
    """
    public = _public_before_noise(question, catalog)
    private = [
        n for n in sorted(inputs_of(question, catalog)) if catalog.tables[n].unit is not None
    ]
    places = (place_of(catalog.tables[name], catalog.folder) for name in private)
    contents = (part for name in public for part in contents_of(catalog, name))
    return [question.digest.encode(), *places, *contents]


def _view(question: Question, catalog: Catalog, receipt: bytes) -> bytes:
    """Return the rows of the outer query on the released rows of a receipt.

    Raises:
        DpstreamError: the query fails, or a public table changed meanwhile.
    """
    public = named_tables([question.statement.outer], catalog)
    before = stamps(catalog, public)
    rows = outer(question, catalog, table_of(receipt))
    if stamps(catalog, public) != before:
        raise PolicyError(
            "input",
            "changed while the outer query read it; its rows were not kept",
            "wait until the public tables are at rest",
        )
    return table_bytes(rows)


def inputs_of(question: Question, catalog: Catalog) -> set[str]:
    """Return the tables that a statement reads, including public ones."""
    statement = question.statement
    return named_tables([statement.source, statement.public, statement.outer], catalog)


def check(question: Question, catalog: Catalog) -> None:
    """Run every rewritten query on tables without rows, before the statement is charged.

    Raises:
        RunError: DuckDB refuses a query.
    """
    statement, names = question.statement, _before_noise(question, catalog)
    query = stage_one(question.per_column, catalog, grids_of(question.gridded.sketched()))
    with Engine(catalog, names, empty=True) as engine:
        table = engine.run(query)
        if statement.public is not None:
            engine.run(typed_public(statement))
    kinds = [table.schema.field(f"group_{i}").type for i in range(len(statement.groups))]
    outer(question, catalog, empty(question, kinds), check=True)


def drawn(
    question: Question,
    catalog: Catalog,
    ring: KeyRing,
    charge: Charge,
    shards: int | None = None,
    executor: Executor | None = None,
) -> bytes:
    """Read rows and draw noise under the charge's run id; return the receipt."""
    names = _before_noise(question, catalog)
    with contextlib.ExitStack() as stack:
        if executor is None:
            executor = LocalShards(stack.enter_context(Engine(catalog, names)), ring, shards)
        private_answer = Stage(question, catalog, executor, ring, charge.run_id).run()
    return encoded(_header(question, charge, private_answer), released(question, private_answer))


def _before_noise(question: Question, catalog: Catalog) -> set[str]:
    """Return the tables that are read before the noise is drawn."""
    return named_tables([question.statement.source, question.statement.public], catalog)


def _public_before_noise(question: Question, catalog: Catalog) -> list[str]:
    names = _before_noise(question, catalog)
    return sorted(name for name in names if catalog.tables[name].unit is None)


def _header(question: Question, charge: Charge, private_answer: StageAnswer) -> Header:
    nulls = private_answer.nulls
    chosen = {c.name: (c.low or 0.0, c.high or 0.0) for c in private_answer.plan.columns}
    automatic = [c.name for c in question.plan.columns if c.automatic]
    return Header(
        **answered_now(charge),
        epsilon=charge.epsilon,
        delta=charge.delta,
        mu=charge.mu,
        threshold_delta=charge.threshold_delta,
        reports=tuple(f.name for f in question.statement.functions if f.report),
        bounds={name: chosen[name] for name in automatic if name not in nulls},
        nulls=tuple(name for name in automatic if name in nulls),
        cuts=private_answer.cuts,
        not_estimated=not_estimated(
            question.plan, private_answer.cuts.keys() | nulls, bool(question.statement.groups)
        ),
    )
