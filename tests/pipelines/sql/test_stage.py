"""Shards of units and formats of files decide nothing.

What is done with released columns.
"""

import secrets
from pathlib import Path
from typing import cast

import pytest

from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.pipelines.runners.bounded import Runner
from dpstream.pipelines.sql.stage import MAX_SHARDS, LocalShards
from dpstream.pipelines.tables.engine import Engine, MemoryLimitError
from tests.pipelines.sql.asking import ALL, COUNTED, KEY, OPTIONS, answer_to, data_set, dp


def test_shards_and_kinds_of_files_change_no_byte_of_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under one run id (a fixed one), 1 and 5 turns of units and three formats agree."""
    tables = []
    text = dp(ALL + ", STDDEV(n, contribution_bounds_per_row => (-3, 8)) AS d, SUM(n) AS x, "
              "MAX(seconds) AS hi") + " ORDER BY page"  # fmt: skip
    text = text.replace("max_groups_contributed = 12", "max_groups_contributed = 4")
    text = text.replace("epsilon = 2", "epsilon = 60")
    monkeypatch.setattr(secrets, "token_hex", lambda size: "5a" * size)
    for kind, shards in (("parquet", 1), ("parquet", 5), ("csv", 1), ("jsonl", 3)):
        folder = tmp_path / f"{kind}{shards}"
        folder.mkdir()
        data_set(folder, kind=kind)
        tables.append(answer_to(folder, text, shards=shards))
    assert tables[0].header.bounds.keys() == {"x", "hi"} and tables[0].table.num_rows >= 6
    first = tables[0].table.drop_columns([])
    assert all(answer.table.equals(first) for answer in tables[1:2])
    # Another catalog is another question: noise differs, the columns do not.
    assert all(answer.table.schema == first.schema for answer in tables[2:])


def test_turns_grow_fourfold_and_end_at_the_most() -> None:
    turns, tried = LocalShards(cast(Engine, None), KeyRing(bytes.fromhex(KEY)), 1), []

    def once() -> None:
        tried.append(turns._shards)
        raise MemoryLimitError("memory", "is too small", "give more")

    with pytest.raises(MemoryLimitError):
        turns._fitted(once)
    assert tried == [1, 4, 16, 64, 256, 1024, MAX_SHARDS] and MAX_SHARDS == 4_096


def test_outer_parts_work_on_released_columns(tmp_path: Path) -> None:
    data_set(tmp_path)
    inner = dp(f"page, {COUNTED} AS n", options=OPTIONS.replace("= 2", "= 60"))
    text = (
        f"SELECT t.title, r.page, r.n, r.n / 2 AS h FROM ({inner}) AS r "
        "JOIN pages AS t ON r.page = t.page WHERE r.n > 10 ORDER BY r.n DESC LIMIT 3"
    )
    answer = answer_to(tmp_path, text)
    rows = answer.table.to_pylist()
    assert [row["page"] for row in rows] == ["p0", "p1", "p2"]
    assert all(row["h"] == row["n"] / 2 for row in rows) and rows[1]["title"] == "Title 1"
    assert set(answer.intervals) == {"n"}
    sorted_n = [row["n"] for row in rows]
    assert sorted_n == sorted(sorted_n, reverse=True)


_LAPLACE = "epsilon = 20, delta = 1e-9, max_groups_contributed = 2, mechanism = GEOMETRIC"
_PUBLIC = OPTIONS + ", group_selection_strategy = PUBLIC_GROUPS"
_ROWS = "(SELECT * FROM visits WHERE {where}) AS v"
#: Statements of every kind, on some rows or on none.
_EMPTIED = {
    "no groups": dp("SUM(n) AS s, MIN(seconds) AS lo, COUNT(DISTINCT uid) AS u", f"FROM {_ROWS}",
                    "epsilon = 2, delta = 1e-9"),
    "thresholds": dp(f"page, seconds > 1 AS late, {COUNTED} AS n, COUNT(DISTINCT uid) AS u",
                     f"FROM {_ROWS} GROUP BY page, late"),
    "every function": dp(
        "page, SUM(seconds WITH REPORT, contribution_bounds_per_group => (0, 9)) AS s, "
        "AVG(seconds, contribution_bounds_per_row => (0, 9)) AS a, "
        "STDDEV(seconds, contribution_bounds_per_row => (0, 9)) AS d, "
        "MEDIAN(seconds, contribution_bounds_per_row => (0, 9)) AS m, "
        "APPROX_QUANTILES(seconds, 4, contribution_bounds_per_row => (0, 9)) AS q",
        f"FROM {_ROWS} GROUP BY page HAVING s > 1 ORDER BY page LIMIT 3"),
    "bounds": dp("page, SUM(seconds) AS s, MAX(seconds) AS hi, AVG(n) AS a",
                 f"FROM {_ROWS} GROUP BY page"),
    "geometric": dp(f"page, {COUNTED} AS n, COUNT(DISTINCT uid) AS u",
                  f"FROM {_ROWS} GROUP BY page", _LAPLACE),
    "laplace bounds": dp("page, SUM(n) AS s, COUNT(DISTINCT uid) AS u",
                         f"FROM {_ROWS} GROUP BY page", _LAPLACE),
    "a norm": dp(f"page, {COUNTED} AS n", f"FROM {_ROWS} GROUP BY page",
                 "epsilon = 2, delta = 1e-9, contribution_norm = 4"),
    "public groups": dp("p.page, MEDIAN(v.seconds, contribution_bounds_per_row => (0, 9)) AS m",
                        f"FROM {_ROWS} RIGHT JOIN (SELECT DISTINCT page FROM pages) AS p "
                        "ON v.page = p.page GROUP BY p.page", _PUBLIC),
    "no public groups": dp(f"p.page, {COUNTED} AS n",
                           f"FROM {_ROWS} RIGHT JOIN (SELECT DISTINCT page FROM pages "
                           "WHERE title = 'none') AS p ON v.page = p.page GROUP BY p.page",
                           _PUBLIC),
}  # fmt: skip


@pytest.mark.parametrize("kind", _EMPTIED)
def test_a_relation_without_rows_is_answered_as_any_other(kind: str, tmp_path: Path) -> None:
    """An error would tell whether the one row is there that a condition asks for."""
    data_set(tmp_path, epsilon=1e3)
    text = _EMPTIED[kind]
    full = answer_to(tmp_path, text.format(where="uid >= 0"), shards=2)
    none = answer_to(tmp_path, text.format(where="uid = -1"), shards=2)
    assert none.table.schema == full.table.schema
    assert {name: table.schema for name, table in none.intervals.items()} == {
        name: table.schema for name, table in full.intervals.items()
    }
    if kind in ("thresholds", "every function", "no public groups"):
        assert none.table.num_rows == 0


def test_nor_do_workers_fail_without_a_row(tmp_path: Path) -> None:
    data_set(tmp_path)
    text = _EMPTIED["every function"].format(where="uid = -1")
    answer = answer_to(tmp_path, text, runner=Runner("DirectRunner"), shards=2)
    assert answer.table.num_rows == 0 and "page" in answer.table.column_names


@pytest.mark.parametrize(
    "order",
    ["CAST(page AS INT64)", "1 / (n - n)", "EXP(1e9 * n)", "page", "1", "n * 9e307 * 10 DESC",
     "LOG(n - n, 0)", "CAST(CAST(page AS DATE) AS STRING), n DESC"],
)  # fmt: skip
def test_an_order_that_fails_is_no_order(order: str, tmp_path: Path) -> None:
    """After the charge nothing may fail: what was paid for is seen."""
    data_set(tmp_path)
    options = OPTIONS.replace("= 2", "= 60")
    inner = dp(f"page, {COUNTED} AS n", options=options)
    assert answer_to(tmp_path, f"{inner} ORDER BY {order}").table.num_rows >= 6
    outside = f"SELECT r.page, r.n FROM ({inner}) AS r ORDER BY {order}"
    assert answer_to(tmp_path, outside).table.num_rows >= 6


def test_an_outer_query_that_groups_is_ordered(tmp_path: Path) -> None:
    data_set(tmp_path)
    inner = dp(f"page, {COUNTED} AS n", options=OPTIONS.replace("= 2", "= 60"))
    text = (
        f"SELECT t.title, SUM(r.n) AS n FROM ({inner}) AS r JOIN pages AS t ON r.page = t.page "
        "GROUP BY t.title ORDER BY "
    )
    orders = ("n DESC", "SUM(r.n) DESC", "CAST(t.title AS INT64), n DESC")
    tables = {order: answer_to(tmp_path, text + order).table.to_pylist() for order in orders}
    rows = tables["n DESC"]
    assert [row["n"] for row in rows] == sorted((row["n"] for row in rows), reverse=True)
    assert {row["title"] for row in rows} == {"Title 0", "Title 1", "Title 2"}
    assert [len(rows) for rows in tables.values()] == [3, 3, 3]
