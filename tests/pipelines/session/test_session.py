"""Sessions: opened and closed, the nine steps, allotments, names, cells, and one question once."""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.sessions.aggregates import (
    COUNT,
    Aggregate,
    average,
    median,
    quantiles,
    sum_of,
)
from dpstream.pipelines.session.ask import AllotmentQuestion, SessionQuestion, order_of
from dpstream.pipelines.session.config import load_config
from dpstream.pipelines.session.open_table import OpenTable
from dpstream.pipelines.session.records.load import add, init
from dpstream.pipelines.session.session import Session
from dpstream.state.ledger.open import PROJECT_FILE
from tests import accounts
from tests.golden.refusals import Refused
from tests.pipelines.session.tables import RECORDS, SMALL_PROJECT, small_config_at

MANY = RECORDS.splitlines()[0] + "\n" + "".join(
    f"p{n},{n % 4},{n % 10},{1 + n % 2},0.5\n" for n in range(4_000)
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    small_config_at(tmp_path_factory.mktemp("many"), MANY)
    return tmp_path_factory.getbasetemp()


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with Session(small_config_at(tmp_path, MANY), analyst="bob") as session:
        yield session


def test_the_nine_steps(session: Session, refused: Refused) -> None:
    with Session(session.open_table.config, analyst="alice") as before:
        before.where("a < 2 AND epsilon >= 1").count(1)
    chosen = session.where("a < 3", name="young")  # 1, 2
    assert session["young"] is chosen
    most = chosen.max_consumed()  # 3
    assert most == 1.0 and session.where("a = 2").max_consumed() == 0
    wanted = most + 0.5 + 0.25  # 4
    rich = chosen.where(f"epsilon >= {wanted}")  # 5
    first = rich.as_pinq(0.25)  # 6
    count = first.count(0.25)  # 7
    assert count.value is not None and abs(count.value - 1_500 + 500) < 200 and first.left == 0
    analysis = rich.as_pinq(0.5)  # 8
    assert analysis.average("b", 0.25).charged and analysis.median("b", 0.125).charged  # 9
    assert analysis.left == 0.125
    refused(analysis.count, 0.25)
    assert rich.max_consumed() == 1.75
    refused(rich.as_pinq, 0.5)


def test_with_budget_is_the_points_that_have_it_then_and_later(
    session: Session, refused: Refused
) -> None:
    session.where("a = 0 AND epsilon >= 1").count(1)
    rich = session.where("a < 2").with_budget(1)
    boxes = rich.boxes()
    assert boxes[:, [0, 2], 0].tolist() == [[0, 8], [1, 4]] or len(boxes) == 2
    count, analysis = rich.as_pinq(0.25), rich.as_pinq(0.75)
    assert count.selection.identity == analysis.selection.identity == rich.selection.identity
    refused(rich.with_budget, 1.5)
    assert (rich.with_budget(0.25).boxes()[:, 2, 0] >= 5).all()  # those that had more


def test_a_batch_is_one_charge_of_each_point(session: Session, refused: Refused) -> None:
    rich = session.where("epsilon >= 1")
    answer = rich.grid({"a": None, "b": 2}, 0.5, (COUNT, sum_of("b"), average("b")))
    assert answer.table.num_rows == 8 and session.table.max_consumed() == 0.5
    counts = answer.table["count"].to_numpy()
    assert abs(counts.sum() - 4_000) < 400 and (abs(counts - 500) < 150).all()
    [(_, charge)] = session.open_table.account.history()
    assert len(charge.boxes) == 1  # missing values are in no cell of b
    # all or nothing
    refused(lambda: session.where("epsilon >= 0.75").histogram("a", 0.75))
    assert len(session.open_table.account.history()) == 1


def test_cells_lie_within_what_is_asked(session: Session, refused: Refused) -> None:
    part = session.where("a >= 2 AND b >= 5 AND epsilon >= 1")
    assert part.histogram("a", 0.1).table["a"].to_pylist() == [2, 3]
    assert part.histogram("b", 0.1, [5, 6, 10]).table["b_end"].to_pylist() == [6, 10]
    spoken = session.where("a >= 2 AND consumed_rho = 0 AND rho >= 0.25")
    assert spoken.histogram("a", 0.25, kind="rho").table["a"].to_pylist() == [0, 1, 2, 3]
    missing = session.where("b IS NULL AND epsilon >= 1").histogram("b", 0.1)
    assert missing.table["b"].to_pylist() == [None]
    for edges in (0, 11, True):
        refused(part.histogram, "b", 0.1, edges if edges is not True else 99)


def test_cover_charges_more_and_reads_the_same(session: Session) -> None:
    answer = session.where("a = 1 AND epsilon >= 1").count(1, cover="a")
    [(_, charge)] = session.open_table.account.history()
    assert charge.boxes[0, 0].tolist() == [0, 4] and charge.read[0, 0].tolist() == [1, 2]
    assert answer.value is not None and abs(answer.value - 1_000) < 60
    assert session.where("a = 3").max_consumed() == 1


def test_rho_pays_for_gaussian_noise_and_not_for_epsilon(
    session: Session, refused: Refused
) -> None:
    answer = session.where("rho >= 0.5").count(0.5, kind="rho")
    assert answer.sd == pytest.approx(1, abs=0.1)
    assert session.table.max_consumed("rho") == 0.5 and session.table.max_consumed() == 0
    allotment = session.where("epsilon >= 1").as_pinq(1)
    for wrong in ({"kind": "rho"}, {"drop": True}, {"cover": ("a",)}):
        refused(allotment.count, 0.5, **wrong)


def test_an_allotment_lives_on(session: Session, refused: Refused) -> None:
    made = session.where("epsilon >= 1 AND a < 2").as_pinq(0.75)
    first = made.count(0.25)
    with Session(session.open_table.config, analyst="bob") as later:
        same = later.allotment(made.run_id)
        assert same.left == 0.5 and same.count(0.25).receipt == first.receipt
        part = same.where("a = 0")
        assert part.count(0.25).charged and same.left == 0.25
        refused(lambda: same.where("a = 3").count(0.25))
        for run_id in (first.header.run_id, "0" * 32):
            refused(later.allotment, run_id)


def test_a_named_allotment_is_paid_once(session: Session) -> None:
    points = session.where("epsilon >= 1 AND a < 2")
    made = points.as_pinq(0.25, name="half")
    again = session.where("a < 2 AND epsilon >= 1").as_pinq(0.25, name="half")
    assert made.charged and not again.charged and again.run_id == made.run_id
    others = [
        points.as_pinq(0.25, name="other"),
        points.as_pinq(0.125, name="half"),
        points.as_pinq(0.125, name="half", cover=("a",)),
        points.where("a = 0").as_pinq(0.25, name="half"),
    ]
    assert all(other.charged for other in others)
    with Session(session.open_table.config, analyst="eve") as eve:
        assert eve.where("epsilon >= 1 AND a = 1").as_pinq(0.25, name="other").charged
    assert len({made.run_id, *(other.run_id for other in others)}) == 5


def test_names_and_quantiles(session: Session) -> None:
    with pytest.raises(UsageError):
        _ = session["nobody"]
    rich = session.where("epsilon >= 1")
    table = rich.quantiles("b", [0.25, 0.75], 0.5).table
    low, high = (table[name][0].as_py() for name in table.column_names if "_" in name
                 and name.rpartition("_")[2] not in ("sd", "low", "high"))  # fmt: skip
    assert abs(low - 2) <= 1 and abs(high - 7) <= 1
    median_of = rich.ask((median("b"),), 0.25)
    assert median_of.value is not None and abs(median_of.value - 4.5) <= 1
    assert np.isclose(rich.average("b", 0.1).value or 0, 4.5, atol=0.6)


def test_a_scan_is_of_the_newest_version(tmp_path: Path) -> None:
    config = small_config_at(tmp_path)
    (tmp_path / "more.csv").write_text(RECORDS.splitlines()[0] + "\nx,1,1,1.0,0.5\n")
    for held in (False, True):
        with OpenTable(config, "alice", held) as open_table:
            first = open_table.scan()
            assert open_table.scan() is first
            add(config, [tmp_path / "more.csv"])
            assert (
                open_table.scan() is not first
                and open_table.scan().manifest.version > first.manifest.version
            )


def test_records_of_a_table_that_was_made_anew_are_not_read_any_more(tmp_path: Path) -> None:
    config = small_config_at(tmp_path)
    with OpenTable(config, "alice", held=True) as open_table:
        first = open_table.scan()
        rmtree(config.folder)
        init(config)  # the ids' key is another: other parts, of the same number
        assert (
            open_table.scan() is not first
            and open_table.scan().manifest.version == first.manifest.version
        )


def test_a_ledger_that_lacks_the_last_charge_is_refused(tmp_path: Path, refused: Refused) -> None:
    from dpstream.pipelines.session.session import Session

    config = small_config_at(tmp_path)
    with Session(config) as session:
        session.where("epsilon >= 1").count(0.5)
    before = (tmp_path / "ledger.db").read_bytes()
    with Session(config) as session:
        session.where("epsilon >= 1").count(0.25)
    (tmp_path / "ledger.db").write_bytes(before)
    refused(OpenTable, config, "alice")


def test_the_key_is_wiped(tmp_path: Path) -> None:
    with OpenTable(small_config_at(tmp_path), "alice") as open_table:
        ring = open_table.ring
        assert open_table.insecure and ring is open_table.ring
    with pytest.raises(Exception):
        ring.source_fingerprint([b"x"])


def test_names_of_analysts(tmp_path: Path, refused: Refused) -> None:
    config = small_config_at(tmp_path)
    for name in ("", "a\nb", "x" * 201):
        refused(OpenTable, config, name)


def test_another_table_in_the_ledger_is_refused(tmp_path: Path, refused: Refused) -> None:
    from dpstream.pipelines.session.session import Session

    with Session(small_config_at(tmp_path)) as session:
        session.where("epsilon >= 1").count(1)
    text = SMALL_PROJECT.format(key="22" * 32, more="")
    assert "high = 4" in text
    accounts.write(tmp_path / PROJECT_FILE, text.replace("high = 4", "high = 5"))
    refused(lambda: OpenTable(load_config(tmp_path), "alice"))


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
    with Session(small_config_at(tmp_path), analyst="alice") as session:
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
    with Session(small_config_at(tmp_path), analyst="alice") as session:
        part = session.where("epsilon >= 1")
        plain = part.ask([COUNT, median("b")], 0.5)
        named = part.ask([Aggregate("quantiles", "b", (0.5,), label="a"), COUNT], 0.5)
        assert named.receipt == plain.receipt and not named.charged
        assert named.table["a"].to_pylist() == plain.table["median_b"].to_pylist()


def test_what_differs_in_what_is_drawn_stays_two_questions(tmp_path: Path) -> None:
    with Session(small_config_at(tmp_path), analyst="alice") as session:
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
    with Session(small_config_at(tmp_path), analyst="alice") as session:

        def identity(*cover: str) -> list[bytes]:
            request = session.table.request([COUNT], 0.5, cover=cover)
            order = order_of(session.open_table, request)
            selection = request.selection
            return list(AllotmentQuestion(session.open_table, order, selection, "night").identity)

        assert identity("a", "b") == identity("b", "a", "b")
        assert len({tuple(identity(*cover)) for cover in ((), ("a",), ("b",), ("a", "b"))}) == 4
