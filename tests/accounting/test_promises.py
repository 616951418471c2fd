"""Both promises of both families: 91 months of (2, 1e-7)."""

import msgspec
import pytest

from dpstream.accounting.budget import allocate
from dpstream.accounting.errors import UsageError
from dpstream.accounting.fixed_schedule import epsilon_of_responses
from dpstream.accounting.gaussian import epsilon_of
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.promises import promise_lines, promises
from tests.accounting.plans import SECOND, build


def months(contributions: int = 1, **privacy: object) -> Plan:
    return build(
        1, public_keys="list", strategy="auto", epsilon=2.0, delta=1e-7, windows=91, period=SECOND,
        contributions=contributions, **privacy,
    )  # fmt: skip


def test_ninety_one_months() -> None:
    plan = months(2, per_key_bound=1)
    geometric, gaussian = promises(plan, allocate(plan))
    assert (geometric.family, geometric.chosen) == ("geometric", True)
    assert (geometric.epsilon, geometric.delta) == (2, 0)
    assert (gaussian.epsilon, gaussian.delta, gaussian.chosen) == (2, 1e-7, False)
    assert geometric.periods == gaussian.periods == 91
    assert geometric.lifetime == (182, 0)
    assert gaussian.lifetime[0] == pytest.approx(24, abs=0.5)
    mu = allocate(msgspec.structs.replace(plan, privacy=gaussian_of(plan))).mu
    assert gaussian.lifetime[0] == pytest.approx(epsilon_of(91**0.5 * mu, 91e-7), rel=1e-6)
    assert geometric.fixed is not None and gaussian.fixed is None
    assert geometric.fixed == (
        epsilon_of_responses(geometric.fixed[1], 1.0, 182),
        geometric.fixed[1],
    )
    alone = promises(months(), allocate(months()))[0].fixed
    assert alone is not None and geometric.fixed[0] < alone[0] < 182
    assert geometric.sd < gaussian.sd


def gaussian_of(plan: Plan) -> object:
    return msgspec.structs.replace(plan.privacy, strategy="blt")


def test_auto_can_go_by_the_lifetime() -> None:
    by_period, by_lifetime = months(), months(optimise="lifetime")
    assert allocate(by_period).strategy == "geometric"
    assert allocate(by_lifetime).strategy == "blt"
    assert by_period.hash != by_lifetime.hash
    once = build(1, public_keys="list", strategy="auto", contributions=1, optimise="lifetime")
    assert allocate(once).strategy == "geometric"
    with pytest.raises(UsageError, match="optimise"):
        build(1, public_keys="list", strategy="blt", optimise="lifetime").check()


def test_lines_for_a_person() -> None:
    plan = months()
    lines = promise_lines(plan, allocate(plan))
    assert [line.split()[0] for line in lines] == ["Noise", "Noise", "Lifetime"]
    assert "(in force)" in lines[0] and "(182, 0)" in lines[2] and "all 91 periods" in lines[2]
    selected = build(12)
    in_force, other = promise_lines(selected, allocate(selected))
    assert "gaussian" in in_force and "(in force)" in in_force
    assert "geometric" in other and "(in force)" not in other
    pure = build(4, public_keys="list", strategy="geometric", delta=0.0)
    assert promise_lines(pure, allocate(pure)) == []
