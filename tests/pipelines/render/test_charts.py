"""Pictures: the same bytes for the same numbers, extremes kept, words escaped."""

import numpy as np

from dpstream.pipelines.render.charts import (
    COLOURS,
    LINE_POINTS,
    ChartLine,
    _drawn_positions,
    lines,
    relative_noise,
    swatches,
)


def test_the_same_numbers_are_the_same_bytes() -> None:
    series = [ChartLine("x", np.array([1.0, 2.0, 400.0]))]
    one, other = (lines("n", series, 'w "<&', "across", "up") for _ in range(2))
    assert one == other and one.caption == 'w "<&'
    assert one.svg.startswith('<svg role="img" aria-label="w &quot;&lt;&amp;" viewBox=')
    assert "<metadata" not in one.svg and "#0a0b00" not in one.svg and "var(--s0)" in one.svg


def test_pictures_of_one_page_have_ids_of_their_own() -> None:
    values, sds = np.array([1.0, -5.0]), np.array([0.1, 2.0])
    one, other = (relative_noise(name, values, sds, "w").svg for name in ("a", "b"))
    assert 'id="a-' in one and 'id="b-' not in one and 'id="b-' in other


def test_a_long_line_keeps_its_extremes() -> None:
    assert _drawn_positions(np.zeros(LINE_POINTS)).tolist() == list(range(LINE_POINTS))
    values = np.random.default_rng(1).standard_normal(10 * LINE_POINTS)
    indices = _drawn_positions(values)
    assert len(indices) <= LINE_POINTS + 2 and (np.diff(indices) > 0).all()
    assert {0, len(values) - 1, values.argmin(), values.argmax()} <= set(indices.tolist())


def test_further_lines_are_dashed() -> None:
    assert swatches(COLOURS + 1) == [*(f"s{n}" for n in range(COLOURS)), "s0 dashed"]
