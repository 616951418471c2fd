"""What a ledger holds of a run: its charge, and the hash chain that charges form.

A run is charged when it begins, before its first draw, and once: the charge is named by the
run id that its store committed (or its execution drew) and by the epoch.  Another run on the
same data (a corrected input, the same statement on a grown table) is fresh noise and a new
charge; so is a further epoch of a run, which a restore begins that cannot replay.

An entry's digest covers the digest before it, so that an edited entry, or one removed from the
middle, is noticed.  A program that does not know a field or a kind of an entry refuses the whole
ledger (``forbid_unknown_fields``): an entry that is skipped would be budget given back.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from dpstream.accounting.errors import PolicyError
from dpstream.accounting.figures import exact
from dpstream.accounting.plan.account import Account
from dpstream.state.ledger.region_charge import RegionCharge

#: What was run; ``run``: charged before kinds were recorded.
ChargeKind = Literal["run", "stream", "choice", "sql", "session", "table", "workload", "frame"]


class Charge(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one run spends per unit of a data set; see ``accounting.composition``.

    Attributes:
        run_id, plan_hash: the run and its public plan (statement, question).
        unit: the privacy unit in the words of entries from before there were identities.
        identity: canonical text of the unit (`accounting.plan.unit`), empty in such entries.
        periods: units that one person can have in the run, ``None`` where it has no end.
        together: the most of them whose effects add up, ``None``: all.
        alone: nothing is promised to several of them together.
        epsilon, delta: the run's own guarantee.
        mu: Gaussian-DP parameter of its noise, if it is accounted for so.
        rho: zCDP parameter of its noise, if it is accounted for so; with neither the charge is a
            plain (epsilon, delta).
        regions: of a session: which points pay, and with what.
        threshold_delta: part of delta its thresholds use (C b).
        kind: what was run.
        epoch: 0, or how often the run was restored without a replay.

    Raises:
        ValueError: a figure is negative, infinite or not a number.
    """

    run_id: str
    plan_hash: str
    unit: str
    epsilon: float
    delta: float
    mu: float | None
    threshold_delta: float
    kind: ChargeKind = "run"
    epoch: int = 0
    identity: str = ""
    periods: int | None = 1
    together: int | None = 1
    alone: bool = False
    rho: float | None = None
    regions: RegionCharge | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        noise = (self.mu or 0.0, self.rho or 0.0)
        figures = (self.epsilon, *noise, self.delta, self.threshold_delta)
        if not all(0 <= x < math.inf for x in figures) or self.epoch < 0:
            raise ValueError("a charge is made of finite figures that are not negative")
        if self.mu is not None and self.rho is not None:
            raise ValueError("a charge has a mu or a rho, not both")
        if self.mu is None and self.rho is None and self.threshold_delta:
            raise ValueError("a plain charge has all its delta in delta")
        if min(1 if n is None else n for n in (self.periods, self.together)) < 1:
            raise ValueError("a person has at least one unit")

    @property
    def name(self) -> str:
        """Names the charge within its data set: run id and epoch."""
        return self.run_id if self.epoch == 0 else f"{self.run_id}/{self.epoch}"

    @property
    def text(self) -> str:
        """What the ledger keeps of it."""
        return msgspec.json.encode(self, order="sorted").decode()

    @classmethod
    def read(cls, text: str) -> "Charge":
        """The charge of an entry's text.

        Raises:
            PolicyError: this program does not know its form.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, UnicodeError):
            raise PolicyError(
                "ledger.path", "holds an entry of another form", "use the program that wrote it"
            ) from None


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The end of the chain as someone saw it: number and digest of the last entry."""

    data_set: str
    seq: int
    digest: str

    def check(self, data_set: str, digest: str | None) -> None:
        """Refuse a ledger that is not this one, as old or newer.

        Args:
            data_set: that is to be charged; digest: of the entry of this number there.

        Raises:
            PolicyError: it lacks that entry, or another data set was charged.
        """
        if self.data_set != data_set:
            raise PolicyError(
                "ledger.data_set",
                "this run was charged to another data set",
                "name that data set again; other data needs a run of its own",
            )
        if self.seq and digest != self.digest:
            raise PolicyError(
                "ledger.path",
                "is an older or replaced ledger: entries that this run's store has seen are gone",
                "bring back the newest ledger of the data set",
            )


class Entry(NamedTuple):
    """One line of a ledger, for people; ``digest`` is its place in the chain."""

    seq: int
    data_set: str
    charge: Charge
    digest: str = ""


class Book:
    """The charges of one data set in memory, in order, with their running account."""

    def __init__(self) -> None:
        self.charges = list[Charge]()
        self.account = Account()
        self._names = dict[str, Charge]()

    def add(self, charge: Charge) -> None:
        """Add the next one."""
        self.charges.append(charge)
        self.account.add(charge)
        self._names[charge.name] = charge

    def find(self, name: str) -> Charge | None:
        """The charge of a name, ``None`` if there is none."""
        return self._names.get(name)

    def check(self, more: Sequence[Charge], epsilon: float, delta: float) -> None:
        """Refuse charges that would not be within a limit, whoever asks: a run, or a plan.

        Raises:
            PolicyError: they would be beyond it, or protect units whose costs do not add up.
        """
        kinds = {charge.regions is not msgspec.UNSET for charge in (*self.charges[:1], *more)}
        if len(kinds) > 1:
            raise PolicyError(
                "ledger.data_set",
                "a table whose records have budgets of their own protects another privacy unit "
                "than runs that protect all records of a person",
                "give the table a data set of its own: what both tell of a person adds up",
            )
        # A run per user is no mu-GDP run per (user, period): refused, or counted as several.
        if not self.account.within(more, epsilon, delta):
            raise PolicyError(
                "ledger.limit",
                f"the runs on this data set would together spend more than epsilon {exact(epsilon)}"
                f" at delta {exact(delta)} per unit ({len(self.charges)} runs are charged already)",
                "spend less, continue a run on its own store, or ask the data steward for a larger "
                "limit",
            )

    def cut(self, charges: int) -> None:
        """Take back all charges but the first so many."""
        for charge in self.charges[charges:]:
            del self._names[charge.name]
        del self.charges[charges:]
        self.account.cut(charges)


def chained(previous: str, data_set: str, text: str) -> str:
    """Digest of an entry, which covers that of the entry before it."""
    joined = "\0".join((previous, data_set, text)).encode(errors="surrogateescape")
    return hashlib.blake2b(joined, digest_size=16).hexdigest()
