"""Random histories of statements against budgets that are kept for every single point.

Two analysts ask, drop, cover, allot, draw, give up and close ranges, with a quota.  The model has
each point's budget in an array and evaluates conditions by DuckDB; after each statement what every
point has spent is compared, and whether the statement was answered.
"""

import itertools
import random
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.errors import DpstreamError
from dpstream.accounting.regions.amounts import CLOSED
from dpstream.pipelines.session.ask import close_before
from tests.lanes import few_first
from tests.pipelines.session.statements import Session
from tests.pipelines.session.tables import small_config_at

KINDS = ("epsilon", "rho")
QUOTA, MICRO = 1_250_000, 1_000_000
AT = np.array(list(itertools.product(range(4), range(11), range(9), range(5))))
INITIAL = {"epsilon": AT[:, 2] * 250_000, "rho": AT[:, 3] * 250_000}
COMPARED = ("=", "<>", "<", "<=", ">", ">=")


class Model:
    """What every point has spent, in millionths, and what is left of allotments."""

    def __init__(self) -> None:
        self.spent = {kind: np.zeros(len(AT), np.int64) for kind in KINDS}
        self.own = {who: np.zeros(len(AT), np.int64) for who in ("alice", "bob")}
        self.allotments: dict[tuple[str, str], list[Any]] = {}
        self.db = duckdb.connect()

    def where(self, text: str) -> Any:
        """The points for which a condition is true."""
        columns = {
            "a": pa.array(AT[:, 0]),
            "b": pa.array([None if b == 10 else b for b in AT[:, 1].tolist()], pa.int64()),
        }
        for kind in KINDS:
            left = np.maximum(INITIAL[kind] - self.spent[kind], 0)
            for name, micro in (
                (kind, INITIAL[kind]),
                (f"consumed_{kind}", self.spent[kind]),
                (f"remaining_{kind}", left),
            ):
                columns[name] = pa.array(micro / MICRO)
        self.db.register("points", pa.table(columns))
        rows = self.db.sql(f"SELECT ({text}) IS TRUE AS yes FROM points").to_arrow_table()
        return rows["yes"].to_numpy()

    def agrees(self, session: Session) -> bool:
        """Whether the account says the same of every point."""
        for kind, model in self.spent.items():
            spent = session.open_table.account.spent(kind)  # type: ignore[arg-type]
            theirs = np.full(len(AT), -1)
            for box, amount in zip(spent.boxes, spent.amounts.tolist(), strict=True):
                theirs[((box[:, 0] <= AT) & (box[:, 1] > AT)).all(axis=1)] = amount
            closed = (theirs >= CLOSED) & (model >= CLOSED)
            if not ((theirs == model) | closed).all():
                return False
        return True

    def charge(self, who: str, mask: Any, kind: str, amount: int, drop: bool, cover: Any) -> Any:
        """The points that a question reads; ``None``: it is refused."""
        mask = mask & (INITIAL[kind] > 0)
        wide = mask.reshape(4, 11, 9, 5)
        for axis in [("a", "b").index(name) for name in cover]:
            wide = np.broadcast_to(wide.any(axis=axis, keepdims=True), wide.shape)
        wide = wide.reshape(-1)
        lacks = wide & (INITIAL[kind] - self.spent[kind] < amount)
        if kind == "epsilon":
            lacks |= wide & (self.own[who] + amount > QUOTA)
        pays = wide & ~lacks if drop else wide
        if (lacks.any() and not drop) or not (mask & pays).any():
            return None
        self.spent[kind][pays] += amount
        if kind == "epsilon":
            self.own[who][pays] += amount
        return mask & pays


def condition(rng: random.Random, depth: int) -> str:
    """A random condition; of what was spent, too."""
    if depth and rng.random() < 0.6:
        sign = rng.choice((" AND ", " OR "))
        parts = sign.join(f"({condition(rng, depth - 1)})" for _ in range(2))
        return f"NOT ({parts})" if rng.random() < 0.2 else parts
    name = rng.choice(("a", "b", "b", "epsilon", "rho", *(("consumed_epsilon", "remaining_rho",
                       "remaining_epsilon") if rng.random() < 0.3 else ())))  # fmt: skip
    if name == "b" and rng.random() < 0.3:
        return rng.choice(("b IS NULL", "b IS NOT NULL", "MOD(b, 3) = 1", "b NOT IN (2, NULL)"))
    size = {"a": 4, "b": 10}.get(name, 0)
    value = rng.randrange(size) if size else rng.choice((0.25, 0.5, 1, 1.5))
    return f"{name} {rng.choice(COMPARED)} {value}"


def history(folder: Path, seed: int, steps: int = 30) -> int:
    """Run one history; how many point budgets were compared."""
    rng, model, compared, answers = random.Random(f"history {seed}"), Model(), 0, [0, 0]
    quota = f"\n[table.small.quota]\nepsilon = {QUOTA / MICRO}\n"
    config = small_config_at(folder, more=quota)
    with Session(config, "alice") as alice, Session(config, "bob") as bob:
        for step in range(steps):
            who, session = rng.choice((("alice", alice), ("bob", bob)))
            kind, micro = rng.choice(("epsilon", "epsilon", "rho")), 50_000 * rng.randint(1, 8)
            text, amount = condition(rng, 2), str(micro / MICRO)
            mask = model.where(text)
            name, drop = rng.choice("xyz"), rng.random() < 0.4
            cover = tuple(c for c in ("a", "b") if rng.random() < 0.2)
            what, held = rng.random(), model.allotments.get((who, name))
            if what < 0.5:
                read = model.charge(who, mask, kind, micro, drop, cover)
                options = dict(kind=kind, drop=drop, cover=cover, as_of=str(step))
                ask: Any = lambda: session.where(text).count(amount, **options)  # noqa: B023, E731
            elif what < 0.65:
                read = None if held else model.charge(who, mask, kind, micro, False, cover)
                if read is not None:
                    model.allotments[who, name] = [kind, read, micro]
                ask = lambda: session.where(text).as_pinq(amount, name, kind, cover)  # noqa: B023, E731
            elif what < 0.9:
                fits = held is not None and held[0] == kind and micro <= held[2]
                read = held[1] & mask if fits else None  # type: ignore[index]
                open_ = read is not None and read.any() and (model.spent[kind][read] < CLOSED).all()
                read = read if open_ else None
                if open_:
                    held[2] -= micro  # type: ignore[index]
                drawn = f"SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS({kind} = {amount}, allotment = "
                drawn += f"'{name}') COUNT(*) AS n FROM small WHERE {text}"
                ask = lambda: session.ask(drawn, as_of=str(step))  # noqa: B023, E731
            elif what < 0.96:
                read = held[1] if held is not None and held[2] else None
                read = read if held and (model.spent[held[0]][held[1]] < CLOSED).all() else None
                if read is not None and held and held[2]:
                    del model.allotments[who, name]
                else:
                    read = None
                ask = lambda: session.ask(f"DROP ALLOTMENT {name} ON small")  # noqa: B023, E731
            else:
                edge, read = rng.randint(1, 3), AT[:, 1] < 0
                for spent in model.spent.values():
                    spent[AT[:, 1] < edge] = CLOSED
                ask = lambda: close_before(session.open_table, "b", str(edge))  # noqa: B023, E731
            try:
                ask()
                answered = True
            except DpstreamError:
                answered = False
            assert answered == (read is not None), (seed, step, text)
            answers[answered] += 1
            assert model.agrees(session), (seed, step, text)
            compared += 2 * len(AT)
    assert min(answers) > 1
    return compared


@pytest.mark.parametrize("seed", few_first(range(110)))
def test_every_point_has_spent_what_it_should(seed: int, tmp_path: Path) -> None:
    assert history(tmp_path, seed) == 30 * 2 * len(AT)
