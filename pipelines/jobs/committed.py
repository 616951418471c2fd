"""What the run that a job's store holds was begun with: figures that are shown are those in force.

Public parts only.  A database is not connected to for this, and what cannot be read is as good as
not there: who runs the job is told.
"""

from pathlib import Path
from typing import NamedTuple

from dpstream.accounting.budget import Budget
from dpstream.accounting.calibration import calibrated
from dpstream.accounting.errors import DpstreamError
from dpstream.accounting.plan.plan import Plan
from dpstream.pipelines.jobs.job import Job


class Committed(NamedTuple):
    """A begun run: its id, and its plan and budget with the numbers that were committed."""

    run_id: str
    plan: Plan
    budget: Budget


def committed(job: Job) -> Committed | None:
    """What the store's file holds, ``None`` without one or with the state of another plan."""
    path = job.state.path
    if path is None or not Path(path).exists():
        return None
    from dpstream.state.sqlite.file import peek_identity  # not needed to plan

    try:
        identity = peek_identity(path)
        if identity is None or identity.plan_hash != job.plan.hash:
            return None
        return Committed(identity.run_id, *calibrated(job.plan, identity.calibration))
    except (DpstreamError, OSError):
        return None
