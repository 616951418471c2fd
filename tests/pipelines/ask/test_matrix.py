"""Every cell of the matrix is a test that is there, or a reason, and the docs show the matrix.

``REWRITE=1`` writes the table of docs/design/questions.md anew.
"""

import importlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.pipelines.ask.kinds import ALL, KINDS

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


#: Rows, and the worlds of `kinds` that belong to each.
ROWS: Mapping[str, tuple[str, ...]] = {
    "stream": ("stream",),
    "frame": ("frame",),
    "SQL": ("sql",),
    "tuning": ("tuning",),
    "session": ("session",),
    "workload": ("workload pure", "workload tables"),
    "census": ("census persons", "census households"),
    "keys only": ("keys", "keys in SQL"),
}
#: Where tests of the suite and of the faults are.
ASK, FAULTS = "tests/pipelines/ask/test_question.py", "tests/faults/"
RECOVERED = f"{FAULTS}test_recovered_account.py"
REPEATED = f"{FAULTS}test_answer_kills.py::test_it_is_charged_once_at_many_calls"


class Check(NamedTuple):
    """A check.

    Attributes:
        what: in words; test: ``file::function[case]`` of all kinds that are not in ``apart``.
        apart: by row: another test (it has ``::``), or the reason why the check cannot apply.
    """

    what: str
    test: str
    apart: Mapping[str, str] = {}


def _but(rows: str, why: str) -> dict[str, str]:
    """One reason for several rows; ``*`` is all rows that others do not name."""
    return dict.fromkeys(rows.split(", "), why)


_FILES_OF_OTHERS = "its inputs are not the program's: they are known by their place"
CHECKS = (
    Check("an account restored alone is refused", f"{RECOVERED}::"
          "test_restored_refused_recovered_and_asked_again"),
    Check("a charge has one shown answer", f"{ASK}::test_an_account_that_was_rolled_back",
          {"stream": f"{RECOVERED}::test_a_stream_whose_tokens_alone_are_older"}),
    Check("one noise meets one input", f"{FAULTS}test_one_noise.py::"
          "test_no_noise_meets_two_inputs",
          {"stream": f"{FAULTS}test_one_noise.py::"
                     "test_a_stream_draws_nothing_for_other_rows[run]"}),
    Check("asked again on other rows, none, or without files",
          f"{ASK}::test_asking_again_tells_nothing_of_the_rows",
          {"stream": "tests/pipelines/test_finished.py::test_no_command_tells_of_the_input"}),
    Check("first answers on neighbouring rows",
          f"{ASK}::test_first_answers_on_neighbours_differ_in_released_values_alone"),
    Check("limit", f"{ASK}::test_beyond_the_limit_nothing_is_read_or_written",
          {"stream": "tests/pipelines/stream/test_begin.py::test_the_limit_used_up_meanwhile"}),
    Check("an account that is absent, or has another id",
          f"{ASK}::test_an_account_that_is_absent_or_another_is_refused"),
    Check("table id", "tests/pipelines/cli/test_table.py::"
          "test_five_data_sets_in_turn_over_one_folder",
          _but("stream, SQL, tuning, workload, census", _FILES_OF_OTHERS)
          | _but("frame, keys only", "a table in memory is known by nothing (limits.md)")),
    Check("one file is not private and public",
          "tests/accounting/test_places.py::test_one_file_is_not_private_and_public[catalog]",
          _but("stream, tuning, workload", "tests/accounting/test_places.py::"
               "test_one_file_is_not_private_and_public[keys of a folder]")
          | {"frame": "public keys are given as values, not as a file",
             "session": "its public input selects points before the charge",
             "census": "no row of a public file is published as it is"}),
    Check("recover", f"{RECOVERED}::test_restored_refused_recovered_and_asked_again"),
    Check("migrate", "tests/pipelines/cli/test_table.py::"
          "test_wider_dimensions_do_not_make_budgets_whole_again",
          _but("stream, frame, SQL, tuning, workload, census, keys only",
               "its charge is of every unit, whatever the schema")),
    Check("sequence", "tests/test_structure.py::test_one_sequence_charges_and_commits"),
    Check("killed at each step", "tests/pipelines/ask/test_question.py::test_killed_at_a_step",
          {"stream": "tests/pipelines/stream/test_begin.py::"
                     "test_cut_off_anywhere_it_is_charged_once"}),
    Check("a fault at every file call", f"{FAULTS}test_file_calls.py::test_every_call[sql]", {
        row: f"{FAULTS}test_file_calls.py::test_every_call[{case}]"
        for row, case in {
            "stream": "run", "frame": "frame", "tuning": "choose", "session": "points",
            "workload": "workload answer --mechanism=geometric",
            "census": "census execute, households", "keys only": "keys",
        }.items()
    }),
    Check("races", f"{ASK}::test_processes_that_ask_at_once_at_the_limit",
          {"stream": "tests/pipelines/stream/test_begin.py::test_many_begin_at_once"}),
    Check("`fresh`", f"{ASK}::test_as_of_and_fresh_are_new_charges",
          {"stream": "tests/pipelines/stream/test_run.py::"
                     "test_a_changed_number_is_one_command"}),
    Check("`fresh` continues what was cut off", f"{ASK}::test_fresh_continues_what_was_cut_off",
          {"stream": "tests/pipelines/stream/test_fresh.py::test_a_full_disk_is_charged_once"}),
    Check("`fresh` typed again until it is done", f"{REPEATED}[sql --fresh]",
          {"stream": f"{REPEATED}[run --fresh]", "tuning": f"{REPEATED}[choose --fresh]",
           "session": f"{REPEATED}[points --fresh]",
           "workload": f"{REPEATED}[workload answer --fresh]",
           "census": f"{REPEATED}[census execute --fresh]"}
          | _but("frame, keys only", "it returns its answer in memory and delivers nothing")),
    Check("`as_of`", f"{ASK}::test_as_of_and_fresh_are_new_charges",
          {"stream": "its windows name the times; other input is another job or `--fresh`"}),
    Check("the same bytes on every runner", f"{ASK}::test_workers_of_a_runner_give_the_same_bytes",
          {"stream": "tests/runners/test_golden.py::test_flink"}
          | _but("frame, tuning, workload",
                 f"{ASK}::test_a_kind_that_no_runner_reads_takes_none")
          | {"keys only": f"{ASK}::test_workers_of_a_runner_give_the_same_bytes[keys in SQL]"}),
    Check("no private value in errors and logs",
          f"{ASK}::test_no_private_value_is_shown_where_a_question_fails",
          {"stream": "tests/audit/test_leak_channels.py::test_failed_runs_leak_nowhere"}),
)  # fmt: skip


def cells() -> Iterator[tuple[str, str, str]]:
    """Check, row, and its test or reason; no cell is empty."""
    for check in CHECKS:
        for row in ROWS:
            yield check.what, row, check.apart.get(row, check.test)


def rendered() -> str:
    """The table of the docs: a row for each check."""
    lines = [
        "| check | test | kinds with another test, or to which it cannot apply |",
        "|---|---|---|",
    ]
    for check in CHECKS:
        rows_of = dict[str, list[str]]()
        for row, why in check.apart.items():
            rows_of.setdefault(why, []).append(row)
        apart = "; ".join(f"{', '.join(rows)}: {_cell(why)}" for why, rows in rows_of.items())
        lines.append(f"| {check.what} | {_cell(check.test)} | {apart} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return f"`{text}`" if "::" in text else text
