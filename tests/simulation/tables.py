"""The tables of the model store, and what one transaction checks before it writes."""

import random
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import pyarrow as pa

from accounting.errors import RunError
from state.store import OvertakenError, RunIdentity

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

    @property
    def place(self) -> Place:
        return self.window, self.shard


class Record(NamedTuple):
    """One admitted record."""

    unit: bytes
    partition: int
    offset: int
    pairs: int
    cut: int
    rank: int | None


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
        self.counts: dict[int, dict[bytes, int]] = defaultdict(dict)
        self.admitted: dict[int, list[Record]] = defaultdict(list)

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
            if last:
                self.progress[step.place] = step.trigger
                if step.closes:
                    self.keys[step.place] = {}

    def decide(
        self, shard: int, before: int, loaded: dict[bytes, int], part: list[Record], cut: int | None
    ) -> None:
        """One transaction: admitted records of some units; with ``cut`` the whole is decided."""
        counts = self.counts[shard]
        changed = {record.unit for record in part}
        if self.decided[shard] != before or any(counts.get(u, 0) != loaded[u] for u in changed):
            raise RunError("state.store", "another worker decided this shard", "let it run on")
        for record in part:
            counts[record.unit] = counts.get(record.unit, 0) + record.pairs
        self.admitted[shard] += part
        if cut is not None:
            self.decided[shard] = cut
