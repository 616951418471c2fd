"""On every path of outputs a unit takes each weight at most once, and moves nobody else's.

Each sabotage is one plausible way to build skip that looks the same in most runs.
"""

import bisect
import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms import bounding, skipping
from dpstream.dp_transforms.noise.ids import key_ids
from dpstream.dp_transforms.published_keys import PublishedKeys
from dpstream.state.idtable import shard_of
from tests.dp_transforms import every_path
from tests.dp_transforms.every_path import AHEAD, CASES, TINY, Breach, enumerated, every_unit
from tests.streams import KEYS, key_name


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

    def own(keys: PublishedKeys, window: int, trigger: int) -> Any:
        identity = keys._store.identity
        ids = released(keys, window, trigger)
        return ids[shard_of(ids, identity.shards) == 0]

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
    quiet = mock.patch.object(every_path, "check")
    with sabotage(), quiet, pytest.raises(Breach, match="transcript"):
        for unit in CASES[case].added.values():
            enumerated(CASES[case], [unit])
