"""Sums on their way: whatever the pieces and shards, the same integers arrive."""

import numpy as np
import pytest

from dpstream.accounting.sessions.aggregates import Question
from dpstream.dp_transforms.batches import ArrowBatchCoder
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.session import measured, nothing
from dpstream.dp_transforms.session.batches import (
    empty,
    gathered,
    joined,
    packed,
    routed,
    shards_of,
)
from tests.dp_transforms.session.test_totals import question_of, same
from tests.fixed import INPUTS
from tests.sessions import QUESTIONS, RUN, SHAPES, Records, boxes_of, random_records, space

SPACE, CODER = space(), ArrowBatchCoder()


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
