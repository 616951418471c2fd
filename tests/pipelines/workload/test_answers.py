"""Tables of answers."""

import numpy as np
import pytest

from dpstream.accounting.errors import required
from dpstream.pipelines.workload import answers as module
from dpstream.pipelines.workload.answers import answers
from dpstream.pipelines.workload.estimate import Estimate, norms
from dpstream.pipelines.workload.release import Moment
from tests.pipelines.workload.survey import workload

MOMENTS = [Moment(0, 10, 1, 5), Moment(0, 10, 2, 10)]
RNG = np.random.default_rng(2)
ESTIMATE = Estimate(
    RNG.normal(size=(2, 10)), np.array([1.0, 3.0]), (np.triu(np.ones((5, 5))), np.eye(2))
)
_ANSWERED = "so few answers are a table"
ONE = ESTIMATE._replace(cells=ESTIMATE.cells[:1], scale=ESTIMATE.scale[:1])


def test_every_release_has_its_own_error() -> None:
    query_set = workload()
    table = required(answers(query_set, ESTIMATE, MOMENTS, over_time=True), _ANSWERED)
    assert table.num_rows == 2 * query_set.queries
    sd = table.column("sd").to_numpy()
    assert np.allclose(sd[query_set.queries :], 3 * sd[: query_set.queries])
    assert np.allclose(sd[: query_set.queries], norms(query_set, ESTIMATE.mix))
    value, low, high = (table.column(n).to_numpy() for n in ("value", "low", "high"))
    assert np.allclose(high - value, 1.959964 * sd) and np.allclose(value - low, high - value)
    assert table.column("trigger").to_pylist()[-1] == 2
    assert table.column("product").to_pylist()[-1] == 2
    assert value[-1] == pytest.approx(ESTIMATE.cells[1].sum())
    once = required(answers(query_set, ONE, MOMENTS[:1]), _ANSWERED)
    assert "trigger" not in once.column_names and once.num_rows == query_set.queries


def test_values_without_negative_cells() -> None:
    query_set = workload([{"factors": {"age": "identity", "sex": "identity"}}])
    plain = required(answers(query_set, ESTIMATE, MOMENTS), _ANSWERED)
    consistent_table = required(answers(query_set, ESTIMATE, MOMENTS, consistent=True), _ANSWERED)
    assert (
        min(plain.column("value").to_pylist())
        < 0
        <= min(consistent_table.column("value").to_pylist())
    )
    assert consistent_table.select(["sd", "low", "high"]) == plain.select(["sd", "low", "high"])


def test_not_more_than_a_table_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ANSWERS", workload().queries)
    assert answers(workload(), ESTIMATE, MOMENTS) is None
