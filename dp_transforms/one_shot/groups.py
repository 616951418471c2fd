"""Groups of an answer: their values as an Arrow table, a code and a keyed id for each.

Codes are numbered as groups are met, over all shards of units; ids are keyed 128-bit MACs of the
typed values (``dp_transforms.noise.ids``), so that a group's noise is its own whatever else there
is.  Texts are taken byte by byte: two spellings of one word are two groups, and get two noises.

A module of its own: noise and estimates do without Arrow, which takes long to load.
"""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.accounting.arrays import Ids, Int64
from dpstream.dp_transforms.ingest.columns import identity, plain
from dpstream.dp_transforms.noise.ids import typed_ids
from dpstream.dp_transforms.noise.prf import Prf
from dpstream.state.numbers import arrow_numbers, one_array, valid_of, values_of


def encoded(column: pa.Array | pa.ChunkedArray) -> tuple[Int64, pa.Array]:
    """Return (rows,) codes of a column's values, NULL among them, and the values by code."""
    coded = pc.dictionary_encode(one_array(column), null_encoding="encode")
    return values_of(coded.indices).astype(np.int64), coded.dictionary


def keyed(prf: Prf, kinds: list[str], columns: list[pa.Array]) -> Ids:
    """Return ids of rows of values."""
    if not columns[0]:
        return np.zeros((0, 2), np.uint64)
    fields = []
    for kind, column in zip(kinds, columns, strict=True):
        exact = kind in ("string", "bytes")
        fields.append((kind, plain(column) if exact else identity(column, kind, nulls=True)[0]))
    return typed_ids(prf, fields)


class Groups:
    """All groups that have occurred.

    Args:
        names, kinds: of the group columns (``ids.ID_KINDS``).
        prf: AES under the key of key ids.
        public: the groups, if they are public: no others are added.
    """

    def __init__(
        self, names: list[str], kinds: list[str], prf: Prf, public: pa.Table | None = None
    ) -> None:
        self._names, self._kinds, self._prf = names, kinds, prf
        self._parts: list[pa.Table] = []
        self._group_ids = pa.nulls(0, pa.binary(16))
        self._ids = np.zeros((0, 2), np.uint64)
        self._frozen = False
        if not names:
            self._ids = np.zeros((1, 2), np.uint64)  # no GROUP BY: one public group
        elif public is not None:
            self.codes([public.column(i) for i in range(public.num_columns)])
            self._frozen = True

    @property
    def ids(self) -> Ids:
        """Return (groups, 2) ids by code."""
        return self._ids

    @property
    def values(self) -> pa.Table | None:
        """Return the values by code, with their types even if there are none; ``None`` without
        group
        columns.
        """
        return pa.concat_tables(self._parts).combine_chunks() if self._parts else None

    def codes(self, columns: list[pa.ChunkedArray]) -> Int64:
        """Return (rows,) codes of rows of values; -1 for a value that is not a public group."""
        if not self._names:
            raise ValueError("there are no group columns")
        codes, values = distinct(map(encoded, columns))
        ids = keyed(self._prf, self._kinds, values)
        packed = pa.Array.from_buffers(pa.binary(16), len(ids), [None, pa.py_buffer(ids.tobytes())])
        if not len(self._group_ids) and not self._frozen:
            indices = np.full(len(ids), -1)
        else:
            place = pc.index_in(packed, value_set=self._group_ids)
            indices = np.where(valid_of(place), values_of(place), -1).astype(np.int64)
        new = np.flatnonzero(indices < 0)
        if not self._frozen and (new.size or not self._parts):  # without a row: its types
            indices[new] = len(self._ids) + np.arange(new.size)
            new_rows = arrow_numbers(new)
            self._parts.append(pa.table([v.take(new_rows) for v in values], names=self._names))
            self._ids = np.concatenate([self._ids, ids[new]])
            self._group_ids = pa.concat_arrays([self._group_ids, packed.take(new_rows)])
        return np.asarray(indices[codes])


def distinct(columns: Iterator[tuple[Int64, pa.Array]]) -> tuple[Int64, list[pa.Array]]:
    """Return (rows,) codes of rows of several columns, and each column's values by code.

    Args:
        columns: one or more, as `encoded` gives them.
    """
    codes, first = next(columns)
    values = [first]
    for more, its_values in columns:
        size = np.int64(max(1, len(its_values)))
        codes, both = encoded(arrow_numbers(codes * size + more))
        pair = values_of(both)
        values = [v.take(arrow_numbers(pair // size)) for v in values]
        values.append(its_values.take(arrow_numbers(pair % size)))
    return codes, values
