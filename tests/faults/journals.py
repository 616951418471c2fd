"""A journal as a process leaves it that is killed in the middle of a commit."""

import os
import subprocess
import sys
from pathlib import Path

#: Writes more pages than its cache holds, so that some are in the file, and is killed.
_CHILD = """
import os, signal, sys
from dpstream.state.sqlite.database import open_file
db = open_file(sys.argv[1])
db.execute("PRAGMA cache_size = 1")
db.execute("BEGIN IMMEDIATE")
db.execute("CREATE TABLE lost (x)")
for _ in range(64):
    db.execute("INSERT INTO lost VALUES (zeroblob(8000))")
os.kill(os.getpid(), signal.SIGKILL)
"""

#: What SQLite writes first, once the pages of the journal are on disk.
_HOT = bytes.fromhex("d9d505f920a163d7")


def leave_journal(path: Path) -> Path:
    """Kill a process in a commit to a file; the journal that it leaves."""
    journal = Path(f"{path}-journal")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", _CHILD, str(path)], env=environment, check=False)
    assert done.returncode == -9
    assert journal.read_bytes().startswith(_HOT) and path.stat().st_size > 64 * 8000
    return journal
