"""Files of dead letters whose name is the digest of their bytes: damage is noticed."""

from pathlib import Path

import pyarrow as pa
import pytest

from dpstream.accounting.errors import RunError
from dpstream.dp_transforms.batches import DEAD_LETTER_SCHEMA
from dpstream.pipelines.connectors.dead_letters import check_dead_letters
from dpstream.pipelines.connectors.write import write_dead_letters
from tests.faults.damage import flip


def test_a_damaged_file_is_refused_and_written_again(tmp_path: Path) -> None:
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
    with pytest.raises(RunError) as caught:
        check_dead_letters(folder)
    assert caught.value.field == "dead_letter" and caught.value.exit_code == 4
    assert write_dead_letters(folder, [letters]) == path
    check_dead_letters(folder)
    assert path.read_bytes() == before and path.stat().st_mode & 0o777 == 0o600
