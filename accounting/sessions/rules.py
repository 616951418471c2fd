"""Rules that the steward of a table may change at any time: quotas of analysts, and how much of
an initial budget may be used by when.

Both are public, and decided on the ledger, the request and the instant of the charge alone.  They
only ever refuse what the points' budgets allow, so that no rule, and no change of one, weakens the
guarantee of a record.

**Quota.**  The most that one analyst may charge to ANY ONE point.  A name is what the program is
told: a quota shares budget among analysts who name themselves truly.

**Unlock.**  Of an initial budget b only floor(b min(1, share (1 + whole days since start))) is
usable, nothing before the start: the first analyst cannot take all.
"""

from fractions import Fraction

import msgspec

from dpstream.accounting.errors import UsageError
from dpstream.accounting.limits import MICROS_PER_SECOND
from dpstream.accounting.regions.amounts import MICRO, Number, exact, initial_of

_DAY = 86_400 * MICROS_PER_SECOND


class Quotas(msgspec.Struct, frozen=True, kw_only=True):
    """The most that an analyst may charge to one point, in millionths.

    Attributes:
        epsilon, rho: by analyst; default_epsilon, default_rho: of all others, ``None``: no quota.
    """

    epsilon: dict[str, int] = {}
    rho: dict[str, int] = {}
    default_epsilon: int | None = None
    default_rho: int | None = None

    def of(self, kind: str, analyst: str) -> int | None:
        """An analyst's quota of a kind of budget; ``None``: none."""
        if kind == "epsilon":
            return self.epsilon.get(analyst, self.default_epsilon)
        return self.rho.get(analyst, self.default_rho)


def quota_of(value: Number, field: str = "quota") -> int:
    """A quota in millionths, rounded down.

    Raises:
        UsageError: it is no number from 0 to ``limits.MAX_EPSILON``.
    """
    return initial_of(value, field)


class Unlock(msgspec.Struct, frozen=True, kw_only=True):
    """How much of an initial budget may be used by when.

    Attributes:
        start: microseconds since 1970; share: of the initial budget, for each day, as a decimal.
    """

    start: int
    share: float | str

    def __post_init__(self) -> None:
        if not 0 < exact(self.share, "unlock.share") <= 1:
            raise UsageError(
                "unlock.share", "must be above 0 and at most 1", "use 0.1 for ten days"
            )

    def usable(self, at: int) -> Fraction:
        """The share of every initial budget that may be used at an instant in microseconds."""
        if at < self.start:
            return Fraction()
        days = 1 + (at - self.start) // _DAY
        return min(Fraction(1), exact(self.share, "unlock.share") * days)


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """A steward's rules; by default there are none."""

    quotas: Quotas = Quotas()
    unlock: Unlock | None = None

    def usable(self, at: int) -> int:
        """Millionths of every initial budget that may be used at an instant, rounded down."""
        return MICRO if self.unlock is None else int(self.unlock.usable(at) * MICRO)
