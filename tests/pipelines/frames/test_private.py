"""The answer's table is everybody's, and its words say what is promised."""

from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import dpstream
from tests.pipelines.frames.visits import visits

TABLE = visits()


def test_libraries_take_it_as_a_table() -> None:
    answer = dpstream.histogram(TABLE, unit="user", key="page", epsilon=2.0)
    names = ["page", "units", "units_sd", "units_noise_low", "units_noise_high"]
    assert answer.table.column_names == names and len(answer) == answer.table.num_rows > 3
    assert pa.table(answer).equals(answer.table)
    frame = answer.to_pandas()
    assert isinstance(frame, pd.DataFrame) and list(frame.columns) == names
    assert pl.DataFrame(answer).rows() == [tuple(row.values()) for row in answer.table.to_pylist()]
    assert answer.table["page"].to_pylist() == sorted(answer.table["page"].to_pylist())


def test_the_words_name_what_of_a_unit_counts() -> None:
    both: dict[str, Any] = {"unit": "user", "key": "page", "epsilon": 2.0}
    text = repr(dpstream.histogram(TABLE, **both, max_keys=3))
    assert "(2, 1e-09)-differential privacy" in text and "'user'" in text
    assert "at most 3 of its keys" in text and "if enough units have it" in text
    text = repr(dpstream.count(TABLE, **both, max_rows=2, public_keys=["p0"]))
    assert "at most 2 of its rows in each" in text and "public ones: all are here" in text
    text = repr(dpstream.sum(TABLE, unit="user", value="seconds", bounds=(0, 99.5), epsilon=0.1,
                            max_rows=5))  # fmt: skip
    assert "at most 5 of its rows, with values within 0 and 99.5" in text and "keys" not in text
    assert "(0.1, 0)" in text
    text = repr(dpstream.histogram(TABLE, **both, delta=0, public_keys=["p0"]))
    assert "(2, 0)-differential privacy" in text


def test_figures_of_a_guarantee_are_rounded_up() -> None:
    answer = dpstream.histogram(TABLE, unit="user", key="page", epsilon=1.23456789)
    assert "(1.23457, 1e-09)" in answer.guarantee and answer.epsilon == 1.23456789


def test_the_first_rows_are_shown_and_the_rest_counted() -> None:
    text = repr(dpstream.count(TABLE, unit="user", key="page", epsilon=1.0,
                                public_keys=[f"p{i}" for i in range(13)]))  # fmt: skip
    assert "... 3 more rows" in text and "count_noise_high" in text
    [line] = [line for line in text.splitlines() if line.split()[:1] == ["p0"]]
    assert len(line.split()) == 5
    empty = dpstream.mean(TABLE.slice(0, 0), unit="user", value="seconds", bounds=(0, 1), epsilon=1)
    assert repr(empty).splitlines()[-1].split() in (["–"] * 4, repr(empty).splitlines()[-1].split())


def test_nothing_is_printed_that_was_not_released() -> None:
    data = pa.table({"user": ["alice"], "page": ["secret"]})
    answer = dpstream.histogram(data, unit="user", key="page", epsilon=1.0)
    assert "alice" not in repr(answer) and "secret" not in repr(answer)


@pytest.mark.parametrize("name", ["table", "header", "guarantee", "receipt", "digest"])
def test_an_answer_says_all_of_itself(name: str) -> None:
    answer = dpstream.count(TABLE, unit="user", epsilon=1.0, mechanism="gaussian")
    assert getattr(answer, name) is not None and answer.charged is None and answer.delta == 1e-9
