"""The margins that a plan states hold for what is published, level by level."""

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from scipy import stats

from dpstream.accounting.tabulation import margins
from dpstream.accounting.tabulation.margins import margin
from dpstream.accounting.tabulation.parameters import TABLES
from dpstream.dp_transforms.tabulation.release import figures_of, outputs
from tests.dp_transforms.tabulation.measuring import exact_counts, measured
from tests.dp_transforms.tabulation.worlds import World, world

[PERSONS] = TABLES["p"]


def _stated(w: World, part: Any, cells: int, size: int) -> int:
    if w.parameters.estimates == "combined" and part.first is not None:
        return margins.combined_margin(part.first_noise, part.noise, size, cells)
    return margin(part.noise, cells, clipped=not w.parameters.allow_negative)


def missed(w: World, runs: int) -> dict[Any, list[int]]:
    """By level, detail and cells of a figure: figures beyond their margin, and all."""
    exact = exact_counts(w, PERSONS)
    stated: dict[Any, int] = {}
    out: dict[Any, list[int]] = defaultdict(lambda: [0, 0])
    for run in range(runs):
        for (level, counts), (_, parts) in zip(
            exact, measured(w, PERSONS, run_id=f"{run:032x}"), strict=True
        ):
            for part in parts:
                truth = counts.cells(part.groups, PERSONS.details[part.detail])
                size = truth.shape[1]
                for output in outputs(PERSONS):
                    rows = output.rows.get(part.detail, ())
                    for row, figures in zip(
                        rows, figures_of(part, rows, w.parameters), strict=True
                    ):
                        key = level.level, part.detail, part.first is None, len(row.cells)
                        if key not in stated:
                            stated[key] = _stated(w, part, len(row.cells), size)
                        errors = figures - truth[:, list(row.cells)].sum(axis=1)
                        out[key][0] += int((np.abs(errors) > stated[key]).sum())
                        out[key][1] += len(errors)
    return out


def _wrong(misses: dict[Any, list[int]]) -> list[Any]:
    """Kinds of figures that miss their margin more often than 5% with all but no doubt."""
    alpha = 1e-6 / len(misses)
    return [key for key, (beyond, all_) in misses.items()
            if stats.binom.sf(beyond - 1, all_, 0.05) < alpha]  # fmt: skip


@pytest.mark.parametrize("settings", [
    {"noise": "census"},
    {"noise": "rounded"},
    {"noise": "census", "definition": "puredp", "budget": 9.0},
    {"noise": "census", "allow_negative": False},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("runs", [2, pytest.param(200, marks=pytest.mark.slow)])
def test_margins_hold(settings: dict[str, Any], runs: int) -> None:
    misses = missed(world(1_500, **settings), runs)
    assert len(misses) > 40 and _wrong(misses) == []


@pytest.mark.parametrize("runs", [2, pytest.param(200, marks=pytest.mark.slow)])
def test_margins_of_combined_figures_hold(runs: int) -> None:
    """Where no threshold is near, so that nothing was selected: they do not cover its bias."""
    from dpstream.accounting.tabulation.parameters import PR_LEVELS, US_LEVELS

    for steps in ((-1e6, -9e5, 1e6), (1e6, 2e6, 3e6), (-3e6, -2e6, -1e6)):
        far = {"t1t2": dict.fromkeys((*US_LEVELS, *PR_LEVELS), steps)}
        misses = missed(world(300, estimates="combined", thresholds=far), runs)
        assert _wrong(misses) == []


def test_margins_of_less_noise_do_not() -> None:
    w = world(1_500)
    less = w._replace(parameters=world(0, budget=1.6).parameters)
    stated = {}
    for _, parts in measured(less, PERSONS):
        for part in parts:
            stated[part.first is None, part.detail] = margin(part.noise)
    beyond = all_ = 0
    for (_, counts), (_, parts) in zip(exact_counts(w, PERSONS), measured(w, PERSONS), strict=True):
        for part in parts:
            truth = counts.cells(part.groups, PERSONS.details[part.detail])
            errors = np.abs(part.values - truth)
            beyond += int((errors > stated[part.first is None, part.detail]).sum())
            all_ += errors.size
    assert stats.binom.sf(beyond - 1, all_, 0.05) < 1e-6
