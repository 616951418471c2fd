"""Whether pairs on published keys take a selection weight (mechanism.md section 9), and which.

A job that says ``skip`` is taken at its word: what does not go with it is refused elsewhere
(`accounting.plan.privacy`, `accounting.plan.plan`).  One that says nothing skips, by the rules of
new runs, where all of it goes together and something is saved.
"""

from typing import TYPE_CHECKING

from dpstream.accounting import limits
from dpstream.accounting.plan.rules import SKIPS_USUALLY
from dpstream.accounting.plan.schedule import schedule_of
from dpstream.accounting.weights import SelectionWeights, usual_weights

if TYPE_CHECKING:
    from dpstream.accounting.plan.plan import Plan
    from dpstream.accounting.plan.privacy import Privacy


def suits(plan: "Plan") -> bool:
    """Whether the records and the time axis of a plan go with skipping.

    A record that an id names can come again with other contents, and would take the index of the
    first once more.  An event ahead of its stamp counts at a later trigger time than it is decided
    at, which passes over files that join cannot tell apart; and a record's windows, and bits of
    them, share a word with its indices.
    """
    line = plan.timeline
    return (
        plan.record_id is None
        and line.max_skew == 0
        and line.windows_per_record <= limits.MAX_SKIPPING_WINDOWS
    )


def skips(
    privacy: "Privacy",
    selects: bool,
    triggers: int,
    rules: int,
    suited: bool,
    remembers: bool = False,
) -> bool:
    """Whether pairs on published keys take no selection weight.

    Args:
        selects: keys are selected, not public; triggers: T.
        rules: of the run; suited: ``suits``; remembers: later windows know what was published.
    """
    if privacy.skip is not None:
        return privacy.skip
    return (
        rules >= SKIPS_USUALLY
        and suited
        and selects
        and privacy.mode == "sticky"
        and privacy.weights is not None
        and privacy.per_key_bound in (None, 1)
        and privacy.contributions <= limits.MAX_SKIPPING
        and privacy.select_every is None
        and (remembers or len(schedule_of(privacy, triggers, True) or ()) > 1)
    )


def weights_of(privacy: "Privacy", skipping: bool) -> SelectionWeights | None:
    """The weights of a unit's pairs: the job's own, unless it named none and skips by the rules."""
    if not (skipping and privacy.skip is None and privacy.usual_weights):
        return privacy.weights
    kind = {"combine": privacy.combine, "sticky": True, "fused": False}
    return usual_weights(privacy.contributions, **kind, skip=True) or privacy.weights
