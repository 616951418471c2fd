"""What does not fit into samplers and integers is refused with a way out."""

import pytest

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.errors import UsageError
from dpstream.accounting.fields import Aggregate
from tests.accounting.plans import build

WIDE = Aggregate("total", "sum", "v", (-(2.0**32), 2.0**32), 1.0)


@pytest.mark.parametrize("strategy", ["tree", "blt", "geometric"])
def test_noise_beyond_the_integers_is_refused(strategy: str) -> None:
    plan = build(100, public_keys="list", strategy=strategy, aggregates=(WIDE,), epsilon=1e-4)
    with pytest.raises(UsageError, match="grid"):
        allocate(plan)


def test_auto_refuses_what_no_family_can_draw() -> None:
    plan = build(100, public_keys="list", strategy="auto", aggregates=(WIDE,), epsilon=1e-4)
    with pytest.raises(UsageError, match="grid"):
        allocate(plan)
    usual = build(100, public_keys="list", strategy="auto", aggregates=(WIDE,), contributions=1)
    with pytest.raises(UsageError, match="grid"):
        allocate(usual)
