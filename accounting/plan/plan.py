"""The Plan: every public parameter of a job, fixed before the first record.

All fields are public and may be printed, logged and hashed.  ``Plan.hash`` names the plan in
the store, in every noise node's name and in every release; performance settings (batch rows,
cache, workers) are a different class and are not part of it.
"""

import math
import re
from fractions import Fraction
from typing import Literal

import msgspec

from dpstream.accounting import limits
from dpstream.accounting.errors import UsageError
from dpstream.accounting.plan.canonical import plan_hash
from dpstream.accounting.plan.timeline import Timeline
from dpstream.accounting.weights import SelectionWeights

#: Changes when the same plan would give other releases; part of the plan hash.
MECHANISM_VERSION = 2

FieldType = Literal["string", "int", "bool", "bytes"]
Kind = Literal["count", "sum", "mean", "units"]
Mode = Literal["sticky", "rounds"]
StrategyName = Literal["tree", "toeplitz", "blt"]


class Field(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A column that identifies something (the unit, a part of the key), with its type."""

    column: str
    type: FieldType = "string"


class Aggregate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One published column.

    Attributes:
        name: column of the release.
        kind: ``count`` of records, ``sum`` or ``mean`` of ``column`` clamped to ``clamp`` on
            multiples of ``grid``, ``units`` = count of distinct units of the window.
        share: weight in the division of the value budget (default: equal).
    """

    name: str
    kind: Kind
    column: str | None = None
    clamp: tuple[float, float] | None = None
    grid: float = 1.0
    share: float | None = None

    def grid_bounds(self) -> tuple[int, int]:
        """(lo, hi) in grid units, snapped inward; exact in rationals."""
        if self.clamp is None:
            raise ValueError("only sum and mean have bounds")
        grid = Fraction(str(self.grid))
        return (
            math.ceil(Fraction(str(self.clamp[0])) / grid),
            math.floor(Fraction(str(self.clamp[1])) / grid),
        )

    def check(self, index: int) -> None:
        """Refuse an aggregate whose sensitivity is not bounded by public figures."""
        where = f"aggregate[{index}]"
        if not self.name or self.name.startswith("_"):
            raise UsageError(f"{where}.name", "must be non-empty and not start with '_'", "rename")
        if self.share is not None and not 0 < self.share < math.inf:
            raise UsageError(f"{where}.share", "must be a positive number", "write e.g. 1.0")
        if self.kind in ("count", "units"):
            if self.column is not None or self.clamp is not None:
                raise UsageError(
                    where, f"kind '{self.kind}' takes no column and no clamp", "remove them"
                )
            return
        if self.column is None or self.clamp is None:
            raise UsageError(
                where,
                f"kind '{self.kind}' needs a column and public bounds",
                "add column = '...' and clamp = [low, high]",
            )
        if not all(math.isfinite(x) for x in (*self.clamp, self.grid)) or self.grid <= 0:
            raise UsageError(
                where, "clamp and grid must be finite and grid positive", "correct them"
            )
        lo, hi = self.grid_bounds()
        if lo > hi or lo == hi == 0:
            raise UsageError(
                f"{where}.clamp",
                "must be [low, high] with a multiple of the grid other than 0 inside",
                "widen the clamp or choose a finer grid",
            )
        if max(abs(lo), abs(hi)) > limits.MAX_GRID_VALUE:
            raise UsageError(
                f"{where}.grid",
                f"bounds exceed {limits.MAX_GRID_VALUE} grid units",
                "choose a coarser grid",
            )


class ValueStream(msgspec.Struct, frozen=True):
    """One noisy running sum behind the aggregates.

    Attributes:
        name: ``count`` or the name of the aggregate it was made for.
        column: input column, ``None`` for the constant 1 of a count.
        lo, hi: clamp in grid units; ``mid`` is subtracted after clamping.
        sensitivity: L = the most one record adds, in grid units.
        grid: size of a grid unit.
        share: weight of this stream in the value budget.
    """

    name: str
    column: str | None
    lo: int
    hi: int
    mid: int
    sensitivity: int
    grid: float
    share: float


class Privacy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is promised and how the budget is divided.

    Attributes:
        epsilon, delta: the guarantee for one unit (per period, if the timeline has one).
        contributions: C, admitted (record, window) pairs of a unit.
        mode: ``sticky`` (a key is selected once a window, then always published) or
            ``rounds`` (Algorithm 2: select, release, restart).
        strategy: how prefixes are noised.
        theta: share of delta kept for the thresholds.
        pre_threshold: mu_count; a key is tested only with more units than this.
        refresh_every: triggers between publications of a selected key (sticky).
        selection_share: share of mu^2 for key selection (default: best for the mode).
        final_flush: rounds mode publishes every once-selected key at window close.
        per_key_bound: 1 = one record per (unit, window, key) counts (sticky); value columns
            then need sqrt(C) times less noise.
        weights: decaying weights of a unit's pairs in selection (sticky).
        combine: test the weighted count together with the published plain count.
        select_every: triggers between two tests of a key (sticky; default: ``refresh_every``).
            Fewer tests need less noise and lower thresholds; a key appears that much later.
        periods_share_windows: a window may meet several privacy periods though keys are selected
            (``Timeline.periods_met`` above 1): one person is several units in a key then, so
            thresholds rise until that many publish nothing by themselves.
    """

    epsilon: float
    delta: float
    contributions: int
    mode: Mode = "sticky"
    strategy: StrategyName = "blt"
    theta: float = 0.4
    pre_threshold: int = 0
    refresh_every: int | None = None
    selection_share: float | None = None
    final_flush: bool = False
    per_key_bound: int | None = None
    weights: SelectionWeights | None = None
    combine: bool = False
    select_every: int | None = None
    periods_share_windows: bool = False

    def check(self) -> None:
        """Refuse budgets that are no guarantee."""
        if not 0 < self.epsilon <= limits.MAX_EPSILON:
            raise UsageError(
                "privacy.epsilon",
                f"must be positive and finite, at most {limits.MAX_EPSILON:g}",
                "write e.g. 1.0",
            )
        if not 0 < self.delta < 1:
            raise UsageError("privacy.delta", "must lie strictly between 0 and 1", "write 1e-9")
        if not 1 <= self.contributions <= limits.MAX_CONTRIBUTIONS:
            raise UsageError(
                "privacy.contributions",
                f"must be a whole number from 1 to {limits.MAX_CONTRIBUTIONS}",
                "choose how many records of one unit may count",
            )
        if not 0 < self.theta < 1:
            raise UsageError("privacy.theta", "must lie strictly between 0 and 1", "write 0.4")
        if not 0 <= self.pre_threshold <= limits.MAX_PAIRS:
            raise UsageError(
                "privacy.pre_threshold", "must be a whole number, 0 or more", "write 0"
            )
        if self.refresh_every is not None and self.refresh_every < 1:
            raise UsageError("privacy.refresh_every", "must be 1 or more", "omit it")
        if self.selection_share is not None and not 0 < self.selection_share < 1:
            raise UsageError("privacy.selection_share", "must lie between 0 and 1", "omit it")
        self._check_selection()

    def _check_selection(self) -> None:
        if self.per_key_bound not in (None, 1):
            raise UsageError(
                "privacy.per_key_bound", "must be 1 or omitted", "raise contributions instead"
            )
        if self.select_every is not None and self.select_every < 1:
            raise UsageError("privacy.select_every", "must be 1 or more", "omit it")
        for name in ("per_key_bound", "weights", "combine", "select_every"):
            if getattr(self, name) and self.mode != "sticky":
                raise UsageError(
                    f"privacy.{name}", "needs mode 'sticky' (one selection a window)", "omit it"
                )
        if self.weights is not None:
            self.weights.check(self.contributions)
        if self.combine and not (self.weights and self.per_key_bound):
            raise UsageError(
                "privacy.combine",
                "adds a weighted stream to plain counts of units, so it needs both",
                "set weights and per_key_bound = 1, or omit it",
            )


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every public parameter of one job.

    Attributes:
        source: public identity of the input (kind and path, topic or table).
        stamp: ``event_time`` or the column that carries the source stamp.
        unit: the privacy unit's column.
        key: columns of the key, in order.
        event_time: column of the event time.
        aggregates: what is published.
        timeline: windows and triggers.
        privacy: guarantee and split.
        public_keys: digest of a public key list, ``None`` when keys are selected.
        record_id: column that names a record of its unit wherever it is delivered; ``None``:
            a record is named by its position in the source.
    """

    source: str
    unit: Field
    key: tuple[Field, ...]
    event_time: str
    aggregates: tuple[Aggregate, ...]
    timeline: Timeline
    privacy: Privacy
    stamp: str = "event_time"
    public_keys: str | None = None
    record_id: Field | None = None
    mechanism_version: int = MECHANISM_VERSION

    def check(self) -> "Plan":
        """Refuse a plan that is not sound or not runnable; returns the plan itself."""
        self.timeline.check()
        self.privacy.check()
        if not 1 <= len(self.key) <= limits.MAX_KEY_COLUMNS:
            raise UsageError(
                "schema.key", f"needs 1 to {limits.MAX_KEY_COLUMNS} columns", "list the key columns"
            )
        if not 1 <= len(self.aggregates) <= limits.MAX_AGGREGATES:
            raise UsageError(
                "aggregate",
                f"needs 1 to {limits.MAX_AGGREGATES} entries",
                "add [[aggregate]] tables",
            )
        if self.record_id is not None and self.record_id.type == "bool":
            raise UsageError("schema.record_id", "cannot tell records apart", "name an id column")
        for index, aggregate in enumerate(self.aggregates):
            aggregate.check(index)
        self._check_names()
        self._check_strategy()
        if self.units_aggregate and self.privacy.mode != "sticky":
            raise UsageError(
                "aggregate.kind",
                "'units' is published from the selection stream, which only mode 'sticky' keeps",
                "use mode = 'sticky' or remove the aggregate",
            )
        if self.public_keys is not None and self.privacy.mode != "sticky":
            raise UsageError(
                "privacy.mode", "public keys need no selection, so no rounds", "use 'sticky'"
            )
        return self

    def _check_strategy(self) -> None:
        privacy = self.privacy
        if privacy.weights is not None and not self.selects:
            raise UsageError("privacy.weights", "public keys need no selection", "omit it")
        # Publications: new selections, refreshes before the last trigger, the last (always a test).
        refreshes = self.refresh_every < self.timeline.triggers
        uneven = refreshes and self.refresh_every % self.select_every
        if self.units_aggregate and self.selects and uneven:
            raise UsageError(
                "privacy.select_every",
                "must divide refresh_every where a count of units is published",
                "omit it, or choose a divisor",
            )
        plain = any(a.kind in ("count", "mean", "units") for a in self.aggregates)
        if privacy.combine and not plain:
            raise UsageError(
                "privacy.combine", "needs a published count", "add an aggregate of kind 'count'"
            )
        most = limits.MAX_TOEPLITZ_TRIGGERS
        if privacy.strategy == "toeplitz" and self.timeline.triggers > most:
            raise UsageError(
                "privacy.strategy",
                f"'toeplitz' takes at most {most} triggers a window",
                "use 'blt', which has the same error for any number, or 'tree'",
            )

    def _check_names(self) -> None:
        names = [f.column for f in self.key] + [a.name for a in self.aggregates]
        names += [f"{a.name}_sd" for a in self.aggregates]
        reserved = {
            "release_id",
            "window_start",
            "window_end",
            "trigger",
            "trigger_time",
            "plan_hash",
            "run_id",
        }
        used = [f.column for f in self.key]
        inside = {"unit", "stamp", "event_cut", "partition", "offset", "window", "leaf", "rank"}
        if any(not n or n[0] == "_" or n in inside or re.fullmatch(r"v\d+", n) for n in used):
            raise UsageError(
                "schema.key",
                "columns must not be empty, start with '_', look like 'v0', or be named "
                + ", ".join(sorted(inside)),
                "rename the column in the input",
            )
        # "count" also names the running count behind a mean; two streams must never share a name.
        if any(a.name == "count" and a.kind in ("sum", "mean") for a in self.aggregates):
            raise UsageError("aggregate.name", "'count' is reserved for kind 'count'", "rename it")
        if len(set(names)) != len(names) or reserved & set(names):
            raise UsageError(
                "aggregate.name",
                "release columns must be distinct and not " + ", ".join(sorted(reserved)),
                "rename the aggregate or key column",
            )

    @property
    def units_aggregate(self) -> Aggregate | None:
        """The count-of-units column, if any."""
        return next((a for a in self.aggregates if a.kind == "units"), None)

    @property
    def selects(self) -> bool:
        """Whether keys must be selected (no public list)."""
        return self.public_keys is None

    @property
    def counts_units(self) -> bool:
        """Whether exact unit sets are kept (selection, or a published count of units)."""
        return self.selects or self.keeps_counting_units

    @property
    def keeps_counting_units(self) -> bool:
        """Whether a key's unit set lives until its window closes."""
        return self.units_aggregate is not None or bool(self.privacy.per_key_bound)

    @property
    def window_sets(self) -> bool:
        """Whether a key's unit set outlives its selection (a round's set ends with the round)."""
        return self.privacy.mode == "sticky" and self.keeps_counting_units

    @property
    def units_stream_apart(self) -> bool:
        """Whether a published count of units needs noise of its own: it is not the selection
        stream continued when keys are public or selected by weighted counts."""
        published = self.units_aggregate is not None
        return published and (not self.selects or self.privacy.weights is not None)

    @property
    def ranked(self) -> bool:
        """Whether the order of a unit's pairs matters after BOUND."""
        return self.privacy.weights is not None or bool(self.privacy.per_key_bound)

    @property
    def sums(self) -> int:
        """Integer sums kept per key: the value streams, and the weighted count of units."""
        return len(self.value_streams) + (self.privacy.weights is not None)

    @property
    def units_alone(self) -> int:
        """The most units that one person can be in a (key, round), as thresholds allow for."""
        return self.timeline.periods_met if self.privacy.periods_share_windows else 1

    @property
    def refresh_every(self) -> int:
        """Triggers between two publications of a selected key (sticky)."""
        return self.privacy.refresh_every or max(1, self.timeline.triggers // 100)

    @property
    def select_every(self) -> int:
        """Triggers between two tests of a key; the window's last trigger is always one."""
        if self.privacy.mode != "sticky":
            return 1
        return min(self.privacy.select_every or self.refresh_every, self.timeline.triggers)

    @property
    def selection_leaves(self) -> int:
        """Tests of a key in one window = leaves of the selection stream."""
        return -(-self.timeline.triggers // self.select_every)

    def selection_leaf(self, trigger: int) -> int:
        """Leaf of the selection stream that holds a trigger's data: the next test, 1-based."""
        return -(-trigger // self.select_every)

    def selects_at(self, trigger: int) -> bool:
        """Whether keys are tested at a trigger."""
        return trigger % self.select_every == 0 or trigger == self.timeline.triggers

    @property
    def value_streams(self) -> tuple[ValueStream, ...]:
        """The noisy running sums behind the aggregates; a mean reuses an existing count."""
        streams: list[ValueStream] = []
        needs_count = [a for a in self.aggregates if a.kind in ("count", "mean")]
        if needs_count:
            share = next((a.share for a in needs_count if a.kind == "count" and a.share), 1.0)
            streams.append(ValueStream("count", None, 1, 1, 0, 1, 1.0, share))
        for a in self.aggregates:
            if a.kind in ("sum", "mean"):
                lo, hi = a.grid_bounds()
                mid = (lo + hi) // 2 if a.kind == "mean" else 0
                bound = max(abs(lo - mid), abs(hi - mid), 1)
                streams.append(
                    ValueStream(a.name, a.column, lo, hi, mid, bound, a.grid, a.share or 1.0)
                )
        return tuple(streams)

    @property
    def hash(self) -> str:
        """128-bit hex digest of every public parameter (``accounting.plan.canonical``)."""
        return plan_hash(self)
