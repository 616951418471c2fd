"""Plans for the tests of the accounting."""

from collections.abc import Callable

import pytest

from dpstream.accounting.plan.fields import Aggregate, Field
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.plan.privacy import Privacy
from dpstream.accounting.plan.timeline import Timeline

SECOND = 1_000_000
COUNT = (Aggregate("n", "count"),)


def build(
    triggers: int = 100,
    *,
    aggregates: tuple[Aggregate, ...] = COUNT,
    public_keys: str | None = None,
    period: int | None = None,
    windows: int = 1,
    **privacy: object,
) -> Plan:
    window = triggers * SECOND
    settings = {"strategy": "tree", "epsilon": 6.0, "delta": 1e-9, "contributions": 32, **privacy}
    return Plan(
        source="files",
        unit=Field("user"),
        key=(Field("page"),),
        event_time="time",
        aggregates=aggregates,
        timeline=Timeline(0, windows * window, window, window, SECOND, period=period),
        privacy=Privacy(**settings),  # type: ignore[arg-type]
        public_keys=public_keys,
    )


@pytest.fixture(scope="session")
def make_plan() -> Callable[..., Plan]:
    return build
