"""The output folder of an answer with many files: drafted, archived, committed, published.

    draft      a private folder in the archive, in which files are written (by workers too)
    archive    beside the account: a private folder for each answer, named by its receipt
    OUT        the published folder, which appears complete or not at all

The receipt of such an answer has the digest of every file.  The files are on disk in the archive
before the receipt is committed, and OUT is made afterwards.  So if any process is killed, or OUT is
lost or changed, the same question restores the committed files, at no charge and without reading
the rows.  If the archive is lost too, the question is refused, whether or not rows changed.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from dpstream.accounting.errors import PolicyError, RunError, UsageError
from dpstream.accounting.limits import SINK_THREADS
from dpstream.accounting.places import walked
from dpstream.state.disk_errors import ABSENT, file_error, file_errors, require_folder
from dpstream.state.durable import PRIVATE, make_folder, publish_folder, sync, sync_tree
from dpstream.state.ledger.open import file_of
from dpstream.state.locks import private_folder, sweep

#: What an error of the system means for either folder.
_CANNOT = "cannot be written or read back"

#: Puts files of these names into a folder.
Fill = Callable[[Path, Iterable[str]], None]


class Written(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of a folder: its size in bytes, and its BLAKE2b-128 digest as hexadecimal digits."""

    bytes: int
    digest: str


class _Named(msgspec.Struct):
    """The fields that every manifest has."""

    run_id: str


class Archive:
    """The files of an account's answers.

    Args:
        place: the private folder; the first answer makes it.
        field: the name of the account in the command's errors.
    """

    def __init__(self, place: Path, field: str = "account") -> None:
        self._place, self._field = place, field

    @contextlib.contextmanager
    def draft(self) -> Iterator[Path]:
        """Yield a private folder for the files of an answer; it is removed at the end unless kept.

        Raises:
            RunError: the folder cannot be made, or the block cannot write into it.
        """
        with file_errors(self._field, _CANNOT):
            make_folder(self._place, PRIVATE)
        with private_folder(self._place, self._field) as draft, file_errors(self._field, _CANNOT):
            yield draft

    def seal(self, draft: Path, names: Iterable[str]) -> dict[str, Written]:
        """Flush the files of these names to disk, and remove all else from the draft.

        Raises:
            RunError: a file is missing, or cannot be read or flushed.
        """
        wanted = set(names)
        with file_errors(self._field, _CANNOT):
            every = sorted(Path(at, name) for at, _, names in walked(draft) for name in names)
            paths = {path.relative_to(draft).as_posix(): path for path in every}
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
        """Store a sealed draft under its receipt, before the receipt is committed.

        Raises:
            RunError: the draft cannot be stored.
        """
        place = self._of(receipt)
        if place.exists():  # the same files, of somebody who was cut off before the commit
            return
        with file_errors(self._field, _CANNOT):
            sync(draft)
            os.rename(draft, place)
            sync(self._place)

    def take(
        self, receipt: bytes, files: Mapping[str, Written], names: Iterable[str], target: Path
    ) -> None:
        """Copy files of a committed answer, after a check of each against the receipt.

        Raises:
            PolicyError: a file is missing or damaged.
            RunError: a file cannot be written.
        """
        place = self._of(receipt)
        for name in names:
            with file_errors(self._field, "has an answer that cannot be read"):
                intact = is_written(place / name, files[name])
            if not intact:
                raise PolicyError(
                    self._field,
                    "has lost the files of this answer, or they are damaged",
                    "restore its folder of answers from a backup, or ask with --fresh: a new"
                    " charge",
                )
            with file_errors(self._field, _CANNOT):
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(place / name, target / name)

    def _of(self, receipt: bytes) -> Path:
        return self._place / hashlib.blake2b(receipt, digest_size=16).hexdigest()


class Output:
    """A published folder.

    Args:
        out: the folder's path.
        manifest: the name of the file in it that lists the others.
        field: the name of ``out`` in the command's errors.
    """

    def __init__(self, out: Path, manifest: str, field: str = "OUT") -> None:
        self._out, self._manifest, self._field = out, manifest, field

    def existing_manifest(self) -> bytes | None:
        """Return the manifest of an existing output; ``None`` if there is nothing at its path.

        Raises:
            UsageError: something else is at the path.
        """
        if not self._out.exists() and not self._out.is_symlink():
            return None
        try:
            return (self._out / self._manifest).read_bytes()
        except ABSENT:
            raise self._foreign_output() from None
        except OSError as error:
            raise file_error(self._field, "cannot be read", error) from None

    def check(self, run_id: str | None) -> None:
        """Refuse an existing output, unless it belongs to the answer of this run.

        Args:
            run_id: the answer's run id; ``None``: the question is not answered yet, so that no
                output of it can exist.

        Raises:
            UsageError: something else is at the path.
            RunError: no folder can be made there.
        """
        current = self.existing_manifest()
        if current is None:
            require_folder(self._field, self._out)
            return
        with contextlib.suppress(msgspec.MsgspecError, UnicodeError):
            if run_id and msgspec.json.decode(current, type=_Named).run_id == run_id:
                return
        if run_id is None:
            rule = "exists and is not of this answer, which would be a new one"
            raise UsageError(self._field, rule, "name a new folder: the answer is a new charge")
        raise self._foreign_output()

    def publish(self, manifest: bytes, files: Mapping[str, Written], fill: Fill) -> list[str]:
        """Make the folder match its manifest: as a whole, or file by file if it exists already.

        Args:
            files: the files of the manifest.
            fill: writes some of them into a folder.

        Returns:
            Names of the files that were damaged or missing in the existing folder.

        Raises:
            UsageError: something else is at the path.
            RunError: a file cannot be written.
        """
        current = self.existing_manifest()
        if current not in (None, manifest):
            raise self._foreign_output()
        with file_errors(self._field, "cannot be read"):
            damaged = [
                name for name, data in files.items() if not is_written(self._out / name, data)
            ]
        if current is not None and not damaged:
            sweep(self._out.parent)  # whoever made it may have been killed before it tidied up
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

    def _foreign_output(self) -> UsageError:
        return UsageError(
            self._field,
            "exists and is not of this answer, or its manifest is damaged",
            "name a new folder, or move this one away and run again: the same answer at no charge",
        )


def archive_of(account: str | Path, beside: Path) -> Path:
    """Return the folder with the files of an account's answers.

    Args:
        account: path or URL of the account.
        beside: a folder of this machine, used if the account is a database.
    """
    file = file_of(account)
    return beside / "dpstream.answers" if file is None else file.with_name(f"{file.name}.answers")


def written(path: Path) -> Written:
    """Return the size and digest of a file.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
        return Written(file.tell(), digest.hexdigest())


def is_written(path: Path, wanted: Written | None) -> bool:
    """Return whether a file has the size and digest that were written.

    Raises:
        OSError: it cannot be read.
    """
    try:
        return written(path) == wanted
    except ABSENT:
        return False
