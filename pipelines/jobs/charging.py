"""What a run of a job costs, and whether it would be accepted now: the same rule for `dpstream run`
and for `dpstream plan`.

Public parts alone: the job, the identity in the store's file, names of files in the folder of the
releases, and the ledger.  Nothing is written, and no runner is loaded.
"""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dpstream.accounting.budget.allocation import Budget, allocate
from dpstream.accounting.budget.calibration import calibrated
from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.plan.unit import together
from dpstream.pipelines.jobs.committed import Ledgered, unit_of
from dpstream.pipelines.jobs.job import Job
from dpstream.state.ledger.charges import Charge
from dpstream.state.ledger.history import Accept
from dpstream.state.ledger.open import file_of, read_history

if TYPE_CHECKING:
    from dpstream.state.ledger.events import Head
    from dpstream.state.store import RunIdentity


class Expected(NamedTuple):
    """What a run of a job would begin with.

    Attributes:
        run_id: of the run that goes on; ``None``: a new one begins.
        charge: what the run costs.
        charged: it is in the ledger already, so that nothing more is charged.
    """

    run_id: str | None
    charge: Charge
    charged: bool


def check_begin(job: Job, fresh: bool = False, accept: Accept | None = None) -> Expected:
    """Refuse now what `begin` would refuse, as far as public files and the ledger say.

    A store or a sink that is a database or a topic is not connected to: `begin` looks at it.

    Args:
        fresh: a new run is asked for: the store and the releases that are there are moved away.
        accept: of a run that is not charged yet.

    Raises:
        PolicyError: the store holds another plan's run, it was lost, or the ledger's limit does
            not allow the charge.
        UsageError: the job's files lie where they must not; RunError: one cannot be read.
    """
    refuse_private_in_sink(job)
    identity = None if fresh else store_identity(job)
    if identity is not None and identity.plan_hash != job.plan.hash:
        raise PolicyError(
            "store",
            f"holds run {identity.run_id}, which was begun with another plan: the job was "
            "changed since",
            f"type {fresh_command(job)}, which begins a new run at a new charge "
            "and keeps the old store and releases beside the new ones; or restore the old job",
        )
    folder = job.sink.folder
    new = identity is None and not fresh and job.state.path is not None
    if new and folder is not None and folder_used(folder):
        again = f"type {fresh_command(job)}, which moves the old releases away"
        raise lost_store("sink.path", f"an empty folder; or {again}")
    seen = ledger_seen(job)
    if job.ledger is None:
        if seen is not None and not fresh:
            raise unnamed_ledger()
    elif fresh and seen is not None and seen.id != job.ledger.id:
        seen = None  # a new run may be of other data
    return check_charge(job, identity, seen, accept)


def fresh_command(job: Job) -> str:
    """What to type for a new run."""
    if job.cells is not None:
        return "`dpstream workload answer` as before with --fresh and a new --out"
    return f"`dpstream run {job.name} --fresh`"


def store_identity(job: Job) -> "RunIdentity | None":
    """The run that the store's file holds, of whatever plan; ``None`` also for a database."""
    path = job.state.path
    if path is None or not Path(path).exists():
        return None
    from dpstream.state.sqlite.file import peek_identity  # not needed to plan

    return peek_identity(path)


def ledger_seen(job: Job) -> "Head | None":
    """The end of the ledger as the store's file last saw it; ``None`` also for a database."""
    path = job.state.path
    if path is None or not Path(path).exists():
        return None
    from dpstream.state.ledger.lineage import LEDGER, head_of  # not needed to plan
    from dpstream.state.sqlite.file import peek_note

    return head_of(peek_note(path, LEDGER))


def unnamed_ledger() -> PolicyError:
    """What is raised where a run was charged and its job names no ledger any more."""
    return PolicyError(
        "account", "this run was charged in an account, and the job names none", "name it again"
    )


def lost_store(field: str, another: str) -> PolicyError:
    """What is raised where a new store would add to releases of a run it knows nothing of.

    Args:
        field: of the sink; another: words for a fresh place of the same kind.
    """
    return PolicyError(
        field,
        "holds a run's releases, but the store is new: it was lost, moved or belongs elsewhere",
        f"restore the run's store, or write this run's releases to {another}",
    )


def folder_used(folder: Path) -> bool:
    """Whether a run has ever published files in a folder, or begun to."""
    names = ("run.json", "run-epoch-*.json", "window-*/trigger-*.*")
    return any(any(folder.glob(name)) for name in names)


def check_charge(
    job: Ledgered,
    identity: "RunIdentity | None" = None,
    seen: "Head | None" = None,
    accept: Accept | None = None,
) -> Expected:
    """Refuse now what charging a run would refuse; writes no entry.

    Args:
        identity: of the run that was begun; ``None``: a new one.
        seen: the ledger's end as the job's store last saw it.
        accept: of a run that is not charged yet.

    Raises:
        PolicyError: beyond the limit, of a unit whose costs do not add up with others, or the
            ledger is older than what the store has seen.
    """
    if identity is None:
        spend = spend_of(job, allocate(job.plan), "")
    else:
        budget = calibrated(job.plan, identity.calibration).budget
        spend = spend_of(job, budget, identity.run_id, identity.epoch)
    charged = False
    if job.ledger is not None:
        account = read_history(job.ledger, seen)
        charged = identity is not None and account.find(spend.name) is not None
        if not charged:
            if accept is not None:
                accept(account)
            account.check([spend])
    return Expected(None if identity is None else identity.run_id, spend, charged)


def spend_of(job: Ledgered, budget: Budget, run_id: str, epoch: int = 0) -> Charge:
    """What a run of the job costs.

    Raises:
        PolicyError: the run was begun with numbers that promise nothing.
    """
    plan = job.plan
    if not budget.sound and job.ledger is not None:
        raise PolicyError(
            "account", "a mechanism without a guarantee cannot be charged", "use another store"
        )
    return Charge(
        run_id=run_id,
        plan_hash=plan.hash,
        epsilon=budget.epsilon,
        delta=budget.delta,
        mu=None if budget.plain else budget.mu,
        threshold_delta=0.0 if budget.plain else plan.privacy.contributions * budget.b,
        kind="workload" if getattr(job, "cells", None) is not None else "stream",
        epoch=epoch,
        identity=unit_of(job).text,
        periods=plan.timeline.periods,
        together=together(plan),
    )


def refuse_private_in_sink(job: Job) -> None:
    """What is published must not lie in one folder with what must never be.

    Raises:
        PolicyError, UsageError: it does.
    """
    folder = job.sink.folder
    private = {
        "secret": job.privacy.secret.file,
        "store": job.state.path and str(job.state.path),
        "account.path": job.ledger and file_of(job.ledger.path),
    }
    for field, path in private.items():
        if path and folder and folder.resolve() in Path(path).resolve().parents:
            raise PolicyError(
                field, "lies in the folder of the releases", "keep private files elsewhere"
            )
    store = job.state.path
    file = job.ledger and file_of(job.ledger.path)
    if file and store and file.resolve() == store.resolve():
        raise UsageError("account.path", "is the state store's file", "use a file of its own")
    if job.ledger and job.ledger.path == job.state.store:
        raise UsageError("account.path", "is the store's database", "use a database of its own")
