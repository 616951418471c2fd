"""Where a first job goes: its sections in the project file, and files that no other job has."""

import re
from pathlib import Path

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.pipelines.drafting.draft import release_folder, store_name
from dpstream.pipelines.jobs.secret import new_secret
from dpstream.pipelines.project.project import Project, decode_project, find, is_name, locate
from dpstream.pipelines.project.text import read_at_most
from dpstream.state.disk_errors import file_error
from dpstream.state.durable import replacing
from dpstream.state.ledger.open import PROJECT_FILE

#: A name for what a file's name says nothing about.
_ANY_NAME = "records"


def project_at(given: Path | None) -> tuple[Path, str, Project | None]:
    """The project file that is begun or extended: its path, absolute, its text (empty: there is no
    file), and what it has.

    Args:
        given: of ``--project``; ``None``: the file that commands find from the current folder, or
            a new one there.

    Raises:
        UsageError: its folder does not exist, or it is no usable project file.
    """
    path = locate(given) if given is not None else find(Path.cwd()) or Path.cwd() / PROJECT_FILE
    if not path.parent.is_dir():
        raise UsageError("--project", "is in a folder that does not exist", "make the folder first")
    if not path.exists():
        return path, "", None
    text = read_at_most(path, path.name, f"give a {PROJECT_FILE}")
    return path, text.decode(errors="surrogateescape"), decode_project(text, path)


def name_of(file: str) -> str:
    """A section's name for a file or a pattern of files: the file's own, or its folder's."""
    given = Path(file)
    for part in (given.name.partition(".")[0], given.absolute().parent.name):
        name = re.sub(r"[^A-Za-z0-9_-]+", "_", part).strip("_-")
        name = re.sub(r"^[^A-Za-z]+", "", name)[:64]
        if name:
            return name
    return _ANY_NAME


def check_job(path: Path, project: Project | None, job: str) -> None:
    """Refuse a job's name before anything is asked.

    Args:
        path: of the project file, absolute.

    Raises:
        UsageError: it is no name of a section.
        PolicyError: a job of this name is there, or files that would be taken for this job's.
    """
    if not is_name(job):
        raise UsageError("--job", "is not a usable name", "use letters, digits, _ and -")
    if _is_job(project, job):
        raise PolicyError(
            "--job",
            f"[job.{job}] is in {path.name} already, and is not written over",
            f"add --job {_free(path, project, job)}, or edit the section",
        )
    for name in _files(job):
        if (path.parent / name).exists():
            raise PolicyError(
                "--job",
                f"would be taken to go on with {name}, which another run has begun",
                f"add --job {_free(path, project, job)}",
            )


def _files(job: str) -> tuple[str, str]:
    return store_name(job), release_folder(job)


def _is_job(project: Project | None, job: str) -> bool:
    return project is not None and job in project.sections.job


def _free(path: Path, project: Project | None, job: str) -> str:
    """A name of a job that meets nothing."""
    names = (f"{job}{number}" for number in range(2, 10_000))
    return next(
        name
        for name in names
        if not _is_job(project, name)
        and not any((path.parent / file).exists() for file in _files(name))
    )


#: Private files that commands leave beside a job, a catalog or a table: heads and logs.
PRIVATE_FILES = ("dpstream-*.head", "dpstream-errors*.log")


def keep_out_of_git(folder: Path, *private: str | Path) -> None:
    """Name a folder's private files in its ``.gitignore``, where it is part of a repository.

    Args:
        private: secret, account, stores, dead letters: paths or patterns, named if they lie in
            the folder itself.

    Raises:
        RunError: the file cannot be written.
    """
    if not any((each / ".git").exists() for each in (folder, *folder.parents)):
        return
    paths = [folder / each for each in private]
    names = [*(path.name for path in paths if path.parent == folder), *PRIVATE_FILES]
    path = folder / ".gitignore"
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        missing = [name for name in names if name not in text.splitlines()]
        if missing:
            with replacing(path) as draft:
                end = "" if text.endswith("\n") or not text else "\n"
                draft.write_text("\n".join([text + end + missing[0], *missing[1:], ""]))
    except (OSError, UnicodeError) as error:
        raise file_error(".gitignore", "cannot be written", error) from None


def store_names(job: str) -> tuple[str, str]:
    """Patterns of a job's store with its journals, and of stores that `run --fresh` moved."""
    store = store_name(job)
    return f"{store}*", f"{store.removesuffix('.db')}-*.db*"


def make_secret(path: Path) -> bool:
    """Make a secret unless one is there; whether it was made.

    Raises:
        UsageError: there is something else; RunError: the operating system cannot write.
    """
    if not path.parent.is_dir():
        raise UsageError("--secret", "is in a folder that does not exist", "make the folder first")
    if path.exists() and not path.is_file():
        raise UsageError("--secret", "is there, and is no file", "choose another name")
    if path.exists():
        return False
    new_secret(path)
    return True
