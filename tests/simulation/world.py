"""One seed, one world: ``python -m tests.simulation.world --seed N [--trace]``.

Replays a seed that failed, or runs many: ``--seeds 20000`` or ``--seconds 600``; with
``--sabotage`` of a sabotaged product (see ``sabotaged``).
"""

import argparse
import contextlib
import itertools
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from tests.simulation import hooks
from tests.simulation.checks import Problem, check_end
from tests.simulation.history import World
from tests.simulation.stores import DRAWN, MAKERS, Make, emulated


class Outcome(NamedTuple):
    """How a world went: the broken rule, if any, and its trace."""

    seed: int
    problem: str | None
    trace: list[str]
    totals: Counter[str]


def simulate(
    seed: int, make: Make | None = None, records: int | None = None, skipping: bool = False
) -> Outcome:
    """Live one history and check it; ``skipping``: of a job that skips what is published."""
    with tempfile.TemporaryDirectory(dir=hooks.memory_folder()) as folder, hooks.fast():
        make = make or DRAWN[list(DRAWN)[seed % len(DRAWN)]]
        world = World(seed, make, folder, records, skipping)
        problem = None
        with hooks.watched(world):
            try:
                world.live()
                check_end(world)
            except Problem as error:
                problem = str(error)
            except Exception as error:  # a bug: named without its text, which can hold data
                problem = f"{type(error).__name__} in {hooks.place_of(error)}"
                traceback.clear_frames(error.__traceback__)  # nothing is read on after the end
            finally:
                world.close()
        return Outcome(seed, problem, world.trace, world.totals)


def smallest(
    seed: int, make: Make | None = None, skipping: bool = False
) -> tuple[Outcome, int | None]:
    """The outcome of a seed that fails, with as few records as still make it fail."""
    outcome, fewest = simulate(seed, make, skipping=skipping), None
    for records in (5, 10, 20, 40, 80):
        smaller = simulate(seed, make, records, skipping)
        if smaller.problem is not None:
            return smaller, records
    return outcome, fewest


def report(
    seed: int, make: Make | None = None, store: str | None = None, skipping: bool = False
) -> str:
    """What to print of a seed that failed: the rule and the command that replays it."""
    outcome, records = smallest(seed, make, skipping)
    command = f"python -m tests.simulation.world --seed {seed}"
    command += f" --records {records}" if records else ""
    command += f" --store {store}" if store else ""
    command += " --skipping" if skipping else ""
    return f"seed {seed}: {outcome.problem}\nreplay: {command} --trace"


def _seeds(options: argparse.Namespace) -> Iterator[int]:
    if options.seconds is None:
        yield from range(options.seed, options.seed + options.seeds)
        return
    end = time.monotonic() + options.seconds
    for seed in itertools.count(options.seed):
        if time.monotonic() > end:
            return
        yield seed


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--seconds", type=float, help="as many as this time allows")
    parser.add_argument("--store", choices=list(MAKERS), help="drawn if not given")
    parser.add_argument("--records", type=int, help="drawn if not given")
    parser.add_argument("--skipping", action="store_true", help="jobs that skip what is published")
    parser.add_argument("--trace", action="store_true", help="print what happened")
    parser.add_argument("--sabotage", help="sabotage the product: which seeds find it?")
    options = parser.parse_args()
    make = MAKERS[options.store] if options.store else None
    with contextlib.ExitStack() as stack:
        if options.store == "spanner":
            stack.enter_context(emulated())
        if options.sabotage:
            stack.enter_context(_sabotaged(options.sabotage))
        _run(options, make)


def _sabotaged(name: str) -> contextlib.AbstractContextManager[None]:
    from tests.simulation.sabotaged import SABOTAGED

    return SABOTAGED[name].patch()


def _run(options: argparse.Namespace, make: Make | None) -> None:
    failed, runs, totals, start = list[int](), 0, Counter[str](), time.monotonic()
    for seed in _seeds(options):
        outcome = simulate(seed, make, options.records, options.skipping)
        runs += 1
        totals += outcome.totals
        if options.trace:
            print(*outcome.trace, sep="\n")
        if outcome.problem:
            failed.append(seed)
            print(f"seed {seed}: {outcome.problem}", flush=True)
    figures = ", ".join(f"{n} {name}" for name, n in sorted(totals.items()))
    print(f"{runs} seeds in {time.monotonic() - start:.1f} s, {len(failed)} failed; {figures}")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
