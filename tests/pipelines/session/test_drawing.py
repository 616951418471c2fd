"""Pictures: well-formed, the same bytes again, texts as they are, and colours that say budget."""

import io
import xml.etree.ElementTree as ET

import matplotlib.image as mpimg
import numpy as np
import pytest

from dpstream.accounting.regions.charging import close
from dpstream.accounting.regions.space import Budget, Category, Integer, Space
from dpstream.accounting.regions.spent import untouched
from dpstream.pipelines.session import drawing
from dpstream.pipelines.session.pictures import heat_map, over_time
from tests.pipelines.session.people import DAY, PEOPLE, START, box
from tests.pipelines.session.test_pictures import charged

SPACE = PEOPLE.space


def pixels(data: bytes) -> np.ndarray:
    return np.asarray(mpimg.imread(io.BytesIO(data)))


def parsed(svg: str) -> ET.Element:
    head = '<svg xmlns:xlink="http://www.w3.org/1999/xlink" '
    return ET.fromstring(svg.replace("<svg ", head, 1))


@pytest.mark.parametrize("by", [("age", "weight"), ("smoker", "arrived"), ("age", "epsilon")])
def test_maps_are_well_formed_and_the_same_again(by: tuple[str, str]) -> None:
    spent, _ = charged()
    heat = heat_map(spent, *by)
    one, other = (drawing.heat(SPACE, heat, "epsilon", "m") for _ in range(2))
    assert one == other and one.caption.startswith("Least epsilon left")
    tree = parsed(one.svg)
    images = [node for node in tree.iter() if node.tag.endswith("image")]
    links = [value for node in tree.iter() for name, value in node.attrib.items()
             if name.endswith("href")]  # fmt: skip
    assert images and all(link.startswith(("#m", "#map-m", "data:image/png")) for link in links)
    data = drawing.heat_png(SPACE, heat, "epsilon")
    assert data == drawing.heat_png(SPACE, heat, "epsilon") and pixels(data).shape[1] == 1024


def test_spent_budget_is_seen() -> None:
    """Where nothing is spent all is of one colour, that of the top of the bar."""
    spent, _ = charged()
    blank = pixels(drawing.heat_png(SPACE, heat_map(untouched(SPACE, "epsilon"), "age", "weight"),
                                    "epsilon"))  # fmt: skip
    full = pixels(drawing.heat_png(SPACE, heat_map(spent, "age", "weight"), "epsilon"))
    middle = (slice(300, 320), slice(200, 700))
    assert len(np.unique(blank[middle].reshape(-1, 4), axis=0)) == 1
    assert len(np.unique(full[middle].reshape(-1, 4), axis=0)) > 2


def test_what_is_closed_is_blank() -> None:
    spent, _ = charged()
    for days, blank in ((5, True), (30, True), (0, False)):
        shut = close(spent, box(arrived=(START, START + days * DAY))) if days else spent
        heat = heat_map(shut, "arrived", "age")
        assert ("blank" in drawing.heat(SPACE, heat, "epsilon", "m").caption) is blank
        middle = pixels(drawing.heat_png(SPACE, heat, "epsilon"))[300, 120]
        assert bool((middle[:3] == 1).all()) is blank


def test_names_and_codes_are_texts_and_no_formulas() -> None:
    space = Space((
        Category(name="$x^{", codes=("$\\frac", "<b>&")), Integer(name="a<b", low=0, high=3),
        Budget(name="epsilon", most=1.0),
    ))  # fmt: skip
    heat = heat_map(untouched(space, "epsilon"), "$x^{", "a<b")
    svg = drawing.heat(space, heat, "epsilon", "m").svg
    texts = [node.text for node in parsed(svg).iter() if node.tag.endswith("text")]
    assert {"$x^{", "$\\frac", "<b>&", "a<b"} <= set(texts) and "<b>" not in svg


def test_spending() -> None:
    moments = over_time(PEOPLE, "epsilon", charged()[1])
    picture = drawing.spending(moments, "epsilon")
    assert "at most 3.2" in picture.caption and "var(--s1)" in picture.svg
    assert parsed(picture.svg) is not None
    one, other = (drawing.spending_png(history, "epsilon") for history in (moments, moments[:2]))
    assert pixels(one).shape == pixels(other).shape and one != other
    assert drawing.spending_text([], "rho") == "Nothing of rho is spent"
    assert drawing.spending_png([], "rho")
    assert drawing.spending(moments[:1], "epsilon").svg
