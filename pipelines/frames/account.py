"""The account and the noise key of a question about a table in memory, as its asker gives them."""

from typing import TYPE_CHECKING, NamedTuple

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.account import LedgerAccount
from dpstream.pipelines.ask.question import Asking

if TYPE_CHECKING:
    from dpstream.dp_transforms.noise.key_source import KeySource
    from dpstream.state.ledger.open import AccountPlace


class Account(NamedTuple):
    """Where a question is charged, and where the data set's noise key is."""

    ledger: "AccountPlace"
    key: "KeySource"


def account_of(
    account: LedgerAccount | None, noise_key: "str | KeySource | None", how: Asking
) -> Account | None:
    """Where a question is charged; ``None``: nowhere.

    Raises:
        DpstreamError: it is no account, there is no reference to a key, or without an account
            something is given that means nothing then.
    """
    if account is None:
        given = {"noise_key": noise_key is not None, "fresh": how.fresh, "as_of": bool(how.as_of)}
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
    return Account(account.ledger, _key(noise_key))


def _key(noise_key: "str | KeySource | None") -> "KeySource":
    from dpstream.dp_transforms.noise.key_source import KeySource

    if isinstance(noise_key, KeySource):
        return noise_key
    if noise_key is None:
        raise UsageError(
            "noise_key",
            "is required with an account: it is what the same answer is given again by",
            "make one with `dpstream key new noise.key`, once for the data set, and write "
            "noise_key='file:noise.key'",
        )
    if not isinstance(noise_key, str):
        raise UsageError(
            "noise_key", "is not a reference to a key", "write noise_key='file:noise.key'"
        )
    return KeySource(noise_key)
