"""Pictures of experiments: every method's value, the best ringed, two files each."""

from pathlib import Path

import numpy as np
import pytest

from tests.bench.paper.charts import draw, short_number, sweep_chart, table_chart


@pytest.mark.parametrize(
    ("value", "text"), [(1_234_567, "1.23M"), (-1500, "-1.5k"), (999, "999"), (0.5, "0.5")]
)
def test_short_numbers(value: float, text: str) -> None:
    assert short_number(value) == text


def test_a_table_names_each_method_and_value() -> None:
    rows = [
        {"method": m, "triggers": 100, "keys": k, "l1": 50.0, "records": 100}
        for m, k in (("sticky", 1234), ("rounds", 56))
    ]
    figure = table_chart(rows, {}, 1000, "title")
    keys, share = figure.axes
    assert [label.get_text() for label in keys.get_yticklabels()] == ["sticky", "rounds"]
    assert [text.get_text() for text in keys.texts] == ["1,234", "56"]
    assert [text.get_text() for text in share.texts] == ["50.0%", "50.0%"]


def test_a_sweep_rings_the_best_and_is_two_files(tmp_path: Path) -> None:
    rows = [
        {"method": "sticky", "contributions": c, "keys": k, "l1": e, "l2": e, "linf": e}
        for c, k, e in ((1, 5, 9.0), (2, 8, 4.0), (5, 3, 6.0))
    ]
    figure = sweep_chart(rows, "title")
    for axes in figure.axes:
        [ring] = [line for line in axes.lines if line.get_markersize() == 11]
        assert np.asarray(ring.get_xdata()).tolist() == [2]
    assert draw(figure, tmp_path / "x.json") == ["x.png", "x.svg"]
    assert (tmp_path / "x.png").stat().st_size and (tmp_path / "x.svg").stat().st_size
