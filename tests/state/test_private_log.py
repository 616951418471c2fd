"""The private log: who may read it, what it never writes through, how large it grows.

What errors of the system mean: the cause, and what to do.

Private files in a git repository: those that it tracks are refused, no others.
"""

import builtins
import errno
import fcntl
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from dpstream.accounting.errors import RunError, UsageError
from dpstream.state import private_log
from dpstream.state.disk_errors import (
    DEVICE,
    FULL,
    MEMORY,
    MISSING,
    PASSING,
    QUOTA,
    RIGHTS,
    UNKNOWN,
    cause_at,
    cause_of,
    decode_error,
    failed_read,
    file_error,
    lock_failure,
    memory_error,
    out_of_memory,
    read_failure,
    require_folder,
)
from dpstream.state.private_log import (
    DEBUG,
    MAX_BYTES,
    MAX_ENTRIES,
    NAME,
    keep_beside,
    unexpected,
    what_next,
)
from dpstream.state.repository import refuse_tracked, repository_of
from tests.golden.refusals import Refused

CANARY = "CANARY7741"


def failure(text: str = CANARY) -> ValueError:
    """An error with a traceback."""
    try:
        raise ValueError(text)
    except ValueError as error:
        return error


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.mark.parametrize("umask", [0, 0o077])
def test_only_its_owner_reads_it(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        keep_beside(f"sqlite:{tmp_path / 's.db'}")
        fix = what_next(failure())
    finally:
        os.umask(before)
    log = tmp_path / NAME
    assert mode(log) == 0o600 and str(log) in fix and CANARY not in fix
    what_next(failure("another"))
    text = log.read_text()
    assert text.count("Traceback (most recent call last)") == 2 and "another" in text


def test_a_worker_writes_nothing(tmp_path: Path) -> None:
    """A process that began no command: no file, no traceback, whatever its environment says."""
    code = (
        "from tests.state.test_private_log import failure; "
        "from dpstream.dp_transforms.telemetry import guarded\n"
        "@guarded('records')\ndef stage(): raise failure()\n"
        "try: stage()\nexcept Exception as error: print(error)"
    )
    environment = {**os.environ, DEBUG: "1", "XDG_STATE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env=environment, check=True)  # fmt: skip
    assert "failed with ValueError" in done.stdout and CANARY not in done.stdout + done.stderr
    assert not list(tmp_path.rglob("*"))


def test_the_first_local_place_is_taken(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    keep_beside("spanner://p/i/d", None, tmp_path / "job" / "job.toml")
    assert str(tmp_path / "job" / NAME) in what_next(failure())


def test_no_test_writes_beside_the_job_of_another() -> None:
    """The jobs of this repository are loaded in their places, and tests share a process."""
    assert os.environ["XDG_STATE_HOME"] in what_next(failure())


def test_without_a_place_it_is_the_user_s_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    private_log.keep_in(None)
    what_next(failure())
    assert mode(tmp_path / "dpstream") == 0o700 and mode(tmp_path / "dpstream" / NAME) == 0o600


def test_another_s_file_is_left_alone(tmp_path: Path) -> None:
    """A link, a file that others can read, one with a second name, a pipe and a folder."""
    victim = tmp_path / "victim"
    victim.write_text("")
    victim.chmod(0o600)
    (tmp_path / NAME).symlink_to(victim)
    readable = tmp_path / "dpstream-errors-2.log"
    readable.touch(0o644)
    os.link(victim, tmp_path / "dpstream-errors-3.log")
    os.mkfifo(tmp_path / "dpstream-errors-4.log", 0o600)
    (tmp_path / "dpstream-errors-5.log").mkdir()
    (tmp_path / "dpstream-errors-6.log").symlink_to(tmp_path / "not-there")
    keep_beside(tmp_path / "s.db")
    fix = what_next(failure())
    assert "dpstream-errors-7.log" in fix
    assert (
        victim.read_text() == readable.read_text() == "" and not (tmp_path / "not-there").exists()
    )


def test_its_size_is_bounded(tmp_path: Path) -> None:
    """However often a command fails, and however long the text of the error is."""
    for _ in range(10):
        keep_beside(tmp_path / "s.db")
        for _ in range(MAX_ENTRIES + 5):
            what_next(failure("long" * 100_000))
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(sizes) == {NAME, "dpstream-errors.old.log"}
    assert max(sizes.values()) < 2 * MAX_BYTES
    keep_beside(tmp_path / "s.db")
    before = sum(sizes.values())
    for _ in range(3 * MAX_ENTRIES):
        what_next(failure("short"))
    after = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert 0 < after - before < 2_000 * MAX_ENTRIES


def test_threads_write_whole_entries(tmp_path: Path) -> None:
    keep_beside(tmp_path / "s.db")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: what_next(failure(f"error {n}!")), range(MAX_ENTRIES)))
    text = (tmp_path / NAME).read_text()
    assert all(text.count(f"ValueError: error {n}!") == 1 for n in range(MAX_ENTRIES))


def test_a_log_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    keep_beside(tmp_path / "absent" / "s.db")
    fix = what_next(failure())
    assert "could not be written" in fix and DEBUG in fix and CANARY not in fix


def test_what_the_system_refused_is_said() -> None:
    error = unexpected("dpstream replay", OSError(errno.EDQUOT, CANARY, CANARY))
    assert QUOTA.reason in error.rule and QUOTA.fix in error.fix and CANARY not in str(error)
    assert unexpected("dpstream replay", ValueError(CANARY)).rule == "failed with ValueError"
    assert unexpected("a stage", OSError(errno.ECONNREFUSED, CANARY)).rule.startswith("failed with")


class _Rendezvous(grpc.RpcError):
    """As grpc's own, which has no public name."""


def test_a_lost_connection_is_said_without_a_class(tmp_path: Path) -> None:
    keep_beside(tmp_path / "s.db")
    error = RuntimeError(CANARY)
    error.__cause__ = _Rendezvous(CANARY)
    for lost in (_Rendezvous(CANARY), error):
        refusal = unexpected("runner", lost)
        assert "lost its connection" in refusal.rule and "Rendezvous" not in str(refusal)
        assert CANARY not in str(refusal) and NAME not in refusal.fix
    assert not (tmp_path / NAME).exists()


def test_debug_prints_after_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keep_beside(tmp_path / "s.db")
    what_next(failure())
    assert capsys.readouterr().err == ""
    monkeypatch.setenv(DEBUG, "1")
    what_next(failure())
    first, *rest = capsys.readouterr().err.splitlines()
    assert "may hold private values" in first and CANARY in "".join(rest)


GOLDEN = Path(__file__).with_name("disk_errors.txt")
NUMBERS = (
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT,
    errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.EMFILE,
    errno.ENFILE, errno.EIO, errno.ENOMEM, errno.EFBIG, errno.ENOLCK, errno.ESTALE, errno.EPIPE,
)  # fmt: skip


def test_what_each_number_means() -> None:
    lines = []
    for number in NUMBERS:
        error = file_error(
            "sink.path", "cannot be written", OSError(number, "text", "/secret/path")
        )
        lines.append(f"{errno.errorcode[number]}\n  {error}\n")
    text = "".join(lines)
    if os.environ.get("REWRITE"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()
    assert "/secret" not in text


def test_a_folder_that_cannot_be_made_is_refused_by_its_cause(tmp_path: Path) -> None:
    """A file at the path or above it, and a link that leads to no folder, have different fixes."""
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    errors = list[RunError]()
    for place in ("file", "file/below/it", "link", "link/below"):
        with pytest.raises(RunError) as error:
            require_folder("sink.path", tmp_path / place)
        errors.append(error.value)
    assert [error.fix == errors[0].fix for error in errors] == [True, True, False, False]
    assert not {error.fix for error in errors} & {RIGHTS.fix, MISSING.fix}
    assert all(error.field == "sink.path" and "nowhere" not in str(error) for error in errors)
    (tmp_path / "folder").mkdir()
    (tmp_path / "good").symlink_to(tmp_path / "folder")
    for place in ("folder", "folder/new/below", "good/new", "new"):
        require_folder("sink.path", tmp_path / place)


def test_an_error_without_a_number() -> None:
    assert cause_of(OSError("text")) == UNKNOWN
    assert cause_of(OSError(errno.ENOSPC, "")) == FULL


def test_memory_that_ends_is_told_by_its_cause() -> None:
    assert cause_of(MemoryError("text")) == MEMORY == cause_of(OSError(errno.ENOMEM, ""))
    assert out_of_memory(RuntimeError("can't start new thread"))
    assert not out_of_memory(RuntimeError("text")) and not out_of_memory(OSError(errno.EIO, ""))
    assert memory_error("stage.bound").field == "memory"


@pytest.mark.parametrize(
    "error",
    [
        ImportError("x.so: failed to map segment from shared object"),
        OSError("libx.so: cannot allocate memory in static TLS block"),
        RuntimeError("std::bad_alloc"),
    ],
    ids=repr,
)
def test_a_library_that_has_no_memory_to_load_is_told_by_its_words(error: Exception) -> None:
    """Also where another error hides it, as where numba loads its compiler."""
    assert out_of_memory(error)
    hidden = OSError("could not load a library")
    hidden.__context__ = error
    assert out_of_memory(hidden)
    assert not out_of_memory(ValueError(str(error)))


def test_a_look_at_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert cause_at(tmp_path / "file") is None
    assert cause_at(tmp_path / "none" / "file") == MISSING
    cause = cause_at(tmp_path)
    assert cause is not None and cause.choice


def failing(monkeypatch: pytest.MonkeyPatch, name: str, number: int, module: object = os) -> None:
    """Let a function of a module fail."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, "text", "/secret/path")

    monkeypatch.setattr(module, name, fail)


def test_a_file_is_damaged_only_if_it_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that knows the system's error names it; of another the files are read again."""
    damaged = UsageError("table.path", "is not Parquet", "correct it")
    file = tmp_path / "file"
    file.write_bytes(b"none")
    assert decode_error(damaged, ValueError("text"), file, tmp_path / "none") is damaged
    assert decode_error(damaged, OSError("a library's own"), file) is damaged
    for error in (OSError(errno.EIO, "text"), MemoryError("text")):
        named = decode_error(damaged, error, file)
        assert named.field == "table.path" and cause_of(error).reason in named.rule
    with monkeypatch.context() as patch:
        failing(patch, "open", errno.EIO, builtins)
        named = decode_error(damaged, ValueError("text"), file)
    assert DEVICE.reason in named.rule and named.fix == DEVICE.fix and "secret" not in str(named)


def test_a_failed_read_without_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named if the files fail again, and else called one that passed."""
    file = tmp_path / "file"
    file.write_bytes(bytes(3 << 20))
    assert read_failure([file, tmp_path, tmp_path / "none"]) is None
    assert PASSING.reason in failed_read("statement", [file]).rule
    with monkeypatch.context() as patch:
        failing(patch, "open", errno.ESTALE, builtins)
        assert cause_of(OSError(errno.ESTALE, "")).reason in failed_read("statement", [file]).rule


@pytest.mark.parametrize(
    ("module", "name", "number"),
    [
        (fcntl, "lockf", errno.ENOLCK),
        (os, "fsync", errno.EDQUOT),
        (os, "fsync", errno.EIO),
        (tempfile, "TemporaryFile", errno.EROFS),
        (tempfile, "TemporaryFile", errno.EACCES),
        (builtins, "open", errno.ESTALE),
    ],
)
def test_a_look_tries_what_fails(
    module: object, name: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cause is the system's, whatever library reported an error without it."""
    file = tmp_path / "file"
    file.touch()
    failing(monkeypatch, name, number, module)
    assert cause_at(file, [file]) == cause_of(OSError(number, ""))
    assert list(tmp_path.iterdir()) == [file]


def test_locks_are_tried_where_a_file_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert lock_failure(tmp_path) is None
    with monkeypatch.context() as patch:
        failing(patch, "TemporaryFile", errno.ENOSPC, tempfile)
        assert lock_failure(tmp_path) is None
    failing(monkeypatch, "lockf", errno.ENOLCK, fcntl)
    failure = lock_failure(tmp_path)
    assert failure is not None and failure.errno == errno.ENOLCK


def test_too_many_open_files_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.EMFILE, "")

    monkeypatch.setattr(os, "open", full)
    assert cause_at(tmp_path / "file") == cause_of(OSError(errno.EMFILE, ""))


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
def test_a_file_is_refused_once_git_tracks_it(
    repository: Path, name: str, refused: Refused
) -> None:
    private = repository / "data" / name
    private.write_text("x")
    (repository / "data" / "a").write_text("x")
    git(repository, "add", "data/a")
    refuse_tracked("secret", private, "all know it")
    git(repository, "add", "--force", "--", f":(literal)data/{name}")
    error = refused(lambda: refuse_tracked("secret", private, "all know it"))
    assert error.field == "secret" and str(repository) not in str(error)
    git(repository, "rm", "-r", "--cached", "--", f":(literal)data/{name}")
    refuse_tracked("secret", private, "all know it")


def test_a_folder_is_refused_if_git_tracks_a_file_of_it(repository: Path, refused: Refused) -> None:
    (repository / "data" / "part-1.parquet").write_text("x")
    refuse_tracked("dead_letter", repository / "data", "records")
    git(repository, "add", "data")
    refused(lambda: refuse_tracked("dead_letter", repository / "data", "records"))


def test_without_git_or_repository_nothing_is_refused(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / "a").write_text("x")
    git(repository, "add", "a")
    monkeypatch.setenv("PATH", str(repository))
    refuse_tracked("secret", repository / "a", "all know it")
    refuse_tracked("secret", Path("/none/at/all"), "all know it")
