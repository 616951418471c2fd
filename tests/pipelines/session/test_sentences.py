"""Boxes in words are predicates of the same boxes."""

from fractions import Fraction

import numpy as np
import pytest

from dpstream.accounting.sessions.aggregates import COUNT, Question, median, sum_of
from dpstream.accounting.sessions.cells import Cells, along
from dpstream.pipelines.session import sentences
from dpstream.pipelines.session.predicates import boxes_of
from tests.pipelines.session.people import DAY, PEOPLE, START, box, random_boxes

SPACE = PEOPLE.space


@pytest.mark.parametrize("seed", range(60))
def test_a_box_in_words_is_the_box(seed: int) -> None:
    one = random_boxes(seed)
    text = sentences.box(SPACE, one[0])
    assert boxes_of("" if text == sentences.EVERYTHING else text, SPACE).tolist() == one.tolist()


def test_some_boxes_as_people_read_them() -> None:
    assert sentences.box(SPACE, SPACE.everything[0]) == "everything"
    assert sentences.box(SPACE, box(age=(10, 20), weight=(None, 80.5))[0]) == (
        "age >= 10 AND age < 20 AND weight < 80.5"
    )
    assert sentences.box(SPACE, box(arrived=(START + DAY, None))[0]) == (
        "arrived >= '2013-01-02T00:00:00Z'"
    )
    missing = SPACE.everything[0].copy()
    missing[0] = 100, 101
    missing[1] = 1, 2
    assert sentences.box(SPACE, missing) == "age IS NULL AND smoker = 'yes'"
    many = np.concatenate([box(age=(n, n + 1)) for n in range(10)])
    assert sentences.boxes(SPACE, many)[-2:] == ["age = 7", "... and 2 more"]


@pytest.mark.parametrize(
    ("number", "text"),
    [(Fraction(1, 10), "0.1"), (Fraction(-5, 4), "-1.25"), (Fraction(7), "7"),
     (Fraction(3, 1000), "0.003"), (Fraction(12345678, 10**6), "12.345678")],
)  # fmt: skip
def test_decimals_are_exact(number: Fraction, text: str) -> None:
    assert sentences.decimal(number) == text


def test_amounts_and_questions() -> None:
    assert (sentences.amount(1), sentences.amount(2_500_000)) == ("0.000001", "2.5")
    question = Question(kind="epsilon", amount=1, aggregates=(COUNT, sum_of("age"), median("age")),
                        cells=Cells((along(SPACE, "smoker"),)))  # fmt: skip
    assert sentences.question(question) == "count, sum(age), quantiles(age, 0.5) by smoker (2)"
