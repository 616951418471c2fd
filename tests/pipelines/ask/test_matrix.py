"""Every cell of the matrix is a test that is there, or a reason, and the docs show the matrix.

``REWRITE=1`` writes the table of docs/design/questions.md anew.
"""

import importlib
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pipelines.ask.kinds import ALL, KINDS
from tests.pipelines.ask.matrix import CHECKS, ROWS, cells, rendered

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "design" / "questions.md"
BEGIN, END = "<!-- matrix -->\n", "<!-- end of matrix -->\n"


def cases_of(function: Callable[..., object]) -> set[str]:
    """The values that a test is given, of which its cases are made."""
    marks = [mark for mark in getattr(function, "pytestmark", []) if mark.name == "parametrize"]
    cases = set[str]()
    for mark in marks:
        for given in mark.args[1]:
            values = getattr(given, "values", given if isinstance(given, tuple) else (given,))
            cases |= {value for value in values if isinstance(value, str)}
    takes = function.__code__.co_varnames[: function.__code__.co_argcount]  # type: ignore[attr-defined]
    return cases | (set(KINDS) if "kind" in takes else set())


def wrong(row: str, cell: str) -> str:
    """What is wrong with a cell; empty: nothing."""
    named = re.fullmatch(r"(tests/\S+)\.py::(\w+)(?:\[(.*)\])?", cell)
    if named is None:
        return "" if len(cell.split()) > 3 and "::" not in cell else "neither a test nor a reason"
    module = importlib.import_module(named[1].replace("/", "."))
    function = getattr(module, named[2], None)
    if function is None:
        return "there is no such test"
    cases = cases_of(function)
    if named[3] is not None:
        return "" if named[3] in cases else "the test has no such case"
    missing = set(ROWS[row]) - cases
    return f"the test leaves out {sorted(missing)}" if missing and cases & ALL.keys() else ""


def test_every_cell_is_a_test_or_a_reason() -> None:
    assert {name for kinds in ROWS.values() for name in kinds} == ALL.keys()
    assert [(*cell, why) for cell in cells() if (why := wrong(*cell[1:]))] == []
    assert {row for check in CHECKS for row in check.apart} <= ROWS.keys()


@pytest.mark.parametrize(
    ("row", "cell"),
    [
        ("SQL", "tests/pipelines/ask/test_question.py::test_nothing"),
        ("SQL", "tests/faults/test_file_calls.py::test_every_call[no command]"),
        ("stream", "tests/pipelines/ask/test_question.py::test_as_of_and_fresh_are_new_charges"),
        ("tuning", "tests/pipelines/ask/test_question.py::"
                   "test_workers_of_a_runner_give_the_same_bytes"),
        ("SQL", ""),
    ],
)  # fmt: skip
def test_a_wrong_cell_is_seen(row: str, cell: str) -> None:
    assert wrong(row, cell)


def test_the_docs_show_the_matrix() -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    old, _, after = rest.partition(END)
    if os.environ.get("REWRITE"):
        PAGE.write_text(f"{before}{BEGIN}{rendered()}{END}{after}")
        return
    assert old == rendered()
