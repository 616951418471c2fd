"""Bounded file sources: ``pipeline | ReadFiles(job)`` gives record batches with positions.

Contract with the next stage: every batch has the columns ``job.columns``, in that order, of
consecutive rows of one file, and schema metadata ``dpstream.partition`` (index of the file in
the manifest) and ``dpstream.offset`` (int64 number of the first row), decimal ASCII; or, where
files are small, of runs of such rows with a list of each (``batches.ROWS``).  A row's position
depends on the files alone, never on ``batch_rows``, on the runner or on what is read together.

**Files in the place of a job's own source** are other data of the same schema, read by its ingest.
`dpstream choose --proxy` and `report --truth` read such files.  A source without end gives stamps
and message ids of its own, which no file has: there the event time is the stamp.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import apache_beam as beam
import msgspec
import numpy as np
import pyarrow as pa
from typing_extensions import override

from dpstream.accounting.errors import DpstreamError, UsageError
from dpstream.accounting.places import COLUMNAR, FILE_KINDS, file_kind
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.batches import PARTITION, ROWS
from dpstream.dp_transforms.ingest.records import (
    Canonicaliser,
    canonical_public_keys,
    public_key_ids,
)
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.telemetry import guarded, rows_read
from dpstream.pipelines.connectors.input_files import (
    SourceFile,
    file_in_words,
    fingerprint_parts,
    identity_part,
    manifest,
)
from dpstream.pipelines.connectors.inputs import (
    Backpressure,
    Input,
    ReadRows,
    output,
    placed,
    read_transform,
)
from dpstream.pipelines.connectors.query import add_cells, apply_query
from dpstream.pipelines.formats.compression import checked_codec, plain, refuse_packed_parquet
from dpstream.pipelines.formats.parquet import read_row_group, row_groups
from dpstream.pipelines.formats.rows import Part, Reason, Refused, Rows, refuse, unreadable
from dpstream.pipelines.formats.small import (
    SMALL_BYTES,
    TOGETHER_BYTES,
    TOGETHER_FILES,
    joined,
    positioned_runs,
    read_texts,
)
from dpstream.pipelines.formats.texts import COMMAS, csv_header, csv_positions, read_text
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.jobs.keys import read_public_keys
from dpstream.pipelines.project.sections import CsvSection
from dpstream.pipelines.project.source import GIVEN_COLUMNS
from dpstream.state.disk_errors import file_errors

#: What one element of work is: (kind, partition, path, row group, first row).  The kind of a
#: compressed file is ``csv+gzip`` or alike.
Piece = tuple[str, int, str, int, int]
Group = tuple[Piece, ...]


def pieces(job: Job) -> list[Piece]:
    """Return every piece of the source, in manifest order; checks the needed columns at once.

    A row group of a Parquet file is a piece, a CSV or JSON Lines file is one; a file that
    cannot be read at all is a piece of kind ``unreadable``.

    Raises:
        UsageError: no file, a needed column is in a file's schema not just once, or a file is
            compressed and cannot be unpacked (see `pipelines.formats.compression`).
        RunError: the operating system cannot read a file.
    """
    return [piece for group in groups(job) for piece in group]


def groups(job: Job, files: Sequence[SourceFile] | None = None) -> list[Group]:
    """Return the pieces of the source (or of some of its files), those of small files together; see
    `pieces`.
    """
    files = manifest(job) if files is None else files
    with file_errors("table.path", "cannot be read"):
        pieces = [(piece, file.size) for file in files for piece in _pieces_of(job, file)]
    out, size = list[list[Piece]](), 0
    for piece, bytes_ in pieces:
        alone = bytes_ > SMALL_BYTES or piece[0] not in FILE_KINDS or job.reading.csv != COMMAS
        full = size + bytes_ > TOGETHER_BYTES or not out or len(out[-1]) >= TOGETHER_FILES
        if alone or full:
            out.append([])
            size = 0
        out[-1].append(piece)
        size = TOGETHER_BYTES if alone else size + bytes_
    return list(map(tuple, out))


def _pieces_of(job: Job, file: SourceFile) -> Iterator[Piece]:
    kind = job.source.kind
    if kind in COLUMNAR:
        starts = row_groups(file.path, job.columns, "table.path", file_in_words(file), kind)
        if starts is None:
            refuse_packed_parquet(file.path, "table.path", file_in_words(file))
            yield "unreadable", file.partition, file.path, 0, 0
        for group, first_row in enumerate(starts or ()):
            yield kind, file.partition, file.path, group, first_row
        return
    with open(file.path, "rb") as raw:
        codec = checked_codec(raw, file.path, kind, "table.path", file_in_words(file))
        header = csv_header(plain(raw, codec), job.reading.csv) if kind == "csv" else None
    if header is not None:
        csv_positions(header, job.columns, job.reading.csv, file_in_words(file))
    yield kind if codec is None else f"{kind}+{codec}", file.partition, file.path, 0, 0


def read_piece(piece: Piece, columns: tuple[str, ...], csv: CsvSection = COMMAS) -> Iterator[Part]:
    """Yield the rows and refused positions of one piece (`ReadFiles` without Beam).

    Raises:
        OSError: the operating system cannot read the file.
    """
    kind, _, path, group, first_row = piece
    if kind == "unreadable":
        yield refuse(0, Reason.UNREADABLE_FILE)
    elif kind in COLUMNAR:
        yield from read_row_group(path, columns, group, first_row, kind)
    else:
        text, _, codec = kind.partition("+")
        with open(path, "rb") as raw:
            yield from read_text(text, plain(raw, codec or None), columns, csv=csv)


def read_group(
    group: Group, columns: tuple[str, ...], batch_rows: int, csv: CsvSection = COMMAS
) -> Iterator[ReadRows]:
    """Yield batches with positions and dead letters of pieces (`ReadFiles` without Beam).

    Raises:
        RunError: the operating system cannot read a file.
    """
    kind = group[0][0]
    if len(group) == 1:
        try:
            yield from placed(read_piece(group[0], columns, csv), group[0][1], batch_rows)
        except OSError as error:
            raise unreadable(group[0][1], error) from None
        return
    if kind in COLUMNAR:
        dead = list[ReadRows]()
        yield from _many_parquet(group, columns, batch_rows, dead)
        yield from dead
        return
    for part in read_texts(kind, ((piece[1], piece[2]) for piece in group), columns):
        if isinstance(part.result, pa.RecordBatch):
            yield from positioned_runs(part, batch_rows)
        else:
            yield Refused(part.offset, part.result), part.partition


def batches(job: Job) -> Iterator[pa.RecordBatch]:
    """Yield all rows of a job's files with their positions; refused ones are left out.

    Raises:
        UsageError, RunError: see `pieces`; or the operating system cannot read a file.
    """
    for part in _all_of(job):
        if isinstance(part, pa.RecordBatch):
            yield part


def _all_of(job: Job) -> Iterator[ReadRows]:
    for group in groups(job):
        yield from read_group(group, job.columns, job.batch_rows, job.reading.csv)


def _many_parquet(
    group: Group, columns: tuple[str, ...], batch_rows: int, dead: list[ReadRows]
) -> Iterator[pa.RecordBatch]:
    """Batches; refused positions are put into ``dead``."""

    def rows() -> Iterator[tuple[int, Rows]]:
        for piece in group:
            try:
                for part in read_piece(piece, columns):
                    if isinstance(part, Refused):
                        dead.append((part, piece[1]))
                    else:
                        yield piece[1], part
            except OSError as error:
                raise unreadable(piece[1], error) from None

    for batch in joined(rows(), batch_rows):
        yield from positioned_runs(batch, batch_rows)


class _ReadPiece(beam.DoFn):
    """Pieces -> batches; refused positions to the dead letter; errors carry no values."""

    def __init__(self, columns: tuple[str, ...], batch_rows: int, csv: CsvSection) -> None:
        self.columns, self.batch_rows, self.csv = columns, batch_rows, csv

    @guarded("source")
    def process(self, element: Group) -> Iterable[Any]:
        """Read some pieces; yields `pa.RecordBatch` and tagged dead letters."""
        for read in read_group(element, self.columns, self.batch_rows, self.csv):
            for partition, rows in _partitions_of(read):
                rows_read[partition] += rows
            yield output(read)


def _partitions_of(read: ReadRows) -> Iterator[tuple[int, int]]:
    """Yield (partition, rows) of what was read, refused rows too."""
    if not isinstance(read, pa.RecordBatch):
        refused, partition = read
        for each in np.broadcast_to(partition, refused.offsets.shape).tolist():
            yield each, 1
        return
    numbers = read.schema.metadata[PARTITION].decode().split(",")
    rows = read.schema.metadata.get(ROWS, b"%d" % read.num_rows).decode().split(",")
    for number, amount in zip(numbers, rows, strict=True):
        if number:  # of no rows there is none
            yield int(number), int(amount)


class ReadFiles(beam.PTransform):  # type: ignore[misc]
    """The records of a job's files.

    ``expand`` returns outputs ``records`` and ``dead_letter``, collections of
    `pa.RecordBatch`.  The manifest and the columns are checked when the transform is made.

    Args:
        job: source, schema and ``batch_rows`` are used.
        files: those that are read (default: all), with their partitions.

    Raises:
        UsageError: see `pieces`.
    """

    def __init__(self, job: Job, files: Sequence[SourceFile] | None = None) -> None:
        super().__init__()
        self._groups = groups(job, files)
        self._dofn = _ReadPiece(job.columns, job.batch_rows, job.reading.csv)

    def reads(self, job: Job) -> bool:
        """Return whether these are the files of a job, as they are now."""
        return groups(job) == self._groups

    def expand(self, begin: Any) -> Any:
        """Return ``Create(groups) | Reshuffle | read``: runners can spread the pieces.

        One reshuffle is enough: Create's own would add a stage and five transforms.
        """
        return (
            begin
            | "Pieces" >> beam.Create(self._groups, reshuffle=False)
            | "Spread" >> beam.Reshuffle()
            | "Read" >> read_transform(self._dofn)
        )


class FilesInput(Input):
    """The input of files that are all present."""

    bounded = True

    @override
    def identity(self) -> list[bytes]:
        return [identity_part(*part) for part in fingerprint_parts(self.job)]

    @override
    def read(self, begin: int = 0, backpressure: Backpressure | None = None) -> Any:
        return ReadFiles(self.job)

    @override
    def scan(self) -> Iterator[ReadRows]:
        return _all_of(self.job)

    @override
    def locate(self, partition: int, offset: int) -> tuple[str, int]:
        return manifest(self.job)[partition].name, offset

    @override
    def files(self) -> tuple[SourceFile, ...]:
        return manifest(self.job)


class JoinedFiles(Input):
    """The files of one pass of a run whose input grows (`pipelines.stream.passes`).

    Args:
        files: those that the pass reads, which must not change while it does.
        identity: parts that identify them.
    """

    bounded = True

    def __init__(self, job: Job, files: Sequence[SourceFile], identity: Sequence[bytes]) -> None:
        super().__init__(job)
        self._files, self._identity = tuple(files), list(identity)

    @property
    def partitions(self) -> list[int]:
        """Partitions that the pass reads."""
        return [file.partition for file in self._files]

    @override
    def identity(self) -> list[bytes]:
        return self._identity

    @override
    def read(self, begin: int = 0, backpressure: Backpressure | None = None) -> Any:
        return ReadFiles(self.job, self._files)

    @override
    def files(self) -> tuple[SourceFile, ...]:
        return self._files


def recorded(job: Job, pattern: str, field: str) -> Job:
    """Return the job with recorded files for its source.

    Args:
        pattern: absolute path or glob.
        field: the option that named them, for errors.

    Raises:
        UsageError: nothing tells of which kind the files are.
    """
    replace, source = msgspec.structs.replace, job.source
    if not source.unbounded:
        return replace(job, source=replace(source, path=pattern))
    kind = file_kind(pattern) or source.format
    if kind not in FILE_KINDS:
        raise UsageError(
            field,
            f"names no kind of files, and table.format is '{source.kind}'",
            "give a path that ends in .parquet, .csv or .jsonl, for example",
        )
    plan = job.plan
    if plan.stamp in GIVEN_COLUMNS:
        plan = replace(plan, stamp="event_time")
    if plan.record_id is not None and plan.record_id.column in GIVEN_COLUMNS:
        plan = replace(plan, record_id=None)
    files = type(source)(kind, pattern, plan.stamp, query=source.query)
    return replace(job, source=files, plan=plan)


def canonical_records(job: Job, plan: Plan, ring: KeyRing) -> Iterator[pa.RecordBatch]:
    """Yield the usable records of a job's files in the stream's own canonical form, batch after
    batch.

    Args:
        plan: by which they are taken in; its timeline may be another than the job's.
        ring: keys of the ids.

    Raises:
        UsageError: no file, or a column is missing.
        RunError: the operating system cannot read a file.
    """
    public = None
    if plan.public_keys is not None:
        public = public_key_ids(plan, ring, canonical_public_keys(plan, read_public_keys(job)))
    ingest = Canonicaliser(plan, ring, public)
    for batch in add_cells(job, apply_query(job, batches(job))):
        yield ingest(batch)[0]


@contextlib.contextmanager
def named_by(field: str) -> Iterator[None]:
    """Name the option in errors about recorded files."""
    try:
        yield
    except DpstreamError as error:
        if error.field != "table.path":
            raise
        raise type(error)(field, error.rule, error.fix) from None
