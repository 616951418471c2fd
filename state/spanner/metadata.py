"""Notes of the Spanner store: small public texts in its Meta table, changed by comparison."""

from typing import Any

from google.cloud import spanner
from google.cloud.spanner_v1.database import Database

from dpstream.state.spanner.client import read_rows, transact


def named(generation: int, name: str) -> str:
    """Name of a note's row; each generation of the state has notes of its own."""
    return f"note.{generation}.{name}" if generation else f"note.{name}"


def read_metadata(database: Database, name: str) -> str | None:
    """The text of a row, ``None`` if there is none."""
    rows = read_rows(database, "Meta", ("Value",), [(name,)])
    return next((str(value) for (value,) in rows), None)


def swap_metadata(database: Database, name: str, old: str | None, new: str | None) -> bool:
    """Replace a row's text durably if it is still ``old``; ``None`` stands for no row.

    Returns:
        Whether it was.  False as well when the answer of the commit that replaced it was lost
        and it is tried again: whoever cares reads the note (``state.ledger.lineage`` does).
    """
    key = spanner.KeySet(keys=[[name]])

    def swap(transaction: Any) -> bool:
        stored = [str(value) for (value,) in transaction.read("Meta", ("Value",), key)]
        if stored != ([] if old is None else [old]):
            return False
        if new is None:
            transaction.delete("Meta", key)
        else:
            transaction.insert_or_update("Meta", ("Name", "Value"), [[name, new]])
        return True

    return bool(transact(database, swap))
