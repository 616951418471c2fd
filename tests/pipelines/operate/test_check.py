"""What `check` counts is what a run of the job writes to its dead letter; it leaves no trace."""

import gzip
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.pipelines.connectors.write import dead_letter_folder
from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.operate.check import check_source
from dpstream.pipelines.stream.run import run_job
from dpstream.state import open as stores
from tests.folders import START, MakeFolderJob, data, line, make_folder_job, mark
from tests.folders import write as put
from tests.golden.refusals import Refused
from tests.growing import place
from tests.pipelines.cli.called import call
from tests.pipelines.sql.shop import LOOKED_UP, dp
from tests.pipelines.sql.shop import folder as visited
from tests.written import read_dead_letters

__all__ = ["make_folder_job"]
CANARY = "CANARY7741"
GOOD = [
    "1,p1,2024-01-01 00:00:00Z,1",
    "2,p1,2024-01-01T05:00:00+02:00,2",
    "3,p2,2024-01-02 01:00,3",
]
#: Lines of CSV that are unusable, each for a reason of its own or several.
HOSTILE = [
    f"{CANARY},p1,2024-01-01 00:00:00Z,1", ",p1,2024-01-01 00:00:00Z,1", "1,p1,01/02/2024 10:00,1",
    "1,p1,2031-01-01 00:00:00Z,1", "1,p1,2024-01-01 00:00:00Z,many", "1,p1,2024-01-01 00:00:00Z",
    '1,"p1,2024-01-01 00:00:00Z,1', "1,p1,2024-13-01 00:00:00Z,1", "1,p1,,1", "",
    "1,\0p,2024-01-01 00:00:00Z,1", "1,p1,2024-01-01 00:00:00Z,1,1", "9" * 30 + ",p,2024-01-01,1",
    "1," + "p" * 5_000 + ",2024-01-01 00:00:00Z,1", "1,p1,2024-01-01 00:00:00Z,nan",
]  # fmt: skip


@pytest.fixture(autouse=True)
def closed_stores() -> Iterator[None]:
    yield
    stores.close_all()


def csv_job(folder: Path, lines: list[str], name: str = "a.csv") -> Path:
    place(folder, kind="csv")
    text = "\n".join(["user,page,at,amount", *lines]) + "\n"
    (folder / "in" / name).write_bytes(text.encode())
    return folder / "dpstream.toml"


def hostile_csv(folder: Path) -> Path:
    path = csv_job(folder, [*GOOD, *HOSTILE] * 30)
    (folder / "in" / "b.csv").write_text("user,page,at,amount\n" + "\n".join([*HOSTILE, *GOOD]))
    (folder / "in" / "c.csv").touch()
    return path


def hostile_json(folder: Path) -> Path:
    place(folder, kind="jsonl")
    row = {"user": 1, "page": "p", "at": "2024-01-01T00:00:00Z", "amount": 1}
    rows: list[object] = [
        row, {**row, "user": None}, {**row, "user": CANARY}, {**row, "at": "10.1.2024"}, [], 7,
        {**row, "amount": "x"}, {**row, "page": {"a": 1}}, {"user": 1}, {**row, "at": 0},
    ]  # fmt: skip
    text = "".join(json.dumps(r) + "\n" for r in rows * 20) + "{\n\n" + '{"user": "\ud800"}\n'
    (folder / "in" / "a.jsonl").write_bytes(text.encode("utf-8", "surrogatepass"))
    return folder / "dpstream.toml"


def hostile_parquet(folder: Path) -> Path:
    place(folder)
    for number in range(3):  # small files are read together
        table = pa.table({
            "user": pa.array([1, None, 3, 4, 5], pa.int64()),
            "page": ["a", "b", None, "d", "e"],
            "at": pa.array([START, START, START, None, START * 2], pa.timestamp("us", "UTC")),
            "amount": [1.0, float("nan"), 1.0, 1.0, 1.0],
        })  # fmt: skip
        pq.write_table(table, folder / "in" / f"{number}.parquet", row_group_size=2)
    return folder / "dpstream.toml"


def packed(folder: Path) -> Path:
    path = csv_job(folder, [*GOOD, *HOSTILE] * 30)
    path.write_text(path.read_text().replace('"in/*.csv"', '"in/*"\nformat = "csv"'))
    compressed = gzip.compress((folder / "in" / "a.csv").read_bytes())
    (folder / "in" / "b.csv.gz").write_bytes(compressed)
    return path


def public_keys(folder: Path) -> Path:
    path = csv_job(folder, [*GOOD, *HOSTILE] * 5)
    (folder / "keys.csv").write_text("page\np2\n")
    path.write_text(path.read_text() + 'public_keys = "keys.csv"\n')
    return path


def record_ids(folder: Path) -> Path:
    path = csv_job(folder, [*GOOD, *HOSTILE])
    text = path.read_text()
    assert 'time_column = "at"' in text
    path.write_text(text.replace('time_column = "at"', 'time_column = "at"\nrecord_id = "amount"'))
    return path


def statement(folder: Path) -> Path:
    """A job whose query keeps some rows and has casts that fail."""
    job = visited(folder)
    stream = ("sql", "--stream", "daily", "--project", job, dp(LOOKED_UP))
    assert call(*stream, "--emit", "live").exit_code == 0
    text = job.read_text()
    job.write_text(text.replace(text[text.index("[job.daily]") : text.index("[job.live]")], ""))
    return job


CASES = (hostile_csv, hostile_json, hostile_parquet, packed, public_keys, record_ids, statement)


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_counts_are_those_of_the_dead_letter(make: Callable[[Path], Path], tmp_path: Path) -> None:
    job = load_job(make(tmp_path))
    before = _files(tmp_path)
    checked = check_source(job)
    assert _files(tmp_path) == before, "a check writes nothing"
    counts = run_job(job).operator_only
    letters = read_dead_letters(dead_letter_folder(job))
    expected = Counter(letters.column("reason").to_pylist())
    assert {of.reason: of.records for of in checked.unusable} == expected
    dead = counts["operator_dead_letters"]
    in_flow = counts["operator_records_in"]
    assert checked.usable == in_flow - (dead - counts.get("operator_dead_source", 0))
    assert checked.complete and checked.read == checked.usable + dead + checked.left_out
    assert checked.beyond_contributions == counts.get("operator_pairs_rejected", 0)
    for of in checked.unusable:
        assert len(of.first) == min(5, of.records) and of.problem and of.fix


def test_the_positions_are_rows_of_files(tmp_path: Path) -> None:
    checked = check_source(load_job(csv_job(tmp_path, [*GOOD, *HOSTILE])))
    lines = [row for row in (*GOOD, *HOSTILE) if row]  # a blank line is no row
    rows = {of.reason: [lines[row] for name, row in of.first] for of in checked.unusable}
    assert rows["value"] == ["1,p1,2024-01-01 00:00:00Z,many", "1,p1,2024-01-01 00:00:00Z,nan"]
    assert rows["time"][:2] == ["1,p1,01/02/2024 10:00,1", "1,p1,2031-01-01 00:00:00Z,1"]
    assert {name for of in checked.unusable for name, _ in of.first} == {"a.csv"}
    assert next(of for of in checked.unusable if of.reason == "time").no_time == 3


def test_a_limit_reads_the_first_rows(tmp_path: Path) -> None:
    path = csv_job(tmp_path, GOOD * 400)
    (tmp_path / "in" / "b.csv").write_text("user,page,at,amount\n" + "x,,,\n" * 400)
    checked = check_source(msgspec.structs.replace(load_job(path), batch_rows=100), limit=250)
    assert (checked.read, checked.usable, checked.complete) == (300, 300, False)
    assert check_source(load_job(path), limit=10_000).complete


def test_what_a_run_would_refuse(tmp_path: Path, refused: Refused) -> None:
    place(tmp_path)
    table = {"user": ["a"], "page": ["a"], "at": ["2024-01-01"], "amount": ["much"]}
    pq.write_table(pa.table(table), tmp_path / "in" / "a.parquet")
    refused(lambda: check_source(load_job(tmp_path / "dpstream.toml")))


@pytest.mark.parametrize("stamp", ["manifest", "closed"])
def test_a_folder_that_grows(make_folder_job: MakeFolderJob, tmp_path: Path, stamp: str) -> None:
    """Files that markers have closed (or that lie still), with their rows by name."""
    job = make_folder_job("csv", "manifest" if stamp == "manifest" else "closed")
    rows = [*data(40), {"user": "u", "key": "k", "time": "noon", "value": 1}]
    put(tmp_path / "in" / "day" / "1.csv", rows)
    changed = START // 1_000_000 + 50
    os.utime(tmp_path / "in" / "day" / "1.csv", (changed, changed))
    mark(tmp_path / "in", START + 60_000_000, line("day/1.csv", START + 50_000_000), "{broken")
    checked = check_source(job)
    reasons = {of.reason: of for of in checked.unusable}
    assert checked.usable == 40
    assert reasons["time"].first == [("day/1.csv", 40)] and reasons["time"].no_time == 1
    if stamp == "closed":  # the time of change says it, so markers are not read
        assert checked.read == 41 and set(reasons) == {"time"}
        return
    assert checked.read == 42
    assert reasons["malformed"].first == [(f"_closed/{_only(tmp_path / 'in' / '_closed')}", 1)]


def _only(folder: Path) -> str:
    [path] = folder.iterdir()
    return path.name


def _files(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(("slide", "units"), [("", 30), ('slide = "12h"', 50)], ids=["day", "both"])
def test_the_units_of_the_largest_key_of_a_window(tmp_path: Path, slide: str, units: int) -> None:
    """30 units of p1 on one day and 20 others on the next, within 12 hours of each other."""
    first = [f"{user},p1,2024-01-01 20:00:00Z,1" for user in [*range(30), *range(30)]]
    second = [f"{user},p1,2024-01-02 02:00:00Z,1" for user in range(40, 60)]
    many = [f"1,q{page},2024-01-01 10:00:00Z,1" for page in range(70)]
    path = csv_job(tmp_path, [*first, *second, *many])
    text = path.read_text().replace('window = "1d"', f'window = "1d"\n{slide}')
    path.write_text(text.replace("epsilon = 20.0, delta = 1e-2", "epsilon = 1.0, delta = 1e-6"))
    checked = check_source(load_job(path))
    assert checked.units_needed is not None
    assert checked.most_units_up_to_needed == units and checked.units_needed > units
    result = call("check", "--project", path)
    assert result.exit_code == 0 and f"the most is {units}" in result.stdout
    path.write_text(text.replace("delta = 1e-2", "delta = 1e-3"))
    enough = check_source(load_job(path))
    assert enough.units_needed is not None
    assert enough.most_units_up_to_needed == enough.units_needed <= 30
    path.write_text(text + 'public_keys = "keys.csv"\n')
    (tmp_path / "keys.csv").write_text("page\np1\n")
    assert check_source(load_job(path)).units_needed is None
