"""`dpstream workload answer` seen from outside: is there as much noise as there must be?

The command is typed, and its folder read.  What is there less the exact answers is whitened by what
(epsilon, delta), C and the published mix ask for, computed here from the definitions; runs are many
windows, or many cells, of one answer.  Then the command is spoilt in each of the ways that a
program like it could be wrong, and the same look must see it.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.accounting.arrays import Float64
from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.budget.calibration import committed_text
from dpstream.accounting.gaussian import mu_of
from dpstream.accounting.strategies import make_strategy
from dpstream.accounting.strategies.cells import mixing
from dpstream.dp_transforms import residual as tables
from dpstream.dp_transforms import run as runs
from dpstream.dp_transforms.noise.oneshot import OneShot
from dpstream.pipelines.workload import lattice
from dpstream.pipelines.workload.estimate import Estimate
from dpstream.pipelines.workload.lattice import lattice_of
from dpstream.pipelines.workload.release import read_release
from tests import accounts
from tests.audit.test_mixed_cells import allowed, least, reused
from tests.fixed_runs import fix_run_id
from tests.pipelines.cli.called import call

HOUR, WINDOWS, TRIGGERS, CELLS = 3_600_000_000, 60, 2, 4
#: Cells of an answer that is given once, on two axes.
SIDES, MANY = 40, 2000
START, EPSILON, DELTA, C = 1_704_067_200_000_000, 6.0, 1e-9, 2
PROJECT = """
version = 1
[data_set.people]
unit = { name = "user", type = "int" }
account = { path = "ledger.db", limit = { epsilon = 900.0, delta = 1e-6 } }
insecure_test_secret = "KEY"
[table.records]
path = "records.parquet"
unit_column = "user"
time_column = "at"
[job.cells]
table = "records"
key = [{ column = "cell", type = "int" }, { column = "side", type = "int" }]
aggregate.n = { kind = "count" }
start = "2024-01-01T00:00:00Z"
end = "END"
window = "1h"
release_every = "30m"
budget = { epsilon = 6.0, delta = 1e-9, covers = "lifetime" }
contributions = 2
mechanism.strategy = "blt"
shards = 1
sink = { kind = "parquet", path = "releases" }
"""


def write(folder: Path, cells: int, factor: Any) -> Float64:
    """A survey of one record a unit and its job; returns the exact counts, (windows, triggers,
    cells) of each window so far."""
    rng = np.random.default_rng(8)
    rows = 400
    hours, sides = (WINDOWS, 1) if cells == CELLS else (1, SIDES)
    cell, at = rng.integers(0, cells, rows), rng.integers(0, hours * HOUR, rows)
    table = {
        "user": np.arange(rows),
        "cell": cell // sides,
        "side": cell % sides,
        "at": pa.array(START + at).cast(pa.timestamp("us", "UTC")),
    }
    pq.write_table(pa.table(table), folder / "records.parquet")
    end = np.datetime64(START + hours * HOUR, "us").astype("datetime64[s]")
    text = PROJECT.replace("END", f"{end}Z").replace("KEY", "5e" * 32)
    accounts.write(folder / "dpstream.toml", text)
    fix_run_id(folder, "a7" * 16)
    domain = [{"name": "cell", "size": cells // sides}, {"name": "side", "size": sides}]
    workload = {"domain": domain, "queries": [{"factors": factor}]}
    (folder / "asked.json").write_text(json.dumps(workload))
    counts = np.zeros((hours, TRIGGERS, cells))
    step = at % HOUR // (HOUR // TRIGGERS)
    np.add.at(counts, (at // HOUR, step, cell), 1)
    return counts.cumsum(axis=1)


def answered(folder: Path, *options: str) -> Estimate | Any:
    """The estimate in the folder that the command writes."""
    done = call("workload", "answer", folder / "asked.json", "--project", folder, "--out",
                folder / "out", "--cache", folder / "cache", *options, "--json")  # fmt: skip
    assert done.exit_code == 0, done.output
    return read_release(folder / "out").estimate


def whitened(folder: Path, factor: Any) -> Float64:
    """(windows, triggers * cells) noise of an answer over time, by what the guarantee asks for."""
    exact = write(folder, CELLS, factor)
    estimate = answered(folder, "--over-time")
    mix = np.kron(*estimate.mix)
    noise = estimate.cells.reshape(exact.shape) - exact
    encoder = make_strategy("blt", TRIGGERS).matrix()
    decoder = np.tril(np.ones(encoder.shape)) @ np.linalg.inv(encoder)
    longest = np.sqrt((np.linalg.inv(mix) ** 2).sum(axis=0).max())
    column = np.sqrt((encoder**2).sum(axis=0).max())
    sigma = C * longest * column / mu_of(EPSILON, DELTA)
    flat = noise.reshape(len(noise), -1)
    return np.asarray(np.linalg.solve(sigma * np.kron(decoder, mix), flat.T).T)


def too_little(noise: Float64) -> bool:
    """In one direction, or in the mean of all (4.5 sds of it)."""
    mean = float(np.mean(noise**2))
    return least(noise) < allowed(*noise.shape) or mean < 1 - 4.5 * np.sqrt(2 / noise.size)


def test_there_is_enough_noise_in_every_direction(tmp_path: Path) -> None:
    noise = whitened(tmp_path, {"cell": "range"})
    assert not too_little(noise) and np.mean(noise**2) < 1 + 4.5 * np.sqrt(2 / noise.size)


@contextlib.contextmanager
def calibrating(change: str) -> Iterator[None]:
    """The run's committed numbers, spoilt: noise / 1.25, or as if one record of a unit counted."""

    def calibrate(plan: Any) -> str:
        replace = msgspec.structs.replace
        if change == "C forgotten":
            fewer = replace(plan, privacy=replace(plan.privacy, contributions=1))
            return committed_text(plan, allocate(fewer))
        budget = allocate(plan)
        values = tuple(replace(noise, sigma=noise.sigma / 1.25) for noise in budget.values)
        return committed_text(plan, replace(budget, values=values))

    with mock.patch.object(runs, "calibrate", calibrate):
        yield


@contextlib.contextmanager
def before_completion() -> Iterator[None]:
    """The sensitivity is that of X, and then a column of it is completed to twice the norm."""
    honest = mixing.inverse_norm2

    def factored(matrix: Float64) -> Float64:
        matrix = matrix / matrix.diagonal().max()
        more = matrix + np.diag([float(len(matrix) > 1), *np.zeros(len(matrix) - 1)])
        return np.linalg.inv(np.linalg.cholesky(more)).T.copy()

    def before(mix: Float64) -> float:
        return honest(mix) / (1 + (len(mix) > 1))

    with (
        mock.patch.object(mixing, "_factored", factored),
        mock.patch.object(mixing, "inverse_norm2", before),
    ):
        yield


SPOILT = {
    "scale / 1.25": lambda: calibrating("scale"),
    "C forgotten": lambda: calibrating("C forgotten"),
    "sensitivity before completion": before_completion,
    "a component used again": reused,
}


@pytest.mark.parametrize("name", SPOILT)
def test_too_little_noise_is_seen(name: str, tmp_path: Path) -> None:
    with SPOILT[name]():
        assert too_little(whitened(tmp_path, {"cell": "range"}))


SUMS = {"cell": {"matrix": [[1, 1, 0, 0], [0, 0, 1, 1]]}}


@contextlib.contextmanager
def singular() -> Iterator[None]:
    """L spans the workload's rows alone: what least squares needs, and nothing else."""

    def factored(matrix: Float64) -> Float64:
        if len(matrix) < CELLS:
            return matrix
        root = np.array([[1.0, 1, 0, 0], [0, 0, 1, 1]]) / 2
        return root.T @ root

    with mock.patch.object(mixing, "_factored", factored):
        yield


def test_a_singular_mix_is_refused_before_a_charge(tmp_path: Path) -> None:
    write(tmp_path, CELLS, SUMS)
    with singular():
        done = call("workload", "answer", tmp_path / "asked.json", "--project", tmp_path,
                    "--over-time", "--out", tmp_path / "out", "--cache",
                    tmp_path / "cache")  # fmt: skip
    assert done.exit_code == 2 and "invertible" in done.output
    assert accounts.charges(tmp_path / "ledger.db") == [] and not (tmp_path / "out").exists()


def test_a_singular_mix_would_show_exact_counts(tmp_path: Path) -> None:
    """Of a program that took it; the honest one mixes the identity in, and hides them."""
    exact = write(tmp_path, CELLS, SUMS)
    bare = np.array([1.0, -1.0, 0, 0])
    with singular(), mock.patch.object(mixing, "inverse_norm2", lambda mix: 1.0):
        answers = answered(tmp_path, "--over-time").cells.reshape(exact.shape)
    assert np.abs((answers - exact) @ bare).max() < 2.0**-14
    for name in ("cache", "out", "releases-over-time"):
        assert (tmp_path / name).exists()
    honest = tmp_path / "honest"
    honest.mkdir()
    exact = write(honest, CELLS, SUMS)
    hidden = answered(honest, "--over-time").cells.reshape(exact.shape)
    assert np.abs((hidden - exact) @ bare).std() > 1


def relative_variance(folder: Path, option: str) -> float:
    """Of 2,000 cells asked once: their noise's mean square over what the guarantee needs."""
    exact = write(folder, MANY, {"cell": "identity", "side": "identity"})
    answered(folder, option)
    answers = pq.read_table(folder / "out" / "answers.parquet").column("value").to_numpy()
    ratio = np.exp(-EPSILON / C)
    needed = (
        2 * ratio / (1 - ratio) ** 2
        if option == "--mechanism=geometric"
        else (C / mu_of(EPSILON, DELTA)) ** 2
    )
    return float(np.mean((answers - exact[0, -1]) ** 2) / needed)


#: 4.5 sds of the mean of so many squares; the fourth moment of geometric noise at epsilon / C = 3
#: is 15 squares of its variance.
LEAST = {
    "--mechanism=geometric": 1 - 4.5 * np.sqrt(14 / MANY),
    "--tables": 1 - 4.5 * np.sqrt(2 / MANY),
}


@pytest.mark.parametrize("option", LEAST)
def test_answers_given_once_have_enough_noise(option: str, tmp_path: Path) -> None:
    assert LEAST[option] < relative_variance(tmp_path, option) < 2 - LEAST[option]


@contextlib.contextmanager
def fewer(option: str, change: str) -> Iterator[None]:
    """A scale that is less than it should be."""
    factor = 1.25 if change == "scale / 1.25" else C

    def drawn(honest: Any) -> Any:
        return lambda self, items, scale: honest(self, items, scale / factor)

    def of_tables(counts: Any, axes: Any, bases: Any, sds: Any, *rest: Any) -> Any:
        return published(counts, axes, bases, [sd / factor for sd in sds], *rest)

    published = tables.published
    with contextlib.ExitStack() as stack:
        if option == "--tables":
            stack.enter_context(mock.patch.object(tables, "published", of_tables))
        elif change == "scale / 1.25":
            law = drawn(OneShot.discrete_laplace)
            stack.enter_context(mock.patch.object(OneShot, "discrete_laplace", law))
        else:
            made = lambda strategy, epsilon, _: lattice_of(strategy, epsilon, 1)  # noqa: E731
            stack.enter_context(mock.patch.object(lattice, "lattice_of", made))
        yield


@pytest.mark.parametrize("change", ["scale / 1.25", "C forgotten"])
@pytest.mark.parametrize("option", LEAST)
def test_too_little_noise_of_answers_given_once_is_seen(
    option: str, change: str, tmp_path: Path
) -> None:
    with fewer(option, change):
        assert relative_variance(tmp_path, option) < LEAST[option]


def test_a_draw_used_for_another_cell_is_seen(tmp_path: Path) -> None:
    """Cells that share their noise have the same noise far too often."""
    honest = OneShot.discrete_laplace

    def same(self: OneShot, items: Any, scale: float) -> Any:
        return np.repeat(honest(self, items[: len(items) // 2], scale), 2)

    shares = []
    for law in (honest, same):
        folder = tmp_path / law.__name__
        folder.mkdir()
        exact = write(folder, MANY, {"cell": "identity", "side": "identity"})
        with mock.patch.object(OneShot, "discrete_laplace", law):
            cells = answered(folder, "--mechanism=geometric").cells.ravel()
        step = np.diff(cells - exact[0, -1].ravel())[::2]
        shares.append(np.mean(np.abs(step) < 1e-9))
    assert shares[0] < 0.9 and shares[1] > 0.99
