"""Files that appear whole or not at all: made once, or put in another's place.

Drafts: nobody's are swept at once, somebody's never, whoever looks and whatever their age.

A lock keeps others waiting as long as its process lives, and says where there are none.

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
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from dpstream.state import durable
from dpstream.state.durable import drafted, sweep
from dpstream.state.locks import free, held, private_folder
from dpstream.state.locks import sweep as sweep_of_locks


def child(folder: Path, code: str) -> subprocess.Popen[str]:
    """A process that has made a draft of ``folder/x``."""
    text = (
        "import os, sys, signal\nfrom pathlib import Path\n"
        "from dpstream.state.durable import drafted\n"
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


def test_the_first_writer_makes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    assert durable.put_once(path, b"first", mode=0o600)
    assert not durable.put_once(path, b"second")
    assert path.read_bytes() == b"first" and path.stat().st_mode & 0o777 == 0o600
    assert names(path.parent) == ["file"]


def test_of_several_files_those_that_are_there_stay(tmp_path: Path) -> None:
    old, new = tmp_path / "a" / "old", tmp_path / "b" / "new"
    assert durable.put_entry(old, b"first")
    assert durable.put_entries([(old, b"other"), (new, b"new")]) == [False, True]
    assert (old.read_bytes(), new.read_bytes()) == (b"first", b"new")
    durable.put_again(old, b"again")
    assert old.read_bytes() == b"again" and names(old.parent) == ["old"]


def test_a_draft_takes_the_place_only_where_the_block_ends_well(tmp_path: Path) -> None:
    out = tmp_path / "file"
    out.write_bytes(b"old")
    with pytest.raises(ValueError, match="half"), durable.replacing(out) as draft:
        draft.write_bytes(b"half")
        raise ValueError("half")
    assert out.read_bytes() == b"old" and names(tmp_path) == ["file"]
    with durable.replacing(out, 0o600) as draft:
        draft.write_bytes(b"whole")
    assert out.read_bytes() == b"whole" and out.stat().st_mode & 0o777 == 0o600
    assert names(tmp_path) == ["file"]


def test_a_draft_is_on_disk_before_it_takes_the_place_and_the_place_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, flushed, real = tmp_path / "file", list[tuple[int, bool]](), os.fsync
    out.write_bytes(b"old")

    def fsync(descriptor: int) -> None:
        flushed.append((os.fstat(descriptor).st_ino, out.read_bytes() == b"new"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with durable.replacing(out) as draft:
        draft.write_bytes(b"new")
    assert flushed == [(out.stat().st_ino, False), (tmp_path.stat().st_ino, True)]


@pytest.fixture(params=[0, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    old = os.umask(request.param)
    yield request.param
    os.umask(old)


def modes(folder: Path) -> dict[str, int]:
    return {p.relative_to(folder).as_posix(): p.stat().st_mode & 0o777 for p in folder.rglob("*")}


def test_modes_do_not_depend_on_a_wide_umask(umask: int, tmp_path: Path) -> None:
    """It can only take rights away."""
    durable.put_once(tmp_path / "public" / "a" / "file", b"")
    durable.put_once(tmp_path / "private" / "a" / "file", b"", durable.PRIVATE)
    with durable.replacing(tmp_path / "public" / "other") as draft:
        draft.touch()
    public, folder = 0o644 & ~umask, 0o755 & ~umask
    assert modes(tmp_path / "public") == {"a": folder, "a/file": public, "other": public}
    assert modes(tmp_path / "private") == {"a": 0o700, "a/file": 0o600}
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o700


def test_a_published_folder_can_be_read_by_others(umask: int, tmp_path: Path) -> None:
    draft, out = tmp_path / "draft", tmp_path / "out"
    (draft / "a").mkdir(parents=True)
    (draft / "a" / "file").touch()
    draft.chmod(0o700)
    durable.sync_tree(draft)
    assert draft.stat().st_mode & 0o777 == 0o700
    durable.publish_folder(draft, out)
    assert modes(out) == {"a": 0o755 & ~umask, "a/file": 0o644 & ~umask}
    assert out.stat().st_mode & 0o777 == 0o755 & ~umask
    draft.mkdir()
    with pytest.raises(FileExistsError):
        durable.publish_folder(draft, out)


def test_a_folder_is_on_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file and folder in it, and the folder that has the name after."""
    draft, out = tmp_path / "draft", tmp_path / "out"
    (draft / "a").mkdir(parents=True)
    (draft / "a" / "file").touch()
    before, after, real = set[int](), set[int](), os.fsync
    inside = {path.stat().st_ino for path in (draft, *draft.rglob("*"))}

    def fsync(descriptor: int) -> None:
        (after if out.exists() else before).add(os.fstat(descriptor).st_ino)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    durable.sync_tree(draft)
    durable.publish_folder(draft, out)
    assert before == inside and after == {tmp_path.stat().st_ino}


def test_no_folder_is_made_in_the_root_of_the_file_system(tmp_path: Path) -> None:
    path = Path("/dpstream-nowhere/x/y")
    with pytest.raises(FileNotFoundError):
        durable.make_folder(path)
    assert not path.parent.parent.exists()
    durable.make_folder(Path("/tmp"))
    durable.make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


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
        sweep_of_locks(tmp_path)
        assert (folder / "shard-0000.arrow").exists()
    assert not list(tmp_path.iterdir())
    draft = tmp_path / ".dpstream-work-abc"  # of one that was killed a moment ago
    draft.mkdir()
    (draft / "lock").touch()
    (draft / "shard-0000.arrow").write_bytes(b"private")
    sweep_of_locks(tmp_path)
    assert not draft.exists()


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
    sweep_of_locks(tmp_path)
    assert not list(tmp_path.iterdir())


def test_without_a_lock_a_folder_s_age_decides(tmp_path: Path) -> None:
    draft = tmp_path / ".dpstream-work-abc"
    draft.mkdir()
    sweep_of_locks(tmp_path)
    assert draft.exists()  # just being made
    aged(draft)
    sweep_of_locks(tmp_path)
    assert not draft.exists()
    none = mock.patch.object(fcntl, "flock", side_effect=OSError(95, "not supported"))
    with none, private_folder(tmp_path, "folder") as folder:
        sweep_of_locks(tmp_path)
        assert folder.exists()
        aged(folder.parent)
        sweep_of_locks(tmp_path)
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
