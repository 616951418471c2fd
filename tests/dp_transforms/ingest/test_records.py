"""Ingest: bad records are dead-lettered alike every time and touch no other record.

A position that is there twice is seen, whatever its numbers; nothing else is.
"""

import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpstream.accounting.aggregates import AGGREGATE_KINDS
from dpstream.accounting.fields import Aggregate
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.batches import ID
from dpstream.dp_transforms.ingest.records import (
    Canonicaliser,
    canonical_public_keys,
    public_key_ids,
    repeats,
    require_once,
)
from dpstream.dp_transforms.noise.prf import KeyRing
from tests.dp_transforms.reference import accept, on_grid, verdict
from tests.dp_transforms.runs import (
    BAD,
    BYTE_LAYOUTS,
    TEXT_LAYOUTS,
    Layout,
    cast,
    coded,
    raw,
    text_expected,
    ticks,
)
from tests.golden.refusals import Refused
from tests.streams import KEYS, START, STEP, SUM, generate, make_plan, positioned

RING: KeyRing = KEYS.ring()


# --- values on the grid ------------------------------------------------------------------


def grid_values(plan: Plan, values: Sequence[float]) -> list[tuple[int, ...]]:
    size = len(values)
    batch = positioned(
        {"user": ["u"] * size, "page": ["k"] * size, "time": [START] * size, "value": values}
    )
    good, dead = Canonicaliser(plan, RING)(batch)
    assert dead.num_rows == 0
    names = [n for n in good.schema.names if re.fullmatch("v[0-9]+", n)]
    return list(zip(*(good.column(n).to_pylist() for n in names), strict=True))


FINITE = st.floats(-1e300, 1e300) | st.integers(-4000, 4000).map(lambda k: k / 200)
GRIDS = [(0.1, (-5.0, 5.0)), (0.25, (-1.9, 7.3)), (0.01, (0.0, 0.99)), (3.0, (-100.0, 50.0))]


@pytest.mark.parametrize(("grid", "bounds"), GRIDS)
@pytest.mark.parametrize("kind", [name for name, kind in AGGREGATE_KINDS.items() if kind.bounded])
@settings(max_examples=60)
@given(values=st.lists(FINITE, min_size=1, max_size=20))
def test_clamp_and_grid(
    kind: str, grid: float, bounds: tuple[float, float], values: list[float]
) -> None:
    figure = Aggregate("f", kind, "value", bounds, grid)  # type: ignore[arg-type]
    plan = make_plan(aggregates=(figure,))
    stream = plan.design.streams[-1]
    lo, hi = figure.grid_bounds()
    points = range(lo - 3, hi + 4)
    got = grid_values(plan, values + [float(Fraction(str(grid)) * k) for k in points])
    assert got[: len(values)] == [on_grid(plan, v) for v in values]
    assert got[len(values) :] == [(min(max(k, lo), hi) - stream.mid,) for k in points]
    assert max(abs(v) for (v,) in got) <= stream.sensitivity


def test_a_value_beyond_every_float_after_scaling_is_clamped() -> None:
    figure = Aggregate("f", "sum", "value", (-2.0, 3.0), 0.1)
    assert grid_values(make_plan(aggregates=(figure,)), [1e308, -1.7e308]) == [(30,), (-20,)]


# --- whole records ---------------------------------------------------------------------

PLAN = make_plan(stamped=True, lateness=4, skew=STEP // 2, aggregates=(SUM,), contributions=2)
PERIODS = msgspec.structs.replace(
    PLAN, timeline=msgspec.structs.replace(PLAN.timeline, period=4 * STEP)
)
FAR = 10**17
USERS = [b"u1", b"u2", b"e\xcc\x81", b"\xc3\xa9", b"", b"\xff", b"a\0", b"x" * 2000, None]
PAGES = [b"k1", b"k2", b"", b"\xed\xa0\x80", None]
EVENTS = [START, START + STEP, START + 3 * STEP + 1, START - 1, START + 100 * STEP, -FAR, FAR, None]
STAMPS = [START, START + STEP, START + 9 * STEP, START + 12 * STEP, START + 50 * STEP, FAR, None]
NUMBERS = [1.0, -0.0, 2.25, 1e308, math.nan, math.inf, None]
RECORD = st.tuples(*(st.sampled_from(pool) for pool in (USERS, PAGES, EVENTS, STAMPS, NUMBERS)))
GOOD_RECORD = st.tuples(
    *(
        st.sampled_from(pool)
        for pool in (USERS[:4], PAGES[:3], EVENTS[:3], [START + 5 * STEP], NUMBERS[:4])
    )
)
LAYOUTS: dict[str, tuple[Layout, Layout, Layout]] = {
    "arrow": (raw(pa.string()), cast(pa.int64()), cast(pa.float64())),
    "binary": (cast(pa.large_binary()), ticks(pa.timestamp("us"), pa.int64()), coded(pa.float64())),
    "coded": (coded(pa.binary()), cast(pa.int64()), cast(pa.float64())),
}


def outcomes(plan: Plan, rows: Sequence[Any], layout: str = "arrow", first: int = 0) -> list[Any]:
    """What became of each row: its canonical record without position, or its reason."""
    text, time, number = LAYOUTS[layout]
    user, page, event, stamp, value = zip(*rows, strict=True)
    batch = positioned(
        {
            "user": text(user),
            "page": text(page),
            "time": time(event),
            "arrived": time(stamp),
            "value": number(value),
        },
        partition=3,
        offset=first,
    )
    good, dead = Canonicaliser(plan, RING)(batch)
    records: dict[int, Any] = dict(
        zip(dead.column("offset").to_pylist(), dead.column("reason").to_pylist(), strict=True)
    )
    assert set(good.column("partition").to_pylist()) <= {3}
    for record in good.to_pylist():
        offset = record.pop("offset")
        assert offset not in records
        records[offset] = record
    assert sorted(records) == list(range(first, first + len(rows)))
    return [records[first + i] for i in range(len(rows))]


def reason_of(plan: Plan, row: Any) -> str | None:
    """The first rule a row breaks, in the public order."""
    user, page, event, stamp, value = row
    if text_expected(user) in (BAD, ""):
        return "unit"
    if text_expected(page) == BAD:
        return "key"
    if event is None or stamp is None:
        return "time"
    refused = verdict(plan, event, stamp)
    if refused:
        return refused
    return "value" if value is None or not math.isfinite(value) else None


@pytest.mark.parametrize("plan", [PLAN, PERIODS], ids=["stream", "periods"])
@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=60)
@given(rows=st.lists(RECORD | GOOD_RECORD, min_size=1, max_size=12), split=st.integers(0, 12))
def test_a_rows_fate_is_its_own(plan: Plan, layout: str, rows: list[Any], split: int) -> None:
    together = outcomes(plan, rows, layout)
    assert together == [outcomes(plan, [row])[0] for row in rows]
    assert together == outcomes(plan, rows[::-1], layout, first=7)[::-1]
    apart = [outcomes(plan, part, layout) for part in (rows[:split], rows[split:]) if part]
    assert together == [fate for part in apart for fate in part]
    good = [i for i, fate in enumerate(together) if isinstance(fate, dict)]
    if good:
        assert outcomes(plan, [rows[i] for i in good], layout) == [together[i] for i in good]
    for row, fate in zip(rows, together, strict=True):
        assert (fate if isinstance(fate, str) else None) == reason_of(plan, row)


def test_text_columns_give_the_same_records_as_typed_ones() -> None:
    """What a CSV file delivers: everything as text."""
    stream = generate(PLAN, records=400)
    stream = stream.take(np.flatnonzero(stream.partition == 0))
    typed = stream.batch(np.arange(len(stream)))
    text = {
        name: typed.column(name).cast(pa.string())
        for name in ("user", "page", "time", "arrived", "value")
    }
    assert text["time"][0].as_py().endswith("Z")
    ingest = Canonicaliser(PLAN, RING)
    records, dead = ingest(typed)
    again, dead_again = ingest(positioned(text))
    assert records.equals(again) and dead.equals(dead_again)
    assert records.num_rows > 100 and dead.num_rows > 10


@pytest.mark.parametrize("plan", [PLAN, PERIODS], ids=["stream", "periods"])
def test_rule_0_at_every_boundary(plan: Plan) -> None:
    timeline = plan.timeline
    edges = [timeline.start + k * STEP + d for k in range(-1, 30) for d in (-1, 0, 1)]
    rows = [
        (b"u", b"k", event, stamp, 1.0)
        for event in edges
        for stamp in [*edges[::3], event - timeline.max_skew, event - timeline.max_skew - 1, FAR]
    ]
    fates = outcomes(plan, rows)
    expected = [verdict(plan, event, stamp) for _, _, event, stamp, _ in rows]
    assert [f if isinstance(f, str) else None for f in fates] == expected
    assert {None, "time", "late"} == set(expected)
    for (_, _, event, stamp, _), fate in zip(rows, fates, strict=True):
        if isinstance(fate, dict):
            assert fate["_event_trigger_time"] == (event - timeline.start) // STEP + 1
            assert fate["stamp"] == stamp


def test_the_unit_of_a_period_is_user_and_period() -> None:
    def unit(plan: Plan, user: bytes, event: int) -> bytes:
        fate = outcomes(plan, [(user, b"k", event, event, 1.0)])[0]
        unit: bytes = fate["unit"]
        return unit

    first, same, later = START, START + 4 * STEP - 1, START + 4 * STEP
    assert unit(PLAN, b"a", first) == unit(PLAN, b"a", later)
    assert unit(PERIODS, b"a", first) == unit(PERIODS, b"a", same)
    assert unit(PERIODS, b"a", first) != unit(PERIODS, b"a", later)
    assert unit(PERIODS, b"a", first) != unit(PERIODS, b"b", first)


def test_a_stream_is_accepted_as_the_reference_says() -> None:
    stream = generate(PERIODS, records=600)
    expected = accept(PERIODS, stream)
    ingest = Canonicaliser(PERIODS, RING)
    got = {}
    for batch in stream.batches(100):
        for record in ingest(batch)[0].to_pylist():
            got[record["partition"], record["offset"]] = record
    assert set(got) == set(expected)
    for where, record in got.items():
        slow = expected[where]
        assert (record["_event_trigger_time"], record["v0"]) == (
            slow.event_trigger_time,
            *slow.values,
        )
        assert (record["page"], record["stamp"]) == (slow.key, slow.order[0])


def test_an_empty_batch() -> None:
    stream = generate(PLAN, records=10)
    good, dead = Canonicaliser(PLAN, RING)(stream.batch(np.zeros(0, np.int64)))
    assert (good.num_rows, dead.num_rows) == (0, 0)
    assert good.schema == Canonicaliser(PLAN, RING).schema


def test_layouts_of_equal_text_are_one_identity() -> None:
    values = ["a", "e\u0301", "\u00e9", "\0"]
    arrays = [
        *(layout(values) for layout in TEXT_LAYOUTS.values()),
        *(layout([v.encode() for v in values]) for layout in BYTE_LAYOUTS.values()),
    ]
    plan = make_plan()
    rest = {"page": ["k"] * 4, "time": [START] * 4}
    seen = []
    for array in arrays:
        batch = positioned({"user": array, **rest})
        seen.append(Canonicaliser(plan, RING)(batch)[0].column("unit").to_pylist())
    assert all(ids == seen[0] for ids in seen)
    assert seen[0][1] == seen[0][2] and len(set(seen[0])) == 3


# --- public keys -----------------------------------------------------------------------


def test_public_keys_are_canonical_and_distinct() -> None:
    plan = make_plan(public="list")
    table = canonical_public_keys(plan, pa.table({"page": ["e\u0301", "\u00e9", "b", "a", "b"]}))
    assert table.column("page").to_pylist() == ["a", "b", "\u00e9"]


def test_other_keys_than_the_public_ones_go_to_the_dead_letter() -> None:
    plan = msgspec.structs.replace(PLAN, public_keys="list")
    table = canonical_public_keys(plan, pa.table({"page": ["e\u0301", "k1"]}))
    ingest = Canonicaliser(plan, RING, public_key_ids(plan, RING, table))
    batch = positioned(
        {
            "user": ["u"] * 4,
            "page": ["\u00e9", "k1", "k2", None],
            "time": [START] * 4,
            "arrived": [START] * 4,
            "value": [1.0] * 4,
        }
    )
    good, dead = ingest(batch)
    assert good.column("page").to_pylist() == ["\u00e9", "k1"]
    assert dead.column("reason").to_pylist() == ["not_public", "key"]


@pytest.mark.parametrize("period", [None, 6])
def test_what_joins_later_is_late_by_its_pass(period: int | None) -> None:
    """Row by row, whatever stands in the batch: the plan's lateness, counted from when a file came.

    The reference: the same row with a stamp of its own at the instant that was released by then.
    """
    plan = make_plan(triggers=8, windows=3, lateness=2, period=period)
    stamped = msgspec.structs.replace(plan, stamp="stamp")
    timeline = plan.timeline
    joined = ((2, 7), (5, 12), (6, 29))  # of partitions 2-4, 5, and 6 on
    came = {0: 0, 1: 0, 2: 7, 4: 7, 5: 12, 6: 29, 9: 29}
    rng = np.random.default_rng(5)
    for partition, done in came.items():
        at = timeline.start + rng.integers(0, timeline.end - timeline.start, 300)  # type: ignore[operator]
        rows: dict[str, Any] = {
            "user": ["u"] * 300,
            "page": ["k"] * 300,
            "time": at,
            "value": [1.0] * 300,
        }
        there = Canonicaliser(plan, RING, joined=joined)
        good, dead = there(positioned(rows, partition=partition))
        stamps = np.maximum(at, timeline.instant_of(done) if done else at)
        expected = Canonicaliser(stamped, RING)(positioned(rows | {"stamp": stamps}, partition))[1]
        assert dead.equals(expected) and set(dead["reason"].to_pylist()) <= {"late"}
        assert dead.num_rows or done < 12, "some windows are closed by then"
        assert good.column("stamp").to_pylist() == [
            t for n, t in enumerate(at.tolist()) if n not in set(dead["offset"].to_pylist())
        ], "stamps stay their own"
        alone = there(positioned({name: value[:1] for name, value in rows.items()}, partition))
        assert alone[1].num_rows == int(0 in dead["offset"].to_pylist())


PLACES = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 2), st.integers(2**23 - 1, 2**31 - 1)),
        st.one_of(st.integers(0, 3), st.integers(2**40 - 1, 2**63 - 1)),
    ),
    max_size=12,
)


@given(PLACES)
def test_repeats_are_those_of_a_set(places: list[tuple[int, int]]) -> None:
    partition = np.array([p for p, _ in places], np.int32)
    offset = np.array([o for _, o in places], np.int64)
    before = partition.copy(), offset.copy()
    assert repeats(partition, offset) == (len(set(places)) < len(places))
    assert (partition == before[0]).all() and (offset == before[1]).all()


def _records(offsets: list[int]) -> pa.RecordBatch:
    rows = len(offsets)
    return pa.RecordBatch.from_pydict({
        "unit": pa.array([bytes(16)] * rows, ID), "partition": pa.array([0] * rows, pa.int32()),
        "offset": pa.array(offsets, pa.int64()),
    })  # fmt: skip


def test_records_of_one_position_are_refused_with_the_adapters_name(refused: Refused) -> None:
    require_once(_records([]))
    require_once(_records([3, 1, 2]))
    refused(lambda: require_once(_records([3, 1, 3])))
