"""Exact sums of cells: against a slow count of single records, in pieces, and on their way."""

import numpy as np
import pytest

from dpstream.accounting.arrays import Int64
from dpstream.accounting.regions.space import Budget, Integer, Space
from dpstream.accounting.sessions.aggregates import Cells, Needs, Question, sum_of
from dpstream.dp_transforms.batches import ArrowBatchCoder
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.session import Totals, measured, nothing, totals
from dpstream.dp_transforms.session.totals import (
    empty,
    gathered,
    joined,
    packed,
    routed,
    shards_of,
)
from tests.fixed import INPUTS
from tests.sessions import QUESTIONS, RUN, SHAPES, Records, boxes_of, random_records, space

SPACE = space()


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
