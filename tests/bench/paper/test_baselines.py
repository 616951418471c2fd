"""Baselines: one-shot releases of streams, and strategies of cells."""

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from dp_accounting.pld import common
from dp_accounting.pld.privacy_loss_distribution import from_privacy_parameters
from scipy import stats

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.gaussian import delta_of, mu_of
from dpstream.accounting.limits import DECODE_BITS
from dpstream.accounting.strategies.cells.auto import auto
from dpstream.accounting.strategies.cells.eigen import spectrum
from dpstream.accounting.strategies.cells.strategy import identity
from dpstream.accounting.workloads.attributes import explicit, interval, of_size
from dpstream.accounting.workloads.workload import marginals, of_matrix, over, workload_of
from dpstream.dp_transforms.noise.ids import typed_ids
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.pipelines.formats.encodings import read_releases
from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.stream.run import run_job
from tests.accounting.strategies.cells.shapes import EXAMPLE4, attributes, rows, small
from tests.bench.paper import baselines, cell_baselines
from tests.bench.paper.baselines import (
    NAMES,
    Draws,
    Guarantee,
    composed_epsilon,
    query_of,
    run_baseline,
)
from tests.bench.paper.jobs import Frame, Setting, parse_mode, write_job
from tests.bench.paper.synth import DAY_MICROS, Synth, generate
from tests.bench.paper.truth import Columns, Scoreboard, Truth, load
from tests.golden.refusals import Refused

PAPER = Guarantee(6.0, 1e-9, 32)
Published = dict[int, dict[int, float]]


def day(rows: int = 4000, users: int = 100, keys: int = 60, seed: int = 1) -> Columns:
    rng = np.random.default_rng(seed)
    names = pa.array([f"k{i}" for i in range(keys)])
    key = (rng.zipf(1.3, rows) % keys).astype(np.int32)
    time = np.sort(rng.integers(0, DAY_MICROS, rows))
    return Columns(names, key, time, rng.integers(0, users, rows).astype(np.int32))


def record(monkeypatch: pytest.MonkeyPatch) -> Published:
    """What a baseline publishes, by trigger and key."""
    published: Published = {}

    class Recorder(Scoreboard):
        def publish(self, codes: Any, values: Any, replace: bool = False) -> None:
            super().publish(codes, values, replace)
            published[len(published) + 1] = dict(zip(codes.tolist(), values.tolist(), strict=True))

    monkeypatch.setattr(baselines, "Scoreboard", Recorder)
    return published


def slow(name: str, data: Columns, triggers: int, promise: Guarantee, ring: KeyRing) -> Published:
    """The definition, record by record, one draw at a time."""
    query = query_of(name, promise, triggers)
    ids = typed_ids(ring.key, [("string", data.names)])
    value = Draws(ring, (name, "value"), query.value_sigma, ids)
    test = query.selection_sigma and Draws(ring, (name, "test"), query.selection_sigma, ids)
    admitted: dict[int, int] = defaultdict(int)
    rows = []
    for user, key, step_index in zip(
        data.user.tolist(), data.key.tolist(), data.step_index(triggers).tolist(), strict=True
    ):
        admitted[user] += 1
        if admitted[user] <= promise.contributions:
            rows.append((user, key, step_index))
    total: dict[int, float] = defaultdict(float)
    out: Published = {}
    for t in range(1, triggers + 1):
        cumulative = name.startswith("baseline1")
        pairs = [
            (u, k)
            for u, k, step_index in rows
            if step_index == t or (cumulative and step_index < t)
        ]
        out[t] = {}
        for key in {k for _, k in pairs}:
            row = np.array([key])
            units = len({u for u, k in pairs if k == key})
            noisy = sum(k == key for _, k in pairs) + int(value.at(row, t)[0])
            tested = units + int(test.at(row, t)[0]) if test else noisy
            if tested > query.tau / 2**DECODE_BITS:
                total[key] = noisy if cumulative else total[key] + noisy
                out[t][key] = total[key]
    return out


@pytest.mark.parametrize("name", NAMES)
def test_a_baseline_is_its_definition(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data, promise, ring = day(), Guarantee(60.0, 1e-3, 30), KeyRing(bytes(32))
    expected = slow(name, data, 4, promise, ring)
    published = record(monkeypatch)
    figures = run_baseline(name, data, Truth(data, 4), promise, ring)
    assert published == expected
    assert sum(map(len, expected.values())) == figures["updates"] > 10
    if name.startswith("baseline1"):
        assert figures["keys"] == len(expected[4])
    else:
        assert figures["keys"] == len(set().union(*expected.values()))


def even_day(keys: int, per_key: int, triggers: int) -> Columns:
    """Every key gets ``per_key`` records of distinct users, all at the first trigger."""
    rows = keys * per_key
    names = pa.array([f"k{i}" for i in range(keys)])
    user = np.arange(rows, dtype=np.int32)
    return Columns(names, (user % keys).astype(np.int32), np.zeros(rows, np.int64), user)


def noise_is_right(
    name: str, promise: Guarantee, monkeypatch: pytest.MonkeyPatch, halved: str = ""
) -> bool:
    """Whether sd of values and rate of selection are those of the query; 1200 keys.

    Args:
        halved: sabotage: the noise of ``value`` or ``test`` has half its sd.
    """
    query, keys = query_of(name, promise, 2), 1200

    class Weaker(Draws):
        def __init__(self, ring: Any, label: Any, sigma: float, ids: Any) -> None:
            super().__init__(ring, label, sigma / (2 if label[1] == halved else 1), ids)

    monkeypatch.setattr(baselines, "Draws", Weaker)
    published = record(monkeypatch)
    tau, sd = query.tau / 2**DECODE_BITS, query.selection_sigma or query.value_sigma
    checks = []
    for per_key in (round(tau + sd), round(tau + 8 * sd)):
        data = even_day(keys, per_key, 2)
        published.clear()
        run_baseline(name, data, Truth(data, 2), promise, KeyRing(bytes(range(32))))
        selected = len(published[1])
        chance = stats.norm.sf((math.floor(tau) + 0.5 - per_key) / sd)
        checks.append(stats.binomtest(selected, keys, chance).pvalue)
        if selected == keys:
            gaps = np.array(list(published[1].values())) - per_key
            variance = query.value_sigma**2 + 1 / 12
            at = stats.chi2.cdf(np.sum(gaps**2) / variance, keys)
            checks.append(2 * min(at, 1 - at))
    assert len(checks) == 3
    return min(checks) > 1e-5


SMALL = Guarantee(8.0, 1e-6, 2)


@pytest.mark.parametrize("name", NAMES)
def test_noise_and_selection(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert noise_is_right(name, SMALL, monkeypatch)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("halved", ["value", "test"])
def test_half_the_noise_is_noticed(name: str, halved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if halved == "test" and name.endswith("+published"):
        halved = "value"
    assert not noise_is_right(name, SMALL, monkeypatch, halved)


def test_draws_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other keys, triggers, roles, baselines and secrets draw anew; the same name draws again."""
    data = day()
    ids = typed_ids(KeyRing(bytes(32)).key, [("string", data.names)])
    rows = np.arange(60)

    def draw(secret: int = 0, label: tuple[str, ...] = ("a", "value"), t: int = 1) -> list[int]:
        return Draws(KeyRing(bytes([secret] * 32)), label, 1000.0, ids).at(rows, t).tolist()

    assert draw() == draw()
    others = [draw(), draw(1), draw(label=("b", "value")), draw(label=("a", "test")), draw(t=2)]
    assert len({tuple(o) for o in others}) == 5
    assert len(set(draw())) > 50
    sample = Draws(KeyRing(bytes(32)), ("a", "value"), 1000.0, ids).at(rows[::7], 1)
    assert sample.tolist() == draw()[::7], "a draw does not depend on which others are drawn"


@pytest.mark.parametrize("triggers", [1, 100, 1000])
@pytest.mark.parametrize("promise", [PAPER, Guarantee(1.0, 1e-6, 5), Guarantee(6.0, 1e-9, 1)])
def test_the_fair_composition_holds_and_wastes_nothing(triggers: int, promise: Guarantee) -> None:
    query = query_of("baseline1", promise, triggers)
    assert query.selection_sigma is not None
    count = promise.contributions
    n = np.arange(1, count + 1)
    values = ((count - n + 1) ** 2 + n - 1) / query.value_sigma**2
    mu = math.sqrt(triggers * np.max(n / query.selection_sigma**2 + values))
    assert delta_of(promise.epsilon, mu) <= promise.delta
    # C = 1 of two streams: both are touched; with C > 1 the split is nearly free.
    assert mu > 0.998 * mu_of(promise.epsilon, promise.delta)
    tau = query.tau / 2**DECODE_BITS
    tail = stats.norm.sf((tau - 1.5) / query.selection_sigma)
    cells = count * triggers
    for lonely in np.unique(np.geomspace(1, cells, 40).astype(int)):
        rest = mu * math.sqrt((cells - lonely) / cells)
        used = delta_of(promise.epsilon, rest) + lonely * tail
        assert used <= promise.delta * (1 + 1e-6)
    assert cells * tail > 0.5 * promise.delta


def test_baseline_2_spends_everything_in_every_batch() -> None:
    budget = allocate(baselines._one_shot_plan(PAPER))
    assert budget.selection is not None and budget.tau is not None
    for triggers in (1, 1000):
        query = query_of("baseline2", PAPER, triggers)
        assert query.value_sigma == pytest.approx(budget.values[0].sigma, rel=1e-8)
        assert query.selection_sigma == pytest.approx(budget.selection.sigma, rel=1e-8)
        assert query.tau == pytest.approx(int(budget.tau[0]), abs=1)


@pytest.mark.parametrize(("queries", "epsilon"), [(2, 1.0), (30, 6.0), (100, 6.0)])
def test_optimal_composition_is_that_of_the_pld(queries: int, epsilon: float) -> None:
    delta = 1e-6
    each = composed_epsilon(epsilon, delta, queries, delta / (2 * queries))
    for factor, inside in ((1.0, True), (1.01, False)):
        worst = common.DifferentialPrivacyParameters(each * factor, delta / (2 * queries))
        pld = from_privacy_parameters(worst, value_discretization_interval=each * factor)
        spent = pld.self_compose(queries).get_delta_for_epsilon(epsilon)
        assert (spent <= delta * 1.001) == inside


def test_the_published_reading() -> None:
    """Noise and thresholds that the module's docstring compares with the fair ones."""
    for triggers, times in ((100, 5.8), (1000, 6.2)):
        black, fair = (query_of(n, PAPER, triggers) for n in ("baseline1+published", "baseline1"))
        assert black.selection_sigma is None
        assert black.value_sigma / fair.value_sigma == pytest.approx(times, abs=0.1)
    once = query_of("baseline2+published", PAPER, 100)
    assert once.selection_sigma is None and once.value_sigma == pytest.approx(33.4, abs=0.1)
    assert once.tau / 2**DECODE_BITS == pytest.approx(254.3, abs=1)


def test_refusals(refused: Refused) -> None:
    refused(query_of, "baseline3", PAPER, 10)
    refused(lambda: query_of("baseline1+published", Guarantee(0.01, 1e-9, 32), 1000))
    refused(lambda: query_of("baseline1", Guarantee(6.0, 1e-9, 10_000), 1000))
    for name in NAMES:
        refused(query_of, name, Guarantee(0.0, 1e-9, 32), 10)


def test_baseline_2_is_the_job_with_a_window_for_every_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With noise far below 1 the product's own pipeline publishes the same numbers."""
    generate(Synth(users=3000, keys=30, seed=4), tmp_path / "day.parquet")
    frame = Frame(tmp_path / "day.parquet", "int", tmp_path / "runs", 1000.0, 0.01, 2)
    path = write_job(frame, Setting(parse_mode("sticky,strategy=tree,weights=uniform"), 6, 3))
    path.write_text(path.read_text().replace('window = "1d"', 'window = "4h"'))
    job = load_job(path)
    assert (job.plan.timeline.windows, job.plan.timeline.triggers) == (6, 1)
    run_job(job)
    releases = read_releases(path.parent / "releases").group_by("key").aggregate([("count", "sum")])

    data = load(tmp_path / "day.parquet")
    published = record(monkeypatch)
    run_baseline("baseline2", data, Truth(data, 6), Guarantee(1000.0, 0.01, 3), KeyRing(bytes(32)))
    last = {key: value for batch in published.values() for key, value in batch.items()}
    codes = pc.index_in(releases["key"], value_set=data.names).to_pylist()
    assert last == dict(zip(codes, releases["count_sum"].to_pylist(), strict=True))
    assert len(last) > 20


def test_example_4() -> None:
    workload = of_matrix(EXAMPLE4)
    bound = spectrum(workload).bound
    errors = [cell_baselines.gaussian_error(workload), identity(workload).error(workload),
              cell_baselines.haar(workload).error(workload)]  # fmt: skip
    assert errors == pytest.approx([40, 36, 21])
    ratios = [math.sqrt(error / bound) for error in errors]
    assert ratios == pytest.approx([1.6366, 1.5527, 1.1859], abs=6e-5)


@pytest.mark.parametrize("name", small())
def test_the_workload_itself(name: str) -> None:
    workload = small()[name]
    queries = rows(workload)
    gram = queries.T @ queries
    rank = np.linalg.matrix_rank(gram)
    assert cell_baselines.itself(workload).error(workload) == pytest.approx(
        np.diag(gram).max() * rank
    )
    assert cell_baselines.gaussian_error(workload) == pytest.approx(
        np.diag(gram).max() * len(queries)
    )


@pytest.mark.parametrize("name", small())
def test_a_plan_is_the_best_of_all(name: str) -> None:
    workload = small()[name]
    plan, errors = auto(workload), cell_baselines.errors(workload)
    assert len(errors) >= 5 and plan.error <= min(errors.values()) * (1 + 1e-3)
    assert min(errors.values()) >= plan.floor * (1 - 1e-9)


def test_the_largest_column_of_factors_that_peak_at_different_cells() -> None:
    """Prefixes are largest at the first cell, suffixes at the last: neither is where the sum is."""
    rng = np.random.default_rng(5)
    for sizes in ([5, 4], [6, 3, 2], [9]):
        domain = [of_size(str(axis), size) for axis, size in enumerate(sizes)]
        products = [
            (1.0, {axis: interval("prefix", size) for axis, size in enumerate(sizes)}),
            (1.0, {axis: explicit(np.tri(size)[::-1].T + 0.0, size)
                   for axis, size in enumerate(sizes)}),
            (1.0, {0: explicit(rng.integers(0, 3, (4, sizes[0])) + np.eye(4, sizes[0]), sizes[0])}),
        ]  # fmt: skip
        workload = workload_of(domain, products)
        dense = (rows(workload) ** 2).sum(0).max()
        assert cell_baselines.column_norm2(workload) == pytest.approx(dense)


def test_fourier_and_data_cube() -> None:
    workload = marginals(attributes(8, 16, 16), [2])
    bound = spectrum(workload).bound
    # All three tables, as they are; and the characters that they need.
    assert cell_baselines.datacube(workload).sensitivity2 == pytest.approx(3)
    assert cell_baselines.datacube(workload).error(workload) == pytest.approx(
        1.0217**2 * bound, rel=2e-3
    )
    assert math.isfinite(cell_baselines.fourier(workload).error(workload))
    # One table of few cells answers both of its margins.
    small_tables = marginals(attributes(2, 2), [1])
    assert (
        cell_baselines.datacube(small_tables).gram.trace(over([2, 2], ["identity"] * 2)) == math.inf
    )
    assert cell_baselines.datacube(
        marginals(attributes(2, 2), [1, 2])
    ).sensitivity2 == pytest.approx(1)
