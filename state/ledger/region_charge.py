"""The part of an entry that only kind ``session`` has: which points pay how much.

Boxes are packed (edge by edge, int64, deflated, base64), because a batch can have thousands.  The
account's chain covers the packed text, and the order of the boxes is a part of it: a replay charges
the same boxes in the same order.
"""

import base64
import binascii
import zlib
from typing import Literal

import msgspec
import numpy as np

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import PolicyError
from dpstream.accounting.limits import MAX_DIMENSIONS, MAX_QUERY_BOXES

#: ``closed``: the boxes are closed for ever, nothing is paid.
RegionKind = Literal["epsilon", "rho", "closed"]
#: Bytes that packed boxes may become: what is charged has pieces of its own beyond what is asked.
_MOST = 64 * MAX_QUERY_BOXES * MAX_DIMENSIONS * 16


class RegionCharge(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a session's entry charges, or draws on an allotment that was charged before.

    Attributes:
        budget: the kind of budget.
        amount: in millionths, of every point; 0 where boxes are closed.
        charged: packed boxes that pay, snapped, disjoint (``boxes``).
        reads: packed boxes that the query may read, inside of those (``read``).
        analyst: who asked.
        at: when, microseconds since 1970; never before that of an entry before it.
        allotment: for a draw, run id of the allotment that paid for it, so that no boxes pay again;
            empty in the entry of an allotment; a question that pays for itself has none.
    """

    budget: RegionKind
    amount: int
    charged: str
    reads: str
    analyst: str
    at: int
    allotment: str | msgspec.UnsetType = msgspec.UNSET

    @property
    def draws_on(self) -> str:
        """The run id of the allotment that it draws on; empty if it draws on none."""
        return "" if isinstance(self.allotment, msgspec.UnsetType) else self.allotment

    @property
    def allots(self) -> bool:
        """Whether it is an allotment, which only pays for later draws."""
        return self.allotment == ""

    @classmethod
    def of(
        cls, budget: RegionKind, amount: int, boxes: Int64, read: Int64, analyst: str, at: int
    ) -> "RegionCharge":
        """Return a charge from boxes (k, d, 2) that pay and (m, d, 2) that are read."""
        charged = packed(boxes)
        reads = charged if read is boxes else packed(read)
        return cls(budget, amount, charged, reads, analyst, at)

    def with_boxes(self, boxes: Int64, read: Int64) -> "RegionCharge":
        """Return the same charge for other boxes (k, d, 2) that pay and (m, d, 2) that are read."""
        charged = packed(boxes)
        reads = charged if self.reads == self.charged else packed(read)
        return msgspec.structs.replace(self, charged=charged, reads=reads)

    @property
    def boxes(self) -> Int64:
        """Return (k, d, 2) int64, the boxes that pay.

        Raises:
            PolicyError: they differ from what was written.
        """
        return unpacked(self.charged)

    @property
    def read(self) -> Int64:
        """Return (m, d, 2) int64, what the query may read, disjoint; raises as ``boxes`` does."""
        return unpacked(self.reads)


def packed(boxes: Int64) -> str:
    """Return boxes as a text: their shape and their edges."""
    edges = np.ascontiguousarray(boxes.transpose(1, 2, 0), "<i8")
    data = zlib.compress(edges.tobytes(), 1)
    return f"{len(boxes)}x{boxes.shape[1]} {base64.b64encode(data).decode()}"


def unpacked(text: str) -> Int64:
    """Return the boxes of a text, edge by edge in memory.

    Raises:
        PolicyError: the text has another form.
    """
    try:
        shape, _, data = text.partition(" ")
        many, dimensions = (int(part) for part in shape.split("x"))
        size = many * dimensions * 16
        if not 0 <= size <= _MOST or not 0 < dimensions <= MAX_DIMENSIONS:
            raise ValueError
        unzip = zlib.decompressobj()
        edges = unzip.decompress(base64.b64decode(data, validate=True), size + 1)
        boxes = np.frombuffer(edges, "<i8").reshape(dimensions, 2, many)
    except (ValueError, binascii.Error, zlib.error):
        raise PolicyError(
            "account.path", "holds boxes of another form", "use the program that wrote them"
        ) from None
    return boxes.astype(np.int64, copy=False).transpose(2, 0, 1)
