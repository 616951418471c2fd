"""The comparison beside a plan: exact where structure gives it, absent with a reason elsewhere."""

import numpy as np
import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.accounting.strategies.cells import fixed
from dpstream.accounting.strategies.cells import named as module
from dpstream.accounting.strategies.cells.named import STRATEGIES, comparison, largest, named
from dpstream.accounting.workloads.attributes import of_size
from dpstream.accounting.workloads.factors import explicit, interval
from dpstream.accounting.workloads.workload import Workload, marginals, over, workload_of
from tests.accounting.strategies.cells.shapes import attributes, rows, small


def large() -> dict[str, Workload]:
    """Workloads of more cells than one matrix is made for."""
    return {
        "2-way ranges of 20 x 10": marginals(attributes(*[10] * 20), [2], "range"),
        "2-way prefixes of 20 x 10": marginals(attributes(*[10] * 20), [2], "prefix"),
        "ranges of 3 x 100": over([100] * 3, ["range"] * 3),
        "2-way ranges of 5 x 100": marginals(attributes(*[100] * 5), [2], "range"),
        "tables of 30 x 10": marginals(attributes(*[10] * 30), [2]),
    }


@pytest.mark.parametrize("name", large())
def test_a_comparison_of_a_large_domain(name: str) -> None:
    workload = large()[name]
    errors, absent = comparison(workload)
    assert {"gaussian", "identity", "haar", "hierarchical", "fourier"} <= set(errors)
    assert not set(errors) & set(absent) and all(absent.values())
    assert {"gaussian", *fixed.BY_NAME, "eigen"} == set(errors) | set(absent)
    # Noise on each query by itself: the middle cell is in most ranges, the first in all prefixes.
    queries, products = workload.queries, len(workload.products)
    most = {"2-way ranges of 20 x 10": 30**2, "2-way prefixes of 20 x 10": 10**2,
            "ranges of 3 x 100": 2550**3, "2-way ranges of 5 x 100": 2550**2,
            "tables of 30 x 10": 1}[name]  # fmt: skip
    assert errors["gaussian"] == pytest.approx(float(queries) * products * most)


@pytest.mark.parametrize("name", small())
def test_every_strategy_of_a_small_domain(name: str) -> None:
    workload = small()[name]
    queries = rows(workload)
    errors, absent = comparison(workload)
    assert "identity" in errors and not set(errors) & set(absent)
    assert errors["identity"] == pytest.approx((queries**2).sum())
    assert comparison(workload, worst=True).errors["identity"] == pytest.approx(
        (queries**2).sum(1).max()
    )


def test_the_largest_column_of_factors_that_peak_at_different_cells() -> None:
    """Prefixes are largest at the first cell, suffixes at the last: neither is where the sum is."""
    rng = np.random.default_rng(5)
    for sizes in ([5, 4], [6, 3, 2], [9]):
        domain = [of_size(str(axis), size) for axis, size in enumerate(sizes)]
        products = [
            (1.0, {axis: interval("prefix", size) for axis, size in enumerate(sizes)}),
            (1.0, {axis: explicit(np.tri(size)[::-1].T + 0.0, size)
                   for axis, size in enumerate(sizes)}),
            (1.0, {0: explicit(rng.integers(0, 3, (4, sizes[0])) + np.eye(4, sizes[0]), sizes[0])}),
        ]  # fmt: skip
        workload = workload_of(domain, products)
        dense = (rows(workload) ** 2).sum(0).max()
        assert fixed.column_norm2(workload) == pytest.approx(dense)


def test_a_strategy_that_is_asked_for_is_refused_where_it_cannot_be_made() -> None:
    workload = large()["2-way ranges of 20 x 10"]
    for name in ("workload", "optimum", "eigen"):
        with pytest.raises(PolicyError):
            named(workload, name)
    assert named(over([100] * 3, ["range"] * 3), "optimum").sensitivity2 > 0
    assert set(STRATEGIES) > set(fixed.BY_NAME)


def test_a_comparison_never_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> float:
        raise MemoryError

    monkeypatch.setattr(module, "_error", failing)
    errors, absent = comparison(small()["ranges"])
    assert not errors and set(absent) == {"gaussian", *fixed.BY_NAME, "eigen"}


def test_the_largest_variance_without_a_list_of_queries() -> None:
    workload = over([100] * 3, ["range"] * 3)  # 128,787,625,000 queries
    assert largest(workload, fixed.identity(workload)) == pytest.approx(100.0**3)
    with pytest.raises(PolicyError):
        largest(workload, fixed.fourier(workload))
