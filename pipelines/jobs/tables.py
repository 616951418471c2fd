"""The tables of a job file as frozen structs; unknown keys are refused at every level.

Durations, times and paths are texts here, as written; `pipelines.jobs.job` parses and resolves
them.  ``[performance]`` is apart from everything that enters the plan.
"""

from pathlib import Path
from typing import Literal

import msgspec

from dpstream.accounting import limits
from dpstream.accounting.errors import UsageError
from dpstream.accounting.plan.fields import Aggregate, Field
from dpstream.accounting.plan.privacy import Mode, Optimise, StrategyName
from dpstream.accounting.tuning.answer import How
from dpstream.accounting.weights import SelectionWeights
from dpstream.state.ledger.open import AccountPlace, check_names, place_below

FileKind = Literal["parquet", "csv", "jsonl"]
#: Where releases go: files in a folder, or a topic or table of a service.
SinkKind = Literal["parquet", "csv", "jsonl", "kafka", "pubsub", "bigquery"]
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


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the job file: frozen, unknown keys refused."""


class LookUpConfig(_Table, frozen=True):
    """``[[source.query.look_up]]``: a public table that the query may look up by its key.

    Attributes:
        name: in the query's text.
        path: a file or glob of Parquet, CSV or JSON Lines (by its ending).
        key: columns that no two of its rows have in common; checked.
        columns: types by name, where the files have none.
    """

    name: str
    path: str
    key: tuple[str, ...]
    columns: dict[str, str] | None = None


class QueryConfig(_Table, frozen=True):
    """``[source.query]``: a row-local SELECT that every row of the source goes through first; see
    `pipelines.sql.row_local`.

    Attributes:
        table: what the text calls the source.
        columns: SQL types, by name, of the source's columns that the text may use (default: those
            of the first file, if it is Parquet).
        text: the SELECT; its columns are the key's and the aggregates'.  Unit, times and record
            id pass by it.  `dpstream sql --stream` writes it.
        look_up: public tables.
    """

    table: str = "records"
    columns: dict[str, str] | None = None
    text: str | None = None
    look_up: tuple[LookUpConfig, ...] = ()


class SourceConfig(_Table, frozen=True):
    """``[source]``: where records come from.

    Attributes:
        kind: files that are all there (``parquet``, ``csv``, ``jsonl``); or a source without end:
            a ``folder`` of files that grows, ``kafka``, ``pubsub``.
        path: a file or a glob (``**`` for any folders); of ``folder`` a folder or URL prefix.
            CSV and JSON Lines may be compressed (gzip, bzip2, zstd).
        stamp: ``event_time`` (files only), a stamp the source gives, or the column that carries it.
        format: of a folder's files, or of a message (``json``: one object).
        topic, servers: of Kafka; ``options`` go to its client, values ``env:NAME`` are looked up.
        subscription: of Pub/Sub, ``projects/P/subscriptions/S``.
        settle: how long a file must lie unchanged (stamp ``closed``), a row may be stamped before
            its file is closed (stamp of a column), or a broker may be behind its own clock: it
            delays releases and decides nothing.
        query: what rows go through first.
    """

    kind: SourceKind
    path: str = ""
    stamp: str | None = None
    format: Literal["parquet", "csv", "jsonl", "json"] | None = None
    topic: str | None = None
    servers: str | None = None
    subscription: str | None = None
    options: dict[str, str] = {}
    settle: str = "2s"
    query: QueryConfig | None = None

    @property
    def unbounded(self) -> bool:
        """Whether more may come for as long as the source lives."""
        return self.kind in GIVEN_STAMPS

    @property
    def stamp_column(self) -> str:
        """``event_time``, or the column that carries the stamp."""
        given = GIVEN_STAMPS.get(self.kind, ())
        stamp = self.stamp or (given[0] if given else "event_time")
        return f"_{stamp}" if stamp in given else stamp

    @property
    def name(self) -> str:
        """What the source is called in the plan: public."""
        return f"{self.kind}:{self.topic or self.subscription or self.path}"


class TimeColumn(_Table, frozen=True):
    """``schema.event_time``; ``type`` says of whole numbers in Parquet that they count
    microseconds since 1970 (as which they are read)."""

    column: str
    type: Literal["micros"] | None = None


class SchemaConfig(_Table, frozen=True):
    """``[schema]``: which columns are the unit, the key and the event time; and, where a source
    may deliver a record again at another position, the column that names it."""

    unit: Field
    key: tuple[Field, ...]
    event_time: TimeColumn
    record_id: Field | None = None


class TimeConfig(_Table, frozen=True):
    """``[time]``: RFC 3339 times and durations, as texts."""

    start: str
    window: str
    trigger_every: str
    end: str | None = None
    slide: str | None = None
    allowed_lateness: str = "0s"
    max_skew: str = "0s"


class PrivacyConfig(_Table, frozen=True):
    """``[privacy]``: see `accounting.plan.plan.Privacy`; plus the period and where the key is.

    ``allow_large_delta``: a delta above 0.01 is wanted (`accounting.strength`).
    ``strategy`` is ``auto`` with public keys, else ``blt``, unless given; of private keys ``auto``
    takes ``blt`` or ``geometric`` (`accounting.tuning.family`).  ``weights`` is a table,
    ``uniform``, or ``auto``: the best known for the job's kind (see `pipelines.jobs.job`).

    The key is found at ``key`` (see `dp_transforms.noise.references`); ``key_file = "PATH"`` is
    short for ``key = "file:PATH"``.  ``insecure_test_key`` (64 hex digits) and
    ``insecure_test_run_id`` (32) are for tests on public data: whoever knows them can subtract
    the noise.
    """

    epsilon: float
    delta: float
    contributions: int
    period: str | None = None
    mode: Mode = "sticky"
    strategy: StrategyName | None = None
    optimise: Optimise = "period"
    theta: float = 0.4
    pre_threshold: int = 0
    refresh_every: int | None = None
    selection_share: float | None = None
    final_flush: bool = False
    per_key_bound: int | None = None
    weights: SelectionWeights | Literal["auto", "uniform"] = "auto"
    combine: bool = False
    select_every: int | None = None
    periods_share_windows: bool = False
    tests: int | tuple[int, ...] | None = None
    skip: bool | None = None
    allow_large_delta: bool = False
    key_file: str | None = None
    key: str | None = None
    insecure_test_key: str | None = None
    insecure_test_run_id: str | None = None

    @property
    def reference(self) -> str | None:
        """Where the noise key is, whichever way it is written."""
        return self.key if self.key_file is None else f"file:{self.key_file}"


class KeysConfig(_Table, frozen=True):
    """``[keys]``: a CSV file whose header names the key columns; no selection is needed.

    ``remember``: how long later windows know what a window has published: ``run``, ``never``, or a
    duration (`accounting.plan.remembering`).
    """

    public: str | None = None
    remember: str | None = None


class StateConfig(_Table, frozen=True):
    """``[state]``: where state lives (``sqlite:PATH``, the default, beside the job file; or
    ``spanner://PROJECT/INSTANCE/DATABASE``) and the number of key shards, fixed when the store
    is made.  ``keep_releases``: how long the releases of a window that has ended stay in the store
    of a source without end once the sink has them (default: for ever)."""

    store: str | None = None
    shards: int = 4
    keep_releases: str | None = None

    @property
    def path(self) -> Path | None:
        """File of the embedded store, ``None`` where the store is no file."""
        kind, _, path = (self.store or "").partition(":")
        return Path(path) if kind == "sqlite" else None


class LedgerConfig(_Table, frozen=True):
    """``[ledger]``: the data set's account, shared by its jobs; its limit is in the account.

    Attributes:
        path: its file, or ``spanner://PROJECT/INSTANCE/DATABASE`` of an account's own database.
        data_set: the name it knows the data by.
        id: of the account, as `dpstream account create` and `account show` print it.
        unit: what the data set calls the privacy unit, where jobs find the same ids in columns of
            different names (default: the unit's column).
    """

    path: str
    data_set: str
    id: str
    unit: str | None = None

    def place(self, folder: Path, file: Path | None = None) -> AccountPlace:
        """The account, with a file's path from the folder of the file that names it.

        Args:
            file: that file, whole path.

        Raises:
            UsageError: a name or the id is none, or the URL is none of an account.
        """
        for field, text in (("path", self.path), ("unit", self.unit)):
            if text is not None and (not text or "\0" in text):
                raise UsageError(f"ledger.{field}", "must not be empty", "write a name")
        check_names(self.data_set, self.id)
        path, named = place_below(folder, self.path), None if file is None else str(file)
        return AccountPlace(path, self.data_set, self.id, self.unit, named)


class SinkConfig(_Table, frozen=True):
    """``[sink]``: where releases go.

    Attributes:
        kind: files (``parquet``, ``csv``, ``jsonl``), ``kafka``, ``pubsub`` or ``bigquery``.
        path: folder of files.
        topic: of Kafka; of Pub/Sub ``projects/P/topics/T``.
        servers: of Kafka; ``options`` go to its client, values ``env:NAME`` are looked up.
        table: of BigQuery, ``project.dataset.table``.
        dead_letter: folder of the dead letters, which are files with every kind; default: beside
            the folder of the releases, or beside the job file.
        formulas: of CSV: ``guard`` (the default) writes an apostrophe before text that a
            spreadsheet would take for a formula, ``keep`` writes it as it is.
    """

    kind: SinkKind
    path: str = ""
    topic: str | None = None
    servers: str | None = None
    options: dict[str, str] = {}
    table: str | None = None
    dead_letter: str | None = None
    formulas: Literal["guard", "keep"] | None = None

    @property
    def guarded(self) -> bool:
        """Whether CSV marks text that a spreadsheet would take for a formula."""
        return self.formulas != "keep"

    @property
    def folder(self) -> Path | None:
        """Folder of the releases, ``None`` where they are no files."""
        return Path(self.path) if self.path else None

    @property
    def file_kind(self) -> FileKind:
        """Kind of files to export releases to: the sink's own, if it is one of files."""
        kinds: dict[str, FileKind] = {"csv": "csv", "jsonl": "jsonl"}
        return kinds.get(self.kind, "parquet")


class PerformanceConfig(_Table, frozen=True):
    """``[performance]``: none of it changes a released byte.

    Attributes:
        batch_rows: rows of an Arrow batch at ingest.
        look_ahead: triggers a prediction looks ahead (default: by the number of triggers).
        threads: that work on a job whose input is all there, where its stages share a process
            (DirectRunner); default: two, if there are two cores.
    """

    batch_rows: int = limits.DEFAULT_BATCH_ROWS
    look_ahead: int | None = None
    threads: int | None = None


class TuningConfig(_Table, frozen=True):
    """``[choice]``: where C and clamps come from; written by ``dpstream choose``, but for
    ``range``: the declared [low, high] of an aggregate whose clamp is to be chosen."""

    how: How = "public"
    first: str | None = None
    rule: str | None = None
    clamps: tuple[str, ...] = ()
    epsilon: float | None = None
    delta: float | None = None
    mu: float | None = None
    run_id: str | None = None
    question: str | None = None
    receipt: str | None = None
    range: dict[str, tuple[float, float]] = {}


class JobFile(_Table, frozen=True):
    """The tables of a job file, as written."""

    source: SourceConfig
    schema: SchemaConfig
    aggregate: tuple[Aggregate, ...]
    time: TimeConfig
    privacy: PrivacyConfig
    sink: SinkConfig
    keys: KeysConfig = KeysConfig()
    state: StateConfig = StateConfig()
    ledger: LedgerConfig | None = None
    performance: PerformanceConfig = PerformanceConfig()
    choice: TuningConfig | None = None
