"""The noise of the direct simulation: every prefix has the sd of its strategy, also restarted."""

import numpy as np
import pytest

from dpstream.accounting.arrays import Float64
from dpstream.accounting.strategies import make_strategy
from tests.oracle.simulation import noise_of

KEYS, TRIGGERS, SIGMA = 20_000, 13, 4.0
#: Sample figures leave this many of their sds in one of 25 million runs; the seed is fixed anyway.
FAR = 5.5


def fits(noise: Float64, sd: float) -> bool:
    return bool(abs((noise**2).mean() / sd**2 - 1) < FAR * np.sqrt(2 / len(noise)))


@pytest.mark.parametrize("name", ["tree", "blt"])
@pytest.mark.parametrize("step_index", [0, 5])
def test_prefixes_before_and_after_a_restart(name: str, step_index: int) -> None:
    strategy = make_strategy(name, TRIGGERS)
    sd = SIGMA * strategy.sd_factors
    noise = noise_of(np.random.default_rng(4), KEYS, strategy, SIGMA)
    before = [noise.advance() for _ in range(8)]
    assert all(fits(drawn, sd[t]) for t, drawn in enumerate(before))
    again, others = np.arange(KEYS // 2), slice(KEYS // 2, None)
    noise.restart(again, step_index)
    for t in range(8, TRIGGERS):
        drawn = noise.advance()
        fresh = step_index + t - 8
        assert noise.step_index[0] == fresh + 1 and noise.step_index[-1] == t + 1
        assert fits(drawn[again], sd[fresh]) and fits(drawn[others], sd[t])
        for past in before:
            correlation = np.corrcoef(past[again], drawn[again])[0, 1]
            assert abs(correlation) < FAR / np.sqrt(len(again))
    # What goes on is not new: neighbouring prefixes share their nodes.
    assert np.corrcoef(before[7][others], drawn[others])[0, 1] > 0.2
