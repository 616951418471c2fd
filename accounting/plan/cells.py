"""Cells whose noise is mixed: what the plan says of L (``accounting.mixing``)."""

import math
from typing import TYPE_CHECKING

import msgspec

from dpstream.accounting.errors import PolicyError

if TYPE_CHECKING:
    from dpstream.accounting.mixing import Mixing


class Cells(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The cells are the public keys, in the order of their list; component j is mixed by column j.

    Figures are rounded up to 16 bits, so that they do not depend on the processor that found them.

    Attributes:
        size: number of cells.
        digest: of L.
        inverse_norm2: squared norm of the longest column of L^-1.
        rms_norm: root mean square of the norms of L's rows: sd of a typical cell.
        row_sum: the largest sum of magnitudes of a row of L.
    """

    size: int
    digest: str
    inverse_norm2: float
    rms_norm: float
    row_sum: float


def cells_of(mixing: "Mixing | None") -> Cells | None:
    """What a plan says of a mixing; ``None`` where each cell has noise of its own.

    Such a plan is that of a stream with public keys: the same hash, names and bytes.
    """
    if mixing is None or mixing.identity:
        return None
    rms = math.sqrt(float((mixing.row_norms**2).mean()))
    figures = (_coarse(x) for x in (mixing.inverse_norm2, rms, mixing.row_sum))
    return Cells(mixing.size, mixing.digest, *figures)


def checked_mixing(cells: Cells, mixing: "Mixing | None", rows: int) -> "Mixing":
    """The mixing of a plan's cells, which a run is handed apart from the plan.

    Args:
        rows: cells in the public list.

    Raises:
        PolicyError: it is not the one the plan was made with.
    """
    if mixing is None or mixing.digest != cells.digest or rows != cells.size:
        raise PolicyError(
            "cells",
            "the mixing of noise, or the list of cells, is not the one the plan was made with",
            "load the job again",
        )
    if mixing.inverse_norm2 > cells.inverse_norm2 * (1 + 1e-9):
        raise PolicyError(
            "cells",
            "a record would add more to what is noised than the plan says",
            "make the plan anew from the mixing",
        )
    return mixing


def _coarse(figure: float) -> float:
    """Rounded up to 16 bits."""
    part, exponent = math.frexp(figure)
    return math.ldexp(math.ceil(math.ldexp(part, 16)), exponent - 16)
