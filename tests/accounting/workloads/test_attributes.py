"""Attributes: cells of values, refusals, and bytes that tell them apart; factors, written out."""

from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.limits import MAX_ATTRIBUTE_CELLS
from dpstream.accounting.workloads import attributes as module
from dpstream.accounting.workloads.attributes import (
    Factor,
    domain_of,
    explicit,
    interval,
    of_edges,
    of_size,
    of_values,
)
from tests.accounting.strategies.cells.shapes import listed


def test_bins_are_half_open() -> None:
    age = of_edges("age", [0, 18, 65.5])
    assert age.size == 2
    assert age.cells([-1, 0, 17.9, 18, 65, 65.5, float("nan")]).tolist() == [-1, 0, 0, 1, 1, -1, -1]


def test_values_keep_their_order() -> None:
    state = of_values("state", ["NY", "CA", "TX"])
    assert state.cells(["TX", "NY", "WA", "CA", ""]).tolist() == [2, 0, -1, 1, -1]
    assert of_values("code", [7, -3]).cells([-3, 7, 0]).tolist() == [1, 0, -1]
    assert of_size("n", 3).cells([0, 2, 3, -1]).tolist() == [0, 2, -1, -1]


@pytest.mark.parametrize(
    "make",
    [
        lambda: of_values("a", []),
        lambda: of_values("a", ["x", "y", "x"]),
        lambda: of_values("a", ["x", 1]),
        lambda: of_values("a", [1, True]),
        lambda: of_values("a", [1.0, 2.0]),
        lambda: of_values("a", [None]),
        lambda: of_values("a", range(MAX_ATTRIBUTE_CELLS + 1)),
        lambda: of_edges("a", [1]),
        lambda: of_edges("a", [1, 1]),
        lambda: of_edges("a", [2, 1]),
        lambda: of_edges("a", [0, float("nan")]),
        lambda: of_edges("a", [0, float("inf")]),
        lambda: of_edges("a", [0, "secret"]),
        lambda: of_edges("a", [False, True]),
        lambda: of_size("a", 0),
        lambda: of_size("a", 2.0),  # type: ignore[arg-type]
        lambda: of_size("a", MAX_ATTRIBUTE_CELLS + 1),
        lambda: domain_of([]),
        lambda: domain_of([of_size("a", 2)] * 2),
        lambda: domain_of([of_size(str(k), 2) for k in range(101)]),
    ],
)
def test_refusals_name_the_rule_and_no_value(make: Callable[[], object]) -> None:
    with pytest.raises(UsageError) as caught:
        make()
    assert caught.value.field.startswith("domain") and caught.value.fix
    assert "secret" not in str(caught.value)


def test_equal_bytes_are_equal_attributes() -> None:
    different = [
        of_values("a", ["1", "2"]),
        of_values("a", [1, 2]),
        of_values("a", [12]),
        of_edges("a", [1, 2]),
        of_values("a", ["12"]),
        of_values("a1", ["2"]),
        of_values("a", ["2", "1"]),
        of_size("a", 2),
    ]
    assert len({attribute.canonical() for attribute in different}) == len(different)
    assert of_size("a", 2).canonical() == of_values("a", [0, 1]).canonical()


KINDS = [
    (k, n, w, r)
    for n in (1, 2, 5, 8)
    for r in (False, True)
    for k, w in [
        ("identity", 0),
        ("total", 0),
        ("prefix", 0),
        ("range", 0),
        ("width", max(1, n // 2)),
    ]
]


def factors() -> list[Factor]:
    rng = np.random.default_rng(1)
    matrices = [explicit(rng.normal(size=(4, 5)), 5, r) for r in (False, True)]
    return [interval(k, n, w, r) for k, n, w, r in KINDS] + matrices


@pytest.mark.parametrize("factor", factors(), ids=lambda f: f"{f.kind}-{f.size}-{f.relative}")
def test_implicit_equals_written_out(factor: Factor) -> None:
    rows = np.array(listed(factor))
    rng = np.random.default_rng(2)
    x, root = rng.normal(size=(3, factor.size, 2)), rng.normal(size=(factor.size,) * 2)
    covariance = root @ root.T
    assert factor.rows == len(rows)
    np.testing.assert_allclose(factor.dense(), rows, atol=1e-12)
    np.testing.assert_allclose(factor.gram(), rows.T @ rows, atol=1e-12)
    np.testing.assert_allclose(factor.apply(x, 1), np.einsum("qi,aib->aqb", rows, x), atol=1e-12)
    np.testing.assert_allclose(
        factor.variances(covariance), np.diag(rows @ covariance @ rows.T), atol=1e-10
    )
    along = rows.sum(1) ** 2 / factor.size
    np.testing.assert_allclose(factor.parts[0], along, atol=1e-12)
    np.testing.assert_allclose(factor.parts[1], (rows**2).sum(1) - along, atol=1e-12)
    gram = rows.T @ rows
    assert factor.reversible == np.allclose(gram, gram[::-1, ::-1], atol=1e-13)


def test_answers_in_integers_are_exact() -> None:
    x = np.full(6, 2**53 + 1)
    assert interval("range", 6).apply(x)[1] == 2 * (2**53 + 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: interval("ranges", 4),
        lambda: interval("width", 4),
        lambda: interval("width", 4, 5),
        lambda: interval("range", 4, 2),
        lambda: interval("width", 4, -1),
        lambda: explicit([], 2),
        lambda: explicit([[]], 2),
        lambda: explicit(np.zeros((0, 2)), 2),
        lambda: explicit([[1, 2, 3]], 2),
        lambda: explicit([[1, 2], [3]], 2),
        lambda: explicit([[0, 0], [1, 1]], 2),
        lambda: explicit([[1, float("nan")]], 2),
        lambda: explicit([[1, -float("inf")]], 2),
        lambda: explicit([[1e10, 1]], 2),
        lambda: explicit([["secret", 1]], 2),  # type: ignore[arg-type]
        lambda: explicit("secret", 2),
    ],
)
def test_refusals(make: Callable[[], object]) -> None:
    with pytest.raises(UsageError) as caught:
        make()
    assert caught.value.field.startswith("queries.factors") and "secret" not in str(caught.value)


def test_duplicate_negative_and_deficient_rows_are_taken_as_they_are() -> None:
    factor = explicit([[1, -1], [1, -1]], 2)
    np.testing.assert_array_equal(factor.gram(), [[2, -2], [-2, 2]])


def test_bytes_tell_factors_apart() -> None:
    many = [interval(k, n, w, r) for k, n, w, r in KINDS]
    many += [explicit([[1, 0]], 2), explicit([[0, 1]], 2), explicit([[1, 0], [0, 1]], 2)]
    assert len({factor.canonical() for factor in many}) == len(many)
    assert explicit([[0.0, 1]], 2).canonical() == explicit([[-0.0, 1]], 2).canonical()


@pytest.mark.parametrize("relative", [False, True])
def test_masses_of_ranges_are_counted_by_their_lengths(relative: bool) -> None:
    masses = interval("range", 50, relative=relative).masses
    with mock.patch.object(module, "_LISTED", 0):
        assert interval("range", 50, relative=relative).masses == pytest.approx(masses, rel=1e-12)
