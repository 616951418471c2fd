"""Which pairs take which weight: by definition, and on every path of outputs of tiny streams."""

import contextlib
import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.weights import SelectionWeights
from dpstream.dp_transforms import bounding, decision, flow, skipping, step
from dpstream.dp_transforms.batches import ids_of, numbers
from dpstream.dp_transforms.published_keys import PublishedKeys
from dpstream.state import open as stores
from tests.streams import START, STEP, Stream, begin, key_name, make_plan

# --- words ---------------------------------------------------------------------------------


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
            known = mask >> window & 1
            pairs.append((used[who], -1 if known else taken[who]))
            used[who] += 1
            taken[who] += not known
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
    place = np.zeros(size, np.int32), np.arange(size)
    counts, words, ranks = np.zeros(units, np.int32), [], []
    for half in (slice(0, 25), slice(25, size)):  # two decisions: the counters go on
        order = np.arange(len(unit[half]))
        given = (column[half] for column in (*place, wanted, published))
        found = skipping.admit(unit[half], *given, counts, limit, order)
        words += found[0].tolist()
        ranks += found[1].tolist()
    want = by_definition(unit.tolist(), wanted.tolist(), published.tolist(), limit)
    pairs = skipping.pairs_in(np.array(words))
    assert pairs.tolist() == [len(p) for p in want]
    at = np.repeat(np.arange(size), pairs)
    nth = np.concatenate([np.arange(n) for n in pairs])
    rank, index = skipping.laid_out(np.array(ranks, np.int32)[at], nth)
    assert list(zip(rank.tolist(), index.tolist(), strict=True)) == [p for ps in want for p in ps]
    # A unit's count is the sum of its records' words, so that stores need not know what they say.
    assert counts.tolist() == np.bincount(unit, words, units).astype(int).tolist()


def test_a_position_that_comes_twice_counts_once() -> None:
    zeros = np.zeros(3, np.int64)
    counts = np.zeros(1, np.int32)
    words, _ = skipping.admit(
        zeros, np.zeros(3, np.int32), np.array([5, 5, 6]), zeros + 1, np.zeros(3, np.int32),
        counts, 9, np.arange(3),
    )  # fmt: skip
    assert skipping.pairs_in(words).tolist() == [1, 0, 1]


def test_an_exhausted_unit_gets_nothing() -> None:
    counts = np.array([skipping.exhausted(4)], np.int32)
    one = np.ones(1, np.int64)
    words, _ = skipping.admit(
        0 * one, np.zeros(1, np.int32), one, one, np.ones(1, np.int32), counts, 4, 0 * one
    )
    assert words.tolist() == [0] and counts.tolist() == [skipping.exhausted(4)]


# --- every path of outputs -----------------------------------------------------------------

#: A window of five triggers, three of them tests; what each key's test says is enumerated.
TESTS = (1, 3, 5)
PLAN = make_plan(
    triggers=5, windows=2, contributions=5, strategy="blt", skip=True, tests=TESTS,
    weights=SelectionWeights(1.0, 2.0), remember="never",
)  # fmt: skip
SHARDS = 2
#: (window, key number) -> trigger at which it is selected.
Path_ = dict[tuple[int, int], int]


@dataclasses.dataclass(frozen=True)
class Row:
    """An admitted pair as it reaches the key shards."""

    unit: bytes
    window: int
    trigger: int
    page: str
    index: int


class Breach(Exception):
    """What a sabotaged variant breaks."""


def stream(rows: list[tuple[int, int, int]]) -> Stream:
    """(user, key, quarters of a trigger since the start) of each record; offsets by time."""
    user, key, at = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    time = START + at * STEP // 4
    zero = np.zeros(len(rows), np.int64)
    return Stream(user, key, time, time, zero.astype(float), zero, np.arange(len(rows)))


def paths(keys: int) -> Iterator[Path_]:
    """Every way in which the keys of the first window, and the first one of the second, can be
    selected: at some test or never."""
    names = [*((0, key) for key in range(keys)), (1, 0)]
    for choice in itertools.product((*TESTS, 0), repeat=len(names)):
        yield {name: at for name, at in zip(names, choice, strict=True) if at}


@contextlib.contextmanager
def forced(path: Path_, rows: list[Row]) -> Iterator[None]:
    """Tests say what the path says; what is aggregated is kept."""
    window_of: dict[int, int] = {}
    sticky, aggregate = step.Stepper._sticky, step.aggregate

    def remember(stepper: Any, states: Any, window: int, slots: Any, trigger: int) -> Any:
        window_of[id(states)] = window
        return sticky(stepper, states, window, slots, trigger)

    def select(plan: Plan, _: Any, states: Any, slots: Any, trigger: int) -> Any:
        names = states.key_columns(slots).column("page").to_pylist()
        window = window_of[id(states)]
        chosen = {key_name(k) for (w, k), at in path.items() if w == window and at <= trigger}
        return np.array([name in chosen for name in names], np.bool_)

    def keep(plan: Plan, states: Any, batch: Any, ids: Any, weights: Any) -> Any:
        units, index = ids_of(batch.column("unit")), numbers(batch.column("_index"))
        columns = (batch.column(name).to_pylist() for name in ("window", "trigger", "page"))
        rows.extend(
            Row(unit.tobytes(), *where, int(i))
            for unit, i, *where in zip(units, index, *columns, strict=True)
        )
        return aggregate(plan, states, batch, ids, weights)

    def predict(plan: Plan, _: Any, states: Any, slots: Any, trigger: int) -> None:
        later = [t for t in TESTS if t > trigger]
        states.due[slots] = later[0] if later else np.iinfo(np.int32).max

    with (
        mock.patch.object(step.Stepper, "_sticky", remember),
        mock.patch.object(step, "select", select),
        mock.patch.object(step, "aggregate", keep),
        mock.patch.object(step, "predict", predict),
    ):
        yield


def run(path: Path_, records: Stream, folder: Path, number: int) -> tuple[list[Row], Any]:
    """Admitted pairs and released bytes on one path."""
    rows: list[Row] = []
    begun = begin(PLAN, folder / f"{number}.db", shards=SHARDS)
    with forced(path, rows):
        releases, _ = flow.run_in_memory(begun, records.batches(50))
    stores.close_all()
    names = {
        (m[b"dpstream.window"], m[b"dpstream.trigger"]): sorted(b.column("page").to_pylist())
        for b in releases
        for m in [b.schema.metadata]
    }
    return rows, names


def check(path: Path_, rows: list[Row]) -> None:
    """The unit's weights on this path, and the status of every pair."""
    weights = PLAN.privacy.weights.integers(PLAN.privacy.contributions)  # type: ignore[union-attr]
    by_unit: dict[bytes, list[Row]] = defaultdict(list)
    begun: dict[tuple[int, str], int] = {}
    for row in rows:
        by_unit[row.unit].append(row)
        begun[row.window, row.page] = min(row.trigger, begun.get((row.window, row.page), 99))
    for row in rows:
        # A key is selected at the path's test, or at the first one that it has a unit at.
        least = max(path.get((row.window, int(row.page[1:])), 99), begun[row.window, row.page])
        selected = min((t for t in TESTS if t >= least), default=99)
        if (row.index < 0) != (selected < row.trigger):
            raise Breach("status: not what was published before the pair's trigger")
    for own in by_unit.values():
        squares = sum(int(weights[row.index]) ** 2 for row in own if row.index >= 0)
        if squares > 1 << 16:
            raise Breach("squares: a unit's weights on one path add up to more than 1")
        taken = [row.index for row in own if row.index >= 0]
        if len(set(taken)) != len(taken):
            raise Breach("squares: a unit takes a weight twice")


#: The others, whose keys the added unit shares; quarters of a trigger.
OTHERS = [(1, 0, 1), (1, 1, 6), (1, 0, 9), (2, 1, 2), (2, 0, 13), (3, 2, 4), (3, 2, 14), (1, 0, 25)]
ADDED = {
    "spread": [(9, 0, 0), (9, 1, 5), (9, 2, 10), (9, 0, 15), (9, 0, 22)],
    "one key, late": [(9, 2, 3), (9, 2, 11), (9, 1, 12), (9, 1, 18), (9, 0, 30)],
    "crowd at once": [(9, 0, 7), (9, 1, 7), (9, 2, 7), (9, 0, 8), (9, 1, 8)],
}


def enumerated(folder: Path, unit: list[tuple[int, int, int]], every: int = 1) -> None:
    """All paths on neighbouring streams; raises ``Breach``."""
    number = itertools.count()
    added = sorted([*OTHERS, *unit], key=lambda row: row[2])
    without = sorted(OTHERS, key=lambda row: row[2])
    for path in itertools.islice(paths(3), 0, None, every):
        outcomes = [run(path, stream(r), folder, next(number)) for r in (without, added)]
        for rows, _ in outcomes:
            check(path, rows)
        (fewer, names), (more, same) = outcomes
        if names == same:  # equal outputs: nobody else's pairs may differ
            mine = {row.unit for row in more} - {row.unit for row in fewer}
            rest = [row for row in more if row.unit not in mine]
            if sorted(map(dataclasses.astuple, rest)) != sorted(map(dataclasses.astuple, fewer)):
                raise Breach("others: another unit's weight differs though outputs are equal")


@pytest.mark.parametrize("name", ADDED)
def test_weights_on_every_path(name: str, tmp_path: Path) -> None:
    enumerated(tmp_path, ADDED[name], every=11)


@pytest.mark.slow
@pytest.mark.parametrize("name", ADDED)
def test_weights_on_all_paths(name: str, tmp_path: Path) -> None:
    enumerated(tmp_path, ADDED[name])


# --- sabotaged ------------------------------------------------------------------------------


@contextlib.contextmanager
def refund() -> Iterator[None]:
    """An index comes back when its key is published."""
    log: dict[tuple[int, int], list[tuple[int, Any]]] = defaultdict(list)
    seen: list[Any] = []
    of_keys, admit, admit_new = PublishedKeys.of_keys, skipping.admit, bounding._admit_new

    def at_work(plan: Plan, store: Any, shard: int, *rest: Any) -> Any:
        seen[:] = [shard]
        return admit_new(plan, store, shard, *rest)

    def watch(
        known: PublishedKeys, ids: Any, first: Any, count: Any, decided: int, upto: int
    ) -> Any:
        seen[1:] = [known, ids, first, decided]
        return of_keys(known, ids, first, count, decided, upto)

    def back(unit: Any, *rest: Any) -> Any:
        shard, known, ids, first, decided = seen
        counts = rest[4]
        for slot in np.unique(unit).tolist():
            kept = []
            for window, key in log[shard, slot]:
                gone = decided and known._known(window, key, decided)[0]
                counts[slot] -= (1 << 16) if gone else 0
                kept += [] if gone else [(window, key)]
            log[shard, slot] = kept
        out = admit(unit, *rest)
        for row, slot in enumerate(unit.tolist()):
            if out[0][row] >> 16:
                log[shard, slot].append((int(first[row]), ids[row : row + 1].copy()))
        return out

    with (
        mock.patch.object(bounding, "_admit_new", at_work),
        mock.patch.object(PublishedKeys, "of_keys", watch),
        mock.patch.object(bounding.skipping, "admit", back),
    ):
        yield


@contextlib.contextmanager
def reset_by_window() -> Iterator[None]:
    """The counter of indices begins anew in each window."""
    admit = skipping.admit

    def anew(unit: Any, partition: Any, offset: Any, wanted: Any, published: Any, counts: Any,
             *rest: Any) -> Any:  # fmt: skip
        if reset.get("now"):
            counts &= 0xFFFF
        return admit(unit, partition, offset, wanted, published, counts, *rest)

    reset: dict[str, bool] = {}
    of_keys = PublishedKeys.of_keys

    def watch(
        known: PublishedKeys, ids: Any, first: Any, count: Any, decided: int, upto: int
    ) -> Any:
        reset["now"] = decided == PLAN.timeline.triggers
        return of_keys(known, ids, first, count, decided, upto)

    with (
        mock.patch.object(PublishedKeys, "of_keys", watch),
        mock.patch.object(bounding.skipping, "admit", anew),
    ):
        yield


@contextlib.contextmanager
def of_one_shard() -> Iterator[None]:
    """The set that one key shard published, not all of them."""
    released = PublishedKeys._released

    def own(known: PublishedKeys, window: int, trigger: int) -> Any:
        identity = known._store.identity
        ids = released(known, window, trigger)
        return ids[step.shard_of(ids, identity.shards) == 0]

    with mock.patch.object(PublishedKeys, "_released", own):
        yield


@contextlib.contextmanager
def first_always() -> Iterator[None]:
    """Every pair takes the first weight."""
    laid_out = skipping.laid_out

    def first(rank: Any, nth: Any) -> Any:
        order, index = laid_out(rank, nth)
        return order, np.minimum(index, 0)

    with mock.patch.object(decision.skipping, "laid_out", first):
        yield


@contextlib.contextmanager
def counted_by_others() -> Iterator[None]:
    """A unit's index follows how many records others sent before."""
    laid_out = skipping.laid_out

    def shifted(rank: Any, nth: Any) -> Any:
        order, index = laid_out(rank, nth)
        return order, np.where(index < 0, -1, np.minimum(4, index + np.arange(len(index)) % 2))

    with mock.patch.object(decision.skipping, "laid_out", shifted):
        yield


SABOTAGED: dict[str, tuple[Callable[[], Any], str]] = {
    "refund": (refund, "squares"),
    "reset by window": (reset_by_window, "squares"),
    "set of one shard": (of_one_shard, "status"),
    "first weight always": (first_always, "squares"),
    "index by others' records": (counted_by_others, "s"),
}


@pytest.mark.parametrize("name", SABOTAGED)
def test_sabotage_is_caught(name: str, tmp_path: Path) -> None:
    sabotage, rule = SABOTAGED[name]
    with sabotage(), pytest.raises(Breach, match=rule):
        for number, unit in enumerate(ADDED.values()):
            folder = tmp_path / str(number)
            folder.mkdir()
            enumerated(folder, unit, every=5)
