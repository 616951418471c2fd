"""Public figures and times as text: a guarantee is never shown smaller than it is.

A figure that says how much may be learnt or spent is shortened with ``up``, one that says how
much is proven or left with ``down``.  Both round the number as a person writes it (its shortest
decimal form), so 0.1 stays 0.1.  Numbers of no guarantee are shown as a person reads them best
(`human`).
"""

import math
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal

from dpstream.accounting.limits import MICROS_PER_SECOND


def up(figure: float, digits: int = 6) -> str:
    """Return a figure with at most ``digits`` digits, never below itself."""
    return _shortened(figure, digits, ROUND_CEILING)


def down(figure: float, digits: int = 6) -> str:
    """Return a figure with at most ``digits`` digits, never above itself."""
    return _shortened(figure, digits, ROUND_FLOOR)


def exact(figure: float) -> str:
    """Return a figure as short as it can be written without changing it."""
    short = f"{figure:g}"
    return short if float(short) == figure else repr(float(figure))


def decimal_text(number: float) -> str:
    """Return a number as a decimal without an exponent: ``0.00001``, ``1000000``."""
    text = f"{Decimal(repr(float(number))):f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _shortened(figure: float, digits: int, rounding: str) -> str:
    if not math.isfinite(figure):
        return f"{figure:g}"
    rounded = Context(prec=digits, rounding=rounding).create_decimal(Decimal(repr(float(figure))))
    return f"{float(rounded):.{digits}g}"


def guarantee_pair(
    epsilon: float, delta: float, mu: float | None = None, digits: tuple[int, int] = (6, 6)
) -> str:
    """Return an (epsilon, delta) guarantee as text, never stronger than it is.

    Args:
        epsilon, delta: of the guarantee.
        mu: of Gaussian differential privacy, where the guarantee has one; four digits are shown.
        digits: significant digits of epsilon and of delta.

    Returns:
        ``(1, 1e-09)``, or ``(1, 1e-09), mu 0.2129``.
    """
    pair = f"({up(epsilon, digits[0])}, {up(delta, digits[1])})"
    return pair if mu is None else f"{pair}, mu {up(mu, 4)}"


def left_text(left: Mapping[str, float]) -> str:
    """Return the part of an account that is left for one more question, as text.

    Args:
        left: ``epsilon`` of noise without delta, ``mu`` of Gaussian noise, ``rho`` of zCDP: each
            if nothing else is charged any more; and ``delta`` of thresholds.
    """
    return (
        f"a plain epsilon {down(left['epsilon'])}, Gaussian noise of mu {down(left['mu'], 4)}, or "
        f"zCDP of rho {down(left['rho'], 4)}; thresholds of delta {down(left['delta'], 4)}"
    )


def duration(micros: int) -> str:
    """Return a length of time as exact text, in the largest unit that divides it."""
    names = (("day", 86400), ("hour", 3600), ("minute", 60), ("second", 1))
    for name, seconds in names:
        number, rest = divmod(micros, seconds * MICROS_PER_SECOND)
        if number and not rest:
            return f"{number} {name}{'s' if number != 1 else ''}"
    return f"{micros} microseconds"


EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def moment_of(micros: int) -> datetime:
    """Return the datetime of microseconds since 1970.

    Raises:
        OverflowError: no such date in Python's calendar.
    """
    return EPOCH + timedelta(microseconds=int(micros))


def time_text(moment: datetime) -> str:
    """Return a time as RFC 3339 has it: ``2013-01-01T05:00:00Z``; local without its offset."""
    return moment.isoformat().replace("+00:00", "Z")


def second_text(micros: int) -> str:
    """Return an instant of microseconds since 1970, to the second, as RFC 3339 has it."""
    return time_text(moment_of(micros - micros % 1_000_000))


def human(number: float | None) -> str:
    """Return a number with three significant digits: ``12,346``, ``4.57``, ``1e-9``."""
    if number is None or not math.isfinite(number):
        return "–"
    size = abs(number)
    if size == 0:
        return "0"
    if size < 1e-3 or size >= 1e12:
        digits, exponent = f"{number:.2e}".split("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"
    if size < 1:
        return f"{number:.3g}"
    places = 0 if size >= 100 else 1 if size >= 10 else 2
    text = f"{number:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def human_up(number: float | None) -> str:
    """Return ``human`` of a figure of the guarantee: never below itself."""
    return human(number if number is None else float(up(number, 3)))


def percent(part: float) -> str:
    """Return a share as text: ``12.3 %``."""
    return f"{100 * part:.1f} %"
