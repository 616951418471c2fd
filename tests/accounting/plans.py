"""Plans and columns that the tests of the accounting share."""

from collections.abc import Callable

import msgspec

from dpstream.accounting.budget.allocation import Budget, allocate_mechanism
from dpstream.accounting.fields import Aggregate, Field
from dpstream.accounting.plan.plan import Plan, mechanism_of
from dpstream.accounting.plan.privacy import Privacy
from dpstream.accounting.plan.timeline import Timeline

Make = Callable[..., Plan]
SECOND, DAY = 1_000_000, 86_400_000_000
COUNT, UNITS = Aggregate("n", "count"), Aggregate("people", "units")
SUM = Aggregate("total", "sum", "v", (-3.0, 7.0), 0.5)
MEAN = Aggregate("level", "mean", "v", (-2.0, 9.0), 0.25)


def build(
    triggers: int = 100,
    *,
    aggregates: tuple[Aggregate, ...] = (COUNT,),
    public_keys: str | None = None,
    period: int | None = None,
    windows: int = 1,
    **privacy: object,
) -> Plan:
    """A plan of windows of so many triggers, a second each; `privacy` are fields of Privacy."""
    window = triggers * SECOND
    settings = {"strategy": "tree", "epsilon": 6.0, "delta": 1e-9, "contributions": 32}
    settings |= {"allow_large_delta": True, **privacy}
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


def allocate_sharing(plan: Plan, selection_share: float | None) -> Budget:
    """The budget of a plan with another share for key selection than the best known."""
    mechanism = mechanism_of(plan.check())
    return allocate_mechanism(msgspec.structs.replace(mechanism, selection_share=selection_share))
