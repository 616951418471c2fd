"""Creation, addition, replacement and deletion of a table's records, each as one new version.

Spent budget belongs to points, never to records: it stays, whatever happens to records.

* ``init`` and ``add``: of records with one id the first counts, in the order of the files' names
  and of their rows, and a record whose id the table has is refused: use ``replace`` for it.
* ``replace``: a record replaces the one with its id, even if it cannot be used itself (a person who
  withdraws the budget is not asked about any more); one whose id the table does not have is
  refused.
* ``delete``: records whose ids are named are removed; ids that the table does not have are refused.

Refused records are in the dead letter, by file and row.  How many were refused depends on the
records: it is shown only to the operator who loads them.

**Neighbours.**  That ids are unique is part of the neighbour relation: tables are neighbours if one
has one record more, of an id of its own.  An id is a MAC under a key of the table, so that names of
records are not in it.
"""

import contextlib
import io
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.accounting.arrays import Bool, Ids, Int64
from dpstream.accounting.errors import PolicyError, RunError, UsageError, required
from dpstream.dp_transforms.noise.prf import Prf
from dpstream.pipelines.session.config import Config
from dpstream.pipelines.session.records.manifest import (
    Manifest,
    Part,
    check_account,
    commit,
    read_manifest,
    refuse_table,
)
from dpstream.pipelines.session.records.parts import (
    ID,
    PART_ROWS,
    budgets_of,
    checked_paths,
    ids_in,
    read_part,
    schema_of,
    table_of,
    tidy,
    write_part,
    writing,
)
from dpstream.pipelines.session.records.reading import (
    DUPLICATE_ID,
    MISSING_ID,
    UNKNOWN_ID,
    Letters,
    Records,
    files_of,
    ids_of,
    records_of,
)
from dpstream.state.disk_errors import file_errors
from dpstream.state.durable import PRIVATE, put_once
from dpstream.state.idtable import IdTable
from dpstream.state.ledger.contract import Ledger
from dpstream.state.ledger.events import new_id
from dpstream.state.ledger.open import open_ledger, read_history
from dpstream.state.ledger.regions import RegionAccount

#: So many records, of so many coordinates each, still add up within 64 bits.
MAX_RECORDS = 1 << 31


class Loaded(NamedTuple):
    """A new version of a table; for the operator alone.

    Attributes:
        version: the version's number.
        records: number of its records; usable: of these.
        taken: records (or ids of records to delete) that this change used.
        refused: number of refused records by reason: the rule, or the dimension that has no such
            value.
        dead_letter: file of the refused ones; ``None`` if there are none.
        tidied: whether files of older versions are removed (else a reader still has them open; the
            next change, or `tidied`, removes them).
    """

    version: int
    records: int
    usable: int
    taken: int
    refused: dict[str, int]
    dead_letter: Path | None
    tidied: bool


def init(config: Config) -> Loaded:
    """Make a table of the records at its path.

    Raises:
        PolicyError: the folder holds one, or the account is another table's.
        UsageError: there are no files, or a file lacks a needed column.
        RunError: the operating system failed.
    """
    files = files_of(config.records, f"table.{config.name}.path")
    with contextlib.closing(open_ledger(config.account)) as ledger, writing(config.folder):
        refuse_table(config.folder, config.option)
        RegionAccount(ledger, config.table)  # refuses an account of another table
        key = None if config.record_id is None else secrets.token_bytes(32)
        id_type = None if config.record_id is None else config.record_id.type
        hexed = None if key is None else key.hex()
        manifest = Manifest(1, new_id(), config.table.digest, 0, id_type, hexed, ())
        return _Change(config, manifest, files, ledger).add()


def add(config: Config, files: Sequence[str | Path]) -> Loaded:
    """Add the records of files.

    Raises:
        UsageError, RunError: as for `init`; or the folder holds no table.
        PolicyError: it holds another one.
    """
    with writing(config.folder):
        return _Change.of(config, files).add()


def replace(config: Config, files: Sequence[str | Path]) -> Loaded:
    """Replace the records that have the same ids as the records of files.

    Raises:
        As for `add`; UsageError: the table has no ids.
    """
    with writing(config.folder):
        return _Change.of(config, files, named=True).replace()


def delete(config: Config, files: Sequence[str | Path]) -> Loaded:
    """Delete the records whose ids files list, in a column with the same name as in the records.

    Raises:
        As for `replace`.
    """
    with writing(config.folder):
        return _Change.of(config, files, named=True).delete()


def tidied(config: Config) -> bool:
    """Remove the files of older versions; return whether they are gone (no reader has them open).

    Raises:
        RunError, PolicyError: there is no table, or another one.
    """
    with writing(config.folder):
        return tidy(config.folder, read_manifest(config.folder, config.table))


class _Change:
    """One change of a table, by its only writer.

    Args:
        new_in: the account, if the table is made now.
    """

    def __init__(
        self,
        config: Config,
        manifest: Manifest,
        files: Sequence[str | Path],
        new_in: Ledger | None = None,
    ) -> None:
        self._config, self._manifest, self._new_in = config, manifest, new_in
        self._files = [str(path) for path in files]
        self._folder = config.folder
        self._prf = None if manifest.id_key is None else Prf(bytes.fromhex(manifest.id_key))
        self._schema = schema_of(config.table.space, self._prf is not None)
        self._budgets = budgets_of(config.table.space)
        self._letters = list[Letters]()

    @classmethod
    def of(cls, config: Config, files: Sequence[str | Path], named: bool = False) -> "_Change":
        """Return a change of the present table."""
        manifest = read_manifest(config.folder, config.table)
        check_account(manifest, read_history(config.account))
        field = f"table.{config.name}.record_id"
        if manifest.id_type != (None if config.record_id is None else config.record_id.type):
            raise PolicyError(
                field, "is not what the table was made with", "correct the project file"
            )
        if named and manifest.id_key is None:
            raise UsageError(field, "is not given: no record has a name", "make a new table")
        checked_paths(config.folder, list(manifest.parts))  # a damaged part is not written anew
        return cls(
            config, manifest, [path for pattern in files for path in files_of(str(pattern), "file")]
        )

    def add(self) -> Loaded:
        """Add the records of the files whose ids are new."""
        id_table = IdTable()
        if self._prf is not None:
            for part in self._manifest.parts:
                id_table.intern(ids_in(read_part(self._folder, part, [ID])))
        parts = self._written(
            self._first(records_of(self._config, self._files, self._prf), id_table)
        )
        return self._committed((*self._manifest.parts, *parts), sum(p.rows for p in parts))

    def replace(self) -> Loaded:
        """Add the records of the files whose ids are known; remove the old ones."""
        id_table = IdTable()
        reading = self._first(records_of(self._config, self._files, self._prf), id_table)
        new = list(reading)
        remaining, there = self._without(id_table)
        parts = self._written(self._with_ids_in(new, there, id_table))
        return self._committed((*remaining, *parts), sum(p.rows for p in parts))

    def delete(self) -> Loaded:
        """Remove the listed records."""
        id_table = IdTable()
        named = list[tuple[int, Int64, Int64]]()
        for file, rows, ids, given in ids_of(
            self._config, self._files, required(self._prf, "records have ids")
        ):
            self._refuse(file, rows[~given], MISSING_ID)
            fresh, slots = _interned(id_table, ids[given])
            self._refuse(file, rows[given][~fresh], DUPLICATE_ID)
            named.append((file, rows[given][fresh], slots[fresh]))
        remaining, there = self._without(id_table)
        for file, rows, slots in named:
            self._refuse(file, rows[~there[slots]], UNKNOWN_ID)
        return self._committed(remaining, int(there.sum()))

    def _first(self, batches: Iterable[Records | Letters], id_table: IdTable) -> Iterator[Records]:
        """Yield the first record of each id that is not known yet."""
        for batch in batches:
            if isinstance(batch, Letters):
                self._letters.append(batch)
            elif batch.ids is None:
                yield batch
            else:
                fresh, _ = _interned(id_table, batch.ids)
                self._refuse(batch.file, batch.rows[~fresh], DUPLICATE_ID)
                yield batch.filtered(fresh)

    def _with_ids_in(
        self, new: Iterable[Records], there: Bool, id_table: IdTable
    ) -> Iterator[Records]:
        """Yield the records whose ids the table had."""
        for batch in new:
            present = there[id_table.find(required(batch.ids, "some.ids is there"))]
            self._refuse(batch.file, batch.rows[~present], UNKNOWN_ID)
            yield batch.filtered(present)

    def _without(self, gone: IdTable) -> tuple[tuple[Part, ...], Bool]:
        """Return the parts without some records, and which of their ids existed."""
        remaining, there = list[Part](), np.zeros(gone.size, np.bool_)
        for part in self._manifest.parts:
            slots = gone.find(ids_in(read_part(self._folder, part, [ID])))
            there[slots[slots >= 0]] = True
            if (slots < 0).all():
                remaining.append(part)
            elif (slots < 0).any():
                rows = read_part(self._folder, part).filter(pa.array(slots < 0))
                remaining.append(write_part(self._folder, rows, part.usable, self._budgets))
        return tuple(remaining), there

    def _written(self, records: Iterable[Records]) -> list[Part]:
        """Write parts of records; usable and unusable ones are in different parts."""
        parts, held = list[Part](), dict[bool, list[pa.Table]]({True: [], False: []})
        for batch in records:
            for usable, tables in held.items():
                one = batch.filtered(batch.usable == usable)
                if len(one.rows):
                    tables.append(table_of(self._schema, one.at, usable, one.ids))
                if sum(table.num_rows for table in tables) >= PART_ROWS:
                    parts.append(self._part(tables, usable))
        parts += [self._part(tables, usable) for usable, tables in held.items() if tables]
        return parts

    def _part(self, tables: list[pa.Table], usable: bool) -> Part:
        rows = pa.concat_tables(tables)
        tables.clear()
        return write_part(self._folder, rows, usable, self._budgets)

    def _committed(self, parts: tuple[Part, ...], taken: int) -> Loaded:
        """Commit the new version; refused records are on disk before it counts."""
        rows = sum(part.rows for part in parts)
        if rows > MAX_RECORDS:
            raise RunError("records", f"are more than {MAX_RECORDS:,}", "divide the table")
        version = self._manifest.version + 1
        manifest = msgspec.structs.replace(self._manifest, version=version, parts=parts)
        letter = self._dead_letter(manifest.version)
        if self._new_in is not None:  # before the table is there, which is refused without it
            self._new_in.name_table(manifest.id)
        commit(self._folder, manifest)
        counts = Counter(reason for letters in self._letters for reason in letters.reasons)
        return Loaded(
            version=manifest.version,
            records=rows,
            usable=sum(part.rows for part in manifest.usable()),
            taken=taken,
            refused=dict(sorted(counts.items())),
            dead_letter=letter,
            tidied=tidy(self._folder, manifest),
        )

    def _refuse(self, file: int, rows: Int64, reason: str) -> None:
        if len(rows):
            self._letters.append(Letters(file, rows, [reason] * len(rows)))

    def _dead_letter(self, version: int) -> Path | None:
        if not any(len(letters.rows) for letters in self._letters):
            return None
        files = np.concatenate([np.full(len(s.rows), s.file) for s in self._letters])
        rows = np.concatenate([letters.rows for letters in self._letters])
        reasons = [reason for letters in self._letters for reason in letters.reasons]
        names = pa.DictionaryArray.from_arrays(
            pa.array(files.astype(np.int32)), pa.array(self._files)
        )
        columns = {"file": names, "row": rows, "reason": reasons}
        table = pa.table(columns).take(np.lexsort((rows, files)))
        buffer = io.BytesIO()
        pq.write_table(table, buffer)
        folder = self._folder / "dead_letter"
        path = folder / f"version-{version}-{secrets.token_hex(8)}.parquet"
        with file_errors("table.coordinates", "cannot be written"):
            put_once(path, buffer.getvalue(), PRIVATE)
        return path


def _interned(id_table: IdTable, ids: Ids) -> tuple[Bool, Int64]:
    """Return which ids are not known yet, without duplicates, and the slots of all."""
    before = id_table.size
    slots = id_table.intern(ids)
    fresh = np.zeros(len(slots), np.bool_)
    _, first = np.unique(slots, return_index=True)
    fresh[first] = slots[first] >= before
    return fresh, slots
