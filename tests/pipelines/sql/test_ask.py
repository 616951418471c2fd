"""A statement from the text to the committed answer, on real files."""

import math
from pathlib import Path
from typing import Any

import duckdb
import pytest

from dpstream.accounting.errors import PolicyError, RunError, UsageError
from dpstream.pipelines.sql import ask as asking
from dpstream.pipelines.sql.ask import ask
from dpstream.pipelines.sql.catalog import load_catalog
from dpstream.pipelines.sql.receipt import SqlAnswer
from tests.pipelines.sql.asking import (
    COUNTED,
    OPTIONS,
    charges,
    data_set,
    dp,
    visits,
    without_noise,
)

_ALL = (
    f"page, {COUNTED} AS n, SUM(seconds WITH REPORT, contribution_bounds_per_group => (0, 900)) "
    "AS s, AVG(seconds, contribution_bounds_per_row => (0, 100)) AS a, "
    "MEDIAN(seconds, contribution_bounds_per_row => (0, 100)) AS m, COUNT(DISTINCT uid) AS u"
)
_PUBLIC = "FROM visits AS v RIGHT JOIN (SELECT DISTINCT page FROM pages) AS p ON v.page = p.page "


def _asked(folder: Path, text: str, **more: Any) -> SqlAnswer:
    return ask(load_catalog(folder / "shop.toml"), text, **more)


def _truth(folder: Path, text: str) -> list[tuple[Any, ...]]:
    con = duckdb.connect()
    con.execute(f"CREATE VIEW visits AS SELECT * FROM '{folder}/visits.parquet'")
    try:
        return con.execute(text).fetchall()
    finally:
        con.close()


def test_an_answer_is_near_its_data_and_charged_once(tmp_path: Path) -> None:
    data_set(tmp_path)
    first = _asked(tmp_path, dp(_ALL) + " ORDER BY page")
    again = _asked(tmp_path, "/* again */ " + dp(_ALL).lower() + "\n order by page")
    assert first.charged and not again.charged
    assert again.receipt == first.receipt and again.header == first.header
    [charge] = charges(tmp_path)
    assert (charge.kind, charge.epsilon, charge.delta) == ("sql", 2.0, 1e-9)
    assert charge.mu == first.header.mu and charge.identity.endswith('"uid","type":"int"}')
    exact = dict(_truth(tmp_path, "SELECT page, COUNT(*) FROM visits GROUP BY page"))
    found = first.table.to_pylist()
    assert len(found) >= 8 and [row["page"] for row in found] == sorted(r["page"] for r in found)
    for row, sd in zip(found, first.intervals["n"]["sd"].to_pylist(), strict=True):
        assert abs(row["n"] - exact[row["page"]]) < 6 * sd
        assert row["s_low"] < row["s"] < row["s_high"]
        assert row["m"] is None or 0 <= row["m"] <= 100
    assert "n_low" not in first.table.column_names  # only where WITH REPORT asks for it
    assert set(first.intervals) == {"n", "s", "a", "m", "u"}


def test_without_noise_it_is_duckdb_s_own_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_set(tmp_path)
    without_noise(monkeypatch)
    rest = f"{_PUBLIC} GROUP BY p.page ORDER BY p.page"
    items = _ALL.replace("page,", "p.page,", 1)
    options = (
        "epsilon = 2, delta = 1e-9, max_groups_contributed = 12, max_rows_contributed = 100, "
        "group_selection_strategy = PUBLIC_GROUPS"
    )
    found = _asked(tmp_path, dp(items, rest, options)).table.to_pylist()
    truth = _truth(
        tmp_path,
        "SELECT page, SUM(c), SUM(s), SUM(t) / SUM(k), COUNT(*) FROM (SELECT page, uid, "
        "LEAST(COUNT(*), 30) AS c, LEAST(COALESCE(SUM(seconds), 0), 900) AS s, SUM(seconds) AS t, "
        "COUNT(seconds) AS k FROM visits GROUP BY page, uid) GROUP BY page ORDER BY page",
    )
    own = {row[0]: row[1:] for row in truth}
    assert [row["page"] for row in found] == sorted(f"p{i}" for i in range(12))
    for row in found:
        n, s, a, u = own.get(row["page"], (0, 0, None, 0))
        assert (row["n"], row["u"]) == (n, u)
        assert math.isclose(row["s"], s, abs_tol=1e-9)
        if a is None:
            assert row["a"] is None and row["m"] is None
        else:
            assert math.isclose(row["a"], float(a), rel_tol=1e-6)


def test_shards_and_kinds_of_files_change_no_byte_of_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under one run id (a fixed one), 1 and 5 turns of units and three formats agree."""
    tables = []
    text = dp(_ALL + ", STDDEV(n, contribution_bounds_per_row => (-3, 8)) AS d, SUM(n) AS x, "
              "MAX(seconds) AS hi") + " ORDER BY page"  # fmt: skip
    text = text.replace("max_groups_contributed = 12", "max_groups_contributed = 4")
    text = text.replace("epsilon = 2", "epsilon = 60")
    monkeypatch.setattr(asking.secrets, "token_hex", lambda size: "5a" * size)
    for kind, shards in (("parquet", 1), ("parquet", 5), ("csv", 1), ("jsonl", 3)):
        folder = tmp_path / f"{kind}{shards}"
        folder.mkdir()
        data_set(folder, kind=kind)
        tables.append(_asked(folder, text, shards=shards))
    assert tables[0].header.bounds.keys() == {"x", "hi"} and tables[0].table.num_rows >= 6
    first = tables[0].table.drop_columns([])
    assert all(found.table.equals(first) for found in tables[1:2])
    # Another catalog is another question: noise differs, the columns do not.
    assert all(found.table.schema == first.schema for found in tables[2:])


def test_outer_parts_work_on_released_columns(tmp_path: Path) -> None:
    data_set(tmp_path)
    asked = dp(f"page, {COUNTED} AS n", options=OPTIONS.replace("= 2", "= 60"))
    text = (
        f"SELECT t.title, r.page, r.n, r.n / 2 AS h FROM ({asked}) AS r "
        "JOIN pages AS t ON r.page = t.page WHERE r.n > 10 ORDER BY r.n DESC LIMIT 3"
    )
    found = _asked(tmp_path, text)
    rows = found.table.to_pylist()
    assert [row["page"] for row in rows] == ["p0", "p1", "p2"]
    assert all(row["h"] == row["n"] / 2 for row in rows) and rows[1]["title"] == "Title 1"
    assert set(found.intervals) == {"n"}
    sorted_n = [row["n"] for row in rows]
    assert sorted_n == sorted(sorted_n, reverse=True)


def test_laplace_is_charged_plain_and_needs_no_groups(tmp_path: Path) -> None:
    data_set(tmp_path)
    text = dp(f"{COUNTED} AS n", "FROM visits", "epsilon = 1, mechanism = LAPLACE")
    found = _asked(tmp_path, text)
    [charge] = charges(tmp_path)
    assert (charge.mu, charge.delta, charge.threshold_delta) == (None, 0.0, 0.0)
    assert found.table.num_rows == 1 and abs(found.table["n"][0].as_py() - 4_000) < 1_000


def test_fresh_is_a_new_charge_and_changed_data_another_request(tmp_path: Path) -> None:
    data_set(tmp_path)
    text = dp(f"page, {COUNTED} AS n")
    first, fresh = _asked(tmp_path, text), _asked(tmp_path, text, fresh=True)
    assert fresh.charged and fresh.header.run_id != first.header.run_id
    assert not fresh.table.equals(first.table)
    assert _asked(tmp_path, text).receipt == fresh.receipt  # the last one
    data_set(tmp_path, visits(seed=8))
    assert _asked(tmp_path, text).charged
    assert len(charges(tmp_path)) == 3


def test_nothing_is_charged_for_what_cannot_run_or_is_refused(tmp_path: Path) -> None:
    data_set(tmp_path, epsilon=0.2)
    with pytest.raises(PolicyError):
        _asked(tmp_path, dp(f"page, {COUNTED} AS n"))  # more than epsilon 0.2 at delta 1e-5
    with pytest.raises(UsageError, match="no-dp-select"):
        _asked(tmp_path, "SELECT page FROM visits")
    small = dp("page, SUM(page + 1, contribution_bounds_per_group => (0, 1)) AS s")
    with pytest.raises((RunError, UsageError)) as failed:
        _asked(tmp_path, small.replace("epsilon = 2", "epsilon = 0.01"))
    assert failed.value.__cause__ is None and "page" not in str(failed.value)
    assert charges(tmp_path) == []


def test_a_key_is_needed(tmp_path: Path) -> None:
    path = data_set(tmp_path)
    path.write_text(path.read_text().replace('key_file = "noise.key"', ""))
    with pytest.raises(UsageError, match=r"privacy\.key"):
        _asked(tmp_path, dp(f"page, {COUNTED} AS n"))
    assert charges(tmp_path) == []


def test_ugly_data_never_raises(tmp_path: Path) -> None:
    """Rows that are no rows, numbers that are none: NULL, or not there."""
    data_set(tmp_path, kind="csv")
    ugly = ["x,p0,1,1", "5,p0,nan,2", "6,p0,inf,99999999999999999999", "7,,1e400,", ",p0,3,3",
            "8,p1,-1e308,-9223372036854775808", "9,p0", "1,p0,2,3,4", '"1,p0'] * 2  # fmt: skip
    with open(tmp_path / "visits.csv", "a") as file:
        file.write("\n".join(ugly) + "\n")
    items = (
        f"page, {COUNTED} AS n, SUM(n / (n - 1), contribution_bounds_per_group => (0, 9)) AS d, "
        "SUM(n * n * n * 4611686018427387904, contribution_bounds_per_group => (0, 9)) AS o, "
        "AVG(seconds * 1e300, contribution_bounds_per_group => (0, 9)) AS a"
    )
    assert _asked(tmp_path, dp(items)).table.num_rows >= 5
