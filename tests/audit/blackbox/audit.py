"""Audit of a job: run its mechanism on synthetic neighbours and state the proven epsilon.

Families of trials, all through the real flow with a key and run ids of their own:

    values        a unit's worst case for what is published of keys that are surely selected
    one key       where a unit counts once per key: C records of it on one key
    another run   the same after a run without the unit, same key: each run must have its noise
    selection     which keys appear, and when, with others at the threshold
    alone         how often keys of too few units appear at all

Each may be wrong with its share of 1 - confidence; the verdict is wrong at most with all of it.
A bound below the claim proves nothing but that this audit found nothing.

The result is shown as a page of text.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.errors import UsageError
from dpstream.accounting.figures import down, up
from dpstream.accounting.gaussian import epsilon_of
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.render.layout import labelled, page
from tests.audit.blackbox.run import Fixed, Runner, numbered_field, sides
from tests.audit.blackbox.values import (
    alone_released,
    crossing,
    selection_scores,
    value_scores,
    visible_mu,
)
from tests.audit.evidence.bounds import (
    Claim,
    ProvenBound,
    Scores,
    bound,
    claim_of,
    rate_below,
)
from tests.audit.evidence.design import TrialDesign, designs

#: Fewest trials of an audit.
_LEAST = 200
#: Share of the doubt that the first family gets.
_FIRST = 0.6
#: Trials a side of families whose sound effect is small and whose breaches are not.
_FEW = 2_000

Progress = Callable[[int, int], None]


class Ask(NamedTuple):
    """The settings of an audit.

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
        assert self.trials >= _LEAST and 0.5 <= self.confidence < 1
        return self


class Family(NamedTuple):
    """One kind of trial and the bound it proves.

    Attributes:
        name, description: name and words of the trials; visible: the largest mu that they can show.
        bound: what is proven; scores: of the statistic that proved it; rows: fed to the flow.
    """

    name: str
    description: str
    visible: float
    bound: ProvenBound
    scores: Scores
    rows: int


class Alone(NamedTuple):
    """Released keys of too few units, their total number, and the bound these prove."""

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
        """Return whether the plan's claim cannot hold for the mechanism that ran."""
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
        families = [
            self._values(design, self.ask.trials, number == 0, again=False)
            for number, design in enumerate(self.designs)
        ]
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
        hits = alone_released(self.runner, keys, self._error_chance)
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


def visible_epsilon(result: AuditResult, mu: float) -> float:
    """Return epsilon of a visible mu at the claim's delta."""
    return epsilon_of(mu, result.claim.delta_gaussian)


mpl.use("Agg")
_CLAIM, _SEEN, _MEASURED, _PROVEN = "#4a4a4a", "#1f5fa8", "#c2571a", "#2f8f5b"


def text(result: AuditResult) -> str:
    """Return the audit as text for a person at a terminal."""
    claim, best = result.claim, result.best.bound
    percent = f"{100 * result.ask.confidence:g}%"
    reach, visible = best.epsilon, result.visible
    lines = [
        *labelled(
            "Claim",
            f"epsilon {up(claim.epsilon, 4)} at delta {up(claim.delta, 3)}: mu {up(claim.mu, 4)}, "
            f"thresholds C b = {up(claim.slack, 3)}",
        ),
        *labelled(
            "Visible",
            f"at best mu {down(visible, 4)} (epsilon {down(visible_epsilon(result, visible), 4)}) "
            "to an observer of the keys of one unit",
        ),
        *labelled(
            "Proven",
            f"epsilon >= {down(reach, 4)}, mu >= {down(best.mu, 4)} with confidence {percent}",
        ),
        "",
        f"{'Trials':<12}  visible mu   proven mu   proven epsilon   trials a side   the unit's",
    ]
    lines += [
        f"{f.name:<12}  {down(f.visible, 4):<11}  {down(f.bound.mu, 4):<10}  "
        f"{down(f.bound.epsilon, 4):<15}  {f.bound.trials[1]:<14,}  {f.description}"
        for f in result.families
    ]
    if result.alone is not None:
        alone = result.alone
        lines.append(
            f"alone         {alone.released:,} of {alone.keys:,} keys of {alone.units} unit(s) "
            f"released: chance >= {down(alone.at_least, 3)}, claimed <= {up(claim.tail, 3)}"
        )
    lines += ["", *labelled("Seconds", f"{result.seconds:.1f}")]
    verdict = "consistent: no bound exceeds the claim"
    if result.refuted:
        why = [f.name for f in result.families if f.bound.refutes(claim)]
        if result.alone is not None and result.alone.at_least > claim.tail:
            why.append("alone")
        verdict = (
            f"REFUTED by {', '.join(why)}: the mechanism that ran is not what the plan claims; "
            "publish nothing of it"
        )
    return page([*lines, *labelled("Verdict", verdict)])
