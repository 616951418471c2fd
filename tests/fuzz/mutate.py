"""Mutated copies of a corpus, drawn from a seed.

The readers' work is done in C++ and C (Arrow, msgspec, DuckDB), which a fuzzer guided by the
coverage of Python code does not see; so inputs are drawn by structure: single bytes, tokens of the
format, lines, numbers, and lines that are repeated past the blocks that parsers work in.
"""

import random
import re
from collections.abc import Callable, Sequence

#: No input is longer.
MAX_BYTES = 3 << 20
#: Bytes that are written: any, those that mean something in a format or an encoding, and as often
#: those that end something in a parser.
ENDS = b'\0\n\r",'
SPECIAL = b"\0\n\r\",'\\{}[]#=:\t \x7f\x80\xbf\xc3\xed\xef\xf4\xff"
NUMBERS = (
    *(b"0", b"-0", b"-1", b"00", b"1e400", b"1e-400", b"-1e308", b"nan", b"inf", b"0.1", b"1e5"),
    *(b"4294967296", b"9223372036854775807", b"9223372036854775808", b"18446744073709551616"),
    *(b"-9223372036854775809", b"1" * 400, b"0.30000000000000004", b"1e22", b"5e-324", b"1_000"),
)
#: More rows than Arrow's CSV parser takes before it goes by what it has seen of them.
BLOCK_ROWS = 9_000
_END = re.compile(rb"[\n\r,:\"]")
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")


class Mutator:
    """Draws inputs from a corpus.

    Args:
        corpus: files that stand in the repository; tokens: of their format.
    """

    def __init__(self, corpus: Sequence[bytes], tokens: Sequence[bytes], seed: int) -> None:
        self._corpus, self._tokens, self._rng = corpus, tokens, random.Random(seed)
        changes: list[tuple[int, Callable[[bytes], bytes]]] = [
            (2, self._flip), (3, self._put), (3, self._insert), (2, self._delete),
            (1, self._double), (3, self._token), (1, self._splice), (2, self._lines),
            (2, self._repeat),
            (2, self._number), (1, self._cut), (1, self._long),
        ]  # fmt: skip
        self._changes = [change for weight, change in changes for _ in range(weight)]

    def draw(self) -> bytes:
        """The next input."""
        data = self._rng.choice(self._corpus)
        for _ in range(self._rng.choice((1, 1, 2, 3, 4, 6))):
            data = self._rng.choice(self._changes)(data)[:MAX_BYTES]
        return data

    def _at(self, data: bytes) -> int:
        """Anywhere; near the end, which parsers read last, by whatever path is left; and before
        what ends a field or a line."""
        near_end, near_field = self._rng.random() < 0.25, self._rng.random() < 0.25
        at = self._rng.randint(max(0, len(data) - 200) if near_end else 0, len(data))
        field = _END.search(data, at) if near_field else None
        return at if field is None else field.start()

    def _byte(self) -> bytes:
        return bytes([self._rng.choice(self._rng.choice((bytes(range(256)), SPECIAL, ENDS)))])

    def _range(self, data: bytes) -> tuple[int, int]:
        begin = self._at(data)
        return begin, min(len(data), begin + self._log(200))

    def _log(self, most: int) -> int:
        """1 to ``most``, each order of magnitude as often."""
        return int(most ** self._rng.random())

    def _flip(self, data: bytes) -> bytes:
        if not data:
            return data
        at = self._rng.randrange(len(data))
        return data[:at] + bytes([data[at] ^ 1 << self._rng.randrange(8)]) + data[at + 1 :]

    def _put(self, data: bytes) -> bytes:
        at = self._at(data)
        return data[:at] + self._byte() + data[at + 1 :]

    def _insert(self, data: bytes) -> bytes:
        at = self._at(data)
        return data[:at] + self._byte() * self._log(9) + data[at:]

    def _delete(self, data: bytes) -> bytes:
        begin, end = self._range(data)
        return data[:begin] + data[end:]

    def _double(self, data: bytes) -> bytes:
        begin, end = self._range(data)
        return data[:end] + data[begin:]

    def _token(self, data: bytes) -> bytes:
        at = self._at(data)
        return data[:at] + self._rng.choice(self._tokens) + data[at:]

    def _splice(self, data: bytes) -> bytes:
        other = self._rng.choice(self._corpus)
        return data[: self._at(data)] + other[self._at(other) :]

    def _lines(self, data: bytes) -> bytes:
        lines = data.splitlines(keepends=True)
        self._rng.shuffle(lines)
        return b"".join(lines)

    def _repeat(self, data: bytes) -> bytes:
        """A line as often as fills the blocks of parsers."""
        lines = data.splitlines(keepends=True) or [b"\n"]
        at = self._rng.randrange(len(lines))
        often = self._rng.choice((self._log(20_000), BLOCK_ROWS))
        lines[at] *= min(often, MAX_BYTES // len(lines[at]))
        return b"".join(lines)

    def _number(self, data: bytes) -> bytes:
        numbers = list(_NUMBER.finditer(data[:4096]))
        if not numbers:
            return data
        begin, end = self._rng.choice(numbers).span()
        return data[:begin] + self._rng.choice(NUMBERS) + data[end:]

    def _cut(self, data: bytes) -> bytes:
        return data[: self._at(data)]

    def _long(self, data: bytes) -> bytes:
        """One byte very often, now and then past the limit of a line."""
        at = self._at(data)
        return data[:at] + self._byte() * self._log(1_500_000) + data[at:]
