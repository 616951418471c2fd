"""Whether pairs on published keys take a selection weight (mechanism.md section 9), and which.

A job that says ``skip`` is taken at its word: what does not go with it is refused elsewhere
(`accounting.plan.privacy`, `accounting.plan.plan`).  One that says nothing skips where all of it
goes together and something is saved.
"""

from typing import TYPE_CHECKING

from dpstream.accounting import limits
from dpstream.accounting.plan.schedule import schedule_of
from dpstream.accounting.weights import SelectionWeights, usual_weights

if TYPE_CHECKING:
    from dpstream.accounting.plan.plan import Plan
    from dpstream.accounting.plan.privacy import Privacy
    from dpstream.accounting.plan.timeline import Timeline


def suits(plan: "Plan") -> bool:
    """Whether the records and the time axis of a plan go with skipping.

    Records that ids name are decided one trigger time after the other, by what is kept beside their
    decisions (`dp_transforms.bounding`), and published keys are not looked up there.  An event
    ahead of its stamp counts at a later trigger time than it is decided at, which passes over files
    that join cannot tell apart.
    """
    line = plan.timeline
    return plan.record_id is None and line.max_skew == 0 and _apart(line)


def _apart(line: "Timeline") -> bool:
    """Whether windows are far enough apart: bits of a record's windows share a word with its
    indices, and a live stream waits at each test."""
    if line.windows_per_record > limits.MAX_SKIPPING_WINDOWS:
        return False
    return line.end is not None or line.slide >= limits.LEAST_SKIPPING_SLIDE


def skips(
    privacy: "Privacy",
    selects: bool,
    triggers: int,
    suited: bool,
    remembers: bool = False,
) -> bool:
    """Whether pairs on published keys take no selection weight.

    Args:
        selects: keys are selected, not public; triggers: T.
        suited: ``suits``; remembers: later windows know what was published.
    """
    if privacy.skip is not None:
        return privacy.skip
    return (
        suited
        and selects
        and privacy.mode == "sticky"
        and privacy.weights is not None
        and not privacy.weights.by_size
        and privacy.per_key_bound in (None, 1)
        and privacy.contributions <= limits.MAX_SKIPPING
        and privacy.select_every is None
        and (remembers or len(schedule_of(privacy, triggers, True) or ()) > 1)
    )


def weights_of(privacy: "Privacy", skipping: bool) -> SelectionWeights | None:
    """The weights of a unit's pairs: the job's own, unless it named none and skips unasked."""
    if not (skipping and privacy.skip is None and privacy.usual_weights):
        return privacy.weights
    kind = {"combine": privacy.combine, "sticky": True, "fused": False}
    return usual_weights(privacy.contributions, **kind, skip=True) or privacy.weights


def hindrance(plan: "Plan") -> str | None:
    """The field of the job that keeps a plan with weights from skipping; ``None``: it skips, or
    has none to spare."""
    privacy, line = plan.privacy, plan.timeline
    if plan.design.skips or not plan.design.weighted:
        return None
    named = {
        "mechanism.skip": privacy.skip is False,
        "mechanism.weights.size_share": bool(privacy.weights and privacy.weights.by_size),
        "mechanism.select_every": privacy.select_every is not None,
        "per_key_bound": privacy.per_key_bound not in (None, 1),
        "contributions": privacy.contributions > limits.MAX_SKIPPING,
        "table.record_id": plan.record_id is not None,
        "max_skew": line.max_skew > 0,
        "slide": not _apart(line),
    }
    return next((field for field, hinders in named.items() if hinders), "one test a window")
