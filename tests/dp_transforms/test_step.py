"""Steps against the exhaustive reference, the publication calendar, and DuckDB with noise off.

Steps that keys have taken: on another layout of shards, or in a commit of a part.

Random sticky plans of all modes together against the exhaustive reference.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import duckdb
import msgspec
import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.budget.allocation import Budget, allocate
from dpstream.accounting.limits import MAX_SKIPPING_WINDOWS
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.weights import SelectionWeights
from dpstream.dp_transforms import aggregation, flow, step
from dpstream.dp_transforms.batches import concat, record_schema
from dpstream.dp_transforms.flow import BoundCallback, ReleaseCallback
from dpstream.dp_transforms.ingest.records import CanonicaliserFactory
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.selection import predict
from dpstream.dp_transforms.step import TakenSteps
from dpstream.state import open as stores
from dpstream.state.arrow import id_array
from dpstream.state.retention_store import ReshardProgress
from dpstream.state.sqlite.store import SqliteStore
from dpstream.state.store import KeyShard
from tests.budgets import budgeted
from tests.dp_transforms.reference import Pair, admitted
from tests.dp_transforms.runs import (
    MODES,
    PLANS,
    PUBLIC,
    SELECTING,
    Released,
    Silent,
    options_of,
    run,
    slow,
    stream_of,
    without_noise,
)
from tests.golden.refusals import Refused
from tests.state.conformance import KEY_SCHEMA, STREAMS
from tests.state.life_conformance import spread
from tests.streams import (
    COUNT,
    MEAN,
    STEP,
    SUM,
    UNITS,
    Stream,
    begin,
    generate,
    key_name,
    make_plan,
    released,
    sealed_bytes,
)

#: Window 3 was resharded when its two shards had come to 4 and 2, window 5 twice.
TAKEN = TakenSteps(
    {3: [ReshardProgress((4, 2))], 5: [ReshardProgress((1, 1)), ReshardProgress((0, 0, 6))]}
)


def states_with(keys: list[int]) -> KeyShard:
    """Keys whose numbers' remainders are their shards, on any layout."""
    states, ids = KeyShard(KEY_SCHEMA, STREAMS), spread(keys)
    columns = [pa.array([f"p{k}" for k in keys]), pa.array(keys, pa.int64()), id_array(ids)]
    states.intern(ids, pa.RecordBatch.from_arrays(columns, names=["page", "lang", "_id"]))
    return states


def test_keys_of_a_shard_that_was_ahead_have_taken_the_step() -> None:
    keys = spread([0, 1, 2, 3])
    step_flags = {t: TAKEN.before_reshard(3, t, keys).tolist() for t in (2, 3, 4, 5)}
    assert step_flags == {
        2: [True] * 4, 3: [True, False] * 2, 4: [True, False] * 2, 5: [False] * 4,
    }  # fmt: skip
    assert not TAKEN.before_reshard(4, 1, keys).any()
    # Any of several reshards counts.
    assert TAKEN.before_reshard(5, 6, spread([2, 3, 5])).tolist() == [True, False, True]


def test_a_step_is_left_for_the_others() -> None:
    states = states_with([0, 1, 2, 3])
    due, ids = np.array([0, 1, 3]), spread([0, 1, 9, 8])
    slots, rows = TAKEN.remaining(states, 3, 3, due, ids)
    assert slots.tolist() == [1, 3] and states.done[:4].tolist() == [True, False, True, False]
    # Key 9 is new on its shard; key 8 came from the shard that was ahead and has no state.
    assert rows is not None and rows.tolist() == [False, True, True, False]


def test_a_part_that_was_committed_is_left_out() -> None:
    states = states_with([0, 1, 2])
    states.done[1] = True
    slots, rows = TAKEN.remaining(states, 7, 1, np.array([0, 1, 2]), spread([1, 2, 4]))
    assert slots.tolist() == [0, 2] and rows is not None and rows.tolist() == [False, True, True]


def test_a_new_key_is_left_whatever_the_last_one_did() -> None:
    """Its slot is -1 here, in arrays that may be full."""
    states = states_with(list(range(1024)))
    assert len(states.done) == states.size
    states.done[-1] = True
    slots, rows = TAKEN.remaining(states, 7, 1, np.array([0, 1023]), spread([5000, 1023]))
    assert slots.tolist() == [0] and rows is not None and rows.tolist() == [True, False]


def test_nothing_is_copied_where_nobody_was_ahead() -> None:
    states, due = states_with([0, 1]), np.array([1])
    assert TAKEN.remaining(states, 7, 1, due, spread([0, 5])) == (due, None)


@pytest.mark.parametrize("plan", MODES)
def test_equals_the_exhaustive_reference(
    plan: Plan, ring: KeyRing, store_paths: Iterator[str]
) -> None:
    got, expected = run(plan, store_paths), slow(plan, ring)
    assert got == expected
    rows = [row for name in got for row in got[name]]
    assert len(rows) >= 15
    assert len({key for key, _ in rows}) < 60 or plan.public_keys is not None


@pytest.mark.parametrize("plan", SELECTING)
def test_look_ahead_never_changes_a_byte(plan: Plan, store_paths: Iterator[str]) -> None:
    source = stream_of(plan).batches(400)
    results = [
        released(plan, source, next(store_paths), look_ahead=ahead) for ahead in (1, 3, 8, 64)
    ]
    assert all(result == results[0] for result in results)


def silent_selections(plan: Plan, stream: Stream, got: Released) -> int:
    """Selections of keys at a trigger at which they received nothing."""
    fed = {(p.window, p.step_index, p.key) for p in admitted(plan, stream)}
    seen: set[tuple[int, str]] = set()
    count = 0
    for (window, trigger), rows in got.items():
        for key, _ in rows:
            count += (window, key) not in seen and (window, trigger, key) not in fed
            seen.add((window, key))
    return count


@pytest.mark.parametrize(
    "name", ["sticky", "long", "blt long", "sticky pre-threshold", "weights", "combined late"]
)
def test_prediction_is_needed_and_its_loss_noticed(
    name: str, store_paths: Iterator[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, streams = PLANS[name], [stream_of(PLANS[name], seed) for seed in (1, 2, 3)]
    honest = [run(plan, store_paths, stream) for stream in streams]
    silent = [silent_selections(plan, *pair) for pair in zip(streams, honest, strict=True)]
    assert sum(silent) >= 2
    monkeypatch.setattr(step, "predict", lambda *_: None)
    assert [run(plan, store_paths, stream) for stream in streams] != honest


def one_later(plan: Plan, thresholds: Any, states: Any, slots: np.ndarray, trigger: int) -> None:
    """Prediction that is a trigger late."""
    predict(plan, thresholds, states, slots, trigger)
    due = states.due[slots]
    states.due[slots] = np.where(due < plan.timeline.triggers, due + 1, due)


def test_a_late_prediction_is_noticed(
    ring: KeyRing, store_paths: Iterator[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = PLANS["long"]
    monkeypatch.setattr(step, "predict", one_later)
    assert run(plan, store_paths) != slow(plan, ring)


# --- units -------------------------------------------------------------------------------


def repeated_units(plan: Plan, keys: int, units: int) -> Stream:
    """Every unit sends to its key at several triggers of the first window."""
    key = np.repeat(np.arange(keys), units * 3)
    user = np.tile(np.repeat(np.arange(units), 3), keys) + 1000 * key
    event = plan.timeline.start + (np.tile(np.arange(3), keys * units) * 3 + user % 3) * STEP
    row = np.arange(len(key))
    return Stream(user, key, event, event, np.ones(len(key)), np.zeros_like(row), row)


def unit_counts(plan: Plan, pairs: list[Pair], window: int, trigger: int) -> dict[str, int]:
    units: dict[str, set[object]] = {}
    for p in pairs:
        if p.window == window and p.step_index <= trigger:
            units.setdefault(p.key, set()).add(p.unit)
    return {key: len(members) for key, members in units.items()}


@pytest.fixture
def noise_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "sampler_of", Silent)
    monkeypatch.setattr(step, "calibrated", budgeted(without_noise))


@pytest.mark.parametrize("least", [0, 3])
def test_no_key_is_tested_below_the_pre_threshold(
    least: int, store_paths: Iterator[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With thresholds that every statistic passes, the gate alone decides, exactly."""

    def wide_open(plan: Plan) -> Budget:
        budget = allocate(plan)
        return msgspec.structs.replace(budget, tau=np.full_like(budget.tau, -(1 << 20)))

    monkeypatch.setattr(step, "calibrated", budgeted(wide_open))
    plan = make_plan(pre_threshold=least, remember="never")
    stream = stream_of(plan)
    got = run(plan, store_paths, stream)
    pairs = admitted(plan, stream)
    for window in range(plan.timeline.windows):
        last = plan.timeline.triggers
        units = unit_counts(plan, pairs, window, last)
        seen = {key for t in range(1, last + 1) for key, _ in got[window, t]}
        above = {key for key, count in units.items() if count > least}
        assert seen == above and (len(above) < len(units)) == (least > 0)


@pytest.mark.usefixtures("noise_off")
@pytest.mark.parametrize("name", ["sticky units", "sticky all", "public all"])
def test_a_unit_counts_once_per_window_and_key(name: str, store_paths: Iterator[str]) -> None:
    """Also when its key was selected between two of its records."""
    plan = PLANS[name]
    stream = repeated_units(plan, keys=5, units=8)
    got = run(plan, store_paths, stream)
    listed = {key_name(k) for k in PUBLIC}
    for (window, trigger), rows in got.items():
        truth = unit_counts(plan, admitted(plan, stream), window, trigger)
        for key, figures in rows:
            assert plan.public_keys is None or key in listed
            assert figures["people"][0] == truth.get(key, 0)
    assert got[0, plan.timeline.triggers][0][1]["people"][0] == 8


@pytest.mark.usefixtures("noise_off")
def test_a_unit_is_tested_once_over_micro_batches(
    store_paths: Iterator[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight units repeat themselves; where nine are needed no key is selected."""
    quiet = make_plan(pre_threshold=8)
    assert not any(run(quiet, store_paths, repeated_units(quiet, 5, 8)).values())
    loud = make_plan(pre_threshold=7)
    got = run(loud, store_paths, repeated_units(loud, 5, 8))
    assert len(got[0, loud.timeline.triggers]) == 5
    honest = aggregation._fresh_units

    def per_batch(plan: Plan, states: Any, slots: np.ndarray, rows: Any) -> object:
        states.pairs.__init__()
        return honest(plan, states, slots, rows)

    monkeypatch.setattr(aggregation, "_fresh_units", per_batch)
    assert any(run(quiet, store_paths, repeated_units(quiet, 5, 8)).values())


# --- publication calendar ------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["sticky", "sticky refresh 5", "sticky late", "sticky sliding", "sticky units"]
)
def test_selected_keys_follow_the_public_calendar(name: str, store_paths: Iterator[str]) -> None:
    plan = PLANS[name]
    last, every = plan.timeline.triggers, plan.design.refresh_every
    got = run(plan, store_paths)
    first_seen: dict[tuple[int, str], int] = {}
    for (window, trigger), rows in sorted(got.items()):
        for key, _ in rows:
            first_seen.setdefault((window, key), trigger)
    assert len(set(first_seen.values())) > 2
    for (window, trigger), rows in got.items():
        selected = {k for (w, k), at in first_seen.items() if w == window and at <= trigger}
        now = {k for (w, k), at in first_seen.items() if w == window and at == trigger}
        refresh = trigger % every == 0 or trigger == last
        assert [key for key, _ in rows] == sorted(selected if refresh else now)


def test_public_keys_are_published_on_the_calendar_without_any_data(
    store_paths: Iterator[str],
) -> None:
    plan = PLANS["public all"]
    nobody = stream_of(plan).take(np.zeros(0, np.int64))
    for (_, trigger), rows in run(plan, store_paths, nobody).items():
        due = trigger % 3 == 0 or trigger == plan.timeline.triggers
        assert [key for key, _ in rows] == ([key_name(k) for k in PUBLIC] if due else [])


def test_publishing_only_with_new_data_is_noticed(
    ring: KeyRing, store_paths: Iterator[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = PLANS["sticky"]
    monkeypatch.setattr(step, "publishes", lambda *_: False)
    assert run(plan, store_paths) != slow(plan, ring)


# --- groups that share a commit -------------------------------------------------------------


# --- restarts ------------------------------------------------------------------------------


@pytest.mark.parametrize("together", [1, 4])
@pytest.mark.parametrize("plan", MODES)
def test_a_restart_between_any_two_steps_changes_nothing(
    plan: Plan, together: int, store_paths: Iterator[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    restarts_change_nothing(plan, together, store_paths, monkeypatch)


def test_quiet_steps_that_are_read_back_are_not_added_again(
    store_paths: Iterator[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    restarts_change_nothing(PLANS["sticky both 3"], 4, store_paths, monkeypatch)


def restarts_change_nothing(
    plan: Plan, together: int, store_paths: Iterator[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of steps that share a commit, a crash repeats those of the last group, and no others.

    Each process has groups of another size: some of their steps are committed, and read back.
    """
    monkeypatch.setattr(flow, "COMMIT_STEPS", together)
    source = stream_of(plan).batches(400)
    settings = options_of(plan)
    expected = released(plan, source, next(store_paths), **settings)
    path, honest = next(store_paths), step.Stepper._compute
    steps = plan.timeline.windows * plan.timeline.triggers * 3
    stops = {steps // 4, steps // 2, steps // 2 + 1, steps - 2}
    computed = 0

    def failing(self: step.Stepper, *args: Any) -> object:
        nonlocal computed
        computed += 1
        if computed in stops:
            raise InterruptedError
        return honest(self, *args)

    monkeypatch.setattr(step.Stepper, "_compute", failing)
    for attempt in range(len(stops) + 1):
        monkeypatch.setattr(flow, "COMMIT_STEPS", together + attempt)
        try:
            again = released(plan, source, path, **settings)
        except InterruptedError:
            stores.close_all()
            continue
        assert again == expected
        assert released(plan, source, path, **settings) == expected
        most = together + len(stops)
        assert steps + len(stops) <= computed <= steps + most * len(stops)
        return
    pytest.fail("never came to its end")


def turns(
    plan: Plan, paths: Iterator[str], workers: int, patch: pytest.MonkeyPatch, seed: int = 3
) -> list[list[object]]:
    """What each worker emits when several run one shard's steps and overtake each other.

    Each turn has another number of steps a commit, so that their groups do not coincide.
    """
    path = next(paths)
    run = begin(plan, path, shards=1, **options_of(plan))
    aliases = [run._replace(store=f"sqlite:{'/' * n}{path}") for n in range(workers)]
    ingest = CanonicaliserFactory(plan, run.keys, run.public)()
    records = concat((ingest(b)[0] for b in stream_of(plan).batches(400)), record_schema(plan))
    last = plan.timeline.last_trigger_time
    batches = [batch for _, batch in BoundCallback(run)()(0, [records], last, 0).outputs]
    busy = [ReleaseCallback(alias)()(0, batches, last, 0).outputs for alias in aliases]
    out: list[list[object]] = [[] for _ in busy]
    rng = np.random.default_rng(seed)
    while True:
        # The one that is furthest behind overtakes all others by a few steps.
        worker = min(range(workers), key=lambda w: len(out[w]))
        goal = max(len(emitted) for emitted in out) + rng.integers(1, 4)
        before = len(out[worker])
        patch.setattr(flow, "COMMIT_STEPS", int(rng.integers(1, 6)))
        for name, rows in itertools.islice(busy[worker], int(goal) - before):
            out[worker].append((name, sealed_bytes(rows)))
        if len(out[worker]) == before:
            break
    stores.close_all()
    return out


@pytest.mark.parametrize("plan", MODES)
def test_workers_that_run_the_same_steps_emit_the_same(
    plan: Plan, store_paths: Iterator[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (alone,) = turns(plan, store_paths, 1, monkeypatch)
    assert all(emitted == alone for emitted in turns(plan, store_paths, 3, monkeypatch))


def test_a_worker_that_keeps_old_states_is_noticed(
    store_paths: Iterator[str], monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    """States that hold steps of an overtaken group claim commits that nobody made."""
    monkeypatch.setattr(SqliteStore, "forget", lambda *_: None)
    refused(turns, PLANS["sticky"], store_paths, 3, monkeypatch)
    stores.close_all()


# --- noise off -----------------------------------------------------------------------------

TRUTH = """
SELECT k.page, k.people, k.n, k.total, k.level FROM (
  SELECT page, count(DISTINCT "user") people, count(*) n, sum(total) * 0.5 total,
         sum(level) / count(*) level
  FROM pairs WHERE win = ? AND step_index <= ? GROUP BY page) k
WHERE k.people > ? ORDER BY k.page
"""


def true_figures(plan: Plan, pairs: list[Pair]) -> dict[tuple[int, int], list[tuple[Any, ...]]]:
    columns = [a.name for a in plan.aggregates if a.kind in ("sum", "mean")]
    table: dict[str, list[object]] = {
        "win": [p.window for p in pairs],
        "step_index": [p.step_index for p in pairs],
        "user": [f"{p.unit}" for p in pairs],
        "page": [p.key for p in pairs],
        "total": [0] * len(pairs),
        "level": [0] * len(pairs),
    }
    for i, name in enumerate(columns):
        table[name] = [p.values[i] for p in pairs]
    database = duckdb.connect()
    database.register("pairs", pa.table(table))
    least = plan.privacy.pre_threshold
    return {
        (w, t): database.execute(TRUTH, [w, t, least]).fetchall()
        for w in range(plan.timeline.windows)
        for t in range(1, plan.timeline.triggers + 1)
    }


@pytest.mark.usefixtures("noise_off")
@pytest.mark.parametrize(
    "name", ["sticky", "sticky pre-threshold", "sticky all", "sticky late", "sticky sliding"]
)
def test_without_noise_it_is_a_group_by(name: str, store_paths: Iterator[str]) -> None:
    plan = msgspec.structs.replace(PLANS[name], remember="never")
    stream = stream_of(plan, seed=5)
    truth = true_figures(plan, admitted(plan, stream))
    middle = (-8 + 24) // 2  # of MEAN's bounds in grid units
    got = run(plan, store_paths, stream)
    for at, rows in got.items():
        assert [key for key, _ in rows] == [row[0] for row in truth[at]]
        for (_, figures), (_, people, n, total, level) in zip(rows, truth[at], strict=True):
            exact = {"people": people, "n": n, "total": total}
            for name_, value in exact.items():
                assert name_ not in figures or figures[name_][0] == value
            if "level" in figures:
                mean = (middle + level) * 0.25
                assert figures["level"][0] == pytest.approx(mean, rel=1e-14)
    assert sum(len(rows) for rows in truth.values()) > 300


CI, LONG = 5, 400
#: Seeds of plans that skip what is published.
SKIPPING, SKIPPING_LONG = 2, 200


def random_plan(rng: np.random.Generator) -> Plan:
    """Any strategy, selection, calendar and timeline; thresholds of few units."""
    strategy = str(rng.choice(["tree", "blt", "dense"]))
    public = rng.random() < 0.15
    aggregates = tuple(a for a in (COUNT, SUM, MEAN, UNITS) if rng.random() < 0.5) or (COUNT,)
    per_key, weights = rng.random() < 0.6, not public and rng.random() < 0.7
    counts = any(a.kind != "sum" for a in aggregates)
    divisor = int(rng.integers(1, 4))
    options: dict[str, Any] = {
        "strategy": strategy,
        "epsilon": float(rng.choice([5.0, 9.0, 40.0])),
        # The only weight of C = 1 lies on the lattice; product and reference may round it apart.
        "contributions": int(rng.integers(2 if weights else 1, 8)),
        "per_key_bound": 1 if per_key else None,
        "combine": bool(per_key and weights and counts and rng.random() < 0.6),
        "public": "list" if public else None,
        "refresh_every": divisor * int(rng.integers(1, 3)),
        "select_every": None if rng.random() < 0.5 else divisor,
        "pre_threshold": 0 if public else int(rng.choice([0, 0, 1, 3])),
    }
    if weights:
        offset, power = rng.choice([0.5, 2.0, 6.0]), rng.choice([0.25, 0.5, 1.0, 1.5])
        options["weights"] = SelectionWeights(float(offset), float(power))
    return make_plan(aggregates=aggregates, **random_timeline(rng), **options)  # type: ignore


def random_timeline(rng: np.random.Generator) -> dict[str, Any]:
    """Lengths in triggers: tumbling or sliding windows, with or without stamps of their own."""
    triggers = int(rng.integers(1, 16))
    out: dict[str, Any] = {"triggers": triggers, "windows": int(rng.integers(1, 4))}
    if rng.random() < 0.4:
        out |= {"stamped": True, "lateness": int(rng.integers(0, min(4, triggers)))}
        out["skew"] = int(rng.choice([0, STEP]))
    width = triggers - int(out.get("lateness", 0))  # type: ignore[call-overload]
    if rng.random() < 0.4:
        out["slide"] = int(rng.choice([d for d in range(1, width + 1) if width % d == 0]))
        out["windows"] = int(rng.integers(1, 6))
    return out


def random_skipping_plan(rng: np.random.Generator) -> Plan:
    """A plan in which pairs on published keys take no selection weight, on any tests."""
    strategy, combines = str(rng.choice(["tree", "blt", "dense"])), rng.random() < 0.4
    aggregates = tuple(a for a in (COUNT, SUM, MEAN, UNITS) if rng.random() < 0.5) or (COUNT,)
    line = random_timeline(rng)
    last = int(line["triggers"])  # type: ignore[call-overload]
    if "slide" in line and last > MAX_SKIPPING_WINDOWS * int(line["slide"]):  # type: ignore
        del line["slide"]
    test_times = np.flatnonzero(rng.random(last - 1) < rng.choice([0.1, 0.4, 1.0])) + 1
    tests = [None, int(rng.integers(1, 20)), (*test_times.tolist(), last)][int(rng.integers(3))]
    weights = float(rng.choice([0.5, 1.0, 3.0])), float(rng.choice([0.5, 1.0, 2.0]))
    if line["windows"] == 1 and rng.random() < 0.3:
        line["period"] = int(rng.integers(1, last + 1))
    return make_plan(
        **line, aggregates=(COUNT, *aggregates[1:]) if combines else aggregates, strategy=strategy,
        epsilon=float(rng.choice([5.0, 9.0, 40.0])),
        contributions=int(rng.integers(2, 9)), per_key_bound=1 if combines else None,
        combine=combines, skip=True, tests=tests, weights=SelectionWeights(*weights),
        refresh_every=int(rng.integers(1, 6)), pre_threshold=int(rng.choice([0, 0, 1, 3])),
    )  # type: ignore[arg-type]  # fmt: skip


def check(
    seed: int, ring: KeyRing, paths: Iterator[str], draw: Callable[..., Plan] = random_plan
) -> int:
    """Compare one random plan on a random stream; returns how many rows it released."""
    rng = np.random.default_rng([seed, 11])
    plan = draw(rng)
    users, heavy = int(rng.integers(50, 300)), bool(rng.random() < 0.5)
    stream = generate(plan, seed, users=users, keys=30, heavy=heavy)
    layout = {"shards": int(rng.integers(1, 5)), "look_ahead": int(rng.integers(1, 20))}
    got = run(plan, paths, stream, **layout)
    assert got == slow(plan, ring, stream), f"seed {seed}"
    return sum(map(len, got.values()))


def test_random_plans(ring: KeyRing, store_paths: Iterator[str]) -> None:
    assert sum(check(seed, ring, store_paths) > 20 for seed in range(CI)) > CI / 2


@pytest.mark.slow
def test_random_plans_long(ring: KeyRing, store_paths: Iterator[str]) -> None:
    for seed in range(CI, LONG):
        check(seed, ring, store_paths)


def test_random_plans_that_skip(ring: KeyRing, store_paths: Iterator[str]) -> None:
    rows = [check(seed, ring, store_paths, random_skipping_plan) for seed in range(SKIPPING)]
    assert max(rows) > 20


@pytest.mark.slow
def test_random_plans_that_skip_long(ring: KeyRing, store_paths: Iterator[str]) -> None:
    for seed in range(SKIPPING, SKIPPING_LONG):
        check(seed, ring, store_paths, random_skipping_plan)
