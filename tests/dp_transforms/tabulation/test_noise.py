"""Noise is named by run, table, level, step and cell, and by nothing else."""

import itertools
from typing import Any

import numpy as np
import pytest
from scipy import stats

from dpstream.accounting.tabulation.parameters import US_LEVELS
from dpstream.accounting.tabulation.scales import LawName, Noise
from dpstream.dp_transforms.tabulation import noise as module
from dpstream.dp_transforms.tabulation.noise import FIRST, TOTAL, CellNoise, detail_step
from tests.dp_transforms.tabulation.worlds import RUN, ring
from tests.fixed import INPUTS

LEVEL = US_LEVELS[0]
WIDE = Noise("discrete gauss", 1_000.0)


def test_a_cell_has_the_same_noise_whoever_draws_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_GROUPS", 100)
    with ring() as keys:
        noise = CellNoise(keys, RUN, INPUTS)
        groups = np.arange(450)
        draws = noise.draw(WIDE, "t1t2", LEVEL, FIRST, groups, 3)
        rng = np.random.default_rng(0)
        for _ in range(20):
            begin, end = np.sort(rng.integers(0, 450, 2))
            subset = groups[begin:end][rng.random(end - begin) < rng.random()]
            assert (noise.draw(WIDE, "t1t2", LEVEL, FIRST, subset, 3) == draws[subset]).all()
    assert len(np.unique(draws)) > 900  # of 1,350: no cell has another's noise


def test_no_two_names_share_noise() -> None:
    groups = np.arange(200)
    steps = (FIRST, TOTAL, *(detail_step(d) for d in range(4)))
    draws = {}
    with ring() as keys, ring(8) as other:
        for ring_, (run, inputs), table, level, step in itertools.product(
            (keys, other), ((RUN, INPUTS), ("6b" * 16, INPUTS), (RUN, bytes(16))),
            ("t1t2", "t3"), US_LEVELS[:2], steps,
        ):  # fmt: skip
            drawn = CellNoise(ring_, run, inputs).draw(WIDE, table, level, step, groups, 1)[:, 0]
            draws[id(ring_), run, inputs, table, level, step] = drawn
    for (_, a), (_, b) in itertools.combinations(draws.items(), 2):
        assert (a == b).sum() < 5


def test_a_name_has_its_scale_and_law() -> None:
    groups = np.arange(400)
    laws: tuple[LawName, ...] = ("discrete gauss", "rounded gauss", "discrete laplace")
    with ring() as keys:
        noise = CellNoise(keys, RUN, INPUTS)
        drawn = [noise.draw(Noise(law, scale), "t1t2", LEVEL, FIRST, groups, 1)[:, 0]
                 for law in laws for scale in (500.0, 500.5)]  # fmt: skip
    for a, b in itertools.combinations(drawn, 2):
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.25  # fresh, not the same uniforms scaled


@pytest.mark.parametrize("law", ["discrete gauss", "rounded gauss", "discrete laplace"])
def test_noise_has_its_law(law: LawName) -> None:
    scale = 3.0
    with ring() as keys:
        drawn = CellNoise(keys, RUN, INPUTS).draw(
            Noise(law, scale), "t1t2", LEVEL, FIRST, np.arange(50_000), 2
        ).reshape(-1)  # fmt: skip
    k = np.arange(-14, 15)
    if law == "discrete laplace":
        chances = np.exp(-np.abs(k) / scale)
        chances *= np.tanh(0.5 / scale)
    elif law == "rounded gauss":
        chances = np.diff(stats.norm.cdf(np.append(k - 0.5, 14.5), scale=scale))
    else:
        chances = np.exp(-(k**2) / (2 * scale**2))
        chances /= np.exp(-(np.arange(-90, 91) ** 2) / (2 * scale**2)).sum()
    inside = drawn[np.abs(drawn) <= 14]
    seen = np.bincount(inside + 14, minlength=29)
    expected = chances / chances.sum() * len(inside)
    assert stats.chisquare(seen, expected).pvalue > 1e-4
    assert abs(len(inside) / len(drawn) - chances.sum()) < 0.005


def test_without_a_scale_there_is_no_noise() -> None:
    with ring() as keys:
        drawn = CellNoise(keys, RUN, INPUTS).draw(
            Noise("discrete gauss", 0.0), "t1t2", LEVEL, FIRST, np.arange(5), 3
        )  # fmt: skip
    assert drawn.shape == (5, 3) and not drawn.any()


def test_no_groups_have_no_noise() -> None:
    """As in step 1 of a shard of which the totals alone are measured."""
    with ring() as keys:
        drawn = CellNoise(keys, RUN, INPUTS).draw(WIDE, "t1t2", LEVEL, FIRST, np.arange(0), 3)
    assert drawn.shape == (0, 3)


def test_pinned() -> None:
    """An execution that another version goes on with must draw what was drawn before.

    The groups lie in four blocks: one more name of a cell is one more measurement of its count.
    """
    groups = np.array([0, 1, (1 << 20) - 1, 1 << 20, 1 << 21, 3 << 20])
    laws: tuple[tuple[LawName, Any], ...] = (
        ("discrete gauss", FIRST), ("rounded gauss", detail_step(1)), ("discrete laplace", TOTAL),
    )  # fmt: skip
    with ring() as keys:
        noise = CellNoise(keys, RUN, INPUTS)
        draws = [
            noise.draw(Noise(law, 100.0), "t1t2", LEVEL, step, groups, 1)[:, 0].tolist()
            for law, step in laws
        ]
    assert draws == [
        [-94, -102, -150, -70, -172, -71],
        [217, 85, -80, -63, -112, 80],
        [38, -75, 345, -224, -30, 36],
    ]
