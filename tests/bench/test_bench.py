"""The parts of the benchmarks that measure nothing: fits, plans, data, errors of counts, lanes."""

import argparse
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.stats import norm

from dpstream.accounting.arrays import Int64
from dpstream.pipelines.jobs.job import load_job
from tests.bench import (
    cliffs,
    figures,
    front,
    growth,
    peer_runs,
    selection,
    session,
    stream,
    week,
)
from tests.bench.lanes import Measured, chosen
from tests.bench.regimes import grid, ours
from tests.bench.regimes.grid import Cell
from tests.bench.regimes.ours import population
from tests.bench.shape import statements
from tests.bench.workloads import box_sums, box_variances
from tests.lanes import in_order, left_out
from tests.oracle.rivals import keys
from tests.oracle.rivals.laws import gaussian_mu
from tests.oracle.simulation import table1_records
from tests.oracle.sweep import Sorted

AT = [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("power", "steep"), [(0.3, False), (1.0, False), (1.1, False), (1.5, True)]
)
def test_worse_than_linear_is_seen(power: float, steep: bool) -> None:
    fitted = growth.exponent(AT, [3.0 * n**power for n in AT])
    assert fitted["fit"] == pytest.approx(power, abs=1e-3)
    assert fitted["last"] == pytest.approx(power, abs=1e-3)
    assert growth.too_steep(fitted) is steep


def test_noise_alone_is_not_growth() -> None:
    noisy = [1.0, 4.0, 3.0, 11.0]
    fitted = growth.exponent(AT, noisy)
    assert fitted["error"] > 0.1 and not growth.too_steep(fitted)


@pytest.mark.parametrize("name", cliffs.CLIFFS)
def test_a_cliffs_jobs_are_what_they_say(name: str, tmp_path: Path) -> None:
    field, base = cliffs.CLIFFS[name]
    (tmp_path / "runs").mkdir()
    for n, shape in enumerate(cliffs.shapes(name, 3)):
        assert getattr(shape, field) == getattr(base, field) << n
        small = shape._replace(users=20, keys=10)
        job = load_job(cliffs.write_shape(small, tmp_path, "sticky"))
        timeline = job.plan.timeline
        overlaps = timeline.window // timeline.slide
        assert (job.state.shards, overlaps) == (shape.shards, shape.overlaps)
        assert timeline.triggers == (shape.triggers if overlaps == 1 else overlaps)
        assert timeline.windows == (shape.windows if overlaps == 1 else cliffs.SLIDES)
        keys = pq.read_table(job.source.path)["key"].to_pylist()
        assert {len(key) for key in keys} == {shape.key_bytes}


def test_dimensions_end_where_cost_once_jumped() -> None:
    """Three doublings reach the sizes at which each of these was found to be slow."""
    ends = {field: getattr(cliffs.shapes(name, 3)[-1], field)
            for name, (field, _) in cliffs.CLIFFS.items()}  # fmt: skip
    ends["files"] = growth.sizes(growth.Size(), 3)["files"][-1].files
    assert ends == {
        "shards": 512, "triggers": 10_000, "windows": 5_000, "overlaps": 48, "key_bytes": 1_024,
        "files": 10_000,
    }  # fmt: skip


def test_a_cliff_is_measured_as_the_others_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is fitted is there, of a run and of the next one on its store (`growth.run` is run
    for real below)."""
    measurements = iter(
        [dict.fromkeys(("records", "seconds", *growth.MEASURES), n) for n in (5.0, 2.0)]
    )
    monkeypatch.setattr(cliffs, "in_child", lambda *_: next(measurements))
    (tmp_path / "runs").mkdir()
    small = cliffs.Shape(users=50, keys=10, triggers=2, shards=1)
    costs = growth.least([cliffs.run(small, tmp_path, "sticky")])
    assert costs["cpu_seconds"] == 5.0 and costs["again_cpu_seconds"] == 2.0


def test_start_up_does_not_hide_growth() -> None:
    start_up = dict.fromkeys(("seconds", *growth.MEASURES), 100.0)
    costs = [dict.fromkeys(start_up, 100.0 + 30 * n**1.5) for n in AT]
    net = [growth.beyond(cost, start_up) for cost in costs]
    assert not growth.too_steep(growth.exponent(AT, [cost["seconds"] for cost in costs]))
    assert growth.too_steep(growth.exponent(AT, [cost["seconds"] for cost in net]))
    # Less than a tenth cannot be told from noise, whatever its sign.
    tiny = growth.beyond(dict.fromkeys(start_up, 99.0), start_up)
    assert tiny["seconds"] == pytest.approx(9.9)


def test_each_size_is_doubled_alone() -> None:
    base = growth.Size()
    series = growth.sizes(base, 3)
    assert set(series) == {"users", "keys", "triggers", "contributions", "shards", "files"}
    for name, points in series.items():
        first = growth.FILES if name == "files" else getattr(base, name)
        assert [getattr(point, name) // first for point in points] == AT
        assert all(p._replace(**{name: getattr(base, name)}) == base for p in points)


def test_many_files_hold_the_same_records(tmp_path: Path) -> None:
    size = growth.Size(users=200, keys=50)
    table = pq.read_table(growth.write_data(size, tmp_path))
    parts = growth.write_data(size._replace(files=7), tmp_path)
    assert len(list(parts.iterdir())) == 7 and pq.read_table(parts).equals(table)
    ran = growth.run(size._replace(triggers=2, files=7), tmp_path, "sticky")
    assert ran["records"] == len(table) and ran["again_cpu_seconds"] > 0


def test_plain_numpy_agrees_with_the_truth(tmp_path: Path) -> None:
    """Many users of few keys: what is released is close to the raw histogram."""
    data, out = tmp_path / "data.parquet", tmp_path / "out.parquet"
    users = np.repeat(np.arange(40_000), 2)
    columns = {
        "user": users,
        "key": pa.array([f"k{n % 4}" for n in range(len(users))]),
        "time": pa.array(np.full(len(users), 1_704_067_200_000_000), pa.timestamp("us")),
        "value": np.full(len(users), 50.0),
    }
    pq.write_table(pa.table(columns), data)
    peer_runs.numpy_insecure(data, out)
    errors = peer_runs.errors(data, out)
    assert errors["keys"] == 4 and errors["count_l1"] < 0.02 * len(users)


def test_the_front_marks_what_nothing_of_its_kind_beats() -> None:
    points: list[dict[str, Any]] = [
        {"kind": "same", "keys": 10, "l1": 5},
        {"kind": "same", "keys": 12, "l1": 4},
        {"kind": "same", "keys": 20, "l1": 9},
        {"kind": "per key", "keys": 11, "l1": 3},
        {"kind": "same", "refused": "a rule"},
    ]
    front.mark(points)
    assert [p.get("undominated") for p in points] == [False, True, True, True, None]


def test_every_point_of_the_front_is_a_sound_plan_or_refused(tmp_path: Path) -> None:
    records = Sorted.of(table1_records(3_000, 2_000, 1), 2_000, 32)
    named = list(front.settings())
    sample = [s for n, s in enumerate(named) if n % 15 == 0 or front.default_of(s)]
    points = [front.point(setting, 6, records) for setting in sample]
    assert all(("keys" in p) != ("refused" in p) for p in points) and len(points) > 8
    assert sum(p.get("default", False) for p in points) == 2
    front.mark(points)
    reference = front.one_shot(6, records)
    front.draw([p for p in points if "keys" in p], reference, tmp_path / "front.png")
    assert (tmp_path / "front.png").stat().st_size > 1000


def test_growing_memory_is_seen() -> None:
    def points(leak: float) -> list[week.Point]:
        hours = np.arange(0, 168, 2.0)
        warm = 300 + 200 * np.minimum(hours / 12, 1)  # the first day's growth is no leak
        noise = np.random.default_rng(1).normal(0, 15, len(hours))
        python = warm + leak * hours + noise
        return [week.Point(h, h, m, 60.0, h) for h, m in zip(hours, python, strict=True)]

    assert abs(week.growth(points(0.0), 7)["python"]) < week.ALLOWED_MIB
    assert week.growth(points(0.5), 7)["python"] > week.ALLOWED_MIB
    assert week.growth(points(0.0), 7)["prism"] == 0


def test_rates_of_engines_are_those_of_the_runs_beside_them() -> None:
    """Medians and ends of what each repetition says, also where a machine slows down meanwhile."""

    def pair(slowness: float, cpu: float) -> list[stream.Measured]:
        sizes = ((100, 1.0 + 10.0), (400, 4.0 + 10.0))  # ten seconds of start-up
        return [
            stream.Measured(seconds * slowness, {"launcher": cpu * rows, "engine": 1.0}, "")
            for rows, seconds in sizes
        ]

    base = [pair(1.0, 2e-6), pair(2.0, 2e-6), pair(4.0, 3e-6)]
    own = [pair(2.0, 1e-6), pair(4.0, 1e-6), pair(10.0, 1e-6)]
    figures_of = stream.rates([100, 400], own, base)
    assert figures_of["records_per_second"] == (25.0, 10.0, 50.0)
    assert figures_of["of_in_process"] == (0.5, 0.4, 0.5)
    assert figures_of["cpu_micros_per_record"] == {"launcher": (1, 1, 1), "engine": (0, 0, 0)}
    result = {"engine": "prism", "workers": 1} | figures_of
    assert stream.markdown([result]).splitlines()[-1] == (
        "| Prism | 25 (10 to 50) | 7.14 (2.86 to 14.3) | 0.5 (0.4 to 0.5) | 0.5 (0.4 to 0.5) | "
        "1 (1 to 1) | 2,500 (2,500 to 2,500) |"
    )


def test_a_recorded_week(tmp_path: Path) -> None:
    week.write(tmp_path, 2, 500, 50, 20)
    job = load_job(tmp_path)
    table = pq.read_table(sorted((tmp_path / "in").iterdir()))
    assert table.num_rows == 1000 and job.plan.timeline.windows == 2
    assert job.plan.timeline.period == week.DAY * 1_000_000


def test_figures_off_their_record_are_named() -> None:
    """Of few runs by the kind's margin, whichever way."""
    recorded = figures.references(
        [{"a: cpu": 2.0, "a: memory": 1.0, "a, default: keys": 100.0, "old: cpu": 1.0}]
    )
    assert figures.compare({name: one.value for name, one in recorded.items()}, recorded) == []
    measures = {"a: cpu": 2.59, "a: memory": 0.91, "a, default: keys": 109.0, "old: cpu": 0.78}
    assert figures.compare(measures, recorded) == []
    measures = {"a: cpu": 2.61, "a: memory": 0.9, "a, default: keys": 111.0, "new: cpu": 1.0}
    wrong = figures.compare(measures, recorded)
    assert [line.partition(": ")[0] for line in wrong] == [
        "a, default", "a", "a", "new", "old"
    ]  # fmt: skip


def test_margins_are_made_from_the_spread_of_five_runs() -> None:
    runs = [{"a: cpu": 2.0 * x, "b: cpu": 1.0, "a: keys": 50.0}
            for x in (0.9, 1.0, 1.05, 1.1, 0.95)]  # fmt: skip
    few, enough = figures.references(runs[:4]), figures.references(runs)
    assert few["a: cpu"].margin == figures.TOLERANCES["cpu"] and few["a: cpu"].runs == 4
    assert enough["a: cpu"].value == 2.0 and enough["a: keys"].margin == figures.LEAST
    # Three standard deviations of 7.8%; a figure that never moved has those of its kind.
    assert 0.25 < enough["a: cpu"].margin < 0.28
    assert 0.16 < enough["b: cpu"].margin < 0.2
    assert figures.compare({"a: cpu": 2.5, "b: cpu": 0.87, "a: keys": 52.0}, enough) == []
    wrong = figures.compare({"a: cpu": 2.6, "b: cpu": 0.8, "a: keys": 53.0}, enough)
    assert len(wrong) == 3


def test_a_run_is_recorded_beside_the_others_or_in_their_place() -> None:
    content = {"runs": [{"figures": {"a: cpu": 1.0, "b: cpu": 3.0}}], "commands": {}}
    new = {"figures": {"a: cpu": 2.0, "b: cpu": 3.0}}

    def values(anew: list[str] | None) -> list[dict[str, float]]:
        changed = figures.with_run(content, new, anew)
        assert changed["commands"] == {}
        return figures.recorded_runs(changed)

    assert values(None) == [{"a: cpu": 1.0, "b: cpu": 3.0}, new["figures"]]
    assert values(["a: cpu"]) == [{"b: cpu": 3.0}, new["figures"]]
    assert values([]) == [new["figures"]]


def test_every_recorded_figure_is_a_ratio_or_counts() -> None:
    """No seconds: what is recorded holds on another machine."""
    runs = figures.recorded_runs(json.loads(figures.RECORDED.read_text()))
    kinds = {figures.kind_of(name) for run in runs for name in run}
    assert kinds and kinds <= figures.TOLERANCES.keys()


def test_statements_are_counted_without_imports_and_docstrings() -> None:
    text = (
        '"""A module."""\nimport os\ndef f():\n    """Says so."""\n    if os:\n        return 1\n'
    )
    assert statements(text) == 3  # def, if, return


def boxes(sizes: tuple[int, ...], k: int = 50) -> tuple[Int64, Int64]:
    ends = np.sort(np.random.default_rng(3).integers(0, sizes, (2, k, len(sizes))), axis=0)
    return ends[0], ends[1]


def test_sums_and_variances_equal_the_queries_written_out() -> None:
    sizes = (4, 3, 5)
    rng = np.random.default_rng(4)
    lo, hi = boxes(sizes)
    x = rng.integers(-9, 9, sizes)
    roots = [rng.normal(size=(n, n)) for n in sizes]
    covariances = [root @ root.T for root in roots]
    covariance = np.kron(np.kron(*covariances[:2]), covariances[2])
    inside = [
        (lo[:, k, None] <= np.arange(n)) & (np.arange(n) <= hi[:, k, None])
        for k, n in enumerate(sizes)
    ]
    rows = np.einsum("qa,qb,qc->qabc", *(part.astype(float) for part in inside)).reshape(
        len(lo), -1
    )
    assert (box_sums(x, lo, hi) == rows @ x.ravel()).all()
    np.testing.assert_allclose(
        box_variances(covariances, lo, hi), np.diag(rows @ covariance @ rows.T)
    )


def test_integers_stay_exact() -> None:
    x = np.array([2**53 + 1, 1])
    assert box_sums(x, np.array([[0]]), np.array([[0]]))[0] == 2**53 + 1


ALIKE = in_order(f"tests/state/test_x.py::test_cases[{number}]" for number in range(4))
#: By test, its CPU seconds and the lines it reaches.
TESTS: dict[str, tuple[float, set[int]]] = {
    "tests/state/test_x.py::test_short": (0.01, {0}),
    "tests/state/test_x.py::test_quick": (1.0, {1, 3}),
    "tests/state/test_x.py::test_slow_and_no_more": (4.0, {1, 3}),
    "tests/state/test_x.py::test_sabotage": (4.0, {1}),
    "tests/state/test_x.py::test_killed": (4.5, {1}),
    "tests/state/test_x.py::test_killed_for_long": (9.0, {1}),
    "tests/audit/test_y.py::test_of_the_audit": (4.0, {0}),
    "tests/audit/test_y.py::test_of_the_audit_for_long": (9.0, {0}),
    **{test: (1.0, {2}) for test in ALIKE},
    ALIKE[2]: (1.0, {9}),
}


def measured() -> Measured:
    lines = {test: np.isin(np.arange(16), list(reached)) for test, (_, reached) in TESTS.items()}
    seconds = {test: used for test, (used, _) in TESTS.items()}
    return Measured(seconds, {test: np.packbits(row) for test, row in lines.items()})


def test_what_is_left_out_reaches_no_line_of_its_own() -> None:
    out = left_out(TESTS, dict(chosen(measured())))
    assert out == {
        "tests/state/test_x.py::test_slow_and_no_more",
        "tests/state/test_x.py::test_killed_for_long",
        "tests/audit/test_y.py::test_of_the_audit_for_long",
        ALIKE[3],  # the third alone reaches a line, and the first ones come before it
    }
    stay = set.union(*(reached for test, (_, reached) in TESTS.items() if test not in out))
    assert stay == set.union(*(reached for _, reached in TESTS.values()))


def test_no_measurements_are_refused() -> None:
    with pytest.raises(ValueError, match="no test was measured"):
        list(chosen(Measured({}, {})))


KEYS, COUNT = 300, selection.CONTRIBUTIONS


@pytest.fixture(scope="module")
def records() -> Sorted:
    return Sorted.of(table1_records(20_000, KEYS, 3), KEYS, COUNT)


def test_a_users_pairs_are_numbered_in_the_order_of_time(records: Sorted) -> None:
    """Once each, whatever repeats lie between them."""
    totals = selection.Totals.of(records)
    seen: dict[int, list[int]] = {}
    pairs, repeats = [], 0
    for user, key in zip(records.user.tolist(), records.key.tolist(), strict=True):
        own = seen.setdefault(user, [])
        if key in own:
            repeats += 1
            continue
        pairs.append((key, len(own)))
        own.append(key)
    assert repeats > 100
    assert list(zip(totals.key.tolist(), totals.nth.tolist(), strict=True)) == pairs
    assert totals.units.tolist() == np.bincount([k for k, _ in pairs], minlength=KEYS).tolist()


@pytest.mark.parametrize("growth", [1.0, 2.4])
@pytest.mark.parametrize("fall", selection.WEIGHTS)
def test_what_is_spent_is_what_there_is(fall: tuple[float, float], growth: float) -> None:
    """Squares of both shifts over the variances, and the tails of a user alone in C keys."""
    weights = keys.index_weights(COUNT, *fall)
    (selecting, counting), d, above = selection.threshold(weights, 0.3, 0.1, growth)
    mu = gaussian_mu(6.0, 0.9e-9)
    spent = float(weights @ weights) / selecting**2 + growth**2 * COUNT / counting**2
    assert spent == pytest.approx(mu**2, rel=1e-9)
    tails = norm.sf((above - weights - d) / math.hypot(selecting, d * counting))
    assert tails.sum() == pytest.approx(1e-10, rel=1e-3)
    # The rule before, C tails of the largest weight, asks for more where weights fall.
    largest = COUNT * tails.max()
    assert largest == pytest.approx(1e-10, rel=1e-3) if fall[1] == 0 else largest > 1.2e-10


def test_drawn_errors_are_the_expected_ones(
    records: Sorted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "WEIGHTS", ((1.0, 0.0), (2.0, 2.0)))
    monkeypatch.setattr(selection, "SHARES", (0.3,))
    monkeypatch.setattr(selection, "THETAS", (0.3,))
    totals = selection.Totals.of(records)
    held = totals.units > 0
    size = int(held.sum())
    none, once = np.zeros((size, 0), np.int64), np.ones(size, np.int64)
    cells = keys.Cells(totals.raw[held], totals.units[held], none, once)
    drawn = [list(selection.one_test(totals, 2.0, seed)) for seed in range(40)]
    for n, of in enumerate(drawn[0]):
        weights = keys.index_weights(COUNT, *of["weights"])
        sds, d, above = selection.threshold(weights, of["share"], of["theta"], 2.0)
        weighted = np.bincount(totals.key, weights[totals.nth], KEYS)[held]
        expected = keys.both(cells, weighted, (1.0, d), sds, above)
        assert np.mean([run[n]["l1"] for run in drawn]) == pytest.approx(expected, rel=0.02)


def test_a_table_has_ours_and_the_best_of_one_test(records: Sorted) -> None:
    rows = list(selection.rows_of("small", records, 20, 1))
    ours, rivals = rows[:2], rows[2:]
    assert [row["mechanism"] for row in ours] == ["default", "combined"]
    assert all(row["keys"] >= row["by_tenth"] > 0 for row in ours)
    once, stream = ([r for r in rivals if words in r["mechanism"]] for words in ("once", "stream"))
    assert once[0]["l1"] < stream[0]["l1"]
    for row in rivals:
        assert row["by_tenth"] == 0
        if "most keys" in row["mechanism"]:
            assert row["l1"] <= ours[1]["l1"]
    assert "keys  L1" in selection.line(rows[0])


QUERIES = 120
SMALL = pytest.param(20_000, False)
LONGER = [
    pytest.param(20_000, True, marks=pytest.mark.slow),
    pytest.param(1_000_000, False, marks=pytest.mark.slow),
]


def test_the_whole_session_has_its_shape() -> None:
    for widened in (False, True):
        asking, reply, queries = session.session_of(session.FULL, widened), None, []
        try:
            while True:
                queries.append(asking.send(reply))
                reply = float(len(queries) % 257)
        except StopIteration:
            pass
        figures = [query.figure.what for query in queries]
        assert len(queries) == session.FULL
        assert figures.count("count") == 5 * session.BARS + 5 + 2 * session.SQUARES**2
        assert figures.count("average") > figures.count("quantiles") > 100


@pytest.mark.parametrize(("rows", "individual"), [SMALL, *LONGER])
def test_a_session(tmp_path: Path, rows: int, individual: bool) -> None:
    options: dict[str, Any] = {"queries": QUERIES, "runs": 1, "individual": individual}
    result, took = session.run(
        tmp_path / "rides", argparse.Namespace(rows=rows, held=True, **options)
    )
    assert took["seconds"].shape == (1, QUERIES, 3)
    assert result["regions_balanced"] <= 8
    assert result["regions"] >= 10 * result["regions_balanced"]
    # Every point of the dense squares: all histograms that it is in, four grids and one more.
    assert result["batches"]["most_charged"] == 12 * 100_000
    assert session.within(result, individual, full=False) == []


def test_limits_are_held() -> None:
    seconds = np.array([[[0.1, 0.1, 0.25]] * 10])
    figures = session.ratios(seconds) | {"regions": 700, "regions_balanced": 9}
    figures["batches"] = {"faster": 19.0}
    wrong = session.within(figures, individual=False, full=True)
    assert len(wrong) == 8


def test_rides_are_the_same_every_time(tmp_path: Path) -> None:
    one, two = (session.write(tmp_path / name, 1_000, True) for name in ("a", "b"))
    assert one.read_bytes() == two.read_bytes()
    first = [(folder.parent / "rides-000.parquet").read_bytes() for folder in (one, two)]
    assert first[0] == first[1]


SEED = 5


def part(kind: str, **chosen: Any) -> list[Cell]:
    """Cells of the grid of a kind, with these values."""
    return [
        cell
        for cell in grid.cells()
        if cell.kind == kind and all(getattr(cell, name) in chosen[name] for name in chosen)
    ]


#: What is sampled, and how many of each: regimes in which the program is not beaten.
HELD = {
    "public one-shot": (8, part("public one-shot")),
    "public sum": (3, part("public sum", contributions=(2, 4, 8, 32))),
    "public stream": (8, part("public stream", triggers=(1, 16, 100))),
    "few keys of a person": (6, part("private one-shot", contributions=(1, 2))),
    "many keys of a person": (
        4, part("private one-shot", where=("singles", "unequal", "even"), contributions=(8, 32)),
    ),
    "one trigger a window": (
        2,
        part(
            "private stream",
            triggers=(1,),
            contributions=(1, 2),
            where=("singles", "unequal", "even"),
        ),
    ),
    "tables": (2, part("workload", where=("range 8x16x16", "range 64x64", "range 100x100x100"))),
}  # fmt: skip


def sample() -> list[Cell]:
    rng = random.Random(SEED)
    return [cell for count, cells in HELD.values() for cell in rng.sample(cells, count)]


@pytest.mark.parametrize("cell", sample(), ids=str)
def test_no_rival_is_better(cell: Cell) -> None:
    row = grid.row(cell)
    assert row.holds, row


def test_a_worse_answer_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell("public one-shot", 2, 1, 1.0, 0.0)
    assert grid.row(cell).holds
    figure = ours.public_totals(2, 1.0, 0.0)
    worse = figure._replace(error=1.03 * figure.error)
    monkeypatch.setattr(ours, "public_totals", lambda *_: worse)
    assert not grid.row(cell).holds


def test_the_grid_has_every_regime_once() -> None:
    cells = list(grid.cells())
    assert len(set(cells)) == len(cells) > 700
    for kind in grid.KINDS:
        there = [cell for cell in cells if cell.kind == kind]
        assert there and (kind.startswith("public") or all(cell.where for cell in there))
        if kind.startswith("private"):
            assert all(cell.delta > 0 for cell in there)


def test_populations_are_what_they_say() -> None:
    singles, paper = population("singles"), population("paper")
    records = np.bincount(singles.person)
    assert singles.keys == 91 * 36 and 21_000 < len(singles.person) < 23_000
    assert 0.87 < float((records == 1).mean()) < 0.91
    assert 5.4 < float(np.bincount(paper.person).mean()) < 5.9
    assert population("paper") is paper
    for contributions in (1, 8):
        stream = paper.arrivals(contributions, 16)
        cells = paper.cells(contributions)
        assert stream.step.min() == 1 and stream.step.max() == 16
        assert (cells.units * cells.times).sum() == len(stream.key)
        sizes = paper.cells(contributions, by_size=True)
        assert (sizes.times @ sizes.by_index).sum() == len(stream.key)
        # A person of n keys is in n of them.
        assert all(total % (n + 1) == 0 for n, total in enumerate(sizes.times @ sizes.by_index))
