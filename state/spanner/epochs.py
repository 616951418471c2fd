"""Fencing epochs: what keeps a worker that was asleep from a step whose own fence is gone.

A step's row in ``Steps`` can be inserted only once, and so can that of a decision of BOUND.  A
stream of years cannot keep all of them.  So windows, and the trigger times that decisions follow,
are counted in fencing epochs of ``EPOCH_LENGTH``; every commit of a step or a decision touches the
row of its fencing epoch in ``Progress``, which must be there.  Rows of a closed fencing epoch go
together with the epoch's own; who finds it missing opens it, in a transaction that asks whether it
was closed:

* windows: those before ``RetainedWindows.dropped`` are, and take no more steps;
* decisions: those that followed a trigger time of a fencing epoch before the one of the last
  decision are: whoever would follow them was overtaken.
"""

from typing import Any

import msgspec
from google.cloud import spanner
from google.cloud.spanner_v1.database import Database

from dpstream.state.retention_store import RETAINED_WINDOWS, RetainedWindows
from dpstream.state.spanner.batch import Mutations
from dpstream.state.spanner.client import commit, transact
from dpstream.state.spanner.metadata import named
from dpstream.state.spanner.schema import BOUND

#: Windows, or trigger times, of a fencing epoch.
EPOCH_LENGTH = 64
_WINDOWS, _DECISIONS = -(1 << 20), -(1 << 40)


def of_window(window: int) -> int:
    """``WindowIndex`` of the row of a window's fencing epoch."""
    return _WINDOWS - window // EPOCH_LENGTH


def of_decision(trigger_time: int) -> int:
    """``WindowIndex`` of the fencing epoch's row for the trigger time a decision follows."""
    return _DECISIONS - trigger_time // EPOCH_LENGTH


def open_fencing_epoch(database: Database, generation: int, part: int, epoch: int) -> bool:
    """Open a fencing epoch that is not there; False: it is closed for good."""

    def work(transaction: Any) -> bool:
        if epoch > _DECISIONS:
            name = spanner.KeySet(keys=[[named(generation, RETAINED_WINDOWS)]])
            texts = [text for (text,) in transaction.read("Meta", ("Value",), name)]
            retained = (
                msgspec.json.decode(texts[0], type=RetainedWindows) if texts else RetainedWindows()
            )
            number, past = _WINDOWS - epoch, retained.dropped
        else:
            row = spanner.KeySet(keys=[[part, BOUND]])
            decided = [
                trigger_time for (trigger_time,) in transaction.read("Progress", ("Reached",), row)
            ]
            number, past = _DECISIONS - epoch, decided[0] if decided else 0
        if (number + 1) * EPOCH_LENGTH <= past:
            return False
        columns = ("Part", "WindowIndex", "Reached")
        transaction.insert_or_update("Progress", columns, [[part, epoch, 0]])
        return True

    return bool(transact(database, work))


def close_decisions(database: Database, part: int, decided: int) -> None:
    """Close the fencing epochs before a committed decision; drop the rows of their decisions."""
    number, out = decided // EPOCH_LENGTH, Mutations()
    out.delete_between("Progress", (part, _DECISIONS - number + 1), (part, _DECISIONS + 1))
    out.delete_between("Steps", (part, BOUND, 0), (part, BOUND, number * EPOCH_LENGTH))
    commit(database, out.fill)


def close_windows(database: Database, part: int, dropped: int) -> None:
    """Close the fencing epochs that lie before ``RetainedWindows.dropped`` as a whole."""
    number, out = dropped // EPOCH_LENGTH, Mutations()
    out.delete_between("Progress", (part, _WINDOWS - number + 1), (part, _WINDOWS + 1))
    commit(database, out.fill)
