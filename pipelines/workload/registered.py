"""Answers given once through the ledger's register: pure epsilon, and tables without a histogram.

The order is that of every answer (`state.ledger.answers`): run id, charge and request are one
transaction before a record is read; noise is named by the run id; the receipt is committed before
the folder gets its place.  Who is cut off goes on under the same run id: same bytes, one charge.
"""

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import InvariantError, PolicyError, RunError, UsageError
from dpstream.accounting.gaussian import mu_of
from dpstream.accounting.strategies.cells.residual import Residual
from dpstream.accounting.strategies.cells.strategy import CellStrategy
from dpstream.accounting.workloads.workload import Workload, codes
from dpstream.dp_transforms import residual as tables
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.pipelines.connectors.files.source import pieces
from dpstream.pipelines.connectors.inputs import Input
from dpstream.pipelines.connectors.registry import input_of
from dpstream.pipelines.jobs.cells import CellDomain, domain_digest
from dpstream.pipelines.jobs.committed import unit_in_words, unit_of
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.jobs.noise_key import key_source
from dpstream.pipelines.operate.acceptance import Acceptance, Request, of_requests
from dpstream.pipelines.workload import lattice
from dpstream.pipelines.workload.answers import answers
from dpstream.pipelines.workload.bounded import bounded
from dpstream.pipelines.workload.cache import solved_purely
from dpstream.pipelines.workload.estimate import Estimate
from dpstream.pipelines.workload.files import domain_text
from dpstream.pipelines.workload.of_job import asked_once, check_job, domain_of_job
from dpstream.pipelines.workload.release import Moment, Receipt, check_place, write_release
from dpstream.pipelines.workload.tables import TableEstimate
from dpstream.pipelines.workload.ways import check_tables
from dpstream.state.ledger.answers import Register
from dpstream.state.ledger.charges import Charge
from dpstream.state.ledger.open import open_ledger
from dpstream.state.run_ids import new_run_id


class Mechanism(NamedTuple):
    """What is drawn and what it costs.

    Attributes:
        name: strategy; digest: of all that decides what is drawn, domain included.
        epsilon, delta, mu: of a unit.
        whole: whether every cell is estimated, not sums alone.
        draw: estimate of (rows, attributes) cells under a key and a run name.
    """

    name: str
    digest: str
    epsilon: float
    delta: float
    mu: float | None
    whole: bool
    draw: Callable[[Int64, KeyRing, tuple[bytes, ...]], Estimate | TableEstimate]


class Answered(NamedTuple):
    """What was written, whether it was charged now, and records left out (for the operator)."""

    receipt: Receipt
    charged: bool
    dead_letters: int


def pure_mechanism(workload: Workload, job: Job, folder: Path) -> Mechanism:
    """Pure epsilon: the job's, with delta 0.

    Args:
        folder: of solved strategies.

    Raises:
        PolicyError: a workload or a domain that no lattice is made for.
    """
    bits = lattice.bits_of(len(workload.sizes))
    privacy = job.plan.privacy
    strategy, whole_numbers, _ = solved_purely(workload, bits, folder)
    made = lattice.lattice_of(whole_numbers, privacy.epsilon, privacy.contributions)
    digest = hashlib.blake2b(digest_size=16, person=b"dpstream-lattice")
    for factor in made.strategy.factors:
        digest.update(np.array(factor.shape, "<i8").tobytes() + factor.astype("<i8").tobytes())
    digest.update(np.float64(made.scale).tobytes())

    def draw(rows: Int64, keys: KeyRing, name: tuple[bytes, ...]) -> Estimate:
        flat = codes(workload.sizes, rows.T)
        cells = np.bincount(flat, minlength=workload.cells).reshape(workload.sizes)
        return lattice.estimate_of(made, lattice.published(made, cells, keys, name))

    whole = all(f.shape[0] >= f.shape[1] for f in made.strategy.factors)
    return Mechanism(strategy, digest.hexdigest(), privacy.epsilon, 0.0, None, whole, draw)


def table_mechanism(workload: Workload, strategy: CellStrategy, job: Job) -> Mechanism:
    """Residual tables: Gaussian noise of whole differences, no histogram of all cells.

    Raises:
        UsageError: the strategy is not one of residual tables.
        PolicyError: more numbers than are published.
    """
    gram, sizes = strategy.gram, workload.sizes
    if not isinstance(gram, Residual):
        raise UsageError("--tables", "is for workloads of tables of counts", "ask such, or omit it")
    check_tables(gram)  # noise is mixed table by table: a limit of that is told before a charge
    privacy = job.plan.privacy
    mu = mu_of(privacy.epsilon, privacy.delta)
    shapes = [[sizes[axis] for axis in key] for key in gram.keys]
    sds = np.sqrt(gram.noise2) * privacy.contributions / mu
    spent = tables.spent2(shapes, sds, privacy.contributions)
    if spent > mu * mu:
        sds *= np.sqrt(spent) / mu * (1 + 1e-12)
    if not tables.spent2(shapes, sds, privacy.contributions) <= mu * mu:
        raise InvariantError("the noise of the tables keeps the budget")
    digest = hashlib.blake2b(sds.astype("<f8").tobytes(), digest_size=16, person=b"dpstream-tables")
    digest.update(repr((sizes, gram.keys)).encode())

    def draw(rows: Int64, keys: KeyRing, name: tuple[bytes, ...]) -> TableEstimate:
        counts = []
        for key, shape in zip(gram.keys, shapes, strict=True):
            flat = codes(shape, rows[:, list(key)].T) if key else np.zeros(len(rows), np.int64)
            size = int(np.prod(shape, dtype=np.int64))
            counts.append(np.bincount(flat, minlength=size).astype(np.int64).reshape(shape))
        noisy = tables.published(counts, gram.keys, sds.tolist(), keys, name)
        return TableEstimate(sizes, gram.keys, sds, tuple(noisy))

    return Mechanism(
        strategy.name, digest.hexdigest(), privacy.epsilon, privacy.delta, mu, False, draw
    )


def answer_once(
    workload: Workload, job: Job, mechanism: Mechanism, out: Path, form: str = "parquet",
    some: bool = False, nonnegative: bool = False, fresh: bool = False,
) -> Answered:  # fmt: skip
    """Charge, read, draw, commit, publish.

    Args:
        some: the job's key names a part of the attributes only.
        fresh: a new charge also for what was answered before; the old receipt stays.

    Raises:
        DpstreamError: refused before a charge, or failed.
    """
    job, domain = asked_once(job), domain_of_job(job, workload, some)
    _check(workload, job)
    if nonnegative and not mechanism.whole:
        raise PolicyError("--nonnegative", "needs estimates of all cells", "omit it")
    if job.ledger is None:
        raise InvariantError("job.ledger is not None")
    # The source hands over the columns of the domain.
    reading = job.reading(domain.key)
    source = input_of(reading)
    before, plan_hash = source.state(), _plan_hash(job, mechanism, domain)
    check_place(out, plan_hash, workload, fresh)
    pieces(reading)  # a column that a file lacks costs nothing
    with key_source(job).ring() as keys:
        request = _request(keys, plan_hash, source)
        with contextlib.closing(open_ledger(job.ledger.path, job.ledger.data_set)) as ledger:
            register = Register(ledger, "workload")
            charge = _charge(job, mechanism, plan_hash)
            run_id, charged = register.begin(charge, request, job.ledger.limit.pair, fresh)
            rows = bounded(reading, domain, keys)
            estimate = mechanism.draw(rows.codes, keys, (run_id.encode(), plan_hash.encode()))
            if source.state() != before:
                raise PolicyError(
                    "source.path", "a file changed while it was read", "run again: a new charge"
                )
            line = job.plan.timeline
            moment = Moment(line.start, line.start + line.window, 1, line.start + line.window)
            receipt = _receipt(workload, job, mechanism, run_id, plan_hash, moment)
            table = answers(workload, estimate, [moment], consistent=nonnegative)

            def commit(data: bytes) -> None:
                known = register.read(run_id)
                if known is not None and known.receipt != data:
                    raise RunError(
                        "--out", "would not be what was published before under this run id",
                        "use the same workload, options and version of the program",
                    )  # fmt: skip
                register.commit(run_id, data)

            receipt = write_release(out, receipt, estimate, table, form, commit)
    return Answered(receipt, charged, rows.dead_letters)


def acceptance(
    workload: Workload, job: Job, mechanism: Mechanism, some: bool = False, fresh: bool = False,
    out: Path | None = None,
) -> Acceptance:  # fmt: skip
    """Whether `answer_once` would be charged now, and what it would cost; charges nothing.

    Args:
        out: the folder that would be made; ``None``: a new one.

    Raises:
        DpstreamError: the job is refused for another reason than its ledger.
    """
    job, domain = asked_once(job), domain_of_job(job, workload, some)
    _check(workload, job)
    if job.ledger is None:
        raise InvariantError("job.ledger is not None")
    plan_hash = _plan_hash(job, mechanism, domain)

    def fingerprint() -> str:
        with key_source(job).ring() as keys:
            return _request(keys, plan_hash, input_of(job.reading(domain.key)))

    request = Request(_charge(job, mechanism, plan_hash), fingerprint)
    accepted = of_requests(job.ledger, [request], fresh)
    if out is None:
        return accepted
    return accepted.unless(lambda: check_place(out, plan_hash, workload, fresh))


def _request(keys: KeyRing, plan_hash: str, source: Input) -> str:
    """Keyed fingerprint of what is asked of which input."""
    return keys.source_fingerprint([b"workload", plan_hash.encode(), *source.identity()])


def _check(workload: Workload, job: Job) -> None:
    """What would fail only after the charge."""
    check_job(job)
    if job.plan.aggregates[0].kind != "count":
        raise UsageError("aggregate.kind", "must be 'count' here", "count records")
    if job.source.unbounded:
        raise UsageError("source.kind", "must be files that are all there", "name such a source")
    if job.ledger is None:
        raise UsageError("ledger", "is required for answers that no store keeps", "add [ledger]")
    if job.plan.privacy.per_key_bound:
        raise UsageError(
            "privacy.per_key_bound",
            "saves nothing where cells share their noise: the effects of a unit's records on "
            "several cells add up",
            "omit it",
        )


def _plan_hash(job: Job, mechanism: Mechanism, domain: CellDomain) -> str:
    """Names what is drawn of which records: the job's plan, the domain, the mechanism."""
    parts = (job.plan.hash, domain.digest, mechanism.digest)
    return hashlib.blake2b(" ".join(parts).encode(), digest_size=16).hexdigest()


def _charge(job: Job, mechanism: Mechanism, plan_hash: str) -> Charge:
    return Charge(
        new_run_id(), plan_hash, unit_in_words(job.plan), mechanism.epsilon,
        mechanism.delta, mechanism.mu, 0.0, kind="workload", identity=unit_of(job).text,
    )  # fmt: skip


def _receipt(
    workload: Workload, job: Job, mechanism: Mechanism, run_id: str, plan_hash: str, moment: Moment
) -> Receipt:
    [aggregate] = job.plan.aggregates
    return Receipt(
        run_id=run_id,
        plan_hash=plan_hash,
        domain=domain_text(workload),
        domain_digest=domain_digest(workload.attributes),
        workload=workload.digest,
        strategy=mechanism.name,
        mixing=None,
        epsilon=mechanism.epsilon,
        delta=mechanism.delta,
        mu=mechanism.mu,
        contributions=job.plan.privacy.contributions,
        aggregate=(aggregate.name, aggregate.kind),
        insecure=job.insecure,
        moments=[moment],
        files={},
    )
