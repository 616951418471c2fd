"""Invented geography."""

import numpy as np
import pytest

from dpstream.pipelines.tabulation.geography import NO_AREA, NO_PLACE
from dpstream.pipelines.tabulation.invented.regions import BLOCKS_PER_TRACT, invent


@pytest.mark.parametrize("seed", range(5))
def test_every_region_is_there(seed: int) -> None:
    made = invent(("01", "04", "72"), 20, 41, 17, seed)
    assert len(made.block) == 20 * BLOCKS_PER_TRACT and (np.diff(made.block) > 0).all()
    state = made.block // 10**13
    assert len(np.unique(made.block // 10_000)) == 20
    inside = made.place != NO_PLACE
    assert len(np.unique(np.stack([state, made.place])[:, inside], axis=1).T) == 41
    assert len(np.unique(made.area[made.area != NO_AREA])) == 17
    assert (made.area[state == 72] == NO_AREA).all()
    assert 0.5 < inside.mean() < 0.8 and np.isclose(made.weights.sum(), 1.0)


def test_a_place_is_blocks_in_a_row() -> None:
    made = invent(("01",), 30, 50, 0, 0)
    change = np.flatnonzero(np.diff(made.place)) + 1
    runs = made.place[np.append(0, change)]
    assert len(runs[runs != NO_PLACE]) == 50


def test_nothing_is_as_good_as_something() -> None:
    made = invent(("72",), 2, 1, 0, 0)
    assert (made.area == NO_AREA).all() and len(np.unique(made.place)) <= 2


def test_very_many_tracts_of_one_state() -> None:
    made = invent(("48",), 20_000, 5, 0, 0)
    assert (np.diff(made.block) > 0).all() and (made.block // 10**13 == 48).all()
    assert len(np.unique(made.block // 10**10)) <= 499
