"""Pictures of plans."""

from pathlib import Path

import numpy as np
import pytest

from dpstream.accounting.errors import RunError, UsageError
from dpstream.pipelines.workload import planning
from dpstream.pipelines.workload.picture import curves, draw, draw_matrices, save, strategy_matrices
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


def test_curves_are_of_what_the_objective_is_about(tmp_path: Path) -> None:
    """So that the floor in the picture is a floor of what is drawn."""
    asked = workload(
        [{"factors": {"age": "prefix"}}, {"weight": 9, "factors": {"sex": "identity"}}]
    )
    worst = planned(asked, tmp_path, "worst")
    largest = {name: values[-1] for name, values in curves(worst).items()}
    own = largest[worst.plan.strategy.name]
    assert own == pytest.approx(worst.plan.error**0.5, rel=1e-6)
    assert largest["identity"] == pytest.approx(worst.compared.errors["identity"] ** 0.5)
    relative = planned(asked, tmp_path, "relative")
    each = curves(relative)["identity"]
    assert each == pytest.approx(
        np.ones(asked.queries)
    )  # a cell's variance is 1, a query's its norm
    label = draw(relative, GUARANTEE).axes[0].get_ylabel()
    assert "norm" in label and "weighted" in draw(worst, GUARANTEE).axes[0].get_ylabel()


def test_the_strategy(tmp_path: Path) -> None:
    one = planned(workload([{"factors": {"age": "range", "sex": "identity"}}]), tmp_path)
    age, sex = strategy_matrices(one.plan.strategy, one.workload.sizes)
    assert age.shape == (5, 5) and np.allclose(sex, np.eye(2))
    gram = age @ age
    assert gram.diagonal().max() == pytest.approx(1)
    error = one.workload.products[0].factors[0].variances(np.linalg.inv(gram)).sum() * 2
    assert error == pytest.approx(one.plan.error, rel=1e-6)
    titles = [axes.get_title() for axes in draw_matrices(one).axes[:2]]
    assert titles == ["age: 5 cells", "sex: 2 cells"]
    whole = planned(workload(), tmp_path)
    assert draw_matrices(whole).axes[0].get_title() == "all cells: 10 cells"
    save(whole, GUARANTEE, None, tmp_path / "m.png")
    assert (tmp_path / "m.png").stat().st_size > 5000 and not (tmp_path / "a.svg").exists()
    with pytest.raises(UsageError, match="--matrix"):
        save(whole, GUARANTEE, None, tmp_path / "m.txt")
