"""What a tuning said and what it cost: figures from noisy counts, words.

``read_off`` is post-processing of noisy counts; ``Tuned`` is what a plan tells about a tuning.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Literal

import msgspec
import numpy as np

from dpstream.accounting.arrays import Int64
from dpstream.accounting.budget.allocation import Budget
from dpstream.accounting.figures import guarantee_pair
from dpstream.accounting.gaussian import epsilon_of
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.tuning.quantiles import (
    answers,
    clamp_of,
    cover_cell,
    prefixes,
    quantile_cell,
)
from dpstream.accounting.tuning.question import Histogram, Question, TuningDesign, contributions_of
from dpstream.accounting.tuning.weighing import (
    KEY_RECORDS,
    NoiseOf,
    PerKey,
    best,
    coverage_of,
    errors,
    per_key,
)

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
    """C and clamps from the noisy nodes of each histogram: post-processing.

    Args:
        noise_with: what the job's noise would be with these clamps, by C and bound per key; public.
        per_key_bound: the job's own.
    """
    pairs, *columns = design.histograms
    estimates = [prefixes(of, y) for of, y in zip(design.histograms, noisy, strict=True)]
    for of, estimate in zip(design.histograms, estimates, strict=True):
        if not answers(of, estimate):
            return Figures(0, (), of.name)
    clamps = tuple(
        (of.name, *clamp_of(of, estimate, question.tail))
        for of, estimate in zip(columns, estimates[1:], strict=True)
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


def expectation(question: Question, design: TuningDesign) -> list[dict[str, Any]]:
    """What accuracy to expect, from public figures alone."""
    return [_expected(of) for of in design.histograms]


def _expected(of: Histogram) -> dict[str, Any]:
    return {
        "name": of.name,
        "candidates": len(of.candidates),
        "sensitivity": of.sensitivity,
        "share_of_mu_squared": of.share,
        "sigma": of.sigma,
        "rank_error_95": of.rank_error,
        "units_for_5_points": of.good_from,
        "no_answer_below": of.answered_from,
    }


class Tuned(msgspec.Struct, frozen=True):
    """Where a job's C and clamps come from; all public.

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
        """``how``, ``words`` and, for a private tuning, its cost and the total, JSON-able.

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
        elif budget.sound and delta > thresholds:
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
        """What a reader of the plan must know."""
        return [FROM_PROXY.format(clamps=self._bounds_text())] if self.how == "proxy" else []

    def _bounds_text(self) -> str:
        return f" and bounds of {', '.join(self.bounds)}" if self.bounds else ""


def rule_text(question: Question) -> str:
    """How C follows from the first hours."""
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
