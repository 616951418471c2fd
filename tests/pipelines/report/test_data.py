"""What the report reads: newest values, bounded samples, and the truth row by row.

Which keys and rows a page holds: the busiest, each key's newest, and no more than the rule.

What a report reads of releases: the newest row of each key, and no foreign releases.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dpstream.pipelines.formats import encodings as sink_formats
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.render.charts import LINE_POINTS, drawn_positions, lines
from dpstream.pipelines.report import data as module
from dpstream.pipelines.report import data as report_data
from dpstream.pipelines.report.data import (
    PAGE_NUMBERS,
    Keys,
    collect,
    gathered,
    inventory,
    most_rows,
    newest,
    newest_of_each,
)
from dpstream.pipelines.report.report import TRUTH_LABEL, build
from tests.fixed_runs import fix_run_id
from tests.reports import RUN, check_page, edit, execute, put, report, row

MakeJob = Callable[..., Job]


@pytest.fixture(autouse=True)
def keep_logging() -> Iterator[None]:
    """The command line silences the process's logs; other tests need theirs."""
    yield
    logging.disable(logging.NOTSET)


def values_of(job: Job) -> dict[str, float]:
    listing = inventory(job)
    table = pa.concat_tables(newest(job.plan, listing.releases))
    return dict(zip(table["key"].to_pylist(), table["records"].to_pylist(), strict=True))


def test_newest_values_between_refreshes(make_job: MakeJob) -> None:
    job = edit(make_job(), ("contributions = 4", "contributions = 4\nmechanism.refresh_every = 2"))
    put(job, 1, [row("early", 1.0)])
    put(job, 2, [row("early", 2.0), row("mid", 2.0)])
    put(job, 3, [row("late", 3.0)])
    assert values_of(job) == {"early": 2.0, "mid": 2.0, "late": 3.0}
    findings = collect(job.plan, inventory(job))
    assert findings.keys.tolist() == [3] and findings.last_trigger.tolist() == [3]
    assert [t["trigger"].to_pylist() for t in findings.series] == [[3], [1, 2], [2]]


SCHEMA = pa.schema([("k", pa.string()), ("n", pa.float64()), ("n_sd", pa.float64())])
#: Values of each key by window.
VALUES: dict[str, dict[int, float | None]] = {
    "big": {0: 100.0, 1: 90.0, 2: 110.0},
    "mid": {0: 50.0, 2: 40.0},
    "late": {2: 60.0},
    "early": {0: 30.0, 1: 20.0},
    "none": {1: None},
}


def parts() -> Iterator[tuple[int, pa.Table]]:
    """Each window in two parts."""
    for window in (0, 1, 2):
        rows = [
            {"k": key, "n": counts[window], "n_sd": 1.0}
            for key, counts in VALUES.items()
            if window in counts
        ]
        for part in (rows[:1], rows[1:]):
            yield window, pa.Table.from_pylist(part, SCHEMA)


def keys_of(limit: int) -> Keys:
    return gathered(parts(), parts(), ["k"], "n", SCHEMA, limit)


def rows_of(keys: Keys) -> list[tuple[str, int, float | None]]:
    names = keys.ranked["k"].to_pylist()
    return [(names[row["_key"]], row["_window"], row["n"]) for row in keys.rows.to_pylist()]


def test_all_rows_where_there_is_room() -> None:
    keys = keys_of(100)
    assert keys.ranked["k"].to_pylist() == ["big", "mid", "late", "early", "none"]
    assert keys.ranked["_windows"].to_pylist() == [3, 2, 1, 2, 1]
    assert (keys.complete, keys.distinct, keys.exact, keys.values) == (5, 5, True, 9)
    want = [(k, w, v) for k in keys.ranked["k"].to_pylist() for w, v in sorted(VALUES[k].items())]
    assert rows_of(keys) == want


@pytest.mark.parametrize("limit", range(1, 10))
def test_the_newest_of_each_before_all_of_the_busiest(limit: int) -> None:
    keys, every = keys_of(limit), keys_of(100)
    names = every.ranked["k"].to_pylist()[:limit]
    assert keys.ranked["k"].to_pylist() == names
    assert keys.rows.num_rows <= limit and keys.distinct == 5 and keys.values == 9
    wanted = [
        (key, window, value)
        for place, key in enumerate(names)
        for window, value in sorted(VALUES[key].items())
        if place < keys.complete or window == max(VALUES[key])
    ]
    assert rows_of(keys) == wanted
    # One more key with all of its windows would be too many.
    if keys.complete < len(names):
        more = len(VALUES[names[keys.complete]]) - 1
        assert keys.rows.num_rows + more > limit


def test_newest_rows_of_complete_windows() -> None:
    """A key's newest row of a complete window; of a key without one its newest row."""
    rows = pa.table({"_key": [0, 0, 0, 1, 1, 2], "_window": [0, 1, 2, 1, 2, 2]})
    keys = Keys(rows.slice(0, 0), rows, 3, 3, True, 6)
    complete = np.array([True, True, False, False, False, False])
    assert newest_of_each(keys, complete).tolist() == [1, 4, 5]
    assert newest_of_each(keys).tolist() == [2, 4, 5]


def test_newest_rows() -> None:
    keys = keys_of(100)
    newest = keys.rows.take(newest_of_each(keys))
    assert newest["_window"].to_pylist() == [2, 2, 2, 1, 1]
    assert newest["_key"].to_pylist() == [0, 1, 2, 3, 4]
    nothing = gathered(iter(()), iter(()), ["k"], "n", SCHEMA, 10)
    assert len(newest_of_each(nothing)) == 0 and nothing.distinct == nothing.complete == 0


def test_keys_beyond_those_held_are_the_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HELD_KEYS", 2)
    keys = keys_of(100)
    assert not keys.exact and keys.ranked["k"].to_pylist()[0] == "big"
    assert keys.ranked["_total"].to_pylist()[0] == 300.0


def test_a_page_holds_so_many_numbers() -> None:
    assert most_rows(1) == PAGE_NUMBERS // 2 and most_rows(12) == PAGE_NUMBERS // 24
    rng = np.random.default_rng(0)
    names = [f"key {i}" for i in range(1000)]

    def many() -> Iterator[tuple[int, pa.Table]]:
        for window in range(100):
            values = {"k": names, "n": rng.random(1000), "n_sd": np.ones(1000)}
            yield window, pa.table(values, SCHEMA)

    keys = gathered(many(), many(), ["k"], "n", SCHEMA, most_rows(4))
    assert keys.ranked.num_rows == 1000 and keys.values == 100_000
    assert (
        keys.rows.num_rows
        == 1000 + 99 * keys.complete
        <= most_rows(4)
        < 1000 + 99 * (keys.complete + 1)
    )


START = datetime(2024, 1, 1, tzinfo=UTC)


def test_large_releases_are_read_in_parts(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = make_job()
    rows = [row(f"{i:04}", 10.0 + i) for i in range(1000)]
    put(job, 1, rows)
    figures = report(job, tmp_path)[2]
    monkeypatch.setattr(sink_formats, "PART_ROWS", 64)
    path = next(Path(job.sink.path).rglob("window-*/*.parquet"))
    parts = list(sink_formats.read_parts(path, pa.schema([("records", pa.float64())])))
    assert len(parts) == 16 and max(p.num_rows for p in parts) == 64
    assert parts[0].schema.names == ["records"]
    again = report(job, tmp_path)[2]
    assert again["busiest"] == figures["busiest"] and figures["busiest"][0]["key"] == "0999"
    assert again["releases"] == figures["releases"]
    values, _ = report_data.collect(job.plan, inventory(job)).scatter["records"]
    assert len(values) == report_data.POINTS and values.max() == 1009.0


def test_thinning_keeps_the_largest_and_the_range() -> None:
    values = np.arange(-500.0, 10_000.0)
    points, sds = report_data.thin(values, values + 1, 400)
    assert len(points) == 400 and (sds == points + 1).all()
    assert set(range(9_900, 10_000)) <= set(points) and np.abs(points).min() == 0
    assert report_data.thin(values[:5], values[:5], 400)[0].tolist() == [-500, -499, -498, -497, -496]  # fmt: skip  # noqa: E501
    assert report_data.evenly(0, 5).tolist() == [] and report_data.evenly(3, 5).tolist() == [0, 1, 2]  # fmt: skip  # noqa: E501
    few = report_data.evenly(1_000_000, 400)
    assert len(few) == 400 and few[0] == 0 and few[-1] == 999_999


def test_long_lines_keep_their_extremes() -> None:
    values = np.full(100_000, 5.0)
    values[77_777], values[33_333] = 9.0, 1.0
    indices = drawn_positions(values)
    assert len(indices) <= LINE_POINTS + 2 and {0, 33_333, 77_777, 99_999} <= set(indices.tolist())
    picture = lines("x", [values], "a line of a hundred thousand", "t", "y")
    assert len(picture.svg) < 100_000


def crowd(path: Path) -> list[tuple[str, str, datetime, float]]:
    """Users with keys of very different sizes, one of them <script>, some records unusable."""
    sizes = {"<script>": 900, "mid": 300, "small": 50, "rare": 4}
    rng = np.random.default_rng(1)
    records = [
        (f"u{rng.integers(2000)}", key, START + timedelta(seconds=int(rng.integers(86_400))),
         float(rng.integers(-5, 15)))
        for key, size in sizes.items()
        for _ in range(size)
    ]  # fmt: skip
    text = [f"{u},{k},{t:%Y-%m-%dT%H:%M:%SZ},{v}" for u, k, t, v in records]
    text += ["u1,mid,yesterday,1", "u1,mid,2025-01-01T00:00:00Z,1", ",mid,2024-01-01T00:00:00Z,1"]
    path.write_text("user,key,time,value\n" + "\n".join(text) + "\n")
    return records


def expected_truth(
    records: list[tuple[str, str, datetime, float]], released: list[dict[str, Any]], until: datetime
) -> list[dict[str, Any]]:
    """The same table without Arrow, row by row."""
    n: Counter[str] = Counter()
    total: defaultdict[str, float] = defaultdict(float)
    users: defaultdict[str, set[str]] = defaultdict(set)
    for user, key, time, value in records:
        if time < until:
            n[key] += 1
            total[key] += max(0.0, min(10.0, value))
            users[key].add(user)
    groups: defaultdict[int, list[str]] = defaultdict(list)
    for key, count in n.items():
        groups[10 ** (len(str(count)) - 1)].append(key)
    by_key = {r["key"]: r for r in released}
    out = []
    for low, keys in sorted(groups.items()):
        mine = [k for k in keys if k in by_key]
        true: dict[str, Callable[[str], float]] = {
            "records": lambda k: n[k],
            "total": lambda k: total[k],
            "people": lambda k: len(users[k]),
            "level": lambda k: total[k] / n[k],
        }
        errors = {
            name: [abs(by_key[k][name] - f(k)) for k in mine if by_key[k][name] is not None]
            for name, f in true.items()
        }
        medians = {name: median(diffs) if diffs else None for name, diffs in errors.items()}
        out.append({"low": low, "high": 10 * low - 1, "keys": len(keys), "released": len(mine), "errors": medians})  # fmt: skip  # noqa: E501
    return out


MORE = """aggregate.people = { kind = "units" }
aggregate.level = { kind = "mean", column = "value", bounds = [0, 10] }
start ="""


def test_truth_where_no_key_was_released(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job()
    crowd(tmp_path / "in" / "a.csv")
    put(job, 4, [])
    _, text, figures = report(job, tmp_path, "--truth", tmp_path / "in" / "*.csv")
    assert TRUTH_LABEL in text and figures["private"]


def test_truth_of_a_real_run(make_job: MakeJob, tmp_path: Path) -> None:
    fix_run_id(tmp_path, RUN)  # the same noise every time
    job = edit(make_job(), ("start =", MORE))
    records = crowd(tmp_path / "in" / "a.csv")
    execute(job)
    triggers = sorted(Path(job.sink.path).rglob("window-*/*.parquet"))
    assert len(triggers) == 4
    triggers[-1].unlink()  # the window has come to its third trigger
    page, text, figures = report(job, tmp_path, "--truth", tmp_path / "in" / "*.csv")
    check_page(page, text)
    released = sink_formats.read_releases(job.sink.path).to_pylist()
    newest = [r for r in released if r["trigger"] == 3]
    assert {r["key"] for r in newest} >= {"<script>", "mid"} and figures["private"]
    truth = figures["truth"]["by_true_records"]
    wanted = expected_truth(records, newest, START + timedelta(hours=18))
    assert [d["errors"].keys() for d in truth] == [d["errors"].keys() for d in wanted]
    for got, want in zip(truth, wanted, strict=True):
        assert got.pop("errors") == pytest.approx(want.pop("errors"))
        assert got == want
    assert figures["truth"]["label"] == TRUTH_LABEL
    assert page.text.count(TRUTH_LABEL) == 3 and "This page is not private." in page.of("strong")
    assert "may be published" not in page.text
    assert (tmp_path / "page.html").stat().st_mode & 0o777 == 0o600


def test_without_truth_nothing_private_is_read(make_job: MakeJob, tmp_path: Path) -> None:
    fix_run_id(tmp_path, RUN)
    job = make_job()
    crowd(tmp_path / "in" / "a.csv")
    execute(job)
    (tmp_path / "in" / "a.csv").unlink()
    assert job.state.path is not None
    job.state.path.unlink()
    page, text, figures = report(job, tmp_path)
    check_page(page, text)
    assert figures["truth"] is None and not figures["private"]
    assert TRUTH_LABEL not in text and "true records" not in text
    assert figures["releases"]["rows"] == sink_formats.read_releases(job.sink.path).num_rows
    assert "Complete: 1 day." in page.text


def test_a_cut_or_unfinished_window_is_not_drawn_as_a_whole_one(make_job: MakeJob) -> None:
    """The job's end cuts the third window, and the second has not come to its last trigger."""
    job = edit(make_job(), ('end = "2024-01-02T00', 'end = "2024-01-03T12'))
    for trigger in range(1, 5):
        put(job, trigger, [row("a", 10.0 * trigger)])
        put(job, trigger, [row("a", 3.0), row("b", 3.0)], window=2)
    put(job, 1, [row("a", 3.0), row("b", 3.0)], window=1)
    findings = build(job).findings
    assert findings.complete.tolist() == [True, False, False]
    assert {release.window for release in findings.drawn_window} == {0}


def test_a_job_with_one_release_a_window_draws_over_windows(
    make_job: MakeJob, tmp_path: Path
) -> None:
    ends = ('end = "2024-01-02T00', 'end = "2024-01-03T12'), ('release_every = "6h"',
                                                              'release_every = "1d"')  # fmt: skip
    job = edit(make_job(), *ends)
    for window in range(3):
        put(job, 1, [row("a", 100.0 - 40 * window), row("b", 50.0)], window=window)
    page, text, _ = report(job, tmp_path)
    check_page(page, text)
    assert "Growth of one window" not in text
    words = [line for line in page.of("figcaption") if "Distinct keys" in line]
    assert words and "2 windows" in words[0]  # the third one is cut
    pictures = [line for line in text.splitlines() if "Final records of a by window" in line]
    assert pictures and "2 values, the last 60" in pictures[0]
