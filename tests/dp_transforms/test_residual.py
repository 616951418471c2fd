"""Noisy residual tables: exact where noise is off, of the covariance that is charged otherwise."""

from unittest import mock

import numpy as np
import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.accounting.limits import MIXED_BITS
from dpstream.accounting.strategies.cells.bases import Even, difference_matrix, fitted, reduced
from dpstream.dp_transforms import residual
from dpstream.dp_transforms.residual import check_range, published, spent2
from tests.fixed import held_noise
from tests.streams import KEYS

TABLE = np.random.default_rng(4).integers(0, 50, (3, 4))
RING = KEYS.ring()
#: Noise of the table and of a total, in units of 2^-MIXED_BITS, of run 7.
RECORDED = [[-1323320, -349192, -778774], [-870427, -1212939, 1205391]]
RECORDED_TOTAL = 1069780


def drawn(run: int, table: np.ndarray = TABLE, axes: tuple[int, ...] = (0, 2)) -> np.ndarray:
    bases = [Even(n) for n in table.shape]
    return published([table], [axes], [bases], [10.0], RING, (b"%d" % run,))[0]


def differences(table: np.ndarray) -> np.ndarray:
    return reduced(table, [Even(n) for n in table.shape])


def test_without_noise() -> None:
    with mock.patch.object(residual, "mixed", lambda c, m: np.zeros(m.size, np.int64)):
        assert np.array_equal(drawn(0), differences(TABLE))
        assert drawn(0, np.array(7), ()) == 7


def test_noise_is_added_before_floats_round() -> None:
    far = -(2**54) - 2  # as a float it would be a multiple of 4 first
    with mock.patch.object(residual, "mixed", lambda c, m: np.full(m.size, far)):
        assert drawn(0, np.array(1), ()) == ((1 << MIXED_BITS) + far) / 2.0**MIXED_BITS


def test_named_by_run_and_table() -> None:
    first = drawn(1)
    assert np.array_equal(drawn(1), first)
    others = drawn(1, TABLE * 0), drawn(1, TABLE + np.eye(3, 4, dtype=np.int64))
    assert not any(np.isclose(other - first, np.rint(other - first)).any() for other in others)
    assert not np.array_equal(drawn(2), first) and not np.array_equal(drawn(1, axes=(0, 1)), first)
    assert np.array_equal(first * 2**MIXED_BITS, np.rint(first * 2**MIXED_BITS))


def test_one_name_adds_the_same_noise() -> None:
    with held_noise():
        assert np.array_equal(drawn(1, TABLE * 0) + differences(TABLE), drawn(1))


def test_covariance() -> None:
    """As if each cell had noise of its own before differences were taken."""
    noise = np.array([drawn(run).ravel() for run in range(3000)]) - differences(TABLE).ravel()
    expected = 100 * np.kron(
        difference_matrix(3) @ difference_matrix(3).T, difference_matrix(4) @ difference_matrix(4).T
    )
    assert np.abs(np.cov(noise.T) - expected).max() < 0.15 * expected.max()
    assert np.abs(noise.mean(0)).max() < 4 * np.sqrt(expected.max() / 3000)


FITTED = [fitted(np.eye(3) * 0.4 + 0.6, 12), fitted(np.tri(4).T @ np.tri(4) / 4, 12)]


def of_fitted(run: int, table: np.ndarray) -> np.ndarray:
    return published([table], [(0, 2)], [FITTED], [10.0], RING, (b"%d" % run,))[0]


def test_fitted_tables_have_the_noise_of_their_bases() -> None:
    exact = reduced(TABLE, FITTED) / 2.0**24
    noise = np.array([of_fitted(run, TABLE).ravel() for run in range(2000)]) - exact.ravel()
    root = np.kron(FITTED[0].root, FITTED[1].root)
    expected = 100 * root @ root.T
    assert np.abs(np.cov(noise.T) - expected).max() < 0.15 * expected.max()
    assert np.abs(noise.mean(0)).max() < 4 * np.sqrt(expected.max() / 2000)


def test_noise_is_rounded_no_coarser_than_what_is_measured() -> None:
    """Else the last bits of what is measured would be published without noise."""
    with held_noise():
        units = of_fitted(1, TABLE) * 2.0**24
        assert np.array_equal(units, np.rint(units))
        drawn = units - reduced(TABLE, FITTED)
        assert np.array_equal(of_fitted(1, TABLE * 0) * 2.0**24, drawn)
    assert len(set((drawn.ravel() % 256).tolist())) > 4  # noise in units of 2^-24 itself


def test_noise_beyond_whole_units_is_refused() -> None:
    check_range([FITTED], np.array([1e6]))
    with pytest.raises(PolicyError):
        check_range([FITTED], np.array([2.0**40]))


def test_what_fitted_tables_spend() -> None:
    """No record moves them by more, in the metric of their noise."""
    root = 10 * np.kron(FITTED[0].root, FITTED[1].root)
    moved = []
    for cell in np.eye(12, dtype=np.int64):
        column = reduced(cell.reshape(3, 4), FITTED).ravel() / 2.0**24
        moved.append(float((np.linalg.solve(root, column) ** 2).sum()))
    spent = spent2([FITTED], np.array([10.0]), 1)
    assert max(moved) <= spent <= max(moved) * (1 + 1e-9)


def test_what_is_spent() -> None:
    """One record of C moves each table by sqrt(prod (1 - 1/n)); twice C is twice that."""
    sds = np.array([10.0, 5.0])
    one = spent2([[Even(3), Even(4)], []], sds, 1)
    assert one == pytest.approx(2 / 3 * 3 / 4 / 100 + 1 / 25) and one >= 0.5 / 100 + 1 / 25
    assert spent2([[Even(3), Even(4)], []], sds, 3) == pytest.approx(9 * one)
    record = np.zeros((3, 4), np.int64)
    record[1, 2] = 1
    moved = differences(record).ravel()
    covariance = 100 * np.kron(
        difference_matrix(3) @ difference_matrix(3).T, difference_matrix(4) @ difference_matrix(4).T
    )
    assert moved @ np.linalg.solve(covariance, moved) <= spent2([[Even(3), Even(4)]], sds[:1], 1)


def test_every_table_has_a_noise_of_its_own() -> None:
    with pytest.raises(ValueError, match="zip"):
        spent2([[Even(3), Even(4)]], np.array([10.0, 5.0]), 1)


def test_the_same_run_draws_the_same_in_every_version() -> None:
    """A run that was cut off goes on under the same names: these numbers are recorded."""
    draws = (drawn(7, TABLE * 0) * 2**MIXED_BITS).astype(int).tolist()
    assert draws == RECORDED
    assert drawn(7, np.array(0), ()) * 2**MIXED_BITS == RECORDED_TOTAL
