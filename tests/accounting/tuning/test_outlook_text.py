"""A plan's answers as a person reads them."""

import msgspec
import pytest

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.tuning.outlook import outlook
from dpstream.accounting.tuning.outlook_text import outlook_text as text
from dpstream.accounting.weights import MILD, STEEP
from tests.accounting.plans import COUNT, MEAN, SUM, UNITS, Make


@pytest.fixture
def plan(make_plan: Make) -> Plan:
    return make_plan(
        12, aggregates=(COUNT, MEAN, SUM), contributions=10, weights=MILD, strategy="blt"
    )


def test_for_a_person(plan: Plan) -> None:
    """Short, the answers first, one starred line, nothing refused."""
    budget = allocate(plan)
    page = text(plan, budget, units=5_000, keys=50)
    lines = page.splitlines()
    assert len(lines) < 35 and all(len(line) < 260 for line in lines)
    heads = [line[:11].strip() for line in lines if line[:1].isupper()]
    assert heads == ["Guarantee", "Counted", "Appears", "Exact", "Budget", "Helps most", "Changes",
                     "More"]  # fmt: skip
    assert sum(line.startswith("*") for line in lines) == 1
    assert "refused" not in page and "of 5,000 units that is" in page and "of 50 keys about" in page
    assert "more than there are" in text(plan, budget, units=3)
    assert "--units N" in text(plan, budget)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ({"public_keys": "list"}, "every key of the public list"),
        ({"mode": "rounds"}, "a key is tested, and published, up to 12 times each"),
        ({"refresh_every": 5}, "published every 5 seconds, 3 times each"),
        ({"select_every": 12}, " units in a window\n"),
        ({"period": 12_000_000, "windows": 4}, "Lifetime    a person of all 4 periods: gaussian ("),
        ({"epsilon": 25.0}, "Warning     epsilon 25 promises little"),
        ({"aggregates": (UNITS,)}, "people"),
        ({"weights": STEEP, "per_key_bound": 1, "combine": True}, "Budget      shares of mu^2"),
    ],
    ids=str,
)
def test_other_jobs(make_plan: Make, kind: dict[str, object], words: str) -> None:
    plan = make_plan(12, **kind)
    page = text(plan, allocate(plan))
    assert words in page
    assert sum(line.startswith("*") for line in page.splitlines()) == 1


def test_periods_without_end(make_plan: Make) -> None:
    plan = make_plan(12, period=12_000_000)
    line = msgspec.structs.replace(plan.timeline, end=None, trigger_every=1_000_000)
    endless = msgspec.structs.replace(plan, timeline=line)
    page = text(endless, allocate(endless))
    assert "Lifetime    a person of 4 periods: gaussian (" in page
    assert "none holds for all of them" in page


def test_hardly_any_key_is_none(make_plan: Make) -> None:
    plan = make_plan(12)
    assert "of 1,000 keys none appear" in text(plan, allocate(plan), units=50)


def test_windows_in_words(make_plan: Make) -> None:
    plan, once = make_plan(12), make_plan(1)
    assert "in windows of 12 seconds, published every 1 second, 12 times each" in text(
        plan, allocate(plan)
    )
    assert "in windows of 1 second, published once each" in text(once, allocate(once))
    line = msgspec.structs.replace(plan.timeline, slide=4_000_000)
    sliding = msgspec.structs.replace(plan, timeline=line)
    assert "in windows of 12 seconds every 4 seconds" in text(sliding, allocate(sliding))


def test_what_helps_most_is_named_first(plan: Plan) -> None:
    best = outlook(plan, allocate(plan))["helps_most"]
    assert f"Helps most  {best['text']}: {best['effect']}; keys x" in text(plan, allocate(plan))


def test_shares_are_explained_where_they_need_it(make_plan: Make, plan: Plan) -> None:
    plain = make_plan(12, per_key_bound=1)
    assert "more than 1 together" in text(plan, allocate(plan))
    assert "more than 1" not in text(plain, allocate(plain))
