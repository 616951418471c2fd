"""Quotas and the unlock schedule, both rounded down."""

from fractions import Fraction

import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.sessions.rules import Quotas, Rules, Unlock, quota_of

DAY = 86_400_000_000


def test_quotas_are_of_a_name_or_of_all_others() -> None:
    quotas = Quotas(epsilon={"ann": 5}, default_epsilon=2, rho={"bob": 7})
    assert [quotas.of("epsilon", who) for who in ("ann", "bob", "cyd")] == [5, 2, 2]
    assert [quotas.of("rho", who) for who in ("ann", "bob")] == [None, 7]
    assert Rules().quotas.of("epsilon", "ann") is None


def test_a_quota_is_rounded_down() -> None:
    assert quota_of("0.0000019") == 1 and quota_of(0) == 0
    with pytest.raises(UsageError, match="quota"):
        quota_of(-1)


def test_so_much_more_every_whole_day() -> None:
    unlock = Unlock(start=5 * DAY, share="0.3")
    amounts = [
        unlock.usable(at) for at in (0, 5 * DAY - 1, 5 * DAY, 6 * DAY - 1, 6 * DAY, 90 * DAY)
    ]
    tenth = Fraction(1, 10)
    assert amounts == [0, 0, 3 * tenth, 3 * tenth, 6 * tenth, 1]
    assert Unlock(start=0, share=0.1).usable(8 * DAY) == 9 * tenth


def test_millionths_are_rounded_down() -> None:
    rules = Rules(unlock=Unlock(start=0, share="0.0000009"))
    assert rules.usable(0) == 0 and rules.usable(DAY) == 1 and rules.usable(3 * DAY) == 3
    assert Rules().usable(-1) == 1_000_000 == Rules(unlock=Unlock(start=0, share=1)).usable(0)


@pytest.mark.parametrize("share", [0, -0.1, 1.01, "nan", "many"])
def test_a_share_that_is_none(share: float) -> None:
    with pytest.raises(UsageError, match="share"):
        Unlock(start=0, share=share)
