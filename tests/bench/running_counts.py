"""Mean sd of a running count over its steps, by family: all C records of a unit anywhere.

    python -m tests.bench.running_counts [--epsilon 6] [--delta 1e-9]

prints a row for each T and C: Gaussian noise (`blt`, `dense`), two-sided geometric noise, and what
`auto` takes.
"""

import argparse

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.fields import Aggregate, Field
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.plan.privacy import Privacy, StrategyName
from dpstream.accounting.plan.timeline import Timeline

SECOND = 1_000_000
#: Triggers and contributions.
ROWS = ((1, 1), (1, 10), (16, 1), (16, 10), (100, 1), (100, 10), (1000, 1), (1000, 10))
FAMILIES: tuple[StrategyName, ...] = ("blt", "dense", "geometric")


def plan_of(triggers: int, contributions: int, strategy: StrategyName, privacy: Privacy) -> Plan:
    """A count in one window of so many seconds."""
    window = triggers * SECOND
    return Plan(
        source="files",
        unit=Field("user"),
        key=(Field("page"),),
        event_time="time",
        aggregates=(Aggregate("n", "count"),),
        timeline=Timeline(0, window, window, window, SECOND),
        privacy=Privacy(privacy.epsilon, privacy.delta, contributions, strategy=strategy),
        public_keys="list",
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epsilon", type=float, default=6.0)
    parser.add_argument("--delta", type=float, default=1e-9)
    options = parser.parse_args()
    promise = Privacy(options.epsilon, options.delta, 1)
    print("    T    C       blt     dense  geometric  auto")
    for triggers, contributions in ROWS:
        sds = []
        for family in FAMILIES:
            budget = allocate(plan_of(triggers, contributions, family, promise))
            sds.append(float(budget.values[0].sd.mean()))
        taken = allocate(plan_of(triggers, contributions, "auto", promise)).strategy
        cells = f"{sds[0]:>10.3f}{sds[1]:>10.3f}{sds[2]:>11.3f}"
        print(f"{triggers:>5}{contributions:>5}{cells}  {taken}")


if __name__ == "__main__":
    main()
