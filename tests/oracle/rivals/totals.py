"""Counts of public keys, given once: sd of a key's noise at (epsilon, delta).

A person has C records of one key each, so that the counts move by C in L1 and by sqrt(C) in L2;
with ``anywhere`` all C may fall on one key, and both are C.
"""

import math
from collections.abc import Callable, Iterator

from tests.oracle.rivals.laws import (
    discrete_staircase_sd,
    gaussian_mu,
    geometric_sd,
    laplace_sd,
    staircase_sd,
    truncated_geometric,
)

Rival = tuple[str, float]
_PURE: dict[str, Callable[[float], float]] = {
    "Laplace": laplace_sd,
    "geometric": geometric_sd,
    "staircase": staircase_sd,
}


def rivals(contributions: int, epsilon: float, delta: float, anywhere: bool) -> Iterator[Rival]:
    """Name and sd of each rival.

    With ``anywhere`` noise for a shift of C at epsilon: the geometric law at b = epsilon / C, the
    staircase at epsilon with its steps C wide.  Without, C shifts of 1 at epsilon / C each.
    """
    count = contributions
    for name, sd in _PURE.items():
        if name == "staircase" and anywhere:
            yield name, count * sd(epsilon)
        else:
            yield name, sd(epsilon / count)
    if anywhere:
        yield "discrete staircase", discrete_staircase_sd(epsilon, count)
    if delta == 0:
        return
    if not anywhere:
        law = truncated_geometric(epsilon / count, delta / count)
        yield "truncated geometric", law.sd
    shift = count if anywhere else math.sqrt(count)
    yield "Gaussian", shift / gaussian_mu(epsilon, delta)
