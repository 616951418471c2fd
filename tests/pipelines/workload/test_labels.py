"""What answers are of, in words."""

import numpy as np

from dpstream.accounting.workloads.attributes import explicit, of_values
from dpstream.accounting.workloads.workload import over, workload_of
from dpstream.pipelines.workload.release import labelled
from tests.pipelines.workload.survey import workload


def test_in_the_order_of_the_answers() -> None:
    query_set = workload()
    columns = {name: column.to_pylist() for name, column in labelled(query_set).items()}
    assert list(columns) == ["product", "age", "sex"]
    assert {len(column) for column in columns.values()} == {query_set.queries}
    rows = list(zip(*columns.values(), strict=True))
    assert rows[:3] == [(0, "[0, 10)", "f"), (0, "[0, 10)", "m"), (0, "[0, 20)", "f")]
    assert (0, "[40, 65.5)", "m") in rows and rows[-1] == (2, "all", "all")
    assert rows[-2] == (1, "[0, 80)", "all")


def test_values_matrices_and_names_that_are_taken() -> None:
    attribute = of_values("value", ["x", "y", "z"])
    queries = [(1.0, {0: explicit(np.eye(3)[:2], 3)})]
    columns = labelled(workload_of([attribute], queries))
    assert columns["value_"].to_pylist() == ["row 0", "row 1"]
    texts = labelled(over([3], ["prefix"]))["0"].to_pylist()
    assert texts == ["0", "0 .. 1", "0 .. 2"]
