"""The released table: labels, intervals that hold, the same bytes from the same noise."""

import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.regions.space import Budget, Category, Integer, Real, Space, Timestamp
from dpstream.accounting.sessions.aggregates import (
    COUNT,
    Axis,
    Cells,
    Kind,
    Question,
    average,
    median,
    quantiles,
    sum_of,
)
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.session import (
    answered,
    encoded,
    errors,
    inputs_of,
    measured,
    released,
    tallied,
)
from dpstream.dp_transforms.session import release as module
from tests.sessions import QUESTIONS, RUN, SHAPES, boxes_of, random_records, space, without_noise

SPACE = space()


def test_without_noise_figures_are_exact(ring: KeyRing, monkeypatch: pytest.MonkeyPatch) -> None:
    without_noise(monkeypatch)
    aggregates = COUNT, sum_of("price"), average("age"), median("age")
    cells = Cells((Axis("city", (0, 1, 2)), Axis("age", (0, 3, 5, 8, 9))))
    question = Question(kind="epsilon", amount=10**9, aggregates=aggregates, cells=cells)
    boxes, records = cells.inside(SPACE, SPACE.everything), random_records(SPACE, 900)
    totals = records.totals(SPACE, boxes, question)
    rows = answered(SPACE, question, boxes, totals, ring, RUN).to_pylist()
    assert len(rows) == 8
    at = records.at[records.usable]
    for row, (city, ages) in zip(
        rows, [(c, a) for c in (0, 1) for a in ((0, 3), (3, 5), (5, 8), (8, 9))], strict=True
    ):
        mine = at[(at[:, 2] == city) & (ages[0] <= at[:, 0]) & (at[:, 0] < ages[1])]
        age, price = mine[:, 0] - 3, (mine[mine[:, 1] < 4, 1] * 5 - 4) / 10
        missing = ages == (8, 9)
        assert row["city"] == "AB"[city]
        assert (row["age"], row["age_end"]) == (
            (None, None) if missing else (ages[0] - 3, ages[1] - 3)
        )
        assert row["count"] == len(mine) and row["sum_price"] == pytest.approx(price.sum())
        if missing:  # of nobody's age there is no average
            assert row["average_age"] is None and row["median_age"] is None
        else:
            assert row["average_age"] == pytest.approx(age.mean())
            assert row["median_age"] == np.quantile(age, 0.5, method="inverted_cdf")
        for name in ("count", "sum_price", "average_age", "median_age"):
            if row[name] is not None:
                assert row[f"{name}_low"] <= row[name] <= row[f"{name}_high"]
                assert row[f"{name}_sd"] >= 0


def test_labels_in_values() -> None:
    wide = Space((
        Timestamp(name="t", low=0, high=2_500_000, step=1_000_000, missing="point"),
        Real(name="x", low=0.1, high=0.4, step=0.1), Integer(name="n", low=5, high=9),
        Category(name="c", codes=("A", "B"), missing="point"), Budget(name="b", most=2, step=10**6),
    ))  # fmt: skip

    def of(name: str, *edges: int) -> dict[str, list[Any]]:
        columns = module.labels(wide, Cells((Axis(name, edges),)))
        return {key: column.to_pylist() for key, column in columns.items()}

    start = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    later = [start + datetime.timedelta(seconds=n) for n in (0, 1, 2.5)]
    assert of("t", 0, 1, 3, 4) == {"t": [*later[:2], None], "t_end": [*later[1:], None]}
    assert of("x", 0, 2, 3) == {"x": [0.1, 0.3], "x_end": [0.3, 0.4]}
    assert of("n", 1, 2, 3) == {"n": [6, 7]} and of("n", 1, 3) == {"n": [6], "n_end": [8]}
    assert of("c", 0, 1, 2, 3) == {"c": ["A", "B", None]}
    assert of("b", 0, 1, 3) == {"b": [0.0, 1.0], "b_end": [1.0, 3.0]}
    both = module.labels(wide, Cells((Axis("n", (0, 1, 2)), Axis("c", (0, 1, 2, 3)))))
    pairs = list(zip(*(column.to_pylist() for column in both.values()), strict=True))
    assert pairs == [(5, "A"), (5, "B"), (5, None), (6, "A"), (6, "B"), (6, None)]
    assert module.labels(wide, Cells()) == {}


@pytest.mark.parametrize(("kind", "amount"), [("epsilon", 1_000_000), ("rho", 50_000)])
def test_intervals_hold(kind: Kind, amount: int, ring: KeyRing) -> None:
    """95% and a little more, of 4,000 answers about the same records."""
    wide = Space((Integer(name="run", low=0, high=4_000),
                  Real(name="x", low=-5, high=20, step=0.1, missing="point"),
                  Budget(name="b", most=1), Budget(name="r", kind="rho", most=1)))  # fmt: skip
    random = np.random.default_rng(1)
    values = np.minimum(random.gamma(2.0, 60.0, 300).astype(np.int64), 250)  # some are missing
    aggregates = COUNT, sum_of("x"), average("x"), quantiles("x", (0.25, 0.5))
    cells = Cells((Axis("run", tuple(range(4_001))),))
    question = Question(kind=kind, amount=amount, aggregates=aggregates, cells=cells)
    columns = {"run": np.repeat(np.arange(4_000), 300), "x": np.tile(values, 4_000)}
    columns |= {"b": columns["run"] * 0, "r": columns["run"] * 0}
    totals = tallied(wide, wide.everything, cells, question.needs(wide, wide.everything), columns,
                     np.ones(len(columns["x"]), np.bool_))  # fmt: skip
    table = answered(wide, question, wide.everything, totals, ring, RUN)
    observed = (values[values < 250] - 50) / 10
    assert 200 < len(observed) < 300
    truth = {"count": 300, "sum_x": observed.sum(), "average_x": observed.mean(),
             "quantiles_x_0.25": np.quantile(observed, 0.25, method="inverted_cdf"),
             "quantiles_x_0.5": np.quantile(observed, 0.5, method="inverted_cdf")}  # fmt: skip
    for name, true in truth.items():
        low, high, value = (table[name + end].to_numpy() for end in ("_low", "_high", ""))
        inside = ((low <= true + 1e-9) & (true - 1e-9 <= high)).mean()
        assert 0.94 < inside < (1.0 if "quantiles" in name else 0.97), (name, inside)
        assert (
            abs(value.mean() - true) < (0.5 if "quantiles" in name else 0.05) * (high - low).mean()
        )
        narrow = (low + high) / 2 + np.array([[-0.3], [0.3]]) * (high - low)
        assert ((narrow[0] <= true) & (true <= narrow[1])).mean() < inside - 0.01
    spread = {name: table[name].to_numpy().std() for name in ("count", "sum_x", "average_x")}
    for name, sd in spread.items():
        assert table[f"{name}_sd"].to_numpy().mean() == pytest.approx(sd, rel=0.05)


def test_nothing_asked_of_nobody_is_null_or_noise(ring: KeyRing) -> None:
    for cells, ranges in SHAPES:
        boxes = boxes_of(SPACE, cells, ranges)
        question = Question(kind="rho", amount=10**6, aggregates=QUESTIONS[-1], cells=cells)
        totals = random_records(SPACE, 0).totals(SPACE, boxes, question)
        table = answered(SPACE, question, boxes, totals, ring, RUN)
        assert table.num_rows == cells.count
        assert (np.abs(table["count"].to_numpy()) < 20).all()
        prices = table["average_price"].to_numpy()
        assert (np.isnan(prices) | ((prices >= -0.4) & (prices <= 1.1))).all()


def test_a_range_of_one_value_has_that_average_and_median(ring: KeyRing) -> None:
    aggregates = average("age"), median("age")
    question = Question(kind="epsilon", amount=2_000_000, aggregates=aggregates)
    boxes = SPACE.box(age=(1, 2))
    totals = random_records(SPACE, 2_000).totals(SPACE, boxes, question)
    [row] = answered(SPACE, question, boxes, totals, ring, RUN).to_pylist()
    for name in ("average_age", "median_age"):
        assert row[name] == row[f"{name}_low"] == row[f"{name}_high"] == 1


@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_the_bytes_are_those_of_the_noisy_sums(shape: int, ring: KeyRing) -> None:
    cells, ranges = SHAPES[shape]
    boxes = boxes_of(SPACE, cells, ranges)
    question = Question(kind="epsilon", amount=10**6, aggregates=QUESTIONS[-1], cells=cells)
    totals = random_records(SPACE, 300).totals(SPACE, boxes, question)
    first, again = (answered(SPACE, question, boxes, totals, ring, RUN) for _ in range(2))
    inputs = inputs_of(totals, ring)
    noisy = measured(SPACE, question, boxes, totals, ring, RUN, inputs)
    assert encoded(first) == encoded(again) == encoded(released(SPACE, question, boxes, noisy))
    assert pa.ipc.open_stream(encoded(first)).read_all().equals(first)
    other = answered(SPACE, question, boxes, totals, ring, "00" * 16)
    assert encoded(other) != encoded(first)
    error_table = errors(SPACE, question, boxes)
    assert error_table["count_sd"].to_pylist() == first["count_sd"].to_pylist()
    half = (first["sum_age_high"].to_numpy() - first["sum_age_low"].to_numpy()) / 2
    assert np.allclose(error_table["sum_age_within"].to_numpy(), half)
