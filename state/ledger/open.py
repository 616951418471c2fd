"""Opens the ledger that a job names: the one place that knows which kinds of ledgers there are."""

from pathlib import Path

from dpstream.state.ledger.contract import Ledger
from dpstream.state.ledger.file import read_ledger
from dpstream.state.ledger.sqlite import SqliteLedger

__all__ = ["open_ledger", "read_ledger"]


def open_ledger(path: str | Path, data_set: str) -> Ledger:
    """The ledger of a data set, which is made if it is not there.

    Raises:
        PolicyError: the file is damaged, another program's, or of a newer version.
        RunError: it cannot be opened, or another process holds it for very long.
    """
    return SqliteLedger(path, data_set)
