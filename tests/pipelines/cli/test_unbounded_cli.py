"""Every command on jobs whose source has no end, with a plan that has none either."""

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner, Result

from dpstream.accounting.errors import PolicyError
from dpstream.pipelines.cli.main import cli
from dpstream.pipelines.connectors import run_manifest
from dpstream.pipelines.connectors.folder.store import place
from dpstream.pipelines.connectors.inputs import refusal
from dpstream.pipelines.connectors.registry import sink_of
from dpstream.pipelines.connectors.write import dead_letter_folder, write_dead_letters
from dpstream.pipelines.formats.rows import Refused
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.stream.begin import begin
from dpstream.pipelines.stream.run import run_job
from dpstream.state import open as stores
from dpstream.state.sqlite.file import connect, swap_metadata
from dpstream.state.transfer import DELIVERED
from tests.flowing import Flowing
from tests.pipelines.cli.called import printed
from tests.pipelines.cli.test_main import keep_logging
from tests.pipelines.cli.test_typed_fixes import commands_of
from tests.streams import positioned

__all__ = ["keep_logging"]

TABLES = {
    "kafka": 'servers = "127.0.0.1:1"\ntopic = "clicks"',
    "folder": 'folder = "in"\nformat = "csv"',
    "pubsub": 'subscription = "projects/p/subscriptions/s"',
}
JOB = """
version = 1
[data_set.site]
unit = {{ name = "user" }}
insecure_test_secret = "1111111111111111111111111111111111111111111111111111111111111111"
[table.clicks]
{table}
unit_column = "user"
time_column = "time"
[job.hourly]
table = "clicks"
key = ["page"]
aggregate.n = {{ kind = "count" }}
aggregate.total = {{ kind = "sum", column = "value", bounds = [0, 10] }}
start = "2024-01-01T00:00:00Z"
window = "1h"
release_every = "20m"
budget = {{ epsilon = 20.0, delta = 1e-2, covers = "{covers}" }}
contributions = 3
store = "state/s.db"
shards = 2
sink = {{ kind = "parquet", path = "out" }}
{more}
"""
#: The job before its bounds are chosen.
TUNED = f"""
version = 1
[data_set.site]
unit = {{ name = "user" }}
insecure_test_secret = "1111111111111111111111111111111111111111111111111111111111111111"
[table.clicks]
{TABLES["folder"]}
unit_column = "user"
time_column = "time"
[job.hourly]
table = "clicks"
key = ["page"]
aggregate.n = {{ kind = "count" }}
aggregate.total = {{ kind = "sum", column = "value" }}
start = "2024-01-01T00:00:00Z"
window = "1h"
release_every = "20m"
budget = {{ epsilon = 20.0, delta = 1e-2, covers = "1d" }}
shards = 2
sink = {{ kind = "parquet", path = "out" }}
choice.range = {{ total = [0, 100] }}
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    yield
    stores.close_all()


def job_file(folder: Path, kind: str = "folder", covers: str = "1d", more: str = "") -> Path:
    """The project file of a job; ``more`` are further lines of its section."""
    (folder / "in").mkdir(exist_ok=True)
    path = folder / "dpstream.toml"
    path.write_text(JOB.format(table=TABLES[kind], covers=covers, more=more))
    return path


def call(*args: Any) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in args])


def text_of(*args: Any) -> str:
    result = call(*args)
    assert result.exit_code == 0, result.output
    return result.stdout


def json_of(*args: Any) -> Any:
    return printed(text_of(*args, "--json"))


def refused(field: str, code: int, *args: Any) -> str:
    """One coded line on stderr, in words and as JSON, and no traceback."""
    result = call(*args, "--json")
    assert result.exit_code == code, result.output
    assert printed(result.stderr)["field"] == field
    result = call(*args)
    assert result.exit_code == code
    *before, last = result.stderr.strip().splitlines()
    assert f": {field}: " in last and all(
        line.startswith(("Project ", "Account ", "Warning: ")) for line in before if line
    )
    return result.stderr


def rows(trigger_time: int) -> pa.RecordBatch:
    """Records of 20 minutes: always new units, on three pages."""
    start = 1_704_067_200_000_000 + (trigger_time - 1) * 1_200_000_000
    size, instant = 60, pa.timestamp("us", "UTC")
    times = pa.array([start + i for i in range(size)]).cast(instant)
    columns = {
        "user": [f"u{trigger_time}-{i}" for i in range(size)],
        "page": [f"p{i % 3}" for i in range(size)],
        "time": times,
        "value": [str(i % 5) for i in range(size)],
        "_manifest": times,
    }
    return positioned(columns, 0, trigger_time * 1000)


def lived(job: Job, last: int, first: int = 1) -> None:
    """The job's run from one trigger time through another, without a runner."""
    run, _ = begin(job)
    flowing = Flowing(run, sink_of(job))
    for trigger_time in range(first, last + 1):
        flowing.feed([rows(trigger_time)])
        flowing.step(trigger_time)
    run.destroy_keys()
    stores.close_all()


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A folder job of four complete windows and one under way."""
    path = job_file(tmp_path)
    lived(load_job(path), 14)
    return path


@pytest.mark.parametrize("kind", TABLES)
def test_plan(tmp_path: Path, kind: str) -> None:
    text = text_of("plan", "--project", job_file(tmp_path, kind))
    assert "in one period of 1 day" in text and "the stream has no end" in text
    assert "a person of 4 periods: gaussian (55.39," in text and "for ever" not in text
    assert "k = 1024" in text_of("plan", "--project", tmp_path, "--details")
    figures = json_of("plan", "--project", tmp_path)
    assert figures["unit"]["period_micros"] and not figures["unit"]["for_ever"]
    [first, *_, last] = figures["periods"]
    assert (first["periods"], last["periods"]) == (1, 1024)
    assert last["mu"] == pytest.approx(32 * first["mu"])


@pytest.mark.parametrize("kind", TABLES)
def test_plan_without_a_period_says_what_that_means(tmp_path: Path, kind: str) -> None:
    text = text_of("plan", "--project", job_file(tmp_path, kind, covers="lifetime"))
    for words in (
        "one budget covers the stream for ever",
        "once for all time",
        "the state of every unit ever seen is kept for ever",
        "Set budget.covers",
    ):
        assert words in text  # fmt: skip
    figures = json_of("plan", "--project", tmp_path)
    assert figures["unit"]["for_ever"] and len(figures["periods"]) == 1


def test_an_endless_stream_is_not_given_the_rule_of_one_trigger(tmp_path: Path) -> None:
    """A window of one trigger: with an end and one window the sharper delta holds, else not."""
    path = job_file(tmp_path, covers="lifetime")
    text = path.read_text()
    assert 'release_every = "20m"' in text
    text = text.replace('release_every = "20m"', 'release_every = "1h"')
    path.write_text(text)
    forever = json_of("plan", "--project", path)
    path.write_text(text.replace("release_every", 'end = "2024-01-01T01:00:00Z"\nrelease_every'))
    once = json_of("plan", "--project", path)
    assert forever["split"]["delta_thresholds"] < once["split"]["delta_thresholds"]


def test_triggers_must_last_for_a_year(tmp_path: Path) -> None:
    path = job_file(tmp_path)
    text = path.read_text().replace('"20m"', '"10ms"').replace('window = "1h"', 'window = "10s"')
    path.write_text(text)
    assert "within a year" in refused("job.hourly.release_every", 2, "plan", "--project", path)
    path.write_text(text.replace('"10ms"', '"20ms"'))
    text_of("plan", "--project", path)


@pytest.mark.parametrize("kind", TABLES)
def test_key_check(tmp_path: Path, kind: str) -> None:
    path = job_file(tmp_path, kind)
    assert json_of("secret", "check", "--project", path)["store"] == "new"


@pytest.mark.parametrize("kind", TABLES)
def test_what_needs_a_store_or_releases_says_so(tmp_path: Path, kind: str) -> None:
    path = job_file(tmp_path, kind)
    for command in ("info", "expire"):
        refused("store", 2, "state", command, "--project", path)
    refused("store", 2, "state", "backup", "--project", path, "--out", tmp_path / "b")
    refused("store", 2, "state", "releases", "--project", path, "--out", tmp_path / "r")
    refused("store", 2, "state", "reshard", "--project", path, "--shards", "3")
    refused("sink.path", 2, "report", "--project", path, "--out", tmp_path / "r.html")
    refused("--runner", 2, "run", "--project", path)
    refused("--wait", 2, "run", "--project", path, "--wait", "2h", "--runner=PrismRunner")


def test_a_fresh_run_of_a_stream_expects_no_file(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    assert run_job(load_job(job_file(tmp_path)), "PrismRunner", stop=stop, fresh=True).stopped


def test_choose(tmp_path: Path) -> None:
    """Not from a source without end; from files in its place, with a horizon."""
    path = tmp_path / "dpstream.toml"
    folder = TABLES["folder"]
    (tmp_path / "in").mkdir()

    def write(*changes: tuple[str, str]) -> None:
        text = TUNED
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path.write_text(text)

    write()
    lines = [f"u{i % 50},p{i % 3},2024-01-01T{i % 24:02d}:00:00Z,{i % 7}" for i in range(2000)]
    proxy = tmp_path / "last-year.csv"
    proxy.write_text("\n".join(["user,page,time,value", *lines]) + "\n")
    ask = ("choose", "hourly", "--project", path, "--as", "chosen")
    refused("table.format", 2, *ask, "--first", "2h", "--epsilon", "1")
    choice = json_of(*ask, "--proxy", proxy)
    assert choice["how"] == "proxy" and choice["contributions"] >= 30
    chosen = load_job(path, "chosen").plan
    assert chosen.privacy.contributions == choice["contributions"]
    # The folder's own file, under another name.
    write()
    (tmp_path / "in" / "a.csv").write_bytes(proxy.read_bytes())
    refused("--proxy", 3, *ask, "--proxy", proxy)
    (tmp_path / "in" / "a.csv").write_text("user,page,time,value\n")
    # Without a period nothing says over what time C has to last.
    for_life = ('covers = "1d"', 'covers = "lifetime"')
    write(for_life)
    advice = refused("budget.covers", 2, *ask, "--proxy", proxy)
    assert "--scale" in advice and "write a length there (recommended), or" in advice
    write(for_life, ('window = "1h"', 'window = "2h"\nslide = "1h"'))
    assert "periods_share_windows = true" in refused("budget.covers", 2, *ask, "--proxy", proxy)
    write(for_life)
    twice = json_of(*ask, "--proxy", proxy, "--first", "1d", "--scale", "2")
    assert twice["contributions"] > 1.5 * choice["contributions"]
    # Messages of a broker look like files of JSON lines; others must say what they are.
    write((folder, TABLES["kafka"]))
    other = tmp_path / "dump"
    other.write_bytes(proxy.read_bytes())
    refused("--proxy", 2, *ask, "--proxy", other)
    assert json_of(*ask, "--proxy", proxy)["contributions"] == choice["contributions"]


def test_info_releases_and_report(job: Path, tmp_path: Path) -> None:
    info = json_of("state", "info", "--project", job)
    assert info["windows"] is None and info["complete"] == 4
    assert info["committed"] == {**{str(w): 3 for w in range(4)}, "4": 2}
    assert "4 are complete" in text_of("state", "info", "--project", job, "--operator")
    assert (
        json_of("state", "releases", "--project", job, "--out", tmp_path / "again")["releases"]
        == 14
    )
    names = sorted(p.relative_to(tmp_path / "out") for p in (tmp_path / "out").rglob("window*/*"))
    assert len(names) == 14
    for name in names:
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    page = tmp_path / "r.html"
    assert "14 releases" in text_of("report", "--project", job, "--out", page)
    assert "so far; figures of the newest one may still change." in page.read_text()
    figures = json_of("report", "--project", job, "--out", page)
    assert figures["releases"]["expected"] is None and figures["releases"]["present"] == 14


def test_damaged_files_are_named(job: Path, tmp_path: Path) -> None:
    """By `run` and by `report`, also on its page; a malformed line names none."""
    letters = []
    for name, reason in (("d/a.csv", "unreadable_rest"), ("b.csv", "malformed")):
        (tmp_path / "in" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "in" / name).touch()
        at = place(name)
        letters.append(refusal(Refused(np.array([at.base]), [reason]), at.partition))
    write_dead_letters(dead_letter_folder(load_job(job)), letters)
    words = ("report", "--project", job, "--out", tmp_path / "r.html")
    assert json_of(*words)["damaged_files"] == {"d/a.csv": "unreadable_rest"}
    result, page = call(*words), (tmp_path / "r.html").read_text()
    assert "d/a.csv" in result.stderr and "d/a.csv" in page and "b.csv" not in result.stderr + page
    [fix] = commands_of(" ".join(result.stderr.split()))
    assert fix == ["check", "hourly"] and call(*fix, "--project", job).exit_code == 2


def test_report_with_truth(job: Path, tmp_path: Path) -> None:
    """Files in the place of the source; what no release covers yet counts nowhere."""
    lines = ["user,page,time,value"]
    for trigger_time in range(1, 40):
        for row in rows(trigger_time).to_pylist():
            at = row["time"].isoformat().replace("+00:00", "Z")
            lines.append(f"{row['user']},{row['page']},{at},{row['value']}")
    (tmp_path / "truth.csv").write_text("\n".join(lines) + "\n")
    page = tmp_path / "r.html"
    figures = json_of("report", "--project", job, "--out", page, "--truth", tmp_path / "truth.csv")
    decades = figures["truth"]["by_true_records"]
    assert sum(d["keys"] for d in decades) == 3 * 5
    assert decades[-1]["released"] and decades[-1]["errors"]["n"] < 10
    refused(
        "--truth", 2, "report", "--project", job, "--out", page, "--truth", tmp_path / "none.csv"
    )


def test_backup_restore_reshard_expire(job: Path, tmp_path: Path) -> None:
    saved = tmp_path / "backup"
    json_of("state", "backup", "--project", job, "--out", saved)
    lived(load_job(job), 18, first=15)
    assert json_of("state", "restore", "hourly", saved, "--project", job, "--replace")["epoch"] == 0
    assert json_of("state", "info", "--project", job)["restoring"]
    lived(load_job(job), 20)  # from the beginning: compares up to trigger time 18
    assert not json_of("state", "info", "--project", job)["restoring"]
    assert json_of("state", "reshard", "--project", job, "--shards", "3")["shards"] == 3
    job.write_text(job.read_text().replace("shards = 2", "shards = 3"))
    lived(load_job(job), 23, first=21)
    assert json_of("state", "info", "--project", job)["committed"]["7"] == 2
    done = json_of("state", "expire", "--project", job, "--releases-before", "2024-01-01T03:00:00Z")
    assert done["windows_dropped"] == 3
    info = json_of("state", "info", "--project", job)
    assert (info["dropped"], info["complete"]) == (3, 7)
    assert "0" not in info["committed"]
    assert (
        json_of("state", "releases", "--project", job, "--out", tmp_path / "again")["releases"]
        == 23 - 9
    )
    # Dropped once, not twice; and a time before it gives nothing back.
    again = json_of(
        "state", "expire", "--project", job, "--releases-before", "2024-01-01T03:00:00Z"
    )
    assert again == {"shards_expired": 0, "windows_dropped": 0}


def test_abandon_takes_the_wall_clock(job: Path, tmp_path: Path) -> None:
    """Its input cannot be asked for an end; everything up to now is given up."""
    saved = tmp_path / "backup"
    json_of("state", "backup", "--project", job, "--out", saved)
    done = json_of("state", "restore", "hourly", saved, "--project", job, "--replace", "--abandon")
    assert done["epoch"] == 1 and done["epochs"] == 2
    info = json_of("state", "info", "--project", job)
    assert info["abandoned"] > 14
    assert (
        json_of("state", "releases", "--project", job, "--out", tmp_path / "again")["releases"]
        == 14
    )


def test_an_emptied_sink_is_refused_and_filled_again(job: Path, tmp_path: Path) -> None:
    def files() -> dict[str, bytes]:
        out = tmp_path / "out"
        return {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()}

    before = files()
    shutil.rmtree(tmp_path / "out")
    with pytest.raises(PolicyError, match=r"sink\.path: is empty, but the store says"):
        begin(load_job(job))
    stores.close_all()
    assert not (tmp_path / "out").exists()
    assert json_of("state", "releases", "--project", job) == {
        "releases": 14,
        "out": str(tmp_path / "out"),
    }
    assert files() == before and len(before) == 16
    begin(load_job(job))
    stores.close_all()
    refused("--kind", 2, "state", "releases", "--project", job, "--kind", "csv")
    # What is published is not added to by a store that has not been compared with it.
    json_of("state", "backup", "--project", job, "--out", tmp_path / "backup")
    json_of("state", "restore", "hourly", tmp_path / "backup", "--project", job, "--replace")
    refused("store", 3, "state", "releases", "--project", job)
    assert files() == before


def test_a_stream_that_came_to_its_end_reads_nothing(tmp_path: Path) -> None:
    """Its folder may be gone; before its end that is refused."""
    path = job_file(tmp_path, covers="lifetime", more='end = "2024-01-01T02:00:00Z"')
    lived(load_job(path), 5)
    (tmp_path / "in").rename(tmp_path / "away")
    command = ("run", "--project", path, "--runner=PrismRunner")
    refused("table.path", 2, *command)
    (tmp_path / "away").rename(tmp_path / "in")
    lived(load_job(path), 6, 6)
    (tmp_path / "in").rmdir()
    with contextlib.closing(connect(tmp_path / "state" / "s.db")) as db:
        assert swap_metadata(db, DELIVERED, "6", "5")
        refused("table.path", 2, *command)
        assert swap_metadata(db, DELIVERED, "5", "6")
    assert json_of(*command)["input_read"] is False
    assert text_of("state", "init", "--project", path)


def test_keep_releases(tmp_path: Path) -> None:
    path = job_file(tmp_path, more='keep_releases = "3h"')
    assert load_job(path).state.keep_releases == "3h"
    for wrong in ('"3"', '"-1h"', "3"):
        path = job_file(tmp_path, covers="lifetime", more=f"keep_releases = {wrong}")
        refused("job.hourly.keep_releases", 2, "plan", "--project", path)
    more = 'end = "2024-01-02T00:00:00Z"\nkeep_releases = "3h"'
    text = JOB.format(table='path = "in/*.csv"', covers="lifetime", more=more)
    path.write_text(text)
    assert "--releases-before" in refused("job.hourly.keep_releases", 2, "plan", "--project", path)


def test_committed_names_are_in_public_order(job: Path) -> None:
    run, _ = begin(load_job(job))
    names = list(run_manifest.committed_names(run, run.open()))
    assert names == [(w, t) for w in range(5) for t in (1, 2, 3)][:14]
    run.destroy_keys()
