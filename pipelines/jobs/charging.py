"""The cost of a run of a job, and its acceptance: one rule for `dpstream run` and `dpstream plan`.

It uses only public parts: the job, the run's identity in the store, the names of files in the
folder of releases, and the account.  It writes nothing and imports no runner.
"""

from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from dpstream.accounting.budget.allocation import Budget, allocate
from dpstream.accounting.budget.calibration import calibrated
from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.places import matching_in
from dpstream.accounting.plan.unit import span_of, together
from dpstream.pipelines.jobs.committed import HasAccount, store_identity, unit_of
from dpstream.pipelines.jobs.job import Job
from dpstream.state.disk_errors import file_errors, require_folder
from dpstream.state.ledger.events import Charge
from dpstream.state.ledger.history import Accept
from dpstream.state.ledger.open import file_of, read_history, refuse_damaged_head
from dpstream.state.repository import refuse_tracked

if TYPE_CHECKING:
    from dpstream.state.ledger.events import Head
    from dpstream.state.store import RunIdentity


class Expected(NamedTuple):
    """The run that a job would begin or continue.

    Attributes:
        identity: the run that continues; ``None``: a new one begins.
        charge: what the run costs.
        charged: whether the charge is in the account already, so that nothing more is charged.
    """

    identity: "RunIdentity | None"
    charge: Charge
    charged: bool


def check_begin(job: Job, fresh: bool = False, accept: Accept | None = None) -> Expected:
    """Refuse now what `begin` would refuse, as far as public files, the store and the account show.

    Only `begin` checks a sink that is a database or a topic.  Only `begin` compares the account
    with the end of it that a store in a database has seen.

    Args:
        fresh: a new run is asked for: the existing store and releases are moved away.
        accept: a further rule for a run that is not charged yet.

    Raises:
        PolicyError: the store holds another plan's run, it was lost, the account's limit does
            not allow the charge, or a private file lies in the folder of the releases or in git.
        UsageError: account and store are the same file or database, or a database may not be used.
        RunError: a file or a database cannot be read.
    """
    # Private files in a folder that is published, or in git.  The secret and the account are
    # refused where they are opened, for every kind of question.
    folder = job.sink.folder
    private = {
        "secret": job.secret.file,
        "store": job.state.path and str(job.state.path),
        "account.path": job.ledger and file_of(job.ledger.path),
    }
    for field, path in private.items():
        if path and folder and folder.resolve() in Path(path).resolve().parents:
            raise PolicyError(
                field, "lies in the folder of the releases", "keep private files elsewhere"
            )
    store = job.state.path
    if store is not None:
        refuse_tracked("store", store, "it holds the state of private records")
    file = job.ledger and file_of(job.ledger.path)
    if file and store and file.resolve() == store.resolve():
        raise UsageError("account.path", "is the state store's file", "use a file of its own")
    if job.ledger and job.ledger.path == job.state.store:
        raise UsageError("account.path", "is the store's database", "use a database of its own")
    identity = None if fresh else store_identity(job)
    try:
        return _check_begin(job, identity, fresh, accept)
    except PolicyError:
        begun = None if fresh or identity is not None else store_identity(job)
        if begun is None:
            raise
        # Another process has begun the run meanwhile: the charge and releases are this run's own.
        return _check_begin(job, begun, fresh, accept)


def _check_begin(
    job: Job, identity: "RunIdentity | None", fresh: bool, accept: Accept | None
) -> Expected:
    if identity is not None and identity.plan_hash != job.plan.hash:
        raise _other_run(job, identity)
    folder = job.sink.folder
    new = identity is None and not fresh and job.state.path is not None
    if new and folder is not None and folder_used(folder):
        again = f"type {fresh_command(job)}, which moves the old releases away"
        raise lost_store("sink.path", f"an empty folder; or {again}")
    if identity is None and folder is not None:
        require_folder("sink.path", folder)
    seen = ledger_seen(job)
    if job.ledger is None:
        if seen is not None and not fresh:
            raise unnamed_ledger()
    elif fresh and seen is not None and seen.id != job.ledger.id:
        seen = None  # a new run may be of other data
    if job.ledger is not None:
        refuse_damaged_head(job.ledger)
    return check_charge(job, identity, seen, accept)


def _other_run(job: Job, identity: "RunIdentity") -> PolicyError:
    """Return the error for a store with a run of another plan."""
    run, places = f"holds run {identity.run_id}", f"leave that run alone and {_other_places(job)}"
    of_workload = msgspec.json.decode(identity.plan).get("cells") is not None
    if of_workload is not (job.cells is not None):
        owner, this = ("workload", "job")[:: 1 if of_workload else -1]
        return PolicyError("store", f"{run} of a {owner}, and this is a {this}", places)
    why = "the job was changed since"
    if of_workload:
        why += ", or it is the run of another workload"
    rule = f"{run}, which was begun with another plan: {why}"
    if job.state.path is None or job.sink.folder is None:  # a service, which is not moved away
        return PolicyError("store", rule, f"{places}; or restore the old job")
    places = f"{places}; or " if of_workload else ""
    return PolicyError(
        "store",
        rule,
        f"{places}type {fresh_command(job)}, which begins a new run at a new charge "
        "and keeps the old store and releases beside the new ones; or restore the old job",
    )


def _other_places(job: Job) -> str:
    """Return the options to add that name a store and a place of releases of no other run."""
    folder, name = job.path.parent, job.name
    unused = (f"{name}-{n}" for n in count(2) if not any(folder.glob(f"{name}-{n}[.-]*")))
    new, sink = next(unused), job.sink
    field = "path" if sink.path else "topic" if sink.topic else "table"
    place = new if sink.path else f"{sink.topic or sink.table}{new.removeprefix(name)}"
    store = f"{job.state.store}-2" if job.state.path is None else f"{new}.store.db"
    options = f"--set job.{name}.store={store} --set job.{name}.sink.{field}={place}"
    return f"add {options} to this command"


def fresh_command(job: Job) -> str:
    """Return the command that begins a new run."""
    if job.cells is not None:
        return "`dpstream workload answer` as before with --fresh and a new --out"
    return f"`dpstream run {job.name} --fresh`"


def ledger_seen(job: Job) -> "Head | None":
    """Return the account's end as the store's file last saw it; ``None`` also for a database."""
    if job.state.path is None or not Path(job.state.path).exists():
        return None
    from dpstream.state.ledger.lineage import LEDGER, head_of  # not needed to plan

    return head_of(_note_of(job, LEDGER))


def _note_of(job: Job, name: str) -> str | None:
    path = job.state.path
    if path is None or not Path(path).exists():
        return None
    from dpstream.state.sqlite.file import peek_note

    return peek_note(path, name)


def unfinished_fresh(job: Job) -> "RunIdentity | None":
    """Return the run of the job's plan that ``--fresh`` began and that no command has finished.

    The next ``--fresh`` continues it, at no further charge.
    """
    from dpstream.state.store import FRESH

    identity = None if _note_of(job, FRESH) is None else store_identity(job)
    return identity if identity is not None and identity.plan_hash == job.plan.hash else None


def unnamed_ledger() -> PolicyError:
    """Return the error for a run that was charged and whose job no longer names an account."""
    return PolicyError(
        "account", "this run was charged in an account, and the job names none", "name it again"
    )


def lost_store(field: str, another: str) -> PolicyError:
    """Return the error for a new store that would add to releases of a run it does not know.

    Args:
        field: the field of the sink.
        another: a text that describes an empty place of the same kind.
    """
    return PolicyError(
        field,
        "holds a run's releases, but the store is new: it was lost, moved or belongs elsewhere",
        f"restore the run's store, or write this run's releases to {another}",
    )


def folder_used(folder: Path) -> bool:
    """Return whether a run has ever published files in a folder, or begun to."""
    names = ("run.json", "run-epoch-*.json", "window-*/trigger-*.*")
    with file_errors("sink.path", "cannot be listed"):
        return any(matching_in(folder, name) for name in names)


def check_charge(
    job: HasAccount,
    identity: "RunIdentity | None" = None,
    seen: "Head | None" = None,
    accept: Accept | None = None,
) -> Expected:
    """Refuse now what charging a run would refuse; write no entry.

    Args:
        identity: of the run that was begun; ``None``: a new one.
        seen: the end of the account as the job's store last saw it.
        accept: a further rule for a run that is not charged yet.

    Raises:
        PolicyError: the charge exceeds the limit, its cost cannot be composed with the others of
            its unit, or the account is older than what the store has seen.
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
    return Expected(identity, spend, charged)


def spend_of(job: HasAccount, budget: Budget, run_id: str, epoch: int = 0) -> Charge:
    """Return the charge of a run of the job.

    Raises:
        PolicyError: the run was begun with parameters that give no guarantee.
    """
    plan = job.plan
    if not budget.has_guarantee and job.ledger is not None:
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
        label=job.name or msgspec.UNSET,
        span=span_of(plan),
    )
