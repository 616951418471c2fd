"""Expiry and abandoning in a stream of single trigger times, with restarts that replay it."""

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.fields import Field
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.weights import SelectionWeights
from dpstream.dp_transforms import bounding
from dpstream.dp_transforms.batches import admitted_schema, concat, ids_of, record_schema
from dpstream.dp_transforms.bounding import Copies
from dpstream.dp_transforms.decision import Batch
from dpstream.dp_transforms.flow import SealFactory, run_in_memory
from dpstream.dp_transforms.ingest.records import Canonicaliser
from dpstream.dp_transforms.published_keys import PublishedKeys
from dpstream.dp_transforms.release import steps_through
from dpstream.dp_transforms.run import Run
from dpstream.dp_transforms.skipping import exhausted, pairs_in
from dpstream.dp_transforms.step import Stepper
from dpstream.state import arrow, retention
from dpstream.state import open as stores
from dpstream.state.idtable import shard_of
from dpstream.state.sqlite.file import create_store
from dpstream.state.sqlite.store import SqliteStore
from dpstream.state.store import Store
from dpstream.state.transfer import Abandon, copy_store
from tests.bounded import bound
from tests.lanes import few_first
from tests.streams import (
    COUNT,
    KEYS,
    MEAN,
    START,
    STEP,
    SUM,
    begin,
    by_name,
    generate,
    make_plan,
    positioned,
    sealed_bytes,
)

SHARDS = 2
Releases = dict[tuple[int, int], bytes]

SKIPPING = {"skip": True, "weights": SelectionWeights(1.0, 2.0), "contributions": 5}
PLANS = {
    "tumbling": {"triggers": 6, "windows": 4, "lateness": 2, "skew": STEP + STEP // 2},
    "sliding": {"triggers": 7, "windows": 9, "slide": 2, "lateness": 1, "skew": STEP // 2,
                "contributions": 5},
    "periods": {"triggers": 4, "windows": 8, "lateness": 1, "skew": STEP, "period": 6},
    "sliding periods": {"triggers": 5, "windows": 12, "slide": 1, "period": 4, "skew": 2 * STEP,
                        "contributions": 6},
    "ahead": {"triggers": 4, "windows": 5, "skew": 2 * STEP},
    "skip": {"triggers": 6, "windows": 5, "lateness": 2, "skew": STEP, "tests": (1, 2, 4, 6),
             **SKIPPING},
    "skip sliding": {"triggers": 6, "windows": 9, "slide": 2, "skew": STEP // 2, "tests": (2, 5, 6),
                     **SKIPPING},
}  # fmt: skip


def plan_of(name: str) -> Plan:
    return make_plan(stamped=True, aggregates=(MEAN,), epsilon=9.0, **PLANS[name])  # type: ignore


class Live:
    """One run that gets its records one trigger time at a time, in this process."""

    def __init__(self, run: Run, expires: bool = True) -> None:
        self.run, self.line, self.expires = run, run.plan.timeline, expires
        self.undelivered = 0
        self.reopen()

    def reopen(self) -> None:
        """As another process would: nothing in memory, no rows held."""
        stores.close_all()
        self.store, self.ring = self.run.open(), KEYS.ring()
        self.stepper = Stepper(self.run.plan, self.ring, self.store)
        self.held: list[pa.RecordBatch] = []
        self.released: Releases = {}

    def deliver(self, records: pa.RecordBatch, upto: int) -> None:
        """Records whose input is complete up to a trigger time: decide, step, expire."""
        shard = shard_of(ids_of(records.column("unit")), SHARDS)
        given: dict[str, Any] = {}
        if self.run.plan.design.skips:
            given["published"] = PublishedKeys(self.run.plan, self.store)
        for n in range(SHARDS):
            mine = records.filter(pa.array(shard == n))
            admitted, counts, _ = bound(self.run.plan, self.store, n, mine, upto, **given)
            self.undelivered += counts["operator_records_undelivered"]
            self.held.append(admitted)
        rows = concat(self.held, admitted_schema(self.run.plan))
        stride = self.line.slide // self.line.trigger_every
        trigger_time = rows.column("window").to_numpy() * stride + rows.column("trigger").to_numpy()
        self.held = [rows.filter(pa.array(trigger_time > upto))]
        self.step(rows.filter(pa.array(trigger_time <= upto)), upto)
        if self.expires:
            retention.expire(self.store, self.line)

    def step(self, rows: pa.RecordBatch, upto: int) -> None:
        """Every step up to a trigger time, old ones read back."""
        to = shard_of(ids_of(rows.column("_id")), SHARDS)
        parts: dict[tuple[int, int], list[pa.RecordBatch]] = {}
        for n in range(SHARDS):
            mine = rows.filter(pa.array(to == n))
            for window, trigger, batch in steps_through(self.line, mine, upto):
                if window >= self.store.retained_windows.first:
                    out, _ = self.stepper.step(window, n, trigger, batch)
                    parts.setdefault((window, trigger), []).append(out)
        sealed = SealFactory(self.run)()
        for name, shards in parts.items():
            self.released[name] = sealed_bytes(*sealed(*name, shards))


def canonical(plan: Plan, seed: int = 3) -> tuple[list[pa.RecordBatch], pa.RecordBatch]:
    """(source batches, canonical records)."""
    stream = generate(plan, seed, records=900, users=120, keys=25)
    batches, ingest = stream.batches(100), Canonicaliser(plan, KEYS.ring())
    return batches, concat([ingest(b)[0] for b in batches], record_schema(plan))


def stamp_trigger_time(plan: Plan, records: pa.RecordBatch) -> Any:
    return np.maximum(1, plan.timeline.trigger_time_of(records.column("stamp").to_numpy()))


def drive(live: Live, records: pa.RecordBatch, first: int, last: int, restarts: int) -> None:
    """Deliver one trigger time at a time; now and then restart and get everything again."""
    trigger_times, rng = stamp_trigger_time(live.run.plan, records), np.random.default_rng(8)
    for upto in range(first, last + 1):
        live.deliver(records.filter(pa.array(trigger_times == upto)), upto)
        if rng.integers(0, 10) < restarts:
            live.reopen()
            again = records.filter(pa.array(trigger_times <= upto))
            live.deliver(again.take(pa.array(rng.permutation(again.num_rows))), upto)


def expected(plan: Plan, folder: Path) -> Releases:
    batches, _ = canonical(plan)
    out = by_name(run_in_memory(begin(plan, folder / "calm.db", SHARDS), batches)[0])
    stores.close_all()
    return out


@contextlib.contextmanager
def lived(plan: Plan, path: Path, restarts: int, expires: bool = True) -> Iterator[Live]:
    live = Live(begin(plan, path, SHARDS), expires)
    drive(live, canonical(plan)[1], 1, plan.timeline.last_trigger_time, restarts)
    live.reopen()
    live.deliver(canonical(plan)[1], plan.timeline.last_trigger_time)
    yield live
    stores.close_all()


def units(store: Store) -> int:
    """Units that the store keeps."""
    for n in range(SHARDS):
        store.forget_units(n)
    return sum(store.unit_shard(n).table.size for n in range(SHARDS))


@pytest.mark.parametrize("name", PLANS)
def test_expiry_changes_no_release(name: str, tmp_path: Path) -> None:
    plan = plan_of(name)
    calm = expected(plan, tmp_path)
    assert any(len(b) > min(map(len, calm.values())) for b in calm.values())
    with lived(plan, tmp_path / "a.db", 3) as live:
        assert live.released == calm
        assert live.undelivered == 0  # what is forgotten is no record that was lost
        for shard in range(SHARDS):
            assert live.store.unit_progress(shard).forgotten == plan.timeline.last_trigger_time
            assert not len(
                live.store.admitted_before(shard, live.store.unit_shard(shard))[1].trigger_time
            )
        assert units(live.store) == 0 or plan.timeline.period is None
    with lived(plan, tmp_path / "b.db", 3, expires=False) as live:
        assert live.released == calm and units(live.store) > 100


def test_state_stays_small_while_time_passes(tmp_path: Path) -> None:
    """Positions of a window's length at most; counters of the periods that are open."""
    plan = plan_of("periods")
    timeline, (_, records) = plan.timeline, canonical(plan)
    live, most, everything = Live(begin(plan, tmp_path / "a.db", SHARDS)), 0, 0
    trigger_times = stamp_trigger_time(plan, records)
    for upto in range(1, timeline.last_trigger_time + 1):
        live.deliver(records.filter(pa.array(trigger_times == upto)), upto)
        most = max(most, units(live.store))
        for n in range(SHARDS):
            live.store.forget_units(n)
            times = live.store.admitted_before(n, live.store.unit_shard(n))[1].trigger_time
            assert len(times) == 0 or times.min() > upto - timeline.triggers - 2 - timeline.triggers
    live.reopen()
    stores.close_all()
    with lived(plan, tmp_path / "b.db", 0, expires=False) as control:
        everything = units(control.store)
    assert most < 0.7 * everything


#: By fault: the plan that shows it (only where events run further ahead than the lateness do
#: windows close while records of the next are decided) and what is wrong.
SABOTAGED = {
    "positions go a window too early": (
        "periods", "settled_trigger_time", lambda line, k: line.base(k + 1)
    ),
    "events do not run ahead of their stamps": (
        "ahead", "settled_trigger_time", lambda line, k: line.base(k)
    ),
    "counters go before their period ends": (
        "periods", "period_trigger_time", lambda line, trigger_time: trigger_time * 0 + 1
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", SABOTAGED)
def test_expiry_that_is_too_eager_is_noticed(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    which, name, wrong = SABOTAGED[fault]
    plan = plan_of(which)
    calm = expected(plan, tmp_path)
    monkeypatch.setattr(retention, name, wrong)
    monkeypatch.setattr(
        "dpstream.dp_transforms.bounding.period_trigger_time", retention.period_trigger_time
    )
    with lived(plan, tmp_path / "a.db", 10) as live:
        assert live.released != calm


def answers(plan: Plan, store: SqliteStore, records: pa.RecordBatch, upto: int) -> list[Any]:
    """What BOUND emits of the last trigger times, by unit shard, when a runner asks once more."""
    shard = shard_of(ids_of(records.column("unit")), SHARDS)
    return [
        bound(plan, store, n, records.filter(pa.array(shard == n)), upto, upto - 3)[0].to_pylist()
        for n in range(SHARDS)
    ]


def test_a_worker_of_before_an_expiry_answers_as_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker's expiry gives units new slots; decisions that are left are still found."""
    plan = plan_of("periods")
    timeline, (_, records) = plan.timeline, canonical(plan)
    upto = timeline.last_trigger_time // 2
    live = Live(begin(plan, tmp_path / "a.db", SHARDS), expires=False)
    drive(live, records, 1, upto, 0)
    records = records.filter(pa.array(stamp_trigger_time(plan, records) <= upto))
    schema, sums = stores.key_schema(plan), plan.design.sums
    with contextlib.ExitStack() as stack:
        old, new = (
            stack.enter_context(contextlib.closing(SqliteStore(tmp_path / "a.db", schema, sums)))
            for _ in range(2)
        )
        before = answers(plan, old, records, upto)
        assert retention.expire(live.store, timeline) == SHARDS
        now = answers(plan, new, records, upto)
        assert all(now) and now == before == answers(plan, old, records, upto)
        monkeypatch.setattr(arrow, "moved", lambda rows, slots: rows)  # sabotaged
        assert answers(plan, old, records, upto) != now
    stores.close_all()


# --- abandoning ------------------------------------------------------------------------


def abandoned(live: Live, folder: Path, trigger_time: int) -> Live:
    """The run in a new epoch, everything up to the trigger time given up."""
    source, plan = live.store, live.run.plan
    create_store(folder / "new.db", msgspec.structs.replace(source.identity, epoch=1))
    new = SqliteStore(folder / "new.db", stores.key_schema(plan), plan.design.sums)
    spent = plan.privacy.contributions
    spent = exhausted(spent) if plan.design.skips else spent
    copy_store(source, new, plan.timeline, None, Abandon(trigger_time, spent))
    new.close()
    stores.close_all()
    return Live(live.run._replace(store=f"sqlite:{folder / 'new.db'}"))


@pytest.mark.parametrize("name", PLANS)
def test_an_abandoned_run_releases_new_windows_only(name: str, tmp_path: Path) -> None:
    plan = plan_of(name)
    timeline, (_, records) = plan.timeline, canonical(plan)
    live = Live(begin(plan, tmp_path / "a.db", SHARDS))
    lost = timeline.last_trigger_time // 2
    drive(live, records, 1, lost - 3, 0)
    before = dict(live.released)
    old_ids = {tuple(i) for n in range(SHARDS) for i in live.store.unit_shard(n).table.ids.tolist()}
    live = abandoned(live, tmp_path, lost)
    live.expires = False
    # Everything comes again, old records too; only what is stamped after the trigger time counts.
    drive(live, records, lost + 1, timeline.last_trigger_time, 4)
    live.reopen()
    live.deliver(records, timeline.last_trigger_time)
    first = -(-lost // timeline.base(1))
    assert {w for w, _ in live.released} == set(range(first, timeline.windows))
    assert not set(before) & set(live.released)
    seen = 0
    for n in range(SHARDS):
        shard = live.store.unit_shard(n)
        words = shard.counts
        counts = (pairs_in(words) if plan.design.skips else words).tolist()
        for unit, count in zip(shard.table.ids.tolist(), counts, strict=False):
            assert count <= plan.privacy.contributions
            # Units of the first epoch are spent for good; others start with the second's budget.
            seen += tuple(unit) not in old_ids and count > 0
    assert seen > 0
    # The same records in a new run of the same windows have other noise: another epoch.
    fresh = Live(begin(plan, tmp_path / "same.db", SHARDS), expires=False)
    later = records.filter(pa.array(stamp_trigger_time(plan, records) > lost))
    drive(fresh, later, 1, timeline.last_trigger_time, 0)
    same = [w for w in live.released if live.released[w] == fresh.released[w]]
    assert len(same) < len(live.released) or not live.released
    stores.close_all()


def test_records_before_the_trigger_time_are_decided(tmp_path: Path) -> None:
    """A record stamped before the loss is never admitted again, in whatever window it lies."""
    plan = plan_of("sliding")
    timeline, (_, records) = plan.timeline, canonical(plan)
    live = abandoned(Live(begin(plan, tmp_path / "a.db", SHARDS)), tmp_path, 6)
    old = records.filter(pa.array(stamp_trigger_time(plan, records) <= 6))
    assert old.num_rows > 50
    for n in range(SHARDS):
        shard = shard_of(ids_of(old.column("unit")), SHARDS)
        out, counts, _ = bound(
            plan, live.store, n, old.filter(pa.array(shard == n)), timeline.last_trigger_time
        )
        assert out.num_rows == 0 and counts["operator_records_undelivered"] == 0
    # Later ones are not wasted on windows that nobody releases any more.
    live.reopen()
    late = records.filter(pa.array(stamp_trigger_time(plan, records) == 7))
    Path(tmp_path / "x").mkdir()
    other = abandoned(Live(begin(plan, tmp_path / "b.db", SHARDS)), tmp_path / "x", 6)
    shard = shard_of(ids_of(late.column("unit")), SHARDS)
    out, *_ = bound(
        plan, other.store, 0, late.filter(pa.array(shard == 0)), timeline.last_trigger_time
    )
    assert out.num_rows and min(out.column("window").to_pylist()) >= 3
    stores.close_all()


# Copies with other contents: what counts is a function of the unit's records, whatever happens.


#: (unit, key, step, value) of admitted pairs, by trigger time of the decision.
Pairs = dict[int, Counter[tuple[bytes, str, int, int]]]


def copied_plan_of(skew: int, per_key: int | None) -> Plan:
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
                self.decide(store, number, given, upto, since, attempt, draw)
            else:
                for time in range(since + 1, upto + 1):
                    out[time] = attempt.get(time, Counter())
                since = upto if draw.random() < 0.8 else since
        stores.close_all()
        return {time: pairs for time, pairs in out.items() if pairs}

    def decide(self, store: Any, number: int, given: pa.RecordBatch, upto: int, since: int,
               attempt: Pairs, draw: random.Random) -> None:  # fmt: skip
        """A decision; what it admits is told apart by trigger times, one question for each."""
        bound(self.plan, store, number, given, upto, since)
        for time in range(since + 1, upto + 1):  # decided already: the same records once more
            got = bound(self.plan, store, number, given, time, time - 1)[0].to_pylist()
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
    plan = copied_plan_of(skew, per_key)
    records = records_of(plan, seed)
    expected = model(plan, records)
    assert sum(map(Counter.total, expected.values())) > 20
    for shards in (1, 3):
        runner = Runner(plan, records, tmp_path / f"{shards}.db", shards)
        assert runner.run(seed * 10 + shards) == expected


def test_a_reshard_keeps_what_tells_copies_apart(tmp_path: Path) -> None:
    plan = copied_plan_of(2, 1)
    records = records_of(plan, 3)
    out = Runner(plan, records, tmp_path / "a.db", 2).run(5, last=9)
    source, target = (
        begin(plan, tmp_path / name, n).open() for name, n in (("a.db", 2), ("b.db", 3))
    )
    copy_store(source, target, plan.timeline)
    out |= Runner(plan, records, tmp_path / "b.db", 3).run(6, since=9)
    assert out == model(plan, records)


def test_the_counter_of_copies_counts_what_no_admitted_record_holds(tmp_path: Path) -> None:
    plan = copied_plan_of(0, None)
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
    times = np.maximum(1, plan.timeline.trigger_time_of(records["stamp"].to_numpy()))
    for spans in ([1, 2], [2]):  # the second decision reads the first one's from the store
        store = begin(plan, tmp_path / f"{len(spans)}.db", 1).open()
        counts, since = Counter[str](), 0
        for upto in spans:
            of = records.filter(pa.array((times > since) & (times <= upto)))
            counts.update(bound(plan, store, 0, of, upto, since).counts)
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
        plan = copied_plan_of(2, 1)
        records = records_of(plan, seed)
        runner = Runner(plan, records, tmp_path / f"{seed}.db", 2)
        different += runner.run(seed) != model(plan, records)
    assert different
