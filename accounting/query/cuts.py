"""What a query's bounds leave out: private estimates, read off the histograms that chose them.

The interval of an answer is about its noise.  It knows nothing of the rows, groups and values that
the bounds leave out, so an answer says beside it how much that is, as far as a private figure can.
All of it is post-processing of noisy nodes that were paid for (``accounting.query.bounds``), so it
costs nothing more and shows nothing more.

**Share of values.**  The noisy prefixes of the histogram give the part of its values that lies
beyond each bound.  It holds one value of each unit, chosen by chance, so it is a share of units'
values, not of all rows.  ``within`` is the histogram's rank error as a part of its total: with a
chance of 95% no share errs by more.

**Share of the amount** (rows, groups, or size of values).  Let S(x) be the number of values above
x.  What a bound B leaves in is the integral of S up to B; what it cuts is S(B) times the mean by
which a value above B exceeds it.  S(B) is measured.  That mean is not: bounds are chosen where
values end that noise does not hide, and beyond them hardly anything is seen.  So it is taken from
the two farthest points where S is well above noise, as if the size of values were log-normal from
there on, and once more as if it were a power law, the slowest fall that counts of people usually
have (``amount_at_most``; S(B) is then raised by its margin).  Neither is a proof: no private figure
can exclude that one unit holds nearly everything.
"""

import math
from typing import NamedTuple

import msgspec
import numpy as np
from scipy.special import ndtr, ndtri

from dpstream.accounting.arrays import Float64
from dpstream.accounting.tuning.question import Histogram

#: S is well above noise from so many rank errors; the nearer point has so many times as many.
#: Simulated, of 3,000 to 300,000 units whose rows are log-normal with sigma .5 to 2: root mean
#: square errors of the amount are the least, within a tenth; for power laws they grow slowly.
_CLEAR, _TIMES = 1.5, 16.0
#: One-sided 95% margin of one prefix, as a part of the rank error of all.
_MARGIN = 0.5
#: Least power of a law with a mean that can be told, and largest sigma of a log-normal one.
_SLOWEST, _WIDEST = 1.05, 8.0
Points = tuple[tuple[float, float], tuple[float, float]]


class Cut(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one bound, or a pair, leaves out; public, an estimate.

    Attributes:
        of: ``groups`` of a unit, ``rows`` of a unit in a group, or ``values``.
        low, high: the bounds.
        below, above: shares of values beyond each; within: what they err by at most, at 95%.
        amount: share of all groups, all rows, or of the size of all values, that is beyond;
            ``None`` where sizes do not add up to the figure (variances, quantiles).
        amount_at_most: the same if sizes fall as slowly as a power law; 1 where that has no mean.
    """

    of: str
    low: float
    high: float
    below: float
    above: float
    within: float
    amount: float | None = None
    amount_at_most: float | None = None


def cut_of(
    of: Histogram, estimate: Float64, what: str, bounds: tuple[int, int], grid: float, sums: bool
) -> Cut:
    """The cut of bounds in grid units, by the prefixes that they were chosen from.

    Args:
        estimate: (cells,) of ``accounting.tuning.quantiles.prefixes``.
        what: see ``Cut.of``; grid: size of a unit of it; sums: whether sizes add up to the figure.
    """
    low, high = bounds
    edges, total = np.array(of.candidates, np.float64), max(float(estimate[-1]), 0.0)
    prefixes = np.clip(np.concatenate([[0.0], estimate]), 0, total)
    # A cell is labelled by its edge away from 0: see ``bounds.cells_of_values``.
    under = float(prefixes[np.searchsorted(edges, low, "left" if low <= 0 else "right")])
    over = total - float(prefixes[np.searchsorted(edges, high, "right" if high >= 0 else "left")])
    amount = at_most = None
    if sums:
        up, down = edges > 0, edges < 0
        above = Tail(edges[up], total - prefixes[1:][up], total - prefixes[up.argmax()], high)
        under_0 = Tail(-edges[down][::-1], prefixes[:-1][down][::-1], prefixes[down.sum()], -low)
        sides = [tail.sizes(of.rank_error) for tail in (above, under_0)]
        inside, beyond, most = (math.fsum(side[i] for side in sides) for i in range(3))
        amount = beyond / (inside + beyond) if inside + beyond > 0 else 0.0
        slow = 1.0 if math.isinf(most) else most / (inside + most) if inside + most > 0 else 0.0
        at_most = max(amount, slow)
    values = max(total, 1.0)
    within = min(1.0, of.rank_error / values)
    ends = low * grid, high * grid
    return Cut(what, *ends, under / values, over / values, within, amount, at_most)


class Tail(NamedTuple):
    """Values on one side of 0, by size.

    Attributes:
        edges: (n,) increasing, above 0; above: (n,) values of a larger size than each, noisy.
        everything: values on this side; bound: of sizes.
    """

    edges: Float64
    above: Float64
    everything: float
    bound: float

    def sizes(self, rank_error: float) -> tuple[float, float, float]:
        """Sizes added up within the bound; an estimate of those beyond it, and its most."""
        if not len(self.edges) or self.bound <= 0:
            return 0.0, 0.0, 0.0
        above = np.maximum.accumulate(np.clip(self.above, 0, self.everything)[::-1])[::-1]
        inner = int((self.edges <= self.bound).sum())
        before = np.concatenate([[self.everything], above])[:inner]
        width = np.diff(self.edges[:inner], prepend=0.0)
        # Sizes are whole numbers of steps, and fall about evenly between two edges.
        inside = float((width * before + (width - 1) / 2 * (above[:inner] - before)).sum())
        beyond, margin = float(above[inner - 1]), _MARGIN * rank_error
        points = self._points(above, inner, rank_error)
        if points is None:  # nothing to tell a tail by
            return inside, beyond * self.bound / 2, (beyond + margin) * self.bound
        (near, many), (far, few) = points
        power = math.log(many / few) / math.log(far / near)
        if far < self.bound:  # or as fast as from there to the bound
            power = max(power, math.log(few / (beyond + margin)) / math.log(self.bound / far))
        slow = self.bound / (power - 1) if power > _SLOWEST else math.inf
        return inside, beyond * self._log_normal(points), (beyond + margin) * slow

    def _points(self, above: Float64, inner: int, rank_error: float) -> Points | None:
        """Two points (size, values beyond it) of the tail, the second one farther out."""
        clear = np.flatnonzero(above[:inner] >= _CLEAR * rank_error)
        if not clear.size:
            return None
        few = float(above[clear[-1]])
        nearer = np.flatnonzero(above >= min(_TIMES * few, (few + self.everything) / 2))
        if not nearer.size or nearer[-1] >= clear[-1] or above[nearer[-1]] >= self.everything:
            return None
        near, far = float(self.edges[nearer[-1]]), float(self.edges[clear[-1]])
        return (near, float(above[nearer[-1]])), (far, few)

    def _log_normal(self, points: Points) -> float:
        """Mean excess over the bound of the log-normal law through two points."""
        (near, many), (far, few) = points
        first, last = (-float(ndtri(n / self.everything)) for n in (many, few))
        sigma = min(math.log(far / near) / max(last - first, 1e-6), _WIDEST)
        middle = math.log(far) - sigma * last
        at = (math.log(self.bound) - middle) / sigma
        beyond = float(ndtr(-at))
        if beyond < 1e-12:
            return self.bound * sigma / max(at, 1.0)
        size = math.exp(middle + sigma**2 / 2) * float(ndtr(sigma - at)) / beyond
        return max(0.0, size - self.bound)
