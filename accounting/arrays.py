"""Arrays of numpy by the type of what they hold, as annotations name them."""

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]
#: Ids of 16 bytes, (n, 2): two little-endian words each.
Ids = npt.NDArray[np.uint64]
