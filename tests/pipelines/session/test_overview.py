"""What is shown before and after asking: plans, the account, and boxes in words."""

import contextlib
import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.image as mpimg
import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.errors import RunError
from dpstream.accounting.regions.space import Budget, Category, Integer, Space
from dpstream.accounting.regions.spent import Spent, close, untouched
from dpstream.accounting.sessions.aggregates import (
    COUNT,
    Cells,
    Question,
    along,
    average,
    median,
    quantiles,
    sum_of,
)
from dpstream.pipelines.render.question_plan import session_text
from dpstream.pipelines.session import page, sentences
from dpstream.pipelines.session import plan as planning
from dpstream.pipelines.session import union as unions
from dpstream.pipelines.session.ask import close_before
from dpstream.pipelines.session.overview import (
    PIXELS,
    heat_map,
    kinds,
    over_time,
    overview,
    transcript,
)
from dpstream.pipelines.session.page import Chosen
from dpstream.pipelines.session.receipt import Answer, Header, answer_rows, answer_text
from dpstream.pipelines.session.records.load import add
from dpstream.pipelines.session.selection import predicate_of
from dpstream.pipelines.session.sentences import (
    figure_of,
    ranges_of,
    value_of,
)
from dpstream.pipelines.session.session import Session
from dpstream.pipelines.session.union import Union
from dpstream.state.ledger.events import RegionCharge
from tests.accounting.regions.spaces import ask
from tests.browser import DESKTOP, PHONE, browser
from tests.golden.pinned import check, of_refusals
from tests.golden.refusals import Refused
from tests.pipelines.session.tables import (
    DAY,
    PEOPLE,
    PEOPLE_START,
    RECORDS,
    box,
    random_boxes,
    small_config_at,
)


def plan_of(
    session: Session, where: str, amount: float, *figures: Any, union: bool = False, **how: Any
) -> Any:
    request = session.where(where).request(figures or (COUNT,), amount, **how)
    return planning.plan(session.open_table, request, union)


def fields_of(session: Session, plan: Any) -> dict[str, Any]:
    """The plan as values for JSON."""
    return planning.as_builtins(session.open_table.space, plan)


def lines_of(session: Session, plan: Any) -> list[str]:
    """The plan as text."""
    return session_text(fields_of(session, plan)).splitlines()


def test_a_plan_spends_and_reads_nothing(session: Session) -> None:
    def never() -> None:
        raise AssertionError("a record was read")

    session.open_table.scan = never  # type: ignore[assignment,method-assign]
    plan = plan_of(session, "epsilon >= 1", 0.5, COUNT, average("b"), median("b"))
    assert plan.decision.accepted and len(plan.errors) == 3 and plan.answered == ""
    assert (plan.regions, plan.after) == (1, 2) and session.open_table.account.history() == []
    fields = fields_of(session, plan)
    assert fields["errors"][0]["within"] > fields["errors"][0]["sd"] > 0
    text = "\n".join(lines_of(session, plan))
    assert "records of rank" in text and "/ records" in text and "epsilon 0.5" in text


def test_the_error_is_that_of_the_answer(session: Session) -> None:
    plan = plan_of(session, "epsilon >= 1", 0.5)
    answer = session.where("epsilon >= 1").count(0.5)
    assert answer.sd == pytest.approx(plan.errors[0].sd[0])


def test_a_refusal_is_foreseen(session: Session) -> None:
    plan = plan_of(session, "a = 0", 0.5)
    assert not plan.decision.accepted and plan.errors == []
    assert plan.enough == "epsilon >= 0.5" and any(
        plan.enough in line for line in lines_of(session, plan)
    )
    assert plan_of(session, f"a = 0 AND {plan.enough}", 0.5).decision.accepted
    dropped = plan_of(session, "a = 0", 0.5, drop=True)
    assert dropped.decision.accepted and any("Dropped" in s for s in lines_of(session, dropped))


def test_what_is_free_is_said(session: Session) -> None:
    rich = session.where("epsilon >= 1")
    rich.histogram("a", 0.5)
    plan = plan_of(session, "epsilon >= 1", 0.25, union=True)
    assert plan.union is not None and plan.union.parts == 4 and not plan.answered
    rich.count(0.25)
    assert plan_of(session, "epsilon >= 1", 0.25).answered
    text = "\n".join(lines_of(session, plan_of(session, "epsilon >= 1", 0.25, union=True)))
    assert "asking it again is free" in text and "--union" in text


def test_a_plan_decodes_no_answer_unless_a_union_is_asked(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.where("epsilon >= 1").histogram("a", 0.5)
    decoded: list[object] = []
    monkeypatch.setattr(unions, "decoded", lambda *given: decoded.append(given))
    plan = plan_of(session, "epsilon >= 1", 0.25)
    assert plan.decision.accepted and plan.union is None and not plan.searched and not decoded
    assert fields_of(session, plan)["union_searched"] is False
    with pytest.raises(AttributeError):  # the check can fail: this one decodes
        plan_of(session, "epsilon >= 1", 0.25, union=True)
    assert decoded


def test_a_search_without_a_result_says_so(session: Session) -> None:
    session.where("epsilon >= 1 AND a < 2").count(0.25)
    plan = plan_of(session, "epsilon >= 1", 0.25, union=True)
    assert plan.searched and plan.union is None
    assert len(lines_of(session, plan)) == 1 + len(
        lines_of(session, plan_of(session, "epsilon >= 1", 0.25))
    )


def test_what_cover_wastes_is_said(session: Session) -> None:
    plan = plan_of(session, "a = 0 AND epsilon >= 1", 0.5, cover=("a",))
    assert plan.waste == pytest.approx(4)
    assert any("4 times what is asked" in line for line in lines_of(session, plan))


QUOTA = "\n[table.small.quota]\nepsilon = 1.5\n"


def test_what_is_left(tmp_path: Path) -> None:
    with Session(small_config_at(tmp_path, more=QUOTA), analyst="alice") as session:
        session.where("a < 2 AND epsilon >= 1").count(0.5)
        session.where("a = 1 AND epsilon >= 1").count(0.25)
        summary = overview(session.open_table, session.table.selection)
        assert summary["entries"] == 2 and set(summary["budgets"]) == {"epsilon", "rho"}
        part = summary["budgets"]["epsilon"]
        assert (part["most_spent"], part["least_spent"], part["most_initial"]) == (0.75, 0, 2)
        assert part["rows"][0] == {"where": "a = 1 AND epsilon >= 1", "spent": 0.75}
        assert summary["quotas"] == {
            "epsilon": {"analyst": "alice", "quota": 1.5, "most_charged": 0.75}
        }
        part_summary = overview(
            session.open_table, session.where("a = 0 AND epsilon >= 1").selection
        )
        assert part_summary["budgets"]["epsilon"]["least_spent"] == 0.5
        close_before(session.open_table, "b", 3)
        part = overview(session.open_table, session.table.selection)["budgets"]["epsilon"]
        assert part["most_spent"] == 0.75 and part["closed_boxes"] == 1
        assert part["rows"][0] == {"where": "b < 3", "spent": None}
        closed = overview(session.open_table, session.where("b = 0").selection)["budgets"][
            "epsilon"
        ]
        assert closed["most_spent"] == 0 and closed["closed_boxes"] == 1


SPACE = PEOPLE.space


def charged() -> tuple[Spent, list[tuple[str, RegionCharge]]]:
    spent, history = untouched(SPACE, "epsilon"), []
    for number, (boxes, amount) in enumerate((
        (box(age=(20, 60)), 300_000),
        (box(age=(30, 50), weight=(50, 100)), 500_000),
        (box(weight=(80, 120)), 1_200_000),
        (box(age=(10, 20), arrived=(PEOPLE_START, None)), 2_000_000),
    )):  # fmt: skip
        decision, spent = ask(spent, boxes, amount, drop=True)
        entry = RegionCharge.of(
            "epsilon", amount, decision.charged, decision.charged, "a", PEOPLE_START + number
        )
        history.append((f"{number:032x}", entry))
    return spent, history


def most(spent: Spent, frame: np.ndarray) -> int:
    """The most that a point of a box has spent, region by region."""
    return max(
        int(amount) for one, amount in zip(spent.boxes, spent.amounts, strict=True)
        if ((one[:, 0] < frame[:, 1]) & (one[:, 1] > frame[:, 0])).all()
    )  # fmt: skip


@pytest.mark.parametrize("initial", [None, 2_000_000, 300_000])
def test_a_map_is_the_least_over_the_others(initial: int | None) -> None:
    spent, _ = charged()
    heat = heat_map(spent, "age", "weight", initial)
    at = 4_000_000 if initial is None else initial
    assert heat.left.shape == (PIXELS, 101) and heat.initial == at / 1e6
    rng = np.random.default_rng(3)
    for _ in range(200):
        row, column = rng.integers(heat.left.shape[0]), rng.integers(heat.left.shape[1])
        frame = SPACE.everything[0].copy()
        frame[0], frame[2] = heat.columns[[column, column + 1]], heat.rows[[row, row + 1]]
        frame[4] = at, at + 1
        assert heat.left[row, column] == max(at - most(spent, frame), 0) / 1e6
    assert len(np.unique(heat.left)) > 1


def test_the_initial_budget_as_a_side() -> None:
    spent, _ = charged()
    heat = heat_map(spent, "age", "epsilon")
    assert heat.initial is None and (heat.left >= 0).all()
    frame = SPACE.everything[0].copy()
    frame[0], frame[4] = (15, 16), heat.rows[[-2, -1]]
    assert heat.left[-1, 15] == (heat.rows[-2] - most(spent, frame)) / 1e6
    turned = heat_map(spent, "epsilon", "age")
    assert np.array_equal(turned.left.T, heat.left)


def test_a_part_of_the_space() -> None:
    spent, _ = charged()
    heat = heat_map(spent, "age", "smoker", within=box(age=(70, 90), weight=(0, 50))[0])
    assert heat.left.shape == (2, 20) and (heat.left == 4).all()


def test_what_is_refused(session: Session) -> None:
    spent, _ = charged()
    figures = ("", "count()", "count(x)", "sum", "sum()", "sum(a, b)", "max(a)", "quantiles(a)",
               "quantiles(a, b)", "sum(a", "avg(fare)", "mean(fare)", "averge(fare)")  # fmt: skip
    cells = (["age=a"], ["age=x"], ["age", "age=3"], ["nothing"], ["age=-1"])
    nobody = session.where("a < 0").selection
    calls: dict[str, Callable[[], object]] = {
        **{f"figure {text!r}": partial(figure_of, text) for text in figures},
        **{f"cells {texts}": partial(ranges_of, SPACE, texts) for texts in cells},
        "one dimension": lambda: heat_map(spent, "age", "age"),
        "no dimension": lambda: heat_map(spent, "age", "nothing"),
        "no initial budget": lambda: heat_map(spent, "age", "weight", 5_000_000),
        "nobody": lambda: overview(session.open_table, nobody),
    }
    check(Path(__file__).with_name("refusals_overview.txt"), of_refusals(calls))


def test_spending_over_time() -> None:
    spent, history = charged()
    moments = over_time(PEOPLE, "epsilon", history)
    assert [moment.at for moment in moments] == [PEOPLE_START + n for n in range(4)]
    assert [moment.most for moment in moments] == [0.3, 0.8, 2.0, 3.2]
    assert moments[-1].regions == len(spent.amounts)
    means = [moment.mean for moment in moments]
    assert means == sorted(means) and 0 < means[0] < moments[0].most
    assert over_time(PEOPLE, "rho", history) == [] and kinds(SPACE) == ["epsilon", "rho"]


def test_closed_points_are_left_out() -> None:
    spent, _ = charged()
    shut = close(spent, box(arrived=(PEOPLE_START, PEOPLE_START + 5 * DAY)))
    for by in (("age", "weight"), ("age", "epsilon")):
        assert np.array_equal(heat_map(shut, *by).left, heat_map(spent, *by).left)
    budget_left = heat_map(shut, "arrived", "age").left
    assert np.isnan(budget_left[:, :5]).all() and not np.isnan(budget_left[:, 5:]).any()


def test_every_entry_is_what_it_is(tmp_path: Path) -> None:
    with Session(small_config_at(tmp_path), analyst="alice") as session:
        session.where("a = 0 AND epsilon >= 1").histogram("b", 0.5, [0, 5, 10])
        session.open_table.analyst = "bob"
        allotment = session.where("a = 1 AND rho >= 0.5").as_pinq(0.5, "rho")
        allotment.where("b < 5").sum("b", 0.25)
        close_before(session.open_table, "b", 1)

        def gone() -> None:
            raise RunError("table", "is gone", "bring it back")

        session.open_table.scan = gone  # type: ignore[assignment,method-assign]
        with contextlib.suppress(RunError):
            session.where("a = 2 AND b >= 1 AND epsilon >= 1").count(0.25)
        lines = transcript(session.open_table)
    assert [(line.what, line.analyst, line.kind, line.amount) for line in lines] == [
        ("question", "alice", "epsilon", 500_000),
        ("allotment", "bob", "rho", 500_000),
        ("draw", "bob", "rho", 250_000),
        ("closed", "bob", "", 0),
        ("cut off", "bob", "epsilon", 250_000),
    ]
    assert lines[0].question == "count by b (2)" and lines[2].question == "sum(b)"
    assert lines[0].where == ["a = 0 AND b IS NOT NULL AND epsilon >= 1"]
    assert lines[2].where == ["a = 1 AND b < 5 AND rho >= 0.5"] and lines[3].where == ["b = 0"]
    assert lines[2].allotment == lines[1].run_id and lines[0].allotment == ""
    assert bool(lines[0].answered) and not lines[1].answered and not lines[4].answered
    assert lines[0].as_dict()["amount"] == 0.5


@pytest.mark.parametrize("seed", range(60))
def test_a_box_in_words_is_the_box(seed: int) -> None:
    one = random_boxes(seed)
    text = sentences.box(SPACE, one[0])
    assert (
        predicate_of("" if text == sentences.EVERYTHING else text, SPACE).boxes().tolist()
        == one.tolist()
    )


def test_some_boxes_as_people_read_them() -> None:
    assert sentences.box(SPACE, SPACE.everything[0]) == "everything"
    assert sentences.box(SPACE, box(age=(10, 20), weight=(None, 80.5))[0]) == (
        "age >= 10 AND age < 20 AND weight < 80.5"
    )
    assert sentences.box(SPACE, box(arrived=(PEOPLE_START + DAY, None))[0]) == (
        "arrived >= '2013-01-02T00:00:00Z'"
    )
    missing = SPACE.everything[0].copy()
    missing[0] = 100, 101
    missing[1] = 1, 2
    assert sentences.box(SPACE, missing) == "age IS NULL AND smoker = 'yes'"
    many = np.concatenate([box(age=(n, n + 1)) for n in range(10)])
    assert sentences.boxes(SPACE, many)[-2:] == ["age = 7", "... and 2 more"]


@pytest.mark.parametrize(
    ("number", "text"),
    [(Fraction(1, 10), "0.1"), (Fraction(-5, 4), "-1.25"), (Fraction(7), "7"),
     (Fraction(3, 1000), "0.003"), (Fraction(12345678, 10**6), "12.345678")],
)  # fmt: skip
def test_decimals_are_exact(number: Fraction, text: str) -> None:
    assert sentences.decimal(number) == text


def test_amounts_and_questions() -> None:
    assert (sentences.amount(1), sentences.amount(2_500_000)) == ("0.000001", "2.5")
    question = Question(kind="epsilon", amount=1, aggregates=(COUNT, sum_of("age"), median("age")),
                        cells=Cells((along(SPACE, "smoker"),)))  # fmt: skip
    assert sentences.question(question) == "count, sum(age), quantiles(age, 0.5) by smoker (2)"


def test_figures() -> None:
    assert figure_of(" count ") == COUNT and figure_of("average( fare )") == average("fare")
    assert figure_of("median(fare)") == median("fare")
    assert figure_of("quantiles(fare, 0.25, .75)") == quantiles("fare", [0.25, 0.75])


def test_ranges() -> None:
    space = PEOPLE.space
    assert ranges_of(space, ["smoker", "age=4", "weight=0, 50,100"]) == {
        "smoker": None, "age": 4, "weight": ["0", "50", "100"],
    }  # fmt: skip
    assert value_of(space, "arrived", "2013-01-01T00:00:00Z") == PEOPLE_START


def test_answers_as_tables() -> None:
    table = pa.table({
        "smoker": ["no", None], "count": [3.0, -1234.5], "count_sd": [1.0, 1.0],
        "count_low": [1.0, -1240.0], "count_high": [5.0, None],
    })  # fmt: skip
    question = Question(kind="epsilon", amount=1)
    header = Header(run_id="ab", plan_hash="12", table="cd", where="", question=question)
    answer = Answer(header, table, b"", "", True, False)
    assert answer_text(answer).splitlines() == [
        "smoker     count", "------  --------", "no          3 ±2", "NULL    -1,234.5",
    ]  # fmt: skip
    assert answer_rows(answer)[1] == {  # as of SQL
        "values": {"smoker": None, "count": -1234.5},
        "intervals": {"count": {"sd": 1.0, "noise_low": -1240.0, "noise_high": None}},
    }


def test_unions_in_words() -> None:
    union = Union(10.0, 1.0, 8.0, 12.0, 3, ("a",), "2024", "2025")
    assert union.text == "10 ±2, of 3 parts answered 2024 to 2025"


def test_a_column_of_steps_is_told_with_its_figures() -> None:
    aggregates = (COUNT, average("weight"), median("weight"), average("age"))
    question = Question(kind="epsilon", amount=1, aggregates=aggregates)
    [line] = sentences.rounding_of(SPACE, question)
    assert line.startswith("weight ") and "0.5" in line
    assert sentences.rounding_of(SPACE, Question(kind="epsilon", amount=1)) == []


# Pictures: well-formed, the same bytes again, texts as they are, and colours that say budget.


def pixels(data: bytes) -> np.ndarray:
    return np.asarray(mpimg.imread(io.BytesIO(data)))


def parsed(svg: str) -> ET.Element:
    head = '<svg xmlns:xlink="http://www.w3.org/1999/xlink" '
    return ET.fromstring(str(svg).replace("<svg ", head, 1))


@pytest.mark.parametrize("by", [("age", "weight"), ("smoker", "arrived"), ("age", "epsilon")])
def test_maps_are_well_formed_and_the_same_again(by: tuple[str, str]) -> None:
    spent, _ = charged()
    heat = heat_map(spent, *by)
    one, other = (page.heat_picture(SPACE, heat, "epsilon", "m") for _ in range(2))
    assert one == other and one.text.startswith("Least epsilon left")
    tree = parsed(one.svg)
    images = [node for node in tree.iter() if node.tag.endswith("image")]
    links = [value for node in tree.iter() for name, value in node.attrib.items()
             if name.endswith("href")]  # fmt: skip
    assert images and all(link.startswith(("#m", "#map-m", "data:image/png")) for link in links)
    data = page.heat_png(SPACE, heat, "epsilon")
    assert data == page.heat_png(SPACE, heat, "epsilon") and pixels(data).shape[1] == 1024


def test_spent_budget_is_seen() -> None:
    """Where nothing is spent all is of one colour, that of the top of the bar."""
    spent, _ = charged()
    blank = pixels(page.heat_png(SPACE, heat_map(untouched(SPACE, "epsilon"), "age", "weight"),
                                    "epsilon"))  # fmt: skip
    full = pixels(page.heat_png(SPACE, heat_map(spent, "age", "weight"), "epsilon"))
    middle = (slice(300, 320), slice(200, 700))
    assert len(np.unique(blank[middle].reshape(-1, 4), axis=0)) == 1
    assert len(np.unique(full[middle].reshape(-1, 4), axis=0)) > 2


def test_what_is_closed_is_blank() -> None:
    spent, _ = charged()
    for days, blank in ((5, True), (30, True), (0, False)):
        shut = (
            close(spent, box(arrived=(PEOPLE_START, PEOPLE_START + days * DAY))) if days else spent
        )
        heat = heat_map(shut, "arrived", "age")
        assert ("blank" in page.heat_picture(SPACE, heat, "epsilon", "m").text) is blank
        middle = pixels(page.heat_png(SPACE, heat, "epsilon"))[300, 120]
        assert bool((middle[:3] == 1).all()) is blank


def test_names_and_codes_are_texts_and_no_formulas() -> None:
    space = Space((
        Category(name="$x^{", codes=("$\\frac", "<b>&")), Integer(name="a<b", low=0, high=3),
        Budget(name="epsilon", most=1.0),
    ))  # fmt: skip
    heat = heat_map(untouched(space, "epsilon"), "$x^{", "a<b")
    svg = page.heat_picture(space, heat, "epsilon", "m").svg
    texts = [node.text for node in parsed(svg).iter() if node.tag.endswith("text")]
    assert {"$x^{", "$\\frac", "<b>&", "a<b"} <= set(texts) and "<b>" not in svg


def test_spending() -> None:
    moments = over_time(PEOPLE, "epsilon", charged()[1])
    picture = page.spending_picture(moments, "epsilon")
    assert "at most 3.2" in picture.text and "var(--s1)" in picture.svg
    assert parsed(picture.svg) is not None
    one, other = (page.spending_png(history, "epsilon") for history in (moments, moments[:2]))
    assert pixels(one).shape == pixels(other).shape and one != other
    assert page.spending_text([], "rho") == "Nothing of rho is spent"
    assert page.spending_png([], "rho")
    assert page.spending_picture(moments[:1], "epsilon").svg


def opened(folder: Path, records: str = RECORDS) -> Session:
    session = Session(small_config_at(folder, records), analyst="<b>alice</b>")
    session.where("a < 2 AND epsilon >= 1").count(0.5)
    session.where("rho >= 0.5").as_pinq(0.25, "rho").count(0.125)
    return session


def test_the_page_is_of_the_ledger_alone(tmp_path: Path) -> None:
    pages = []
    for number, records in enumerate((RECORDS, RECORDS.splitlines()[0] + "\n")):
        with opened(tmp_path / str(number), records) as session:
            (session.open_table.config.folder / "manifest.json").unlink()
            text = page.render(session.open_table, Chosen((("b", "epsilon"),)))
        pages.append(re.sub(r"[0-9a-f]{32}|\d{4}-\d\d-\d\d[T ][\d:]+(Z| UTC)", "", text))
    # But for the clock's marks on the picture over time nothing differs.
    one, other = (re.sub(r"<svg.*?</svg>", "", text, flags=re.S) for text in pages)
    assert one == other


def test_the_page_is_self_contained_and_escaped(tmp_path: Path) -> None:
    with opened(tmp_path) as session:
        text = page.render(session.open_table, Chosen())
    assert text.startswith(page.MARK) and "INSECURE" in text
    assert "&lt;b&gt;alice" in text and "<b>alice" not in text
    assert not re.findall(r"(?:src|href)=\"(?!#|data:)", text) and "<script" not in text
    for phrase in ("allotment", "draw on ", "question: count", "a &lt; 2 AND epsilon &gt;= 1",
                 "zCDP", "rho"):  # fmt: skip
        assert phrase in text, phrase
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))


def test_the_page_in_a_browser(tmp_path: Path) -> None:
    with opened(tmp_path / "table") as session:
        file = tmp_path / "page.html"
        file.write_text(page.render(session.open_table, Chosen()), encoding="utf-8")
    with browser(tmp_path / "browser") as chromium:
        for screen in (DESKTOP, PHONE):
            tab = chromium.open(file.as_uri(), screen)
            assert tab.width <= screen[0] and not tab.complaints() and not tab.requests()
            assert tab.run("[...document.querySelectorAll('svg')].every(s => s.clientWidth > 100)")
            assert "<b>alice</b>" in tab.run("document.body.textContent")


def test_frames_and_pairs(tmp_path: Path, refused: Refused) -> None:
    with opened(tmp_path) as session:
        part = session.where("a = 1 OR a = 3")
        assert page.frame_of(part.boxes())[0].tolist() == [1, 4]
        refused(lambda: page.frame_of(session.where("a < 0").boxes()))
        assert page.png(session.open_table, Chosen(kind="rho")).startswith(b"\x89PNG")
        assert page.png(session.open_table, Chosen(over_time=True)).startswith(b"\x89PNG")
        for wrong in (Chosen(kind="delta"), Chosen((("a", "b"), ("b", "a")))):
            refused(page.png, session.open_table, wrong)
    assert page.pairs_of(["a, b"]) == (("a", "b"),)
    for wrong_pair in ("a", "a,b,c"):
        refused(page.pairs_of, [wrong_pair])


def test_only_files_of_our_own_are_replaced(tmp_path: Path, refused: Refused) -> None:
    out = tmp_path / "a.html"
    for _ in range(2):
        page.write(out, page.MARK + " x")
    assert out.read_text() == page.MARK + " x"
    mine = tmp_path / "mine.html"
    mine.write_text("<p>mine")
    refused(page.write, mine, page.MARK)
    assert mine.read_text() == "<p>mine"


def test_a_page_of_nothing_asked(tmp_path: Path) -> None:
    config = small_config_at(tmp_path)
    add(config, [tmp_path / "small.csv"])
    with Session(config) as session:
        assert "Nothing was asked yet" in page.render(session.open_table, Chosen())
