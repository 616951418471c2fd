"""Where selection weights may go by the number of a unit's pairs (`accounting.weights`).

What a pair adds must be fixed before it is counted, and with such weights it is fixed by the number
of all pairs of its unit.  So a unit's pairs must be decided together: all of them lie in one window
(the job has one window, or a privacy period of a window's length), the window has one trigger, and
no record is decided before its event's trigger.  A record that turns up after its trigger is not
admitted at all, because its window is closed.
"""

from typing import TYPE_CHECKING

from dpstream.accounting.errors import UsageError

if TYPE_CHECKING:
    from dpstream.accounting.plan.plan import Plan


def suits_sizes(plan: "Plan") -> bool:
    """Whether selection weights may go by the number of a unit's pairs in a plan."""
    return _hindrance(plan) is None


def check_sizes(plan: "Plan") -> None:
    """Refuse weights by size where a unit's pairs are not decided together."""
    weights = plan.privacy.weights
    if weights is None or not weights.by_size:
        return
    hindrance = _hindrance(plan)
    if hindrance is not None:
        raise UsageError(
            "mechanism.weights.size_share",
            f"weighs a unit's records by their number, which needs {hindrance}",
            "set that, or use weights = { offset = 3, power = 1.5 }, which go by their order",
        )


def _hindrance(plan: "Plan") -> str | None:
    """What is missing, in words."""
    line, privacy = plan.timeline, plan.privacy
    needs = {
        "mode 'sticky' and selected keys": plan.public_keys is None and privacy.mode == "sticky",
        "per_key_bound = 1": privacy.per_key_bound == 1,
        "one trigger a window": line.triggers == 1,
        "all records of a unit in one window (budget.covers as long as window)": (
            line.period == line.window or (line.end is not None and line.windows == 1)
        ),
        "max_skew = 0": line.max_skew == 0,
        "no mechanism.skip": not privacy.skip,
        "no mechanism.selection_share beside it": privacy.selection_share is None,
    }
    return next((words for words, there in needs.items() if not there), None)
