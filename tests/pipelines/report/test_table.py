"""The table of all keys: its rows, its first rows without a script, and what it says it holds."""

from collections.abc import Callable

import numpy as np

from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.report.data import collect, gathered, inventory, value_schema
from dpstream.pipelines.report.table import (
    FIRST_ROWS,
    KEY_TEXT,
    Column,
    rows_text,
    table,
    with_error,
)
from tests.reports import edit, put, row

MakeJob = Callable[..., Job]
COLUMNS = [Column("records", "records", "records_sd"), Column("total", "total", "total_sd")]


def test_values_with_their_errors() -> None:
    assert with_error(None, 1.0) == with_error(1.0, None) == with_error(np.nan, 1.0) == "–"
    assert with_error(100.0, 10.0) == "100 ± 19.6"


def test_rows_of_a_run(make_job: MakeJob) -> None:
    job = edit(make_job(), ('end = "2024-01-02', 'end = "2024-01-04'))
    put(job, 4, [row("a", 1234.56789), row("b", 5.0)], window=0)
    put(job, 4, [{**row("a", 20.0), "total": None}], window=2)
    keys = collect(job.plan, inventory(job)).all_keys
    key_table = table(job.plan.key, keys, job.plan.timeline, COLUMNS, "keys.csv")
    data = key_table.data
    assert data["keys"] == [("a",), ("b",)] and data["names"] == ["key"] and data["texts"] == [True]
    assert data["key"] == [0, 0, 1] and data["window"] == [0, 1, 0]
    assert data["starts"] == ["2024-01-01 UTC", "2024-01-03 UTC"]
    assert data["ends"] == ["2024-01-02 UTC", "2024-01-04 UTC"]
    assert data["from"][1] == "2024-01-03T00:00:00Z" and data["to"][0] == "2024-01-02T00:00:00Z"
    assert data["columns"][0]["values"] == [1234.5679, 20.0, 5.0]
    assert data["columns"][1] == {
        "title": "total", "values": [3703.7037, None, 15.0], "sds": [10.0, 10.0, 10.0],
    }  # fmt: skip
    assert key_table.first[0] == (["a"], "2024-01-03 UTC", ["20 ± 9.8", "–"])
    assert [key for key, _, _ in key_table.first] == [["a"], ["b"]]
    assert key_table.caption == "All 2 keys with all their 3 values."


def test_texts_are_cut_and_rows_in_the_page_few(make_job: MakeJob) -> None:
    job = make_job()
    put(job, 1, [row(f"{i:03}" + "k" * 300, 10.0) for i in range(40)])
    keys = collect(job.plan, inventory(job)).all_keys
    key_table = table(job.plan.key, keys, job.plan.timeline, COLUMNS, "keys.csv")
    assert len(key_table.first) == FIRST_ROWS and len(key_table.data["keys"]) == 40
    assert all(len(text) < KEY_TEXT + 30 for [text] in key_table.data["keys"])
    assert key_table.data["keys"][0][0].endswith("(303 characters)")


def test_an_empty_key_is_shown_by_name_and_saved_empty(make_job: MakeJob) -> None:
    job = make_job()
    put(job, 1, [row("", 50.0)])
    keys = collect(job.plan, inventory(job)).all_keys
    key_table = table(job.plan.key, keys, job.plan.timeline, COLUMNS, "keys.csv")
    assert key_table.data["keys"] == [("",)] and key_table.first[0][0] == ["(empty text)"]


def test_what_is_left_out_is_said(make_job: MakeJob) -> None:
    job = make_job()
    put(job, 4, [row(f"{i}", 10.0 + i) for i in range(10)])
    group = inventory(job).releases

    def parts() -> list[tuple[int, object]]:
        from dpstream.pipelines.report.data import newest

        return [(0, part) for part in newest(job.plan, group)]

    keys = gathered(parts(), parts(), ["key"], "records", value_schema(job.plan), 4)  # type: ignore[arg-type]
    words = rows_text(keys)
    assert "The 4 busiest of 10 keys" in words and "4 of 10 values" in words
    assert "at least" not in words and "at least 10 keys" in rows_text(keys._replace(exact=False))
