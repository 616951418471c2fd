"""Choose C and bounds for a job, by the common sequence of charge and answer (`pipelines.ask`).

The question is fixed from public parts (`pipelines.tuning.ask`); the answer is committed before the
new job is written.  With proxy data nothing is drawn or charged, and the job is marked accordingly.

**Records** of the first hours are read batch by batch into histograms.  Ingest is the stream's own:
the same canonical form, dead letters and positions.  A timeline that ends with the first hours
excludes later event times; the tally excludes later stamps.  What is counted of a record is a
function of that record alone.

**Proxy data** must not be the job's own: exact figures of the job's own records are a release
without noise and without a charge.  Uncompressed contents are compared: copies and links have other
names, and a copy may be compressed.  Messages of a broker and objects of a remote store cannot be
compared: there the data steward is responsible for using other data.

**Figures** are those with which the job can be run: its noise for each C, bounds, bound per key.
All of it is public, a function of the job's plan and of the noisy counts.
"""

import contextlib
import glob
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dpstream.accounting.arrays import Int64
from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.errors import PolicyError, UsageError, required
from dpstream.accounting.figures import exact
from dpstream.accounting.places import COLUMNAR
from dpstream.accounting.plan.plan import Plan, with_privacy
from dpstream.accounting.tuning.answer import (
    ChosenBounds,
    Figures,
    NoiseOf,
    PerKey,
    read_off,
    rule_text,
)
from dpstream.accounting.tuning.question import encoder_matrix
from dpstream.accounting.tuning.reference import final_sd
from dpstream.accounting.tuning.starred import usual
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.noise.secret import KEY_BYTES
from dpstream.dp_transforms.tuning import Tally, noisy
from dpstream.pipelines.ask import sequence
from dpstream.pipelines.ask.acceptance import (
    Acceptance,
    check_first_file,
    request_for,
    requests_acceptance,
)
from dpstream.pipelines.connectors.files.source import canonical_records, named_by, pieces, recorded
from dpstream.pipelines.connectors.input_files import manifest, stamps
from dpstream.pipelines.formats.compression import (
    HEAD_BYTES,
    codec_of,
    plain_by_name,
)
from dpstream.pipelines.formats.lines import BLOCK_BYTES, BrokenFileError
from dpstream.pipelines.formats.receipt import answered_now, encoded, header_of
from dpstream.pipelines.formats.rows import unreadable
from dpstream.pipelines.jobs.charging import spend_of
from dpstream.pipelines.jobs.committed import Receipt, unit_of
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.jobs.secret import secret_source
from dpstream.pipelines.project.copying import append_section, sink_of_copy
from dpstream.pipelines.project.job_section import ChoiceSection
from dpstream.pipelines.tuning.ask import (
    CheckedRequest,
    canonical_plan,
    in_column_units,
    refuse_taken,
    render,
)
from dpstream.state.disk_errors import file_error
from dpstream.state.ledger.contract import Answer, AnswerLog, Decision
from dpstream.state.ledger.events import Charge, ChargeKind, new_run_id
from dpstream.state.ledger.history import History
from dpstream.state.ledger.open import open_ledger

Content = tuple[int, bytes]


def tally(tuning: CheckedRequest, job: Job, ring: KeyRing, name: tuple[bytes, ...]) -> list[Int64]:
    """Return exact histograms of the first hours of ``job``'s input: PRIVATE, for ``noisy`` only.

    Args:
        job: the job whose files are read; the timeline of its plan starts with the first hours.
        name: the run's name, for the sampling keys.

    Raises:
        UsageError: there is no file, or a column is missing.
        RunError: the operating system cannot read a file.
    """
    timeline = job.plan.timeline
    ends = msgspec.structs.replace(timeline, end=timeline.start + tuning.question.first)
    plan = msgspec.structs.replace(canonical_plan(job.plan), timeline=ends)
    counted = Tally(plan, ring, name, tuning.design.histograms, tuning.question.values_per_unit)
    for records in canonical_records(job, plan, ring):
        counted.add(records)
    return counted.counts()


def refuse_own_data(job: Job, proxy: Job) -> None:
    """Refuse proxy data with a file of the job's source.

    Raises:
        PolicyError: a file is the same.
        RunError: a file cannot be read.
    """
    with named_by("--proxy"):
        given = set(_contents(proxy))
    try:
        own = _in_folder(job, given) if job.source.unbounded else _contents(job)
        overlap = any(content in given for content in own)
    except UsageError:
        return  # the stream's files are not there yet
    except OSError as error:
        raise file_error("table.path", "cannot be read", error) from None
    if overlap:
        raise PolicyError(
            "--proxy",
            "holds a file of the job's own source: its exact figures would be an uncharged release",
            "give data of other units, or choose privately with --first and --epsilon",
        )


def _contents(job: Job) -> Iterator[Content]:
    """Yield the content digest of every file of a bounded source."""
    for file in manifest(job):
        try:
            yield content_of(file.path, job.source.kind)
        except OSError as error:
            raise unreadable(file.partition, error) from None


def _in_folder(job: Job, given: set[Content]) -> Iterator[Content]:
    """Yield content digests of files of a growing folder; of other sizes only compressed files."""
    if job.source.kind != "folder" or "://" in job.source.path:
        return
    sizes, kind = {size for size, _ in given}, str(job.source.format)
    for path in (p for p in Path(job.source.path).rglob("*") if p.is_file()):
        with open(path, "rb", buffering=0) as raw:
            packed = codec_of(raw.read(HEAD_BYTES), path.name) is not None
        if packed or path.stat().st_size in sizes:
            yield content_of(str(path), kind)


def content_of(path: str, kind: str) -> Content:
    """Return size and BLAKE2b-128 digest of a file; for a compressed text, those of the text.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb") as raw:
        if kind not in COLUMNAR:
            try:
                stream, size, digest = plain_by_name(raw, path, kind), 0, _digest()
                while block := stream.read(BLOCK_BYTES):
                    size += len(block)
                    digest.update(block)
                return size, digest.digest()
            except BrokenFileError:
                raw.seek(0)
        content_digest = hashlib.file_digest(raw, _digest)
        return raw.tell(), content_digest.digest()


def _digest() -> Any:
    return hashlib.blake2b(digest_size=16)


def read_off_runnable(tuning: CheckedRequest, nodes: list[Int64]) -> Figures:
    """Return figures of the noisy nodes with which the job can be run."""
    bound = tuning.job.plan.privacy.per_key_bound

    def noise_with(bounds: ChosenBounds) -> NoiseOf:
        plan = with_bounds(tuning, bounds)
        return lambda contributions, per_key: noise_at_the_end(plan, contributions, per_key)

    figures = read_off(tuning.question, tuning.design, nodes, noise_with, bound)
    # The largest C, at most the tuned one, whose noise can be drawn.
    if figures.unanswered is not None or _allowed(tuning, figures, figures.contributions):
        return figures
    low, high = 1, figures.contributions  # low can be run: see ``ask``
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _allowed(tuning, figures, middle) else (low, middle)
    note = "a smaller C is taken, because the noise of the chosen one exceeds the sampler's range"
    notes = (*figures.notes, note)
    return msgspec.structs.replace(figures, contributions=low, notes=notes, cut=None, sd=None)


def noise_at_the_end(plan: Plan, contributions: int, per_key: int | None) -> float:
    """Return the sd of the first column at a window's end, in records at the bound; public.

    It is for that C and bound per key; infinite if the job cannot be run with them.
    """
    other = with_privacy(plan, contributions=contributions, per_key_bound=per_key)
    try:
        other = with_privacy(other, weights=plan.privacy.weights or usual(other))
        return final_sd(other, allocate(other))
    except (UsageError, PolicyError):
        return math.inf


def _allowed(tuning: CheckedRequest, figures: Figures, contributions: int) -> bool:
    try:
        allocate(with_privacy(with_bounds(tuning, figures.bounds), contributions=contributions))
    except UsageError:
        return False
    return True


def with_bounds(tuning: CheckedRequest, chosen: ChosenBounds) -> Plan:
    """Return the job's plan with these bounds."""
    bounds, plan = bounds_of(tuning, chosen), tuning.job.plan
    aggregates = tuple(
        msgspec.structs.replace(a, bounds=bounds.get(a.name, a.bounds)) for a in plan.aggregates
    )
    return msgspec.structs.replace(plan, aggregates=aggregates)


def bounds_of(tuning: CheckedRequest, chosen: ChosenBounds) -> dict[str, tuple[float, float]]:
    """Return tuned bounds in the columns' units, by aggregate."""
    grids = {a.name: a.grid for a in tuning.job.plan.aggregates}
    named = _labelled(tuning, chosen)
    return {name: in_column_units(low, high, grids[name]) for name, low, high in named}


def _labelled(tuning: CheckedRequest, chosen: ChosenBounds) -> ChosenBounds:
    """Return bounds by the job's own names of its aggregates."""
    return tuple((tuning.labels[name], low, high) for name, low, high in chosen)


#: Noise of proxy data does not exist; ids and sampling keys need some key, and this one is no
#: secret.
_NO_SECRET = bytes(KEY_BYTES)


class Outcome(NamedTuple):
    """The chosen figures; all of them are public once they are written.

    Attributes:
        job: the new job.
        releases: where its releases go.
        how: ``private`` or ``proxy``.
        contributions: C.
        bounds: [low, high] by aggregate, in the column's units.
        cut: share of all records that C cuts, at least.
        sd: of the first column's noise at a window's end, in records at the bound; ``None``: not
            known.
        per_key: other bounds per key, the C that they would need and what they cut.
        notes: remarks.
        run_id: of the charge.
        charged: whether this very call was charged.
        insecure: a fixed test secret was used: whoever knows it can subtract the noise.
    """

    job: str
    releases: str
    how: str
    contributions: int
    bounds: dict[str, tuple[float, float]]
    cut: float | None
    sd: float | None
    per_key: tuple[PerKey, ...]
    notes: tuple[str, ...]
    run_id: str | None
    charged: bool
    insecure: bool


def choose(tuning: CheckedRequest, show: Callable[[Outcome], object]) -> None:
    """Choose the figures and write the new job.

    Args:
        show: shows what was written; if it fails, asking ``fresh`` again continues this answer.

    Raises:
        PolicyError: the charge exceeds the account's limit, or there are too few units for an
            answer at this budget.
    """
    if not tuning.private:
        show(_proxy(tuning))
        return
    place = required(tuning.job.ledger, "a private tuning has an account")
    with (
        secret_source(tuning.job).ring() as ring,
        contextlib.closing(open_ledger(place)) as ledger,
    ):
        sequence.ask(
            TuningQuestion(tuning),
            ledger,
            ring,
            tuning.request.how,
            deliver=lambda answer: show(_write_job(tuning, answer)),
        )


class TuningQuestion(NamedTuple):
    """A question about the first hours of a job's stream, for `ask.sequence`."""

    checked: CheckedRequest

    @property
    def kind(self) -> ChargeKind:
        """The kind of the charge; see `ask.question.Question`."""
        return "choice"

    @property
    def identity(self) -> Sequence[bytes]:
        """The canonical parts of the question; the digested plan names the source."""
        return [self.checked.digest.encode()]

    def check(self, ring: KeyRing) -> None:
        """Refuse a taken name, and files that cannot be read; see `ask.question.Question`."""
        refuse_taken(self.checked)
        pieces(self.checked.job)

    def decide(self, run_id: str, account: History) -> Decision:
        """Return the charge of the question; see `ask.question.Question`."""
        spend = _spend(self.checked, run_id)
        refuse_useless(self.checked, account, spend)
        return Decision(spend)

    def stamp(self) -> object:
        """Return names, sizes and times of the job's files; see `ask.question.Question`."""
        return stamps(self.checked.job)

    def draw(self, charge: Charge, ring: KeyRing) -> bytes:
        """Read the records, draw the noise and return the receipt; see `ask.question.Question`."""
        receipt = Receipt(
            **answered_now(charge),
            identity=charge.identity,
            epsilon=charge.epsilon,
            delta=charge.delta,
            mu=self.checked.design.mu,
            first=self.checked.question.first,
            figures=_draw(self.checked, ring, charge.run_id),
        )
        return encoded(receipt)


def acceptance(tuning: CheckedRequest) -> Acceptance:
    """Return whether a tuning would be answered now, and its cost; charges nothing."""
    place = tuning.job.ledger
    if not tuning.private or place is None:
        return Acceptance(None, None, None, None).unless(lambda: _check_proxy(tuning))
    spend, how = _spend(tuning, new_run_id()), tuning.request.how
    secret, question = tuning.job.secret, TuningQuestion(tuning)

    def check(account: History) -> None:
        refuse_useless(tuning, account, spend)
        check_first_file(tuning.job)

    accepted = requests_acceptance(
        place,
        [request_for(spend, lambda: question.identity, secret, how.as_of)],
        how.fresh,
        check,
    )
    run_id = accepted.run_id
    if not accepted.answered or run_id is None:
        return accepted.unless(lambda: refuse_taken(tuning))
    with contextlib.closing(open_ledger(place, looking=True)) as ledger:
        answer = AnswerLog(ledger, question.kind).read(run_id)
    given = required(answer, "a question that was answered has its answer")
    return accepted.unless(lambda: _figures_of(tuning, header_of(given.receipt, Receipt)))


def refuse_useless(tuning: CheckedRequest, account: History, spend: Charge) -> None:
    """Refuse a tuning that would leave its stream no budget, before it is charged."""
    stream = spend_of(tuning.job, allocate(tuning.job.plan), "")
    [accepted] = account.check([spend])
    try:
        account.check([accepted, stream])
    except PolicyError:
        epsilon, delta = account.persons_limit()
        raise PolicyError(
            "account.limit",
            "the tuning and the stream it is for would together spend more than epsilon "
            f"{exact(epsilon)} at delta {exact(delta)} per unit",
            f"lower --epsilon or budget.epsilon, or {account.raising([spend, stream])}",
        ) from None


def _spend(tuning: CheckedRequest, run_id: str) -> Charge:
    question = tuning.question
    identity = unit_of(tuning.job).text
    paid = (question.epsilon, question.delta, tuning.design.mu, 0.0)
    # The first hours lie in one period: nobody has two units in them.
    return Charge(run_id, tuning.digest, identity, *paid, kind="choice", label=tuning.job.name)


def _draw(tuning: CheckedRequest, ring: KeyRing, run_id: str) -> Figures:
    """Read the first hours and draw every histogram's noise once."""
    name = (bytes.fromhex(run_id), tuning.digest.encode())
    counts = tally(tuning, tuning.job, ring, name)
    return read_off_runnable(tuning, noisy(ring, name, tuning.design.histograms, counts))


def _figures_of(tuning: CheckedRequest, receipt: Receipt) -> Figures:
    """Return the figures of a committed answer.

    Raises:
        PolicyError: there were too few units for one.
    """
    figures = receipt.figures
    if figures.unanswered is not None:
        label = tuning.labels.get(figures.unanswered, figures.unanswered)
        raise PolicyError(
            "--first",
            f"the noisy count of units for '{label}' is too small to choose by, and the charge "
            "stands",
            "check the job's start, columns and types, use a longer --first or a larger --epsilon "
            "(a new charge), or choose by --proxy",
        )
    return figures


def _write_job(tuning: CheckedRequest, answer: Answer) -> Outcome:
    """Write the job of a committed answer."""
    receipt = header_of(answer.receipt, Receipt)
    choice = ChoiceSection(
        how="private",
        epsilon=receipt.epsilon,
        delta=receipt.delta,
        mu=receipt.mu,
        run_id=receipt.run_id,
        question=receipt.plan_hash,
        as_of=tuning.request.as_of or None,
        receipt=answer.digest,
    )
    return _write(tuning, _figures_of(tuning, receipt), choice, answer.charged)


def _proxy_job(tuning: CheckedRequest) -> Job:
    """The job with the files of ``--proxy`` for its source."""
    pattern = str(Path(glob.escape(str(Path.cwd()))) / (tuning.request.proxy or ""))
    return recorded(tuning.job, pattern, "--proxy")


def _check_proxy(tuning: CheckedRequest) -> None:
    """Refuse what is no file, or has other columns than the job."""
    with named_by("--proxy"):
        check_first_file(_proxy_job(tuning))


def _proxy(tuning: CheckedRequest) -> Outcome:
    """Compute the same histograms of other data, exactly; marked as such, not charged."""
    start, timeline = tuning.start, tuning.job.plan.timeline
    moved = msgspec.structs.replace(timeline, start=start, end=start + tuning.question.first)
    job = _proxy_job(tuning)
    job = msgspec.structs.replace(job, plan=msgspec.structs.replace(job.plan, timeline=moved))
    refuse_own_data(tuning.job, job)
    with named_by("--proxy"):
        counts = tally(tuning, job, KeyRing(_NO_SECRET), (b"proxy",))
    histograms = tuning.design.histograms
    nodes = [
        encoder_matrix(histogram.cells) @ x for histogram, x in zip(histograms, counts, strict=True)
    ]
    figures = read_off_runnable(tuning, nodes)
    if figures.unanswered is not None:
        raise UsageError(
            "--proxy", "has no usable record in the time asked for", "check --proxy-start, --first"
        )
    return _write(tuning, figures, ChoiceSection(how="proxy"), False)


def _write(
    tuning: CheckedRequest, figures: Figures, choice: ChoiceSection, charged: bool
) -> Outcome:
    """Write the job with its figures.

    Args:
        choice: how they were chosen, and what was charged.
    """
    request, bounds = tuning.request, bounds_of(tuning, figures.bounds)
    labelled = _labelled(tuning, figures.bounds)
    table = msgspec.structs.replace(
        choice,
        first=request.first,
        rule=rule_text(tuning.question),
        bounds=tuple(name for name, _, _ in labelled),
        range=tuning.ranges,
    )
    named = figures.contributions, labelled
    text, section = render(request.project, request.job, request.new, *named, table)
    append_section(request.project, request.new, text, section, "--as")
    return Outcome(
        job=request.new,
        releases=sink_of_copy(request.new, section),
        how=table.how,
        contributions=figures.contributions,
        bounds=bounds,
        cut=figures.cut,
        sd=figures.sd,
        per_key=figures.per_key,
        notes=figures.notes,
        run_id=table.run_id,
        charged=charged,
        insecure=table.run_id is not None and tuning.job.insecure,
    )
