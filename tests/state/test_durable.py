"""Files that appear whole or not at all: made once, or put in another's place."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpstream.state import durable


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


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
