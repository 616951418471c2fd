"""The public facts of a release: what it promises, to whom, and which run made it.

They are functions of the plan, of the numbers that were committed when the run began, of its run id
and epoch, and of a window and trigger: nothing of a record, and nothing that differs between two
workers or two replays of one program.

**Epochs.**  A run that was restored without its input draws new noise in a further epoch, which
composes with the earlier ones.  Facts state the guarantee of all epochs up to the release's own:
e epochs of k periods cost no more than e k periods (`accounting.guarantee.of_periods`).
"""

from typing import Any, NamedTuple

import msgspec

from dpstream.accounting.budget.allocation import Budget
from dpstream.accounting.figures import moment_of, time_text, up
from dpstream.accounting.guarantee import NEIGHBOURS, of_periods, unit_text
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.plan.unit import identity_of

#: Name of the facts in the metadata of a file, a message and a table.
FACTS = "dpstream"
UNBOUNDED = "unbounded"
#: Name and version of this program, as `pyproject.toml` has them: workers may lack its metadata.
PROGRAM = "dpstream 0.1.0"


class RunStamp(NamedTuple):
    """What a release says of its run.

    Attributes:
        plan_hash: hash of the public plan.
        run_id: as releases show it, with the stamps UNSOUND and INSECURE before it.
        epoch: of the release.
    """

    plan_hash: str
    run_id: str
    epoch: int


def run_facts(plan: Plan, budget: Budget, stamp: RunStamp) -> dict[str, Any]:
    """Return the facts of all releases of a run, JSON-able.

    Args:
        plan, budget: as committed when the run began.
        stamp: of the run.

    Returns:
        ``guarantee`` (for one unit, of one period if there are periods), ``lifetime`` (for a person
        of all periods of the job: ``unbounded`` without a last one, ``None`` without a guarantee),
        ``unit``, ``contributions``, ``values`` (published columns with their bounds),
        ``mechanism``, and ``run`` (plan, id, stamps, epoch and program).
    """
    epochs, periods = stamp.epoch + 1, plan.timeline.periods
    every: dict[str, Any] | str | None = UNBOUNDED
    if not budget.has_guarantee:
        every = None
    elif periods is not None:
        every = {"periods": periods, **_pair(plan, budget, periods * epochs)}
    return {
        "guarantee": {
            "sound": budget.has_guarantee,
            **_pair(plan, budget, epochs),
            "covers": identity_of(plan).covers or "lifetime",
            "neighbours": NEIGHBOURS,
        },
        "lifetime": every,
        "unit": {"column": plan.unit.column, "text": unit_text(plan)},
        "contributions": plan.privacy.contributions,
        "contributions_per_key": plan.privacy.per_key_bound,
        "values": [
            {"column": a.name, "kind": a.kind, "of": a.column, "bounds": a.bounds, "grid": a.grid}
            for a in plan.aggregates
        ],
        "mechanism": {
            "noise": "two-sided geometric" if budget.plain else "Gaussian",
            "strategies": {noise.name: noise.strategy for noise in budget.streams},
            "keys": "selected privately" if plan.design.selects else "a public list",
        },
        "run": {
            "plan_hash": stamp.plan_hash,
            "run_id": stamp.run_id,
            "stamps": stamp.run_id.split("-")[:-1],
            "epoch": stamp.epoch,
            "program": PROGRAM,
        },
    }


def _pair(plan: Plan, budget: Budget, periods: int) -> dict[str, float]:
    """(epsilon, delta) of so many periods; rounded up, so that all processors give one figure."""
    row = of_periods(plan, budget, periods)
    if periods == 1:
        return {name: row[name] for name in ("epsilon", "delta")}
    return {name: float(up(row[name])) for name in ("epsilon", "delta")}


def release_facts(
    plan: Plan, of_run: dict[str, Any], window: int, trigger: int, missing: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return the facts of one release: those of its run, its window and trigger, and
    ``incomplete``, the expected names of files that it was released without, if there are any.
    """
    timeline = plan.timeline
    start, end = (time_text(moment_of(each)) for each in timeline.window_bounds(window))
    instant = timeline.instant_of(timeline.base(window) + trigger)
    return (
        of_run
        | ({"incomplete": list(missing)} if missing else {})
        | {
            "window": {"number": window, "start": start, "end": end},
            "trigger": {
                "number": trigger,
                "of": timeline.triggers,
                "instant": time_text(moment_of(instant)),
            },
        }
    )


def labels(facts: dict[str, Any]) -> dict[str, str]:
    """Return the facts that every row of a message sink bears, as short texts; none of none."""
    if not facts:
        return {}
    guarantee, run = facts["guarantee"], facts["run"]
    return {
        "epsilon": repr(guarantee["epsilon"]),
        "delta": repr(guarantee["delta"]),
        "covers": guarantee["covers"],
        "unit": facts["unit"]["column"],
        "contributions": str(facts["contributions"]),
        **({"stamps": ",".join(run["stamps"])} if run["stamps"] else {}),
    }


def encoded(facts: dict[str, Any]) -> bytes:
    """Return facts as JSON, the same bytes for the same facts."""
    return msgspec.json.encode(facts)
