"""The Plan: every public parameter of a job, fixed before the first record.

All fields are public and may be printed, logged and hashed.  ``Plan.hash`` names the plan in
the store, in every noise node's name and in every release; performance settings (batch rows,
cache, workers) are a different class and are not part of it.

**Selection weights by the number of a unit's pairs** (`accounting.weights`, `suits_sizes`).  What a
pair adds must be fixed before it is counted, and with such weights it is fixed by the number of all
pairs of its unit.  So a unit's pairs must be decided together: all of them lie in one window (the
job has one window, or a privacy period of a window's length), the window has one trigger, and no
record is decided before its event's trigger.  A record that turns up after its trigger is not
admitted at all, because its window is closed.

**Mechanisms** are what a budget is computed from: promises and a resolved design, without source,
time or schema.  A stream's plan is one way to such a mechanism.  A bounded job that has no timeline
and no event time makes one by itself, with one trigger and one window, and is calibrated by the
same rules.

**The canonical form** is what a plan's hash is computed from.  The hash names the plan in the store
and in every noise node.  Each field stands in it under its declared name (``msgspec.field(name=)``,
if the attribute was renamed), and not at all while it has its default, so that a field that is
added changes no hash.  A default that changes needs another `MECHANISM_VERSION`.  Tests pin the
hashes of twenty plans, and every field with its default.
"""

import functools
import hashlib
import re
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from dpstream.accounting import limits
from dpstream.accounting.aggregates import COUNT, kind_of
from dpstream.accounting.aggregates import check as check_aggregate
from dpstream.accounting.errors import UsageError
from dpstream.accounting.fields import Aggregate, Field, job_field
from dpstream.accounting.mixing import Cells
from dpstream.accounting.plan.design import Design, check_remember, design_of
from dpstream.accounting.plan.privacy import THETA, Privacy
from dpstream.accounting.plan.timeline import Timeline, check_tests


def suits_sizes(plan: "Plan") -> bool:
    """Return whether selection weights may go by the number of a unit's pairs in a plan."""
    return _hindrance(plan) is None


def check_sizes(plan: "Plan") -> None:
    """Refuse weights by size where a unit's pairs are not decided together."""
    weights = plan.privacy.weights
    if weights is None or not weights.by_size:
        return
    hindrance = _hindrance(plan)
    if hindrance is not None:
        raise UsageError(
            "mechanism.weights.size_share",
            f"weighs a unit's records by their number, which needs {hindrance}",
            "set that, or use weights = { offset = 3, power = 1.5 }, which go by their order",
        )


def _hindrance(plan: "Plan") -> str | None:
    """What is missing, in words."""
    timeline, privacy = plan.timeline, plan.privacy
    needs = {
        "selected keys": plan.public_keys is None,
        "per_key_bound = 1": privacy.per_key_bound == 1,
        "one trigger a window": timeline.triggers == 1,
        "all records of a unit in one window (budget.covers as long as window)": (
            timeline.one_window_a_period or (timeline.end is not None and timeline.windows == 1)
        ),
        "max_skew = 0": timeline.max_skew == 0,
        "no mechanism.skip": not privacy.skip,
    }
    return next((words for words, there in needs.items() if not there), None)


#: Changes when the same plan would give other releases of the same files; part of the plan hash.
#: Records that were missing before and are read now change them too: 3 reads dates in text, ids of
#: 2^63 and more, exact decimals and extension types.
MECHANISM_VERSION = 3


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
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
        query: digest of the row-local query that rows go through before they are records, with
            the public tables it looks up; ``None``: there is none.
        cells: how the noise of public keys is mixed; ``None``: each has noise of its own.
        reading: how the source's texts are read, as JSON; ``None``: as RFC 4180 and RFC 3339 have
            them.
        remember: how long later windows know what a window has published: ``run``, micros, or
            ``never``; ``None``: see `accounting.plan.design`.
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
    query: str | None = None
    cells: Cells | None = None
    reading: str | None = None
    remember: Literal["run", "never"] | int | None = None

    def once(self) -> "Plan":
        """Return the plan of one answer at the end of its time; only that time is checked.

        Raises:
            UsageError, PolicyError: see `Timeline.check` and `Timeline.once`.
        """
        self.timeline.check()
        replace = msgspec.structs.replace
        privacy = replace(self.privacy, refresh_every=None, select_every=None)
        return replace(self, timeline=self.timeline.once(), privacy=privacy)

    def check(self) -> "Plan":
        """Refuse a plan that is not sound or not runnable; returns the plan itself."""
        self.timeline.check()
        self.privacy.check()
        if not 1 <= len(self.key) <= limits.MAX_KEY_COLUMNS:
            raise UsageError(
                "key",
                f"needs 1 to {limits.MAX_KEY_COLUMNS} columns",
                "list so many key columns; the key of a workload's job may leave out attributes",
            )
        if not 1 <= len(self.aggregates) <= limits.MAX_AGGREGATES:
            raise UsageError(
                "aggregate",
                f"needs 1 to {limits.MAX_AGGREGATES} entries",
                'write e.g. aggregate.records = { kind = "count" } in the job',
            )
        if self.record_id is not None and self.record_id.type == "bool":
            raise UsageError("table.record_id", "cannot tell records apart", "name an id column")
        for index, aggregate in enumerate(self.aggregates):
            check_aggregate(aggregate, index)
        self._check_names()
        self._check_strategy()
        if self.cells is not None:
            self._check_cells()
        return self

    def _check_strategy(self) -> None:
        privacy, design = self.privacy, self.design
        if privacy.weights is not None and not design.selects:
            raise UsageError("mechanism.weights", "public keys need no selection", "omit it")
        # Publications: new selections, refreshes before the last trigger, the last (always a test).
        refreshes = design.refresh_every < self.timeline.triggers
        uneven = refreshes and design.refresh_every % design.select_every
        check_tests(privacy, self.timeline.triggers)
        check_remember(self)
        check_sizes(self)
        self._check_plain()
        for name in ("tests", "skip"):
            if getattr(privacy, name) and not design.selects:
                raise UsageError(job_field(name), "public keys need no selection", "omit it")
        if design.schedule is not None and design.units_from == "selection":
            raise UsageError(
                "mechanism.tests",
                "a count of units that is the selection continued is published at tests only",
                "set weights, which give it noise of its own, or use select_every",
            )
        if privacy.skip and self.record_id is not None:
            # A copy with other contents would take the index of the first once more (section 9).
            raise UsageError(
                "mechanism.skip", "is not for records that table.record_id names", "omit skip"
            )
        if privacy.skip and self.timeline.windows_per_record > limits.MAX_SKIPPING_WINDOWS:
            raise UsageError(
                "mechanism.skip",
                f"a record may be in at most {limits.MAX_SKIPPING_WINDOWS} windows with it",
                "use a larger slide, or omit skip",
            )
        if design.units_column and design.selects and uneven and design.schedule is None:
            raise UsageError(
                "mechanism.select_every",
                "must divide refresh_every where a count of units is published",
                "omit it, or choose a divisor",
            )
        kinds = [kind_of(a) for a in self.aggregates]
        if privacy.combine and not any(kind.uses_count or kind.counts_units for kind in kinds):
            raise UsageError(
                "mechanism.combine", "needs a published count", "add an aggregate of kind 'count'"
            )
        most = limits.MAX_TRIGGERS_OF.get(privacy.strategy, limits.MAX_TRIGGERS)
        if self.timeline.triggers > most:
            raise UsageError(
                "mechanism.strategy",
                f"'{privacy.strategy}' takes at most {most} triggers a window",
                "use 'blt', which has about the same error for any number, or 'tree'",
            )

    def _check_plain(self) -> None:
        """What goes with noise that is charged plain epsilon."""
        privacy, design = self.privacy, self.design
        if privacy.optimise != "period" and privacy.strategy != "auto":
            raise UsageError(
                "mechanism.optimise",
                f"says what 'auto' chooses by, and the strategy is '{privacy.strategy}'",
                "omit it, or use strategy 'auto'",
            )
        if privacy.strategy == "geometric" and design.selects:
            self._check_plain_selection()
        if not privacy.delta and design.triggers > limits.MAX_GEOMETRIC_TRIGGERS:
            raise UsageError(
                "budget.delta",
                "must be above 0: geometric noise takes at most "
                f"{limits.MAX_GEOMETRIC_TRIGGERS} triggers a window",
                "publish less often, or write 1e-9",
            )
        if not privacy.delta and (design.selects or self.cells is not None):
            raise UsageError(
                "budget.delta",
                "must be above 0 where keys are selected or cells mixed",
                "write 1e-9, or list the keys in public_keys",
            )

    def _check_plain_selection(self) -> None:
        """Counts that are tested have geometric noise of their own: every pair counts alike."""
        privacy = self.privacy
        for name in ("weights", "combine", "skip", "periods_share_windows"):
            if getattr(privacy, name):
                raise UsageError(
                    job_field(name),
                    "is for Gaussian noise: with strategy 'geometric' keys are selected by counts "
                    "of units",
                    "omit it, or the strategy (weights: 'uniform')"
                    if name == "weights"
                    else "omit it, or the strategy",
                )

    def _check_cells(self) -> None:
        privacy = self.privacy
        if self.public_keys is None:
            raise UsageError("cells", "are public keys", "name the list of all cells")
        if privacy.per_key_bound:
            raise UsageError(
                "per_key_bound",
                "saves nothing where cells share their noise: the effects of a unit's records on "
                "several cells add up",
                "omit it",
            )
        if privacy.strategy not in ("blt", "dense", "auto"):
            raise UsageError(
                "mechanism.strategy",
                f"nodes of '{privacy.strategy}' are integers, and mixed ones would not be",
                "use 'blt' or 'dense'",
            )
        if self.timeline.triggers > limits.MAX_MIXED_TRIGGERS:
            raise UsageError(
                "time.trigger",
                f"mixed cells take at most {limits.MAX_MIXED_TRIGGERS} triggers a window",
                "publish less often or use shorter windows",
            )
        if any(kind_of(a).counts_units for a in self.aggregates):
            raise UsageError(
                "aggregate.kind",
                "'units' is no sum over records, so its noise is not mixed",
                "count records, with contributions = 1 for a count of units",
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
        inside = {"unit", "stamp", "partition", "offset", "window", "rank"}
        if any(not n or n[0] == "_" or n in inside or re.fullmatch(r"v\d+", n) for n in used):
            raise UsageError(
                "key",
                "columns must not be empty, start with '_', look like 'v0', or be named "
                + ", ".join(sorted(inside)),
                "rename the column in the input",
            )
        # "count" also names the running count behind a mean; two streams must never share a name.
        if any(stream.name == COUNT for stream in self.design.streams if stream.column):
            raise UsageError("aggregate.name", "'count' is reserved for kind 'count'", "rename it")
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise UsageError(
                "aggregate.name",
                f"'{twice}' would name two columns of the release: keys, aggregates and their sds"
                " (NAME_sd) each need a name of their own",
                "give the aggregate another name",
            )
        if reserved & set(names):
            raise UsageError(
                "aggregate.name",
                "release columns must not be " + ", ".join(sorted(reserved)),
                "rename the aggregate or key column",
            )

    @functools.cached_property
    def design(self) -> Design:
        """The joint meaning of the settings, resolved once."""
        return design_of(self)

    @functools.cached_property
    def hash(self) -> str:
        """The 128-bit hex digest of every public parameter in the canonical form below."""
        return plan_hash(self)


class Resolved(Protocol):
    """A plan or a mechanism: promises, and what they mean together."""

    @property
    def privacy(self) -> Privacy:
        """Epsilon, delta, C and the options of selection."""

    @property
    def design(self) -> Design:
        """The joint meaning of the settings."""


class Mechanism(msgspec.Struct, frozen=True):
    """The mechanism that ``accounting.budget.allocation`` divides a budget for.

    Attributes:
        privacy: epsilon, delta, C and the options of selection.
        design: what the settings mean together.
        windows: windows that all of a unit's pairs lie in, ``None`` for a stream without end.
        periods_met: the most privacy periods that one window can meet; 1 without periods.
        periods: units that one person can have; 1 without periods, ``None`` without an end.
        selection_share: share of mu^2 for key selection, in comparisons that look for the best one;
            ``None``: the best known (`accounting.budget.shares`).
    """

    privacy: Privacy
    design: Design
    windows: int | None = 1
    periods_met: int = 1
    periods: int | None = 1
    selection_share: float | None = None

    @property
    def once(self) -> bool:
        """Return whether a key is tested a single time, in the one window there is."""
        return self.windows == 1 and self.design.tests == 1


_Promised = TypeVar("_Promised", Plan, Mechanism)


def with_privacy(plan: _Promised, **settings: Any) -> _Promised:
    """Return the plan with other fields of ``Privacy``; weights among them count as the job's
    own.
    """
    if "weights" in settings:
        settings = {"usual_weights": False} | settings
    privacy = msgspec.structs.replace(plan.privacy, **settings)
    return msgspec.structs.replace(plan, privacy=privacy)


def mechanism_of(plan: Plan) -> Mechanism:
    """Return the mechanism of a stream's plan."""
    timeline = plan.timeline
    windows = None if timeline.end is None else timeline.windows
    return Mechanism(plan.privacy, plan.design, windows, timeline.periods_met, timeline.periods)


def plan_hash(plan: "Plan") -> str:
    """Return 128-bit hex digest of every public parameter."""
    # What a job leaves open, a run that was begun says in its numbers.
    same = with_privacy(plan, skip=plan.privacy.skip or None, usual_weights=False)
    form = {"mechanism_version": plan.mechanism_version, "theta": THETA} | declared(same)
    encoded = msgspec.json.encode(form, order="sorted")
    return hashlib.blake2b(encoded, digest_size=16, person=b"dpstream-plan").hexdigest()


def declared(value: Any) -> Any:
    """Return a struct as JSON-able values: the fields that differ from their defaults, by name."""
    if not isinstance(value, msgspec.Struct):
        return [declared(part) for part in value] if isinstance(value, tuple) else value
    fields = [(field, getattr(value, field.name)) for field in msgspec.structs.fields(value)]
    return {field.encode_name: declared(part) for field, part in fields if part != field.default}
