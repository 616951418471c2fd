"""What ``make test`` leaves out reaches no line of its own."""

import numpy as np
import pytest

from tests.bench.lanes import Measured, chosen
from tests.lanes import in_order, left_out

ALIKE = in_order(f"tests/state/test_x.py::test_cases[{number}]" for number in range(4))
#: By test, its CPU seconds and the lines it reaches.
TESTS: dict[str, tuple[float, set[int]]] = {
    "tests/state/test_x.py::test_short": (0.01, {0}),
    "tests/state/test_x.py::test_quick": (1.0, {1, 3}),
    "tests/state/test_x.py::test_slow_and_no_more": (4.0, {1, 3}),
    "tests/state/test_x.py::test_sabotage": (4.0, {1}),
    "tests/state/test_x.py::test_killed": (4.5, {1}),
    "tests/state/test_x.py::test_killed_for_long": (9.0, {1}),
    "tests/audit/test_y.py::test_of_the_audit": (4.0, {0}),
    "tests/audit/test_y.py::test_of_the_audit_for_long": (9.0, {0}),
    **{test: (1.0, {2}) for test in ALIKE},
    ALIKE[2]: (1.0, {9}),
}


def measured() -> Measured:
    lines = {test: np.isin(np.arange(16), list(reached)) for test, (_, reached) in TESTS.items()}
    seconds = {test: used for test, (used, _) in TESTS.items()}
    return Measured(seconds, {test: np.packbits(row) for test, row in lines.items()})


def test_what_is_left_out_reaches_no_line_of_its_own() -> None:
    out = left_out(TESTS, dict(chosen(measured())))
    assert out == {
        "tests/state/test_x.py::test_slow_and_no_more",
        "tests/state/test_x.py::test_killed_for_long",
        "tests/audit/test_y.py::test_of_the_audit_for_long",
        ALIKE[3],  # the third alone reaches a line, and the first ones come before it
    }
    stay = set.union(*(reached for test, (_, reached) in TESTS.items() if test not in out))
    assert stay == set.union(*(reached for _, reached in TESTS.values()))


def test_no_measurements_are_refused() -> None:
    with pytest.raises(ValueError, match="no test was measured"):
        list(chosen(Measured({}, {})))
