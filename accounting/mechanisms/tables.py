"""Tables of laws at 128 bits: thresholds between which a uniform means one integer.

A table of K values on either side has 2 K thresholds; a 128-bit uniform u means the value
``lowest`` plus the number of thresholds that are <= u.

* ``rounded``: thresholds are the CDF rounded to the nearest 2^-128.  Each moves at most 2^-129
  of probability, and the tails that are left out are smaller still: the total variation distance
  of a draw from its law is at most about (thresholds) * 2^-129.
* ``exact``: a real uniform with first bits u lies in [u, u + 1) 2^-128.  Thresholds are the CDF
  rounded up.  So only these u are open: the one just below each threshold, which holds an edge
  of the law, and 0 and 2^128 - 1, which hold its tails.  For them a sampler takes more bits
  (``laws.settle``) and is exact.
"""

from typing import NamedTuple

from dpstream.accounting.balls import precision
from dpstream.accounting.limits import MAX_SIGMA
from dpstream.accounting.mechanisms.laws import (
    DiscreteGaussianLaw,
    DiscreteLaplaceLaw,
    Law,
    RoundedGaussianLaw,
)

BITS = 128
FULL = 1 << BITS
_PRECISION = 256
#: A Laplace table has about 178 scales of entries, a Gaussian one 27 sds: no larger than that.
MAX_TABLE_SCALE = MAX_SIGMA * 27 / 178
#: Below these a value other than 0 has a probability of less than 2^-92, and a table is no use.
LEAST_TABLE_SCALE, LEAST_TABLE_SIGMA = 2.0**-6, 2.0**-3


class Table(NamedTuple):
    """Thresholds of a law in units of 2^-128, increasing, for the values from ``lowest`` on.

    Attributes:
        exact: whether the open uniforms must be settled with more bits.
    """

    law: Law
    thresholds: list[int]
    exact: bool

    @property
    def lowest(self) -> int:
        """The value below the first threshold."""
        return -(len(self.thresholds) // 2)


def rounded_gaussian(sigma: float) -> Table:
    """Table of the rounded Gaussian, 0 < sigma <= MAX_SIGMA.

    Raises:
        ValueError: sigma is outside this range.
    """
    if not 0 < sigma <= MAX_SIGMA:
        raise ValueError("sigma is outside the sampler's range")
    upper: list[int] = []
    with precision(_PRECISION):
        for tail in RoundedGaussianLaw(sigma).lower():
            value = _integer(tail * FULL + 0.5)
            if value == 0:
                break
            upper.append(value)
    # P[Z <= k] = 1 - P[Z > k]; the lower half mirrors the upper: k -> -k-1.
    thresholds = list(reversed(upper)) + [FULL - value for value in upper]
    return Table(RoundedGaussianLaw(sigma), thresholds, exact=False)


def discrete_laplace(scale: float) -> Table:
    """Exact table of the two-sided geometric law.

    Raises:
        ValueError: scale is not within LEAST_TABLE_SCALE .. MAX_TABLE_SCALE.
    """
    if not LEAST_TABLE_SCALE <= scale <= MAX_TABLE_SCALE:
        raise ValueError("scale is outside the sampler's range")
    return _exact(DiscreteLaplaceLaw(scale))


def discrete_gaussian(sigma: float) -> Table:
    """Exact table of the discrete Gaussian.

    Raises:
        ValueError: sigma is not within LEAST_TABLE_SIGMA .. MAX_SIGMA.
    """
    if not LEAST_TABLE_SIGMA <= sigma <= MAX_SIGMA:
        raise ValueError("sigma is outside the sampler's range")
    return _exact(DiscreteGaussianLaw(sigma))


def _exact(law: Law) -> Table:
    floors: list[int] = []
    with precision(_PRECISION):
        for tail in law.lower():
            value = _integer(tail * FULL)
            if value == 0:
                break
            floors.append(value)
    # f < 2^128 F < f + 1: rounded up, an edge is f + 1 and its mirror image 2^128 - f.
    thresholds = [f + 1 for f in reversed(floors)] + [FULL - f for f in floors]
    return Table(law, thresholds, exact=True)


def _integer(ball: object) -> int:
    integer = ball.floor().unique_fmpz()  # type: ignore[attr-defined]
    if integer is None:
        raise ArithmeticError("the precision does not decide a threshold")
    return int(integer)
