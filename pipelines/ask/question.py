"""What a kind of question implements, so that the one sequence (`ask.sequence`) can ask it.

To add a kind: docs/design/questions.md.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from dpstream.dp_transforms.noise.prf import KeyRing
    from dpstream.state.ledger.answers import Decision
    from dpstream.state.ledger.charges import Charge, ChargeKind
    from dpstream.state.ledger.history import History


class Asking(NamedTuple):
    """How a question is asked.

    Attributes:
        fresh: at a new charge if it was answered; one that was cut off continues.
        as_of: a public label, which tells the same question about two states of the data apart.
    """

    fresh: bool = False
    as_of: str = ""


ONCE = Asking()


class Question(Protocol):
    """Something that is asked once.

    Everything but what ``draw`` reads is public, and depends on no private row.  So whether a
    question is answered again at no charge, and what it costs, tell nothing about the rows.
    """

    @property
    def kind(self) -> "ChargeKind":
        """Of the charge; questions of two kinds are never the same question."""
        ...

    @property
    def identity(self) -> Sequence[bytes]:
        """Canonical parts: the question, where its private inputs lie, and the content of public
        inputs that are used before the noise.  Never anything of a private row."""
        ...

    def check(self, keys: "KeyRing") -> None:
        """Refuse what could not be answered, before anybody pays for it.

        Called where the question is not answered yet.  It may look at schemas, options and
        the runner, never at private rows.

        Raises:
            DpstreamError: the question cannot be answered.
        """
        ...

    def decide(self, run_id: str, account: "History") -> "Decision":
        """What the answer costs, and what it may read.  Called in the transaction that charges,
        perhaps several times: it changes nothing.

        Args:
            run_id: of the charge; book: all charges before it.

        Raises:
            PolicyError: refused, for a public reason.
        """
        ...

    def stamp(self) -> object:
        """What differs when a private input changes while it is read: names, sizes and times of
        files; no row.

        Raises:
            RunError: an input cannot be read.
        """
        ...

    def draw(self, charge: "Charge", keys: "KeyRing") -> bytes:
        """Read the private rows, draw the noise and return the receipt, which is the public answer.

        Called behind the charge, outside of the transaction.  All noise is named by
        ``charge.run_id`` and by the digest of what it is added to (`dp_transforms.noise.inputs`),
        so that whoever was cut off and asks again gets the same answer of the same rows.

        Raises:
            DpstreamError: rows cannot be read; nothing was shown, and the charge stands.
        """
        ...
