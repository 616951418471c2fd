"""A session table of the project file: the public model of records with budgets of their own, its
steward's rules, and where its records, its account and its secret are.

    version = 1

    [data_set.rides]                  # without a unit: each record has a budget of its own
    secret = "file:rides.secret"
    account = { path = "rides.account.db", id = "7f3a0c5d9e1b2846" }   # `table init` writes it

    [table.rides]
    path = "rides-*.parquet"          # or .csv, .jsonl
    record_id = "ride_id"             # names a record for replace and delete
    coordinates = "rides.table"       # private: the records as coordinates

    [table.rides.dimension.pickup]
    type = "timestamp"
    low = "2013-01-01T00:00:00Z"
    high = "2014-01-01T00:00:00Z"
    step = "1h"
    grid = "1d"                       # questions are charged by whole cells of it

    [table.rides.dimension.longitude]
    type = "real"
    low = -74.3
    high = -73.7
    step = 0.001
    grid = 0.01
    missing = "point"                 # a place of its own for null and what is out of range

    [table.rides.dimension.vendor]
    type = "category"
    values = ["CMT", "VTS"]

    [table.rides.dimension.epsilon]
    type = "budget"
    kind = "epsilon"                  # or rho: a record may have one of each
    most = 4.0
    column = "budget"                 # or value = 1.0: of every record

    [table.rides.quota]               # the most that an analyst may charge to one point
    epsilon = 2.0
    [table.rides.quota.analyst.alice]
    epsilon = 3.0

    [table.rides.unlock]              # so much more of an initial budget is usable each day
    start = "2024-01-01T00:00:00Z"
    share = 0.1

The model has the data set's name.  Dimensions with their order, and ``regions``, are fixed before
the first record.  Quotas and the unlock schedule may change at any time.
"""

import contextlib
import dataclasses
import glob
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec

from dpstream.accounting import limits
from dpstream.accounting.errors import DpstreamError, UsageError, closest
from dpstream.accounting.fields import Field
from dpstream.accounting.places import ENDINGS, FileKind, below, file_kind
from dpstream.accounting.regions.amounts import MICRO, exact, initial_of
from dpstream.accounting.regions.space import Budget, Category, Integer, Real, Timestamp
from dpstream.accounting.sessions.table import (
    AnyDimension,
    Quotas,
    Rules,
    SessionTable,
    Unlock,
    quota_of,
)
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.pipelines.project.dialect import Reading, reading_of
from dpstream.pipelines.project.project import (
    Project,
    account_of,
    is_session_table,
    load_project,
    secret_of,
    section_named,
)
from dpstream.pipelines.project.sections import DimensionSection, TableSection, TimeColumn
from dpstream.pipelines.project.text import duration_micros, instant_micros
from dpstream.state.ledger.open import PROJECT_FILE, AccountPlace, project_option
from dpstream.state.private_log import keep_beside

#: Fields of a table that sessions use.
_FIELDS = {
    "data_set",
    "path",
    "record_id",
    "csv",
    "time_column",
    "dimension",
    "coordinates",
    "regions",
    "quota",
    "unlock",
}


@dataclasses.dataclass(frozen=True)
class Config:
    """A checked session table; paths are absolute.

    Attributes:
        name: name of its section.
        table: the public model.
        columns: one column of the records for each dimension; ``None``: it has a fixed ``value``.
        fixed: the budget that every record has, for such dimensions, else ``None``.
        record_id: the column that names a record, with strings or integers.
        records: glob of the files.
        folder: private folder of the records as coordinates.
        account: the data set's account; its id is empty until `table init` makes the account.
        secret: a reference to the secret.
        rules: the data steward's rules.
        reading: how the files are read.
        base: folder of the project file.
    """

    name: str
    table: SessionTable
    columns: tuple[str | None, ...]
    fixed: tuple[float | None, ...]
    record_id: Field | None
    records: str
    folder: Path
    account: AccountPlace
    secret: SecretSource
    rules: Rules
    reading: Reading
    base: Path

    @property
    def option(self) -> str:
        """The option of commands that names the project file; empty in its own folder."""
        return project_option(self.base / PROJECT_FILE)

    @property
    def snapshot(self) -> Path:
        """The file of the account's snapshot, which can be made again by replaying the account."""
        return self.folder / "account.npz"

    def secret_source(self) -> SecretSource:
        """Return the reference to the secret.

        Raises:
            UsageError: the data set names no secret, or the reference cannot be used.
        """
        return self.secret.required(
            f"data_set.{self.account.data_set}.secret", "is required to ask"
        )


def load_config(
    project: str | Path | None = None,
    table: str | None = None,
    environment: str | None = None,
    settings: Sequence[str] = (),
) -> Config:
    """Return a session table of a project file.

    Args:
        project: the file or its folder; ``None``: found from the current folder.
        table: name of the table; ``None``: the only one.
        environment: the value of ``--env``.
        settings: the values of ``--set``.

    Raises:
        UsageError: the file cannot be read, is not TOML, or has unknown or missing fields, or
            the table is not a session table.
    """
    return config_in(load_project(project, environment, settings), table)


def config_in(project: Project, table: str | None = None, without_account: bool = False) -> Config:
    """Return a session table of a decoded project file; raises as `load_config` does.

    Args:
        without_account: the data set need not name an account, nor its id.
    """
    name, section = session_table(project, table)
    where = f"table.{name}"
    data_set, owner = project.data_set(section.data_set, f"{where}.data_set")
    if owner.unit is not None:
        raise UsageError(
            f"{where}.data_set",
            f"is {data_set}, which has a unit; here each record has a budget of its own",
            "add a data set without a unit, and name it",
        )
    _check_fields(where, section)
    path, folder = section.path or "", section.coordinates or f"{name}.table"
    for field, text in (("path", path), ("coordinates", folder)):
        if "\0" in text:
            raise UsageError(f"{where}.{field}", "must be a path", "correct it")
    if section.coordinates == "":
        raise UsageError(f"{where}.coordinates", "must not be empty", "write a name")
    records = below(Path(glob.escape(str(project.folder))), path, f"{where}.path")
    kind_of(path, f"{where}.path")
    parts = section.dimension
    with located(name, parts):
        dimensions = tuple(_dimension(f"{where}.dimension.{n}", n, p) for n, p in parts.items())
        regions = limits.MAX_REGIONS if section.regions is None else section.regions
        model = SessionTable(name=data_set, dimensions=dimensions, cap=regions)
        rules = _rules(where, section)
    columns = tuple(None if p.value is not None else p.column or n for n, p in parts.items())
    time = section.time_column
    time_name = time.column if isinstance(time, TimeColumn) else time
    if time_name is not None and time_name not in columns:
        fix = closest(time_name, [column for column in columns if column is not None])
        raise UsageError(f"{where}.time_column", "is the column of no dimension", fix)
    account = account_of(project, data_set, to_make=without_account)
    keep_beside(account.path, project.path)
    return Config(
        name=name,
        table=model,
        columns=columns,
        fixed=tuple(p.value for p in parts.values()),
        record_id=_record_id(where, section),
        records=str(records),
        folder=below(project.folder, folder, f"{where}.coordinates"),
        account=account,
        secret=secret_of(project, data_set),
        rules=rules,
        reading=reading_of(where, section, _numbers(section)),
        base=project.folder,
    )


def _numbers(section: TableSection) -> tuple[str, ...]:
    """Return the columns whose texts are numbers."""
    numeric = ("integer", "real", "budget")
    return tuple(
        part.column or name for name, part in section.dimension.items() if part.type in numeric
    )


def session_table(project: Project, name: str | None) -> tuple[str, TableSection]:
    """Return a session table by its name; without one the only session table.

    Raises:
        UsageError: there is no such table, or its records have no budgets.
    """
    tables = {n: t for n, t in project.sections.table.items() if is_session_table(t)}
    if name is not None and name not in project.sections.table:
        fix = closest(name, tables or project.sections.table)
        raise UsageError("table", f"no table '{name}' in {PROJECT_FILE}", fix)
    if not tables or (name is not None and name not in tables):
        raise UsageError(
            f"table.{name or 'NAME'}.dimension",
            "is required: a session asks a table whose records are points of public dimensions",
            'add dimension.COLUMN = { ... }, one of them of type = "budget"',
        )
    return section_named(tables, "table", name)


@contextlib.contextmanager
def located(name: str, dimensions: Collection[str]) -> Iterator[None]:
    """Rewrite errors about a model so that they name the fields of the table's section."""
    try:
        yield
    except DpstreamError as error:
        field = error.field.removeprefix("dimension ")
        parts = {"dimensions": "dimension", "dimension": "dimension", "table.cap": "regions"}
        if field in dimensions:
            part = f"dimension.{field}"
        elif field.startswith("unlock."):
            part = field
        elif field in parts:
            part = parts[field]
        else:
            raise
        raise type(error)(f"table.{name}.{part}", error.rule, error.fix) from None


def _check_fields(where: str, section: TableSection) -> None:
    """Refuse fields that sessions do not use, and a table without a path."""
    for field in msgspec.structs.fields(TableSection):
        default = field.default if field.default_factory is msgspec.NODEFAULT else {}
        if field.name not in _FIELDS and getattr(section, field.name) != default:
            raise UsageError(
                f"{where}.{field.encode_name}",
                "is not for a table whose records have budgets of their own",
                "omit it",
            )
    if not section.path:
        raise UsageError(
            f"{where}.path",
            "is required: records come from files of Parquet, CSV or JSON Lines",
            'add path = "records/*.parquet"',
        )


def _record_id(where: str, section: TableSection) -> Field | None:
    record_id = section.record_id
    if record_id is None or isinstance(record_id, str):
        return None if record_id is None else Field(record_id)
    return record_id.field(f"{where}.record_id", "string", "int")


def kind_of(path: str, field: str) -> FileKind:
    """Return one of `places.FILE_KINDS`, by a file's name.

    Raises:
        UsageError: the name ends otherwise.
    """
    kind = file_kind(path)
    if kind is None:
        raise UsageError(
            field, "is of no known kind", f"use {', '.join(ENDINGS)} (text perhaps with .gz)"
        )
    return kind


#: What each type must have, and what it may have beside name, type and column.
_PARTS: dict[str, tuple[set[str], set[str]]] = {
    "integer": ({"low", "high"}, {"grid", "missing"}),
    "real": ({"low", "high", "step"}, {"grid", "missing"}),
    "timestamp": ({"low", "high"}, {"step", "grid", "missing"}),
    "category": ({"values"}, {"grid", "missing"}),
    "budget": ({"most"}, {"kind", "step", "grid", "value"}),
}


def _dimension(where: str, name: str, part: DimensionSection) -> AnyDimension:
    needed, more = _PARTS[part.type]
    for field in ("low", "high", "step", "grid", "missing", "values", "kind", "most", "value"):
        given = getattr(part, field) is not None
        if given and field not in needed | more:
            raise UsageError(f"{where}.{field}", f"is not for type {part.type}", "remove it")
        if not given and field in needed:
            raise UsageError(f"{where}.{field}", f"is required for type {part.type}", "add it")
    if part.value is not None and part.column is not None:
        raise UsageError(f"{where}.value", "is given, and a column too", "keep one of them")
    common: dict[str, Any] = {"name": name}
    if part.missing is not None:
        common["missing"] = part.missing
    if part.type == "timestamp":
        return _timestamp(where, part, common)
    step = Fraction(1)
    if part.step is not None:
        step = exact(part.step, f"{where}.step", part.step)
    if part.type == "budget":
        step = step if part.step is not None else Fraction(1, MICRO)
        micro = _coordinates(f"{where}.step", step * MICRO, "millionths")
        common |= {"kind": part.kind or "epsilon", "most": part.most, "step": micro}
    if part.grid is not None:
        common["grid"] = _steps(where, exact(part.grid, f"{where}.grid", part.step), step)
    if part.type == "category":
        codes = tuple(unicodedata.normalize("NFC", code) for code in part.values or ())
        return Category(codes=codes, **common)
    if part.type == "budget":
        if part.value is not None:
            initial_of(part.value, f"{where}.value")
        return Budget(**common)
    low, high = exact(part.low or 0, f"{where}.low"), exact(part.high or 0, f"{where}.high")
    if part.type == "integer":
        return Integer(
            low=_coordinates(f"{where}.low", low, "1"),
            high=_coordinates(f"{where}.high", high, "1"),
            **common,
        )
    return Real(low=float(low), high=float(high), step=float(step), **common)


def _timestamp(where: str, part: DimensionSection, common: dict[str, Any]) -> Timestamp:
    low, high = (
        instant_micros(f"{where}.{name}", _text(f"{where}.{name}", getattr(part, name)))
        for name in ("low", "high")
    )
    step = duration_micros(f"{where}.step", _text(f"{where}.step", part.step or "1s"))
    if step < 1:
        raise UsageError(f"{where}.step", "must be a microsecond or more", "use a longer one")
    if part.grid is not None:
        grid = duration_micros(f"{where}.grid", _text(f"{where}.grid", part.grid))
        common["grid"] = _steps(where, Fraction(grid), Fraction(step))
    return Timestamp(low=low, high=high, step=step, **common)


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise UsageError(field, "must be a text", "write it in quotes")
    return value


def _coordinates(field: str, value: Fraction, unit: str) -> int:
    if value.denominator != 1 or value.numerator > limits.MAX_COORDINATES << 22:
        raise UsageError(field, f"must be a whole number of {unit}", "round it")
    return value.numerator


def _steps(where: str, grid: Fraction, step: Fraction) -> int:
    """Return a cell's width in coordinates."""
    if step <= 0:
        raise UsageError(f"{where}.step", "must be above 0", "use a positive step")
    return _coordinates(f"{where}.grid", grid / step, "steps")


def _rules(where: str, section: TableSection) -> Rules:
    quotas, unlock = Quotas(), None
    if section.quota is not None:
        named, field = section.quota.analyst, f"{where}.quota"
        quotas = Quotas(
            epsilon={
                who: quota_of(q.epsilon, f"{field}.analyst.{who}.epsilon")
                for who, q in named.items()
                if q.epsilon is not None
            },
            rho={
                who: quota_of(q.rho, f"{field}.analyst.{who}.rho")
                for who, q in named.items()
                if q.rho is not None
            },
            default_epsilon=_quota(section.quota.epsilon, f"{field}.epsilon"),
            default_rho=_quota(section.quota.rho, f"{field}.rho"),
        )
    if section.unlock is not None:
        start = instant_micros(f"{where}.unlock.start", section.unlock.start)
        unlock = Unlock(start=start, share=section.unlock.share)
    return Rules(quotas=quotas, unlock=unlock)


def _quota(value: float | None, field: str) -> int | None:
    return None if value is None else quota_of(value, field)
