"""Dead letters: positions and rules, for their owner alone."""

import stat
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from dpstream.accounting.errors import RunError
from dpstream.pipelines.formats.rows import Refused
from dpstream.pipelines.tabulation.dead_letters import dead_letter_folder, write


def test_positions_and_rules_for_the_owner_alone(tmp_path: Path) -> None:
    folder = dead_letter_folder(tmp_path / "out")
    assert folder == tmp_path / "dead_letter" / "out"
    refused = [Refused(np.array([70, 7]), ["age", "sex"]), Refused(np.array([], np.int64), [])]
    assert write(folder, refused) == 2
    [file] = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert pq.read_table(file).to_pylist() == [
        {"partition": 0, "offset": 7, "reason": "sex"},
        {"partition": 0, "offset": 70, "reason": "age"},
    ]
    assert write(folder, refused) == 2 and len(list(folder.iterdir())) == 1


def test_nothing_is_no_file(tmp_path: Path) -> None:
    assert write(tmp_path / "none", [Refused(np.array([], np.int64), [])]) == 0
    assert not (tmp_path / "none").exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="--dead-letter"):
        write(tmp_path / "file" / "inside", [Refused(np.array([1]), ["age"])])
