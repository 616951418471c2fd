"""Released values: exact prefixes plus the noise of the key's own paths, with the sds they have."""

import numpy as np
import pytest

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.limits import DECODE_BITS
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.noise.paths import Paths
from dpstream.dp_transforms.perturbation import Published, PublishedPaths, publish
from dpstream.state.store import KeyShard
from tests.dp_transforms.pairs import noise_stream, states_of
from tests.streams import COUNT, MEAN, SUM, UNITS, make_plan

ALL = (COUNT, MEAN, SUM, UNITS)


def paths_of(plan: Plan) -> PublishedPaths:
    budget = allocate(plan)
    units = None if budget.units is None else noise_stream(plan, budget.units, "units")
    return PublishedPaths([noise_stream(plan, noise) for noise in budget.values], units)


def filled(plan: Plan, keys: int) -> KeyShard:
    states = states_of(plan, range(keys))
    states.units[:keys] = np.arange(keys) + 50
    states.values[:keys] = np.arange(keys)[:, None] * 7 + 1000 + np.arange(states.values.shape[1])
    return states


def published(plan: Plan, states: KeyShard, slots: list[int], trigger: int = 5) -> Published:
    return publish(plan, allocate(plan), states, paths_of(plan), np.array(slots), trigger)


def test_values_are_exact_prefixes_plus_the_noise_of_their_paths() -> None:
    plan = make_plan(aggregates=ALL, triggers=10)
    budget, states = allocate(plan), filled(plan, 4)
    figures = published(plan, states, [2, 0])
    for number, (stream, noise) in enumerate(zip(plan.design.streams, budget.values, strict=True)):
        paths = Paths(noise_stream(plan, noise))
        paths.start(np.arange(2), states.table.ids[[2, 0]])
        drawn = paths.advance(np.arange(2), np.full(2, 5))[:, 0] / (1 << DECODE_BITS)
        prefix = states.values[[2, 0], number] + drawn
        assert drawn.any()
        if stream.name == "count":
            assert figures.values["n"].tolist() == prefix.tolist()
            assert figures.sds["n"].tolist() == [noise.sd[4]] * 2
        if stream.name == "total":
            assert figures.values["total"].tolist() == (prefix * 0.5).tolist()
            assert figures.sds["total"] == pytest.approx([noise.sd[4] * 0.5] * 2)
    assert set(figures.values) == set(figures.sds) == {"n", "level", "total", "people"}


@pytest.mark.parametrize("strategy", ["tree", "blt"])
def test_company_does_not_matter(strategy: str) -> None:
    """Neither other keys, nor when they were first published, nor the triggers before."""
    plan = make_plan(aggregates=ALL, triggers=10, strategy=strategy)
    states, budget = filled(plan, 5), allocate(plan)
    together, paths = published(plan, states, [3, 1, 4]), paths_of(plan)
    publish(plan, budget, states, paths, np.array([4]), 2)
    publish(plan, budget, states, paths, np.array([0, 4]), 3)
    later = publish(plan, budget, states, paths, np.array([4, 3]), 5)
    for name in ("n", "total", "level", "people"):
        assert together.values[name][[2, 0]].tolist() == later.values[name].tolist()


def test_every_stream_has_noise_of_its_own() -> None:
    plan = make_plan(aggregates=(COUNT, SUM), triggers=10)
    states = filled(plan, 40)
    noise, units = paths_of(plan).noise(states, np.arange(40), 5, 5)
    assert units is None and len(noise) == 2
    assert np.abs(np.corrcoef(noise[0], noise[1])[0, 1]) < 0.6
    assert len(set(noise[0].tolist())) > 30


def test_the_count_of_units_is_at_its_own_step() -> None:
    """The selection stream continued has a step for each test, not for each trigger."""
    plan = make_plan(aggregates=(UNITS,), triggers=12, select_every=3, refresh_every=3)
    states, budget = filled(plan, 3), allocate(plan)
    assert budget.units is not None and not plan.design.units_apart
    figures = published(plan, states, [0, 1, 2], 9)
    paths = Paths(noise_stream(plan, budget.units, "units"))
    paths.start(np.arange(3), states.table.ids[:3])
    drawn = paths.advance(np.arange(3), np.full(3, 3))[:, 0]
    assert figures.values["people"].tolist() == (states.units[:3] + drawn / 256).tolist()
    assert figures.sds["people"].tolist() == [budget.units.sd[2]] * 3
