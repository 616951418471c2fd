"""Neighbouring streams through the whole flow (mechanism.md rules 0 to 5 and 10), and sabotage.

Every sabotaged variant is caught by the audit that the honest product passes.
"""

from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from dpstream.accounting import aggregates
from tests.audit.checks import (
    name_problems,
    pair_problems,
    run_problems,
    scale_problems,
    transcript_of,
)
from tests.audit.neighbours import KINDS, Pair, make_pair, plans, skipping_name, skipping_plans
from tests.audit.recorder import Trace, record, record_bound_by_trigger_times
from tests.audit.reference import Mechanism
from tests.audit.sabotaged import SABOTAGED
from tests.audit.sabotaged_ranked import RANKED_SABOTAGED, SKIPPING_SABOTAGED
from tests.lanes import few_first

CI_PAIRS, LONG_PAIRS = 78, 500


@cache
def mechanism_of(name: str) -> Mechanism:
    return Mechanism((plans() | skipping_plans())[name])


def audit(pair: Pair, folder: Path) -> tuple[list[str], list[Trace]]:
    """Every breach of a pair, and what its two runs did."""
    named_plans = plans() | skipping_plans()
    mechanism = mechanism_of(next(n for n, plan in named_plans.items() if plan == pair.plan))
    everyone = pair.others + pair.unit
    without = record(pair.plan, pair.others, folder, pair.shards)
    # The neighbour comes in another order, in other batches, some twice, on other shards.
    added = record(pair.plan, everyone, folder, 1 + pair.seed % 3, seed=pair.seed)
    problems = [*run_problems(mechanism, without), *run_problems(mechanism, added)]
    problems += pair_problems(mechanism, pair, without, added)
    if pair.plan.design.skips:
        # D on the path of outputs that D' took: the streams are compared to the end of it.
        follow = transcript_of(added)
        forced = record(pair.plan, pair.others, folder, pair.shards, follow=follow)
        problems += pair_problems(mechanism, pair, forced, added)
        problems += name_problems(mechanism)
        return problems, [without, added]
    by_trigger_times = record_bound_by_trigger_times(pair.plan, everyone, folder, 1 + pair.seed % 2)
    if by_trigger_times.admitted() != added.admitted():
        problems.append("bound: deciding one trigger time at a time admits other records")
    problems += name_problems(mechanism)
    return problems, [without, added]


def audit_seeds(seeds: range, folder: Path, skipping: bool = False) -> None:
    for seed in seeds:
        pair = make_pair(seed, name=skipping_name(seed) if skipping else None)
        assert audit(pair, folder)[0] == [], str(pair)


@pytest.mark.parametrize("part", few_first(range(6)))
def test_neighbours_differ_in_one_unit_only(tmp_path: Path, part: int) -> None:
    each = CI_PAIRS // 6
    audit_seeds(range(part * each, (part + 1) * each), tmp_path)


@pytest.mark.parametrize("part", few_first(range(7)))
def test_neighbours_of_jobs_that_skip(tmp_path: Path, part: int) -> None:
    audit_seeds(range(5 * part, 5 * part + 5), tmp_path, skipping=True)


@pytest.mark.slow
def test_neighbours_long(tmp_path: Path) -> None:
    audit_seeds(range(CI_PAIRS, LONG_PAIRS), tmp_path)
    audit_seeds(range(35, LONG_PAIRS // 2), tmp_path, skipping=True)


def test_noise_has_the_sd_of_the_plan(tmp_path: Path) -> None:
    for name in ("sticky", "mean_sliding", "public", "blt", "dense", "combined_units"):
        traces = []
        for seed in (0, 7):
            traces += audit(make_pair(seed, "ordinary", name), tmp_path)[1]
        assert list(scale_problems(mechanism_of(name), traces)) == []


def test_the_pairs_reach_what_they_claim() -> None:
    pairs = [make_pair(seed) for seed in range(CI_PAIRS)]
    assert {pair.kind for pair in pairs} == set(KINDS)
    assert {pair.plan for pair in pairs} == set(plans().values())
    assert all(pair.unit for pair in pairs)
    assert {pair.plan.privacy.strategy for pair in pairs} == {"tree", "blt", "dense"}
    assert {a.kind for pair in pairs for a in pair.plan.aggregates} == set(
        aggregates.AGGREGATE_KINDS
    )


def test_ranked_pairs_repeat_a_unit_within_a_micro_batch(tmp_path: Path) -> None:
    """Also the unit that is added: several of its records of one key come at once."""
    for name in ("weights", "two_per_key"):
        pair = make_pair(3, "flood", name)
        trace = record(pair.plan, pair.others + pair.unit, tmp_path, 1)
        places = Counter((row.window, row.step_index, row.unit, row.page) for row in trace.rows)
        assert max(places.values()) > 1
        ranks = {row.rank for row in trace.rows if row.rank >= 0}
        if name != "two_per_key":  # there repeats take no rank
            assert ranks == set(range(pair.plan.privacy.contributions))


ALL = SABOTAGED | RANKED_SABOTAGED | SKIPPING_SABOTAGED
#: Neighbours tried before a variant counts as undetected; the audit of CI has many more.
TRIES = 4


def breaches(plan: str, kind: str, seed: int, folder: Path) -> set[str]:
    """Rules that the code in force breaches on one pair."""
    problems, traces = audit(make_pair(seed, kind, plan), folder)
    problems += scale_problems(mechanism_of(plan), traces)
    return {problem.partition(":")[0] for problem in problems}


@cache
def honest_breaches(plan: str, kind: str, seed: int, folder: Path) -> set[str]:
    """Breaches of the product as it is; several variants share their neighbours."""
    return breaches(plan, kind, seed, folder)


@pytest.mark.parametrize("name", ALL)
def test_sabotage_is_caught(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    case, shared = ALL[name], tmp_path_factory.getbasetemp()
    mechanism_of(case.plan)  # the judge's figures are never computed under sabotage
    for seed in range(100, 100 + TRIES):
        with case.patch():
            caught = case.rule in breaches(case.plan, case.kind, seed, tmp_path)
        honest = honest_breaches(case.plan, case.kind, seed, shared)
        assert honest == set(), f"honest product, seed {seed}"
        if caught:
            return
    raise AssertionError(f"{name} was not caught")
