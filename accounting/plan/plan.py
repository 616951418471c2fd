"""The Plan: every public parameter of a job, fixed before the first record.

All fields are public and may be printed, logged and hashed.  ``Plan.hash`` names the plan in
the store, in every noise node's name and in every release; performance settings (batch rows,
cache, workers) are a different class and are not part of it.
"""

import functools
import re
from typing import Literal

import msgspec

from dpstream.accounting import limits
from dpstream.accounting.aggregates import COUNT, kind_of
from dpstream.accounting.aggregates import check as check_aggregate
from dpstream.accounting.errors import UsageError
from dpstream.accounting.fields import Aggregate, Field, job_field
from dpstream.accounting.plan.canonical import plan_hash
from dpstream.accounting.plan.cells import Cells
from dpstream.accounting.plan.design import Design, design_of
from dpstream.accounting.plan.privacy import Privacy
from dpstream.accounting.plan.remembering import check_remember
from dpstream.accounting.plan.schedule import check_tests
from dpstream.accounting.plan.sizes import check_sizes
from dpstream.accounting.plan.timeline import Timeline

#: Changes when the same plan would give other releases; part of the plan hash.
MECHANISM_VERSION = 2
#: Strategies that end before others (``Timeline.check`` has the most of all).
_MOST_TRIGGERS = {
    "toeplitz": limits.MAX_TOEPLITZ_TRIGGERS,
    "dense": limits.MAX_DENSE_TRIGGERS,
    "geometric": limits.MAX_GEOMETRIC_TRIGGERS,
}


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
        remember: how long later windows know what a window has published: ``run``, micros, or
            ``never``; ``None``: see `accounting.plan.remembering`.
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
    remember: Literal["run", "never"] | int | None = None

    def once(self) -> "Plan":
        """The plan of one answer at the end of its time; only that time is checked.

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
                "key", f"needs 1 to {limits.MAX_KEY_COLUMNS} columns", "list the key columns"
            )
        if not 1 <= len(self.aggregates) <= limits.MAX_AGGREGATES:
            raise UsageError(
                "aggregate",
                f"needs 1 to {limits.MAX_AGGREGATES} entries",
                "add [[aggregate]] tables",
            )
        if self.record_id is not None and self.record_id.type == "bool":
            raise UsageError("table.record_id", "cannot tell records apart", "name an id column")
        for index, aggregate in enumerate(self.aggregates):
            check_aggregate(aggregate, index)
        self._check_names()
        self._check_strategy()
        if self.cells is not None:
            self._check_cells()
        if self.design.units_column and self.design.restarts:
            raise UsageError(
                "aggregate.kind",
                "'units' is published from the selection stream, which only mode 'sticky' keeps",
                "use mode = 'sticky' or remove the aggregate",
            )
        if self.public_keys is not None and self.design.restarts:
            raise UsageError(
                "mechanism.mode", "public keys need no selection, so no rounds", "use 'sticky'"
            )
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
        most = _MOST_TRIGGERS.get(privacy.strategy, limits.MAX_TRIGGERS)
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
        if privacy.mode != "sticky":
            raise UsageError(
                "mechanism.mode", "'rounds' is for Gaussian noise", "use 'sticky', or omit strategy"
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
        if self.timeline.triggers > limits.MAX_TOEPLITZ_TRIGGERS:
            raise UsageError(
                "time.trigger",
                f"mixed cells take at most {limits.MAX_TOEPLITZ_TRIGGERS} triggers a window",
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
        """What the settings mean together, resolved once."""
        return design_of(self)

    @property
    def hash(self) -> str:
        """128-bit hex digest of every public parameter (``accounting.plan.canonical``)."""
        return plan_hash(self)
