"""What a first job's budget covers: each window, a period, or the lifetime, with figures of each.

The figures are computed for an assumed population; nothing is read from the data.
"""

from collections.abc import Callable
from typing import NamedTuple

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.errors import UsageError
from dpstream.accounting.figures import human, up
from dpstream.accounting.tuning.outlook import coverage, exactness
from dpstream.pipelines.drafting.draft import Answers, Target, checked, project_text

WINDOW, LIFETIME = "window", "lifetime"
#: Windows of the period that is compared with one window and with all.
_PERIOD_WINDOWS = 4


class Population(NamedTuple):
    """What is assumed of one window; public."""

    units: int = 10_000
    records: int = 30_000
    keys: int = 1_000


def with_covers(answers: Answers, covers: str) -> Answers:
    """The answers with a budget that covers a window, the lifetime, or a length."""
    word = covers.strip().lower()
    period = {WINDOW: answers.windows.length, LIFETIME: None}.get(word, covers.strip())
    return answers._replace(period=period)


def choices(answers: Answers) -> list[str]:
    """What to compare: each window, four windows if there are more, and the lifetime."""
    number, unit = int(answers.windows.length[:-1]), answers.windows.length[-1]
    period = [f"{_PERIOD_WINDOWS * number}{unit}"]
    return [WINDOW, *(period if answers.windows.number > _PERIOD_WINDOWS else []), LIFETIME]


def table(answers: Answers, target: Target, compared: list[str], people: Population) -> list[str]:
    """A line for each choice: keys, error, records that C cuts, and epsilon over the whole run."""
    keys, epsilon = "keys (first, middle window)", "epsilon of all windows"
    head = ("covers", keys, "error of 1,000", "C cuts", epsilon)
    rows = [head]
    for covers in compared:
        plan = checked(project_text(with_covers(answers, covers), target), target).plan
        budget = allocate(plan)
        figures = coverage(plan, budget, people.units, people.records, people.keys)
        [count, *_] = exactness(plan, budget)
        always = figures["epsilon_always"]
        rows.append(
            (
                covers,
                f"{_keys(figures['keys_first'])}, {_keys(figures['keys_middle'])}",
                f"{human(100 * count['sizes'][-1]['relative'])}%",
                f"{human(100 * (figures['share_cut'] or 0.0))}%",
                "–" if always is None else up(always, 3),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _keys(number: float | None) -> str:
    return "all" if number is None else "none" if number < 0.05 else human(number)


def checker(answers: Answers, target: Target) -> Callable[[str], str]:
    """A function that checks an answer: a word or a length that the job accepts."""

    def read(covers: str) -> str:
        if covers.strip().lower() not in (WINDOW, LIFETIME) and not covers.strip()[:1].isdigit():
            raise UsageError(
                "--covers",
                f"'{covers}' is neither a length nor what a budget can cover",
                f"write {WINDOW}, {LIFETIME}, or a length such as 28d",
            )
        checked(project_text(with_covers(answers, covers), target), target)
        return covers.strip().lower()

    return read


def assumed(people: Population) -> str:
    """A line that states the assumed population."""
    return (
        f"computed for {people.units:,} units with {people.records:,} records in each window (the "
        f"same units in all) and {people.keys:,} keys: assumed (--units, --records, --keys), not "
        "read"
    )
