"""What a job promises: each setting has its bounds, and options that need others say so."""

from typing import Any

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
        ("budget.epsilon", {"epsilon": 0.0}),
        ("budget.epsilon", {"epsilon": float("nan")}),
        ("budget.delta", {"delta": 1.0}),
        ("budget.delta", {"delta": 0.0}),
        ("budget.delta", {"delta": 5e-324}),
        ("contributions", {"contributions": 0}),
        ("contributions", {"contributions": limits.MAX_CONTRIBUTIONS + 1}),
        ("mechanism.pre_threshold", {"pre_threshold": -1}),
        ("mechanism.refresh_every", {"refresh_every": 0}),
        ("per_key_bound", {"per_key_bound": 0}),
        ("mechanism.select_every", {"select_every": 0}),
        ("mechanism.combine", {"combine": True}),
        ("mechanism.combine", {"combine": True, "weights": WEIGHTS}),
        ("mechanism.combine", {"combine": True, "per_key_bound": 1}),
        ("mechanism.combine", {"combine": True, "weights": WEIGHTS, "per_key_bound": 2}),
    ],
)
def test_refusals(make_plan: Make, field: str, case: dict[str, Any]) -> None:
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
        {"per_key_bound": 1, "weights": WEIGHTS, "combine": True},
    ],
)
def test_what_is_allowed_just_so(edge: dict[str, Any]) -> None:
    Privacy(**{"epsilon": 1.0, "delta": 1e-9, "contributions": 2, **edge}).check()
