"""Sections of ``dpstream.toml`` as frozen structs, as written; unknown fields are refused.

Places, durations and instants are texts here.  What they mean together is worked out by the
modules that use a section: `pipelines.jobs.parts` makes a job of ``[job.NAME]``, its table and its
data set, `pipelines.sql.load` a catalog of the tables of a data set.
"""

from typing import Any, Literal

import msgspec

from dpstream.accounting.fields import Field, FieldType


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A section of the project file, or a table in one."""


class UnitSection(Section, frozen=True):
    """``unit`` of a data set: what is protected, and the type of its ids."""

    name: str
    type: FieldType = "string"


class AccountSection(Section, frozen=True):
    """``account`` of a data set: its file or ``spanner://PROJECT/INSTANCE/DATABASE``, and its id,
    as `dpstream init`, `dpstream account create` and `dpstream session init` write it; only the
    last of them makes an account where there is no id yet."""

    path: str
    id: str | None = None


class DataSetSection(Section, frozen=True):
    """``[data_set.NAME]``: tables about the same privacy units, with one account and one secret.

    Attributes:
        unit: absent where each record has a budget of its own (`dpstream session`).
        secret: ``file:PATH``, ``env:NAME`` or ``gcp:projects/P/secrets/S/versions/N``: what all
            noise comes from.
        insecure_test_secret: 64 hex digits, for tests on public data: who knows them can subtract
            the noise.
    """

    unit: UnitSection | None = None
    account: AccountSection | None = None
    secret: str | None = None
    insecure_test_secret: str | None = None

    def __repr__(self) -> str:
        return f"DataSetSection({self.unit!r}, {self.account!r}, {self.secret!r})"


class TimeColumn(Section, frozen=True):
    """``time_column`` with a type: whole numbers in Parquet that count microseconds since 1970."""

    column: str
    type: Literal["micros"] | None = None


class Via(Section, frozen=True):
    """``unit_via``: the table that owns the rows, and pairs of (column, key column of it)."""

    table: str
    on: tuple[tuple[str, str], ...]


class DimensionSection(Section, frozen=True):
    """``dimension.NAME`` of a table with a budget for each record; each type has some of these."""

    type: Literal["integer", "real", "timestamp", "category", "budget"]
    column: str | None = None
    low: float | str | None = None
    high: float | str | None = None
    step: float | str | None = None
    grid: float | str | None = None
    missing: Literal["point", "refuse"] | None = None
    values: tuple[str, ...] | None = None
    kind: Literal["epsilon", "rho"] | None = None
    most: float | None = None
    value: float | None = None


class AnalystQuota(Section, frozen=True):
    """``[table.NAME.quota.analyst.WHO]``: the most that an analyst may charge to one point."""

    epsilon: float | None = None
    rho: float | None = None


class QuotaSection(Section, frozen=True):
    """``[table.NAME.quota]``: of all analysts that are not named."""

    epsilon: float | None = None
    rho: float | None = None
    analyst: dict[str, AnalystQuota] = {}


class UnlockSection(Section, frozen=True):
    """``[table.NAME.unlock]``: so much more of an initial budget is usable each day."""

    start: str
    share: float


class TableSection(Section, frozen=True):
    """``[table.NAME]``: where records come from; exactly one of path, folder, topic, subscription
    and uri.

    Attributes:
        data_set: whose; needed where there are several.
        public: its rows may be shown as they are; it has no unit.
        path: a file or a pattern of Parquet, CSV or JSON Lines (by its ending, perhaps compressed).
        folder: a folder, or a URL prefix, of files that grows.
        format: of the files of a folder or the messages of a topic, or of a path whose ending
            does not tell.
        topic, servers, options: of Kafka; values ``env:NAME`` are looked up.
        subscription: of Pub/Sub, ``projects/P/subscriptions/S``.
        uri, remote: of a SQLite or PostgreSQL database, and the table's name there.
        stamp: when a record became known: ``event_time`` (files), a stamp that the source gives,
            or the column that carries it.
        settle: how long a file must lie unchanged before it is read; it delays releases and
            decides nothing.
        columns: types by name where the source has none.
        unit_column, unit_via: whose a row is; exactly one of them in a private table of a data
            set with a unit.
        time_column: of jobs; record_id: the column that names a record.
        key_columns: of a public table that a job's query looks up: no two rows have them in common.
        dimension, coordinates, regions, quota, unlock: of a table with a budget for each record:
            its public model, the private folder of its records as coordinates, the most regions
            of its account, and its steward's rules.
    """

    data_set: str | None = None
    public: bool = False
    path: str | None = None
    folder: str | None = None
    format: Literal["parquet", "csv", "jsonl", "json"] | None = None
    topic: str | None = None
    servers: str | None = None
    options: dict[str, str] = {}
    subscription: str | None = None
    uri: str | None = None
    remote: str | None = None
    stamp: str | None = None
    settle: str = "2s"
    columns: dict[str, str] | None = None
    unit_column: str | None = None
    unit_via: Via | None = None
    time_column: str | TimeColumn | None = None
    record_id: str | Field | None = None
    key_columns: tuple[str, ...] = ()
    dimension: dict[str, DimensionSection] = {}
    coordinates: str | None = None
    regions: int | None = None
    quota: QuotaSection | None = None
    unlock: UnlockSection | None = None


class WorkloadSection(Section, frozen=True):
    """``[workload.NAME]``: linear queries that are asked once, of the job whose records they
    count; ``file`` has the queries."""

    file: str
    job: str


class CensusSection(Section, frozen=True):
    """``[census.NAME]``: census tables of one file of records.

    Attributes:
        parameters, data: folders with the Bureau's parameter files, and with the input files.
        data_set: whose records they are; needed where there are several.
        program: ``p``: persons (t1, t2); ``h``: households (t3, t4).
        noise: ``census``: discrete Gaussian (zcdp) or geometric (puredp), as published;
            ``rounded``: rounded Gaussian (zcdp), which costs less.
        estimates: ``census``, or ``combined``: totals from both steps by least squares.
    """

    parameters: str
    data: str
    data_set: str | None = None
    program: Literal["p", "h"] = "p"
    noise: Literal["census", "rounded"] = "census"
    estimates: Literal["census", "combined"] = "census"


class ProjectSections(Section, frozen=True):
    """The whole file; ``[job.NAME]`` is decoded where a job is asked for (`JobSection`)."""

    version: Literal[1]
    data_set: dict[str, DataSetSection] = {}
    table: dict[str, TableSection] = {}
    job: dict[str, dict[str, Any]] = {}
    workload: dict[str, WorkloadSection] = {}
    census: dict[str, CensusSection] = {}
    env: dict[str, dict[str, Any]] = {}
