"""The stream of few records a person: its shape, and what its mechanisms are worth on it."""

import numpy as np

from tests.bench import few_keys as few_keys_of_the_product
from tests.oracle import few_keys
from tests.oracle.few_keys import KEYS, MONTHS, RECORDS, Figures


def test_the_stream_has_the_shape_that_it_says() -> None:
    stream = few_keys.records()
    of_people = np.bincount(stream.person)
    assert len(stream.person) == RECORDS and (of_people > 0).all()
    assert abs((of_people == 1).mean() - 0.89) < 0.005
    assert np.unique(stream.month).size == MONTHS and np.unique(stream.key).size == KEYS
    assert (np.diff(stream.month) >= 0).all()
    shares = np.bincount(stream.key) / RECORDS
    assert abs(shares[0] / shares[1] - 2) < 0.15 and abs(shares[0] / shares[3] - 4) < 0.5
    all_of_them, first = few_keys.cells(stream), few_keys.cells(stream, 1)
    assert all_of_them.sum() >= first.sum() == np.unique(stream.person * MONTHS + stream.month).size


def test_truncated_noise_is_not_beaten_by_the_textbook() -> None:
    figures: dict[tuple[str, int], Figures] = {
        (row.mechanism, row.contributions): row for row in few_keys.figures(few_keys.records())
    }
    for contributions, most in ((1, 0.65), (2, 0.90)):
        mine = figures["truncated", contributions]
        assert mine.error <= most
        for name in ("laplace", "geometric"):
            other = figures[name, contributions]
            assert mine.keys >= other.keys and mine.all_error <= other.all_error
        assert mine.on_others <= 1.2 * figures["laplace", contributions].on_others
    assert figures["truncated", 1].all_error < figures["truncated", 2].all_error


def test_the_product_is_not_beaten_by_the_textbook() -> None:
    """Expected figures of the numbers that the product commits, by ``auto``."""
    table = {(str(row["C"]), str(row["mechanism"])): row for row in few_keys_of_the_product.rows()}
    for contributions, most in (("1", 0.65), ("2", 0.90)):
        mine = table[contributions, "auto: geometric"]
        textbook = table[contributions, "textbook, laplace"]
        assert figure(mine, "error of large cells") <= most
        for name in ("textbook, laplace", "textbook, geometric", "gaussian (blt)"):
            other = table[contributions, name]
            assert figure(mine, "keys") >= figure(other, "keys")
            assert figure(mine, "mean loss of all cells") <= figure(other, "mean loss of all cells")
        shared = "error on the textbook's keys"
        assert figure(mine, shared) <= 1.2 * figure(textbook, shared)


def figure(row: dict[str, object], name: str) -> float:
    return float(str(row[name]))
