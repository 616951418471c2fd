"""How exact an answer will be, before anything is charged or read.

Noise is fixed by the question alone, so that its size is public.  Of a count or a sum that is the
whole error.  An average's error falls with the number of records, and a quantile's is one of rank:
so many records it may be off by, whatever their values are.
"""

from typing import Literal, NamedTuple

import numpy as np

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.query.calibration import half_width
from dpstream.accounting.query.parts import half_of
from dpstream.accounting.query.tree import rank_factor
from dpstream.accounting.regions.space import Space
from dpstream.accounting.sessions.aggregates import Question
from dpstream.accounting.sessions.calibration import Measure, calibrated


class Expected(NamedTuple):
    """The error of an aggregate.

    Attributes:
        name: the aggregate's.
        what: ``value``; ``value times records``: to be divided by the records of the cell, for
            values at the ends of the range (the worst case); ``rank``: in records.
        sd: (cells,) of the noise; within: (cells,) half-width of the 95% interval.
    """

    name: str
    what: Literal["value", "value times records", "rank"]
    sd: Float64
    within: Float64

    @property
    def most(self) -> float:
        """Half-width of the interval in the cell where it is largest."""
        return float(self.within.max())


def expected(space: Space, question: Question, boxes: Int64) -> list[Expected]:
    """The errors of a question's aggregates, in their order.

    Args:
        boxes: (m, d, 2) that the query would read.

    Raises:
        UsageError: as for `calibrated`.
    """
    errors = []
    for measures in calibrated(space, question, boxes):
        what = _WHAT[measures.aggregate.what]
        sd, within = np.array([_expected(measure) for measure in measures.each]).T
        errors.append(Expected(measures.aggregate.name, what, sd[measures.of], within[measures.of]))
    return errors


_WHAT: dict[str, Literal["value", "value times records", "rank"]] = {
    "count": "value",
    "sum": "value",
    "average": "value times records",
    "quantiles": "rank",
}


def _expected(measure: Measure) -> tuple[float, float]:
    """(sd, half-width) in cells of one range."""
    line, noises = measure.line, measure.noises
    width = half_width(noises[0].law)
    if line is None:
        return noises[0].sd, float(noises[0].margin)
    if measure.aggregate.what == "sum":
        unit = float(line.unit)
        return noises[0].sd * unit, noises[0].margin * unit
    if measure.aggregate.what == "average":
        total, records = noises
        sd = float(np.hypot(total.sd, half_of(measure.column) * records.sd)) * line.step
        return sd, width * sd
    sd = noises[0].sd * rank_factor(measure.column)
    return sd, width * sd
