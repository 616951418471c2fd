"""Remembered keys on every path of outputs: a unit's weights, everybody else's pairs, and rounds.

Tiny streams through the whole flow, with the tests' answers enumerated (`test_skipping` has the
harness).  What each variant below breaks must be seen: keys forgotten in mid-window or by a true
count, rows without noise, a list of one shard, or of a test that is not over.
"""

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.weights import SelectionWeights
from dpstream.dp_transforms import flow, perturbation, step
from dpstream.dp_transforms.batches import ids_of
from dpstream.dp_transforms.published_keys import Remembered, RememberedKeys
from dpstream.state import open as stores
from tests.dp_transforms.exhaustive import AdmittedPair, Breach, Path_, forced
from tests.streams import START, STEP, Stream, as_rows, begin, by_name, make_plan

SHARDS = 2
WEIGHTS = SelectionWeights(1.0, 2.0)
#: A window of five triggers, three of them tests; what each key's test says is enumerated.
TUMBLING = make_plan(
    triggers=5, windows=2, contributions=5, strategy="blt", skip=True, tests=(1, 3, 5),
    weights=WEIGHTS, remember="run",
)  # fmt: skip
#: Three windows of which two overlap; a selection is known to the next window but one at most.
SLIDING = make_plan(
    triggers=4, slide=2, windows=3, contributions=5, strategy="blt", skip=True, tests=(1, 2, 4),
    weights=WEIGHTS, remember=3 * STEP,
)  # fmt: skip


def stream(rows: list[tuple[int, int, int]]) -> Stream:
    """(user, key, quarters of a trigger since the start) of each record; offsets by time."""
    user, key, at = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    time = START + at * STEP // 4
    zero = np.zeros(len(rows), np.int64)
    return Stream(user, key, time, time, zero.astype(float), zero, np.arange(len(rows)))


def paths(plan: Plan, keys: int) -> Iterator[Path_]:
    """Every way in which keys can be selected in each window: at some test or never."""
    names = list(itertools.product(range(plan.timeline.windows), range(keys)))
    tests = (*plan.design.test_triggers.tolist(), 0)
    for choice in itertools.product(tests, repeat=len(names)):
        yield {name: at for name, at in zip(names, choice, strict=True) if at}


class Outcome:
    """One run: admitted pairs, tested (window, key)s by trigger, released keys and bytes."""

    def __init__(self, plan: Plan, path: Path_, records: Stream, file: Path) -> None:
        self.rows: list[AdmittedPair] = []
        self.selected: dict[tuple[int, str], list[int]] = defaultdict(list)
        run = begin(plan, file, shards=SHARDS)
        with forced(plan, path, self.rows), self._noting(plan):
            releases, _ = flow.run_in_memory(run, records.batches(50))
        stores.close_all()
        self.bytes = by_name(releases)
        self.names = {name: [str(r["page"]) for r in as_rows(b)] for name, b in self.bytes.items()}

    @contextlib.contextmanager
    def _noting(self, plan: Plan) -> Iterator[None]:
        honest = step.Stepper._chosen

        def note(stepper: Any, states: Any, window: int, slots: Any, trigger: int) -> Any:
            out = honest(stepper, states, window, slots, trigger)
            for name in states.key_columns(out[1]).column("page").to_pylist():
                self.selected[window, name].append(trigger)
            return out

        with mock.patch.object(step.Stepper, "_chosen", note):
            yield


def is_remembered(plan: Plan, outcome: Outcome, window: int, page: str) -> bool:
    """By definition: selected in some window by this one's start, and not too long ago."""
    timeline = plan.timeline
    lasting = plan.remember // STEP if isinstance(plan.remember, int) else 1 << 30
    start = timeline.base(window)
    times = [
        timeline.base(w) + t for (w, p), ts in outcome.selected.items() if p == page for t in ts
    ]
    return any(start - lasting < time <= start for time in times)


def check(plan: Plan, outcome: Outcome) -> None:
    """Rounds, releases and the weights of every unit on this path."""
    assert plan.privacy.weights is not None
    weights = plan.privacy.weights.integers(plan.privacy.contributions)
    pages = {page for names in outcome.names.values() for page in names}
    for window, page in itertools.product(range(plan.timeline.windows), sorted(pages)):
        tested, remembered = (
            outcome.selected[window, page],
            is_remembered(plan, outcome, window, page),
        )
        if len(tested) + remembered > 1:
            raise Breach("rounds: a key is selected again in a window that has published it")
        first = 1 if remembered else min(tested, default=99)
        for t in range(1, plan.timeline.triggers + 1):
            if (page in outcome.names[window, t]) != (t >= first):
                raise Breach("gaps: a key is not published although it was, or before")
    by_unit: dict[bytes, list[AdmittedPair]] = defaultdict(list)
    for row in outcome.rows:
        by_unit[row.unit].append(row)
        tested = outcome.selected[row.window, row.page]
        out = (
            is_remembered(plan, outcome, row.window, row.page)
            or min(tested, default=99) < row.trigger
        )
        if (row.index < 0) != out:
            raise Breach("status: not what was published before the pair's trigger")
    for own in by_unit.values():
        squares = sum(int(weights[row.index]) ** 2 for row in own if row.index >= 0)
        taken = [row.index for row in own if row.index >= 0]
        if squares > 1 << 16 or len(set(taken)) != len(taken):
            raise Breach("squares: a unit's weights on one path add up to more than 1")


#: The others, whose keys the added unit shares; quarters of a trigger.
OTHERS = [(1, 0, 1), (1, 1, 6), (1, 0, 9), (2, 1, 2), (2, 0, 13), (3, 1, 4), (3, 1, 14), (2, 0, 25)]
ADDED = {
    "spread": [(9, 0, 0), (9, 1, 5), (9, 0, 10), (9, 1, 16), (9, 0, 22)],
    "late": [(9, 1, 3), (9, 1, 11), (9, 0, 12), (9, 1, 21), (9, 0, 30)],
}
PLANS = {"tumbling": TUMBLING, "sliding": SLIDING}


def enumerated(plan: Plan, folder: Path, unit: list[tuple[int, int, int]], every: int) -> int:
    """Paths on neighbouring streams; raises ``Breach``; how many had equal outputs."""
    end = plan.timeline.windows * 4 * (plan.timeline.slide // STEP)
    number, equal = itertools.count(), 0
    added = sorted((r for r in [*OTHERS, *unit] if r[2] < end), key=lambda row: row[2])
    without = [row for row in added if row[0] != 9]
    for path in itertools.islice(paths(plan, 2), 0, None, every):
        fewer, more = (
            Outcome(plan, path, stream(rows), folder / f"{next(number)}.db")
            for rows in (without, added)
        )
        for outcome in (fewer, more):
            check(plan, outcome)
        if fewer.names == more.names:  # equal outputs: nobody else's pairs may differ
            equal += 1
            mine = {row.unit for row in more.rows} - {row.unit for row in fewer.rows}
            rest = [row for row in more.rows if row.unit not in mine]
            if sorted(map(repr, rest)) != sorted(map(repr, fewer.rows)):
                raise Breach("others: another unit's weight differs though outputs are equal")
    return equal


@pytest.mark.parametrize("unit", ADDED)
@pytest.mark.parametrize("name", PLANS)
def test_weights_and_rounds_on_every_path(name: str, unit: str, tmp_path: Path) -> None:
    every = {"tumbling": 51, "sliding": 907}[name]
    assert enumerated(PLANS[name], tmp_path, ADDED[unit], every) > 1


@pytest.mark.slow
@pytest.mark.parametrize("unit", ADDED)
@pytest.mark.parametrize("name", PLANS)
def test_weights_and_rounds_on_all_paths(name: str, unit: str, tmp_path: Path) -> None:
    assert enumerated(PLANS[name], tmp_path, ADDED[unit], {"tumbling": 1, "sliding": 5}[name]) > 40


# --- sabotaged ------------------------------------------------------------------------------


@contextlib.contextmanager
def forgotten_in_mid_window() -> Iterator[None]:
    """Half a window later a remembered key is tested as if it had never been published."""
    compute = step.Stepper._compute

    def forget(stepper: Any, states: Any, window: int, shard: int, trigger: int, *rest: Any) -> Any:
        if window and trigger == 2 and shard in stepper._remembered:
            remembered = stepper._remembered[shard].at(window)
            if remembered.columns is not None and len(remembered.of(window)):
                keys = remembered.columns.take(pa.array(remembered.of(window)))
                slots = states.table.find(ids_of(keys.column("_id").combine_chunks()))
                states.selected[slots] = 0
        return compute(stepper, states, window, shard, trigger, *rest)

    with mock.patch.object(step.Stepper, "_compute", forget):
        yield


@contextlib.contextmanager
def forgotten_by_true_count() -> Iterator[None]:
    """A key is remembered only if it had a unit in the window before, exactly counted."""
    counts: dict[tuple[int, bytes], int] = defaultdict(int)
    aggregate, compute, of = vars(step)["aggregate"], step.Stepper._compute, Remembered.of
    at = [0]

    def noted(stepper: Any, states: Any, window: int, *rest: Any) -> Any:
        at[0] = window
        return compute(stepper, states, window, *rest)

    def count(plan: Plan, states: Any, batch: Any, weights: Any) -> Any:
        for key in ids_of(batch.column("_id")):
            counts[at[0], key.tobytes()] += 1
        return aggregate(plan, states, batch, weights)

    def slots_of(remembered: Remembered, window: int) -> Any:
        slots = of(remembered, window)
        assert remembered.columns is not None or not len(slots)
        keep = [
            counts[window - 1, remembered._keys.ids[slot].tobytes()] > 3 for slot in slots.tolist()
        ]
        return slots[np.array(keep, np.bool_)]

    with (
        mock.patch.object(step, "aggregate", count),
        mock.patch.object(step.Stepper, "_compute", noted),
        mock.patch.object(Remembered, "of", slots_of),
    ):
        yield


@contextlib.contextmanager
def of_one_shard() -> Iterator[None]:
    """BOUND knows what one key shard selected, not all."""
    since = RememberedKeys._since

    def own(keys: RememberedKeys, start: int) -> Any:
        of_other = keys._ids_only and keys._shard > 0
        return [] if of_other else since(keys, start)

    with mock.patch.object(RememberedKeys, "_since", own):
        yield


@contextlib.contextmanager
def of_later_tests() -> Iterator[None]:
    """A window goes on reading the list: what others select meanwhile is known at once."""
    at = RememberedKeys.at

    def anew(keys: RememberedKeys, window: int) -> Remembered:
        if keys._ids_only:  # BOUND's
            keys._read = Remembered()
            keys._read.begin(window, 1 << 20, keys._store.selections(keys._shard, -1))
            return keys._read
        return at(keys, window)

    with mock.patch.object(RememberedKeys, "at", anew):
        yield


SABOTAGED: dict[str, tuple[Callable[[], Any], str, Plan]] = {
    "forgotten in mid-window": (forgotten_in_mid_window, "rounds", TUMBLING),
    "forgotten by a true count": (forgotten_by_true_count, "gaps|rounds", TUMBLING),
    "list of one shard": (of_one_shard, "status", TUMBLING),
    "list of later tests": (of_later_tests, "status", SLIDING),
}


@pytest.mark.parametrize("name", SABOTAGED)
def test_sabotage_is_caught(name: str, tmp_path: Path) -> None:
    sabotage, rule, plan = SABOTAGED[name]
    with sabotage(), pytest.raises(Breach, match=rule):
        for number, unit in enumerate(ADDED.values()):
            folder = tmp_path / str(number)
            folder.mkdir()
            enumerated(plan, folder, unit, 61)


# --- rows over nothing ------------------------------------------------------------------------


def zero_rows(plan: Plan, folder: Path) -> list[tuple[float, float]]:
    """(value, sd) of remembered keys that have no record in the second window."""
    begin_, end = plan.timeline.window_bounds(0)
    records = stream([(u, k, 1 + u % 8) for u in range(400) for k in range(12)])
    assert begin_ <= records.event.min() and records.event.max() < end
    run = begin(plan, folder / "zeros.db", shards=SHARDS)
    releases, _ = flow.run_in_memory(run, records.batches(50))
    stores.close_all()
    out = by_name(releases)
    first = {r["page"] for r in as_rows(out[0, plan.timeline.triggers])}
    rows = [r for (w, _), data in out.items() if w for r in as_rows(data)]
    assert {r["page"] for r in rows} == first and len(first) == 12
    return [(float(r["n"]), float(r["n_sd"])) for r in rows]  # type: ignore[arg-type]


def noisy(rows: list[tuple[float, float]]) -> bool:
    scaled = np.array([value / sd for value, sd in rows])
    return bool((scaled == 0).mean() < 0.3 and 0.6 < scaled.std() < 1.5)


def test_rows_over_nothing_have_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(triggers=6, windows=2, contributions=12, epsilon=40.0)
    assert noisy(zero_rows(plan, tmp_path))
    publish = perturbation.publish

    def noiseless(plan: Plan, budget: Any, states: Any, paths: Any, slots: Any, *at: Any) -> Any:
        figures = publish(plan, budget, states, paths, slots, *at)
        nothing = states.values[slots, 0] == 0
        figures.values["n"][nothing] = 0.0
        return figures

    monkeypatch.setattr(step, "publish", noiseless)
    (tmp_path / "sabotaged").mkdir()
    assert not noisy(zero_rows(plan, tmp_path / "sabotaged"))
