"""The account and the secret of a question about a table in memory, as its asker gives them."""

from typing import TYPE_CHECKING, NamedTuple

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.account import LedgerAccount
from dpstream.pipelines.ask.question import Asking

if TYPE_CHECKING:
    from dpstream.dp_transforms.noise.secret_source import SecretSource
    from dpstream.state.ledger.open import AccountPlace


class Account(NamedTuple):
    """Where a question is charged, and where the data set's secret is."""

    ledger: "AccountPlace"
    secret: "SecretSource"


def account_of(
    account: LedgerAccount | None, secret: "str | SecretSource | None", how: Asking
) -> Account | None:
    """Where a question is charged; ``None``: nowhere.

    Raises:
        DpstreamError: it is no account, there is no reference to a secret, or without an account
            something is given that means nothing then.
    """
    if account is None:
        given = {"secret": secret is not None, "fresh": how.fresh, "as_of": bool(how.as_of)}
        for argument in (name for name, is_given in given.items() if is_given):
            raise UsageError(
                argument,
                "has no meaning without an account: every answer has noise of its own",
                "leave it out, or give account=dpstream.LedgerAccount(...)",
            )
        return None
    if not isinstance(account, LedgerAccount):
        raise UsageError(
            "account",
            "is no account that can be named",
            "write account=dpstream.LedgerAccount('ledger.db', 'visits', id='...')",
        )
    return Account(account.ledger, _source(secret))


def _source(secret: "str | SecretSource | None") -> "SecretSource":
    from dpstream.dp_transforms.noise.secret_source import SecretSource

    if isinstance(secret, SecretSource):
        return secret
    if secret is None:
        raise UsageError(
            "secret",
            "is required with an account: it is what the same answer is given again by",
            "make one with `dpstream secret new noise.secret`, once for the data set, and write "
            "secret='file:noise.secret'",
        )
    if not isinstance(secret, str):
        raise UsageError(
            "secret", "is not a reference to a secret", "write secret='file:noise.secret'"
        )
    return SecretSource(secret)
