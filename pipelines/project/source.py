"""The source of a job's records: its table as the job reads it, and the query that rows go through.

A table says where records come from; a job can read those in files, folders and topics.
"""

import glob
import os
from pathlib import Path
from typing import Any, Literal

import msgspec

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.places import (
    FILE_KINDS,
    FileKind,
    below,
    file_kind,
    matching,
    unescaped,
)
from dpstream.pipelines.project.project import Project, unit_of
from dpstream.pipelines.project.sections import (
    CsvSection,
    DataSetSection,
    Section,
    TableSection,
    UnitSection,
)
from dpstream.pipelines.project.text import duration_micros, read_at_most
from dpstream.state.disk_errors import file_errors

MAX_QUERY_BYTES = 1 << 16
SourceKind = FileKind | Literal["folder", "kafka", "pubsub"]
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


class LookUp(Section, frozen=True):
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


class Query(Section, frozen=True):
    """A row-local SELECT that every row of the source goes through first; see
    `pipelines.statements.row_query`.

    Attributes:
        table: the name of the source in the text.
        columns: SQL types, by name, of the source's columns that the text may use (default: those
            of the first file, if it is Parquet).
        text: the SELECT; its columns are the key's and the aggregates'.  It does not change unit,
            times and record id.  `dpstream sql --stream` writes it.
        look_up: public tables.
        csv: how the source's files are written.
    """

    table: str = "records"
    columns: dict[str, str] | None = None
    text: str | None = None
    look_up: tuple[LookUp, ...] = ()
    csv: CsvSection = CsvSection()


class Source(Section, frozen=True):
    """The source of records.

    Attributes:
        kind: files that are all present (`places.FILE_KINDS`); or a source without end: a growing
            ``folder`` of files, ``kafka``, ``pubsub``.
        path: a file or a glob (``**`` for any folders); for ``folder`` a folder or URL prefix.
            Text may be compressed (`places.READ_SUFFIXES`).
        stamp: ``event_time`` (files only), a stamp that the source gives, or the column with it.
        format: of a folder's files, or of a message (``json``: one object).
        topic, servers: for Kafka; ``options`` go to its client, values ``env:NAME`` are looked up.
        subscription: for Pub/Sub, ``projects/P/subscriptions/S``.
        settle: how long a file must be unchanged (stamp ``closed``), how long before its file is
            closed a row may be stamped (stamp of a column), or how far a broker may be behind its
            own clock: it delays releases and has no other effect.
        query: the query that rows go through first.
        expect: names of the files that complete data has (`pipelines.project.expected`).
    """

    kind: SourceKind
    path: str = ""
    stamp: str | None = None
    format: FileKind | None = None
    topic: str | None = None
    servers: str | None = None
    subscription: str | None = None
    options: dict[str, str] = msgspec.field(default_factory=dict)
    settle: str = "2s"
    query: Query | None = None
    expect: str | None = None

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
        """Return the path of the first file.

        Returns:
            ``None``: there is none yet in a folder that grows, or it is elsewhere.

        Raises:
            UsageError: a run would have no file, or no folder.
            RunError: a folder cannot be listed.
        """
        if not self.path or "://" in self.path:
            return None
        files = f"{glob.escape(self.path)}/*.{self.format}" if self.unbounded else self.path
        with file_errors("table.path", "has a folder that cannot be listed"):
            first = min(filter(os.path.isfile, matching(files)), default=None)
        if self.unbounded and not os.path.isdir(self.path):
            raise no_folder()
        if first is None and not self.unbounded:
            raise no_file(self.path)
        return first


def no_folder() -> UsageError:
    """Return the error for a folder that grows and is none."""
    return UsageError("table.path", "is not a folder", "make it, or correct the path")


def no_file(pattern: str) -> UsageError:
    """Return the error for a path or pattern of files that matches none."""
    return UsageError(
        "table.path",
        f"matches no file: {unescaped(pattern)}",
        "correct the path or the pattern",
    )


def described(
    project: Project, name: str, table_name: str
) -> tuple[TableSection, str, DataSetSection, UnitSection]:
    """Return a job's table, its data set with its name, and the unit; raises as `parts_of` does."""
    table = project.table(table_name, f"job.{name}.table")
    owner = f"table.{table_name}.data_set"
    data_set_name, data_set = project.data_set(table.data_set, owner)
    if table.public:
        raise UsageError(
            f"table.{table_name}.public",
            "a job protects units, and a public table has none",
            "name a private table",
        )
    unit = unit_of(project, data_set_name, "a job")
    for field in ("unit_column", "time_column"):
        if getattr(table, field) is None:
            raise UsageError(
                f"table.{table_name}.{field}", "is required by a job", f'add {field} = "COLUMN"'
            )
    return table, data_set_name, data_set, unit


def source_kind(where: str, table: TableSection) -> str:
    """Return the kind of a table's source, if a job can read it.

    Raises:
        UsageError: the table has none or several sources, or a file of no known kind.
    """
    places = {
        "path": table.path,
        "folder": table.folder,
        "kafka": table.topic,
        "pubsub": table.subscription,
        "uri": table.uri,
    }
    given = [kind for kind, place in places.items() if place is not None]
    if len(given) != 1:
        raise UsageError(
            where,
            "names no place of its records" if not given else "names several places",
            "give one of path, folder, topic and subscription",
        )
    if given == ["uri"]:
        raise UsageError(
            f"{where}.uri",
            "is a database, which a job cannot read",
            "ask it with `dpstream sql`, or export its records to files",
        )
    if given != ["path"]:
        return given[0]
    kind = table.format or file_kind(table.path or "")
    if kind is None:
        raise UsageError(
            f"{where}.path",
            "has an ending that tells no kind of files",
            f"add format = {', '.join(map(repr, FILE_KINDS[:-1]))} or {FILE_KINDS[-1]!r}",
        )
    return kind


def source_of(project: Project, table_name: str, query: str | None = None) -> Source:
    """Return the source of a table's records.

    Args:
        query: the query that every row goes through first.
    """
    table = project.table(table_name, "table")
    kind: Any = source_kind(f"table.{table_name}", table)
    files = table.path is not None
    return Source(
        kind=kind,
        path=table.path or table.folder or "",
        stamp=table.stamp,
        format=None if files else table.format,
        topic=table.topic,
        servers=table.servers,
        subscription=table.subscription,
        options=table.options,
        settle=table.settle,
        query=None if query is None else query_of(project, table_name, query),
        expect=table.expect,
    )


def written_source_name(project: Project, name: str) -> str:
    """Return the input's name for a plan: as in the file, without environment and settings."""
    _, job = project.job(name)
    table = project.written.table[job.table]
    kind = source_kind(f"table.{job.table}", table)
    return f"{kind}:{table.topic or table.subscription or table.path or table.folder}"


def query_of(project: Project, table_name: str, text: str | None = None) -> Query:
    """Return a query of a table: its text, and the public tables that it may look up."""
    for public, other in project.sections.table.items():
        if other.public and other.key_columns and other.csv is not None:
            raise UsageError(
                f"table.{public}.csv",
                "is not for a table that a job's query looks up",
                "write its file with commas and decimal points, in UTF-8",
            )
    look_ups = tuple(
        LookUp(public, other.path, other.key_columns, other.columns)
        for public, other in project.sections.table.items()
        if other.public and other.path is not None and other.key_columns
    )
    table = project.table(table_name, "table")
    return Query(table_name, table.columns, text, look_ups, table.csv or CsvSection())


def query_text(project: Project, name: str, path: str) -> str:
    """Read the SELECT of a job's query file."""
    field = f"job.{name}.query"
    text = read_at_most(project.folder / path, field, "shorten the statement", MAX_QUERY_BYTES)
    try:
        return text.decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        raise UsageError(field, "is not UTF-8", "save it in UTF-8") from None


def source_path(folder: Path, source: Source) -> str:
    """Return where files are; a folder may be a URL prefix of an object store."""
    if source.kind == "folder":
        return source.path if "://" in source.path else str(folder / source.path)
    escaped = Path(glob.escape(str(folder)))
    return str(below(escaped, source.path, "table.path")) if source.path else ""


#: Fields of a source that say where it is, by its kind; of every other kind it is a path.
_PLACES = {"kafka": ("topic", "servers", "options"), "pubsub": ("subscription",)}


def check_source(source: Source) -> None:
    """Refuse fields of other kinds of sources, and stamps that records could move."""
    kind = source.kind
    check_fields(
        "table",
        source,
        _PLACES.get(kind, ("path",)),
        ("format", "settle") if source.unbounded else ("expect",),
        ("path", "expect", "format", "topic", "servers", "subscription", "options"),
    )
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


def check_fields(
    name: str,
    values: msgspec.Struct,
    needed: tuple[str, ...],
    allowed: tuple[str, ...],
    fields: tuple[str, ...],
) -> None:
    """Refuse fields of other kinds of sources or sinks, and needed ones that are empty.

    Args:
        name: name of the part, for messages.
        values: the part, with its ``kind``.
        needed: fields that its kind needs; ``options`` may be empty.
        allowed: further fields that its kind may have.
        fields: all fields that some kind may have.
    """
    kind: str = getattr(values, "kind")  # noqa: B009 - of both kinds of struct
    for field in fields:
        if getattr(values, field) and field not in (*needed, *allowed):
            raise UsageError(f"{name}.{field}", f"is not for kind '{kind}'", "remove it")
    for field in needed:
        text = getattr(values, field) or ""
        if field != "options" and (not text or "\0" in text):
            raise UsageError(f"{name}.{field}", "must not be empty", "write a name")
