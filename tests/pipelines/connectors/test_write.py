"""Writing of releases and dead letters, and the check of dead letters."""

import os
from argparse import Namespace
from pathlib import Path

import pyarrow as pa
import pytest

from dpstream.dp_transforms.batches import DEAD_LETTER_SCHEMA
from dpstream.pipelines.connectors.dead_letters import check_dead_letters
from dpstream.pipelines.connectors.write import (
    WriteDeadLetters,
    dead_letter_folder,
    write_dead_letters,
)
from tests.faults.damage import flip
from tests.golden.refusals import Refused
from tests.pipelines.connectors.files.test_sink import release
from tests.written import read_dead_letters, write_release


def test_dead_letters_are_their_owners_from_the_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the umask; releases can be read by others and written by their owner alone."""
    modes, link = [], os.link

    def look(draft: Path, path: Path) -> None:
        modes.append(draft.stat().st_mode & 0o777)
        link(draft, path)

    monkeypatch.setattr(os, "link", look)
    folder, letters = (
        tmp_path / "new" / "dead_letter" / "out",
        pa.RecordBatch.from_pylist(
            [{"partition": 0, "offset": 1, "reason": "malformed"}], schema=DEAD_LETTER_SCHEMA
        ),
    )
    old = os.umask(0)
    try:
        path = write_dead_letters(folder, [letters])
        write_release(tmp_path / "out", "csv", release(0, 1, ["a"]))
        (tmp_path / "mine").mkdir(mode=0o750)
        write_dead_letters(tmp_path / "mine", [letters])
    finally:
        os.umask(old)
    assert path is not None and path.stat().st_mode & 0o777 == 0o600
    assert modes == [0o600, 0o644, 0o600]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o750
    assert read_dead_letters(folder).num_rows == 1


@pytest.mark.parametrize("kind", ["parquet", "csv", "kafka", "pubsub", "bigquery"])
def test_dead_letters_of_every_kind_of_sink_are_written_so(tmp_path: Path, kind: str) -> None:
    """There is one writer, whatever the sink: it knows a folder only."""
    job = Namespace(dead_letter=str(tmp_path / "dead"), sink=Namespace(kind=kind))
    writer = WriteDeadLetters(job)._dofn  # type: ignore[arg-type]
    writer.start_bundle()
    row = {"partition": 0, "offset": 1, "reason": "malformed"}
    list(writer.process(pa.RecordBatch.from_pylist([row], schema=DEAD_LETTER_SCHEMA)))
    writer.finish_bundle()
    paths = [p for p in dead_letter_folder(job).iterdir()]  # type: ignore[arg-type]
    assert [p.stat().st_mode & 0o777 for p in paths] == [0o600]


def test_a_damaged_file_is_refused_and_written_again(tmp_path: Path, refused: Refused) -> None:
    """Whoever has the same dead letters again puts the file right."""
    rows = [{"partition": 0, "offset": 1, "reason": "malformed"}]
    letters = pa.RecordBatch.from_pylist(rows, schema=DEAD_LETTER_SCHEMA)
    folder = tmp_path / "dead"
    check_dead_letters(folder)
    path = write_dead_letters(folder, [letters])
    assert path is not None
    before = path.read_bytes()
    check_dead_letters(folder)
    flip(path, 8 * (len(before) // 2))
    refused(check_dead_letters, folder)
    assert write_dead_letters(folder, [letters]) == path
    check_dead_letters(folder)
    assert path.read_bytes() == before and path.stat().st_mode & 0o777 == 0o600
