"""The output folder of an answer that is many files: drafted, archived, committed, published.

    draft      a private folder in the archive, in which files are written (by workers too)
    archive    beside the account: the private folders of its answers, each named by its receipt
    OUT        the published folder, which appears whole

The receipt of such an answer has the digest of every file.  The files are on disk in the archive
before the receipt is committed, and OUT is made after: so whatever is killed, and whatever becomes
of OUT, the same question restores the committed files, at no charge and without a look at the rows.
If the archive is gone as well, that is refused, whether or not rows changed.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from dpstream.accounting.errors import PolicyError, RunError
from dpstream.accounting.limits import SINK_THREADS
from dpstream.state.disk_errors import file_errors
from dpstream.state.durable import PRIVATE, make_folder, publish_folder, sync, sync_tree
from dpstream.state.ledger.open import file_of
from dpstream.state.private_folders import private_folder

#: What an error of the system means for either folder.
_CANNOT = "cannot be written or read back"

#: Puts files of these names into a folder.
Fill = Callable[[Path, Iterable[str]], None]


class Written(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of a folder: its size in bytes, and its BLAKE2b-128 as hexadecimal digits."""

    bytes: int
    digest: str


class _Named(msgspec.Struct):
    """What every manifest says."""

    run_id: str


class Archive:
    """The files of an account's answers.

    Args:
        place: the folder, private; the first answer makes it.
        field: what a command calls the account.
    """

    def __init__(self, place: Path, field: str = "account") -> None:
        self._place, self._field = place, field

    @contextlib.contextmanager
    def draft(self) -> Iterator[Path]:
        """A private folder for the files of an answer, which is gone at the end unless it is kept.

        Raises:
            RunError: it cannot be made, or the block cannot write into it.
        """
        with file_errors(self._field, _CANNOT):
            make_folder(self._place, PRIVATE)
        with private_folder(self._place, self._field) as draft, file_errors(self._field, _CANNOT):
            yield draft

    def seal(self, draft: Path, names: Iterable[str]) -> dict[str, Written]:
        """The files of these names, on disk; whatever else is in the draft is removed.

        Raises:
            RunError: one is missing, or cannot be read or flushed.
        """
        wanted = set(names)
        with file_errors(self._field, _CANNOT):
            paths = {path.relative_to(draft).as_posix(): path for path in _files(draft)}
            for name in paths.keys() - wanted:
                paths.pop(name).unlink()  # of a worker that was cut off
            sync_tree(draft, PRIVATE)
            with ThreadPoolExecutor(SINK_THREADS) as pool:
                files = dict(zip(paths, pool.map(written, paths.values()), strict=True))
        if wanted - files.keys():
            raise RunError(
                "runner",
                "has not handed over all files of the answer",
                "give workers and this process one folder: that of the account",
            )
        return files

    def keep(self, draft: Path, receipt: bytes) -> None:
        """Keep a sealed draft under its receipt, before that is committed.

        Raises:
            RunError: it cannot be written.
        """
        place = self._of(receipt)
        if place.exists():  # the same files, of somebody who was cut off before the commit
            return
        with file_errors(self._field, _CANNOT):
            sync(draft)
            os.rename(draft, place)
            sync(self._place)

    def take(
        self, receipt: bytes, files: Mapping[str, Written], names: Iterable[str], into: Path
    ) -> None:
        """Copy files of a committed answer, each of which is what the receipt says.

        Raises:
            PolicyError: they are gone or damaged; RunError: they cannot be written.
        """
        place = self._of(receipt)
        for name in names:
            if not is_written(place / name, files[name]):
                raise PolicyError(
                    self._field,
                    "has lost the files of this answer, or they are damaged",
                    "restore its folder of answers from a backup, or ask with --fresh: a new"
                    " charge",
                )
            with file_errors(self._field, _CANNOT):
                (into / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(place / name, into / name)

    def _of(self, receipt: bytes) -> Path:
        return self._place / hashlib.blake2b(receipt, digest_size=16).hexdigest()


class Output:
    """A published folder.

    Args:
        out: its place; manifest: the file in it that says what the others are.
        field: what the command calls ``out``.
    """

    def __init__(self, out: Path, manifest: str, field: str = "OUT") -> None:
        self._out, self._manifest, self._field = out, manifest, field

    def existing_manifest(self) -> bytes | None:
        """The manifest of what stands there; ``None``: nothing does.

        Raises:
            PolicyError: something else does.
        """
        if not self._out.exists() and not self._out.is_symlink():
            return None
        with contextlib.suppress(OSError):
            return (self._out / self._manifest).read_bytes()
        raise self._foreign()

    def check(self, run_id: str | None) -> None:
        """Refuse what stands there, unless it is of the answer of this run.

        Args:
            run_id: of the answer; ``None``: the question is not answered yet, so that nothing of
                it can stand there.

        Raises:
            PolicyError: something else stands there.
        """
        current = self.existing_manifest()
        if current is None:
            return
        with contextlib.suppress(msgspec.MsgspecError, UnicodeError):
            if run_id and msgspec.json.decode(current, type=_Named).run_id == run_id:
                return
        raise self._foreign()

    def publish(self, manifest: bytes, files: Mapping[str, Written], fill: Fill) -> list[str]:
        """Make the folder what its manifest says: whole, or file by file where it stands already.

        Args:
            files: of the manifest; fill: puts some of them into a folder.

        Returns:
            Files that were damaged or missing in the folder that stands there.

        Raises:
            PolicyError: something else stands there.
            RunError: it cannot be written.
        """
        current = self.existing_manifest()
        if current not in (None, manifest):
            raise self._foreign()
        damaged = [name for name, of in files.items() if not is_written(self._out / name, of)]
        if current is not None and not damaged:
            return []
        with file_errors(self._field, _CANNOT):
            make_folder(self._out.parent)
        with (
            private_folder(self._out.parent, self._field) as draft,
            file_errors(self._field, _CANNOT),
        ):
            fill(draft, damaged)
            if current is None:
                (draft / self._manifest).write_bytes(manifest)
                sync_tree(draft)
                publish_folder(draft, self._out)
                return []
            sync_tree(draft)
            for name in damaged:
                make_folder((self._out / name).parent)
                os.replace(draft / name, self._out / name)
                sync((self._out / name).parent)
        return damaged

    def _foreign(self) -> PolicyError:
        return PolicyError(
            self._field,
            "exists and is not of this answer, or its manifest is damaged",
            "name a new folder, or move this one away and run again: the same answer at no charge",
        )


def archive_of(account: str | Path, beside: Path) -> Path:
    """The folder that keeps the files of an account's answers.

    Args:
        account: path or URL; beside: a folder of this machine for that of a database.
    """
    file = file_of(account)
    return beside / "dpstream.answers" if file is None else file.with_name(f"{file.name}.answers")


def _files(folder: Path) -> list[Path]:
    return sorted(Path(at, name) for at, _, names in os.walk(folder) for name in names)


def written(path: Path) -> Written:
    """What a file is.

    Raises:
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
        return Written(file.tell(), digest.hexdigest())


def is_written(path: Path, wanted: Written | None) -> bool:
    """Whether a file is what was written."""
    try:
        return written(path) == wanted
    except OSError:
        return False
