"""Predicates against DuckDB: a point is in the boxes if and only if the text is TRUE there.

Selections: predicates joined, boxes cut, and identities that mean the same points.
"""

import contextlib
import itertools
import random
import zlib
from collections.abc import Iterator
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.errors import DpstreamError
from dpstream.accounting.regions.boxes import disjoint, points
from dpstream.accounting.regions.conditions import NEGATED
from dpstream.accounting.regions.space import Budget, Category, Integer, Real, Space, Timestamp
from dpstream.accounting.regions.spent import Spent, charge, untouched
from dpstream.pipelines.session import conditions
from dpstream.pipelines.session.selection import Selection, common
from tests.golden.pinned import check, of_refusals
from tests.golden.refusals import Refused
from tests.lanes import few_first
from tests.pipelines.session import tables as people
from tests.pipelines.session.statements import selected

DAY = 86_400_000_000
START = 1_704_067_200_000_000
SPACE = Space(
    (
        Integer(name="hour", low=-1, high=2, missing="point"),
        Real(name="x", low=0.0, high=1.5, step=0.5, missing="point"),
        Category(name="Vendor", codes=("b", "a", "é"), missing="point"),
        Timestamp(name="day", low=START, high=START + 3 * DAY, step=DAY),
        Budget(name="eps", most=1.0, step=500_000),
        Budget(name="r", kind="rho", most=0.000002),
    )
)


class Spending:
    """What points have spent: a corner of epsilon, overdrawn in places, and a slab of rho."""

    def __init__(self) -> None:
        epsilon = untouched(SPACE, "epsilon")
        for box, amount in (((0, 2), 250_000), ((1, 4), 750_000)):
            boxes = SPACE.everything.copy()
            boxes[0, 0], boxes[0, 1] = box, (0, 3)
            epsilon = charge(epsilon, boxes, amount)
        boxes = SPACE.everything.copy()
        boxes[0, 3] = (1, 3)
        self._spent_by_kind = {"epsilon": epsilon, "rho": charge(untouched(SPACE, "rho"), boxes, 1)}

    def spent(self, kind: str) -> Spent:
        return self._spent_by_kind[kind]


VIEWS = Spending()


def boxes_of(text: str, space: Space, views: Spending | None = None) -> np.ndarray:
    return selected(text, space).boxes(views)


def every_point() -> np.ndarray:
    """(n, 6) every point of the space."""
    return np.array(list(itertools.product(*map(range, SPACE.sizes.tolist()))))


def spent_at(at: np.ndarray, kind: str) -> np.ndarray:
    spent, amounts = VIEWS.spent(kind), np.full(len(at), -1)
    for box, amount in zip(spent.boxes, spent.amounts, strict=True):
        amounts[((at >= box[:, 0]) & (at < box[:, 1])).all(axis=1)] = amount
    return amounts


def within(boxes: np.ndarray, at: np.ndarray) -> np.ndarray:
    """(n,) in how many boxes each point is."""
    counts = np.zeros(len(at), int)
    for box in boxes:
        counts += ((at >= box[:, 0]) & (at < box[:, 1])).all(axis=1)
    return counts


def table() -> pa.Table:
    """Every point as records: where a coordinate is a step, one at its line and one within."""
    at = np.repeat(every_point(), 2, axis=0)
    inside = np.tile([0, 1], len(at) // 2)
    micro = {kind: spent_at(at, kind) for kind in ("epsilon", "rho")}
    initial = {"epsilon": at[:, 4] * 500_000, "rho": at[:, 5]}

    def nullable(values: Any, place: int) -> pa.Array:
        return pa.array(values, mask=at[:, place] == SPACE.values[place])

    def amount(values: np.ndarray) -> pa.Array:
        decimals = [Decimal(value).scaleb(-6) for value in values.tolist()]
        return pa.array(decimals, pa.decimal128(18, 6))

    codes = np.array(["b", "a", "é", ""])
    return pa.table(
        {
            "hour": nullable(at[:, 0] - 1, 0),
            "x": nullable(at[:, 1] * 0.5 + inside * 0.25, 1),
            "Vendor": nullable(codes[at[:, 2]], 2),
            "day": pa.array(START + at[:, 3] * DAY + inside * (DAY // 2)).cast(pa.timestamp("us")),
            "eps": amount(initial["epsilon"]),
            "r": amount(initial["rho"]),
            **{f"consumed_{kind}": amount(micro[kind]) for kind in micro},
            **{f"remaining_{kind}": amount(np.maximum(initial[kind] - micro[kind], 0))
               for kind in micro},
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def database() -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect() as db:
        db.register("rows", table())
        yield db


def agree(db: duckdb.DuckDBPyConnection, text: str) -> int:
    """Every point agrees with DuckDB; how many are in the boxes."""
    boxes = boxes_of(text, SPACE, VIEWS)
    counts = within(boxes, every_point())
    assert counts.max(initial=0) <= 1 and disjoint(boxes)
    true = db.sql(f"SELECT ({text}) IS TRUE AS yes FROM rows").to_arrow_table()["yes"].to_numpy()
    assert (np.repeat(counts, 2) == true).all(), text
    return int(counts.sum())


TEXTS = """
hour = 0
hour <> 0
NOT hour = 0
hour < 1 OR hour IS NULL
NOT (hour < 1 OR hour IS NULL)
hour > 0.5
hour <= -0.5
hour = 0.5
hour >= -1 AND hour < 99
hour BETWEEN 0 AND 1
hour NOT BETWEEN 0 AND 1
NOT (hour BETWEEN 0 AND NULL)
hour BETWEEN NULL AND 0
hour IN (0, 1, 7)
hour NOT IN (0, 7)
hour NOT IN (0, NULL)
hour IN (0, NULL)
NOT (hour IN (0, NULL))
hour = NULL
NOT hour = NULL
hour <> NULL OR x < 0.5
hour IS NULL
hour IS NOT NULL
0 < hour
0 >= HOUR
x < 0.5
NOT x < 0.5
x >= 0.5 AND x < 1.0
x <= 9
x > -0.1
x = 9
x <> 9
x BETWEEN -5 AND 1.5
x IS NULL AND hour IS NULL
vendor = 'a'
Vendor <> 'a'
vendor > 'a'
vendor <= 'b'
vendor < 'zzz'
NOT vendor >= 'b'
vendor IN ('a', 'é')
vendor NOT IN ('a')
day < TIMESTAMP '2024-01-02'
day >= '2024-01-02 00:00:00'
day >= DATE '2024-01-02' AND day < '2024-01-03'
day < '2030-01-01'
day > '2023-12-31'
eps >= 0.5
eps > 0.25
eps = 0.5
eps <= 0.7
eps <> 1
eps BETWEEN 0.5 AND 0.9
r >= 0.0000015
r = 0.000001
consumed_epsilon < 0.5
consumed_epsilon = 0.25
consumed_epsilon IN (0.25, 1.0)
consumed_epsilon NOT IN (0.25)
consumed_epsilon IS NULL
consumed_epsilon IS NOT NULL
NOT consumed_epsilon > 0.25
remaining_epsilon >= 0.25
remaining_epsilon = 0
remaining_epsilon <> 0
remaining_epsilon < 0
remaining_epsilon <= 0
remaining_epsilon BETWEEN 0.1 AND 0.5
NOT remaining_epsilon > 0.2
remaining_epsilon NOT IN (0, 0.25)
consumed_rho > 0 AND remaining_rho > 0.0000005
hour = 0 AND x < 0.5 OR vendor = 'b' AND NOT (day < '2024-01-02' OR eps < 0.5)
(hour = 0 OR x < 0.5) AND (vendor = 'b' OR consumed_epsilon > 0)
TRUE
FALSE
NULL
NOT NULL
TRUE AND hour = 0
FALSE OR hour = 0
NULL OR hour = 0
NULL AND hour = 0
NOT (NULL AND hour = 0)
NOT (NOT (hour = 0))
((hour)) = (((0)))
hour + 1 = 2
abs(hour) = 1
hour = hour
hour IS DISTINCT FROM 1
vendor LIKE 'a%' OR upper(vendor) = 'B'
NOT (vendor LIKE 'a%')
CASE WHEN hour = 1 THEN TRUE ELSE FALSE END OR hour = 0
(hour + 1) * 2 BETWEEN 0 AND 3 AND eps * 2 >= 1
COALESCE(hour, 1) = 1
hour = - - 1
hour = -1
""".strip().split("\n")


@pytest.mark.parametrize("text", TEXTS)
def test_a_point_is_in_the_boxes_if_the_predicate_is_true(
    database: duckdb.DuckDBPyConnection, text: str
) -> None:
    agree(database, text)


def grown(rng: random.Random, depth: int) -> str:
    """A random predicate."""
    if depth == 0 or rng.random() < 0.2:
        column, values = rng.choice(
            [
                ("hour", ["-1", "0", "1", "2", "0.5", "NULL"]),
                ("x", None),
                ("vendor", ["'a'", "'b'", "'é'", "NULL"]),
                ("eps", ["0", "0.5", "0.6", "1", "NULL"]),
                ("consumed_epsilon", ["0", "0.25", "0.3", "1", "NULL"]),
                ("remaining_epsilon", ["0", "0.25", "0.5", "NULL"]),
                ("remaining_rho", ["0", "0.000001", "0.000002"]),
            ]
        )
        if values is None:
            return f"x {rng.choice(['<', '>='])} {rng.choice(['0', '0.5', '1.0', '1.5'])}"
        kind = rng.random()
        if kind < 0.15:
            return f"{column} IS {rng.choice(['', 'NOT '])}NULL"
        if kind < 0.35:
            members = ", ".join(rng.choices(values, k=rng.randint(1, 3)))
            return f"{column} {rng.choice(['', 'NOT '])}IN ({members})"
        if kind < 0.5:
            low, high = rng.choices(values, k=2)
            return f"{column} {rng.choice(['', 'NOT '])}BETWEEN {low} AND {high}"
        return f"{column} {rng.choice(['=', '<>', '<', '<=', '>', '>='])} {rng.choice(values)}"
    kind = rng.random()
    if kind < 0.3:
        return f"NOT ({grown(rng, depth - 1)})"
    sign = rng.choice([" AND ", " OR "])
    return sign.join(f"({grown(rng, depth - 1)})" for _ in range(rng.randint(2, 3)))


def test_random_predicates_agree_with_duckdb(database: duckdb.DuckDBPyConnection) -> None:
    rng = random.Random(17)
    sizes = [agree(database, grown(rng, rng.randint(1, 4))) for _ in range(150)]
    assert len(set(sizes)) > 25  # not all of them trivial


def test_two_valued_logic_would_be_noticed(
    database: duckdb.DuckDBPyConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A negation that takes the missing coordinate with it."""
    monkeypatch.setattr(conditions, "NEGATED", NEGATED | {"=": "<="})
    with pytest.raises(AssertionError):
        agree(database, "NOT hour = 0")


REFUSED = [
    "price = 1",
    "hour",
    "rides.hour = 1",
    "hour LIKE 'a'",
    "hour = 1; hour = 2",
    "-- hour = 1",
    "/* hour = 1 */",
    "(hour = 1",
    "hour = 1)",
    "hour ISNULL",
    "hour = 1 AS x",
    "hour = 1::INT",
    "IN = NULL",
    "price = NULL",
    "price IN (NULL)",
    '"hour".x = 1',
    "hour = ?",
    "hour = 1e70",
    "hour = 1e999999999",
    "hour = '1'",
    "hour =",
    "SELECT 1",
    "x = 0.5",
    "x <= 1.0",
    "x > 0",
    "x IN (0.5)",
    "x BETWEEN 0 AND 1",
    "x < 0.3",
    "day <= '2024-01-02'",
    "day < '2024-01-02T01:00:00Z'",
    "day < '2024-13-02'",
    "day < 5",
    "vendor = 'zzz'",
    "vendor = 5",
    "consumed_epsilon < 'a'",
    "hours = 1",
    "hour = 1 AND\n  price = 2",
    *(text.replace("SECRET", "secret7") for text in (
        "vendor = 'SECRET'", "hour = 'SECRET'", "day < 'SECRET'", 'vendor = "SECRET"',
        "f(SECRET)", "hour = 1 SECRET 'SECRET", "x < 0.7777",
    )),
]  # fmt: skip


def test_what_no_boxes_could_mean_is_refused_with_its_place() -> None:
    """And with no value that was written."""
    calls = {text: partial(selected, text, SPACE) for text in REFUSED}
    calls["a budget that records do not have"] = partial(
        selected, "consumed_rho < 1", Space(SPACE.dimensions[:5])
    )
    text = of_refusals(calls)
    refusals = "".join(line for line in text.splitlines(True) if not line.startswith("=="))
    assert "secret7" not in refusals.replace("f(secret7)", "") and "0.7777" not in refusals
    check(Path(__file__).with_name("refusals_predicates.txt"), text)


@pytest.mark.slow
@pytest.mark.parametrize("seed", few_first(range(8)))
def test_many_random_predicates(database: duckdb.DuckDBPyConnection, seed: int) -> None:
    rng = random.Random(f"many {seed}")
    for _ in range(500):
        agree(database, grown(rng, rng.randint(1, 5)))


WORDS = """hour x vendor eps consumed_epsilon remaining_rho day 0 1 0.5 -1 'a' 'b' NULL TRUE FALSE
AND OR NOT ( ) = <> < <= > >= BETWEEN IN IS , - + * CAST AS INT '2024-01-02' TIMESTAMP DATE
CASE WHEN THEN ELSE END SELECT FROM ' ; $ ? [ ] { } | LIKE @ ^ . x.y EXISTS
ANY ALL DISTINCT LIMIT ORDER BY hour= (hour 1e5 ISNULL NOTNULL COLLATE"""
SOUP = WORDS.split()
SEEDS = few_first(range(9))


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_is_taken_means_in_duckdb_what_it_means_here(
    database: duckdb.DuckDBPyConnection, seed: int
) -> None:
    """Words in any order, and predicates with a word put in, taken away or exchanged."""
    rng, taken = random.Random(f"soup {seed}"), 0
    for number in range(400):
        words = [rng.choice(SOUP) for _ in range(rng.randint(1, 8))]
        if number % 2:
            words = grown(rng, 2).replace("(", " ( ").replace(")", " ) ").split()
            at = rng.randrange(len(words))
            words[at : at + rng.randint(0, 1)] = rng.choices(SOUP, k=rng.randint(0, 1))
        text = " ".join(words)
        try:
            selected(text, SPACE)
        except DpstreamError:
            continue
        if text:
            with contextlib.suppress(duckdb.Error):  # which fails where GoogleSQL has NULL
                agree(database, text)
                taken += 1
    assert taken > 15


def test_an_empty_text_is_true_everywhere() -> None:
    assert (boxes_of(" ", SPACE) == SPACE.everything).all()


def test_kinds_of_consumption_are_known_before_it_is() -> None:
    assert not selected("hour = 1", SPACE).moves
    assert selected("NOT (hour = 1 OR remaining_rho > 1)", SPACE).moves


WIDE = Space(
    (
        Integer(name="a", low=0, high=10_000),
        Integer(name="b", low=0, high=10_000),
        Budget(name="eps", most=1.0),
    )
)


@pytest.mark.parametrize(
    "text",
    [
        "(" * 3_000 + "a = 1" + ")" * 3_000,
        "NOT " * 3_000 + "a = 1",
        "a = " + "-" * 3_000 + "1",
        "a = NOT " * 3_000 + "1",
        " OR ".join(["a = 1"] * 10_000),
        "a IN (" + ", ".join(["1"] * 20_000) + ")",
        "a = 1" + " " * 300_000,
        "CASE WHEN " * 2_000,
        "[" * 3_000,
        " AND ".join(f"({c} IN ({', '.join(map(str, range(0, 2_000, 2)))}))" for c in "ab"),
        " AND ".join(f"({c} IN ({', '.join(map(str, range(0, 400, 2)))}))" for c in "ab"),
    ],
    ids=["parens", "nots", "signs", "equal nots", "ors", "long list", "blanks", "cases", "brackets",
         "million boxes", "40,000 boxes"],
)  # fmt: skip
def test_hostile_predicates_are_refused_soon(text: str, refused: Refused) -> None:
    refused(boxes_of, text, WIDE)


def test_long_chains_are_read() -> None:
    text = " OR ".join(f"a = {i} AND b = {i}" for i in range(0, 150))
    assert len(boxes_of(text, WIDE)) == 150
    assert len(boxes_of(" AND ".join(f"a <> {i}" for i in range(0, 600, 2)), WIDE)) == 300
    assert len(boxes_of(" OR ".join(f"a = {i}" for i in range(150)), WIDE)) == 1


PERSONS = people.PEOPLE.space


class ChargedOnce:
    """An account that was charged once."""

    def spent(self, kind: str) -> Spent:
        return charge(untouched(PERSONS, "epsilon"), people.box(age=(0, 50)), 500_000)


@pytest.mark.parametrize("seed", few_first(range(20)))
def test_common_points_are_those_of_both(seed: int) -> None:
    boxes = np.concatenate([people.box(age=(n, n + 10)) for n in (0, 20, 40)])
    others = people.random_boxes(seed)
    overlap = common(boxes, others)
    assert disjoint(overlap) if len(overlap) else True
    size = sum(points(common(one[None], others)) for one in boxes)
    assert points(overlap) == size == points(common(others, boxes))


def test_boxes_are_cut() -> None:
    both = selected("(age < 10 OR age >= 90) AND smoker = 'yes'", PERSONS)
    larger = selected("smoker = 'yes' AND age IS NOT NULL", PERSONS)
    assert points(both.boxes()) * 10 == points(larger.boxes()) * 2
    assert both.cut_to(people.box(age=(5, 20))).boxes()[:, 0].tolist() == [[5, 10]]


def test_an_identity_is_that_of_every_zlib(monkeypatch: pytest.MonkeyPatch) -> None:
    def identity() -> bytes:
        return selected("age < 10 OR age >= 90", PERSONS).identity

    here, compress = identity(), zlib.compress
    monkeypatch.setattr(zlib, "compress", lambda data, level=-1: compress(data, 0))
    assert identity() == here


def test_identities() -> None:
    one = selected("age >= 10 AND age < 20", PERSONS)
    other = Selection(PERSONS).cut_to(people.box(age=(10, 20)))
    assert one.identity == other.identity != selected("age < 20", PERSONS).identity
    spoken = selected("consumed_epsilon > 0", PERSONS)
    assert spoken.moves and not one.moves
    assert spoken.identity == selected("consumed_epsilon > 0", PERSONS).identity
    assert spoken.identity != spoken.cut_to(people.box(age=(10, 20))).identity
    # Texts that differ within a literal are not the same question.
    spaced = [selected(f"consumed_epsilon > 0 AND smoker = '{code}'", PERSONS).identity
              for code in ("no", "yes")]  # fmt: skip
    assert len({*spaced}) == 2


def test_consumption_is_as_the_account_stands() -> None:
    spoken = selected("consumed_epsilon >= 0.5", PERSONS)
    assert spoken.boxes(ChargedOnce()).tolist() == people.box(age=(0, 50)).tolist()
