"""Pieces of a file: every line is of exactly one."""

from pathlib import Path

import pytest

from dpstream.pipelines.formats.lines import MAX_LINE_BYTES
from dpstream.pipelines.tabulation import pieces as module
from dpstream.pipelines.tabulation.pieces import lines_of, pieces


def lines(path: Path, size: int) -> list[tuple[int, bytes]]:
    """(position, line) of all pieces."""
    positioned_lines = []
    for piece in pieces(path, size):
        for line_block in lines_of(piece):
            positioned_lines += list(
                zip(line_block.positions.tolist(), line_block.lines.to_pylist(), strict=True)
            )
            assert line_block.returns == any(b"\r" in line for line in line_block.lines.to_pylist())
            blank = [line in (b"\n", b"\r\n") for line in line_block.lines.to_pylist()]
            assert line_block.blank.tolist() == blank
    return positioned_lines


@pytest.mark.parametrize("end", [b"\n", b""])
def test_every_size_gives_the_same_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: bytes
) -> None:
    path = tmp_path / "file.txt"
    rows = [b"ab|c", b"", b"x" * 17, b"d\r", b"\r", b"", b"last"]
    path.write_bytes(b"\n".join([b"HEADER|LINE", *rows]) + end)
    expected, at = list[tuple[int, bytes]](), 12
    for row in rows:
        expected.append((at, row + b"\n"))
        at += len(row) + 1
    assert lines(path, 1 << 20) == expected
    monkeypatch.setattr(module, "BLOCK_BYTES", 3)
    for size in range(1, at + 3):
        assert lines(path, size) == expected, size


@pytest.mark.parametrize("data", [b"", b"HEADER", b"HEADER\n"])
def test_no_lines(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "file.txt"
    path.write_bytes(data)
    assert lines(path, 3) == []


def test_a_line_that_is_too_long_is_of_one_piece(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    long = b"x" * (3 * MAX_LINE_BYTES)
    path.write_bytes(b"H\na\n" + long + b"\nb\n")
    for size in (100, MAX_LINE_BYTES, 10 * MAX_LINE_BYTES):
        positioned_lines = lines(path, size) if size > 100 else lines(path, 1_000_003)
        assert [at for at, _ in positioned_lines] == [2, 4, 4 + len(long) + 1]
        assert len(positioned_lines[1][1]) > MAX_LINE_BYTES + 1 and positioned_lines[2][1] == b"b\n"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        pieces(tmp_path / "no.txt")
