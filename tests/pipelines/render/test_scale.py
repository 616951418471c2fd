"""Whether a store has enough shards, as text."""

from collections.abc import Callable

from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.render.scale import scale_text, shards_lines
from dpstream.pipelines.scale.rates import PRICES, RATES
from dpstream.pipelines.scale.scale import (
    Load,
    as_dict,
    estimate,
    shard_figures,
)


def test_an_estimate_names_what_it_rests_on(spanner_job: Job, make_job: Callable[..., Job]) -> None:
    """Prices and Spanner's limits only of a job that pays for a cluster."""
    load = Load(keys=10**6, records_per_day=10**8)
    for one, cluster in ((spanner_job, True), (make_job(), False)):
        figures = as_dict(estimate(one, load), load, RATES, PRICES)
        text = scale_text(figures)
        used = {name for name in figures["figures"] if cluster or name in RATES}
        assert {line.split()[1] for line in text.splitlines() if line.startswith("From ")} == used
        assert {*PRICES} <= figures["figures"].keys()
        assert ("Cost        $" in text) == cluster and ("SQLite      " in text) != cluster


def test_words_say_whether_there_are_enough(spanner_job: Job, make_job: Callable[..., Job]) -> None:
    assert shard_figures(make_job(), 10) == {} and shards_lines({}) == []
    assert "enough here" in "\n".join(shards_lines(shard_figures(spanner_job, 10)))
    many = shard_figures(spanner_job, 2_000_000)
    assert f"set shards = {many['shards_needed']}" in "\n".join(shards_lines(many))
    assert "--changed-keys" in "\n".join(shards_lines(shard_figures(spanner_job, None)))
