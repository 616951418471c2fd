"""The interface of a kind of question, through which the one sequence (`ask.sequence`) asks it.

To add a kind: docs/design/questions.md.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from dpstream.dp_transforms.noise.prf import KeyRing
    from dpstream.state.ledger.contract import Decision
    from dpstream.state.ledger.events import Charge, ChargeKind
    from dpstream.state.ledger.history import History


class Asking(NamedTuple):
    """The way in which a question is asked.

    Attributes:
        fresh: ask again, at a new charge, a question that was answered; one that was interrupted
            continues.
        as_of: a public label, which distinguishes the same question about two states of the data.
    """

    fresh: bool = False
    as_of: str = ""


ONCE = Asking()


class Covering(Protocol):
    """Whether the stored answer of another question answers this one, at no charge.

    The decision is made from public parts and from the account: of answers that have the same
    figures at no wider an interval, the first one that was charged is given, so that a question
    that is repeated gets the same bytes again.
    """

    @property
    def families(self) -> Sequence[Sequence[bytes]]:
        """Canonical parts that a question shares with others: with all whose figures can be the
        same; then with more of them, whose answers a plan offers for computing on."""

    def covers(self, charge: "Charge", receipt: bytes) -> bool:
        """Return whether an answer of the first family has the figures of this question."""


class Question(Protocol):
    """A question that is asked once.

    Everything except what ``draw`` reads is public, and depends on no private row.  So whether a
    question is answered again at no charge, and what it costs, reveals nothing about the rows.
    """

    @property
    def kind(self) -> "ChargeKind":
        """The kind of the charge; questions of two kinds are never the same question."""

    @property
    def identity(self) -> Sequence[bytes]:
        """Canonical parts that identify the question, without anything of a private row.

        These are the question, the paths of its private inputs, and the content of public inputs
        that are used before the noise.
        """

    def check(self, ring: "KeyRing") -> None:
        """Refuse a question that cannot be answered, before it is charged.

        Called if the question is not answered yet.  It may read schemas, options and the runner,
        never private rows.

        Raises:
            DpstreamError: the question cannot be answered.
        """

    def decide(self, run_id: str, account: "History") -> "Decision":
        """Return the cost of the answer, and the records it may read.

        Called in the transaction that charges, perhaps several times: it must change nothing.

        Args:
            run_id: the run id of the charge.
            account: all charges before it.

        Raises:
            PolicyError: refused, for a public reason.
        """

    def stamp(self) -> object:
        """Return a value that differs if a private input changes while it is read: names, sizes and
        times of files; no row.

        Raises:
            RunError: an input cannot be read.
        """

    def draw(self, charge: "Charge", ring: "KeyRing") -> bytes:
        """Read the private rows, draw the noise and return the receipt, which is the public answer.

        Called after the charge, outside the transaction.  All noise is named by ``charge.run_id``
        and by the digest of the numbers that it is added to (`dp_transforms.noise.inputs`), so that
        a question that was interrupted gets the same answer from the same rows when it is asked
        again.

        Raises:
            DpstreamError: rows cannot be read; nothing was shown, and the charge stays.
        """
