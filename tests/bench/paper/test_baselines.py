"""Baselines: one-shot releases of streams, and strategies of cells."""

import functools
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
from tests.bench.paper import baselines, cell_baselines, linear
from tests.bench.paper import linear as shapes
from tests.bench.paper.baselines import (
    NAMES,
    Draws,
    Guarantee,
    composed_epsilon,
    query_of,
    run_baseline,
)
from tests.bench.paper.jobs import Frame, Setting, parse_mode, write_job
from tests.bench.paper.linear import PARTS, Row, Study
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


# Linear workloads of the eigen-design paper: their figures, and the shapes of their queries.


STUDY = Study(cells=32, large=128)


@functools.cache
def solved_rows(part: str) -> list[Row]:
    return PARTS[part](STUDY, lambda _: None)


def test_example_4_has_the_papers_figures() -> None:
    [row] = solved_rows("example4")
    errors = row["errors"]
    printed = {"gaussian": 1.6366, "identity": 1.5527, "haar": 1.1859, "eigen": 1.0178}
    assert {name: errors[name] for name in printed} == pytest.approx(printed, abs=2e-4)
    assert errors["optimum"] < errors["eigen"] and row["squared"] == pytest.approx(15.018, abs=0.02)
    assert row["bound"] == pytest.approx(math.sqrt(14.933 / 8) / mu_of(0.5, 1e-4), rel=1e-4)
    for matrix in map(np.array, row["matrices"].values()):
        assert np.allclose(matrix, matrix.T) and (matrix**2).sum(0).max() == pytest.approx(1)


def test_table_2_says_who_is_best_and_worst() -> None:
    table_rows = solved_rows("table2")
    assert [row["name"] for row in table_rows] == list(linear.PRINTED_TABLE2)
    for row in table_rows:
        errors = row["errors"]
        assert 1 - 1e-9 <= row["floor"] <= errors["optimum"] <= errors["eigen"] * 1.001
        assert row["best_factor"] * errors["eigen"] == pytest.approx(errors[row["best"]])
        assert row["worst_factor"] >= row["best_factor"] and row["bound_ratio"] <= 1 + 1e-9
        assert "optimum" not in (row["best"], row["worst"])


def test_figure_3_has_both_kinds_of_errors() -> None:
    figure_rows = solved_rows("figure3")
    absolute = [row for row in figure_rows if row["figure"] == "absolute"]
    assert [row["kind"] for row in absolute] == ["ranges"] * 8 + ["tables"] * 6
    assert all(row["errors"]["optimum"] <= min(row["errors"].values()) * 1.001 for row in absolute)
    relative = [row for row in figure_rows if row["figure"] == "relative"]
    assert len(relative) == 2 * 4 * len(linear.EPSILONS)
    by_budget = [row["errors"]["eigen"] for row in relative[: len(linear.EPSILONS)]]
    assert by_budget == sorted(by_budget, reverse=True)
    assert by_budget[0] / by_budget[2] == pytest.approx(mu_of(1, 1e-4) / mu_of(0.1, 1e-4))


def test_relative_errors_are_means_of_sizes_of_noise() -> None:
    """Against drawn noise of the identity strategy, the only one whose noise is plain."""
    table = shapes.generated("t", (2, 4, 4), 5000, 1)
    problem = shapes.tables(table.sizes)._replace(rivals=("identity",))
    errors = linear.relative_errors(problem, table)
    shaped = table.counts.reshape(table.sizes)
    exact = np.concatenate([a.ravel() for a in problem.workload.apply(shaped)])
    noise = np.random.default_rng(0).normal(size=(4000, *table.sizes))
    drawn = np.concatenate([noise.sum(axis).reshape(4000, -1) for axis in (3, 2, 1)], axis=1)
    size = np.maximum(exact, 5)
    assert errors["identity"] == pytest.approx(np.mean(np.abs(drawn) / size), rel=0.02)
    assert errors["optimum"] <= errors["identity"]


def test_figure_4_trades_error_for_time() -> None:
    figure_rows = solved_rows("figure4")
    for workload in ("1D ranges", "2-way tables"):
        mine = [row for row in figure_rows if row["workload"] == workload]
        full = next(row["error"] for row in mine if row["method"] == "full")
        assert {row["method"] for row in mine} == {"full", "separation", "principal"}
        assert all(full * (1 - 1e-3) <= row["error"] for row in mine)
        errors = [row["error"] for row in mine if row["method"] == "principal"]
        assert errors[-1] <= errors[0] * 1.001 and all(row["seconds"] >= 0 for row in mine)


def test_figure_5_eigenvectors_do_not_mind_the_order_of_cells() -> None:
    plain, permuted, tables, tables_permuted = (row["errors"] for row in solved_rows("figure5"))
    assert permuted["eigen"] == pytest.approx(plain["eigen"], rel=2e-3)
    for name in ("wavelet", "Fourier"):
        assert permuted[name] > 1.1 * plain[name] >= plain["eigen"]
        assert tables[name] >= 1 - 1e-9 and tables_permuted[name] >= tables["eigen"] * 0.999


@pytest.mark.parametrize("make", [linear.haar_basis, linear.fourier_basis])
@pytest.mark.parametrize("size", [1, 2, 8])
def test_design_queries_are_orthonormal(make, size) -> None:  # type: ignore[no-untyped-def]
    basis = make(size)
    assert basis.shape == (size, size) and np.allclose(basis @ basis.T, np.eye(size))


@pytest.mark.parametrize("sizes", [{"cells": 48}, {"cells": 16}, {"large": 1 << 14}])
def test_sizes(sizes: dict[str, int], refused: Refused) -> None:
    refused(lambda: Study(**sizes).check())
    assert STUDY.check() == STUDY


def test_words() -> None:
    page = linear.words(solved_rows("example4") + solved_rows("figure4")[:1])
    assert "gaussian 1.636" in page and "full 128" in page


@pytest.mark.parametrize(
    ("cells", "attributes", "expected"),
    [(2048, 3, (8, 16, 16)), (2048, 1, (2048,)), (32, 5, (2,) * 5), (64, 4, (2, 2, 4, 4))],
)
def test_split(cells: int, attributes: int, expected: tuple[int, ...]) -> None:
    assert shapes.split(cells, attributes) == expected


@pytest.mark.parametrize(("cells", "attributes"), [(48, 2), (8, 4)])
def test_sizes_that_cannot_be_shared(cells: int, attributes: int, refused: Refused) -> None:
    refused(shapes.split, cells, attributes)


def test_random_ranges_are_boxes_of_some_attributes() -> None:
    problem = shapes.random_ranges((2, 4, 4), 5)
    solved_rows = problem.workload.products[0].factors[0].matrix
    assert solved_rows is not None and solved_rows.shape == (shapes.QUERIES, 32)
    boxes = solved_rows.reshape(-1, 2, 4, 4)
    sides = [np.asarray(boxes.any(axis=tuple({1, 2, 3} - {axis}))) for axis in (1, 2, 3)]
    for box, one, two, three in zip(boxes, *sides, strict=True):
        assert np.array_equal(box, np.multiply.outer(np.multiply.outer(one, two), three))
    unbounded = np.array([side.all(axis=1) for side in sides])
    assert 0 < unbounded[0].mean() < 1 and (~unbounded).any(axis=0).mean() > 0.5
    again, other = (shapes.random_ranges((2, 4, 4), seed).workload.structure for seed in (5, 6))
    assert again == problem.workload.structure != other


def test_random_tables_are_some_sets_of_attributes() -> None:
    sets = [p.axes for p in shapes.random_tables((2, 4, 4, 2), 1).workload.products]
    assert len(set(sets)) == len(sets) == 4 and all(sets)
    assert [len(p.axes) for p in shapes.tables((2, 4, 4)).workload.products] == [2, 2, 2]


def test_permuted_queries_are_the_same_in_another_order() -> None:
    problem = shapes.ranges((4, 4))
    variant = shapes.permuted(problem, 2)
    gram, other = problem.workload.gram(), variant.workload.gram()
    assert not np.allclose(gram, other) and variant.weight == 100
    assert np.allclose(np.linalg.eigvalsh(gram), np.linalg.eigvalsh(other))
    assert spectrum(variant.workload).bound == pytest.approx(spectrum(problem.workload).bound)
    # Strategies that know the order of cells are worse off.
    for name in shapes.RANGE_RIVALS:
        assert variant.rival(name).error(variant.workload) > problem.rival(name).error(
            problem.workload
        )
    assert variant.eigen().error(variant.workload) == pytest.approx(
        problem.eigen().error(problem.workload), rel=1e-2
    )


def test_rivals_over_the_attributes_where_queries_are_one_matrix() -> None:
    problem = shapes.random_ranges((4, 8), 0)
    plain = shapes.ranges((4, 8))
    pair = (problem, plain._replace(grid=plain.workload))
    gram, expected = (each.rival("haar").gram.dense() for each in pair)  # type: ignore[attr-defined]
    assert np.array_equal(gram, expected) and gram.shape == (32, 32)
    assert shapes.predicates(8, 0).rival("identity").error(shapes.predicates(8, 0).workload) > 0


def test_generated_tables_have_shapes_and_records() -> None:
    census, adult = shapes.histograms(2048, 3)
    assert (census.sizes, census.records) == ((8, 16, 16), 15_000_000)
    assert (adult.sizes, adult.records) == ((4, 8, 8, 8), 33_000)
    counts = np.sort(census.counts)
    assert counts[-1] > 20 * np.median(counts)
    assert np.array_equal(shapes.histograms(2048, 3)[0].counts, census.counts)
