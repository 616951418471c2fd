"""Python's values as Arrow columns, value by value.

Whether a value is accepted, and as what, depends on that value and the declared type alone, never
on the other values of its bundle: a value that is not of its column's type becomes null, and its
row a dead letter later.  The fast path is for columns in which every value is of the type.
"""

import contextlib
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa
from apache_beam.utils.timestamp import Timestamp

from dpstream.dp_transforms.ingest.columns import instant

INSTANT = pa.timestamp("us", "UTC")
_NONE = type(None)
#: Python types whose values an Arrow type takes as they are; no number is cut, no bool counted.
_EXACT: dict[pa.DataType, set[type]] = {
    pa.string(): {str, _NONE},
    pa.binary(): {bytes, _NONE},
    pa.bool_(): {bool, _NONE},
    pa.int64(): {int, _NONE},
    pa.float64(): {float, int, _NONE},
}
_FAILS = (pa.ArrowException, ValueError, OverflowError)


def column_of(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return an array of values of one type; an instant must be one of Beam's timestamps."""
    if pa.types.is_timestamp(kind):
        micros = [value.micros if isinstance(value, Timestamp) else None for value in values]
        return column_of(micros, pa.int64()).cast(kind)
    if set(map(type, values)) <= _EXACT[kind]:
        with contextlib.suppress(*_FAILS):
            return pa.array(values, kind)
    return pa.concat_arrays([_cell(value, kind) for value in values])


def _cell(value: Any, kind: pa.DataType) -> pa.Array:
    """Return an array of one value, which is null if it is not of the type or does not fit."""
    number = value.item() if isinstance(value, np.generic) else value
    if type(number) in _EXACT[kind]:
        with contextlib.suppress(*_FAILS):
            return pa.array([number], kind)
    return pa.nulls(1, kind)


def instants_of(values: Sequence[Any]) -> pa.Array:
    """Return times as Beam's timestamps, from the forms that rows have.

    These are Beam's timestamps, those of Python, numpy and pandas (without a zone they are UTC),
    whole numbers of microseconds since 1970, and RFC 3339 text.
    """
    micros, valid = np.zeros(len(values), np.int64), np.zeros(len(values), np.bool_)
    kinds = np.array([_kind(value) for value in values])
    for kind, micros_of in _TIMES.items():
        at = np.flatnonzero(kinds == kind)
        if not at.size:
            continue
        part = [values[int(i)] for i in at]
        try:
            micros[at], valid[at] = micros_of(part)
        except _FAILS:
            for i, value in zip(at, part, strict=True):
                with contextlib.suppress(*_FAILS):
                    moment, ok = micros_of([value])
                    micros[i], valid[i] = moment[0], ok[0]
    return pa.array(micros, mask=~valid).cast(INSTANT)


def _kind(value: Any) -> str:
    if isinstance(value, Timestamp):
        return "beam"
    if isinstance(value, np.datetime64):
        return "numpy"
    if isinstance(value, datetime):  # pandas' are Python's
        return "time"
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return "int"
    return "text" if isinstance(value, str) else ""


def _beams(values: Sequence[Any]) -> tuple[Any, Any]:
    return instant(pa.array([value.micros for value in values], pa.int64()))


def _times(values: Sequence[Any]) -> tuple[Any, Any]:
    return instant(pa.array(values, INSTANT))


def _numpys(values: Sequence[Any]) -> tuple[Any, Any]:
    ticks = np.array(values, "datetime64[us]")
    return ticks.astype(np.int64), ~np.isnat(ticks)


def _ints(values: Sequence[Any]) -> tuple[Any, Any]:
    return instant(pa.array([int(value) for value in values], pa.int64()))


def _texts(values: Sequence[Any]) -> tuple[Any, Any]:
    return instant(pa.array(values, pa.string()))


_TIMES: dict[str, Callable[[Sequence[Any]], tuple[Any, Any]]] = {
    "beam": _beams,
    "time": _times,
    "numpy": _numpys,
    "int": _ints,
    "text": _texts,
}
