"""Records that an id names: wherever and however often they are delivered, they count once."""

import itertools
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from dpstream.accounting.fields import Field
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.flow import run_in_memory
from dpstream.dp_transforms.ingest.records import Canonicaliser
from dpstream.state import open as stores
from dpstream.state.arrow import indexed, position_ids
from dpstream.state.store import Admitted, Store
from tests.bounded import bound
from tests.golden.refusals import Refused
from tests.streams import (
    COUNT,
    KEYS,
    START,
    STEP,
    SUM,
    UNITS,
    begin,
    by_name,
    generate,
    make_plan,
    positioned,
)


def plan_with_ids(**options: object) -> Plan:
    plan = make_plan(triggers=6, aggregates=(COUNT, SUM, UNITS), **options)  # type: ignore[arg-type]
    return msgspec.structs.replace(plan, record_id=Field("id", "bytes")).check()


def table(plan: Plan, seed: int = 5) -> pa.Table:
    """The records of a stream as one table with an id for each, unique within its unit only."""
    batches = generate(plan, seed, records=400, users=150, keys=30).batches(1000)
    rows = pa.Table.from_batches([b.replace_schema_metadata(None) for b in batches])
    seen: dict[str, int] = {}
    ids = []
    for user in rows["user"].to_pylist():
        seen[user] = seen.get(user, 0) + 1
        ids.append(seen[user].to_bytes(16, "big"))
    return rows.append_column("id", pa.array(ids, pa.binary()))


def delivered(rows: pa.Table, seed: int | None) -> list[pa.RecordBatch]:
    """The rows in batches; with a seed in any order, each 1 to 3 times, at other positions."""
    if seed is not None:
        rng = np.random.default_rng(seed)
        order = np.repeat(np.arange(rows.num_rows), rng.integers(1, 4, rows.num_rows))
        rows = rows.take(pa.array(rng.permutation(order)))
    size = 64 if seed is None else int(np.random.default_rng(seed).integers(1, 200))
    out = []
    for number, batch in enumerate(rows.combine_chunks().to_batches(max_chunksize=size)):
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        out.append(positioned(columns, number, 10_000 * (seed or 0)))
    return out


def released(plan: Plan, batches: list[pa.RecordBatch], path: Path) -> dict[tuple[int, int], bytes]:
    out = by_name(run_in_memory(begin(plan, path), batches)[0])
    stores.close_all()
    return out


def test_positions_do_not_matter(tmp_path: Path) -> None:
    plan = plan_with_ids()
    rows = table(plan)
    expected = released(plan, delivered(rows, None), tmp_path / "s.db")
    for seed in range(1, 5):
        assert released(plan, delivered(rows, seed), tmp_path / f"{seed}.db") == expected
    without = msgspec.structs.replace(plan, record_id=None)
    assert released(without, delivered(rows, 1), tmp_path / "w.db").values() != expected.values()


def test_a_restart_may_deliver_them_elsewhere(tmp_path: Path) -> None:
    plan = plan_with_ids()
    rows = table(plan)
    expected = released(plan, delivered(rows, None), tmp_path / "s.db")
    # Everything is decided and committed; other positions change nothing.
    assert released(plan, delivered(rows, 7), tmp_path / "s.db") == expected


def test_one_id_of_two_units_is_two_records() -> None:
    plan = plan_with_ids()
    rows = table(plan).slice(0, 2)
    batch = rows.set_column(5, "id", pa.array([b"x", b"x"])).combine_chunks().to_batches()[0]
    ingest = Canonicaliser(plan, KEYS.ring())
    records, dead = ingest(positioned(dict(zip(rows.schema.names, batch.columns, strict=True))))
    assert records.num_rows == 2 and dead.num_rows == 0
    assert records["offset"][0] == records["offset"][1]  # the unit tells them apart
    assert records["unit"][0] != records["unit"][1]


def test_ids_are_keyed_and_spread() -> None:
    plan = plan_with_ids()
    batch = delivered(table(plan), None)[0]
    mine, _ = Canonicaliser(plan, KEYS.ring())(batch)
    assert (np.array(mine["offset"]) >= 0).all() and (np.array(mine["partition"]) >= 0).all()
    assert len({*mine["partition"].to_pylist()}) > 1
    # The two numbers share no bits: together they are 94, not 63.
    partition, offset = (mine[name].to_numpy() for name in ("partition", "offset"))
    assert np.mean(partition & 0x3FFFFFFF == offset >> 33) < 0.1
    other, _ = Canonicaliser(plan, type(KEYS)(None, "33" * 32).ring())(batch)
    assert mine["offset"] != other["offset"]


def test_a_record_without_an_id_is_dead() -> None:
    plan = plan_with_ids()
    rows = table(plan).slice(0, 3)
    columns = dict(zip(rows.schema.names, rows.columns, strict=True))
    columns["id"] = pa.array([b"a", None, b"c"])
    batch = pa.table(columns).combine_chunks().to_batches()[0]
    where = dict(zip(batch.schema.names, batch.columns, strict=True))
    records, dead = Canonicaliser(plan, KEYS.ring())(positioned(where, 4, 70))
    assert records.num_rows == 2
    assert dead.to_pylist() == [{"partition": 4, "offset": 71, "reason": "record_id"}]


def test_the_plan_knows(refused: Refused) -> None:
    plan = plan_with_ids()
    assert plan.hash != msgspec.structs.replace(plan, record_id=None).hash
    refused(lambda: msgspec.structs.replace(plan, record_id=Field("id", "bool")).check())


def stamped_plan() -> Plan:
    """Stamps of their own, as of a broker that appends a repeated message again."""
    plan = make_plan(triggers=6, lateness=2, skew=STEP, stamped=True, aggregates=(COUNT, SUM))
    return msgspec.structs.replace(plan, record_id=Field("id", "bytes")).check()


def test_copies_with_later_stamps_count_once(tmp_path: Path) -> None:
    plan = stamped_plan()
    rows = table(plan)
    # One whose clock is ahead is dead the first time, and lives when it comes again.
    rows = rows.filter(pc.less_equal(rows["time"], rows["arrived"]))
    expected = released(plan, delivered(rows, None), tmp_path / "s.db")
    at = rows.schema.names.index("arrived")
    stamps = rows["arrived"].cast(pa.int64()).to_numpy()
    for seed in (1, 2):
        rng = np.random.default_rng(seed)
        more = rng.integers(0, 3 * STEP, rows.num_rows) * (rng.random(rows.num_rows) < 0.5)
        later = pa.array(stamps + more).cast(pa.timestamp("us", "UTC"))
        twice = pa.concat_tables([rows, rows.set_column(at, "arrived", later)])
        path = tmp_path / f"{seed}.db"
        assert released(plan, delivered(twice, seed), path) == expected
        # Everything is decided: what comes again is recalled as it was decided.
        assert released(plan, delivered(twice, seed + 5), path) == expected


def pairs(plan: Plan, store: Store, rows: list[tuple[str, float, float, int]], upto: int) -> Any:
    """(key, step index) of what BOUND admits of (user, event, stamp, id), its key the user's
    name."""
    users, events, stamps, ids = zip(*rows, strict=True)
    instant = pa.timestamp("us", "UTC")
    columns = {
        "user": users,
        "page": users,
        "time": pa.array([START + int(t * STEP) for t in events]).cast(instant),
        "arrived": pa.array([START + int(t * STEP) for t in stamps]).cast(instant),
        "value": [1.0] * len(rows),
        "id": pa.array([bytes([i]) for i in ids], pa.binary()),
    }
    records, dead = Canonicaliser(plan, KEYS.ring())(positioned(columns))
    assert dead.num_rows == 0
    out, *_ = bound(plan, store, 0, records, upto, upto - 1)
    return sorted(zip(out["page"].to_pylist(), out["trigger"].to_pylist(), strict=True))


def test_a_copy_at_a_later_cut_is_the_same_record(tmp_path: Path) -> None:
    """Also when the record of another unit is late, and whether its unit is full or not."""
    plan = stamped_plan()
    for number in (1, 2, 3, 4):
        for late in ([], [("y", 0.5, 0.5, 9)]):
            store = begin(plan, tmp_path / f"{number}{len(late)}.db", 1).open()
            mine = [("x", 0.5, 0.1 * i, i) for i in range(1, number + 1)]
            assert pairs(plan, store, mine, 1) == [("x", 1)] * min(number, 3)
            again = [("x", 0.5, 1.5 + 0.1 * i, i) for i in range(1, number + 1)]
            assert pairs(plan, store, [*again, *late], 2) == [("y", 2)] * len(late)
            stores.close_all()


#: Copies of one record of a unit, with one stamp and different (event, key, value).
COPIES = {
    "keys": [(0.5, "b", 1.0), (0.5, "a", 1.0), (0.5, "c", 1.0)],
    "values": [(0.5, "a", 2.0), (0.5, "a", -1.0), (0.5, "a", 3.0)],
    "times": [(0.9, "b", 1.0), (1.2, "a", 1.0), (0.2, "c", 1.0)],
}


@pytest.mark.parametrize("copies", COPIES.values(), ids=list(COPIES))
def test_delivery_does_not_choose_between_copies(tmp_path: Path, copies: list[Any]) -> None:
    """Others' records can change what comes first, so that must not decide what counts."""
    plan, seen = stamped_plan(), set()
    instant = pa.timestamp("us", "UTC")
    for number, order in enumerate(itertools.permutations([*copies, (0.1, "z", 0.0)])):
        events, keys, values = zip(*order, strict=True)
        columns = {
            "user": ["x"] * 4,
            "page": keys,
            "time": pa.array([START + int(t * STEP) for t in events]).cast(instant),
            "arrived": pa.array([START + int(1.5 * STEP)] * 4).cast(instant),
            "value": pa.array(values),
            "id": pa.array([b"2" if key == "z" else b"1" for key in keys], pa.binary()),
        }
        records, dead = Canonicaliser(plan, KEYS.ring())(positioned(columns))
        assert dead.num_rows == 0
        store = begin(plan, tmp_path / f"{number}.db", 1).open()
        out, *_ = bound(plan, store, 0, records, 2, 1)
        # Again, from the committed decisions.
        again, *_ = bound(plan, store, 0, records, 2, 1)
        for got in (out, again):
            assert got.num_rows == 2
            names = ("page", "v1", "trigger", "window")
            seen.add(tuple(sorted(zip(*(got[n].to_pylist() for n in names), strict=True))))
        stores.close_all()
    assert len(seen) == 1


@pytest.mark.parametrize("other", [(0.5, "b"), (1.2, "a")], ids=["key", "time"])
def test_a_copy_with_other_contents_gets_no_decision_of_the_first(
    tmp_path: Path, other: tuple[float, str]
) -> None:
    """With a bound per key: else it would be one more of its own key, and a first one again."""
    given = stamped_plan()
    privacy = msgspec.structs.replace(given.privacy, per_key_bound=1)
    line = msgspec.structs.replace(given.timeline, window=STEP, slide=STEP, end=START + 12 * STEP)
    plan = msgspec.structs.replace(given, privacy=privacy, timeline=line).check()
    ring, instant = KEYS.ring(), pa.timestamp("us", "UTC")
    store = begin(plan, tmp_path / "s.db", 1).open()

    def admitted(event: float, key: str) -> int:
        columns = {
            "user": ["x"],
            "page": [key],
            "time": pa.array([START + int(event * STEP)]).cast(instant),
            "arrived": pa.array([START + int(1.5 * STEP)]).cast(instant),
            "value": [1.0],
            "id": pa.array([b"1"], pa.binary()),
        }
        records, dead = Canonicaliser(plan, ring)(positioned(columns))
        assert dead.num_rows == 0
        return bound(plan, store, 0, records, 2, 0)[0].num_rows

    assert admitted(0.5, "a") == 1
    assert admitted(*other) == 0
    assert admitted(0.5, "a") == 1  # the record itself, from its decision
    stores.close_all()


@pytest.mark.parametrize("skew", [0, STEP])
def test_a_later_event_gets_no_decision_of_the_first(tmp_path: Path, skew: int) -> None:
    """Also where the first is not delivered again: it was counted by an attempt before."""
    given = stamped_plan()
    line = msgspec.structs.replace(
        given.timeline, window=STEP, slide=STEP, end=START + 12 * STEP, max_skew=skew
    )
    plan = msgspec.structs.replace(given, timeline=line).check()
    ring, instant = KEYS.ring(), pa.timestamp("us", "UTC")
    store = begin(plan, tmp_path / "s.db", 1).open()

    def admitted(event: float, stamp: float, key: str, upto: int) -> int:
        columns = {
            "user": ["x"],
            "page": [key],
            "time": pa.array([START + int(event * STEP)]).cast(instant),
            "arrived": pa.array([START + int(stamp * STEP)]).cast(instant),
            "value": [1.0],
            "id": pa.array([b"1"], pa.binary()),
        }
        records, dead = Canonicaliser(plan, ring)(positioned(columns))
        assert dead.num_rows == 0
        return bound(plan, store, 0, records, upto, 0)[0].num_rows

    ahead = skew / STEP
    assert admitted(1.5 + ahead, 1.5, "a", 2) == 1
    assert admitted(2.5 + ahead, 2.5, "b", 3) == 0  # another window, still open
    assert admitted(3.5 + ahead, 3.5, "c", 4) == 0
    # Every window of the first is past its last trigger time: the id names a new record.
    assert admitted(4.5 + ahead + 2 * (skew > 0), 4.5 + 2 * (skew > 0), "c", 7) == 1
    assert admitted(1.5 + ahead, 2.5, "a", 7) == 1  # the record itself, sent again
    stores.close_all()


def test_a_position_kept_twice_shifts_nobody_elses() -> None:
    """It stands there twice where its first record has expired but was not yet deleted."""
    number = np.arange(4, dtype=np.int32)
    twice = Admitted(
        number * 0, np.array([5, 5, 6, 7]), number // 3, number + 1, number + 1, number
    )
    index, rows = indexed(twice)
    at = index.find(position_ids(number[:2] * 0, np.array([6, 7]), np.array([0, 1])))
    assert rows.pairs[at].tolist() == [3, 4] and rows.pairs.tolist() == [1, 3, 4]
