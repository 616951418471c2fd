"""Numbers as unevaluated sums of two float64, compiled: about 104 bits.

Every operation is off by at most ERROR times its result (of a sum: times the sum of magnitudes).
Only IEEE additions and multiplications are used, without contraction (numba's default), so the
classical error-free transformations hold (Dekker 1971, Knuth 1969).  A pair is normalised: its
second number is at most half a unit in the last place of the first.
"""

from dpstream.accounting.compiled import njit

#: Relative error of an operation, generously: the proofs give a few times 2^-105.
ERROR = 2.0**-101

_SPLIT = float((1 << 27) + 1)


@njit(inline="always")
def two_sum(a: float, b: float) -> tuple[float, float]:  # pragma: no cover - compiled
    """a + b, and what its rounding lost, exactly."""
    total = a + b
    other = total - a
    return total, (a - (total - other)) + (b - other)


@njit(inline="always")
def two_product(a: float, b: float) -> tuple[float, float]:  # pragma: no cover - compiled
    """a b, and what its rounding lost, exactly (|a| and |b| below 2^990)."""
    product = a * b
    wide = _SPLIT * a
    a_high = wide - (wide - a)
    a_low = a - a_high
    wide = _SPLIT * b
    b_high = wide - (wide - b)
    b_low = b - b_high
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


@njit(inline="always")
def plus(
    a: float, a_low: float, b: float, b_low: float
) -> tuple[float, float]:  # pragma: no cover - compiled
    """Sum of two pairs."""
    total, rest = two_sum(a, b)
    rest += a_low + b_low
    high = total + rest
    return high, rest - (high - total)


@njit(inline="always")
def scaled(a: float, b: float, b_low: float) -> tuple[float, float]:  # pragma: no cover - compiled
    """A float times a pair."""
    product, rest = two_product(a, b)
    rest += a * b_low
    high = product + rest
    return high, rest - (high - product)


@njit(inline="always")
def times(
    a: float, a_low: float, b: float, b_low: float
) -> tuple[float, float]:  # pragma: no cover - compiled
    """Product of two pairs."""
    product, rest = two_product(a, b)
    rest += a * b_low + a_low * b
    high = product + rest
    return high, rest - (high - product)
