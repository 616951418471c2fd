"""Types against a schema: what can give no record is refused, and nothing else is."""

import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.accounting.fields import FieldType
from dpstream.dp_transforms.ingest import columns
from dpstream.pipelines.connectors.files import types
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.project.sections import TimeColumn
from tests.golden.refusals import Refused

MakeJob = Callable[..., Job]
#: An array of each type with values that are usable, if any of the type is.
ARRAYS = {
    "string": pa.array(["7", "true"]),
    "large_string": pa.array(["7", "true"], pa.large_string()),
    "string_view": pa.array(["7", "true"], pa.string_view()),
    "binary": pa.array([b"7", b"8"]),
    "fixed": pa.array([b"77", b"88"], pa.binary(2)),
    "int8": pa.array([7, 8], pa.int8()),
    "uint64": pa.array([7, 8], pa.uint64()),
    "double": pa.array([7.0, 8.0]),
    "decimal": pa.array([7, 8]).cast(pa.decimal128(20)),
    "bool": pa.array([True, False]),
    "date": pa.array([19_000, 19_001], pa.date32()),
    "timestamp": pa.array([7, 8], pa.timestamp("us")),
    "time": pa.array([7, 8], pa.time64("us")),
    "list": pa.array([[7], [8]]),
    "struct": pa.array([{"a": 7}, {"a": 8}]),
    "null": pa.nulls(2),
}


def fits(role: types._Role, array: pa.Array) -> bool:
    return role.fits(columns.value_type(array.type))


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("declared", ["string", "int", "bool", "bytes"])
def test_identities_are_refused_where_no_row_would_be_one(
    make_job: MakeJob, declared: FieldType, name: str
) -> None:
    """Held against the ingest itself."""
    job, array = make_job("parquet"), ARRAYS[name]
    unit = msgspec.structs.replace(job.plan.unit, type=declared)
    role = types._identity("table.unit_column", None, unit, job)
    usable = bool(columns.identity(array, declared)[1].any())
    assert fits(role, array) is (usable and name != "double")  # two floats can be equal and differ
    if not pa.types.is_nested(array.type):
        assert fits(role, array.dictionary_encode()) is fits(role, array)
    if not fits(role, array):
        proposal = re.search('type = "(.+)"', role.fix(array.type))
        none = ("double", "date", "timestamp", "time", "list", "struct", "null")
        assert (proposal is None) is (name in none)
        if proposal is not None and proposal[1] != declared:  # what is proposed is usable
            assert columns.identity(array, proposal[1])[1].all()


@pytest.mark.parametrize("name", ARRAYS)
def test_times_and_numbers(make_job: MakeJob, name: str) -> None:
    job, array = make_job("parquet"), ARRAYS[name]
    number, time = types._number("c", job), types._time("table.time_column", "c", None, job)
    text = name in ("string", "large_string", "string_view")
    usable = bool(columns.measure(array)[1].any())
    assert fits(number, array) is (usable and not text)
    usable = bool(columns.instant(array)[1].any())
    integral = pa.types.is_integer(array.type)
    assert fits(time, array) is (text or (usable and not integral))
    counted = types._time("table.time_column", "c", TimeColumn("c", unit="s"), job)
    assert fits(counted, array) is (text or integral or pa.types.is_floating(array.type))
    for role in (number, time):
        assert fits(role, array) or len(role.fix(array.type)) > 10


def write(job: Job, name: str, **types_: pa.DataType) -> None:
    at = pa.array([1_704_067_200_000_000], pa.timestamp("us", "UTC"))
    given = {"user": ["u"], "key": ["k"], "time": at, "value": [1.0]}
    columns_ = {column: pa.array(values) for column, values in given.items()}
    for column, kind in types_.items():
        columns_[column] = columns_[column].cast(kind)
    pq.write_table(pa.table(columns_), job.path.parent / "in" / name)


def test_every_file_is_looked_at(make_job: MakeJob, refused: Refused) -> None:
    job = make_job("parquet")
    write(job, "a.parquet")
    types.check_types(job)
    write(job, "b.parquet", value=pa.string())
    refused(types.check_types, job)


def test_the_same_column_twice_and_ids_as_text_are_refused(
    make_job: MakeJob, refused: Refused
) -> None:
    job = make_job("parquet")
    write(job, "a.parquet")
    table = pq.read_table(job.path.parent / "in" / "a.parquet")
    raw = pa.array([bytes(16)] * len(table), pa.binary(16))
    for other in (
        pa.table([*table.columns, table["user"]], [*table.column_names, "user"]),
        table.set_column(0, "user", pa.ExtensionArray.from_storage(pa.uuid(), raw)),
    ):
        pq.write_table(other, job.path.parent / "in" / "a.parquet")
        refused(types.check_types, job)


def test_one_file_that_is_none_among_others(make_job: MakeJob, refused: Refused) -> None:
    job = make_job("parquet")
    (job.path.parent / "in" / "b.parquet").write_bytes(b"")
    refused(types.check_types, job)
    write(job, "a.parquet")
    (job.path.parent / "in" / "b.parquet").write_bytes(b"PAR1 no file PAR1")
    refused(types.check_types, job)


def test_one_csv_without_header(make_job: MakeJob, refused: Refused) -> None:
    job = make_job("csv")
    folder = job.path.parent / "in"
    (folder / "a.csv").write_bytes(b"")
    refused(types.check_types, job)
    (folder / "b.csv").write_text("user,key,time,value\n")
    types.check_types(job)  # no row of a file without a byte is lost
    (folder / "c.csv").write_bytes(b"\xff\xfe\0\n")
    refused(types.check_types, job)


def test_what_a_query_reads_is_its_own_business(make_job: MakeJob) -> None:
    from dpstream.pipelines.project.source import Query

    job = make_job("parquet")
    write(job, "a.parquet", value=pa.string(), key=pa.binary())
    source = msgspec.structs.replace(job.source, query=Query(columns={"value": "VARCHAR"}))
    types.check_types(msgspec.structs.replace(job, source=source))


def test_names_are_quoted(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job("parquet")
    role = types._time("table.time_column", 'a "b', None, job)
    assert 'column = "a \\"b"' in role.fix(pa.int64())
    assert str(tmp_path) not in role.fix(pa.int64())
