"""Ask a question: charge, read, draw, commit, and only then show the answer.

The order is the guarantee, and this module is the only place that implements it:

1. *charge*: decision, charge and request are one transaction of the account, durable before a
   private row is read.  So there is no draw without a charge, and no charge whose run id is lost.
2. *draw*: rows are read and noise is drawn, named by the run id of that charge and by a digest of
   the very numbers that it is added to (`dp_transforms.noise.inputs`).
3. *commit*: the receipt, which is the public answer, is committed; if there are two, the first one
   counts.
4. *show*: the answer is shown as it is read back, once the account's head file has the receipt on
   disk (`state.ledger.head`).  An account that was restored from a backup is refused before 1.
5. *deliver*: the command writes and prints its output, and then records all its answers as
   delivered.  If an answer was asked with ``fresh`` and is not delivered, the next ``fresh``
   continues it: a failed command that is repeated charges once.

A receipt does not depend on the presentation of an answer (names that a question chose, an order of
rows, what is computed from released figures).  Each command that asks presents the receipt, and the
presentation is no part of the question's identity.  If it fails, the draw remains.

**Killed at any moment.**  Before the end of 1 nothing was charged and nothing was read.  Between 1
and 3 nothing was shown: the same question continues under its run id, on the rows that exist then,
at no charge.  It is never refused because rows changed: its noise on other rows is independent.
After 3 the same question is answered with the committed bytes and their date, without reading rows;
after 5, ``fresh`` is a new charge.

**What asking again reveals.**  A request is the keyed digest of the question, of the paths of its
inputs and of a public label (``as_of``), never of rows.  So neither the charge nor the answer of a
repeated question depends on whether a row changed meanwhile; ``fresh`` is a new charge.  An input
that changes *while* it is read is refused by its stamp, because the answer would describe no state
of the data; asking again continues that charge.

**What is known is free.**  A question that is not in the account is answered by the first stored
answer that has its figures at no wider an interval (`ask.question.Covering`); ``fresh`` asks anew.

**Two processes that ask at once** get one charge, and read the one committed receipt.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from dpstream.accounting.errors import PolicyError, UsageError, required
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.noise.secret import KEY_BYTES, wipe
from dpstream.pipelines.ask.question import ONCE, Asking, Covering, Question
from dpstream.state.ledger.contract import Answer, AnswerLog, Begun, Ledger
from dpstream.state.ledger.events import Charge, ChargeKind, new_run_id
from dpstream.state.ledger.history import History

#: Characters of a label.
_LABEL = 400


def ask(
    question: Question,
    ledger: Ledger,
    ring: KeyRing,
    how: Asking = ONCE,
    deliver: Callable[[Answer], object] = lambda _: None,
    covering: Covering | None = None,
) -> Answer:
    """Return the answer of a question; see the module.

    Args:
        question, ledger, ring, how, covering: see `answered`.
        deliver: writes and prints what the command makes of the answer.

    Raises:
        DpstreamError: the question is refused, or failed; the module states what was charged.
    """
    answer = answered(question, ledger, ring, how, covering)
    deliver(answer)
    AnswerLog(ledger, question.kind).deliver({answer.run_id})
    return answer


def answered(
    question: Question,
    ledger: Ledger,
    ring: KeyRing,
    how: Asking = ONCE,
    covering: Covering | None = None,
) -> Answer:
    """Return the answer of a question, which is not delivered yet (steps 1 to 4 of the module).

    Args:
        ledger: the account of the data set, whose limit applies.
        ring: the key ring of the data set's secret.
        covering: decides which other answers have its figures; ``None``: none has.

    Raises:
        DpstreamError: the question is refused, or failed; the module states what was charged.
    """
    return answered_together([(question, covering)], ledger, ring, how)[0]


def answered_together(
    questions: Sequence[tuple[Question, Covering | None]],
    ledger: Ledger,
    ring: KeyRing,
    how: Asking = ONCE,
) -> list[Answer]:
    """Return the answers of the parts of one statement, each with an identity of its own.

    Those that are not in the account are charged in one transaction: all of them or, where the
    limit does not accept their sum, none.  Whoever asks again gets those that were drawn, and the
    others continue.

    Args:
        questions: each with its covering, see `answered`.
        ledger, ring, how: see `answered`.

    Raises:
        DpstreamError: one is refused, or failed; the module states what was charged.
    """
    lookups = [
        (question, AnswerLog(ledger, question.kind), keys, covering)
        for question, covering in questions
        for keys in [keys_of(question.kind, question.identity, ring, how.as_of, covering)]
    ]
    runs = [
        free_run(register, keys, how.fresh, covering) for _, register, keys, covering in lookups
    ]
    free = [
        None if run is None else register.read(run)
        for run, (_, register, _, _) in zip(runs, lookups, strict=True)
    ]
    open_ = [one for one, answer in zip(lookups, free, strict=True) if answer is None]
    for question, *_ in open_:
        question.check(ring)

    def pay() -> list[Begun]:
        return [
            register.begin(keys.request, question.decide, how.fresh, keys.families)
            for question, register, keys, _ in open_
        ]

    drawn_now = list[Answer]()
    begun = pay() if len(open_) < 2 else ledger.transact(pay, show=False)
    for one, (question, register, *_) in zip(begun, open_, strict=True):
        if one.receipt is None:
            register.commit(one.run_id, drawn(question, one.charge, ring))
        drawn_now.append(_read(register, one.run_id)._replace(charged=one.charged))
    new = iter(drawn_now)
    return [next(new) if answer is None else answer._replace(charged=False) for answer in free]


def _read(register: AnswerLog, run_id: str) -> Answer:
    answer = register.read(run_id)
    return required(answer, "a committed answer is read back")


def ask_uncharged(question: Question, ring: KeyRing | None = None) -> bytes:
    """Return the answer of a question that is charged nowhere: asked again, it spends again.

    Args:
        ring: the key ring of a secret; ``None``: a secret is drawn for this answer alone, as the
            run id is, and forgotten.
    """
    with _thrown_away() if ring is None else contextlib.nullcontext(ring) as used:
        question.check(used)
        return drawn(question, question.decide(new_run_id(), History()).charge, used)


class Keys(NamedTuple):
    """The keyed digests by which an account recognises a question.

    Attributes:
        request: of the question itself (`request_of`).
        families: of what it shares with others (`ask.question.Covering`).
    """

    request: str
    families: Sequence[str] = ()


def keys_of(
    kind: ChargeKind,
    identity: Sequence[bytes],
    ring: KeyRing,
    as_of: str = "",
    covering: Covering | None = None,
) -> Keys:
    """Return the digests of a question; arguments and errors are those of `request_of`."""
    families = () if covering is None else covering.families
    alike = ([b"alike %d" % at, *parts] for at, parts in enumerate(families))
    return Keys(
        request_of(kind, identity, ring, as_of),
        [request_of(kind, parts, ring, as_of) for parts in alike],
    )


def free_run(register: AnswerLog, keys: Keys, fresh: bool, covering: Covering | None) -> str | None:
    """Return the run id whose answer a question gets at no charge; ``None``: it is charged."""
    run_id = register.continued(keys.request, fresh)
    if run_id is not None or fresh or covering is None:
        return run_id
    alike = register.alike(keys.families[0])
    return next(
        (charge.run_id for charge, receipt in alike if covering.covers(charge, receipt)), None
    )


def request_of(kind: ChargeKind, identity: Sequence[bytes], ring: KeyRing, as_of: str = "") -> str:
    """Return the keyed digest by which an account recognises a question.

    Args:
        kind, identity: of the question (`ask.question.Question`).

    Raises:
        UsageError: the label is not printable, or too long.
    """
    if len(as_of) > _LABEL or not (as_of.isprintable() or not as_of):
        raise UsageError(
            "as_of", f"must be at most {_LABEL} printable characters", "write e.g. 2024-06-30"
        )
    return ring.source_fingerprint([b"question", kind.encode(), as_of.encode(), *identity])


def drawn(question: Question, charge: Charge, ring: KeyRing) -> bytes:
    """Return the receipt of a charged question, unless an input changed while it was read.

    Raises:
        PolicyError: an input changed.
    """
    before = question.stamp()
    receipt = question.draw(charge, ring)
    if question.stamp() != before:
        raise changed()
    return receipt


def changed() -> PolicyError:
    """Return the error for an input that changed while a charged question read it."""
    return PolicyError(
        "input",
        "changed while it was read; nothing was published",
        "ask again when it is at rest: this charge continues, and nothing more is charged",
    )


@contextlib.contextmanager
def _thrown_away() -> Iterator[KeyRing]:
    """Yield a key ring that is used for one answer alone."""
    secret = bytearray(os.urandom(KEY_BYTES))
    try:
        ring = KeyRing(secret)
    finally:
        wipe(secret)
    with ring:
        yield ring
