"""Whether and how long later windows know what a window has published (mechanism.md section 9).

``Plan.remember`` is ``run`` (for as long as the run lives), a duration, or ``never``; a plan that
says nothing remembers where it selects keys in more than one window.
"""

from typing import TYPE_CHECKING

from dpstream.accounting.errors import UsageError

if TYPE_CHECKING:
    from dpstream.accounting.plan.plan import Plan


def remembers(plan: "Plan") -> bool:
    """Whether a window publishes from its start what an earlier one has selected."""
    line, privacy = plan.timeline, plan.privacy
    if plan.public_keys is not None or privacy.mode != "sticky":
        return False
    several = line.end is None or line.windows > 1
    return several and plan.remember != "never"


def remembered_for(plan: "Plan") -> int | None:
    """Trigger times that a selection is remembered for; ``None``: for the run."""
    if not isinstance(plan.remember, int):
        return None
    return plan.remember // plan.timeline.trigger_every


def check_remember(plan: "Plan") -> None:
    """Refuse what cannot be remembered, and durations that the triggers do not divide."""
    if plan.remember in (None, "never"):
        return
    if plan.public_keys is not None:
        raise UsageError(
            "remember_keys", "public keys are known in every window", "omit it, or public_keys"
        )
    if plan.privacy.mode != "sticky":
        raise UsageError(
            "remember_keys",
            "needs mode 'sticky': in mode 'rounds' every release of a key must be earned again",
            "use 'sticky', or omit it",
        )
    every = plan.timeline.trigger_every
    if isinstance(plan.remember, int) and (plan.remember <= 0 or plan.remember % every):
        raise UsageError(
            "remember_keys",
            "must be a positive multiple of release_every",
            "write 'run', 'never', or a duration such as '30d'",
        )
