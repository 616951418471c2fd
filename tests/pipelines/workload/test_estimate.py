"""Answers and standard errors of estimates, of cells and of tables, against matrices."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import nnls

from dpstream.accounting.arrays import Float64, kron
from dpstream.accounting.budget.allocation import StreamNoise, encoder_of
from dpstream.accounting.limits import MIXED_BITS
from dpstream.accounting.strategies.cells.auto import auto
from dpstream.accounting.strategies.cells.bases import Even, difference_matrix, reduced
from dpstream.accounting.strategies.cells.mixing import mixed
from dpstream.accounting.strategies.cells.optimum import optimum
from dpstream.accounting.workloads.workload import Workload, from_dict, over
from dpstream.dp_transforms.noise.continuous import ContinuousGaussian
from dpstream.dp_transforms.noise.mixing import MixedNoise
from dpstream.dp_transforms.noise.paths import NoiseStream
from dpstream.pipelines.workload import estimate
from dpstream.pipelines.workload.estimate import (
    Estimate,
    TableEstimate,
    covariance,
    nonnegative,
    norms,
    values,
)
from dpstream.pipelines.workload.release import of_arrays, to_arrays
from tests.golden.pinned import check, of_refusals
from tests.pipelines.workload.survey import workload
from tests.streams import KEYS


def matrix(query_set: Workload) -> Float64:
    """W, one product below the other."""
    return np.concatenate(
        [kron([f.dense() for f in query_set.factors_of(p)]) for p in query_set.products]
    )


def mixes(query_set: Workload) -> list[tuple[Float64, ...]]:
    rng = np.random.default_rng(query_set.cells)
    each = tuple(rng.normal(size=(n, n)) for n in query_set.sizes)
    return [each, (rng.normal(size=(query_set.cells, query_set.cells)),)]


@pytest.mark.parametrize(
    "query_set", [workload(), over([9], ["range"]), over([3, 2, 4], ["range"] * 3)]
)
def test_against_matrices(query_set: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, rng = matrix(query_set), np.random.default_rng(1)
    x = rng.integers(-9, 99, query_set.cells).astype(np.float64)
    assert np.array_equal(values(query_set, x), rows @ x)
    for mix in mixes(query_set):
        mix_matrix = mix[0] if len(mix) == 1 else kron(list(mix))
        expected = rows @ mix_matrix @ mix_matrix.T @ rows.T
        assert np.allclose(covariance(query_set, mix), expected)
        for at_once in (1 << 24, 100):
            monkeypatch.setattr(estimate, "_AT_ONCE", at_once)
            assert np.allclose(norms(query_set, mix) ** 2, np.diag(expected))


def test_many_cells_take_little_time() -> None:
    """A million cells, each with its own error: no matrix of cells by cells."""
    query_set = over([100, 100, 100], ["prefix", "prefix", "total"])
    mix = [np.triu(np.ones((100, 100))) for _ in range(3)]
    row_norms = norms(query_set, mix)
    assert row_norms.shape == (10_000,) and (row_norms > 0).all()


def test_measured_errors_are_those_of_the_formula() -> None:
    """500 draws of the engine's own mixed noise, all queries of a small table together."""
    query_set = over([16, 12], ["range", "identity"])
    mixing = mixed(auto(query_set).strategy, query_set.sizes)
    once = encoder_of("dense", 1)
    noise = StreamNoise("n", once, once.strategy.col2, 1.0, 1.0, 3.0)
    sd = norms(query_set, mixing.factors) * noise.sd[0]
    ring, total = KEYS.ring(), 0.0
    for run in range(500):
        stream = NoiseStream(
            ring, (b"%d" % run,), (0, 1), "value", noise, ContinuousGaussian(noise.sigma)
        )
        drawn = MixedNoise(stream, mixing).at(1) / 2.0**MIXED_BITS
        total += float(np.sum(values(query_set, drawn) ** 2))
    assert total / 500 == pytest.approx(float(np.sum(sd**2)), rel=0.02)


SIZES = (3, 4, 1, 2)
X = np.random.default_rng(8).integers(0, 20, SIZES)


def workload_of(queries: list[dict[str, Any]]) -> Workload:
    domain = [{"name": str(k), "size": n} for k, n in enumerate(SIZES)]
    return from_dict({"domain": domain, "queries": queries})


def table_estimate(ways: int = 2) -> TableEstimate:
    keys = [k for w in range(ways + 1) for k in itertools.combinations((0, 1, 3), w)]
    reduced_tables = []
    for key in keys:
        table = X.sum(axis=tuple(a for a in range(4) if a not in key))
        reduced_tables.append(reduced(table, [Even(SIZES[a]) for a in key]).astype(np.float64))
    return TableEstimate(
        tuple(map(Even, SIZES)), tuple(keys), np.arange(1.0, len(keys) + 1), tuple(reduced_tables)
    )


WORKLOAD = workload_of(
    [{"ways": 2}, {"factors": {"0": "prefix", "3": "identity"}}, {"factors": {}},
     {"factors": {"1": "range", "2": "identity"}}]
)  # fmt: skip


def test_without_noise_tables_are_exact() -> None:
    [answers] = table_estimate().answers(WORKLOAD)
    assert (
        np.allclose(answers.estimates, values(WORKLOAD, X.ravel().astype(np.float64)))
        and answers.displayed is answers.estimates
    )


def test_variances_against_matrices() -> None:
    """Of W (sum over R of spread Sub^+) with noise of covariance s_R^2 Sub Sub^T."""
    held = table_estimate()
    [answers] = held.answers(WORKLOAD)
    rows = matrix(WORKLOAD)
    total = np.zeros(len(rows))
    for key, sd in zip(held.keys, held.sds, strict=True):
        inverses = [
            np.linalg.pinv(difference_matrix(n)) if a in key else np.full((n, 1), 1 / n)
            for a, n in enumerate(SIZES)
        ]
        each = [np.asarray(inverse, np.float64) for inverse in inverses]
        grams = [difference_matrix(SIZES[a]) @ difference_matrix(SIZES[a]).T for a in key]
        root = [np.asarray(np.linalg.cholesky(gram), np.float64) for gram in grams]
        noise = rows @ kron(each) @ (kron(root) if root else np.ones((1, 1)))
        total += sd**2 * (noise**2).sum(1)
    assert np.allclose(answers.sd**2, total)


def test_tables_as_arrays() -> None:
    again = of_arrays(to_arrays(table_estimate()))
    assert isinstance(again, TableEstimate) and again.keys == table_estimate().keys
    for one, other in zip(again.measured, table_estimate().measured, strict=True):
        assert np.array_equal(one, other)
    [answers] = again.answers(WORKLOAD)
    [expected] = table_estimate().answers(WORKLOAD)
    assert np.array_equal(answers.sd, expected.sd)


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    many = over([200], ["range"])
    calls: dict[str, Callable[[], object]] = {
        "a covariance of many": lambda: covariance(many, [np.eye(200)]),
        "a table that was not measured": lambda: list(table_estimate(1).answers(WORKLOAD)),
        "cells of tables": lambda: list(table_estimate().answers(WORKLOAD, consistent=True)),
        "a covariance of tables": lambda: table_estimate().covariance(WORKLOAD),
        "a search without end": lambda: nonnegative(np.array([-1.0, 1.0]), [np.eye(2)]),
    }
    monkeypatch.setattr(estimate, "slope", lambda x, gradient: 1e300)
    check(Path(__file__).with_name("refusals_estimate.txt"), of_refusals(calls))


def test_least_squares_as_an_independent_solver_finds_it() -> None:
    """Lawson and Hanson's active sets on A x = A y, A = L^-1."""
    rng = np.random.default_rng(3)
    for sizes in ([32], [6, 5]):
        mix = mixed(optimum(over(sizes, ["range"] * len(sizes))).strategy, tuple(sizes)).factors
        mix_matrix = mix[0] if len(mix) == 1 else np.kron(*mix)
        cells = rng.poisson(0.7, len(mix_matrix)) + mix_matrix @ rng.normal(size=len(mix_matrix))
        assert (cells < 0).sum() > 3
        inverse = np.linalg.inv(mix_matrix)
        expected, _ = nnls(inverse, inverse @ cells)
        nearest = nonnegative(cells, mix)
        assert nearest.min() >= 0 and np.allclose(nearest, expected, atol=1e-4)
        clipped = np.maximum(cells, 0)
        assert np.linalg.norm(inverse @ (nearest - cells)) < np.linalg.norm(
            inverse @ (clipped - cells)
        )


def test_what_is_not_negative_stays() -> None:
    cells = np.array([0.0, 1.0, 2.5])
    assert nonnegative(cells, [np.eye(3) * 2]) is cells
    assert np.array_equal(nonnegative(-cells, [np.eye(3)]), np.zeros(3))


def test_totals_are_better_than_clipped_ones() -> None:
    """Of many empty cells clipping keeps the positive half of the noise."""
    rng = np.random.default_rng(5)
    mix = mixed(optimum(over([64], ["range"])).strategy, (64,)).factors
    clipped, nonnegative_errors = [], []
    for _ in range(40):
        cells = 30.0 * (np.arange(64) == 7) + mix[0] @ rng.normal(size=64)
        clipped.append(np.maximum(cells, 0).sum() - 30)
        nonnegative_errors.append(nonnegative(cells, mix).sum() - 30)
    assert np.mean(np.square(nonnegative_errors)) < 0.5 * np.mean(np.square(clipped))


def test_cells_as_arrays() -> None:
    given = Estimate(np.ones((2, 6)), np.ones(2), (np.eye(2), np.eye(3)), 2.5, (1,))
    again = of_arrays(to_arrays(given))
    assert isinstance(again, Estimate) and (again.half_width, again.summed) == (2.5, (1,))
    assert [len(factor) for factor in again.mix] == [2, 3]
    assert np.array_equal(again.cells, given[0])
    with pytest.raises(KeyError):
        of_arrays({"cells": np.ones(1)})
