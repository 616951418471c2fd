"""The result of a tuning and its cost: C, bounds and figures from noisy counts, as text.

All of it is post-processing of noisy counts, and of the plan: no further look at data.  `Tuned` is
what a plan tells about a tuning.

**Which C**: noise, which grows with it, against what it cuts, which falls.  A bound C keeps the
part k(C) of all pairs (``coverage_of``), sum over units of min(pairs, C) over sum of pairs.  A key
of n records is expected to be short by n (1 - k(C)), if the units that are cut are in it as they
are everywhere, and its noise at a window's end has an sd that the plan gives for each C.  The root
of both squares is weighed; a quantile of pairs ignores noise, and of few units with very many pairs
it makes a C that drowns everything.

Units beyond the largest candidate count as if they had just so many: what is cut of them is not
known, so that the cut is at least what is said.

**Quantiles and clamps**: least squares over the nodes, then the nearest non-decreasing prefixes.
Without noise both give back the exact prefixes, and each figure is the exact one of its definition.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.budget.allocation import Budget
from dpstream.accounting.figures import guarantee_pair
from dpstream.accounting.gaussian import epsilon_of
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.tuning.question import (
    Histogram,
    Question,
    TuningDesign,
    contributions_of,
    covariance_of,
    encoder_matrix,
)

#: sd of the first column's noise at a window's end, in records at the bound; infinite where a job
#: with that C and bound per key cannot be run.
NoiseOf = Callable[[int, int | None], float]

#: Records of a key that is weighed for, unless somebody says.
KEY_RECORDS = 1_000
#: Bounds per key that are proposed beside the job's own.
PER_KEY_BOUNDS = (1, 2, 4, 8, 16)
_GAIN = 0.95
_FLOAT_ERROR = 1e-7


class Coverage(NamedTuple):
    """Pairs that a bound keeps: (edges,) increasing bounds in pairs of the first hours, from 0,
    and the part of all pairs kept by each."""

    edges: Float64
    part: Float64


class PerKey(msgspec.Struct, frozen=True):
    """The effect of another bound per key on the same histogram.

    Attributes:
        bound: k; contributions: C that is weighed best with it.
        cut: part of all pairs that C cuts, without what is beyond k in a key.
        sd: see ``NoiseOf``.
    """

    bound: int
    contributions: int
    cut: float
    sd: float


def coverage_of(histogram: Histogram, estimate: Float64) -> Coverage:
    """Return the part of all pairs that each candidate bound keeps.

    Pairs are summed as survivors: sum over c of #{units with >= c pairs}, linear inside a wide
    cell. Survivors below the rank error are noise and count as none (a few units with very many
    pairs stay unseen); beyond the largest candidate a unit counts with that candidate.

    Args:
        estimate: (cells,) noisy prefixes of the histogram of pairs per unit.
    """
    edges = np.array([0, *histogram.candidates], np.float64)
    above = estimate[-1] - np.concatenate([[0.0], estimate[:-1]])  # units with > edges[t] pairs
    above[above < max(histogram.rank_error, _FLOAT_ERROR)] = 0.0
    width = np.diff(edges)
    mass = width * above[:-1] + (width - 1) / 2 * (above[1:] - above[:-1])
    sums = np.concatenate([[0.0], np.cumsum(mass)])
    return Coverage(edges, sums / sums[-1])


def errors(part: Float64, sd: Float64, records: int) -> Float64:
    """Return (n,) root mean square errors, in records, of a key of ``records`` records."""
    return np.asarray(np.hypot((1 - part) * records, sd), np.float64)


def best(part: Float64, sd: Float64, records: int) -> int:
    """Return the index of the bound with the least error of a key of ``records`` records.

    Args:
        part: (n,) of all pairs that each bound keeps; sd: (n,) of its noise in records.

    Raises:
        ValueError: none of them can be run.
    """
    error = errors(part, sd, records)
    if not np.isfinite(error).any():
        raise ValueError("no bound can be run")
    return int(np.argmin(error))


def per_key(
    bounds: Float64, part: Float64, noise: NoiseOf, records: int, own: int | None, most: float
) -> tuple[PerKey, ...]:
    """Return the effect of each bound per key but the job's own, where it can be run and helps.

    Args:
        bounds: (n,) C of each candidate; part: (n,) of all pairs that it keeps.
        own: the job's bound per key.
        most: error of what was chosen; bounds that gain less than ``_GAIN`` are not worth a word.
    """
    rows = []
    for bound in PER_KEY_BOUNDS:
        sd = np.array([noise(int(c), bound) for c in bounds])
        if bound != own and np.isfinite(sd).any():
            at = best(part, sd, records)
            if errors(part, sd, records)[at] > _GAIN * most:
                continue
            rows.append(PerKey(bound, int(bounds[at]), float(1 - part[at]), float(sd[at])))
    return tuple(rows)


_SLACK = 1e-12


def prefixes(histogram: Histogram, noisy: Int64) -> Float64:
    """Return (cells,) non-decreasing estimates of the prefixes of the histogram.

    Args:
        noisy: (nodes,) A x + noise.
    """
    from scipy.optimize import isotonic_regression  # slow to load, and a plan needs none of it

    nodes = encoder_matrix(histogram.cells).T.astype(np.float64) @ noisy.astype(np.float64)
    counts = covariance_of(histogram.cells) @ nodes
    return np.asarray(isotonic_regression(np.cumsum(counts)).x, np.float64)


def answers(histogram: Histogram, estimate: Float64) -> bool:
    """Return whether the noisy total is large enough to read a quantile from."""
    return bool(estimate[-1] >= max(1 - _FLOAT_ERROR, histogram.answered_from))


def quantile_cell(estimate: Float64, target: float) -> int:
    """Return the first cell t with prefix_t >= target * total."""
    return int(np.argmax(estimate >= target * estimate[-1] - _FLOAT_ERROR))


def cover_cell(histogram: Histogram, estimate: Float64, cover: float) -> int:
    """Return the first cell whose candidate, as a bound, keeps ``cover`` of all pairs."""
    return int(np.argmax(coverage_of(histogram, estimate).part[1:] >= cover * (1 - _SLACK)))


def clamp_of(histogram: Histogram, estimate: Float64, tail: float) -> tuple[int, int]:
    """Return (low, high) candidates that at most ``tail`` of the values exceed at each end.

    Cells are labelled by their edge away from 0, so a low bound above 0 and a high bound below
    0 take the candidate nearer to 0.
    """
    edges, last = histogram.candidates, histogram.cells - 1
    before = np.concatenate([[0.0], estimate[:-1]])
    low = int(np.flatnonzero(before <= tail * estimate[-1] + _FLOAT_ERROR)[-1])
    high = quantile_cell(estimate, 1 - tail)
    if low > high:  # only by noise
        low, high = high, low
    low = low if edges[low] <= 0 else max(low - 1, 0)
    high = high if edges[high] >= 0 else min(high + 1, last)
    if edges[low] == edges[high] == 0:  # bounds need a multiple of the grid other than 0
        high, low = (high + 1, low) if high < last else (high, low - 1)
    return edges[low], edges[high]


#: Where no bound can be run no rule weighs any: the middle is as good, and is refused with its C.
_NO_RULE = 0.5

#: (low, high) in grid units of each aggregate whose bounds are chosen.
ChosenBounds = tuple[tuple[str, int, int], ...]
How = Literal["private", "proxy", "public", "data"]

FROM_PROXY = (
    "contributions{clamps} chosen from other data: no charge, if that data shares users with "
    "this stream the guarantee does not cover the tuning"
)
BIAS = (
    "the rule multiplies by a public factor: too large where a unit's records come in bursts or "
    "the first hours are the busy ones, too small where they are quiet; units that send nothing "
    "in the first hours are not seen, so heavy units weigh more"
)


class Figures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tuned figures.

    Attributes:
        contributions: C; 0 if nothing was answered.
        bounds: (low, high) in grid units of each aggregate, in the order of the question.
        unanswered: name of the first histogram with too small a noisy total.
        notes: remarks, post-processing like the rest.
        cut: part of all pairs in the first hours that C cuts, at least; ``None``: not known.
        sd: of the first column's noise at a window's end with that C, in records at the bound.
        per_key: what other bounds per key would come to; a job may take any of them.
    """

    contributions: int
    bounds: ChosenBounds
    unanswered: str | None = None
    notes: tuple[str, ...] = ()
    cut: float | None = None
    sd: float | None = None
    per_key: tuple[PerKey, ...] = ()


def read_off(
    question: Question,
    design: TuningDesign,
    noisy: list[Int64],
    noise_with: Callable[[ChosenBounds], NoiseOf],
    per_key_bound: int | None = None,
) -> Figures:
    """Return C and bounds from the noisy nodes of each histogram: post-processing.

    Args:
        noise_with: what the job's noise would be with these clamps, by C and bound per key; public.
        per_key_bound: the job's own.
    """
    pairs, *columns = design.histograms
    estimates = [
        prefixes(histogram, y) for histogram, y in zip(design.histograms, noisy, strict=True)
    ]
    for histogram, estimate in zip(design.histograms, estimates, strict=True):
        if not answers(histogram, estimate):
            return Figures(0, (), histogram.name)
    clamps = tuple(
        (histogram.name, *clamp_of(histogram, estimate, question.tail))
        for histogram, estimate in zip(columns, estimates[1:], strict=True)
    )
    noise = noise_with(clamps)
    scale, most = Fraction(question.scale), question.max_contributions
    bounds = np.array([contributions_of(pair, scale, most) for pair in pairs.candidates])
    part = coverage_of(pairs, estimates[0])
    sd = np.array([noise(int(count), per_key_bound) for count in bounds])
    notes: list[str] = []
    if question.key_records is not None and np.isfinite(sd).any():
        cell = best(part.part[1:], sd, question.key_records)
    elif question.cover is not None:
        cell = cover_cell(pairs, estimates[0], question.cover)
    else:
        cell = quantile_cell(estimates[0], question.quantile or _NO_RULE)
    if cell == len(bounds):
        cell -= 1
        notes.append("the quantile lies beyond --max-contributions, which is taken instead")
    if question.key_records is not None and cell == len(bounds) - 1 and cell:
        notes.append(
            "the largest bound that was looked at: what units have beyond it is not known; "
            "--max-contributions looks further"
        )
    records = question.key_records or KEY_RECORDS
    error = float(errors(part.part[1:], sd, records)[cell])
    others = per_key(bounds, part.part[1:], noise, records, per_key_bound, error)
    tuned, cut = int(bounds[cell]), float(1 - part.part[1 + cell])
    cell_sd = float(sd[cell]) if np.isfinite(sd[cell]) else None
    return Figures(tuned, clamps, None, tuple(notes), cut, cell_sd, others)


def expectation(design: TuningDesign) -> list[dict[str, Any]]:
    """Return the accuracy to expect, from public figures alone."""
    return [
        {
            "name": histogram.name,
            "candidates": len(histogram.candidates),
            "sensitivity": histogram.sensitivity,
            "share_of_mu_squared": histogram.share,
            "sigma": histogram.sigma,
            "rank_error_95": histogram.rank_error,
            "units_for_5_points": histogram.good_from,
            "no_answer_below": histogram.answered_from,
        }
        for histogram in design.histograms
    ]


class Tuned(msgspec.Struct, frozen=True):
    """The origin of a job's C and bounds; all public.

    Attributes:
        how: ``private`` (charged), ``proxy`` (other data) or ``public``.
        bounds: aggregates whose bounds were chosen with C.
        first: the part of the stream that was read, as text.
        run_id, epsilon, delta, mu: of a private tuning.
    """

    how: How
    bounds: tuple[str, ...] = ()
    first: str = ""
    run_id: str = ""
    epsilon: float = 0.0
    delta: float = 0.0
    mu: float = 0.0

    def describe(self, plan: Plan, budget: Budget) -> dict[str, Any]:
        """Return ``how``, ``words`` and, for a private tuning, its cost and the total, JSON-able.

        The total is one Gaussian mechanism with mu^2 = mu_tuning^2 + mu_stream^2, the deltas
        of the stream's thresholds added, at the sum of both deltas; rounded up.  Where the
        stream has geometric noise both guarantees are added up.
        """
        if self.how != "private":
            return {"how": self.how, "text": "; ".join(self.warnings())}
        thresholds = 0.0 if budget.plain else budget.b * plan.privacy.contributions
        mu = math.sqrt(self.mu**2 + budget.mu**2) * (1 + 1e-12)
        delta = budget.delta + self.delta  # its float error is covered by the slack below
        total = None
        if budget.plain:
            total = (budget.epsilon + self.epsilon) * (1 + 1e-12)
        elif budget.has_guarantee and delta > thresholds:
            total = epsilon_of(mu, (delta - thresholds) * (1 - 1e-12))
        words = (
            f"contributions{self._bounds_text()} chosen from the first {self.first} of this "
            f"stream by a {guarantee_pair(self.epsilon, self.delta)}-DP mechanism, charged as run "
            f"{self.run_id}"
        )
        if total is not None:
            both = guarantee_pair(total, delta, digits=(4, 4))
            words += f"; tuning and stream together: {both}; the account holds every other run on "
            words += "the data set"
        return {
            "how": self.how,
            "text": words,
            "run_id": self.run_id,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "mu": self.mu,
            "total": {"epsilon": total, "delta": delta, "mu": mu},
        }

    def warnings(self) -> list[str]:
        """Return the warnings that a reader of the plan must know."""
        return [FROM_PROXY.format(clamps=self._bounds_text())] if self.how == "proxy" else []

    def _bounds_text(self) -> str:
        return f" and bounds of {', '.join(self.bounds)}" if self.bounds else ""


def rule_text(question: Question) -> str:
    """Return the rule by which C follows from the first hours, as text."""
    if question.key_records is not None:
        return (
            f"the bound with the least error of a key of {question.key_records:,} records, noise "
            f"against what is cut, of pairs per unit times {float(Fraction(question.scale)):.6g}"
        )
    what = (
        f"the bound that keeps {question.cover:g} of all pairs"
        if question.cover is not None
        else f"the {question.quantile:g} quantile of pairs per unit"
    )
    return f"{what}, times {float(Fraction(question.scale)):.6g}, rounded up"
