"""The public key list: a set of typed rows, told by its digest; errors show a line's number.

Cells of records: by their own values, and by nothing else.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.fields import Field
from dpstream.accounting.workloads.attributes import of_edges, of_values
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.jobs.keys import (
    CellDomain,
    cell_key,
    domain_digest,
    public_key_digest,
    read_public_keys,
)
from tests.golden.refusals import Refused

FIELDS = (Field("city"), Field("zone", "int"))


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_the_digest_is_of_the_set_of_keys(tmp_path: Path) -> None:
    one = public_key_digest(written(tmp_path / "a.csv", "city,zone\nx,1\ny,2\n"), FIELDS)
    same = written(tmp_path / "b.csv", "\ufeffzone,more,city\n2,?,y\n1,?,x\n1,!,x\n")
    assert public_key_digest(same, FIELDS) == one
    other = public_key_digest(written(tmp_path / "c.csv", "city,zone\nx,1\ny,3\n"), FIELDS)
    text = public_key_digest(tmp_path / "a.csv", (Field("city"), Field("zone", "string")))
    assert len({one, other, text}) == 3


@pytest.mark.parametrize(
    "text",
    ["", "city\nx\n", "city,zone,city\nx,1,x\n", "city,zone\n", "city,zone\nx,01\n",
     "city,zone\nx,SECRET\n", "city,zone\nx,9223372036854775808\n", 'city,zone\n"x,1\n'],
)  # fmt: skip
def test_what_is_no_list(text: str, tmp_path: Path, refused: Refused) -> None:
    error = refused(lambda: public_key_digest(written(tmp_path / "keys.csv", text), FIELDS))
    assert error.field == "public_keys" and "SECRET" not in str(error)


def test_a_line_that_does_not_end_is_no_key(tmp_path: Path, refused: Refused) -> None:
    path = written(tmp_path / "keys.csv", "city,zone\nx,1\n")
    with open(path, "ab") as file:
        file.truncate(1 << 36)  # more than there is memory
    refused(public_key_digest, path, FIELDS)


def test_a_job_reads_the_list_that_it_was_planned_with(
    tmp_path: Path, make_job: Callable[..., Job], refused: Refused
) -> None:
    job, path = make_job(), written(tmp_path / "keys.csv", "key\nb\na\nb\n")
    refused(read_public_keys, job)
    plan = msgspec.structs.replace(job.plan, public_keys=public_key_digest(path, job.plan.key))
    job = msgspec.structs.replace(job, public_keys=str(path), plan=plan)
    assert read_public_keys(job).to_pydict() == {"key": ["a", "b"]}
    written(path, "key\na\n")
    refused(read_public_keys, job)


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


def test_a_key_of_other_columns_is_named_beside_the_attributes(refused: Refused) -> None:
    refused(lambda: cell_key((AGE, SEX), (Field("agge", "int"), Field("sex", "string"))))


def test_a_key_may_leave_out_attributes() -> None:
    """A job has few key columns, and a workload may have many attributes."""
    fields = cell_key((AGE, SEX), (Field("sex", "string"), Field("age", "int")))
    assert cell_key((AGE, SEX), (Field("sex", "string"),)) == fields


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
