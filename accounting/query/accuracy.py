"""The least epsilon at which a question is as exact as asked, and its errors at other epsilons.

A plan states the half-width of each interval before a row is read, and the half-width never rises
when epsilon rises (`query.families`).  So the least epsilon is found by bisection on a public list
of numbers with three digits.  Nothing of it depends on a row: the epsilon that is found is a
parameter of the question like one that was written, and the same statement finds the same one.

Each family of noise has its own least epsilon; the smaller one is taken, and with it its family,
so that no account can choose one with a wider interval afterwards.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from dpstream.accounting.errors import UsageError
from dpstream.accounting.query.families import Families, outlook
from dpstream.accounting.query.grids import Gridded
from dpstream.accounting.query.plan import Family
from dpstream.accounting.tuning.reference import FACTORS

#: The least power of ten, and how many numbers the list has: from 0.001 to 999.
_LEAST, _NUMBERS = -5, 6 * 900


class Exactness(NamedTuple):
    """The least epsilon, and the family of noise that reaches the error with it."""

    epsilon: float
    family: Family


def least(at: Callable[[float], Families], limits: Mapping[str, float]) -> Exactness | None:
    """Return the least epsilon at which no interval is wider than asked.

    Args:
        at: returns the question with an epsilon.
        limits: the largest half-width of a 95% interval, by column; columns with given bounds.

    Returns:
        ``None``: no epsilon up to 999 reaches it.
    """
    at, options = functools.cache(at), list[Exactness]()
    for family in ("gaussian", "geometric"):

        def reached(number: int, family: Family = family) -> bool:
            option = _option(at, _epsilon(number), family)
            return option is not None and all(map(float.__le__, *_pairs(option, limits)))

        low, high = -1, _NUMBERS - 1
        if not reached(high):
            continue
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if reached(middle) else (middle, high)
        options.append(Exactness(_epsilon(high), family))
    return min(options, default=None)


def _epsilon(number: int) -> float:
    """Return a number of the list: three digits and a power of ten."""
    return float(f"{100 + number % 900}e{_LEAST + number // 900}")


def _option(at: Callable[[float], Families], epsilon: float, family: Family) -> Gridded | None:
    try:
        options = at(epsilon).options
    except UsageError:  # no noise of this size can be drawn
        return None
    return next((option for option in options if option.plan.mechanism == family), None)


def _pairs(option: Gridded, limits: Mapping[str, float]) -> tuple[list[float], list[float]]:
    """Return half-widths of limited columns, and their limits."""
    widths = {column["name"]: column["parts"][0]["within"] for column in outlook(option).columns}
    return [float(widths[name]) for name in limits], [float(limit) for limit in limits.values()]


def by_epsilon(
    at: Callable[[float], Families], epsilon: float, mechanism: Family
) -> Sequence[dict[str, Any]]:
    """Return the errors of a question at several epsilons, in its family of noise.

    Returns:
        For each of `reference.FACTORS` times ``epsilon``: that ``epsilon``, and the ``columns`` of
        `families.Outlook`; epsilons at which nothing can be drawn are left out.
    """
    rows = list[dict[str, Any]]()
    for factor in FACTORS:
        option = _option(at, factor * epsilon, mechanism)
        if option is not None:
            rows.append({"epsilon": factor * epsilon, "columns": outlook(option).columns})
    return rows
