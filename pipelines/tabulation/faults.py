"""What is wrong with public files: every fault with its file, row, column, rule and fix.

Public files say nothing of a person, but a wrong file may have been put in their place: so a fault
names rows and columns and never shows a value.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from dpstream.accounting.arrays import Bool, Int64
from dpstream.accounting.errors import UsageError

#: Faults of one rule and column of a file that are listed one by one; the rest is counted.
MAX_LISTED = 10_000


class Fault(NamedTuple):
    """One rule that a public file does not keep.

    Attributes:
        file: its name, without folders.
        row: number of the line in the file, the header's is 1; ``None``: of the whole file.
        column: or field; empty: of the whole row or file.
        rule: what is not as it must be, in words; fix: what to do.
    """

    file: str
    row: int | None
    column: str
    rule: str
    fix: str

    def __str__(self) -> str:
        where = [self.file]
        where += [] if self.row is None else [f"row {self.row}"]
        where += [self.column] if self.column else []
        return f"{', '.join(where)}: {self.rule}. Fix: {self.fix}."

    def as_dict(self) -> dict[str, Any]:
        """The fault for machines."""
        return self._asdict()


class Faults:
    """Gathers the faults of one file, in the order in which they are found.

    Args:
        file: its name, without folders.
    """

    def __init__(self, file: str) -> None:
        self.file = file
        self.faults = list[Fault]()

    def add(self, column: str, rule: str, fix: str, row: int | None = None) -> None:
        """One fault."""
        self.faults.append(Fault(self.file, row, column, rule, fix))

    def rows(self, bad: Bool, numbers: Int64, column: str, rule: str, fix: str) -> None:
        """A fault of each row that is marked.

        Args:
            bad: (n,) which rows; numbers: (n,) their numbers in the file.
        """
        at = numbers[np.flatnonzero(bad)]
        for number in at[:MAX_LISTED].tolist():
            self.add(column, rule, fix, number)
        if len(at) > MAX_LISTED:
            self.add(column, f"{rule} (and {len(at) - MAX_LISTED:,} more rows)", fix)


def refuse(fault_stream: Iterable[Fault]) -> None:
    """Refuse public files that have faults; nothing is charged for them.

    Raises:
        UsageError: there is one; shows the first and how many there are.
    """
    faults = list(fault_stream)
    if faults:
        first = faults[0]
        more = f" ({len(faults):,} faults)" if len(faults) > 1 else ""
        where = first.file if first.row is None else f"{first.file} row {first.row}"
        raise UsageError(
            f"{where} {first.column}".strip(),
            f"{first.rule}{more}",
            f"{first.fix}; `dpstream census validate` lists all" if more else first.fix,
        )
