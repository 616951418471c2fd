"""Limits keep the reasons that stand beside them: integers, services, waiting, defaults."""

import ast
import inspect
import math

from dpstream.accounting import limits


def reasonless(source: str) -> list[str]:
    """Limits above whose group of lines no reason stands."""
    lines, names = source.splitlines(), []
    for node in ast.parse(source).body:
        if not isinstance(node, ast.Assign):
            continue
        at = node.lineno - 1
        while at > 0 and lines[at - 1].strip() and not lines[at - 1].startswith("#"):
            at -= 1
        if at == 0 or not lines[at - 1].startswith("#:"):
            names.append(ast.unparse(node.targets[0]))
    return names


def test_each_has_its_reason() -> None:
    names = reasonless(inspect.getsource(limits))
    assert names == ["MICROS_PER_SECOND"]  # no limit, a unit
    assert reasonless('"""M."""\n\nMOST = 3\n#: Why.\nLEAST = 1\n') == ["MOST"]


def test_all_are_positive_numbers() -> None:
    for name, value in vars(limits).items():
        if name.isupper():
            assert isinstance(value, int | float) and 0 < value < math.inf, name


def test_sums_on_the_grid_fit_into_64_bits() -> None:
    """A key's sum at its largest, as decoded, and noise beside it."""
    largest = limits.MAX_GRID_VALUE * limits.MAX_PAIRS << limits.DECODE_BITS
    assert largest <= 1 << 62
    assert limits.MAX_REAL_SIGMA * (1 << limits.DECODE_BITS) < 2.0**53


def test_numbers_of_triggers_fit_their_types() -> None:
    assert limits.MAX_TRIGGERS.bit_length() == 21  # levels of a path's state
    assert limits.MAX_DENSE_TRIGGERS <= limits.MAX_MIXED_TRIGGERS <= limits.MAX_TRIGGERS
    # 19 numbers a trigger of at most 5 characters, committed in one cell.
    assert limits.MAX_DENSE_TRIGGERS * 19 * 5 < limits.CELL_CHARACTERS
    assert limits.MAX_TRIGGER_TIME < (1 << 31) - 1
    seconds_of_life = limits.LEAST_LIFE / limits.MICROS_PER_SECOND
    assert seconds_of_life / 86_400 >= 366 and limits.MAX_TRIGGER_TIME / seconds_of_life > 67


def test_defaults_lie_within_what_may_be_asked_for() -> None:
    assert limits.BATCH_ROWS <= limits.SPLIT_BUFFER_ROWS
    assert limits.MAX_WEIGHTED <= limits.MAX_CONTRIBUTIONS <= limits.MAX_PAIRS


def test_spanners_own_limits_are_kept() -> None:
    """80,000 mutations and 100 MiB of a commit, 10 MiB and 2,621,440 characters of a cell."""
    assert limits.COMMIT_MUTATIONS <= 80_000 and limits.COMMIT_BYTES < 100 << 20
    assert limits.CELL_BYTES < 10 << 20 and limits.CELL_CHARACTERS < 2_621_440
    assert limits.CELL_BYTES < limits.COMMIT_BYTES


def test_a_lost_call_leaves_time_for_another() -> None:
    assert 2 * limits.CALL_SECONDS <= limits.COMMIT_RETRY_SECONDS
