"""The benchmark of sessions at a small size: each query asked, each point charged once by it."""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.bench import rides, session, session_picture

QUERIES = 120
SMALL = pytest.param(20_000, False)
LONGER = [
    pytest.param(20_000, True, marks=pytest.mark.slow),
    pytest.param(1_000_000, False, marks=pytest.mark.slow),
]


def test_the_whole_session_has_its_shape() -> None:
    for widened in (False, True):
        asking, reply, queries = session.session_of(session.FULL, widened), None, []
        try:
            while True:
                queries.append(asking.send(reply))
                reply = float(len(queries) % 257)
        except StopIteration:
            pass
        figures = [query.figure.what for query in queries]
        assert len(queries) == session.FULL
        assert figures.count("count") == 5 * session.BARS + 5 + 2 * session.SQUARES**2
        assert figures.count("average") > figures.count("quantiles") > 100


@pytest.mark.parametrize(("rows", "individual"), [SMALL, *LONGER])
def test_a_session(tmp_path: Path, rows: int, individual: bool) -> None:
    options: dict[str, Any] = {"queries": QUERIES, "runs": 1, "individual": individual}
    result, took = session.run(
        tmp_path / "rides", argparse.Namespace(rows=rows, held=True, **options)
    )
    assert took["seconds"].shape == (1, QUERIES, 3)
    assert result["regions_balanced"] <= 8
    assert result["regions"] >= 10 * result["regions_balanced"]
    # Every point of the dense squares: all histograms that it is in, four grids and one more.
    assert result["batches"]["most_charged"] == 12 * 100_000
    assert session.within(result, individual, full=False) == []
    session_picture.draw(took["seconds"], took["regions"], took["balanced"], tmp_path / "it.png")
    assert (tmp_path / "it.png").stat().st_size > 10_000


def test_limits_are_held() -> None:
    seconds = np.array([[[0.1, 0.1, 0.25]] * 10])
    figures = session.ratios(seconds) | {"regions": 700, "regions_balanced": 9}
    figures["batches"] = {"faster": 19.0}
    wrong = session.within(figures, individual=False, full=True)
    assert len(wrong) == 8


def test_rides_are_the_same_every_time(tmp_path: Path) -> None:
    one, two = (rides.write(tmp_path / name, 1_000, True) for name in ("a", "b"))
    assert one.read_bytes() == two.read_bytes()
    first = [(folder.parent / "rides-000.parquet").read_bytes() for folder in (one, two)]
    assert first[0] == first[1]
