"""The mechanism with one test at the end, against plain loops and its expectation."""

import math

import numpy as np
import pytest
from scipy.stats import norm

from tests.bench import selection
from tests.oracle.rivals import keys
from tests.oracle.rivals.laws import gaussian_mu
from tests.oracle.simulation import table1_records
from tests.oracle.sweep import Sorted

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
