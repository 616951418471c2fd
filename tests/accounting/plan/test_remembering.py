"""Which plans remember keys over windows, for how long, and what is refused."""

import msgspec
import pytest

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.errors import UsageError
from dpstream.accounting.guarantee import describe
from dpstream.accounting.plan.plan import Plan
from tests.streams import STEP, make_plan

REPLACED = msgspec.structs.replace


@pytest.mark.parametrize(
    ("settings", "remembers", "lasting"),
    [
        ({}, True, None),
        ({"remember": "run"}, True, None),
        ({"remember": "never"}, False, None),
        ({"remember": 5 * STEP}, True, 5),
        ({"windows": 1}, False, None),
        ({"windows": 1, "remember": "run"}, False, None),
        ({"mode": "rounds"}, False, None),
        ({"public": "list"}, False, None),
        ({"public": "list", "remember": "never"}, False, None),
    ],
)
def test_which_plans_remember(
    settings: dict[str, object], remembers: bool, lasting: int | None
) -> None:
    design = make_plan(**settings).design  # type: ignore[arg-type]
    assert design.remembers == remembers
    assert design.remembered_for == lasting


def test_a_stream_without_end_remembers() -> None:
    plan = make_plan()
    line = REPLACED(plan.timeline, end=None)
    assert REPLACED(plan, timeline=line).design.remembers


@pytest.mark.parametrize(
    "settings",
    [
        {"public": "list", "remember": "run"},
        {"public": "list", "remember": STEP},
        {"mode": "rounds", "remember": "run"},
        {"remember": 0},
        {"remember": -STEP},
        {"remember": STEP + 1},
    ],
)
def test_what_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=r"remember_keys"):
        make_plan(**settings)  # type: ignore[arg-type]


def test_only_what_is_said_is_hashed() -> None:
    plans = [make_plan(remember=r) for r in (None, "run", "never", STEP, 2 * STEP)]
    assert len({plan.hash for plan in plans}) == 5
    one: list[Plan] = [make_plan(windows=1, remember=r) for r in (None, "never")]
    assert allocate(one[0]).sound and one[0].hash != one[1].hash


def test_the_guarantee_says_it() -> None:
    for remember, words in (
        (None, "untested"),
        (5 * STEP, "untested, for 5 seconds"),
        ("never", ""),
    ):
        plan = make_plan(remember=remember)
        publishing = describe(plan, allocate(plan))["publishing"]
        assert publishing.endswith(words) and ("untested" in publishing) == bool(words)
