"""What charges spend of each period of an account's unit, and whether one more is accepted.

Two data sets that differ in one unit (one person's records of one period) give every charge whose
records lie in other periods the same input, so that such a charge cannot tell them apart whatever
was answered before.  So the limit is kept for every period by itself: a charge is accepted if **for
every period of its range** a filter accepts the sum of all charges whose range has that period
(`accounting.filters`).  Different periods may be accepted by different filters, since each pair of
neighbours differs in one of them.

A range holds every private record that can change one of the charge's outputs, rounded outward to
whole periods (``Charged.span``); a charge without one counts in all periods, as every question
does.  Which later charges are made may depend on earlier answers, also on those about other
periods; the theorems of the filters allow that.  Periods are infinitely many, but the sums are
equal between two borders of ranges, so that few pieces hold them all.

A first charge that only its own (epsilon, delta) fits takes all periods of its range for good.  It
is first if no charge before it counts in any of them.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable
from typing import Literal, NamedTuple

from dpstream.accounting.composition import Spend, Total, epsilon_spent, written
from dpstream.accounting.errors import PolicyError
from dpstream.accounting.figures import up
from dpstream.accounting.filters import FilterName, Limit
from dpstream.accounting.gaussian import bisected
from dpstream.accounting.plan.unit import Charged, UnitIdentity, cost_to, periods_of


class Piece(NamedTuple):
    """Periods with equal sums.

    Attributes:
        total: of the charges that count in them.
        taken: whether a first charge has taken them for good.
    """

    total: Total
    taken: bool = False

    def over(self, limit: Limit) -> bool:
        """Return whether the charges exceed a limit, as only a recovery or a lower limit can do."""
        if self.taken:
            return self.total.spends > 1
        return not limit.accepting(self.total)


class Verdict(NamedTuple):
    """The account's decision on a charge.

    Attributes:
        accepted: whether it is accepted.
        reason: the filter that accepts it in the period of least room; ``first``: its own pair
            fits, and it takes its periods for good; ``taken``: refused, a first charge has taken
            one of its periods; ``room``: refused, in some period no filter has room.
        used: the largest share of the limit that its periods use with it; above 1 if refused.
        part: what decides in the period of least room: a filter or the pot
            (`filters.Limit.scarcest`).
    """

    accepted: bool
    reason: FilterName | Literal["first", "taken", "room"]
    used: float
    part: FilterName | Literal["pot"]


class Spent(NamedTuple):
    """The sums of all periods of an account, as a value.

    Attributes:
        unit: the account's.
        borders: numbers of the periods at which a new piece begins, rising.
        pieces: one more than borders; the first reaches back without end, the last onward.
    """

    unit: UnitIdentity
    borders: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @classmethod
    def nothing(cls, unit: UnitIdentity, order: float) -> "Spent":
        """Return the sums before the first charge.

        Args:
            order: of the account's Renyi filter.
        """
        return cls(unit, (), (Piece(Total(order=order)),))

    def plus(self, charge: Charged, times: int = 1, takes: bool = False) -> "Spent":
        """Return the sums with one more charge, or several that are alike.

        Args:
            takes: whether it takes its periods for good.

        Raises:
            PolicyError: it protects another unit, or nothing bounds its cost.
        """
        spend = cost_to(self.unit, charge).spend
        split = self._split(charge)
        first, behind = split._range(charge)
        more = (
            Piece(piece.total.plus(spend, times), piece.taken or takes)
            for piece in split.pieces[first:behind]
        )
        return split._replace(pieces=(*split.pieces[:first], *more, *split.pieces[behind:]))

    def of(self, charge: Charged) -> tuple[Piece, ...]:
        """Return the pieces that a charge counts in."""
        split = self._split(charge)
        first, behind = split._range(charge)
        return split.pieces[first:behind]

    def verdict(self, limit: Limit, charge: Charged) -> Verdict:
        """Return whether a charge is accepted; see the module.

        Raises:
            PolicyError: it protects another unit, or nothing bounds its cost.
        """
        spend, before = cost_to(self.unit, charge).spend, self.of(charge)
        worst = max((piece.total.plus(spend) for piece in before), key=limit.used)
        used, part, accepting = limit.used(worst), limit.scarcest(worst), limit.accepting(worst)
        if any(piece.taken for piece in before):
            return Verdict(False, "taken", math.inf, part)
        if accepting:
            return Verdict(True, accepting[0], used, part)
        fits = spend.epsilon <= limit.epsilon and spend.delta <= limit.delta
        if fits and all(not piece.total.spends for piece in before):
            return Verdict(True, "first", 1.0, part)
        return Verdict(False, "room", used, part)

    def raised(self, limit: Limit, charge: Charged) -> tuple[float, float] | None:
        """Return nearly the least (epsilon, delta) of a raised limit that accepts a charge.

        Delta stays where the pot has room, and else grows until it has.

        Returns:
            ``None``: none of up to 2^30 times the epsilon does.
        """
        totals = [piece.total.plus(cost_to(self.unit, charge).spend) for piece in self.of(charge)]
        delta, pots = limit.delta, [limit.pot_share(total) for total in totals]
        if max(pots) > 1:
            delta = float(up(delta * max(pots), 3))

        def accepts(epsilon: float) -> bool:
            more = limit._replace(epsilon=epsilon, delta=delta)
            return self.verdict(more, charge).accepted

        if not 0 < delta < 1:
            return None
        high = limit.epsilon
        for _ in range(30):
            if accepts(high):
                break
            high *= 2
        else:
            return None
        if high > limit.epsilon:
            high = bisected(accepts, limit.epsilon, high, 40)[1]
        epsilon = max(limit.epsilon, float(up(high, 4)))
        return (epsilon, delta) if accepts(epsilon) else None

    def most(self, limit: Limit, pieces: Iterable[Piece] | None = None) -> Piece:
        """Return the piece that uses the largest share of a limit.

        Args:
            pieces: among these; ``None``: among all.
        """

        def used(piece: Piece) -> float:
            return math.inf if piece.taken else limit.used(piece.total)

        return max(self.pieces if pieces is None else pieces, key=used)

    def holds(self, limit: Limit, charge: Charged) -> int:
        """Return how many more charges like this one are accepted, at most 2^40."""
        spend, pieces = cost_to(self.unit, charge).spend, self.of(charge)
        if any(piece.taken for piece in pieces):
            return 0
        first = self.verdict(limit, charge).reason == "first"
        return 1 if first else min(limit.holds(piece.total, spend) for piece in pieces)

    def _split(self, charge: Charged) -> "Spent":
        """The same sums, with borders at both ends of a charge's range."""
        borders, pieces = list(self.borders), list(self.pieces)
        for border in periods_of(self.unit, charge):
            if border is not None and border not in borders:
                at = bisect_left(borders, border)
                borders.insert(at, border)
                pieces.insert(at, pieces[at])
        return self._replace(borders=tuple(borders), pieces=tuple(pieces))

    def _range(self, charge: Charged) -> tuple[int, int]:
        """Which pieces a charge counts in, where its range has borders."""
        first, behind = periods_of(self.unit, charge)
        begin = 0 if first is None else self.borders.index(first) + 1
        return begin, len(self.pieces) if behind is None else self.borders.index(behind) + 1


def person_spent(
    unit: UnitIdentity, charges: Iterable[Charged], delta: float
) -> tuple[float, float] | None:
    """Return (epsilon, delta) of a person of all periods, for charges fixed beforehand.

    It is reported beside a limit per period, and nothing is refused by it.

    Args:
        delta: for noise; thresholds of all periods come on top.

    Returns:
        ``None``: the account has no periods; infinite after a stream without end.
    """
    if unit.period is None:
        return None
    person, total = UnitIdentity(unit.name, unit.type), Total()
    try:
        for charge in charges:
            total = total.plus(cost_to(person, charge).spend)
    except PolicyError:
        return math.inf, 1.0
    together = math.nextafter(float(total.extra + written(delta)), math.inf)
    return epsilon_spent(total, together), together


class _Question(NamedTuple):
    """A charge that is not made yet, about any records of a unit."""

    epsilon: float
    delta: float
    mu: float | None
    rho: float | None
    threshold_delta: float
    identity: str
    periods: int | None = 1
    together: int | None = 1
    span: tuple[int, int | None] | None = None


class Room(NamedTuple):
    """The public part of an account that a choice between families of noise uses.

    Attributes:
        limit, spent: of the account.
        identity: unit that the question protects, as the account names it.
    """

    limit: Limit
    spent: Spent
    identity: UnitIdentity

    def holds(self, spend: Spend) -> int:
        """Return how many more questions of this cost the account accepts."""
        return self.spent.holds(self.limit, self._charge(spend, 1.0))

    def share(self, spend: Spend, part: float = 1.0) -> float:
        """Return the share of what is left that a question takes, in the period where it is most.

        Args:
            part: of its plain epsilon.
        """
        charge = self._charge(spend, part)
        cost, pieces = cost_to(self.spent.unit, charge).spend, self.spent.of(charge)
        if any(piece.taken for piece in pieces):
            return math.inf
        return max(self.limit.share_left(piece.total, cost) for piece in pieces)

    def equal_share(self, other: Spend, plain: Spend) -> float:
        """Return the factor of a plain spend's epsilon at which its share is that of another spend.

        Returns:
            At most 1: a spend whose share is not larger stays as it is.  0 where nothing is left
            for plain spends, and something for the other one.
        """
        share = self.share(other)
        if self.share(plain) <= share:
            return 1.0
        if self.share(plain, 0.0) > share:
            return 0.0
        return bisected(lambda part: self.share(plain, part) > share, 0.0, 1.0, 40)[0]

    def _charge(self, spend: Spend, part: float) -> _Question:
        return _Question(
            spend.epsilon * part if spend.mu is None else spend.epsilon,
            spend.delta,
            spend.mu,
            spend.rho,
            spend.threshold_delta,
            self.identity.text,
        )
