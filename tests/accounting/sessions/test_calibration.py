"""From millionths to scales: never less noise than was paid for, and hardly more."""

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from dpstream.accounting import limits
from dpstream.accounting.errors import UsageError
from dpstream.accounting.query.parts import QueryPart
from dpstream.accounting.sessions import calibration
from dpstream.accounting.sessions.aggregates import (
    COUNT,
    Aggregate,
    Axis,
    Cells,
    Kind,
    Question,
    average,
    median,
    sum_of,
)
from dpstream.accounting.sessions.calibration import calibrated, expected, scale_of
from tests.sessions import QUESTIONS, SHAPES, boxes_of, space

SPACE = space()


def spent(kind: Kind, question: Question, cell: int, boxes: object) -> Fraction:
    """What the parts of one cell cost together at their sensitivity, exactly."""
    total = Fraction()
    for measures in calibrated(SPACE, question, boxes):  # type: ignore[arg-type]
        for noise in measures.each[measures.range_numbers[cell]].noises:
            most, nodes, scale = noise.part.most, noise.part.nodes, Fraction(noise.scale)
            cost = most * nodes / scale if kind == "epsilon" else most**2 * nodes / (2 * scale**2)
            total += cost
    return total


@pytest.mark.parametrize("kind", ["epsilon", "rho"])
@pytest.mark.parametrize("amount", [7, 333_333, 1_000_000, 7_654_321])
def test_a_cell_spends_its_amount_and_no_more(kind: Kind, amount: int) -> None:
    for cells, ranges in SHAPES:
        for aggregates in QUESTIONS:
            boxes = boxes_of(SPACE, cells, ranges)
            question = Question(kind=kind, amount=amount, aggregates=aggregates, cells=cells)
            for cell in range(cells.count):
                share = spent(kind, question, cell, boxes) / Fraction(amount, 10**6)
                assert 1 - Fraction(1, 10**12) < share <= 1


@pytest.mark.parametrize("kind", ["epsilon", "rho"])
def test_scales_are_the_least_floats(kind: Kind) -> None:
    for most in (1, 3, 7, 1_000_003):
        for amount in (Fraction(1, 10**6), Fraction(1, 3), Fraction(7, 10), Fraction(1000)):
            part = QueryPart("", "sum", 0, most, 9, None, 0, 1.0)
            scale = scale_of(kind, part, amount)

            def cost(of: float, most: int = most) -> Fraction:
                if kind == "epsilon":
                    return most * 9 / Fraction(of)
                return most**2 * 9 / (2 * Fraction(of) ** 2)

            assert cost(scale) <= amount < cost(math.nextafter(math.nextafter(scale, 0), 0))


def test_known_scales() -> None:
    def scales(kind: Kind, *aggregates: Aggregate) -> list[float]:
        question = Question(kind=kind, amount=500_000, aggregates=aggregates)
        measures = calibrated(SPACE, question, SPACE.everything)
        return [noise.scale for of in measures for noise in of.each[0].noises]

    assert scales("epsilon", COUNT) == [2.0]
    assert scales("rho", COUNT) == [1.0]  # mu^2 / 2 = 1/2
    assert scales("epsilon", sum_of("age")) == [8.0]  # |4|, not 8 - 1
    assert scales("epsilon", sum_of("price")) == [22.0]  # 1.1 in tenths
    assert scales("epsilon", COUNT, COUNT_AGAIN) == [4.0, 4.0]
    assert scales("epsilon", Aggregate("count", share=3.0), COUNT_AGAIN) == pytest.approx(
        [8 / 3, 8]
    )
    assert scales("epsilon", average("age")) == pytest.approx([4 / (1 / 3), 1 / (1 / 6)])
    assert scales("epsilon", median("age")) == [8.0]  # 4 levels of 8 leaves
    assert scales("rho", median("age")) == [2.0]


COUNT_AGAIN = Aggregate("count", label="again")


def test_a_narrower_range_has_less_noise() -> None:
    cells = Cells((Axis("age", (0, 3, 5, 8)),))
    question = Question(kind="epsilon", amount=10**6, aggregates=(sum_of("age"),), cells=cells)
    [measures] = calibrated(SPACE, question, cells.inside(SPACE, SPACE.everything))
    scales = [measures.each[of].noises[0].scale for of in measures.range_numbers]
    assert scales == [3.0, 1.0, 4.0]  # -3 .. -1, 0 and 1, 2 .. 4
    [box_measures] = calibrated(SPACE, question, SPACE.box(age=(-1, 1)))
    assert [box_measures.each[of].noises[0].scale for of in box_measures.range_numbers] == [
        1.0,
        1.0,
        1.0,
    ]


def test_noise_beyond_exact_draws_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    question = Question(kind="epsilon", amount=1)
    calibrated(SPACE, question, SPACE.everything)
    monkeypatch.setattr(limits, "MAX_REAL_SIGMA", 1e5)
    monkeypatch.setattr(calibration, "_measure", calibration._measure.__wrapped__)
    with pytest.raises(UsageError, match="range of exact draws"):
        calibrated(SPACE, question, SPACE.everything)
    with pytest.raises(UsageError, match="budget"):
        calibrated(SPACE, Question(kind="rho", amount=0), SPACE.everything)


def test_rho_is_that_of_gaussian_dp() -> None:
    """Error rates of telling one record apart are those of N(0, 1) and N(mu, 1), mu^2 / 2 = rho."""
    question = Question(kind="rho", amount=720_000)
    [measures] = calibrated(SPACE, question, SPACE.everything)
    mu = 1 / measures.each[0].noises[0].scale
    assert mu == pytest.approx(1.2) and mu <= 1.2
    assert stats.norm.cdf(-mu / 2) > 0.27


CELLS = Cells((Axis("age", (0, 3, 5, 8)),))


def question_of(amount: int = 10**6, kind: str = "epsilon") -> Question:
    aggregates = COUNT, sum_of("age"), average("price"), median("price")
    return Question(kind=kind, amount=amount, aggregates=aggregates, cells=CELLS)  # type: ignore[arg-type]


def test_errors_by_cell() -> None:
    count, total, mean, middle = expected(SPACE, question_of(4_000_000), SPACE.everything)
    assert [of.what for of in (count, total, mean, middle)] == [
        "value", "value", "value times records", "rank",
    ]  # fmt: skip
    # Geometric noise of scale 1: sd sqrt(2 q) / (1 - q), q = 1 / e; P[|Z| > 3] = .027.
    sd = math.sqrt(2 * math.exp(-1)) / (1 - math.exp(-1))
    assert np.allclose(count.sd, sd) and (count.within == 3).all()
    assert total.sd.argmax() == 2 and total.most == total.within[2] > total.within[1]
    prices = Question(kind="epsilon", amount=10**6, aggregates=(sum_of("price"),))
    [price] = expected(SPACE, prices, SPACE.everything)
    # Scale 11 tenths: P[|Z| > 3.2] = .053, P[|Z| > 3.3] = .048.
    assert price.most == pytest.approx(3.3) and price.sd[0] == pytest.approx(1.1 * 2**0.5, rel=0.01)
    [of] = calibrated(SPACE, Question(kind="epsilon", amount=10**6, aggregates=(average("price"),)),
                      SPACE.everything)  # fmt: skip
    # h is 2 steps of 1/2; the sum has two thirds of epsilon 1, the count a third.
    total_sd, count_sd = (noise.sd for noise in of.each[0].noises)
    assert np.allclose(mean.sd, math.hypot(total_sd, 2 * count_sd) / 2)
    assert (middle.sd > 1).all()


@pytest.mark.parametrize(
    ("kind", "width"), [("epsilon", math.log(20) / math.sqrt(2)), ("rho", stats.norm.ppf(0.975))]
)
def test_errors_of_averages_and_medians_hold_for_their_law(kind: str, width: float) -> None:
    """Half-widths in sds: of a Laplace law P[|X| > t] = exp(-t sqrt(2)), of a normal one 1.96."""
    _, _, mean, middle = expected(SPACE, question_of(4_000_000, kind), SPACE.everything)
    for errors in (mean, middle):
        assert errors.within / errors.sd == pytest.approx(width)
