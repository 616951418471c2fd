"""Trials of key selection: when a key first appears, and what the score of a design shows."""

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from dpstream.pipelines.audit.rows import Released
from dpstream.pipelines.audit.selection import Crossing, first_tests, visible_mu
from dpstream.pipelines.jobs.job import Job


def test_the_first_test_of_each_key_in_window_0_counts(make_job: Callable[..., Job]) -> None:
    plan = make_job().plan
    assert plan.design.select_every == 1
    key, window, trigger = (
        np.array([4, 4, 5, 7]), np.array([0, 0, 0, 1]), np.array([3, 2, 4, 1])
    )  # fmt: skip
    rows = Released(key, window, trigger, pa.table({}))
    tests = first_tests(plan, rows, np.array([2, 3]), 2, 3)
    # Key 5 passes after the last test that is told apart; key 7 in a window of no trial.
    assert tests.tolist() == [[1, 3], [3, 3]]


def test_ratios_are_logs_and_equal_sides_show_nothing() -> None:
    even = np.array([0.5, 0.3, 0.2])
    more = np.array([0.7, 0.2, 0.1])
    blind = Crossing(5, 1, even, even[None])
    seen = Crossing(5, 4, even, np.stack([more] * 4))
    assert not blind.ratios.any()
    assert np.allclose(np.exp(seen.ratios[0]), more / even)
    assert visible_mu(blind, 1) < 0.1 < 0.5 < visible_mu(seen, 1)
