"""Bounds that a query chooses: histograms of ``dpstream choose``, paid by it.

What has no bound of its own gets one histogram over all groups together, as noisy nodes of a binary
tree over a public grid of ``accounting.tuning.question``:

* a column without bounds: its values (0 and +-(4 .. 7) 2^k grid units), of a count each unit's rows
  in a group (1 and more);
* ``automatic_rows``: the rows of a unit in a group (of a sum how many times the bounds its size
  there is, rounded up, for r times the bounds is all that r limits); ``automatic_groups``: the
  groups of a unit.

A histogram counts at most VALUES values of a unit, chosen by sampling keys of the unit's own rows,
so that A x moves by at most VALUES sqrt(levels) in L2 (VALUES levels in L1), in however many groups
the unit is.  A column's histogram has OF_VALUES (bounds of values) or OF_COUNTS (rows) of what the
column would have, were a count tested, of mu^2 (of epsilon with geometric noise), that of groups
OF_GROUPS of what all columns would have; ``allocate_query`` divides what is left.  All is one
mechanism of mu: what is drawn later may adapt to what was released before (section 4).

The bounds are the edges that at most TAIL of the values lie beyond, read off noisy counts.  Where
units are few, that is less than the noise of a prefix, and any of the edges far beyond all values
would do (they grow by powers of two: answers a thousand times too wide).  So as many values may lie
beyond as noise hides, UNSEEN of the rank error.

One figure of all rows has no TAIL.  Its counts, sums and means lose sizes beyond their bounds and
have noise in proportion to them, so from where noise hides the values a bound goes on to the edge
of least expected error (`Tail.widest`).  Of many groups most are small, their number is
private, and a bound that few units need is noise for all.  A sum's noise is that of the wider bound
alone, so the other one is as wide.  All of this is post-processing, and no bound changes the
sensitivity argument: noise is calibrated to the bounds after they are chosen.

A histogram whose noisy total is too small for its noise says nothing: the column is NULL, and rows
and groups are bounded by the public constants of the plan.  What the chosen bounds cut is estimated
too.

**What bounds leave out**: private estimates, read off the histograms that chose them.  The interval
of an answer is about its noise.  It knows nothing of the rows, groups and values that the bounds
leave out, so an answer says beside it how much that is, as far as a private figure can.  All of it
is post-processing of noisy nodes that were paid for, so it costs nothing more and shows nothing
more.

**Share of values.** The noisy prefixes of the histogram give the part of its values that lies
beyond each bound. It holds one value of each unit, of one group chosen by chance, so each unit
counts once, whatever its number of groups: where units of many groups also have more in each, a
larger part of all groups is cut (docs/design/mechanism.md: why none is weighted). ``within`` is the
histogram's rank error as a part of its total: with a chance of 95% no share errs by more.

**Share of the amount** (rows, groups, or size of values).  Let S(x) be the number of values above
x.  What a bound B leaves in is the integral of S up to B; what it cuts is S(B) times the mean by
which a value above B exceeds it.  S is measured up to where noise hides what is beyond.  That mean,
and S(B) of a bound farther out, are not: they are taken from the two farthest points where S is
well above noise, as if the size of values were log-normal from there on, and once more as if it
were a power law, the slowest fall that counts of people usually have (``amount_at_most``; S(B) is
then raised by its margin).  Neither is a proof: no private figure can exclude that one unit holds
nearly everything.
"""

import math
from collections.abc import Callable, Container, Mapping
from typing import NamedTuple

import msgspec
import numpy as np

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.errors import InvariantError, UsageError, required
from dpstream.accounting.libraries import special
from dpstream.accounting.query.calibration import (
    COMBINED,
    OF_COUNTS,
    OF_VALUES,
    mu_of_query,
    noise_by_bound,
)
from dpstream.accounting.query.plan import GROUPS, MAX_ROWS, QueryColumn, QueryPlan
from dpstream.accounting.tuning.answer import answers, clamp_of, prefixes
from dpstream.accounting.tuning.question import (
    Histogram,
    factor_of,
    histogram,
    magnitudes,
    value_candidates,
)

#: S is well above noise from so many rank errors; the nearer point has so many times as many.
#: Simulated, of 3,000 to 300,000 units whose rows are log-normal with sigma .5 to 2: root mean
#: square errors of the amount are the least, within a tenth; for power laws they grow slowly.
_CLEAR, _NEARER_RATIO = 1.5, 16.0
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
    """The values outside one bound, or a pair of bounds; public, an estimate.

    Attributes:
        of: ``groups`` of a unit, ``rows`` of a unit in a group, ``values``, values of whose
            distances the ``squares`` count (variances), or how many times given ``bounds`` a unit's
            sum in a group is.
        low, high: the bounds.
        below, above: shares of values beyond each; within: the 95% margin of these shares.
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
    histogram: Histogram,
    estimate: Float64,
    what: str,
    bounds: tuple[int, int],
    grid: float,
    sums: bool,
) -> Cut:
    """Return the cut of bounds in grid units, by the prefixes that they were chosen from.

    Args:
        estimate: (cells,) of ``accounting.tuning.answer.prefixes``.
        what: see ``Cut.of``; grid: size of a unit of it; sums: whether sizes add up to the figure.
    """
    low, high = bounds
    edges, total = np.array(histogram.candidates, np.float64), max(float(estimate[-1]), 0.0)
    prefixes = np.clip(np.concatenate([[0.0], estimate]), 0, total)
    # A cell is labelled by its edge away from 0: see ``bounds.cells_of_values``.
    under = float(prefixes[np.searchsorted(edges, low, "left" if low <= 0 else "right")])
    over = total - float(prefixes[np.searchsorted(edges, high, "right" if high >= 0 else "left")])
    amount = at_most = None
    if sums:
        sides = [tail.sizes(histogram.rank_error) for tail in tails(histogram, estimate, bounds)]
        inside, beyond, most = (math.fsum(side[i] for side in sides) for i in range(3))
        amount = beyond / (inside + beyond) if inside + beyond > 0 else 0.0
        slow = 1.0 if math.isinf(most) else most / (inside + most) if inside + most > 0 else 0.0
        at_most = max(amount, slow)
    values = max(total, 1.0)
    within = min(1.0, histogram.rank_error / values)
    ends = low * grid, high * grid
    return Cut(what, *ends, under / values, over / values, within, amount, at_most)


def tails(histogram: Histogram, estimate: Float64, bounds: tuple[int, int]) -> "tuple[Tail, Tail]":
    """Return the tails of values above 0 and of those below it; bounds in grid units."""
    edges, total = np.array(histogram.candidates, np.float64), max(float(estimate[-1]), 0.0)
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
        """Return the sum of sizes within the bound, an estimate of that beyond it, and its most."""
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
        """Return the bound of least error, among the edges from this bound to _FARTHER times as
        far.

        The error is the root of the square of the sizes that are expected beyond, by the number
        beyond this bound and the log-normal law, plus that of the noise.

        Args:
            noise: maps bounds to the sd of the noise with each of them.
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
        nearer = np.flatnonzero(above >= min(_NEARER_RATIO * few, (few + self.everything) / 2))
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


#: Values of one unit in a histogram.
VALUES = 1
#: Part of the values that may lie beyond each bound.
TAIL = 0.01
#: Part of the units whose rows a mean may count fewer times: none of their values is lost, and the
#: noise grows with r.
TAIL_OF_MEANS = 0.1
#: Largest bounds, in grid units: of values, of counts.
_MOST, _COUNT = 1 << 28, 1 << 20
#: Grid units between the bounds of values that are squared.
_SQUARED = 1 << 16
#: Most groups of a unit that are chosen; part of the columns' budget that this takes.
MOST_GROUPS, OF_GROUPS = 256, 1 / 12
_GROUPS, _ROWS = magnitudes(MOST_GROUPS), magnitudes(MAX_ROWS)
#: Kinds whose sizes add up to the figure.
_ADDED = ("count", "sum", "mean")
_SLACK = 1e-12


class BoundsDesign(msgspec.Struct, frozen=True):
    """The histograms for the settings that a query chooses, in the columns' order, groups last;
    public.

    Attributes:
        law: family of the noise of their nodes; ``sigma`` of a histogram is its sd or scale.
        histograms: named as the columns, as ``QueryColumn.rows_histogram``, or ``GROUPS``.
    """

    law: str
    histograms: tuple[Histogram, ...]

    @property
    def reserved(self) -> dict[str, float]:
        """The cost of each histogram: part of mu^2 or of epsilon; for ``allocate_query``."""
        return {histogram.name: histogram.share for histogram in self.histograms}


class Settled(NamedTuple):
    """A plan whose bounds are chosen.

    Attributes:
        plan: the plan with bounds for every column.
        nulls: columns whose histogram said nothing: they are NULL, whatever their bounds.
        cuts: what chosen bounds leave out, by histogram.
    """

    plan: QueryPlan
    nulls: frozenset[str]
    cuts: dict[str, Cut]


def design_bounds(plan: QueryPlan) -> BoundsDesign | None:
    """Return the histograms of a plan, ``None`` where all bounds are given.

    Raises:
        UsageError: the plan is refused, or the budget allows no answer at all.
    """
    plan.check()
    if plan.mechanism == "auto":
        raise InvariantError("the family of a plan's noise is chosen")
    total, free = math.fsum(c.share for c in plan.columns), 1.0
    if plan.selects and plan.mechanism == "gaussian":
        free = 1 - COMBINED
    wanted: list[tuple[str, tuple[int, ...], float]] = []
    for column in plan.columns:
        share = column.share / total
        if column.automatic:
            part = OF_COUNTS if column.kind == "count" else OF_VALUES
            wanted.append((column.name, _with_beyond(candidates(column)), share * part))
        if column.automatic_rows:
            wanted.append((column.rows_histogram, _with_beyond(_ROWS), share * OF_COUNTS))
    if plan.automatic_groups:
        wanted.append((GROUPS, _with_beyond(_GROUPS), OF_GROUPS))
    if not wanted:
        return None
    mu, made = mu_of_query(plan)[0] if plan.mechanism == "gaussian" else 1.0, []
    for name, edges, part in wanted:
        share, ends = free * part * (1 - _SLACK), (TAIL, 1 - TAIL)
        try:
            gaussian = histogram(name, edges, len(edges), ends, VALUES, share, mu)
        except UsageError:  # it names the option of `dpstream choose`
            raise UsageError(
                "epsilon",
                "is too small to choose contribution bounds from the data",
                "use a larger epsilon, or give the bounds",
            ) from None
        made.append(
            gaussian if plan.mechanism == "gaussian" else _geometric(gaussian, plan.epsilon)
        )
    return BoundsDesign(plan.mechanism, tuple(made))


def candidates(column: QueryColumn) -> tuple[int, ...]:
    """Return the edges that a column's bounds are chosen from, in grid units."""
    if column.kind == "count":
        return magnitudes(_COUNT)
    most = _MOST // column.most_rows
    return value_candidates(-most, most)


def _with_beyond(edges: tuple[int, ...]) -> tuple[int, ...]:
    """One edge more at each end that has no other: its cell holds what no bound can hold."""
    below = (2 * edges[0],) if edges[0] < 0 else ()
    return (*below, *edges, 2 * edges[-1])


def settled(plan: QueryPlan, design: BoundsDesign, noisy: list[Int64]) -> Settled:
    """Return bounds from the noisy nodes of each histogram, and their cuts: post-processing.

    Where too few units have a value to choose by, a count has its public default bound, the rows
    of a unit that count; any other column is NULL.
    """
    least = TAIL if plan.grouped else 0.0
    means = {column.rows_histogram for column in plan.columns if column.kind == "mean"}
    widened = _Widened.of(plan, design)
    chosen: dict[str, tuple[int, int]] = {}
    estimates: dict[str, tuple[Histogram, Float64]] = {}
    for each, nodes in zip(design.histograms, noisy, strict=True):
        estimate = prefixes(each, nodes)
        if answers(each, estimate):
            reweighted = TAIL_OF_MEANS if each.name in means else least
            tail = max(reweighted, UNSEEN * each.rank_error / float(estimate[-1]))
            least_edge = each.candidates[1] if each.candidates[0] < 0 else 0
            bounds = clamp_of(each, estimate, tail)
            bounds = max(bounds[0], least_edge), min(bounds[1], each.candidates[-2])
            chosen[each.name] = widened.bounds(each, estimate, bounds)
            estimates[each.name] = each, estimate
    columns, nulls, cuts = [], set[str](), dict[str, Cut]()
    for column in plan.columns:
        if column.automatic and column.name not in chosen and column.kind != "count":
            nulls.add(column.name)
        made = _with_bounds(column, chosen)
        columns.append(made)
        if column.rows_histogram in chosen:
            each, estimate = estimates[column.rows_histogram]
            what = "bounds" if column.kind == "sum" else "rows"
            # Of a mean, rows beyond the bound count fewer times, and nothing is lost.
            added = column.kind != "mean"
            cuts[each.name] = cut_of(each, estimate, what, (0, made.rows), 1.0, added)
        if column.automatic and column.name in chosen:
            of_kind = {"count": "rows", "var": "squares", "stddev": "squares"}
            what = of_kind.get(column.kind, "values")
            each, estimate = estimates[column.name]
            low, high = (required(b, "the bounds are chosen") for b in (made.low, made.high))
            ends = round(low / column.grid), round(high / column.grid)
            added = column.kind in _ADDED and not column.distinct
            cuts[each.name] = cut_of(each, estimate, what, ends, column.grid, added)
    groups = plan.groups
    if plan.automatic_groups and GROUPS in chosen:
        groups = chosen[GROUPS][1]
        cuts[GROUPS] = cut_of(*estimates[GROUPS], "groups", (0, groups), 1.0, True)
    settled_plan = msgspec.structs.replace(
        plan, columns=tuple(columns), groups=groups, automatic_groups=False
    )
    return Settled(settled_plan, frozenset(nulls), cuts)


class _Widened(NamedTuple):
    """Bounds made as wide as is good for the whole error, or as costs no noise.

    Attributes:
        kinds: of the column of each histogram whose sizes add up to the figure.
        noise: of one figure of all rows the noise by bound, by histogram; else empty.
    """

    kinds: Mapping[str, str]
    noise: dict[str, float]

    @classmethod
    def of(cls, plan: QueryPlan, design: BoundsDesign) -> "_Widened":
        added = [column for column in plan.columns if column.kind in _ADDED]
        kinds = {column.name: column.kind for column in added if column.automatic}
        # Of a sum r is a bound of sizes; that of a mean cuts nothing off.
        kinds |= {c.rows_histogram: "count" for c in added if c.kind == "sum"}
        if plan.grouped or not kinds:
            return cls(kinds, {})
        noise = noise_by_bound(plan, design.reserved)
        by_histogram = {c.rows_histogram: noise[c.name] for c in added}
        return cls(kinds, by_histogram | {c.name: noise[c.name] for c in added})

    def bounds(
        self, histogram: Histogram, estimate: Float64, bounds: tuple[int, int]
    ) -> tuple[int, int]:
        """Bounds in grid units of a histogram, from those of ``clamp_of``."""
        kind, (low, high) = self.kinds.get(histogram.name), bounds
        if kind is None:
            return bounds
        if histogram.name in self.noise:
            low, high = self._of_least_error(kind, histogram, estimate, bounds)
        if kind == "sum":  # noise is that of the wider one
            return -max(-low, high), max(-low, high)
        return low, high

    def _of_least_error(
        self, kind: str, histogram: Histogram, estimate: Float64, bounds: tuple[int, int]
    ) -> tuple[int, int]:
        by_bound, (low, high) = self.noise[histogram.name], bounds
        up, down = tails(histogram, estimate, bounds)
        if kind != "mean":  # of two bounds, only the wider one
            if high >= -low:
                return low, up.widest(histogram.rank_error, lambda b: by_bound * b)
            return -down.widest(histogram.rank_error, lambda b: by_bound * b), high
        high = up.widest(histogram.rank_error, lambda b: by_bound * (b - low) / 2)
        return -down.widest(histogram.rank_error, lambda b: by_bound * (b + high) / 2), high


def _with_bounds(column: QueryColumn, chosen: Mapping[str, tuple[int, int]]) -> QueryColumn:
    """A column with the bounds and rows that were chosen for it."""
    rows = chosen.get(column.rows_histogram, (0, column.rows))[1]
    low, high, grid = column.low, column.high, column.grid
    if column.automatic:
        default = (0, column.rows if column.kind == "count" else 1)
        lo, hi = chosen.get(column.name, default)
        if lo >= hi:  # one edge: a range needs two
            lo, hi = min(lo, hi) - (column.kind != "count"), max(lo, hi)
        if column.kind == "count":
            lo = 0
        low, high = float(lo * column.grid), float(hi * column.grid)
        if column.kind in ("var", "stddev"):
            while hi - lo > _SQUARED:
                grid, lo, hi = 2 * grid, lo // 2, -(-hi // 2)
    return msgspec.structs.replace(
        column, rows=rows, low=low, high=high, grid=grid, automatic_rows=False
    )


def not_estimated(plan: QueryPlan, cuts: Container[str], grouped: bool) -> tuple[str, ...]:
    """Return the bounds of a plan whose cut is not known, because no histogram measured it.

    Args:
        cuts: by histogram; grouped: the answer has groups.
    """
    out = ["groups"] if grouped and plan.groups is not None and GROUPS not in cuts else []
    for column in plan.columns:
        of_rows = column.kind == "count" and column.per == "row"
        if column.kind != "units" and not of_rows and column.name not in cuts:
            out.append(f"bounds of {column.name}")
        if column.kind != "units" and column.per == "row" and column.rows_histogram not in cuts:
            out.append(column.rows_histogram)
    return tuple(out)


def _geometric(histogram: Histogram, epsilon: float) -> Histogram:
    """The same with two-sided geometric noise."""
    scale = VALUES * histogram.col2 / (histogram.share * epsilon) * (1 + _SLACK)
    sd = math.sqrt(2) * scale * factor_of(histogram.cells, histogram.targets)
    far = float(-special.ndtri(0.05 / (2 * histogram.cells)))
    return msgspec.structs.replace(
        histogram, sensitivity=float(VALUES * histogram.col2), sigma=scale, rank_error=sd * far
    )


def cells_of_values(histogram: Histogram, values: Int64) -> Int64:
    """Return (n,) cell of each value, labelled by the edge away from 0; values beyond are
    clamped.
    """
    edges = np.array(histogram.candidates)
    values = np.clip(values, edges[0], edges[-1])
    up = np.searchsorted(edges, values, side="left")
    down = np.searchsorted(edges, values, side="right") - 1
    return np.asarray(np.where(values >= 0, up, down))
