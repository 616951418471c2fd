"""A command typed again over files that were damaged since: restored, or refused; never charged."""

import shutil
from pathlib import Path

import pytest

from dpstream.state.ledger.open import read_ledger
from tests.faults.damage import flip
from tests.faults.processes import files
from tests.faults.systems import SYSTEMS, call, charged, done

WITH_FILES = [name for name, system in SYSTEMS.items() if system.out]
#: Of folders of thousands of files.
MOST = 6


@pytest.mark.parametrize("name", WITH_FILES)
def test_no_damage_is_called_done(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit of each published file and of each file of dead letters; then one is missing."""
    system, folder = SYSTEMS[name], tmp_path / "work"
    system.make(folder)
    monkeypatch.chdir(folder)
    charged(system)
    entries = read_ledger(system.ledger)
    for place in filter(None, (system.out, system.letters)):
        before = files(Path(place))
        assert before
        for path in sorted(before)[:MOST]:
            flip(Path(place, path), 8 * (len(before[path]) // 2))
            again = call(*system.charge)
            if again.exit_code == 0:
                assert files(Path(place)) == before, path
                continue
            assert again.exit_code in (2, 3, 4) and "Fix: " in again.output, again.output
            shutil.move(place, tmp_path / "away")  # what the fix says
            done(*system.charge)
            if place == system.out:
                assert files(Path(place)) == before
            else:  # of a run that is finished, they are not written again
                shutil.rmtree(place, ignore_errors=True)
                shutil.copytree(tmp_path / "away", place)
                Path(place, path).write_bytes(before[path])
            shutil.rmtree(tmp_path / "away")
        assert read_ledger(system.ledger) == entries
