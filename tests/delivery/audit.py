"""What must hold of two neighbouring streams under one schedule, and of one under two."""

from tests.audit.neighbours import Pair
from tests.delivery import world
from tests.delivery.schedules import Schedule, make, schedule, with_unit
from tests.delivery.world import Came, calm, live
from tests.simulation.checks import Problem


def audit(seed: int, kind: str | None = None, name: str | None = None) -> tuple[list[str], Came]:
    """Every breach of a seed, and what came of the others' records alone.

    Without tardy records the neighbour comes under another schedule and on other shards; with
    them, what a record joins depends on its delivery, so the neighbour's only has more in it.
    """
    pair, base = make(seed, kind, name)
    try:
        came = live(base)
        if base.tardy:
            more = with_unit(base, pair.unit, seed)
        else:
            other = schedule(pair.plan, pair.others, seed + 1_000_000, 1 + seed % 2, False)
            more = with_unit(other, pair.unit, seed)
        added = live(more)
    except (Problem, AssertionError) as error:
        return [str(error)], Came({}, {}, {}, {}, {})
    problems = [*promised(base, came), *promised(more, added)]
    if came.placed != _without(pair, added):
        problems.append("others: a record is admitted otherwise beside one unit more")
    return problems, came


def _without(pair: Pair, added: Came) -> world.Placed:
    mine = {record.serial for record in pair.unit}
    return {serial: placed for serial, placed in added.placed.items() if serial not in mine}


def promised(history: Schedule, came: Came) -> list[str]:
    """What kept the source's promise is decided as if all had been there from the beginning."""
    late = {r.user for r in history.records if r.serial in history.tardy}
    users = {r.serial: r.user for r in history.records}
    calmly, indices = calm(history)
    here = {s: p for s, p in came.placed.items() if users[s] not in late}
    there = {s: p for s, p in calmly.items() if users[s] not in late}
    problems = [] if here == there else ["lost: a record is not where its stamp puts it"]
    # A record that breaks the promise may change what is published, and so which weights are taken.
    if not late and came.indices != indices:
        problems.append("weights: a pair takes another weight than in a calm run")
    return problems
