"""A process that was killed in a commit of a ledger: whoever comes next rolls its journal back."""

import subprocess
from pathlib import Path

import pytest

from dpstream.accounting.errors import UsageError
from dpstream.state.ledger.open import read_ledger
from tests import accounts
from tests.faults.journals import leave_journal
from tests.faults.systems import SYSTEMS, charged, done
from tests.faults.test_disk import disk

__all__ = ["disk"]


@pytest.mark.parametrize("name", SYSTEMS)
def test_no_command_is_stopped_by_a_journal(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands that read and those that charge, of every system; the charge stays one."""
    system, folder = SYSTEMS[name], tmp_path / "work"
    system.make(folder)
    monkeypatch.chdir(folder)
    charged(system)
    entries = accounts.charges(system.ledger)
    assert len(entries) == 1
    for words in (*system.reads, system.charge):
        journal = leave_journal(Path(system.ledger))
        done(*words)
        assert not journal.exists() or words[0] in ("doctor", "report", "plan", "state")
    assert accounts.charges(system.ledger) == entries


def test_a_journal_on_a_disk_that_is_read_only(disk: Path) -> None:
    """It says what happened; on the same disk, writable again, the same call succeeds."""
    path = disk / "ledger.db"
    accounts.opened(path, "d").close()
    leave_journal(path)
    for option in ("ro", "rw"):
        subprocess.run(["mount", "-o", f"remount,{option}", str(disk)], check=True)
        if option == "ro":
            for look in (lambda: read_ledger(path), lambda: accounts.opened(path, "d")):
                with pytest.raises(UsageError, match="journal cannot be rolled back") as caught:
                    look()
                assert caught.value.field == "account.path"
    assert accounts.charges(path) == []
