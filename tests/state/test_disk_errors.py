"""What errors of the system mean: the cause, and what to do."""

import builtins
import errno
import fcntl
import os
import tempfile
from pathlib import Path

import pytest

from dpstream.accounting.errors import RunError, UsageError
from dpstream.state.disk_errors import (
    DEVICE,
    FULL,
    MEMORY,
    MISSING,
    PASSING,
    RIGHTS,
    UNKNOWN,
    cause_at,
    cause_of,
    failed_read,
    file_error,
    lock_failure,
    memory_error,
    out_of_memory,
    read_failure,
    require_folder,
    verdict,
)

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
    assert verdict(damaged, ValueError("text"), file, tmp_path / "none") is damaged
    assert verdict(damaged, OSError("a library's own"), file) is damaged
    for error in (OSError(errno.EIO, "text"), MemoryError("text")):
        named = verdict(damaged, error, file)
        assert named.field == "table.path" and cause_of(error).reason in named.rule
    with monkeypatch.context() as patch:
        failing(patch, "open", errno.EIO, builtins)
        named = verdict(damaged, ValueError("text"), file)
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
