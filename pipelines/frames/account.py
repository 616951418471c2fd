"""A data set's account and secret, for questions and runs that Python code starts by itself.

The module does not import Beam, so that a question about a table in memory can have an account.
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
    """A plan, and the account that its runs are charged in; either with a job or without one."""

    plan: "Plan"
    ledger: AccountPlace | None


@dataclasses.dataclass(frozen=True)
class DataSetAccount:
    """A data set's account, and a reference to its secret; made by `account` or
    ``ProjectFile.account``.

    Attributes:
        place: the account's file or database, its data set and id.
        secret: where the secret is; questions need it, because an answered question is
            recognised by a digest that is keyed with the secret.
    """

    place: AccountPlace
    secret: SecretSource = dataclasses.field(default_factory=SecretSource)

    def check(self, plan: "Plan") -> None:
        """Raise the error that ``charge`` would raise now; write no entry.

        Raises:
            PolicyError: the charge would exceed the account's limit.
        """
        from dpstream.pipelines.jobs.charging import check_charge

        check_charge(Charged(plan, self.place))

    def charge(self, run: "Run") -> None:
        """Charge a run, once for each run id and epoch, before any noise is drawn.

        Raises:
            PolicyError: the charge exceeds the account's limit; or the store is a copy, is older
                than its account, or was restored (a restored store must be compared with what the
                sink has published, and only a job knows its sink).
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
    """Return the account of a data set that is not described in a project file.

    ``dpstream account create`` makes the account, with its limit, and prints its id.  With a
    project file, ``dpstream.project().account(NAME)`` returns the account of a data set.

    Args:
        path: the account's file or URL.
        data_set: the name of the data set in the account.
        id: the account's id.
        unit: the name of the privacy unit in the account, where tables have the same units in
            columns of different names (default: the unit's column).
        secret: a reference to the data set's secret: ``file:PATH``, ``env:NAME`` or ``gcp:...``.
            Paths start in the folder that is current now, whatever it is later.

    Raises:
        UsageError: the id is missing, or an argument cannot be used.
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
    source = SecretSource.of(secret).below(Path.cwd())
    return DataSetAccount(AccountPlace(place, data_set, id, unit), source)


def checked_account(given: DataSetAccount | None, how: Asking) -> DataSetAccount | None:
    """Return the account that a question is charged in; ``None`` if it is charged nowhere.

    Raises:
        UsageError: the argument is not an account, or has no secret; or ``fresh`` or ``as_of``,
            which have no meaning without an account, are given without one.
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
