"""Both steps of a group in one estimate, by least squares: less error at the same cost.

The published method measures a group's total in step 1, chooses the detail by it, and throws it
away; the total that it publishes is the sum of n noisy cells.  Let y be the total of step 1, of
noise variance u, and c_1 .. c_n the cells, each of variance v.  The linear unbiased estimate of
least variance of the total x is

    T = S + w (y - S),    S = sum c_i,    w = n v / (u + n v),

of variance n v (1 - w), and that of a cell is c_i + (T - S) / n: what the total has moved, spread
evenly.  A sum of k cells has variance k v (1 - k w / n).  Nothing but released numbers is used, so
it is post-processing and costs nothing.

**Whole numbers.**  D = floor(w (y - S) + 1/2) is added to the total, and the cells share it: with
q = floor(D / n) each takes q, and the first D - n q of them in public order one more.  The order
alternates between the sexes.  So the published total is exactly the sum of the published cells,
and a sex's margin the sum of its cells; rounding adds at most 1/2 to a total and 1 to a cell.

**Counts below 0.**  Where they may not be published, each figure (total, margin, cell) that is
below 0 becomes 0 after the estimate.  No figure comes further from the truth by it, and a total is
then not always the sum of its cells: clipping first, as the published method does, would add a
bias that grows with the number of empty cells.

**Bias.**  T is unbiased over all noise.  Given the detail it is not: a group came to a detail
*because* y lay between two thresholds, and w of y's conditional error stays in T.  ``bias`` is that
conditional mean, exactly.  It is 0 far from thresholds, and near one it pulls estimates of groups
that were lifted over it up, and of those that fell below it down.  The published method has no such
bias, because its cells are drawn after the choice.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.tabulation import margins
from dpstream.accounting.tabulation.margins import Chances, chances, least_margin, plus, summed
from dpstream.accounting.tabulation.parameters import Parameters
from dpstream.accounting.tabulation.scales import Noise


class Estimates(NamedTuple):
    """Published figures of groups of one detail.

    Attributes:
        total: (g,); sexes: (g, 2), ``None`` of detail 0; cells: (g, n).
    """

    total: Int64
    sexes: Int64 | None
    cells: Int64


def weight(first: Noise, detail: Noise, cells: int) -> float:
    """w, the weight of step 1's total against the sum of ``cells`` cells."""
    u, v = chances(first).variance, chances(detail).variance
    return cells * v / (u + cells * v) if v else 0.0


def combine(first: Int64, cells: Int64, weight: float, *, allow_negative: bool) -> Estimates:
    """Estimates of some groups of one detail.

    Args:
        first: (g,) noisy totals of step 1.
        cells: (g, n) noisy cells, n = 1 or sex-major and even; as measured, so not clipped.
        weight: w of this level and detail.
        allow_negative: whether figures below 0 are published.
    """
    groups, n = cells.shape
    apart = first - cells.sum(axis=1)
    moved = np.floor(weight * apart + 0.5).astype(np.int64)
    shared = cells + (moved[:, None] + n - 1 - _ranks(n)) // n
    total = shared.sum(axis=1)
    sexes = None if n == 1 else shared.reshape(groups, 2, n // 2).sum(axis=2)
    if allow_negative:
        return Estimates(total, sexes, shared)
    clipped = None if sexes is None else np.maximum(sexes, 0)
    return Estimates(np.maximum(total, 0), clipped, np.maximum(shared, 0))


def _ranks(n: int) -> Int64:
    """(n,) place of each cell in the order in which remainders are given out."""
    if n == 1:
        return np.zeros(1, np.int64)
    return np.asarray(np.arange(n).reshape(n // 2, 2).T.ravel())


def variance(first: Noise, detail: Noise, cells: int, part: int) -> float:
    """Variance of the estimate of a sum of ``part`` of the cells, before it is rounded."""
    w = weight(first, detail, cells)
    return part * chances(detail).variance * (1 - part * w / cells)


def published_margin(
    parameters: Parameters, first: Noise | None, detail: Noise, cells: int, part: int
) -> int:
    """Exact 95% margin of a published figure: the sum of ``part`` of a group's measured cells.

    Args:
        first: noise of the group's step 1, ``None`` without one.
        detail: noise of each measured cell; cells: how many the group has.
    """
    own = first if parameters.estimates == "combined" else None
    return _published_margin(own, detail, cells, part, not parameters.allow_negative)


@functools.lru_cache(maxsize=4096)
def _published_margin(
    first: Noise | None, detail: Noise, cells: int, part: int, clipped: bool
) -> int:
    if first is None:
        return margins.margin(detail, part, clipped=clipped)
    return margin(first, detail, cells, part)


def margin(first: Noise, detail: Noise, cells: int, part: int) -> int:
    """Exact 95% margin of the published sum of ``part`` of the cells: 1, a half or all of them.

    With A the noise of these cells and U that of step 1 less that of the other cells, the figure's
    error is A + floor((D + c) / m), D = floor(w (U - A) + 1/2), m = cells / part, with some c in 0
    .. m - 1 for the figure's place in the order.  A and U are independent, and for each A the error
    is within m of 0 on an interval of U: P is one sum over A.
    """
    w, law = weight(first, detail, cells), chances(detail)
    of, rest = summed(law, part), summed(law, cells - part)
    others = plus(chances(first), Chances(-rest.lowest - len(rest.mass) + 1, rest.mass[::-1]))
    ways = cells // part
    most = max(-of.lowest, int(of.values[-1])) + max(-others.lowest, int(others.values[-1])) + 1
    if w == 0:
        return least_margin(_missed_plainly(of), most)
    return max(least_margin(_missed(of, others, w, ways, c), most) for c in {0, ways - 1})


def _missed_plainly(law: Chances) -> Callable[[int], float]:
    return lambda m: float(law.mass[np.abs(law.values) > m].sum())


def _missed(of: Chances, others: Chances, w: float, ways: int, c: int) -> Callable[[int], float]:
    """P(|error| > m) as a function of m."""
    a = of.values

    def up_to(moved: Int64) -> Float64:
        """P(D <= moved): U - A < (moved + 1/2) / w."""
        return others.at_most(np.ceil(a + (moved + 0.5) / w) - 1)

    def missed(m: int) -> float:
        inside = up_to(ways * (m - a + 1) - 1 - c) - up_to(ways * (-m - a) - c - 1)
        return 1 - float(of.mass @ inside)

    return missed


def bias(first: Noise, weight: float, low: float, high: float, truth: int) -> float:
    """Expected error of a total whose detail was chosen because ``low`` <= y < ``high``.

    0 where that has no chance.
    """
    law = chances(first)
    seen = truth + law.values
    chosen = (seen >= low) & (seen < high)
    chance = float(law.mass[chosen].sum())
    return weight * float(law.mass[chosen] @ law.values[chosen]) / chance if chance > 0 else 0.0
