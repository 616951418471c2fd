"""The parts of a job, gathered from the sections of the project file that it names.

``[job.NAME]`` names a table, and the table a data set, which has unit, account and secret.
An error in a part names the field of the section that it came from (`relocate`).
"""

import re
from typing import Any, NoReturn

import msgspec

from dpstream.accounting.errors import DpstreamError, UsageError, required
from dpstream.accounting.fields import Aggregate, Field
from dpstream.accounting.places import file_kind
from dpstream.pipelines.project.job_parts import (
    JobParts,
    KeysConfig,
    LookUpConfig,
    PrivacyConfig,
    QueryConfig,
    SchemaConfig,
    SinkConfig,
    SourceConfig,
    StateConfig,
)
from dpstream.pipelines.project.job_section import JobSection
from dpstream.pipelines.project.project import Project, account_of, secret_of, unit_of
from dpstream.pipelines.project.sections import (
    DataSetSection,
    TableSection,
    TimeColumn,
    UnitSection,
)
from dpstream.pipelines.project.text import read_at_most

MAX_QUERY_BYTES = 1 << 16
#: Where a field stands, by its first part, if not in the job's own section.
_SECTIONS = {
    "table": ("table.{table}", "table."),
    "secret": ("data_set.{data_set}", ""),
    "insecure_test_secret": ("data_set.{data_set}", ""),
    "account": ("data_set.{data_set}", ""),
    "unit": ("data_set.{data_set}", ""),
}


def parts_of(project: Project, name: str, query: str | None = None) -> JobParts:
    """Return the parts of a job.

    Args:
        query: the text of its query; ``None``: that of the file which the job names, if any.

    Raises:
        UsageError: a required section is absent or lacks a field, or its table is public.
    """
    _, job = project.job(name)
    table, data_set_name, data_set, unit = described(project, name, job.table)
    if query is None and job.query is not None:
        query = _query_text(project, name, job.query)
    covers = job.budget.covers
    return JobParts(
        section=job,
        source=source_of(project, job.table, query),
        schema=_schema(job, table, unit),
        aggregate=tuple(
            Aggregate(name, part.kind, part.column, part.bounds, part.grid, part.share)
            for name, part in job.aggregate.items()
        ),
        privacy=PrivacyConfig(
            epsilon=job.budget.epsilon,
            delta=job.budget.delta,
            contributions=job.contributions,
            period={"lifetime": None, "window": job.window}.get(covers, covers),
            per_key_bound=job.per_key_bound,
            secret=secret_of(project, data_set_name),
            **_fields(job.mechanism),
        ),
        sink=SinkConfig(dead_letter=job.dead_letter, **_fields(job.sink)),
        keys=KeysConfig(job.public_keys),
        state=StateConfig(
            _store(job.store) or f"sqlite:{name}.store.db", job.shards, job.keep_releases
        ),
        ledger=None if data_set.account is None else account_of(project, data_set_name),
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


def relocate(error: DpstreamError, project: Project, name: str) -> NoReturn:
    """Raise an error about a job's parts again, with the field's name in the project file."""
    _, job = project.job(name)
    table = project.sections.table.get(job.table)
    data_set = "" if table is None else table.data_set
    data_set = data_set or next(iter(project.sections.data_set), "NAME")
    field = error.field
    numbered = re.match(r"aggregate\[(\d+)\]", field)
    if numbered and int(numbered[1]) < len(job.aggregate):
        field = f"aggregate.{list(job.aggregate)[int(numbered[1])]}{field[numbered.end() :]}"
    first = re.split(r"[.\[]", field)[0]
    names_table = any(f"{field}.".startswith(f"table.{other}.") for other in project.sections.table)
    if first in _SECTIONS and not names_table:
        section, own = _SECTIONS[first]
        place = section.format(table=job.table, data_set=data_set)
        field = f"{place}.{field.removeprefix(own)}"
    elif first in job.__struct_fields__ and not names_table:
        field = f"job.{name}.{field}"
    raise type(error)(field, error.rule, error.fix) from None


def _schema(job: JobSection, table: TableSection, unit: UnitSection) -> SchemaConfig:
    record_id = Field(table.record_id) if isinstance(table.record_id, str) else table.record_id
    key = tuple(Field(part) if isinstance(part, str) else part for part in job.key)
    unit_field = Field(required(table.unit_column, "a job's table has a unit column"), unit.type)
    return SchemaConfig(unit_field, key, _time_column(table), record_id)


def _fields(section: msgspec.Struct) -> dict[str, Any]:
    return {field: getattr(section, field) for field in section.__struct_fields__}


def _time_column(table: TableSection) -> TimeColumn:
    column = table.time_column
    if isinstance(column, str):
        return TimeColumn(column)
    return TimeColumn(
        "" if column is None else column.column, None if column is None else column.type
    )


def _store(text: str | None) -> str | None:
    """Return a store's URL; a path alone is a SQLite file, unless it was meant to be a URL."""
    if text is None or "://" in text or text.startswith("spanner:"):
        return text
    return f"sqlite:{text.removeprefix('sqlite:')}"


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
            'add format = "parquet", "csv" or "jsonl"',
        )
    return kind


def source_of(project: Project, table_name: str, query: str | None = None) -> SourceConfig:
    """Return the source of a table's records.

    Args:
        query: the query that every row goes through first.
    """
    table = project.table(table_name, "table")
    kind: Any = source_kind(f"table.{table_name}", table)
    files = table.path is not None
    return SourceConfig(
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
    )


def written_source_name(project: Project, name: str) -> str:
    """Return the input's name for a plan: as in the file, without environment and settings."""
    _, job = project.job(name)
    table = project.written.table[job.table]
    kind = source_kind(f"table.{job.table}", table)
    return f"{kind}:{table.topic or table.subscription or table.path or table.folder}"


def query_of(project: Project, table_name: str, text: str | None = None) -> QueryConfig:
    """Return a query of a table: its text, and the public tables that it may look up."""
    look_ups = tuple(
        LookUpConfig(public, other.path, other.key_columns, other.columns)
        for public, other in project.sections.table.items()
        if other.public and other.path is not None and other.key_columns
    )
    return QueryConfig(table_name, project.table(table_name, "table").columns, text, look_ups)


def _query_text(project: Project, name: str, path: str) -> str:
    """Read the SELECT of a job's query file."""
    field = f"job.{name}.query"
    text = read_at_most(project.folder / path, field, "shorten the statement", MAX_QUERY_BYTES)
    try:
        return text.decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        raise UsageError(field, "is not UTF-8", "save it in UTF-8") from None
