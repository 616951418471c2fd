"""Limits against an analyst who chooses each charge by the privacy loss of all earlier answers.

`adversary.Analyst` computes the true delta of the best strategy.  Under the account's rule it is at
most the limit's delta; under wrong rules it is larger, so the tests detect a mistake in the filters
without relying on a formula.

Two-sided geometric noise for public keys: what it costs, what it spares, and who may take it.
"""

import math
from collections import Counter
from collections.abc import Callable
from fractions import Fraction

import mpmath
import pytest

from dpstream.accounting.budget.allocation import allocate, mean_log_sd
from dpstream.accounting.budget.calibration import calibrate, calibrated
from dpstream.accounting.composition import Limit, Parts, Total, best_order, default_parts
from dpstream.accounting.errors import InvariantError
from dpstream.accounting.geometric import geometric_sd_above, scale_for
from dpstream.accounting.guarantee import describe
from dpstream.accounting.strategies import GeometricStrategy, TreeStrategy
from dpstream.pipelines.render.job_plan import details_text
from tests.accounting.adversary import Accepts, Analyst, Charge, gauss, largest, plain
from tests.accounting.plans import COUNT, MEAN, SUM, UNITS, build
from tests.golden.refusals import Refused

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


PUBLIC = "a list"


@pytest.mark.parametrize(
    ("triggers", "contributions", "most"),
    [(1, 10, 2.33), (16, 10, 6.1), (100, 1, 0.50), (100, 10, 10.0), (500, 10, 14.2)],
)
def test_sd_of_a_running_count(triggers: int, contributions: int, most: float) -> None:
    """All C records anywhere, mean over steps, at (6, 1e-9)."""
    plan = build(triggers, public_keys=PUBLIC, strategy="auto", contributions=contributions)
    budget = allocate(plan)
    assert budget.plain and budget.strategy == "geometric"
    assert float(budget.values[0].sd.mean()) <= most


@pytest.mark.parametrize("epsilon", [0.1, 0.3, 1.0, 6.0, 50.0])
def test_epsilon_is_the_sum_over_streams(epsilon: float) -> None:
    """Exactly, as fractions, of the float and of what a person wrote."""
    plan = build(16, public_keys=PUBLIC, strategy="geometric", aggregates=(COUNT, SUM, MEAN, UNITS),
                 epsilon=epsilon, delta=0.0)  # fmt: skip
    budget = allocate(plan)
    spent = sum((Fraction(s.sensitivity) / Fraction(s.scale) for s in budget.streams), Fraction())
    assert 0.999 * Fraction(epsilon) < spent <= min(Fraction(epsilon), Fraction(repr(epsilon)))
    values = {stream.name: stream.sensitivity for stream in plan.design.streams} | {"units": 1}
    for stream in budget.streams:
        strategy = stream.strategy_object
        assert isinstance(strategy, GeometricStrategy)
        assert stream.sensitivity == 32 * values[stream.name] * strategy.column1


@pytest.mark.parametrize("scale", [2.0**-10, 0.01, 1 / 6, 1.0, 30.0, 1e9])
def test_sd_is_above_that_of_the_law(scale: float) -> None:
    with mpmath.workdps(60):
        ratio = mpmath.exp(-1 / mpmath.mpf(scale))
        exact = mpmath.sqrt(2 * ratio) / (1 - ratio)
        assert exact <= geometric_sd_above(scale) <= exact * (1 + mpmath.mpf("1e-10"))


def test_scales_are_rounded_up() -> None:
    """Also where only the decimal, or only the float, needs the larger of two neighbours."""
    for sensitivity, epsilon in ((1, 0.1), (7, 0.3), (1, 1.1), (10**12, 1.7), (3, 3.0)):
        scale = scale_for(sensitivity, Fraction(1, 3), epsilon)
        exact = Fraction(3 * sensitivity) / min(Fraction(epsilon), Fraction(repr(epsilon)))
        assert exact <= Fraction(scale) <= exact * (1 + Fraction(1, 2**51))


def test_auto_takes_the_least_error() -> None:
    """And never more than either family; sd does not rise when delta or epsilon rises."""
    last = math.inf
    for delta in (0.0, 1e-12, 1e-9, 1e-6, 1e-3):
        given = {"public_keys": PUBLIC, "contributions": 2, "epsilon": 1.0, "delta": delta}
        auto = allocate(build(16, strategy="auto", **given))  # type: ignore[arg-type]
        geometric = allocate(build(16, strategy="geometric", **given))  # type: ignore[arg-type]
        both = [geometric]
        if delta:
            both.append(allocate(build(16, strategy="blt", **given)))  # type: ignore[arg-type]
        own = mean_log_sd(auto)
        assert own == min(mean_log_sd(budget) for budget in both) <= last
        last = own
    gaussian = allocate(
        build(16, public_keys=PUBLIC, strategy="auto", per_key_bound=1, contributions=400)
    )
    assert not gaussian.plain and gaussian.strategy == "blt"


def test_selected_keys_need_a_delta(refused: Refused) -> None:
    assert allocate(build(16, strategy="auto")).strategy == "blt"
    refused(lambda: build(2049, public_keys=PUBLIC, strategy="auto", delta=0.0).check())
    for strategy in ("geometric", "auto"):
        refused(build(16, strategy=strategy, delta=0.0).check)


@pytest.mark.parametrize("strategy", ["tree", "blt", "dense"])
def test_gaussian_noise_needs_a_delta(strategy: str, refused: Refused) -> None:
    refused(lambda: build(16, public_keys=PUBLIC, strategy=strategy, delta=0.0).check())


def test_encoders_that_look_ahead_have_no_mu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: a strategy with rows in the future under a Gaussian claim is not calibrated."""
    monkeypatch.setattr(TreeStrategy, "law", "geometric")
    with pytest.raises(InvariantError, match="later step"):
        allocate(build(7, public_keys=PUBLIC))


def test_committed_numbers_hold_the_choice() -> None:
    plan = build(16, public_keys=PUBLIC, strategy="auto", aggregates=(COUNT, UNITS),
                 contributions=2)  # fmt: skip
    begun = calibrated(plan, calibrate(plan))
    assert begun.plan.privacy.strategy == "geometric" and begun.budget.plain
    fresh = allocate(plan)
    assert begun.budget.units is not None and fresh.units is not None
    for ours, theirs in zip(begun.budget.streams, fresh.streams, strict=True):
        assert (ours.scale, ours.sigma, ours.share) == (theirs.scale, theirs.sigma, theirs.share)
        assert (
            ours.strategy_object.parameters.tolist() == theirs.strategy_object.parameters.tolist()
        )


def test_periods_add_up_and_the_page_says_pure() -> None:
    plan = build(
        16, public_keys=PUBLIC, strategy="geometric", delta=0.0, epsilon=2.0, windows=91,
        period=16_000_000,
    )  # fmt: skip
    figures = describe(plan, allocate(plan))
    assert figures["periods"][-1]["epsilon"] == pytest.approx(182)
    assert figures["periods"][-1]["delta"] == 0 and figures["split"]["law"] == "geometric"
    page = details_text(plan, allocate(plan))
    assert "pure epsilon" in page and "(blocks)^2" in page and "mu" not in figures["periods_rule"]
