"""The account of a data set: what its runs cost together, kept up to date run by run.

``accounting.plan.unit.composed`` looks at every run each time.  An account keeps its sums: a run
whose unit is among those of the runs before it leaves their common unit as it is, so it costs the
same whether it is looked at alone or with all others (`tests/accounting/plan/test_account.py` holds
the two against each other).  A run with a unit that is new here is composed with all of them.
"""

import math
from collections.abc import Sequence

from dpstream.accounting.composition import Total, epsilon_spent, total_of
from dpstream.accounting.figures import up
from dpstream.accounting.limits import MAX_EPSILON
from dpstream.accounting.plan.unit import Charged, UnitIdentity, composed, cost_to
from dpstream.accounting.strength import MOST_DELTA


class Account:
    """Runs on one data set, in order; see the module."""

    def __init__(self) -> None:
        self.charges = list[Charged]()
        self._total: Total | None = None  # of all charges; None: not known yet
        self._common: UnitIdentity | None = None
        self._units = set[str]()

    def add(self, charge: Charged) -> None:
        """Charge one more run, whatever it costs."""
        if self._total is not None and self._joins(charge):
            self._total = self._total.plus(cost_to(self._common, charge))
        else:
            self._total = None
        self.charges.append(charge)

    def cut(self, runs: int) -> None:
        """Take back all runs but the first so many."""
        if runs < len(self.charges):
            del self.charges[runs:]
            self._total = None

    def within(self, more: Sequence[Charged], epsilon: float, delta: float) -> bool:
        """Whether all runs and some more together satisfy (epsilon, delta) per common unit.

        Raises:
            PolicyError: their costs do not add up.
        """
        return self._with(more).within(epsilon, delta)

    def cost_with(self, more: Sequence[Charged], epsilon: float, delta: float) -> str:
        """What all runs and some more together would spend, and per which unit, as a text.

        Args:
            epsilon, delta: of a limit: the cost is given at its delta, or, where no epsilon is
                enough there, at its epsilon.

        Raises:
            PolicyError: their costs do not add up.
        """
        total, unit = self._with(more), composed([*self.charges, *more]).unit_text
        try:
            at_delta = total.epsilon(delta)
            if math.isfinite(at_delta):
                return f"epsilon {up(at_delta)} at that delta, per {unit}"
            return f"delta {up(min(1.0, float(total.delta(epsilon))))} at that epsilon, per {unit}"
        except (ValueError, OverflowError):  # figures that floats do not hold
            return f"more than any figure here, per {unit}"

    def limit_for(
        self, more: Sequence[Charged], epsilon: float, delta: float
    ) -> tuple[float, float] | None:
        """The least limit found that has room for all runs and some more.

        Args:
            epsilon, delta: of the present limit.  Delta stays where some epsilon is enough; else it
                is what no epsilon pays for, and as much again for noise.

        Returns:
            ``None``: no limit that a person should set has room.

        Raises:
            PolicyError: their costs do not add up.
        """
        total = self._with(more)
        try:
            if not math.isfinite(epsilon_spent(total, delta)):
                noise = bool(total.gauss or total.rho)
                delta = float(up(float(total.extra) * (1 + noise), 3))
            epsilon = max(epsilon, float(up(epsilon_spent(total, delta), 4)))
            fits = total.within(epsilon, delta)
        except (ValueError, OverflowError):  # figures that floats do not hold
            return None
        usable = epsilon <= MAX_EPSILON and delta <= MOST_DELTA
        return (epsilon, delta) if fits and usable else None

    def total(self) -> Total:
        """What all runs cost their common unit together.

        Raises:
            PolicyError: their costs do not add up.
        """
        return self._with([])

    def _with(self, more: Sequence[Charged]) -> Total:
        if self._total is None:
            composition = composed(self.charges)
            self._total, self._common = total_of(composition.spends), composition.common
            self._units = {c.identity for c in self.charges}
        if not all(map(self._joins, more)):
            return total_of(composed([*self.charges, *more]).spends)
        total = self._total
        for charge in more:
            total = total.plus(cost_to(self._common, charge))
        return total

    def _joins(self, charge: Charged) -> bool:
        return charge.identity in self._units
