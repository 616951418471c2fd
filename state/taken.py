"""Which keys of a step have taken it already: after a reshard, or a commit in parts.

A step is taken once for each key.  Shards of a store that is resharded may be at different steps;
the new shards continue after the last one, and keys that came from a shard that was ahead must not
take those steps again (``ReshardProgress``).  A step too large for one transaction is committed in
parts by key (``KeyShard.done``).  Either way the step is computed for the remaining keys, and its
releases are those that one undivided step would have given: keys do not depend on each other.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from dpstream.accounting.arrays import Bool, Ids, Int64
from dpstream.state.idtable import shard_of
from dpstream.state.retention_store import ReshardProgress
from dpstream.state.store import KeyShard


class TakenSteps:
    """The steps that the keys of a store's open windows have taken.

    Args:
        reshards: by window, the progress of the keys' earlier shards at each reshard.
    """

    def __init__(self, reshards: Mapping[int, Sequence[ReshardProgress]]) -> None:
        self._reshards = reshards

    def before_reshard(self, window: int, trigger: int, ids: Ids) -> Bool:
        """Return (n,) which of the key ids (n, 2) took the step on their shard of an earlier
        layout.
        """
        ahead = np.zeros(len(ids), np.bool_)
        for reshard in self._reshards.get(window, ()):
            progress = np.array(reshard.progress, np.int32)
            ahead |= progress[shard_of(ids, len(progress))] >= trigger
        return ahead

    def remaining(
        self, states: KeyShard, window: int, trigger: int, slots: Int64, ids: Ids
    ) -> tuple[Int64, Bool | None]:
        """Return the keys and rows that a step must still be computed for.

        Args:
            states: the shard; its keys that have taken the step are marked as done.
            slots: keys that are due; ids: (n, 2) key ids of the step's rows.

        Returns:
            (remaining due keys, (n,) rows whose key remains; ``None``: all of both).
        """
        ahead = None
        if window in self._reshards:
            ahead = self.before_reshard(window, trigger, ids)
            states.done[: states.size] |= self.before_reshard(window, trigger, states.table.ids)
        if not states.done.any():
            return slots, None if ahead is None else ~ahead
        at = states.table.find(ids)
        rows = (at < 0) | ~states.done[at]
        return slots[~states.done[slots]], rows if ahead is None else rows & ~ahead
