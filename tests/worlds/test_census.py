"""Census files in other forms: all records are read, or they are refused before a charge.

Their columns are fixed and of text, and a record is its own unit: there are no types of ids.
"""

import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.formats.lines import BOM
from dpstream.pipelines.tabulation.private import LAYOUTS, lookup_of, read_records
from dpstream.pipelines.tabulation.public_files import GEOGRAPHY
from tests.pipelines.tabulation.office import Office, charges, executed, ledger_of, office
from tests.worlds.fixtures import zipped

RECORDS = LAYOUTS["p"].file
Form = Callable[[bytes], bytes]
#: The same rows.
FORMS: dict[str, Form] = {
    "plain": bytes,
    "crlf": lambda data: data.replace(b"\n", b"\r\n"),
    "mark": lambda data: BOM + data,
    "open end": lambda data: data.rstrip(b"\n"),
    "blank lines": lambda data: data.replace(b"\n", b"\n\n"),
    "all": lambda data: BOM + data.replace(b"\n", b"\r\n\r\n").rstrip(b"\r\n"),
}


def as_parquet(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.table({"line": data.splitlines()}), sink)
    return bytes(sink.getvalue())


#: What has no header that can be read.
DAMAGED: dict[str, Form] = {
    "empty": lambda data: b"",
    "cut": lambda data: data[:20],
    "semicolons": lambda data: data.replace(b"|", b";"),
    "quoted": lambda data: b'"' + data.replace(b"|", b'"|"').replace(b"\n", b'"\n"'),
    "no header": lambda data: data.partition(b"\n")[2],
    "utf-16": lambda data: data.decode().encode("utf-16"),
    "parquet": as_parquet,
    "gzip": gzip.compress,
    "xz": lzma.compress,
    "zip": zipped,
}


def rewritten(folder: Path, form: Form, *names: str) -> Office:
    """A small office with files of that name, by default all texts, in another form."""
    own = office(folder)
    for path in [own.path(name) for name in names] or [*folder.rglob("*.txt")]:
        path.write_bytes(form(path.read_bytes()))
    return own


def records_of(own: Office) -> list[bytes]:
    loaded = own.load()
    lookup = lookup_of(loaded.files, loaded.parameters)
    parts = list(read_records(own.path(RECORDS), lookup, None))
    leaves = [np.concatenate([part.leaf[table] for part in parts]) for table in parts[0].leaf]
    columns = [
        np.concatenate([getattr(part, name) for part in parts]) for name in ("block", "codes")
    ]
    return [column.tobytes() for column in (*columns, *leaves)]


def test_the_same_records_are_in_each_form(tmp_path: Path) -> None:
    read = {name: records_of(rewritten(tmp_path / name, form)) for name, form in FORMS.items()}
    assert all(records == read["plain"] for records in read.values())
    assert len(read["plain"][0]) == 300 * 4


@pytest.mark.parametrize("name", [RECORDS, GEOGRAPHY])
@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_refused_before_a_charge(name: str, damage: str, tmp_path: Path) -> None:
    own = rewritten(tmp_path / "office", DAMAGED[damage], name)
    with pytest.raises(UsageError) as error:
        executed(own, tmp_path / "out", ledger=ledger_of(tmp_path))
    assert error.value.field.startswith(name) and charges(tmp_path) == []
