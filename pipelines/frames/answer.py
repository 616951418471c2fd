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
import secrets
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pyarrow as pa

from dpstream.accounting.errors import InvariantError, UsageError
from dpstream.accounting.query.grids import regridded
from dpstream.accounting.query.plan import QueryPlan
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.noise.secret import KEY_BYTES, wipe
from dpstream.dp_transforms.one_shot import aggregated, answer, bounded, choose_bounds, counted
from dpstream.pipelines.account import LedgerAccount
from dpstream.pipelines.frames.private import PrivateTable, private_table
from dpstream.pipelines.frames.question import Question
from dpstream.pipelines.frames.rows import Rows, partials_of, rows_of, wide_values
from dpstream.pipelines.sql.receipt import Header, decoded, encoded, estimated
from dpstream.state.ledger.answers import Register
from dpstream.state.ledger.open import open_ledger
from dpstream.state.numbers import numbers

if TYPE_CHECKING:
    from dpstream.dp_transforms.run import KeySource


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
            receipt = _drawn(question, rows_of(question, columns, ring), ring, _run_id())
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
        charge = question.charge(_run_id(), question.identity(ledger.unit))
        with contextlib.closing(open_ledger(ledger.path, ledger.data_set)) as book:
            register = Register(book, "frame")
            limit = (ledger.limit.epsilon, ledger.limit.delta)
            run_id, charged = register.begin(charge, request, limit, fresh)
            found = register.finish(run_id, lambda name: _drawn(question, rows, ring, name))
    insecure = source.insecure_test_key is not None
    told = decoded(found.receipt, found.digest, charged, insecure)
    return private_table(question, told, ledger.data_set)


def _run_id() -> str:
    return secrets.token_hex(16)


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
    from dpstream.dp_transforms.run import KeySource  # with all that a run needs

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
    plan, null = _bounds(question, rows, ring, name)
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
    return encoded(_header(question, run_id, plan, null), released)


def _bounds(
    question: Question, rows: Rows, ring: KeyRing, name: tuple[bytes, bytes]
) -> tuple[QueryPlan, bool]:
    """The plan with its bounds, found if they are to be, and whether there are none."""
    plan, design, bits = question.gridded
    if design is None:
        return plan, False
    [of] = design.histograms
    [column] = plan.columns
    ids = (rows.unit_ids, rows.groups.ids)
    counts = {of.name: counted(of, wide_values(column, rows), ids, ring, name)}
    settled = choose_bounds(plan, design, counts, ring, name)
    [chosen] = settled.plan.columns
    bounds = {column.name: (chosen.low or 0.0, chosen.high or 0.0)}
    return regridded(plan, bounds, bits), bool(settled.nulls)


def _header(question: Question, run_id: str, plan: QueryPlan, null: bool) -> Header:
    charge = question.charge(run_id, question.identity(None))
    [column] = plan.columns
    automatic = question.column.automatic
    return Header(
        run_id=run_id,
        question=question.digest,
        answered=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        epsilon=charge.epsilon,
        delta=charge.delta,
        mu=charge.mu,
        threshold_delta=charge.threshold_delta,
        reports=(column.name,),
        bounds={column.name: (column.low or 0.0, column.high or 0.0)} if automatic and not null
        else {},
        nulls=(column.name,) if null else (),
    )  # fmt: skip
