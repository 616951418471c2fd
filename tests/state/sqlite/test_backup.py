"""Copies of a file: whole under their name, with a digest behind them, and never over another."""

from pathlib import Path

import pytest

from dpstream.accounting.errors import PolicyError, RunError, UsageError
from dpstream.state.sqlite.backup import (
    backup_file,
    check_file,
    copy_backup,
    drafted,
    publish,
    refuse_existing,
    replace_file,
    seal_backup,
)
from tests.state.conformance import IDENTITY, take_step
from tests.state.sqlite.bench import SqliteBench


def test_a_backup_is_the_store_of_one_instant(bench: SqliteBench, tmp_path: Path) -> None:
    store, out, progress = bench.open(), tmp_path / "b" / "backup", list[tuple[int, int]]()
    take_step(store, 1, [1, 2], 1)
    assert backup_file(bench.path, out, lambda done, of: progress.append((done, of))) == IDENTITY
    assert progress and progress[-1][0] == progress[-1][1]
    assert out.stat().st_mode & 0o77 == 0, "for its owner only"
    take_step(store, 2, [3], 2)
    copy = tmp_path / "copy"
    copy_backup(out, copy)
    assert check_file(copy) == IDENTITY
    there = SqliteBench(copy)
    assert there.open().progress() == [(0, 0, 1)]
    there.close()
    assert [path.name for path in out.parent.iterdir()] == ["backup"]


def test_nothing_is_overwritten(bench: SqliteBench, tmp_path: Path) -> None:
    out, draft = tmp_path / "out", tmp_path / "draft"
    out.write_text("mine"), draft.write_text("other")
    for attempt in (
        lambda: refuse_existing(out),
        lambda: backup_file(bench.path, out),
        lambda: publish(draft, out),
    ):
        with pytest.raises(UsageError) as caught:
            attempt()
        assert caught.value.field == "backup" and out.read_text() == "mine"


@pytest.mark.parametrize("at", [0, 10, -1, -16])
def test_any_other_byte_is_noticed(tmp_path: Path, at: int) -> None:
    file, copy = tmp_path / "backup", tmp_path / "copy"
    file.write_bytes(b"anything at all")
    seal_backup(file)
    copy_backup(file, copy)
    assert copy.read_bytes() == b"anything at all"
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(data)
    with pytest.raises(PolicyError, match="is damaged"):
        copy_backup(file, copy)


def test_a_file_without_a_digest_is_no_backup(bench: SqliteBench, tmp_path: Path) -> None:
    bench.open().close()
    bench.close()
    for content in (b"", b"short", b"x" * 100, Path(bench.path).read_bytes()):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(PolicyError, match="is damaged"):
            copy_backup(tmp_path / "file", tmp_path / "copy")


def test_a_store_that_is_replaced_is_kept_under_a_free_name(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    path.write_text("0"), (tmp_path / "s.db-wal").write_text("log of 0")
    for number, aside in enumerate(("s.db.old", "s.db.old1", "s.db.old2"), 1):
        draft = tmp_path / "draft"
        draft.write_text(str(number))
        assert replace_file(path, draft) == tmp_path / aside
        assert (tmp_path / aside).read_text() == str(number - 1) and path.read_text() == str(number)
    assert (tmp_path / "s.db.old-wal").read_text() == "log of 0"
    assert not (tmp_path / "s.db-wal").exists()


def test_a_draft_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    denied = pytest.raises(
        RunError, match=r"cannot be written: (there is no such|a file of that name)"
    )
    with denied, drafted(tmp_path / "file" / "out"):
        pass
    with pytest.raises(KeyboardInterrupt), drafted(tmp_path / "out") as draft:
        draft.write_text("half")
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
