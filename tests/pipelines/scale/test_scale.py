"""``plan --scale``: the design's figures on paper, laws of the estimate, and its command line.

Shards of a job on Spanner: as many as keep a step to one commit.
"""

import functools
import json
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from dpstream.accounting.errors import UsageError
from dpstream.accounting.limits import COMMIT_MUTATIONS, MAX_SHARDS
from dpstream.pipelines.cli.main import cli
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.scale import rates
from dpstream.pipelines.scale.rates import PRICES, RATES, SPANNER, with_prices
from dpstream.pipelines.scale.scale import (
    Estimate,
    Load,
    distinct,
    estimate,
    keys_of_a_commit,
    shards_for,
)
from tests.pipelines.conftest import TEMPLATE


@pytest.mark.parametrize("changed", [1, 10_000, 1_000_000])
def test_shards_have_room_for_their_keys(changed: int, spanner_job: Job) -> None:
    most, shards = keys_of_a_commit(spanner_job), shards_for(spanner_job, changed)
    assert 6 * most < COMMIT_MUTATIONS
    mean = changed / shards
    assert mean + 6 * math.sqrt(mean) <= most
    # About the least number: a tenth fewer would not do.
    fewer = changed / (0.9 * shards)
    assert shards == 1 or fewer + 6 * math.sqrt(fewer) > most


def test_there_are_never_more_than_allowed(spanner_job: Job) -> None:
    assert shards_for(spanner_job, 10**15) == MAX_SHARDS


#: The design's scale: 1e9 keys, drawn uniformly, 6e9 records a day, 96 triggers.
PAPER = Load(keys=10**9, records_per_day=6 * 10**9, units=10**9, published_keys=0)
#: Seconds of a micro-batch and workers that the paper reports for it.
PAPER_SECONDS, PAPER_WORKERS = 306, 5_500


def job_for(folder: Path, *edits: tuple[str, str]) -> Job:
    text = TEMPLATE.format(kind="csv", pattern="*.csv", sink="parquet", batch_rows=1000)
    for old, new in [('release_every = "6h"', 'release_every = "15m"'), *edits]:
        assert old in text
        text = text.replace(old, new, 1)
    (folder / "dpstream.toml").write_text(text)
    return load_job(folder / "dpstream.toml")


@pytest.fixture
def on_spanner(tmp_path: Path) -> Job:
    return job_for(
        tmp_path,
        ("contributions = 4", "contributions = 32"),
        ("batch_rows", 'store = "spanner://p/i/d"\nbatch_rows'),
    )


@pytest.fixture
def on_sqlite(tmp_path: Path) -> Job:
    return job_for(tmp_path)


def with_load(**more: object) -> Load:
    return msgspec.structs.replace(PAPER, **more)


def test_the_designs_figures_at_the_papers_scale(on_spanner: Job) -> None:
    needs = estimate(on_spanner, PAPER)
    assert needs.interval == 900
    assert needs.records == 62_500_000
    assert needs.shards == 16_384
    assert 3_750 <= needs.rows_a_step <= 3_850
    assert needs.rows_a_step < keys_of_a_commit(on_spanner)
    assert 65_000 <= needs.key_writes <= 70_000
    assert needs.warnings == ()


def test_tens_of_workers_where_the_paper_has_thousands(on_spanner: Job) -> None:
    """As fast as the paper's average micro-batch, at twice the average load, cores 70% busy."""
    needs = estimate(on_spanner, with_load(within_seconds=PAPER_SECONDS, worker_vcpus=1))
    assert 10 <= needs.workers < 100 < PAPER_WORKERS / 50
    assert needs.within == PAPER_SECONDS


def test_distinct_is_what_uniform_draws_give() -> None:
    rng = np.random.default_rng(0)
    seen = len(np.unique(rng.integers(0, 10_000, 7_000)))
    assert distinct(10_000, 7_000) == pytest.approx(seen, rel=0.02)
    skewed = len(np.unique(rng.zipf(1.3, 7_000) % 10_000))
    assert skewed < seen < 7_000
    assert distinct(1, 1_000_000) == 1
    assert distinct(1e9, 10) == pytest.approx(10, abs=1e-6)


def values(needs: Estimate) -> list[float]:
    cost = [needs.cost.get(name, 0.0) for name in ("total", "worker_vcpus", "spanner_nodes")]
    return [needs.workers, needs.nodes, needs.shards, needs.peak_writes, sum(needs.vcpus.values()),
            needs.state_gib, *cost]  # fmt: skip


@pytest.mark.parametrize(
    "more",
    [
        {"records_per_day": 12 * 10**9},
        {"peak": 8.0},
        {"keys": 4 * 10**9},
        {"units": 4 * 10**9},
        {"within_seconds": 60.0},
        {"published_keys": 10**9},
    ],
    ids=str,
)
def test_more_never_needs_less(on_spanner: Job, more: dict[str, object]) -> None:
    less, much = (values(estimate(on_spanner, load)) for load in (PAPER, with_load(**more)))
    assert all(b >= a for a, b in zip(less, much, strict=True))
    assert much != less


def test_windows_that_overlap_hold_their_keys_again(on_spanner: Job) -> None:
    """Keys and pairs are there once in each open window, units once in all."""

    def gib(windows: int, load: Load) -> float:
        timeline = on_spanner.plan.timeline
        often = msgspec.structs.replace(timeline, slide=timeline.window // windows)
        plan = msgspec.structs.replace(on_spanner.plan, timeline=often)
        return estimate(msgspec.structs.replace(on_spanner, plan=plan), load).state_gib

    one, two, four = (gib(windows, PAPER) for windows in (1, 2, 4))
    assert four - two == pytest.approx(2 * (two - one), rel=1e-3) and two > one
    few_units = with_load(units=10**6)
    assert gib(4, few_units) == pytest.approx(4 * gib(1, few_units), rel=0.01)


def test_what_can_be_published_is_bounded_by_the_threshold(on_spanner: Job) -> None:
    few = estimate(on_spanner, with_load(published_keys=None, records_per_day=10**6))
    assert 0 < few.keys_published < 10**6 / 10
    many = estimate(on_spanner, with_load(published_keys=None, keys=100, units=None))
    assert many.keys_published == 100


def test_a_rate_is_used_for_its_own_part(on_spanner: Job) -> None:
    base = estimate(on_spanner, PAPER).vcpus
    for name, part in (
        ("pipeline_records", "pipeline"),
        ("shuffle_rows", "shuffle"),
        ("spanner_records", "database_client"),
    ):
        half = RATES | {name: RATES[name]._replace(value=RATES[name].value / 2)}
        slow = estimate(on_spanner, PAPER, half).vcpus
        assert slow[part] == pytest.approx(2 * base[part], abs=0.02)
        assert all(slow[other] == base[other] for other in base if other != part)


def test_prices_are_inputs(on_spanner: Job) -> None:
    base = estimate(on_spanner, PAPER).cost
    dear = estimate(on_spanner, PAPER, prices=with_prices({"spanner_node_hour": 1.8})).cost
    assert dear["spanner_nodes"] == pytest.approx(2 * base["spanner_nodes"])
    assert dear["worker_vcpus"] == base["worker_vcpus"]
    assert sum(v for k, v in base.items() if k != "total") == pytest.approx(base["total"], abs=0.05)
    for wrong in ({"vcpu": 1.0}, {"vcpu_hour": -1.0}, {"vcpu_hour": float("nan")}):
        with pytest.raises(UsageError, match="--price"):
            with_prices(wrong)


def test_every_figure_names_its_source() -> None:
    for name, figure in {**RATES, **SPANNER, **PRICES}.items():
        assert figure.value > 0 and figure.source, name
        if figure.kind == "measured":
            assert figure.source.startswith("python -m tests.bench."), name
        if figure.kind == "list price":
            assert "as of 20" in figure.source and "/pricing" in figure.source, name


def test_one_machine_is_told_when_it_is_too_small(on_sqlite: Job) -> None:
    small = estimate(on_sqlite, Load(keys=10_000, records_per_day=10**6))
    assert (small.store, small.workers, small.nodes, small.cost) == ("sqlite", 1, 0, {})
    assert small.warnings == () and 1 <= small.shards <= 4
    large = estimate(on_sqlite, PAPER)
    assert any("memory" in warning for warning in large.warnings)
    # Table 1: 934 MiB of state for 58 million records.
    table1 = estimate(on_sqlite, Load(keys=10**6, records_per_day=57_870_000))
    assert table1.state_gib == pytest.approx(934 / 1024, rel=0.05)


@pytest.mark.parametrize(
    "more",
    [{"peak": 0.5}, {"peak": float("nan")}, {"peak": float("inf")}, {"keys": 0},
     {"within_seconds": 0.0}, {"published_keys": -1}],
    ids=str,
)  # fmt: skip
def test_what_is_no_load_is_refused(on_spanner: Job, more: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        estimate(on_spanner, with_load(**more))


SCALE = ("--scale", "--keys", "1000000000", "--records-per-day", "6000000000")


def test_the_command(on_spanner: Job) -> None:
    outcome = CliRunner().invoke(cli, ["plan", "--project", str(on_spanner.path), *SCALE])
    assert outcome.exit_code == 0, outcome.output
    for part in ("16,384", "3,815 rows a step", "list price: as of", "Cost", "microbatch"):
        assert part in outcome.stdout
    args = [*SCALE, "--within", "306s", "--price", "vcpu_hour=0.01", "--json"]
    plan = json.loads(
        CliRunner().invoke(cli, ["plan", "--project", str(on_spanner.path), *args]).stdout
    )
    assert plan["scale"]["estimate"]["within"] == 306
    assert plan["scale"]["figures"]["vcpu_hour"]["kind"] == "given"


@pytest.mark.parametrize(
    ("args", "field"),
    [
        (["--scale", "--keys", "5"], "--records-per-day"),
        ([*SCALE, "--price", "vcpu_hour"], "--price"),
        ([*SCALE, "--within", "soon"], "--within"),
        ([*SCALE, "--peak", "0.1"], "--peak"),
    ],
)
def test_what_the_command_refuses(on_spanner: Job, args: list[str], field: str) -> None:
    outcome = CliRunner().invoke(cli, ["plan", "--project", str(on_spanner.path), *args])
    assert outcome.exit_code == 2 and field in outcome.stderr


def test_this_machine_can_be_measured(on_sqlite: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    once = functools.partial(rates.records_per_core_second, runs=1)  # not the best of three
    monkeypatch.setattr(rates, "records_per_core_second", once)
    args = ["--scale", "--keys", "1000", "--records-per-day", "1000000", "--measure", "--json"]
    outcome = CliRunner().invoke(cli, ["plan", "--project", str(on_sqlite.path), *args])
    assert outcome.exit_code == 0, outcome.output
    figure = json.loads(outcome.stdout)["scale"]["figures"]["pipeline_records"]
    assert "this machine" in figure["source"] and 20_000 < figure["value"] < 20_000_000
    assert figure["value"] != RATES["pipeline_records"].value
