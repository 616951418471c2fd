"""Answers of sessions: exact totals of cells, their noise, and the table that is released.

    totals = tallied(...)                       # or a scan's: exact, private
    noisy = measured(question, .., totals, ring, run_id, inputs_of(totals, ring))  # public
    table = released(question, .., noisy)       # post-processing

No Beam, no store, no database.
"""

from dpstream.dp_transforms.session.release import (
    answered,
    encoded,
    errors,
    inputs_of,
    labels,
    measured,
    released,
)
from dpstream.dp_transforms.session.totals import ColumnTotals, Noisy, Totals, nothing, tallied

__all__ = [
    "ColumnTotals",
    "Noisy",
    "Totals",
    "answered",
    "encoded",
    "errors",
    "inputs_of",
    "labels",
    "measured",
    "nothing",
    "released",
    "tallied",
]
