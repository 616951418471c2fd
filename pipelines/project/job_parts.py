"""The parts of a job as frozen structs, which `jobs.parts` makes from the project file.

Durations, times and paths are texts here, as written; `pipelines.jobs.job` parses and resolves
them.
"""

import contextlib
import glob
import os
import re
from pathlib import Path
from typing import Literal

import msgspec

from dpstream.accounting import limits
from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.fields import Aggregate, Field
from dpstream.accounting.places import FileKind, matching
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.pipelines.project.job_section import (
    SERVICE_SINKS,
    JobSection,
    MechanismSection,
    SinkSection,
    SinkTarget,
)
from dpstream.pipelines.project.sections import Section, TimeColumn
from dpstream.pipelines.project.text import duration_micros
from dpstream.state import open as stores
from dpstream.state.ledger.open import AccountPlace

SourceKind = Literal["parquet", "csv", "jsonl", "folder", "kafka", "pubsub"]
#: Stamps that a source gives its records, by its kind; the first is the default.  Each stands in
#: a column of that name with a leading ``_`` that the source adds.
GIVEN_STAMPS = {
    "folder": ("manifest", "closed"),
    "kafka": ("append_time",),
    "pubsub": ("publish_time",),
}
#: Columns a source adds beside the data's own: its stamps, and Pub/Sub's name of a message.
MESSAGE_ID = "_message_id"
GIVEN_COLUMNS = {f"_{stamp}" for stamps in GIVEN_STAMPS.values() for stamp in stamps} | {MESSAGE_ID}


class LookUpConfig(Section, frozen=True):
    """A public table that a job's query may look up by its key.

    Attributes:
        name: the table's name in the query's text.
        path: a file or glob of Parquet, CSV or JSON Lines (by its ending).
        key: columns in which no two of its rows are equal; checked.
        columns: types by name, if the files have none.
    """

    name: str
    path: str
    key: tuple[str, ...]
    columns: dict[str, str] | None = None


class QueryConfig(Section, frozen=True):
    """A row-local SELECT that every row of the source goes through first; see
    `pipelines.statements.row_query`.

    Attributes:
        table: the name of the source in the text.
        columns: SQL types, by name, of the source's columns that the text may use (default: those
            of the first file, if it is Parquet).
        text: the SELECT; its columns are the key's and the aggregates'.  It does not change unit,
            times and record id.  `dpstream sql --stream` writes it.
        look_up: public tables.
    """

    table: str = "records"
    columns: dict[str, str] | None = None
    text: str | None = None
    look_up: tuple[LookUpConfig, ...] = ()


class SourceConfig(Section, frozen=True):
    """The source of records.

    Attributes:
        kind: files that are all present (``parquet``, ``csv``, ``jsonl``); or a source without
            end: a growing ``folder`` of files, ``kafka``, ``pubsub``.
        path: a file or a glob (``**`` for any folders); for ``folder`` a folder or URL prefix.
            CSV and JSON Lines may be compressed (gzip, bzip2, zstd).
        stamp: ``event_time`` (files only), a stamp that the source gives, or the column with it.
        format: of a folder's files, or of a message (``json``: one object).
        topic, servers: for Kafka; ``options`` go to its client, values ``env:NAME`` are looked up.
        subscription: for Pub/Sub, ``projects/P/subscriptions/S``.
        settle: how long a file must be unchanged (stamp ``closed``), how long before its file is
            closed a row may be stamped (stamp of a column), or how far a broker may be behind its
            own clock: it delays releases and has no other effect.
        query: the query that rows go through first.
    """

    kind: SourceKind
    path: str = ""
    stamp: str | None = None
    format: Literal["parquet", "csv", "jsonl", "json"] | None = None
    topic: str | None = None
    servers: str | None = None
    subscription: str | None = None
    options: dict[str, str] = msgspec.field(default_factory=dict)
    settle: str = "2s"
    query: QueryConfig | None = None

    @property
    def unbounded(self) -> bool:
        """Return whether the source has no end."""
        return self.kind in GIVEN_STAMPS

    @property
    def stamp_column(self) -> str:
        """``event_time``, or the column that has the stamp."""
        given = GIVEN_STAMPS.get(self.kind, ())
        stamp = self.stamp or (given[0] if given else "event_time")
        return f"_{stamp}" if stamp in given else stamp

    @property
    def name(self) -> str:
        """The source's name in the plan: public."""
        return f"{self.kind}:{self.topic or self.subscription or self.path}"

    def first_file(self) -> str | None:
        """Return the path of the first of the files that have a schema or a header.

        Returns:
            ``None``: there is none yet, or they are elsewhere.
        """
        kind = self.format if self.kind == "folder" else self.kind
        if kind not in ("parquet", "csv") or "://" in self.path:
            return None
        files = f"{glob.escape(self.path)}/*.{kind}" if self.kind == "folder" else self.path
        with contextlib.suppress(OSError):
            return min(filter(os.path.isfile, matching(files)), default=None)
        return None


class SchemaConfig(Section, frozen=True):
    """The columns of unit, key and event time, and the record id.

    A source that may deliver a record again at another position needs a column that names the
    record.
    """

    unit: Field
    key: tuple[Field, ...]
    event_time: TimeColumn
    record_id: Field | None = None


class PrivacyConfig(MechanismSection, frozen=True, kw_only=True):
    """See `accounting.plan.plan.Privacy`; plus the period and the reference to the secret.

    ``allow_large_delta``: allow a delta above 0.01 (`accounting.strength`).
    ``strategy`` is ``auto`` by default; for private keys ``auto`` chooses ``blt`` or
    ``geometric`` (`accounting.tuning.starred`).  ``optimise`` is ``period`` by default; with
    private keys and more than one privacy period it is ``lifetime``.  ``weights`` is a table
    (`accounting.weights.SelectionWeights`), ``uniform``, or ``auto``: the best known for the job's
    kind (see `pipelines.jobs.job`).
    """

    epsilon: float
    delta: float
    contributions: int
    period: str | None = None
    per_key_bound: int | None = None
    secret: SecretSource = SecretSource()


class KeysConfig(Section, frozen=True):
    """A CSV file whose header names the key columns; no selection is needed."""

    public: str | None = None


class StateConfig(Section, frozen=True):
    """The job's store (``sqlite:PATH`` or ``spanner://PROJECT/INSTANCE/DATABASE``).

    The number of key shards is fixed when the store is made.  ``keep_releases``: how long the
    releases of a window that has ended stay in the store of a source without end once the sink has
    them (default: for ever).
    """

    store: str
    shards: int = 4
    keep_releases: str | None = None

    @property
    def path(self) -> Path | None:
        """The file of the embedded store; ``None`` if the store is not a file."""
        kind, _, path = self.store.partition(":")
        return Path(path) if kind == "sqlite" else None


class SinkConfig(SinkSection, frozen=True):
    """The sink of releases.

    Attributes:
        dead_letter: folder of the dead letters, which are files with every kind; default: beside
            the folder of the releases, or beside the project file.
    """

    dead_letter: str | None = None

    @property
    def guarded(self) -> bool:
        """Return whether CSV marks text that a spreadsheet would take for a formula."""
        return self.formulas != "keep"

    @property
    def folder(self) -> Path | None:
        """The folder of the releases; ``None`` if they are not files."""
        return Path(self.path) if self.path else None

    @property
    def file_kind(self) -> FileKind:
        """The kind of files to export releases to: the sink's own, if it writes files."""
        kinds: dict[str, FileKind] = {"csv": "csv", "jsonl": "jsonl"}
        return kinds.get(self.kind, "parquet")


class JobParts(Section, frozen=True):
    """The parts of a job, as written; ``section`` has the fields that are in no other part."""

    section: JobSection
    source: SourceConfig
    schema: SchemaConfig
    aggregate: tuple[Aggregate, ...]
    privacy: PrivacyConfig
    sink: SinkConfig
    keys: KeysConfig
    state: StateConfig
    ledger: AccountPlace | None


def check_parts(file: JobParts) -> None:
    """Check the rules of the tables that do not enter the plan."""
    threads = file.section.threads
    ranges = [
        ("shards", file.state.shards, limits.MAX_SHARDS),
        ("threads", 1 if threads is None else threads, limits.MAX_THREADS),
    ]
    for field, value, most in ranges:
        if not 1 <= value <= most:
            raise UsageError(field, f"must be a whole number from 1 to {most}", "correct it")
    texts = _check_source(file.source) + _check_sink(file.sink)
    if file.state.keep_releases is not None:
        duration_micros("keep_releases", file.state.keep_releases)
        if not file.source.unbounded:
            raise UsageError(
                "keep_releases",
                f"is for sources without end, and table.format is '{file.source.kind}'",
                "omit it; `dpstream state expire --releases-before` drops releases of such a job",
            )
    for field, text in texts:
        if not text or "\0" in text:
            raise UsageError(field, "must not be empty", "write a name")
    if file.state.store is not None:
        stores.backend(file.state.store)


#: Fields that say where a source is, by its kind; of every other kind it is a path.
_SOURCE_FIELDS = {"kafka": ("topic", "servers", "options"), "pubsub": ("subscription",)}


def _check_fields(
    name: str,
    table: SourceConfig | SinkConfig,
    needed: tuple[str, ...],
    allowed: tuple[str, ...],
    fields: tuple[str, ...],
) -> list[tuple[str, str]]:
    """Refuse fields of other kinds; return the texts that must not be empty.

    Args:
        name: name of the part, for messages.
        table: the part as written.
        needed: fields that its kind needs; ``options`` may be empty.
        allowed: further fields that its kind may have.
        fields: all fields that some kind may have.
    """
    for field in fields:
        if getattr(table, field) and field not in (*needed, *allowed):
            raise UsageError(f"{name}.{field}", f"is not for kind '{table.kind}'", "remove it")
    return [(f"{name}.{f}", getattr(table, f) or "") for f in needed if f != "options"]


def _check_sink(sink: SinkConfig) -> list[tuple[str, str]]:
    """Refuse fields of other kinds of sinks; return the texts that must not be empty."""
    target = SERVICE_SINKS.get(sink.kind, SinkTarget(("path",)))
    allowed = ("dead_letter", *(("formulas",) if sink.kind == "csv" else ()))
    fields = tuple(field for field in sink.__struct_fields__ if field != "kind")
    texts = _check_fields("sink", sink, target.fields, allowed, fields)
    field = target.fields[0]
    if target.example and not re.fullmatch(target.form, getattr(sink, field) or ""):
        raise UsageError(
            f"sink.{field}", f"is no full name of {sink.kind}", f"write {target.example}"
        )
    return texts


def _check_source(source: SourceConfig) -> list[tuple[str, str]]:
    """Refuse fields of other kinds of sources; return the texts that must not be empty."""
    kind = source.kind
    fields = ("path", "format", "topic", "servers", "subscription", "options")
    allowed = ("format", "settle") if source.unbounded else ()
    needed = _SOURCE_FIELDS.get(kind, ("path",))
    texts = _check_fields("table", source, needed, allowed, fields)
    formats = {"folder": ("parquet", "csv", "jsonl")}.get(kind, ("json",))
    if source.unbounded and source.format not in (*formats, *(() if kind == "folder" else (None,))):
        words = " or ".join(f"'{name}'" for name in formats)
        raise UsageError("table.format", f"must be {words} for kind '{kind}'", "correct it")
    if source.unbounded and source.stamp == "event_time":
        raise PolicyError(
            "table.stamp",
            "is the event time, which lets one user's records make others late in a live stream",
            f"use stamp = '{GIVEN_STAMPS[kind][0]}', or a column that the broker fills",
        )
    duration_micros("table.settle", source.settle)
    return texts
