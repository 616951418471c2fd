"""Files that appear whole or not at all: made once, or put in another's place."""

import os
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
