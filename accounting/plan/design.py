"""The joint meaning of a plan's settings: resolved once, read by budget, step and guarantee.

A job's mode, its key list, its columns and the options of selection decide a handful of things
about the flow.  They are decided here and nowhere else.

**Memory** (mechanism.md section 9): whether and how long later windows know what a window has
published.  ``Plan.remember`` is ``run`` (for as long as the run lives), a duration, or ``never``; a
plan that says nothing remembers where it selects keys in more than one window.

**Skipping** (mechanism.md section 9): whether pairs on published keys take a selection weight, and
which.  A job that says ``skip`` is taken at its word: what does not go with it is refused elsewhere
(`accounting.plan.privacy`, `accounting.plan.plan`).  One that says nothing skips where all of it
goes together and something is saved.
"""

import bisect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from dpstream.accounting import limits
from dpstream.accounting.aggregates import COUNT, DerivedSum, derived_sums, kind_of, streams_of
from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import UsageError
from dpstream.accounting.fields import Aggregate, ValueStream
from dpstream.accounting.limits import DECODE_BITS, MIXED_BITS
from dpstream.accounting.mixing import Cells
from dpstream.accounting.plan.timeline import schedule_of, triggers_of_tests
from dpstream.accounting.weights import SelectionWeights, usual_weights

if TYPE_CHECKING:
    from dpstream.accounting.plan.plan import Plan
    from dpstream.accounting.plan.privacy import Privacy
    from dpstream.accounting.plan.timeline import Timeline


def remembers(plan: "Plan") -> bool:
    """Return whether a window publishes keys of earlier windows from its start."""
    timeline = plan.timeline
    if plan.public_keys is not None:
        return False
    several = timeline.end is None or timeline.windows > 1
    return several and plan.remember != "never"


def remembered_for(plan: "Plan") -> int | None:
    """Return how many trigger times a selection is remembered for; ``None``: for the run."""
    if not isinstance(plan.remember, int):
        return None
    return plan.remember // plan.timeline.trigger_every


def check_remember(plan: "Plan") -> None:
    """Refuse what cannot be remembered, and durations that the triggers do not divide."""
    if plan.remember in (None, "never"):
        return
    if plan.public_keys is not None:
        raise UsageError(
            "remember_keys", "public keys are known in every window", "omit it, or public_keys"
        )
    every = plan.timeline.trigger_every
    if isinstance(plan.remember, int) and (plan.remember <= 0 or plan.remember % every):
        raise UsageError(
            "remember_keys",
            "must be a positive multiple of release_every",
            "write 'run', 'never', or a duration such as '30d'",
        )


def suits(plan: "Plan") -> bool:
    """Return whether the records and the time axis of a plan go with skipping.

    Records that ids name are decided one trigger time after the other, by what is kept beside their
    decisions (`dp_transforms.bounding`), and published keys are not looked up there.  An event
    ahead of its stamp counts at a later trigger time than it is decided at, which passes over files
    that join cannot tell apart.
    """
    timeline = plan.timeline
    return plan.record_id is None and timeline.max_skew == 0 and _apart(timeline)


def _apart(timeline: "Timeline") -> bool:
    """Whether windows are far enough apart: bits of a record's windows share a word with its
    indices, and a live stream waits at each test."""
    if timeline.windows_per_record > limits.MAX_SKIPPING_WINDOWS:
        return False
    return timeline.end is not None or timeline.slide >= limits.LEAST_SKIPPING_SLIDE


def skips(
    privacy: "Privacy",
    selects: bool,
    triggers: int,
    suited: bool,
    remembers: bool = False,
) -> bool:
    """Return whether pairs on published keys take no selection weight.

    Args:
        selects: keys are selected, not public; triggers: T.
        suited: ``suits``; remembers: later windows know what was published.
    """
    if privacy.skip is not None:
        return privacy.skip
    return (
        suited
        and selects
        and privacy.weights is not None
        and not privacy.weights.by_size
        and privacy.per_key_bound in (None, 1)
        and privacy.contributions <= limits.MAX_SKIPPING
        and privacy.select_every is None
        and (remembers or len(schedule_of(privacy, triggers, True) or ()) > 1)
    )


def weights_of(privacy: "Privacy", skipping: bool) -> SelectionWeights | None:
    """Return the weights of a unit's pairs: the job's own, unless it named none and skips
    unasked.
    """
    if not (skipping and privacy.skip is None and privacy.usual_weights):
        return privacy.weights
    kind = {"combine": privacy.combine, "selects": True, "fused": False}
    return usual_weights(privacy.contributions, **kind, skip=True) or privacy.weights


def hindrance(plan: "Plan") -> str | None:
    """Return the field of the job that keeps a plan with weights from skipping, or ``None``.

    ``None`` means that the plan skips, or has no weights to spare.
    """
    privacy, timeline = plan.privacy, plan.timeline
    if plan.design.skips or not plan.design.weighted:
        return None
    named = {
        "mechanism.skip": privacy.skip is False,
        "mechanism.weights.size_share": bool(privacy.weights and privacy.weights.by_size),
        "mechanism.select_every": privacy.select_every is not None,
        "per_key_bound": privacy.per_key_bound not in (None, 1),
        "contributions": privacy.contributions > limits.MAX_SKIPPING,
        "table.record_id": plan.record_id is not None,
        "max_skew": timeline.max_skew > 0,
        "slide": not _apart(timeline),
    }
    return next((field for field, hinders in named.items() if hinders), "one test a window")


#: How long the exact set of a key's units is kept: not at all (public keys without a count of
#: units, or pairs are admitted with a bound per key and say which of them is the first), until the
#: key is selected, or until the window closes.
UnitSets = Literal["none", "until selected", "window"]
#: Where a published count of units gets its noise: none is published, it is the selection stream
#: continued, or it has a stream of its own.
UnitsFrom = Literal["none", "selection", "own stream"]


class Design(msgspec.Struct, frozen=True):
    """A plan, resolved.

    Attributes:
        selects: keys are selected (there is no public list): once a window, and then published to
            its end.
        unit_sets: how long the exact set of a key's units is kept.
        units_from: where a published count of units gets its noise.
        per_key: k, the most records of a (unit, window, key) that count; ``None``: no such bound.
            BOUND does not admit a record beyond it, which takes nothing of C, and says which pair
            is the first of its key.
        ranked: the order of a unit's pairs matters after BOUND.
        weighted: selection counts a unit's pairs with falling weights.
        weights: these weights.
        units_column: the count-of-units column, if any.
        streams: the noisy running sums behind the columns.
        derived: sums without a stream of their own, made from a mean's two.
        sums: integers kept per key: the streams, and the weighted count of units.
        units_alone: the most units that one person can be in a (key, round), as thresholds allow
            for.
        triggers: T, triggers of a window.
        refresh_every: triggers between two publications of a selected key.
        select_every: triggers between two tests of a key; the last trigger is always one.
        schedule: triggers of the tests where they are not ``select_every`` apart.
        skips: pairs on published keys take no selection weight.
        remembers: a window publishes from its start what earlier ones selected, and tests it no
            more; remembered_for: so many trigger times after the selection, ``None``: for the run.
        cells: how the noise of public keys is mixed, if it is.
    """

    selects: bool
    unit_sets: UnitSets
    units_from: UnitsFrom
    per_key: int | None
    ranked: bool
    weighted: bool
    units_column: Aggregate | None
    streams: tuple[ValueStream, ...]
    derived: tuple[DerivedSum, ...]
    sums: int
    units_alone: int
    triggers: int
    refresh_every: int
    select_every: int
    cells: Cells | None = None
    schedule: tuple[int, ...] | None = None
    skips: bool = False
    weights: SelectionWeights | None = None
    remembers: bool = False
    remembered_for: int | None = None

    @property
    def inverse_norm2(self) -> float:
        """The factor, squared, by which a mixing enlarges a record's effect: 1 without a mixing."""
        return 1.0 if self.cells is None else self.cells.inverse_norm2

    @property
    def decode_bits(self) -> int:
        """Released prefixes are multiples of 2^-decode_bits of the grid."""
        return DECODE_BITS if self.cells is None else MIXED_BITS

    @property
    def by_size(self) -> bool:
        """Return whether selection weights go by the number of a unit's pairs."""
        return self.weights is not None and self.weights.by_size

    @property
    def once_per_key(self) -> bool:
        """Return whether only the first record of a (unit, window, key) counts."""
        return self.per_key == 1

    @property
    def counts_units(self) -> bool:
        """Return whether the published count of records is one of units.

        Geometric noise can test it: a single test takes truncated noise, of a count that is noised
        once.
        """
        counted = any(stream.name == COUNT for stream in self.streams)
        return counted and self.once_per_key and (self.tests > 1 or self.value_steps == 1)

    @property
    def published_once(self) -> bool:
        """Return whether a key is published a single time a window: at its only test, at the
        close.
        """
        return self.selects and self.tests == 1 and not self.remembers

    @property
    def value_steps(self) -> int:
        """Steps of a published stream: one where keys are published once, else the triggers."""
        return 1 if self.published_once else self.triggers

    @property
    def admits_per_key(self) -> bool:
        """Return whether there is a bound per key, which BOUND keeps."""
        return self.per_key is not None

    @property
    def packs_indices(self) -> bool:
        """Return whether a unit's count in the store holds its indices too
        (`dp_transforms.skipping`).

        With a bound per key it does not: each pair with an index is marked, and marks are counted.
        """
        return self.skips and not self.admits_per_key

    @property
    def units_apart(self) -> bool:
        """Return whether a published count of units has a stream of its own."""
        return self.units_from == "own stream"

    @property
    def selection_published(self) -> bool:
        """Return whether the selection stream goes on as the published count of units."""
        return self.selects and self.units_from == "selection"

    @property
    def window_sets(self) -> bool:
        """Return whether a key's unit set is kept until its window closes."""
        return self.unit_sets == "window"

    @property
    def tests(self) -> int:
        """The number of tests of a key in one window = steps of the selection stream."""
        return len(self.test_triggers)

    @property
    def test_triggers(self) -> Int64:
        """(tests,) triggers at which keys are tested; read-only."""
        return triggers_of_tests(self.triggers, self.select_every, self.schedule)

    def selection_step_index(self, trigger: int) -> int:
        """Step of the selection stream that holds a trigger's data: the next test, 1-based."""
        if self.schedule is None:
            return -(-trigger // self.select_every)
        return bisect.bisect_left(self.schedule, trigger) + 1

    def selects_at(self, trigger: int) -> bool:
        """Return whether keys are tested at a trigger."""
        if self.schedule is None:
            return trigger % self.select_every == 0 or trigger == self.triggers
        return trigger in self.schedule


def design_of(plan: "Plan") -> Design:
    """Resolve a plan."""
    timeline = plan.timeline
    selects, met = plan.public_keys is None, timeline.periods_met
    given = plan.privacy, plan.aggregates, selects, timeline.triggers, met, plan.cells
    return resolve(*given, suits(plan), remembers(plan), remembered_for(plan))


def resolve(
    privacy: "Privacy",
    aggregates: Sequence[Aggregate],
    selects: bool,
    triggers: int = 1,
    periods_met: int = 1,
    cells: Cells | None = None,
    suited: bool = False,
    remembers: bool = False,
    remembered_for: int | None = None,
) -> Design:
    """Return what a job's settings make the mechanism do: what is noised, when, and by which tests.

    Args:
        aggregates: the published columns.
        selects: keys are selected, not public.
        triggers: T, triggers of a window; a job that publishes once has one.
        periods_met: the most privacy periods that one window can meet.
        cells: how the noise of public keys is mixed.
        suited: records and time axis go with skipping (``accounting.plan.design``).
        remembers, remembered_for: see ``accounting.plan.design``.
    """
    skipping = skips(privacy, selects, triggers, suited, remembers)
    per_key = privacy.per_key_bound
    weighted = privacy.weights is not None
    counted = next((a for a in aggregates if kind_of(a).counts_units), None)
    refresh_every = privacy.refresh_every or max(1, triggers // 100)
    select_every = min(privacy.select_every or refresh_every, triggers)
    derived = derived_sums(aggregates)
    streams = streams_of(aggregates, {made.name for made in derived})
    counting, bounded = counted is not None, per_key is not None
    return Design(
        selects=selects,
        unit_sets=_unit_sets(selects, counting, bounded),
        units_from=_units_from(counted, selects, weighted or skipping),
        per_key=per_key,
        ranked=weighted or per_key is not None,
        weighted=weighted,
        units_column=counted,
        streams=streams,
        derived=derived,
        sums=len(streams) + weighted,
        units_alone=periods_met if privacy.periods_share_windows else 1,
        triggers=triggers,
        refresh_every=refresh_every,
        select_every=select_every,
        cells=cells,
        schedule=schedule_of(privacy, triggers, skipping) if selects else None,
        skips=skipping,
        weights=weights_of(privacy, skipping),
        remembers=remembers,
        remembered_for=remembered_for,
    )


def _unit_sets(selects: bool, counting: bool, bounded: bool) -> UnitSets:
    """``counting``: units are counted after the selection too; ``bounded``: there is a bound per
    key, which BOUND keeps."""
    if bounded:
        return "none"
    if counting:
        return "window"
    return "until selected" if selects else "none"


def _units_from(counted: Aggregate | None, selects: bool, weighted: bool) -> UnitsFrom:
    """The selection stream goes on as the count of units only if it is a plain count."""
    if counted is None:
        return "none"
    return "selection" if selects and not weighted else "own stream"
