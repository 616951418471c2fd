"""Committed figures of a job: those of a private tuning in its account, and of the run in its
store.

**``choice`` against the account.**  A private tuning must be charged and unedited.  What a tuning
released may be used freely; a figure that was written by hand in its place may have been chosen by
looking at the data, without a charge.

**The run in the store.**  Commands show the figures in force, which are those that the run was
begun with.  Only public parts are read.  A store that cannot be read counts as absent here:
`dpstream run` and `dpstream plan` report it.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dpstream.accounting.budget.allocation import Budget
from dpstream.accounting.budget.calibration import calibrated
from dpstream.accounting.errors import DpstreamError, PolicyError, required
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.plan.unit import UnitIdentity, identity_of
from dpstream.accounting.tuning.answer import Figures, Tuned
from dpstream.accounting.tuning.question import canonical_names
from dpstream.pipelines.formats.receipt import Header, header_of
from dpstream.pipelines.project.text import duration_micros
from dpstream.state import open as stores
from dpstream.state.passes import Passes, noted_passes

if TYPE_CHECKING:
    from dpstream.pipelines.jobs.job import Job
    from dpstream.pipelines.project.job_section import ChoiceSection
    from dpstream.state.ledger.open import AccountPlace
    from dpstream.state.store import RunIdentity, Store

_AGAIN = "run `dpstream choose` on the data set's account, or restore the section it wrote"


class Receipt(Header, frozen=True, kw_only=True):
    """The released result of a private tuning; committed once, before it is shown.

    Attributes:
        identity: canonical text of the privacy unit (`accounting.plan.unit`).
        epsilon, delta, mu: what it cost.
        first: length of the stream that was read, in microseconds.
        figures: what was chosen.
    """

    identity: str
    epsilon: float
    delta: float
    mu: float
    first: int
    figures: Figures


class HasAccount(Protocol):
    """Something with a plan, and an account that its runs are charged in: a job, for example."""

    @property
    def name(self) -> str:
        """The public name in the project file."""

    @property
    def plan(self) -> Plan:
        """The public plan."""

    @property
    def ledger(self) -> "AccountPlace | None":
        """The account, if one is named."""


def unit_of(job: HasAccount) -> UnitIdentity:
    """Return the privacy unit as the job's account names it.

    Raises:
        PolicyError: the plan's column is not declared to hold the account's unit.
    """
    name = None if job.ledger is None else job.ledger.unit_in(job.plan.unit.column)
    return identity_of(job.plan, name)


def tuned_of(job: "Job") -> Tuned | None:
    """Return the part of a plan that shows the job's ``choice``."""
    tuning = job.section.choice
    if tuning is None:
        return None
    return Tuned(
        tuning.how,
        tuning.bounds,
        tuning.first or "",
        tuning.run_id or "",
        tuning.epsilon or 0.0,
        tuning.delta or 0.0,
        tuning.mu or 0.0,
    )


def check_tuning(job: "Job") -> None:
    """Refuse figures that were tuned on the data without a charge, as far as this can be checked.

    Raises:
        PolicyError: ``how`` is "data"; or it is "private" and the account has no such charge, or
            the job's figures are not those that were released.
    """
    tuning = job.section.choice
    if tuning is None or (tuning.how in ("public", "proxy") and not _names_private_run(tuning)):
        return
    if tuning.how == "data":
        raise PolicyError(
            "choice.how",
            "figures chosen by looking at the data are a release that nobody has paid for",
            "run `dpstream choose`, or choose them from public knowledge or other data",
        )
    if tuning.how != "private":
        raise PolicyError("choice.how", "was edited: it names a private tuning's run", _AGAIN)
    if job.ledger is None:
        raise PolicyError("account", "is required by a private tuning", "name its account")
    receipt = _receipt(job, tuning)
    for field, differs in _differences(job, tuning, receipt):
        if differs:
            raise PolicyError(field, "differs from what the private tuning released", _AGAIN)


def _names_private_run(tuning: "ChoiceSection") -> bool:
    fields = (tuning.run_id, tuning.receipt, tuning.question, tuning.epsilon, tuning.mu)
    return any(field is not None for field in fields)


def _receipt(job: "Job", tuning: "ChoiceSection") -> Receipt:
    """Return the committed receipt of the job's tuning, whose charge is in the account."""
    from dpstream.state.ledger.contract import AnswerLog  # not needed by a job without a tuning
    from dpstream.state.ledger.open import open_ledger

    missing = PolicyError("choice.run_id", "has no matching charge in the account", _AGAIN)
    with contextlib.closing(
        open_ledger(required(job.ledger, "a tuned job has an account"))
    ) as ledger:
        charge = ledger.history().find(tuning.run_id or "")
        entry = AnswerLog(ledger, "choice").read(tuning.run_id or "")
    if charge is None or entry is None:
        raise missing
    receipt = header_of(entry.receipt, Receipt)
    paid = (charge.epsilon, charge.delta, charge.mu, charge.identity, charge.plan_hash)
    if paid != (receipt.epsilon, receipt.delta, receipt.mu, receipt.identity, receipt.plan_hash):
        raise missing
    if entry.digest != tuning.receipt:
        raise PolicyError("choice.receipt", "is not the receipt in the account", _AGAIN)
    return receipt


def _differences(job: "Job", tuning: "ChoiceSection", receipt: Receipt) -> list[tuple[str, bool]]:
    plan = job.plan
    labels = {name: label for label, name in canonical_names(plan.aggregates).items()}
    released = {labels.get(name, name): (low, high) for name, low, high in receipt.figures.bounds}
    bounds = {a.name: a.grid_bounds() for a in plan.aggregates if a.bounds is not None}
    first = -1 if tuning.first is None else duration_micros("choice.first", tuning.first)
    return [
        ("contributions", not _chosen_bounds(plan, receipt)),
        *(
            (f"aggregate.{name}.bounds", bounds.get(name) != pair)
            for name, pair in released.items()
        ),
        ("choice.bounds", set(tuning.bounds) != released.keys()),
        ("choice.epsilon", tuning.epsilon != receipt.epsilon),
        ("choice.delta", tuning.delta != receipt.delta),
        ("choice.mu", tuning.mu != receipt.mu),
        ("choice.first", first != receipt.first),
        ("choice.question", tuning.question != receipt.plan_hash),
        *_unit_differences(job, unit_of(job), receipt),
    ]


def _chosen_bounds(plan: Plan, receipt: Receipt) -> bool:
    """Return whether C, or C and a bound per key, is what was released: either may be used."""
    count, bound = plan.privacy.contributions, plan.privacy.per_key_bound
    offered = {(other.bound, other.contributions) for other in receipt.figures.per_key}
    return count == receipt.figures.contributions or (bound, count) in offered


def _unit_differences(job: "Job", unit: UnitIdentity, receipt: Receipt) -> list[tuple[str, bool]]:
    """Return the fields that describe the unit, and whether each differs from the tuning's."""
    named = job.ledger is not None and job.ledger.unit is not None
    tuned = UnitIdentity.read(receipt.identity)
    return [
        ("unit.name" if named else "table.unit_column", unit.name != tuned.name),
        ("table.unit_column", unit.type != tuned.type),
        ("budget.covers", (unit.period, unit.calendar) != (tuned.period, tuned.calendar)),
        ("table.time_column", unit.event_time != tuned.event_time),
        ("start", unit.phase != tuned.phase),
    ]


class Committed(NamedTuple):
    """A begun run: its id, and its plan and budget with the committed parameters."""

    run_id: str
    plan: Plan
    budget: Budget


def store_identity(job: "Job") -> "RunIdentity | None":
    """Return the run in the job's store, of whatever plan; ``None`` if none was begun.

    Raises:
        PolicyError: the store is damaged, or of another format.
        UsageError: the store is a database that may not be used.
        RunError: the store cannot be read, or its database cannot be reached.
    """
    path, store = job.state.path, job.state.store
    if store is None or (path is not None and not Path(path).exists()):
        return None  # without an import that a plan does not need
    from dpstream.state.open import backend

    return backend(store).identity()


def committed(job: "Job") -> Committed | None:
    """Return the run in the store; ``None`` without one, or if it has another plan."""
    try:
        identity = store_identity(job)
        if identity is None or identity.plan_hash != job.plan.hash:
            return None
        return Committed(identity.run_id, *calibrated(job.plan, identity.calibration))
    except (DpstreamError, OSError):
        return None


@contextlib.contextmanager
def opened_store(job: "Job") -> Iterator["Store | None"]:
    """Yield the store of a job's run; ``None``: there is none of its plan that can be read."""
    url, store = job.state.store or "", None
    with contextlib.suppress(DpstreamError):
        store = stores.backend(url).open(job.plan) if stores.exists(url) else None
    try:
        yield store if store and store.identity.plan_hash == job.plan.hash else None
    finally:
        if store is not None:
            store.close()


def abandoned_before(job: "Job") -> int:
    """Return the first window that a job's run has not abandoned, at most how many windows the job
    has; 0: it has abandoned none.
    """
    with opened_store(job) as store:
        window = 0 if store is None else store.retained_windows.abandoned
    return window if job.plan.timeline.end is None else min(window, job.plan.timeline.windows)


def stored_passes(job: "Job") -> Passes | None:
    """Return the passes in a job's store."""
    with opened_store(job) as store:
        return None if store is None else noted_passes(store)
