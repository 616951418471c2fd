"""A job's records as cells of a workload, and answers without a store: pure epsilon, and tables.

**The job that answers** has the job's records, C and account, with cells as public keys.  Queries
on the cells are post-processing, so that they do not enter the plan; the domain and the mix of
noise do.  Hence a store, an account's entry and all noise belong to a domain and a strategy:
another workload is answered from the release, or by another run.

**Answers without a store** have no histogram of all cells.  They follow the common sequence of
charge and answer (`pipelines.ask`).  The estimate is committed, in the archive beside the account;
the answers of the workload are computed from it.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import InvariantError, UsageError, refuse_first, required
from dpstream.accounting.fields import Field
from dpstream.accounting.gaussian import mu_of
from dpstream.accounting.mixing import Mixing, cells_of
from dpstream.accounting.strategies.cells.residual import Tables
from dpstream.accounting.strategies.cells.strategy import CellStrategy
from dpstream.accounting.workloads.workload import Workload, codes
from dpstream.dp_transforms import residual as tables
from dpstream.dp_transforms.batches import ids_of
from dpstream.dp_transforms.decision import admit
from dpstream.dp_transforms.ingest.records import Canonicaliser
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.pipelines.ask import sequence
from dpstream.pipelines.ask.folder import Archive, Output, Written, archive_of
from dpstream.pipelines.ask.question import ONCE, Asking
from dpstream.pipelines.connectors.files.source import batches, pieces
from dpstream.pipelines.connectors.files.types import check_types
from dpstream.pipelines.connectors.input_files import stamps
from dpstream.pipelines.connectors.query import apply_query
from dpstream.pipelines.formats.receipt import answered_now, encoded, header_of
from dpstream.pipelines.jobs.committed import unit_of
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.jobs.keys import (
    CELL,
    CellDomain,
    JobCells,
    cell_key,
    domain_digest,
    put_cells,
)
from dpstream.pipelines.jobs.secret import secret_source
from dpstream.pipelines.project.copying import place_beside
from dpstream.pipelines.workload import lattice
from dpstream.pipelines.workload.estimate import Estimate, TableEstimate
from dpstream.pipelines.workload.planning import (
    check_tables,
    domain_text,
    solved_purely,
)
from dpstream.pipelines.workload.release import (
    ESTIMATE,
    RECEIPT,
    Moment,
    Receipt,
    Released,
    answers,
    released_of,
    write_estimate,
    write_release,
)
from dpstream.state.ledger.contract import Answer, Decision
from dpstream.state.ledger.events import Charge, ChargeKind
from dpstream.state.ledger.history import Accept, History
from dpstream.state.ledger.open import open_ledger

#: What the names of places of answers over time end with.
OVER_TIME = "over-time"


def cells_job(job: Job, workload: Workload, mixing: Mixing, over_time: bool) -> Job:
    """Return a job whose releases are estimates of a workload's cells.

    Args:
        over_time: release at every trigger time of the job; otherwise once, at its end.

    Raises:
        UsageError, PolicyError: the job's key, aggregates or privacy do not fit.
    """
    _check_job(job)
    domain = _domain_of_job(job, workload)
    replace, plan = msgspec.structs.replace, job.plan
    # Weights choose among keys by units: with all cells public there is nothing to choose.
    privacy = (
        replace(plan.privacy, weights=None)
        if job.section.mechanism.weights == "auto"
        else plan.privacy
    )
    timeline = plan.timeline
    if not over_time:
        timeline = timeline.once()
        privacy = replace(privacy, strategy="dense", refresh_every=None, select_every=None)
    plan = replace(
        plan,
        key=(CELL,),
        public_keys=domain.digest,
        cells=cells_of(mixing),
        timeline=timeline,
        privacy=privacy,
        remember=None,
    ).check()
    return replace(job, plan=plan, cells=JobCells(domain, mixing))


def with_own_places(job: Job) -> Job:
    """Return the job with a store, releases and dead letters beside its own, for answers over time.

    Answers at the end of the job's time are another run, which has the job's own places.  A store
    in a database stays as it is: it holds one run and refuses another one.
    """
    replace, state, sink = msgspec.structs.replace, job.state, job.sink
    if state.path is not None:
        file = state.path.with_name(f"{state.path.stem}-{OVER_TIME}{state.path.suffix}")
        state = replace(state, store=f"sqlite:{file}")
    if sink.table:
        sink = replace(sink, table=place_beside(sink.table, OVER_TIME, "."))
    if sink.topic:
        sink = replace(sink, topic=place_beside(sink.topic, OVER_TIME))
    if sink.path:
        sink = replace(sink, path=_folder_beside(job, sink.path))
    dead_letter = _folder_beside(job, job.dead_letter)
    return replace(job, state=state, sink=sink, dead_letter=dead_letter)


def _folder_beside(job: Job, path: str) -> str:
    """Return another folder; in the project's folder if the path is that."""
    folder = job.path.parent
    return os.path.normpath(folder / place_beside(os.path.relpath(path, folder), OVER_TIME))


def _domain_of_job(job: Job, workload: Workload) -> CellDomain:
    """Return the domain of an aligned workload, with its input columns.

    Raises:
        UsageError: the columns do not fit the domain.
    """
    key = cell_key(workload.attributes, job.plan.key)
    if CELL.column in set(job.columns) - {field.column for field in key}:
        raise UsageError(
            "table", f"reads a column '{CELL.column}', as the cells are called", "rename it"
        )
    return CellDomain(workload.attributes, key)


def _check_job(job: Job) -> None:
    """Refuse a job that has a list of keys, or another aggregate than one count or sum.

    Raises:
        UsageError: see above.
    """
    aggregates = job.plan.aggregates
    refuse_first(
        (
            job.public_keys is not None,
            UsageError("public_keys", "is not for a workload: its cells are the keys", "omit it"),
        ),
        (
            len(aggregates) != 1 or aggregates[0].kind not in ("count", "sum"),
            UsageError(
                "aggregate",
                "a workload is asked of one count or one sum",
                'keep one, such as aggregate.records = { kind = "count" }',
            ),
        ),
    )


def asked_once(workload: Workload, job: Job) -> tuple[Job, CellDomain]:
    """Return the job with its whole time as one window with one trigger time, and its domain.

    Raises:
        UsageError, PolicyError: the job cannot answer an aligned workload once, without a store.
    """
    job = msgspec.structs.replace(job, plan=job.plan.once().check())
    domain = _domain_of_job(job, workload)
    _check_job(job)
    refuse_first(
        (
            job.plan.aggregates[0].kind != "count",
            UsageError(
                "aggregate.kind", "must be 'count' here", "count records, or use --strategy product"
            ),
        ),
        (
            job.source.unbounded,
            UsageError("table.format", "must be files that are all there", "name such a source"),
        ),
        (
            job.ledger is None,
            UsageError(
                "account",
                "is required for answers that no store keeps",
                "type `dpstream account create`",
            ),
        ),
        (
            bool(job.plan.privacy.per_key_bound),
            UsageError(
                "per_key_bound",
                "saves nothing where cells share their noise: the effects of a unit's records on "
                "several cells add up",
                "omit it",
            ),
        ),
    )
    return job, domain


# Records of a job's files as cells of a domain, at most C of each unit: for answers given once.
#
# The records are the stream's own: the same canonical form, times, dead letters and order of
# admission (`dp_transforms.decision.admit`), over one window that is the job's whole time.  A
# record travels as the packed numbers of its cells, so that domains of any size pass through.

_WIDTH = 2


class Rows(NamedTuple):
    """PRIVATE: (rows, attributes) cells of the counted records; how many are dead letters."""

    codes: Int64
    dead_letters: int


def bounded(job: Job, domain: CellDomain, ring: KeyRing) -> Rows:
    """Read a job's files.

    Args:
        job: a job whose one window is all time and whose input has the domain's columns.

    Raises:
        DpstreamError: the files cannot be read.
    """
    plan = msgspec.structs.replace(
        job.plan, key=(Field(CELL.column, "bytes"),), public_keys=None, cells=None
    )
    ingest, good, dead = Canonicaliser(plan, ring), [], 0
    for batch in apply_query(job, batches(job)):
        valid_records, letters = ingest(_packed(domain, batch))
        good.append(valid_records)
        dead += letters.num_rows
    if not good:
        return Rows(np.zeros((0, len(domain.attributes)), np.int64), dead)
    records = pa.Table.from_batches(good).combine_chunks()
    ids = np.concatenate([ids_of(one.column("unit")) for one in good])
    _, unit = np.unique(ids, axis=0, return_inverse=True)
    unit = unit.ravel().astype(np.int64)
    admitted, _ = admit(
        unit,
        records.column("stamp").to_numpy(),
        records.column("partition").to_numpy(),
        records.column("offset").to_numpy(),
        np.ones(len(unit), np.int64),
        np.zeros(int(unit.max(initial=-1)) + 1, np.int32),
        plan.privacy.contributions,
    )
    packed = b"".join(records.column(CELL.column).to_pylist())
    codes = np.frombuffer(packed, f"<u{_WIDTH}").reshape(len(unit), len(domain.attributes))
    return Rows(codes[admitted > 0].astype(np.int64), dead)


def _packed(domain: CellDomain, batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with the cells of each row as bytes, null where one of them is missing."""
    codes = domain.codes(batch)
    rows = np.ascontiguousarray(codes.T.clip(min=0)).astype(f"<u{_WIDTH}")
    width = rows.shape[1] * _WIDTH
    offsets = np.arange(len(rows) + 1, dtype=np.int64) * width
    blobs = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(rows), [None, pa.py_buffer(offsets), pa.py_buffer(rows)]
    )
    outside = pa.array((codes < 0).any(axis=0))
    null = pa.scalar(None, pa.large_binary())
    return put_cells(batch, pa.compute.if_else(outside, null, blobs))


class Mechanism(NamedTuple):
    """The mechanism that is drawn, and its cost.

    Attributes:
        name: the strategy's name.
        digest: of all that decides what is drawn, including the domain.
        epsilon, delta, mu: the cost for a unit.
        every_cell: whether every cell is estimated, not only sums.
        draw: returns the estimate of (rows, attributes) cells under a key and a run name.
    """

    name: str
    digest: str
    epsilon: float
    delta: float
    mu: float | None
    every_cell: bool
    draw: Callable[[Int64, KeyRing, tuple[bytes, ...]], Estimate | TableEstimate]


class Answered(NamedTuple):
    """The receipt, whether the answer was charged now, and records left out (for the operator)."""

    receipt: Receipt
    charged: bool
    dead_letters: int


def pure_mechanism(workload: Workload, job: Job, folder: Path) -> Mechanism:
    """Return the mechanism with pure epsilon: the job's, with delta 0.

    Args:
        folder: folder of solved strategies.

    Raises:
        UsageError: no lattice is made for the workload or the domain.
    """
    workload, privacy = workload.canonical, job.plan.privacy
    strategy, whole_numbers, _ = solved_purely(workload, folder)
    strategy, made = lattice.better_lattice(
        strategy, whole_numbers, workload, privacy.epsilon, privacy.contributions
    )
    digest = hashlib.blake2b(digest_size=16, person=b"dpstream-lattice")
    for factor in made.strategy.factors:
        digest.update(np.array(factor.shape, "<i8").tobytes() + factor.astype("<i8").tobytes())
    digest.update(np.float64(made.scale).tobytes())

    def draw(rows: Int64, ring: KeyRing, name: tuple[bytes, ...]) -> Estimate:
        flat = codes(workload.sizes, rows.T)
        cells = np.bincount(flat, minlength=workload.cells).reshape(workload.sizes)
        return lattice.estimate_of(made, lattice.published(made, cells, ring, name))

    full_rank = all(f.shape[0] >= f.shape[1] for f in made.strategy.factors)
    return Mechanism(strategy, digest.hexdigest(), privacy.epsilon, 0.0, None, full_rank, draw)


def table_mechanism(workload: Workload, strategy: CellStrategy, job: Job) -> Mechanism:
    """Return residual tables: Gaussian noise of whole differences, no histogram of all cells.

    Raises:
        UsageError: the strategy is not one of residual tables, or would publish too many numbers.
    """
    gram, sizes = strategy.gram, workload.aligned.sizes
    if not isinstance(gram, Tables):
        raise UsageError("--tables", "needs a strategy of residual tables", "omit it")
    check_tables(gram)  # noise is mixed table by table: a limit of that is told before a charge
    privacy = job.plan.privacy
    mu = mu_of(privacy.epsilon, privacy.delta)
    shapes = [[sizes[axis] for axis in key] for key in gram.keys]
    bases = [[gram.bases[axis] for axis in key] for key in gram.keys]
    sds = np.sqrt(gram.noise2) * privacy.contributions / mu
    spent = tables.spent2(bases, sds, privacy.contributions)
    if spent > mu * mu:
        sds *= np.sqrt(spent) / mu * (1 + 1e-12)
    if not tables.spent2(bases, sds, privacy.contributions) <= mu * mu:
        raise InvariantError("the noise of the tables keeps the budget")
    tables.check_range(bases, sds)
    digest = hashlib.blake2b(sds.astype("<f8").tobytes(), digest_size=16, person=b"dpstream-tables")
    digest.update(repr((sizes, gram.keys)).encode())
    for basis in gram.bases:
        digest.update(basis.canonical())

    def draw(rows: Int64, ring: KeyRing, name: tuple[bytes, ...]) -> TableEstimate:
        counts = []
        for key, shape in zip(gram.keys, shapes, strict=True):
            flat = codes(shape, rows[:, list(key)].T) if key else np.zeros(len(rows), np.int64)
            size = int(np.prod(shape, dtype=np.int64))
            counts.append(np.bincount(flat, minlength=size).astype(np.int64).reshape(shape))
        noisy = tables.published(counts, gram.keys, bases, sds.tolist(), ring, name)
        return TableEstimate(gram.bases, gram.keys, sds, tuple(noisy))

    return Mechanism(
        strategy.name, digest.hexdigest(), privacy.epsilon, privacy.delta, mu, False, draw
    )


class WorkloadQuestion:
    """A mechanism's estimate of the cells of a job's domain, for `ask.sequence`.

    Args:
        out: where the answer is to be published.
        accept: may refuse a new charge by the charges before it.

    Attributes:
        archive: stores the estimate.
        dead_letters: number of records left out, for the operator; known after the draw.
    """

    kind: ChargeKind = "workload"

    def __init__(
        self,
        workload: Workload,
        job: Job,
        mechanism: Mechanism,
        out: Path | None = None,
        accept: Accept | None = None,
    ) -> None:
        self._out, self._accept = out, accept
        workload = workload.aligned
        job, self._domain = asked_once(workload, job)
        self.ledger = required(job.ledger, "a job that is asked once has an account")
        self._workload, self._job, self._mechanism = workload, job, mechanism
        # The source hands over the columns of the domain.
        self._reading = job.with_key(self._domain.key)
        # What is drawn and for which records: the job's plan, domain and mechanism.  The cells
        # replace the key, and what the aggregate is called is presentation.
        [aggregate] = job.plan.aggregates
        counted = msgspec.structs.replace(aggregate, name=aggregate.kind)
        plan = msgspec.structs.replace(job.plan, key=(CELL,), aggregates=(counted,))
        parts = (plan.hash, self._domain.digest, mechanism.digest)
        self.plan_hash = hashlib.blake2b(" ".join(parts).encode(), digest_size=16).hexdigest()
        self.archive = Archive(archive_of(self.ledger.path, job.path.parent), "account.path")
        self.dead_letters = 0

    @property
    def identity(self) -> Sequence[bytes]:
        """The canonical parts of the question; the digested plan names the source."""
        return [self.plan_hash.encode()]

    def check(self, ring: KeyRing) -> None:
        """Refuse, for example, a column that a file lacks; see `ask.question.Question`."""
        if self._out is not None:
            Output(self._out, RECEIPT, "--out").check(None)
        pieces(self._reading)
        check_types(self._reading)

    def decide(self, run_id: str, account: History) -> Decision:
        """Return the charge of the question; see `ask.question.Question`."""
        if self._accept is not None:
            self._accept(account)
        unit, mechanism = unit_of(self._job).text, self._mechanism
        cost = mechanism.epsilon, mechanism.delta, mechanism.mu, 0.0
        name = self._job.name
        return Decision(Charge(run_id, self.plan_hash, unit, *cost, kind="workload", label=name))

    def stamp(self) -> object:
        """Return names, sizes and times of the job's files; see `ask.question.Question`."""
        return stamps(self._reading)

    def draw(self, charge: Charge, ring: KeyRing) -> bytes:
        """Read the records, draw the noise and return the receipt; see `ask.question.Question`."""
        rows = bounded(self._reading, self._domain, ring)
        self.dead_letters = rows.dead_letters
        name = (charge.run_id.encode(), self.plan_hash.encode())
        estimate = self._mechanism.draw(rows.codes, ring, name)
        with self.archive.draft() as draft:
            write_estimate(draft, estimate)
            receipt = encoded(self._receipt(charge, self.archive.seal(draft, [ESTIMATE])))
            self.archive.keep(draft, receipt)
        return receipt

    def released(self, data: bytes) -> Released:
        """Return the estimate of a committed receipt."""
        receipt = header_of(data, Receipt)
        with self.archive.draft() as draft:
            self.archive.take(data, receipt.files, [ESTIMATE], draft)
            return released_of(receipt, (draft / ESTIMATE).read_bytes())

    def _receipt(self, charge: Charge, files: dict[str, Written]) -> Receipt:
        job, mechanism, timeline = self._job, self._mechanism, self._job.plan.timeline
        [aggregate] = job.plan.aggregates
        return Receipt(
            **answered_now(charge),
            domain=domain_text(self._workload),
            domain_digest=domain_digest(self._workload.attributes),
            workload=self._workload.digest,
            strategy=mechanism.name,
            mixing=None,
            mechanism="geometric" if mechanism.mu is None else "gaussian",
            epsilon=mechanism.epsilon,
            delta=mechanism.delta,
            mu=mechanism.mu,
            contributions=job.plan.privacy.contributions,
            aggregate=(aggregate.name, aggregate.kind),
            insecure=job.insecure,
            moments=[
                Moment(
                    timeline.start,
                    timeline.start + timeline.window,
                    1,
                    timeline.start + timeline.window,
                )
            ],
            files=files,
        )


def answer_once(
    workload: Workload,
    job: Job,
    mechanism: Mechanism,
    out: Path,
    form: str | None = None,
    nonnegative: bool = False,
    how: Asking = ONCE,
    accept: Accept | None = None,
    show: Callable[[Answered], object] = lambda _: None,
) -> Answered:
    """Ask the question, and write the answers of the workload.

    Args:
        form: format of the table of answers; ``None``: that of ``out``, else parquet.
        how: whether to ask again at a new charge, and about which state of the data.
        accept: may refuse a new charge by the charges before it.
        show: shows what was written; if it fails, asking ``fresh`` again continues this answer.

    Raises:
        DpstreamError: refused before a charge, or failed.
    """
    question = WorkloadQuestion(workload, job, mechanism, out, accept)
    if nonnegative and not mechanism.every_cell:
        raise UsageError("--nonnegative", "needs estimates of all cells", "omit it")
    results = list[Answered]()

    def write(answer: Answer) -> None:
        released = question.released(answer.receipt)
        receipt, estimate = released.receipt, released.estimate
        table = answers(workload, estimate, receipt.moments, consistent=nonnegative)
        [aggregate] = job.plan.aggregates
        named = aggregate.name, aggregate.kind
        receipt = msgspec.structs.replace(receipt, workload=workload.digest, aggregate=named)
        receipt = write_release(out, receipt, estimate, table, form, nonnegative)
        results.append(Answered(receipt, answer.charged, question.dead_letters))
        show(results[0])

    with (
        secret_source(job).ring() as keys,
        contextlib.closing(open_ledger(question.ledger)) as ledger,
    ):
        sequence.ask(question, ledger, keys, how, deliver=write)
    return results[0]
