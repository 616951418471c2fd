"""The private log: who may read it, what it never writes through, how large it grows."""

import errno
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from dpstream.state import private_log
from dpstream.state.disk_errors import QUOTA
from dpstream.state.private_log import (
    DEBUG,
    MAX_BYTES,
    MAX_ENTRIES,
    NAME,
    keep_beside,
    unexpected,
    what_next,
)

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
