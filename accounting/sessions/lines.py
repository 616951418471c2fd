"""Columns as numbers: whole coordinates are values on a lattice, so that sums are whole numbers.

A real value counts as the line of its grid at or below it: that is what its coordinate says.
"""

import math
from fractions import Fraction
from typing import NamedTuple

from dpstream.accounting import limits
from dpstream.accounting.errors import UsageError
from dpstream.accounting.regions.amounts import exact
from dpstream.accounting.regions.dimensions import Dimension, Integer, Real


class Line(NamedTuple):
    """Values of a column: coordinate c has the value unit (first + by c).

    Attributes:
        unit: of the lattice that sums are whole numbers of.
        first, by: whole numbers without a common divisor.
    """

    unit: Fraction
    first: int
    by: int

    def at(self, coordinate: int) -> int:
        """The value of a coordinate, in units."""
        return self.first + self.by * coordinate

    @property
    def low(self) -> float:
        """The value of coordinate 0."""
        return float(self.unit * self.first)

    @property
    def step(self) -> float:
        """From one coordinate's value to the next."""
        return float(self.unit * self.by)


def line_of(dimension: Dimension) -> Line:
    """How a dimension's coordinates are numbers; a real value counts as the grid line below it.

    Raises:
        UsageError: they are none, or too many to be summed.
    """
    if isinstance(dimension, Integer):
        low, step = Fraction(dimension.low), Fraction(1)
    elif isinstance(dimension, Real):
        low, step = exact(dimension.low, dimension.name), exact(dimension.step, dimension.name)
    else:
        raise UsageError(
            dimension.name, "cannot be aggregated", "use a column of whole or real numbers"
        )
    scale = low.denominator * step.denominator
    first, by = int(low * scale), int(step * scale)
    common = math.gcd(first, by)
    line = Line(Fraction(common, scale), first // common, by // common)
    most = max(abs(line.at(0)), abs(line.at(dimension.values - 1)), dimension.values)
    if most > limits.MAX_GRID_VALUE or dimension.values > limits.MAX_SUMMED:
        raise UsageError(
            dimension.name, "has too many steps to be summed", "declare it with a wider step"
        )
    return line
