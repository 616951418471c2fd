"""What a disturbed run published against an undisturbed one, in figures."""

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq


class Figures(NamedTuple):
    """Release rows by what became of them; all zero but ``rows`` when the promise holds.

    Attributes:
        rows: of the undisturbed run; second: with another value; lost: missing; doubled:
            published more often than once; extra: that nobody should have published.
    """

    rows: int = 0
    second: int = 0
    lost: int = 0
    doubled: int = 0
    extra: int = 0

    @property
    def clean(self) -> bool:
        """Nothing went wrong, and there was something that could."""
        return self.rows > 0 and not any(self[1:])

    def plus(self, other: "Figures") -> "Figures":
        """Sums of both."""
        return Figures(*(a + b for a, b in zip(self, other, strict=True)))


def released_rows(folder: Path) -> list[tuple[bytes, str]]:
    """(release id, row as text) of every row below a folder; hidden drafts do not count."""
    out = []
    for path in sorted(folder.rglob("*.parquet")):
        if not path.name.startswith("."):
            rows = pq.ParquetFile(path).read().to_pylist()
            out += [(row["release_id"], repr(sorted(row.items()))) for row in rows]
    return out


def compare(rows: list[tuple[bytes, str]], expected: list[tuple[bytes, str]]) -> Figures:
    """Figures of ``released_rows`` of a run against those of an undisturbed one."""
    right, times = dict(expected), Counter(name for name, _ in rows)
    assert len(right) == len(expected)
    return Figures(
        rows=len(expected),
        second=sum(name in right and row != right[name] for name, row in rows),
        lost=sum(name not in times for name in right),
        doubled=sum(many - 1 for many in times.values()),
        extra=sum(name not in right for name in times),
    )
