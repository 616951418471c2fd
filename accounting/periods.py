"""What charges spend of each period of an account's unit, and whether one more is accepted.

The limit holds for every period separately: a charge is accepted if, **for every period of its
range**, a filter accepts the sum of all charges whose range contains that period
(`accounting.composition`).  The reason: two data sets that differ in one unit (one person's records
of one period) give the same input to every charge whose records lie in other periods, so such a
charge cannot tell them apart, whatever was answered before.  Different filters may accept
different periods, because each pair of neighbours differs in one period only.

The range of a charge contains every private record that can change one of its outputs, rounded
outward to whole periods (``Charged.span``).  A charge without a range, such as every question,
counts in all periods.  Later charges may be chosen by earlier answers, also by answers about other
periods; the theorems of the filters allow that.  There are infinitely many periods, but the sums
are equal between two borders of ranges, so a few pieces are enough to store them.

A first charge that no filter accepts, but whose own (epsilon, delta) is within the limit, takes all
periods of its range: every later charge in one of them is refused.  A charge is first if no earlier
charge counts in any period of its range.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable
from typing import Literal, NamedTuple

from dpstream.accounting.composition import (
    FilterName,
    Limit,
    Spend,
    Total,
    decimal_value,
    epsilon_spent,
)
from dpstream.accounting.errors import PolicyError
from dpstream.accounting.figures import up
from dpstream.accounting.gaussian import bisected
from dpstream.accounting.plan.unit import Charged, UnitIdentity, cost_to, periods_of


class Piece(NamedTuple):
    """Periods with equal sums.

    Attributes:
        total: sums of the charges that count in them.
        taken: whether a first charge has taken them, so that every later charge is refused.
    """

    total: Total
    taken: bool = False

    def over(self, limit: Limit) -> bool:
        """Return whether the charges exceed a limit; only a recovery or a lower limit causes it."""
        if self.taken:
            return self.total.spends > 1
        return not limit.accepting(self.total)


class Verdict(NamedTuple):
    """The account's decision on a charge.

    Attributes:
        accepted: whether it is accepted.
        reason: the filter that accepts it in the fullest period; ``first``: accepted because its
            own (epsilon, delta) is within the limit, and it takes its periods; ``taken``: refused
            because a first charge has taken one of its periods; ``room``: refused because in some
            period no filter accepts it.
        used: the share of the limit that is used in the fullest period, with this charge; above 1
            if it is refused.
        part: the filter, or the delta sum, that decides in the fullest period
            (`filters.Limit.deciding_part`).
    """

    accepted: bool
    reason: FilterName | Literal["first", "taken", "room"]
    used: float
    part: FilterName | Literal["delta_sum"]


class Spent(NamedTuple):
    """The sums of all periods of an account, as a value.

    Attributes:
        unit: the account's unit.
        borders: numbers of the periods at which a new piece begins, in rising order.
        pieces: one more than borders; the first has no beginning, and the last has no end.
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
            takes: whether it takes its periods, so that every later charge is refused there.

        Raises:
            PolicyError: it protects another unit, or nothing bounds its cost.
        """
        spend = cost_to(self.unit, charge).spend
        split = self._split(charge)
        first, behind = split._range(charge)
        charged = (
            Piece(piece.total.plus(spend, times), piece.taken or takes)
            for piece in split.pieces[first:behind]
        )
        return split._replace(pieces=(*split.pieces[:first], *charged, *split.pieces[behind:]))

    def pieces_of(self, charge: Charged) -> tuple[Piece, ...]:
        """Return the pieces that a charge counts in."""
        split = self._split(charge)
        first, behind = split._range(charge)
        return split.pieces[first:behind]

    def verdict(self, limit: Limit, charge: Charged) -> Verdict:
        """Return whether a charge is accepted; see the module.

        Raises:
            PolicyError: it protects another unit, or nothing bounds its cost.
        """
        spend, before = cost_to(self.unit, charge).spend, self.pieces_of(charge)
        fullest = max((piece.total.plus(spend) for piece in before), key=limit.used)
        used, part = limit.used(fullest), limit.deciding_part(fullest)
        accepting = limit.accepting(fullest)
        if any(piece.taken for piece in before):
            return Verdict(False, "taken", math.inf, part)
        if accepting:
            return Verdict(True, accepting[0], used, part)
        fits = spend.epsilon <= limit.epsilon and spend.delta <= limit.delta
        if fits and all(not piece.total.spends for piece in before):
            return Verdict(True, "first", 1.0, part)
        return Verdict(False, "room", used, part)

    def raised_limit(self, limit: Limit, charge: Charged) -> tuple[float, float] | None:
        """Return (epsilon, delta) of a raised limit that accepts a charge, nearly the least one.

        Delta stays the same where the delta sum fits, and is raised until it fits otherwise.

        Returns:
            The pair; ``None`` if no epsilon up to 2^30 times the present one is enough.
        """
        spend = cost_to(self.unit, charge).spend
        shares = [
            limit.delta_sum_share(piece.total.plus(spend)) for piece in self.pieces_of(charge)
        ]
        delta = limit.delta
        if max(shares) > 1:
            delta = float(up(delta * max(shares), 3))

        def accepts(epsilon: float) -> bool:
            raised = limit._replace(epsilon=epsilon, delta=delta)
            return self.verdict(raised, charge).accepted

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

    def fullest(self, limit: Limit, pieces: Iterable[Piece] | None = None) -> Piece:
        """Return the piece that uses the largest share of a limit.

        Args:
            pieces: the pieces to compare; ``None``: all of them.
        """

        def used(piece: Piece) -> float:
            return math.inf if piece.taken else limit.used(piece.total)

        return max(self.pieces if pieces is None else pieces, key=used)

    def further_charges(self, limit: Limit, charge: Charged) -> int:
        """Return how many more charges like this one are accepted, at most 2^40."""
        spend, pieces = cost_to(self.unit, charge).spend, self.pieces_of(charge)
        if any(piece.taken for piece in pieces):
            return 0
        first = self.verdict(limit, charge).reason == "first"
        return 1 if first else min(limit.further_charges(piece.total, spend) for piece in pieces)

    def _split(self, charge: Charged) -> "Spent":
        """Return the same sums, with borders at both ends of a charge's range."""
        borders, pieces = list(self.borders), list(self.pieces)
        for border in periods_of(self.unit, charge):
            if border is not None and border not in borders:
                index = bisect_left(borders, border)
                borders.insert(index, border)
                pieces.insert(index, pieces[index])
        return self._replace(borders=tuple(borders), pieces=tuple(pieces))

    def _range(self, charge: Charged) -> tuple[int, int]:
        """Return the first piece that a charge counts in, and the one behind the last.

        Both ends of its range must be borders.
        """
        first, behind = periods_of(self.unit, charge)
        begin = 0 if first is None else self.borders.index(first) + 1
        return begin, len(self.pieces) if behind is None else self.borders.index(behind) + 1


def person_spent(
    unit: UnitIdentity, charges: Iterable[Charged], delta: float
) -> tuple[float, float] | None:
    """Return (epsilon, delta) of one person over all periods, for charges fixed beforehand.

    It is reported beside a limit per period; no charge is refused because of it.

    Args:
        delta: part of delta for noise; the deltas of thresholds of all periods are added to it.

    Returns:
        The pair; ``None`` if the account has no periods.  Epsilon is infinite after a stream
        without end.
    """
    return None if unit.period is None else person_total(unit, charges, delta)


def person_total(
    unit: UnitIdentity, charges: Iterable[Charged], delta: float
) -> tuple[float, float]:
    """Return (epsilon, delta) of one person over all records, for charges fixed beforehand.

    Args:
        unit: of the account; delta: see `person_spent`.
    """
    person, total = UnitIdentity(unit.name, unit.type), Total()
    try:
        for charge in charges:
            total = total.plus(cost_to(person, charge).spend)
    except PolicyError:
        return math.inf, 1.0
    together = math.nextafter(float(total.extra + decimal_value(delta)), math.inf)
    return epsilon_spent(total, together), together


class _Question(NamedTuple):
    """A charge that is only planned, of a question about all records of a unit."""

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
    """The public figures of an account that a choice between families of noise uses.

    Attributes:
        limit, spent: the account's limit, and what its charges have spent.
        identity: unit that the question protects, as the account names it.
    """

    limit: Limit
    spent: Spent
    identity: UnitIdentity

    def further_charges(self, spend: Spend) -> int:
        """Return how many more questions of this cost the account accepts."""
        return self.spent.further_charges(self.limit, self._charge(spend, 1.0))

    def share(self, spend: Spend, factor: float = 1.0) -> float:
        """Return the share of the unused limit that a question takes, in the period where the
        share is largest.

        Args:
            factor: the question has this factor times its plain epsilon.
        """
        charge = self._charge(spend, factor)
        cost, pieces = cost_to(self.spent.unit, charge).spend, self.spent.pieces_of(charge)
        if any(piece.taken for piece in pieces):
            return math.inf
        return max(self.limit.share_of_rest(piece.total, cost) for piece in pieces)

    def equal_share(self, other: Spend, plain: Spend) -> float:
        """Return the factor of a plain spend's epsilon that gives it the share of another spend.

        Returns:
            At most 1: a plain spend whose share is not larger keeps its epsilon.  0 if the account
            has nothing left for plain spends, but has for the other one.
        """
        share = self.share(other)
        if self.share(plain) <= share:
            return 1.0
        if self.share(plain, 0.0) > share:
            return 0.0
        return bisected(lambda factor: self.share(plain, factor) > share, 0.0, 1.0, 40)[0]

    def _charge(self, spend: Spend, factor: float) -> _Question:
        return _Question(
            spend.epsilon * factor if spend.mu is None else spend.epsilon,
            spend.delta,
            spend.mu,
            spend.rho,
            spend.threshold_delta,
            self.identity.text,
        )
