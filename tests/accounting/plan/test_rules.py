"""Versions of rules: what a run from before keeps."""

import msgspec
import pytest

from dpstream.accounting.plan.design import resolve
from dpstream.accounting.plan.rules import FIRST_RULES, REPEATS_FREE, RULES
from tests.accounting.plans import COUNT, Make


def test_versions_follow_each_other() -> None:
    assert FIRST_RULES == 1 < REPEATS_FREE <= RULES


@pytest.mark.parametrize("rules", range(FIRST_RULES, RULES + 1))
def test_a_plan_is_resolved_by_its_own_rules(make_plan: Make, rules: int) -> None:
    plan = msgspec.structs.replace(make_plan(24, per_key_bound=1), rules=rules)
    assert plan.design.repeats_cost == (rules < REPEATS_FREE)
    assert plan.design == resolve(plan.privacy, (COUNT,), True, 24, rules=rules)
