"""A space in a wider one, against records: every record of small spaces is put at its old and at
its new point by rules written out here, and has spent at the new one what it had at the old one.

Coarsening makes fewer boxes and never lowers a point.
"""

import itertools
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from dpstream.accounting.limits import MAX_QUERY_BOXES
from dpstream.accounting.regions import spent as coarsening
from dpstream.accounting.regions.embedding import Embedding, Side, embedding
from dpstream.accounting.regions.space import (
    Budget,
    Category,
    Dimension,
    Integer,
    Real,
    Space,
    Timestamp,
)
from dpstream.accounting.regions.spent import coarsen
from tests.accounting.regions.spaces import painted, partition
from tests.golden.refusals import Refused


def point(dimension: Dimension, value: Any) -> int | None:
    """The coordinate of a record's value, as docs/guides/session.md and section 14 of mechanism.md
    have it; ``None``: the record is not usable."""
    match dimension:
        case Budget(step=step, most=most):
            return None if value is None else min(value // step, int(most * 1_000_000) // step)  # type: ignore[operator]
        case Category(codes=codes):
            values, at = len(codes), codes.index(value) if value in codes else None
        case Integer(low=low, high=high):
            values, at = high - low, None if value is None else value - low
        case Timestamp(low=low, high=high, step=step):
            values = -((low - high) // step)
            at = None if value is None or not low <= value < high else (value - low) // step
        case Real(low=low, high=high, step=step):
            start, width = Fraction(str(low)), Fraction(str(step))
            values = int((Fraction(str(high)) - start) / width)
            at = None if value is None else (Fraction(str(value)) - start) // width
    if at is not None and 0 <= at < values:
        return int(at)
    return values if dimension.missing == "point" else None


class Case(NamedTuple):
    """Two spaces, and values of each dimension of the wider one by name."""

    old: tuple[Dimension, ...]
    new: tuple[Dimension, ...]
    values: dict[str, list[Any]]


def records(case: Case) -> Iterator[tuple[tuple[int, ...] | None, tuple[int, ...]]]:
    """Old point (``None``: not usable then) and new point of every record that is usable now."""
    names = [dimension.name for dimension in case.new]
    for values in itertools.product(*(case.values[name] for name in names)):
        record = dict(zip(names, values, strict=True))
        new = [point(dimension, record[dimension.name]) for dimension in case.new]
        old = [point(dimension, record[dimension.name]) for dimension in case.old]
        if None not in new:
            yield None if None in old else tuple(old), tuple(new)  # type: ignore[arg-type, misc]


def some_boxes(rng: np.random.Generator, sizes: list[int]) -> np.ndarray:
    """Disjoint boxes: slices along one dimension, cut at random in the others."""
    along = int(rng.integers(len(sizes)))
    edges = sorted(set(rng.integers(0, sizes[along] + 1, 5).tolist()))
    boxes = []
    for low, high in itertools.pairwise(edges):
        box = [sorted(rng.choice(size + 1, 2, replace=False).tolist()) for size in sizes]
        box[along] = [low, high]
        boxes.append(box)
    return np.array(boxes, np.int64).reshape(-1, len(sizes), 2)


def times_in(boxes: np.ndarray, at: tuple[int, ...]) -> int:
    place = np.array(at)
    return int(((boxes[:, :, 0] <= place) & (place < boxes[:, :, 1])).all(axis=1).sum())


def wrong_points(case: Case, how: Embedding, seed: int = 0) -> int:
    """Records that have spent at their new point something else than at their old one."""
    rng, old, new = np.random.default_rng(seed), Space(case.old), Space(case.new)
    pairs = list(records(case))
    assert {at for _, at in pairs} == set(itertools.product(*map(range, new.sizes.tolist())))
    wrong, charges = 0, [some_boxes(rng, old.sizes.tolist()) for _ in range(12)]
    for boxes, wide in zip(charges, how.boxes(charges), strict=True):
        assert ((wide[:, :, 0] >= 0) & (wide[:, :, 1] <= new.sizes)).all()
        wrong += sum(times_in(wide, at) != (before is not None and times_in(boxes, before))
                     for before, at in pairs)  # fmt: skip
    return wrong


EPSILON = Budget(name="e", most=1.0, step=500_000)
FINER = Budget(name="e", most=1.75, step=250_000)
BUDGETS = [n * 125_000 for n in range(16)]
FEW = [0, 499_999, 500_000, 999_999, 1_000_000, 3_000_000]
ONE = {"e": FEW}


def integer(low: int, high: int, missing: Any = "refuse") -> Integer:
    return Integer(name="a", low=low, high=high, missing=missing)


CASES = {
    "wider on both sides": Case((integer(0, 4), EPSILON), (integer(-2, 6), EPSILON),
                                {"a": list(range(-2, 6)), **ONE}),
    "with a point of missing values": Case(
        (integer(0, 4, "point"), EPSILON), (integer(-2, 6, "point"), EPSILON),
        {"a": [*range(-3, 8), None], **ONE}),
    "missing values that were refused": Case(
        (integer(0, 4), EPSILON), (integer(0, 5, "point"), EPSILON),
        {"a": [*range(-1, 8), None], **ONE}),
    "missing values that are refused now": Case(
        (integer(0, 4, "point"), EPSILON), (integer(-1, 5), EPSILON),
        {"a": [*range(-1, 5)], **ONE}),
    "a new dimension, in another order": Case(
        (integer(0, 3, "point"), EPSILON),
        (Integer(name="b", low=5, high=8, missing="point"), EPSILON, integer(0, 4, "point")),
        {"a": [*range(-1, 6), None], "b": [5, 6, 7, None], **ONE}),
    "higher and finer budgets": Case((integer(0, 2), EPSILON), (integer(0, 2), FINER),
                                     {"a": [0, 1], "e": BUDGETS}),
    "a budget of a second kind": Case(
        (integer(0, 2), EPSILON), (EPSILON, Budget(name="r", kind="rho", most=0.5, step=250_000),
                                   integer(-1, 2)), {"a": [-1, 0, 1], "r": BUDGETS[:6], **ONE}),
    "instants, the last step of which is shorter": Case(
        (Timestamp(name="t", low=20, high=47, step=10, missing="point"), EPSILON),
        (Timestamp(name="t", low=10, high=47, step=5, missing="point"), EPSILON),
        {"t": [*range(5, 55), None], **ONE}),
    "instants that go on": Case(
        (Timestamp(name="t", low=20, high=40, step=10), EPSILON),
        (Timestamp(name="t", low=5, high=58, step=5), EPSILON), {"t": [*range(5, 58)], **ONE}),
    "reals": Case(
        (Real(name="x", low=0.1, high=0.5, step=0.2, missing="point"), EPSILON),
        (Real(name="x", low=-0.1, high=0.7, step=0.1, missing="point"), EPSILON),
        {"x": ["-0.2", *(f"{n / 20:.2f}" for n in range(-2, 14)), "0.9", None], **ONE}),
    "codes in another order": Case(
        (Category(name="c", codes=("a", "b", "c"), missing="point"), EPSILON),
        (Category(name="c", codes=("x", "c", "a", "b", "y"), missing="point"), EPSILON),
        {"c": ["a", "b", "c", "x", "y", "other", None], **ONE}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_each_record_has_spent_what_it_had_spent(name: str) -> None:
    case = CASES[name]
    assert wrong_points(case, embedding(Space(case.old), Space(case.new))) == 0


@pytest.mark.parametrize("name", CASES)
def test_another_embedding_is_seen(name: str) -> None:
    """Each piece is shifted, or left out: the check above fails."""
    case = CASES[name]
    right = embedding(Space(case.old), Space(case.new))
    sabotaged = 0
    for number, side in enumerate(right.sides):
        for at, piece in enumerate(side.pieces):
            if side.place is None:
                continue
            shifted = msgspec.structs.replace(piece, at=piece.at + 1)
            for pieces in ((*side.pieces[:at], shifted, *side.pieces[at + 1 :]),
                           (*side.pieces[:at], *side.pieces[at + 1 :])):  # fmt: skip
                sides = [
                    *right.sides[:number],
                    Side(side.place, pieces),
                    *right.sides[number + 1 :],
                ]
                if pieces:
                    assert wrong_points(case, Embedding(tuple(sides))) > 0
                    sabotaged += 1
    assert sabotaged


def test_what_is_whole_stays_one_box() -> None:
    case = CASES["codes in another order"]
    old, new = Space(case.old), Space(case.new)
    assert (embedding(old, new).boxes([old.everything])[0] == new.everything).all()
    none, both = embedding(old, new).boxes([old.everything[:0], old.everything])
    assert len(none) == 0 and len(both) == 1 and embedding(old, new).boxes([]) == []


CODES = tuple(f"{n:03d}" for n in range(80))
REFUSED = {
    "one less": ((integer(0, 4), EPSILON), (EPSILON,), "a"),
    "another type": ((integer(0, 4), EPSILON),
                     (Real(name="a", low=0.0, high=4.0, step=1.0), EPSILON), "a"),
    "a narrower range": ((integer(0, 4), EPSILON), (integer(0, 3), EPSILON), "a"),
    "other lines": ((Real(name="a", low=0.0, high=1.0, step=0.5), EPSILON),
                    (Real(name="a", low=-0.25, high=1.25, step=0.5), EPSILON), "a"),
    "wider steps": ((Real(name="a", low=0.0, high=1.0, step=0.25), EPSILON),
                    (Real(name="a", low=0.0, high=1.0, step=0.5), EPSILON), "a"),
    "a last step that was shorter": (
        (Timestamp(name="a", low=0, high=25, step=10), EPSILON),
        (Timestamp(name="a", low=0, high=40, step=10), EPSILON), "a"),
    "a code less": ((Category(name="a", codes=("x", "y")), EPSILON),
                    (Category(name="a", codes=("x", "z")), EPSILON), "a"),
    "codes turned around": ((Category(name="a", codes=CODES), EPSILON),
                            (Category(name="a", codes=CODES[::-1]), EPSILON), "a"),
    "a smaller most": ((EPSILON,), (Budget(name="e", most=0.5, step=500_000),), "e"),
    "wider steps of budgets": ((EPSILON,), (Budget(name="e", most=2.0, step=1_000_000),), "e"),
    "another kind": ((EPSILON,), (Budget(name="e", kind="rho", most=1.0, step=500_000),), "e"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_wider_is_refused(name: str, refused: Refused) -> None:
    old, new, dimension = REFUSED[name]
    caught = refused(lambda: embedding(Space(old), Space(new)))
    assert caught.field == f"dimension {dimension}"


def test_too_many_boxes_are_refused(refused: Refused) -> None:
    """A charge of single codes, each of which is far from the others in the new list."""
    codes = tuple(f"{n:02d}" for n in range(60))
    apart = [
        code for pair in zip(codes, (f"n{code}" for code in codes), strict=True) for code in pair
    ]
    old = Space((Category(name="c", codes=codes), Category(name="d", codes=codes), EPSILON))
    new = Space((Category(name="c", codes=tuple(apart)), Category(name="d", codes=tuple(apart)),
                 EPSILON))  # fmt: skip
    assert len(codes) ** 2 < MAX_QUERY_BOXES
    boxes = np.array([[[0, 60], [0, 60], [0, 1]], [[0, 60], [0, 60], [1, 2]]])
    assert len(embedding(old, new).boxes([boxes[:1]])[0]) == len(codes) ** 2
    assert len(embedding(old, new).boxes([boxes[:1], boxes[:1]])) == 2  # of one charge, not of all
    refused(lambda: embedding(old, new).boxes([boxes]))


SIZES = np.array([5, 4, 6])


def test_no_point_falls() -> None:
    rng = np.random.default_rng(0)
    for most in (1, 5, 20):
        for _ in range(20):
            boxes, spent = partition(rng, SIZES, 60)
            coarse_boxes, raised = coarsen(boxes, spent, most)
            assert (painted(coarse_boxes, raised, SIZES) >= painted(boxes, spent, SIZES)).all()
            assert len(coarse_boxes) <= len(boxes) and raised.max() == spent.max()


def test_the_smaller_amount_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coarsening, "joined", np.minimum)
    with pytest.raises(AssertionError):
        test_no_point_falls()


def test_the_cheapest_go_first() -> None:
    boxes = np.array([[[0, 1]], [[1, 2]], [[2, 10]], [[10, 11]]])
    coarse_boxes, spent = coarsen(boxes, np.array([5, 0, 3, 4]), 3)
    # Raising eight points by one costs 8, two by five and one by three less: 1-2 costs 3.
    assert coarse_boxes.tolist() == [[[0, 1]], [[1, 10]], [[10, 11]]] and spent.tolist() == [
        5,
        3,
        4,
    ]
