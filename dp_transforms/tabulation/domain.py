"""The public domain of every table: which regions and iterations there are, from public files.

Nothing of a data file enters here, so the cells of a table, their order and with it the names of
their noise are the same whatever the data are.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa


class PublicFiles(NamedTuple):
    """The public files of an execution, parsed and checked.

    Attributes:
        iterations: CODE (string, distinct), NAME (string), LEVEL (int8, 1 or 2), ALONE (bool, null
            for ethnicities), DETAILED_ONLY, COARSE_ONLY, ETHNICITY (bool); those of level 0 are
            left out.
        codes: race and ethnicity codes, sorted.
        members: (k, 2) int32, row of an iteration and index of a code that belongs to it.
        geography: block (string of 15 digits, distinct), state (2), county (5), tract (11),
            place (7, null: none), aiannh (4, null: none); only what is in the run.
    """

    iterations: pa.Table
    codes: pa.StringArray
    members: npt.NDArray[np.int32]
    geography: pa.Table
