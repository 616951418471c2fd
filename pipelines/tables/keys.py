"""Declared keys are unique: checked when a catalog is registered.

A row whose unit comes by a foreign key belongs to the unit of *the* row with that key.  Were two
rows to have one key, of two units, a row would have two owners, and removing one unit would move
rows of the other.  So uniqueness is part of the neighbour relation: data sets are neighbours if
keys are unique in both (removing a unit keeps them unique).  The answer, whether a key is unique,
is a fact about the data; it is told to whoever registers the catalog (`registration`), never to an
analyst.
"""

from collections.abc import Callable, Iterable

import pyarrow as pa

from dpstream.accounting.errors import PolicyError
from dpstream.pipelines.tables.catalog import Catalog


def check_keys(catalog: Catalog, read: Callable[[str], Iterable[pa.RecordBatch]]) -> None:
    """Check that no declared key is there twice among the rows of its table.

    Args:
        catalog: whose keys they are.
        read: the batches of a table, by its name in the catalog; asked once for each key, and
            only the key's columns are used.  Names of columns may differ in case.

    Raises:
        PolicyError: a key is not unique; names the table, never a key.
    """
    for table, columns in catalog.declared_keys:
        batches = [_columns(batch, columns) for batch in read(table)]
        if not batches:
            continue
        rows = pa.Table.from_batches(batches).drop_null()
        if rows.group_by(list(columns)).aggregate([]).num_rows < rows.num_rows:
            raise PolicyError(
                f"table {table}",
                f"has rows that share a key ({', '.join(columns)}), which is declared unique",
                "name a unique key in unit_via, or give the table a unit_column",
            )


def _columns(batch: pa.RecordBatch, columns: tuple[str, ...]) -> pa.RecordBatch:
    places = {name.lower(): place for place, name in enumerate(batch.schema.names)}
    return pa.RecordBatch.from_arrays([batch.column(places[c]) for c in columns], names=columns)
