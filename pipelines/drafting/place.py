"""Where a first job goes: nothing is written over, and no other run's store is met."""

import os
from pathlib import Path

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.pipelines.drafting.draft import release_folder
from dpstream.pipelines.jobs.noise_key import new_key
from dpstream.state.disk_errors import file_error, file_errors
from dpstream.state.durable import put_once, replacing


def check_place(out: Path, key_file: Path, replace: bool) -> None:
    """Refuse a place before anything is asked.

    Args:
        out: the job file, absolute; ``key_file``: the noise key, absolute.
        replace: whether a job file may be written over.

    Raises:
        UsageError: it is no place for a job file.
        PolicyError: something is there that would be lost, or would be taken for this job's.
    """
    if out.suffix != ".toml":
        raise UsageError("--out", "must end in .toml", "name it like job.toml")
    if out == key_file:
        raise UsageError("--key-file", "is the job file", "choose another name")
    for field, path in (("--out", out), ("--key-file", key_file)):
        if not path.parent.is_dir():
            raise UsageError(field, "is in a folder that does not exist", "make the folder first")
        if path.exists() and not path.is_file():
            raise UsageError(field, "is there, and is no file", "choose another name")
    if out.exists() and not replace:
        raise PolicyError(
            "--out",
            "exists, and is not written over unasked",
            f"add --out {_free(out)}, or --replace",
        )
    for name in (f"{out.stem}.db", release_folder(out)):
        if out.with_name(name).exists():
            raise PolicyError(
                "--out",
                f"would be taken to go on with {name} beside it, which another run has begun",
                f"add --out {_free(out)}",
            )


def _free(out: Path) -> str:
    """A name beside ``out`` that meets nothing."""
    stems = (f"{out.stem}{number}" for number in range(2, 10_000))
    free = (out.with_name(f"{stem}.toml") for stem in stems)
    taken = next(
        path
        for path in free
        if not any(
            path.with_name(n).exists() for n in (path.name, f"{path.stem}.db", release_folder(path))
        )
    )
    return os.path.relpath(taken)


#: Private files that commands leave beside a job, a catalog or a table: heads and logs.
PRIVATE_FILES = ("dpstream-*.head", "dpstream-errors*.log")


def keep_out_of_git(folder: Path, *private: str | Path) -> None:
    """Name a folder's private files in its ``.gitignore``, where it is part of a repository.

    Args:
        private: key, account, stores, dead letters: paths or patterns, named if they lie in the
            folder itself.

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


def store_names(out: Path) -> tuple[str, str]:
    """Patterns of a job's store with its journals, and of stores that `run --fresh` moved."""
    return f"{out.stem}.db*", f"{out.stem}-*.db*"


def write(text: str, out: Path, key_file: Path, replace: bool) -> bool:
    """Write the job file, and the key if there is none; gives whether one was made.

    Raises:
        PolicyError: the job file has come into being meanwhile.
        RunError: the operating system cannot write.
    """
    made = not key_file.exists()
    if made:
        new_key(key_file)
    with file_errors("--out", "cannot be written"):
        os.stat(out.absolute().parent)  # a folder is not made: its name may be misspelt
        if replace:
            with replacing(out) as draft:
                draft.write_text(text, encoding="utf-8")
        elif not put_once(out, text.encode()):
            raise PolicyError("--out", "exists, and is not written over unasked", "add --replace")
    return made
