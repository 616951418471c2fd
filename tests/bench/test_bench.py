"""The parts of the benchmarks that measure nothing: fits, missing peers, errors of counts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.pipelines.jobs.job import load_job
from dpstream.state.ledger.open import read_ledger
from tests.bench import cliffs, figures, front, growth, ledger, peer_runs, stream, week
from tests.bench.shape import statements
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


def test_a_bench_of_an_account_charges_what_it_says(tmp_path: Path) -> None:
    bench_figures = ledger.bench(tmp_path, 40, 2, zcdp=True)
    assert bench_figures["entries"] == 40 and bench_figures["charge"]["cpu_ms"] > 0
    # How it was made; one to compose, two by the one, one and four by both in turn.
    assert len(read_ledger(tmp_path / "40-True.db")) == 1 + 40 + 1 + 2 + 1 + 4


def test_statements_are_counted_without_imports_and_docstrings() -> None:
    text = (
        '"""A module."""\nimport os\ndef f():\n    """Says so."""\n    if os:\n        return 1\n'
    )
    assert statements(text) == 3  # def, if, return
