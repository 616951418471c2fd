"""The question that the tests of tuning begin with, and the encoder's exact answers."""

import math

import msgspec
import numpy as np

from dpstream.accounting.arrays import Int64
from dpstream.accounting.tuning.answer import ChosenBounds, NoiseOf
from dpstream.accounting.tuning.question import (
    Histogram,
    Question,
    TunedColumn,
    encoder_matrix,
)

HOUR = 3_600_000_000
QUESTION = Question(
    2 * HOUR, 1.0, 1e-9, 0.9, None, 1000, "12", 0.05, 1, (TunedColumn("m", -90, 500),)
)


def but(**changes: object) -> Question:
    """The same question but for these fields."""
    return msgspec.structs.replace(QUESTION, **changes)


def free(_: ChosenBounds) -> NoiseOf:
    """A noise that no bound changes; no bound per key can be run."""
    return lambda contributions, per_key_bound: 1.0 if per_key_bound is None else math.inf


def exact(histogram: Histogram, counts: Int64) -> Int64:
    """The nodes of a histogram with these cells, without noise."""
    return np.asarray(encoder_matrix(histogram.cells) @ counts)
