"""What one change of a job would give."""

import msgspec
import pytest

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.tuning.changes import Change, changes
from dpstream.accounting.tuning.reference import reference_figures
from dpstream.accounting.tuning.starred import ways
from dpstream.accounting.weights import MILD
from tests.accounting.plans import COUNT, MEAN, SUM, UNITS, Make


def rows_of(plan: Plan) -> list[Change]:
    return changes(plan, ways(plan))


def row(rows: list[Change], field: str, value: object = ...) -> Change:
    """The one row that begins with this setting."""
    matches = [r for r in rows if next(iter(r.settings), "") == field]
    matches = [r for r in matches if value is ... or r.settings[field] == value]
    assert len(matches) == 1, [r.text for r in rows]
    return matches[0]


@pytest.fixture
def plan(make_plan: Make) -> Plan:
    return make_plan(
        12, aggregates=(COUNT, MEAN), contributions=10, weights=MILD, strategy="blt", windows=3
    )


def test_the_starred_line_is_the_first_and_the_only_one(plan: Plan) -> None:
    rows = rows_of(plan)
    assert [r.starred for r in rows] == [True] + [False] * (len(rows) - 1)
    assert [r.same for r in rows] == sorted((r.same for r in rows), reverse=True)
    others = [r.gain for r in rows if not r.same]
    assert others == sorted(others, reverse=True) and len(others) > 8


def test_every_kind_of_change_is_there(plan: Plan) -> None:
    rows = rows_of(plan)
    once = row(rows, "release_every", "12s")
    assert once.keys is not None and once.keys > 1.25 and once.noise < 0.7 and once.helps
    assert once.effect == "published once, at the window's end"
    assert row(rows, "release_every", "4s").noise > once.noise
    tested = row(rows, "mechanism.tests", 3)
    assert tested.noise == 1 and tested.keys is not None and tested.keys > 1.1
    assert tested.early == 0
    assert tested.effect == (
        "a key is tested 3 times, growing apart; no keys by a tenth of the window"
    )
    unskipped = row(rows, "mechanism.skip", False)
    assert unskipped.keys is not None and unskipped.keys < 0.95 and not unskipped.helps
    assert row(rows, "contributions", 20).noise > 1.5
    one_less = row(rows, "aggregate.level")
    assert one_less.noise == pytest.approx(2**-0.5, rel=1e-3)
    assert row(rows, "public_keys").keys is None
    assert {"per_key_bound = 1", "mechanism.combine = true"} <= {
        part for r in rows for part in r.text.split(", ")
    }
    # The mean counts by itself, so that dropping the count changes nothing.
    assert not any("aggregate.n" in r.settings for r in rows)


def test_a_job_that_does_not_skip_is_told_what_it_would_gain(make_plan: Make) -> None:
    plan = make_plan(100, strategy="blt", weights=MILD, skip=False)
    rows = rows_of(plan)
    skipping = row(rows, "mechanism.skip", True)
    assert skipping.helps and skipping.keys is not None and 1.15 < skipping.keys < 1.4
    assert skipping.early is not None and 1.05 < skipping.early < 1.3
    assert skipping.effect == (
        "pairs on published keys take no selection weight; tests grow apart, "
        f"x{skipping.early:.2g} keys by a tenth of the window"
    )
    tested = row(rows, "mechanism.select_every", 100)
    assert tested.keys is not None and tested.keys > 1.3
    # What is published once has the noise of one step, not of 100.
    assert tested.noise is not None and 0.3 < tested.noise < 0.5
    # Where it cannot skip it is not told so.
    plain = rows_of(make_plan(100, strategy="blt", contributions=3))
    assert not any("mechanism.skip" in r.settings for r in plain)


def test_more_tests_are_told_by_what_comes_early(make_plan: Make) -> None:
    plan = make_plan(100, strategy="blt", weights=MILD)
    rows = {
        r.settings["mechanism.tests"]: r for r in rows_of(plan) if "mechanism.tests" in r.settings
    }
    assert set(rows) == {1, 3, 6, 10, 32, 64}
    few, many = rows[6], rows[32]
    assert few.keys is not None and few.early is not None
    assert many.keys is not None and many.early is not None
    assert few.keys > 1.05 > 1 > many.keys and few.early < 0.8 < many.early
    assert rows[1].effect.startswith("a key is tested once, at the window's end")


def test_fewer_records_are_no_gain_for_nothing(plan: Plan) -> None:
    half = row(rows_of(plan), "contributions", 5)
    assert half.noise < 0.6 and not half.helps
    assert half.cut == pytest.approx(1 - (137 / 60) / (7381 / 2520))
    assert "22% fewer records" in half.effect
    # A job of C = 5 that names no weights has none.
    assert half.settings["mechanism.weights"] == MILD


def test_ratios_are_those_of_the_changed_plan(plan: Plan) -> None:
    replace = msgspec.structs.replace
    own = reference_figures(plan, allocate(plan))
    other = replace(plan, timeline=replace(plan.timeline, trigger_every=12_000_000))
    once = row(rows_of(plan), "release_every", "12s")
    performance = reference_figures(other, allocate(other))
    assert once.keys == performance.keys_against(own) and once.noise == performance.noise_against(
        own
    )


def test_what_cannot_be_run_is_left_out(make_plan: Make) -> None:
    plan = make_plan(24, aggregates=(SUM,), mode="rounds")
    rows = rows_of(plan)
    fields = {field for r in rows for field in r.settings}
    assert "per_key_bound" not in fields and "mechanism.select_every" not in fields
    assert "mechanism.mode" in row(rows, "mechanism.mode").settings  # public keys need sticky
    one = rows_of(make_plan(1, aggregates=(SUM,), contributions=1))
    assert not any("release_every" in r.settings for r in one)
    assert "contributions" in {field for r in one for field in r.settings}
    assert all(r.settings != {"contributions": 0} for r in one)


def test_a_count_of_units_is_published_when_it_is_tested(make_plan: Make) -> None:
    rows = rows_of(make_plan(12, aggregates=(UNITS,)))
    tested = row(rows, "mechanism.select_every", 12)
    assert tested.settings == {"mechanism.select_every": 12, "mechanism.refresh_every": 12}


def test_public_keys_leave_noise_to_choose(make_plan: Make) -> None:
    rows = rows_of(make_plan(12, aggregates=(COUNT, MEAN), public_keys="list"))
    assert rows[0].starred and rows[0].effect in ("the least noise", "the job as it is")
    assert all(r.keys == 1 for r in rows)
    fields = {field for r in rows for field in r.settings}
    assert not fields & {"public_keys", "mechanism.select_every", "mechanism.combine"}


def test_triggers_divide_what_they_must(make_plan: Make) -> None:
    plan = make_plan(12)
    sliding = msgspec.structs.replace(
        plan, timeline=msgspec.structs.replace(plan.timeline, slide=4_000_000)
    )
    matches = [r for r in rows_of(sliding) if "release_every" in r.settings]
    assert {r.settings["release_every"] for r in matches} == {"2s", "4s"}
    assert {r.effect for r in matches} == {"published less often"}
