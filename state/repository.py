"""Private files that a git repository holds: refused, because whoever has the repository has them.

A secret in a commit subtracts all noise, a store and dead letters hold records, and an account that
a checkout replaces lacks charges that were made.
"""

import contextlib
from pathlib import Path

from dpstream.accounting.errors import PolicyError

#: The monitor of a repository's files is a program that its configuration names.
_GIT = ("git", "-c", "core.fsmonitor=false", "ls-files", "-z", "--")


def repository_of(folder: Path) -> Path | None:
    """Return the folder of the git repository that a folder is part of; ``None``: of none."""
    folder = folder.absolute()
    with contextlib.suppress(PermissionError):
        return next((each for each in (folder, *folder.parents) if (each / ".git").exists()), None)
    return None


def refuse_tracked(field: str, path: str | Path, consequence: str) -> None:
    """Refuse a private file, or folder of files, that git tracks.

    Nothing is refused outside of a repository, or where git is not installed.

    Args:
        field: the field that names it.
        consequence: what follows if others get the repository.

    Raises:
        PolicyError: git tracks it.
    """
    private = Path(path).absolute()
    if repository_of(private.parent) is None:
        return
    import subprocess  # outside of a repository nothing needs it

    try:
        listed = subprocess.run(
            [*_GIT, f":(literal){private.name}"],
            cwd=private.parent,
            capture_output=True,
            check=False,
        )
    except OSError:
        return
    if listed.stdout:
        raise PolicyError(
            field,
            f"is tracked by git: {consequence}",
            f"type `git rm -r --cached {private.name}` and commit, and name it in .gitignore",
        )
