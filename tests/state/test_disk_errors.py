"""What errors of the system mean: the cause, and what to do."""

import errno
import os
from pathlib import Path

import pytest

from dpstream.accounting.errors import RunError
from dpstream.state.disk_errors import (
    FULL,
    MEMORY,
    MISSING,
    RIGHTS,
    UNKNOWN,
    cause_at,
    cause_of,
    file_error,
    memory_error,
    out_of_memory,
    require_folder,
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


def test_too_many_open_files_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.EMFILE, "")

    monkeypatch.setattr(os, "open", full)
    assert cause_at(tmp_path / "file") == cause_of(OSError(errno.EMFILE, ""))
