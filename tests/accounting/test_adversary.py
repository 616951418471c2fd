"""Limits against an analyst who chooses each charge by the privacy loss of all earlier answers.

`adversary.Analyst` computes the true delta of the best strategy.  Under the account's rule it is at
most the limit's delta; under wrong rules it is larger, so the tests detect a mistake in the filters
without relying on a formula.
"""

from collections import Counter
from collections.abc import Callable

import pytest

from dpstream.accounting.composition import Total
from dpstream.accounting.filters import Limit, Parts, best_order, default_parts
from tests.accounting.adversary import Accepts, Analyst, Charge, gauss, largest, plain

LIMITS = [(1.0, 1e-6), (4.0, 1e-6), (8.0, 1e-6)]
#: Parts of delta, with which the promise is nearly reached, and those of an account by default.
PARTS: dict[str, Callable[[float, float], Parts]] = {
    "default": default_parts,
    "no Renyi part": lambda epsilon, delta: Parts(delta, 0.4 * delta, 0.0, 2.0),
    "Renyi alone": lambda epsilon, delta: Parts(delta, 0.0, delta, best_order(epsilon, delta)),
}


def total(charges: list[Charge], order: float) -> Total:
    out = Total(order=order)
    for charge, times in Counter(charges).items():
        out = out.plus(charge, times)
    return out


def rule(*limits: Limit) -> Accepts:
    """A charge is accepted if one of the limits accepts all charges."""
    return lambda charges: any(
        bool(limit.accepting(total(charges, limit.parts.order))) for limit in limits
    )


def worst(accepts: Accepts, epsilon: float, steps: int) -> float:
    """True delta of the best strategy of up to so many answers of each kind."""
    analyst = Analyst(accepts, epsilon)
    mu = largest(lambda size: accepts([gauss(size)] * steps), 6.0)
    part = analyst.on_grid(largest(lambda size: accepts([plain(size)] * steps), epsilon))
    return analyst.delta(mu, part, steps, steps)


def check_promise(epsilon: float, delta: float, parts: str, steps: int) -> None:
    limit = Limit(epsilon, delta, PARTS[parts](epsilon, delta))
    spent = worst(rule(limit), epsilon, steps)
    assert spent <= delta
    least = {"default": 0.7, "no Renyi part": 0.99, "Renyi alone": 0.2}[parts]
    assert spent >= least * delta  # an analyst that finds nothing proves nothing


@pytest.mark.parametrize(("epsilon", "delta"), LIMITS)
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("steps", [2, 6])
def test_the_limit_holds(epsilon: float, delta: float, parts: str, steps: int) -> None:
    check_promise(epsilon, delta, parts, steps)


@pytest.mark.slow
@pytest.mark.parametrize(("epsilon", "delta"), LIMITS)
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("steps", [4, 10, 15, 22, 30])
def test_the_limit_holds_for_many_steps(
    epsilon: float, delta: float, parts: str, steps: int
) -> None:
    check_promise(epsilon, delta, parts, steps)


@pytest.mark.parametrize(("epsilon", "delta"), LIMITS)
def test_a_raise_on_the_way_stays_within_the_highest_limit(epsilon: float, delta: float) -> None:
    """The analyst decides by answers whether the limit is raised; parts keep their shares."""
    parts = default_parts(epsilon / 2, delta / 3)
    low, high = Limit(epsilon / 2, delta / 3, parts), Limit(epsilon, delta, parts)
    assert worst(rule(low, high), epsilon, 4) <= delta
    # Answers that decided which part of delta grows could use both.
    others = [
        Limit(epsilon, delta, Parts(delta, share * delta, 0.0, 2.0)) for share in (0.05, 0.95)
    ]
    assert worst(rule(*others), epsilon, 4) > 1.5 * delta


@pytest.mark.parametrize(("epsilon", "delta"), LIMITS)
def test_a_part_that_is_counted_twice_is_seen(epsilon: float, delta: float) -> None:
    parts = default_parts(epsilon, delta)
    twice = Parts(1.4 * delta, parts.thresholds, parts.renyi, parts.order)
    assert worst(rule(Limit(epsilon, 1.4 * delta, twice)), epsilon, 4) > 1.1 * delta


@pytest.mark.parametrize(("epsilon", "delta"), LIMITS)
def test_an_order_that_is_chosen_late_is_seen(epsilon: float, delta: float) -> None:
    best = best_order(epsilon, delta)
    late = [Parts(delta, 0.0, delta, max(1.05, best * part)) for part in (0.3, 0.5, 1, 2, 5)]
    limits = [Limit(epsilon, delta, parts) for parts in late]
    assert worst(rule(*limits), epsilon, 12) > 1.1 * delta
    assert worst(rule(limits[2]), epsilon, 12) <= delta


@pytest.mark.parametrize(("epsilon", "delta"), LIMITS)
def test_a_delta_sum_that_is_left_out_is_seen(epsilon: float, delta: float) -> None:
    limit = Limit(epsilon, delta, default_parts(epsilon, delta))

    def without_delta_sum(charges: list[Charge]) -> bool:
        return bool(limit.accepting(total(charges, limit.parts.order)._replace(extra=0)))  # type: ignore[arg-type]

    assert worst(without_delta_sum, epsilon, 2) > 100 * delta


@pytest.mark.parametrize(("epsilon", "delta"), LIMITS)
def test_a_missing_measure_that_counts_as_nothing_is_seen(epsilon: float, delta: float) -> None:
    limit = Limit(epsilon, delta, default_parts(epsilon, delta))

    def kinds_apart(charges: list[Charge]) -> bool:
        noisy, sure = ([c for c in charges if (c.mu is None) == one] for one in (False, True))
        return rule(limit)(noisy) and rule(limit)(sure)

    assert worst(kinds_apart, epsilon, 2) > 100 * delta
