"""A data set's account and secret, for what Python begins or asks without a command.

It loads no Beam: a question about a table in memory (`frames`) has an account too.
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.pipelines.ask.question import Asking
from dpstream.state.ledger.open import AccountPlace, check_names, place_below
from dpstream.state.private_log import keep_beside

if TYPE_CHECKING:
    from dpstream.accounting.plan.plan import Plan
    from dpstream.dp_transforms.run import Run


class Charged(NamedTuple):
    """A plan and the account that its runs are charged in, of a job or without one."""

    plan: "Plan"
    ledger: AccountPlace | None


@dataclasses.dataclass(frozen=True)
class DataSetAccount:
    """A data set's account, and where its secret is; `account` and ``ProjectFile.account`` make it.

    Attributes:
        place: the account's file or database, its data set and id.
        secret: where the secret is; questions need it, by which they are known again.
    """

    place: AccountPlace
    secret: SecretSource = dataclasses.field(default_factory=SecretSource)

    def check(self, plan: "Plan") -> None:
        """Refuse now what ``charge`` would refuse; writes no entry.

        Raises:
            PolicyError: beyond the limit.
        """
        from dpstream.pipelines.jobs.charging import check_charge

        check_charge(Charged(plan, self.place))

    def charge(self, run: "Run") -> None:
        """Charge a begun run, once per run id and epoch; before any draw.

        Raises:
            PolicyError: beyond the limit, or the store is a copy, older than its account, or was
                restored (only a job knows its sink, with which it has to be compared).
        """
        from dpstream.pipelines.stream.begin import charge  # with Beam: only of a run

        if run.open().restoring:
            raise PolicyError(
                "store",
                "was restored, and has to be compared with what its run has published",
                "go on with `dpstream run`",
            )
        charge(Charged(run.plan, self.place), run)


def account(
    path: str | Path,
    data_set: str,
    *,
    id: str = "",
    unit: str | None = None,
    secret: str | SecretSource | None = None,
) -> DataSetAccount:
    """The account of a data set that no project file names.

    ``dpstream account create`` makes it, with its limit, and prints its id; where there is a
    project file, ``dpstream.project().account(NAME)`` is the account that it names.

    Args:
        path: the account's file or URL.
        data_set: the name it knows the data by.
        id: of the account.
        unit: what the account calls the privacy unit, where plans find the same ids in columns of
            different names (default: the unit's column).
        secret: where the data set's secret is: ``file:PATH``, ``env:NAME`` or ``gcp:...``.  Paths
            start in the folder that is current now, whatever it is later.

    Raises:
        UsageError: the account has no id, or a part is not usable.
    """
    if not id:
        raise UsageError(
            "account",
            "needs the id of an account",
            "make one with `dpstream account create PATH --unit NAME --epsilon E --delta D`, "
            "and write id='...' as it prints it",
        )
    check_names(data_set, id)
    place = place_below(Path.cwd(), str(path))
    keep_beside(place)
    if secret is not None and not isinstance(secret, str | SecretSource):
        raise UsageError("secret", "is not a reference to a secret", "write secret='file:PATH'")
    source = secret if isinstance(secret, SecretSource) else SecretSource(secret)
    return DataSetAccount(AccountPlace(place, data_set, id, unit), source.below(Path.cwd()))


def checked_account(given: DataSetAccount | None, how: Asking) -> DataSetAccount | None:
    """Where a question is charged; ``None``: nowhere.

    Raises:
        UsageError: it is no account or has no secret, or without an account something is given
            that means nothing then.
    """
    if given is None:
        for argument in [name for name in ("fresh", "as_of") if getattr(how, name)]:
            raise UsageError(
                argument,
                "has no meaning without an account: every answer has noise of its own",
                "leave it out, or give account=dpstream.project().account()",
            )
        return None
    if not isinstance(given, DataSetAccount):
        raise UsageError(
            "account",
            "is no account that can be named",
            "write account=dpstream.project().account(), or account=dpstream.account('ledger.db',"
            " 'visits', id='...', secret='file:PATH')",
        )
    if not given.secret.given:
        raise UsageError(
            "secret",
            "is required with an account: the same question is known again by it",
            "make one with `dpstream secret new noise.secret`, once for the data set, and write "
            "dpstream.account(..., secret='file:noise.secret')",
        )
    return given
