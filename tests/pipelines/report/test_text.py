"""Words of the report: any key is one safe line, and settings show nothing secret."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.report.text import instant, key_label, settings, visible, window_name
from tests.pipelines.sql.visited import with_text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("abc", "abc"),
        ("a\nb", "a\\u000ab"),
        ("\u202ex", "\\u202ex"),
        ("x" * 6, "xxxxx… (6 characters)"),
    ],
)
def test_any_text_is_one_line(text: str, shown: str) -> None:
    assert visible(text, 5) == shown


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
    rows = dict(settings(job))
    assert rows["privacy.contributions"] == "4" and rows["time.start"] == "2024-01-01 UTC"
    assert rows["privacy key"].startswith("INSECURE") and rows["aggregate total: kind"] == "sum"
    said = " ".join(rows.values())
    assert "0f0f" not in said and str(job.state.path) not in said
    assert window_name(job.plan.timeline, 0) == "2024-01-01 UTC to 2024-01-02 UTC"


def test_a_query_is_shown_by_its_digest_alone(tmp_path: Path) -> None:
    job = with_text(tmp_path, "SELECT page, n AS x FROM visits WHERE page <> 'Quitte'")
    rows = dict(settings(job))
    assert rows["query of rows, digest"] == job.plan.query and "Quitte" not in str(rows)
