"""Words of the report: any key is one safe line, and settings show nothing secret.

The table of all keys: its rows, its first rows without a script, and what it says it holds.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dpstream.accounting.weights import SelectionWeights
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.report.data import collect, gathered, inventory, value_schema
from dpstream.pipelines.report.text import (
    FIRST_ROWS,
    KEY_TEXT,
    Column,
    instant,
    key_label,
    plain,
    public_source,
    rows_text,
    settings,
    stamp,
    table,
    title_of,
    visible,
    window_name,
    with_error,
)
from tests import accounts
from tests.pipelines.sql.visited import with_text
from tests.reports import edit, put, row


@pytest.mark.parametrize(
    ("text", "rendered"),
    [
        ("abc", "abc"),
        ("a\nb", "a\\u000ab"),
        ("\u202ex", "\\u202ex"),
        ("x" * 6, "xxxxx… (6 characters)"),
    ],
)
def test_any_text_is_one_line(text: str, rendered: str) -> None:
    assert visible(text, 5) == rendered


def test_keys_of_several_columns() -> None:
    row = {"a": b"\x00\xff", "b": "", "c": 7}
    assert key_label(row, ["a", "b", "c"]) == "0x00ff · (empty text) · 7"


@pytest.mark.parametrize(
    ("micros", "text"),
    [(0, "1970-01-01 UTC"), (60_000_000, "1970-01-01 00:01 UTC"),
     (1_000_000, "1970-01-01 00:00:01 UTC"), (1 << 62, f"{1 << 62} µs")],
)  # fmt: skip
def test_instants(micros: int, text: str) -> None:
    assert instant(micros) == text


def test_settings_have_no_path_and_no_key(make_job: Callable[..., Job]) -> None:
    job = make_job()
    rows = dict(settings(job, job.plan))
    assert rows["contributions"] == "4" and rows["start"] == "2024-01-01 UTC"
    assert rows["secret"].startswith("INSECURE") and rows["aggregate total: kind"] == "sum"
    text = " ".join(rows.values())
    assert "0f0f" not in text and str(job.state.path) not in text
    assert window_name(job.plan.timeline, 0) == "2024-01-01 UTC to 2024-01-02 UTC"


def test_what_a_job_leaves_open_is_shown_as_its_run_has_it(make_job: Callable[..., Job]) -> None:
    job, weights = make_job(), SelectionWeights(3.0, 0.5)
    privacy = msgspec.structs.replace(job.plan.privacy, weights=weights)
    timeline = job.plan.timeline
    assert timeline.end is not None
    longer = msgspec.structs.replace(timeline, end=timeline.end + timeline.window)
    now = msgspec.structs.replace(job.plan, privacy=privacy, timeline=longer)
    other = msgspec.structs.replace(
        now, privacy=msgspec.structs.replace(privacy, skip=False), remember="never"
    )
    for plan, earlier_keys, skip in (
        (now, "published from the window's start, for the run", "yes"),
        (other, "not known", "no"),
    ):
        rows = dict(settings(job, plan))
        assert rows["keys of earlier windows"] == earlier_keys and rows["mechanism.skip"] == skip
        assert "privacy.usual_weights" not in rows and "3" in rows["mechanism.weights"]


def test_a_query_is_shown_by_its_digest_alone(tmp_path: Path) -> None:
    job = with_text(tmp_path, "SELECT page, n AS x FROM visits WHERE page <> 'Quitte'")
    rows = dict(settings(job, job.plan))
    assert rows["query of rows, digest"] == job.plan.query and "Quitte" not in str(rows)


def test_times_for_programs() -> None:
    assert stamp(0) == "1970-01-01T00:00:00Z" and stamp(1_500_000) == "1970-01-01T00:00:01.500000Z"
    assert stamp(1 << 62) == str(1 << 62)


def test_a_column_as_it_is() -> None:
    assert plain("") == "" and plain(b"\x00") == "0x00" and plain("a\n") == "a\\u000a"


@pytest.mark.parametrize(
    ("name", "rendered"),
    [
        ("csv:/home/somebody/private/week.csv", "csv:week.csv"),
        ("parquet:../in/*.parquet", "parquet:*.parquet"),
        ("folder:gs://bucket/of/somebody/", "folder:somebody"),
        ("csv:C:\\Users\\somebody\\week.csv", "csv:week.csv"),
        ("kafka:visits", "kafka:visits"),
        ("pubsub:projects/p/subscriptions/s", "pubsub:projects/p/subscriptions/s"),
    ],
)
def test_sources_without_their_paths(name: str, rendered: str) -> None:
    assert public_source(name) == rendered


def test_titles(make_job: Callable[..., Job]) -> None:
    assert title_of(make_job()) == "csv files"
    assert title_of(make_job(pattern="in/week.csv")) == "week.csv"
    job = make_job()
    account = 'account = { path = "a.db", limit = { epsilon = 9.0, delta = 1e-6 } }'
    text = job.path.read_text()
    assert "\n\n[table." in text
    accounts.write(job.path, text.replace("\n\n[table.", f"\n{account}\n\n[table."))
    assert title_of(load_job(job.path)).startswith("shop / ")


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
