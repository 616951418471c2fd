"""Copies of a record: which of the records with one id counts, where ids name records.

An id names a record of its unit.  A unit's records are decided in the order of their stamps, of
equal ones in that of keyed digests of what they hold.  Once a record is admitted, no other with its
id is, until every window that it can belong to is past its last trigger time
(``retention.dropped_before``); then the id names a new record.  A copy that holds the same is the
record itself, and has its decision.  One that holds something else never gets it: it is left out.

All this is a function of the unit's own records and of the plan.  The trigger times that a decision
spans are gone through one by one, so it does not matter how many are decided together, and what
blocks an id is the trigger time at which a record was admitted, never whether its position is still
in the store.  So neither the order of delivery, nor the number of shards, nor a crash between two
commits chooses between copies.  At most C pairs of a unit are admitted whatever its ids are, which
is all that the sensitivity needs.
"""

import numpy as np

from dpstream.accounting.arrays import Bool, Ids, Int32, Int64
from dpstream.accounting.plan.timeline import Timeline
from dpstream.state.idtable import IdTable
from dpstream.state.retention import dropped_before


class Copies:
    """When records of each id were last admitted."""

    def __init__(self, line: Timeline) -> None:
        self._line, self._ids = line, IdTable()
        self._last = np.zeros(0, np.int64)

    def admitted(self, ids: Ids, trigger_time: Int64 | Int32) -> None:
        """Record that records of these ids were admitted at these trigger times."""
        slots = self._ids.intern(ids)
        more = max(self._ids.size, 2 * len(self._last)) - len(self._last)
        if self._ids.size > len(self._last):
            self._last = np.concatenate([self._last, np.zeros(more, np.int64)])
        np.maximum.at(self._last, slots, trigger_time)

    def blocks(self, ids: Ids, trigger_time: Int64) -> Bool:
        """Return whether the id of each record, to be decided at these trigger times, is in use."""
        slots = self._ids.find(ids)
        last = np.where(slots < 0, 0, np.append(self._last, 0)[slots])
        return last > dropped_before(self._line, trigger_time)
