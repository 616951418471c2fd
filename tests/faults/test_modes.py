"""Rights of every file and folder that commands make under umask 0, in every system."""

import os
from pathlib import Path

import pytest

from tests.faults.systems import SYSTEMS, charged, done

#: What is made for its owner alone, by the beginnings of names below the folder.
PRIVATE = (
    "book", "ledger.db", "state", "dead_letter", "small.table", "noise.secret", "cache", "job.db",
    "small.names", "s.db",
)  # fmt: skip


@pytest.mark.parametrize("name", SYSTEMS)
def test_nothing_is_open_to_others(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system, folder = SYSTEMS[name], tmp_path / "work"
    old = os.umask(0)
    try:
        system.make(folder)
        # The account is made by the program, as `dpstream account create` does; all else is ours.
        mine = {path for path in folder.rglob("*") if path.name != "ledger.db"}
        monkeypatch.chdir(folder)
        charged(system)
        for words in system.reads:
            done(*words)
    finally:
        os.umask(old)
    made = [path for path in sorted(folder.rglob("*")) if path not in mine]
    assert made
    for path in made:
        mode, name = path.stat().st_mode & 0o777, path.relative_to(folder).as_posix()
        most = 0o755 if path.is_dir() else 0o644
        if name.lstrip(".").startswith(PRIVATE):
            most = 0o700 if path.is_dir() else 0o600
        assert not mode & ~most, f"{name} has mode {mode:o}"
    if system.out:
        assert Path(system.out).stat().st_mode & 0o777 == 0o755
