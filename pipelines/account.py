"""A data set's account in a ledger, for what is begun without a job.

It loads no Beam: a question about a table in memory (`frames`) has an account too.
"""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.state.ledger.open import AccountPlace, check_names, place_below
from dpstream.state.private_log import keep_beside

if TYPE_CHECKING:
    from dpstream.accounting.plan.plan import Plan
    from dpstream.dp_transforms.run import Run


class Charged(NamedTuple):
    """A plan and the ledger that its runs are charged in, of a job or without one."""

    plan: "Plan"
    ledger: AccountPlace | None


class LedgerAccount:
    """A data set's account, for runs and questions that are begun without a job.

    `dpstream account create` makes it, with its limit, and prints its id.

    Args:
        path: the account's file or URL.
        data_set: the name it knows the data by.
        id: of the account.
        unit: what the account calls the privacy unit, where plans find the same ids in columns of
            different names (default: the unit's column).
        allow_large_delta: a limit's delta above 0.01 is wanted; without it such a limit is refused.
    """

    def __init__(
        self,
        path: str | Path,
        data_set: str,
        *,
        id: str = "",
        unit: str | None = None,
        epsilon: object = None,
        delta: object = None,
    ) -> None:
        if epsilon is not None or delta is not None:
            raise UsageError(
                "account",
                "takes no limit: the account has one",
                "set it with `dpstream account limit PATH --epsilon E --delta D`",
            )
        if not id:
            raise UsageError(
                "account",
                "needs the id of an account",
                "make one with `dpstream account create PATH --unit NAME --epsilon E --delta D`, "
                "and write id='...' as it prints it",
            )
        check_names(data_set, id)
        place = place_below(Path(), str(path))
        keep_beside(place)
        self.ledger = AccountPlace(place, data_set, id, unit)

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
        from dpstream.pipelines.stream.begin import charge  # with Beam: only of a run

        if run.open().restoring:
            raise PolicyError(
                "store",
                "was restored, and has to be compared with what its run has published",
                "go on with `dpstream run`",
            )
        charge(Charged(run.plan, self.ledger), run)
