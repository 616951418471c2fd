"""Admission against a slow reference: order, C, periods, windows, repeats, trigger times.

Records of a unit shard: which copy counts, and which windows of a record are admitted.

Order and number of the records of a unit that count.

Which pairs take which weight, by definition; `test_every_path` looks at all outputs.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.weights import SelectionWeights
from dpstream.dp_transforms import bounding, skipping
from dpstream.dp_transforms.batches import concat, ids_of, record_schema
from dpstream.dp_transforms.bounding import decide
from dpstream.dp_transforms.decision import admit, firsts, taken_pairs
from dpstream.dp_transforms.ingest.records import Canonicaliser
from dpstream.dp_transforms.noise.ids import key_ids
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.state import open as stores
from dpstream.state.arrow import position_ids
from dpstream.state.keycounts import KeyCounts, Wanted
from dpstream.state.sqlite.store import SqliteStore
from dpstream.state.store import OvertakenError, Store
from tests.bounded import bound
from tests.dp_transforms.reference import Accepted, Pair, SlowBound, accept, covers
from tests.golden.refusals import Refused
from tests.streams import COUNT, MEAN, STEP, SUM, begin, generate, make_plan


def test_equal_positions_of_two_units_are_two_records() -> None:
    """A source that reuses positions must not let one unit push out another's record."""
    counts = np.zeros(2, np.int32)
    where = np.zeros(2, np.int32), np.zeros(2, np.int64)
    wanted = np.ones(2, np.int64)
    taken, _ = admit(np.array([0, 1]), np.zeros(2, np.int64), *where, wanted, counts, 3)
    assert taken.tolist() == [1, 1]
    taken, _ = admit(np.array([1, 1]), np.zeros(2, np.int64), *where, wanted, counts, 3)
    assert taken.tolist() == [1, 0] and counts.tolist() == [1, 2]
    # Delivered as 1, 0, 1 the unit's own repetition is still one record.
    where = np.zeros(3, np.int32), np.zeros(3, np.int64)
    between = np.array([1, 0, 1])
    counts[:] = 0
    taken, _ = admit(between, np.zeros(3, np.int64), *where, np.ones(3, np.int64), counts, 3)
    assert taken.tolist() == [1, 1, 0] and counts.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("contributions", "before", "now"), [(5, 0.62, 0.74), (10, 0.70, 0.84), (20, 0.77, 0.91)]
)
def test_repeats_that_take_nothing_leave_room_for_keys(
    contributions: int, before: float, now: float
) -> None:
    """Share of (unit, key) pairs that count at all: 5,000 units with up to 60 keys, up to 300
    records on each, both heavy-tailed.  (Commits of a public repository: .72 and .84 at C = 10.)"""
    rng = np.random.default_rng(1)
    keys = np.minimum(np.floor(rng.pareto(1.5, 5_000) + 1), 60).astype(np.int64)
    unit = np.repeat(np.arange(5_000), keys)
    records = np.minimum(np.floor(rng.pareto(0.9, len(unit)) + 1), 300).astype(np.int64)
    order = rng.permutation(records.sum())
    pair = np.repeat(np.arange(len(unit)), records)[order]
    unit, rows = unit[pair], np.arange(len(pair))
    place, ones = (np.zeros(len(rows), np.int32), rows), np.ones(len(rows), np.int64)
    taken, _ = admit(unit, rows, *place, ones, np.zeros(5_000, np.int32), contributions)
    assert len(np.unique(pair[taken > 0])) / records.size == pytest.approx(before, abs=0.01)
    counters = np.zeros(5_000, np.int32), np.zeros(5_000, np.int32)
    none = np.zeros(len(rows), np.int32)
    of = Wanted(unit, *place, np.zeros(len(rows), np.int64), ones, pair.astype(np.uint64), none)
    admission = KeyCounts().admit(rows, of, *counters, contributions, 1, 0)
    assert (admission.pairs > 0).sum() / records.size == pytest.approx(now, abs=0.01)
    assert counters[0].max() == contributions


def test_offsets_that_differ_in_high_bits_are_two_positions() -> None:
    """Ids of records take the place of offsets: all 63 bits of them count."""
    batch = SimpleNamespace(
        stamp=np.array([3, 3, 3, 3]),
        partition=np.array([0, 0, 1, 0], np.int32),
        offset=np.array([5, 5 + 2**32, 5, 5]),
        unit=np.array([0, 0, 0, 1]),
        digest=None,
    )
    ids = position_ids(batch.partition, batch.offset, batch.unit)
    assert firsts(np.arange(4), batch, ids).tolist() == [0, 1, 2, 3]  # type: ignore[arg-type]


def test_windows_and_indices_of_a_record_are_read_from_bits() -> None:
    """Slow and fast agree; a pair that is not the first of its key has no index."""
    rng = np.random.default_rng(3)
    taken = rng.integers(0, 1 << 63, 200, np.uint64)
    taken >>= rng.integers(0, 64, 200).astype(np.uint64)
    taken[0] = (1 << 64) - 1
    fresh = taken & rng.integers(0, 1 << 63, 200, np.uint64)
    rank = rng.integers(0, 50, 200).astype(np.int32)
    expected = []
    for row, (bits, first) in enumerate(zip(taken.tolist(), fresh.tolist(), strict=True)):
        index = int(rank[row])
        for nth in range(64):
            if bits >> nth & 1:
                expected.append((row, nth, index if first >> nth & 1 else -1))
            index += first >> nth & 1
    got = taken_pairs(taken, fresh, rank)
    assert list(zip(*(column.tolist() for column in got), strict=True)) == expected
    none = taken_pairs(taken[:0], fresh[:0], rank[:0])
    assert [len(column) for column in none] == [0, 0, 0]


PLANS = {
    "whole stream": make_plan(),
    "periods": make_plan(windows=5, triggers=4, period=4),
    "late": make_plan(stamped=True, lateness=4, skew=STEP),
    "late periods": make_plan(
        stamped=True, windows=4, triggers=9, lateness=3, period=3, skew=STEP // 2
    ),
    "sliding": make_plan(slide=3, windows=8, aggregates=(COUNT, SUM)),
    "sliding late": make_plan(
        stamped=True, slide=2, windows=9, triggers=10, lateness=2, skew=2 * STEP, contributions=7
    ),
    "per key": make_plan(per_key_bound=1, contributions=6),
    "per key sliding": make_plan(
        stamped=True, slide=2, windows=9, triggers=10, lateness=2, skew=2 * STEP,
        per_key_bound=2, weights=SelectionWeights(2, 0.5), contributions=7, aggregates=(COUNT, SUM),
    ),
    "per key periods": make_plan(
        stamped=True, windows=4, triggers=9, lateness=3, period=3, skew=STEP // 2,
        per_key_bound=3, contributions=4,
    ),
    "ranked late": make_plan(
        stamped=True, windows=4, triggers=9, lateness=3, period=3, skew=STEP // 2,
        weights=SelectionWeights(), contributions=5,
    ),
    "ranked sliding": make_plan(
        stamped=True, slide=2, windows=9, triggers=10, lateness=2, skew=2 * STEP,
        weights=SelectionWeights(2, 0.5), contributions=7, aggregates=(COUNT, SUM),
    ),
    "by size": make_plan(
        stamped=True, windows=8, triggers=1, period=1, per_key_bound=1, contributions=4,
        weights=SelectionWeights(size_share=0.2),
    ),
    "means": make_plan(aggregates=(MEAN, SUM), contributions=1),
}  # fmt: skip
Positions = list[tuple[int, int]]
Row = tuple[object, ...]


class Case:
    """A plan, its stream, canonical records by position, and a store of one shard."""

    def __init__(self, plan: Plan, ring: KeyRing, path: str, seed: int = 3) -> None:
        self.plan, self.path = plan, path
        self.stream = generate(plan, seed, records=900, users=160, keys=12, heavy=True)
        ingest = Canonicaliser(plan, ring)
        good = [ingest(b)[0] for b in self.stream.batches(200)]
        self.records = concat(good, record_schema(plan))
        where = zip(
            self.records.column("partition").to_pylist(),
            self.records.column("offset").to_pylist(),
            strict=True,
        )
        self.row = {p: i for i, p in enumerate(where)}
        self.accepted: dict[tuple[int, int], Accepted] = accept(plan, self.stream)
        units = self.records.column("unit").to_pylist()
        self.unit_id = {self.accepted[p].unit: units[i] for p, i in self.row.items()}
        self.run = begin(plan, path, shards=1)
        self.key_ids = functools.partial(key_ids, plan, ring.key)

    def open(self) -> Store:
        return self.run.open()

    def deliver(self, positions: Iterable[tuple[int, int]], upto: int) -> list[Row]:
        rows = np.array([self.row[p] for p in positions], np.int64)
        records = self.records.take(pa.array(rows))
        out, *_ = bound(self.plan, self.open(), 0, records, upto)
        assert (ids_of(out.column("_id")) == self.key_ids(out)).all()
        return plain_rows(out)

    def expected(self, pairs: Iterable[Pair]) -> list[Row]:
        return sorted(
            (
                p.window,
                p.step_index,
                *[p.rank] * self.plan.design.ranked,
                self.unit_id[p.unit],
                p.key,
                *p.values,
            )
            for p in pairs
        )


def plain_rows(batch: pa.RecordBatch) -> list[Row]:
    names = [n for n in batch.schema.names if n != "_id"]
    return sorted(zip(*(batch.column(n).to_pylist() for n in names), strict=True))


def shuffled(positions: Iterable[tuple[int, int]], seed: int) -> Positions:
    ordered = sorted(positions)
    return [ordered[i] for i in np.random.default_rng(seed).permutation(len(ordered))]


@pytest.fixture(params=list(PLANS), ids=lambda name: name.replace(" ", "-"))
def case(request: pytest.FixtureRequest, ring: KeyRing, store_paths: Iterator[str]) -> Case:
    return Case(PLANS[request.param], ring, next(store_paths))


def test_the_door_accepts_what_rule_0_accepts(case: Case) -> None:
    assert set(case.row) == set(case.accepted)
    refused = len(case.stream) - len(case.accepted)
    assert (refused > 20) == (case.plan.stamp != "event_time")


@pytest.mark.parametrize("seed", [0, 1])
def test_all_at_once_equals_the_reference(case: Case, seed: int) -> None:
    last = case.plan.timeline.last_trigger_time
    got = case.deliver(shuffled(case.row, seed), last)
    expected = case.expected(SlowBound(case.plan, case.accepted).deliver(case.row, last))
    assert got == expected
    assert 0 < len(got) < len(case.row) * case.plan.timeline.windows_per_record


def test_a_unit_never_gets_more_than_c_pairs(case: Case) -> None:
    got = case.deliver(case.row, case.plan.timeline.last_trigger_time)
    per_unit = Counter(row[2 + case.plan.design.ranked] for row in got)
    assert max(per_unit.values()) == case.plan.privacy.contributions
    # The same reference without the bound admits more: the figure above is the bound's doing.
    slow = SlowBound(case.plan, case.accepted)
    slow.used = _Unbounded()
    free = Counter(p.unit for p in slow.deliver(case.row, case.plan.timeline.last_trigger_time))
    assert max(free.values()) > case.plan.privacy.contributions


class _Unbounded(dict):  # type: ignore[type-arg]
    def __missing__(self, key: object) -> int:
        return 0

    def __setitem__(self, key: object, value: object) -> None:
        pass


def trigger_times_of(case: Case, pieces: int) -> list[int]:
    last = case.plan.timeline.last_trigger_time
    return sorted({max(1, last * (i + 1) // pieces) for i in range(pieces)})


def by_trigger_time(case: Case, upto: int, after: int) -> Positions:
    return [p for p in case.row if after < max(1, case.accepted[p].stamp_trigger_time) <= upto]


@pytest.mark.parametrize("pieces", [2, 5, 1000])
def test_one_trigger_time_at_a_time_equals_all_at_once(case: Case, pieces: int) -> None:
    got: list[Row] = []
    after = 0
    for upto in trigger_times_of(case, pieces):
        got += case.deliver(shuffled(by_trigger_time(case, upto, after), upto), upto)
        after = upto
    slow = SlowBound(case.plan, case.accepted)
    assert sorted(got) == case.expected(
        slow.deliver(case.row, case.plan.timeline.last_trigger_time)
    )


def test_repeated_deliveries_count_once(case: Case) -> None:
    rng = np.random.default_rng(7)
    times = rng.integers(1, 6, len(case.row))
    positions = [p for p, n in zip(case.row, times, strict=True) for _ in range(n)]
    last = case.plan.timeline.last_trigger_time
    got = case.deliver([positions[i] for i in rng.permutation(len(positions))], last)
    assert got == case.expected(SlowBound(case.plan, case.accepted).deliver(case.row, last))


@pytest.mark.parametrize("restart", [False, True])
def test_a_replay_repeats_committed_decisions(case: Case, restart: bool) -> None:
    middle, last = case.plan.timeline.last_trigger_time // 2, case.plan.timeline.last_trigger_time
    first = case.deliver(by_trigger_time(case, middle, 0), middle)
    if restart:
        stores.close_all()
    early = shuffled(by_trigger_time(case, middle, 0), 5)
    assert case.deliver(early + early[::3], middle) == first
    rest = case.deliver(case.row, last)
    slow = SlowBound(case.plan, case.accepted)
    assert rest == case.expected(slow.deliver(case.row, last))
    stores.close_all()
    assert case.deliver(shuffled(case.row, 6) + list(case.row), last) == rest


def test_a_late_delivery_joins_the_next_open_trigger_time(case: Case) -> None:
    last = case.plan.timeline.last_trigger_time
    slow = SlowBound(case.plan, case.accepted)
    held = [p for p in case.row if sum(p) % 5 == 0]
    after, moved = 0, 0
    for number, upto in enumerate(trigger_times_of(case, 4)):
        now = [p for p in by_trigger_time(case, upto, after) if p not in set(held)]
        if number:
            now += [p for p in held if case.accepted[p].stamp_trigger_time <= after]
            held = [p for p in held if case.accepted[p].stamp_trigger_time > after]
            moved += len(now)
        assert case.deliver(shuffled(now, number), upto) == case.expected(slow.deliver(now, upto))
        after = upto
    assert moved and after == last
    # Everything again, after a restart: the decisions of both kinds of record are repeated.
    stores.close_all()
    again = [p for p in case.row if p not in set(held)]
    assert case.deliver(again, last) == case.expected(slow.deliver(again, last))


def test_decisions_that_were_not_committed_do_not_count(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = case.plan.timeline.last_trigger_time
    case.deliver(by_trigger_time(case, last // 2, 0), last // 2)
    store = case.open()
    for name in ("commit_units", "unit_shard"):
        with monkeypatch.context() as patch:
            patch.setattr(store, name, _interrupted)
            with pytest.raises(InterruptedError):
                case.deliver(case.row, last)
    with monkeypatch.context() as patch:
        patch.setattr(bounding, "expand", _interrupted)
        with pytest.raises(InterruptedError):
            case.deliver(by_trigger_time(case, last // 2, 0), last // 2)
    slow = SlowBound(case.plan, case.accepted)
    assert case.deliver(case.row, last) == case.expected(slow.deliver(case.row, last))


def _interrupted(*_: object) -> None:
    raise InterruptedError


def test_what_never_was_delivered_in_time_is_counted(case: Case) -> None:
    last = case.plan.timeline.last_trigger_time
    lost = [p for p in case.row if case.accepted[p].unit[0] == "u1"]
    case.deliver([p for p in case.row if p not in set(lost)], last)
    rows = pa.array([case.row[p] for p in lost])
    out, counts, _ = bound(case.plan, case.open(), 0, case.records.take(rows), last)
    assert lost and out.num_rows == 0
    assert counts["operator_records_undelivered"] == len(lost)


def test_other_units_do_not_matter(case: Case, ring: KeyRing, store_paths: Iterator[str]) -> None:
    """Remove the unit with a third of all records: the others keep admission and step."""
    last = case.plan.timeline.last_trigger_time
    everyone = case.deliver(case.row, last)
    heavy = {i for unit, i in case.unit_id.items() if unit[0] == "u0"}
    rest = [p for p in case.row if case.accepted[p].unit[0] != "u0"]
    assert len(rest) < 0.8 * len(case.row)
    stores.close_all()
    case.run = begin(case.plan, next(store_paths), shards=1)
    at = 2 + case.plan.design.ranked
    assert case.deliver(rest, last) == [row for row in everyone if row[at] not in heavy]


def sabotage_arrival(stamp: np.ndarray, *ties: np.ndarray) -> np.ndarray:
    return np.arange(len(stamp))


def sabotage_ties(stamp: np.ndarray, *ties: np.ndarray) -> np.ndarray:
    return np.argsort(stamp, kind="stable")


@pytest.mark.parametrize("order", [sabotage_arrival, sabotage_ties])
def test_sabotaged_orders_are_noticed(
    case: Case, order: Callable[..., np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounding, "stamp_order", order)
    last = case.plan.timeline.last_trigger_time
    got = case.deliver(shuffled(case.row, 1), last)
    expected = case.expected(SlowBound(case.plan, case.accepted).deliver(case.row, last))
    assert got != expected


def test_ranks_of_a_unit_are_its_pairs_in_the_order_of_stamps(case: Case) -> None:
    """0, 1, 2, ... whatever the delivery; forgetting them is noticed by the reference."""
    if not case.plan.design.ranked:
        return
    got = case.deliver(shuffled(case.row, 4), case.plan.timeline.last_trigger_time)
    by_unit: dict[object, list[object]] = {}
    for row in got:
        by_unit.setdefault(row[3], []).append(row[2])
    assert max(map(len, by_unit.values())) == case.plan.privacy.contributions
    if case.plan.design.by_size:
        assert all(ranks == [len(ranks) - 1] * len(ranks) for ranks in by_unit.values())
        return
    for ranks in by_unit.values():
        # With a bound per key those that are not the first of their key have none.
        firsts = [rank for rank in ranks if rank != -1]
        assert sorted(firsts) == list(range(len(firsts)))  # type: ignore[type-var]
        assert len(firsts) == len(ranks) or case.plan.privacy.per_key_bound not in (None, 1)


def test_pieces_of_any_size_are_the_whole(case: Case) -> None:
    last = case.plan.timeline.last_trigger_time
    expected = case.deliver(case.row, last)
    rows = case.records.take(pa.array(list(case.row.values())))
    for size in (1, 7, 100, 10**6):
        pieces, *_ = decide(case.plan, case.open(), 0, rows, last, 0, case.key_ids)
        batches = list(pieces(size))
        assert sorted(row for piece in batches for row in plain_rows(piece)) == expected
        most = 2 * size + case.plan.timeline.windows_per_record
        assert max(piece.num_rows for piece in batches) <= most
    nothing, *_ = decide(case.plan, case.open(), 0, rows, last, last, case.key_ids)
    assert [piece.num_rows for piece in nothing(5)] == [0]


def test_who_waits(case: Case) -> None:
    """Records of later trigger times, and late ones of units that may still get a pair."""
    timeline, slow = case.plan.timeline, SlowBound(case.plan, case.accepted)
    middle = timeline.last_trigger_time // 2

    def waiting(positions: Iterable[tuple[int, int]], upto: int) -> set[tuple[int, int]]:
        rows = case.records.take(pa.array([case.row[p] for p in positions]))
        batch = bound(case.plan, case.open(), 0, rows, upto).waiting
        where = (batch.column(name).to_pylist() for name in ("partition", "offset"))
        return set(zip(*where, strict=True))

    early = set(by_trigger_time(case, middle, 0))
    held = {p for p in early if sum(p) % 3 == 0}
    assert waiting(set(case.row) - held, middle) == set(case.row) - early
    slow.deliver(early - held, middle)
    open_ = {p for p in held if slow.used[case.accepted[p].unit] < case.plan.privacy.contributions}
    assert waiting(held, middle) == open_ and open_ and open_ < held
    waiting(early - held, timeline.last_trigger_time)
    assert waiting(case.row, timeline.last_trigger_time) == set()


def test_what_is_committed_has_pairs(case: Case) -> None:
    """A record without a pair needs no row: what was decided is known by its trigger time."""
    got = case.deliver(case.row, case.plan.timeline.last_trigger_time)
    store = case.open()
    pairs = store.admitted_before(0, store.unit_shard(0))[1].pairs
    assert (pairs > 0).all() and pairs.sum() == len(got)


def test_pairs_are_counted_as_admitted_rejected_or_late(case: Case) -> None:
    """Late: a window that holds the event and had taken its last records when the record came."""
    timeline, held = case.plan.timeline, [p for p in case.row if sum(p) % 4 == 0]
    middle, last = timeline.last_trigger_time // 2, timeline.last_trigger_time
    slow, after, totals = SlowBound(case.plan, case.accepted), 0, dict[str, int]()
    for upto in (middle, last):
        now = set(by_trigger_time(case, upto, after))
        # A part of the first half comes with the second.
        now = (now - set(held)) if upto == middle else now | {
            p for p in held if case.accepted[p].stamp_trigger_time <= middle
        }  # fmt: skip
        expected = {"admitted": len(slow.deliver(now, upto)), "rejected": 0, "late": 0}
        for position in now:
            record = case.accepted[position]
            trigger_time = max(1, record.stamp_trigger_time)
            entry = trigger_time if trigger_time > after else after + 1
            holds, still_open = windows_of(case.plan, record.event_trigger_time, entry)
            expected["late"] += holds - still_open
            expected["rejected"] += still_open - len(slow.fate[position])
        rows = case.records.take(pa.array([case.row[p] for p in now]))
        _, counts, _ = bound(case.plan, case.open(), 0, rows, upto)
        tally = {name: counts[f"operator_pairs_{name}"] for name in expected}
        assert tally == expected
        totals = {name: totals.get(name, 0) + n for name, n in tally.items()}
        after = upto
    assert totals["admitted"] and totals["rejected"]
    assert totals["late"] or timeline.slide == timeline.window


def windows_of(plan: Plan, event_trigger_time: int, entry_trigger_time: int) -> tuple[int, int]:
    """(windows that an event is in and could have joined, those that it still can)."""
    timeline, ends = plan.timeline, []
    event = timeline.start + (event_trigger_time - 1) * timeline.trigger_every
    for window in range(timeline.windows):
        if covers(plan, window, event):
            ends.append(timeline.base(window) + timeline.triggers)
    entry = max(event_trigger_time, entry_trigger_time)
    return len(ends), sum(entry <= last for last in ends)


def test_forgotten_decisions_are_not_answered_though_they_are_still_there(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store may delete them later than it says so: what BOUND answers must not depend on it."""
    middle, slow = case.plan.timeline.last_trigger_time // 2, SlowBound(case.plan, case.accepted)
    positions = by_trigger_time(case, middle, 0)
    assert case.deliver(positions, middle) == case.expected(slow.deliver(positions, middle))
    times = sorted({max(1, case.accepted[p].stamp_trigger_time) for p in positions})
    forgotten = times[len(times) // 2]
    monkeypatch.setattr(SqliteStore, "_rewrite_units", lambda *_: False)
    case.open().forget_positions(0, forgotten)
    later = [p for p in positions if max(1, case.accepted[p].stamp_trigger_time) > forgotten]
    assert later and len(later) < len(positions)
    assert case.deliver(positions, middle) == case.expected(slow.deliver(later, middle))


def test_a_worker_that_was_overtaken_decides_on_what_is_there(
    case: Case, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    """Its memory is of before the other worker's commit: forgotten, read again, one decision."""
    middle, last = case.plan.timeline.last_trigger_time // 2, case.plan.timeline.last_trigger_time
    store = case.open()
    commit, forget, shards = store.commit_units, store.forget_units, list[int]()

    def overtaken(*given: Any) -> None:
        if len(shards) < 2:
            raise OvertakenError
        commit(*given)

    def forgotten(shard: int) -> None:
        shards.append(shard)
        forget(shard)

    monkeypatch.setattr(store, "commit_units", overtaken)
    monkeypatch.setattr(store, "forget_units", forgotten)
    slow = SlowBound(case.plan, case.accepted)
    first = by_trigger_time(case, middle, 0)
    assert case.deliver(first, middle) == case.expected(slow.deliver(first, middle))
    assert shards == [0, 0]
    shards.clear()
    monkeypatch.setattr(bounding, "STEP_ATTEMPTS", 3)
    monkeypatch.setattr(store, "commit_units", lambda *_: (_ for _ in ()).throw(OvertakenError))
    refused(case.deliver, case.row, last)
    assert shards == [0] * 3


def test_what_was_emitted_is_not_returned_again(case: Case) -> None:
    """One trigger time at a time, everything delivered each time: every pair leaves BOUND once."""
    last, got, since = case.plan.timeline.last_trigger_time, list[Row](), 0
    for upto in range(1, last + 1):
        rows = case.records.take(pa.array(np.random.default_rng(upto).permutation(len(case.row))))
        out, *_ = bound(case.plan, case.open(), 0, rows, upto, since)
        got, since = got + plain_rows(out), upto
    assert sorted(got) == case.expected(SlowBound(case.plan, case.accepted).deliver(case.row, last))
    again, *_ = bound(case.plan, case.open(), 0, case.records, last, last)
    assert again.num_rows == 0


def by_definition(
    unit: list[int], wanted: list[int], published: list[int], limit: int
) -> list[list[tuple[int, int]]]:
    """(rank, index) of each admitted pair of each record, in order."""
    used, taken = defaultdict[int, int](int), defaultdict[int, int](int)
    out = []
    for who, windows, mask in zip(unit, wanted, published, strict=True):
        pairs = []
        for window in range(windows):
            if used[who] == limit:
                break
            published_bit = mask >> window & 1
            pairs.append((used[who], -1 if published_bit else taken[who]))
            used[who] += 1
            taken[who] += not published_bit
        out.append(pairs)
    return out


@pytest.mark.parametrize("seed", range(20))
def test_words_hold_ranks_indices_and_windows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size, units, windows = 60, 4, int(rng.integers(1, 12))
    limit = int(rng.choice([1, 3, 8, 1023]))
    unit = np.sort(rng.integers(0, units, size))
    wanted = rng.integers(0, windows + 1, size)
    published = rng.integers(0, 1 << windows, size).astype(np.int32)
    partition, offset = np.zeros(size, np.int32), np.arange(size)
    counts, words, ranks = np.zeros(units, np.int32), list[int](), list[int]()
    for half in (slice(0, 25), slice(25, size)):  # two decisions: the counters go on
        order = np.arange(len(unit[half]))
        admission = skipping.admit(
            unit[half], partition[half], offset[half], wanted[half], published[half],
            counts, limit, order,
        )  # fmt: skip
        words += admission[0].tolist()
        ranks += admission[1].tolist()
    want = by_definition(unit.tolist(), wanted.tolist(), published.tolist(), limit)
    pairs = skipping.pairs_in(np.array(words))
    assert pairs.tolist() == [len(p) for p in want]
    at = np.repeat(np.arange(size), pairs)
    nth = np.concatenate([np.arange(n) for n in pairs])
    rank, index = skipping.laid_out(np.array(ranks, np.int32)[at], nth)
    assert list(zip(rank.tolist(), index.tolist(), strict=True)) == [p for ps in want for p in ps]
    # A unit's count is the sum of its records' words, so that stores need not know what they say.
    assert counts.tolist() == np.bincount(unit, words, units).astype(int).tolist()


def test_words_are_what_stores_hold() -> None:
    """A store that was begun before must say the same: no other place for any of the numbers."""
    counts, one = np.array([3 + (2 << 16)], np.int32), np.ones(1, np.int64)
    words, rank = skipping.admit(
        0 * one, np.zeros(1, np.int32), one, 3 * one, np.array([0b1101], np.int32), counts, 5,
        0 * one,
    )  # fmt: skip
    # Two of three windows: the unit is full.  The first has published the key, the second not.
    assert words.tolist() == [2 + (1 << 16)] and counts.tolist() == [5 + (3 << 16)]
    assert rank.tolist() == [3 + (2 << 10) + (0b01 << 20)]
    assert skipping.exhausted(7) == 7 + (7 << 16)
