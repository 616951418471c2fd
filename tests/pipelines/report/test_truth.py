"""Errors by the true size of a key (from real records in test_data)."""

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.report.truth import Decade, _decades, _median, _summed


def test_keys_are_grouped_by_decades(make_job: Callable[..., Job]) -> None:
    table = pa.table({
        "_n": [0, 1, 9, 10, 99, 100], "_released": [True, True, False, True, True, False],
        "records": [5.0, 2.0, 1.0, 4.0, 6.0, None], "total": [1.0] * 5 + [None],
    })  # fmt: skip
    decades = _decades(make_job().plan, table)
    assert [one[:4] for one in decades] == [
        (0, 0, 1, 1),
        (1, 9, 2, 1),
        (10, 99, 2, 2),
        (100, 999, 1, 0),
    ]
    assert [one.errors["records"] for one in decades] == [5.0, 2.0, 5.0, None]
    assert isinstance(decades[0], Decade)


def test_a_median_of_what_is_known() -> None:
    assert _median(np.array([1.0, np.nan, 3.0])) == 2.0
    assert _median(np.array([np.nan])) is None


def test_partial_sums_add_up() -> None:
    part = pa.table({"window": [0, 1, 0], "_n": [1, 2, 3]})
    sums = _summed(part, ["window"], part.schema).sort_by("window")
    assert sums.to_pydict() == {"window": [0, 1], "_n": [4, 2]}
