"""The lanes of the tests: ``make test``, ``make extended`` and ``make nightly``.

CI runs the first two.  Two lists take tests out of the first one; both hold lines ``NUMBER TEST``
(so many cases stay) or ``0 TEST[CASE]``.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

#: Tests and cases that only ``make nightly`` runs, chosen by CPU seconds.
SLOW = Path(__file__).with_name("slow.txt")
#: Tests and cases that ``make extended`` runs: `tests.bench.lanes` chooses them.
EXTENDED = Path(__file__).with_name("extended.txt")


def read_list(path: Path) -> dict[str, int]:
    """Return the number of each line of a list, by test or test case."""
    lines = (line for line in path.read_text().splitlines() if not line.startswith("#"))
    numbers = (line.split(" ", 1) for line in lines)
    return {name: int(number) for number, name in numbers}


def in_order(ids: Iterable[str]) -> list[str]:
    """Return test ids in an order that they alone fix: of a test's cases the first ones stay."""
    return sorted(ids, key=lambda name: hashlib.sha256(name.encode()).digest())


def left_out(ids: Iterable[str], most: dict[str, int]) -> set[str]:
    """Return the test ids that a list leaves out."""
    remaining, out = dict(most), set[str]()
    for name in in_order(ids):
        function = name.partition("[")[0]
        if most.get(name) == 0 or remaining.get(function) == 0:
            out.add(name)
        elif function in remaining:
            remaining[function] -= 1
    return out


def few_first(cases: Iterable[Any], fast: int = 1) -> list[Any]:
    """Return all cases for ``pytest.mark.parametrize``, those behind the first ``fast`` as slow.

    For seeds of one property, and for faults of one kind: each is worth running, and no more than
    a few of them on every change.
    """
    return [
        case if number < fast else pytest.param(case, marks=pytest.mark.slow)
        for number, case in enumerate(cases)
    ]
