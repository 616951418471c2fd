"""What a command line says: figures, ranges, and answers as tables."""

import pyarrow as pa
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.sessions.aggregates import COUNT, Question, average, median, quantiles
from dpstream.pipelines.session.figures import (
    answer_text,
    figure_of,
    ranges_of,
    records,
    union_text,
    value_of,
)
from dpstream.pipelines.session.receipt import Answer, Header
from dpstream.pipelines.session.union import Union
from tests.pipelines.session.people import PEOPLE, START


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
    assert records(answer)[1] == {
        "smoker": None, "count": -1234.5, "count_sd": 1.0, "count_low": -1240.0,
        "count_high": None,
    }  # fmt: skip


def test_unions_in_words() -> None:
    union = Union(10.0, 1.0, 8.0, 12.0, 3, ("a",), "2024", "2025")
    assert union_text(union) == "10 ±2, of 3 parts answered 2024 to 2025"
