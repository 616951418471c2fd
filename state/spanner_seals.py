"""Digests of the Spanner store's cells, put on and taken off where rows meet the client.

Spanner checks its own disks; this notices what goes wrong between a worker's memory and them, and
rows that were written by hand.  It happens in one place: `state.spanner_client` lets every batch,
transaction and read through here, so the rest of the store knows nothing about it.

* A BYTES cell begins with 18 bytes: a mark of two and the digest (`state.seals`), which covers
  the cell's base64 text and the row's key.  18 bytes are 24 digits of base64 without a rest, so
  nothing is encoded anew.
* A number of ``Progress`` has 31 bits of its digest above its own 32.
* A text of ``Meta`` has its digest in front.

What schema version 1 wrote has none; it is read as it is, and written so, until a restore or a
reshard makes a new generation of the rows (``Format``).
"""

from base64 import b64encode
from collections.abc import Sequence
from typing import Any

from state.seals import damaged, digest, sealed_text, unsealed_text

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
    "Progress": {"Reached"},
    "Steps": {"Releases"},
    "Keys": {"Columns", "State", "UnitIds"},
    "KeyUnits": {"UnitIds"},
    "KeysByDue": {"KeyIds"},
    "Units": {"Records"},
    "Meta": {"Value"},
}
_MARK, _DIGITS = b"\0\2", 24
#: Bytes that a cell is longer than what it holds.
CELL_SEAL = 18
_LOW = (1 << 32) - 1


class Format:
    """Which rows of a database have no digests: all of ``Meta``, and of some generations."""

    def __init__(self) -> None:
        self.plain_meta = False
        self.plain: set[int] = set()

    def bare(self, table: str, key: Sequence[Any]) -> bool:
        """Whether a row has none."""
        if table == "Meta":
            return self.plain_meta or key[0] == "schema_version"
        return bool(self.plain) and key[0] // GENERATION in self.plain


_FORMATS: dict[str, Format] = {}


def format_of(database: Any) -> Format:
    """What is known of a database in this process."""
    return _FORMATS.setdefault(database.name, Format())


def with_keys(table: str, columns: Sequence[str]) -> Sequence[str]:
    """The columns that must be read so that some can be checked."""
    if not _SEALED.get(table, set()) & set(columns):
        return columns
    return (*columns, *(key for key in _KEYS[table] if key not in columns))


def opened(
    known: Format, table: str, columns: Sequence[str], wanted: int, rows: list[Any]
) -> list[list[Any]]:
    """Rows checked and without their digests; their first ``wanted`` columns.

    Raises:
        PolicyError: a cell is not what was written.
    """
    at, keys = _places(table, columns)
    if not at:
        return rows
    out = []
    for row in rows:
        key, new = [_text(row[i]) for i in keys], list(row)
        if not known.bare(table, key):
            name = "/".join(map(str, (table, *key)))
            for i, column in at:
                if row[i] is not None:
                    new[i] = _open(f"{name}/{column}", row[i], table == "Meta")
        out.append(new[:wanted])
    return out


def sealed_rows(
    known: Format, table: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]
) -> list[Any]:
    """Rows with their digests."""
    at, keys = _places(table, columns)
    out: list[Any] = []
    for row in rows:
        key = [_text(row[i]) for i in keys]
        if not at or known.bare(table, key):
            out.append(row)
            continue
        name, new = "/".join(map(str, (table, *key))), list(row)
        for i, column in at:
            if row[i] is not None:
                new[i] = _seal(f"{name}/{column}", row[i], table == "Meta")
        out.append(new)
    return out


def _places(table: str, columns: Sequence[str]) -> tuple[list[tuple[int, str]], list[int]]:
    """(places and names of columns with digests, places of the key)."""
    some = _SEALED.get(table, set())
    at = [(i, column) for i, column in enumerate(columns) if column in some]
    return at, [columns.index(key) for key in _KEYS[table]] if at else []


def _seal(name: str, value: Any, meta: bool) -> Any:
    if isinstance(value, int):
        return value | _check(name, value) << 32
    text = _text(value)
    if meta:
        return sealed_text(name, text)
    return b64encode(_MARK + digest(name, text.encode())).decode() + text


def _open(name: str, value: Any, meta: bool) -> Any:
    if isinstance(value, int):
        found = value & _LOW
        if value < 0 or value >> 32 != _check(name, found):
            raise damaged()
        return found
    text = _text(value)
    if meta:
        return unsealed_text(name, text)
    data = text[_DIGITS:]
    if text[:_DIGITS] != b64encode(_MARK + digest(name, data.encode())).decode():
        raise damaged()
    return data.encode()


def _check(name: str, number: int) -> int:
    return int.from_bytes(digest(name, number.to_bytes(8, "little"))[:4], "little") >> 1


def _text(value: Any) -> Any:
    """A cell as text: the client takes and gives BYTES as base64, one as text, one as bytes."""
    return value.decode() if isinstance(value, bytes) else value


class Sealing:
    """A batch or a transaction of the client whose rows get and lose their digests on the way."""

    def __init__(self, real: Any, known: Format) -> None:
        self._real, self._known = real, known

    def insert(self, table: str, columns: Sequence[str], rows: Sequence[Any]) -> None:
        """Rows that must not be there."""
        self._real.insert(table, columns, sealed_rows(self._known, table, columns, rows))

    def insert_or_update(self, table: str, columns: Sequence[str], rows: Sequence[Any]) -> None:
        """Rows whether they are there or not."""
        self._real.insert_or_update(table, columns, sealed_rows(self._known, table, columns, rows))

    def update(self, table: str, columns: Sequence[str], rows: Sequence[Any]) -> None:
        """Rows that must be there."""
        self._real.update(table, columns, sealed_rows(self._known, table, columns, rows))

    def delete(self, table: str, keyset: Any) -> None:
        """Rows that go."""
        self._real.delete(table, keyset)

    def read(
        self, table: str, columns: Sequence[str], keyset: Any, **options: Any
    ) -> list[list[Any]]:
        """Rows as of the transaction."""
        every = with_keys(table, columns)
        rows = list(self._real.read(table, every, keyset, **options))
        return opened(self._known, table, every, len(columns), rows)
