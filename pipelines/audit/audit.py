"""Audit a job: run its mechanism on synthetic neighbours and say what that proves of epsilon.

Families of trials, all through the real flow with a key and run ids of their own:

    values        a unit's worst case for what is published of keys that are surely selected
    one key       where a unit counts once per key: C records of it on one key
    another run   the same after a run without the unit, same key: each run must have its noise
    selection     which keys appear, and when, with others at the threshold
    alone         how often keys of too few units appear at all

Each may be wrong with its share of 1 - confidence; the verdict is wrong at most with all of it.
A bound below the claim proves nothing but that this audit found nothing.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.errors import UsageError
from dpstream.accounting.evidence.bounds import (
    Claim,
    ProvenBound,
    Scores,
    bound,
    claim_of,
    rate_below,
)
from dpstream.accounting.evidence.design import TrialDesign, designs
from dpstream.accounting.gaussian import epsilon_of
from dpstream.pipelines.audit.rows import numbered_field
from dpstream.pipelines.audit.run import Fixed, Runner, sides
from dpstream.pipelines.audit.selection import (
    alone_released,
    crossing,
    selection_scores,
    visible_mu,
)
from dpstream.pipelines.audit.values import value_scores
from dpstream.pipelines.jobs.job import Job

_LEAST, _MOST = 200, 10_000_000
#: Share of the doubt that the first family gets.
_FIRST = 0.6
#: Trials a side of families whose sound effect is small and whose breaches are not.
_FEW = 2_000

Progress = Callable[[int, int], None]


class Ask(NamedTuple):
    """What to audit with.

    Attributes:
        trials: a side; seed: of the synthetic data only; confidence: of the verdict.
        beam: through the whole Beam pipeline; fixed: key and run id of a test.
    """

    trials: int = 10_000
    seed: int = 0
    confidence: float = 0.99
    beam: bool = False
    fixed: Fixed | None = None

    def check(self) -> "Ask":
        """Refuse figures that prove nothing; returns itself."""
        if not _LEAST <= self.trials <= _MOST:
            raise UsageError("--trials", f"must lie between {_LEAST} and {_MOST}", "write 10000")
        if not 0.5 <= self.confidence < 1:
            raise UsageError("--confidence", "must lie between 0.5 and 1", "write 0.99")
        if self.seed < 0:
            raise UsageError("--seed", "must not be negative", "write 0")
        return self


class Family(NamedTuple):
    """One kind of trial and what it proved.

    Attributes:
        name, description: which trials; visible: the most this statistic can see of the plan's mu.
        bound: what is proven; scores: of the statistic that proved it; rows: fed to the flow.
    """

    name: str
    description: str
    visible: float
    bound: ProvenBound
    scores: Scores
    rows: int


class Alone(NamedTuple):
    """Keys of too few units: how many of how many were released, and what that proves."""

    released: int
    keys: int
    at_least: float
    units: int


class AuditResult(NamedTuple):
    """An audit; everything in it is public, because nothing private went in.

    Attributes:
        claim: the plan's; families: what was tried; alone: ``None`` with public keys.
        visible: mu of the best statistic; seconds: wall time; ask: the figures asked for.
    """

    plan_hash: str
    claim: Claim
    families: list[Family]
    alone: Alone | None
    seconds: float
    ask: Ask

    @property
    def best(self) -> Family:
        """The family that proves most."""
        return max(self.families, key=lambda f: f.bound.mu)

    @property
    def visible(self) -> float:
        """The most any family's statistic can see of mu."""
        return max(f.visible for f in self.families)

    @property
    def refuted(self) -> bool:
        """Whether the plan's claim cannot hold for the mechanism that ran."""
        alone = self.alone is not None and self.alone.at_least > self.claim.tail
        return alone or any(f.bound.refutes(self.claim) for f in self.families)


def audit(job: Job, ask: Ask, progress: Progress | None = None) -> AuditResult:
    """Run all families of a job's plan.

    Args:
        job: a checked job; nothing of it is read or written but its plan and settings.
        progress: told (trials done, trials in all).

    Raises:
        UsageError, PolicyError: figures out of range, a key without room for numbers, or a plan
            that cannot be run.
    """
    ask.check()
    if job.plan.cells is not None:
        raise UsageError(
            "job",
            "answers a workload: its cells share their noise, so that keys are no trials",
            "audit the job itself, whose keys have noise of their own",
        )
    numbered_field(job.plan)
    allocate(job.plan)  # what the job itself is refused for
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dpstream-audit-") as folder:
        runner = Runner(job, Path(folder), ask.beam, ask.fixed)
        work = _Work(runner, ask, progress or (lambda done, total: None))
        families, alone = work.families(), work.alone()
    return AuditResult(job.plan.hash, work.claim, families, alone, time.monotonic() - began, ask)


class _Work:
    """The families of one audit, in order."""

    def __init__(self, runner: Runner, ask: Ask, progress: Progress) -> None:
        self.runner, self.ask = runner, ask
        self.plan = runner.plan
        self.budget = allocate(self.plan)
        self.claim = claim_of(self.plan, self.budget)
        self.designs = designs(self.plan, self.budget)
        # A published count that IS the selection stream shows the selection better than keys do.
        fused = self.budget.units is not None and self.budget.units is self.budget.selection
        self.reads_selection = self.plan.design.selects and not fused
        few, each = min(_FEW, ask.trials), 2 * ask.trials
        self._few = few
        self._total = each * len(self.designs) + 2 * few
        self._total += each * (self.reads_selection + self.plan.design.selects)
        self._done, self._progress = 0, progress

    def _error_chance(self, trials: int) -> None:
        self._done += trials
        self._progress(self._done, self._total)

    def _tail(self, first: bool) -> float:
        """The chance with which one family may prove too much."""
        others = len(self.designs) + self.reads_selection + self.plan.design.selects
        doubt = 1 - self.ask.confidence
        return doubt * _FIRST if first else doubt * (1 - _FIRST) / others

    def families(self) -> list[Family]:
        """All families that give a lower bound of mu."""
        families = []
        for number, design in enumerate(self.designs):
            families.append(self._values(design, self.ask.trials, number == 0, again=False))
        families.append(self._values(self.designs[0], self._few, first=False, again=True))
        if self.reads_selection:
            families.append(self._selection())
        return families

    def _values(self, design: TrialDesign, trials: int, first: bool, again: bool) -> Family:
        added = sides(trials, self.ask.seed)
        scores, rows = value_scores(self.runner, design, added, self._error_chance, again)
        proven = bound(scores, self.claim, self._tail(first))
        name = "another run" if again else design.name
        words = _design_text(design) + (", after a run without it" if again else "")
        return Family(name, words, design.mu, proven, scores[proven.statistic], rows)

    def _selection(self) -> Family:
        added = sides(self.ask.trials, self.ask.seed)
        design = crossing(self.plan, self.budget, self.ask.trials, self.ask.seed)
        scores, rows = selection_scores(self.runner, design, added, self._error_chance)
        proven = bound(scores, self.claim, self._tail(False))
        words = f"one record on each of {design.keys} keys with {design.others:,} others"
        visible = visible_mu(design, self.ask.seed)
        return Family("selection", words, visible, proven, scores[0], rows)

    def alone(self) -> Alone | None:
        """Keys of too few units."""
        if not self.plan.design.selects:
            return None
        keys = 2 * self.ask.trials
        hits, _ = alone_released(self.runner, keys, self._error_chance)
        at_least = rate_below(hits, keys, self._tail(False))
        return Alone(
            hits, keys, at_least, self.plan.privacy.pre_threshold + self.plan.design.units_alone
        )


def _design_text(design: TrialDesign) -> str:
    """A design for a person."""
    where = f"{design.keys} keys" if design.keys > 1 else "one key"
    more = f" and {design.extra} more" if design.extra else ""
    with_others = f" with {design.others:,} others each" if design.others else ""
    first, last = int(design.when[0]), int(design.when[-1])
    at = f"trigger {first}" if first == last else f"triggers {first} to {last}"
    return f"{len(design.pattern)} records on {where}{more}{with_others}, at {at}"


def as_dict(result: AuditResult) -> dict[str, object]:
    """The audit for machines."""
    claim = result.claim
    return {
        "plan_hash": result.plan_hash,
        "verdict": "refuted" if result.refuted else "consistent",
        "confidence": result.ask.confidence,
        "trials": result.ask.trials,
        "seed": result.ask.seed,
        "beam": result.ask.beam,
        "insecure": result.ask.fixed is not None,
        "claim": {
            "epsilon": claim.epsilon,
            "delta": claim.delta,
            "mu": claim.mu,
            "threshold_delta": claim.slack,
        },
        "visible": {"mu": result.visible, "epsilon": visible_epsilon(result, result.visible)},
        "lower_bound": {
            "mu": result.best.bound.mu,
            "epsilon": result.best.bound.epsilon,
            "epsilon_plain": max(f.bound.epsilon_plain for f in result.families),
        },
        "families": [_family(result, f) for f in result.families],
        "alone": None if result.alone is None else result.alone._asdict() | {"b": claim.tail},
        "seconds": round(result.seconds, 1),
    }


def _family(result: AuditResult, family: Family) -> dict[str, object]:
    proven = family.bound
    return {
        "name": family.name,
        "text": family.description,
        "rows": family.rows,
        "visible_mu": family.visible,
        "visible_epsilon": visible_epsilon(result, family.visible),
        "mu": proven.mu,
        "epsilon": proven.epsilon,
        "epsilon_plain": proven.epsilon_plain,
        "false_positives": proven.false_positives,
        "false_negatives": proven.false_negatives,
        "trials": int(np.sum(proven.trials)),
        "statistic": proven.statistic,
        "refutes": proven.refutes(result.claim),
    }


def visible_epsilon(result: AuditResult, mu: float) -> float:
    """Epsilon of a visible mu at the claim's delta."""
    return epsilon_of(mu, result.claim.delta_gaussian)
