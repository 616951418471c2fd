"""What an account will have spent by a date if the jobs of its data set go on.

Each job of the project file is charged once, for all of its time.  When that has passed, the same
job is assumed to begin again for as long, with the same budget, until the date or until the limit
refuses it.  The forecast holds no questions that may be asked in the meantime.

The limit holds for each period of the account's unit separately, and a charge counts in the periods
of its own time alone (`accounting.periods`): years that do not meet cost a period the most that one
of them costs, not their sum.  What one person has over all periods does add up, and is shown beside
it.  By a date a person has records in at most the periods that have begun by then, which is a bound
also for a stream without end.

The forecast is a function of the account and the project file, which are public, so it costs
nothing.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.composition import Limit
from dpstream.accounting.figures import second_text
from dpstream.accounting.periods import person_total
from dpstream.accounting.plan.unit import UnitIdentity
from dpstream.pipelines.jobs.charging import spend_of
from dpstream.pipelines.jobs.job import Job, job_in
from dpstream.pipelines.project.project import Project, account_of
from dpstream.pipelines.project.source import described
from dpstream.state.ledger.events import Charge
from dpstream.state.ledger.open import read_history

_DAY_MICROS = 86_400_000_000
#: Runs of a job in a forecast, which ends sooner where there are more: each composes with all
#: before it.
_MOST = 100
#: Dates at which the picture shows what a person has spent.
_DATES = 60


class Run(NamedTuple):
    """A run of a job, charged or foreseen.

    Attributes:
        begins, ends: microseconds since 1970; ``None``: it has no end.
        charged: whether the account has its charge.
    """

    begins: int
    ends: int | None
    charge: Charge
    charged: bool


def forecast(project: Project, data_set: str | None, now: int, until: int) -> dict[str, Any]:
    """Return the runs until a date, what each uses of the limit, and what a person has spent.

    Args:
        now, until: microseconds since 1970.

    Raises:
        UsageError: there is no account, or a job cannot be read.
        PolicyError: the account has no limit per unit, or a job protects another unit.
    """
    data_set, _ = project.data_set(data_set, "DATA_SET")
    place = account_of(project, data_set)
    account = read_history(place)
    filters, spent, charges = account.filters, account.spent, list(account.charges)
    unit, refused, rows = account.created.unit, dict[str, dict[str, Any]](), list[dict[str, Any]]()
    asked_until = until
    runs, until = _runs(project, data_set, account.charges, now, until)
    for run in runs:
        job = str(run.charge.label)
        if job in refused:
            continue
        accepted = True
        if not run.charged:
            verdict = spent.verdict(filters, run.charge)
            accepted = verdict.accepted
            if accepted:
                spent = spent.plus(run.charge, takes=verdict.reason == "first")
                charges.append(run.charge)
            else:
                refused[job] = {
                    "begins": _day(run.begins),
                    "enough": spent.raised_limit(filters, run.charge),
                }
        fullest = spent.fullest(filters, spent.pieces_of(run.charge))
        rows.append(
            {
                "job": job,
                "begins": _day(run.begins),
                "ends": None if run.ends is None else _day(run.ends),
                "charged": run.charged,
                "accepted": accepted,
                "used": filters.used(fullest.total) if accepted else None,
                "person": _person(
                    unit, charges, until if run.ends is None else min(run.ends, until), filters
                ),
            }
        )
    begin = min((run.begins for run in map(_charged, account.charges)), default=now)
    dates = [begin + (until - begin) * step // _DATES for step in range(_DATES + 1)]
    return {
        "data_set": data_set,
        "unit": {"text": unit.description, "name": unit.name, "period": unit.covers},
        "limit": {"epsilon": filters.epsilon, "delta": filters.delta},
        "until": _day(until),
        "asked_until": _day(asked_until),
        "most_runs": _MOST,
        "runs": rows,
        "other_charges": sum(charge.kind != "stream" for charge in account.charges),
        "refused": refused,
        "person": _person(unit, charges, until, filters),
        "by_date": [(_day(date), _person(unit, charges, date, filters)) for date in dates],
    }


def in_five_years(now: int) -> int:
    """Return the end of a forecast that nobody gave: a day, in microseconds."""
    return (now // _DAY_MICROS + 5 * 365) * _DAY_MICROS


def _runs(
    project: Project, data_set: str, charges: Iterable[Charge], now: int, until: int
) -> tuple[list[Run], int]:
    """The runs of the account and those that follow from the project file, in order of time, and
    the instant until which they are all."""
    runs = [_charged(charge) for charge in charges if charge.kind == "stream"]
    plans = {run.charge.plan_hash for run in runs}
    for name in project.sections.job:
        if described(project, name, project.job(name)[1].table)[1] != data_set:
            continue
        job = job_in(project, name)
        expected = 0
        for run in _repeated(job):
            if run.begins > until:
                break
            if expected == _MOST:
                until = run.begins
                break
            begun = run.charge.run_id == "" and run.charge.plan_hash in plans
            if begun or (run.charge.run_id and run.ends is not None and run.ends <= now):
                continue
            runs.append(run)
            expected += 1
    runs = [run for run in runs if run.begins <= until]
    return sorted(runs, key=lambda run: (run.begins, not run.charged)), until


def _charged(charge: Charge) -> Run:
    """The run of a charge of the account."""
    if charge.span is None:
        return Run(charge.instant or 0, None, charge, True)
    return Run(*_instants(charge, charge.span), charge, True)


def _repeated(job: Job) -> Iterator[Run]:
    """The run of a job as it is written, with an empty id, and those that follow it."""
    charge, timeline = spend_of(job, allocate(job.plan), ""), job.plan.timeline
    for number in itertools.count():
        name = f"{job.name} {number}" if number else ""
        if charge.span is None:
            end = timeline.end
            begins, ends = timeline.start, end
            if end is not None:
                begins, ends = (_repetition(timeline.start, end, number + i) for i in (0, 1))
            one = msgspec.structs.replace(charge, run_id=name, at=begins)
            yield Run(begins, ends, one, False)
        else:
            first, behind = charge.span
            moved = number * (0 if behind is None else behind - first)
            end = None if behind is None else behind + moved
            one = msgspec.structs.replace(charge, run_id=name, span=(first + moved, end))
            yield Run(*_instants(charge, (first + moved, end)), one, False)
        if end is None:
            return


def _repetition(start: int, end: int, number: int) -> int:
    """When a run begins again for the nth time: whole months of UTC are repeated as months."""
    first, last = (np.datetime64(each, "us") for each in (start, end))
    months = (last.astype("M8[M]") - first.astype("M8[M]")).astype(int)
    offset = first - first.astype("M8[M]")
    if months and offset == last - last.astype("M8[M]") and offset < np.timedelta64(28, "D"):
        again = first.astype("M8[M]") + number * months
        return int((again + offset).astype("M8[us]").astype(np.int64))
    return start + number * (end - start)


def _instants(charge: Charge, span: tuple[int, int | None]) -> tuple[int, int | None]:
    """The ends of a range, in microseconds."""
    calendar = UnitIdentity.read(charge.identity).of_all_times.calendar
    first, behind = span
    if calendar is None:
        return first, behind
    begins, ends = calendar.beginnings(np.array([first, first if behind is None else behind]))
    return int(begins), None if behind is None else int(ends)


def _person(
    unit: UnitIdentity, charges: Iterable[Charge], instant: int, limit: Limit
) -> tuple[float, float]:
    """(epsilon, delta) of one person for what is recorded before an instant."""
    before = (_before(charge, instant) for charge in charges)
    return person_total(unit, [charge for charge in before if charge is not None], limit.delta)


def _before(charge: Charge, instant: int) -> Charge | None:
    """A charge as it is for records before an instant; ``None``: it has none of them."""
    if charge.span is None:
        return charge if charge.instant is None or charge.instant <= instant else None
    own = UnitIdentity.read(charge.identity).of_all_times
    first, upto = charge.span[0], instant
    if own.calendar is not None:
        upto = own.calendar.number(instant - 1) + 1
    begun = -((first - upto) // (own.period or 1))
    if begun <= 0:
        return None
    periods = begun if charge.periods is None else min(begun, charge.periods)
    return msgspec.structs.replace(charge, periods=periods)


def _day(instant: int) -> str:
    """A day in UTC, or an instant that does not begin one."""
    return second_text(instant).removesuffix("T00:00:00Z")
