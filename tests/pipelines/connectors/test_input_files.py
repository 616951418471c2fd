"""The files of a bounded source: what a pattern matches is a file, or refused.

Files that change while a run reads them: nothing of them is released, and the store says so.
"""

import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow.parquet as pq
import pytest

from dpstream.accounting.errors import RunError, UsageError
from dpstream.pipelines.beam_yaml import DPStreamRows
from dpstream.pipelines.connectors.files import source
from dpstream.pipelines.connectors.files.source import ReadFiles
from dpstream.pipelines.connectors.input_files import InputWatch, manifest
from dpstream.pipelines.connectors.sink import Sink
from dpstream.pipelines.frames.stream import DPStream
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.stream.run import run_job
from dpstream.state import open as stores
from tests.audit.replays import new_place
from tests.growing import arrive, place, released
from tests.pipelines.cli.called import call, refused
from tests.pipelines.conftest import TEMPLATE
from tests.pipelines.connectors.files.test_source import CANARY, table, write
from tests.runners.prism import ROOT, binary

MakeJob = Callable[..., Job]
HEADER = "user,key,time,value\n"


def test_no_files_and_files_in_the_sink(tmp_path: Path, make_job: MakeJob) -> None:
    job = make_job("parquet")
    with pytest.raises(UsageError, match="matches no file"):
        ReadFiles(job)
    job = make_job("parquet", pattern="**/*.parquet")
    (tmp_path / "releases").mkdir()
    write(tmp_path / "releases" / "x.parquet", "parquet", table(1))
    with pytest.raises(UsageError, match=r"sink\.path"):
        ReadFiles(job)


def test_the_error_says_where_it_looked(tmp_path: Path, make_job: MakeJob) -> None:
    make_job("csv", pattern="none/[ab]*.csv")
    odd = tmp_path / "a[b]c"
    odd.mkdir()
    (odd / "dpstream.toml").write_bytes((tmp_path / "dpstream.toml").read_bytes())
    with pytest.raises(UsageError) as caught:
        manifest(load_job(odd / "dpstream.toml"))
    assert f"matches no file: {odd}/none/[ab]*.csv. Fix" in str(caught.value)


def dangling(path: Path) -> None:
    path.symlink_to(path.parent / f"{CANARY}-nowhere")


def circle(path: Path) -> None:
    path.symlink_to(path)


def through_a_file(path: Path) -> None:
    path.symlink_to(path.parent / "a.csv" / "x")


def unix_socket(path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        listener.bind(f"/proc/self/fd/{folder}/{path.name}")  # a path of its own may be too long
    finally:
        os.close(folder)
        listener.close()


def device(path: Path) -> None:
    path.symlink_to("/dev/null")


NO_FILES = {
    dangling: "a link that leads to no file",
    circle: "a link that leads to no file",
    through_a_file: "a link that leads to no file",
    os.mkfifo: "a pipe, a socket or a device",
    unix_socket: "a pipe, a socket or a device",
    device: "a pipe, a socket or a device",
    Path.mkdir: "a folder",
}


@pytest.mark.parametrize("make", NO_FILES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("pattern", ["in/*.csv", "in/**/*.csv", "in/b.csv"])
def test_what_is_no_file_is_refused(
    tmp_path: Path, make_job: MakeJob, make: Callable[[Path], None], pattern: str
) -> None:
    job = make_job("csv", pattern=pattern)
    (tmp_path / "in" / "a.csv").write_text(HEADER)
    make(tmp_path / "in" / "b.csv")
    if make is Path.mkdir and "**" in pattern:
        assert [file.name for file in manifest(job)] == ["a.csv"]
        return
    with pytest.raises(UsageError) as caught:
        ReadFiles(job)
    assert caught.value.field == "table.path" and f"matches {NO_FILES[make]}." in str(caught.value)
    assert CANARY not in str(caught.value)


def test_links_to_files_are_files(tmp_path: Path, make_job: MakeJob) -> None:
    job = make_job("csv")
    (tmp_path / "elsewhere.csv").write_text(HEADER)
    (tmp_path / "in" / "b.csv").symlink_to(tmp_path / "elsewhere.csv")
    assert [file.name for file in manifest(job)] == ["b.csv"]


def test_any_folders_match_no_folder(tmp_path: Path, make_job: MakeJob) -> None:
    (tmp_path / "in" / "day").mkdir(parents=True)
    for name in ("a.csv", "day/b.csv"):
        (tmp_path / "in" / name).write_text(HEADER)
    for pattern in ("in/**", "in/**/*"):
        assert [f.name for f in manifest(make_job("csv", pattern=pattern))] == [
            "a.csv",
            "day/b.csv",
        ]


def test_a_name_that_nothing_is_told_of(
    tmp_path: Path, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, real = make_job("csv"), os.stat
    (tmp_path / "in" / "a.csv").write_text(HEADER)

    def deny(path: object, **options: object) -> os.stat_result:
        if str(path).endswith("a.csv"):
            raise PermissionError(13, CANARY)
        return real(path, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("dpstream.pipelines.connectors.input_files.os.stat", deny)
    with pytest.raises(RunError, match="cannot be read") as caught:
        manifest(job)
    assert CANARY not in str(caught.value)


def test_nothing_is_charged(tmp_path: Path) -> None:
    place = new_place(tmp_path / "place")
    (place.folder / "in.csv").unlink()
    (place.folder / "in.csv").symlink_to("nowhere.csv")
    with pytest.raises(UsageError, match="a link that leads to no file"):
        run_job(place.job())
    assert not any((place.folder / name).exists() for name in ("state", "out"))
    assert place.entries() == []


def test_a_pipe_is_no_key_list(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "keys.csv")
    text = TEMPLATE.format(kind="csv", pattern="x", sink="csv")
    (tmp_path / "dpstream.toml").write_text(text + 'public_keys = "keys.csv"\n')
    with pytest.raises(UsageError, match=r"public_keys: is not a file"):
        load_job(tmp_path / "dpstream.toml")


POLICY, RUN = 3, 4
KINDS = ("csv", "jsonl", "parquet", "csv.gz")
SECRET = "alice"
Hook = Callable[[], None]


def job_of(folder: Path, kind: str = "csv") -> Path:
    """A job on two files of a kind; ``other`` holds what replaces the second."""
    place(folder)
    text = (folder / "dpstream.toml").read_text()
    assert "in/*.parquet" in text
    (folder / "dpstream.toml").write_text(text.replace("in/*.parquet", f"in/*.{kind}"))
    days = sorted((folder / "all").iterdir())
    for at, name in enumerate((f"in/{SECRET}-0", f"in/{SECRET}-1", "other")):
        (folder / f"{name}.{kind}").write_bytes(_bytes(days[at], kind))
    return folder / "dpstream.toml"


def _bytes(day: Path, kind: str) -> bytes:
    if kind == "parquet":
        return day.read_bytes()
    rows = pq.read_table(day).to_pylist()
    for row in rows:
        row["at"] = row["at"].isoformat()
    if kind == "jsonl":
        return "".join(json.dumps(row) + "\n" for row in rows).encode()
    text = ["user,page,at,amount", *(",".join(map(str, row.values())) for row in rows)]
    data = ("\n".join(text) + "\n").encode()
    return gzip.compress(data, mtime=0) if kind.endswith(".gz") else data


def replaced(folder: Path, kind: str = "csv") -> bytes:
    """Put the other file in the second's place; the bytes that were there."""
    path = folder / f"in/{SECRET}-1.{kind}"
    before = path.read_bytes()
    (folder / "new").write_bytes((folder / f"other.{kind}").read_bytes())
    os.replace(folder / "new", path)
    return before


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``hook(do, after=False)``: do something once, before files are read or after."""
    real = source.read_group

    def put(do: Hook, after: bool = False) -> None:
        todo = [do]

        def read(*arguments: Any) -> Iterator[Any]:
            if not after and todo:
                todo.pop()()
            yield from real(*arguments)
            if after and todo:
                todo.pop()()

        monkeypatch.setattr(source, "read_group", read)

    return put


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The releases of the same job on input that stays as it is."""
    folder = tmp_path_factory.mktemp("calm")
    assert call("run", "--project", job_of(folder), "--quiet").exit_code == 0
    stores.close_all()
    return released(folder)


def information(job: Path) -> dict[str, Any]:
    text = call("state", "info", "--project", job, "--json", "--operator").stdout
    info: dict[str, Any] = json.loads(text)
    return dict(info["operator_only"])


@pytest.mark.parametrize(
    ("kind", "after"),
    [
        *((kind, False) for kind in KINDS),
        ("csv", True),
        *(pytest.param(kind, True, marks=pytest.mark.slow) for kind in KINDS[1:]),
    ],
)
def test_nothing_of_changed_files_is_released(
    tmp_path: Path, hook: Callable[..., None], kind: str, after: bool
) -> None:
    job = job_of(tmp_path, kind)
    hook(lambda: replaced(tmp_path, kind) and None, after)
    text = refused("run", "--project", job, "--quiet", code=POLICY)
    assert SECRET not in text and released(tmp_path) == {}
    assert information(job)["input_changed"]
    # Every later command refuses, also when the old bytes are back.
    (tmp_path / f"other.{kind}").write_bytes(_bytes(sorted((tmp_path / "all").iterdir())[1], kind))
    replaced(tmp_path, kind)
    for command in (
        ("run",), ("state", "init"), ("state", "releases"),
        ("state", "releases", "--out", tmp_path / "again"), ("run", "--through", "end"),
    ):  # fmt: skip
        assert "--fresh" in refused(*command, "--project", job, code=POLICY)
    assert released(tmp_path) == {} and not (tmp_path / "again").exists()
    # What the message names is the fix.
    assert call("run", "--project", job, "--fresh", "--quiet").exit_code == 0
    assert released(tmp_path) and not information(job)["input_changed"]


def test_without_the_comparison_they_are(
    tmp_path: Path, hook: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same change under a sabotaged sink, so that the test above has something to find."""
    monkeypatch.setattr(
        Sink, "write", lambda self, *rest: self._write(*rest, *[False][: 2 - len(rest)])
    )
    job = job_of(tmp_path)
    hook(lambda: replaced(tmp_path) and None)
    assert call("run", "--project", job, "--quiet").exit_code == POLICY
    assert released(tmp_path)


def test_a_touched_file_goes_on(
    tmp_path: Path, hook: Callable[..., None], undisturbed: dict[str, bytes]
) -> None:
    job = job_of(tmp_path)
    hook(lambda: os.utime(tmp_path / f"in/{SECRET}-1.csv"))
    assert call("run", "--project", job, "--quiet").exit_code == 0
    assert released(tmp_path) == undisturbed
    assert call("run", "--project", job, "--quiet").exit_code == 0


def test_a_file_that_is_gone_decides_nothing(
    tmp_path: Path, hook: Callable[..., None], undisturbed: dict[str, bytes]
) -> None:
    job, path = job_of(tmp_path), tmp_path / f"in/{SECRET}-1.csv"
    hook(lambda: path.rename(tmp_path / "aside") and None, after=True)
    assert SECRET not in refused("run", "--project", job, "--quiet", code=RUN)
    assert released(tmp_path) == {} and not information(job)["input_changed"]
    (tmp_path / "aside").rename(path)
    assert call("run", "--project", job, "--quiet").exit_code == 0
    assert released(tmp_path) == undisturbed


def test_a_file_that_is_added_is_no_change(
    tmp_path: Path, hook: Callable[..., None], undisturbed: dict[str, bytes]
) -> None:
    job, new = job_of(tmp_path), tmp_path / "in/late.csv"
    hook(lambda: new.write_bytes((tmp_path / "other.csv").read_bytes()) and None)
    for _ in range(2):  # until it is moved away, nothing says that the run has ended
        refused("run", "--project", job, "--quiet", code=POLICY)
    assert not information(job)["input_changed"]
    new.rename(tmp_path / "late.csv")
    assert call("run", "--project", job, "--quiet").exit_code == 0
    assert released(tmp_path) == undisturbed


def test_the_verdict_outlives_backup_restore_and_reshard(
    tmp_path: Path, hook: Callable[..., None]
) -> None:
    job = job_of(tmp_path)
    before: list[bytes] = []

    def change() -> None:
        assert (
            call("state", "backup", "--project", job, "--out", tmp_path / "early.db").exit_code == 0
        )
        before.append(replaced(tmp_path))

    hook(change, after=True)
    refused("run", "--project", job, "--quiet", code=POLICY)
    assert call("state", "backup", "--project", job, "--out", tmp_path / "late.db").exit_code == 0
    assert call("state", "reshard", "--project", job, "--shards", "2").exit_code == 0
    assert information(job)["input_changed"]
    # No backup takes its place: it may have been made between the change and the verdict.
    for more in ((), ("--abandon", "--now", "2024-01-04T00:00:00Z")):
        refused(
            "state",
            "restore",
            "daily",
            tmp_path / "early.db",
            "--replace",
            "--project",
            job,
            *more,
            code=POLICY,
        )
    for path in tmp_path.glob("s*.db*"):
        path.unlink()
    assert call("state", "restore", "daily", tmp_path / "late.db", "--project", job).exit_code == 0
    (tmp_path / f"in/{SECRET}-1.csv").write_bytes(before[0])
    refused("run", "--project", job, "--quiet", code=POLICY)


def test_of_passes_the_earlier_ones_stay(tmp_path: Path, hook: Callable[..., None]) -> None:
    place(tmp_path)
    job = tmp_path / "dpstream.toml"
    arrive(tmp_path, 1)
    assert call("run", "--project", job, "--through", "2024-01-02", "--quiet").exit_code == 0
    first = released(tmp_path)
    arrive(tmp_path, 2)
    old, _ = sorted((tmp_path / "in").iterdir())
    # One that is only compared, in the pass that reads another.
    hook(lambda: old.write_bytes((tmp_path / "all/day-2.parquet").read_bytes()) and None)
    refused("run", "--project", job, "--through", "2024-01-03", "--quiet", code=POLICY)
    assert first and released(tmp_path) == first
    old.write_bytes((tmp_path / "all/day-0.parquet").read_bytes())
    assert "--fresh" in refused("run", "--project", job, "--through", "2024-01-03", code=POLICY)


def test_public_pages_and_looks_say_nothing_of_it(
    tmp_path: Path, hook: Callable[..., None]
) -> None:
    place(tmp_path)
    job, page = tmp_path / "dpstream.toml", tmp_path / "page.html"
    arrive(tmp_path, 1)
    assert call("run", "--project", job, "--through", "2024-01-02", "--quiet").exit_code == 0
    arrive(tmp_path, 2)
    changed, looks = tmp_path / "in/day-0.parquet", list[object]()

    def look() -> None:
        for words in (("report", "--out", page), ("plan",)):
            done = call(*words, "--project", job)
            looks.append((done.exit_code, done.output, page.read_bytes()))

    def change() -> None:
        look()
        changed.write_bytes((tmp_path / "all/day-2.parquet").read_bytes())

    hook(change)
    refused("run", "--project", job, "--through", "2024-01-03", "--quiet", code=POLICY)
    look()
    assert looks[:2] == looks[2:]
    public, private = (call("state", "info", "--project", job, *w) for w in ((), ("--operator",)))
    assert "changed" not in public.output and "changed" in private.output


def _from_python(pipeline: beam.Pipeline, job: Path) -> None:
    read = pipeline | ReadFiles(load_job(job))
    output = read.records | DPStream(load_job(job))
    rows = job.parent / "rows"
    _ = output.releases | beam.Map(lambda _: rows.write_text("released"))


def _from_yaml(pipeline: beam.Pipeline, job: Path) -> None:
    output = pipeline | DPStreamRows(project=str(job))
    rows = job.parent / "rows"
    _ = output["releases"] | beam.Map(lambda _: rows.write_text("released"))


@pytest.mark.parametrize("build", [_from_python, _from_yaml])
@pytest.mark.parametrize("changes", [False, True])
def test_pipelines_of_ones_own_give_no_changed_rows(
    tmp_path: Path,
    hook: Callable[..., None],
    build: Callable[[beam.Pipeline, Path], None],
    changes: bool,
) -> None:
    job, raised = job_of(tmp_path), False
    if changes:
        hook(lambda: replaced(tmp_path) and None)
    try:
        with beam.Pipeline() as pipeline:
            build(pipeline, job)
    except Exception:
        raised = True
    stores.close_all()
    assert (raised, (tmp_path / "rows").exists()) == (changes, not changes)
    assert information(job)["input_changed"] == changes and (not changes or not released(tmp_path))


#: The command, which does something when it has read the first files.
CHILD = """
import os, runpy, signal, sys
from dpstream.pipelines.connectors.files import source
real = source.read_group
def read(*arguments):
    yield from real(*arguments)
    {do}
source.read_group = read
sys.argv = ["dpstream", "run", "--quiet"]
runpy.run_module("tests.fixed_runs", run_name="__main__")
"""


def test_killed_then_changed_then_run(tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    job = job_of(tmp_path)
    killed = [sys.executable, "-c", CHILD.format(do="os.kill(os.getpid(), signal.SIGKILL)")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(killed, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    before = replaced(tmp_path)
    for command in (("run",), ("state", "releases")):
        refused(*command, "--project", job, code=POLICY)
    assert released(tmp_path) == {}
    (tmp_path / f"in/{SECRET}-1.csv").write_bytes(before)
    assert call("run", "--project", job, "--quiet").exit_code == 0
    assert released(tmp_path) == undisturbed


def test_a_watch_without_files_compares_nothing() -> None:
    InputWatch(()).check()


@pytest.mark.slow
def test_on_prism_only_what_came_before_is_visible(
    tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    job_of(tmp_path)
    os.environ.setdefault("PRISM_LOCATION", binary())
    command = [
        sys.executable, "-m", "tests.paced", "20000", "run", "--quiet", "--runner=PrismRunner",
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    )
    until = time.monotonic() + 120
    while not released(tmp_path) and run.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    replaced(tmp_path)
    _, errors = run.communicate(timeout=180)
    assert run.returncode == POLICY and SECRET not in errors
    there = released(tmp_path)
    assert there and there.items() < undisturbed.items()
    refused("run", "--project", tmp_path, code=POLICY)
    assert released(tmp_path) == there
