"""Cells of records: by their own values, and by nothing else."""

import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.fields import Field
from dpstream.accounting.workloads.attributes import of_edges, of_values
from dpstream.pipelines.jobs.cells import CellDomain, domain_digest

AGE, SEX = of_edges("age", [0, 10, 20.5]), of_values("sex", ["f", "m", "é"])
LEVEL = of_values("cell", [7, -1, 3])


def domain(*attributes: object) -> CellDomain:
    types = {"age": "int", "sex": "string", "cell": "int"}
    key = tuple(Field(a.name, types[a.name]) for a in attributes)  # type: ignore
    return CellDomain(attributes, key)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "ages",
    [pa.array([0, 9.99, 10, 20.5, -0.1, None, float("nan"), 20.4, 5]),
     pa.array(["0", "9.99", "10", "20.5", "-0.1", None, "x", "20.4", "5"])],
    ids=["numbers", "text"],
)  # fmt: skip
def test_bins_and_values(ages: pa.Array) -> None:
    sex = pa.array(["f", "m", "e\u0301", "f", "f", "f", "f", "x", None])
    batch = pa.record_batch({"age": ages, "sex": sex}).replace_schema_metadata({b"k": b"v"})
    cells = domain(AGE, SEX).of(batch)
    assert cells.column("cell").to_pylist() == [0, 1, 5] + [None] * 6
    assert cells.schema.metadata == {b"k": b"v"} and cells.num_columns == 3


def test_a_column_that_is_called_so(tmp_path: object) -> None:
    batch = pa.record_batch({"cell": pa.array([3, 7, 8, None], pa.int32())})
    assert domain(LEVEL).of(batch).column("cell").to_pylist() == [2, 0, None, None]
    assert domain(LEVEL).of(batch.slice(4)).num_rows == 0


def test_every_cell_is_listed_once() -> None:
    table = domain(AGE, SEX, LEVEL).table
    assert np.array_equal(table.column("cell").to_numpy(), np.arange(18))


def test_digests_tell_domains_apart() -> None:
    others = [
        [AGE, SEX], [SEX, AGE], [AGE], [of_edges("age", [0, 10, 20])],
        [of_edges("Age", [0, 10, 20.5])], [of_values("age", [0, 10])],
        [of_values("age", ["0", "10"])], [of_values("age", ["01", "0"])],
    ]  # fmt: skip
    assert len({domain_digest(attributes) for attributes in others}) == len(others)
