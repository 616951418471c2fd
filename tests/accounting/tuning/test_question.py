"""The question of a tuning: grids, sensitivity of the encoders, budget, stated accuracy."""

import itertools
import math
from fractions import Fraction
from statistics import NormalDist

import msgspec
import numpy as np
import pytest

from dpstream.accounting import limits
from dpstream.accounting.errors import UsageError
from dpstream.accounting.gaussian import delta_of
from dpstream.accounting.tuning.question import (
    CONTRIBUTIONS,
    Histogram,
    TunedColumn,
    TuningDesign,
    canonical,
    contributions_of,
    design,
    encoder_matrix,
    magnitudes,
    pair_candidates,
    value_candidates,
    worst_factor,
)
from tests.accounting.tuning.questions import QUESTION, but
from tests.structs import changed, leaves

# --- grids -------------------------------------------------------------------------------


def test_grids_are_public_geometric_and_reach_both_ends() -> None:
    assert magnitudes(1) == (1,) and magnitudes(9) == (1, 2, 3, 4, 5, 6, 7, 8, 9)
    for most in (2, 3, 10, 17, 1000, 1 << 32):
        grid = magnitudes(most)
        assert grid[0] == 1 and grid[-1] == most
        assert all(b - a == 1 or b <= 1.25 * a + 1 for a, b in itertools.pairwise(grid))
    assert value_candidates(0, 3) == (0, 1, 2, 3)
    assert value_candidates(5, 9) == (5, 6, 7, 8, 9)
    assert value_candidates(-9, -5) == (-9, -8, -7, -6, -5)
    assert value_candidates(-2, 1) == (-2, -1, 0, 1)


def test_extrapolation_is_rounded_up_and_capped() -> None:
    assert [contributions_of(n, Fraction(5, 2), 9) for n in (1, 2, 3, 4)] == [3, 5, 8, 9]
    assert pair_candidates(Fraction(12), 100)[-1] == 9
    assert contributions_of(1, Fraction(1, 50), 9) == 1


# --- sensitivity and budget ----------------------------------------------------------------


@pytest.mark.parametrize("cells", [1, 2, 3, 4, 5, 7, 8, 9, 31, 64, 77])
def test_l2_of_every_move_is_within_the_stated_sensitivity(cells: int) -> None:
    for of in design(but(columns=(TunedColumn("m", 0, cells),), values_per_unit=3)).histograms:
        per_unit = 1 if of.name == CONTRIBUTIONS else 3
        matrix = encoder_matrix(of.cells)
        worst = 0.0
        for places in itertools.islice(
            itertools.combinations_with_replacement(range(of.cells), per_unit), 3000
        ):
            moved = np.bincount(places, minlength=of.cells)
            worst = max(worst, float(np.sqrt(((matrix @ moved) ** 2).sum())))
        assert worst <= of.sensitivity
        assert worst > 0.999 * of.sensitivity  # and the bound is not idle


@pytest.mark.parametrize(
    "columns", [(), QUESTION.columns, (*QUESTION.columns, TunedColumn("k", 0, 9))]
)
def test_all_histograms_together_cost_mu(columns: tuple[TunedColumn, ...]) -> None:
    made = design(but(columns=columns))
    used = sum((of.sensitivity / of.sigma) ** 2 for of in made.histograms)
    assert 0.999 * made.mu**2 < used <= made.mu**2
    assert delta_of(1.0, math.sqrt(used)) <= 1e-9 < delta_of(1.0, 1.01 * math.sqrt(used))
    half = sum((of.sensitivity / (of.sigma / 2)) ** 2 for of in made.histograms)
    assert delta_of(1.0, math.sqrt(half)) > 1e-9


def test_what_a_histogram_says_of_itself() -> None:
    """Shares that add up to no more than all of mu^2, targets, and a rank error by its formula."""
    made = design(but(quantile=0.9, cover=None, tail=0.05, columns=(TunedColumn("m", -90, 500),)))
    contributions, values = made.histograms
    assert sum(Fraction(of.share) for of in made.histograms) < 1
    assert contributions.targets == (0.9,) and values.targets == (0.05, 0.95)
    for of in made.histograms:
        matrix = encoder_matrix(of.cells)
        assert of.col2 == matrix.sum(axis=0).max() and of.share == pytest.approx(0.5, rel=1e-9)
        quantile = NormalDist().inv_cdf(1 - 0.05 / (2 * of.cells))
        sd = math.sqrt(of.sigma**2 + 1 / 12) * worst_factor(matrix, of.targets)
        assert of.rank_error == pytest.approx(sd * quantile, rel=1e-12)
    read = design(but(epsilon=0.0, delta=0.0), private=False)
    assert [of.rank_error for of in read.histograms] == [0.0] * len(read.histograms)


def test_figures_at_the_ends_of_their_ranges_are_taken() -> None:
    for changes in (
        {"max_contributions": limits.MAX_CONTRIBUTIONS},
        {"values_per_unit": limits.MAX_VALUES_PER_UNIT},
        {"max_contributions": 24, "scale": "12"},
    ):
        design(but(**changes))
    for beyond, text in (
        ({"max_contributions": limits.MAX_CONTRIBUTIONS + 1}, "must lie between 0 and"),
        ({"max_contributions": 23, "scale": "12"}, "is so short that two pairs"),
        ({"epsilon": limits.MAX_EPSILON * 1.01}, "must lie between 0 and"),
    ):
        with pytest.raises(UsageError, match=text):
            design(but(**beyond))


def test_the_tree_beats_plain_cells_at_equal_budget() -> None:
    for cells in (2, 3, 4, 5, 8, 16, 23, 64, 77, 200):
        tree = encoder_matrix(cells)
        col2 = int(tree.sum(axis=0).max())
        for targets in ((0.9,), (0.5,), (0.05, 0.95)):
            plain = worst_factor(np.eye(cells, dtype=np.int64), targets)
            assert math.sqrt(col2) * worst_factor(tree, targets) < plain


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"epsilon": 0.0}, "--epsilon"),
        ({"epsilon": 1e-5}, "--epsilon"),
        ({"delta": 1.0}, "--delta"),
        ({"quantile": 1.0}, "--quantile"),
        ({"quantile": None, "cover": 1.0}, "--cover"),
        ({"tail": 0.5}, "--tail"),
        ({"max_contributions": 0}, "--max-contributions"),
        ({"values_per_unit": 65}, "--values-per-unit"),
        ({"scale": "4380"}, "--first"),
    ],
)
def test_questions_that_are_refused_in_public(changes: dict[str, object], field: str) -> None:
    with pytest.raises(UsageError) as caught:
        design(but(**changes))
    assert caught.value.field == field


# --- with noise ------------------------------------------------------------------------------


def rank_errors(made: TuningDesign, scale: float, draws: int = 400) -> list[float]:
    """Share of draws in which a prefix minus its target errs beyond the stated rank error."""
    rng, shares = np.random.default_rng(3), []
    for of in made.histograms:
        matrix = encoder_matrix(of.cells)
        counts = rng.integers(0, 200, of.cells)
        noise = np.rint(rng.normal(0, of.sigma * scale, (draws, len(matrix)))).astype(np.int64)
        decode = np.cumsum(np.linalg.pinv(matrix.astype(float)), axis=0)
        estimates = (matrix @ counts + noise) @ decode.T
        truth = np.cumsum(counts)
        worst = np.zeros(draws)
        for q in of.targets:
            wrong = (estimates - q * estimates[:, -1:]) - (truth - q * truth[-1])
            worst = np.maximum(worst, np.abs(wrong).max(axis=1))
        shares.append(float((worst > of.rank_error).mean()))
    return shares


def test_stated_rank_error_holds_and_is_not_idle() -> None:
    made = design(QUESTION)
    assert max(rank_errors(made, 1.0)) < 0.08
    assert min(rank_errors(made, 2.0)) > 0.3  # the check can fail


# --- canonical form ----------------------------------------------------------------------


def test_the_canonical_form_has_frozen_names() -> None:
    """Digests of questions are computed from this form: a renamed field keeps its name here."""
    drawn = Histogram("m", (1, 2), 3, (0.5,), 2, 1.5, 0.5, 3.25, 4.0)
    form = canonical(QUESTION, TuningDesign(0.25, (drawn,)))
    assert form == {
        "question": {
            "first": 7_200_000_000, "epsilon": 1.0, "delta": 1e-9, "quantile": 0.9, "cover": None,
            "max_contributions": 1000, "scale": "12", "tail": 0.05, "values_per_unit": 1,
            "columns": [["m", -90, 500]], "key_records": None,
        },
        "mu": "0.25",
        "histograms": [{
            "name": "m", "candidates": [1, 2], "cells": 3, "targets": [0.5], "col2": 2,
            "sensitivity": "1.5", "share": "0.5", "sigma": "3.25", "rank_error": "4",
        }],
    }  # fmt: skip


def test_the_last_bits_of_a_processor_do_not_make_another_question() -> None:
    def nudged(histogram: Histogram) -> Histogram:
        figures = ("sensitivity", "share", "sigma", "rank_error")
        return msgspec.structs.replace(
            histogram, **{n: getattr(histogram, n) * (1 + 4e-16) for n in figures}
        )

    here = design(QUESTION)
    there = TuningDesign(here.mu * (1 + 4e-16), tuple(map(nudged, here.histograms)))
    assert here != there and canonical(QUESTION, here) == canonical(QUESTION, there)


FULL = but(cover=0.5, key_records=4)


@pytest.mark.parametrize("path", leaves(FULL), ids=lambda path: ".".join(map(str, path)))
def test_every_field_of_a_question_is_in_its_canonical_form(path: tuple[object, ...]) -> None:
    of = TuningDesign(0.25, ())
    assert canonical(changed(FULL, path), of) != canonical(FULL, of)


DESIGN = design(QUESTION)


@pytest.mark.parametrize("path", leaves(DESIGN), ids=lambda path: ".".join(map(str, path)))
def test_every_field_of_a_design_is_in_the_canonical_form(path: tuple[object, ...]) -> None:
    assert canonical(QUESTION, changed(DESIGN, path)) != canonical(QUESTION, DESIGN)
