"""The job file: TOML tables decoded into frozen structs, and the public plan they mean.

``load_job(path)`` is the one entry.  Unknown keys are refused at every level; durations and
times are texts that are parsed exactly; paths are resolved against the job file's folder.
Everything that decides what is released ends up in ``Job.plan``; ``[performance]`` does not
and cannot change a released byte.
"""

import glob
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from dpstream.accounting import limits
from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.extras import require
from dpstream.accounting.places import below, files_at, refuse_both
from dpstream.accounting.plan.fields import Field
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.plan.privacy import Privacy
from dpstream.accounting.plan.timeline import Timeline
from dpstream.accounting.weights import SelectionWeights, usual_weights
from dpstream.dp_transforms.noise.references import parse_reference
from dpstream.pipelines.jobs.committed import check_tuning
from dpstream.pipelines.jobs.keys import public_key_digest
from dpstream.pipelines.jobs.shapes import with_columns
from dpstream.pipelines.jobs.tables import (
    GIVEN_COLUMNS,
    GIVEN_STAMPS,
    MESSAGE_ID,
    JobFile,
    KeysConfig,
    PerformanceConfig,
    PrivacyConfig,
    QueryConfig,
    SchemaConfig,
    SinkConfig,
    SourceConfig,
    StateConfig,
    TuningConfig,
)
from dpstream.pipelines.jobs.text import (
    duration_micros,
    instant_micros,
    parse_toml,
    raise_decode_error,
    refuse_data_dependent,
)
from dpstream.state import open as stores
from dpstream.state.disk_errors import unreadable
from dpstream.state.ledger.open import AccountPlace, refuse_limit
from dpstream.state.private_log import keep_beside

if TYPE_CHECKING:
    from dpstream.pipelines.jobs.cells import JobCells

MAX_JOB_BYTES = 1 << 20
#: Stands for the digest of a public list that is not read yet.
_UNREAD = "0" * 32


class Job(msgspec.Struct, frozen=True):
    """A checked job: tables with absolute paths, and the public plan.

    Attributes:
        path: the job file.
        source, schema, privacy, keys, state, ledger, sink, performance: its tables; every
            path in them is absolute.
        plan: what is released and promised; checked.
        tuning: where C and clamps come from, if the job says so.
        cells: the domain that its key columns are mapped to, where it answers a workload.
    """

    path: Path
    source: SourceConfig
    schema: SchemaConfig
    privacy: PrivacyConfig
    keys: KeysConfig
    state: StateConfig
    ledger: AccountPlace | None
    sink: SinkConfig
    performance: PerformanceConfig
    plan: Plan
    tuning: TuningConfig | None = None
    cells: "JobCells | None" = None

    @property
    def key(self) -> tuple[Field, ...]:
        """The key columns of the input."""
        return self.plan.key if self.cells is None else self.cells.domain.key

    @property
    def columns(self) -> tuple[str, ...]:
        """Input columns the job reads, each once: unit, key, time, stamp, values, record id; or
        those that its query reads, beside unit, time, stamp and record id."""
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
        """The job with other key columns of its input, to be read and not to be run."""
        return msgspec.structs.replace(self, plan=msgspec.structs.replace(self.plan, key=key))

    @property
    def data_columns(self) -> tuple[str, ...]:
        """``columns`` without those that the source itself adds."""
        if not self.source.unbounded:
            return self.columns
        return tuple(name for name in self.columns if name not in GIVEN_COLUMNS)

    @property
    def insecure(self) -> bool:
        """Whether a fixed test key or run id is set; the output must be stamped so."""
        return (self.privacy.insecure_test_key or self.privacy.insecure_test_run_id) is not None


def load_job(path: str | Path, workload: bool = False) -> Job:
    """Read and check a job file.

    Args:
        workload: it is asked a workload, whose domain takes the place of the keys: they are public,
            so that delta may be 0.

    Raises:
        UsageError: unreadable, unknown or missing keys, values that are not usable.
        PolicyError: settings that no privacy guarantee survives, or a [choice] that its ledger
            does not know.
    """
    path = Path(path).absolute()
    job = job_of(decode_job(read_text(path)), path, workload)
    check_tuning(job)
    return job


def read_text(path: Path) -> bytes:
    """The text of a job file.

    Raises:
        UsageError: unreadable or too long.
    """
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_JOB_BYTES + 1)
    except OSError as error:
        raise unreadable("job file", error) from None
    if len(text) > MAX_JOB_BYTES:
        raise UsageError("job file", f"exceeds {MAX_JOB_BYTES} bytes", "give a job file")
    return text


def decode_job(text: bytes) -> JobFile:
    """The tables of a job file's text; raises as `load_job` does."""
    return decode_tables(parse_toml(text))


def decode_tables(tables: dict[str, Any]) -> JobFile:
    """Parsed tables as structs; raises as `load_job` does."""
    refuse_data_dependent(tables)
    refuse_limit(tables)
    try:
        return msgspec.convert(with_columns(tables), JobFile)
    except msgspec.ValidationError as error:
        raise_decode_error(error, JobFile)


def job_of(file: JobFile, path: Path, workload: bool = False) -> Job:
    """The checked job of decoded tables; ``path`` (absolute) is where paths start from, and
    ``workload`` is that of `load_job`."""
    keep_beside(path)
    _check_tables(file)
    folder = path.parent
    keys = msgspec.structs.replace(
        file.keys, public=_under(folder, file.keys.public, "keys.public")
    )
    # The cells of a workload are named by its domain, which is charged with the job's plan.
    domain = workload and keys.public is None and file.privacy.delta == 0
    plan = Plan(
        source=file.source.name,
        unit=file.schema.unit,
        key=file.schema.key,
        event_time=file.schema.event_time.column,
        aggregates=file.aggregate,
        timeline=_timeline(file),
        privacy=_privacy(file, domain or file.keys.public is not None),
        stamp=file.source.stamp_column,
        record_id=_record_id(file),
        remember=_remember(keys.remember),
        # Checked as a plan of public keys before the list is read.
        public_keys=_UNREAD if domain or keys.public is not None else None,
    ).check()
    if plan.privacy.strategy == "auto" and plan.public_keys is None:
        from dpstream.accounting.tuning.family import resolved  # a reference population

        plan = resolved(plan)
    replace = msgspec.structs.replace
    source = replace(file.source, path=source_path(folder, file.source))
    _refuse_both(source, keys.public, folder)
    if keys.public is not None:
        digest = public_key_digest(Path(keys.public), plan.key)
        plan = replace(plan, public_keys=digest).check()
    if source.query is not None:
        source, digest = _with_query(source, source.query, plan, folder)
        plan = replace(plan, query=digest).check()
    store = file.state.store or f"sqlite:{path.stem}.state.db"
    store = stores.backend(store).below(folder).url
    ledger = None if file.ledger is None else file.ledger.place(folder, path)
    keep_beside(store, None if ledger is None else ledger.path, path)
    return Job(
        path=path,
        source=source,
        schema=file.schema,
        privacy=_key_below(folder, file.privacy),
        keys=keys,
        state=replace(file.state, store=store),
        ledger=ledger,
        sink=_sink_below(path, file.sink),
        performance=file.performance,
        plan=plan,
        tuning=file.choice,
    )


def _with_query(
    source: SourceConfig, query: QueryConfig, plan: Plan, folder: Path
) -> tuple[SourceConfig, str]:
    """The source with the types that its query was checked with, and the query's digest."""
    require("sql", "source.query")
    from dpstream.pipelines.sql.row_query import compiled

    found = compiled(source, plan, folder)
    columns = {own: found.types[name] for name, own in found.reads.items()}
    replace = msgspec.structs.replace
    return replace(source, query=replace(query, columns=columns)), found.digest


def _refuse_both(source: SourceConfig, keys: str | None, folder: Path) -> None:
    """Refuse public keys, or a public table of the query, that the source reads as private."""
    query = source.query
    public = {} if keys is None else {"keys.public": glob.escape(keys)}
    for number, table in enumerate(() if query is None else query.look_up):
        public[f"source.query.look_up[{number}].path"] = str(folder / table.path)
    if public and source.path and "://" not in source.path:
        path = glob.escape(source.path) if source.kind == "folder" else source.path
        files = {field: files_at(pattern) for field, pattern in public.items()}
        refuse_both({"source.path": files_at(path)}, files)


def source_path(folder: Path, source: SourceConfig) -> str:
    """Where files are; a folder may be a URL prefix of an object store."""
    if source.kind == "folder":
        return source.path if "://" in source.path else str(folder / source.path)
    escaped = Path(glob.escape(str(folder)))
    return str(below(escaped, source.path, "source.path")) if source.path else ""


def _sink_below(job: Path, sink: SinkConfig) -> SinkConfig:
    """Where files go starts from the job's folder; dead letters are files with every sink."""
    replace, folder = msgspec.structs.replace, job.parent
    if sink.path:
        return replace(sink, path=str(below(folder, sink.path, "sink.path")))
    dead = sink.dead_letter or f"dead_letter/{job.stem}"
    return replace(sink, dead_letter=str(below(folder, dead, "sink.dead_letter")))


def _record_id(file: JobFile) -> Field | None:
    """Pub/Sub delivers a message again at no fixed position: its id names it."""
    if file.schema.record_id is None and file.source.kind == "pubsub":
        return Field(MESSAGE_ID)
    return file.schema.record_id


def _under(folder: Path, path: str | None, field: str) -> str | None:
    return None if path is None else str(below(folder, path, field))


def _key_below(folder: Path, privacy: PrivacyConfig) -> PrivacyConfig:
    """A key's file in either spelling starts from the job's folder, and is a ``key_file`` then."""
    path, key = privacy.key_file, privacy.key
    if key is not None and key.startswith("file:"):
        path, key = key.removeprefix("file:"), None
    return msgspec.structs.replace(
        privacy, key_file=_under(folder, path, "privacy.key_file"), key=key
    )


def _remember(text: str | None) -> Literal["run", "never"] | int | None:
    if text is None:
        return None
    named: dict[str, Literal["run", "never"]] = {"run": "run", "never": "never"}
    try:
        return named.get(text) or duration_micros("keys.remember", text)
    except UsageError as error:
        fix = "write 'run', 'never', or a duration such as '30d'"
        raise UsageError("keys.remember", error.rule, fix) from None


def _timeline(file: JobFile) -> Timeline:
    """The time axis in micros; a bounded source needs its end."""
    time = file.time
    if time.end is None and not file.source.unbounded:
        raise UsageError(
            "time.end",
            f"is required, because source.kind '{file.source.kind}' is bounded",
            "add the end of the last window, for example end = '2014-01-07T00:00:00Z'",
        )
    window = duration_micros("time.window", time.window)
    period = file.privacy.period
    return Timeline(
        start=instant_micros("time.start", time.start),
        end=None if time.end is None else instant_micros("time.end", time.end),
        window=window,
        slide=window if time.slide is None else duration_micros("time.slide", time.slide),
        trigger_every=duration_micros("time.trigger_every", time.trigger_every),
        allowed_lateness=duration_micros("time.allowed_lateness", time.allowed_lateness),
        max_skew=duration_micros("time.max_skew", time.max_skew),
        period=None if period is None else duration_micros("privacy.period", period),
    )


def _privacy(file: JobFile, public: bool) -> Privacy:
    """Args: public: whether keys are public."""
    own = {"weights": _weights(file, public), "usual_weights": file.privacy.weights == "auto"}
    names = [name for name in Privacy.__struct_fields__ if name not in own]
    given = {name: getattr(file.privacy, name) for name in names} | own
    given["strategy"] = file.privacy.strategy or ("auto" if public else "blt")
    return Privacy(**given)


def _weights(file: JobFile, public: bool) -> SelectionWeights | None:
    """``auto``: what is usual for the job's kind."""
    privacy = file.privacy
    if isinstance(privacy.weights, SelectionWeights):
        return privacy.weights
    if privacy.weights == "uniform" or privacy.strategy == "geometric":
        return None
    return usual_weights(
        privacy.contributions,
        combine=privacy.combine,
        sticky=privacy.mode == "sticky" and not public,
        fused=any(a.kind == "units" for a in file.aggregate) and not privacy.skip,
        skip=bool(privacy.skip),
    )


def _check_tables(file: JobFile) -> None:
    """Rules of the tables that do not enter the plan."""
    threads = file.performance.threads
    ranges = [
        ("state.shards", file.state.shards, limits.MAX_SHARDS),
        ("performance.batch_rows", file.performance.batch_rows, limits.MAX_BATCH_ROWS),
        ("performance.look_ahead", file.performance.look_ahead or 1, limits.MAX_TRIGGERS),
        ("performance.threads", 1 if threads is None else threads, limits.MAX_THREADS),
    ]
    for field, value, most in ranges:
        if not 1 <= value <= most:
            raise UsageError(field, f"must be a whole number from 1 to {most}", "correct it")
    texts = _check_source(file.source) + _check_sink(file.sink)
    if file.state.keep_releases is not None:
        duration_micros("state.keep_releases", file.state.keep_releases)
        if not file.source.unbounded:
            raise UsageError(
                "state.keep_releases",
                f"is for sources without end, and source.kind is '{file.source.kind}'",
                "omit it; `dpstream state expire --releases-before` drops releases of such a job",
            )
    for field, text in texts:
        if not text or "\0" in text:
            raise UsageError(field, "must not be empty", "write a name")
    if file.state.store is not None:
        stores.backend(file.state.store)
    _check_key(file.privacy)


#: Fields that say where a source or a sink is, by its kind; of every other kind it is a path.
_SOURCE_FIELDS = {"kafka": ("topic", "servers", "options"), "pubsub": ("subscription",)}
_SINK_FIELDS = {
    "kafka": ("topic", "servers", "options"),
    "pubsub": ("topic",),
    "bigquery": ("table",),
}
#: The form of names that a service gives, with an example.
_SINK_NAMES = {
    "pubsub": ("topic", r"projects/[^/]+/topics/[^/]+", "projects/P/topics/T"),
    "bigquery": ("table", r"[^.`\s]+\.[^.`\s]+\.[^.`\s]+", "project.dataset.table"),
}


def _check_fields(
    name: str,
    table: SourceConfig | SinkConfig,
    needed: tuple[str, ...],
    allowed: tuple[str, ...],
    known: tuple[str, ...],
) -> list[tuple[str, str]]:
    """Refuse fields that are of other kinds; gives the texts that must say something.

    Args:
        name: of the table in the job file.
        table: as written.
        needed: fields of its kind; ``options`` may be empty.
        allowed: further ones that its kind may have.
        known: all that some kind may have.
    """
    for field in known:
        if getattr(table, field) and field not in (*needed, *allowed):
            raise UsageError(f"{name}.{field}", f"is not for kind '{table.kind}'", "remove it")
    return [(f"{name}.{f}", getattr(table, f) or "") for f in needed if f != "options"]


def _check_sink(sink: SinkConfig) -> list[tuple[str, str]]:
    """Fields of its kind and no others; the texts that must say something."""
    needed = _SINK_FIELDS.get(sink.kind, ("path",))
    allowed = {"csv": ("formulas",), "parquet": (), "jsonl": ()}.get(sink.kind, ("dead_letter",))
    known = ("path", "topic", "servers", "options", "table", "dead_letter", "formulas")
    texts = _check_fields("sink", sink, needed, allowed, known)
    if sink.kind in _SINK_NAMES:
        field, form, example = _SINK_NAMES[sink.kind]
        if not re.fullmatch(form, getattr(sink, field) or ""):
            raise UsageError(f"sink.{field}", f"is no full name of {sink.kind}", f"write {example}")
    return texts


def _check_source(source: SourceConfig) -> list[tuple[str, str]]:
    """Fields of its kind and no others; the texts that must say something."""
    kind = source.kind
    known = ("path", "format", "topic", "servers", "subscription", "options")
    allowed = ("format", "settle") if source.unbounded else ()
    needed = _SOURCE_FIELDS.get(kind, ("path",))
    texts = _check_fields("source", source, needed, allowed, known)
    formats = {"folder": ("parquet", "csv", "jsonl")}.get(kind, ("json",))
    if source.unbounded and source.format not in (*formats, *(() if kind == "folder" else (None,))):
        words = " or ".join(f"'{name}'" for name in formats)
        raise UsageError("source.format", f"must be {words} for kind '{kind}'", "correct it")
    if source.unbounded and source.stamp == "event_time":
        raise PolicyError(
            "source.stamp",
            "is the event time, which lets one user's records make others late in a live stream",
            f"use stamp = '{GIVEN_STAMPS[kind][0]}', or a column that the broker fills",
        )
    duration_micros("source.settle", source.settle)
    return texts


def _check_key(privacy: PrivacyConfig) -> None:
    named = [n for n in ("insecure_test_key", "key", "key_file") if getattr(privacy, n) is not None]
    if len(named) > 1:
        raise UsageError(
            f"privacy.{named[0]}", f"excludes privacy.{named[1]}", "keep one of the two"
        )
    if privacy.reference is not None:
        parse_reference(privacy.reference)
    for name, digits in (("insecure_test_key", 64), ("insecure_test_run_id", 32)):
        text = getattr(privacy, name)
        if text is not None and (len(text) != digits or set(text) - set("0123456789abcdef")):
            raise UsageError(f"privacy.{name}", f"must be {digits} hex digits", "correct it")
