"""Amounts of budget in whole millionths: charges are rounded up, initial budgets down.

An amount is an integer of micro-epsilon or micro-rho.  Integers add up exactly, in any order and
on any machine, so that every reader of a ledger holds the same figures.  A number stands for the
decimal that it is written as (0.1 is one tenth, not the binary fraction beside it), and the
integer that a charge becomes is the budget that the noise must be made for, never the number that
was asked for: then nothing costs more than what was charged.

**Rounding only over-charges.**  For a wish w and an initial budget b, ceil(w) >= w and
floor(b) <= b: if the sum of ceil(w_i) is at most floor(b), that of the w_i is at most b.
"""

import math
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import TypeGuard

import numpy as np

from dpstream.accounting import limits
from dpstream.accounting.arrays import Bool, Float64, Int64
from dpstream.accounting.errors import UsageError

MICRO = 1_000_000
#: The largest amount, in millionths.
MOST = int(limits.MAX_EPSILON) * MICRO
#: What points that are closed for ever have spent: no sum of charges is above the largest budget,
#: so that a point which spent all of it stays open to what it paid for.
CLOSED = MOST + 1

Number = int | float | str | Decimal | Fraction


def exact(value: Number, field: str, step: Number | None = None) -> Fraction:
    """Return a number as the decimal that it is written as.

    The decimal of a float has at most 17 digits, so for a multiple of a power of two it may differ
    from the float, and bounds that are whole steps of such a grid would be a step short.  So a
    float that is a whole number of steps of a power of two is returned exactly.

    Args:
        step: of the grid that the number is read for, the number itself if it is the step.

    Raises:
        UsageError: it is no number, infinite or NaN.
    """
    try:
        if _is_power_of_two(step) and isinstance(value, float) and math.isfinite(value):
            number_of_steps = Fraction(value) / Fraction(step)
            if number_of_steps.denominator == 1:
                return Fraction(value)
        if isinstance(value, int | Fraction) and not isinstance(value, bool):
            return Fraction(value)
        number = Decimal(str(value))
        if number.is_finite():
            return Fraction(number)
    except InvalidOperation:
        pass
    raise UsageError(field, "must be a finite number", "write a decimal such as 0.1")


def _is_power_of_two(step: Number | None) -> TypeGuard[int | float]:
    return isinstance(step, int | float) and step > 0 and math.frexp(step)[0] == 0.5


def charge_of(value: Number, field: str = "budget") -> int:
    """Return a charge in millionths, rounded up.

    Raises:
        UsageError: it is not above 0, above ``limits.MAX_EPSILON``, or no number.
    """
    amount = math.ceil(exact(value, field) * MICRO)
    check_amount(amount, field)
    return amount


def check_amount(amount: int, field: str = "budget") -> None:
    """Refuse a charge in millionths that is none.

    Raises:
        UsageError: see above.
    """
    if isinstance(amount, bool) or not isinstance(amount, int | np.integer):
        raise UsageError(field, "must be a whole number of millionths", "use charge_of")
    if not 0 < amount <= MOST:
        raise UsageError(
            field,
            f"must be above 0 and at most {limits.MAX_EPSILON:g}",
            "ask for a budget in that range",
        )


def initial_of(value: Number, field: str = "initial budget") -> int:
    """Return an initial budget in millionths, rounded down.

    Raises:
        UsageError: it is negative, above ``limits.MAX_EPSILON``, or no number.
    """
    amount = math.floor(exact(value, field) * MICRO)
    if not 0 <= amount <= MOST:
        raise UsageError(
            field, f"must be 0 to {limits.MAX_EPSILON:g}", "give budgets in that range"
        )
    return amount


def initials_of(values: Float64) -> tuple[Int64, Bool]:
    """Return (n,) initial budgets in millionths, rounded down, and (n,) whether a record has one.

    A budget above ``limits.MAX_EPSILON`` (an infinite one too) is that; a negative or missing one
    (NaN) is none, 0.  Every other one is the largest m of which m / 10^6, as a float, is not
    above the value: of up to 15 digits no two decimals are one float, so it is that of the
    decimal.

    Args:
        values: (n,) float64.

    Returns:
        (n,) int64 and (n,) bool.
    """
    given = values >= 0
    value = np.where(given, np.minimum(values, limits.MAX_EPSILON), 0.0)
    micro = np.floor(value * MICRO)
    micro -= micro / MICRO > value
    micro += (micro + 1) / MICRO <= value
    return micro.astype(np.int64), given
