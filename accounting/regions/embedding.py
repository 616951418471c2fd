"""Embedding of a table's space in a wider one: the former places of the wider space's records.

**Why nobody's budget is whole again.**  A record has one point in each space, and its coordinates
in the wider one decide those that it had: f(p') = p.  A box B of the old space that was charged
becomes the box, or the boxes, of all p' with f(p') in B.  So the sum of what was charged at p' is
the sum at f(p'), which no point's record has exceeded, and the induction of mechanism.md section
14 goes on from there.  Points without an f (their records were refused before: they were no
records of the table, and never read) have spent nothing.

f exists where each old dimension is there again by its name and type, with a range that contains
the old one, and steps that divide the old steps on the same lines.  Then values keep their step;
values outside of the old range were at its point of missing values, if it has one; an initial
budget above the old ``most`` was at ``most``.  All else is refused: with a narrower range, or one
dimension less, records of several old points would be at one point.
"""

import itertools
from collections.abc import Iterator, Sequence
from fractions import Fraction

import msgspec
import numpy as np

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import UsageError
from dpstream.accounting.limits import MAX_QUERY_BOXES
from dpstream.accounting.regions.amounts import exact
from dpstream.accounting.regions.boxes import club, stacked, taken
from dpstream.accounting.regions.space import (
    Budget,
    Category,
    Dimension,
    Integer,
    Real,
    Space,
    Timestamp,
)

#: Pieces of one dimension: codes of a category in another order have one each.
MAX_PIECES = 64


class Piece(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A range of a dimension of the wider space, and where its records were.

    Attributes:
        low, high: the coordinates low <= x < high.
        at: the old coordinate at ``low``.
        each: so many coordinates were one, at + (x - low) // each; 0: all of them were at ``at``.
    """

    low: int
    high: int
    at: int
    each: int


class Side(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A dimension of the wider space.

    Attributes:
        place: number of the old dimension; ``None``: it is new, and its piece is all of it.
        pieces: rising; coordinates in none of them had no record.
    """

    place: int | None
    pieces: tuple[Piece, ...]


class Embedding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """See the module; ``sides`` are the dimensions of the wider space in order."""

    sides: tuple[Side, ...]

    def boxes(self, charges: Sequence[Int64]) -> list[Int64]:
        """Return, for each charge, (m, d', 2) disjoint boxes of all points whose records were in
        its boxes.

        Args:
            charges: (k, d, 2) disjoint boxes of each; the same list gives the same boxes.

        Raises:
            UsageError: they are more than an entry can have.
        """
        if not charges:
            return []
        charge = np.repeat(np.arange(len(charges)), [len(boxes) for boxes in charges])
        boxes = np.concatenate(charges)
        owners = np.arange(len(boxes))
        wide = np.empty((len(boxes), len(self.sides), 2), np.int64)
        for place, side in enumerate(self.sides):
            if side.place is None:
                wide[:, place] = side.pieces[0].low, side.pieces[0].high
                continue
            box_numbers, ranges = _ranges(boxes[:, side.place], side.pieces)
            counts = np.bincount(box_numbers, minlength=len(boxes))
            first, repeats = np.cumsum(counts) - counts, counts[owners]
            if np.bincount(charge[owners], repeats).max(initial=0) > MAX_QUERY_BOXES:
                raise UsageError(
                    "dimension",
                    "divides a charge of the account into too many boxes",
                    "keep more of the dimensions as they were",
                )
            number = np.arange(repeats.sum()) - np.repeat(np.cumsum(repeats) - repeats, repeats)
            wide, owners = np.repeat(wide, repeats, axis=0), np.repeat(owners, repeats)
            wide[:, place] = ranges[first[owners] + number]
        wide, labels = club(stacked([wide]), charge[owners])
        order = np.argsort(labels, kind="stable")
        ends = np.searchsorted(labels[order], np.arange(len(charges) + 1))
        return [taken(wide, order[low:high]) for low, high in itertools.pairwise(ends.tolist())]


def _ranges(sides: Int64, pieces: tuple[Piece, ...]) -> tuple[Int64, Int64]:
    """Ranges (m, 2) of the coordinates that were in some old ranges (k, 2), and whose each is."""
    low, high, at, each = np.array([(p.low, p.high, p.at, p.each) for p in pieces], np.int64).T
    begin, end = sides[:, :1], sides[:, 1:]
    inside = (begin <= at) & (at < end)
    all_ranges = np.stack(
        [
            np.where(each > 0, np.maximum(low + (begin - at) * each, low), low),
            np.where(
                each > 0, np.minimum(low + (end - at) * each, high), np.where(inside, high, low)
            ),
        ],
        axis=2,
    )
    owners, numbers = np.nonzero(all_ranges[:, :, 0] < all_ranges[:, :, 1])
    ranges = all_ranges[owners, numbers]
    # Pieces that touch are one range.
    heads = np.ones(len(ranges), np.bool_)
    heads[1:] = (owners[1:] != owners[:-1]) | (ranges[1:, 0] != ranges[:-1, 1])
    tails = np.roll(heads, -1)
    return owners[heads], np.stack([ranges[heads, 0], ranges[tails, 1]], axis=1)


def embedding(old: Space, new: Space) -> Embedding:
    """Return the embedding of the old space in the new one.

    Raises:
        UsageError: it does not; names the dimension, and says why.
    """
    names = {dimension.name: place for place, dimension in enumerate(old.dimensions)}
    for name in names:
        if all(dimension.name != name for dimension in new.dimensions):
            raise _refused(name, "is not there any more", "keep it")
    sides = list[Side]()
    for dimension in new.dimensions:
        place = names.get(dimension.name)
        if place is None:
            sides.append(Side(None, (Piece(0, dimension.size, 0, 0),)))
        else:
            sides.append(Side(place, _pieces(old.dimensions[place], dimension)))
    return Embedding(tuple(sides))


def _pieces(old: Dimension, new: Dimension) -> tuple[Piece, ...]:
    if type(old) is not type(new):
        raise _refused(new.name, "is of another type", "keep its type")
    if isinstance(old, Budget) and isinstance(new, Budget):
        return _of_budget(old, new)
    if isinstance(old, Category) and isinstance(new, Category):
        values = list(_of_codes(old, new))
    else:
        values = [_of_range(old, new)]
    if len(values) > MAX_PIECES:
        raise _refused(new.name, "has its codes in another order", "add new codes behind the old")
    return tuple(_with_missing(old, new, values))


def _with_missing(old: Dimension, new: Dimension, values: list[Piece]) -> Iterator[Piece]:
    """The pieces of values, and between them those that were at the point of missing values."""
    end = 0
    for piece in (*values, Piece(new.size, new.size, 0, 0)):
        if end < piece.low and old.missing == "point":
            yield Piece(end, piece.low, old.values, 0)
        if piece.low < piece.high:
            yield piece
        end = piece.high


def _of_range(old: Dimension, new: Dimension) -> Piece:
    """Of numbers and instants: the old range in the new one, on its lines."""
    (low, high, step), (new_low, new_high, new_step) = _line(old), _line(new)
    if new_low > low or new_high < high:
        raise _refused(new.name, "has a narrower range", "keep the old range inside the new one")
    each, shift = step / new_step, (low - new_low) / new_step
    end = Fraction(new.values) if new_high == high else (high - new_low) / new_step
    if any(number.denominator != 1 for number in (each, shift, end)):
        raise _refused(
            new.name,
            "has steps on other lines",
            "move its range by whole steps, and divide the old step by a whole number",
        )
    return Piece(int(shift), int(end), 0, int(each))


def _line(dimension: Dimension) -> tuple[Fraction, Fraction, Fraction]:
    """low, high and step."""
    match dimension:
        case Integer(low=low, high=high):
            return Fraction(low), Fraction(high), Fraction(1)
        case Timestamp(low=low, high=high, step=step):
            return Fraction(low), Fraction(high), Fraction(step)
        case Real():
            return dimension.range
    raise TypeError(type(dimension))


def _of_codes(old: Category, new: Category) -> Iterator[Piece]:
    """Runs of old codes that follow each other in both lists."""
    places = {code: place for place, code in enumerate(old.codes)}
    if not places.keys() <= set(new.codes):
        raise _refused(new.name, "lacks a code that it had", "keep all codes")
    there = [(x, places[code]) for x, code in enumerate(new.codes) if code in places]
    for _, run in itertools.groupby(there, lambda pair: pair[0] - pair[1]):
        pairs = list(run)
        yield Piece(pairs[0][0], pairs[-1][0] + 1, pairs[0][1], 1)


def _of_budget(old: Budget, new: Budget) -> tuple[Piece, ...]:
    """Initial budgets above the old ``most`` were at it."""
    if new.kind != old.kind:
        raise _refused(new.name, "is of another kind", "keep its kind, or add another budget")
    if exact(new.most, new.name) < exact(old.most, old.name) or old.step % new.step:
        raise _refused(
            new.name,
            "has a smaller most, or steps that do not divide the old step",
            "raise most alone, or divide the step by a whole number",
        )
    each, last = old.step // new.step, old.values - 1
    pieces = (Piece(0, each * last, 0, each), Piece(each * last, new.values, last, 0))
    return tuple(piece for piece in pieces if piece.low < piece.high)


def _refused(name: str, rule: str, fix: str) -> UsageError:
    return UsageError(
        f"dimension {name}", f"{rule}: records of several old points would be at one point", fix
    )
