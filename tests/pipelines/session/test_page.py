"""Pictures: well-formed, the same bytes again, texts as they are, and colours that say budget."""

import io
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import matplotlib.image as mpimg
import numpy as np
import pytest

from dpstream.accounting.regions.space import Budget, Category, Integer, Space
from dpstream.accounting.regions.spent import close, untouched
from dpstream.pipelines.session import page
from dpstream.pipelines.session.overview import heat_map, over_time
from dpstream.pipelines.session.page import Chosen
from dpstream.pipelines.session.records.load import add
from dpstream.pipelines.session.session import Session
from tests.browser import DESKTOP, PHONE, browser
from tests.golden.refusals import Refused
from tests.pipelines.session.people import DAY, PEOPLE, START, box
from tests.pipelines.session.small import RECORDS, config_at
from tests.pipelines.session.test_overview import charged

SPACE = PEOPLE.space


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
        shut = close(spent, box(arrived=(START, START + days * DAY))) if days else spent
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
    session = Session(config_at(folder, records), analyst="<b>alice</b>")
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
    config = config_at(tmp_path)
    add(config, [tmp_path / "small.csv"])
    with Session(config) as session:
        assert "Nothing was asked yet" in page.render(session.open_table, Chosen())
