"""Estimates as arrays; those of tables are in test_tables."""

import numpy as np
import pytest

from dpstream.pipelines.workload.estimate import Estimate
from dpstream.pipelines.workload.release import of_arrays, to_arrays


def test_cells() -> None:
    given = Estimate(np.ones((2, 6)), np.ones(2), (np.eye(2), np.eye(3)), 2.5, (1,))
    estimate = of_arrays(to_arrays(given))
    assert isinstance(estimate, Estimate) and (estimate.half_width, estimate.summed) == (2.5, (1,))
    assert [len(factor) for factor in estimate.mix] == [2, 3] and np.array_equal(
        estimate.cells, given[0]
    )
    with pytest.raises(KeyError):
        of_arrays({"cells": np.ones(1)})
