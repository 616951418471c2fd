"""A lock keeps others waiting as long as its process lives, and says where there are none.

A private folder is its process's: gone with it, and removed by the next one if it was killed.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from dpstream.state.locks import free, held, private_folder, sweep

_CHILD = """
import sys
from pathlib import Path
from state.locks import held
with held(Path(sys.argv[1])) as there:
    print(there, flush=True)
    sys.stdin.read()
"""


def holder(path: Path) -> subprocess.Popen[str]:
    """A process that holds the lock."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    made = subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True,
    )  # fmt: skip
    assert made.stdout is not None and made.stdout.readline() == "True\n"
    return made


def test_a_lock_is_free_once_its_process_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with holder(path) as process:
        with free(path) as nobodys:
            assert nobodys is False
        process.send_signal(signal.SIGKILL)
    with free(path) as nobodys:
        assert nobodys is True
        with free(path) as again:
            assert again is False


def test_nothing_is_locked_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), free(tmp_path / "none"):
        pass
    with pytest.raises(OSError), held(tmp_path / "no" / "folder"):
        pass
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError), held(tmp_path / "link"):
        pass


def test_a_file_system_without_locks_says_so(tmp_path: Path) -> None:
    with mock.patch.object(fcntl, "flock", side_effect=OSError(95, "not supported")):
        with held(tmp_path / "lock") as there:
            assert there is False
        with free(tmp_path / "lock") as nobodys:
            assert nobodys is None


def aged(folder: Path) -> None:
    """A week ago."""
    os.utime(folder, (time.time() - 7 * 86_400,) * 2)


def test_a_folder_is_kept_while_its_launcher_lives_and_no_longer(tmp_path: Path) -> None:
    with private_folder(tmp_path, "folder") as folder:
        (folder / "shard-0000.arrow").write_bytes(b"private")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        aged(folder.parent)
        sweep(tmp_path)
        assert (folder / "shard-0000.arrow").exists()
    assert not list(tmp_path.iterdir())
    left = tmp_path / ".dpstream-work-abc"  # of one that was killed a moment ago
    left.mkdir()
    (left / "lock").touch()
    (left / "shard-0000.arrow").write_bytes(b"private")
    sweep(tmp_path)
    assert not left.exists()


def test_who_still_writes_while_a_folder_is_removed_leaves_nothing(tmp_path: Path) -> None:
    """A worker outlives its launcher: its file would stay, and keep the folder from going."""
    real, late = shutil.rmtree, list[str]()

    def slowly(folder: Path, **how: Any) -> None:
        with contextlib.suppress(OSError):
            (left / "7").write_bytes(b"private")
            late.append("written")
        real(folder, **how)
        with contextlib.suppress(OSError):
            (left / "8").write_bytes(b"private")
            late.append("written")

    with mock.patch.object(shutil, "rmtree", slowly), private_folder(tmp_path, "folder") as left:
        (left / "0").write_bytes(b"private")
    assert not late and not list(tmp_path.iterdir())


def test_what_was_cut_off_while_it_was_removed_goes_next_time(tmp_path: Path) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with (
        mock.patch.object(shutil, "rmtree", killed), pytest.raises(KeyboardInterrupt),
        private_folder(tmp_path, "folder") as left,
    ):  # fmt: skip
        (left / "0").write_bytes(b"private")
    [gone] = tmp_path.iterdir()
    assert list(gone.rglob("0"))
    sweep(tmp_path)
    assert not list(tmp_path.iterdir())


def test_without_a_lock_a_folder_s_age_decides(tmp_path: Path) -> None:
    left = tmp_path / ".dpstream-work-abc"
    left.mkdir()
    sweep(tmp_path)
    assert left.exists()  # just being made
    aged(left)
    sweep(tmp_path)
    assert not left.exists()
    none = mock.patch.object(fcntl, "flock", side_effect=OSError(95, "not supported"))
    with none, private_folder(tmp_path, "folder") as folder:
        sweep(tmp_path)
        assert folder.exists()
        aged(folder.parent)
        sweep(tmp_path)
        assert not folder.exists()


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_lock_that_fails_is_no_file_system_without_locks(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are locks, nobody goes on without one."""

    def fail(*_: object) -> None:
        raise OSError(number, "")

    (tmp_path / "file").touch()
    monkeypatch.setattr(fcntl, "flock", fail)
    for lock in (held(tmp_path / "file"), free(tmp_path / "file")):
        if number in (errno.EIO, errno.ESTALE):
            with pytest.raises(OSError), lock:
                pass
        else:
            with lock as acquired:
                assert not acquired
