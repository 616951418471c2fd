"""The released table of a question, from its noisy sums alone: post-processing.

A row for each cell, in their order: the cell's range along each axis, and of each aggregate its
value, the sd of its noise, and both ends of a 95% interval.  Estimates are made of all cells at
once, wherever their noise was drawn, so that they are the same bytes.
"""

import numpy as np
import pyarrow as pa

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.query.calibration import PartNoise, half_width
from dpstream.accounting.query.tree import cells_of, tree_of
from dpstream.accounting.regions.dimensions import (
    Budget,
    Category,
    Dimension,
    Integer,
    Real,
    Timestamp,
)
from dpstream.accounting.regions.space import Space
from dpstream.accounting.sessions.aggregates import Question, line_of
from dpstream.accounting.sessions.calibration import Measure, Measures, calibrated
from dpstream.accounting.sessions.cells import Axis
from dpstream.dp_transforms.one_shot.estimates import Estimate, direct, mean
from dpstream.dp_transforms.one_shot.trees import read_off
from dpstream.dp_transforms.session.measuring import Noisy
