"""Records of the private file in batches; those that break a rule go to the dead letter."""

from collections.abc import Callable, Iterator
from pathlib import Path

from dpstream.dp_transforms.tabulation.expand import Records
from dpstream.pipelines.tabulation import dead_letters
from dpstream.pipelines.tabulation.pieces import Piece, pieces
from dpstream.pipelines.tabulation.private import Lookup, read_piece, strict_refusal
from dpstream.state.disk_errors import file_errors


def read(path: Path, lookup: Lookup, letters: Path | None) -> Iterator[Records]:
    """All records of a file.

    Args:
        letters: folder of refused records; ``None``: they refuse the file.

    Raises:
        PolicyError: a record was refused, and there is no folder for it.
        RunError: the file cannot be read, or a dead letter not written.
    """
    for piece in _pieces(path):
        yield from read_one(piece, lookup, letters)


def read_one(
    piece: Piece,
    lookup: Lookup,
    letters: Path | None,
    callback: Callable[[int], None] = lambda _: None,
) -> Iterator[Records]:
    """The same of a piece; its dead letters are one file, whoever reads it.

    Args:
        callback: how many there are, for the operator.
    """
    name, refused = Path(piece.path).name, []
    with file_errors(name, "cannot be read"):
        for parsed in read_piece(piece, lookup):
            if letters is None and len(parsed.refused.offsets):
                raise strict_refusal(name)
            refused.append(parsed.refused)
            yield parsed.records
    if letters is not None:
        callback(dead_letters.write(letters, refused))


def _pieces(path: Path) -> list[Piece]:
    with file_errors(path.name, "cannot be read"):
        return pieces(path)
