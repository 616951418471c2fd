"""The files of a bounded source: what a pattern matches is a file, or refused."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from dpstream.accounting.errors import RunError, UsageError
from dpstream.pipelines.connectors.files.input_manifest import manifest
from dpstream.pipelines.connectors.files.source import ReadFiles
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.stream.run import run_job
from tests.audit.replays import new_place
from tests.pipelines.conftest import TEMPLATE
from tests.pipelines.connectors.files.test_source import CANARY, table, write

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


KINDS = {
    dangling: "a link that leads to no file",
    circle: "a link that leads to no file",
    through_a_file: "a link that leads to no file",
    os.mkfifo: "a pipe, a socket or a device",
    unix_socket: "a pipe, a socket or a device",
    device: "a pipe, a socket or a device",
    Path.mkdir: "a folder",
}


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
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
    assert caught.value.field == "table.path" and f"matches {KINDS[make]}." in str(caught.value)
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

    monkeypatch.setattr("dpstream.pipelines.connectors.files.input_manifest.os.stat", deny)
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
    text = TEMPLATE.format(kind="csv", pattern="x", sink="csv", batch_rows=9)
    (tmp_path / "dpstream.toml").write_text(text + 'public_keys = "keys.csv"\n')
    with pytest.raises(UsageError, match=r"public_keys: is not a file"):
        load_job(tmp_path / "dpstream.toml")
