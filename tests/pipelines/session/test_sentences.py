"""Boxes in words are predicates of the same boxes."""

from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.sessions.aggregates import (
    COUNT,
    Cells,
    Question,
    along,
    average,
    median,
    quantiles,
    sum_of,
)
from dpstream.pipelines.session import sentences
from dpstream.pipelines.session.receipt import Answer, Header, answer_rows, answer_text
from dpstream.pipelines.session.selection import predicate_of
from dpstream.pipelines.session.sentences import (
    figure_of,
    ranges_of,
    value_of,
)
from dpstream.pipelines.session.union import Union
from tests.pipelines.session.people import DAY, PEOPLE, START, box, random_boxes

SPACE = PEOPLE.space


@pytest.mark.parametrize("seed", range(60))
def test_a_box_in_words_is_the_box(seed: int) -> None:
    one = random_boxes(seed)
    text = sentences.box(SPACE, one[0])
    assert (
        predicate_of("" if text == sentences.EVERYTHING else text, SPACE).boxes().tolist()
        == one.tolist()
    )


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


def test_figures() -> None:
    assert figure_of(" count ") == COUNT and figure_of("average( fare )") == average("fare")
    assert figure_of("median(fare)") == median("fare")
    assert figure_of("quantiles(fare, 0.25, .75)") == quantiles("fare", [0.25, 0.75])


@pytest.mark.parametrize(
    "text", ["", "count()", "count(x)", "sum", "sum()", "sum(a, b)", "max(a)", "quantiles(a)",
             "quantiles(a, b)", "sum(a"],
)  # fmt: skip
def test_what_is_no_figure(text: str) -> None:
    with pytest.raises(UsageError, match="figure"):
        figure_of(text)


@pytest.mark.parametrize("name", ["avg", "mean", "averge"])
def test_the_nearest_figure_is_named(name: str) -> None:
    with pytest.raises(UsageError, match=f"'{name}.fare.'. Fix: did you mean 'average'. write "):
        figure_of(f"{name}(fare)")


def test_ranges_that_are_no_number_are_quoted() -> None:
    with pytest.raises(UsageError, match=r"--by age: has 'a' .* write age, age=4 or"):
        ranges_of(SPACE, ["age=a"])


def test_ranges() -> None:
    space = PEOPLE.space
    assert ranges_of(space, ["smoker", "age=4", "weight=0, 50,100"]) == {
        "smoker": None, "age": 4, "weight": ["0", "50", "100"],
    }  # fmt: skip
    assert value_of(space, "arrived", "2013-01-01T00:00:00Z") == START
    for wrong in (["age=x"], ["age", "age=3"], ["nothing"], ["age=-1"]):
        with pytest.raises(UsageError):
            ranges_of(space, wrong)


def test_answers_as_tables() -> None:
    table = pa.table({
        "smoker": ["no", None], "count": [3.0, -1234.5], "count_sd": [1.0, 1.0],
        "count_low": [1.0, -1240.0], "count_high": [5.0, None],
    })  # fmt: skip
    question = Question(kind="epsilon", amount=1)
    header = Header(run_id="ab", plan_hash="12", table="cd", where="", question=question)
    answer = Answer(header, table, b"", "", True, False)
    assert answer_text(answer).splitlines() == [
        "smoker     count", "------  --------", "no          3 ±2", "NULL    -1,234.5",
    ]  # fmt: skip
    assert answer_rows(answer)[1] == {  # as of SQL
        "values": {"smoker": None, "count": -1234.5},
        "intervals": {"count": {"sd": 1.0, "noise_low": -1240.0, "noise_high": None}},
    }


def test_unions_in_words() -> None:
    union = Union(10.0, 1.0, 8.0, 12.0, 3, ("a",), "2024", "2025")
    assert union.text == "10 ±2, of 3 parts answered 2024 to 2025"


def test_a_column_of_steps_is_told_with_its_figures() -> None:
    aggregates = (COUNT, average("weight"), median("weight"), average("age"))
    question = Question(kind="epsilon", amount=1, aggregates=aggregates)
    [line] = sentences.rounding_of(SPACE, question)
    assert line.startswith("weight ") and "0.5" in line
    assert sentences.rounding_of(SPACE, Question(kind="epsilon", amount=1)) == []
