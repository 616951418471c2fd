"""What must hold at the end of every history, whatever happened."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from dpstream.accounting.arrays import Int64
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.batches import concat, ids_of, record_schema, split_by_shard
from dpstream.dp_transforms.decision import Batch, expand
from dpstream.dp_transforms.flow import ReleaseCallback, SealFactory, run_in_memory
from dpstream.state.idtable import shard_of
from dpstream.state.retention import period_trigger_time
from dpstream.state.store import Admitted, PerKey, Store, UnitShard
from tests.bounded import ids_in
from tests.dp_transforms.reference import remembered_keys
from tests.simulation.hooks import nothing_expires
from tests.simulation.runner import run_on
from tests.simulation.stores import sqlite
from tests.streams import as_rows, by_name, sealed_bytes

#: A record: partition, offset, unit.
Record = tuple[int, int, bytes]


class Problem(Exception):
    """A rule that was broken, in words without data."""


class Decision(NamedTuple):
    """What BOUND committed on an admitted record."""

    pairs: int
    trigger_time: int
    rank: int | None
    per_key: tuple[int, int, int, int] | None = None


def still_there(store: Store, shard: int, ranked: bool, out: dict[Record, Decision]) -> None:
    """Add the decisions of a shard whose positions have not expired."""
    for piece in store.position_pieces(shard):
        for row, unit in enumerate(piece.ids):
            place = int(piece.records.partition[row]), int(piece.records.offset[row])
            record = *place, unit.tobytes()
            decision = decision_of(piece.records, row, ranked)
            if out.setdefault(record, decision) != decision:
                raise Problem("a decision has changed")


def decision_of(admitted: Admitted, row: int, ranked: bool) -> Decision:
    """What was decided on an admitted record."""
    rank = int(admitted.rank[row]) if ranked and admitted.rank is not None else None
    per_key = None
    if admitted.per_key is not None:
        key, first, taken, fresh = (int(column[row]) for column in admitted.per_key)
        per_key = key, first, taken, fresh
    return Decision(int(admitted.pairs[row]), int(admitted.trigger_time[row]), rank, per_key)


def put_decision(batch: Batch, row: int, decision: Decision) -> None:
    """Note it in a batch."""
    per_key = None
    if decision.per_key is not None:
        key, first, *bits = decision.per_key
        words = (np.array([word], np.uint64) for word in bits)
        per_key = PerKey(np.array([key], np.uint64), np.array([first], np.int32), *words)
    rank = np.array([decision.rank or 0], np.int32)
    batch.write(np.array([row]), np.array([decision.pairs]), rank, per_key)
    batch.trigger_time[row] = decision.trigger_time


def came_again(batch: Batch, earlier_decisions: dict[Record, Decision]) -> int:
    """Records of a batch that were admitted and now get no pairs: their positions have gone."""
    rows = zip(batch.partition.tolist(), batch.offset.tolist(), batch.ids, strict=True)
    repeats = np.array(
        [(p, o, unit.tobytes()) in earlier_decisions for p, o, unit in rows], np.bool_
    )
    return int((repeats & (batch.pairs == 0)).sum())


def decisions(
    store: Store,
    plan: Plan,
    records: pa.RecordBatch,
    shards: int,
    earlier_decisions: dict[Record, Decision] | None = None,
) -> dict[Record, Decision]:
    """Every committed decision, read with a new handle.

    Args:
        earlier_decisions: decisions whose positions may have expired.
    """
    gone, out = earlier_decisions or {}, dict[Record, Decision]()
    batch = Batch(plan, records, ids_in(plan))
    place = shard_of(batch.ids, shards)
    for shard in range(shards):
        mine = dict[Record, Decision]()
        units = store.unit_shard(shard)
        store.load_units(shard, units, batch.ids[place == shard])
        _, admitted = store.admitted_before(shard, units)
        for row, slot in enumerate(admitted.unit.tolist()):
            unit = units.table.ids[slot].tobytes()
            record = int(admitted.partition[row]), int(admitted.offset[row]), unit
            if record in mine:
                raise Problem("a position is admitted twice")
            mine[record] = decision_of(admitted, row, plan.design.ranked)
        if any(gone.get(record, decision) != decision for record, decision in mine.items()):
            raise Problem("what has expired is decided again")
        if any(d.trigger_time <= units.forgotten and r not in gone for r, d in mine.items()):
            raise Problem("a position is decided when it has expired")
        if units.decided != plan.timeline.last_trigger_time:
            raise Problem("a decision is lost")
        _check_counters(plan, units, batch, np.flatnonzero(place == shard), gone | mine)
        out |= mine
    return out | gone


def _check_counters(
    plan: Plan, units: UnitShard, batch: Batch, rows: Int64, made: dict[Record, Decision]
) -> None:
    """A counter is the pairs of its unit, expired or not, until its period is closed."""
    pairs = Counter[bytes]()
    for (_, _, unit), decision in made.items():
        pairs[unit] += decision.pairs
    expected = np.array([pairs[unit.tobytes()] for unit in batch.ids[rows]], np.int64)
    slots = units.table.find(batch.ids[rows])
    counters = np.where(slots >= 0, units.counts[slots] if units.table.size else 0, 0)
    gone = np.zeros(len(rows), np.bool_)
    if plan.timeline.period is not None:
        closed = (
            period_trigger_time(plan.timeline, batch.event_trigger_time[rows]) <= units.forgotten
        )
        gone = closed & (counters == 0)
    if not (gone | (counters == expected)).all():
        raise Problem("a counter is not that of its unit")


def check_end(world: Any) -> None:
    """The whole history against the undisturbed run, or what of it must still hold."""
    plan, run = world.plan, world.run
    with_door = [world.ingest(batch) for batch in world.source.all_batches()]
    records = concat([good for good, _ in with_door], record_schema(plan))
    calm = sqlite(world.identity, plan, world.folder, -1)
    clean, store = calm.open(), world.database.open()
    try:
        with nothing_expires():
            releases, dead = run_in_memory(run_on(run, clean), world.source.all_batches())
        _check_dead(world, dead)
        made = decisions(store, plan, records, world.shards, world.decisions)
        calmly = decisions(clean, plan, records, world.shards)
        _check_bound(world, records, made, calmly)
        expected = by_name(releases)
        if world.tardy:
            expected = _from_decisions(world, records, made)
        _check_releases(world, expected)
        if plan.design.skips:
            check_skips(plan, records, made, expected)
        timeline = plan.timeline
        if store.completed(world.shards) != dict.fromkeys(
            range(timeline.windows), timeline.triggers
        ):
            raise Problem("a step is lost")
    finally:
        clean.close()
        store.close()


def _indices(
    plan: Plan, decision: Decision, opened: Sequence[int]
) -> Iterator[tuple[int, int | None]]:
    """(window, weight that it takes, ``None`` for none) of the admitted pairs of a record."""
    assert decision.rank is not None
    if plan.design.packs_indices:
        index, skipped = decision.rank >> 10 & 0x3FF, decision.rank >> 20
        windows = opened[: decision.pairs & 0xFFFF]
        spared = [bool(skipped >> nth & 1) for nth in range(len(windows))]
        if len(windows) - sum(spared) != decision.pairs >> 16:
            raise Problem("a pair takes other than one weight")
    else:
        assert decision.per_key is not None
        index, (_, begin, taken, fresh) = decision.rank, decision.per_key
        bits = [nth for nth in range(taken.bit_length()) if taken >> nth & 1]
        windows, spared = [begin + nth for nth in bits], [not fresh >> nth & 1 for nth in bits]
    for window, free in zip(windows, spared, strict=True):
        yield window, None if free else index
        index += not free


def check_skips(
    plan: Plan,
    records: pa.RecordBatch,
    made: dict[Record, Decision],
    releases: dict[tuple[int, int], bytes],
) -> None:
    """Every pair's weight follows from what was released, and no unit takes one twice."""
    timeline = plan.timeline
    first: dict[tuple[int, str], int] = {}  # (window, key) -> trigger time of its selection
    for (window, trigger), data in sorted(releases.items()):
        for released in as_rows(data):
            first.setdefault((window, str(released["page"])), timeline.base(window) + trigger)
    remembered_pages = remembered_keys(plan, first)
    batch, pages = Batch(plan, records, ids_in(plan)), records.column("page").to_pylist()
    taken: dict[bytes, list[int]] = {}
    for row, page in enumerate(pages):
        unit = batch.ids[row].tobytes()
        decision = made.get((int(batch.partition[row]), int(batch.offset[row]), unit))
        if decision is None or decision.rank is None:
            continue
        entry = max(int(batch.event_trigger_time[row]), decision.trigger_time)
        opened = [w for w in range(timeline.windows) if _open(plan, w, entry, batch, row)]
        indices = []
        for window, index in _indices(plan, decision, opened):
            published = first.get((window, page), 1 << 40) < decision.trigger_time
            published |= (
                page in remembered_pages[window] and timeline.base(window) < decision.trigger_time
            )
            if published != (index is None):
                raise Problem("a pair does not know what was published before it")
            indices += [] if index is None else [index]
        taken.setdefault(unit, []).extend(indices)
    for unit_indices in taken.values():
        if sorted(unit_indices) != list(range(len(unit_indices))):
            raise Problem("a unit takes a weight twice")


def _open(plan: Plan, window: int, entry: int, batch: Batch, row: int) -> bool:
    timeline = plan.timeline
    stride, width = (
        timeline.slide // timeline.trigger_every,
        timeline.window // timeline.trigger_every,
    )
    event = int(batch.event_trigger_time[row])
    covers = window * stride < event <= window * stride + width
    return covers and entry <= window * stride + timeline.triggers


def _check_dead(world: Any, dead: Iterable[pa.RecordBatch]) -> None:
    letters = [letter for batch in dead for letter in batch.to_pylist()]
    if {(d["partition"], d["offset"]): d["reason"] for d in letters} != world.dead_letters:
        raise Problem("other records are refused")


def _check_bound(
    world: Any, records: pa.RecordBatch, made: dict[Record, Decision], calm: dict[Record, Decision]
) -> None:
    skips = world.plan.design.packs_indices
    pairs: Counter[bytes] = Counter()
    for record, decision in made.items():
        pairs[record[2]] += decision.pairs & 0xFFFF if skips else decision.pairs
    if any(n > world.plan.privacy.contributions for n in pairs.values()):
        raise Problem("a unit has more than C pairs")
    # Units of which no record broke the delivery assumption: nothing of theirs may differ.
    batch = Batch(world.plan, records, ids_in(world.plan))
    late = {
        batch.ids[row].tobytes()
        for row, place in enumerate(
            zip(batch.partition.tolist(), batch.offset.tolist(), strict=True)
        )
        if place in world.source.ever_tardy
    }
    if world.plan.design.skips and world.tardy:
        # What is published may differ then, and with it which weights others take, not their pairs.
        made, calm = (
            {r: _without_weights(d, skips) for r, d in decided.items()} for decided in (made, calm)
        )
    if {r: d for r, d in made.items() if r[2] not in late} != {
        r: d for r, d in calm.items() if r[2] not in late
    }:
        raise Problem("a record is decided otherwise than in a calm run")


def _without_weights(decision: Decision, packed: bool) -> Decision:
    """A decision without which of its pairs take a weight, and which one."""
    pairs = decision.pairs & 0xFFFF if packed else decision.pairs
    per_key = None if decision.per_key is None else (*decision.per_key[:3], 0)
    return Decision(pairs, decision.trigger_time, None, per_key)


def _check_releases(world: Any, expected: dict[tuple[int, int], bytes]) -> None:
    if world.sink.keys() != expected.keys():
        raise Problem("not one release for each (window, trigger)")
    if world.sink != expected:
        raise Problem("a release is not that of its decisions")


def _from_decisions(
    world: Any, records: pa.RecordBatch, made: dict[Record, Decision]
) -> dict[tuple[int, int], bytes]:
    """What RELEASE must publish when BOUND has decided so, from a new store."""
    plan, run = world.plan, world.run
    batch = Batch(plan, records, ids_in(plan))
    for row in range(records.num_rows):
        record = int(batch.partition[row]), int(batch.offset[row]), batch.ids[row].tobytes()
        decision = made.get(record)
        if decision is not None:
            if plan.design.skips:
                decision = decision._replace(pairs=decision.pairs & 0xFFFF)
            put_decision(batch, row, decision)
    rows = expand(plan, records, np.flatnonzero(batch.pairs), batch)
    target = shard_of(ids_of(rows.column("_id")), world.shards)
    file = sqlite(world.identity, plan, world.folder, -2)
    store = file.open()
    try:
        own = run_on(run, store)
        release, seal = ReleaseCallback(own)(), SealFactory(own)()
        parts: dict[tuple[int, int], list[pa.RecordBatch]] = {}
        by_shard = dict(split_by_shard(rows, target, world.shards))
        for shard in range(world.shards):
            held = [by_shard[shard]] if shard in by_shard else []
            with nothing_expires():
                for name, part in release(shard, held, plan.timeline.last_trigger_time, 0).outputs:
                    parts.setdefault(name, []).append(part)
        return {name: sealed_bytes(*seal(*name, own)) for name, own in parts.items()}
    finally:
        store.close()
