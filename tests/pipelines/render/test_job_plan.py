"""The plan of a job as text: answers first, short, complete, and rounded in the safe direction."""

from typing import Any

import msgspec
import pytest

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.figures import up
from dpstream.accounting.guarantee import NOT_SOUND, describe, promises
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.tuning.outlook import outlook
from dpstream.accounting.weights import MILD, STEEP
from dpstream.pipelines.render.job_plan import (
    details_text,
    promise_lines,
    summary_text,
    trigger_rows,
)
from tests.accounting.plans import COUNT, MEAN, SUM, UNITS, Make, build
from tests.accounting.test_guarantee import ALL, months


@pytest.fixture
def plan(make_plan: Make) -> Plan:
    return make_plan(
        12, aggregates=(COUNT, MEAN, SUM), contributions=10, weights=MILD, strategy="blt"
    )


def test_for_a_person(plan: Plan) -> None:
    """Short, the answers first, one line of advice, nothing refused."""
    budget = allocate(plan)
    page = summary_text(plan, budget, units=5_000, keys=50)
    lines = page.splitlines()
    assert len(lines) < 22 and all(len(line) < 260 for line in lines)
    heads = [line[:11].strip() for line in lines if line[:1].isupper()]
    assert heads == ["Guarantee", "Counted", "Appears", "Exact", "Epsilon", "Budget", "Helps most",
                     "More"]  # fmt: skip
    assert "refused" not in page and "of 5,000 units that is" in page and "of 50 keys about" in page
    assert "more than there are" in summary_text(plan, budget, units=3)
    assert "--units N" in summary_text(plan, budget)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ({"public_keys": "list"}, "every key of the public list"),
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
    page = summary_text(plan, allocate(plan))
    assert words in page


def test_periods_without_end(make_plan: Make) -> None:
    plan = make_plan(12, period=12_000_000)
    line = msgspec.structs.replace(plan.timeline, end=None, trigger_every=1_000_000)
    endless = msgspec.structs.replace(plan, timeline=line)
    page = summary_text(endless, allocate(endless))
    assert "Lifetime    a person of 4 periods: gaussian (" in page
    assert "none holds for all of them" in page


def test_hardly_any_key_is_none(make_plan: Make) -> None:
    plan = make_plan(12)
    assert "of 1,000 keys none appear" in summary_text(plan, allocate(plan), units=50)


def test_windows_in_words(make_plan: Make) -> None:
    plan, once = make_plan(12), make_plan(1)
    assert "in windows of 12 seconds, published every 1 second, 12 times each" in summary_text(
        plan, allocate(plan)
    )
    assert "in windows of 1 second, published once each" in summary_text(once, allocate(once))
    line = msgspec.structs.replace(plan.timeline, slide=4_000_000)
    sliding = msgspec.structs.replace(plan, timeline=line)
    assert "in windows of 12 seconds every 4 seconds" in summary_text(sliding, allocate(sliding))


def test_what_helps_most_is_one_line(plan: Plan) -> None:
    best = outlook(plan, allocate(plan))["helps_most"]
    assert f"Helps most  {best['text']}: keys x" in summary_text(plan, allocate(plan))


def test_shares_are_explained_where_they_need_it(make_plan: Make, plan: Plan) -> None:
    plain = make_plan(12, per_key_bound=1)
    assert "more than 1 together" in summary_text(plan, allocate(plan))
    assert "more than 1" not in summary_text(plain, allocate(plain))


@pytest.mark.parametrize(
    ("windows", "expected_numbers"),
    [(1, []), (2, [1, 2]), (3, [1, 2, 3]), (10, [1, 2, 4, 8, 10]), (20, [1, 2, 4, 8, 20]),
     (40, [1, 2, 4, 8, 40]), (None, [1, 2, 4, 8, 1024])],
)  # fmt: skip
def test_lines_of_periods(
    make_plan: Make, windows: int | None, expected_numbers: list[int]
) -> None:
    plan = make_plan(windows=windows or 1, period=100_000_000)
    if windows is None:
        line = msgspec.structs.replace(plan.timeline, end=None)
        plan = msgspec.structs.replace(plan, timeline=line)
    budget = allocate(plan)
    figures, page = describe(plan, budget), details_text(plan, budget)
    rows = {row["periods"]: row for row in figures["periods"]}
    lines = [line.strip() for line in page.splitlines() if line.strip().startswith("k = ")]
    assert lines == [
        f"k = {k}: mu {up(rows[k]['mu'])}, epsilon {up(rows[k]['epsilon'])} at delta "
        f"{up(rows[k]['delta'], 3)}"
        for k in expected_numbers
    ]
    assert ("has no end" in page) == (windows is None)
    assert (f"{figures['periods_rule']}" in page) == bool(expected_numbers)
    assert "once for all time" not in page


def test_the_line_of_the_budget_is_rounded_up(make_plan: Make) -> None:
    plan = make_plan(contributions=7, delta=1.234567e-9)
    budget = allocate(plan)
    (line,) = (x for x in details_text(plan, budget).splitlines() if x.startswith("Budget"))
    gaussian, thresholds = budget.delta * (1 - budget.theta), 7 * budget.b
    assert line == (
        f"Budget      mu {up(budget.mu)}; delta {up(gaussian, 3)} noise + {up(thresholds, 3)} "
        f"thresholds (b = {up(budget.b, 3)} per key and round)"
    )


@pytest.mark.parametrize("public", [None, "list"])
@pytest.mark.parametrize(
    ("triggers", "expected_numbers"),
    [(1, [1]), (2, [1, 2]), (7, [1, 2, 3, 4, 6, 7]), (100, [1, 2, 3, 25, 50, 75, 100]),
     (101, [1, 2, 3, 26, 51, 76, 101])],
)  # fmt: skip
def test_the_tables_hold_the_figures(
    make_plan: Make, public: str | None, triggers: int, expected_numbers: list[int]
) -> None:
    plan = make_plan(triggers, aggregates=ALL, public_keys=public)
    budget = allocate(plan)
    figures, lines = describe(plan, budget), details_text(plan, budget).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("Trigger"))
    tau = figures["tau"]
    names = [name for s in figures["streams"] for name in ("sd", s["name"])]
    assert lines[at].split() == ["Trigger", *names, *(["tau", "(units)"] if tau else [])]
    for t, line in zip(expected_numbers, lines[at + 1 :], strict=False):
        sds = [f"{s['sd'][t - 1]:.6g}" for s in figures["streams"]]
        assert line.split() == [str(t), *sds, *([f"{tau[t - 1]:.6g}"] if tau else [])]
    columns = at + len(expected_numbers) + 2
    assert lines[columns - 1] == "" and lines[columns].startswith("Column")
    for c, line in zip(figures["columns"], lines[columns + 1 :], strict=False):
        figure = f"{c['name']:<16}  {c['sd_mean']:.6g}, {c['sd_final']:.6g} {c['note']}"
        assert line == figure.rstrip()
    streams = lines[at - 1 - len(figures["streams"]) : at - 1]
    for s, line in zip(figures["streams"], streams, strict=True):
        cells = [s["name"], *(f"{s[x]:.6g}" for x in ("share", "sensitivity", "sigma"))]
        assert line.split() == [*cells, str(s["col2"])]


@pytest.mark.parametrize("case", [{}, {"triggers": 1}])
def test_text_is_short_and_complete(make_plan: Make, case: dict[str, Any]) -> None:
    plan = make_plan(**case)
    page = details_text(plan, allocate(plan))
    assert len(page.splitlines()) <= 45
    for part in ("Guarantee", "Neighbours", "2^129", "sigma", "tau", "50% chance", "Assumed"):
        assert part in page
    assert NOT_SOUND not in page


def test_lines_for_a_person() -> None:
    plan = months()
    lines = promise_lines(plan, allocate(plan))
    assert [line.split()[0] for line in lines] == ["Noise", "Noise", "Lifetime"]
    assert "(in force)" in lines[0] and "(182, 0)" in lines[2] and "all 91 periods" in lines[2]
    selected = build(12)
    in_force, other = promise_lines(selected, allocate(selected))
    assert "gaussian" in in_force and "(in force)" in in_force
    assert "geometric" in other and "(in force)" not in other
    pure = build(4, public_keys="list", strategy="geometric", delta=0.0)
    assert promise_lines(pure, allocate(pure)) == []


def test_lines_say_period_column_and_figures() -> None:
    """The first column, the figures rounded up to 4 and 3 digits, and whether periods repeat."""
    plan = months(2, aggregates=(COUNT, SUM), per_key_bound=1)
    rows = promises(plan, allocate(plan))
    assert {row.column for row in rows} == {"n"}
    lines = promise_lines(plan, allocate(plan))
    assert all(" a period, n " in line and " in all, " not in line for line in lines[:2])
    fixed = rows[0].fixed
    assert fixed is not None and fixed[0] == pytest.approx(131.55, abs=0.01)
    assert "geometric (182, 0), (131.6, 9.1e-06) on a schedule fixed beforehand" in lines[2]
    assert "gaussian (23.61, 9.11e-06)" in lines[2]
    twice = months(windows=2)
    assert all(" a period, n " in line for line in promise_lines(twice, allocate(twice))[:2])
    once = build(12)
    assert all(" in all, n " in line for line in promise_lines(once, allocate(once)))
    pure = months(strategy="geometric", delta=0.0)
    [noise, _] = promise_lines(pure, allocate(pure))
    assert "(in force)" not in noise


def test_a_handful_of_triggers_stands_for_all() -> None:
    streams = [{"name": "selection", "sd": [1.0, 2.0, 3.0]}, {"name": "n", "sd": [4.0, 5.0, 6.0]}]
    heads, rows = trigger_rows({"streams": streams, "tau": [7.0, 8.0, 9.0]})
    assert heads == ["sd selection", "sd n", "tau (units)"]
    assert rows == [(1, [1.0, 4.0, 7.0]), (2, [2.0, 5.0, 8.0]), (3, [3.0, 6.0, 9.0])]
    assert trigger_rows({"streams": streams, "tau": None}) == (
        heads[:2],
        [(t, r[:2]) for t, r in rows],
    )
