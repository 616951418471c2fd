"""A week of daily folders in which each day in turn is late, missing, empty, twice or truncated.

Lost rows: 0, or a refusal before the charge.
"""

import gzip
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from dpstream.accounting.errors import DpstreamError
from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.stream.completeness import STRICT, Terms, came_late
from dpstream.pipelines.stream.run import Result, run_job
from dpstream.state import open as stores
from dpstream.state.ledger.open import read_history
from tests import accounts
from tests.fixed_runs import fix_run_id
from tests.golden.refusals import Refused
from tests.growing import JOB, released
from tests.pipelines.cli.called import call, printed

DAYS = [f"2024-01-{number:02d}" for number in range(1, 8)]
WEEK, NIGHTS = "2024-01-08", [*DAYS[1:], "2024-01-08"]
ROWS = 60
#: What the weekly job says in place of the daily one of `tests.growing`.
WEEKLY = {
    "in/*.KIND": 'raw/date=*/*.csv.gz"\nexpect = "raw/date={day}/*.csv.gz',
    "2024-01-05T00": "2024-01-29T00",
    'window = "1d"': 'window = "7d"',
    'release_every = "6h"': 'release_every = "EVERY"',
    "LATE": "0s",
    "[data_set.shop]\n": '[data_set.shop]\naccount = { path = "l.db",'
    " limit = { epsilon = 900.0, delta = 0.1 } }\n",
}


@pytest.fixture(autouse=True)
def closed_stores() -> Iterator[None]:
    yield
    stores.close_all()


def write(folder: Path, day: str, rows: int = ROWS, part: int = 0) -> Path:
    """A part of a day's records."""
    path = folder / "raw" / f"date={day}" / f"part-{part}.csv.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{n % 20},p{n % 3},{day}T{n % 24:02d}:00:00Z,{n % 9}.0\n" for n in range(rows)]
    path.write_bytes(gzip.compress("".join(["user,page,at,amount\n", *lines]).encode(), mtime=0))
    return path


def week(folder: Path, every: str = "7d", days: list[str] = DAYS) -> Path:
    """The job with its account, and some days."""
    text = JOB
    for old, new in WEEKLY.items():
        text = text.replace(old, new)
    folder.mkdir(exist_ok=True)
    accounts.write(folder / "dpstream.toml", text.replace("EVERY", every))
    fix_run_id(folder)
    for day in days:
        write(folder, day)
    return folder


def run(folder: Path, through: str | None = WEEK, terms: Terms = STRICT) -> Result:
    stores.close_all()
    return run_job(load_job(folder / "dpstream.toml"), through=through, terms=terms)


def refusal(folder: Path, through: str, terms: Terms = STRICT) -> str:
    with pytest.raises(DpstreamError) as error:
        run(folder, through, terms)
    return str(error.value)


def untouched(folder: Path) -> bool:
    """Nothing is charged, and no store or release was made."""
    account = load_job(folder).ledger
    assert account is not None
    return not read_history(account).charges and not {"s.db", "out"} & {
        path.name for path in folder.iterdir()
    }


def lost(result: Result, rows: int) -> int:
    """Rows of the files that do not count; all are inside the bound C or cut by it."""
    counts = result.operator_only
    assert counts["operator_records_in"] == rows
    return counts.get("operator_dead_letters", 0)


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The releases of the complete week."""
    folder = week(tmp_path_factory.mktemp("complete"))
    assert lost(run(folder), 7 * ROWS) == 0
    return released(folder)


def test_a_day_that_is_missing_late_or_truncated_costs_nothing(
    complete: dict[str, bytes], tmp_path: Path, refused: Refused
) -> None:
    folder = week(tmp_path / "job")
    for day in DAYS:
        path = folder / "raw" / f"date={day}" / "part-0.csv.gz"
        data = path.read_bytes()
        shutil.rmtree(path.parent)
        error = refused(run, folder)  # missing
        assert f"raw/date={day}/*.csv.gz" in str(error) and error.exit_code == 4
        path.parent.mkdir()
        refused(run, folder)  # late: its folder came first
        path.write_bytes(data[: len(data) // 2])
        refused(run, folder)  # truncated
        assert untouched(folder)
        path.write_bytes(data)
    assert lost(run(folder), 7 * ROWS) == 0
    assert released(folder) == complete


@pytest.mark.parametrize("day", DAYS)
def test_a_day_that_is_empty_or_comes_in_two_files(day: str, tmp_path: Path) -> None:
    folder = week(tmp_path / "job")
    write(folder, day, rows=0)
    assert lost(run(folder), 6 * ROWS) == 0
    folder = week(tmp_path / "twice")
    write(folder, day, part=1)
    assert lost(run(folder), 8 * ROWS) == 0


@pytest.mark.parametrize("day", DAYS)
def test_nights_with_a_late_day_end_with_the_figures_of_the_complete_week(
    day: str, tmp_path: Path
) -> None:
    folder, other = week(tmp_path / "job", "1d", []), week(tmp_path / "other", "1d")
    rows = 0
    for night, through in enumerate(NIGHTS):
        late = DAYS[night] == day
        if not late:
            write(folder, DAYS[night])
        if late:
            assert f"date={day}/" in refusal(folder, through)
        elif night in (DAYS.index(day) + 1, 6):
            write(folder, day)
            rows += run(folder, through).operator_only.get("operator_dead_letters", 0)
    write(folder, day)
    rows += run(folder, NIGHTS[-1]).operator_only.get("operator_dead_letters", 0)
    run(other, NIGHTS[-1])
    last = f"window-000000/trigger-{len(NIGHTS):06d}.parquet"
    assert rows == 0 and released(folder)[last] == released(other)[last]


def test_what_is_released_as_incomplete_says_so_whenever_it_is_asked(tmp_path: Path) -> None:
    days = [day for day in DAYS if day != "2024-01-03"]
    folder, name = week(tmp_path / "job", days=days), "raw/date=2024-01-03/*.csv.gz"
    result = run(folder, terms=Terms(incomplete=True))
    assert result.missing == (name,)
    first, job = released(folder), load_job(folder)
    assert came_late(job) == []
    (folder / "out" / "window-000000" / "trigger-000001.parquet").unlink()
    write(folder, "2024-01-03")
    again = run(folder)  # without the flag: the pass is committed
    assert again.missing == (name,) and released(folder) == first
    # It joins for a window that is closed: every later command names it.
    for day in range(8, 15):
        write(folder, f"2024-01-{day:02d}")
    (warning,) = came_late(job)
    assert name in warning and "2024-01-01T00:00:00Z" in warning
    late = run(folder, "2024-01-15")
    assert late.missing == () and late.operator_only["operator_dead_late"] == ROWS
    paths = [folder / "out" / name for name in sorted(released(folder))]
    facts = [json.loads(pq.read_schema(path).metadata[b"dpstream"]) for path in paths]
    assert [each.get("incomplete") for each in facts] == [[name], None]
    final = pq.read_table(folder / "out" / "_final.parquet")
    column = next(each for each in final.schema.names if each.endswith("_quality"))
    qualities = final.group_by("window_start").aggregate([(column, "distinct")])
    by_window = qualities.sort_by("window_start").column(f"{column}_distinct").to_pylist()
    assert by_window == [["incomplete"], ["final"]]
    page = tmp_path / "page.html"
    for command, *more in (
        ("run",),
        ("plan",),
        ("report", "--out", str(page)),
        ("report", "--publish", str(tmp_path / "public")),
    ):
        stores.close_all()
        out = call(command, "--project", folder, *more)
        assert name in (out.stderr + out.stdout).replace("\n            ", "")
    assert page.read_text().count(name) == 1  # the page says it of the first week alone


def test_a_pass_needs_what_no_pass_has_needed(tmp_path: Path) -> None:
    """Files that were read to their end may be gone; what was missing is missed while it counts."""
    folder = week(tmp_path / "job", "1d", [DAYS[0]])
    run(folder, DAYS[1])
    shutil.rmtree(folder / "raw" / f"date={DAYS[0]}")
    for through, there in ((DAYS[2], False), (DAYS[3], True)):
        if there:
            write(folder, DAYS[2])
        assert "missing: raw/date=2024-01-02/*.csv.gz" in refusal(folder, through)
        if not there:
            write(folder, DAYS[2])
            result = run(folder, through, Terms(incomplete=True))
            assert result.missing == ("raw/date=2024-01-02/*.csv.gz",)
    write(folder, DAYS[1])
    result = run(folder, DAYS[3])
    assert result.missing == () and lost(result, 2 * ROWS) == 0
    assert came_late(load_job(folder)) == []


def test_a_run_waits_and_then_goes_on_or_is_refused(tmp_path: Path) -> None:
    folder = week(tmp_path / "job", days=DAYS[:6])
    assert "after 0.1 s: raw/date=2024-01-07" in refusal(folder, WEEK, Terms(wait=100_000))
    assert untouched(folder)
    waited = list[str]()
    job = load_job(folder)

    def warn(text: object) -> None:
        waited.append(str(text))
        write(folder, DAYS[6])

    run_job(job, through=WEEK, terms=Terms(wait=200_000), warn=warn)
    assert waited == ["the run waits for missing files: raw/date=2024-01-07/*.csv.gz"]
    assert len(released(folder)) == 1


def test_flags_of_a_run_that_expects_files(tmp_path: Path, refused: Refused) -> None:
    folder = week(tmp_path / "job", days=DAYS[:6])
    refused(run, folder, None)
    refused(run, folder, None, Terms(incomplete=True))
    refused(run, folder, "2024-02-01")
    path = folder / "dpstream.toml"
    plain = path.read_text().replace("expect = ", "# ")
    path.write_text(plain)
    for terms in (Terms(wait=1), Terms(incomplete=True)):
        refused(run, folder, WEEK, terms)
    assert untouched(folder)
    result = call("run", "--project", folder, "--through", WEEK, "--json")
    assert result.exit_code == 0
    assert any(
        'expect = "raw/date={day}/*.csv.gz"' in one for one in printed(result.stdout)["warnings"]
    )


def test_a_fresh_run_is_refused_before_the_old_one_is_moved(tmp_path: Path) -> None:
    folder = week(tmp_path / "job")
    run(folder)
    before = {path.name for path in folder.iterdir()}
    shutil.rmtree(folder / "raw" / f"date={DAYS[2]}")
    result = call("run", "--project", folder, "--through", WEEK, "--fresh")
    assert result.exit_code == 4 and DAYS[2] in result.stderr
    assert {path.name for path in folder.iterdir()} == before
