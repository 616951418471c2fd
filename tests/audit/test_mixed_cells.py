"""Mixed cells seen from outside: is there as much noise as the guarantee needs, in every direction?

Windows of a run have noise of their own, so that many windows are many runs.  What is published
less the exact counts is whitened by the covariance that (epsilon, delta), C and L ask for, computed
here from their definitions: sigma^2 (L L^T) x (B B^T) with sigma = C |L^-1| |A| / mu.  A direction
with less noise than that tells neighbours apart better than mu allows.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest

from dpstream.accounting import mixing as certified
from dpstream.accounting.arrays import Float64, kron
from dpstream.accounting.budget.allocation import Budget, allocate
from dpstream.accounting.budget.calibration import committed_text
from dpstream.accounting.gaussian import mu_of
from dpstream.accounting.mixing import Mixing
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.strategies import make_strategy
from dpstream.dp_transforms.noise.continuous import ContinuousGaussian
from tests.dp_transforms.runs import (
    begin_mixed,
    exact_counts,
    factors,
    matrices,
    mixed_plan,
    mixed_released,
)
from tests.streams import generate

#: L's inverse has columns of norms 1.2 and more.
FACTORS = factors(2, 2)
TRIGGERS, CELLS = 2, 4
Change = Callable[[Plan], Budget]


def seen(
    folder: Path, windows: int, mixing: Mixing, change: Change | None = None, **options: Any
) -> tuple[Plan, Float64]:
    """The plan, and (windows, triggers * cells) published less exact counts of a whole run."""
    settings = {"triggers": TRIGGERS, "windows": windows, "strategy": "blt", **options}
    plan = mixed_plan(mixing, **settings)
    stream = generate(plan, records=4 * windows, users=1 << 40, keys=mixing.size)
    text = None if change is None else committed_text(plan, change(plan))
    run = begin_mixed(plan, folder, mixing, 1, text)
    estimates = matrices(mixed_released(run, stream.batches(5000)), ["n"])["n"]
    return plan, (estimates - exact_counts(plan, stream, mixing.size)).reshape(windows, -1)


def whitened(plan: Plan, noise: Float64, parts: list[Float64]) -> Float64:
    """The noise by what the guarantee asks for, from the definitions alone."""
    product = kron(parts)
    encoder = make_strategy(plan.privacy.strategy, plan.timeline.triggers).matrix()
    decoder = np.tril(np.ones(encoder.shape)) @ np.linalg.inv(encoder)
    longest = np.sqrt((np.linalg.inv(product) ** 2).sum(axis=0).max())
    column = np.sqrt((encoder**2).sum(axis=0).max())
    privacy = plan.privacy
    sigma = privacy.contributions * longest * column / mu_of(privacy.epsilon, privacy.delta)
    return np.asarray(np.linalg.solve(sigma * np.kron(decoder, product), noise.T).T)


def least(noise: Float64) -> float:
    """The smallest variance of any direction, from samples in rows."""
    return float(np.linalg.eigvalsh(noise.T @ noise / len(noise))[0])


def allowed(windows: int, size: int) -> float:
    """What samples of enough noise do not fall below: 4 sds below their smallest variance's own
    limit, (1 - (size / windows)^1/2)^2 (Marchenko and Pastur)."""
    return (1 - np.sqrt(size / windows)) ** 2 - 4 * np.sqrt(2 / windows) * 0.4


def test_there_is_enough_noise_in_every_direction(tmp_path: Path) -> None:
    plan, noise = seen(tmp_path, 200, Mixing(FACTORS))
    smallest = least(whitened(plan, noise, FACTORS))
    assert allowed(200, TRIGGERS * CELLS) <= smallest < 1


def scaled(plan: Plan) -> Budget:
    budget = allocate(plan)
    less = [msgspec.structs.replace(noise, sigma=noise.sigma / 1.25) for noise in budget.values]
    return msgspec.structs.replace(budget, values=tuple(less))


def without_contributions(plan: Plan) -> Budget:
    privacy = msgspec.structs.replace(plan.privacy, contributions=1)
    return allocate(msgspec.structs.replace(plan, privacy=privacy))


def before_completion(plan: Plan) -> Budget:
    """As if columns were of norm 1, as before one of them was completed."""
    assert plan.cells is not None and plan.cells.inverse_norm2 > 1.5
    return allocate(
        msgspec.structs.replace(plan, cells=msgspec.structs.replace(plan.cells, inverse_norm2=1.0))
    )


@contextlib.contextmanager
def reused() -> Iterator[None]:
    """Every step draws the components' first node again."""
    honest = ContinuousGaussian.pairs

    def pairs(self: ContinuousGaussian, prf: Any, tweaks: Any, node: int) -> Any:
        return honest(self, prf, tweaks, 0)

    with mock.patch.object(ContinuousGaussian, "pairs", pairs):
        yield


@pytest.mark.parametrize(
    ("change", "windows"), [(scaled, 200), (without_contributions, 60), (before_completion, 300)]
)
def test_too_little_noise_is_seen(change: Change, windows: int, tmp_path: Path) -> None:
    plan, noise = seen(tmp_path, windows, Mixing(FACTORS), change)
    assert least(whitened(plan, noise, FACTORS)) < allowed(windows, TRIGGERS * CELLS)


def test_a_component_that_is_used_again_is_seen(tmp_path: Path) -> None:
    with reused():
        plan, noise = seen(tmp_path, 60, Mixing(FACTORS))
    assert least(whitened(plan, noise, FACTORS)) < 1e-3


def test_a_singular_mixing_would_show_exact_counts(tmp_path: Path) -> None:
    """It is refused; a program that took it would publish some combination of cells as it is."""
    rows = factors(4)[0]
    rows[3] = rows[0] + rows[1] - rows[2]
    with pytest.raises(Exception, match="singular"):
        Mixing([rows])
    with mock.patch.object(certified, "inverse_norm2", lambda factor: 1.0):
        _, noise = seen(tmp_path, 60, Mixing([rows]))
    bare = np.array([1.0, 1.0, -1.0, -1.0])
    assert np.abs(noise[:, :4] @ bare).max() < 2.0**-14
    _, honest = seen(tmp_path / "honest", 60, Mixing(factors(4)))
    assert np.abs(honest[:, :4] @ bare).max() > 1


def relative_error(folder: Path, windows: int, strategy: str) -> float:
    """Mean squared error of all cells and triggers over what plan and L announce."""
    mixing = Mixing(factors(6, 8))
    plan, noise = seen(folder, windows, mixing, triggers=4, strategy=strategy)
    sd = np.outer(allocate(plan).values[0].sd, mixing.row_norms).reshape(-1)
    return float((noise**2).sum() / (windows * (sd**2).sum()))


def test_the_error_is_what_the_plan_announces(tmp_path: Path) -> None:
    assert relative_error(tmp_path, 60, "dense") == pytest.approx(1, abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["blt", "dense"])
def test_the_error_of_500_runs_is_within_2_percent(strategy: str, tmp_path: Path) -> None:
    assert relative_error(tmp_path, 500, strategy) == pytest.approx(1, abs=0.02)
