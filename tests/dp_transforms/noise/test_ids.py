"""Ids of all kinds: one per value whatever its Arrow layout, never one for two, NULL included.

Rows as blocks for a MAC: what they hold, byte by byte.
"""

import datetime
import itertools
from collections.abc import Callable, Sequence
from decimal import Context, Decimal
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpstream.dp_transforms.ingest.columns import identity
from dpstream.dp_transforms.noise import ids as module
from dpstream.dp_transforms.noise.ids import ID_KINDS, frame, typed_ids
from dpstream.dp_transforms.noise.prf import KeyRing
from tests.dp_transforms.runs import Layout, cast, coded, sliced, ticks


@settings(max_examples=40)
@given(
    rows=st.lists(
        st.tuples(st.binary(max_size=34), st.binary(max_size=18), st.integers(-(2**63), 2**63 - 1)),
        max_size=5,
    )
)
def test_frames_are_length_context_and_components(
    rows: list[tuple[bytes, bytes, int]],
) -> None:
    """Block 0 holds bytes and context; components have a tag and a length; zeros at the end."""
    columns = []
    for number, tag in enumerate((3, 7)):
        data = b"".join(row[number] for row in rows)  # type: ignore[misc]
        ends = np.cumsum([0, *(len(row[number]) for row in rows)])  # type: ignore[arg-type]
        columns.append((tag, np.frombuffer(data or b"\0", np.uint8), ends.astype(np.int64)))
    message, lengths = frame(np.array([row[2] for row in rows], np.int64), columns)
    expected = []
    for first, second, context in rows:
        body = b"".join(
            bytes([tag]) + len(data).to_bytes(4, "little") + data
            for tag, data in ((3, first), (7, second))
        )
        head = len(body).to_bytes(8, "little") + context.to_bytes(8, "little", signed=True)
        expected.append(head + body + bytes(-len(body) % 16))
    assert lengths.tolist() == [len(one) // 16 for one in expected]
    assert message.tobytes() == b"".join(expected)


Column = Any
#: Enough digits for every decimal of 256 bits.
WIDE = Context(prec=200)


def ids_of(ring: KeyRing, kind: str, column: Column) -> list[bytes]:
    identities, ok = identity(column, kind, nulls=True)
    assert ok.all() and len(identities) == len(column)
    return [row.tobytes() for row in typed_ids(ring.key, [(kind, identities)])]


def chunked(layout: Layout) -> Callable[[Sequence[Any]], pa.ChunkedArray]:
    return lambda values: pa.chunked_array(
        [layout(values[:1]), sliced(layout)(values[1:3]), layout(values[3:])]
    )


# --- one value, one id ---------------------------------------------------------------------------

EPOCH = datetime.date(1970, 1, 1)
DAYS = [datetime.date(1, 1, 1), EPOCH, datetime.date(1969, 12, 31), datetime.date(9999, 12, 31)]


def in_days(kind: pa.DataType, width: pa.DataType, per_day: int) -> Layout:
    def build(values: Sequence[Any]) -> pa.Array:
        days = [None if v is None else (v - EPOCH).days * per_day for v in values]
        return pa.array(days, width).view(kind)

    return build


def in_ticks(kind: pa.DataType) -> Layout:
    """Whole seconds as ticks of a unit."""
    per = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[kind.unit]

    def build(values: Sequence[Any]) -> pa.Array:
        return ticks(kind, pa.int64())([None if v is None else v * per for v in values])

    return build


def at_scale(kind: pa.DataType) -> Layout:
    return lambda values: pa.array(
        [None if v is None else v.quantize(Decimal(1).scaleb(-kind.scale), context=WIDE)
         for v in values], kind)  # fmt: skip


SECONDS = [0, 1, -1, 1_704_067_200, -9_000_000_000, 9_000_000_000]
INTEGERS = [Decimal(n) for n in (0, 1, -1, 10, 100, -1000, 12300, 99999, -20480)]
LAYOUTS: dict[str, tuple[list[Any], list[Layout]]] = {
    "string": (
        ["", "a", "\u00e9", "x" * 20],
        [cast(pa.string()), cast(pa.large_string()), cast(pa.string_view()), coded(pa.string())],
    ),
    "bytes": (
        [b"", b"a", b"\0" * 17],
        [cast(pa.binary()), cast(pa.large_binary()), coded(pa.binary())],
    ),
    "int": (
        [0, 1, 100, 127],
        [cast(t) for t in (pa.int8(), pa.int16(), pa.uint32(), pa.uint64(), pa.int64())]
        + [coded(pa.int32())],
    ),
    "bool": ([True, False], [cast(pa.bool_()), coded(pa.bool_())]),
    "date": (
        DAYS,
        [
            in_days(pa.date32(), pa.int32(), 1),
            in_days(pa.date64(), pa.int64(), 86_400_000),
            coded(pa.date32()),
        ],
    ),
    "timestamp": (
        SECONDS,
        [
            in_ticks(pa.timestamp(unit, zone))
            for unit in ("s", "ms", "us", "ns")
            for zone in (None, "UTC", "America/New_York", "+05:30")
        ]
        + [lambda values: in_ticks(pa.timestamp("us", "UTC"))(values).dictionary_encode()],
    ),
    "decimal": (
        INTEGERS,
        [
            at_scale(kind)
            for kind in (
                pa.decimal32(7, 0), pa.decimal32(9, 2), pa.decimal64(15, 3), pa.decimal128(38, 0),
                pa.decimal128(30, 20), pa.decimal256(76, 0), pa.decimal256(76, 60),
            )
        ]
        + [lambda v: at_scale(pa.decimal128(9, 2))(v).dictionary_encode()]
        + [lambda v: pa.array([None if x is None else int(x) for x in v], pa.int32())],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", LAYOUTS)
@settings(max_examples=25)
@given(data=st.data())
def test_one_value_has_one_id_in_every_layout(
    ring: KeyRing, kind: str, data: st.DataObject
) -> None:
    pool, layouts = LAYOUTS[kind]
    values = data.draw(st.lists(st.sampled_from([*pool, None]), min_size=1, max_size=9))
    plain = layouts[0]
    expected = {v: ids_of(ring, kind, plain([v]))[0] for v in {*pool, None}}
    assert len(set(expected.values())) == len(expected)
    for layout in layouts:
        for build in (layout, sliced(layout), chunked(layout)):
            assert ids_of(ring, kind, build(values)) == [expected[v] for v in values]


def test_a_column_without_type_is_null(ring: KeyRing) -> None:
    for kind, (_, layouts) in LAYOUTS.items():
        typed = ids_of(ring, kind, layouts[0]([None, None]))
        assert ids_of(ring, kind, pa.nulls(2)) == typed
        assert ids_of(ring, kind, pa.chunked_array([], layouts[0]([]).type)) == []


def fits(value: Decimal) -> bool:
    """Within the digits of Arrow's decimals of 128 bits."""
    _, digits, exponent = value.as_tuple()
    return isinstance(exponent, int) and -30 <= exponent <= 8 and len(digits) <= 38


DECIMALS = st.decimals(allow_nan=False, allow_infinity=False, places=None).filter(fits)
WIDE_DECIMALS = st.tuples(st.integers(-(10**76) + 1, 10**76 - 1), st.integers(0, 76))


@settings(max_examples=50)
@given(pairs=st.lists(WIDE_DECIMALS, min_size=1, max_size=6), zeros=st.integers(0, 40))
def test_decimals_are_reduced_as_python_does(
    ring: KeyRing, pairs: list[tuple[int, int]], zeros: int
) -> None:
    """Exponent and significand against Python's integers, at the largest width."""
    pairs = [*pairs, *((s - s % 10**zeros, e) for s, e in pairs if s > 0)]
    for scale, group in itertools.groupby(sorted(pairs, key=lambda p: p[1]), lambda p: p[1]):
        raw = [s for s, _ in group]
        column = pa.array([Decimal(s).scaleb(-scale, WIDE) for s in raw], pa.decimal256(76, scale))
        for row, (exponent, *_), data in zip(
            raw,
            module._reduced(column).view(np.int32).tolist(),
            module._reduced(column),
            strict=True,
        ):
            significand, power = row, -scale
            while significand and significand % 10 == 0:
                significand, power = significand // 10, power + 1
            assert exponent == (power if significand else 0)
            assert int.from_bytes(data[1:].tobytes(), "little", signed=True) == significand


@settings(max_examples=33)
@given(integer=st.integers(-(2**31), 2**31), shift=st.integers(0, 6))
def test_a_decimal_has_one_id_at_every_scale(ring: KeyRing, integer: int, shift: int) -> None:
    value = Decimal(integer).scaleb(-shift, WIDE)
    ids = {
        ids_of(ring, "decimal", pa.array([value], kind))[0]
        for kind in (
            pa.decimal128(38, 6), pa.decimal128(38, 20), pa.decimal256(76, 30), pa.decimal64(18, 6),
        )
    }  # fmt: skip
    assert len(ids) == 1


@settings(max_examples=33)
@given(nanos=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=6, unique=True))
def test_instants_are_told_apart_to_the_nanosecond(ring: KeyRing, nanos: list[int]) -> None:
    kind = pa.timestamp("ns", "UTC")
    assert len(set(ids_of(ring, "timestamp", pa.array(nanos, pa.int64()).view(kind)))) == len(nanos)
    micros = [n // 1000 for n in nanos]
    fine = pa.array([max(m * 1000, -(2**63)) for m in micros], pa.int64()).view(kind)
    coarse = pa.array(micros, pa.int64()).view(pa.timestamp("us"))
    same = [m * 1000 >= -(2**63) for m in micros]
    pairs = zip(ids_of(ring, "timestamp", fine), ids_of(ring, "timestamp", coarse), strict=True)
    assert [a == b for a, b in pairs] == same


# --- two values, two ids -------------------------------------------------------------------------

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "string": st.text("a1\0", max_size=3),
    "bytes": st.binary(max_size=3),
    "int": st.integers(-2, 2) | st.integers(-(2**63), 2**63 - 1),
    "bool": st.booleans(),
    "date": st.integers(-2, 2).map(lambda d: EPOCH + datetime.timedelta(d)) | st.dates(),
    "timestamp": st.integers(-2, 2) | st.integers(-(2**63), 2**63 - 1),
    "decimal": st.integers(-2, 2).map(Decimal) | st.sampled_from(INTEGERS) | DECIMALS,
}
ARROW: dict[str, Layout] = {
    "string": cast(pa.string()),
    "bytes": cast(pa.binary()),
    "int": cast(pa.int64()),
    "bool": cast(pa.bool_()),
    "date": cast(pa.date32()),
    "timestamp": ticks(pa.timestamp("ns"), pa.int64()),
    "decimal": at_scale(pa.decimal256(76, 30)),
}
FIELD = st.sampled_from(ID_KINDS).flatmap(lambda k: st.tuples(st.just(k), st.none() | VALUES[k]))


class Frames:
    """Stands for a PRF and keeps what it would be given."""

    def mac(self, message: npt.NDArray[np.uint64], lengths: npt.NDArray[np.int64]) -> Any:
        self.message = message.tobytes()
        return np.zeros((len(lengths), 2), np.uint64)


def framed(row: list[tuple[str, Any]], context: int) -> bytes:
    frames = Frames()
    columns = [(kind, identity(ARROW[kind]([value]), kind, True)[0]) for kind, value in row]
    typed_ids(frames, columns, np.array([context]))  # type: ignore[arg-type]
    return frames.message


CONFUSABLE: list[list[tuple[list[tuple[str, Any]], int]]] = [
    [([("string", "1")], 0), ([("bytes", b"1")], 0), ([("int", 1)], 0), ([("bool", True)], 0)],
    [([("string", "")], 0), ([("string", "\0")], 0), ([("bytes", b"")], 0), ([("int", 0)], 0)],
    [([("string", "a"), ("string", "b")], 0), ([("string", "b"), ("string", "a")], 0)],
    [([("string", "ab"), ("string", "")], 0), ([("string", "a"), ("string", "b")], 0)],
    [([("string", "a"), ("int", 1)], 0), ([("int", 1), ("string", "a")], 0)],
    [([("string", "a")], 0), ([("string", "a")], 1), ([("string", "a"), ("int", 1)], 0)],
    [([("int", 1)], 0), ([("bytes", b"\1" + b"\0" * 7)], 0)],
    [([("string", "a" * 11)], 0), ([("string", "a" * 12)], 0), ([("string", "a" * 27)], 0)],
    [([("string", "a\0\0")], 0), ([("string", "a\0")], 0), ([("string", "a")], 0)],
]


@pytest.mark.parametrize("rows", CONFUSABLE)
def test_confusable_rows_are_framed_apart(rows: list[tuple[list[tuple[str, Any]], int]]) -> None:
    check_frames(rows)


@settings(max_examples=100)
@given(
    rows=st.lists(
        st.tuples(st.lists(FIELD, min_size=1, max_size=3), st.integers(0, 1)),
        min_size=2,
        max_size=7,
    )
)
def test_rows_are_framed_injectively(rows: list[tuple[list[tuple[str, Any]], int]]) -> None:
    check_frames(rows)


def check_frames(rows: list[tuple[list[tuple[str, Any]], int]]) -> None:
    """Two rows have one message only if they are equal, and none begins another's."""
    frames = [framed(*row) for row in rows]
    for (a, left), (b, right) in itertools.combinations(zip(rows, frames, strict=True), 2):
        if a == b:
            assert left == right
        else:
            assert not left.startswith(right) and not right.startswith(left)


def test_kinds_never_collide(ring: KeyRing) -> None:
    """What could be taken for one: 0 and 1 of all kinds, their texts, and each kind's NULL."""
    alike: dict[str, list[Any]] = {
        "string": ["", "0", "1", "1970-01-01", "NULL", "n", "ns", "i", "s"],
        "bytes": [b"", b"0", b"1", b"\0" * 8, b"\1" + b"\0" * 7, b"\0" * 16, b"\0" * 36, b"s"],
        "int": [0, 1, 115],
        "bool": [False, True],
        "date": [EPOCH, EPOCH + datetime.timedelta(1)],
        "timestamp": [0, 1, 86_400 * 10**9],
        "decimal": [Decimal(0), Decimal(1), Decimal(10)],
    }
    ids = [
        i
        for kind, values in alike.items()
        for i in ids_of(ring, kind, ARROW[kind]([*values, None]))
    ]
    assert len(set(ids)) == len(ids) == sum(map(len, alike.values())) + len(ID_KINDS)


@pytest.mark.parametrize(
    "sabotage",
    [
        {"_NULL": ord("s")},
        {"_TAGS": {**module._TAGS, "date": ord("i")}},
        {"_TAGS": {**module._TAGS, "decimal": ord("y"), "timestamp": ord("y")}},
        {"_seconds_and_nanos": lambda c: c.cast(pa.int64()).to_numpy()},
        {"_reduced": lambda c: np.frombuffer(c.buffers()[1], np.int64)},
    ],
    ids=["null-as-text", "date-as-int", "as-bytes", "unit-forgotten", "scale-forgotten"],
)
def test_sabotaged_encodings_are_caught(ring: KeyRing, sabotage: dict[str, Any]) -> None:
    def broken() -> bool:
        try:
            test_kinds_never_collide(ring)
            for kind in ("timestamp", "decimal"):
                pool, layouts = LAYOUTS[kind]
                id_lists = [ids_of(ring, kind, layout(pool)) for layout in layouts]
                assert all(ids == id_lists[0] for ids in id_lists)
        except AssertionError:
            return True
        return False

    assert not broken()
    with mock.patch.multiple(module, **sabotage):
        assert broken()


# --- nulls ---------------------------------------------------------------------------------------


MIXED = st.tuples(*(st.none() | VALUES[kind] for kind in ("string", "decimal", "int")))


@settings(max_examples=60)
@given(rows=st.lists(MIXED, min_size=1, max_size=8), at_once=st.integers(1, 400))
def test_a_rows_id_is_its_own(ring: KeyRing, rows: list[tuple[Any, ...]], at_once: int) -> None:
    """Neighbours, their nulls, and how rows are cut up change no id."""
    kinds = ("string", "decimal", "int")

    def ids(of: list[tuple[Any, ...]]) -> list[bytes]:
        arrays = [ARROW[k](list(v)) for k, v in zip(kinds, zip(*of, strict=True), strict=True)]
        fields = [(k, identity(a, k, True)[0]) for k, a in zip(kinds, arrays, strict=True)]
        context = np.arange(len(of)) * 0 + 5
        return [row.tobytes() for row in typed_ids(ring.key, fields, context)]

    alone = [ids([row])[0] for row in rows]
    with mock.patch.object(module, "_BYTES_AT_ONCE", at_once):
        assert ids(rows) == alone
    assert len(set(alone)) == len(set(rows))


@pytest.mark.parametrize("kind", ID_KINDS)
def test_null_is_refused_where_it_is_not_asked_for(kind: str) -> None:
    pool, layouts = LAYOUTS[kind]
    for layout in layouts:
        column, ok = identity(layout([pool[0], None]), kind)
        assert ok.tolist() == [True, False] and column.null_count == 0


WRONG = [
    ("date", pa.array(["2024-01-01"])),
    ("date", pa.array([1])),
    ("date", pa.array([datetime.datetime(2024, 1, 1)])),
    ("date", pa.array([1], pa.int64()).view(pa.date64())),
    ("date", pa.array([-(2**62)], pa.int64()).view(pa.date64())),
    ("timestamp", pa.array(["2024-01-01T00:00:00Z"])),
    ("timestamp", pa.array([1])),
    ("timestamp", pa.array([datetime.date(2024, 1, 1)])),
    ("decimal", pa.array(["1"])),
    ("decimal", pa.array([1.0])),
    ("decimal", pa.array([True])),
    ("string", pa.array([Decimal(1)])),
]


@pytest.mark.parametrize(("kind", "array"), WRONG, ids=[f"{k}-{a.type}" for k, a in WRONG])
def test_other_types_are_no_values_of_a_kind(kind: str, array: pa.Array) -> None:
    for nulls in (False, True):
        column, ok = identity(array, kind, nulls)
        assert not ok.any() and len(column) == 1 and column.null_count == 0


# --- what was, stays -----------------------------------------------------------------------------

PINNED: dict[str, str] = {
    "string": "920c35b42bf0ff876391a491231fbc26",
    "int": "4b122c5aa848f5c329b1b6efba683175",
    "bool": "eeedcb2db9bf511df684798db3282b69",
    "bytes": "2627d8934402712aa44d7c876bd295cb",
    "date": "67cb24b158f9b7ccfc9e899dc7b1fe80",
    "timestamp": "3d3921485bf7528aece3614240ca99a2",
    "decimal": "6740080dad729770e18c9cd7a57d6cae",
}


@pytest.mark.parametrize("kind", ID_KINDS)
def test_known_ids(kind: str) -> None:
    """Stores hold ids of the first four kinds: they must not move."""
    pool, layouts = LAYOUTS[kind]
    ring = KeyRing(bytes(range(32)))
    column = identity(layouts[0](pool), kind)[0]
    ids = typed_ids(ring.key, [(kind, column)], np.arange(len(pool)))
    assert ids.tobytes()[-16:].hex() == PINNED[kind]
