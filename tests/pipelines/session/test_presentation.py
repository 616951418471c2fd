"""One question of a session, however it is written and shown, is charged once and drawn once."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from dpstream.accounting.sessions.aggregates import (
    COUNT,
    Aggregate,
    average,
    median,
    quantiles,
    sum_of,
)
from dpstream.pipelines.session.ask import AllotmentQuestion, SessionQuestion, order_of
from dpstream.pipelines.session.session import Session
from tests.pipelines.session.small import config_at

FIGURES = (COUNT, sum_of("b"), average("b"), quantiles("b", (0.25, 0.5, 0.75)))
BY = {"a": None, "b": [0, 5, 10]}
#: Spellings of one predicate: one that stays, and one whose points a charge may change.
WHERE = {
    "still": (
        "epsilon >= 1 AND (a < 2 OR b < 3)",
        "(b<3 or a<2)  and epsilon>=1.0",
        "1 <= epsilon AND ((a < 2) OR 3 > b)",
    ),
    "moving": (
        "remaining_epsilon >= 0.5 AND a < 3",
        "a<3  and  remaining_epsilon >= 0.50",
        "(3 > a) AND NOT remaining_epsilon < 0.5",
    ),
}


def _written(draw: random.Random) -> tuple[list[Aggregate], dict[str, tuple[str, Any]]]:
    """Figures in an order, with labels, and by output which figure it is."""
    labels = (f"f{n}" for n in itertools.count())
    names: dict[str, tuple[str, Any]] = {}
    out = list[Aggregate]()
    for figure in draw.sample([*FIGURES, draw.choice(FIGURES)], len(FIGURES) + 1):
        at = tuple(draw.sample(figure.at, len(figure.at)))
        one = Aggregate(figure.what, figure.column, at, label=next(labels))
        names |= {
            name: (figure.what, q) for name, q in zip(one.outputs, at or (None,), strict=True)
        }
        out.append(one)
    return out, names


@pytest.mark.parametrize("kind", WHERE)
def test_names_order_and_spelling_cost_nothing(kind: str, tmp_path: Path) -> None:
    with Session(config_at(tmp_path), analyst="alice") as session:
        first = session.where(WHERE[kind][0]).ask(FIGURES, 0.5, BY)
        released = {(row["a"], row["b"]): row for row in first.table.to_pylist()}
        assert first.charged and len({row["count"] for row in released.values()}) > 2
        for seed in range(40):
            draw = random.Random(seed)
            figures, names = _written(draw)
            by = {name: BY[name] for name in draw.sample(list(BY), 2)}
            answer = session.where(draw.choice(WHERE[kind])).ask(figures, "0.50", by)
            assert not answer.charged and answer.receipt == first.receipt
            assert answer.table.column_names[0] == next(iter(by))
            rows = answer.table.to_pylist()
            assert [row["b"] for row in rows] == sorted(row["b"] for row in rows) or "a" in by
            for row in rows:
                drawn = released[row["a"], row["b"]]
                for name, (what, q) in names.items():
                    source = {"quantiles": f"quantiles_b_{q}", "count": "count"}.get(
                        what, f"{what}_b"
                    )
                    for part in ("", "_sd", "_low", "_high"):
                        assert row[name + part] == drawn[source + part], (seed, name)
        assert len(session.open_table.account.history()) == 1


def test_a_label_does_not_take_a_dimensions_place(tmp_path: Path) -> None:
    with Session(config_at(tmp_path), analyst="alice") as session:
        part = session.where("epsilon >= 1")
        plain = part.ask([COUNT, median("b")], 0.5)
        named = part.ask([Aggregate("quantiles", "b", (0.5,), label="a"), COUNT], 0.5)
        assert named.receipt == plain.receipt and not named.charged
        assert named.table["a"].to_pylist() == plain.table["median_b"].to_pylist()


def test_what_differs_in_what_is_drawn_stays_two_questions(tmp_path: Path) -> None:
    with Session(config_at(tmp_path), analyst="alice") as session:
        table, b = session.table, "b"
        requests = [
            points.request(figures, amount, by, kind)
            for points in (table, table.where("a < 2"), table.where("remaining_epsilon >= 0.5"))
            for figures in (
                [COUNT], [sum_of(b)], [sum_of("a")], [average(b)], [COUNT, sum_of(b)],
                [median(b)], [quantiles(b, (0.25,))], [quantiles(b, (0.25, 0.5))],
                [median(b), quantiles(b, (0.25,))],
                [COUNT, Aggregate("sum", b, share=2.0)],
            )
            for amount in (0.25, 0.5)
            for kind in ("epsilon", "rho")
            for by in (None, {"a": None}, {"a": [0, 2, 4]}, {"b": [0, 5, 10]}, BY)
        ]  # fmt: skip
        identities = {tuple(SessionQuestion(session.open_table, r).identity) for r in requests}
        assert len(identities) == len(requests) > 100


def test_an_allotment_covers_a_set_of_dimensions(tmp_path: Path) -> None:
    with Session(config_at(tmp_path), analyst="alice") as session:

        def identity(*cover: str) -> list[bytes]:
            request = session.table.request([COUNT], 0.5, cover=cover)
            order = order_of(session.open_table, request)
            selection = request.selection
            return list(AllotmentQuestion(session.open_table, order, selection, "night").identity)

        assert identity("a", "b") == identity("b", "a", "b")
        assert len({tuple(identity(*cover)) for cover in ((), ("a",), ("b",), ("a", "b"))}) == 4
