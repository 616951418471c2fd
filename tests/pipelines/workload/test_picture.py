"""Pictures of plans."""

from pathlib import Path

import numpy as np
import pytest

from dpstream.accounting.errors import RunError, UsageError
from dpstream.pipelines.workload import planning
from dpstream.pipelines.workload.picture import curve, draw, draw_matrices, save, strategy_matrices
from dpstream.pipelines.workload.planning import guarantee_of, planned
from tests.pipelines.workload.survey import workload

GUARANTEE = guarantee_of(None, None, 2.0, 1)


def test_errors_of_all_queries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workload_plan = planned(workload(), tmp_path)
    errors = curve(workload_plan)
    assert len(errors) == workload_plan.workload.queries and (np.diff(errors) >= 0).all()
    [axes] = draw(workload_plan, GUARANTEE).axes
    floor = next(line for line in axes.lines if "floor" in str(line.get_label()))
    drawn = workload_plan.per_query(workload_plan.plan.floor) / 2
    assert np.asarray(floor.get_ydata())[0] == pytest.approx(drawn)
    save(workload_plan, GUARANTEE, tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_bytes().startswith(b"<?xml")
    with pytest.raises(UsageError):
        save(workload_plan, GUARANTEE, tmp_path / "a.gif")
    with pytest.raises(RunError):
        save(workload_plan, GUARANTEE, tmp_path / "none" / "a.png")
    monkeypatch.setattr(planning, "MAX_LISTED", 1)
    with pytest.raises(UsageError):
        curve(workload_plan)


def test_the_curve_is_of_what_the_objective_is_about(tmp_path: Path) -> None:
    """So that the floor in the picture is a floor of what is drawn."""
    query_set = workload(
        [{"factors": {"age": "prefix"}}, {"weight": 9, "factors": {"sex": "identity"}}]
    )
    worst = planned(query_set, tmp_path, "worst")
    assert curve(worst)[-1] == pytest.approx(worst.plan.error**0.5, rel=1e-6)
    cells = planned(query_set, tmp_path, "relative", "identity")
    # A cell's variance is 1, a query's its norm.
    assert curve(cells) == pytest.approx(np.ones(query_set.queries))
    relative = planned(query_set, tmp_path, "relative")
    label = draw(relative, GUARANTEE).axes[0].get_ylabel()
    assert "norm" in label and "weighted" in draw(worst, GUARANTEE).axes[0].get_ylabel()


def test_the_strategy(tmp_path: Path) -> None:
    one = planned(workload([{"factors": {"age": "range", "sex": "identity"}}]), tmp_path)
    age, sex = strategy_matrices(one.plan.strategy, one.workload.sizes)
    assert age.shape == (5, 5) and np.allclose(sex, np.eye(2))
    gram = age @ age
    assert gram.diagonal().max() == pytest.approx(1)
    inverse = np.asarray(np.linalg.inv(gram), np.float64)
    error = one.workload.products[0].factors[0].variances(inverse).sum() * 2
    assert error == pytest.approx(one.plan.error, rel=1e-6)
    titles = [axes.get_title() for axes in draw_matrices(one).axes[:2]]
    assert titles == ["age: 5 cells", "sex: 2 cells"]
    workload_plan = planned(workload(), tmp_path)
    assert draw_matrices(workload_plan).axes[0].get_title() == "all cells: 10 cells"
    save(workload_plan, GUARANTEE, None, tmp_path / "m.png")
    assert (tmp_path / "m.png").stat().st_size > 5000 and not (tmp_path / "a.svg").exists()
    with pytest.raises(UsageError, match="--matrix"):
        save(workload_plan, GUARANTEE, None, tmp_path / "m.txt")
