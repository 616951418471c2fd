"""A data set's account in a ledger, for what is begun without a job.

It loads no Beam: a question about a table in memory (`frames`) has an account too.
"""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dpstream.accounting.errors import PolicyError
from dpstream.accounting.strength import WeakGuaranteeWarning
from dpstream.pipelines.jobs.tables import LedgerConfig, Limit
from dpstream.state.ledger.open import place_below
from dpstream.state.private_log import keep_beside

if TYPE_CHECKING:
    from dpstream.accounting.plan.plan import Plan
    from dpstream.dp_transforms.run import Run


class Charged(NamedTuple):
    """A plan and the ledger that its runs are charged in, of a job or without one."""

    plan: "Plan"
    ledger: LedgerConfig | None


class LedgerAccount:
    """A data set's account in a ledger, for runs and questions that are begun without a job.

    Args:
        path: the ledger's file, which the first charge makes, or its URL.
        data_set: the name it knows the data by.
        epsilon, delta: the most that all runs on the data set together may spend per unit.
        unit: what the data set calls the privacy unit, where plans find the same ids in columns of
            different names (default: the unit's column).
        allow_large_delta: a limit's delta above 0.01 is wanted; without it such a limit is refused.
    """

    def __init__(
        self, path: str | Path, data_set: str, *, epsilon: float, delta: float,
        unit: str | None = None, allow_large_delta: bool = False,
    ) -> None:  # fmt: skip
        numbers = all(isinstance(number, float | int) for number in (epsilon, delta))
        limit = Limit(epsilon, delta, allow_large_delta) if numbers else Limit(0.0, 0.0)
        limit.check("account", "account", "allow_large_delta=True")
        for warning in limit.warnings:
            warnings.warn(warning, WeakGuaranteeWarning, stacklevel=2)
        place = place_below(Path(), str(path))
        keep_beside(place)
        self.ledger = LedgerConfig(path=place, data_set=data_set, limit=limit, unit=unit)

    def check(self, plan: "Plan") -> None:
        """Refuse now what ``charge`` would refuse; writes no entry.

        Raises:
            PolicyError: beyond the limit.
        """
        from dpstream.pipelines.jobs.charging import check_charge

        check_charge(Charged(plan, self.ledger))

    def charge(self, run: "Run") -> None:
        """Charge a begun run, once per run id and epoch; before any draw.

        Raises:
            PolicyError: beyond the limit, or the store is a copy, older than its ledger, or was
                restored (only a job knows its sink, with which it has to be compared).
        """
        from dpstream.pipelines.begin import charge  # with Beam: only of a run

        if run.open().restoring:
            raise PolicyError(
                "state.store",
                "was restored, and has to be compared with what its run has published",
                "go on with `dpstream run`",
            )
        charge(Charged(run.plan, self.ledger), run)
