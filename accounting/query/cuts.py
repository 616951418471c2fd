"""What a query's bounds leave out: private estimates, read off the histograms that chose them.

The interval of an answer is about its noise.  It knows nothing of the rows, groups and values that
the bounds leave out, so an answer says beside it how much that is, as far as a private figure can.
All of it is post-processing of noisy nodes that were paid for (``accounting.query.bounds``), so it
costs nothing more and shows nothing more.

**Share of values.** The noisy prefixes of the histogram give the part of its values that lies
beyond each bound. It holds one value of each unit, of one group chosen by chance, so each unit
counts once, whatever its number of groups: where units of many groups also have more in each, a
larger part of all groups is cut (docs/design/mechanism.md: why none is weighted). ``within`` is the
histogram's rank error as a part of its total: with a chance of 95% no share errs by more.

**Share of the amount** (rows, groups, or size of values).  Let S(x) be the number of values above
x.  What a bound B leaves in is the integral of S up to B; what it cuts is S(B) times the mean by
which a value above B exceeds it.  S is measured up to where noise hides what is beyond.  That mean,
and S(B) of a bound farther out, are not: they are taken from the two farthest points where S is
well above noise, as if the size of values were log-normal from
there on, and once more as if it were a power law, the slowest fall that counts of people usually
have (``amount_at_most``; S(B) is then raised by its margin).  Neither is a proof: no private figure
can exclude that one unit holds nearly everything.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np

from dpstream.accounting import special
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
#: Values beyond an edge that noise hides, as a part of the rank error that holds for all cells at
#: once: 2.8 sds of a prefix.  Bounds of a mean and of rows begin where no more are beyond.
UNSEEN = 0.75
#: How many times as far as values are seen a bound may go.
_FARTHER = 3
Points = tuple[tuple[float, float], tuple[float, float]]


class Cut(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one bound, or a pair, leaves out; public, an estimate.

    Attributes:
        of: ``groups`` of a unit, ``rows`` of a unit in a group, ``values``, or how many times given
            ``bounds`` a unit's sum in a group is.
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
        sides = [tail.sizes(of.rank_error) for tail in tails(of, estimate, bounds)]
        inside, beyond, most = (math.fsum(side[i] for side in sides) for i in range(3))
        amount = beyond / (inside + beyond) if inside + beyond > 0 else 0.0
        slow = 1.0 if math.isinf(most) else most / (inside + most) if inside + most > 0 else 0.0
        at_most = max(amount, slow)
    values = max(total, 1.0)
    within = min(1.0, of.rank_error / values)
    ends = low * grid, high * grid
    return Cut(what, *ends, under / values, over / values, within, amount, at_most)


def tails(of: Histogram, estimate: Float64, bounds: tuple[int, int]) -> "tuple[Tail, Tail]":
    """Values above 0, and those below it by their size; bounds in grid units."""
    edges, total = np.array(of.candidates, np.float64), max(float(estimate[-1]), 0.0)
    prefixes = np.clip(np.concatenate([[0.0], estimate]), 0, total)
    up, down = edges > 0, edges < 0
    above = Tail(edges[up], total - prefixes[1:][up], total - prefixes[up.argmax()], bounds[1])
    sizes, under = -edges[down][::-1], prefixes[:-1][down][::-1]
    return above, Tail(sizes, under, prefixes[down.sum()], -bounds[0])


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
        above, inner = self._falling(), int((self.edges <= self.bound).sum())
        before = np.concatenate([[self.everything], above])[:inner]
        width = np.diff(self.edges[:inner], prepend=0.0)
        # Sizes are whole numbers of steps, and fall about evenly between two edges.
        inside = float((width * before + (width - 1) / 2 * (above[:inner] - before)).sum())
        beyond, margin = float(above[inner - 1]), _MARGIN * rank_error
        points = self._points(rank_error)
        if points is None:  # nothing to tell a tail by
            return inside, beyond * self.bound / 2, (beyond + margin) * self.bound
        (near, many), (far, few) = points
        power = math.log(many / few) / math.log(far / near)
        # Of a bound beyond what noise hides, the law gives the number too.
        hidden = above[:inner] <= UNSEEN * rank_error
        at = int(hidden.argmax()) if hidden.any() else inner - 1
        seen, since = float(above[at]), float(self.edges[at])
        if far < since:  # or as fast as from there to the bound
            power = max(power, math.log(few / (seen + margin)) / math.log(since / far))
        slow = self.bound / (power - 1) if power > _SLOWEST else math.inf
        most = (seen + margin) * (since / self.bound) ** power * slow
        return inside, seen * self._excess(points, since, seen + margin, self.bound), most

    def widest(self, rank_error: float, noise: Callable[[Float64], Float64]) -> int:
        """The bound of least error, among the edges from this bound to _FARTHER times as far.

        The error is the root of the square of the sizes that are expected beyond, by the number
        beyond this bound and the log-normal law, plus that of the noise.

        Args:
            noise: its sd with each of some bounds.
        """
        points, inner = self._points(rank_error), int((self.edges <= self.bound).sum())
        if points is None or self.everything - points[0][1] < rank_error:  # nothing seen nearer
            return int(self.bound)
        last = int((self.edges[:-1] <= _FARTHER * self.bound).sum())
        bounds = self.edges[inner - 1 : max(inner, last)]
        beyond = float(self._falling()[inner - 1])
        upto = beyond + _MARGIN * rank_error
        sizes = [self._excess(points, self.bound, upto, float(bound)) for bound in bounds]
        return int(bounds[np.argmin((beyond * np.array(sizes)) ** 2 + noise(bounds) ** 2)])

    def _falling(self) -> Float64:
        """(n,) values above each edge, not increasing."""
        above = np.clip(self.above, 0, self.everything)
        return np.asarray(np.maximum.accumulate(above[::-1])[::-1], np.float64)

    def _points(self, rank_error: float) -> Points | None:
        """Two points (size, values beyond it) of the tail, the second one farther out."""
        above, inner = self._falling(), int((self.edges <= self.bound).sum())
        clear = np.flatnonzero(above[:inner] >= _CLEAR * rank_error)
        if not clear.size:
            return None
        few = float(above[clear[-1]])
        nearer = np.flatnonzero(above >= min(_TIMES * few, (few + self.everything) / 2))
        if not nearer.size or nearer[-1] >= clear[-1] or above[nearer[-1]] >= self.everything:
            return None
        near, far = float(self.edges[nearer[-1]]), float(self.edges[clear[-1]])
        return (near, float(above[nearer[-1]])), (far, few)

    def _excess(self, points: Points, since: float, most: float, size: float) -> float:
        """Mean excess over a size, of each value beyond ``since`` (``most`` of them): by the law
        through two points, or through the farther one and ``since`` where that falls faster."""
        middle, sigma = self._law(points)
        if points[1][0] < since and most < points[1][1]:
            other, steeper = self._law((points[1], (since, most)))
            middle, sigma = min((middle, sigma), (other, steeper), key=lambda law: law[1])
        at, then = ((math.log(x) - middle) / sigma for x in (since, size))
        beyond = float(special.ndtr(-at))
        if beyond < 1e-12:
            return max(0.0, since * sigma / max(at, 1.0) - (size - since))
        sizes = math.exp(middle + sigma**2 / 2) * float(special.ndtr(sigma - then))
        return max(0.0, (sizes - size * float(special.ndtr(-then))) / beyond)

    def _law(self, points: Points) -> tuple[float, float]:
        """Mean and sd of the logarithm."""
        (near, many), (far, few) = points
        first, last = (-float(special.ndtri(n / self.everything)) for n in (many, few))
        sigma = min(math.log(far / near) / max(last - first, 1e-6), _WIDEST)
        return math.log(far) - sigma * last, sigma
