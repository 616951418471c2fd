"""From millionths to scales: never less noise than was paid for, and hardly more.

Questions: what may be asked and what it needs, coordinates as numbers, names of noise.

Cells: a partition of what is asked, and the ranges that a column has in them.

The public model of a table: what its digest covers, and what it refuses.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest
from scipy import stats

from dpstream.accounting import limits
from dpstream.accounting.query.parts import QueryPart, cell_at, cells_of
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
    Question,
    along,
    canonical,
    leaves_of,
    line_of,
    tree_column,
)
from dpstream.accounting.sessions.calibration import calibrated, expected, scale_of
from dpstream.accounting.sessions.table import (
    AnyDimension,
    Quotas,
    Rules,
    SessionTable,
    Unlock,
    quota_of,
)
from tests.golden.refusals import Refused
from tests.sessions import (
    QUESTIONS,
    SHAPES,
    average,
    boxes_of,
    median,
    points,
    quantiles,
    space,
    sum_of,
)

SPACE = space()


def spent(kind: BudgetKind, question: Question, cell: int, boxes: object) -> Fraction:
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
def test_a_cell_spends_its_amount_and_no_more(kind: BudgetKind, amount: int) -> None:
    for cells, ranges in SHAPES:
        for aggregates in QUESTIONS:
            boxes = boxes_of(SPACE, cells, ranges)
            question = Question(kind=kind, amount=amount, aggregates=aggregates, cells=cells)
            for cell in range(cells.count):
                share = spent(kind, question, cell, boxes) / Fraction(amount, 10**6)
                assert 1 - Fraction(1, 10**12) < share <= 1


@pytest.mark.parametrize("kind", ["epsilon", "rho"])
def test_scales_are_the_least_floats(kind: BudgetKind) -> None:
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
    def scales(kind: BudgetKind, *aggregates: Aggregate) -> list[float]:
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


def test_noise_beyond_exact_draws_is_refused(
    monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    question = Question(kind="epsilon", amount=1)
    calibrated(SPACE, question, SPACE.everything)
    monkeypatch.setattr(limits, "MAX_REAL_SIGMA", 1e5)
    monkeypatch.setattr(calibration, "_measure", calibration._measure.__wrapped__)
    refused(lambda: calibrated(SPACE, question, SPACE.everything))
    refused(lambda: calibrated(SPACE, Question(kind="rho", amount=0), SPACE.everything))


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


@pytest.mark.parametrize(("dimension", "unit"), [
    (Integer(name="x", low=-3, high=5), Fraction(1)),
    (Real(name="x", low=-0.4, high=1.6, step=0.5), Fraction(1, 10)),
    (Real(name="x", low=0, high=100, step=0.25), Fraction(1, 4)),
    (Real(name="x", low=-74.05, high=-73.75, step=0.001), Fraction(1, 1000)),
    (Real(name="x", low=0, high=3_000, step=30), Fraction(30)),
])  # fmt: skip
def test_coordinates_as_numbers(dimension: Integer | Real, unit: Fraction) -> None:
    line = line_of(dimension)
    assert line.unit == unit
    for at in range(min(dimension.values, 20)):
        value = line.unit * line.at(at)
        assert dimension.edge(value) == at
        assert float(value) == pytest.approx(line.low + at * line.step, abs=1e-12)


def test_columns_without_numbers_or_of_too_many(refused: Refused) -> None:
    columns = (
        Category(name="x", codes=("A",)),
        Integer(name="y", low=0, high=2),
        Budget(name="e", most=1),
    )
    caught = refused(lambda: average("x").check(Space(columns)))
    assert caught.fix.endswith(": y")
    line_of(Integer(name="x", low=0, high=1 << 31))
    for low, high in ((0, 1 << 40), (0, (1 << 31) + 1), (1 << 33, (1 << 33) + 5)):
        refused(line_of, Integer(name="x", low=low, high=high))


def question(*aggregates: Aggregate, **other: Any) -> Question:
    usual: dict[str, Any] = {"kind": "epsilon", "amount": 1, "aggregates": aggregates}
    return Question(**(usual | other))


@pytest.mark.parametrize("bad", [
    (), (COUNT, COUNT), (Aggregate("count", "age"),), (Aggregate("sum"),), (sum_of("x"),),
    (quantiles("age", ()),), (quantiles("age", (1.5,)),), (quantiles("age", (0.5, 0.5)),),
    (Aggregate("sum", "age", (0.5,)),), (Aggregate("count", share=0.0),),
    (Aggregate("count", share=float("nan")),), (COUNT, Aggregate("sum", "age", label="count_sd")),
    # Their figures have other names, but their noise would be one.
    (quantiles("age", (0.25,)), quantiles("age", (0.75,))),
    (Aggregate("quantiles", "age", (0.2, 0.4), label="a"),
     Aggregate("quantiles", "price", (0.6, 0.8), label="a")),
])  # fmt: skip
def test_what_has_no_meaning(bad: tuple[Aggregate, ...], refused: Refused) -> None:
    refused(lambda: question(*bad).check(SPACE))


@pytest.mark.parametrize("other", [
    {"amount": 0}, {"amount": -1}, {"amount": 0.5}, {"kind": "delta"},
    {"cells": Cells((Axis("age", (1,)),))},
    {"cells": Cells((Axis("age", (0, 8)),)), "aggregates": (Aggregate("count", label="age"),)},
])  # fmt: skip
def test_questions_without_meaning(other: dict[str, Any], refused: Refused) -> None:
    refused(lambda: question(**({"aggregates": (COUNT,)} | other)).check(SPACE))
    question(COUNT, median("age"), cells=Cells((Axis("age", (0, 8)),))).check(SPACE)


def test_needs() -> None:
    query = question(COUNT, sum_of("age"), average("age"), median("price"), average("price"))
    needs = query.needs(SPACE, SPACE.everything)
    assert needs.columns == ("age", "price")
    assert [of.column for of in needs.leaves] == ["price"]
    assert question(COUNT).needs(SPACE, SPACE.everything) == ((), ())


def test_leaves_are_the_trees() -> None:
    wide = type(SPACE)((Integer(name="x", low=0, high=10_000, missing="point"),
                        *SPACE.dimensions[3:]))  # fmt: skip
    for low, high in ((0, 10_001), (17, 9_000), (5, 6), (100, 356), (3, 260), (9_998, 10_000)):
        box = wide.everything.copy()
        box[0, 0] = low, high
        of = leaves_of(wide, box, "x")
        column = tree_column("", of.low, of.high, (0.5,))
        at = np.arange(of.low, of.high)
        leaf = (at - of.low) * of.size // of.width
        assert of.size == cells_of(column) and (leaf == cell_at(column, at)).all()
        assert leaf.min() == 0 and leaf.max() < of.size and of.high <= 10_000


def test_what_a_question_says_never_changes() -> None:
    query = question(COUNT, quantiles("age", (0.5, 1)), cells=Cells((Axis("city", (0, 1, 2)),)))
    box = SPACE.box(age=(0, 2))
    assert canonical(query, box) == (
        b'["dpstream session question/1","epsilon",1,[["count","",[],1.0,"count"],'
        b'["quantiles","age",[0.5,1.0],1.0,"quantiles_age"]],[["city",[0,1,2]]],'
        b"[[[3,5],[0,5],[0,2],[0,3],[0,1]]]]"
    )
    others = [
        msgspec.structs.replace(query, **change)
        for change in ({"amount": 2}, {"kind": "rho"}, {"cells": Cells()}, {"aggregates": (COUNT,)})
    ]
    texts = {canonical(other, box) for other in others} | {canonical(query, SPACE.everything)}
    assert len(texts) == 5 and canonical(query, box) not in texts


@pytest.mark.parametrize(("cells", "ranges"), SHAPES)
def test_what_is_inside_are_the_points_that_have_a_cell(
    cells: Cells, ranges: tuple[tuple[str, int, int], ...]
) -> None:
    boxes = boxes_of(SPACE, Cells(), ranges)
    inside = cells.inside(SPACE, boxes)
    for point in points(SPACE):
        has = all(
            any(
                a <= point[SPACE.place(x.name)] < b
                for a, b in zip(x.edges, x.edges[1:], strict=False)
            )
            for x in cells.axes
        )
        place = np.array(point)
        hit = [((b[:, :, 0] <= place) & (place < b[:, :, 1])).all(axis=1).sum()
               for b in (boxes, inside)]  # fmt: skip
        assert hit[1] == (hit[0] if has else 0)
    assert cells.count == np.prod(cells.shape, dtype=int)


@pytest.mark.parametrize(("cells", "ranges"), SHAPES)
@pytest.mark.parametrize("name", ["age", "price", "city"])
def test_ranges_are_those_of_the_points_of_a_cell(
    cells: Cells, ranges: tuple[tuple[str, int, int], ...], name: str
) -> None:
    boxes, place = boxes_of(SPACE, cells, ranges), SPACE.place(name)
    spans = cells.ranges(SPACE, boxes, name)
    values = SPACE.dimensions[place].values
    met: dict[int, set[int]] = {}
    for point in points(SPACE):
        at = np.array(point)
        if ((boxes[:, :, 0] <= at) & (at < boxes[:, :, 1])).all(axis=1).any():
            number = 0
            for axis in cells.axes:
                x = point[SPACE.place(axis.name)]
                number = number * axis.count + int(np.searchsorted(axis.edges, x, "right")) - 1
            met.setdefault(number, set()).add(point[place])
    for number, of in met.items():
        low, high = spans.bounds[spans.range_numbers[number]].tolist()
        inside = {x for x in of if x < values}
        assert 0 <= low < high <= values
        assert not inside or (min(inside), max(inside) + 1) == (low, high)


def test_axes_from_values(refused: Refused) -> None:
    assert along(SPACE, "age", [-3, 0, 5]) == Axis("age", (0, 3, 8))
    assert along(SPACE, "price", [0.1, 1.6]) == Axis("price", (1, 4))
    assert along(SPACE, "city") == Axis("city", (0, 1, 2))
    assert along(SPACE, "age") == Axis("age", tuple(range(10)))  # the last: missing values
    for bad in (lambda: along(SPACE, "price", [0.2, 1.6]), lambda: along(SPACE, "city", ["A"]),
                lambda: along(SPACE, "name")):  # fmt: skip
        refused(bad)


@pytest.mark.parametrize("axes", [
    (Axis("age", (3,)),), (Axis("age", ()),), (Axis("age", (2, 2)),), (Axis("age", (3, 1)),),
    (Axis("age", (-1, 2)),), (Axis("age", (0, 10)),), (Axis("age", (0, 9)),),
    (Axis("city", (0, 2)),), (Axis("age", (0, 8)), Axis("age", (0, 8))), (Axis("x", (0, 1)),),
])  # fmt: skip
def test_what_is_no_partition(axes: tuple[Axis, ...], refused: Refused) -> None:
    refused(lambda: Cells(axes).check(SPACE))
    Cells((Axis("age", (0, 3, 8, 9)), Axis("city", (0, 1)))).check(SPACE)


def test_too_many_cells(monkeypatch: pytest.MonkeyPatch, refused: Refused) -> None:
    cells = Cells((Axis("age", (0, 1, 2)), Axis("city", (0, 1, 2))))
    monkeypatch.setattr(limits, "MAX_CELLS", 4)
    cells.check(SPACE)
    monkeypatch.setattr(limits, "MAX_CELLS", 3)
    refused(lambda: cells.check(SPACE))
    refused(lambda: along(SPACE, "age"))


AGE = Integer(name="age", low=0, high=100, grid=5)
FARE = Real(name="fare", low=0, high=99.9, step=0.1, missing="point")
CITY = Category(name="city", codes=("A", "B"))
WHEN = Timestamp(name="when", low=0, high=86_400_000_000)
INITIAL = Budget(name="initial", most=1.5)
RHO = Budget(name="rho", kind="rho", most=0.5, step=10)


def rides(*dimensions: AnyDimension, name: str = "rides", cap: int = 10_000) -> SessionTable:
    return SessionTable(
        name=name, dimensions=dimensions or (AGE, FARE, CITY, WHEN, INITIAL, RHO), cap=cap
    )


def test_the_digest_is_that_of_the_first_version() -> None:
    """Ledgers name it: it must never move."""
    assert rides().digest == "bb80f9f9687fe46b879fb0b1ee65b3ae"


def test_equal_numbers_are_one_table() -> None:
    alike = msgspec.structs.replace(FARE, low=0.0, high=99.90, step=0.10)
    budget = msgspec.structs.replace(INITIAL, most="1.50")
    assert rides(AGE, alike, CITY, WHEN, budget, RHO).digest == rides().digest


CHANGES: list[tuple[int, dict[str, Any]]] = [
    (0, {"name": "years"}), (0, {"low": 1}), (0, {"high": 99}), (0, {"grid": 6}),
    (0, {"missing": "point"}), (1, {"low": 0.1}), (1, {"high": 100.0}), (1, {"step": 0.3}),
    (2, {"codes": ("B", "A")}), (3, {"low": 1}), (3, {"high": 86_400_000_001}), (3, {"step": 5}),
    (4, {"most": 1.6}), (4, {"step": 2}), (5, {"most": 0.6}),
]  # fmt: skip


@pytest.mark.parametrize(("place", "change"), CHANGES)
def test_whatever_is_fixed_of_a_dimension_moves_the_digest(
    place: int, change: dict[str, Any]
) -> None:
    changed = list(rides().dimensions)
    changed[place] = msgspec.structs.replace(changed[place], **change)
    assert rides(*changed).digest != rides().digest


def test_whatever_is_fixed_of_the_table_moves_the_digest() -> None:
    order = rides(FARE, AGE, CITY, WHEN, INITIAL, RHO)
    fewer = rides(AGE, FARE, CITY, WHEN, INITIAL)
    for other in (rides(name="flights"), rides(cap=9_999), order, fewer):
        assert other.digest != rides().digest


@pytest.mark.parametrize(
    "make",
    [
        lambda: rides(name=""),
        lambda: rides(name="a\nb"),
        lambda: rides(cap=0),
        lambda: rides(cap=1_000_000),
        lambda: rides(AGE),
        lambda: rides(AGE, AGE, INITIAL),
    ],
)
def test_what_is_no_table(make: Callable[[], object], refused: Refused) -> None:
    refused(make)


DAY = 86_400_000_000


def test_quotas_are_of_a_name_or_of_all_others() -> None:
    quotas = Quotas(epsilon={"ann": 5}, default_epsilon=2, rho={"bob": 7})
    assert [quotas.of("epsilon", who) for who in ("ann", "bob", "cyd")] == [5, 2, 2]
    assert [quotas.of("rho", who) for who in ("ann", "bob")] == [None, 7]
    assert Rules().quotas.of("epsilon", "ann") is None


def test_a_quota_is_rounded_down(refused: Refused) -> None:
    assert quota_of("0.0000019") == 1 and quota_of(0) == 0
    refused(lambda: quota_of(-1))


def test_so_much_more_every_whole_day() -> None:
    unlock = Unlock(start=5 * DAY, share="0.3")
    amounts = [
        unlock.usable(at) for at in (0, 5 * DAY - 1, 5 * DAY, 6 * DAY - 1, 6 * DAY, 90 * DAY)
    ]
    tenth = Fraction(1, 10)
    assert amounts == [0, 0, 3 * tenth, 3 * tenth, 6 * tenth, 1]
    assert Unlock(start=0, share=0.1).usable(8 * DAY) == 9 * tenth


def test_millionths_are_rounded_down() -> None:
    rules = Rules(unlock=Unlock(start=0, share="0.0000009"))
    assert rules.usable(0) == 0 and rules.usable(DAY) == 1 and rules.usable(3 * DAY) == 3
    assert Rules().usable(-1) == 1_000_000 == Rules(unlock=Unlock(start=0, share=1)).usable(0)


@pytest.mark.parametrize("share", [0, -0.1, 1.01, "nan", "many"])
def test_a_share_that_is_none(share: float, refused: Refused) -> None:
    refused(lambda: Unlock(start=0, share=share))
