"""Two-sided geometric noise for public keys: what it costs, what it spares, and who may take it."""

import math
from fractions import Fraction

import mpmath
import pytest

from dpstream.accounting.budget.allocation import allocate, mean_log_sd
from dpstream.accounting.budget.calibration import calibrate, calibrated
from dpstream.accounting.errors import InvariantError, UsageError
from dpstream.accounting.geometric import geometric_sd_above, scale_for
from dpstream.accounting.guarantee import describe
from dpstream.accounting.strategies import GeometricStrategy, TreeStrategy
from dpstream.pipelines.render.job_plan import details_text
from tests.accounting.plans import COUNT, MEAN, SUM, UNITS, build

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


def test_selected_keys_need_a_delta() -> None:
    assert allocate(build(16, strategy="auto")).strategy == "blt"
    with pytest.raises(UsageError, match="triggers"):
        build(2049, public_keys=PUBLIC, strategy="auto", delta=0.0).check()
    for strategy in ("geometric", "auto"):
        with pytest.raises(UsageError):
            build(16, strategy=strategy, delta=0.0).check()


@pytest.mark.parametrize("strategy", ["tree", "blt", "dense"])
def test_gaussian_noise_needs_a_delta(strategy: str) -> None:
    with pytest.raises(UsageError, match="delta"):
        build(16, public_keys=PUBLIC, strategy=strategy, delta=0.0).check()


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
