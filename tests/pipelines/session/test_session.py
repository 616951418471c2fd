"""Sessions: the nine steps, allotments, names, cells, batches, budgets of both kinds."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.sessions.aggregates import COUNT, average, median, sum_of
from dpstream.pipelines.session.session import Session
from dpstream.state.ledger.orders import SessionRefusedError
from tests.pipelines.session.small import RECORDS, config_at

MANY = RECORDS.splitlines()[0] + "\n" + "".join(
    f"p{n},{n % 4},{n % 10},{1 + n % 2},0.5\n" for n in range(4_000)
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config_at(tmp_path_factory.mktemp("many"), MANY)
    return tmp_path_factory.getbasetemp()


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with Session(config_at(tmp_path, MANY), analyst="bob") as session:
        yield session


def test_the_nine_steps(session: Session) -> None:
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
    with pytest.raises(PolicyError, match=r"has 0.125 left"):
        analysis.count(0.25)
    assert rich.max_consumed() == 1.75
    with pytest.raises(SessionRefusedError):
        rich.as_pinq(0.5)


def test_with_budget_is_the_points_that_have_it_then_and_later(session: Session) -> None:
    session.where("a = 0 AND epsilon >= 1").count(1)
    rich = session.where("a < 2").with_budget(1)
    boxes = rich.boxes()
    assert boxes[:, [0, 2], 0].tolist() == [[0, 8], [1, 4]] or len(boxes) == 2
    count, analysis = rich.as_pinq(0.25), rich.as_pinq(0.75)
    assert count.selection.identity == analysis.selection.identity == rich.selection.identity
    with pytest.raises(PolicyError, match="more than any point"):
        rich.with_budget(1.5)
    assert (rich.with_budget(0.25).boxes()[:, 2, 0] >= 5).all()  # those that had more


def test_a_batch_is_one_charge_of_each_point(session: Session) -> None:
    rich = session.where("epsilon >= 1")
    answer = rich.grid({"a": None, "b": 2}, 0.5, (COUNT, sum_of("b"), average("b")))
    assert answer.table.num_rows == 8 and session.table.max_consumed() == 0.5
    counts = answer.table["count"].to_numpy()
    assert abs(counts.sum() - 4_000) < 400 and (abs(counts - 500) < 150).all()
    [(_, charge)] = session.open_table.account.history()
    assert len(charge.boxes) == 1  # missing values are in no cell of b
    with pytest.raises(SessionRefusedError):  # all or nothing
        session.where("epsilon >= 0.75").histogram("a", 0.75)
    assert len(session.open_table.account.history()) == 1


def test_cells_lie_within_what_is_asked(session: Session) -> None:
    part = session.where("a >= 2 AND b >= 5 AND epsilon >= 1")
    assert part.histogram("a", 0.1).table["a"].to_pylist() == [2, 3]
    assert part.histogram("b", 0.1, [5, 6, 10]).table["b_end"].to_pylist() == [6, 10]
    spoken = session.where("a >= 2 AND consumed_rho = 0 AND rho >= 0.25")
    assert spoken.histogram("a", 0.25, kind="rho").table["a"].to_pylist() == [0, 1, 2, 3]
    missing = session.where("b IS NULL AND epsilon >= 1").histogram("b", 0.1)
    assert missing.table["b"].to_pylist() == [None]
    for edges in (0, 11, True):
        with pytest.raises(UsageError, match=r"cells.b|--by|cut"):
            part.histogram("b", 0.1, edges if edges is not True else 99)


def test_cover_charges_more_and_reads_the_same(session: Session) -> None:
    answer = session.where("a = 1 AND epsilon >= 1").count(1, cover="a")
    [(_, charge)] = session.open_table.account.history()
    assert charge.boxes[0, 0].tolist() == [0, 4] and charge.read[0, 0].tolist() == [1, 2]
    assert answer.value is not None and abs(answer.value - 1_000) < 60
    assert session.where("a = 3").max_consumed() == 1


def test_rho_pays_for_gaussian_noise_and_not_for_epsilon(session: Session) -> None:
    answer = session.where("rho >= 0.5").count(0.5, kind="rho")
    assert answer.sd == pytest.approx(1, abs=0.1)
    assert session.table.max_consumed("rho") == 0.5 and session.table.max_consumed() == 0
    allotment = session.where("epsilon >= 1").as_pinq(1)
    for wrong in ({"kind": "rho"}, {"drop": True}, {"cover": ("a",)}):
        with pytest.raises(UsageError, match="allotment"):
            allotment.count(0.5, **wrong)


def test_an_allotment_lives_on(session: Session) -> None:
    made = session.where("epsilon >= 1 AND a < 2").as_pinq(0.75)
    first = made.count(0.25)
    with Session(session.open_table.config, analyst="bob") as later:
        same = later.allotment(made.run_id)
        assert same.left == 0.5 and same.count(0.25).receipt == first.receipt
        part = same.where("a = 0")
        assert part.count(0.25).charged and same.left == 0.25
        with pytest.raises(UsageError, match="true nowhere"):
            same.where("a = 3").count(0.25)
        for run_id in (first.header.run_id, "0" * 32):
            with pytest.raises(PolicyError, match=f"'{run_id}' is in the account"):
                later.allotment(run_id)


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
    with pytest.raises(UsageError, match="no subspace 'nobody'"):
        _ = session["nobody"]
    rich = session.where("epsilon >= 1")
    table = rich.quantiles("b", [0.25, 0.75], 0.5).table
    low, high = (table[name][0].as_py() for name in table.column_names if "_" in name
                 and name.rpartition("_")[2] not in ("sd", "low", "high"))  # fmt: skip
    assert abs(low - 2) <= 1 and abs(high - 7) <= 1
    median_of = rich.ask((median("b"),), 0.25)
    assert median_of.value is not None and abs(median_of.value - 4.5) <= 1
    assert np.isclose(rich.average("b", 0.1).value or 0, 4.5, atol=0.6)
