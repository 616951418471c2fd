"""Two runs: windows by their bounds, keys by their columns, noise of both in a difference."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.report.comparison import as_dict, compare
from dpstream.pipelines.report.report import build
from tests.pipelines.report.runs import second, weeks
from tests.reports import edit, put, row

MakeJob = Callable[..., Job]
OTHER = "cd" * 16


def four_days(job: Job) -> Job:
    return edit(job, ('end = "2024-01-02T', 'end = "2024-01-05T'))


def test_windows_and_keys_are_matched(make_job: MakeJob, tmp_path: Path) -> None:
    a = four_days(make_job())
    b = second(a, tmp_path / "b", lambda text: text.replace("2024-01-01T", "2024-01-02T"))
    put(a, 4, [row("x", 101.0, 3.0), row("only a", 7.0)], window=1)
    put(a, 4, [row("x", 50.0, 3.0)], window=2)
    put(a, 4, [row("alone", 1.0)], window=0)  # B begins a day later
    put(b, 4, [row("x", 110.0, 4.0), row("only b", 9.0)], window=0, run_id=OTHER)
    put(b, 4, [{**row("x", 80.0, 4.0), "total": None}], window=1, run_id=OTHER)
    found = compare(build(a), build(b))
    assert found.windows.tolist() == [1, 2] and not found.same_run
    assert found.both.tolist() == [1, 1]
    assert found.only_a.tolist() == found.only_b.tolist() == [1, 0]
    rows = {
        (found.keys.ranked["key"][r["_key"]].as_py(), r["_window"]): r
        for r in found.keys.rows.to_pylist()
    }
    assert set(rows) == {("x", 1), ("x", 2), ("only a", 1), ("only b", 1)}
    first = rows["x", 1]
    assert (first["a:records"], first["b:records"], first["d:records"]) == (101.0, 110.0, 9.0)
    assert first["d:records_sd"] == 5.0  # 3 and 4
    assert np.isnan(rows["x", 2]["d:total"]) and rows["x", 2]["d:records"] == 30.0
    assert rows["only a", 1]["b:records"] is None and rows["only b", 1]["a:records"] is None
    records, total = found.agreements["records"], found.agreements["total"]
    assert (records.values, records.within, records.sd_a, records.sd_b) == (2, 0.5, 3.0, 4.0)
    assert total.values == 1
    assert sorted(zip(*records.points, strict=True)) == [(50.0, 80.0), (101.0, 110.0)]
    told = as_dict(found)
    assert [w["both"] for w in told["windows"]] == [1, 1]
    assert told["columns"]["records"]["within_noise"] == 0.5


def test_differences_of_noise_are_mostly_within_it(make_job: MakeJob, tmp_path: Path) -> None:
    keys = [f"key {n:03}" for n in range(200)]
    plain = make_job()
    b = weeks(second(plain, tmp_path / "b"), keys, 10, seed=1)
    a = weeks(plain, keys, 10, seed=2)
    found = compare(build(a), build(b))
    agreement = found.agreements["records"]
    assert agreement.values == 1600 and 0.93 < agreement.within < 0.97
    far = found.agreements["total"]  # three times the noise of the count, at twice its sd
    assert far.within < 0.85


def test_a_window_in_which_one_run_has_no_row(make_job: MakeJob, tmp_path: Path) -> None:
    a = four_days(make_job())
    b = second(a, tmp_path / "b")
    for window in range(3):
        put(a, 4, [row("x", 1.0)] if window else [], window=window)
        put(b, 4, [row("x", 2.0)] if window == 2 else [], window=window, run_id=OTHER)
    found = compare(build(a), build(b))
    assert found.only_a.tolist() == [0, 1, 0] and found.both.tolist() == [0, 0, 1]
    nothing = second(a, tmp_path / "c")
    put(nothing, 4, [], run_id=OTHER)
    found = compare(build(a), build(nothing))
    assert not found.both.any() and found.keys.rows.num_rows == 0


def test_what_cannot_be_compared(make_job: MakeJob, tmp_path: Path) -> None:
    a = make_job()
    put(a, 1, [row("x", 1.0)])
    typed = 'key = [{ column = "key", type = "int" }]'
    b = second(a, tmp_path / "b", lambda t: t.replace('key = [{ column = "key" }]', typed))
    put(b, 1, [{**row("x", 1.0), "key": 1}])
    with pytest.raises(UsageError, match="key columns"):
        compare(build(a), build(b))
    c = second(a, tmp_path / "c", lambda t: t.replace('"records"', '"n"').replace('"total"', '"t"'))
    put(c, 1, [])
    with pytest.raises(UsageError, match="no column of the same name"):
        compare(build(a), build(c))


def test_no_common_window_and_one_run(make_job: MakeJob, tmp_path: Path) -> None:
    a = make_job()
    b = second(a, tmp_path / "b", lambda text: text.replace("2024-01-0", "2024-02-0"))
    for job in (a, b):
        put(job, 1, [row("x", 1.0)])
    found = compare(build(a), build(b))
    assert len(found.windows) == 0 and found.keys.distinct == 0 and found.same_run
    assert as_dict(found)["columns"]["records"]["within_noise"] is None
