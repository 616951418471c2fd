"""Sums of digests: every column of every row counts, in any order."""

from collections.abc import Iterator
from typing import Any

import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.state.ledger.events import COLUMNS, sum_of, sum_without
from dpstream.state.ledger.sqlite import DDL, check_file, put_seal, read_seal, rows_of
from dpstream.state.sqlite.database import sqlite3

ROWS: dict[str, list[tuple[Any, ...]]] = {
    "entries": [(1, None, "{}", "00"), (2, "b", "{}", "11")],
    "tokens": [("a", "t", None), ("b", "t", "s")],
    "requests": [
        ("a", "q", b"", None, None, None, None),
        ("b", "q", b"g", b"\xff", "22", b"v", "33"),
    ],
}


@pytest.fixture
def db() -> Iterator[sqlite3.Connection]:
    made = sqlite3.connect(":memory:")
    made.executescript(DDL)
    for table, rows in ROWS.items():
        for row in rows:
            made.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)
    yield made
    made.close()


@pytest.mark.parametrize("table", COLUMNS)
def test_every_column_of_every_row_counts(db: sqlite3.Connection, table: str) -> None:
    rows = ROWS[table]
    table_sum = sum_of(table, rows)
    assert table_sum == sum_of(table, reversed(rows)) == sum_of(table, rows_of(db, table))
    assert sum_of(table, rows[1:], sum_of(table, rows[:1])) == table_sum
    assert sum_without(table, rows[1:], table_sum) == sum_of(table, rows[:1])
    seen = {
        table_sum,
        sum_of(table, rows[:1]),
        sum_of(table, rows[1:]),
        sum_of(table, [*rows, rows[0]]),
    }
    for number, row in enumerate(rows):
        for column, value in enumerate(row):
            for other in {0, 3, "", "x", b"", None} - {value}:
                changed = [*rows]
                changed[number] = (*row[:column], other, *row[column + 1 :])
                seen.add(sum_of(table, changed))
    cells = [value for row in rows for value in row]
    assert len(seen) == 4 + sum(len({0, 3, "", "x", b"", None} - {value}) for value in cells)
    other = next(name for name in COLUMNS if name != table)
    assert sum_of(other, rows) != table_sum  # nor does a row stand for one of another table


def test_a_seal_is_read_as_it_was_put(db: sqlite3.Connection) -> None:
    put_seal(db)
    sums = read_seal(db)
    assert sums == {table: sum_of(table, rows) for table, rows in ROWS.items()}
    moved = {**sums, "tokens": 7}
    put_seal(db, moved)
    assert read_seal(db) == moved


@pytest.mark.parametrize("seal", ["", "x", "0" * 32, None, "DIGIT", "SWAPPED"])
def test_another_seal_is_damage(db: sqlite3.Connection, seal: str | None) -> None:
    put_seal(db)
    ((text,),) = db.execute("SELECT value FROM account_meta")
    one, two, *rest = text.split(" ")
    changed = {"DIGIT": f"{'1' if text[0] == '0' else '0'}{text[1:]}",
               "SWAPPED": " ".join([two, one, *rest])}  # fmt: skip
    if seal is None:
        db.execute("DELETE FROM account_meta")
    else:
        db.execute("UPDATE account_meta SET value = ?", (changed.get(seal, seal),))
    with pytest.raises(PolicyError, match="is damaged"):
        read_seal(db)


def test_a_text_that_is_none_any_more_is_damage() -> None:
    with pytest.raises(PolicyError, match="is damaged"):
        sum_of("tokens", [("a", "\udc80", None)])


def test_pages(db: sqlite3.Connection) -> None:
    db.execute("INSERT INTO account_meta VALUES ('version', '1')")
    check_file(db)
