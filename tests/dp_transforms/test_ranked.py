"""Modes in which the order of a unit's pairs matters: one record a key, weights, combined."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import duckdb
import msgspec
import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.weights import SelectionWeights
from dpstream.dp_transforms import aggregation, bounding, step
from dpstream.dp_transforms.batches import admitted_schema, concat, ids_of, record_schema
from dpstream.dp_transforms.flow import BoundCallback, ReleaseCallback
from dpstream.dp_transforms.ingest.records import CanonicaliserFactory
from dpstream.dp_transforms.noise.paths import NoiseStream
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.pacing import stops
from dpstream.dp_transforms.selection import NoisyThresholds
from dpstream.state import open as stores
from tests.budgets import budgeted, redesigned
from tests.dp_transforms.exhaustive import LATTICE, slow_weights
from tests.dp_transforms.reference import admitted, bounds_keys
from tests.dp_transforms.runs import (
    RANKED,
    listed,
    options_of,
    ranked_plan,
    run,
    slow,
    stream_of,
    without_noise,
)
from tests.streams import MEAN, SUM, UNITS, begin, released, sealed_bytes

PLANS = [pytest.param(plan, id=name.replace(" ", "-")) for name, plan in RANKED.items()]
FEW = [pytest.param(RANKED[n], id=n) for n in ("weights", "weights units", "weights periods")]


def several_at_once(plan: Plan) -> int:
    """Cases of a unit with pairs of one key, but not of one value, in one micro-batch."""
    cases: dict[object, set[object]] = {}
    for p in admitted(plan, stream_of(plan)):
        cases.setdefault((p.window, p.step_index, p.unit, p.key), set()).add((p.rank, p.values))
    return sum(len(pairs) > 1 for pairs in cases.values())


@pytest.mark.parametrize("plan", PLANS)
def test_streams_repeat_units_within_a_micro_batch(plan: Plan) -> None:
    if plan.privacy.per_key_bound == 1 and bounds_keys(plan):
        assert several_at_once(plan) == 0  # what exceeds the bound is not admitted
        return
    assert several_at_once(plan) >= 10


# --- delivery ------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS)
def test_delivery_never_changes_a_byte(plan: Plan, store_paths: Iterator[str]) -> None:
    stream = stream_of(plan)
    once = released(plan, stream.batches(400), next(store_paths), **options_of(plan))
    again = stream.batches(61, seed=4) + stream.batches(211, seed=5)[::2]
    for shards, source in ((1, stream.batches(17, seed=1)), (5, again)):
        settings = {**options_of(plan), "shards": shards}
        assert released(plan, source, next(store_paths), **settings) == once


def emitted(plan: Plan, paths: Iterator[str], seed: int | None) -> list[object]:
    """Steps of one shard; with a seed its admitted rows come in any order and in any batches."""
    settings = begin(plan, next(paths), shards=1, **options_of(plan))
    ingest = CanonicaliserFactory(plan, settings.keys, settings.public)()
    good = concat((ingest(b)[0] for b in stream_of(plan).batches(400)), record_schema(plan))
    bounding, releasing = BoundCallback(settings)(), ReleaseCallback(settings)()
    out: list[object] = []
    real = aggregation.aggregate

    def watched(plan: Plan, states: Any, *rest: Any) -> Any:
        result = real(plan, states, *rest)
        out.append(states.values.sum(axis=0).tolist())  # the weighted counts are the last of these
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "aggregate", watched)
        since, late, ahead = 0, [good], list[pa.RecordBatch]()
        for upto in stops(plan) if plan.design.skips else [plan.timeline.last_trigger_time]:
            held = bounding(0, late, upto, since)
            late = [] if held.waiting is None else [held.waiting]
            rows = [*ahead, *(batch for _, batch in held.outputs)]
            if seed is not None:
                table = concat(rows, admitted_schema(plan))
                order = np.random.default_rng(seed).permutation(table.num_rows)
                rows = [table.take(pa.array(part)) for part in np.array_split(order, 7)]
            steps = releasing(0, rows, upto, since)
            ahead = [] if steps.waiting is None else [steps.waiting]
            for name, batch in steps.outputs:
                out.append((name, sealed_bytes(batch.sort_by("page"))))  # as the seal does
            since = upto
    stores.close_all()
    return out


@pytest.mark.parametrize("plan", PLANS)
def test_the_order_of_a_micro_batch_never_changes_a_byte(
    plan: Plan, store_paths: Iterator[str]
) -> None:
    expected = emitted(plan, store_paths, None)
    assert emitted(plan, store_paths, 1) == expected
    assert emitted(plan, store_paths, 2) == expected


def unranked(real: Any) -> Any:
    """Of a unit's several pairs the one that arrives first counts."""

    def fresh_units(plan: Plan, *rest: Any) -> Any:
        privacy = plan.privacy
        key_bound = privacy.per_key_bound
        plan = msgspec.structs.replace(
            plan, privacy=msgspec.structs.replace(privacy, weights=None, per_key_bound=None)
        )
        with redesigned(unit_sets="window") if key_bound else contextlib.nullcontext():
            return real(plan, *rest)

    return fresh_units


@pytest.mark.parametrize("plan", FEW)
def test_an_order_of_arrival_is_noticed(
    plan: Plan, store_paths: Iterator[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where values or weights of the first and a later record differ."""
    expected = emitted(plan, store_paths, None)
    monkeypatch.setattr(aggregation, "_fresh_units", unranked(aggregation._fresh_units))
    assert emitted(plan, store_paths, None) == expected  # BOUND emits them in order
    assert emitted(plan, store_paths, 1) != expected


# --- against the references ----------------------------------------------------------------


def forgotten_after_selection(real: Any) -> Any:
    """The set of a selected key is not used any more, as without a bound per key."""

    def fresh_units(plan: Plan, states: Any, slots: Any, rows: Any) -> Any:
        chosen, _ = real(plan, states, slots, rows)
        chosen = np.union1d(chosen, np.flatnonzero(states.selected[slots] > 0))
        return chosen, ids_of(rows.column("unit"))[chosen]

    return fresh_units


def no_ranks(real: Any) -> Any:
    def admit(*args: Any) -> Any:
        taken, rank = real(*args)
        return taken, np.zeros_like(rank)

    return admit


def no_indices(real: Any) -> Any:
    """All first pairs of a unit weigh as its very first."""

    def admit(*args: Any) -> Any:
        pairs, rank, per_key = real(*args)
        return pairs, np.zeros_like(rank), per_key

    return admit


def k_more(real: Any) -> Any:
    """A bound per key that is one too many."""

    def admit(plan: Plan, *args: Any) -> Any:
        bound = (plan.privacy.per_key_bound or 0) + 1
        privacy = msgspec.structs.replace(plan.privacy, per_key_bound=bound)
        return real(msgspec.structs.replace(plan, privacy=privacy), *args)

    return admit


def all_first(real: Any) -> Any:
    """Every record counts its unit, and takes an index if it is the first."""

    def admit(*args: Any) -> Any:
        pairs, rank, per_key = real(*args)
        if (per_key.taken == per_key.fresh).all():  # a bound of 1: the unit counts twice elsewhere
            return pairs, rank, per_key._replace(fresh=per_key.fresh & ~np.uint64(1))
        return pairs, rank, per_key._replace(fresh=per_key.taken)

    return admit


def separate_noise(real: Any) -> Any:
    """The test of a combined statistic draws its own noise for the plain count."""

    def ensure(self: Any, states: Any, slots: Any, step_index: Any) -> None:
        for paths, coefficient in self._paths[1:]:
            assert coefficient > 0
            paths._stream._prefix = paths._stream._prefix ^ np.uint64(1)
        real(self, states, slots, step_index)
        for paths, _ in self._paths[1:]:
            paths._stream._prefix = paths._stream._prefix ^ np.uint64(1)

    return ensure


SABOTAGE: list[tuple[str, Any, str, Callable[[Any], Any]]] = [
    ("weights units", aggregation, "_fresh_units", forgotten_after_selection),
    ("weights", bounding, "admit", no_ranks),
    ("combined late", bounding, "_admit_per_key", no_indices),
    ("per key", bounding, "_admit_per_key", k_more),
    ("two per key public", bounding, "_admit_per_key", k_more),
    ("per key", bounding, "_admit_per_key", all_first),
    ("three per key sliding", bounding, "_admit_per_key", all_first),
    ("combined", NoisyThresholds, "ensure", separate_noise),
    ("combined units", NoisyThresholds, "ensure", separate_noise),
]


@pytest.mark.parametrize(("name", "owner", "attribute", "sabotage"), SABOTAGE)
def test_sabotage_is_noticed_by_the_reference(
    name: str,
    owner: Any,
    attribute: str,
    sabotage: Callable[[Any], Any],
    ring: KeyRing,
    store_paths: Iterator[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = RANKED[name]
    expected = slow(plan, ring)
    assert run(plan, store_paths) == expected
    monkeypatch.setattr(owner, attribute, sabotage(getattr(owner, attribute)))
    assert run(plan, store_paths) != expected


FIRST = """
SELECT page, count(*), count(DISTINCT "user"), sum(value) * 0.5 FROM (
  SELECT *, row_number() OVER (PARTITION BY page, "user" ORDER BY step_index, rank) AS nth
  FROM pairs WHERE win = ? AND step_index <= ?
) WHERE nth = 1 GROUP BY page ORDER BY page
"""


@pytest.mark.parametrize("name", ["per key", "per key sliding", "per key public"])
def test_without_noise_it_is_each_units_first_record(
    name: str, store_paths: Iterator[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = RANKED[name]
    at = [a.name for a in plan.aggregates if a.kind in ("sum", "mean")].index(SUM.name)
    pairs = admitted(plan, listed(plan, stream_of(plan)))
    table = {
        "win": [p.window for p in pairs], "step_index": [p.step_index for p in pairs],
        "rank": [p.rank for p in pairs], "user": [f"{p.unit}" for p in pairs],
        "page": [p.key for p in pairs], "value": [p.values[at] for p in pairs],
    }  # fmt: skip
    database = duckdb.connect()
    database.register("pairs", pa.table(table))
    monkeypatch.setattr(step, "calibrated", budgeted(without_noise))
    monkeypatch.setattr(NoiseStream, "advance", _no_noise)
    seen = 0
    for (window, trigger), rows in run(plan, store_paths).items():
        truth = {row[0]: row[1:] for row in database.execute(FIRST, [window, trigger]).fetchall()}
        for key, figures in rows:
            count, people, total = truth.get(key, (0, 0, 0.0))
            assert figures["n"][0] == count == people
            assert figures["total"][0] == total
            assert figures.get(UNITS.name, (people,))[0] == people
            seen += count
    assert seen > 300
    assert database.execute("SELECT count(*) FROM pairs").fetchone()[0] > 300  # type: ignore


def _no_noise(
    self: Any, tweaks: Any, step_index: np.ndarray, upto: np.ndarray, stack: Any, width: int
) -> np.ndarray:
    return np.zeros((len(step_index), width), np.int64)


# --- weights -------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0.5, 3.0, 6.0])
@pytest.mark.parametrize("power", [0.01, 0.5, 1.0, 1.5])
@pytest.mark.parametrize("contributions", [1, 2, 5, 32])
def test_weights_are_rounded_down(offset: float, power: float, contributions: int) -> None:
    got = SelectionWeights(offset, power).integers(contributions).tolist()
    # A weight that lies on the lattice (the only one of C = 1) may be a step lower.
    exact = (contributions, offset, power) == (2, 0.5, 0.5) or contributions == 1
    for mine, slow_one in zip(got, slow_weights(offset, power, contributions), strict=True):
        assert mine == slow_one or (exact and mine == slow_one - 1)
    assert sum(w * w for w in got) <= LATTICE**2 < sum((w + 1.01) ** 2 for w in got)
    assert sorted(got, reverse=True) == got


def test_each_pair_has_its_own_weight() -> None:
    """Pairs of sliding windows too: ranks of a unit are distinct, and all of them are used."""
    plan = ranked_plan((3, 1), aggregates=(MEAN,), triggers=9, slide=3, windows=4)
    used = Counter((p.unit, p.rank) for p in admitted(plan, stream_of(plan)))
    assert max(used.values()) == 1
    assert {rank for _, rank in used} == set(range(plan.privacy.contributions))
