"""Where selection weights may go by the number of a unit's pairs, and what is refused."""

import msgspec
import pytest

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.errors import UsageError
from dpstream.accounting.plan.sizes import suits_sizes
from dpstream.accounting.weights import SelectionWeights
from tests.accounting.plans import SECOND, build


@pytest.mark.parametrize(
    "case",
    [
        {"triggers": 2},
        {"windows": 2},
        {"windows": 4, "period": 2 * SECOND},
        {"per_key_bound": None, "combine": False},
        {"per_key_bound": 2, "combine": False},
        {"selection_share": 0.3},
        {"skip": True},
    ],
    ids=str,
)
def test_weights_by_size_need_all_pairs_of_a_unit_at_once(case: dict[str, object]) -> None:
    settings = {"triggers": 1, "per_key_bound": 1, "combine": True, **case}
    with pytest.raises(UsageError) as caught:
        allocate(build(weights=SelectionWeights(size_share=0.2), **settings))  # type: ignore[arg-type]
    assert caught.value.field == "mechanism.weights.size_share"
    periods = build(1, windows=4, period=SECOND, weights=SelectionWeights(size_share=0.2),
                    per_key_bound=1)  # fmt: skip
    assert allocate(periods).weights is not None


def test_events_ahead_of_their_stamps_are_decided_apart() -> None:
    plan = build(1, per_key_bound=1)
    assert suits_sizes(plan)
    skewed = msgspec.structs.replace(plan.timeline, max_skew=1)
    assert not suits_sizes(msgspec.structs.replace(plan, timeline=skewed))
    assert not suits_sizes(build(1, per_key_bound=1, public_keys="list"))
