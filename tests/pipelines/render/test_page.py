"""Templates escape what they are given; a page replaces only an older one of its own.

The page's script: named by its digest, and data that cannot leave its element.

Pictures: the same bytes for the same numbers, extremes kept, words escaped.

A picture for a template: its SVG as it is, what its points say as text to be escaped.

Templates: all texts escaped, what they include too, and nothing missing in silence.
"""

import base64
import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
from jinja2 import UndefinedError
from markupsafe import Markup

from dpstream.pipelines.render.charts import (
    COLOURS,
    LINE_POINTS,
    Picture,
    axes_of,
    counts,
    drawn_positions,
    lines,
    relative_noise,
    swatches,
    values_axis,
)
from dpstream.pipelines.render.page import (
    begins_with,
    document,
    embedded,
    ending_of,
    mark_of,
    pages,
    policy,
    script_text,
    write_own,
)
from dpstream.state.durable import PRIVATE
from tests.golden.refusals import Refused


def test_texts_are_escaped_and_names_must_be_there() -> None:
    template = pages().from_string("{{ a }}{{ b }} {{ n|human }}")
    assert template.render(a="<b>&", b=Markup("<i>"), n=12345) == "&lt;b&gt;&amp;<i> 12,345"
    with pytest.raises(UndefinedError):
        template.render(a="", b="")


def test_templates_include_each_other() -> None:
    style = pages().get_template("style.css.j2").render()
    assert "--ink" in style and "<" not in style
    assert pages().from_string('<style>{% include "style.css.j2" %}</style>').render() == (
        f"<style>{style}</style>"
    )


def test_the_policy_names_the_script_and_nothing_else() -> None:
    digest = base64.b64encode(hashlib.sha256(script_text().encode()).digest()).decode()
    rules = dict(rule.split(" ", 1) for rule in policy(True).split("; "))
    assert rules["script-src"] == f"'sha256-{digest}'" and rules["default-src"] == "'none'"
    assert rules["base-uri"] == rules["form-action"] == "'none'" and "connect-src" not in rules
    assert policy(True, live=True) == policy(True) + "; connect-src 'self'"
    assert policy(images=True) == policy() + "; img-src data:" and "script-src" not in policy()
    page = document("waiting.html.j2", "report", script=True, live="7", text="<b>not yet")
    assert page.startswith(mark_of("report")) and f"<script>{script_text()}</script>" in page
    assert "&lt;b&gt;not yet" in page and "connect-src" in page
    assert "<script" not in document("waiting.html.j2", "report", text="")


def test_the_script_writes_text_alone() -> None:
    for sink in (
        "innerHTML",
        "outerHTML",
        "insertAdjacent",
        "document.write",
        "eval(",
        "Function(",
    ):
        assert sink not in script_text()
    assert "</script" not in script_text() and "<!--" not in script_text()


def test_data_holds_no_mark_of_html() -> None:
    evil = ["</script><script>alert(1)</script>", "<!--", "&lt;", "\u2028\u2029", '"\\']
    text = embedded({"keys": evil})
    assert not set("<>&\u2028\u2029") & set(text) and json.loads(text) == {"keys": evil}


def test_only_files_of_its_own_are_replaced(tmp_path: Path, refused: Refused) -> None:
    out, mark = tmp_path / "a.html", mark_of("report")
    for content in ("one", "two"):
        write_own(out, mark + content, mark)
    assert out.read_text() == mark + "two" and begins_with(out, mark)
    for other in (mark_of("session"), "<p>mine", ""):
        out.write_text(other)
        error = refused(write_own, out, mark, mark)
        assert error.field == "--out" and out.read_text() == other
    refused(write_own, tmp_path / "none" / "a.html", mark, mark)


def test_what_is_not_private_is_for_its_owner_alone(tmp_path: Path) -> None:
    write_own(tmp_path / "a.html", mark_of("report"), mark_of("report"), PRIVATE)
    assert (tmp_path / "a.html").stat().st_mode & 0o777 == 0o600


def test_a_name_has_one_of_the_endings(refused: Refused) -> None:
    assert ending_of(Path("a/x.PNG"), ("html", "png")) == "png"
    for name in ("a/x.svg", "a/x", "a/.png"):
        refused(ending_of, Path(name), ("html", "png"), "--picture")


def test_the_same_numbers_are_the_same_bytes() -> None:
    series = [np.array([1.0, 2.0, 400.0])]
    one, other = (lines("n", series, 'w "<&', "across", "up") for _ in range(2))
    assert one == other and one.text == 'w "<&'
    assert one.svg.startswith('<svg role="img" aria-label="w &quot;&lt;&amp;" viewBox=')
    assert "<metadata" not in one.svg and "#0a0b00" not in one.svg and "var(--s0)" in one.svg


def test_pictures_of_one_page_have_ids_of_their_own() -> None:
    values, sds = np.array([1.0, -5.0]), np.array([0.1, 2.0])
    one, other = (relative_noise(name, values, sds, "w").svg for name in ("a", "b"))
    assert 'id="a-' in one and 'id="b-' not in one and 'id="b-' in other


def ticks(picture: Picture) -> list[str]:
    return re.findall(r"<text[^>]*>([\d.,]+)</text>", picture.svg)


@pytest.mark.parametrize("triggers", [1, 2, 3, 7, 30])
def test_ticks_of_integers_are_integers(triggers: int) -> None:
    values = np.full(triggers, 0.5)
    labels = ticks(lines("n", [values], "w", "a", "u"))
    height = labels.index("0", 1)  # where the labels of the other axis begin
    keys = ticks(counts("n", np.arange(triggers) + 1, np.ones(triggers, np.int64), "w", "a"))
    for numbers in (labels[:height], keys[: keys.index("0", 1)]):
        assert numbers and all(number.isdigit() for number in numbers)
        assert len(numbers) == len({*numbers})


def test_values_shown_without_fractions_have_no_label_twice() -> None:
    _, axes = axes_of(3.6, 2.2)
    for low, high in ((1_000.0, 1_001.5), (2_000.2, 2_003.0), (0.2, 0.9)):
        axes.set_ylim(low, high)
        values_axis(axes.yaxis)
        labels = [axes.yaxis.get_major_formatter()(at) for at in axes.yaxis.get_majorticklocs()]
        assert len(labels) == len({*labels}) > 1


@pytest.mark.parametrize("scale", [1.0, 1.6, 5.0, 40.0, 1e4])
def test_values_near_each_other_have_labels_too(scale: float) -> None:
    """Also where no power of ten is among them."""
    values = np.linspace(210.0, 210.0 * scale + 1, 5)
    picture = relative_noise("n", values, values / 8, "w")
    numbers = [float(label.replace(",", "")) for label in ticks(picture)]
    assert sum(200 <= number <= 1.2 * values[-1] for number in numbers) >= 2


def test_a_long_line_keeps_its_extremes() -> None:
    assert drawn_positions(np.zeros(LINE_POINTS)).tolist() == list(range(LINE_POINTS))
    values = np.random.default_rng(1).standard_normal(10 * LINE_POINTS)
    indices = drawn_positions(values)
    assert len(indices) <= LINE_POINTS + 2 and (np.diff(indices) > 0).all()
    assert {0, len(values) - 1, values.argmin(), values.argmax()} <= set(indices.tolist())


def test_further_lines_are_dashed() -> None:
    assert swatches(COLOURS + 1) == [*(f"s{n}" for n in range(COLOURS)), "s0 dashed"]


def test_points_and_what_they_say() -> None:
    figure, axes = axes_of(2, 2)
    axes.plot([1, 2], [3, 4])
    picture = Picture.of(figure, "p", "words", ["<b>", "two"], ([1, 2], [3, 4]))
    assert isinstance(picture.svg, Markup) and not isinstance(picture.tips, Markup)
    (left, top, first), (right, bottom, second) = json.loads(picture.tips)
    assert 0 < left < right < 1 and 0 < bottom < top < 1 and (first, second) == ("<b>", "two")
    assert Picture.of(figure, "p", "words").tips == ""
