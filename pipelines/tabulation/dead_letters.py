"""Dead letters of private files: positions and rules, for the operator alone.

They are the engine's own: a file named by its content, below a folder that nobody but its owner can
read.  A position is the number of a record's first byte in the file.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa

from dpstream.pipelines.formats.rows import Refused
from dpstream.state.disk_errors import file_errors


def dead_letter_folder(out: Path) -> Path:
    """Where dead letters go unless another folder is named: ``dead_letter/`` beside the output."""
    return out.parent / "dead_letter" / out.name


def letters(refused: Refused, partition: int = 0) -> pa.RecordBatch:
    """Refused positions as the engine's dead letters.

    Args:
        partition: number of the file.
    """
    # Beam comes with it: only where a record was refused.
    from dpstream.dp_transforms.batches import DEAD_LETTER_SCHEMA

    columns = [
        pa.array(np.full(len(refused.offsets), partition, np.int32)),
        pa.array(refused.offsets, pa.int64()),
        pa.array(refused.reasons, pa.string()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=DEAD_LETTER_SCHEMA)


def write(folder: Path, refused: Iterable[Refused]) -> int:
    """Write what was refused to a folder, which nobody else can read.

    Returns:
        How many records there are of them; for the operator, as it depends on the data.

    Raises:
        RunError: they cannot be written.
    """
    batches = [letters(one) for one in refused if len(one.offsets)]
    if not batches:
        return 0
    from dpstream.pipelines.connectors.write import write_dead_letters

    with file_errors("--dead-letter", "cannot be written"):
        write_dead_letters(folder, batches)
    return sum(batch.num_rows for batch in batches)
