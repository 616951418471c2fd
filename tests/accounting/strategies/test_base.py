"""What every strategy inherits: a trigger at least, no parameters unless it has some, no state."""

import numpy as np
import pytest

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.strategies.base import Ranges, Strategy


class Doubling(Strategy):
    """Each step is a pair of nodes; as little as a strategy may say of itself."""

    name = "doubling"
    col2, sd_factors, rounding, reach = 2.0, np.ones(1), np.ones(1), 1.0
    state_columns = 0

    def worst_split(self, pieces: int, total: int | Int64) -> float | Float64:
        square = 2.0 * total**2
        return square if isinstance(square, float) else np.asarray(square, np.float64)

    def matrix(self) -> Float64:
        return np.repeat(np.eye(self.triggers), 2, axis=0)

    def nodes_through(self, step_index: int | Int64) -> Int64:
        return np.asarray(step_index) * 2

    def fold(self, ranges: Ranges) -> None:
        raise NotImplementedError


class Remembering(Doubling):
    state_columns = 3


@pytest.mark.parametrize("triggers", [0, -1])
def test_a_strategy_has_a_trigger(triggers: int) -> None:
    with pytest.raises(ValueError, match="at least one trigger"):
        Doubling(triggers)


def test_parameters_are_for_those_that_have_some() -> None:
    assert Doubling(2).parameters.size == 0 and Doubling(2, np.zeros(0)).triggers == 2
    with pytest.raises(ValueError, match="no parameters"):
        Doubling(2, np.array([0.5]))


def test_a_path_without_state_begins_at_the_first_node() -> None:
    steps = np.array([0, 1, 5])
    assert Doubling(8).first_node(steps).tolist() == [0, 0, 0]
    assert Remembering(8).first_node(steps).tolist() == [0, 2, 10]


def test_a_strategy_that_leaves_something_out_is_none() -> None:
    class Silent(Strategy):
        name = "silent"

    with pytest.raises(TypeError, match="abstract"):
        Silent(1)  # type: ignore[abstract]


def test_kernels_get_the_arrays_of_ranges_in_their_order() -> None:
    flat, starts, begin, end, stack, out = (np.full(2, i) for i in range(6))
    ranges = Ranges(flat, starts, begin, end, stack, out, exact=lambda row, nodes: lambda bits: [])
    assert [a[0] for a in ranges.arrays] == [0, 1, 2, 3, 4, 5] and ranges.noise_error == 0.0
