"""Copies with other contents: what counts is a function of the unit's records, whatever happens.

A slow model decides on all records of a unit at once, from the definition.  Beside it runs BOUND
with another number of shards, deliveries in any order and repeated, decisions that span one trigger
time or many, crashes between the commits of two shards, and positions that expire early or late.
"""

import functools
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.fields import Field
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms import bounding
from dpstream.dp_transforms.batches import ids_of
from dpstream.dp_transforms.bounding import Copies
from dpstream.dp_transforms.decision import Batch
from dpstream.dp_transforms.ingest.records import Canonicaliser
from dpstream.dp_transforms.noise.ids import key_ids
from dpstream.state import open as stores
from dpstream.state.idtable import shard_of
from dpstream.state.transfer import copy_store
from tests.bounded import bound
from tests.lanes import few_first
from tests.streams import COUNT, KEYS, START, STEP, SUM, begin, make_plan, positioned

#: (unit, key, step, value) of admitted pairs, by trigger time of the decision.
Pairs = dict[int, Counter[tuple[bytes, str, int, int]]]


def plan_of(skew: int, per_key: int | None) -> Plan:
    bound_: dict[str, Any] = {} if per_key is None else {"per_key_bound": per_key}
    plan = make_plan(
        triggers=4, windows=8, lateness=2, skew=skew * STEP, stamped=True,
        aggregates=(COUNT, SUM), **bound_,
    )  # fmt: skip
    return msgspec.structs.replace(plan, record_id=Field("id", "int")).check()


def records_of(plan: Plan, seed: int) -> pa.RecordBatch:
    """Canonical records of few units, with few ids: most ids have several contents."""
    draw, skew = random.Random(seed), plan.timeline.max_skew
    rows = list[dict[str, Any]]()
    for _ in range(150):
        stamp = START + draw.randrange(18 * STEP)
        event = max(START, stamp + draw.randrange(-2 * STEP, skew + 1))
        user, page, value = f"u{draw.randrange(15)}", draw.choice("ab"), float(draw.randrange(3))
        rows.append({"user": user, "page": page, "time": event, "arrived": stamp,
                     "value": value, "id": draw.randrange(3)})  # fmt: skip
    for row in draw.choices(rows, k=40):  # the same again, with a later stamp
        rows.append({**row, "arrived": row["arrived"] + draw.randrange(STEP)})
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
    for name in ("time", "arrived"):
        columns[name] = pa.array(columns[name]).cast(pa.timestamp("us", "UTC"))
    return Canonicaliser(plan, KEYS.ring())(positioned(columns))[0]


def model(plan: Plan, records: pa.RecordBatch) -> Pairs:
    """Every unit's records, one trigger time after the other, in Python."""
    timeline, privacy = plan.timeline, plan.privacy
    wide, per_window = timeline.triggers, timeline.window // timeline.trigger_every
    skew = -(-timeline.max_skew // timeline.trigger_every)
    rows = records.to_pylist()
    times = np.maximum(1, timeline.trigger_time_of(records["stamp"].to_numpy())).tolist()
    out: Pairs = {}
    for unit in {row["unit"] for row in rows}:
        mine = [(time, row) for time, row in zip(times, rows, strict=True) if row["unit"] == unit]
        pairs, of_key = 0, Counter[tuple[int, str]]()
        last = dict[int, int]()
        for time in sorted({time for time, _ in mine}):
            ended = max(0, (time - 1 - wide) // per_window + 1) * per_window - skew
            order = ("stamp", "offset", "partition", "_digest")
            now = [row for at, row in mine if at == time]
            for row in sorted(now, key=lambda r: tuple(r[name] for name in order)):
                event, key, name = row["_event_trigger_time"], row["page"], row["offset"]
                window = (event - 1) // per_window
                step = max(event, time) - window * per_window
                full = pairs >= privacy.contributions
                full |= of_key[window, key] >= (privacy.per_key_bound or 99)
                if full or step > wide or last.get(name, 0) > max(0, ended):
                    continue
                pairs, of_key[window, key] = pairs + 1, of_key[window, key] + 1
                last[name] = time
                out.setdefault(time, Counter())[unit, key, step, row["v1"]] += 1
    return out


class Runner(NamedTuple):
    """BOUND over some shards, with a source that delivers as it likes."""

    plan: Plan
    records: pa.RecordBatch
    path: Path
    shards: int

    def run(self, seed: int, since: int = 0, last: int | None = None) -> Pairs:
        """What is admitted at the trigger times after ``since``, through ``last``."""
        draw = random.Random(seed)
        store = begin(self.plan, self.path, self.shards).open()
        ids = functools.partial(key_ids, self.plan, KEYS.ring().key)
        shard = shard_of(ids_of(self.records["unit"]), self.shards)
        stamps = self.records["stamp"].to_numpy()
        times = np.maximum(1, self.plan.timeline.trigger_time_of(stamps))
        out: Pairs = {}
        last = self.plan.timeline.last_trigger_time if last is None else last
        while since < last:
            upto = min(last, since + draw.choice([1, 1, 2, 5, last]))
            attempt: Pairs = {}
            crash = draw.random() < 0.5
            for number in draw.sample(range(self.shards), self.shards):
                if crash and draw.random() < 0.4:
                    break  # the shards before it have committed
                for time in range(since + 1, upto + 1):
                    attempt.setdefault(time, Counter())
                must = (shard == number) & (times > since) & (times <= upto)
                may = (shard == number) & np.array([draw.random() < 0.3 for _ in times])
                rows = np.flatnonzero(must | may)
                rows = np.concatenate([rows, rows[: len(rows) // 2]])
                given = self.records.take(pa.array(draw.sample(rows.tolist(), len(rows))))
                self.decide(store, number, given, upto, since, ids, attempt, draw)
            else:
                for time in range(since + 1, upto + 1):
                    out[time] = attempt.get(time, Counter())
                since = upto if draw.random() < 0.8 else since
        stores.close_all()
        return {time: pairs for time, pairs in out.items() if pairs}

    def decide(self, store: Any, number: int, given: pa.RecordBatch, upto: int, since: int,
               ids: Any, attempt: Pairs, draw: random.Random) -> None:  # fmt: skip
        """A decision; what it admits is told apart by trigger times, one question for each."""
        bound(self.plan, store, number, given, upto, since, ids)
        for time in range(since + 1, upto + 1):  # decided already: the same records once more
            got = bound(self.plan, store, number, given, time, time - 1, ids)[0].to_pylist()
            attempt[time].update((r["unit"], r["page"], r["trigger"], r["v1"]) for r in got)
        if draw.random() < 0.3:
            timeline = self.plan.timeline  # windows whose steps are all committed may go
            ended = max(0, (since - timeline.triggers) // timeline.base(1) + 1)
            gone = ended * timeline.base(1) - -(-timeline.max_skew // timeline.trigger_every)
            if gone > store.unit_progress(number).forgotten:
                store.forget_positions(number, gone)


@pytest.mark.parametrize("per_key", [None, 1])
@pytest.mark.parametrize("skew", [0, 2])
@pytest.mark.parametrize("seed", few_first(range(9)))
def test_what_counts_of_copies_does_not_depend_on_what_happens(
    tmp_path: Path, seed: int, skew: int, per_key: int | None
) -> None:
    plan = plan_of(skew, per_key)
    records = records_of(plan, seed)
    expected = model(plan, records)
    assert sum(map(Counter.total, expected.values())) > 20
    for shards in (1, 3):
        runner = Runner(plan, records, tmp_path / f"{shards}.db", shards)
        assert runner.run(seed * 10 + shards) == expected


def test_a_reshard_keeps_what_tells_copies_apart(tmp_path: Path) -> None:
    plan = plan_of(2, 1)
    records = records_of(plan, 3)
    out = Runner(plan, records, tmp_path / "a.db", 2).run(5, last=9)
    source, target = (
        begin(plan, tmp_path / name, n).open() for name, n in (("a.db", 2), ("b.db", 3))
    )
    copy_store(source, target, plan.timeline)
    out |= Runner(plan, records, tmp_path / "b.db", 3).run(6, since=9)
    assert out == model(plan, records)


def test_the_counter_of_copies_counts_what_no_admitted_record_holds(tmp_path: Path) -> None:
    plan = plan_of(0, None)
    same = {
        "user": "u",
        "page": "a",
        "time": START + 5,
        "id": 1,
        "value": 1.0,
        "arrived": START + 5,
    }
    later = START + 10 + STEP  # of the next trigger time
    rows: list[dict[str, Any]] = [
        same, same, {**same, "arrived": later},  # the record itself, again
        {**same, "value": 2.0, "arrived": START + 6}, {**same, "page": "b", "arrived": START + 7},
        {**same, "page": "b", "arrived": later},
        {**same, "user": "v", "value": 2.0}, {**same, "id": 2},  # other records
    ]  # fmt: skip
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
    for name in ("time", "arrived"):
        columns[name] = pa.array(columns[name]).cast(pa.timestamp("us", "UTC"))
    records = Canonicaliser(plan, KEYS.ring())(positioned(columns))[0]
    ids = functools.partial(key_ids, plan, KEYS.ring().key)
    times = np.maximum(1, plan.timeline.trigger_time_of(records["stamp"].to_numpy()))
    for spans in ([1, 2], [2]):  # the second decision reads the first one's from the store
        store = begin(plan, tmp_path / f"{len(spans)}.db", 1).open()
        counts, since = Counter[str](), 0
        for upto in spans:
            of = records.filter(pa.array((times > since) & (times <= upto)))
            counts.update(bound(plan, store, 0, of, upto, since, ids).counts)
            since = upto
        assert counts["operator_copies_left_out"] == 3
        assert counts["operator_pairs_admitted"] == 3
    stores.close_all()


def by_position(batch: Batch, rows: Any = slice(None)) -> Any:
    return batch.positions(rows)


def never(self: Copies, ids: Any, trigger_time: Any) -> Any:
    return np.zeros(len(ids), np.bool_)


def while_in_the_store(self: Copies, ids: Any, trigger_time: Any) -> Any:
    """As if an id named its first record for as long as the store has its position."""
    return self._ids.find(ids) >= 0


SABOTAGE: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "a copy has the decision of the first": (Batch, "record_ids", by_position),
    "other contents are another record": (Copies, "blocks", never),
    "the store's clean-up decides": (Copies, "blocks", while_in_the_store),
}


@pytest.mark.parametrize("what", SABOTAGE)
def test_the_model_notices(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, wrong = SABOTAGE[what]
    monkeypatch.setattr(owner, name, wrong)
    assert vars(bounding)["Batch"] is Batch
    different = 0
    for seed in range(2):
        plan = plan_of(2, 1)
        records = records_of(plan, seed)
        runner = Runner(plan, records, tmp_path / f"{seed}.db", 2)
        different += runner.run(seed) != model(plan, records)
    assert different
