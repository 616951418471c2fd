"""Records come in batches, in pieces or whole, and the others go to the dead letter."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from dpstream.accounting.errors import PolicyError, RunError
from dpstream.pipelines.tabulation.pieces import pieces
from dpstream.pipelines.tabulation.private import lookup_of
from dpstream.pipelines.tabulation.reading import read, read_one
from tests.pipelines.tabulation.office import Office


def test_pieces_hold_every_record_once(made: Office) -> None:
    loaded = made.load()
    lookup, path = lookup_of(loaded.files, loaded.parameters), made.path("person-records.txt")
    batches = list(read(path, lookup, None))
    parts = [batch for piece in pieces(path, 1_500) for batch in read_one(piece, lookup, None)]
    assert len(parts) > 5 and sum(map(len, batches)) == 300
    for column in ("block", "codes"):
        a, b = (
            np.concatenate([getattr(x, column) for x in record_batches])
            for record_batches in (batches, parts)
        )
        assert (a == b).all()


def test_refused_records_are_written_once_whoever_reads_them(
    spoilt: Office, tmp_path: Path
) -> None:
    spoilt.spoil("person-records.txt", lambda lines: [*lines[:9], "nonsense", *lines[9:]])
    loaded = spoilt.load()
    lookup, path = lookup_of(loaded.files, loaded.parameters), spoilt.path("person-records.txt")
    for _ in range(2):
        assert sum(map(len, read(path, lookup, tmp_path / "letters"))) == 300
    [letter] = (tmp_path / "letters").iterdir()
    [row] = pq.read_table(letter).to_pylist()
    assert path.read_bytes()[row["offset"] :].startswith(b"nonsense\n")
    with pytest.raises(PolicyError, match="depends on the data") as refused:
        list(read(path, lookup, None))
    assert "nonsense" not in str(refused.value)


def test_a_file_that_is_gone_is_named(made: Office, tmp_path: Path) -> None:
    loaded = made.load()
    lookup = lookup_of(loaded.files, loaded.parameters)
    with pytest.raises(RunError, match=r"gone\.txt: cannot be read"):
        list(read(tmp_path / "gone.txt", lookup, None))
    [piece] = pieces(made.path("person-records.txt"))
    with pytest.raises(RunError, match=r"gone\.txt: cannot be read"):
        list(read_one(piece._replace(path=str(tmp_path / "gone.txt")), lookup, None))
