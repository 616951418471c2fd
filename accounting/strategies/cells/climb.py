"""Maximisation of the concave duals of this package over weights of sum 1, with the gap.

All of them have one shape: a value F(m) of degree 1/2 over the simplex (F^2 is a lower bound of the
error that a strategy can have) and slopes x with sum m x = F, x = 2 dF/dm: the squared column norms
of the strategy that belongs to m.  At the optimum every x is F or, where m is 0, less; scaling the
strategy by its largest x costs the factor max(x) / F, so that every point certifies its own gap.

Two simplices (weights of cells and of queries) work alike: the gaps multiply.

The climb is L-BFGS on the logits of m, in the metric in which a logit weighs m: there the curvature
of a diagonal problem is that of the identity, and the first step m <- m (x / F)^2.  That step alone
converges, too, and twice as fast as the fixed point m <- m x / F.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from dpstream.accounting.arrays import Float64
from dpstream.accounting.errors import required

T = TypeVar("T")
#: The most that one step changes a logit, and the least x / F that it takes for real.
_STRIDE, _LEAST = 6.0, 1e-6
_SHORTEST = 1e-4
#: Steps along which the dual is flatter than this are forgotten.
_CURVED = 1e-4
#: Points times cubed rows: ten minutes of a core.
_WORK = 4 * 10**12


class Slopes(NamedTuple):
    """The value and slopes of a dual at a point.

    Attributes:
        value: F > 0.
        slopes: x for each simplex, sum m x = F in each.
        solution: whatever the caller needs of this point again.
        sure: a lower bound of F in spite of float errors, for duals that give one.
    """

    value: float
    slopes: tuple[Float64, ...]
    solution: Any = None
    sure: float = 0.0

    @property
    def gap(self) -> float:
        """Relative gap that the point certifies: the product of max(x) / F, less 1."""
        return float(np.prod([x.max() / self.value for x in self.slopes])) - 1


def sure_sum(values: Float64) -> float:
    """Sum of the roots of computed eigenvalues, less what their float error may add to it."""
    off = 4 * len(values) * 2.0**-52 * float(values.max(initial=0.0))
    return float(np.sqrt(np.maximum(values - off, 0.0)).sum())


def points_for(rows: int, most: int) -> int:
    """Return how many points are climbed over matrices of ``rows`` rows.

    At 8,192 rows an eigenvalue decomposition takes a minute of a core; the gap of the plan shows
    what is left.

    Args:
        most: points of smaller matrices.
    """
    return max(4, min(most, _WORK // max(1, rows) ** 3))


class Point(NamedTuple):
    """A point of the climb: weights for each simplex, and what the dual says there."""

    weights: tuple[Float64, ...]
    slopes: Slopes


def climb(
    dual: Callable[..., Slopes], start: Sequence[Float64], most: int = 1000, memory: int = 20
) -> Iterator[Point]:
    """Yield points of rising value, at most ``most``; the caller may stop before.

    Args:
        dual: of the weights of each simplex.
        start: positive weights of each simplex.
        most: points.
        memory: steps that L-BFGS remembers; 0: the first step again and again.
    """
    cuts = np.cumsum([len(weights) for weights in start])[:-1].tolist()
    logits = np.log(np.concatenate([weights / weights.sum() for weights in start]))
    weights = _weights(logits, cuts)
    evaluation = dual(*weights)
    steps: list[tuple[Float64, Float64]] = []
    for _ in range(most):
        yield Point(weights, evaluation)
        metric, pull = np.concatenate(weights), _pull(evaluation)
        for history in (steps, []):
            direction = _direction(metric, pull, history).clip(-_STRIDE, _STRIDE)
            slope = np.concatenate(evaluation.slopes) / evaluation.value - 1
            rise = float((metric * slope) @ direction) / 2
            length = 1.0 if rise > 0 else 0.0
            while length > _SHORTEST:
                new = _weights(logits + length * direction, cuts)
                there = dual(*new)
                if np.log(there.value / evaluation.value) >= 1e-4 * length * rise:
                    break
                length /= 3
            else:
                continue
            break
        else:
            return
        steps = [*history, (length * direction, pull - _pull(there))][
            max(0, len(history) + 1 - memory) :
        ]
        logits, weights, evaluation = logits + length * direction, new, there


class Best(NamedTuple, Generic[T]):
    """The result of a climb.

    Attributes:
        error, solution: least error of a point, and what makes its strategy.
        floor, certificate: largest lower bound of a point, and the weights that prove it.
        steps: points that were tried.
    """

    error: float
    solution: T
    floor: float
    certificate: tuple[Float64, ...]
    steps: int


def best_of(
    points: Iterable[Point], primal: Callable[[Point], tuple[float, T]], tolerance: float
) -> Best[T]:
    """Return the best of the points up to the first with a relative gap of at most ``tolerance``.

    Args:
        primal: maps a point to (error of the point's strategy, data that define the strategy).
    """
    best: tuple[float, T] | None = None
    floor, certificate, steps = 0.0, tuple[Float64, ...](), 0
    for point in points:
        steps += 1
        if steps == 1 or point.slopes.sure**2 > floor:
            floor, certificate = point.slopes.sure**2, point.weights
        error, solution = primal(point)
        if best is None or error < best[0]:
            best = error, solution
        if best[0] <= floor * (1 + tolerance):
            break
    return Best(*required(best, "a point is tried"), floor, certificate, steps)


def _weights(logits: Float64, cuts: list[int]) -> tuple[Float64, ...]:
    parts = [np.exp(part - part.max()) for part in np.split(logits, cuts)]
    return tuple(np.maximum(part / part.sum(), 1e-300) for part in parts)


def _pull(evaluation: Slopes) -> Float64:
    """2 log(x / F): where the first step goes."""
    ratio = np.concatenate(evaluation.slopes) / evaluation.value
    return np.asarray(2 * np.log(np.maximum(ratio, _LEAST)))


def _direction(metric: Float64, pull: Float64, steps: list[tuple[Float64, Float64]]) -> Float64:
    """The two loops of L-BFGS, all products in the metric of the point they start from."""
    direction, corrections = pull.copy(), []
    for moved, bent in reversed(steps):
        curve = float((metric * moved) @ bent)
        if curve > _CURVED * float((metric * moved) @ moved):
            share = float((metric * moved) @ direction) / curve
            direction -= share * bent
            corrections.append((moved, bent, curve, share))
    for moved, bent, curve, share in reversed(corrections):
        direction += (share - float((metric * bent) @ direction) / curve) * moved
    return direction
