"""Digests of the Spanner store's cells, put on and taken off where rows meet the client.

Spanner checks its own disks; this notices what goes wrong between a worker's memory and them, and
rows that were written by hand.  It happens in one place: `state.spanner.client` lets every batch,
transaction and read through here, so the rest of the store knows nothing about it.

* A BYTES cell begins with 18 bytes: a mark of two and the digest (`state.seals`), which covers
  the cell's base64 text and the row's key.  18 bytes are 24 digits of base64 without a rest, so
  nothing is encoded anew.
* A number of ``Progress`` has 31 bits of its digest above its own 32.
* A text of ``Meta`` has its digest in front.
"""

from base64 import b64encode
from collections.abc import Callable, Sequence
from typing import Any

from dpstream.state.seals import SIZE, damaged, digest_at, place_of

#: Shards of one generation.
GENERATION = 1 << 15
_KEYS = {
    "Progress": ("Part", "WindowIndex"),
    "Steps": ("Part", "WindowIndex", "Step", "Piece"),
    "Keys": ("Part", "WindowIndex", "KeyId"),
    "KeyUnits": ("Part", "WindowIndex", "KeyId", "Chunk"),
    "KeysByDue": ("Part", "WindowIndex", "Due", "Step", "Piece"),
    "Units": ("Part", "UnitId"),
    "Meta": ("Name",),
}
_SEALED = {
    "Progress": ("Reached",),
    "Steps": ("Releases",),
    "Keys": ("Columns", "State", "UnitIds"),
    "KeyUnits": ("UnitIds",),
    "KeysByDue": ("KeyIds",),
    "Units": ("Records",),
    "Meta": ("Value",),
}
#: Tables with BYTES in their key, and where.
_BY_ID = {"Keys": 2, "KeyUnits": 2, "Units": 1}
_MARK, _DIGITS = b"\0\2", 24
#: Bytes that a cell is longer than what it holds.
CELL_SEAL = 18
_LOW = (1 << 32) - 1


def with_keys(table: str, columns: Sequence[str]) -> Sequence[str]:
    """The columns that must be read so that some can be checked."""
    if not any(column in columns for column in _SEALED.get(table, ())):
        return columns
    return (*columns, *(key for key in _KEYS[table] if key not in columns))


def opened(table: str, columns: Sequence[str], wanted: int, rows: list[Any]) -> list[list[Any]]:
    """Rows checked and without their digests; their first ``wanted`` columns.

    Raises:
        PolicyError: a cell is not what was written.
    """
    at, keys = _places(table, columns)
    if not at:
        return rows
    opener: Any = {"Meta": _open_text, "Progress": _open_number}.get(table, _open_cell)
    return [_changed(table, row, at, keys, opener)[:wanted] for row in rows]


def sealed_rows(table: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Sequence[Any]:
    """Rows with their digests."""
    at, keys = _places(table, columns)
    if not at:
        return rows
    sealer: Any = {"Meta": _seal_text, "Progress": _seal_number}.get(table, _seal_cell)
    return [_changed(table, row, at, keys, sealer) for row in rows]


def _places(table: str, columns: Sequence[str]) -> tuple[list[tuple[int, int]], list[int]]:
    """(place and number of each column with digests, places of the key)."""
    sealed = _SEALED.get(table, ())
    at = [(columns.index(column), n) for n, column in enumerate(sealed) if column in columns]
    return at, [columns.index(key) for key in _KEYS[table]] if at else []


def _changed(
    table: str,
    row: Sequence[Any],
    at: list[tuple[int, int]],
    keys: list[int],
    change: Callable[[bytes, int, Any], Any],
) -> list[Any]:
    """A copy of a row with some cells changed."""
    new, key = list(row), [row[i] for i in keys]
    if table in _BY_ID:  # the client takes BYTES as text and gives them as bytes
        key[_BY_ID[table]] = _text(key[_BY_ID[table]])
    place = place_of(f"{table}/{key}")
    for i, column in at:
        value = row[i]
        if value is not None:
            new[i] = change(place, column, value)
    return new


def _seal_cell(place: bytes, column: int, value: Any) -> str:
    text: str = _text(value)
    return b64encode(_MARK + digest_at(place, column, text.encode())).decode() + text


def _open_cell(place: bytes, column: int, value: Any) -> bytes:
    raw: bytes = value if isinstance(value, bytes) else value.encode()
    data = raw[_DIGITS:]
    if raw[:_DIGITS] != b64encode(_MARK + digest_at(place, column, data)):
        raise damaged()
    return data


def _seal_number(place: bytes, column: int, value: int) -> int:
    check = digest_at(place, column, value.to_bytes(8, "little"))
    return value | int.from_bytes(check[:4], "little") >> 1 << 32


def _open_number(place: bytes, column: int, value: int) -> int:
    number = value & _LOW
    if value != _seal_number(place, column, number):
        raise damaged()
    return number


def _seal_text(place: bytes, column: int, text: str) -> str:
    return f"{digest_at(place, column, text.encode()).hex()} {text}"


def _open_text(place: bytes, column: int, value: str) -> str:
    text = value[2 * SIZE + 1 :]
    if value != _seal_text(place, column, text):
        raise damaged()
    return text


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


class Sealing:
    """A batch or a transaction of the client whose rows get and lose their digests on the way."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def insert(self, table: str, columns: Sequence[str], rows: Sequence[Any]) -> None:
        """Rows that must not be there."""
        self._real.insert(table, columns, sealed_rows(table, columns, rows))

    def insert_or_update(self, table: str, columns: Sequence[str], rows: Sequence[Any]) -> None:
        """Rows whether they are there or not."""
        self._real.insert_or_update(table, columns, sealed_rows(table, columns, rows))

    def update(self, table: str, columns: Sequence[str], rows: Sequence[Any]) -> None:
        """Rows that must be there."""
        self._real.update(table, columns, sealed_rows(table, columns, rows))

    def delete(self, table: str, keyset: Any) -> None:
        """Rows that go."""
        self._real.delete(table, keyset)

    def read(
        self, table: str, columns: Sequence[str], keyset: Any, **options: Any
    ) -> list[list[Any]]:
        """Rows as of the transaction."""
        every = with_keys(table, columns)
        rows = list(self._real.read(table, every, keyset, **options))
        return opened(table, every, len(columns), rows)
