"""Linear workloads of the eigen-design paper: their figures, and the shapes of their queries."""

import functools
import math

import numpy as np
import pytest

from dpstream.accounting.gaussian import mu_of
from dpstream.accounting.strategies.cells.eigen import spectrum
from tests.bench.paper import linear
from tests.bench.paper import linear as shapes
from tests.bench.paper.linear import PARTS, Row, Study
from tests.golden.refusals import Refused

STUDY = Study(cells=32, large=128)


@functools.cache
def rows(part: str) -> list[Row]:
    return PARTS[part](STUDY, lambda _: None)


def test_example_4_has_the_papers_figures() -> None:
    [row] = rows("example4")
    errors = row["errors"]
    printed = {"gaussian": 1.6366, "identity": 1.5527, "haar": 1.1859, "eigen": 1.0178}
    assert {name: errors[name] for name in printed} == pytest.approx(printed, abs=2e-4)
    assert errors["optimum"] < errors["eigen"] and row["squared"] == pytest.approx(15.018, abs=0.02)
    assert row["bound"] == pytest.approx(math.sqrt(14.933 / 8) / mu_of(0.5, 1e-4), rel=1e-4)
    for matrix in map(np.array, row["matrices"].values()):
        assert np.allclose(matrix, matrix.T) and (matrix**2).sum(0).max() == pytest.approx(1)


def test_table_2_says_who_is_best_and_worst() -> None:
    table_rows = rows("table2")
    assert [row["name"] for row in table_rows] == list(linear.PRINTED_TABLE2)
    for row in table_rows:
        errors = row["errors"]
        assert 1 - 1e-9 <= row["floor"] <= errors["optimum"] <= errors["eigen"] * 1.001
        assert row["best_factor"] * errors["eigen"] == pytest.approx(errors[row["best"]])
        assert row["worst_factor"] >= row["best_factor"] and row["bound_ratio"] <= 1 + 1e-9
        assert "optimum" not in (row["best"], row["worst"])


def test_figure_3_has_both_kinds_of_errors() -> None:
    figure_rows = rows("figure3")
    absolute = [row for row in figure_rows if row["figure"] == "absolute"]
    assert [row["kind"] for row in absolute] == ["ranges"] * 8 + ["tables"] * 6
    assert all(row["errors"]["optimum"] <= min(row["errors"].values()) * 1.001 for row in absolute)
    relative = [row for row in figure_rows if row["figure"] == "relative"]
    assert len(relative) == 2 * 4 * len(linear.EPSILONS)
    by_budget = [row["errors"]["eigen"] for row in relative[: len(linear.EPSILONS)]]
    assert by_budget == sorted(by_budget, reverse=True)
    assert by_budget[0] / by_budget[2] == pytest.approx(mu_of(1, 1e-4) / mu_of(0.1, 1e-4))


def test_relative_errors_are_means_of_sizes_of_noise() -> None:
    """Against drawn noise of the identity strategy, the only one whose noise is plain."""
    table = shapes.generated("t", (2, 4, 4), 5000, 1)
    problem = shapes.tables(table.sizes)._replace(rivals=("identity",))
    errors = linear.relative_errors(problem, table)
    shaped = table.counts.reshape(table.sizes)
    exact = np.concatenate([a.ravel() for a in problem.workload.apply(shaped)])
    noise = np.random.default_rng(0).normal(size=(4000, *table.sizes))
    drawn = np.concatenate([noise.sum(axis).reshape(4000, -1) for axis in (3, 2, 1)], axis=1)
    size = np.maximum(exact, 5)
    assert errors["identity"] == pytest.approx(np.mean(np.abs(drawn) / size), rel=0.02)
    assert errors["optimum"] <= errors["identity"]


def test_figure_4_trades_error_for_time() -> None:
    figure_rows = rows("figure4")
    for workload in ("1D ranges", "2-way tables"):
        mine = [row for row in figure_rows if row["workload"] == workload]
        full = next(row["error"] for row in mine if row["method"] == "full")
        assert {row["method"] for row in mine} == {"full", "separation", "principal"}
        assert all(full * (1 - 1e-3) <= row["error"] for row in mine)
        errors = [row["error"] for row in mine if row["method"] == "principal"]
        assert errors[-1] <= errors[0] * 1.001 and all(row["seconds"] >= 0 for row in mine)


def test_figure_5_eigenvectors_do_not_mind_the_order_of_cells() -> None:
    plain, permuted, tables, tables_permuted = (row["errors"] for row in rows("figure5"))
    assert permuted["eigen"] == pytest.approx(plain["eigen"], rel=2e-3)
    for name in ("wavelet", "Fourier"):
        assert permuted[name] > 1.1 * plain[name] >= plain["eigen"]
        assert tables[name] >= 1 - 1e-9 and tables_permuted[name] >= tables["eigen"] * 0.999


@pytest.mark.parametrize("make", [linear.haar_basis, linear.fourier_basis])
@pytest.mark.parametrize("size", [1, 2, 8])
def test_design_queries_are_orthonormal(make, size) -> None:  # type: ignore[no-untyped-def]
    basis = make(size)
    assert basis.shape == (size, size) and np.allclose(basis @ basis.T, np.eye(size))


@pytest.mark.parametrize("sizes", [{"cells": 48}, {"cells": 16}, {"large": 1 << 14}])
def test_sizes(sizes: dict[str, int], refused: Refused) -> None:
    refused(lambda: Study(**sizes).check())
    assert STUDY.check() == STUDY


def test_words() -> None:
    page = linear.words(rows("example4") + rows("figure4")[:1])
    assert "gaussian 1.636" in page and "full 128" in page


@pytest.mark.parametrize(
    ("cells", "attributes", "expected"),
    [(2048, 3, (8, 16, 16)), (2048, 1, (2048,)), (32, 5, (2,) * 5), (64, 4, (2, 2, 4, 4))],
)
def test_split(cells: int, attributes: int, expected: tuple[int, ...]) -> None:
    assert shapes.split(cells, attributes) == expected


@pytest.mark.parametrize(("cells", "attributes"), [(48, 2), (8, 4)])
def test_sizes_that_cannot_be_shared(cells: int, attributes: int, refused: Refused) -> None:
    refused(shapes.split, cells, attributes)


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
