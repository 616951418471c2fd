"""Pictures of plans."""

from pathlib import Path

import numpy as np
import pytest

from dpstream.accounting.errors import RunError, UsageError
from dpstream.pipelines.workload import planning
from dpstream.pipelines.workload.picture import curves, draw, save
from dpstream.pipelines.workload.planning import guarantee_of, planned
from tests.pipelines.workload.survey import workload

GUARANTEE = guarantee_of(None, None, 2.0, 1)


def test_errors_of_all_queries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = planned(workload(), tmp_path)
    by_name = curves(found)
    assert {"identity", "haar", found.plan.strategy.name} <= set(by_name)
    assert all(len(c) == found.workload.queries and (np.diff(c) >= 0).all()
               for c in by_name.values())  # fmt: skip
    [axes] = draw(found, GUARANTEE).axes
    floor = next(line for line in axes.lines if "floor" in str(line.get_label()))
    drawn = found.per_query(found.plan.floor) / 2
    assert np.asarray(floor.get_ydata())[0] == pytest.approx(drawn)
    save(found, GUARANTEE, tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_bytes().startswith(b"<?xml")
    with pytest.raises(UsageError):
        save(found, GUARANTEE, tmp_path / "a.gif")
    with pytest.raises(RunError):
        save(found, GUARANTEE, tmp_path / "none" / "a.png")
    monkeypatch.setattr(planning, "MAX_LISTED", 1)
    with pytest.raises(UsageError):
        curves(found)
