"""Drafts: nobody's are swept at once, somebody's never, whoever looks and whatever their age."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

from dpstream.state.drafts import drafted, sweep


def child(folder: Path, code: str) -> subprocess.Popen[str]:
    """A process that has made a draft of ``folder/x``."""
    text = (
        "import os, sys, signal\nfrom pathlib import Path\nfrom state.drafts import drafted\n"
        f"with drafted(Path({str(folder / 'x')!r})) as draft:\n"
        "    draft.write_bytes(b'private')\n"
        "    Path(f'{draft}-journal').touch()\n"
        "    print(draft.name, flush=True)\n"
        f"    {code}\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    made = subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, env=environment, text=True
    )
    assert made.stdout is not None
    with made.stdout as output:
        assert output.readline()
    return made


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_draft_goes_with_its_block(tmp_path: Path) -> None:
    with drafted(tmp_path / "x") as draft:
        assert draft.stat().st_mode & 0o777 == 0o600 and draft.name.startswith(".x.")
        draft.write_bytes(b"whole")
        os.rename(draft, tmp_path / "x")
    assert names(tmp_path) == ["x"]


def test_a_killed_writers_draft_is_swept_and_a_living_ones_is_not(tmp_path: Path) -> None:
    living, dying = (child(tmp_path, "signal.pause()") for _ in range(2))
    try:
        os.kill(dying.pid, signal.SIGKILL)
        dying.wait()
        assert len(names(tmp_path)) == 4
        old = [path for path in tmp_path.iterdir()]
        for path in old:
            os.utime(path, (0, 0))  # age decides nothing
        sweep(tmp_path)
        assert len(names(tmp_path)) == 2
    finally:
        living.kill()
        living.wait()
    sweep(tmp_path)
    assert names(tmp_path) == []


def test_without_locks_a_day_must_pass(tmp_path: Path) -> None:
    old, young = (tmp_path / f".x.{n}.dpstream-draft" for n in range(2))
    for draft in (old, young):
        draft.touch()
    os.utime(old, (0, 0))
    with mock.patch.object(fcntl, "flock", side_effect=OSError(95, "not supported")):
        sweep(tmp_path)
        with drafted(tmp_path / "y"):
            assert len(names(tmp_path)) == 2
    assert names(tmp_path) == [young.name]


def test_a_draft_that_is_swept_before_its_lock_is_made_again(tmp_path: Path) -> None:
    real, swept = fcntl.flock, list[bool]()

    def flock(descriptor: int, how: int) -> None:
        if not swept:
            swept.append(True)
            sweep(tmp_path)
        real(descriptor, how)

    with mock.patch.object(fcntl, "flock", flock), drafted(tmp_path / "x") as draft:
        assert draft.exists() and names(tmp_path) == [draft.name]


def test_a_sweeper_that_was_first_is_waited_for(tmp_path: Path) -> None:
    """It has the lock already when the writer asks for it, and the draft is gone after that."""
    real_open, real_lock = os.open, fcntl.flock
    lock_request, sweepers = threading.Event(), list[threading.Thread]()

    def remove(draft: Path, descriptor: int) -> None:
        lock_request.wait()
        time.sleep(0.1)
        draft.unlink()
        os.close(descriptor)

    def opened(draft: Path, flags: int, mode: int = 0o777) -> int:
        made = real_open(draft, flags, mode)
        if not sweepers:
            other = real_open(draft, os.O_RDONLY)
            real_lock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            sweepers.append(threading.Thread(target=remove, args=(draft, other)))
            sweepers[0].start()
        return made

    def flock(descriptor: int, how: int) -> None:
        lock_request.set()
        real_lock(descriptor, how)

    with (
        mock.patch.object(os, "open", opened),
        mock.patch.object(fcntl, "flock", flock),
        drafted(tmp_path / "x") as draft,
    ):
        sweepers[0].join()
        assert draft.exists() and names(tmp_path) == [draft.name]


def test_a_sweeper_has_the_lock_until_the_draft_is_gone(tmp_path: Path) -> None:
    draft, real, taken = tmp_path / ".x.0.dpstream-draft", Path.unlink, list[bool]()
    draft.touch()

    def unlink(path: Path, missing_ok: bool = False) -> None:
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                taken.append(True)
            except BlockingIOError:
                taken.append(False)
        real(path, missing_ok)

    with mock.patch.object(Path, "unlink", unlink):
        sweep(tmp_path)
    assert taken == [False] and names(tmp_path) == []


def test_many_that_make_and_sweep_lose_none(tmp_path: Path) -> None:
    lost: list[str] = []

    def work(number: int) -> None:
        for n in range(60):
            name = tmp_path / f"{number}-{n}"
            with drafted(name) as draft:
                sweep(tmp_path)
                try:
                    os.link(draft, name)
                except OSError:
                    lost.append(name.name)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not lost and len(names(tmp_path)) == 4 * 60


def test_what_has_its_name_is_not_opened(tmp_path: Path) -> None:
    """Killed after the link: to close the file would drop SQLite's locks on the store."""
    (tmp_path / "s.db").write_bytes(b"store")
    os.link(tmp_path / "s.db", tmp_path / ".s.db.0.dpstream-draft")
    with mock.patch.object(os, "open", side_effect=AssertionError):
        sweep(tmp_path)
    assert names(tmp_path) == ["s.db"]


def test_other_files_stay(tmp_path: Path) -> None:
    file_names = ["x.dpstream-draft", ".dpstream-draft", ".x.draft", ".x.tmp", "x"]
    for name in file_names:
        (tmp_path / name).touch()
    sweep(tmp_path)
    assert set(names(tmp_path)) >= set(file_names) - {".dpstream-draft"}
