"""A lock keeps others waiting as long as its process lives, and says where there are none."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from dpstream.state.locks import free, held

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
