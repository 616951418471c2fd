"""Statements about points: the nine steps, allotments, groups, joins, and one question once."""

import random
from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import pytest

from dpstream.accounting.sessions.aggregates import COUNT
from dpstream.pipelines.ask.question import Asking
from dpstream.pipelines.session.ask import AllotmentQuestion, SessionQuestion, order_of
from dpstream.pipelines.session.config import load_config
from dpstream.pipelines.session.open_table import OpenTable
from dpstream.pipelines.session.records.load import add, init
from dpstream.pipelines.session.statement import checked_statement, question_of
from dpstream.state.ledger.open import PROJECT_FILE
from tests import accounts
from tests.golden.refusals import Refused
from tests.pipelines.session.statements import Part, Session, call_of
from tests.pipelines.session.tables import (
    RECORDS,
    SMALL_PROJECT,
    config_at,
    rides,
    small_config_at,
    write,
)
from tests.sessions import average, median, quantiles, sum_of

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
    chosen = session.where("a < 3")  # 1, 2
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


def test_a_batch_is_one_charge_of_each_point(session: Session, refused: Refused) -> None:
    rich = session.where("epsilon >= 1")
    answer = rich.ask((COUNT, sum_of("b"), average("b")), 0.5, {"a": None, "b": 2})
    assert answer.table.num_rows == 8 and session.table.max_consumed() == 0.5
    counts = answer.table["count"].to_numpy()
    assert abs(counts.sum() - 4_000) < 400 and (abs(counts - 500) < 150).all()
    [(_, charge)] = session.open_table.account.history()
    assert len(charge.boxes) == 1  # missing values are in no cell of b
    # all or nothing
    refused(lambda: session.where("epsilon >= 0.75").ask((COUNT,), 0.75, {"a": None}))
    assert len(session.open_table.account.history()) == 1


def test_groups_lie_within_what_is_asked(session: Session, refused: Refused) -> None:
    part = session.where("a >= 2 AND b >= 5 AND epsilon >= 1")

    def groups(of: Part, column: str, written: str = "", **how: Any) -> list[Any]:
        text = of.statement((COUNT,), 0.1, {column: None}, **how)
        written = f"{written or column} AS {column}"
        return session.ask(text.replace(f"AS count, {column}", f"AS count, {written}")).column(
            column
        )

    assert groups(part, "a") == [2, 3]
    assert groups(part, "b", "RANGE_BUCKET(b, [5, 6, 10])") == [1, 2]
    assert groups(part, "b", "CASE WHEN b < 7 THEN 'low' ELSE 'high' END") == ["high", "low"]
    assert groups(part, "b", "DIV(b, 4)") == [1, 2]  # computed for each value
    assert groups(part, "b", "RANGE_BUCKET(b, GENERATE_ARRAY(0, 9, 3))") == [2, 3, 4]
    spoken = session.where("a >= 2 AND consumed_rho = 0 AND rho >= 0.25")
    assert groups(spoken, "a", kind="rho") == [0, 1, 2, 3]
    assert groups(session.where("b IS NULL AND epsilon >= 1"), "b") == [None]
    for written in ("MOD(b, 2)", "a + b", "consumed_epsilon", "1 + 1", "RANGE_BUCKET(b, [6, 5])"):
        refused(groups, part, "b", written)


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
    allotment = session.where("epsilon >= 1").as_pinq(1, "night")
    for wrong in ({"kind": "rho"}, {"drop": True}, {"cover": ("a",)}):
        refused(allotment.count, 0.5, **wrong)


def test_an_allotment_lives_on(session: Session, refused: Refused) -> None:
    made = session.where("epsilon >= 1 AND a < 2").as_pinq(0.75, "half")
    first = made.count(0.25)
    with Session(session.open_table.config, analyst="bob") as later:
        same = later.allotment("half")
        assert same.left == 0.5 and same.count(0.25).receipt == first.receipt
        part = same.where("a = 0")
        assert part.count(0.25).charged and same.left == 0.25
        refused(lambda: same.where("a = 3").count(0.25))
        refused(later.allotment, "whole")
    with Session(session.open_table.config, analyst="eve") as eve:  # it is bob's own
        refused(lambda: Part(eve, "", "half").count(0.25))


def test_an_allotment_of_a_name_is_paid_once_until_it_is_given_up(
    session: Session, refused: Refused
) -> None:
    points = session.where("epsilon >= 1 AND a < 2")
    made = points.as_pinq(0.25, "half")
    again = session.where("a < 2 AND epsilon >= 1").as_pinq(0.25, "half")
    assert made.charged and not again.charged and again.run_id == made.run_id
    for other in (
        lambda: points.as_pinq(0.125, "half"),
        lambda: points.as_pinq(0.25, "half", cover=("a",)),
        lambda: points.where("a = 0").as_pinq(0.25, "half"),
    ):
        refused(other)
    assert points.as_pinq(0.25, "other").charged
    made.count(0.125)
    session.ask("DROP ALLOTMENT half ON small")
    assert made.left == 0 and points.max_consumed() == 0.5
    refused(made.count, 0.125, fresh=True)
    refused(session.ask, "DROP ALLOTMENT half ON small")
    anew = points.as_pinq(0.125, "half")
    assert anew.charged and anew.run_id != made.run_id and anew.count(0.125).charged
    with Session(session.open_table.config, analyst="eve") as eve:
        assert eve.where("epsilon >= 1 AND a = 1").as_pinq(0.25, "other").charged


def test_quantiles(session: Session) -> None:
    rich = session.where("epsilon >= 1")
    answer = rich.ask((quantiles("b", [0.25, 0.75]),), 0.5)
    low, high = (answer.column(f"quantiles_b_{q}")[0] for q in ("0.25", "0.75"))
    assert abs(low - 2) <= 1 and abs(high - 7) <= 1
    assert abs(rich.median("b", 0.25).value - 4.5) <= 1
    [several] = session.ask(
        rich.statement((COUNT,), 0.2).replace("COUNT(*)", "APPROX_QUANTILES(b, 2)")
    ).column("count")
    assert several[0] <= several[1] <= several[2] and abs(several[1] - 4.5) <= 2
    assert np.isclose(rich.average("b", 0.05).value or 0, 4.5, atol=0.9)


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
    from tests.pipelines.session.statements import Session

    config = small_config_at(tmp_path)
    with Session(config) as session:
        session.where("epsilon >= 1").count(0.2)
    before = (tmp_path / "ledger.db").read_bytes()
    with Session(config) as session:
        session.where("epsilon >= 1").count(0.3)
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
    from tests.pipelines.session.statements import Session

    with Session(small_config_at(tmp_path)) as session:
        session.where("epsilon >= 1").count(1)
    text = SMALL_PROJECT.format(key="22" * 32, more="")
    assert "high = 4" in text
    accounts.write(tmp_path / PROJECT_FILE, text.replace("high = 4", "high = 5"))
    refused(lambda: OpenTable(load_config(tmp_path), "alice"))


FIGURES = (COUNT, sum_of("b"), average("b"), quantiles("b", (0.25, 0.5, 0.75)))
BY = {"a": None, "b": [0, 5, 10]}
#: Spellings of one condition: one that stays, and one whose points a charge may change.
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


@pytest.mark.parametrize("kind", WHERE)
def test_names_order_and_spelling_cost_nothing(kind: str, tmp_path: Path) -> None:
    with Session(small_config_at(tmp_path), analyst="alice") as session:
        first = session.where(WHERE[kind][0]).ask(FIGURES, 0.5, BY)
        outputs = [name for figure in FIGURES for name in figure.outputs]
        released = {(row["a"], row["b"]): row for row in first.table.to_pylist()}
        assert first.charged and len({row["count"] for row in released.values()}) > 2
        for seed in range(20):
            draw = random.Random(seed)
            figures = draw.sample([*FIGURES, draw.choice(FIGURES[:3])], len(FIGURES) + 1)
            calls = [call for figure in figures for call in call_of(figure).split(", PERC")]
            names = {f"f{n}": call.split(" AS ")[1].strip("`") for n, call in enumerate(calls)}
            by = {name: BY[name] for name in draw.sample(list(BY), 2)}
            text = session.where(draw.choice(WHERE[kind])).statement(figures, "0.50", by)
            for n, call in enumerate(calls):  # other labels
                column = call.split(" AS ")[1]
                text = text.replace(f" AS {column}", f" AS f{n}", 1)
            answer = session.ask(text)
            assert not answer.charged and answer.receipt == first.receipt
            for row in answer.table.to_pylist():
                drawn = released[row["a"], row["b"]]
                assert all(row[name] == drawn[source] for name, source in names.items())
            for name, source in names.items():
                ends = [sorted(map(repr, one.column(column, "low")))
                        for one, column in ((answer, name), (first, source))]  # fmt: skip
                assert ends[0] == ends[1]
        assert set(names.values()) == set(outputs)
        assert len(session.open_table.account.history()) == 1


def test_what_differs_in_what_is_drawn_stays_two_questions(tmp_path: Path) -> None:
    with Session(small_config_at(tmp_path), analyst="alice") as session:
        table, b = session.table, "b"
        requests = [
            points.request(figures, amount, by, kind)
            for points in (table, table.where("a < 2"), table.where("remaining_epsilon >= 0.5"))
            for figures in (
                [COUNT], [sum_of(b)], [sum_of("a")], [average(b)], [COUNT, sum_of(b)],
                [median(b)], [quantiles(b, (0.25,))], [quantiles(b, (0.25, 0.5))],
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
            return list(AllotmentQuestion(session.open_table, order, selection, "n", 0).identity)

        assert identity("a", "b") == identity("b", "a", "b")
        assert len({tuple(identity(*cover)) for cover in ((), ("a",), ("b",), ("a", "b"))}) == 4


AIRPORTS = """city,name,state
a,Alba,x
b,Berg,y
c,Cala,x
"""


def test_public_tables_are_joined_by_the_value_of_a_dimension(
    tmp_path: Path, refused: Refused
) -> None:
    config = config_at(tmp_path)
    write(tmp_path / "rides-0.parquet", rides(3_000))
    init(config)
    (tmp_path / "cities.csv").write_text(AIRPORTS)
    (tmp_path / "twice.csv").write_text(AIRPORTS + "a,Alda,x\n")
    with (tmp_path / PROJECT_FILE).open("a") as project:
        for name in ("cities", "twice"):
            columns = '{ city = "STRING", name = "STRING", state = "STRING" }'
            rows = f'[table.{name}]\npath = "{name}.csv"\npublic = true\n'
            project.write(f"{rows}columns = {columns}\n")
    accounts.write(tmp_path / PROJECT_FILE, (tmp_path / PROJECT_FILE).read_text())
    with Session(config) as session:
        head = "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 0.001)"
        rich = "r.epsilon >= 1"

        def points(text: str) -> list[Any]:
            statement = checked_statement(f"{head} COUNT(*) AS n FROM {text}", session.tables)
            question = question_of(statement, session.open_table, session.tables, Asking())
            return sorted(question.request.selection.boxes(session.open_table.account).tolist())

        plain = points(f"rides AS r WHERE {rich} AND vendor IN ('a', 'c')")
        for text in (
            f"rides AS r JOIN cities AS c ON c.city = r.vendor WHERE {rich} AND c.state = 'x'",
            f"rides AS r WHERE {rich} AND vendor IN (SELECT city FROM cities WHERE state = 'x')",
            f"rides AS r LEFT JOIN cities AS c ON c.city = r.vendor WHERE {rich} AND c.state = 'x'",
            f"rides AS r WHERE {rich} AND EXISTS (SELECT 1 FROM cities AS c WHERE c.city = r.vendor"
            " AND c.state = 'x')",
            f"rides AS r WHERE {rich} AND (vendor LIKE 'a%' OR UPPER(vendor) = 'C')",
        ):
            assert points(text) == plain, text
        more = points(f"rides AS r WHERE {rich} AND vendor <> (SELECT MIN(city) FROM cities)")
        assert more == points(f"rides AS r WHERE {rich} AND vendor IN ('b', 'c')")
        answer = session.ask(
            f"{head} c.name, COUNT(*) AS n FROM rides AS r JOIN cities AS c ON c.city = r.vendor"
            f" WHERE {rich} GROUP BY c.name HAVING n > -1e9 ORDER BY c.name DESC"
        )
        assert answer.column("name") == ["Cala", "Berg", "Alba"]
        again = session.ask(
            "SELECT state, SUM(n) AS n FROM ("
            f"{head} vendor, COUNT(*) AS n FROM rides AS r WHERE {rich} AND vendor IS NOT NULL"
            " GROUP BY vendor) JOIN cities ON city = vendor GROUP BY state ORDER BY state"
        )
        assert not again.charged and again.column("state") == ["x", "y"]
        for wrong in (
            "rides AS r JOIN twice AS c ON c.city = r.vendor",
            "rides AS r LEFT JOIN twice AS c ON c.city = r.vendor",
            "rides AS r CROSS JOIN cities AS c",
            "rides AS r, cities AS c WHERE c.city = r.vendor",
            "rides AS r JOIN cities AS c ON c.city > r.vendor",
            "rides AS r JOIN rides AS s ON r.hour = s.hour",
            "rides AS r JOIN cities AS c ON c.city = r.vendor AND r.hour = 1",
            "(SELECT * FROM rides) AS r",
            "cities AS c JOIN rides AS r ON c.city = r.vendor",
            "rides AS r WHERE r.x = (SELECT COUNT(*) FROM cities)",
        ):
            refused(points, wrong)
        assert len(session.open_table.account.history()) == 1
