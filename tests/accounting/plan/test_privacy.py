"""What a job promises: each setting has its bounds, and options that need others say so."""

import pytest

from dpstream.accounting import limits
from dpstream.accounting.errors import UsageError
from dpstream.accounting.plan.privacy import Privacy
from dpstream.accounting.weights import SelectionWeights
from tests.accounting.plans import Make

WEIGHTS = SelectionWeights()


@pytest.mark.parametrize(
    ("field", "case"),
    [
        ("privacy.epsilon", {"epsilon": 0.0}),
        ("privacy.epsilon", {"epsilon": float("nan")}),
        ("privacy.delta", {"delta": 1.0}),
        ("privacy.delta", {"delta": 0.0}),
        ("privacy.delta", {"delta": 5e-324}),
        ("privacy.contributions", {"contributions": 0}),
        ("privacy.contributions", {"contributions": limits.MAX_CONTRIBUTIONS + 1}),
        ("privacy.theta", {"theta": 1.0}),
        ("privacy.pre_threshold", {"pre_threshold": -1}),
        ("privacy.refresh_every", {"refresh_every": 0}),
        ("privacy.selection_share", {"selection_share": 1.0}),
        ("privacy.per_key_bound", {"per_key_bound": 0}),
        ("privacy.select_every", {"select_every": 0}),
        ("privacy.per_key_bound", {"per_key_bound": 1, "mode": "rounds"}),
        ("privacy.weights", {"weights": WEIGHTS, "mode": "rounds"}),
        ("privacy.select_every", {"select_every": 2, "mode": "rounds"}),
        ("privacy.combine", {"combine": True}),
        ("privacy.combine", {"combine": True, "weights": WEIGHTS}),
        ("privacy.combine", {"combine": True, "per_key_bound": 1}),
        ("privacy.combine", {"combine": True, "weights": WEIGHTS, "per_key_bound": 2}),
    ],
)
def test_refusals(make_plan: Make, field: str, case: dict) -> None:
    """Alone and as a part of its plan."""
    plan = make_plan(**case)
    for check in (plan.privacy.check, plan.check):
        with pytest.raises(UsageError) as caught:
            check()
        assert caught.value.field == field and caught.value.exit_code == 2


@pytest.mark.parametrize(
    "edge",
    [
        {"epsilon": limits.MAX_EPSILON},
        {"contributions": 1},
        {"contributions": limits.MAX_CONTRIBUTIONS},
        {"pre_threshold": limits.MAX_PAIRS},
        {"refresh_every": 1, "select_every": 1},
        {"mode": "rounds", "final_flush": True},
        {"per_key_bound": 1, "weights": WEIGHTS, "combine": True},
    ],
)
def test_what_is_allowed_just_so(edge: dict) -> None:
    Privacy(**{"epsilon": 1.0, "delta": 1e-9, "contributions": 2, **edge}).check()
