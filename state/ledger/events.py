"""The events of an account, and the hash chain that they form.

The events of an account are one append-only chain; `state.ledger.log` stores them, with all else
that an account has.  The first entry describes the account (`Created`); every later entry is a new
limit, a charge, the digest of a receipt, the id of a table, wider dimensions of its table, or what
a recovery closed.  An entry's digest covers the digest before it, so that an edited
entry, or one removed from the middle, is noticed, and the number and digest of the last entry
(`Head`) cover everything that was charged and answered.

A program that does not know a field or a kind of an entry refuses the whole account
(``forbid_unknown_fields``): a charge that is skipped could be spent again.

**Charges.**  A run is charged once, when it begins, before its first draw: the charge is named by
the run id that its store committed (or its execution drew) and by the epoch.  Another run on the
same data (a corrected input, the same statement on a grown table) has new noise and a new charge;
so has a further epoch of a run, which begins after a restore that cannot replay the input.
Ids of runs, accounts and tables are random (`new_run_id`, `new_id`): no key determines them.

**Regions.**  Only a charge of kind ``session`` says which points pay how much.  Boxes are packed
(edge by edge, int64, deflated, base64), because a batch can have thousands.  The account's chain
covers the packed text, and the order of the boxes is a part of it: a replay charges the same boxes
in the same order.
"""

import base64
import binascii
import hashlib
import math
import secrets
import time
import zlib
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from dpstream.accounting.arrays import Int64
from dpstream.accounting.composition import Parts
from dpstream.accounting.errors import PolicyError
from dpstream.accounting.limits import MAX_DIMENSIONS, MAX_QUERY_BOXES
from dpstream.accounting.plan.unit import UnitIdentity
from dpstream.accounting.regions.embedding import Embedding
from dpstream.accounting.regions.space import BudgetKind

#: ``closed``: the boxes are closed for ever, nothing is paid.
RegionKind = Literal[BudgetKind, "closed"]
#: Bytes that packed boxes may become: what is charged has pieces of its own beyond what is asked.
_MOST = 64 * MAX_QUERY_BOXES * MAX_DIMENSIONS * 16
#: What was run.
ChargeKind = Literal["stream", "choice", "sql", "session", "table", "workload", "frame", "keys"]
#: The limit of an account per unit: (epsilon, delta).
Limit = tuple[float, float]
#: The unit of a table whose records have budgets of their own.
RECORD = "record"
#: Characters of an id.
_ID = 16


class RegionCharge(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The charge of a session's entry, or its draw on an allotment that was charged before.

    Attributes:
        budget: the kind of budget.
        amount: charge of every point, in millionths; 0 where boxes are closed.
        charged: packed boxes that pay, snapped, disjoint (``boxes``).
        reads: packed boxes that the query may read, inside the boxes that pay (``read``).
        analyst: name of the analyst who asked.
        at: instant, microseconds since 1970; never earlier than that of the entry before.
        allotment: for a draw, run id of the allotment that paid for it, so that no boxes pay again;
            empty in the entry of an allotment; absent where the question itself pays.
    """

    budget: RegionKind
    amount: int
    charged: str
    reads: str
    analyst: str
    at: int
    allotment: str | msgspec.UnsetType = msgspec.UNSET

    @property
    def draws_on(self) -> str:
        """The run id of the allotment that it draws on; empty if it draws on none."""
        return "" if isinstance(self.allotment, msgspec.UnsetType) else self.allotment

    @property
    def allots(self) -> bool:
        """Return whether it is an allotment, which only pays for later draws."""
        return self.allotment == ""

    @classmethod
    def of(
        cls, budget: RegionKind, amount: int, boxes: Int64, read: Int64, analyst: str, at: int
    ) -> "RegionCharge":
        """Return a charge from boxes (k, d, 2) that pay and (m, d, 2) that are read."""
        charged = packed(boxes)
        reads = charged if read is boxes else packed(read)
        return cls(budget, amount, charged, reads, analyst, at)

    def with_boxes(self, boxes: Int64, read: Int64) -> "RegionCharge":
        """Return the same charge for other boxes (k, d, 2) that pay and (m, d, 2) that are read."""
        charged = packed(boxes)
        reads = charged if self.reads == self.charged else packed(read)
        return msgspec.structs.replace(self, charged=charged, reads=reads)

    @property
    def boxes(self) -> Int64:
        """Return (k, d, 2) int64, the boxes that pay.

        Raises:
            PolicyError: they differ from what was written.
        """
        return unpacked(self.charged)

    @property
    def read(self) -> Int64:
        """(m, d, 2) int64 disjoint boxes that the query may read; raises as ``boxes`` does."""
        return unpacked(self.reads)


def packed(boxes: Int64) -> str:
    """Return boxes as a text: their shape and their edges."""
    edges = np.ascontiguousarray(boxes.transpose(1, 2, 0), "<i8")
    data = zlib.compress(edges.tobytes(), 1)
    return f"{len(boxes)}x{boxes.shape[1]} {base64.b64encode(data).decode()}"


def unpacked(text: str) -> Int64:
    """Return the boxes of a text, edge by edge in memory.

    Raises:
        PolicyError: the text has another form.
    """
    try:
        shape, _, data = text.partition(" ")
        many, dimensions = (int(part) for part in shape.split("x"))
        size = many * dimensions * 16
        if not 0 <= size <= _MOST or not 0 < dimensions <= MAX_DIMENSIONS:
            raise ValueError
        unzip = zlib.decompressobj()
        edges = unzip.decompress(base64.b64decode(data, validate=True), size + 1)
        boxes = np.frombuffer(edges, "<i8").reshape(dimensions, 2, many)
    except (ValueError, binascii.Error, zlib.error):
        raise PolicyError(
            "account.path", "holds boxes of another form", "use the program that wrote them"
        ) from None
    return boxes.astype(np.int64, copy=False).transpose(2, 0, 1)


class Charge(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="event", tag="charge"
):
    """The amount that one run spends per unit of a data set; see ``accounting.composition``.

    Attributes:
        run_id, plan_hash: the run and its public plan (statement, question).
        identity: canonical text of the unit (`accounting.plan.unit`).
        periods: units that one person can have in the run, ``None`` where it has no end.
        together: the most of them whose effects add up, ``None``: all.
        epsilon, delta: the run's own guarantee.
        mu: Gaussian-DP parameter of its noise, if it is accounted for so.
        rho: zCDP parameter of its noise, if it is accounted for so; with neither the charge is a
            plain (epsilon, delta).
        regions: of a session: which points pay, and with what.
        threshold_delta: part of delta its thresholds use (C b).
        kind: what was run.
        at: when it was charged, microseconds since 1970, by the clock of whoever charged it. Absent
            before it is in an account, where ``regions`` has the instant, and in accounts of older
            builds.  A charge that a recovery adds has the instant of the charge that it repeats.
        label: public name of what was run: the job, the tables of a statement, the census tables;
            absent where it has no name.  A session's charge names its analyst instead.
        epoch: 0, or how often the run was restored without a replay.
        span: event times of all records that can change an output (`accounting.periods`), in
            microseconds from the first to before the second, ``None`` without an end; without a
            span the charge counts in every period of the account.
        takes: whether it takes its periods for good, as a first charge that only its own pair fits
            (`accounting.composition`); the account decides that.

    Raises:
        ValueError: a figure is negative, infinite or not a number.
    """

    run_id: str
    plan_hash: str
    identity: str
    epsilon: float
    delta: float
    mu: float | None
    threshold_delta: float
    kind: ChargeKind = "stream"
    epoch: int = 0
    periods: int | None = 1
    together: int | None = 1
    rho: float | None = None
    regions: RegionCharge | msgspec.UnsetType = msgspec.UNSET
    at: int | msgspec.UnsetType = msgspec.UNSET
    label: str | msgspec.UnsetType = msgspec.UNSET
    span: tuple[int, int | None] | None = None
    takes: bool = False

    def __post_init__(self) -> None:
        noise = (self.mu or 0.0, self.rho or 0.0)
        figures = (self.epsilon, *noise, self.delta, self.threshold_delta)
        if min(figures) < 0 or not math.isfinite(sum(figures)) or self.epoch < 0:
            raise ValueError("a charge is made of finite figures that are not negative")
        if self.mu is not None and self.rho is not None:
            raise ValueError("a charge has a mu or a rho, not both")
        if self.mu is None and self.rho is None and self.threshold_delta:
            raise ValueError("a plain charge has all its delta in delta")
        if 0 in (self.periods, self.together) or min(self.periods or 1, self.together or 1) < 1:
            raise ValueError("a person has at least one unit")
        if self.span is not None and self.span[1] is not None and self.span[0] >= self.span[1]:
            raise ValueError("a span ends after its beginning")

    @property
    def name(self) -> str:
        """The name of the charge within its data set: run id and epoch."""
        return self.run_id if self.epoch == 0 else f"{self.run_id}/{self.epoch}"

    @property
    def instant(self) -> int | None:
        """When it was charged, microseconds since 1970; ``None`` if it has no instant (``at``)."""
        at = self.at if isinstance(self.regions, msgspec.UnsetType) else self.regions.at
        return None if isinstance(at, msgspec.UnsetType) else at


class _Event(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="event"):
    """One of the events below."""


class Created(_Event, frozen=True, tag="created"):
    """The first entry.

    Attributes:
        id: random id of the account, 16 hexadecimal characters.
        data_set: name of the data set.
        unit: the privacy unit, which never changes.
        limit: (epsilon, delta) per unit; ``None``: each record has its own budget.
        parts: the division of the limit's delta (`composition.Limit`); ``None`` without a limit.
    """

    id: str
    data_set: str
    unit: UnitIdentity
    limit: Limit | None
    parts: Parts | None


class LimitChanged(_Event, frozen=True, tag="limit"):
    """The entry of a new limit, which holds from there on."""

    limit: Limit


class Received(_Event, frozen=True, tag="receipt"):
    """The entry that a charged request was answered.

    ``digest`` is of the receipt's bytes and its charge.
    """

    run_id: str
    digest: str


class Closed(_Event, frozen=True, tag="closed"):
    """The entry that charges without a receipt are never answered: a repeated question is
    charged.
    """

    run_ids: tuple[str, ...]


class TableNamed(_Event, frozen=True, tag="table"):
    """The entry that a table which the program writes belongs to the account."""

    id: str


class Widened(_Event, frozen=True, tag="widened"):
    """The entry of a wider space of the account's table, in which all earlier charges are embedded.

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


def text_of(event: Event) -> str:
    """Return the account's text of an event, whichever kind of number a caller used."""
    read = _DECODER.decode(msgspec.json.encode(event))
    return msgspec.json.encode(read, order="sorted").decode()


def chained(previous: str, text: str) -> str:
    """Return the digest of an entry, which covers that of the entry before it."""
    joined = "\0".join((previous, text)).encode()
    return hashlib.blake2b(joined, digest_size=16, person=b"dpstream-account").hexdigest()


def new_run_id() -> str:
    """Return 128 random bits: the name of a run, its charge and every noise node of it.

    It is committed before the first draw.  Every system takes its run ids from here, so that tests
    can fix them by one replacement; no argument, setting or environment variable does.
    """
    return secrets.token_hex(16)


def now_micros() -> int:
    """Return the machine's clock, microseconds since 1970; charges are dated by it."""
    return time.time_ns() // 1_000


def new_id() -> str:
    """Return 64 random bits: the lasting id of an account, or of a table of the program."""
    return new_run_id()[:16]


def damaged() -> PolicyError:
    """Return the error for an account that differs from what was written."""
    return PolicyError("account.path", "is damaged", "restore the account from a backup")


def refuse_damage(differs: bool) -> None:
    """Refuse an account that differs from what was written.

    Raises:
        PolicyError: the account differs.
    """
    if differs:
        raise damaged()
