"""The mechanism as published: its figures, and that nothing it releases looks sound."""

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.gaussian import cdp_delta
from dpstream.pipelines.formats.encodings import read_releases
from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.stream.run import run_job
from dpstream.state.ledger.open import AccountPlace
from tests.bench.paper.jobs import Frame, Setting, write_job
from tests.bench.paper.modes import parse_mode
from tests.bench.paper.paper import begin_as_published, published_budget
from tests.bench.paper.synth import Synth, generate
from tests.oracle.simulation import table1_plan


def test_the_figures_of_the_paper() -> None:
    budget = published_budget(table1_plan(100, mode="rounds"))
    selection, values = budget.selection, budget.values[0]
    assert selection is not None and budget.tau is not None and selection.col2 == 7
    rho_values = 32**2 * 7 / (2 * values.sigma**2)
    rho_selection = 32 * 7 / (2 * selection.sigma**2)
    for rho in (rho_values, rho_selection):
        assert cdp_delta(rho, 3.0) <= 1e-9 / 3 * (1 + 1e-9)
        assert cdp_delta(rho * 1.001, 3.0) > 1e-9 / 3
    assert budget.mu**2 / 2 == pytest.approx(rho_values + rho_selection)
    # The stream that is tested has the name that a plan's page knows it by.
    assert selection.name == "selection"
    assert budget.delta * (1 - budget.theta) == pytest.approx(2e-9 / 3)
    assert 32 * (math.exp(3) + 1) * budget.b == pytest.approx(1e-9 / 3)
    assert published_budget(table1_plan(64, mode="rounds")).values[0].col2 == 6
    # The union over triggers is what it lacks: its failures exceed delta by far more.
    assert 100 * 32 * budget.b > 1e-9 and not budget.sound


@pytest.mark.parametrize("privacy", [{}, {"mode": "rounds", "strategy": "blt"}])
def test_another_mechanism_is_refused(privacy: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        published_budget(table1_plan(100, **privacy))


def test_a_run_is_marked_and_never_charged(tmp_path: Path) -> None:
    data = tmp_path / "records.parquet"
    generate(Synth(users=3_000, keys=300, seed=5), data)
    setting = Setting(parse_mode("paper"), 4, 8)
    job = load_job(write_job(Frame(data, "int", tmp_path / "runs", 6.0, 1e-5), setting))
    charged = msgspec.structs.replace(
        job, ledger=AccountPlace(str(tmp_path / "l.db"), "d", "0" * 16)
    )
    with pytest.raises(UsageError, match="ledger"):
        begin_as_published(charged)
    run = begin_as_published(job)
    assert not run.budget().sound
    with pytest.raises(PolicyError, match="without a guarantee"):
        run_job(charged)
    warnings: list[str] = []
    run_job(job, warn=lambda words: warnings.append(str(words)))
    releases = read_releases(job.path.parent / "releases")
    assert releases.num_rows
    assert set(releases["run_id"].to_pylist()) == {f"UNSOUND-{run.run_id}"}
    assert any("does NOT hold" in words for words in warnings)
