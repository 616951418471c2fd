"""A first job meets nothing that is there, and its private files are kept out of git."""

import subprocess
from pathlib import Path

import pytest

from dpstream.accounting.errors import DpstreamError, PolicyError
from dpstream.pipelines.drafting.place import (
    PRIVATE_FILES,
    check_job,
    keep_out_of_git,
    make_secret,
    name_of,
    project_at,
)
from tests.pipelines.cli.called import call
from tests.projects import write_project


@pytest.mark.parametrize("there", ["daily.store.db", "releases/daily", "section"])
def test_what_is_there_is_met_with_a_free_name(there: str, tmp_path: Path) -> None:
    path, _, project = project_at(tmp_path / "dpstream.toml")
    check_job(path, project, "daily")
    (tmp_path / "releases").mkdir()
    (tmp_path / "daily2.store.db").touch()
    if there == "section":
        write_project(tmp_path)
        path, _, project = project_at(tmp_path)
    else:
        (tmp_path / there).touch()
    with pytest.raises(PolicyError, match="add --job daily3"):
        check_job(path, project, "daily")
    check_job(path, project, "daily3")


def test_places_for_no_job(tmp_path: Path) -> None:
    for job, path, field in (
        ("a b", "dpstream.toml", "--job"), ("a", "no/dpstream.toml", "--project"),
    ):  # fmt: skip
        with pytest.raises(DpstreamError) as error:
            check_job(*project_at(tmp_path / path)[::2], job)
        assert error.value.field == field


def test_a_section_is_named_after_the_file_or_its_folder() -> None:
    assert name_of("a/visits-2024.csv.gz") == "visits-2024"
    assert name_of("page views.parquet") == "page_views"
    assert name_of("visits/*.parquet") == "visits" and name_of("visits/2024*.csv") == "visits"


def test_a_secret_is_made_once(tmp_path: Path) -> None:
    secret = tmp_path / "a.secret"
    assert make_secret(secret) and secret.stat().st_mode & 0o777 == 0o600
    before = secret.read_bytes()
    assert not make_secret(secret) and secret.read_bytes() == before
    for path in (tmp_path / "no" / "a.secret", tmp_path):
        with pytest.raises(DpstreamError, match="--secret"):
            make_secret(path)


def test_private_files_are_named_to_git_once_and_only_in_a_repository(tmp_path: Path) -> None:
    """The names match what git is asked about; what was there stays."""
    folder, ignored = tmp_path / "jobs", tmp_path / "jobs" / ".gitignore"
    folder.mkdir()
    keep_out_of_git(folder, folder / "noise.secret")
    assert not ignored.exists()
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    ignored.write_text("releases/")  # without an end of the line
    for _ in range(2):
        keep_out_of_git(folder, folder / "noise.secret")
        keep_out_of_git(
            folder, tmp_path / "other.secret", "ledger.db*", "../other.db*", "spanner://a/b"
        )
    lines = ["releases/", "noise.secret", *PRIVATE_FILES, "ledger.db*"]
    assert ignored.read_text().splitlines() == lines
    names = ["noise.secret", "dpstream-0acc0acc0acc0acc.head", "ledger.db-journal", "job.toml"]
    command = ["git", "-C", str(folder), "check-ignore", *names]
    assert (
        subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        == names[:3]
    )


def test_what_a_first_job_leaves_is_ignored(tmp_path: Path) -> None:
    """Account, key, store, dead letters and a table's records, with what SQLite has beside them."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "visits.csv").write_text("user,page,time\n")
    done = call(
        "init", tmp_path / "visits.csv", "--unit", "user", "--key", "page", "--time", "time",
        "--start", "2024-01-01", "--end", "2024-01-02", "--window", "day", "--covers", "window",
        "--epsilon", "1", "--delta", "1e-6", "--project", tmp_path,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    names = [
        "visits.account.db", "visits.account.db-journal", "visits.secret", "visits.store.db",
        "visits.store-0acc0acc0acc.db-wal",
        "dead_letter/releases/part.parquet",
    ]  # fmt: skip
    command = ["git", "-C", str(tmp_path), "check-ignore", *names, "dpstream.toml", "visits.csv"]
    ignored = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert ignored == names
