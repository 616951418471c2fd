"""A job of the project file: its parts, checked, and the public plan that they define.

``load_job`` is the one entry.  Durations and times are texts that are parsed exactly; paths are
resolved against the project file's folder.  Everything that decides what is released is part of
``Job.plan``; threads and sizes of batches are not, and cannot change a released byte.
"""

import contextlib
import glob
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from dpstream.accounting import limits
from dpstream.accounting.calendars import Calendar
from dpstream.accounting.errors import DpstreamError, UsageError, required
from dpstream.accounting.extras import require
from dpstream.accounting.fields import Aggregate, Field
from dpstream.accounting.places import below, files_at, refuse_both
from dpstream.accounting.plan.plan import Plan, with_privacy
from dpstream.accounting.plan.privacy import Optimise, Privacy
from dpstream.accounting.weights import SelectionWeights, usual_weights
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.pipelines.jobs.committed import check_tuning
from dpstream.pipelines.jobs.time_axis import remembered, timeline_of
from dpstream.pipelines.project.dialect import NUMBERS, PLAIN, Reading, reading_of
from dpstream.pipelines.project.expected import Expectation
from dpstream.pipelines.project.job_section import (
    SERVICE_SINKS,
    JobSection,
    SinkSection,
    SinkTarget,
)
from dpstream.pipelines.project.project import Project, account_of, load_project, secret_of
from dpstream.pipelines.project.sections import (
    RecordIdColumn,
    Section,
    TableSection,
    TimeColumn,
    UnitSection,
)
from dpstream.pipelines.project.source import (
    GIVEN_COLUMNS,
    MESSAGE_ID,
    Query,
    Source,
    check_fields,
    check_source,
    described,
    query_text,
    source_of,
    source_path,
    written_source_name,
)
from dpstream.pipelines.project.text import duration_micros
from dpstream.state import open as stores
from dpstream.state.disk_errors import file_errors
from dpstream.state.ledger.open import AccountPlace
from dpstream.state.private_log import keep_beside

if TYPE_CHECKING:
    from dpstream.pipelines.jobs.keys import JobCells

#: Stands for the digest of a public list that is not read yet.
_UNREAD = "0" * 32
#: Run ids of tests on public data (32 hex digits), by the absolute path of the project file:
#: whoever knows one and the secret can subtract the noise.  Nothing that a user writes or types is
#: put here.
TEST_RUN_IDS = dict[Path, str]()


class StorePlace(Section, frozen=True):
    """The job's store (``sqlite:PATH`` or ``spanner://PROJECT/INSTANCE/DATABASE``).

    Attributes:
        shards, keep_releases: see `pipelines.project.job_section.JobSection`.
    """

    store: str
    shards: int = limits.DEFAULT_SHARDS
    keep_releases: str | None = None

    @property
    def path(self) -> Path | None:
        """The file of the embedded store; ``None`` if the store is not a file."""
        kind, _, path = self.store.partition(":")
        return Path(path) if kind == "sqlite" else None


class Job(msgspec.Struct, frozen=True):
    """A checked job: its section, the places that it names, and the public plan.

    Attributes:
        path: the project file.
        name: the job's name in it.
        section: the job as written; what is not in the plan is read from it.
        source, state, sink, dead_letter, public_keys, ledger, secret: places; every path in them is
            absolute.
        plan: what is released and promised; checked.
        reading: how the files' texts are read.
        cells: the domain that its key columns are mapped to, if it answers a workload.
        batch_rows: rows of an Arrow batch at ingest.  No project file sets it.
        test_run_id: the id of its run, in tests on public data (`TEST_RUN_IDS`).
    """

    path: Path
    name: str
    section: JobSection
    source: Source
    state: StorePlace
    sink: SinkSection
    dead_letter: str
    public_keys: str | None
    ledger: AccountPlace | None
    secret: SecretSource
    plan: Plan
    reading: Reading = PLAIN
    cells: "JobCells | None" = None
    batch_rows: int = limits.BATCH_ROWS
    test_run_id: str | None = None

    @property
    def expectation(self) -> Expectation | None:
        """The names of files that complete data has, by days of the job's calendar, else of the
        zone of its times.

        Raises:
            UsageError: ``expect`` is no rule.
        """
        text, column = self.source.expect, self.reading.time
        zone = self.plan.timeline.zone or (column and column.zone) or "UTC"
        return None if text is None else Expectation.of(text, zone)

    @property
    def key(self) -> tuple[Field, ...]:
        """The key columns of the input."""
        return self.plan.key if self.cells is None else self.cells.domain.key

    @property
    def columns(self) -> tuple[str, ...]:
        """Input columns that the job reads, without duplicates.

        They are unit, key, time, stamp, values and record id; or, with a query, those that the
        query reads, and unit, time, stamp and record id.
        """
        query = self.source.query
        keys = [f.column for f in self.key] if query is None else list(query.columns or ())
        names = [self.plan.unit.column, *keys, self.plan.event_time]
        if self.plan.stamp != "event_time":
            names.append(self.plan.stamp)
        if query is None:
            names += [a.column for a in self.plan.aggregates if a.column is not None]
        names += [] if self.plan.record_id is None else [self.plan.record_id.column]
        return tuple(dict.fromkeys(names))

    def with_key(self, key: tuple[Field, ...]) -> "Job":
        """Return the job with other key columns of its input, to read records, not to run it."""
        return msgspec.structs.replace(self, plan=msgspec.structs.replace(self.plan, key=key))

    @property
    def data_columns(self) -> tuple[str, ...]:
        """``columns`` without those that the source itself adds."""
        if not self.source.unbounded:
            return self.columns
        return tuple(name for name in self.columns if name not in GIVEN_COLUMNS)

    @property
    def insecure(self) -> bool:
        """Return whether a fixed test secret or run id is set; the output must be marked then."""
        return (self.secret.insecure_test_secret or self.test_run_id) is not None


def load_job(
    path: str | Path | None = None,
    name: str | None = None,
    *,
    environment: str | None = None,
    settings: Sequence[str] = (),
    workload: bool = False,
) -> Job:
    """Read and check a job of a project file.

    Args:
        path: the project file or its folder; ``None``: the one that commands find from the
            current folder.
        name: the job's name; ``None``: the only one.
        environment: the environment whose places are used.
        settings: further places, each ``FIELD=VALUE``.
        workload: the job answers a workload, whose domain replaces the keys: they are public, so
            that delta may be 0.  Such a job is asked once: its plan has one trigger time.

    Raises:
        UsageError: the file cannot be read, has unknown or missing keys, or values that cannot be
            used.
        PolicyError: settings with which there is no privacy guarantee, or a [choice] that its
            account does not have.
    """
    project = load_project(path, environment, settings)
    return job_in(project, name, workload)


def job_in(
    project: Project,
    name: str | None = None,
    workload: bool = False,
    query: str | None = None,
) -> Job:
    """Return a checked job of a decoded project file; raises as `load_job` does.

    Args:
        query: the text of its query, in place of that of a file.
    """
    name, section = project.job(name)
    try:
        job = _checked(project, name, section, workload, query)
        check_tuning(job)
    except DpstreamError as error:
        relocate(error, project, name)
    return job


def _checked(
    project: Project, name: str, section: JobSection, workload: bool, query: str | None
) -> Job:
    """Return the job of its section; errors name its fields as they are in the section."""
    path, folder = project.path, project.folder
    keep_beside(path)
    table, data_set_name, data_set, unit = described(project, name, section.table)
    if query is None and section.query is not None:
        query = query_text(project, name, section.query)
    source = source_of(project, section.table, query)
    _check_section(section, source, table.unit_column)
    public_keys = section.public_keys
    if public_keys is not None:
        public_keys = str(below(folder, public_keys, "public_keys"))
    where = f"table.{section.table}"
    numbers = _numbers(section, source)
    replace = msgspec.structs.replace
    plan = _plan(project, name, section, table, unit, source, workload)
    store = stores.backend(_store(section.store) or f"sqlite:{name}.store.db").below(folder).url
    if plan.timeline.calendar is not None:
        plan = _as_begun(plan, plan.timeline.calendar, store)
    reading = reading_of(where, table, numbers)
    time, taken = reading.time, {field.column for field in (plan.unit, *plan.key)}
    if time is not None and time.column in taken and source.query is None:
        raise UsageError(
            "key",
            f"names '{time.column}', or the unit does: its texts become instants, as the time's",
            "give it a column of its own in the input",
        )
    plan = replace(plan, reading=reading.text(plan.timeline.end or plan.timeline.start))
    plan = _one_family(plan, section.mechanism.optimise)
    source = replace(source, path=source_path(folder, source))
    _refuse_both(source, public_keys, folder)
    if public_keys is not None:
        from dpstream.pipelines.jobs.keys import public_key_digest

        digest = public_key_digest(Path(public_keys), plan.key)
        plan = replace(plan, public_keys=digest).check()
    if source.query is not None:
        source, digest = _with_query(source, source.query, plan, folder, time)
        plan = replace(plan, query=digest).check()
    ledger = None if data_set.account is None else account_of(project, data_set_name)
    keep_beside(store, None if ledger is None else ledger.path, path)
    sink, dead_letter = section.sink, section.dead_letter or f"dead_letter/{name}"
    if sink.path:
        sink = replace(sink, path=str(below(folder, sink.path, "sink.path")))
    job = Job(
        path=path,
        name=name,
        section=section,
        source=source,
        state=StorePlace(store, section.shards, section.keep_releases),
        sink=sink,
        dead_letter=str(below(folder, dead_letter, "dead_letter")),
        public_keys=public_keys,
        ledger=ledger,
        secret=secret_of(project, data_set_name),
        plan=plan,
        reading=reading,
        test_run_id=TEST_RUN_IDS.get(path),
    )
    _ = job.expectation  # refused here if it is no rule
    return job


def _as_begun(plan: Plan, calendar: Calendar, store: str) -> Plan:
    """Return the plan with the calendar's list of the run in the store, if one was begun.

    What the machine has learnt of time zones since then changes no window of it.
    """
    from dpstream.accounting.budget.calibration import calendar_of

    with contextlib.suppress(DpstreamError, OSError):  # who opens the store says what is wrong
        identity = stores.backend(store).identity()
        listed = None if identity is None else calendar_of(identity.calibration)
        same = ("unit", "zone", "begin", "end")
        if listed and all(getattr(listed, name) == getattr(calendar, name) for name in same):
            timeline = msgspec.structs.replace(plan.timeline, calendar=listed)
            return msgspec.structs.replace(plan, timeline=timeline)
    return plan


def _numbers(section: JobSection, source: Source) -> tuple[str, ...]:
    """Columns whose texts are numbers: those that are summed, or that the query declares."""
    if source.query is not None:
        declared = (source.query.columns or {}).items()
        return tuple(name for name, kind in declared if kind.upper() in NUMBERS)
    return tuple(part.column for part in section.aggregate.values() if part.column is not None)


def _plan(
    project: Project,
    name: str,
    job: JobSection,
    table: TableSection,
    unit: UnitSection,
    source: Source,
    workload: bool,
) -> Plan:
    """Return the checked plan of a job; a list of public keys is not read yet."""
    time, listed = table.time_column, job.public_keys is not None
    unit_column = required(table.unit_column, "a job's table has a unit column")
    # The cells of a workload are named by its domain, which is charged with the job's plan.
    domain = workload and not listed and job.budget.delta == 0
    plan = Plan(
        source=written_source_name(project, name),
        unit=Field(unit_column, unit.type),
        key=tuple(Field(part) if isinstance(part, str) else part for part in job.key),
        event_time=time if isinstance(time, str) else required(time, "a job has a time").column,
        aggregates=tuple(
            Aggregate(column, **msgspec.structs.asdict(part))
            for column, part in job.aggregate.items()
        ),
        timeline=timeline_of(job, source),
        privacy=_privacy(job, domain or listed, workload),
        stamp=source.stamp_column,
        record_id=_record_id(table.record_id, source),
        remember=remembered(job),
        public_keys=_UNREAD if domain or listed else None,
    )
    return (plan.once() if domain else plan).check()


def _check_section(section: JobSection, source: Source, unit: str | None) -> None:
    """Check what does not enter the plan.

    Args:
        unit: the unit's column.
    """
    check_source(source)
    sink = section.sink
    target = SERVICE_SINKS.get(sink.kind, SinkTarget(("path",)))
    field = target.fields[0]
    if target.example and not re.fullmatch(target.form, getattr(sink, field) or ""):
        raise UsageError(
            f"sink.{field}", f"is no full name of {sink.kind}", f"write {target.example}"
        )
    fields = tuple(field for field in sink.__struct_fields__ if field != "kind")
    allowed = ("formulas",) if sink.kind == "csv" else ()
    check_fields("sink", sink, target.fields, allowed, fields)
    if section.publication is not None:
        columns = {part if isinstance(part, str) else part.column for part in section.key}
        columns |= {*section.aggregate, *((unit,) if unit else ())}
        for name in sorted(section.publication.labels.keys() - columns):
            raise UsageError(
                f"publication.labels.{name}",
                "labels no column that is published, nor the unit's",
                f"label one of {', '.join(sorted(columns))}",
            )
    if section.keep_releases is not None:
        duration_micros("keep_releases", section.keep_releases)
        if not source.unbounded:
            raise UsageError(
                "keep_releases",
                f"is for sources without end, and table.format is '{source.kind}'",
                "omit it; `dpstream state expire --releases-before` drops releases of such a job",
            )


#: Where a field stands, by its first part, if not in the job's own section.
_SECTIONS = {
    "table": ("table.{table}", "table."),
    "secret": ("data_set.{data_set}", ""),
    "insecure_test_secret": ("data_set.{data_set}", ""),
    "account": ("data_set.{data_set}", ""),
    "unit": ("data_set.{data_set}", ""),
}


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


def _store(text: str | None) -> str | None:
    """Return a store's URL; a path alone is a SQLite file, unless it was meant to be a URL."""
    if text is None or "://" in text or text.startswith("spanner:"):
        return text
    return f"sqlite:{text.removeprefix('sqlite:')}"


def _one_family(plan: Plan, optimise: Optimise | None) -> Plan:
    """Return the plan with one family of noise, if it has private keys.

    Args:
        plan: checked; optimise: as the file states it.  Of more than one period it is ``lifetime``
            by default: each period is a charge, and plain ones add up in epsilon, so that a stream
            would reach its account's limit much sooner.
    """
    if plan.privacy.strategy != "auto" or plan.public_keys is not None:
        return plan
    from dpstream.accounting.tuning.starred import resolved  # a reference population

    if optimise is None and plan.timeline.periods != 1:
        plan = with_privacy(plan, optimise="lifetime")
    return resolved(plan)


def _with_query(
    source: Source, query: Query, plan: Plan, folder: Path, time: TimeColumn | None
) -> tuple[Source, str]:
    """Return the source with the types of its checked query, and the query's digest.

    Raises:
        UsageError: the query takes a time column whose writing is declared for something else than
            the instants that it gets, which would be NULL in each row.
    """
    require("sql", "query")
    from dpstream.pipelines.statements.row_query import compiled

    compilation = compiled(source, plan, folder)
    columns = {own: compilation.types[name] for name, own in compilation.reads.items()}
    kind = "TIMESTAMP" if time is None else columns.get(time.column, "TIMESTAMP")
    if time is not None and kind not in ("TIMESTAMP", "DATETIME"):
        raise UsageError(
            "query",
            f"reads '{time.column}' as {kind}, but gets instants, because the table declares how"
            " its times are written",
            f'write {time.column} = "TIMESTAMP" in table.{query.table}.columns',
        )
    replace = msgspec.structs.replace
    return replace(source, query=replace(query, columns=columns)), compilation.digest


def _refuse_both(source: Source, keys: str | None, folder: Path) -> None:
    """Refuse public keys, or a public table of the query, that the source reads as private."""
    query = source.query
    public = {} if keys is None else {"public_keys": glob.escape(keys)}
    for table in () if query is None else query.look_up:
        public[f"table.{table.name}.path"] = str(folder / table.path)
    if public and source.path and "://" not in source.path:
        path = glob.escape(source.path) if source.kind == "folder" else source.path
        with file_errors("table.path", "has a folder that cannot be listed"):
            files = {field: files_at(pattern) for field, pattern in public.items()}
            own = files_at(path)
        refuse_both({"table.path": own}, files)


def _record_id(given: str | RecordIdColumn | None, source: Source) -> Field | None:
    """Return the record id; Pub/Sub needs one, because a message has no fixed position."""
    if given is None:
        return Field(MESSAGE_ID) if source.kind == "pubsub" else None
    if isinstance(given, str):
        return Field(given)
    return given.field("table.record_id", "string", "int", "bytes")


def _privacy(job: JobSection, public: bool, workload: bool) -> Privacy:
    """Return the guarantee and the mechanism of a job.

    Args:
        public: whether keys are public.
        workload: see `load_job`.  Its cells replace private keys, so that no family of noise is
            chosen for the keys; mixed cells have Gaussian noise.
    """
    mechanism = msgspec.structs.asdict(job.mechanism)
    auto = job.mechanism.strategy == "auto"
    resolved: dict[str, Any] = {
        "epsilon": job.budget.epsilon,
        "delta": job.budget.delta,
        "contributions": job.contributions,
        "per_key_bound": job.per_key_bound,
        "weights": _weights(job, public),
        "usual_weights": job.mechanism.weights == "auto",
        "strategy": "blt" if auto and workload and not public else job.mechanism.strategy,
        "optimise": job.mechanism.optimise or "period",
    }
    return Privacy(**(mechanism | resolved))


def _weights(job: JobSection, public: bool) -> SelectionWeights | None:
    """Return the selection weights; ``auto``: the usual ones for the job's kind."""
    mechanism = job.mechanism
    if isinstance(mechanism.weights, SelectionWeights):
        return mechanism.weights
    if mechanism.weights == "uniform" or mechanism.strategy == "geometric":
        return None
    return usual_weights(
        job.contributions,
        combine=mechanism.combine,
        selects=not public,
        fused=any(a.kind == "units" for a in job.aggregate.values()) and not mechanism.skip,
        skip=bool(mechanism.skip),
    )
