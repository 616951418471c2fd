"""Sections of ``dpstream.toml`` as frozen structs, as written; unknown fields are refused.

Paths, durations and instants are texts here.  The modules that use a section interpret it:
`pipelines.jobs.job` makes a job of ``[job.NAME]``, its table and its data set,
`pipelines.sql.load`
a catalog of the tables of a data set.
"""

from typing import Annotated, Any, Literal

import msgspec

from dpstream.accounting.errors import UsageError
from dpstream.accounting.fields import Field, FieldType
from dpstream.accounting.limits import MAX_EPSILON, MIN_DELTA
from dpstream.accounting.places import FileKind
from dpstream.accounting.regions.space import BudgetKind


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A section of the project file, or a table in one."""


#: Declares a place, or what changes no released byte: an environment and ``--set`` may change it.
PLACE = msgspec.Meta(extra={"place": True})
Place = Annotated[str, PLACE]


class UnitSection(Section, frozen=True):
    """``unit`` of a data set: the protected unit, and the type of its ids."""

    name: str
    type: FieldType = "string"


class AccountSection(Section, frozen=True):
    """``account`` of a data set: its id, and its file or ``spanner://PROJECT/INSTANCE/DATABASE``.

    `dpstream init`, `dpstream account create` and `dpstream table init` write it; only the last
    of them makes an account for a section without an id.
    """

    path: Place
    id: str | None = None


class DefaultsSection(Section, frozen=True):
    """``defaults`` of a data set: options of privacy that a statement may leave out.

    Attributes:
        epsilon, delta: of a statement.
        max_groups_contributed: groups of one unit that count.
    """

    epsilon: Annotated[float, msgspec.Meta(gt=0, le=MAX_EPSILON)] | None = None
    delta: Annotated[float, msgspec.Meta(ge=MIN_DELTA, lt=1)] | None = None
    max_groups_contributed: Annotated[int, msgspec.Meta(ge=1, le=4096)] | None = None


class DataSetSection(Section, frozen=True):
    """``[data_set.NAME]``: tables about the same privacy units, with one account and one secret.

    Attributes:
        unit: absent if each record has its own budget (`dpstream table`).
        secret: ``file:PATH``, ``env:NAME`` or ``gcp:projects/P/secrets/S/versions/N``: a reference
            to the secret that all noise is computed from.
        insecure_test_secret: 64 hex digits, for tests on public data: whoever knows them can
            subtract the noise.
        defaults: of options of statements.
    """

    unit: UnitSection | None = None
    account: AccountSection | None = None
    secret: Place | None = None
    insecure_test_secret: str | None = None
    defaults: DefaultsSection = DefaultsSection()

    def __repr__(self) -> str:
        return f"DataSetSection({self.unit!r}, {self.account!r}, {self.secret!r})"


class TimeColumn(Section, frozen=True):
    """``time_column`` as a table: how its values are written, if not as RFC 3339 in UTC.

    Attributes:
        unit: of whole numbers, and their texts, since 1970.
        format: of texts, in the directives of ``strptime``.
        zone: of times without an offset, as the tz database names it; default: UTC.
    """

    column: str
    unit: Literal["s", "ms", "us"] | None = None
    format: str | None = None
    zone: str | None = None


class CsvSection(Section, frozen=True):
    """``csv`` of a table: how its CSV files are written.

    Attributes:
        delimiter: between two fields.
        decimal, thousands: signs in numbers.
        encoding: of the text.
        skip_rows: lines before the header.
        names: of the columns, in order, of files without a header.
        line_breaks_in_quotes: whether a quoted field may go on in the next line.  One quote that is
            not closed then takes the rows of others into a field, so that the files must come from
            a program that writes CSV.
    """

    delimiter: str = ","
    decimal: Literal[".", ","] = "."
    thousands: str = ""
    encoding: str = "utf-8"
    skip_rows: Annotated[int, msgspec.Meta(ge=0, le=100)] = 0
    names: tuple[str, ...] | None = None
    line_breaks_in_quotes: bool = False

    @property
    def signed(self) -> bool:
        """Return whether numbers have other signs than a decimal point."""
        return self.decimal != "." or bool(self.thousands)


class RecordIdColumn(Section, frozen=True):
    """``record_id`` with the type of its values."""

    column: str
    type: str = "string"

    def field(self, where: str, *types: FieldType) -> Field:
        """Return the column with its type.

        Args:
            where: the place of ``record_id`` in the project file.
            types: those that can name a record of this table.

        Raises:
            UsageError: it has another type.
        """
        for kind in types:
            if self.type == kind:
                return Field(self.column, kind)
        fix = f"choose from {', '.join(map(repr, types))}"
        raise UsageError(f"{where}.type", "is not one of the choices", fix)


class Via(Section, frozen=True):
    """``unit_via``: the table that has the rows' unit, and pairs of (column, key column of it)."""

    table: str
    on: tuple[tuple[str, str], ...]


class DimensionSection(Section, frozen=True):
    """``dimension.NAME`` of a table with a budget for each record; each type uses some of the
    fields.
    """

    type: Literal["integer", "real", "timestamp", "category", "budget"]
    column: str | None = None
    low: float | str | None = None
    high: float | str | None = None
    step: float | str | None = None
    grid: float | str | None = None
    missing: Literal["point", "refuse"] | None = None
    values: tuple[str, ...] | None = None
    kind: BudgetKind | None = None
    most: float | None = None
    value: float | None = None


class AnalystQuota(Section, frozen=True):
    """``[table.NAME.quota.analyst.WHO]``: the most that an analyst may charge to one point."""

    epsilon: float | None = None
    rho: float | None = None


class QuotaSection(AnalystQuota, frozen=True):
    """``[table.NAME.quota]``: the quota of every analyst without a section of their own."""

    analyst: dict[str, AnalystQuota] = {}


class UnlockSection(Section, frozen=True):
    """``[table.NAME.unlock]``: the share of an initial budget that each day makes usable."""

    start: str
    share: float


class TableSection(Section, frozen=True):
    """``[table.NAME]``: the source of records.

    Exactly one of path, folder, topic, subscription and uri is set.

    Attributes:
        data_set: the table's data set; required if there are several.
        public: whether the table's rows may be published as they are; it has no unit then.
        path: a file or a pattern of Parquet, Arrow, ORC, CSV, JSON Lines or arrays of JSON (by its
            ending; text may be compressed).
        expect: names of the files that complete data has: a pattern with ``{hour}``, ``{day}`` or
            ``{month}``, such as ``raw/date={day}/*.csv.gz``.
        folder: a growing folder, or URL prefix, of files.
        format: of the files of a folder or the messages of a topic, or of a path whose ending
            does not show it.
        topic, servers, options: for Kafka; values ``env:NAME`` are looked up.
        subscription: for Pub/Sub, ``projects/P/subscriptions/S``.
        uri, remote: a SQLite or PostgreSQL database, and the table's name there.
        stamp: when a record became known: ``event_time`` (files), a stamp that the source gives,
            or the column with it.
        settle: how long a file must be unchanged before it is read; it delays releases and has no
            other effect.
        csv: how CSV files are written, if not with commas in UTF-8.
        columns: types by name, if the source has none.
        unit_column, unit_via: the unit of a row; exactly one of them in a private table of a data
            set with a unit.
        time_column: the event time, for jobs.
        record_id: the column that names a record.
        key_columns: for a public table that a job's query looks up: columns in which no two rows
            are equal.
        dimension, coordinates, regions, quota, unlock: for a table with a budget for each record:
            its public model, the private folder of its records as coordinates, the most regions
            of its account, and the data steward's rules.
    """

    data_set: str | None = None
    public: bool = False
    path: Place | None = None
    expect: Place | None = None
    folder: Place | None = None
    format: FileKind | None = None
    topic: Place | None = None
    servers: Place | None = None
    options: Annotated[dict[str, str], PLACE] = {}
    subscription: Place | None = None
    uri: Place | None = None
    remote: str | None = None
    stamp: str | None = None
    settle: Place = "2s"
    csv: CsvSection | None = None
    columns: dict[str, str] | None = None
    unit_column: str | None = None
    unit_via: Via | None = None
    time_column: str | TimeColumn | None = None
    record_id: str | RecordIdColumn | None = None
    key_columns: tuple[str, ...] = ()
    dimension: dict[str, DimensionSection] = {}
    coordinates: Place | None = None
    regions: int | None = None
    quota: QuotaSection | None = None
    unlock: UnlockSection | None = None


class WorkloadSection(Section, frozen=True):
    """``[workload.NAME]``: linear queries that are asked once about the records of a job; ``file``
    has
    the queries.
    """

    file: Place
    job: str


class CensusSection(Section, frozen=True):
    """``[census.NAME]``: census tables of one file of records.

    Attributes:
        parameters, data: folders with the Bureau's parameter files, and with the input files.
        data_set: the records' data set; required if there are several.
        program: ``p``: persons (t1, t2); ``h``: households (t3, t4).
        noise: ``census``: discrete Gaussian (zcdp) or geometric (puredp), as published;
            ``rounded``: rounded Gaussian (zcdp), which costs less.
        estimates: ``census``, or ``combined``: totals from both steps by least squares.
    """

    parameters: Place
    data: Place
    data_set: str | None = None
    program: Literal["p", "h"] = "p"
    noise: Literal["census", "rounded"] = "census"
    estimates: Literal["census", "combined"] = "census"


class ProjectSections(Section, frozen=True):
    """The whole file; a job is decoded only when it is used (`JobSection`)."""

    version: Literal[1]
    data_set: dict[str, DataSetSection] = {}
    table: dict[str, TableSection] = {}
    view: dict[str, str] = {}
    job: dict[str, dict[str, Any]] = {}
    workload: dict[str, WorkloadSection] = {}
    census: dict[str, CensusSection] = {}
    env: dict[str, dict[str, Any]] = {}
