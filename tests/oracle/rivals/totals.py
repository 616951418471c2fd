"""Counts and sums of public keys, given once: sd of a key's noise at (epsilon, delta).

A person has C records of one key each that add at most L to it, so that what is given moves by C L
in L1 and by sqrt(C) L in L2; with ``anywhere`` all C may fall on one key, and both are C L.  A
staircase of width L loses b for each record whatever it adds, at most C b of all of them, however
they fall: b = epsilon / C.  (One of width C L at epsilon would lose epsilon for each of C keys.)
"""

import math
from collections.abc import Iterator

from tests.oracle.rivals.laws import (
    discrete_staircase_sd,
    gaussian_mu,
    geometric_sd,
    laplace_sd,
    staircase_sd,
    truncated_geometric,
)

Rival = tuple[str, float]


def rivals(
    contributions: int, epsilon: float, delta: float, anywhere: bool, most: int = 1
) -> Iterator[Rival]:
    """Name and sd of each rival.

    Args:
        most: L, a whole number.
    """
    b = epsilon / contributions
    yield "Laplace", most * laplace_sd(b)
    yield "geometric", geometric_sd(b / most)
    yield "staircase", most * staircase_sd(b)
    yield "discrete staircase", discrete_staircase_sd(b, most)
    if delta == 0:
        return
    if most == 1:
        yield "truncated geometric", truncated_geometric(b, delta / contributions).sd
    shift = contributions if anywhere else math.sqrt(contributions)
    yield "Gaussian", most * shift / gaussian_mu(epsilon, delta)
