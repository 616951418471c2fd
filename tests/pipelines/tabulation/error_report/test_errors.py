"""Sums and histograms of errors against numpy's; sizes as production names them."""

import numpy as np
import pytest

from dpstream.pipelines.tabulation.error_report.errors import Errors, interval, size_of


def test_errors_of_many_parts_are_those_of_all() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.integers(-spread, spread + 1, (n, 3)) for spread, n in ((5, 7), (90, 40), (0, 1))]
    errors = Errors()
    for part in parts:
        errors.add(part, len(part))
    every = np.concatenate([part.reshape(-1) for part in parts])
    assert (errors.figures, errors.groups) == (len(every), 48)
    assert errors.bias == pytest.approx(every.mean())
    assert errors.rmse == pytest.approx(np.sqrt((every**2).mean()))
    for chance in (0.0, 0.3, 0.95, 1.0):
        assert errors.quantile(chance) == pytest.approx(np.quantile(np.abs(every), chance))
    for margin in (0, 5, 1000):
        assert errors.within(margin) == pytest.approx((np.abs(every) <= margin).mean())


def test_sizes() -> None:
    sizes = size_of(np.array([0, 1, 2, 10, 11, 100, 101, 331_000_000]))
    assert sizes.tolist() == [0, 0, 1, 1, 2, 2, 3, 9]
    assert [interval(power) for power in (0, 1, 3)] == [
        "[0.0, 1.0]", "(1.0, 10.0]", "(100.0, 1000.0]",
    ]  # fmt: skip
