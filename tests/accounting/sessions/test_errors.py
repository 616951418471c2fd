"""Errors before anything is asked: those that answers then have."""

import math

import numpy as np
import pytest

from dpstream.accounting.sessions.aggregates import (
    COUNT,
    Question,
    average,
    median,
    sum_of,
)
from dpstream.accounting.sessions.calibration import calibrated
from dpstream.accounting.sessions.cells import Axis, Cells
from dpstream.accounting.sessions.errors import expected
from tests.sessions import space

SPACE = space()
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
