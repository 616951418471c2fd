"""The raw records of one window as columns, and the raw counts by key and trigger.

Everything here is exact and private: for public or generated data only.  Memory for the paper's
59M records: 4 bytes each for user and key, 8 for the time, 4 more by trigger.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dpstream.pipelines.synth import DAY_MICROS, Synth

Bool = npt.NDArray[np.bool_]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


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


def first_of_each(group: Int32, most: int) -> Bool:
    """(n,) mask of the first ``most`` rows of each group, in row order."""
    order = np.argsort(group, kind="stable").astype(np.int32)
    begins = np.flatnonzero(np.diff(group[order], prepend=-1))
    begin = np.repeat(begins, np.diff(np.append(begins, len(group))))
    mask = np.zeros(len(group), np.bool_)
    mask[order] = np.arange(len(group)) - begin < most
    return mask


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
