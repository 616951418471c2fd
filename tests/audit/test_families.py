"""Black box: answers of one function on neighbours, of each kind of noise that a question can take.

Every unit has a key of its own, and all keys are public, so that one call is as many independent
mechanisms as there are keys.  A neighbour of each lacks its unit.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from scipy.stats import beta

import dpstream
from dpstream.accounting.arrays import Float64, Ids, Int64
from dpstream.dp_transforms.noise.oneshot import OneShot

EPSILON, SIZE, MOST = 3.0, 20_000, 8.0
ALPHA = 1e-7
PUBLIC = {"key": "page", "public_keys": list(range(SIZE)), "max_keys": 1}


def answers(figure: str, there: bool) -> Float64:
    """Of all keys, with the units or without them."""
    units = np.arange(SIZE if there else 0)
    data = pa.table({"user": units, "page": units, "x": np.full(len(units), MOST)})
    given: dict[str, Any] = {"unit": "user", "epsilon": EPSILON, "mechanism": "geometric", **PUBLIC}
    if figure == "sum":
        given |= {"value": "x", "bounds": (0, MOST), "max_rows": 1}
    answer = getattr(dpstream, figure)(data, **given)
    assert answer.delta == 0
    return np.asarray(answer.table.column(1 if figure == "sum" else "units"), np.float64)


def exceeded(one: Float64, other: Float64) -> bool:
    """Whether some event "at least t" or "at most t" is surely more than e^epsilon as likely."""
    for sign in (1, -1):
        for t in np.quantile(sign * one, np.linspace(0.02, 0.98, 49)):
            hits, rare = int((sign * one >= t).sum()), int((sign * other >= t).sum())
            least = beta.ppf(ALPHA, hits, SIZE - hits + 1) if hits else 0.0
            most = beta.ppf(1 - ALPHA, rare + 1, SIZE - rare) if rare < SIZE else 1.0
            if least > math.exp(EPSILON) * most:
                return True
    return False


def leaks(figure: str) -> bool:
    there, without = answers(figure, True), answers(figure, False)
    return exceeded(there, without) or exceeded(without, there)


@pytest.mark.parametrize("figure", ["histogram", "sum"])
def test_no_event_is_more_than_e_epsilon_as_likely(figure: str) -> None:
    assert not leaks(figure)


def half_stairs(honest: Callable[..., Int64]) -> Callable[..., Int64]:
    def draw(shot: OneShot, items: Ids, scale: float, sensitivity: int, step: int) -> Int64:
        return honest(shot, items, scale / 2, sensitivity // 2, max(1, step // 2))

    return draw


def small(honest: Callable[..., Int64]) -> Callable[..., Int64]:
    return lambda shot, items, scale: honest(shot, items, scale / 1.5)


@pytest.mark.parametrize(
    ("figure", "law", "sabotage"),
    [("sum", "staircase", half_stairs), ("histogram", "discrete_laplace", small)],
    ids=["a staircase of half the bound", "scale / 1.5"],
)
def test_too_little_noise_is_seen(
    figure: str, law: str, sabotage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OneShot, law, sabotage(getattr(OneShot, law)))
    assert leaks(figure)
