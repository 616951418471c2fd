"""Pictures of the eigen-design experiments say what was measured."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.bench.paper.charts import draw
from tests.bench.paper.linear_charts import CHARTS
from tests.bench.paper.test_linear import rows


@pytest.mark.parametrize("name", CHARTS)
def test_two_files(name: str, tmp_path: Path) -> None:
    assert draw(CHARTS[name](rows(name)), tmp_path / "x.json") == ["x.png", "x.svg"]
    assert (tmp_path / "x.png").stat().st_size > 10_000


def test_errors_are_written_out() -> None:
    [bars] = [a for a in CHARTS["example4"](rows("example4")).axes if a.get_xlabel()]
    [row] = rows("example4")
    assert {t.get_text() for t in bars.texts} == {f"{e:.4f}" for e in row["errors"].values()}
    factors, bounds = CHARTS["table2"](rows("table2")).axes
    assert len(factors.texts) == 5 and len(bounds.texts) == 10
    assert f"{rows('table2')[0]['best_factor']:.2f}" in factors.texts[0].get_text()


def test_every_strategy_is_drawn_in_its_place() -> None:
    shape, census, *_ = CHARTS["figure3"](rows("figure3")).axes
    heights = [np.asarray(line.get_ydata()) for line in shape.lines if line.get_marker() == "o"]
    drawn = sorted(float(height[0]) for height in heights if len(height))
    range_rows = [r for r in rows("figure3") if r["figure"] == "absolute" and r["kind"] == "ranges"]
    assert drawn == sorted(e for row in range_rows for e in row["errors"].values())
    assert len([line for line in census.lines if len(np.asarray(line.get_xdata())) == 4]) == 8
    [axes] = CHARTS["figure5"](rows("figure5")).axes
    bars: Any = axes.patches
    assert [bar.get_height() for bar in bars] == [
        e for row in rows("figure5") for e in row["errors"].values()
    ]
