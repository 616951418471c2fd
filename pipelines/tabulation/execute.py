"""An execution: charge, draw, commit, and only then anybody sees a table.

The order is the guarantee, as for every answer (`state.ledger.answers`):

1. The public files are read and checked, and the plan follows; a record's file is only hashed.
2. Charge and request are one transaction: the run id is committed before a record is parsed.
3. Records are counted and noise is drawn under that run id, into a folder that nobody else can
   enter, beside OUT.
4. The receipt, with the digest of every file, is committed, and the folder gets its place whole.

Whoever is killed before 4 has published nothing: the same execution goes on under its run id, which
is the same noise and the same bytes, at no charge.  After 4 it is answered from what stands; if OUT
is gone it is drawn again, and must have the digests of the receipt.  Other input under a run id
would be the same noise on other counts, so a draft that was begun with it is refused.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from dpstream.accounting.errors import InvariantError, PolicyError, RunError, UsageError
from dpstream.accounting.plan.unit import UnitIdentity
from dpstream.accounting.tabulation.plan import TablePlan
from dpstream.dp_transforms.noise.inputs import combined
from dpstream.dp_transforms.noise.key_source import KeySource
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.pipelines.connectors.dead_letters import check_dead_letters
from dpstream.pipelines.jobs.tables import LedgerConfig
from dpstream.pipelines.runners.bounded import Runner
from dpstream.pipelines.tabulation import dead_letters
from dpstream.pipelines.tabulation.book import Book, of_another_input, opened
from dpstream.pipelines.tabulation.draft import (
    Begun,
    Draft,
    Manifest,
    is_whole,
    locked,
    manifest_of,
    of_run,
    standing,
    write_file,
)
from dpstream.pipelines.tabulation.inputs import (
    Inputs,
    Prepared,
    content_of,
    inputs_of,
    prepared,
    stamps,
)
from dpstream.pipelines.tabulation.reading import read
from dpstream.pipelines.tabulation.spread import check, spread
from dpstream.pipelines.tabulation.work import (
    counted,
    counts_digest,
    finished,
    names_of,
    pairs_of,
    parts_of,
)
from dpstream.state.ledger.charges import Charge
from dpstream.state.private_log import keep_beside
from dpstream.state.run_ids import new_run_id


class Order(NamedTuple):
    """What is to be executed, and how.

    Attributes:
        inputs: the files; out: the folder that is made.
        key: where the noise key is.
        ledger: that is charged, ``None``: none is kept.
        runner: whose workers do the work, ``None``: this process.  No byte depends on it.
        fresh: a new charge also for what was answered before.
        strict: refuse a file with a record that breaks a rule.
        dead_letter: folder of refused records; ``None``: ``dead_letter/`` beside ``out``.
    """

    inputs: Inputs
    out: Path
    key: KeySource
    ledger: LedgerConfig | None = None
    runner: Runner | None = None
    fresh: bool = False
    strict: bool = False
    dead_letter: Path | None = None

    @property
    def letters(self) -> Path | None:
        """The folder of refused records; ``None``: they refuse the file."""
        if self.strict:
            return None
        return self.dead_letter or dead_letters.dead_letter_folder(self.out)


class Executed(NamedTuple):
    """What came of it.

    Attributes:
        manifest: what stands in OUT.
        charged: by this very call, if a ledger is kept.
        drawn: now; else OUT stood already.
    """

    manifest: Manifest
    charged: bool
    drawn: bool


def execute(order: Order) -> Executed:
    """Make the tables.

    Raises:
        DpstreamError: the files have faults, the ledger's limit does not allow it, OUT is another
            execution's, or the input changed; nothing is charged twice and nothing is half there.
    """
    keep_beside(None if order.ledger is None else order.ledger.path, order.out)
    letters = order.letters
    if letters is not None and order.out.resolve() in (
        letters.resolve(),
        *letters.resolve().parents,
    ):
        raise UsageError(
            "--dead-letter", "lies in OUT, which is published whole", "name a folder elsewhere"
        )
    if letters is not None:
        check_dead_letters(letters, "--dead-letter")
    found, before = prepared(order.inputs), stamps(order.inputs)
    if order.runner is not None:
        check(order.runner)
    with order.key.ring() as keys:
        request = request_of(order.inputs, found.plan, keys)
        with locked(order.out) as draft, opened(order.ledger, draft, charge_of(found.plan)) as book:
            try:
                out = standing(order.out)  # behind the lock: nobody else puts one there now
                if out is not None:
                    known = None if order.ledger is None else book.known(request)
                    stands(order.out, out, request, order.fresh, order.ledger is not None, known)
                    return Executed(out, False, False)
                return _made(order, found, keys, request, draft, book, before)
            finally:
                draft.drop_if_empty()


def _made(
    order: Order, found: Prepared, keys: KeyRing, request: str, draft: Draft, book: Book,
    before: object,
) -> Executed:  # fmt: skip
    check_draft(draft.begun, draft.manifest, request, order.fresh)
    kept = draft.manifest
    run_id, charged = book.begin(request, new_run_id(), order.fresh)
    known = book.known(request)
    receipt = known[1] if known is not None and known[0] == run_id else None
    names = names_of(found)
    if kept is not None and kept.run_id == run_id and draft.written(names) == kept.files:
        manifest = kept  # all that was left was to put it in its place
    else:
        draft.begin(Begun(run_id, of_run(request, run_id)))
        draw = _here if order.runner is None else _spread
        draw(order, found, keys, run_id, draft)
        insecure = order.key.insecure_test_key is not None
        written = draft.written(names)
        manifest = manifest_of(found.plan, run_id, request, insecure, written)
    if stamps(order.inputs) != before:
        raise PolicyError(
            "DATA",
            "has a file that changed while it was read",
            "put it back and run again, or --fresh: a new charge",
        )
    if receipt is not None and receipt.files != manifest.files:
        raise RunError(
            "OUT", "would not be what was published before under this run id",
            "use the version of the program that made it",
        )  # fmt: skip
    book.commit(run_id, manifest.encoded)
    draft.publish(manifest.encoded)
    return Executed(manifest, charged and order.ledger is not None, True)


def check_draft(
    begun: Begun | None, kept: Manifest | None, request: str, fresh: bool
) -> None:  # fmt: skip
    """Refuse a draft that was begun with other input.

    Raises:
        PolicyError: see above.
    """
    others = any(of is not None and not of.answers(request) for of in (begun, kept))
    if others and not fresh:
        raise of_another_input()


def stands(
    place: Path, out: Manifest, request: str, fresh: bool, charged: bool,
    known: tuple[str, Manifest | None] | None,
) -> None:  # fmt: skip
    """Refuse an OUT that is there already, unless it is the answer.

    Args:
        place, out: the folder and its manifest; charged: whether there is a ledger; known: run id
            and receipt of the request there.

    Raises:
        PolicyError: it is another execution's, or not as it was published.
    """
    answer = out.answers(request) and (not charged or (known is not None and known[1] == out))
    if answer and not fresh:
        if is_whole(place, out):
            return
        raise PolicyError(
            "OUT", "has a file that is missing or is not what was published",
            "put it away and run again: with a ledger that draws the same at no charge",
        )  # fmt: skip
    raise PolicyError("OUT", "exists and is another execution's", "name a new folder")


def request_of(inputs: Inputs, plan: TablePlan, keys: KeyRing) -> str:
    """Keyed fingerprint of what is asked of which input."""
    parts = [b"table", plan.hash.encode(), inputs.digest.encode(), content_of(inputs.records)]
    return keys.source_fingerprint(parts)


def charge_of(plan: TablePlan) -> Callable[[str], Charge]:
    """What a run of a plan costs a person, or a household."""

    def charge(run_id: str) -> Charge:
        cost = plan.cost()
        return Charge(
            run_id, plan.hash, f"{plan.unit} over the whole stream", cost.epsilon, cost.delta,
            cost.mu, 0.0, kind="table", identity=UnitIdentity(plan.unit, "string").text,
            rho=cost.rho,
        )  # fmt: skip

    return charge


def _here(order: Order, found: Prepared, keys: KeyRing, run_id: str, draft: Draft) -> None:
    """Count and draw in this process."""
    tally = counted(found, read(order.inputs.records, found.lookup, order.letters))
    parts = parts_of(found)
    inputs = combined(counts_digest(found, p, pairs_of(found, tally, p), keys) for p in parts)
    for part in parts:
        for file in finished(found, part, pairs_of(found, tally, part), keys, run_id, inputs):
            write_file(draft.path, file)


def _spread(order: Order, found: Prepared, keys: KeyRing, run_id: str, draft: Draft) -> None:
    """Count and draw on a runner's workers."""
    if order.runner is None:
        raise InvariantError("a runner was asked for")
    bound = order.key.of_run(run_id, keys.fingerprint)
    letters = None if order.letters is None else str(order.letters)
    spread(order.runner, order.inputs, found, bound, run_id, draft.path, letters)


__all__ = ["Executed", "Order", "execute", "inputs_of"]
