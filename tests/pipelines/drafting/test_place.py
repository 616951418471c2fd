"""Nothing that is there is written over, and the name that is proposed is free."""

import subprocess
from pathlib import Path

import pytest

from dpstream.accounting.errors import DpstreamError, PolicyError, RunError
from dpstream.pipelines.drafting.place import PRIVATE_FILES, check_place, keep_out_of_git, write
from tests.pipelines.cli.called import call


@pytest.mark.parametrize("there", ["job.toml", "job.db", "releases"])
def test_what_is_there_is_met_with_a_free_name(
    there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    key = tmp_path / "noise.key"
    check_place(tmp_path / "job.toml", key, replace=False)
    (tmp_path / there).touch()
    (tmp_path / "job2.db").touch()
    with pytest.raises(PolicyError, match=r"add --out job3\.toml"):
        check_place(tmp_path / "job.toml", key, replace=False)
    check_place(tmp_path / "job3.toml", key, replace=False)
    if there == "job.toml":
        check_place(tmp_path / "job.toml", key, replace=True)


def test_places_for_no_job(tmp_path: Path) -> None:
    (tmp_path / "d.toml").mkdir()
    for out, key, field in (
        ("job", "k", "--out"), ("no/job.toml", "k", "--out"), ("d.toml", "k", "--out"),
        ("job.toml", "no/k", "--key-file"), ("job.toml", "job.toml", "--key-file"),
    ):  # fmt: skip
        with pytest.raises(DpstreamError) as error:
            check_place(tmp_path / out, tmp_path / key, replace=True)
        assert error.value.field == field


def test_a_key_is_made_once_and_a_job_only_if_told(tmp_path: Path) -> None:
    out, key = tmp_path / "job.toml", tmp_path / "noise.key"
    assert write("a", out, key, replace=False)
    assert key.stat().st_mode & 0o777 == 0o600
    before = key.read_bytes()
    with pytest.raises(PolicyError):
        write("b", out, key, replace=False)
    assert out.read_text() == "a"
    assert not write("c", out, key, replace=True)
    assert out.read_text() == "c" and key.read_bytes() == before
    with pytest.raises(RunError):
        write("d", tmp_path / "no" / "job.toml", key, replace=False)


def test_private_files_are_named_to_git_once_and_only_in_a_repository(tmp_path: Path) -> None:
    """The names match what git is asked about; what was there stays."""
    folder, ignored = tmp_path / "jobs", tmp_path / "jobs" / ".gitignore"
    folder.mkdir()
    keep_out_of_git(folder, folder / "noise.key")
    assert not ignored.exists()
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    ignored.write_text("releases/")  # without an end of the line
    for _ in range(2):
        keep_out_of_git(folder, folder / "noise.key")
        keep_out_of_git(
            folder, tmp_path / "other.key", "ledger.db*", "../other.db*", "spanner://a/b"
        )
    lines = ["releases/", "noise.key", *PRIVATE_FILES, "ledger.db*"]
    assert ignored.read_text().splitlines() == lines
    names = ["noise.key", "dpstream-0acc0acc0acc0acc.head", "ledger.db-journal", "job.toml"]
    command = ["git", "-C", str(folder), "check-ignore", *names]
    assert (
        subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        == names[:3]
    )


def test_what_a_first_job_and_a_table_leave_is_ignored(tmp_path: Path) -> None:
    """Account, key, store, dead letters and a table's records, with what SQLite has beside them."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "visits.csv").write_text("user,page,time\n")
    done = call(
        "init", tmp_path / "visits.csv", "--unit", "user", "--key", "page", "--time", "time",
        "--start", "2024-01-01", "--end", "2024-01-02", "--window", "day", "--covers", "window",
        "--epsilon", "1", "--delta", "1e-6", "--out", tmp_path / "job.toml", "--new-account",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    names = [
        "ledger.db", "ledger.db-journal", "noise.key", "job.db", "job-0acc0acc0acc.db-wal",
        "dead_letter/releases/part.parquet",
    ]  # fmt: skip
    command = ["git", "-C", str(tmp_path), "check-ignore", *names, "job.toml", "visits.csv"]
    ignored = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert ignored == names
