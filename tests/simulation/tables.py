"""The tables of the model store, and what one transaction checks before it writes."""

import copy
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import pyarrow as pa

from dpstream.state.store import OvertakenError, RunIdentity

Place = tuple[int, int]


class KeyRow(NamedTuple):
    """One key of one window; ``taken`` is the last step it has taken."""

    taken: int
    key: dict[str, object]
    units: int
    values: tuple[int, ...]
    round: int
    base: int
    due: int
    pairs: frozenset[bytes]


class StepRows(NamedTuple):
    """What one step writes: rows and releases by key, and those without a key."""

    window: int
    shard: int
    trigger: int
    rows: dict[bytes, KeyRow]
    releases: dict[bytes | None, pa.RecordBatch]
    closes: bool
    #: What it selected, by key: (trigger time, window, the key's row).
    selected: Mapping[bytes, tuple[int, int, pa.RecordBatch]] = MappingProxyType({})

    @property
    def place(self) -> Place:
        return self.window, self.shard


class Record(NamedTuple):
    """One admitted record."""

    unit: bytes
    partition: int
    offset: int
    pairs: int
    trigger_time: int
    rank: int | None
    per_key: tuple[int, int, int, int] | None = None

    @property
    def firsts(self) -> int:
        """Its pairs that were the first of a key, where a bound per key is kept."""
        return 0 if self.per_key is None else self.per_key[3].bit_count()


class Tables:
    """All rows, and the transactions that change them, each whole or not at all.

    Args:
        rows: keys of a step, and units of a decision, that fit into one commit.
        seed: of what a handle forgets; ``None``: it forgets nothing.
    """

    def __init__(
        self,
        identity: RunIdentity,
        schema: pa.Schema,
        streams: int,
        rows: int = 1 << 30,
        seed: int | None = None,
    ) -> None:
        self.identity, self.schema, self.streams, self.limit = identity, schema, streams, rows
        self.random = random.Random(seed)
        self.forgets = 0.0 if seed is None else 0.3
        self.progress: dict[Place, int] = defaultdict(int)
        self.keys: dict[Place, dict[bytes, KeyRow]] = defaultdict(dict)
        self.releases: dict[tuple[int, int, int], dict[bytes | None, pa.RecordBatch]] = {}
        self.notes: dict[str, str | None] = {}
        self.decided: dict[int, int] = defaultdict(int)
        self.forgotten: dict[int, int] = defaultdict(int)
        self.reach: dict[int, int] = defaultdict(int)
        self.counts: dict[int, dict[bytes, tuple[int, int, int]]] = defaultdict(dict)
        self.admitted: dict[int, list[Record]] = defaultdict(list)
        #: By shard: (trigger time, window, key) -> the key's row.
        self.selected: dict[int, dict[tuple[int, int, bytes], pa.RecordBatch]] = defaultdict(dict)
        self.complete = True  # not in the midst of being filled

    def copy(self) -> "Tables":
        """The same rows, which later transactions do not change."""
        other = copy.copy(self)
        for name in ("progress", "releases", "notes", "decided", "forgotten", "reach"):
            setattr(other, name, copy.copy(getattr(self, name)))
        for name in ("keys", "counts", "admitted", "selected"):
            rows = getattr(self, name)
            setattr(
                other,
                name,
                defaultdict(
                    rows.default_factory,
                    {place: copy.copy(contents) for place, contents in rows.items()},
                ),
            )
        return other

    def write(self, parts: Iterable[tuple[StepRows, bool]]) -> None:
        """One transaction: rows of steps, each with its progress if it is the last part."""
        parts, progress = list(parts), dict(self.progress)
        for step, last in parts:
            if progress.get(step.place, 0) != step.trigger - 1:
                raise OvertakenError
            taken = self.keys[step.place]
            if any(k in taken and taken[k].taken >= step.trigger for k in step.rows):
                raise OvertakenError
            if last:
                progress[step.place] = step.trigger
        for step, last in parts:
            self.keys[step.place].update(step.rows)
            self.releases.setdefault(step[:3], {}).update(step.releases)
            for key, (time, window, row) in step.selected.items():
                assert (time, window, key) not in self.selected[step.shard], "selected twice"
                self.selected[step.shard][time, window, key] = row
            if last:
                self.progress[step.place] = step.trigger
                if step.closes:
                    self.keys[step.place] = {}

    def decide(
        self,
        shard: int,
        trigger_times: tuple[int, int | None],
        loaded: dict[bytes, int],
        part: list[Record],
        until: dict[bytes, int],
    ) -> None:
        """One transaction: admitted records of some units.

        Args:
            trigger_times: the one decided before, and the one decided with the last part.
            loaded: counts of the units as the worker knows them.
            until: last trigger time of each unit of the decision.
        """
        counts, (before, trigger_time) = self.counts[shard], trigger_times
        changed = {record.unit for record in part}
        counted = (counts.get(unit, (0, 0, 0))[0] == loaded[unit] for unit in changed)
        if self.decided[shard] != before or not all(counted):
            raise OvertakenError
        for record in part:
            count, _, firsts = counts.get(record.unit, (0, 0, 0))
            more = count + record.pairs, until[record.unit], firsts + record.firsts
            counts[record.unit] = more
        self.admitted[shard] += part
        self.reach[shard] = max([self.reach[shard], *(record.trigger_time for record in part)])
        if trigger_time is not None:
            self.decided[shard] = trigger_time

    def settled(self, shard: int, trigger_time: int) -> list[bytes]:
        """Units of which positions up to a trigger time, or the counter, may go."""
        units = {
            record.unit for record in self.admitted[shard] if record.trigger_time <= trigger_time
        }
        return sorted(
            units | {u for u, (_, until, _) in self.counts[shard].items() if until <= trigger_time}
        )

    def forget(self, shard: int, units: set[bytes], trigger_time: int) -> None:
        """One transaction: some units' positions up to a time, and counters left without."""
        self.admitted[shard] = [
            record
            for record in self.admitted[shard]
            if record.unit not in units or record.trigger_time > trigger_time
        ]
        held, counts = {record.unit for record in self.admitted[shard]}, self.counts[shard]
        for unit in units - held:
            if unit in counts and counts[unit][1] <= trigger_time:
                del counts[unit]
