"""Digits of a fixed width."""

import numpy as np
import pyarrow as pa

from dpstream.pipelines.tabulation.digits import numbers_of


def test_digits_and_what_is_none() -> None:
    texts = ["0042", "9999", "42", "00042", "4 42", "-042", "12.5", "", "٤٢", "12a4"]
    numbers, good = numbers_of(pa.array(texts), 4)
    assert good.tolist() == [True, True] + [False] * 8
    assert numbers[:2].tolist() == [42, 9999] and numbers.dtype == np.int64


def test_slices_and_nothing() -> None:
    column = pa.array(["01", "02", "03", "04"]).slice(1, 2)
    assert numbers_of(column, 2)[0].tolist() == [2, 3]
    numbers, good = numbers_of(pa.array([], pa.string()), 2)
    assert len(numbers) == 0 and len(good) == 0


def test_eighteen_digits() -> None:
    numbers, good = numbers_of(pa.array(["9" * 18]), 18)
    assert numbers.tolist() == [10**18 - 1] and good.all()
