"""Files that say what was meant: a check for the owner of the data, before anybody asks.

A question reads malformed files too, for an error would tell of the rows: what does not fit is
NULL, or its row is dropped.  But a quote of CSV that is never closed takes what follows it into
one field, and a dropped row is missing in every answer.  Only the owner is told, and no value.
"""

import codecs
import zlib
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.accounting.errors import RunError
from dpstream.pipelines.formats.parquet import coded_batches
from dpstream.pipelines.tables.catalog import Catalog, Table
from dpstream.pipelines.tables.engine import Engine, MemoryLimitError
from dpstream.pipelines.tables.files import columns_of, view
from dpstream.pipelines.tables.inputs import FILES, files_of
from dpstream.pipelines.tables.text_files import bad_lines, unpacked

_BLOCK = 1 << 22
_QUOTE = ord('"')
#: What may stand before a quote that opens a field and after one that closes it.
_BESIDE = np.frombuffer(b',\r\n"', np.uint8)


def check_files(catalog: Catalog, table: Table) -> None:
    """Refuse a table with a malformed file; a database's has none.

    Raises:
        RunError: a file is malformed; says the table and the rule, and no value.
    """
    if table.kind not in FILES:
        return
    fault = _parquet(table) if table.kind == "parquet" else _text(table)
    if fault is None and table.kind != "parquet":
        fault = _rows(catalog, table)
    if fault is not None:
        raise RunError(
            f"table {table.name}", f"has a malformed file: {fault}", "write the file anew"
        )


def _parquet(table: Table) -> str | None:
    """Texts are UTF-8: a reader of Parquet takes that for granted."""
    try:
        for path in files_of(table):
            names = [name for name in columns_of(table, path) if name.lower() in table.columns]
            for group in range(pq.read_metadata(path).num_row_groups):
                with coded_batches(path, names, group) as (_, batches):
                    for batch in batches:
                        batch.validate(full=True)
    except MemoryError:
        raise
    except (OSError, pa.ArrowException, UnicodeError):
        return "a text is not UTF-8, or a page cannot be read"
    return None


def _text(table: Table) -> str | None:
    """Every byte of CSV and JSON Lines."""
    try:
        for path in files_of(table):
            with unpacked(path) as file:
                if not _closed(file, table.kind == "csv"):
                    return "a field of CSV has a quote that is not closed, or not doubled"
    except UnicodeError:
        return "a text is not UTF-8"
    except (OSError, EOFError, zlib.error):
        return "it cannot be read or unpacked"
    return None


def _closed(file: BinaryIO, quoted: bool) -> bool:
    """Whether quotes are where RFC 4180 has them; the rest of a block is kept for the next.

    Raises:
        UnicodeError: it is not UTF-8.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    before, left, inside, block = b"\n", b"", 0, b" "
    first = True
    while block:
        block = file.read(_BLOCK)
        decoder.decode(block, final=not block)
        if not quoted:
            continue
        if first:
            first, block = False, block.removeprefix(codecs.BOM_UTF8) or block[:0]
        data = np.frombuffer(before + left + (block or b"\n"), np.uint8)
        at = 1 + np.flatnonzero(data[1:-1] == _QUOTE)
        closing = (np.arange(len(at)) + inside) % 2
        if not np.isin(data[at + 2 * closing - 1], _BESIDE).all():
            return False
        inside = (inside + len(at)) % 2
        before, left = data[-2:-1].tobytes(), data[-1:].tobytes()
    return not inside


def _rows(catalog: Catalog, table: Table) -> str | None:
    """Rows that a question would drop."""
    with Engine(catalog, [table.name]) as engine:
        try:
            if table.kind == "csv":
                engine.run(f"SELECT COUNT(*) AS n FROM ({view(table, None, strict=True)})")
            elif engine.run(bad_lines(table))["bad"][0].as_py():
                return "a line is no JSON object"
        except MemoryLimitError:
            raise
        except RunError:
            return "a row is too short or too long"
    return None
