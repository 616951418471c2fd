"""A job of the project file: its parts, checked, and the public plan that they define.

``load_job`` is the one entry.  Durations and times are texts that are parsed exactly; paths are
resolved against the project file's folder.  Everything that decides what is released is part of
``Job.plan``; threads and sizes of batches are not, and cannot change a released byte.
"""

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from dpstream.accounting import limits
from dpstream.accounting.errors import DpstreamError, UsageError
from dpstream.accounting.extras import require
from dpstream.accounting.fields import Field
from dpstream.accounting.places import below, files_at, refuse_both
from dpstream.accounting.plan.plan import Plan, with_privacy
from dpstream.accounting.plan.privacy import Optimise, Privacy
from dpstream.accounting.plan.timeline import Timeline
from dpstream.accounting.weights import SelectionWeights, usual_weights
from dpstream.pipelines.jobs.committed import check_tuning
from dpstream.pipelines.jobs.parts import parts_of, relocate, written_source_name
from dpstream.pipelines.project.job_parts import (
    GIVEN_COLUMNS,
    MESSAGE_ID,
    JobParts,
    KeysConfig,
    PrivacyConfig,
    QueryConfig,
    SchemaConfig,
    SinkConfig,
    SourceConfig,
    StateConfig,
    check_parts,
)
from dpstream.pipelines.project.job_section import ChoiceSection
from dpstream.pipelines.project.project import Project, load_project
from dpstream.pipelines.project.text import (
    duration_micros,
    instant_micros,
)
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


class Job(msgspec.Struct, frozen=True):
    """A checked job: tables with absolute paths, and the public plan.

    Attributes:
        path: the project file.
        name: the job's name in it.
        source, schema, privacy, keys, state, ledger, sink: the job's parts; every path in them is
            absolute.
        plan: what is released and promised; checked.
        tuning: where C and bounds come from, if the job states it.
        cells: the domain that its key columns are mapped to, if it answers a workload.
        threads: see `pipelines.project.job_section.JobSection`.
        batch_rows: rows of an Arrow batch at ingest.  No project file sets it.
        test_run_id: the id of its run, in tests on public data (`TEST_RUN_IDS`).
    """

    path: Path
    name: str
    source: SourceConfig
    schema: SchemaConfig
    privacy: PrivacyConfig
    keys: KeysConfig
    state: StateConfig
    ledger: AccountPlace | None
    sink: SinkConfig
    plan: Plan
    tuning: ChoiceSection | None = None
    cells: "JobCells | None" = None
    threads: int | None = None
    batch_rows: int = limits.BATCH_ROWS
    test_run_id: str | None = None

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

    def reading(self, key: tuple[Field, ...]) -> "Job":
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
        return (self.privacy.secret.insecure_test_secret or self.test_run_id) is not None


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
    name, _ = project.job(name)
    parts, source_name = parts_of(project, name, query), written_source_name(project, name)
    try:
        job = job_of(parts, project.path, name, source_name, workload)
        check_tuning(job)
    except DpstreamError as error:
        relocate(error, project, name)
    return job


def job_of(
    file: JobParts,
    path: Path,
    name: str,
    source_name: str,
    workload: bool = False,
) -> Job:
    """Return the checked job of its parts; raises as `load_job` does.

    Args:
        path: absolute path of the file that relative paths start from.
        name: the job's name.
        source_name: the name of its input in the plan.
        workload: see `load_job`.
    """
    keep_beside(path)
    check_parts(file)
    folder = path.parent
    public_keys = file.keys.public
    if public_keys is not None:
        public_keys = str(below(folder, public_keys, "public_keys"))
    keys = msgspec.structs.replace(file.keys, public=public_keys)
    # The cells of a workload are named by its domain, which is charged with the job's plan.
    domain = workload and keys.public is None and file.privacy.delta == 0
    plan = Plan(
        source=source_name,
        unit=file.schema.unit,
        key=file.schema.key,
        event_time=file.schema.event_time.column,
        aggregates=file.aggregate,
        timeline=_timeline(file),
        privacy=_privacy(file, domain or file.keys.public is not None, workload),
        stamp=file.source.stamp_column,
        record_id=_record_id(file),
        remember=_remember(file.section.remember_keys),
        # Checked as a plan of public keys before the list is read.
        public_keys=_UNREAD if domain or keys.public is not None else None,
    )
    plan = (plan.once() if domain else plan).check()
    plan = _one_family(plan, file.privacy.optimise)
    replace = msgspec.structs.replace
    source = replace(file.source, path=source_path(folder, file.source))
    _refuse_both(source, keys.public, folder)
    if keys.public is not None:
        from dpstream.pipelines.jobs.keys import public_key_digest

        digest = public_key_digest(Path(keys.public), plan.key)
        plan = replace(plan, public_keys=digest).check()
    if source.query is not None:
        source, digest = _with_query(source, source.query, plan, folder)
        plan = replace(plan, query=digest).check()
    store = stores.backend(file.state.store).below(folder).url
    ledger = file.ledger
    keep_beside(store, None if ledger is None else ledger.path, path)
    return Job(
        path=path,
        name=name,
        source=source,
        schema=file.schema,
        privacy=file.privacy,
        keys=keys,
        state=replace(file.state, store=store),
        ledger=ledger,
        sink=_sink_below(folder, name, file.sink),
        plan=plan,
        tuning=file.section.choice,
        threads=file.section.threads,
        test_run_id=TEST_RUN_IDS.get(path),
    )


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
    source: SourceConfig, query: QueryConfig, plan: Plan, folder: Path
) -> tuple[SourceConfig, str]:
    """Return the source with the types of its checked query, and the query's digest."""
    require("sql", "query")
    from dpstream.pipelines.statements.row_query import compiled

    compilation = compiled(source, plan, folder)
    columns = {own: compilation.types[name] for name, own in compilation.reads.items()}
    replace = msgspec.structs.replace
    return replace(source, query=replace(query, columns=columns)), compilation.digest


def _refuse_both(source: SourceConfig, keys: str | None, folder: Path) -> None:
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


def source_path(folder: Path, source: SourceConfig) -> str:
    """Return where files are; a folder may be a URL prefix of an object store."""
    if source.kind == "folder":
        return source.path if "://" in source.path else str(folder / source.path)
    escaped = Path(glob.escape(str(folder)))
    return str(below(escaped, source.path, "table.path")) if source.path else ""


def _sink_below(folder: Path, name: str, sink: SinkConfig) -> SinkConfig:
    """Return the sink with paths below a folder; every kind of sink has dead letters in files."""
    replace = msgspec.structs.replace
    if sink.path:
        sink = replace(sink, path=str(below(folder, sink.path, "sink.path")))
    dead = sink.dead_letter or f"dead_letter/{name}"
    return replace(sink, dead_letter=str(below(folder, dead, "dead_letter")))


def _record_id(file: JobParts) -> Field | None:
    """Return the record id; Pub/Sub needs one, because a message has no fixed position."""
    if file.schema.record_id is None and file.source.kind == "pubsub":
        return Field(MESSAGE_ID)
    return file.schema.record_id


def _remember(text: str | None) -> Literal["run", "never"] | int | None:
    if text is None:
        return None
    named: dict[str, Literal["run", "never"]] = {"run": "run", "never": "never"}
    try:
        return named.get(text) or duration_micros("remember_keys", text)
    except UsageError as error:
        fix = "write 'run', 'never', or a duration such as '30d'"
        raise UsageError("remember_keys", error.rule, fix) from None


def _timeline(file: JobParts) -> Timeline:
    """Return the time axis in microseconds; a bounded source needs its end."""
    time = file.section
    if time.end is None and not file.source.unbounded:
        raise UsageError(
            "end",
            f"is required, because table.format '{file.source.kind}' is bounded",
            "add the end of the last window, for example end = '2014-01-07T00:00:00Z'",
        )
    window = duration_micros("window", time.window)
    period = file.privacy.period
    return Timeline(
        start=instant_micros("start", time.start),
        end=None if time.end is None else instant_micros("end", time.end),
        window=window,
        slide=window if time.slide is None else duration_micros("slide", time.slide),
        trigger_every=duration_micros("release_every", time.release_every),
        allowed_lateness=duration_micros("allowed_lateness", time.allowed_lateness),
        max_skew=duration_micros("max_skew", time.max_skew),
        period=None if period is None else duration_micros("budget.covers", period),
    )


def _privacy(file: JobParts, public: bool, workload: bool) -> Privacy:
    """Return the privacy section with its defaults.

    Args:
        public: whether keys are public.
        workload: see `load_job`.  Its cells replace private keys, so that no family of noise is
            chosen for the keys; mixed cells have Gaussian noise.
    """
    own = {
        "weights": _weights(file, public),
        "usual_weights": file.privacy.weights == "auto",
        "strategy": file.privacy.strategy or ("blt" if workload and not public else "auto"),
        "optimise": file.privacy.optimise or "period",
    }
    names = [name for name in Privacy.__struct_fields__ if name not in own]
    given = {name: getattr(file.privacy, name) for name in names} | own
    return Privacy(**given)


def _weights(file: JobParts, public: bool) -> SelectionWeights | None:
    """Return the selection weights; ``auto``: the usual ones for the job's kind."""
    privacy = file.privacy
    if isinstance(privacy.weights, SelectionWeights):
        return privacy.weights
    if privacy.weights == "uniform" or privacy.strategy == "geometric":
        return None
    return usual_weights(
        privacy.contributions,
        combine=privacy.combine,
        selects=not public,
        fused=any(a.kind == "units" for a in file.aggregate) and not privacy.skip,
        skip=bool(privacy.skip),
    )
