"""Which of many like cases run in ``make test``, and which in the slow lane alone."""

from collections.abc import Iterable
from typing import Any

import pytest


def few_first(cases: Iterable[Any], fast: int = 1) -> list[Any]:
    """Return all cases for ``pytest.mark.parametrize``, those behind the first ``fast`` as slow.

    For seeds of one property, and for faults of one kind: each is worth running, and no more than
    a few of them on every change.
    """
    return [
        case if number < fast else pytest.param(case, marks=pytest.mark.slow)
        for number, case in enumerate(cases)
    ]
