"""What is done with released columns."""

from pathlib import Path

from tests.pipelines.sql.asking import COUNTED, OPTIONS, asked, data_set, dp


def test_outer_parts_work_on_released_columns(tmp_path: Path) -> None:
    data_set(tmp_path)
    inner = dp(f"page, {COUNTED} AS n", options=OPTIONS.replace("= 2", "= 60"))
    text = (
        f"SELECT t.title, r.page, r.n, r.n / 2 AS h FROM ({inner}) AS r "
        "JOIN pages AS t ON r.page = t.page WHERE r.n > 10 ORDER BY r.n DESC LIMIT 3"
    )
    found = asked(tmp_path, text)
    rows = found.table.to_pylist()
    assert [row["page"] for row in rows] == ["p0", "p1", "p2"]
    assert all(row["h"] == row["n"] / 2 for row in rows) and rows[1]["title"] == "Title 1"
    assert set(found.intervals) == {"n"}
    sorted_n = [row["n"] for row in rows]
    assert sorted_n == sorted(sorted_n, reverse=True)
