"""Offsets of time zones, as arrays: local times become instants, and instants local times.

A zone is a list of changes between 1900 and 2099, read once from the tz database.  Of two equal
local times, when a clock is set back, the first is meant; a local time that was skipped has the
offset before the change: PEP 495 with ``fold = 0``.
"""

import functools
import hashlib
from datetime import datetime, timedelta
from typing import NamedTuple
from zoneinfo import ZoneInfo

import numpy as np

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import required

_SECOND = 1_000_000
#: The days whose offsets are looked up: those of 1900 to 2099, from 1970.
_FIRST_DAY, _LAST_DAY = -25_567, 47_481


class Zone(NamedTuple):
    """The offsets of a time zone.

    Attributes:
        changes: (n,) int64 micros since 1970, in UTC, at which the offset changes.
        offsets: (n + 1,) int64 micros to add to UTC, before, between and after the changes.
    """

    changes: Int64
    offsets: Int64

    def utc(self, local: Int64) -> Int64:
        """Return the instants of local times, see the module."""
        switch = self.changes + np.maximum(self.offsets[:-1], self.offsets[1:])
        return local - self.offsets[np.searchsorted(switch, local, side="right")]

    def digest(self, end: int) -> str:
        """Return a digest of the offsets until an instant."""
        changes = self.changes[self.changes < end]
        parts = changes.astype("<i8").tobytes(), self.offsets[: len(changes) + 1].astype("<i8")
        return hashlib.blake2b(parts[0] + parts[1].tobytes(), digest_size=8).hexdigest()


@functools.lru_cache(maxsize=16)
def zone_of(name: str) -> Zone:
    """Return the offsets of a zone of the tz database, from its first day of 1900 to 2099."""
    zone = ZoneInfo(name)

    def offset(second: int) -> int:
        return seconds(datetime.fromtimestamp(second, zone).utcoffset())

    @functools.cache
    def seconds(shift: timedelta | None) -> int:
        return int(required(shift, "a zone has an offset").total_seconds())

    days = [offset(day * 86_400) for day in range(_FIRST_DAY, _LAST_DAY)]
    changes, offsets = list[int](), [days[0]]
    for index in np.flatnonzero(np.diff(days)).tolist():
        low, high = (_FIRST_DAY + index) * 86_400, (_FIRST_DAY + index + 1) * 86_400
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if offset(middle) == offsets[-1] else (low, middle)
        changes.append(high)
        offsets.append(days[index + 1])
    return Zone(np.array(changes, np.int64) * _SECOND, np.array(offsets, np.int64) * _SECOND)
