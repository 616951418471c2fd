"""Words of the report: any key is one safe line, and settings show nothing secret."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from dpstream.accounting.weights import SelectionWeights
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.report.text import (
    instant,
    key_label,
    plain,
    public_source,
    settings,
    stamp,
    title_of,
    visible,
    window_name,
)
from tests import accounts
from tests.pipelines.sql.visited import with_text


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
    line = job.plan.timeline
    assert line.end is not None
    longer = msgspec.structs.replace(line, end=line.end + line.window)
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
    assert title_of(load_job(job.path)) == "shop"
