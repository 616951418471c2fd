"""Ask about a table: charge, draw, commit, and only then see the answer.

The order is the guarantee, as of a statement (``pipelines.sql.ask``).  With an account, the rows
are first made into a keyed fingerprint and nothing else; question, fingerprint, run id and charge
are one transaction; then rows are counted and noise is drawn, named by the run id; the receipt is
committed before anybody sees it.  The same question about the same rows, in whatever order, is
answered with the same bytes at no charge.  Without an account nothing is kept: noise key and run id
are drawn for this answer alone, and whoever asks again spends epsilon again.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pyarrow as pa

from dpstream.accounting.errors import InvariantError, UsageError
from dpstream.accounting.query.bounds import Settled, not_estimated
from dpstream.accounting.query.grids import regridded
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.noise.secret import KEY_BYTES, wipe
from dpstream.dp_transforms.one_shot import aggregated, answer, bounded, choose_bounds, counted
from dpstream.pipelines.account import LedgerAccount
from dpstream.pipelines.frames.private import PrivateTable, private_table
from dpstream.pipelines.frames.question import Question
from dpstream.pipelines.frames.rows import Rows, histogram_values, partials_of, rows_of
from dpstream.pipelines.sql.receipt import Header, decoded, encoded, estimated
from dpstream.state.ledger.answers import Register
from dpstream.state.ledger.open import open_ledger
from dpstream.state.numbers import numbers
from dpstream.state.run_ids import new_run_id

if TYPE_CHECKING:
    from dpstream.dp_transforms.noise.key_source import KeySource


def ask(
    question: Question,
    columns: Mapping[str, pa.ChunkedArray],
    account: LedgerAccount | None,
    noise_key: "str | KeySource | None",
    fresh: bool,
) -> PrivateTable:
    """The private answer of a question.

    Args:
        account: the data set's; ``None``: charged nowhere.
        noise_key: where the noise key is; needed with an account.
        fresh: ask anew, which is a new charge, what was answered before.

    Raises:
        DpstreamError: beyond the limit, or no key can be had.
    """
    if account is None:
        if noise_key is not None or fresh:
            raise UsageError(
                "noise_key" if noise_key is not None else "fresh",
                "has no meaning without an account: every answer has noise of its own",
                "leave it out, or give account=dpstream.LedgerAccount(...)",
            )
        with _thrown_away() as ring:
            receipt = _drawn(question, rows_of(question, columns, ring), ring, new_run_id())
        return private_table(question, decoded(receipt, "", False, False), None)
    if not isinstance(account, LedgerAccount):
        raise UsageError(
            "account",
            "is no account in a ledger",
            "write account=dpstream.LedgerAccount('ledger.db', 'visits', epsilon=4, delta=1e-6)",
        )
    source = _key(noise_key)
    with source.ring() as ring:
        rows = rows_of(question, columns, ring)
        request = ring.source_fingerprint([b"frame", question.digest.encode(), rows.identity(ring)])
        ledger = account.ledger
        charge = question.charge(new_run_id(), question.identity(ledger.unit))
        with contextlib.closing(open_ledger(ledger.path, ledger.data_set)) as book:
            register = Register(book, "frame")
            run_id, charged = register.begin(charge, request, ledger.limit.pair, fresh)
            found = register.finish(run_id, lambda name: _drawn(question, rows, ring, name))
    insecure = source.insecure_test_key is not None
    told = decoded(found.receipt, found.digest, charged, insecure)
    return private_table(question, told, ledger.data_set)


@contextlib.contextmanager
def _thrown_away() -> Iterator[KeyRing]:
    """A key ring of this answer alone."""
    secret = bytearray(os.urandom(KEY_BYTES))
    try:
        ring = KeyRing(secret)
    finally:
        wipe(secret)
    with ring:
        yield ring


def _key(noise_key: "str | KeySource | None") -> "KeySource":
    from dpstream.dp_transforms.noise.key_source import KeySource

    if isinstance(noise_key, KeySource):
        return noise_key
    if noise_key is None:
        raise UsageError(
            "noise_key",
            "is required with an account: it is what the same answer is given again by",
            "make one with `dpstream key new noise.key`, once for the data set, and write "
            "noise_key='file:noise.key'",
        )
    if not isinstance(noise_key, str):
        raise UsageError(
            "noise_key", "is not a reference to a key", "write noise_key='file:noise.key'"
        )
    return KeySource(noise_key)


def _drawn(question: Question, rows: Rows, ring: KeyRing, run_id: str) -> bytes:
    """Count and draw under a run id: the receipt."""
    name = (bytes.fromhex(run_id), question.digest.encode())
    settled = _bounds(question, rows, ring, name)
    plan, null = settled.plan, bool(settled.nulls)
    budget = question.gridded.budget(plan)
    shard = bounded(plan, partials_of(plan, rows), ring, name)
    ids = rows.groups.ids
    totals = aggregated(shard, len(ids), budget.weights)
    found = answer(plan, budget, totals, [shard], ids, ring, name)
    [column] = plan.columns
    table: dict[str, pa.Array | pa.ChunkedArray] = {}
    if question.key:
        values = rows.groups.values
        if values is None:
            raise InvariantError("values is not None")
        chosen = values.take(numbers(found.group))
        table = dict(zip(chosen.column_names, chosen.columns, strict=True))
    table |= estimated(column.name, found.columns[column.name], absent=null)
    released = pa.table(table)
    if question.key:
        released = released.sort_by([(name, "ascending") for name in question.key])
    return encoded(_header(question, run_id, settled), released)


def _bounds(question: Question, rows: Rows, ring: KeyRing, name: tuple[bytes, bytes]) -> Settled:
    """The plan with its bounds: those that are the question's to choose, by histograms of the rows.

    Where too few units have a row for the rows of a unit to be told, a count has the public bound.
    """
    plan, design, bits = question.gridded
    if design is None:
        return Settled(plan, frozenset(), {})
    [column], ids = plan.columns, (rows.unit_ids, rows.groups.ids)
    counts = {}
    for of in design.histograms:
        values = histogram_values(of.name, column, rows)
        counts[of.name] = counted(of, values, ids, ring, name)
    settled = choose_bounds(plan, design, counts, ring, name)
    [chosen] = settled.plan.columns
    low, high, nulls = chosen.low, chosen.high, settled.nulls
    if nulls and column.kind == "count":
        low, high, nulls = 0.0, float(column.rows), frozenset()
    bounds = {} if low is None or high is None else {column.name: (low, high)}
    return settled._replace(plan=regridded(settled.plan, bounds, bits), nulls=nulls)


def _header(question: Question, run_id: str, settled: Settled) -> Header:
    charge = question.charge(run_id, question.identity(None))
    [column] = settled.plan.columns
    chosen = question.column.automatic and not settled.nulls
    return Header(
        run_id=run_id,
        question=question.digest,
        answered=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        epsilon=charge.epsilon,
        delta=charge.delta,
        mu=charge.mu,
        threshold_delta=charge.threshold_delta,
        reports=(column.name,),
        bounds={column.name: (column.low or 0.0, column.high or 0.0)} if chosen else {},
        nulls=tuple(settled.nulls),
        cuts=settled.cuts,
        not_estimated=not_estimated(
            settled.plan, settled.cuts.keys() | settled.nulls, bool(question.key)
        ),
    )
