"""PEP 249 on private answers."""

from pathlib import Path
from typing import Any

import pytest

import dpstream
from dpstream.accounting.errors import UsageError
from dpstream.pipelines.sql import dbapi
from tests.pipelines.sql.asking import COUNTED, charges, data_set, dp

_TEXT = dp(f"page, {COUNTED} AS n") + " ORDER BY page"


def test_rows_by_every_way(tmp_path: Path) -> None:
    path = data_set(tmp_path)
    with dpstream.connect(path) as connection:
        cursor = connection.cursor()
        assert (cursor.description, cursor.rowcount) == (None, -1)
        assert cursor.execute(_TEXT) is cursor
        table = cursor.fetch_arrow_table()
        assert [part[0] for part in cursor.description or ()] == ["page", "n"]
        assert cursor.rowcount == table.num_rows >= 3
        rows = [tuple(row.values()) for row in table.to_pylist()]
        assert cursor.fetchone() == rows[0]
        assert cursor.fetchmany(2) == rows[1:3] and cursor.fetchall() == rows[3:]
        assert cursor.fetchone() is None
        assert list(connection.execute(_TEXT)) == rows
        assert cursor.answer is not None and cursor.answer.header.epsilon == 2.0
        receipts = []
        ways: list[dict[str, Any]] = [{}, {"as_of": "May"}, {"as_of": "May"}, {"fresh": True}]
        for how in ways:
            answer = cursor.execute(_TEXT, **how).answer
            assert answer is not None
            receipts.append((answer.charged, answer.digest))
    assert [charged for charged, _ in receipts] == [False, True, False, True]
    assert receipts[2][1] == receipts[1][1] and len({digest for _, digest in receipts}) == 3
    assert len(charges(tmp_path)) == 3
    assert (dbapi.apilevel, dbapi.paramstyle) == ("2.0", "qmark")
    with pytest.raises(UsageError):
        cursor.fetchall()


def test_explain_and_refusals(tmp_path: Path) -> None:
    connection = dpstream.connect(data_set(tmp_path))
    cursor = connection.execute("explain " + _TEXT)
    assert "SELECT" in cursor.fetchall()[0][0] and cursor.answer is None
    with pytest.raises(UsageError):
        cursor.execute(_TEXT, (1,))
    with pytest.raises(UsageError):
        cursor.executemany(_TEXT, [(1,)])
    with pytest.raises(UsageError):
        connection.cursor().fetchone()
    with pytest.raises(dbapi.Error):
        cursor.execute("DROP TABLE visits")
    assert charges(tmp_path) == []
    connection.close()
    with pytest.raises(UsageError):
        connection.cursor()
