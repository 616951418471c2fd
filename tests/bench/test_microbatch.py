"""The micro-batch and shuffle benchmarks still run, and their stages add up."""

from pathlib import Path

import pytest

from tests.bench.microbatch import ORDER, Size, draw, measure, series
from tests.bench.shuffle import BATCH, seconds


def test_stages_of_a_step(tmp_path: Path) -> None:
    sizes = [Size(rows, 300, 2, cold) for rows, cold in ((100, False), (200, False), (400, True))]
    points = [measure(f"sqlite:{tmp_path}/{size.rows}.db", size, tmp_path) for size in sizes]
    for size, point in zip(sizes, points, strict=True):
        assert (point["rows"], point["cold"]) == (size.rows, size.cold)
        spent = point["seconds"]
        assert all(spent[stage] > 0 for stage in ("records", "bound", "aggregate", "commit"))
        assert sum(spent[stage] for stage in ORDER) <= 1.5 * spent["total"]
    fit = series("sqlite", points)
    assert set(fit["exponent"]) == {"fit", "error", "last"}
    draw([fit], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_a_shuffle_takes_time(recwarn: pytest.WarningsRecorder) -> None:
    assert 0 < seconds(2 * BATCH, 4, None) < 60
