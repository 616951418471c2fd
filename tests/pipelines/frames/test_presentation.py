"""A question of a table, in whatever order keys are named and listed, is charged and drawn once."""

import itertools
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa

import dpstream
from tests.pipelines.frames.visits import account, question, visits

TABLE = visits().append_column("day", pa.array([f"d{n % 3}" for n in range(3_000)]))
TABLE = TABLE.append_column("hour", pa.array([n % 2 for n in range(3_000)]))
KEY = ("page", "day", "hour")


def _cells(answer: Any, figure: str) -> dict[tuple[Any, ...], Any]:
    """By values of the key, in its fixed order, the figure with its interval."""
    names = [name for name in answer.table.column_names if name.startswith(figure)]
    return {
        tuple(row[name] for name in KEY): tuple(row[name] for name in names)
        for row in answer.table.to_pylist()
    }


def test_the_order_of_keys_is_no_part_of_the_question(tmp_path: Path) -> None:
    paid = account(tmp_path)
    arguments: dict[str, Any] = {"unit": "user", "epsilon": 8.0, "max_keys": 12, **paid}
    first = dpstream.count(TABLE, key=KEY, **arguments)
    assert first.charged and len(first) > 20
    for order in itertools.permutations(KEY):
        answer = dpstream.count(TABLE, key=list(order), **arguments)
        assert answer.receipt == first.receipt and (order == KEY) == (answer.table == first.table)
        assert answer.table.column_names[:3] == list(order)
        rows = [tuple(row.values())[:3] for row in answer.table.to_pylist()]
        assert rows == sorted(rows) and _cells(answer, "count") == _cells(first, "count")
    assert not dpstream.count(TABLE, key=KEY, **arguments).charged
    assert dpstream.count(TABLE, key=KEY[:2], **arguments).charged


def test_the_way_in_which_public_keys_are_given_is_no_part_of_the_question() -> None:
    rows = [{"page": f"p{n}", "day": "d1", "hour": n % 2} for n in range(6)]
    digests = set()
    for order in itertools.permutations(KEY):
        listed = [{name: row[name] for name in order} for row in (*rows[::-1], *rows)]
        for public in (pa.Table.from_pylist(listed), pd.DataFrame(listed), pl.DataFrame(listed)):
            digests.add(question(TABLE, key=list(order), public_keys=public)[0].digest)
    assert len(digests) == 1
    other = pa.Table.from_pylist(rows[1:])
    assert question(TABLE, key=list(KEY), public_keys=other)[0].digest not in digests


def test_numbers_are_what_they_are_however_they_are_written() -> None:
    given: dict[str, Any] = {"kind": "sum", "value": "seconds", "key": "page"}
    written = [
        question(TABLE, **given, bounds=bounds, epsilon=epsilon)[0].digest
        for bounds in ((0, 100), [0.0, 1e2], pa.array([0, 100]).to_numpy())
        for epsilon in (1, 1.0, pa.scalar(1.0).as_py())
    ]
    assert len(set(written)) == 1


def test_a_far_day_leaves_the_others_of_its_column_as_they_are() -> None:
    days = [19_756, 2**31 - 1, 3_789_548]
    rows = 900
    table = pa.table(
        {
            "user": list(range(rows)),
            "day": pa.array([days[n % 3] for n in range(rows)], pa.int32()).cast(pa.date32()),
        }
    )
    answer = dpstream.histogram(table, unit="user", key="day", epsilon=8.0)
    assert len(answer) == 3
    texts = [line.split()[0] for line in repr(answer).splitlines()[-3:]]
    assert texts == ["2024-02-03", "+12345-06-07", "infinity"]
    frame = answer.to_pandas()
    assert list(frame.columns) == answer.table.column_names
    assert [str(day) for day in frame["day"]] == texts
    near = answer.table.slice(0, 1)
    assert frame["units"].tolist()[:1] == near["units"].to_pylist()
