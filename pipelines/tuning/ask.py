"""The public side of a tuning: the question, its cost, and how exact the answer will be.

This module reads no record.  All of it is fixed, and its digest enters the charge and the name of
every noise node, before anything is drawn.

The job of a tuning is read without C and bounds, and written with them as a new job.  Before the
tuning it needs no ``contributions`` and no bounds: to read its records, C is 1 and each bounds to
choose are the column's declared range; both are public.
"""

import copy
import hashlib
import math
from fractions import Fraction
from typing import Any, NamedTuple

import msgspec

from dpstream.accounting.aggregates import AGGREGATE_KINDS
from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.errors import PolicyError, RunError, UsageError, refuse_first
from dpstream.accounting.fields import Aggregate
from dpstream.accounting.figures import moment_of, time_text
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.regions.amounts import exact
from dpstream.accounting.strength import check_delta, weaknesses
from dpstream.accounting.tuning.answer import BIAS, KEY_RECORDS, expectation, rule_text
from dpstream.accounting.tuning.question import (
    Question,
    TunedColumn,
    TuningDesign,
    canonical,
    canonical_names,
    design,
)
from dpstream.pipelines.ask.question import ONCE, Asking
from dpstream.pipelines.jobs.job import Job, job_in
from dpstream.pipelines.project.copying import (
    check_extended,
    check_new_name,
    copied_section,
    read_project_text,
    section_text,
    set_field,
    with_job,
)
from dpstream.pipelines.project.job_section import ChoiceSection
from dpstream.pipelines.project.project import Project
from dpstream.pipelines.project.text import duration_micros, instant_micros

#: Kinds of columns that need bounds, as a job writes them.
_BOUNDED = [name for name, kind in AGGREGATE_KINDS.items() if kind.bounded]


def base_job(project: Project, name: str, all_bounds: bool) -> tuple[Job, tuple[str, ...]]:
    """Return the job with C = 1, and with the declared range for all bounds to choose.

    Args:
        all_bounds: choose all bounds, not only those that are missing.

    Returns:
        (job, names of the aggregates whose bounds are to be chosen).

    Raises:
        UsageError: the job cannot be used, or a range is not declared.
    """
    section = copy.deepcopy(project.sections.job[name])
    declared = _table(_table(section.get("choice")).get("range"))
    section["contributions"] = 1
    mechanism = _table(section.get("mechanism"))
    # The family follows from the C that is chosen, and C is chosen by Gaussian noise.
    if "public_keys" not in section and mechanism.get("strategy") in (None, "auto"):
        mechanism = {**mechanism, "strategy": "blt"}
        mechanism.pop("optimise", None)
        section["mechanism"] = mechanism
    names, aggregates = list[str](), _table(section.get("aggregate"))
    for aggregate, part in aggregates.items():
        bounded = isinstance(part, dict) and part.get("kind") in _BOUNDED
        if bounded and (all_bounds or "bounds" not in part):
            names.append(aggregate)
            part["bounds"] = _range(name, aggregate, part, declared)
    # What an earlier tuning wrote is not what is checked now; ranges are.
    section["choice"] = {"range": declared}
    job = job_in(with_job(project, name, section), name)
    if set(declared) - set(aggregates):
        raise UsageError(
            f"job.{name}.choice.range", "names an aggregate that there is not", "correct it"
        )
    return job, tuple(names)


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _range(name: str, aggregate: str, part: dict[str, Any], declared: dict[str, Any]) -> Any:
    """Return the declared range of an aggregate: that of ``choice.range``, else its bounds."""
    bounds = declared.get(aggregate, part.get("bounds"))
    if bounds is None:
        raise UsageError(
            f"job.{name}.choice.range.{aggregate}",
            "is required: candidates for bounds come from a public range, never from the data",
            f"add choice.range = {{ {aggregate} = [low, high] }} to [job.{name}]",
        )
    return bounds


def question_of(project: Project, name: str) -> tuple[str, str] | None:
    """Return digest and label (``--as-of``) of the question that a job was chosen by.

    ``None``: there is no such job, or it was not chosen privately.
    """
    choice = _table(project.sections.job.get(name, {}).get("choice"))
    question = choice.get("question")
    return None if question is None else (str(question), str(choice.get("as_of", "")))


def render(
    project: Project,
    name: str,
    new: str,
    contributions: int,
    bounds: tuple[tuple[str, int, int], ...],
    choice: ChoiceSection,
) -> tuple[bytes, str]:
    """Return the present project file, and a new section with the tuned figures; see
    `pipelines.project.copying`.

    Raises:
        UsageError: the file cannot be extended.
    """
    text = read_project_text(project)
    section = copied_section(text, name, new)
    section["contributions"] = contributions
    tuned = {aggregate: (low, high) for aggregate, low, high in bounds}
    for aggregate, limits in tuned.items():
        grid = section["aggregate"][aggregate].get("grid", 1.0)
        set_field(section["aggregate"], aggregate, "bounds", list(in_column_units(*limits, grid)))
    section.pop("choice", None)
    fields = msgspec.to_builtins(choice)
    section["choice"] = {n: v for n, v in fields.items() if v not in (None, (), [], {})}
    check_extended(text, name, new, section)
    _check(project, new, section.unwrap(), contributions, tuned)
    return text, section_text(new, section)


def in_column_units(low: int, high: int, grid: float) -> tuple[float, float]:
    """Return bounds in grid units as the column's numbers, which snap back to the same."""
    return _outward(low, grid, -1), _outward(high, grid, 1)


def _outward(units: int, grid: float, sign: int) -> int | float:
    """Return ``units`` of the grid as a number that snaps back to them (bounds snap inward)."""
    bound = units * exact(grid, "grid", grid)
    if bound.denominator == 1:
        return int(bound)
    value = float(bound)
    while (exact(value, "bounds", grid) - bound) * sign < 0:
        value = math.nextafter(value, sign * math.inf)
    return value


def _check(
    project: Project,
    new: str,
    section: dict[str, Any],
    contributions: int,
    tuned: dict[str, tuple[int, int]],
) -> None:
    """Check that the written section reads back as what was chosen."""
    _, written = with_job(project, new, section).job(new)
    bounds = {
        name: Aggregate(name, part.kind, part.column, part.bounds, part.grid).grid_bounds()
        for name, part in written.aggregate.items()
        if name in tuned
    }
    if written.contributions != contributions or bounds != tuned:
        raise RunError("--as", "would not say what was chosen", "report this job's layout")


class Request(NamedTuple):
    """The options of a tuning; see `accounting.tuning.question.Question` for the figures.

    Attributes:
        job: its name in the project file.
        new: the name of the job to write.
        bounds: choose all bounds, not only those that are missing.
    """

    project: Project
    job: str
    new: str
    first: str | None = None
    epsilon: float | None = None
    delta: float | None = None
    quantile: float | None = None
    cover: float | None = None
    key_records: int | None = None
    max_contributions: int = 1000
    scale: float | None = None
    tail: float = 0.05
    values_per_unit: int = 1
    bounds: bool = False
    proxy: str | None = None
    proxy_start: str | None = None
    fresh: bool = False
    as_of: str = ""

    @property
    def how(self) -> Asking:
        """Return whether to ask again at a new charge, and about which state of the data."""
        return Asking(self.fresh, self.as_of)


class CheckedRequest(NamedTuple):
    """A checked request: the job to read with, the public question and its mechanism."""

    request: Request
    job: Job
    question: Question
    design: TuningDesign
    ranges: dict[str, tuple[float, float]]

    @property
    def private(self) -> bool:
        """Return whether the stream itself is asked, not proxy data."""
        return self.request.proxy is None

    @property
    def labels(self) -> dict[str, str]:
        """The names of the job's aggregates by those in the question."""
        return {name: label for label, name in canonical_names(self.job.plan.aggregates).items()}

    @property
    def digest(self) -> str:
        """Return a 128-bit hex digest of everything public about the tuning but for its names."""
        form = canonical(self.question, self.design) | {"plan": canonical_plan(self.job.plan).hash}
        parts = msgspec.json.encode(form, order="sorted")
        return hashlib.blake2b(parts, digest_size=16, person=b"dpstream-ask").hexdigest()

    @property
    def start(self) -> int:
        """Return the instant from which records are read, microseconds since 1970."""
        if self.request.proxy_start is None:
            return self.job.plan.timeline.start
        return instant_micros("--proxy-start", self.request.proxy_start)

    def describe(self) -> dict[str, Any]:
        """Return its cost and the accuracy to expect; public, no data read."""
        question, start = self.question, self.start
        return {
            "how": "private" if self.private else "proxy",
            "first_micros": question.first,
            "reads": [time_text(moment_of(at)) for at in (start, start + question.first)],
            "rule": rule_text(question),
            "bias": BIAS,
            "epsilon": question.epsilon if self.private else None,
            "delta": question.delta if self.private else None,
            "mu": self.design.mu if self.private else None,
            "histograms": [
                row | {"name": self.labels.get(row["name"], row["name"])}
                for row in (expectation(self.design) if self.private else [])
            ],
            "warnings": weaknesses(question.epsilon, question.delta) if self.private else [],
        }


def canonical_plan(plan: Plan) -> Plan:
    """Return a plan with the names of a tuning's question, and its key's columns in order."""
    names, replace = canonical_names(plan.aggregates), msgspec.structs.replace
    aggregates = tuple(replace(a, name=names[a.name]) for a in plan.aggregates)
    key = tuple(sorted(plan.key, key=lambda field: field.column))
    return replace(plan, aggregates=aggregates, key=key)


def ask(request: Request) -> CheckedRequest:
    """Check a request without reading a record.

    Raises:
        UsageError: the job or an option cannot be used, or the budget allows no answer.
        PolicyError: a private tuning without an account.
    """
    check_new_name(request.project, request.new, "--as", existing=True)
    job, names = base_job(request.project, request.job, request.bounds)
    private = request.proxy is None
    _check_flags(request, job)
    first, horizon = _horizon(request, job.plan)
    if not 0 < first <= horizon:
        raise UsageError("--first", "must not exceed the stream or budget.covers", "shorten it")
    rules = (request.quantile, request.cover, request.key_records)
    if sum(rule is not None for rule in rules) > 1:
        raise UsageError(
            "--cover", "excludes --quantile and --key-records", "give one of the three"
        )
    weighed = KEY_RECORDS if all(rule is None for rule in rules) else request.key_records
    question = Question(
        first=first,
        epsilon=request.epsilon or 0.0,
        delta=job.plan.privacy.delta if request.delta is None else request.delta,
        quantile=request.quantile,
        cover=request.cover,
        max_contributions=request.max_contributions,
        scale=scale_text(request.scale, Fraction(horizon, first)),
        tail=request.tail,
        values_per_unit=request.values_per_unit,
        columns=tuple(
            TunedColumn(canonical_names(job.plan.aggregates)[a.name], *a.grid_bounds())
            for a in job.plan.aggregates
            if a.name in names
        ),
        key_records=weighed,
    )
    privacy = job.plan.privacy
    if private:
        switch = f"mechanism.allow_large_delta = true in [job.{request.job}]"
        check_delta(question.delta, privacy.allow_large_delta, "--delta", switch)
    allocate(job.plan)  # the widest bounds with C = 1 can be run: so can whatever is chosen
    widest = tuple((a.name, *a.grid_bounds()) for a in job.plan.aggregates if a.name in names)
    # What cannot be written is refused before it is paid for.
    render(request.project, request.job, request.new, 1, widest, ChoiceSection())
    ranges = {a.name: a.bounds for a in job.plan.aggregates if a.name in names and a.bounds}
    tuning = CheckedRequest(request, job, question, design(question, private), ranges)
    question_of_file = question_of(request.project, request.new)
    same = question_of_file == (tuning.digest, request.as_of)
    check_new_name(request.project, request.new, "--as", existing=same)
    return tuning


def refuse_taken(tuning: CheckedRequest) -> None:
    """Refuse the name of a section that has an earlier answer, if a new one is to be charged.

    Raises:
        UsageError: it is taken.
    """
    request = tuning.request
    if request.fresh:
        check_new_name(request.project, request.new, "--as")


def _check_flags(request: Request, job: Job) -> None:
    """Refuse a choice from the stream itself without first hours, budget or account; and options
    of a charge if nothing is charged.
    """
    private, missing = request.proxy is None, "is required to choose from the stream itself"
    refuse_first(
        (
            private and job.source.unbounded,
            UsageError(
                "table.format",
                f"'{job.source.kind}' has no end, and the first hours of files alone can be asked",
                "choose from recorded files with --proxy, or write C and bounds into the job",
            ),
        ),
        (private and request.first is None, UsageError("--first", missing, "give it")),
        (private and request.epsilon is None, UsageError("--epsilon", missing, "give it")),
        (
            private and job.ledger is None,
            PolicyError(
                "account",
                "is required: tuning on the stream's own records is a release and is charged",
                "make one with `dpstream account create`, which prints the line, or choose from "
                "other data with --proxy",
            ),
        ),
        (
            not private and request.how != ONCE,
            UsageError(
                "--proxy",
                "charges nothing, so --fresh and --as-of mean nothing with it",
                "omit them",
            ),
        ),
        (
            not private and (request.epsilon is not None or request.delta is not None),
            UsageError("--proxy", "draws no noise and charges nothing", "omit the budget flags"),
        ),
    )


def _horizon(request: Request, plan: Plan) -> tuple[int, int]:
    """Return (first hours, time that C has to cover) in microseconds."""
    timeline = plan.timeline
    first = None if request.first is None else duration_micros("--first", request.first)
    if timeline.period is not None or timeline.end is not None:
        horizon = timeline.period or (timeline.end or 0) - timeline.start
        return (horizon if first is None else first), horizon
    if first is None or request.scale is None:
        shared = timeline.slide != timeline.window and plan.design.selects
        flag = "mechanism.periods_share_windows = true"
        more = f"; as windows slide and keys are selected, with {flag}" if shared else ""
        raise UsageError(
            "budget.covers",
            "is lifetime and the stream has no end: nothing says over what time C has to last",
            f"write a length there (recommended{more}), or give --first and --scale",
        )
    return first, first


def scale_text(given: float | None, default: Fraction) -> str:
    """Return the scale, or the default where none is given, as the text of an exact fraction.

    Raises:
        UsageError: it is not above 0 and below 10^9.
    """
    if given is None:
        return str(default)
    if not 0 < given < 1e9:
        raise UsageError("--scale", "must be positive and finite", "write e.g. 4")
    return str(Fraction(str(given)))
