"""The guarantee of a job, and the division of its budget."""

from typing import Annotated, Literal

import msgspec

from dpstream.accounting import limits
from dpstream.accounting.errors import UsageError
from dpstream.accounting.fields import Positive, check_bounds, job_field
from dpstream.accounting.strength import check_delta
from dpstream.accounting.weights import SelectionWeights

#: What ``auto`` makes small: the error of a period's promise, or of that of all periods.
Optimise = Literal["period", "lifetime"]
StrategyName = Literal["tree", "blt", "dense", "geometric", "auto"]
Contributions = Annotated[int, msgspec.Meta(ge=1, le=limits.MAX_CONTRIBUTIONS)]
#: Part of delta that is kept for the thresholds of keys that are tested more than once.
THETA = 0.4


class MechanismFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[job.NAME.mechanism]`` of the project file, as far as the plan takes it as it is written.

    Attributes:
        pre_threshold: a key is tested only with more units than this.
        refresh_every: triggers between two publications of a selected key (default: a hundredth of
            the triggers).
        combine: with ``per_key_bound = 1``: test keys by weighted and published counts together;
            most keys and least error.
        select_every: triggers between two tests of a key (default: ``refresh_every``); fewer tests,
            lower thresholds, and a key appears that much later.
        periods_share_windows: windows may meet several privacy periods though keys are selected
            (``Timeline.periods_met`` above 1); one person is several units in a key then, so
            thresholds rise for it.
        tests: instead of ``select_every``: how many tests of a key a window has, at growing
            distances (test j of n at trigger ⌈T (j/n)²⌉), or a list of triggers that ends with
            the last one.
        skip: pairs on keys that are published already take no selection weight; more keys at the
            same error.  Tests are 16 a window then, unless ``tests`` says otherwise.  Default:
            wherever it can be (mechanism.md section 9); ``false`` turns it off.
        allow_large_delta: ``true`` takes a delta above 0.01, which lets a program reveal everything
            about more than one unit in 100, and is refused otherwise.
    """

    pre_threshold: Annotated[int, msgspec.Meta(ge=0, le=limits.MAX_PAIRS)] = 0
    refresh_every: Positive | None = None
    combine: bool = False
    select_every: Positive | None = None
    periods_share_windows: bool = False
    tests: Positive | tuple[int, ...] | None = None
    skip: bool | None = None
    allow_large_delta: bool = False


class Privacy(MechanismFields, frozen=True):
    """The guarantee, and the division of its budget.

    Attributes:
        epsilon, delta: the guarantee for one unit (per period, if the timeline has one).
        contributions: C, admitted (record, window) pairs of a unit.
        strategy: how prefixes are noised; ``auto``: with public keys by ``blt`` or ``geometric``,
            whichever has the least error, with others by ``blt`` (`accounting.budget.allocation`).
        optimise: what ``auto`` compares families by: the error at the promise of one period, or at
            an equal promise for a person of all periods.
        per_key_bound: k, the most records of a (unit, window, key) that count; value columns then
            need sqrt(C / k) times less noise.
        weights: decaying weights of a unit's pairs in selection.
        usual_weights: ``weights`` are those of a job that names none: where published keys are
            skipped unasked they give way to ``Design.weights``.  No part of the hash.
    """

    epsilon: float
    delta: float
    contributions: Contributions
    strategy: StrategyName = "blt"
    optimise: Optimise = "period"
    per_key_bound: Positive | None = None
    weights: SelectionWeights | None = None
    usual_weights: bool = False

    def check(self) -> None:
        """Refuse budgets that are no guarantee."""
        if not 0 < self.epsilon <= limits.MAX_EPSILON:
            raise UsageError(
                "budget.epsilon",
                f"must be positive and finite, at most {limits.MAX_EPSILON:g}",
                "write e.g. 1.0",
            )
        if self.delta == 0 and self.strategy not in ("geometric", "auto"):
            raise UsageError(
                "budget.delta",
                f"must be above 0 with strategy '{self.strategy}', whose noise is Gaussian",
                "write 1e-9, or use strategy 'geometric' and public keys",
            )
        if self.delta != 0 and not limits.MIN_DELTA <= self.delta < 1:
            raise UsageError(
                "budget.delta",
                f"must be 0, or at least {limits.MIN_DELTA:g} and below 1",
                "write 1e-9",
            )
        switch = "mechanism.allow_large_delta = true"
        check_delta(self.delta, self.allow_large_delta, "budget.delta", switch)
        check_bounds(self, job_field)
        if self.weights is not None:
            self.weights.check(self.contributions, vanishing=bool(self.skip))
        if self.combine and not (self.weights and self.per_key_bound == 1):
            raise UsageError(
                "mechanism.combine",
                "adds a weighted stream to counts in which each unit is 1, so it needs both",
                "set weights and per_key_bound = 1, or omit it",
            )
        if self.skip:
            if self.weights is None:
                raise UsageError(
                    "mechanism.skip",
                    "saves selection weight, and without weights every pair has the same",
                    "set weights = { offset = 1, power = 2 }, or omit skip",
                )
            if self.per_key_bound not in (None, 1):
                raise UsageError(
                    "mechanism.skip",
                    "takes a per_key_bound of 1, or none",
                    "set one of the two, or omit skip",
                )
            if self.contributions > limits.MAX_SKIPPING:
                raise UsageError(
                    "mechanism.skip",
                    f"takes at most {limits.MAX_SKIPPING} contributions",
                    "lower contributions, or omit skip",
                )
