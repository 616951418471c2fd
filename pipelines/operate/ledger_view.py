"""What a ledger holds, for people: entries, what they spend together, what is left of a limit.

All of it is public: a ledger holds run ids, hashes of plans and figures of guarantees.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from dpstream.accounting.composition import Spend, epsilon_left, epsilon_spent, mu_left, rho_left
from dpstream.accounting.errors import UsageError
from dpstream.accounting.figures import down, exact, up
from dpstream.accounting.plan.unit import UnitIdentity, composed
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.jobs.tables import Limit
from dpstream.state.ledger.charges import Charge, Entry
from dpstream.state.ledger.open import file_of, ledger_exists, read_ledger

#: Of sessions, whose entries are paid by the points that they name.
_POINTS = (
    "each entry is paid by some points alone, so the sum is too high: a record pays at most its "
    "initial budget (`dpstream session budget`)"
)


def is_ledger(path: str | Path) -> bool:
    """Whether it is a ledger's URL or file rather than a job file."""
    if file_of(path) is None:
        return True
    try:
        with open(path, "rb") as file:
            return file.read(15) == b"SQLite format 3"
    except OSError:
        raise UsageError("ledger", "cannot be read", "name a ledger's file or a job file") from None


def view(
    path: str | Path, data_set: str | None = None, limit: Limit | None = None
) -> dict[str, Any]:
    """Entries and sums of a ledger, by data set.

    Args:
        path: the ledger's file or URL.
        data_set: only this one.
        limit: the steward's limit of it, for what is left.

    Raises:
        UsageError: there is no ledger, or no such data set.
        PolicyError: its chain is broken, or it is another program's file.
    """
    if file_of(path) is not None and not ledger_exists(path):
        raise UsageError("ledger.path", "holds no ledger yet", "run a job that charges it")
    entries = read_ledger(path)
    names = list(dict.fromkeys(e.data_set for e in entries))
    if data_set is not None:
        if data_set not in names and limit is None:
            raise UsageError("--data-set", "has no entry in the ledger", "correct the name")
        names = [data_set]
    return {
        "head": {"seq": entries[-1].seq, "entries": len(entries)} if entries else None,
        "data_sets": [_data_set(name, entries, limit) for name in names],
    }


def _data_set(name: str, entries: Iterable[Entry], limit: Limit | None) -> dict[str, Any]:
    mine = [e for e in entries if e.data_set == name]
    charges = [e.charge for e in mine]
    unit = composed(charges)
    # Without a limit: at the delta that basic composition would give.
    delta = limit.delta if limit else math.fsum(s.delta for s in unit.spends)
    spent = epsilon_spent(unit.spends, delta) if charges else 0.0
    return {
        "data_set": name,
        "unit": unit.words,
        "entries": [
            {"seq": e.seq, **msgspec.to_builtins(e.charge), "counted_as": n}
            for e, n in zip(mine, unit.units, strict=True)
        ],
        "spent": {"epsilon": _finite(spent), "delta": delta},
        "limit": None if limit is None else {"epsilon": limit.epsilon, "delta": limit.delta},
        "left": None if limit is None else _left(unit.spends, limit),
        "warnings": [
            *([] if limit is None else limit.warnings),
            *unit.warnings,
            *([_POINTS] if any(map(_of_points, charges)) else []),
        ],
    }


def _of_points(charge: Charge) -> bool:
    return charge.kind == "session"


def _left(spends: list[Spend], limit: Limit) -> dict[str, float]:
    """What one more run may cost: a plain epsilon without delta, the mu of Gaussian noise, or the
    rho of zCDP."""
    return {
        "epsilon": epsilon_left(spends, limit.epsilon, limit.delta),
        "mu": mu_left(spends, limit.epsilon, limit.delta),
        "rho": rho_left(spends, limit.epsilon, limit.delta),
    }


def ledger_warnings(job: Job) -> list[str]:
    """What whoever runs the job should know about the data set's ledger, if it names one."""
    if job.ledger is None:
        return []
    if not ledger_exists(job.ledger.path):
        return job.ledger.limit.warnings
    entries = read_ledger(job.ledger.path)
    mine = [entry.charge for entry in entries if entry.data_set == job.ledger.data_set]
    return [*job.ledger.limit.warnings, *composed(mine).warnings]


def _finite(figure: float) -> float | None:
    return figure if math.isfinite(figure) else None


def text(found: dict[str, Any]) -> str:
    """The view as text."""
    lines = list[str]()
    for one in found["data_sets"]:
        lines += [f"Data set  {one['data_set']}", f"Unit      {one['unit'] or 'none yet'}"]
        for entry in one["entries"]:
            epoch = f" epoch {entry['epoch']}" if entry["epoch"] else ""
            noise = "".join(
                f", {name} {up(entry[name], 4)}"
                for name in ("mu", "rho")
                if entry[name] is not None
            )
            lines.append(
                f"{entry['seq']:>7}   {entry['kind']:<8} {entry['run_id']}{epoch}  "
                f"({up(entry['epsilon'])}, {up(entry['delta'])}){noise}{_counted(entry)}"
            )
        spent = one["spent"]["epsilon"]
        told = "more than any epsilon" if spent is None else f"epsilon {up(spent)}"
        lines.append(
            f"Spent     {told} at delta {up(one['spent']['delta'])} per unit, all together"
        )
        if one["left"] is not None:
            limit, left = one["limit"], one["left"]
            lines.append(
                f"Limit     epsilon {exact(limit['epsilon'])} at delta {exact(limit['delta'])}"
            )
            lines.append(
                f"Left      epsilon {down(left['epsilon'])} for a run without delta, Gaussian "
                f"noise of mu {down(left['mu'], 4)}, or zCDP of rho {down(left['rho'], 4)}"
            )
        lines += [f"Warning   {warning}" for warning in one["warnings"]]
    return "\n".join(lines or ["The ledger has no entry."]) + "\n"


def _counted(entry: dict[str, Any]) -> str:
    """As how many units of its own an entry is counted, where that is not one."""
    if entry["counted_as"] == 1:
        return ""
    return f", counted {entry['counted_as']:,} times: {UnitIdentity.read(entry['identity']).words}"
