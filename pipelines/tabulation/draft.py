"""The output folder: made beside its place, whole, and put there at once.

    .OUT.dpstream-table/     the draft: nobody but its owner can enter it
        run.json             which execution it is of, written before the first draw
        t1/..., t2/...       what is published
        manifest.json        the receipt: the digest of every file; what is not in it is not in OUT

Who works on a draft holds a lock on ``run.json`` as long as it lives.  A draft that is not locked
is of an execution that was cut off: the same one goes on with it, any other is refused.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, BinaryIO, NamedTuple

import msgspec

from dpstream.accounting.errors import PolicyError, RunError
from dpstream.accounting.limits import SINK_THREADS
from dpstream.accounting.tabulation.plan import Cost, TablePlan
from dpstream.state.disk_errors import file_error
from dpstream.state.drafts import drafted
from dpstream.state.durable import PUBLIC, make_folder, publish_folder, replacing, sync, sync_tree

MANIFEST, RUN = "manifest.json", "run.json"
_SUFFIX = ".dpstream-table"


class File(NamedTuple):
    """A part of a published table: name below the output folder, and content."""

    name: str
    content: bytes


class Written(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file that was published."""

    bytes: int
    digest: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an execution published; public.

    Attributes:
        program: ``p`` or ``h``.
        run_id, plan: of the execution, and the hash of its public plan.
        request: what tells whether it answers a request, as `of_run` gives it.
        epsilon, delta, mu, rho: what it costs, ``epsilon`` null: nothing is promised.
        insecure: a fixed test key was used: its noise can be subtracted by whoever knows it.
        files: by name below the folder.
        format: of this file.
    """

    program: str
    run_id: str
    plan: str
    request: str
    epsilon: float | None
    delta: float
    mu: float | None
    rho: float | None
    insecure: bool
    files: dict[str, Written]
    format: int = 1

    @property
    def encoded(self) -> bytes:
        """As it is kept."""
        return msgspec.json.format(msgspec.json.encode(self, order="sorted"), indent=1) + b"\n"

    def answers(self, request: str) -> bool:
        """Whether it is of this very request."""
        return self.request == of_run(request, self.run_id)


def manifest_of(
    plan: TablePlan, run_id: str, request: str, insecure: bool, files: dict[str, Written]
) -> Manifest:
    """The receipt of an execution.

    Args:
        request: keyed fingerprint of the plan and of all input; it is not shown.
    """
    cost = Cost(0.0, 0.0) if plan.exact else plan.cost()
    epsilon = None if plan.exact else cost.epsilon
    figures = epsilon, cost.delta, cost.mu, cost.rho
    shown = of_run(request, run_id)
    return Manifest(plan.parameters.program, run_id, plan.hash, shown, *figures, insecure, files)


def of_run(request: str, run_id: str) -> str:
    """What an output shows of a request: nothing that can be compared with another output.

    The fingerprint itself would be the same of any output of the same records, and another as soon
    as one record differs: two outputs would tell, without noise, whether anybody came or left.
    """
    shown = hashlib.blake2b(run_id.encode(), key=request.encode(), digest_size=16)
    return shown.hexdigest()


class Begun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which execution a draft is of; ``request`` as in `Manifest`."""

    run_id: str
    request: str

    def answers(self, request: str) -> bool:
        """Whether it is of this very request."""
        return self.request == of_run(request, self.run_id)


def decoded(data: bytes) -> Manifest:
    """The manifest of its bytes.

    Raises:
        PolicyError: they are of another form.
    """
    with contextlib.suppress(msgspec.MsgspecError, UnicodeError):
        return msgspec.json.decode(data, type=Manifest)
    raise PolicyError(MANIFEST, "is of another form", "use the program that wrote it")


def standing(out: Path) -> Manifest | None:
    """What stands at the output's place, ``None``: nothing.

    Raises:
        PolicyError: something else stands there.
    """
    if not out.exists() and not out.is_symlink():
        return None
    with contextlib.suppress(OSError):
        return decoded((out / MANIFEST).read_bytes())
    raise PolicyError("OUT", "exists and is no output of this command", "name a new folder")


class Draft:
    """The draft beside an output folder, locked.

    Attributes:
        path: of the draft.
    """

    def __init__(self, out: Path, path: Path, lock: IO[bytes]) -> None:
        self._out, self.path, self._lock = out, path, lock

    @property
    def begun(self) -> Begun | None:
        """Which execution it is of; ``None``: of none yet."""
        return _begun(self.path)

    def begin(self, begun: Begun) -> None:
        """Empty it, for an execution.

        Raises:
            RunError: it cannot be written.
        """
        with _writing():
            os.chmod(self.path, 0o700)  # who was cut off while publishing had opened it
            for path in sorted(self.path.iterdir()):
                if path.name != RUN:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            # In place, because the lock is on the file: what is cut off here had drawn nothing yet.
            self._lock.seek(0)
            self._lock.truncate()
            self._lock.write(msgspec.json.encode(begun))
            self._lock.flush()
            os.fsync(self._lock.fileno())
            sync(self.path)
            sync(self.path.parent)

    def drop_if_empty(self) -> None:
        """Remove it if it is of no execution: nothing was begun."""
        if _same(self.path, self._lock) and self.begun is None and self.manifest is None:
            shutil.rmtree(self.path, ignore_errors=True)

    @property
    def manifest(self) -> Manifest | None:
        """The receipt, if it is whole: all that was left was to put it in its place."""
        return _manifest(self.path)

    def written(self, names: Iterable[str]) -> dict[str, Written]:
        """The files of these names, flushed to disk; whatever else is there is removed.

        Raises:
            RunError: one is missing, or cannot be read or flushed.
        """
        wanted, paths = set(names), list[Path]()
        try:
            for folder, _, found in os.walk(self.path):
                for path in (Path(folder, name) for name in found):
                    if self._name(path) in wanted:
                        paths.append(path)
                    elif path.parent != self.path:
                        path.unlink()  # of a worker that was cut off
            sync_tree(self.path)
            with ThreadPoolExecutor(SINK_THREADS) as pool:
                written = pool.map(_digest_of, paths)
                out = dict(zip(map(self._name, paths), written, strict=True))
        except OSError as error:
            raise file_error("OUT", "cannot be read back", error) from None
        if wanted - out.keys():
            raise RunError(
                "runner",
                "has not handed over a part of the tables",
                "give workers and this process one folder: that of OUT",
            )
        return out

    def _name(self, path: Path) -> str:
        return path.relative_to(self.path).as_posix()

    def publish(self, receipt: bytes) -> None:
        """Put it in its place, with the receipt.

        Raises:
            PolicyError: something has come there meanwhile.
            RunError: it cannot be written.
        """
        if self._out.exists():
            raise PolicyError("OUT", "has come into being meanwhile", "name a new folder")
        with _writing():
            with replacing(self.path / MANIFEST) as draft:
                draft.write_bytes(receipt)
            (self.path / RUN).unlink(missing_ok=True)
            publish_folder(self.path, self._out)


def _begun(path: Path) -> Begun | None:
    with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeError):
        return msgspec.json.decode((path / RUN).read_bytes(), type=Begun)
    return None


def _manifest(path: Path) -> Manifest | None:
    with contextlib.suppress(OSError):
        return decoded((path / MANIFEST).read_bytes())
    return None


def left_over(out: Path) -> tuple[Begun | None, Manifest | None]:
    """What the draft of an output is of, for whoever plans: it is not made, and nothing is written.

    Raises:
        RunError: another process works on it, or it could not be made.
    """
    path = path_of(out)
    at = next(place for place in (path, *path.parents) if place.exists())
    if not at.is_dir() or not os.access(at, os.W_OK | os.X_OK):
        raise _unwritable()
    with contextlib.suppress(FileNotFoundError), open(path / RUN, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _taken() from None
        except OSError:
            pass  # no locks on this file system
    return _begun(path), _manifest(path)


def _unwritable() -> RunError:
    return RunError("OUT", "has a folder that cannot be written", "check it")


def _taken() -> RunError:
    return RunError("OUT", "is being made by another process", "wait for it")


def _digest_of(path: Path) -> Written:
    with open(path, "rb") as file:
        return _digest(file)


def _digest(file: BinaryIO) -> Written:
    found = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))  # type: ignore[arg-type]
    return Written(file.tell(), found.hexdigest())


def is_whole(out: Path, manifest: Manifest) -> bool:
    """Whether every file of an output is there, as its manifest has it."""
    for name, wanted in manifest.files.items():
        try:
            with open(out / name, "rb") as file:
                if _digest(file) != wanted:
                    return False
        except OSError:
            return False
    return True


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """What the system says of a file that cannot be written, as an error with a way out.

    Raises:
        RunError: instead of ``OSError``.
    """
    try:
        yield
    except OSError as error:
        raise file_error("OUT", "cannot be written", error) from None


def path_of(out: Path) -> Path:
    """Where the draft of an output is."""
    return out.parent / f".{out.name}{_SUFFIX}"


def write_file(folder: Path, file: File) -> None:
    """Write a file of a draft; who writes it again writes the same.

    It is whole at once, and on disk with the others (`Draft.written`).

    Raises:
        RunError: it cannot be written.
    """
    path = folder / file.name
    with _writing():
        make_folder(path.parent)
        with drafted(path, PUBLIC) as draft:
            draft.write_bytes(file.content)
            os.replace(draft, path)


@contextlib.contextmanager
def locked(out: Path) -> Iterator[Draft]:
    """The draft of an output, for this process alone.

    Raises:
        RunError: another process works on it, or it cannot be made.
    """
    path = path_of(out)
    while True:
        try:
            make_folder(path.parent)
            path.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(path / RUN, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError:
            raise _unwritable() from None
        with os.fdopen(descriptor, "r+b", buffering=0) as lock:  # nothing is left for its close
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _taken() from None
            except OSError:
                pass  # no locks on this file system
            if _same(path, lock):  # else who had it has put it in its place
                yield Draft(out, path, lock)
                return


def _same(path: Path, lock: IO[bytes]) -> bool:
    """Whether a lock is on the draft that is there."""
    try:
        return os.path.samestat(os.stat(path / RUN), os.fstat(lock.fileno()))
    except OSError:
        return False
