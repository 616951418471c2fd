"""Where a function of one variable is zero: Brent's method, bit for bit that of SciPy.

``scipy.optimize`` takes a quarter of a second to import, more than a whole plan, and what is needed
of it are these lines.  Roots enter digests of plans and the names of noise, so that the steps,
their order and both tolerances are those of ``scipy.optimize.brentq`` (Brent 1973, chapter 4; a
test compares the bits).  A root found here is a start: whoever relies on it checks it.
"""

from collections.abc import Callable

#: Relative tolerance and most steps, as SciPy's defaults.
_RELATIVE = 4 * 2.0**-52
_STEPS = 100


def brentq(function: Callable[[float], float], low: float, high: float, *, xtol: float) -> float:
    """A zero between ``low`` and ``high``, where the signs of the function differ.

    Args:
        xtol: absolute tolerance of the place, > 0.

    Raises:
        ValueError: the signs are the same.
        RuntimeError: no convergence within 100 steps.
    """
    before, now = float(low), float(high)
    f_before, f_now = float(function(before)), float(function(now))
    if f_before == 0:
        return before
    if f_now == 0:
        return now
    if (f_before < 0) == (f_now < 0):
        raise ValueError("f(low) and f(high) must have different signs")
    other = f_other = step_before = step = 0.0
    for _ in range(_STEPS):
        if f_before != 0 and f_now != 0 and (f_before < 0) != (f_now < 0):
            other, f_other = before, f_before
            step_before = step = now - before
        if abs(f_other) < abs(f_now):
            before, now, other = now, other, now
            f_before, f_now, f_other = f_now, f_other, f_now
        least = (xtol + _RELATIVE * abs(now)) / 2
        half = (other - now) / 2
        if f_now == 0 or abs(half) < least:
            return now
        if abs(step_before) > least and abs(f_now) < abs(f_before):
            tried = _interpolated((before, f_before), (now, f_now), (other, f_other))
            if 2 * abs(tried) < min(abs(step_before), 3 * abs(half) - least):
                step_before, step = step, tried
            else:
                step_before = step = half
        else:
            step_before = step = half
        before, f_before = now, f_now
        now += step if abs(step) > least else (least if half > 0 else -least)
        f_now = float(function(now))
    raise RuntimeError("no root found")


def _interpolated(
    before: tuple[float, float], now: tuple[float, float], other: tuple[float, float]
) -> float:
    """Step from ``now`` to the zero of the secant, or of the inverse parabola, through (x, f)."""
    (x_before, f_before), (x_now, f_now), (x_other, f_other) = before, now, other
    if x_before == x_other:
        return -f_now * (x_now - x_before) / (f_now - f_before)
    first = (f_before - f_now) / (x_before - x_now)
    second = (f_other - f_now) / (x_other - x_now)
    return -f_now * (f_other * second - f_before * first) / (second * first * (f_other - f_before))
