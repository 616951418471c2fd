"""On every path of outputs a unit takes each weight at most once, and moves nobody else's.

Each sabotage is one plausible way to build skip that looks the same in most runs.

Every path of outputs of tiny streams that skip what is published, through the whole flow.

A path names the test that selects each (window, key); on it tests say what the path says, and all
that reaches the key shards is kept: every pair, and what every state adds to its selection stream.
"""

import bisect
import contextlib
import dataclasses
import functools
import itertools
import tempfile
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
from dpstream.dp_transforms import bounding, flow, skipping
from dpstream.dp_transforms.noise.ids import key_ids
from dpstream.dp_transforms.published_keys import PublishedKeys
from dpstream.state import open as stores
from tests.dp_transforms.exhaustive import LATTICE, AdmittedPair, Breach, Path_, forced, weights_of
from tests.simulation.hooks import fast, memory_folder
from tests.streams import COUNT, KEYS, START, STEP, UNITS, Stream, begin, key_name, make_plan

SHARDS = 2
#: A record: user, key, quarters of a trigger since the start of its event and of its stamp.
Record = tuple[int, int, int, int]


@dataclasses.dataclass(frozen=True)
class Case:
    """A plan, the (window, key)s whose tests are enumerated, and neighbours.

    Attributes:
        others: records of both streams; added: those of one unit more, by name.
    """

    plan: Plan
    names: tuple[tuple[int, int], ...]
    others: tuple[Record, ...]
    added: dict[str, tuple[Record, ...]]

    def paths(self) -> Iterator[Path_]:
        """Every way in which the keys can be selected: at some test or never."""
        tests = self.plan.design.test_triggers.tolist()
        for choice in itertools.product((*tests, 0), repeat=len(self.names)):
            yield {name: at for name, at in zip(self.names, choice, strict=True) if at}


@dataclasses.dataclass
class Seen:
    """What a run did on a path.

    Attributes:
        rows: admitted pairs; x: (window, page, trigger) -> what it adds to the weighted count, in
        2^-8; outputs: trigger time -> (window, page)s that are published then.
    """

    rows: list[AdmittedPair] = dataclasses.field(default_factory=list)
    x: dict[tuple[int, str, int], int] = dataclasses.field(default_factory=dict)
    outputs: dict[int, set[tuple[int, str]]] = dataclasses.field(
        default_factory=lambda: defaultdict(set)
    )


def records(rows: tuple[Record, ...]) -> Stream:
    """The stream of some records; offsets by stamp."""
    user, key, event, stamp = (np.array(c, np.int64) for c in zip(*rows, strict=True))
    zero, order = np.zeros(len(rows), np.int64), np.argsort(stamp, kind="stable")
    offset = np.empty_like(order)
    offset[order] = np.arange(len(rows))
    times = START + event * STEP // 4, START + stamp * STEP // 4
    return Stream(user, key, *times, zero.astype(float), zero, offset)


#: On which path the flow is, for sabotage that looks ahead; and what each key has counted.
AHEAD: dict[str, Any] = {}


@contextlib.contextmanager
def noting(seen: Seen, states: Any, new: list[AdmittedPair]) -> Iterator[None]:
    """Keep what a batch adds to each key's weighted count, and the units it has counted."""
    before = states.values[: states.size, -1].copy()
    yield
    if not new:
        return
    after = states.values[: states.size, -1].copy()
    after[: len(before)] -= before
    pages = states.key_columns(np.arange(states.size)).column("page").to_pylist()
    for page, more in zip(pages, after.tolist(), strict=True):
        if more:
            seen.x[new[0].window, page, new[0].trigger] = more
    counted = AHEAD["counted"][new[0].window, new[0].trigger]
    counted |= dict(zip(pages, states.units[: states.size].tolist(), strict=True))


def run(plan: Plan, path: Path_, stream: Stream) -> Seen:
    """The whole flow on one path."""
    seen = Seen()
    with tempfile.TemporaryDirectory(dir=memory_folder()) as folder, fast():
        begun = begin(plan, Path(folder) / "s.db", shards=SHARDS)
        AHEAD.update(path=path, counted=defaultdict(dict))
        try:
            with forced(plan, path, seen.rows, functools.partial(noting, seen)):
                releases, _ = flow.run_in_memory(begun, stream.batches(50))
        finally:
            stores.close_all()
    for batch in releases:
        metadata = batch.schema.metadata
        window, trigger = (int(metadata[b"dpstream." + n]) for n in (b"window", b"trigger"))
        for page in batch.column("page").to_pylist():
            seen.outputs[plan.timeline.base(window) + trigger].add((window, page))
    return seen


def check(plan: Plan, seen: Seen) -> None:
    """Every pair's status is what was published before it, and no unit takes a weight twice."""
    base, weights = plan.timeline.base, weights_of(plan)
    assert weights is not None
    first: dict[tuple[int, str], int] = {}
    for time, published in sorted(seen.outputs.items()):
        for name in published:
            first.setdefault(name, time)
    by_unit: dict[bytes, list[AdmittedPair]] = defaultdict(list)
    for row in seen.rows:
        by_unit[row.unit].append(row)
        published_before = (
            first.get((row.window, row.page), 1 << 40) < base(row.window) + row.trigger
        )
        if (row.index < 0) != published_before:
            raise Breach("status: not what was published before the pair's trigger")
    for own in by_unit.values():
        taken = [row.index for row in own if row.index >= 0]
        if sum(weights[index] ** 2 for index in taken) > LATTICE**2:
            raise Breach("squares: a unit's weights on one path add up to more than 1")
        if len(set(taken)) != len(taken):
            raise Breach("squares: a unit takes a weight twice")


def compare(plan: Plan, fewer: Seen, more: Seen) -> None:
    """As long as outputs are equal nobody else's pairs differ, and the selection streams, as
    states have them, differ by a vector of norm 1 at most."""
    timeline = plan.timeline
    same = timeline.last_trigger_time
    for time in range(1, timeline.last_trigger_time + 1):
        if fewer.outputs[time] != more.outputs[time]:
            same = time  # what was added by then followed the outputs before it
            break

    def early(rows: list[AdmittedPair]) -> list[AdmittedPair]:
        return [row for row in rows if timeline.base(row.window) + row.trigger <= same]

    mine = {row.unit for row in more.rows} - {row.unit for row in fewer.rows}
    rest = [row for row in early(more.rows) if row.unit not in mine]
    if sorted(map(dataclasses.astuple, rest)) != sorted(
        map(dataclasses.astuple, early(fewer.rows))
    ):
        raise Breach("others: another unit's weight differs though outputs are equal")
    moved: dict[tuple[int, str], int] = defaultdict(int)
    for window, page, trigger in fewer.x.keys() | more.x.keys():
        if timeline.base(window) + trigger <= same:
            name = window, page, trigger
            moved[window, page] += abs(more.x.get(name, 0) - fewer.x.get(name, 0))
    if sum(n * n for n in moved.values()) > LATTICE**2:
        raise Breach("transcript: selection streams differ by more than 1 on equal outputs")


def enumerated(case: Case, units: list[tuple[Record, ...]], every: int = 1) -> int:
    """All paths on neighbouring streams, or each ``every``-th; how many.  Raises ``Breach``."""
    number = 0
    for path in itertools.islice(case.paths(), 0, None, every):
        fewer = run(case.plan, path, records(case.others))
        check(case.plan, fewer)
        for unit in units:
            more = run(case.plan, path, records(case.others + unit))
            check(case.plan, more)
            compare(case.plan, fewer, more)
            number += 1
    return number


def _at(*rows: tuple[int, int, int]) -> tuple[Record, ...]:
    """Records whose stamps are their events."""
    return tuple((user, key, at, at) for user, key, at in rows)


def _plan(**options: object) -> Plan:
    settings = {"contributions": 5, "strategy": "blt", "skip": True, "remember": "never"}
    settings |= {"weights": SelectionWeights(1.0, 2.0), **options}
    settings = {"remember": "never", **settings}  # `test_remembering` has those that do
    return make_plan(**settings)  # type: ignore[arg-type]


_OTHERS = _at(
    (1, 0, 1), (1, 1, 6), (1, 0, 9), (2, 1, 2), (2, 0, 13), (3, 2, 4), (3, 2, 14), (1, 0, 25)
)  # fmt: skip
_ADDED = {
    "spread": _at((9, 0, 0), (9, 1, 5), (9, 2, 10), (9, 0, 15), (9, 0, 22)),
    "one key, late": _at((9, 2, 3), (9, 2, 11), (9, 1, 12), (9, 1, 18), (9, 0, 30)),
    "crowd at once": _at((9, 0, 7), (9, 1, 7), (9, 2, 7), (9, 0, 8), (9, 1, 8)),
}
_NAMES = ((0, 0), (0, 1), (0, 2), (1, 0))
#: Windows of a few triggers, two or three of them tests; what each key's test says is enumerated.
CASES = {
    "skip": Case(_plan(triggers=5, tests=(1, 3, 5)), _NAMES, _OTHERS, _ADDED),
    "combined": Case(
        _plan(triggers=5, tests=(1, 3, 5), per_key_bound=1, combine=True),
        (_NAMES[0], _NAMES[1], _NAMES[3]), _OTHERS, _ADDED,
    ),
    "units": Case(
        _plan(triggers=5, tests=(1, 3, 5), aggregates=(UNITS, COUNT)),
        (_NAMES[0], _NAMES[1], _NAMES[3]), _OTHERS, _ADDED,
    ),
    "sliding": Case(
        _plan(triggers=4, slide=2, windows=3, tests=(2, 4), contributions=6),
        ((0, 0), (0, 1), (1, 0), (1, 1)),
        _at((1, 0, 1), (1, 1, 9), (2, 0, 10), (2, 1, 2), (3, 1, 14)),
        {
            "both": _at((9, 0, 2), (9, 1, 10), (9, 0, 12), (9, 1, 16)),
            "one key": _at((9, 1, 0), (9, 1, 8), (9, 1, 9), (9, 1, 20)),
        },
    ),
    "late": Case(
        _plan(triggers=6, lateness=2, stamped=True, tests=(1, 3, 6)),
        ((0, 0), (0, 1), (1, 1)),
        ((1, 0, 1, 1), (1, 1, 2, 15), (2, 0, 6, 6), (2, 1, 3, 3), (3, 1, 20, 21), (3, 0, 14, 22)),
        {
            "turned round": ((9, 0, 12, 13), (9, 1, 10, 14), (9, 0, 2, 17), (9, 1, 1, 20)),
            "much later": ((9, 1, 1, 2), (9, 1, 5, 22), (9, 0, 0, 23), (9, 1, 17, 30)),
        },
    ),
    "periods": Case(
        _plan(triggers=4, windows=2, period=4, tests=(1, 2, 4), contributions=3),
        ((0, 0), (0, 1), (1, 0)),
        # The user is there in the other period in any case: that is another unit.
        _at((1, 0, 1), (9, 1, 2), (2, 1, 2), (9, 0, 7), (2, 0, 18), (3, 0, 20)),
        {"one more": _at((9, 0, 17), (9, 1, 19), (9, 1, 26), (9, 0, 27))},
    ),
}  # fmt: skip

#: One window of four triggers, and every unit of at most three records on two keys.
TINY = Case(
    _plan(triggers=4, windows=1, tests=(1, 2, 4), contributions=3),
    ((0, 0), (0, 1)),
    _at((1, 0, 1), (2, 1, 3), (2, 0, 6), (1, 1, 10)),
    {},
)


def every_unit(most: int = 3) -> list[tuple[Record, ...]]:
    """Every choice of up to so many records, on two keys and in four triggers."""
    places = [(9, key, 4 * t + 2) for key in (0, 1) for t in range(4)]
    return [
        _at(*sorted(chosen, key=lambda row: row[2]))
        for size in range(1, most + 1)
        for chosen in itertools.combinations_with_replacement(places, size)
    ]


@pytest.mark.parametrize("name", CASES)
def test_weights_on_every_path(name: str) -> None:
    case = CASES[name]
    assert enumerated(case, list(case.added.values()), every=23) > 2


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_weights_on_all_paths(name: str) -> None:
    case = CASES[name]
    paths = enumerated(case, list(case.added.values()))
    assert paths == len(case.added) * len(list(case.paths()))


def test_every_tiny_unit_on_some_paths() -> None:
    assert enumerated(TINY, every_unit(2)[::9], every=5) == 5 * 4


@pytest.mark.slow
def test_every_tiny_unit_on_every_path() -> None:
    assert enumerated(TINY, every_unit()) == 164 * 16


# --- sabotaged ------------------------------------------------------------------------------


def _of_keys(change: Callable[..., Any]) -> Any:
    """``PublishedKeys.of_keys`` with ``change(known, its mask, ids, first, count, decided, upto)``
    in its place."""
    real = PublishedKeys.of_keys

    def of_keys(keys: PublishedKeys, *arguments: Any) -> Any:
        return change(keys, real(keys, *arguments), *arguments)

    return mock.patch.object(PublishedKeys, "of_keys", of_keys)


def _admitted(change: Callable[..., Any]) -> Any:
    """``skipping.admit`` followed by ``change(plan, batch, shard, what it was given, words,
    rank)``; ``batch`` are the records that are decided."""
    now: list[Any] = []
    admit, admit_new = skipping.admit, bounding._admit_new

    def at_work(plan: Plan, store: Any, shard: int, batch: Any, *rest: Any) -> Any:
        now[:] = [plan, batch, shard]
        return admit_new(plan, store, shard, batch, *rest)

    def changed(*given: Any) -> Any:
        words, rank = admit(*given)
        change(*now, given, words, rank)
        return words, rank

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(bounding, "_admit_new", at_work))
    stack.enter_context(mock.patch.object(skipping, "admit", changed))
    return stack


@contextlib.contextmanager
def refund() -> Iterator[None]:
    """An index comes back when its key is published."""
    log: dict[tuple[int, int], list[tuple[int, Any]]] = defaultdict(list)
    context: list[Any] = []
    admit, admit_new = skipping.admit, bounding._admit_new

    def at_work(plan: Plan, store: Any, shard: int, *rest: Any) -> Any:
        context[:] = [shard]
        return admit_new(plan, store, shard, *rest)

    def watch(keys: PublishedKeys, mask: Any, ids: Any, first: Any, _: Any, decided: int,
              upto: int) -> Any:  # fmt: skip
        if context[0] == 0 and decided == 0:
            log.clear()  # a new run
        context[1:] = [keys, ids, first, decided]
        return mask

    def back(unit: Any, *rest: Any) -> Any:
        shard, keys, ids, first, decided = context
        counts = rest[4]
        for slot in np.unique(unit).tolist():
            entries = []
            for window, key in log[shard, slot]:
                gone = decided and keys._published(window, key, decided)[0]
                counts[slot] -= (1 << 16) if gone else 0
                entries += [] if gone else [(window, key)]
            log[shard, slot] = entries
        out = admit(unit, *rest)
        for row, slot in enumerate(unit.tolist()):
            if out[0][row] >> 16:
                log[shard, slot].append((int(first[row]), ids[row : row + 1].copy()))
        return out

    with (
        mock.patch.object(bounding, "_admit_new", at_work),
        _of_keys(watch),
        mock.patch.object(skipping, "admit", back),
    ):
        yield


@contextlib.contextmanager
def recomputed_by_stamp() -> Iterator[None]:
    """A record that is late takes the index that it would have had in time: by its event."""
    log: dict[tuple[int, int], list[int]] = defaultdict(list)

    def by_event(_: Plan, batch: Any, shard: int, given: Any, words: Any, rank: Any) -> None:
        unit, order, counts = given[0], given[7], given[5]
        if (words >> 16).sum() == (counts >> 16).sum():
            for name in [name for name in log if name[0] == shard]:
                del log[name]  # a new run
        for row in order.tolist():
            if words[row] >> 16:
                times = log[shard, int(unit[row])]
                event = int(batch.event_trigger_time[row])
                rank[row] = rank[row] & ~(0x3FF << 10) | bisect.bisect_left(times, event) << 10
                bisect.insort(times, event)

    with _admitted(by_event):
        yield


@contextlib.contextmanager
def reset_by_window() -> Iterator[None]:
    """The counter of indices begins anew in each window."""
    admit, window, context = skipping.admit, [0], list[Any]()

    def watch(keys: PublishedKeys, mask: Any, ids: Any, first: Any, count: Any, decided: int,
              upto: int) -> Any:  # fmt: skip
        context[:] = [keys._plan.timeline, decided]
        return mask

    def anew(*given: Any) -> Any:
        line, decided = context
        window[0] = decided // line.base(1)
        if decided and decided % line.base(1) == 0:
            given[5][:] &= 0xFFFF
        return admit(*given)

    with _of_keys(watch), mock.patch.object(skipping, "admit", anew):
        yield


@contextlib.contextmanager
def of_one_shard() -> Iterator[None]:
    """The set that one key shard published, not all of them."""
    released = PublishedKeys._released

    def own(keys: PublishedKeys, window: int, shard: int, trigger: int) -> Any:
        ids = released(keys, window, shard, trigger)
        return ids if shard == 0 else ids[:0]

    with mock.patch.object(PublishedKeys, "_released", own):
        yield


def _marked(keys: PublishedKeys, mask: Any, ids: Any, first: Any, count: Any,
            published: Callable[[int, str], bool]) -> Any:  # fmt: skip
    """The mask with more windows set: where ``published(window, page)``."""
    names = [key_name(key) for key in range(3)]
    rows = pa.RecordBatch.from_pydict({"page": names})
    known_ids = [i.tobytes() for i in key_ids(keys._plan, KEYS.ring().key, rows)]
    page_of = dict(zip(known_ids, names, strict=True))
    for row, (window, windows) in enumerate(zip(first.tolist(), count.tolist(), strict=True)):
        for nth in range(windows):
            if published(window + nth, page_of[ids[row].tobytes()]):
                mask[row] |= 1 << nth
    return mask


@contextlib.contextmanager
def of_the_same_trigger() -> Iterator[None]:
    """A pair knows what the test at its own trigger will publish."""

    def ahead(keys: PublishedKeys, mask: Any, ids: Any, first: Any, count: Any, decided: int,
              upto: int) -> Any:  # fmt: skip
        timeline, path = keys._plan.timeline, AHEAD["path"]

        def published(window: int, page: str) -> bool:
            at = path.get((window, int(page[1:])))
            return at is not None and timeline.base(window) + at == upto

        return _marked(keys, mask, ids, first, count, published)

    with _of_keys(ahead):
        yield


@contextlib.contextmanager
def of_a_test_never_released() -> Iterator[None]:
    """A pair knows which keys have two units, though no test has said so yet."""

    def counted(keys: PublishedKeys, mask: Any, ids: Any, first: Any, count: Any, decided: int,
                upto: int) -> Any:  # fmt: skip
        timeline = keys._plan.timeline

        def published(window: int, page: str) -> bool:
            counts = AHEAD["counted"].get((window, decided - timeline.base(window)), {})
            return bool(counts.get(page, 0) >= 2)

        return _marked(keys, mask, ids, first, count, published)

    with _of_keys(counted):
        yield


@contextlib.contextmanager
def first_always() -> Iterator[None]:
    """Every pair takes the first weight."""
    laid_out = skipping.laid_out

    def first(rank: Any, nth: Any) -> Any:
        order, index = laid_out(rank, nth)
        return order, np.minimum(index, 0)

    with mock.patch.object(skipping, "laid_out", first):
        yield


@contextlib.contextmanager
def counted_by_others() -> Iterator[None]:
    """A unit's index follows how many records others sent before."""
    laid_out = skipping.laid_out

    def shifted(rank: Any, nth: Any) -> Any:
        order, index = laid_out(rank, nth)
        return order, np.where(index < 0, -1, np.minimum(4, index + np.arange(len(index)) % 2))

    with mock.patch.object(skipping, "laid_out", shifted):
        yield


#: (sabotage, the case that shows it, the rule that it breaks).
SABOTAGED: dict[str, tuple[Callable[[], Any], str, str]] = {
    "refund": (refund, "skip", "squares"),
    "index by stamp": (recomputed_by_stamp, "late", "squares"),
    "reset by window": (reset_by_window, "skip", "squares"),
    "set of one shard": (of_one_shard, "skip", "status"),
    "status of the same trigger": (of_the_same_trigger, "skip", "status"),
    "a test that was never released": (of_a_test_never_released, "skip", "status"),
    "first weight always": (first_always, "skip", "squares"),
    "index by others' records": (counted_by_others, "skip", "s"),
}


@pytest.mark.parametrize("name", SABOTAGED)
def test_sabotage_is_caught(name: str) -> None:
    sabotage, case, rule = SABOTAGED[name]
    with sabotage(), pytest.raises(Breach, match=rule):
        for unit in CASES[case].added.values():
            enumerated(CASES[case], [unit], every=5)


@pytest.mark.parametrize(
    "name", ["refund", "reset by window", pytest.param("index by stamp", marks=pytest.mark.slow)]
)
def test_selection_streams_alone_show_it(name: str) -> None:
    """On equal outputs, which say nothing of it: the unit moves the streams by more than 1."""
    sabotage, case, _ = SABOTAGED[name]
    quiet = mock.patch(f"{__name__}.check")
    with sabotage(), quiet, pytest.raises(Breach, match="transcript"):
        for unit in CASES[case].added.values():
            enumerated(CASES[case], [unit])
