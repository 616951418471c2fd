"""The fast simulation against the one that goes trigger by trigger."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.weights import MILD, SPARED, STEEP
from tests.oracle.simulation import (
    Design,
    admit,
    ranked,
    simulate,
    table1_plan,
    table1_records,
)
from tests.oracle.sweep import Outcome, Sorted, noise_of, sweep

KEYS, TRIGGERS = 3_000, 20
COMBINED: dict[str, Any] = {"per_key_bound": 1, "combine": True}
KINDS: list[dict[str, Any]] = [
    {"weights": MILD},
    {"weights": MILD, "skip": False},
    {"weights": SPARED, "skip": True, "tests": (3, 4, 11, 20), **COMBINED},
    {"weights": STEEP, "skip": False, **COMBINED},
    {"per_key_bound": 1},
    {"fused": True},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_without_noise_both_are_the_same(kind: dict[str, Any]) -> None:
    """Hardly any noise: which pairs are admitted, what they weigh, and what is published when."""
    settings = {"contributions": 12, "strategy": "blt", "delta": 1e-4, **kind}
    plan = table1_plan(TRIGGERS, **settings)
    exact = Design.of(plan, allocate(plan))
    least = 1e-9 if exact.value_sigma else None
    exact = dataclasses.replace(exact, selection_sigma=1e-9, value_sigma=least)
    raw = table1_records(30_000, KEYS, 3)
    figures = sweep(exact, Sorted.of(raw, KEYS, 12), seed=1)
    want = simulate(exact, admit(ranked(raw), 12), raw, KEYS, seed=1)
    assert 50 < want.keys == figures.published[-1] < KEYS
    assert figures.l1 == pytest.approx(want.l1, rel=1e-6)
    assert figures.l2 == pytest.approx(want.l2, rel=1e-6)
    other = dataclasses.replace(exact, skip=not exact.skip)
    if kind.get("weights"):
        assert sweep(other, Sorted.of(raw, KEYS, 12), seed=1) != figures


def test_noise_is_joint() -> None:
    """Each prefix has the strategy's sd, and two of them its correlation."""
    plan = table1_plan(TRIGGERS, strategy="blt", weights=MILD)
    budget = allocate(plan)
    at = np.array([4, 11, 20])
    strategy, sigma = budget.values[0].strategy_object, budget.values[0].sigma
    drawn = noise_of(np.random.default_rng(2), 40_000, strategy, at, sigma)
    assert drawn.std(axis=1) == pytest.approx(budget.values[0].sd[at - 1], rel=0.02)
    decoder = np.tril(np.ones((20, 20))) @ np.linalg.inv(strategy.matrix().astype(float))
    rows = decoder[at - 1]
    want = (rows @ rows.T) / np.outer(*2 * [np.linalg.norm(rows, axis=1)])
    assert np.corrcoef(drawn) == pytest.approx(want, abs=0.02)
    assert want[0, 2] > 0.1


def test_keys_by_a_trigger() -> None:
    outcome = Outcome((2, 5, 9), (1, 4, 6), 0.0, 0.0)
    assert [outcome.by(t) for t in (1, 2, 4.9, 5, 9)] == [0, 1, 1, 4, 6]
