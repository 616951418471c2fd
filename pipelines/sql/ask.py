"""Ask a statement: charge, read, draw, commit, and only then see the answer.

The order is the guarantee, as for ``dpstream choose``: the statement is parsed, validated and
planned from public parts, and its rewritten form is tried on tables without rows; charge and
request are one transaction before a row is read; noise is drawn under the run id of that charge;
the receipt is committed before it is seen.  What is cut off goes on under its run id.  The
same statement on the same input is answered with the same bytes, at no charge; ``fresh`` asks
anew.  HAVING, ORDER BY, LIMIT, arithmetic and public tables come after the noise.

An outer query that fails (memory, or a public table that went away) does not undo the draw: what
it was asked about, the released rows, is committed as the receipt, and whoever asks again asks the
outer query alone.  Otherwise the same noise would be drawn again for a server's rows, which may
have changed meanwhile, by somebody who has seen that the first rows made it fail.
"""

import contextlib
import itertools
from collections.abc import Mapping
from datetime import UTC, datetime

from dpstream.accounting.errors import DpstreamError, PolicyError
from dpstream.accounting.query.bounds import not_estimated
from dpstream.accounting.query.grids import grids_of
from dpstream.dp_transforms.noise.key_source import KeySource
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.pipelines.runners.bounded import Runner
from dpstream.pipelines.sql.catalog import Catalog
from dpstream.pipelines.sql.engine import Engine
from dpstream.pipelines.sql.fitting import require_fitting
from dpstream.pipelines.sql.handed import sweep
from dpstream.pipelines.sql.inputs import stamps, table_parts, uncompared
from dpstream.pipelines.sql.query_plan import Question, named_tables, question_of
from dpstream.pipelines.sql.receipt import Header, SqlAnswer, decoded, encoded
from dpstream.pipelines.sql.registration import require_registered
from dpstream.pipelines.sql.released import empty, outer, released
from dpstream.pipelines.sql.rewrite import stage_one
from dpstream.pipelines.sql.spread import Spread
from dpstream.pipelines.sql.stage import Found, Place, Stage, Turns
from dpstream.pipelines.sql.work import typed_public
from dpstream.state.ledger.answers import Register
from dpstream.state.ledger.open import open_ledger
from dpstream.state.run_ids import new_run_id


def ask(
    catalog: Catalog,
    text: str,
    fresh: bool = False,
    shards: int | None = None,
    runner: Runner | None = None,
) -> SqlAnswer:
    """The private answer of a statement.

    Args:
        fresh: ask anew, which is a new charge, what was answered before.
        shards: of units; no released byte depends on it (default: by the size of the files).
        runner: whose workers do stage 1; ``None``: this process.  No released byte depends on it.

    Raises:
        DpstreamError: not usable or not private as written; beyond the ledger's limit; no key; a
            table that cannot be read, or has a declared key that was not checked.
    """
    question = question_of(text, catalog)
    tables = inputs_of(question, catalog)
    check(question, catalog)
    before = stamps(catalog, tables)  # before the pieces of files are listed
    spread = None if runner is None else Spread(runner, question, catalog, shards)
    source = KeySource(catalog.key.key, catalog.key.insecure_test_key)
    with source.ring() as ring:
        contents = {name: table_parts(catalog.tables[name]) for name in sorted(tables)}
        require_registered(catalog, tables, ring, contents)
        request = _fingerprint(question, ring, contents)

        def draw(run_id: str) -> bytes:
            place = None if spread is None else spread.place(source, ring, run_id)
            receipt = drawn(question, catalog, ring, run_id, shards, place)
            if stamps(catalog, tables) != before:
                raise PolicyError(
                    "table", "has a file that changed while it was read", "ask again: a new charge"
                )
            return receipt

        ledger = catalog.ledger
        sweep(catalog.beside)
        with contextlib.closing(open_ledger(ledger.path, ledger.data_set)) as book:
            register = Register(book, "sql")
            if fresh or register.find(request) is None:
                require_fitting(catalog, tables)
            charge = question.charge(catalog, new_run_id())
            run_id, charged = register.begin(charge, request, ledger.limit.pair, fresh)
            answer = register.finish(run_id, draw)
    insecure = catalog.key.insecure_test_key is not None
    told = decoded(
        answer.receipt,
        answer.digest,
        charged,
        insecure,
        lambda rows: outer(question, catalog, rows),
    )
    return told._replace(uncompared=uncompared(catalog, tables))


def fingerprint_of(question: Question, catalog: Catalog) -> str:
    """The request of a statement on the input as it is now: by it an answer is given again.

    Raises:
        DpstreamError: there is no key, or a table cannot be read.
    """
    with KeySource(catalog.key.key, catalog.key.insecure_test_key).ring() as ring:
        tables = sorted(inputs_of(question, catalog))
        return _fingerprint(question, ring, {n: table_parts(catalog.tables[n]) for n in tables})


def _fingerprint(question: Question, ring: KeyRing, contents: Mapping[str, list[bytes]]) -> str:
    parts = itertools.chain.from_iterable(contents.values())
    return ring.source_fingerprint([b"sql", question.digest.encode(), *parts])


def inputs_of(question: Question, catalog: Catalog) -> set[str]:
    """Tables that a statement reads, public ones too."""
    statement = question.statement
    return named_tables([statement.source, statement.public, statement.outer], catalog)


def check(question: Question, catalog: Catalog) -> None:
    """Run every rewritten query on tables without rows: nobody pays for one that cannot run.

    Raises:
        RunError: DuckDB does not take it.
    """
    statement = question.statement
    names = named_tables([statement.source, statement.public], catalog)
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
    run_id: str,
    shards: int | None = None,
    place: Place | None = None,
) -> bytes:
    """Read and draw under a run id that is charged: the receipt."""
    statement = question.statement
    names = named_tables([statement.source, statement.public], catalog)
    with contextlib.ExitStack() as stack:
        if place is None:
            place = Turns(stack.enter_context(Engine(catalog, names)), ring, shards)
        found = Stage(question, catalog, place, ring, run_id).run()
    header = _header(question, catalog, run_id, found)
    rows = released(question, found)
    try:
        return encoded(header, outer(question, catalog, rows))
    except DpstreamError:
        return encoded(header, rows, outer=False)


def _header(question: Question, catalog: Catalog, run_id: str, found: Found) -> Header:
    charge, nulls = question.charge(catalog, run_id), found.nulls
    chosen = {c.name: (c.low or 0.0, c.high or 0.0) for c in found.plan.columns}
    automatic = [c.name for c in question.plan.columns if c.automatic]
    return Header(
        run_id=run_id,
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
