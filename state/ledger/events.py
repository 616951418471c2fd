"""The events of an account, and the hash chain that they form.

An account is one append-only chain.  Its first entry describes the account (`Created`); every later
entry is a new limit, a charge, the digest of a receipt, the id of a table, wider dimensions of its
table, or what a recovery closed.  An entry's digest covers the digest before it, so that an edited
entry, or one removed from the middle, is noticed, and the number and digest of the last entry
(`Head`) cover everything that was charged and answered.

A program that does not know a field or a kind of an entry refuses the whole account
(``forbid_unknown_fields``): a charge that is skipped could be spent again.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from dpstream.accounting.errors import PolicyError
from dpstream.accounting.fields import FieldType
from dpstream.accounting.regions.embedding import Embedding
from dpstream.state.ledger.charges import Charge

#: The limit of an account per unit: (epsilon, delta).
Limit = tuple[float, float]
#: The unit of a table whose records have budgets of their own.
RECORD = "record"
#: Characters of an id.
_ID = 16


class _Event(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="event"):
    """One of the events below."""


class Created(_Event, frozen=True, tag="created"):
    """The first entry.

    Attributes:
        id: random id of the account, 16 hexadecimal characters.
        data_set: name of the data set.
        unit: name of the privacy unit.
        type: type of its ids.
        limit: (epsilon, delta) per unit; ``None``: each record has its own budget.
    """

    id: str
    data_set: str
    unit: str
    type: FieldType
    limit: Limit | None


class LimitChanged(_Event, frozen=True, tag="limit"):
    """A new limit, which holds from this entry on."""

    limit: Limit


class Received(_Event, frozen=True, tag="receipt"):
    """A charged request was answered; ``digest`` is of the receipt's bytes and its charge."""

    run_id: str
    digest: str


class Closed(_Event, frozen=True, tag="closed"):
    """Charges without a receipt that are never answered: asking again is charged again."""

    run_ids: tuple[str, ...]


class TableNamed(_Event, frozen=True, tag="table"):
    """A table that the program writes now belongs to the account."""

    id: str


class Widened(_Event, frozen=True, tag="widened"):
    """A wider space of the account's table, in which all charges are embedded from this entry on.

    Attributes:
        old, new: digests of the table's model.
        embedding: how the old space lies in the new one.
    """

    old: str
    new: str
    embedding: Embedding

    def charges(self, charges: Sequence[Charge]) -> list[Charge]:
        """Return the earlier charges as they count from here on.

        Raises:
            PolicyError: a charge is of another table.
        """
        regions = [charge.regions for charge in charges if charge.plan_hash == self.old]
        old = [region for region in regions if not isinstance(region, msgspec.UnsetType)]
        if len(old) < len(charges):
            raise PolicyError(
                "data_set",
                "was charged for other dimensions than those that are migrated",
                "name the table that the account was charged with",
            )
        paid = self.embedding.boxes([region.boxes for region in old])
        read = self.embedding.boxes([region.read for region in old])
        return [
            msgspec.structs.replace(charge, plan_hash=self.new, regions=region.with_boxes(*boxes))
            for charge, region, *boxes in zip(charges, old, paid, read, strict=True)
        ]


Event = Created | LimitChanged | Charge | Received | Closed | TableNamed | Widened
_DECODER = msgspec.json.Decoder(Event)  # `msgspec.json.decode` analyses a union at every call


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The end of an account's chain at some time: number and digest of the last entry."""

    id: str
    seq: int
    digest: str

    def check(self, id_: str, digest: str | None) -> None:
        """Refuse an account that is another one, or older than this head.

        Args:
            id_: id of the account that is to be charged.
            digest: digest of its entry with this head's number.

        Raises:
            PolicyError: the account lacks that entry, or another account was charged.
        """
        if self.id != id_:
            raise PolicyError(
                "account.id",
                "this run was charged in another account",
                "name that account again; other data needs a run of its own",
            )
        if digest != self.digest:
            raise PolicyError(
                "account.path",
                "is an older or replaced account: entries that this run's store has seen are gone",
                "bring back the newest account of the data set",
            )


class Entry(NamedTuple):
    """One entry of the chain; ``digest`` covers all entries up to it."""

    seq: int
    event: Event
    digest: str


def is_id(text: str) -> bool:
    """Return whether a text can be an id."""
    return len(text) == _ID and all(c in "0123456789abcdef" for c in text)


def name_of(event: Event) -> str | None:
    """Return the name of a charge, which can be charged once only; other events have none."""
    return event.name if isinstance(event, Charge) else None


def text_of(event: Event) -> str:
    """Return the account's text of an event, whichever kind of number a caller used."""
    read = _DECODER.decode(msgspec.json.encode(event))
    return msgspec.json.encode(read, order="sorted").decode()


def event_of(text: str) -> Event:
    """Return the event of an entry's text.

    Raises:
        PolicyError: this program does not know its form.
    """
    try:
        event: Event = _DECODER.decode(text)
    except (msgspec.MsgspecError, UnicodeError):
        raise PolicyError(
            "account.path", "holds an entry of another form", "use the program that wrote it"
        ) from None
    return event


def chained(previous: str, text: str) -> str:
    """Return the digest of an entry, which covers that of the entry before it."""
    joined = "\0".join((previous, text)).encode(errors="surrogateescape")
    return hashlib.blake2b(joined, digest_size=16, person=b"dpstream-account").hexdigest()
