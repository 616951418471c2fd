"""What a first job's budget covers: each window, a period, or everything; with figures of each.

The figures are of an assumed population, which is public: nothing of it is read from the data.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from dpstream.accounting.budget import allocate
from dpstream.accounting.figures import human, up
from dpstream.accounting.tuning.coverage import coverage
from dpstream.accounting.tuning.outlook import outlook
from dpstream.pipelines.drafting.draft import Answers, checked, job_text

WINDOW, LIFETIME = "window", "lifetime"
#: Windows of the period that is shown between one window and all.
_SOME = 4


class Population(NamedTuple):
    """What is assumed of one window; public."""

    units: int = 10_000
    records: int = 30_000
    keys: int = 1_000


def with_covers(said: Answers, covers: str) -> Answers:
    """The answers with a budget that covers a window, everything, or a length."""
    word = covers.strip().lower()
    period = {WINDOW: said.windows.length, LIFETIME: None}.get(word, covers.strip())
    return said._replace(period=period)


def choices(said: Answers) -> list[str]:
    """What can be covered: each window, four of them if there are more, everything."""
    number, unit = int(said.windows.length[:-1]), said.windows.length[-1]
    some = [f"{_SOME * number}{unit}"] if said.windows.number > _SOME else []
    return [WINDOW, *some, LIFETIME]


def table(said: Answers, out: Path, asked: list[str], people: Population) -> list[str]:
    """A line for each choice: keys, error, records that C cuts, and epsilon over the whole run."""
    head = ("covers", "keys (first, middle window)", "error of 1,000", "C cuts", "epsilon in all")
    rows = [head]
    for covers in asked:
        plan = checked(job_text(with_covers(said, covers), out), out).plan
        budget = allocate(plan)
        found = coverage(plan, budget, people.units, people.records, people.keys)
        [count, *_] = outlook(plan, budget)["exact"]
        always = found["epsilon_always"]
        rows.append((
            covers,
            f"{_keys(found['keys_first'])}, {_keys(found['keys_middle'])}",
            f"{human(100 * count['sizes'][-1]['relative'])}%",
            f"{human(100 * (found['share_cut'] or 0.0))}%",
            "–" if always is None else up(always, 3),
        ))  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _keys(number: float | None) -> str:
    return "all" if number is None else "none" if number < 0.05 else human(number)


def checker(said: Answers, out: Path) -> Callable[[str], str]:
    """Reads an answer: a word or a length that the job takes."""

    def read(covers: str) -> str:
        checked(job_text(with_covers(said, covers), out), out)
        return covers.strip().lower()

    return read


def assumed(people: Population) -> str:
    """The population in words."""
    return (
        f"of {people.units:,} units with {people.records:,} records in each window, the same "
        f"ones in all, and {people.keys:,} keys: assumed (--units, --records, --keys), not read"
    )
