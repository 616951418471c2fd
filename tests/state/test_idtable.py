"""The hash tables against dict and set; ids that share their hash bits stay apart."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dpstream.accounting.arrays import Ids
from dpstream.state.idtable import IdTable, PairSet

#: Few distinct words, so that ids repeat and collide in their low bits.
WORD = st.sampled_from([0, 1, 2, 1023, 1024, 2**32, 2**63, 2**64 - 1])
ID = st.tuples(WORD, WORD)


def array(ids: list[tuple[int, int]]) -> Ids:
    return np.array(ids, np.uint64).reshape(-1, 2)


@given(batches=st.lists(st.lists(ID, max_size=30), max_size=8), unknown=st.lists(ID, max_size=10))
def test_interning_is_a_dict(
    batches: list[list[tuple[int, int]]], unknown: list[tuple[int, int]]
) -> None:
    table, model = IdTable(), dict[tuple[int, int], int]()
    for batch in batches:
        slots = table.intern(array(batch))
        assert slots.tolist() == [model.setdefault(i, len(model)) for i in batch]
        assert table.size == len(model)
        assert [tuple(row) for row in table.ids.tolist()] == list(model)
    assert table.find(array(unknown)).tolist() == [model.get(i, -1) for i in unknown]


def test_interning_many_with_growth() -> None:
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 2**64, (30_000, 2), np.uint64)
    ids[:20_000, 0] = rng.integers(0, 50, 20_000).astype(np.uint64) << np.uint64(40)
    table = IdTable()
    parts = np.split(ids, [1, 2, 1000, 1001, 17_000])
    assert np.concatenate([table.intern(p) for p in parts]).tolist() == list(range(30_000))
    order = rng.permutation(30_000)
    assert (table.intern(ids[order]) == order).all() and table.size == 30_000
    assert (table.find(ids[order]) == order).all()
    assert (table.find(ids ^ np.uint64(1 << 63)) == -1).all()


PAIR = st.tuples(st.integers(0, 5), ID)


@settings(max_examples=50)
@given(batches=st.lists(st.lists(PAIR, max_size=40), max_size=8))
def test_pairs_are_a_set(batches: list[list[tuple[int, tuple[int, int]]]]) -> None:
    pairs, model = PairSet(), set()
    for batch in batches:
        slots = np.array([slot for slot, _ in batch], np.int64)
        fresh = pairs.add(slots, array([unit for _, unit in batch]))
        for pair, new in zip(batch, fresh, strict=True):
            assert new == (pair not in model)
            model.add(pair)
        assert pairs.size == len(model)


def test_pairs_survive_growth_and_only_stale_ones_are_forgotten() -> None:
    rng = np.random.default_rng(2)
    pairs, model = PairSet(), set()
    stale = np.arange(100) % 3 == 0
    forgotten = 0
    for size in (10, 500, 3000, 9000, 40_000):
        slots = rng.integers(0, 100, size)
        units = rng.integers(0, 900, (size, 2)).astype(np.uint64)
        units[:, 1] = 0
        fresh = pairs.add(slots, units, stale)
        for slot, unit, new in zip(slots.tolist(), units[:, 0].tolist(), fresh, strict=True):
            if not stale[slot]:
                assert new == ((slot, unit) not in model)
            elif new and (slot, unit) in model:
                forgotten += 1
            model.add((slot, unit))
    assert forgotten > 0
    live = [(s, u) for s, u in model if not stale[s]]
    slots = np.array([s for s, _ in live])
    units = array([(u, 0) for _, u in live])
    assert not pairs.add(slots, units, stale).any()


def test_pairs_of_other_owners_and_halves_are_other_pairs() -> None:
    pairs = PairSet()
    add = lambda slot, unit: bool(pairs.add(np.array([slot]), array([unit]))[0])  # noqa: E731
    assert add(0, (7, 7)) and not add(0, (7, 7))
    assert add(1, (7, 7)) and add(0, (7, 8)) and add(0, (8, 7))
    # Equal start positions: low ^ slot * constant agrees, the owner tells them apart.
    mix = 0x9E3779B97F4A7C15
    assert add(1, (7 ^ mix, 7)) and add(0, (7 ^ mix ^ mix, 9))
