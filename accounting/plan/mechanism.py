"""What a budget is computed from: promises and a resolved design, without source, time or schema.

A stream's plan is one way to such a mechanism.  A bounded job that has no timeline and no event
time makes one by itself, with one trigger and one window, and is calibrated by the same rules.
"""

from typing import Protocol

import msgspec

from dpstream.accounting.plan.design import Design
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.plan.privacy import Privacy


class Resolved(Protocol):
    """A plan or a mechanism: promises, and what they mean together."""

    @property
    def privacy(self) -> Privacy:
        """Epsilon, delta, C and the options of selection."""

    @property
    def design(self) -> Design:
        """What the settings mean together."""


class Mechanism(msgspec.Struct, frozen=True):
    """What ``accounting.budget.allocation`` divides a budget for.

    Attributes:
        privacy: epsilon, delta, C and the options of selection.
        design: what the settings mean together.
        windows: windows that all of a unit's pairs lie in, ``None`` for a stream without end.
        periods_met: the most privacy periods that one window can meet; 1 without periods.
        periods: units that one person can have; 1 without periods, ``None`` without an end.
    """

    privacy: Privacy
    design: Design
    windows: int | None = 1
    periods_met: int = 1
    periods: int | None = 1

    @property
    def once(self) -> bool:
        """Whether a key is tested a single time, in the one window there is."""
        return self.windows == 1 and self.design.tests == 1


def mechanism_of(plan: Plan) -> Mechanism:
    """The mechanism of a stream's plan."""
    line = plan.timeline
    windows = None if line.end is None else line.windows
    return Mechanism(plan.privacy, plan.design, windows, line.periods_met, line.periods)
