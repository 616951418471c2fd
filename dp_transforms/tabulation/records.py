"""Records of a data file as tables take them: codes by public index, nothing else of a person."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dpstream.accounting.arrays import Int32

Int8 = npt.NDArray[np.int8]
Int16 = npt.NDArray[np.int16]

#: Columns of race codes, and the column of the ethnicity behind them.
RACES = 8


class Records(NamedTuple):
    """A batch of records; each row is one unit (a person or a household).

    Attributes:
        block: (n,) row of the geography that the record lies in, which is in the run.
        codes: (n, 9) index of race codes 1..8 and the ethnicity code in the public code list, -1
            where there is none.
        leaf: by name of a table, (n,) leaf that the record falls into, -1: none, the table does
            not count it.
    """

    block: Int32
    codes: Int16
    leaf: dict[str, Int8]

    def __len__(self) -> int:
        """How many records there are."""
        return len(self.block)
