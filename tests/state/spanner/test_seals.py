"""Digests of the Spanner store: every cell that a hand changes is noticed."""

from base64 import b64decode, b64encode
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.state.seals import damaged
from dpstream.state.spanner import client
from dpstream.state.spanner import schema as spanner_schema
from dpstream.state.spanner import seals as spanner_seals
from dpstream.state.spanner.client import connect
from dpstream.state.spanner.schema import claim, switch
from dpstream.state.spanner.store import SpannerStore
from dpstream.state.store import Store
from dpstream.state.transfer import copy_store
from tests.state.life_conformance import LINE, OLD, everything_of, sample
from tests.state.spanner.bench import SpannerRetentionBench

_KEYS, _SEALED = spanner_seals._KEYS, spanner_seals._SEALED
#: Columns that a use of ``sample`` reads.
CELLS = [
    (t, c) for t, columns in _SEALED.items() for c in sorted(columns) if t not in ("KeyUnits",)
]


@pytest.fixture
def bench(life: SpannerRetentionBench) -> SpannerRetentionBench:
    return life


def raw(bench: SpannerRetentionBench, table: str, column: str) -> list[list[Any]]:
    """Keys and a cell of every row that has one."""
    columns = (*_KEYS[table], column)
    with connect(bench.url).snapshot() as snapshot:
        rows = snapshot.execute_sql(f"SELECT {', '.join(columns)} FROM {table}")
        return [row for row in rows if row[-1] is not None]


def put(bench: SpannerRetentionBench, table: str, column: str, row: list[Any]) -> None:
    with connect(bench.url).batch() as batch:
        batch.update(table, (*_KEYS[table], column), [row])


def flipped(value: Any, bit: int) -> Any:
    """A cell with one bit changed."""
    if isinstance(value, int):
        return value ^ 1 << bit % 62
    if isinstance(value, str):
        at = bit % len(value)
        return value[:at] + chr(ord(value[at]) ^ 1) + value[at + 1 :]
    data = bytearray(b64decode(value))
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    return b64encode(bytes(data))


def everything(store: Store) -> object:
    """All that a run or a copy reads."""
    for window, shard, _ in store.progress():
        assert list(store.key_pieces(window, shard)) is not None
    for shard in range(OLD.shards):
        assert store.unit_progress(shard) and list(store.unit_pieces(shard)) is not None
    assert store.retained_windows is not None and store.metadata("x") == "a"
    return everything_of(store)


def filled(bench: SpannerRetentionBench) -> object:
    store = bench.open()
    sample(store)
    store.set_metadata("x", "a")
    return everything(bench.open())


@pytest.mark.parametrize(("table", "column"), CELLS)
def test_a_flipped_bit_of_any_cell_is_noticed(
    bench: SpannerRetentionBench, table: str, column: str
) -> None:
    expected, rows = filled(bench), raw(bench, table, column)
    if table == "Steps":  # decisions that are behind are not read any more
        rows = [row for row in rows if row[1] >= 0]
    assert rows
    for number, row in enumerate(rows[:6]):
        put(bench, table, column, [*row[:-1], flipped(row[-1], 37 * number + 5)])
        with pytest.raises(PolicyError) as caught:
            everything(bench.open())
        assert str(caught.value) == str(damaged())
        put(bench, table, column, row)
    assert everything(bench.open()) == expected


def test_rows_that_stand_in_each_others_place_are_noticed(bench: SpannerRetentionBench) -> None:
    filled(bench)
    one, other, *_ = raw(bench, "Units", "Records")
    put(bench, "Units", "Records", [*one[:-1], other[-1]])
    with pytest.raises(PolicyError, match="is damaged"):
        everything(bench.open())


def test_without_the_check_nobody_notices(bench: SpannerRetentionBench) -> None:
    """Sabotaged: the state of a key is another one, and is used."""
    expected, row = filled(bench), raw(bench, "Keys", "State")[0]
    put(bench, "Keys", "State", [*row[:-1], flipped(row[-1], 8 * 18)])
    with mock.patch.object(spanner_seals, "_open_cell", lambda _, column, value: value[24:]):
        assert everything(bench.open()) != expected


def moved(bench: SpannerRetentionBench) -> Callable[[], Store]:
    """What a restore or a reshard does: a generation of its own, then the switch."""
    database, source = connect(bench.url), bench.open()
    number = claim(database)
    target = SpannerStore(bench.url, source._schema, source._streams, successor=(OLD, number))
    copy_store(source, target, LINE)
    target.set_metadata("x", "a")
    switch(database, 0, number, OLD)
    return bench.open


def test_an_answer_of_the_switch_that_was_lost(bench: SpannerRetentionBench) -> None:
    """It is tried again, and finds what it has written."""
    filled(bench)
    real, lost = client.transact, list[bool]()

    def twice(database: Any, work: Any) -> Any:
        if not lost and database.name == connect(bench.url).name and work.__name__ == "work":
            lost.append(real(database, work))
        return real(database, work)

    with mock.patch.object(spanner_schema, "transact", twice):
        reopened = moved(bench)
    assert lost == [True] and everything(reopened())
