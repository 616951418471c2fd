"""A view of an account: events, what the charges spend together, and what is left.

All of it is public: an account has run ids, hashes of plans and figures of guarantees.
"""

import math
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from dpstream.accounting.composition import epsilon_spent, total_of
from dpstream.accounting.errors import DpstreamError, UsageError
from dpstream.accounting.figures import second_text
from dpstream.accounting.periods import Piece, person_spent
from dpstream.accounting.plan.unit import cost_to
from dpstream.accounting.strength import limit_weaknesses
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.project.project import Project, account_of, find, load_project
from dpstream.pipelines.project.sections import DataSetSection
from dpstream.pipelines.project.text import text_of
from dpstream.state.disk_errors import ABSENT, unreadable
from dpstream.state.ledger.contract import Ledger
from dpstream.state.ledger.events import Charge, Event, Limit
from dpstream.state.ledger.history import History
from dpstream.state.ledger.open import (
    AccountPlace,
    file_of,
    history_of,
    open_ledger,
    open_path,
    place_below,
    read_history,
    read_ledger,
)

#: Warning about a session's account, whose entries charge only the points that they name.
_POINTS = (
    "only some points pay for each entry, so the sum is too high: a record pays at most its "
    "initial budget (SELECT * FROM dpstream.budget)"
)

_OVER = "the charges exceed the limit: it guarantees nothing now, and every new charge is refused"
_TAKEN = (
    "a first charge was accepted only by its own guarantee, not by a filter: every further charge "
    "in its periods is refused, also after the limit is raised"
)


def of_data_set(project: Project, name: str | None) -> AccountPlace:
    """Return the account of a data set; without a name, of the only one.

    Raises:
        UsageError: there is no such data set, or it names no account.
    """
    name, _ = project.data_set(name, "DATA_SET")
    return account_of(project, name)


def data_set_of(path: str) -> str:
    """Return the data set of the project file here whose account is at a path, or its only one.

    Raises:
        UsageError: there is no project file, or it has several data sets and none, or more than
            one, has this account.
    """
    file = find(Path.cwd())
    data_sets = {} if file is None else load_project(file).sections.data_set
    folder = Path() if file is None else file.parent

    def is_here(section: DataSetSection) -> bool:
        if section.account is None:
            return False
        if file_of(path) is None or file_of(section.account.path) is None:
            return section.account.path == path
        return (folder / section.account.path).resolve() == Path(path).resolve()

    names = [name for name, section in data_sets.items() if is_here(section)] or list(data_sets)
    if len(names) == 1:
        return names[0]
    rule = f"is required: no project file here names one data set for the account {path}"
    fix = "type --data-set NAME"
    if names:
        fix += f" with one of these names: {', '.join(names)}"
    raise UsageError("--data-set", rule, fix)


def named_by(given: str) -> AccountPlace | str:
    """Return the account that a project file names, or an account's own path or URL.

    Args:
        given: a project file, or an account's file or its URL.

    Raises:
        UsageError: the file cannot be read, or names no account.
    """
    if file_of(given) is None:
        return place_below(Path(), given)
    file = Path(given)
    try:
        data = file.read_bytes()
    except ABSENT:
        raise UsageError(
            "FILE", "cannot be read", "name a data set of the project file, or an account's file"
        ) from None
    except OSError as error:
        raise unreadable("FILE", error) from None
    if data.startswith(b"SQLite format 3\0"):
        return given
    if not data:
        raise UsageError(
            "FILE",
            "is empty: it is no project file, and no account was made in it",
            "name another file, or make one there: `dpstream account create FILE --unit NAME "
            "--epsilon E --delta D`",
        )
    try:
        tomllib.loads(text_of(data))
    except ValueError:
        raise UsageError(
            "FILE", "is neither TOML nor an account", "name a project file or an account"
        ) from None
    return of_data_set(load_project(file), None)


def opened(named: AccountPlace | str, recovering: bool = False) -> Ledger:
    """Open the named account; raises as `open_ledger` does."""
    if isinstance(named, str):
        return open_path(named, recovering)
    return open_ledger(named, recovering=recovering)


def view(named: AccountPlace | str) -> dict[str, Any]:
    """Return events and sums of an account.

    Raises:
        UsageError: there is no account.
        PolicyError: it is damaged, another one than was named, or older than the head file beside
            the file that names it.
    """
    return _fields_of(
        history_of(read_ledger(named)) if isinstance(named, str) else read_history(named)
    )


def _fields_of(account: History) -> dict[str, Any]:
    own, charges = account.created, account.charges
    if account.limit is None:  # at the delta that basic composition would give
        delta, used, pieces = math.fsum(charge.delta for charge in charges), None, list[Piece]()
        total, counted = total_of(charges), {charge.name: 1 for charge in charges}
    else:
        delta, filters, spent = account.limit[1], account.filters, account.spent
        total, pieces = spent.fullest(filters).total, list(spent.pieces)
        used = filters.used(total)
        counted = {charge.name: cost_to(own.unit, charge).units for charge in charges}
    epsilon = epsilon_spent(total, delta)
    events = [
        {"seq": e.seq, **msgspec.to_builtins(e.event), **_of_charge(e.event, counted)}
        for e in account.entries
    ]
    return {
        "id": own.id,
        "data_set": own.data_set,
        "unit": {"name": own.unit.name, "type": own.unit.type, "text": own.unit.description},
        "head": {"seq": len(account.digests), "digest": account.digests[-1]},
        "entries": events,
        "charges": len(charges),
        "spent": {"epsilon": epsilon if math.isfinite(epsilon) else None, "delta": delta},
        "limit": None if account.limit is None else _pair(account.limit),
        "used": used,
        "period": own.unit.covers,
        "person": person_spent(own.unit, charges, delta),
        "filters": {} if account.limit is None else filters.shares(total),
        "left": None if account.limit is None else filters.left(total),
        "warnings": [
            *([] if account.limit is None else limit_weaknesses(account.limit)),
            *([_OVER] if any(piece.over(filters) for piece in pieces) else []),
            *([_TAKEN] if any(piece.taken for piece in pieces) else []),
            *([_POINTS] if any(charge.kind == "session" for charge in charges) else []),
        ],
    }


def _of_charge(event: Event, counted: dict[str, int]) -> dict[str, Any]:
    """Return how often a charge counts, when it was made and for what; nothing of other events."""
    if not isinstance(event, Charge):
        return {}
    at = None if event.instant is None else second_text(event.instant)
    label = event.label or (event.regions.analyst if event.regions else "")
    return {"counted_as": counted[event.name], "at": at, "label": label}


def _pair(limit: Limit) -> dict[str, float]:
    return {"epsilon": limit[0], "delta": limit[1]}


def account_warnings(job: Job) -> list[str]:
    """Return warnings about the data set's account, if the job names one.

    An account that cannot be read is refused by the charge, and has no warning here.
    """
    if job.ledger is None:
        return []
    try:
        account = read_history(job.ledger)
    except DpstreamError:
        return []
    return [] if account.limit is None else limit_weaknesses(account.limit)
