"""The raw records of one window as columns, the raw counts, and the paper's errors against them.

Everything here is exact and private: for public or generated data only.  Memory for the paper's
59M records: 4 bytes each for user and key, 8 for the time, 4 more by trigger.

The measures of error (section 5 of the paper) are keys, L1, L2 and Linf against the raw histogram.
A key that is not published counts as 0.  They hold at the last trigger, as in the paper's tables;
``l1_average`` is the mean of L1 over all triggers and ``updates`` the number of published values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dpstream.accounting.arrays import Bool, Float64, Int32, Int64
from tests.bench.paper.synth import DAY_MICROS, Synth


@dataclass(frozen=True)
class Columns:
    """Records of one day as parallel arrays, in order of time (and of the file, where equal).

    Attributes:
        names: (K,) the distinct keys; ``key`` is (n,) their codes 0 .. K-1.
        time: (n,) micros since the start of the day.
        user: (n,) dense codes of the users; empty when they were not read.
    """

    names: pa.StringArray
    key: Int32
    time: Int64
    user: Int32

    def __len__(self) -> int:
        return len(self.key)

    def step_index(self, triggers: int) -> Int32:
        """(n,) trigger 1 .. T at which each record counts."""
        return (self.time // (DAY_MICROS // triggers) + 1).astype(np.int32)


def load(path: Path, users: bool = True, start: int = Synth().start) -> Columns:
    """Read a generated Parquet file (columns user, key, time) of the day that begins at ``start``.

    Args:
        users: whether the users are needed.
    """
    parts: dict[str, list[pa.ChunkedArray]] = {"key": [], "time": [], "user": []}
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            names = ["key", "time", "user"] if users else ["key", "time"]
            table = file.read_row_group(group, columns=names)
            parts["key"].append(table["key"].dictionary_encode())
            parts["time"].append(pa.chunked_array([table["time"].cast(pa.int64())]))
            if users:
                parts["user"].append(table["user"].dictionary_encode())
    key_names, key = _codes(parts["key"])
    _, user = _codes(parts["user"])
    chunks = [c.to_numpy() for chunk in parts["time"] for c in chunk.chunks]
    time = np.concatenate([np.zeros(0, np.int64), *chunks]) - start
    if (time[1:] < time[:-1]).any():
        order = np.argsort(time, kind="stable")
        key, time, user = key[order], time[order], user[order] if users else user
    return Columns(key_names, key, time, user)


def _codes(columns: Sequence[pa.ChunkedArray]) -> tuple[pa.Array, Int32]:
    """One dictionary for all chunks, and the (n,) codes."""
    chunks = [c for column in columns for c in column.chunks if len(c)]
    if not chunks:
        return pa.array([], pa.string()), np.zeros(0, np.int32)
    one = pa.chunked_array(chunks).unify_dictionaries()
    codes = np.concatenate([c.indices.to_numpy() for c in one.chunks])
    return one.chunk(0).dictionary, codes.astype(np.int32, copy=False)


class ByTrigger:
    """Records' key codes grouped by trigger.

    Args:
        key: (n,) codes below ``size``; step_index: (n,) triggers 1 .. ``triggers``.
    """

    def __init__(self, key: Int32, step_index: Int32, size: int, triggers: int) -> None:
        order = np.argsort(step_index, kind="stable")
        self._key = key[order]
        self._bounds = np.searchsorted(step_index[order], np.arange(1, triggers + 2))
        self.size, self.triggers = size, triggers

    def added(self, trigger: int) -> Int64:
        """(size,) records of each key at one trigger."""
        codes = self._key[self._bounds[trigger - 1] : self._bounds[trigger]]
        return np.bincount(codes, minlength=self.size)


class Truth(ByTrigger):
    """Raw counts of every key by trigger, before any bounding: what errors are measured against.

    Args:
        data: the raw records; triggers: T.
    """

    def __init__(self, data: Columns, triggers: int) -> None:
        super().__init__(data.key, data.step_index(triggers), len(data.names), triggers)
        self.names = data.names

    def codes_of(self, keys: pa.ChunkedArray) -> Int64:
        """(m,) codes of released keys.

        Raises:
            ValueError: a key does not occur in the data.
        """
        codes = pc.index_in(keys, value_set=self.names)
        if codes.null_count:
            raise ValueError("a released key does not occur in the data")
        return np.asarray(codes.to_numpy(), np.int64)


def first_of_pair(user: Int32, key: Int32, step_index: Int32 | None = None) -> Bool:
    """(n,) mask of the first row of each distinct (user, key), or (user, key, step index).

    Rows are in order of step, so the rows of one (user, key) are, too.
    """
    pair = user.astype(np.int64) << 32 | key
    order = np.argsort(pair, kind="stable").astype(np.int32)
    pair = pair[order]
    first = np.diff(pair, prepend=-1) != 0
    if step_index is not None:
        first |= np.diff(step_index[order], prepend=-1) != 0
    mask = np.zeros(len(pair), np.bool_)
    mask[order] = first
    return mask


class Scoreboard:
    """What the public knows after each trigger, held against the truth.

    Args:
        truth: raw counts by trigger; `publish` is called once for each trigger in order.
    """

    def __init__(self, truth: Truth) -> None:
        self._truth = truth
        self._exact = np.zeros(truth.size)
        self.figures: Float64 = np.zeros(truth.size)
        self.published: Bool = np.zeros(truth.size, np.bool_)
        self._l1 = list[float]()
        self._updates = 0

    def publish(self, codes: Int64, values: Float64, replace: bool = False) -> None:
        """One trigger: the values of ``codes`` become known.

        Args:
            codes: (m,) distinct keys; values: (m,).
            replace: forget everything published before (a new answer to the whole query).
        """
        self._exact += self._truth.added(len(self._l1) + 1)
        if replace:
            self.figures[:], self.published[:] = 0.0, False
        self.figures[codes], self.published[codes] = values, True
        self._l1.append(float(np.abs(self.figures - self._exact).sum()))
        self._updates += len(codes)

    def errors(self) -> dict[str, Any]:
        """The measures after the last trigger."""
        if len(self._l1) != self._truth.triggers:
            raise ValueError("not every trigger was published")
        distance = np.abs(self.figures - self._exact)
        return {
            "keys": int(self.published.sum()),
            "l1": float(distance.sum()),
            "l2": float(np.sqrt((distance**2).sum())),
            "linf": float(distance.max(initial=0.0)),
            "l1_average": float(np.mean(self._l1)),
            "updates": self._updates,
        }


def errors(truth: Truth, releases: pa.Table) -> dict[str, Any]:
    """The measures of a run's releases (columns key, trigger, count) of one window."""
    code = truth.codes_of(releases["key"])
    trigger = releases["trigger"].to_numpy()
    value = releases["count"].to_numpy()
    order = np.argsort(trigger, kind="stable")
    bounds = np.searchsorted(trigger[order], np.arange(1, truth.triggers + 2))
    board = Scoreboard(truth)
    for t in range(truth.triggers):
        rows = order[bounds[t] : bounds[t + 1]]
        board.publish(code[rows], value[rows])
    return board.errors()
