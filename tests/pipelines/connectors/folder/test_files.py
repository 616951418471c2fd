"""The rows of one closed file: its place, its given stamp, and what it has against it."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.pipelines.connectors.folder.files import Files
from dpstream.pipelines.connectors.folder.store import Folder, place
from dpstream.pipelines.formats.rows import Refused, Rows
from tests.pipelines.formats.test_parquet import plain_bomb

CLOSED = 1_700_000_000_000_000


def parts(folder: Path, kind: str, file: tuple[str, int, int, int]) -> list[Rows | Refused]:
    files = Files(Folder(str(folder)), kind, ("a", "_closed"))
    pieces: list[Rows | Refused] = []
    for piece in files.pieces(file):
        if isinstance(piece, Refused):
            pieces.append(piece)
            continue
        for where, part in files.parts(piece):
            assert where == place(file[0])
            pieces.append(part)
    return pieces


def test_rows_stand_behind_their_names_place(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("b,a\n1,u\n2,v\n")
    [rows] = parts(tmp_path, "csv", ("x.csv", CLOSED, 2, -1))
    assert isinstance(rows, Rows) and rows.offset == place("x.csv").base
    assert rows.batch["a"].to_pylist() == ["u", "v"]
    assert rows.batch["_closed"].cast(pa.int64()).to_pylist() == [CLOSED] * 2


def test_counts_and_sizes_are_held_against_it(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n')
    base = place("x.jsonl").base
    for rows, size, reason in ((7, -1, "row_count"), (-1, 3, "file_changed")):
        pieces = parts(tmp_path, "jsonl", ("x.jsonl", CLOSED, rows, size))
        assert isinstance(pieces[1], Refused)
        assert (pieces[1].offsets.tolist(), pieces[1].reasons) == ([base + 1], [reason])


def test_each_row_group_is_a_piece(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": ["x"] * 5}), tmp_path / "x.parquet", row_group_size=2)
    base = place("x.parquet").base
    pieces = parts(tmp_path, "parquet", ("x.parquet", CLOSED, 5, -1))
    assert [part.offset - base for part in pieces if isinstance(part, Rows)] == [0, 2, 4]


def test_files_that_are_none(tmp_path: Path) -> None:
    pq.write_table(pa.table({"b": [1]}), tmp_path / "other.parquet")
    (tmp_path / "no.parquet").write_bytes(b"no")
    for name, reason in (("other", "missing_column"), ("no", "unreadable_file"),
                         ("none", "unreadable_file")):  # fmt: skip
        [refused] = parts(tmp_path, "parquet", (f"{name}.parquet", CLOSED, -1, -1))
        assert isinstance(refused, Refused) and refused.reasons == [reason]


def test_a_file_that_unpacks_to_much_more_is_a_dead_letter(tmp_path: Path) -> None:
    """A stream that runs has its charge already: other files are read on."""
    plain_bomb(tmp_path / "x.parquet")
    [refused] = parts(tmp_path, "parquet", ("x.parquet", CLOSED, -1, -1))
    assert isinstance(refused, Refused) and refused.reasons == ["unreadable_file"]
