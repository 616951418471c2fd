"""When keys are tested: growing distances, lists, and what is refused."""

import json
import math
import re
from fractions import Fraction

import msgspec
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.fields import Field
from dpstream.accounting.plan.schedule import (
    COMBINED_TESTS,
    DEFAULT_TESTS,
    growing,
    triggers_of_tests,
)
from dpstream.accounting.weights import SelectionWeights
from tests.streams import make_plan

WEIGHTS = SelectionWeights(1.0, 2.0)


@pytest.mark.parametrize("triggers", [1, 2, 5, 15, 16, 100, 1000])
@pytest.mark.parametrize("tests", [1, 3, 15, 16])
def test_growing_tests_are_the_squares_rounded_up(triggers: int, tests: int) -> None:
    want = {math.ceil(triggers * Fraction(j, tests) ** 2) for j in range(1, tests + 1)}
    test_triggers = growing(triggers, tests)
    assert (
        list(test_triggers) == sorted(want)
        and test_triggers[-1] == triggers
        and test_triggers[0] >= 1
    )


@pytest.mark.parametrize("triggers", [100, 365, 1000, 1440])
def test_the_first_test_is_in_the_first_hundredth(triggers: int) -> None:
    """And the usual numbers put one just before a tenth and just before a half of the window."""
    for tests in (DEFAULT_TESTS, COMBINED_TESTS):
        usual = growing(triggers, tests)
        assert usual[0] <= math.ceil(triggers / 100) and len(usual) == tests
        assert any(0.089 * triggers < at <= triggers / 10 for at in usual)
        assert any(0.47 * triggers < at <= triggers / 2 for at in usual)


@pytest.mark.parametrize(
    ("triggers", "every", "schedule", "want"),
    [
        (7, 3, None, [3, 6, 7]),
        (6, 3, None, [3, 6]),
        (4, 1, None, [1, 2, 3, 4]),
        (9, 2, (1, 4, 9), [1, 4, 9]),
    ],
)
def test_triggers_of_the_tests(
    triggers: int, every: int, schedule: tuple[int, ...] | None, want: list[int]
) -> None:
    assert triggers_of_tests(triggers, every, schedule).tolist() == want


def test_a_step_holds_the_data_up_to_the_next_test() -> None:
    design = make_plan(triggers=12, tests=(2, 3, 7, 12)).design
    assert [design.selection_step_index(t) for t in range(1, 14)] == [
        1, 1, 2, 3, 3, 3, 3, 4, 4, 4, 4, 4, 5
    ]  # fmt: skip
    assert [t for t in range(1, 13) if design.selects_at(t)] == [2, 3, 7, 12]
    assert design.tests == 4


def test_skipping_has_sixteen_tests_unless_it_says_otherwise() -> None:
    def tests(**given: object) -> int:
        plan = make_plan(triggers=100, skip=True, weights=WEIGHTS, **given)  # type: ignore[arg-type]
        return plan.design.tests

    assert (tests(), tests(tests=4), tests(tests=(5, 100))) == (16, 4, 2)


@pytest.mark.parametrize(
    "given", [(), (0, 12), (3, 3, 12), (5, 4, 12), (3, 11), (12, 13), 0, -1, (1, 2, 3, 14), (-4,)]
)
def test_other_lists_are_refused(given: object) -> None:
    with pytest.raises(UsageError) as raised:
        make_plan(triggers=12, tests=given)
    assert raised.value.field == "mechanism.tests"
    # Whichever of the fixes is written as it stands, the plan is one.
    fixes = re.findall(r"\[[\d, ]+\]|\d+", raised.value.fix)
    assert len(fixes) == (2 if isinstance(given, tuple) else 1)
    for fix in fixes:
        mended = json.loads(fix)
        make_plan(triggers=12, tests=tuple(mended) if isinstance(mended, list) else mended)


def test_the_shortest_schedules_are_accepted() -> None:
    def tests(given: object) -> list[int]:
        return make_plan(triggers=12, tests=given).design.test_triggers.tolist()

    assert (tests(1), tests((12,)), tests((1, 12))) == ([12], [12], [1, 12])


def test_without_tests_or_skip_keys_are_tested_at_equal_distances() -> None:
    design = make_plan(triggers=12, select_every=5, refresh_every=5, weights=WEIGHTS).design
    assert design.schedule is None and design.test_triggers.tolist() == [5, 10, 12]
    assert not design.test_triggers.flags.writeable  # all designs of equal numbers share it


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("mechanism.tests", {"tests": 3, "select_every": 2}),
        ("mechanism.tests", {"tests": 3, "mode": "rounds"}),
        ("mechanism.skip", {"skip": True}),
        ("mechanism.skip", {"skip": True, "weights": WEIGHTS, "select_every": 2}),
        ("mechanism.skip", {"skip": True, "mode": "rounds", "weights": None}),
        ("mechanism.skip", {"skip": True, "weights": WEIGHTS, "contributions": 1024}),
        ("mechanism.weights", {"skip": True, "weights": WEIGHTS, "public": "list"}),
        ("mechanism.tests", {"tests": 3, "public": "list"}),
    ],
)
def test_what_cannot_be_is_refused(field: str, given: dict[str, object]) -> None:
    with pytest.raises(UsageError) as raised:
        make_plan(triggers=12, **given)  # type: ignore[arg-type]
    assert raised.value.field == field


def test_records_that_an_id_names_are_not_skipped() -> None:
    plan = make_plan(triggers=12, skip=True, weights=WEIGHTS)
    named = msgspec.structs.replace(plan, record_id=Field("id"))
    with pytest.raises(UsageError, match="record_id") as raised:
        named.check()
    assert raised.value.field == "mechanism.skip"


def test_a_record_in_too_many_windows_is_refused() -> None:
    make_plan(triggers=11, slide=1, skip=True, weights=WEIGHTS)
    with pytest.raises(UsageError, match="windows"):
        make_plan(triggers=12, slide=1, skip=True, weights=WEIGHTS)


def test_only_what_is_new_moves_the_hash() -> None:
    plan = make_plan(triggers=12, weights=WEIGHTS)
    hashes = [plan.hash]
    for change in ({"skip": True}, {"tests": 4}, {"tests": (4, 12)}, {"skip": True, "tests": 4}):
        privacy = msgspec.structs.replace(plan.privacy, **change)
        hashes.append(msgspec.structs.replace(plan, privacy=privacy).hash)
    assert len(set(hashes)) == 5
