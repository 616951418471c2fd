"""``type: DPStream`` for Beam YAML: rows in, releases out (see ``deploy/beam_yaml``).

With an input, its rows are the records: what is named as ``source`` tells this input from others,
and of the job's table only the stamp counts.  Rows of Beam YAML have no position, so a
record needs a name of its own (``table.record_id``).  Without an input the job's files are read.
Either way releases are committed and written to the job's sink as by ``dpstream run``, and also go
on as rows (output ``releases``; ``dead_letter`` has positions and reasons).
"""

import functools
from collections.abc import Iterator
from typing import Any

import apache_beam as beam
import msgspec
import pyarrow as pa
from apache_beam.typehints import no_annotations, row_type
from apache_beam.utils.timestamp import Timestamp

from dpstream.accounting.errors import UsageError
from dpstream.dp_transforms.batches import DEAD_LETTER_SCHEMA, release_schema
from dpstream.dp_transforms.flow import DPStream
from dpstream.dp_transforms.telemetry import guarded
from dpstream.pipelines.connectors.files.source import ReadFiles
from dpstream.pipelines.connectors.input_files import CompareInput, InputWatch, manifest
from dpstream.pipelines.connectors.query import with_query
from dpstream.pipelines.connectors.registry import sink_of
from dpstream.pipelines.connectors.write import CountDelivered, WriteDeadLetters, WriteReleases
from dpstream.pipelines.formats.encodings import encode
from dpstream.pipelines.frames.stream import Gather, column_of
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.stream.begin import begin

#: Types of a row's fields that can be read, and the Arrow type each becomes.  The declared type
#: decides, never a value: what becomes of a row is a function of that row alone.
TYPES: dict[Any, pa.DataType] = {
    str: pa.string(),
    bytes: pa.binary(),
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    Timestamp: pa.timestamp("us", "UTC"),
}


class DPStreamRows(beam.PTransform):  # type: ignore[misc]
    """Differentially private running counts and sums per key.

    Args:
        job: name of the job; ``None``: the only one of the project file.
        source: what tells these rows from others (a name and version, a digest); required with
            an input, because a store goes on only with the input it was begun with.
        project: the project file or its folder; ``None``: the one that commands find from the
            current folder.
    """

    _yaml_requires_inputs = False

    def __init__(
        self, job: str | None = None, source: str | None = None, project: str | None = None
    ) -> None:
        super().__init__()
        self._job, self._source = load_job(project, job), source

    @no_annotations
    def expand(self, rows: Any) -> dict[str, Any]:
        """Return Rows, or nothing, in; rows of ``releases`` and ``dead_letter`` out."""
        job = self._job
        refused: list[beam.PCollection] = []
        watch: InputWatch | None = None
        if isinstance(rows, beam.PCollection):
            kinds = _check(job, rows, self._source)
            run, _ = begin(job, [b"rows", str(self._source).encode()])
            gather = Gather(functools.partial(to_batch, kinds=kinds), job.batch_rows)
            batches = beam.ParDo(gather).with_output_types(pa.RecordBatch)
            records = rows | "Batches" >> batches
        else:
            read = rows | "Source" >> ReadFiles(job)
            watch = InputWatch(manifest(job))
            run, _ = begin(job)
            watch.begin(run)
            records, refused = read.records, [read.dead_letter]
        output = with_query(records, job) | "DPStream" >> DPStream(run.plan, run)
        sealed = output.releases
        if watch is not None:
            sealed = sealed | "Compare" >> CompareInput(watch)
        writing = WriteReleases(sink_of(job, run, watch), only_compare=run.open().restoring)
        releases = sealed | "Releases" >> writing
        _ = releases.written | "Counted" >> CountDelivered(job.plan.timeline)
        dead = (output.dead_letter, *refused) | "AllDead" >> beam.Flatten()
        _ = dead | "DeadLetters" >> WriteDeadLetters(job)
        return {
            "releases": sealed | "ReleaseRows" >> _as_rows(release_schema(run.plan)),
            "dead_letter": dead | "DeadRows" >> _as_rows(DEAD_LETTER_SCHEMA),
        }


def _check(job: Job, rows: beam.PCollection, source: str | None) -> dict[str, pa.DataType]:
    """Arrow types of the columns the job needs.

    Raises:
        UsageError: rows that this version cannot count once each.
    """
    if not source:
        raise UsageError(
            "source", "is required with an input", "give the rows a name and version of their own"
        )
    if job.plan.record_id is None:
        raise UsageError(
            "table.record_id",
            "is required: rows of Beam YAML have no position, so one delivered twice would count"
            " twice",
            "name a column that tells a unit's records apart, or leave out the input: the job's "
            "own files have positions",
        )
    if not rows.is_bounded:
        raise UsageError("input", "is unbounded", "run a live stream with `dpstream run`")
    fields = _fields(rows.element_type)
    kinds = {}
    for name in job.columns:
        if name not in fields:
            raise UsageError("input", f"has no field {name!r}", "add it, or correct the job")
        kind = TYPES.get(fields[name])
        if kind is None:
            type_names = ", ".join(sorted(one.__name__ for one in TYPES))
            raise UsageError(
                "input",
                f"has no usable type for field {name!r}",
                f"declare one of {type_names} (MapToFields: output_type)",
            )
        kinds[name] = kind
    return kinds


def _fields(element: Any) -> dict[str, Any]:
    """Declared types of a row's fields, ``Optional[T]`` as T; empty where there is no schema."""
    schema = row_type.RowTypeConstraint.from_user_type(element) or element
    if not isinstance(schema, row_type.RowTypeConstraint):
        return {}
    return {name: plain_type(kind) for name, kind in schema._fields}


def plain_type(kind: Any) -> Any:
    """Return T of ``Optional[T]``, and Python's type for Beam's and numpy's spellings."""
    inner = [t for t in getattr(kind, "union_types", ()) if t is not type(None)]
    kind = inner[0] if len(inner) == 1 else kind
    name = getattr(kind, "__name__", "")
    spelled = {"str_": str, "bytes_": bytes, "bool_": bool, "float32": float, "float64": float}
    sizes = {f"{sign}int{bits}": int for sign in ("", "u") for bits in (8, 16, 32, 64)}
    return (spelled | sizes).get(name, kind)


def to_batch(rows: list[Any], kinds: dict[str, pa.DataType]) -> pa.RecordBatch:
    """Return rows as one batch; a value of another type than its column becomes null.

    Its row goes to the dead letter later.
    """
    columns = [
        column_of([getattr(row, name) for row in rows], kind) for name, kind in kinds.items()
    ]
    return pa.RecordBatch.from_arrays(columns, list(kinds))


def _as_rows(schema: pa.Schema) -> beam.PTransform:
    """Batches -> rows as the JSON Lines sink writes them: bytes as hex, times in RFC 3339."""
    fields = [(field.name, _python(field.type)) for field in schema]
    kind = row_type.RowTypeConstraint.from_fields(fields)
    return beam.ParDo(_Rows()).with_output_types(kind)


def _python(kind: pa.DataType) -> Any:
    if pa.types.is_floating(kind):
        return float | None
    if pa.types.is_integer(kind):
        return int | None
    return (bool if pa.types.is_boolean(kind) else str) | None


class _Rows(beam.DoFn):
    """Few rows: what is released."""

    @guarded("rows")
    def process(self, element: pa.RecordBatch) -> Iterator[beam.Row]:
        """The rows of one batch."""
        for line in encode(element, "jsonl").splitlines():
            yield beam.Row(**msgspec.json.decode(line))
