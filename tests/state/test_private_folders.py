"""A private folder is its process's: gone with it, and removed by the next one if it was killed."""

import contextlib
import fcntl
import os
import shutil
import stat
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from dpstream.state.private_folders import private_folder, sweep


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
