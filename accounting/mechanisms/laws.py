"""Laws of integer noise in ball arithmetic: lower half, exact inverse of the CDF, tables.

All laws are symmetric about 0, so the lower half says everything.  What each is used for, with
noise added to an integer query (mechanism.md section 5):

* ``RoundedGaussianLaw``: Z = round(N).  For integer q, round(q + N) = q + round(N), so q + Z is
  post-processing of the Gaussian mechanism and Gaussian DP holds for every shift, whatever the sd.
* ``DiscreteLaplaceLaw`` (two-sided geometric): P[Z = k] is proportional to e^(-|k| / scale).  A
  shift by s changes no probability by more than e^(s / scale): with L1 sensitivity s and scale
  s / epsilon it is epsilon-DP, with no delta, if it is sampled exactly.
* ``TruncatedGeometricLaw``: the same for |Z| <= k and never beyond.  It is no epsilon-DP mechanism:
  at its ends a shift makes values possible that were not, with chance P[Z = k].  Thresholds at k
  show none of the values below (``accounting.mechanisms.optimum``).
* ``DiscreteStaircaseLaw``: P[Z = k] falls by e^-b every L steps.  A shift by at most L changes no
  probability by more than e^b (``accounting.geometric``); a larger one may.
* ``DiscreteGaussianLaw``: P[Z = k] is proportional to e^(-k^2 / (2 sigma^2)).  It is
  (L2^2 / (2 sigma^2))-zCDP (Canonne, Kamath and Steinke 2020, theorem 4), but NOT Gaussian DP:
  for mu-GDP claims only the rounded Gaussian will do.

Total variation.  If draws come from a law whose total variation distance from the stated one is
at most t, then n draws on both neighbours cost at most (1 + e^epsilon) n t of delta.  That is
2^-100 and less for the tables, but it is not 0: pure DP and zCDP would become approximate.  So
these laws are always sampled exactly, by ``settle``.

**Tables of laws at 128 bits**: thresholds between which a uniform means one integer.  A table of K
values on either side has 2 K thresholds; a 128-bit uniform u means the value ``lowest`` plus the
number of thresholds that are <= u.

* ``rounded``: thresholds are the CDF rounded to the nearest 2^-128.  Each moves at most 2^-129
  of probability, and the tails that are left out are smaller still: the total variation distance
  of a draw from its law is at most about (thresholds) * 2^-129.
* ``exact``: a real uniform with first bits u lies in [u, u + 1) 2^-128.  Thresholds are the CDF
  rounded up.  So only these u are open: the one just below each threshold, which holds an edge
  of the law, and 0 and 2^128 - 1, which hold its tails.  For them a sampler takes more bits
  (`settle`) and is exact.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import flint

from dpstream.accounting.balls import bits_in_force, precision
from dpstream.accounting.limits import MAX_SIGMA

#: The first bits of a uniform and how many they are, of its first n + 1 draws.
Uniform = Callable[[int], tuple[int, int]]


class Law(Protocol):
    """A symmetric law on the integers.

    Its numbers are balls: intervals that hold the exact value, as narrow as the current precision.

    Attributes:
        label: sets the digests of its tables apart; at most 16 bytes, empty for the first law.
    """

    label: ClassVar[bytes]

    def lower(self) -> Iterator[Any]:
        """Yield P[Z <= -1], P[Z <= -2], and so on, for ever."""

    def invert(self, uniform: Any) -> int | None:
        """Return Z at a ball within [0, 1/2], or ``None`` where it holds more than one Z."""


@dataclass(frozen=True)
class RoundedGaussianLaw:
    """The law of round(N), with N a Gaussian of sd ``sigma``."""

    sigma: float
    label: ClassVar[bytes] = b""

    def lower(self) -> Iterator[Any]:
        """Yield P[Z <= -k] = erfc((2 k - 1) / (2 sqrt(2) sigma)) / 2."""
        twice, odd = 2 * flint.arb(self.sigma) * flint.arb(2).sqrt(), 1
        while True:
            yield (flint.arb(odd) / twice).erfc() / 2
            odd += 2

    def invert(self, uniform: Any) -> int | None:
        """Return -floor(sigma sqrt(2) erfinv(1 - 2 u) + 1/2): an edge has probability 0."""
        scale = flint.arb(self.sigma) * flint.arb(2).sqrt()
        return _negative((scale * (1 - 2 * uniform).erfinv() + flint.arb("0.5")).floor())


@dataclass(frozen=True)
class DiscreteLaplaceLaw:
    """The two-sided geometric law: P[Z = k] = (1 - q) / (1 + q) q^|k| with q = e^(-1 / scale)."""

    scale: float
    label: ClassVar[bytes] = b"discrete Laplace"

    def lower(self) -> Iterator[Any]:
        """Yield P[Z <= -k] = q^k / (1 + q)."""
        ratio = (-1 / flint.arb(self.scale)).exp()
        value = 1 / (1 + ratio)
        while True:
            value *= ratio
            yield value

    def invert(self, uniform: Any) -> int | None:
        """Return the largest k with u <= q^k / (1 + q), negated."""
        scale = flint.arb(self.scale)
        at_least = -uniform.log() - (1 + (-1 / scale).exp()).log()
        return _negative((scale * at_least).floor())


@dataclass(frozen=True)
class TruncatedGeometricLaw:
    """The truncated law P[Z = j] = q^|j| (1 - q) / (1 + q - 2 q^(k + 1)), |j| <= k = ``most``.

    q is as in `DiscreteLaplaceLaw`.
    """

    scale: float
    most: int
    label: ClassVar[bytes] = b"truncated geo"

    def lower(self) -> Iterator[Any]:
        """Yield P[Z <= -j] = (q^j - q^(k + 1)) / (1 + q - 2 q^(k + 1)), 0 beyond k."""
        scale = flint.arb(self.scale)
        for j in range(1, self.most + 1):
            yield (-flint.arb(j) / scale).exp() * self._up_to(self.most + 1 - j) / self._total()
        while True:
            yield flint.arb(0)

    def invert(self, uniform: Any) -> int | None:
        """Return the largest j with u <= P[Z <= -j], negated; an edge has probability 0."""
        scale = flint.arb(self.scale)
        beyond = (-flint.arb(self.most + 1) / scale).exp()
        return _negative((-scale * (uniform * self._total() + beyond).log()).floor())

    def _up_to(self, steps: int) -> Any:
        """1 - q^steps."""
        return -(-flint.arb(steps) / flint.arb(self.scale)).expm1()

    def _total(self) -> Any:
        """1 + q - 2 q^(k + 1) = (1 - q) + 2 q (1 - q^k), without a difference of like numbers."""
        ratio = (-1 / flint.arb(self.scale)).exp()
        return self._up_to(1) + 2 * ratio * self._up_to(self.most)


@dataclass(frozen=True)
class DiscreteStaircaseLaw:
    """The staircase law with P[|Z| = i L + j] ~ q^i for j < r and ~ q^(i + 1) for r <= j < L.

    q = e^(-L / scale), L = ``sensitivity`` and r = ``step``, 1 <= r <= L.
    """

    scale: float
    sensitivity: int
    step: int
    label: ClassVar[bytes] = b"staircase"

    def lower(self) -> Iterator[Any]:
        """Yield P[Z <= -k], from the sums of the values nearer to 0."""
        ratio, half = self._ratio(), self._half()
        beyond, weight = half, flint.arb(1)
        while True:
            for j in range(self.sensitivity):
                beyond -= weight if j < self.step else weight * ratio
                yield beyond / (2 * half - 1)
            weight *= ratio

    def invert(self, uniform: Any) -> int | None:
        """Return the largest k with u <= P[Z <= -k], negated; an edge has probability 0.

        Of weights that add up to S on one side (0 included), S q^i lie at i L or beyond it.
        """
        half = self._half()
        tail = uniform * (2 * half - 1)
        falls = ((half / tail).log() * flint.arb(self.scale) / self.sensitivity).floor()
        blocks = falls.unique_fmpz()
        if blocks is None:
            return None
        rest = half - tail * (blocks * self.sensitivity / flint.arb(self.scale)).exp()
        if rest < self.step:
            within = rest.floor()
        elif rest >= self.step:
            within = self.step + ((rest - self.step) / self._ratio()).floor()
        else:
            return None
        return _negative(within + blocks * self.sensitivity)

    def _ratio(self) -> Any:
        return (-flint.arb(self.sensitivity) / flint.arb(self.scale)).exp()

    def _half(self) -> Any:
        """S = (r + (L - r) q) / (1 - q)."""
        lower = -flint.arb(self.sensitivity) / flint.arb(self.scale)
        return (self.step + (self.sensitivity - self.step) * self._ratio()) / -lower.expm1()


@dataclass(frozen=True)
class DiscreteGaussianLaw:
    """The law with P[Z = k] ~ e^(-k^2 / (2 sigma^2)); ``sigma`` is a parameter, not the sd."""

    sigma: float
    label: ClassVar[bytes] = b"discrete Gauss"

    def lower(self) -> Iterator[Any]:
        """Yield tails of the series over its sum; the truncated rest widens the balls."""
        tails = self._tails()
        total = 1 + 2 * tails[0]
        for tail in tails:
            yield tail / total
        while True:
            yield flint.arb(0).union(tails[-1] / total)

    def invert(self, uniform: Any) -> int | None:
        """Return Z by comparison with each tail in turn; only for uniforms that a table does not
        settle.
        """
        last = 0
        for k, tail in enumerate(self.lower(), 1):
            if uniform > tail:
                return -last
            if not uniform < tail:
                return None
            last = k
        raise AssertionError("the tails never end")

    def _tails(self) -> list[Any]:
        """Sums of e^(-j^2 / (2 sigma^2)) over j >= k for k = 1, 2, ..."""
        twice = 2 * flint.arb(self.sigma) ** 2
        bits = bits_in_force() + 16
        terms = math.ceil(self.sigma * math.sqrt(2 * math.log(2) * bits)) + 1
        # From the first term that is left out on, each is at most this part of the one before.
        ratio = (-flint.arb(2 * terms + 3) / twice).exp()
        beyond = (-(flint.arb(terms + 1) ** 2) / twice).exp() / (1 - ratio)
        tail, tails = flint.arb(0).union(beyond), []
        for j in range(terms, 0, -1):
            tail += (-(flint.arb(j) ** 2) / twice).exp()
            tails.append(tail)
        return tails[::-1]


def settle(law: Law, uniform: Uniform) -> int:
    """Return Z at a real uniform of as many bits as it takes: the exact inverse of the law's CDF.

    Args:
        uniform: maps n to the uniform's first bits after n further draws, as (integer, bits).
    """
    further = 0
    while True:
        value, bits = uniform(further)
        upper = value >> (bits - 1)
        if upper:
            value = (1 << bits) - 1 - value
        with precision(2 * bits + 128):
            scale = flint.arb(2) ** bits
            integer = law.invert((flint.arb(value) / scale).union(flint.arb(value + 1) / scale))
        if integer is not None:
            return -integer if upper else integer
        further += 1


def _negative(ball: Any) -> int | None:
    integer = ball.unique_fmpz()
    return None if integer is None else -int(integer)


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
    """Return the table of the rounded Gaussian, 0 < sigma <= MAX_SIGMA.

    Raises:
        ValueError: sigma is outside this range.
    """
    if not 0 < sigma <= MAX_SIGMA:
        raise ValueError("sigma is outside the sampler's range")
    upper = _floors(RoundedGaussianLaw(sigma), 0.5)
    # P[Z <= k] = 1 - P[Z > k]; the lower half mirrors the upper: k -> -k-1.
    thresholds = list(reversed(upper)) + [FULL - value for value in upper]
    return Table(RoundedGaussianLaw(sigma), thresholds, exact=False)


def discrete_laplace(scale: float) -> Table:
    """Return the exact table of the two-sided geometric law.

    Raises:
        ValueError: scale is not within LEAST_TABLE_SCALE .. MAX_TABLE_SCALE.
    """
    if not LEAST_TABLE_SCALE <= scale <= MAX_TABLE_SCALE:
        raise ValueError("scale is outside the sampler's range")
    return _exact(DiscreteLaplaceLaw(scale))


def discrete_gaussian(sigma: float) -> Table:
    """Return the exact table of the discrete Gaussian.

    Raises:
        ValueError: sigma is not within LEAST_TABLE_SIGMA .. MAX_SIGMA.
    """
    if not LEAST_TABLE_SIGMA <= sigma <= MAX_SIGMA:
        raise ValueError("sigma is outside the sampler's range")
    return _exact(DiscreteGaussianLaw(sigma))


def _exact(law: Law) -> Table:
    floors = _floors(law)
    # f < 2^128 F < f + 1: rounded up, an edge is f + 1 and its mirror image 2^128 - f.
    thresholds = [f + 1 for f in reversed(floors)] + [FULL - f for f in floors]
    return Table(law, thresholds, exact=True)


def _floors(law: Law, more: float = 0.0) -> list[int]:
    """The floors of the lower tails, in units of 2^-128, up to the first 0.

    Args:
        more: is added to each tail before it is rounded down, in the same units.
    """
    with precision(_PRECISION):
        return list(
            itertools.takewhile(bool, (_integer(tail * FULL + more) for tail in law.lower()))
        )


def _integer(ball: object) -> int:
    integer = ball.floor().unique_fmpz()  # type: ignore[attr-defined]
    if integer is None:
        raise ArithmeticError("the precision does not decide a threshold")
    return int(integer)
