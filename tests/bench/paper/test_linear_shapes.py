"""Workloads of the experiments are what they are called."""

import numpy as np
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.strategies.cells.eigen import spectrum
from tests.bench.paper import linear_shapes as shapes


@pytest.mark.parametrize(
    ("cells", "attributes", "expected"),
    [(2048, 3, (8, 16, 16)), (2048, 1, (2048,)), (32, 5, (2,) * 5), (64, 4, (2, 2, 4, 4))],
)
def test_split(cells: int, attributes: int, expected: tuple[int, ...]) -> None:
    assert shapes.split(cells, attributes) == expected


@pytest.mark.parametrize(("cells", "attributes"), [(48, 2), (8, 4)])
def test_sizes_that_cannot_be_shared(cells: int, attributes: int) -> None:
    with pytest.raises(UsageError, match="power of 2"):
        shapes.split(cells, attributes)


def test_random_ranges_are_boxes_of_some_attributes() -> None:
    problem = shapes.random_ranges((2, 4, 4), 5)
    rows = problem.workload.products[0].factors[0].matrix
    assert rows is not None and rows.shape == (shapes.QUERIES, 32)
    boxes = rows.reshape(-1, 2, 4, 4)
    sides = [np.asarray(boxes.any(axis=tuple({1, 2, 3} - {axis}))) for axis in (1, 2, 3)]
    for box, one, two, three in zip(boxes, *sides, strict=True):
        assert np.array_equal(box, np.multiply.outer(np.multiply.outer(one, two), three))
    unbounded = np.array([side.all(axis=1) for side in sides])
    assert 0 < unbounded[0].mean() < 1 and (~unbounded).any(axis=0).mean() > 0.5
    again, other = (shapes.random_ranges((2, 4, 4), seed).workload.structure for seed in (5, 6))
    assert again == problem.workload.structure != other


def test_random_tables_are_some_sets_of_attributes() -> None:
    sets = [p.axes for p in shapes.random_tables((2, 4, 4, 2), 1).workload.products]
    assert len(set(sets)) == len(sets) == 4 and all(sets)
    assert [len(p.axes) for p in shapes.tables((2, 4, 4)).workload.products] == [2, 2, 2]


def test_permuted_queries_are_the_same_in_another_order() -> None:
    problem = shapes.ranges((4, 4))
    variant = shapes.permuted(problem, 2)
    gram, other = problem.workload.gram(), variant.workload.gram()
    assert not np.allclose(gram, other) and variant.weight == 100
    assert np.allclose(np.linalg.eigvalsh(gram), np.linalg.eigvalsh(other))
    assert spectrum(variant.workload).bound == pytest.approx(spectrum(problem.workload).bound)
    # Strategies that know the order of cells are worse off.
    for name in shapes.RANGE_RIVALS:
        assert variant.rival(name).error(variant.workload) > problem.rival(name).error(
            problem.workload
        )
    assert variant.eigen().error(variant.workload) == pytest.approx(
        problem.eigen().error(problem.workload), rel=1e-2
    )


def test_rivals_over_the_attributes_where_queries_are_one_matrix() -> None:
    problem = shapes.random_ranges((4, 8), 0)
    plain = shapes.ranges((4, 8))
    pair = (problem, plain._replace(grid=plain.workload))
    gram, expected = (each.rival("haar").gram.dense() for each in pair)  # type: ignore[attr-defined]
    assert np.array_equal(gram, expected) and gram.shape == (32, 32)
    assert shapes.predicates(8, 0).rival("identity").error(shapes.predicates(8, 0).workload) > 0


def test_generated_tables_have_shapes_and_records() -> None:
    census, adult = shapes.histograms(2048, 3)
    assert (census.sizes, census.records) == ((8, 16, 16), 15_000_000)
    assert (adult.sizes, adult.records) == ((4, 8, 8, 8), 33_000)
    counts = np.sort(census.counts)
    assert counts[-1] > 20 * np.median(counts)
    assert np.array_equal(shapes.histograms(2048, 3)[0].counts, census.counts)
