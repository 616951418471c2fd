"""``[job.NAME]`` of the project file as frozen structs, as written."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec

from dpstream.accounting import limits
from dpstream.accounting.fields import Field, KindName, Positive
from dpstream.accounting.places import RELEASE_KINDS, ReleaseKind
from dpstream.accounting.plan.privacy import (
    Contributions,
    MechanismFields,
    Optimise,
    StrategyName,
)
from dpstream.accounting.tuning.answer import How
from dpstream.accounting.weights import SelectionWeights
from dpstream.pipelines.project.sections import PLACE, Place, Section

#: Where releases go: files in a folder, or a topic or table of a service.
SinkKind = Literal["parquet", "csv", "jsonl", "kafka", "pubsub", "bigquery"]


class SinkTarget(NamedTuple):
    """The fields of ``sink`` that name the target of a kind.

    Attributes:
        fields: all that are needed; ``options`` may be empty.
        form: pattern of the first one, ``example``: a value of it.
    """

    fields: tuple[str, ...]
    form: str = ""
    example: str = ""


#: The targets of services; a kind of files has a path.  A kind of service is opened by
#: ``open_sink`` of the module ``pipelines.connectors.KIND.sink``.
SERVICE_SINKS: Mapping[SinkKind, SinkTarget] = {
    "kafka": SinkTarget(("topic", "servers", "options")),
    "pubsub": SinkTarget(("topic",), r"projects/[^/]+/topics/[^/]+", "projects/P/topics/T"),
    "bigquery": SinkTarget(("table",), r"[^.`\s]+\.[^.`\s]+\.[^.`\s]+", "project.dataset.table"),
}


#: A program with its arguments.
Command = Annotated[tuple[str, ...], msgspec.Meta(min_length=1), PLACE]


class AggregateSection(Section, frozen=True):
    """``aggregate.NAME`` of a job: one published column; see `accounting.fields.Aggregate`."""

    kind: KindName
    column: str | None = None
    bounds: tuple[float, float] | None = None
    grid: float = 1.0
    share: float | None = None


class BudgetSection(Section, frozen=True):
    """``budget``: the guarantee for one unit, and what it covers.

    It covers a ``window`` (each separately), the ``lifetime`` (all that the job publishes), or a
    length such as ``"week"`` or ``"28 days"``.
    """

    epsilon: float
    delta: float
    covers: str


class MechanismSection(MechanismFields, frozen=True, kw_only=True):
    """``[job.NAME.mechanism]``: the mechanism of noise; see `accounting.plan.privacy.Privacy`."""

    strategy: StrategyName = "auto"
    optimise: Optimise | None = None
    weights: SelectionWeights | Literal["auto", "uniform"] = "auto"


class SinkSection(Section, frozen=True):
    """``sink`` of a job: the target of its releases.

    Attributes:
        kind: a kind of files, or a service.
        path: the folder of files.
        topic, servers, options: for Kafka; values ``env:NAME`` are looked up.  For Pub/Sub topic
            is ``projects/P/topics/T``.
        table: for BigQuery, ``project.dataset.table``.
        formulas: for CSV: ``guard`` (the default) writes an apostrophe before text that a
            spreadsheet would take for a formula, ``keep`` writes it as it is.
    """

    kind: SinkKind
    path: Place = ""
    topic: Place | None = None
    servers: Place | None = None
    options: Annotated[dict[str, str], PLACE] = msgspec.field(default_factory=dict)
    table: Place | None = None
    formulas: Literal["guard", "keep"] | None = None

    @property
    def place(self) -> str:
        """The folder, topic or table of the releases."""
        return self.path or self.topic or self.table or ""

    @property
    def guarded(self) -> bool:
        """Return whether CSV marks text that a spreadsheet would take for a formula."""
        return self.formulas != "keep"

    @property
    def folder(self) -> Path | None:
        """The folder of the releases; ``None`` if they are not files."""
        return Path(self.path) if self.path else None

    @property
    def file_kind(self) -> ReleaseKind:
        """The kind of files to export releases to: the sink's own, if it writes files."""
        return next((kind for kind in RELEASE_KINDS if kind == self.kind), "parquet")


class ChoiceSection(Section, frozen=True):
    """``[job.NAME.choice]``: the choice of C and bounds.

    `dpstream choose` writes it, except ``range``: the declared [low, high] of an aggregate whose
    bounds are to be chosen.
    """

    how: How = "public"
    first: str | None = None
    rule: str | None = None
    bounds: tuple[str, ...] = ()
    epsilon: float | None = None
    delta: float | None = None
    mu: float | None = None
    run_id: str | None = None
    question: str | None = None
    as_of: str | None = None
    receipt: str | None = None
    range: dict[str, tuple[float, float]] = msgspec.field(default_factory=dict)


class PublicationSection(Section, frozen=True, kw_only=True):
    """``[job.NAME.publication]``: how the public's page and its files present them.

    Nothing here is part of the plan: it changes no released byte and no guarantee.

    Attributes:
        title: of the page and of the data set in its metadata.
        description: what the figures are about, in one or two sentences.
        purpose: what they are meant to be used for.
        publisher, contact: who publishes them, and whom to ask.
        region: what part of the world they describe.
        licence, citation: under which licence they may be used, and how to cite them.
        next: when the next release is expected, as a text.
        labels: texts to show for names of key columns, published columns and the unit's column.
        withhold: ``sd > N%``: values whose standard deviation is more than so much of them are
            shown as "too uncertain"; downloads keep them with a mark.
    """

    title: str
    description: str = ""
    purpose: str = ""
    publisher: str = ""
    contact: str = ""
    region: str = ""
    licence: str = ""
    citation: str = ""
    next: str = ""
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    withhold: Annotated[str, msgspec.Meta(pattern=r"^sd > [1-9][0-9]{0,3}%$")] | None = None

    @property
    def uncertain_above(self) -> float | None:
        """Share of a value above which its standard deviation makes it too uncertain."""
        return None if self.withhold is None else int(self.withhold[len("sd > ") : -1]) / 100


class JobSection(Section, frozen=True):
    """``[job.NAME]``: the releases that are published again and again.

    Attributes:
        table: the table of its records.
        query: a file of one row-local SELECT that every row goes through first; its columns are
            the key's and the aggregates'.
        key: columns to group by, each a name, or a name with its type.
        aggregate: published columns by name, in their order.
        start, end, window, slide, release_every, allowed_lateness, max_skew: the public clock.
        calendar: the time zone whose days, weeks and months all lengths are.
        budget: the guarantee.
        contributions: the most records of a unit that count in what the budget covers.
        per_key_bound: the most of them that count on one key.
        public_keys: a CSV file of the keys; without it keys are selected privately.
        remember_keys: how long later windows publish a key again: ``run``, ``never``, a duration.
        store: the private store of the job's state and releases.
        keep_releases: how long the store keeps releases that the sink has.
        shards: number of key shards, fixed when the store is made.
        dead_letter: the private folder of records that cannot be used.
        threads: of a job with bounded input whose stages share a process (DirectRunner); no
            released byte depends on them.
        publication: how the public's page presents the figures.
        success, failure: command and arguments that `dpstream run` starts at its end, without a
            shell; they get DPSTREAM_JOB, DPSTREAM_WINDOW and DPSTREAM_STATE (complete, incomplete
            or failed) and nothing else.
    """

    table: str
    key: tuple[str | Field, ...]
    aggregate: dict[str, AggregateSection]
    start: str
    window: str
    release_every: str
    budget: BudgetSection
    contributions: Contributions
    sink: SinkSection
    query: str | None = None
    end: str | None = None
    calendar: str | None = None
    slide: str | None = None
    allowed_lateness: str = "0s"
    max_skew: str = "0s"
    per_key_bound: Positive | None = None
    mechanism: MechanismSection = MechanismSection()
    public_keys: Place | None = None
    remember_keys: str | None = None
    store: Place | None = None
    keep_releases: str | None = None
    shards: Annotated[int, msgspec.Meta(ge=1, le=limits.MAX_SHARDS)] = limits.DEFAULT_SHARDS
    dead_letter: Place | None = None
    threads: Annotated[int, msgspec.Meta(ge=1, le=limits.MAX_THREADS), PLACE] | None = None
    choice: ChoiceSection | None = None
    publication: PublicationSection | None = None
    success: Command | None = None
    failure: Command | None = None
