"""Noise of cells, its cost and names; the released table, whose intervals hold."""

import datetime
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.arrays import Int64
from dpstream.accounting.mechanisms.laws import DiscreteLaplaceLaw, RoundedGaussianLaw
from dpstream.accounting.regions.space import (
    Budget,
    BudgetKind,
    Category,
    Integer,
    Real,
    Space,
    Timestamp,
)
from dpstream.accounting.sessions import calibration
from dpstream.accounting.sessions.aggregates import (
    COUNT,
    Aggregate,
    Axis,
    Cells,
    Needs,
    Question,
    Ranges,
)
from dpstream.accounting.sessions.calibration import calibrated
from dpstream.dp_transforms.batches import ArrowBatchCoder
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.session import (
    Totals,
    answered,
    encoded,
    errors,
    inputs_of,
    measured,
    nothing,
    released,
    tallied,
    totals,
)
from dpstream.dp_transforms.session import release as module
from dpstream.dp_transforms.session.totals import empty, gathered, joined, packed, routed, shards_of
from tests.dp_transforms.reference import LEAST_P, masses, shape_p
from tests.fixed import INPUTS
from tests.sessions import (
    QUESTIONS,
    RUN,
    SHAPES,
    Draws,
    Records,
    average,
    boxes_of,
    cost,
    median,
    points,
    quantiles,
    random_records,
    space,
    sum_of,
    without_noise,
)  # fmt: skip

SPACE = space()
LAWS = {"geometric": DiscreteLaplaceLaw, "gaussian": RoundedGaussianLaw}


@pytest.fixture
def no_noise(monkeypatch: pytest.MonkeyPatch) -> Draws:
    return without_noise(monkeypatch)


def worst(
    kind: BudgetKind, aggregates: tuple[Aggregate, ...], ring: KeyRing, seed: int
) -> Fraction:
    """The most that one record more costs at any point, of the amount; 0 where it is not read."""
    most = Fraction()
    for cells, ranges in SHAPES:
        boxes = boxes_of(SPACE, cells, ranges)
        question = Question(kind=kind, amount=123_457, aggregates=aggregates, cells=cells)
        records = random_records(SPACE, 9, seed)
        without = measured(
            SPACE, question, boxes, records.totals(SPACE, boxes, question), ring, RUN, INPUTS
        )
        for point in points(SPACE):
            if point[3] or (point[2] and (point[0] + point[1]) % 2):
                continue  # initial budgets change no answer; half of one city's points suffice
            more = records.plus(point).totals(SPACE, boxes, question)
            loss = cost(
                SPACE,
                question,
                boxes,
                without,
                measured(SPACE, question, boxes, more, ring, RUN, INPUTS),
            )
            place = np.array(point)
            read = ((boxes[:, :, 0] <= place) & (place < boxes[:, :, 1])).all(axis=1).any()
            assert read or loss == 0
            most = max(most, loss)
    return most


@pytest.mark.parametrize("kind", ["epsilon", "rho"])
@pytest.mark.parametrize("aggregates", QUESTIONS, ids=lambda a: "-".join(of.name for of in a))
def test_one_record_costs_the_amount_and_no_more(
    kind: BudgetKind, aggregates: tuple[Aggregate, ...], ring: KeyRing, no_noise: Draws
) -> None:
    assert Fraction(95, 100) < worst(kind, aggregates, ring, 1) <= 1


def narrow(self: Cells, space: Any, boxes: Int64, name: str) -> Ranges:
    ranges = _ranges(self, space, boxes, name)
    bounds = ranges.bounds.copy()
    bounds[:, 1] = np.maximum(bounds[:, 1] - 1, bounds[:, 0] + 1)
    return ranges._replace(bounds=bounds)


def shifted(cells: Cells, coordinates: Any, size: int) -> Int64:
    moved = {axis.name: coordinates[axis.name] - 1 for axis in cells.axes}
    return _numbers(cells, moved, size)


def undivided(kind: BudgetKind, part: Any, amount: Fraction) -> float:
    return _scale_of(kind, part, amount * 2)


def one_node(kind: BudgetKind, part: Any, amount: Fraction) -> float:
    import msgspec

    return _scale_of(kind, msgspec.structs.replace(part, nodes=1), amount)


def everywhere(space: Any, name: str, coordinates: Int64) -> Any:
    return coordinates, np.ones(len(coordinates), np.bool_)


_ranges, _numbers, _scale_of = Cells.ranges, totals.cell_numbers, calibration.scale_of
SABOTAGE: list[tuple[Any, str, Any, int]] = [
    (Cells, "ranges", narrow, 1),  # a range that is not all that is read
    (totals, "cell_numbers", shifted, 1),  # records in a cell beside theirs
    (calibration, "scale_of", undivided, 0),  # noise for twice the amount
    (calibration, "scale_of", one_node, 5),  # one node of a tree instead of all levels
    (totals, "_values", everywhere, 1),  # missing values are summed
]


@pytest.mark.parametrize(("where", "name", "other", "amount"), SABOTAGE,
                         ids=lambda a: getattr(a, "__name__", ""))  # fmt: skip
def test_sabotage_is_seen(
    where: Any, name: str, other: Any, amount: int, ring: KeyRing, no_noise: Draws,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(where, name, other)
    monkeypatch.setattr(calibration, "_measure", calibration._measure.__wrapped__)  # of no cache
    with pytest.raises((AssertionError, ValueError, IndexError)):
        for kind in ("epsilon", "rho"):
            assert worst(kind, QUESTIONS[amount], ring, 1) <= 1


def test_noise_is_drawn_once_for_each_cell_and_node(ring: KeyRing, no_noise: Draws) -> None:
    """Of the scale that was calibrated, under a name that no other draw of the answer has."""
    for cells, ranges in SHAPES:
        boxes = boxes_of(SPACE, cells, ranges)
        question = Question(kind="epsilon", amount=10**6, aggregates=QUESTIONS[-1], cells=cells)
        zeros = nothing(cells.count, question.needs(SPACE, boxes))
        no_noise.clear()
        noisy = measured(SPACE, question, boxes, zeros, ring, RUN, INPUTS)
        names = [(name, *item) for name, _, items in no_noise for item in items.tolist()]
        assert len(set(names)) == len(names) == sum(part.size for of in noisy for part in of)
        scales = {scale for _, scale, _ in no_noise}
        each = calibrated(SPACE, question, boxes)
        assert scales == {n.scale for of in each for m in of.each for n in m.noises}


def drawn(ring: KeyRing, cells: Cells, run: str = RUN, **other: Any) -> tuple[Question, Int64]:
    usual: dict[str, Any] = {"kind": "epsilon", "amount": 400_000, "cells": cells}
    question = Question(**(usual | other))
    boxes = boxes_of(SPACE, cells, ())
    totals_ = nothing(cells.count, question.needs(SPACE, boxes))
    return question, measured(SPACE, question, boxes, totals_, ring, run, INPUTS)[0][0]


def test_the_law_of_the_noise(ring: KeyRing) -> None:
    wide = Space((Integer(name="x", low=0, high=20_000), Integer(name="y", low=-1, high=7),
                  Budget(name="e", most=1), Budget(name="r", kind="rho", most=1)))  # fmt: skip
    cells = Cells((Axis("x", tuple(range(20_001))),))
    for kind in ("epsilon", "rho"):
        aggregates = COUNT, sum_of("y")
        question = Question(kind=kind, amount=900_000, aggregates=aggregates, cells=cells)
        none = nothing(cells.count, question.needs(wide, wide.everything))
        noisy = measured(wide, question, wide.everything, none, ring, RUN, INPUTS)
        for measures, [noise] in zip(
            calibrated(wide, question, wide.everything), noisy, strict=True
        ):
            [part] = measures.each[0].noises
            law = LAWS[part.law]
            assert shape_p(noise, masses(law, part.scale)) > LEAST_P
            assert shape_p(noise, masses(law, part.scale * 1.1)) < LEAST_P  # others are seen


def test_names_are_the_run_the_question_and_the_boxes(ring: KeyRing) -> None:
    wide = Cells((Axis("age", tuple(range(9))), Axis("price", (0, 1, 2, 3))))
    _, first = drawn(ring, wide)
    assert (drawn(ring, wide)[1] == first).all()
    others = [drawn(ring, wide, "6b" * 16)[1], drawn(ring, wide, amount=400_001)[1]]
    others.append(drawn(ring, Cells((wide.axes[0], Axis("price", (1, 2, 3, 4)))))[1])
    question = Question(kind="epsilon", amount=400_000, cells=wide)
    half = boxes_of(SPACE, wide, (("city", 0, 1),))  # the same cells, of other boxes
    none = nothing(wide.count, question.needs(SPACE, half))
    others.append(measured(SPACE, question, half, none, ring, RUN, INPUTS)[0][0])
    assert all((other != first).mean() > 0.5 for other in others)


def test_cells_alone_have_the_noise_that_they_have_among_others(ring: KeyRing) -> None:
    for cells, ranges in SHAPES:
        boxes = boxes_of(SPACE, cells, ranges)
        question = Question(kind="rho", amount=10**5, aggregates=QUESTIONS[-1], cells=cells)
        totals_ = random_records(SPACE, 60).totals(SPACE, boxes, question)
        all_cells = measured(SPACE, question, boxes, totals_, ring, RUN, INPUTS)
        for at in range(cells.count):
            one = Totals(
                totals_.records[at : at + 1],
                {k: type(v)(*(p[at : at + 1] for p in v)) for k, v in totals_.columns.items()},
                {k: v[at : at + 1] for k, v in totals_.leaves.items()},
            )
            alone = measured(SPACE, question, boxes, one, ring, RUN, INPUTS, at)
            for mine, all_ in zip(alone, all_cells, strict=True):
                for part, of in zip(mine, all_, strict=True):
                    assert (part[0] == of[at]).all()


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
def test_intervals_hold(kind: BudgetKind, amount: int, ring: KeyRing) -> None:
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


# Exact sums of cells: against a slow count of single records, in pieces, and on their way.


def question_of(shape: int, amount: int = 10**6) -> tuple[Question, Int64]:
    cells, ranges = SHAPES[shape]
    return (
        Question(kind="epsilon", amount=amount, aggregates=QUESTIONS[-1], cells=cells),
        boxes_of(SPACE, cells, ranges),
    )


def slow(records: Records, question: Question, boxes: Int64) -> Totals:
    """Written from the definitions, a record at a time."""
    needs = question.needs(SPACE, boxes)
    out = nothing(question.cells.count, needs)
    for at, usable in zip(records.at.tolist(), records.usable.tolist(), strict=True):
        read = any(all(low <= x < high for x, (low, high) in zip(at, box, strict=True))
                   for box in boxes.tolist())  # fmt: skip
        number = 0
        for axis in question.cells.axes:
            x = at[SPACE.place(axis.name)]
            inside = [i for i in range(axis.count) if axis.edges[i] <= x < axis.edges[i + 1]]
            read = read and bool(inside)
            number = number * axis.count + (inside or [0])[0]
        if not (read and usable):
            continue
        out.records[number] += 1
        for name, of in out.columns.items():
            x = at[SPACE.place(name)]
            if x < SPACE.dimensions[SPACE.place(name)].values:
                of.records[number] += 1
                of.total[number] += x
        for leaves in needs.leaves:
            x = at[SPACE.place(leaves.column)]
            if x < SPACE.dimensions[SPACE.place(leaves.column)].values:
                leaf = (x - leaves.low) * leaves.size // leaves.width
                out.leaves[leaves.column][number, leaf] += 1
    return out


def same(one: Totals, other: Totals) -> bool:
    assert one.columns.keys() == other.columns.keys() and one.leaves.keys() == other.leaves.keys()
    return (
        np.array_equal(one.records, other.records)
        and all(np.array_equal(one.columns[k], other.columns[k]) for k in one.columns)
        and all(np.array_equal(one.leaves[k], other.leaves[k]) for k in one.leaves)
    )


@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_totals_are_those_of_single_records(shape: int) -> None:
    question, boxes = question_of(shape)
    records = random_records(SPACE, 500, shape)
    tally = records.totals(SPACE, boxes, question)
    assert same(tally, slow(records, question, boxes)) and tally.records.sum() > 50


def test_several_boxes_and_none() -> None:
    question, _ = question_of(3)
    boxes = np.concatenate([
        SPACE.box(age=(-2, 0), price=(None, 0.6)), SPACE.box(age=(0, 2), city=("B", None)),
    ])  # fmt: skip
    records = random_records(SPACE, 500)
    tally = records.totals(SPACE, boxes, question)
    assert same(tally, slow(records, question, boxes)) and tally.records.sum() > 50
    assert not records.totals(SPACE, boxes[:0], question).records.any()


def test_pieces_add_up() -> None:
    question, boxes = question_of(3)
    records = random_records(SPACE, 500)
    expected = records.totals(SPACE, boxes, question)
    parts = [Records(records.at[k::3], records.usable[k::3]) for k in range(3)]
    first, second, third = (part.totals(SPACE, boxes, question) for part in parts)
    assert same(first.plus(second).plus(third), expected) and not same(first.plus(second), expected)
    empty = Records(records.at[:0], records.usable[:0]).totals(SPACE, boxes, question)
    assert same(empty, nothing(question.cells.count, question.needs(SPACE, boxes)))


def test_only_columns_that_matter_are_needed() -> None:
    question = Question(kind="epsilon", amount=1, cells=SHAPES[3][0])
    boxes = SPACE.box(price=(None, 0.6), epsilon=(0.000001, None))
    names = totals.columns_of(SPACE, boxes, question.cells, question.needs(SPACE, boxes))
    assert names == ("age", "price", "city", "epsilon")  # of rho nothing is asked
    assert totals.columns_of(SPACE, SPACE.everything, Cells(), Needs((), ())) == ()
    records = random_records(SPACE, 300)
    values = {d.name: records.at[:, k] for k, d in enumerate(SPACE.dimensions) if d.name in names}
    needs = question.needs(SPACE, boxes)
    tally = totals.tallied(SPACE, boxes, question.cells, needs, values, records.usable)
    assert same(tally, slow(records, question, boxes))


def test_sums_beyond_floats_are_exact() -> None:
    """Of as many large coordinates that their sum is odd and no float holds it."""
    most = 1 << 40
    wide = Space((Integer(name="x", low=0, high=most), Budget(name="b", most=1)))
    question = Question(kind="epsilon", amount=1, aggregates=(sum_of("x"),))
    x = np.append(np.full(1 << 14, most - 1), 1)
    needs, usable = question.needs(wide, wide.everything), np.ones(len(x), np.bool_)
    values = {"x": x, "b": np.zeros(len(x), np.int64)}
    tally = totals.tallied(wide, wide.everything, Cells(), needs, values, usable)
    assert tally.columns["x"].total.tolist() == [(most - 1 << 14) + 1]


CODER = ArrowBatchCoder()


def test_shards_are_runs_of_cells() -> None:
    for cells, shards in ((1, 1), (10, 3), (7, 7), (1 << 20, 9)):
        begins = shards_of(cells, shards)
        assert begins[0] == 0 and begins[-1] == cells and (np.diff(begins) >= cells // shards).all()


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_sums_arrive(shards: int) -> None:
    question, boxes = question_of(3)
    records, needs = random_records(SPACE, 400), question.needs(SPACE, boxes)
    expected = records.totals(SPACE, boxes, question)
    batches = {shard: [empty(needs)] for shard in range(shards)}
    for k in range(3):
        part = Records(records.at[k::3], records.usable[k::3]).totals(SPACE, boxes, question)
        for shard, batch in routed(part, shards):
            batches[shard].append(CODER.decode(CODER.encode(batch)))
    begins = shards_of(question.cells.count, shards)
    totals = nothing(0, needs)
    parts = [gathered(batches[s], begins[s], begins[s + 1], needs) for s in range(shards)]
    assert sum(len(part.records) for part in parts) == question.cells.count
    totals = totals._replace(
        records=np.concatenate([part.records for part in parts]),
        columns={
            name: type(of)(*(np.concatenate([p.columns[name][i] for p in parts]) for i in (0, 1)))
            for name, of in expected.columns.items()
        },
        leaves={name: np.concatenate([p.leaves[name] for p in parts]) for name in expected.leaves},
    )
    assert same(totals, expected)


def test_measured_sums_arrive(ring: KeyRing) -> None:
    for cells, ranges in SHAPES[2:]:
        boxes = boxes_of(SPACE, cells, ranges)
        question = Question(kind="rho", amount=10**6, aggregates=QUESTIONS[-1], cells=cells)
        noisy = measured(
            SPACE,
            question,
            boxes,
            random_records(SPACE, 90).totals(SPACE, boxes, question),
            ring,
            RUN,
            INPUTS,
        )
        begins = shards_of(cells.count, 3)
        shards = []
        for shard in (1, 2, 0):
            at = slice(begins[shard], begins[shard + 1])
            batch = packed(tuple(tuple(part[at] for part in of) for of in noisy))
            shards.append((shard, CODER.decode(CODER.encode(batch))))
        again = joined(shards, [len(of) for of in noisy])
        for mine, theirs in zip(noisy, again, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))
