"""Boxes against all points of small spaces; what is no box is refused.

Spaces: which are accepted, boxes of values, coordinates of records.

Amounts: charges up, initial budgets down, by exact decimals.
"""

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from dpstream.accounting import limits
from dpstream.accounting.arrays import Int64
from dpstream.accounting.regions import boxes as module
from dpstream.accounting.regions.amounts import (
    MOST,
    charge_of,
    check_amount,
    exact,
    initial_of,
    initials_of,
)
from dpstream.accounting.regions.boxes import (
    BoxIndex,
    checked,
    club,
    cut,
    cuts,
    disjoint,
    neighbours,
    overlapped,
    replaced,
    split,
    stacked,
    sums,
    taken,
    union,
    without,
)
from dpstream.accounting.regions.embedding import Piece, embedding
from dpstream.accounting.regions.space import (
    Budget,
    Category,
    Dimension,
    Integer,
    Real,
    Space,
    Timestamp,
)
from tests.accounting.regions.spaces import members, painted, partition, small, some_box, some_boxes
from tests.golden.refusals import Refused

SIZES = np.array([5, 4, 6])


def everywhere(boxes: Any) -> Any:
    """How many of the boxes each point is in."""
    return sum((members(box[None], SIZES).astype(int) for box in boxes), np.zeros(SIZES, int))


def test_overlap_split_and_difference() -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        boxes, _ = partition(rng, SIZES, 12)
        box = some_box(rng, SIZES)
        inside = members(box, SIZES)
        met = overlapped(boxes, box[0])
        assert met.tolist() == [n for n, b in enumerate(boxes)
                                if (members(b[None], SIZES) & inside).any()]  # fmt: skip
        subset = taken(boxes, met)
        pieces = split(subset, box[0])
        assert (pieces.inside == cut(subset, box[0])).all()
        assert (everywhere(pieces.inside) == inside).all()
        assert (everywhere(stacked([pieces.inside, pieces.outside])) == everywhere(subset)).all()
        assert (
            np.bincount(pieces.owners, minlength=len(met)).tolist() == cuts(subset, box[0]).tolist()
        )
        assert (everywhere(without(boxes, box)) == ~inside).all()


def test_overlap_in_a_space_is_that_of_all_comparisons() -> None:
    """Whatever dimensions are left out or looked at first."""
    rng, sizes = np.random.default_rng(2), np.array([40, 30, 50, 7])
    boxes, _ = partition(rng, sizes, 3_000)
    boxes, few = stacked([boxes]), 0
    for number in range(200):
        box = some_box(rng, sizes)[0]
        for place in range(number % 4):
            box[place] = 0, sizes[place]
        met = overlapped(boxes, box, sizes)
        assert met.tolist() == overlapped(boxes, box).tolist()
        few += len(met) < len(boxes) // 16
    assert few > 5 and len(overlapped(boxes, np.stack([sizes * 0, sizes], 1), sizes)) == len(boxes)


def test_some_boxes_in_place_of_others() -> None:
    boxes = np.arange(10 * 4).reshape(10, 2, 2)
    for at, many in (([1, 4, 9], 3), ([1, 4, 9], 5), ([1, 4, 9], 1), ([], 2), ([0, 9], 0)):
        others, numbers = -boxes[:many] - 1, np.array(at, np.int64)
        new_boxes = replaced(boxes, numbers, others)
        remaining = [box for n, box in enumerate(boxes.tolist()) if n not in at]
        assert sorted(new_boxes.tolist()) == sorted(remaining + others.tolist())
        amounts = replaced(boxes[:, 0, 0], numbers, others[:, 0, 0])
        assert amounts.tolist() == new_boxes[:, 0, 0].tolist()
    assert (boxes == np.arange(10 * 4).reshape(10, 2, 2)).all()


def test_thousands_are_disjoint_or_not() -> None:
    """One pair that shares a point is found wherever it is."""
    rng, sizes = np.random.default_rng(3), np.array([400, 300, 500])
    boxes, _ = partition(rng, sizes, 4_000)
    assert disjoint(boxes)
    for _ in range(20):
        worse, at, place = boxes.copy(), int(rng.integers(len(boxes))), int(rng.integers(3))
        worse[at, place, 1] += 1  # into its neighbours, if it has any there
        assert disjoint(worse) == (boxes[at, place, 1] == sizes[place])
    slabs = np.zeros((600, 2, 2), np.int64)  # all meet in one dimension, none in the other
    slabs[:, 0], slabs[:, 1, 0], slabs[:, 1, 1] = (0, 9), np.arange(600), np.arange(1, 601)
    assert disjoint(slabs)
    slabs[77, 1, 1] += 1
    assert not disjoint(slabs)


def test_owners_are_whose_piece_each_is() -> None:
    boxes, _ = partition(np.random.default_rng(1), SIZES, 20)
    box = np.array([[1, 4], [1, 3], [2, 5]])
    subset = taken(boxes, overlapped(boxes, box))
    pieces = split(subset, box)
    for piece, owner in zip(pieces.outside, pieces.owners, strict=True):
        assert (cut(piece[None], subset[owner])[0] == piece).all()


def test_union_has_each_point_once() -> None:
    rng = np.random.default_rng(2)
    for _ in range(60):
        boxes = np.concatenate([some_box(rng, SIZES) for _ in range(4)])
        union_boxes = union(boxes)
        assert disjoint(union_boxes) and (everywhere(union_boxes) == (everywhere(boxes) > 0)).all()
    apart = some_boxes(rng, SIZES)
    assert union(apart) is apart


def test_disjoint_of_few_and_many() -> None:
    rng = np.random.default_rng(3)
    for _ in range(100):
        boxes = np.concatenate([some_box(rng, SIZES) for _ in range(2)])
        assert disjoint(boxes) == (everywhere(boxes).max() <= 1)
    sizes = np.array([1_000, 1_000, 1_000])
    many, _ = partition(rng, sizes, 3_000)
    assert len(many) > 2_500 and disjoint(many)
    corner = many[17:18].copy()
    corner[:, :, 1] = corner[:, :, 0] + 1
    assert not disjoint(np.concatenate([many, corner]))


@pytest.mark.parametrize(("boxes", "rule"), [
    ([[[0, 7], [0, 3], [5, 5]]], "boxes.initial: is empty"),
    ([[[0, 7], [2, 1], [0, 9]]], "boxes.city: is inverted"),
    ([[[-1, 7], [0, 3], [0, 9]]], "boxes.age: reaches out"),
    ([[[0, 8], [0, 3], [0, 9]]], "boxes.age: reaches out"),
    ([[[0, 7], [0, 3], [0, 1 << 62]]], "boxes.initial: reaches out"),
    ([[[0.0, np.nan], [0, 3], [0, 9]]], "whole coordinates"),
    ([[[0.0, np.inf], [0, 3], [0, 9]]], "whole coordinates"),
    ([[[0.5, 2], [0, 3], [0, 9]]], "whole coordinates"),
    ([[[0, 1 << 63], [0, 3], [0, 9]]], "whole coordinates"),
    ([[[0, 1 << 70], [0, 3], [0, 9]]], "whole coordinates"),
    ([[[0, 7], [0, 3]]], "each with 3 pairs"),
    ([[0, 7], [0, 3], [0, 9]], "each with 3 pairs"),
    ([[[0, 4], [0, 3], [0, 9]], [[3, 7], [2, 3], [8, 9]]], "overlap"),
])  # fmt: skip
def test_what_is_no_box_is_refused_with_its_rule(boxes: Any, rule: str, refused: Refused) -> None:
    refused(lambda: checked(small(), boxes))


def test_too_many_boxes_are_refused(refused: Refused) -> None:
    most = limits.MAX_QUERY_BOXES
    boxes = np.broadcast_to(small().everything, (most + 1, 3, 2))
    refused(lambda: checked(small(), boxes))


def boxes(rng: np.random.Generator, count: int, dimensions: int, size: int) -> Int64:
    low = rng.integers(0, size, (count, dimensions))
    return np.stack([low, low + rng.integers(1, size, (count, dimensions))], axis=2)


@pytest.mark.parametrize("size", [3, 40, 10**12])
def test_against_all_pairs(size: int) -> None:
    rng = np.random.default_rng(size % 97)
    for count, dimensions in ((1, 1), (50, 2), (400, 4)):
        held, queries = boxes(rng, count, dimensions, size), boxes(rng, 60, dimensions, size)
        index = BoxIndex(held)
        for box in queries:
            inside = (held[:, :, 0] < box[:, 1]) & (held[:, :, 1] > box[:, 0])
            assert sorted(index.overlapped(box)) == np.flatnonzero(inside.all(axis=1)).tolist()


def joinable(boxes: np.ndarray, spent: np.ndarray) -> bool:
    """Whether two boxes of equal spend make one, by looking at all pairs."""
    for one in range(len(boxes)):
        for two in range(len(boxes)):
            differ = (boxes[one] != boxes[two]).any(axis=1)
            if spent[one] == spent[two] and differ.sum() == 1:
                place = int(np.flatnonzero(differ)[0])
                if boxes[one, place, 1] == boxes[two, place, 0]:
                    return True
    return False


def test_no_point_changes_and_nothing_is_left() -> None:
    rng = np.random.default_rng(0)
    fewer = 0
    for rounds in (0, 5, 40, 80):
        for _ in range(15):
            boxes, spent = partition(rng, SIZES, rounds)
            merged_boxes, left = club(boxes, spent)
            assert (painted(merged_boxes, left, SIZES) == painted(boxes, spent, SIZES)).all()
            assert not joinable(merged_boxes, left)
            fewer += len(boxes) - len(merged_boxes)
    assert fewer > 150


def test_a_grid_of_equal_spend_becomes_one_box() -> None:
    cells = np.array([[[a, a + 1], [b, b + 1]] for a in range(16) for b in range(16)])
    merged_boxes, left = club(cells, np.full(256, 7))
    assert merged_boxes.tolist() == [[[0, 16], [0, 16]]] and left.tolist() == [7]
    left_out = np.arange(256) == 100
    assert len(club(cells, left_out.astype(np.int64))[0]) == 5


def test_sums_that_agree_by_chance_join_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_mixed", lambda v, _: np.zeros(len(v), np.uint64))
    rng = np.random.default_rng(1)
    for _ in range(20):
        boxes, spent = partition(rng, SIZES, 40)
        merged_boxes, left = club(boxes, spent)
        assert (painted(merged_boxes, left, SIZES) == painted(boxes, spent, SIZES)).all()


def test_neighbours_of_any_spend() -> None:
    boxes = np.array([[[2, 4], [0, 1]], [[0, 2], [0, 1]], [[4, 5], [0, 2]]])
    parts = sums(boxes)
    pairs = neighbours(boxes, None, 0, parts[1])
    assert tuple(side.tolist() for side in pairs) == ([1], [0])
    assert not len(neighbours(boxes, np.array([1, 2, 3]), 0, parts[1])[0])


AGES = Integer(name="age", low=-2, high=5)
FARE = Real(name="fare", low=-0.3, high=1.0, step=0.1)
CITY = Category(name="city", codes=("Rome", "Bern", "Oslo"))
TIME = Timestamp(name="time", low=1_000, high=4_500, step=1_000)
BUDGETS = Budget(name="left", most=2.0, step=250_000)


def test_numbers_that_are_not_whole_or_far_away_are_outside() -> None:
    coordinates = AGES.coordinates(np.array([0.5, np.nan, np.inf, -np.inf, 1e300, 2.0]))
    assert coordinates.usable.tolist() == [False] * 5 + [True]
    assert not AGES.coordinates(np.array([1 << 63], np.uint64)).usable.any()


def test_missing_values_have_a_point_of_their_own_or_are_refused() -> None:
    point = Integer(name="age", low=-2, high=5, missing="point")
    values, null = np.array([0, 9, 1]), np.array([False, False, True])
    coordinates = point.coordinates(values, null)
    assert point.size == 8 and coordinates.at.tolist() == [2, 7, 7] and coordinates.usable.all()
    assert AGES.coordinates(values, null).usable.tolist() == [True, False, False]


def test_reals_lie_between_the_lines_of_decimals() -> None:
    lines = [float(f"{n / 10:.1f}") for n in range(-3, 11)]
    coordinates = FARE.coordinates(np.array(lines))
    assert coordinates.at[:-1].tolist() == list(range(13)) and not coordinates.usable[-1]
    below = np.nextafter(np.array(lines[1:]), -10)
    assert FARE.coordinates(below).at.tolist() == list(range(13))
    assert [FARE.edge(line) for line in lines] == list(range(14))
    assert not FARE.coordinates(np.array([np.nan, np.inf, -0.31])).usable.any()


@pytest.mark.parametrize("step", [0.5, 2.0**-24, 2.0**-30])
@pytest.mark.parametrize("first", [0, -5])
def test_reals_lie_between_the_lines_of_a_power_of_two(step: float, first: int) -> None:
    """Whose decimals have more digits than a float shows."""
    dimension = Real(name="x", low=first * step, high=(first + 99) * step, step=step)
    dimension.check()
    lines = np.array([(first + n) * step for n in range(100)])
    assert dimension.values == 99 and [dimension.edge(float(x)) for x in lines] == [*range(100)]
    assert dimension.coordinates(lines).at[:-1].tolist() == list(range(99))
    assert dimension.coordinates(np.nextafter(lines[1:], -9)).at.tolist() == list(range(99))
    halved = Real(name="x", low=first * step, high=(first + 99) * step, step=step / 2)
    [side] = embedding(Space((dimension, BUDGETS)), Space((halved, BUDGETS))).sides[:1]
    assert side.pieces == (Piece(0, 198, 0, 2),)


def test_instants() -> None:
    coordinates = TIME.coordinates(np.array([999, 1_000, 1_999, 2_000, 4_499, 4_500]))
    assert coordinates.at.tolist() == [0, 0, 0, 1, 3, 0] and coordinates.usable.tolist() == [
        0,
        1,
        1,
        1,
        1,
        0,
    ]
    stamps = np.array([2_000, "NaT"], "datetime64[us]")
    assert TIME.coordinates(stamps).usable.tolist() == [True, False]
    assert TIME.values == 4 and TIME.edge(2_000) == 1 and TIME.edge(4_500) == 4


@pytest.mark.parametrize("kind", [np.str_, object])
def test_categories(kind: Any) -> None:
    coordinates = CITY.coordinates(np.array(["Oslo", "Rome", "Paris", "Bern"], kind))
    assert coordinates.at[coordinates.usable].tolist() == [2, 0, 1] and not coordinates.usable[2]
    assert not CITY.coordinates(np.array([None, np.nan], object)).usable.any()
    assert [CITY.edge(code) for code in CITY.codes] == [0, 1, 2]


def test_budgets_go_down_and_a_record_without_one_has_none() -> None:
    coordinates = BUDGETS.coordinates(np.array([0.9999999, 1.0, np.nan, -1.0, np.inf, 0.2]))
    assert coordinates.at.tolist() == [3, 4, 0, 0, 8, 0]
    assert coordinates.usable.tolist() == [True, True, False, False, True, True]
    assert BUDGETS.coordinates(np.array([1.0, 1.0]), np.array([True, False])).at.tolist() == [0, 4]
    # At least .6 are those of .75 and more.
    assert BUDGETS.edge(0.6) == 3 and BUDGETS.edge(0) == 0 and BUDGETS.edge(100) == 9


@pytest.mark.parametrize(("dimension", "value"), [
    (FARE, 0.55), (TIME, 1_500), (CITY, "Paris"), (AGES, "old"), (AGES, float("nan")),
    (FARE, float("inf")), (BUDGETS, "none"),
])  # fmt: skip
def test_edges_that_are_none(dimension: Dimension, value: Any, refused: Refused) -> None:
    error = refused(lambda: dimension.edge(value))
    assert str(value) not in str(error)


@pytest.mark.parametrize("values", [np.array(["1"]), np.array([1 + 1j]), np.array([b"x"])])
def test_columns_of_another_type_are_refused(values: Any, refused: Refused) -> None:
    for dimension in (AGES, FARE, TIME, BUDGETS):
        refused(dimension.coordinates, values)
    refused(lambda: CITY.coordinates(np.array([1.0])))


@pytest.mark.parametrize("wrong", [
    Integer(name="", low=0, high=1), Integer(name="x", low=1, high=1),
    Integer(name="x", low=2, high=1), Integer(name="x", low=0, high=1 << 41),
    Integer(name="x", low=1 << 62, high=(1 << 62) + 5), Integer(name="x", low=0, high=5, grid=0),
    Integer(name="x", low=0, high=5, grid=6), Real(name="x", low=0, high=1, step=0.3),
    Real(name="x", low=0, high=1, step=0), Real(name="x", low=0, high=float("nan"), step=1),
    Real(name="x", low=1e15, high=1e15 + 1, step=0.01), Timestamp(name="x", low=0, high=9, step=0),
    Timestamp(name="x", low=9, high=0), Category(name="x", codes=()),
    Category(name="x", codes=("a", "a")), Category(name="x", codes=("a\0",)),
    Budget(name="x", most=-1.0), Budget(name="x", most=1e6), Budget(name="x", most=1.0, step=0),
    Budget(name="x", most=1.0, missing="point"),
])  # fmt: skip
def test_dimensions_without_meaning_are_refused(wrong: Dimension, refused: Refused) -> None:
    refused(wrong.check)


AGE, LEFT = Integer(name="age", low=0, high=9), Budget(name="left", most=1.0)


def test_a_box_of_values() -> None:
    space = small()
    box = space.box(age=(12, 14), initial=("0.000004", None))
    assert box.tolist() == [[[2, 4], [0, 3], [2, 9]]]
    assert space.box().tolist() == space.everything.tolist() == [[[0, 7], [0, 3], [0, 9]]]
    # A bound leaves out missing values, which are at 6.
    assert space.box(age=(12, None))[0, 0].tolist() == [2, 6]
    assert space.box(age=(None, None))[0, 0].tolist() == [0, 7]


def test_records_are_where_their_values_say(refused: Refused) -> None:
    columns = {
        "age": np.array([10, 99, 15]),
        "city": np.array(["B", "A", "D"]),
        "initial": np.array([4e-6, 17e-6, 1e-6]),
    }
    at, usable = small().coordinates(columns)
    assert at[:2].tolist() == [[0, 1, 2], [6, 0, 8]] and usable.tolist() == [True, True, False]
    refused(lambda: small().coordinates({"age": columns["age"], "initial": columns["initial"]}))


def test_a_record_is_in_the_box_of_its_value() -> None:
    space = small()
    for age in range(10, 16):
        low, high = space.box(age=(age, age + 1))[0, 0]
        at, _ = space.coordinates(
            {"age": np.arange(10, 16), "city": np.full(6, "A"), "initial": np.ones(6)}
        )
        assert np.flatnonzero((at[:, 0] >= low) & (at[:, 0] < high)).tolist() == [age - 10]


@pytest.mark.parametrize("wrong", [
    (), (AGE,), (AGE, AGE, LEFT), (LEFT, Budget(name="other", most=1.0)),
    (LEFT, Category(name="c", codes=())),
    (*(Integer(name=str(n), low=0, high=2) for n in range(16)), LEFT),
])  # fmt: skip
def test_spaces_that_are_refused(wrong: tuple[Integer, ...], refused: Refused) -> None:
    refused(lambda: Space(wrong))


def test_unknown_dimensions_are_refused(refused: Refused) -> None:
    caught = refused(lambda: small().box(height=(1, 2)))
    assert all(dimension.name in caught.fix for dimension in small().dimensions)


def test_a_number_is_the_decimal_that_it_is_written_as() -> None:
    assert exact(0.1, "x") == exact("0.1", "x") == exact(Decimal("0.1"), "x") == Fraction(1, 10)
    assert charge_of(0.1) == charge_of("0.1") == initial_of(0.1) == 100_000
    assert charge_of(1) == charge_of(Fraction(1)) == charge_of(np.float64(1)) == 1_000_000


def test_a_float_on_a_grid_of_a_power_of_two_is_itself(refused: Refused) -> None:
    step = 2.0**-24
    assert exact(step, "x", step) == Fraction(1, 1 << 24) != exact(step, "x")
    assert exact(5 * step, "x", step) == Fraction(5, 1 << 24) != exact(5 * step, "x")
    assert exact(-0.4, "x", 0.5) == Fraction(-2, 5) and exact("0.1", "x", step) == Fraction(1, 10)
    # Whole numbers of other steps are decimals, wherever their floats fall.
    assert exact(0.2, "x", 0.1) / exact(0.1, "x", 0.1) == 2
    for wrong in (math.nan, math.inf):
        refused(exact, wrong, "x", step)


def test_charges_go_up_and_initial_budgets_down() -> None:
    assert charge_of("0.0000001") == 1 and initial_of("0.0000009") == 0
    assert charge_of("1.0000001") == 1_000_001 and initial_of("1.9999999") == 1_999_999


@pytest.mark.parametrize(
    "wrong", [0, -1, 0.0, "-0.1", 1e9, math.inf, math.nan, "nan", "much", True]
)
def test_charges_that_are_none(wrong: float, refused: Refused) -> None:
    refused(lambda: charge_of(wrong))


@pytest.mark.parametrize("wrong", [-1, "-0.0000001", 1001, math.nan, math.inf])
def test_initial_budgets_that_are_none(wrong: float, refused: Refused) -> None:
    refused(lambda: initial_of(wrong))


@pytest.mark.parametrize("wrong", [0, -1, MOST + 1, 1 << 80, 0.5, True, "1"])
def test_amounts_that_are_none(wrong: int, refused: Refused) -> None:
    refused(lambda: check_amount(wrong))
    check_amount(MOST)


def decimals(rng: np.random.Generator) -> list[float]:
    """Budgets with up to 15 digits, many of them at or beside a millionth."""
    micro = rng.integers(0, 1_000_000_000, 3_000)
    near = [float(Decimal(int(m)).scaleb(-6) + Decimal(int(d)).scaleb(-9))
            for m, d in zip(micro, rng.integers(-2, 3, len(micro)), strict=True)]  # fmt: skip
    return [abs(value) for value in near] + rng.uniform(0, 1000, 1_000).tolist()


def test_records_budgets_are_those_of_their_decimals() -> None:
    values = decimals(np.random.default_rng(1))
    initials, given = initials_of(np.array(values))
    assert given.all()
    # Not `==` of lists: where it fails on purpose, pytest would work out their differences.
    np.testing.assert_array_equal(initials, [initial_of(value) for value in values])


def test_rounding_to_the_nearest_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math, "floor", math.ceil)
    with pytest.raises(AssertionError):
        test_charges_go_up_and_initial_budgets_down()
    with pytest.raises(AssertionError):
        test_records_budgets_are_those_of_their_decimals()


def test_a_record_without_a_budget_has_none() -> None:
    initials, given = initials_of(np.array([np.nan, -1.0, -np.inf, 0.0, np.inf, 5_000.0]))
    assert initials.tolist() == [0, 0, 0, 0, MOST, MOST]
    assert given.tolist() == [False, False, False, True, True, True]
