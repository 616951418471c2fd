"""Count of the usable records of a job's source, before anything is charged.

Rows become records by the functions that a run uses: the source's reader (`Input.scan`), the job's
query and cells, and RECORDS (`Canonicaliser`).  So the records that are counted as unusable are
those that a run would write to the dead letter.  Nothing is charged, drawn, stored or written, and
no secret is needed: ids are made with a random key that is discarded.  Whether anything will appear
is counted before bounds on contributions, which only reduce the units of a key.

All of the result is exact and depends on private records: it is for the operator alone.
"""

import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress

import msgspec
import numpy as np
import pyarrow as pa

from dpstream.accounting.arrays import Int64
from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.errors import DpstreamError
from dpstream.accounting.guarantee import describe
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.batches import ids_of, key_fields
from dpstream.dp_transforms.decision import event_trigger_times, open_windows
from dpstream.dp_transforms.ingest import columns
from dpstream.dp_transforms.ingest.records import (
    REASONS,
    CanonicaliserFactory,
    canonical_public_keys,
    positions,
)
from dpstream.dp_transforms.noise.ids import typed_ids
from dpstream.dp_transforms.noise.prf import Prf
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.pipelines.connectors.files.types import check_types
from dpstream.pipelines.connectors.inputs import Input
from dpstream.pipelines.connectors.query import add_cells, apply_query
from dpstream.pipelines.connectors.registry import input_of
from dpstream.pipelines.formats.rows import CORRECT_FILES, FAULTS, Reason
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.jobs.keys import read_public_keys
from dpstream.pipelines.stream.summary import causes_of
from dpstream.state.idtable import IdTable, PairSet

#: Positions of each reason that are shown.
FIRST = 5
#: Distinct pairs of a unit and a key of a window that are kept, about 100 bytes each.
MAX_PAIRS = 5_000_000
#: What the source's own reasons mean, and what helps.
_AT_SOURCE = FAULTS | {
    Reason.NOT_THE_BROKERS_STAMP: (
        "has no append time from the broker",
        "set the topic's message.timestamp.type to LogAppendTime",
    ),
}


class Unusable(msgspec.Struct, frozen=True):
    """Records that are unusable for one reason.

    Attributes:
        reason: as in the dead letter.
        records: number of records.
        first: (file or part, row counted from 0) of the first ones.
        problem, fix: what the reason means for this job, and how to fix it.
        no_time: of the reason ``time``, the number without any time; the others are outside the
            job's range.
    """

    reason: str
    records: int
    first: list[tuple[str, int]]
    problem: str
    fix: str
    no_time: int = 0


class Checked(msgspec.Struct, frozen=True):
    """The records of a source.

    Attributes:
        units_needed: units that a key needs in a window for a 50% chance of being published;
            ``None``: keys are public, or the job has no budget yet.
        most_units_up_to_needed: units of the largest key in a window, or ``units_needed`` if it has
            more; ``None``: nothing is needed, or there were too many pairs to count.
        beyond_contributions: number of contributions beyond the first C of their unit (in a period,
            if the budget has one), which do not count; a record is one in each of its windows, and
            copies of a record are several; ``None``: the plan has a bound per key, too.
        read: number of rows, including unreadable ones.
        left_out: number of rows that the query does not keep.
        usable: number of records that a run would admit to its contribution bound.
        complete: whether all of the source was read, not only the rows up to the limit.
        unusable: by reason, the most frequent first.
    """

    read: int
    left_out: int
    usable: int
    complete: bool
    unusable: list[Unusable]
    units_needed: int | None = None
    most_units_up_to_needed: int | None = None
    beyond_contributions: int | None = None


def check_source(
    job: Job, limit: int | None = None, progress: Callable[[int, int], None] | None = None
) -> Checked:
    """Read a source and count its usable and unusable records.

    Args:
        limit: no further batch is read after so many rows; ``None``: all are.
        progress: called from time to time with the number of rows read.

    Raises:
        UsageError: an error that a run would raise before its charge: no source, or a column that
            is absent or has a type without usable records.
        RunError: the source cannot be read.
    """
    check_types(job)
    reading = _Reading(input_of(job), limit, progress)
    plan, rows, usable = job.plan, 0, 0
    public = None
    if plan.public_keys is not None:
        public = canonical_public_keys(plan, read_public_keys(job))
    key = SecretSource(None, insecure_test_secret=secrets.token_hex(32))
    canonical = CanonicaliserFactory(plan, key, public)()
    tally, untimed, units = reading.tally, 0, _Units(plan, canonical.keys.key)
    for batch in add_cells(job, apply_query(job, reading.batches())):
        records, dead = canonical(batch)
        rows, usable = rows + batch.num_rows, usable + records.num_rows
        units.add(records)
        for reason in REASONS if dead.num_rows else ():
            refused = dead.filter(pa.compute.equal(dead["reason"], reason))
            positions = (
                refused["partition"].to_numpy().astype(np.int64),
                refused["offset"].to_numpy(),
            )
            tally.add(reason, *positions)
            if reason == "time" and refused.num_rows:
                untimed += _without_time(job, batch, *positions)
    unusable = list[Unusable]()
    for reason, count in sorted(tally.counts.items(), key=lambda item: -item[1]):
        first = [reading.source.locate(*positions) for positions in tally.first[reason]]
        texts = _reason_text(job, reason)
        unusable.append(Unusable(reason, count, first, *texts, untimed * (reason == "time")))
    read = reading.rows + sum(tally.counts.values()) - (rows - usable)
    return Checked(read, reading.rows - rows, usable, reading.complete, unusable, *units.result())


def _reason_text(job: Job, reason: str) -> tuple[str, str]:
    """Return what a reason means for this job, and how to fix it."""
    if reason in REASONS:
        cause = causes_of(job)[reason]
        return cause.problem, cause.fix
    return _AT_SOURCE.get(Reason(reason), (f"the source refuses it ({reason})", CORRECT_FILES))


class _Tally:
    """Counts and first positions by reason."""

    def __init__(self) -> None:
        self.counts, self.first = dict[str, int](), dict[str, list[tuple[int, int]]]()

    def add(self, reason: str, partition: Int64, offset: Int64) -> None:
        """Add positions in the order in which they are read."""
        if len(offset):
            self.counts[reason] = self.counts.get(reason, 0) + len(offset)
            first = self.first.setdefault(reason, [])
            more = slice(0, FIRST - len(first))
            first += zip(partition[more].tolist(), offset[more].tolist(), strict=True)


class _Units:
    """Counts what units add, in windows and in all.

    Units of the largest key in a window are counted until it has enough to be published, as
    distinct (window, key, unit), at most `MAX_PAIRS`.  A record is a contribution of its unit in
    each of its windows; those beyond the bound do not count.
    """

    def __init__(self, plan: Plan, ids: Prf) -> None:
        self._plan, self._ids, self._needed = plan, ids, None
        with suppress(DpstreamError):  # `dpstream plan` says what is wrong
            budget = allocate(plan)
            chosen = describe(plan, budget)["selection"] if budget.tau is not None else None
            self._needed = chosen and chosen["units_for_half_chance_easiest"]
        self._units, self._keys, self._pairs = IdTable(), IdTable(), PairSet()
        self._contributions, self._sizes = np.zeros(0, np.int64), np.zeros(0, np.int64)

    def add(self, records: pa.RecordBatch) -> None:
        """Add records."""
        plan, units = self._plan, ids_of(records.column("unit"))
        trigger = event_trigger_times(plan, records)
        first, windows = open_windows(plan.timeline, trigger, trigger)
        slots = self._units.intern(units)
        self._contributions = _added(self._contributions, slots, windows, self._units.size)
        if self._needed is None or self._most >= self._needed or self._pairs.size > MAX_PAIRS:
            return
        key = [
            (field.type, records.column(column.name))
            for field, column in zip(plan.key, key_fields(plan), strict=True)
        ]
        for number in range(plan.timeline.windows_per_record):
            here = number < windows
            keys = self._keys.intern(typed_ids(self._ids, key, first + number)[here])
            new = self._pairs.add(keys, units[here]).astype(np.int64)
            self._sizes = _added(self._sizes, keys, new, self._keys.size)

    @property
    def _most(self) -> int:
        return int(self._sizes.max(initial=0))

    def result(self) -> tuple[int | None, int | None, int | None]:
        """Return the number of units needed, that of the largest key, and contributions beyond the
        bound, as `Checked` has them.
        """
        privacy, needed = self._plan.privacy, self._needed
        beyond = np.maximum(self._contributions - privacy.contributions, 0).sum()
        more = int(beyond) if privacy.per_key_bound is None else None
        if needed is None:
            return None, None, more
        complete = self._most >= needed or self._pairs.size <= MAX_PAIRS
        return needed, min(self._most, needed) if complete else None, more


def _added(counts: Int64, slots: Int64, amounts: Int64, size: int) -> Int64:
    """Return counts by slot with the amounts added; there are ``size`` slots now."""
    counts = np.pad(counts, (0, size)) if size > len(counts) else counts
    np.add.at(counts, slots, amounts)
    return counts


class _Reading:
    """The batches of a source up to a limit; refused positions are counted meanwhile."""

    def __init__(
        self, source: Input, limit: int | None, progress: Callable[[int, int], None] | None
    ) -> None:
        self.source, self.tally, self.rows, self.complete = source, _Tally(), 0, True
        self._limit, self._progress = limit, progress

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield usable rows with positions, in the source's own batches."""
        for item in self.source.scan():
            if self._limit is not None and self.rows >= self._limit:
                self.complete = False
                return
            if isinstance(item, pa.RecordBatch):
                self.rows += item.num_rows
                yield item
                if self._progress is not None:
                    self._progress(self.rows, 0)
                continue
            refused, partition = item
            where, names = np.broadcast_to(partition, refused.offsets.shape), refused.reasons
            for reason in dict.fromkeys(names):
                here = np.array(names) == reason
                self.tally.add(reason, where[here], refused.offsets[here])


def _without_time(job: Job, batch: pa.RecordBatch, partition: Int64, offset: Int64) -> int:
    """Return how many rows at these positions of a batch have no time."""
    dead = np.isin(_pairs(*positions(batch)), _pairs(partition, offset))
    good = np.ones(batch.num_rows, np.bool_)
    stamp = [] if job.plan.stamp == "event_time" else [job.plan.stamp]
    for column in (job.plan.event_time, *stamp):
        good &= columns.instant(batch.column(column))[1]
    return int((dead & ~good).sum())


def _pairs(partition: Int64, offset: Int64) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    pairs = np.empty(len(offset), np.dtype([("partition", np.int64), ("offset", np.int64)]))
    pairs["partition"], pairs["offset"] = partition, offset
    return pairs
