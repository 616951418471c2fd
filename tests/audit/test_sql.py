"""SQL questions, black box: sound ones are accepted, sabotaged ones refuted, intervals hold."""

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from dpstream.accounting.arrays import Float64
from dpstream.accounting.query.thresholds import Selection
from dpstream.dp_transforms.noise.oneshot import OneShot
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.one_shot import bounding
from dpstream.pipelines.sql import ask as asking
from dpstream.pipelines.sql.load import load_catalog
from dpstream.pipelines.sql.stage import LocalShards, private_answer
from dpstream.pipelines.tables.engine import Engine
from tests.audit.evidence.bounds import (
    Claim,
    ProvenBound,
    Scores,
    bound,
    rate_above,
    rate_below,
)
from tests.audit.sql_trials import (
    BROKEN,
    FEW,
    HUNDRED,
    PER_GROUP,
    TAIL,
    TWO_ROWS,
    Trial,
    claim_of,
    proven,
    published,
    question,
    wrapped,
    write,
)
from tests.fixed import fixed_run_ids
from tests.pipelines.sql.asking import KEY

TRIALS = 4_000
_FOUR = [(g, 1.0) for g in range(4)]
_EIGHT = [(g, 0.0) for g in range(8)]
#: Questions, and the share of the claimed mu that trials must prove.
SOUND: dict[str, tuple[Trial, float]] = {
    "count": (Trial(f"COUNT(*, {PER_GROUP}(0, 4)) AS n", [(0, 1)] * 6), 0.75),
    "units and sum": (
        Trial(f"SUM(x, {PER_GROUP}(-3, 8)) AS s, COUNT(DISTINCT uid) AS u", [(0, 8)] * 2,
              most=(8, 1)), 0.75,
    ),
    "groups that count": (
        Trial(f"COUNT(*, {PER_GROUP}(0, 1)) AS n", _FOUR, groups=4, kappa=4), 0.75,
    ),
    "norm": (
        Trial(f"COUNT(*, {PER_GROUP}(0, 9), contribution_norm => 2) AS n",
              [(g, 1) for g in range(9)] * 9, groups=9, kappa=9), 0.75,
    ),
    "mean": (Trial(f"AVG(x, {PER_GROUP}(0, 100)) AS a", [(0, 100)], [[(0, 0.0)]] * 6), 0.6),
    "median": (
        Trial(f"MEDIAN(x, {HUNDRED}) AS m", [(0, 99)] * 2, [[(0, 5), (0, 10)]], options=TWO_ROWS),
        0.15,
    ),
    "units, selected": (
        Trial("COUNT(DISTINCT uid) AS u", _FOUR, [_FOUR] * 4, groups=4, kappa=4, options=FEW,
              public=False), 0.4,
    ),
    "sum, selected": (
        Trial(f"SUM(x, {PER_GROUP}(0, 1)) AS s", _EIGHT, [_EIGHT] * 7, groups=8, kappa=8,
              options=FEW, public=False, presence=True), 0.35,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SOUND)
def test_sound_questions_are_accepted(name: str, tmp_path: Path) -> None:
    trial, least = SOUND[name]
    proven_bound, claim = proven(tmp_path, trial, TRIALS)
    assert not proven_bound.refutes(claim)
    assert least * claim.mu <= proven_bound.mu <= claim.mu


@pytest.mark.parametrize("name", BROKEN)
def test_broken_questions_are_refuted(name: str, tmp_path: Path) -> None:
    patch, trial = BROKEN[name]
    honest, claim = proven(tmp_path, trial, TRIALS)
    assert not honest.refutes(claim)
    with patch():
        proven_bound, _ = proven(tmp_path, trial, TRIALS)
    assert proven_bound.refutes(claim) and proven_bound.mu > claim.mu


@pytest.mark.slow
@pytest.mark.parametrize("name", SOUND)
def test_at_full_size(name: str, tmp_path: Path) -> None:
    """Ten times the trials prove no more than is claimed."""
    trial, least = SOUND[name]
    proven_bound, claim = proven(tmp_path, trial, 25 * TRIALS, seed=4)
    assert not proven_bound.refutes(claim) and least * claim.mu <= proven_bound.mu <= claim.mu


def shown_alone(folder: Path, trial: Trial, trials: int) -> tuple[int, Claim]:
    """In how many trials any group is there whose only unit is the trial's."""
    outcomes = published(folder, trial, np.ones(trials, bool))
    return int(outcomes.present.any(axis=1).sum()), outcomes.claim


_LARGE = "epsilon = 3, delta = 0.1, allow_large_delta = TRUE"
ALONE = {
    "in one group": Trial("COUNT(DISTINCT uid) AS u", [(0, 1)], groups=1, options=_LARGE,
                          public=False),
    "in all that count": Trial("COUNT(DISTINCT uid) AS u", _FOUR, groups=4, kappa=4,
                               options=_LARGE, public=False),
    "in fewer than count": Trial(f"SUM(x, {PER_GROUP}(0, 1)) AS s", _FOUR[:2], groups=4, kappa=4,
                                 options=_LARGE, public=False),
    "with a norm": Trial("COUNT(DISTINCT uid, contribution_norm => 1) AS u", _FOUR, groups=4,
                         kappa=4, options=_LARGE, public=False),
}  # fmt: skip


@pytest.mark.parametrize("name", ALONE)
def test_a_group_of_one_unit_appears_with_its_probability(name: str, tmp_path: Path) -> None:
    """At a delta that can be measured: delta's part for thresholds, and not far below it."""
    size = 5_000
    hits, claim = shown_alone(tmp_path, ALONE[name], size)
    assert claim.tail == pytest.approx(0.04)
    assert rate_below(hits, size, TAIL) <= claim.tail
    if name in ("in one group", "in all that count"):
        # A threshold is a whole number: 0.3 of the claim is shown in the mean of many runs.
        assert rate_above(hits, size, TAIL) >= 0.25 * claim.tail
    lower = wrapped(Selection, "need", lambda real: lambda self, m: real(self, m) - int(self.sd))
    with lower():
        hits, _ = shown_alone(tmp_path, ALONE[name], size)
    assert rate_below(hits, size, TAIL) > claim.tail or name == "with a norm"


#: With this many other units of its size a unit more moves the bounds that exact counts give.
_AUTOMATIC = Trial(
    "SUM(x) AS s", [(0, 900.0)], [[(0, 3.0)]] * 400 + [[(0, 900.0)]] * 11,
    options="epsilon = 1, delta = 1e-6",
)  # fmt: skip


def _chosen(folder: Path, trial: Trial, added: int, runs: int) -> Float64:
    """(runs,) upper bounds that runs of the question choose."""
    query, catalog = question(folder, trial)
    write(folder, trial, np.array([bool(added)]))
    out = []
    with KeyRing(bytearray.fromhex(KEY)) as ring, Engine(catalog, catalog.tables) as engine:
        for run in range(runs):
            name = (added * runs + run + 1).to_bytes(16, "big").hex()
            stage_plan = private_answer(query, catalog, LocalShards(engine, ring, 1), ring, name)
            out.append(stage_plan.plan.columns[0].high or 0.0)
    return np.array(out)


def test_bounds_that_are_not_paid_for_are_refuted(tmp_path: Path) -> None:
    """Bounds are one pair for the whole question, so that each run of it is a trial."""
    claim = claim_of(tmp_path, _AUTOMATIC)

    def proof() -> ProvenBound:
        sides = [_chosen(tmp_path, _AUTOMATIC, added, 60) for added in (0, 1)]
        return bound([Scores(*sides)], claim, TAIL)

    honest = proof()
    assert not honest.refutes(claim)
    with mock.patch.object(bounding, "OneShot", _Noiseless):
        assert proof().refutes(claim)


class _Noiseless(OneShot):
    """Bounds are read off exact counts."""

    def rounded_gaussian(self, items: Any, sigma: Float64 | float) -> Any:
        return np.zeros(len(items), np.int64)


def _covered(folder: Path, options: str, groups: int, run: int) -> dict[str, float]:
    """Share of the groups whose interval holds the figure of the bounded rows, by column."""
    rows = [[(0, value / 8)] for value in np.random.default_rng(1).integers(0, 800, 100).tolist()]
    of = f"WITH REPORT, {PER_GROUP}"
    items = f"COUNT(* {of}(0, 4)) AS n, SUM(r.x {of}(0, 100)) AS s, AVG(r.x {of}(0, 100)) AS a"
    trial = Trial(items, rows[0], rows[1:], options=options)
    folder.mkdir()
    write(folder, trial, np.ones(groups, bool))
    with fixed_run_ids(lambda: f"{run + 1:02x}" * 16):
        table = asking.ask(load_catalog(folder), trial.text).table
    values = [row[0][1] for row in rows]
    truth = {"n": len(rows), "s": sum(values), "a": sum(values) / len(rows)}
    ends = {
        name: [table[f"{name}_noise_{end}"].to_numpy() for end in ("low", "high")] for name in truth
    }
    return {name: float(((low <= truth[name]) & (truth[name] <= high)).mean())
            for name, (low, high) in ends.items()}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "groups", "runs"),
    [("epsilon = 2, delta = 1e-6", 5_000, 1),
     pytest.param("epsilon = 2, delta = 1e-6", 10_000, 10, marks=pytest.mark.slow),
     pytest.param("epsilon = 2, mechanism = GEOMETRIC", 10_000, 10, marks=pytest.mark.slow)],
)  # fmt: skip
def test_intervals_cover_what_they_say(
    options: str, groups: int, runs: int, tmp_path: Path
) -> None:
    coverages = [_covered(tmp_path / str(run), options, groups, run) for run in range(runs)]
    shares = {name: np.mean([one[name] for one in coverages]) for name in coverages[0]}
    assert all(0.94 <= share <= 0.96 for share in shares.values()), shares
