"""Schedules: what a source without end delivers when, and how far it says it is.

A schedule is a list of events, a function of its seed and of the other units' records; the added
unit's records are put between them and change none.  Stamps stand on the edges of trigger times and
of milliseconds, and trigger times lie inside a millisecond.
"""

import dataclasses
import random
from typing import NamedTuple

import msgspec
import numpy as np

from dpstream.accounting.plan.plan import Plan
from tests.audit.neighbours import Pair, Record, make_pair
from tests.streams import STEP

#: No trigger time of a schedule lies on a whole millisecond.
OFF = 137
_EDGES = (-1000, -999, -137, -1, 0, 1, 500, 863, 999)


class Deliver(NamedTuple):
    """Records arrive, by serial; some perhaps not for the first time."""

    serials: tuple[int, ...]


class WatermarkEvent(NamedTuple):
    """The source says: what comes from now on has stamps from this instant on."""

    micros: int


class Tick(NamedTuple):
    """The clock on the wall shows this."""

    micros: int


class Fire(NamedTuple):
    """Timers fire on shards of BOUND with these residues; some bundles are lost; then the other
    stages do ``most`` things."""

    shards: tuple[bool, ...]
    lost: tuple[bool, ...]
    most: int
    seed: int


class Keep(NamedTuple):
    """A checkpoint."""


class Back(NamedTuple):
    """The runner goes back to a checkpoint (the nth last), or begins anew on the store."""

    nth: int | None
    seed: int


Event = Deliver | WatermarkEvent | Tick | Fire | Keep | Back


@dataclasses.dataclass(frozen=True)
class Schedule:
    """One history of deliveries.

    Attributes:
        tardy: serials that may be delivered after their trigger time was stepped.
        stamps: serial -> stamp.
    """

    plan: Plan
    shards: int
    records: tuple[Record, ...]
    events: tuple[Event, ...]
    tardy: frozenset[int]


def moved(pair: Pair) -> Pair:
    """The pair with trigger times inside a millisecond and stamps around their edges."""
    line, end = pair.plan.timeline, pair.plan.timeline.end
    assert end is not None
    line = msgspec.structs.replace(line, start=line.start + OFF, end=end + OFF)
    plan = msgspec.structs.replace(pair.plan, timeline=line).check()

    def edged(record: Record) -> Record:
        draw = random.Random(f"{pair.seed} {record.serial}")
        event, stamp = record.event + OFF, record.stamp + OFF
        if draw.random() < 0.5 and abs(stamp) < 1 << 60:
            stamp = line.start + round((stamp - line.start) / STEP) * STEP + draw.choice(_EDGES)
            event = stamp if plan.stamp == "event_time" else event
        return dataclasses.replace(record, event=event, stamp=stamp)

    others, unit = (tuple(map(edged, records)) for records in (pair.others, pair.unit))
    return dataclasses.replace(pair, plan=plan, others=others, unit=unit)


def make(seed: int, kind: str | None = None, name: str | None = None) -> tuple[Pair, Schedule]:
    """The neighbours of a seed, and a schedule of the others' records."""
    pair = moved(make_pair(seed, kind, name))
    tardy = seed % 2 == 0
    return pair, schedule(pair.plan, pair.others, seed, 1 + seed % 3, tardy)


def schedule(
    plan: Plan, records: tuple[Record, ...], seed: int, shards: int, tardy: bool
) -> Schedule:
    """A schedule of these records."""
    draw, timeline = random.Random(seed), plan.timeline
    late = draw.sample([r.serial for r in records], draw.randint(1, 12)) if tardy else []
    haste = draw.choice([0, STEP // 8, STEP, 4 * STEP])
    order = sorted(records, key=lambda r: (r.stamp + draw.random() * haste, r.serial))
    order = [r for r in order if r.serial not in set(late)]
    # After how many of them each tardy one comes.
    when = sorted((draw.randint(0, len(order)), serial) for serial in late)
    least = [1 << 62, *np.minimum.accumulate([r.stamp for r in reversed(order)]).tolist()][::-1]
    events: list[Event] = []
    sent: list[int] = []
    early = draw.choice([0, 0, 5 * STEP, 20 * STEP])
    now, at, restores, size = (
        timeline.start,
        0,
        draw.choice([0, 0, 1, 2, 3]),
        draw.choice([3, 12, 60]),
    )
    last_instant = timeline.instant_of(timeline.last_trigger_time)
    while at < len(order):
        until = min(len(order), at + draw.randint(1, size))
        batch = [r.serial for r in order[at:until]]
        while when and when[0][0] <= until:
            batch.append(when.pop(0)[1])
        at = until
        if sent and draw.random() < 0.3:
            batch += draw.sample(sent, min(len(sent), draw.randint(1, 9)))
        sent += batch
        events.append(Deliver(tuple(batch)))
        reach = min(least[at], last_instant + 5 * STEP)
        if draw.random() < 0.8:
            now = max(now, draw.choice([reach, reach, reach - 1, reach - 999, reach - STEP // 3]))
            events.append(WatermarkEvent(now))
        if draw.random() < 0.7:
            ahead = draw.choice([0, 0, 0, 1, 1000, STEP, 3 * STEP, -STEP, -3 * STEP, early])
            events.append(Tick(now + ahead))
        if draw.random() < 0.7:
            events.append(_fire(draw))
        if draw.random() < 0.2:
            events.append(Keep())
        if restores and draw.random() < 0.08:
            restores -= 1
            anew = draw.random() < 0.4
            events.append(Back(None if anew else draw.randint(1, 3), draw.getrandbits(32)))
    events += [WatermarkEvent(last_instant + 10 * STEP), Tick(last_instant + 10 * STEP)]
    events += [Deliver((serial,)) for _, serial in when]  # nothing is open any more, or soon
    return Schedule(plan, shards, records, tuple(events), frozenset(late))


def _fire(draw: random.Random) -> Fire:
    shards = tuple(draw.random() < 0.8 for _ in range(3))
    lost = tuple(draw.random() < 0.1 for _ in range(3))
    return Fire(shards, lost, draw.choice([0, 3, 30, 100_000]), draw.getrandbits(32))


def with_unit(base: Schedule, unit: tuple[Record, ...], seed: int) -> Schedule:
    """The schedule with one unit more: its records come between the events of the others.

    Before the watermark passes their stamps, but for some that break the promise.
    """
    draw, slots = random.Random(seed), dict[int, list[int]]()
    tardy = set(base.tardy)
    watermarks = [(n, e.micros) for n, e in enumerate(base.events) if isinstance(e, WatermarkEvent)]
    for record in unit:
        last = next((n for n, micros in watermarks if micros > record.stamp), len(base.events))
        if base.tardy and draw.random() < 0.2:
            tardy.add(record.serial)
            last = len(base.events)
        for _ in range(draw.choice([1, 1, 1, 2])):
            slots.setdefault(draw.randint(0, last), []).append(record.serial)
            last = len(base.events)  # once more, at any time
    events: list[Event] = []
    for number, event in enumerate((*base.events, None)):
        if number in slots:
            events.append(Deliver(tuple(slots[number])))
        if event is not None:
            events.append(event)
    records = base.records + unit
    return Schedule(base.plan, base.shards, records, tuple(events), frozenset(tardy))
