"""Private files in a git repository: those that it tracks are refused, no others."""

import subprocess
from pathlib import Path

import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.state.repository import refuse_tracked, repository_of


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet")
    (tmp_path / "data").mkdir()
    return tmp_path


def test_a_repository_is_that_of_a_parent(
    repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert repository_of(repository / "data") == repository_of(repository) == repository
    assert repository_of(tmp_path_factory.mktemp("elsewhere")) is None


@pytest.mark.parametrize("name", ["noise.secret", "-x", "[a]"])
def test_a_file_is_refused_once_git_tracks_it(repository: Path, name: str) -> None:
    private = repository / "data" / name
    private.write_text("x")
    (repository / "data" / "a").write_text("x")
    git(repository, "add", "data/a")
    refuse_tracked("secret", private, "all know it")
    git(repository, "add", "--force", "--", f":(literal)data/{name}")
    with pytest.raises(PolicyError, match="all know it") as error:
        refuse_tracked("secret", private, "all know it")
    assert error.value.field == "secret" and str(repository) not in str(error.value)
    git(repository, "rm", "-r", "--cached", "--", f":(literal)data/{name}")
    refuse_tracked("secret", private, "all know it")


def test_a_folder_is_refused_if_git_tracks_a_file_of_it(repository: Path) -> None:
    (repository / "data" / "part-1.parquet").write_text("x")
    refuse_tracked("dead_letter", repository / "data", "records")
    git(repository, "add", "data")
    with pytest.raises(PolicyError):
        refuse_tracked("dead_letter", repository / "data", "records")


def test_without_git_or_repository_nothing_is_refused(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / "a").write_text("x")
    git(repository, "add", "a")
    monkeypatch.setenv("PATH", str(repository))
    refuse_tracked("secret", repository / "a", "all know it")
    refuse_tracked("secret", Path("/none/at/all"), "all know it")
