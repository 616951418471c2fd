"""A keyed digest of the exact numbers that an answer's noise is added to: a part of its name.

Noise of an answer that is given once is named by its run id, so that a draw that was cut off goes
on with the same noise.  Were that the whole name, the same noise could be added to other numbers:
an account is restored from a backup, its charge has no receipt any more, the question is asked
again, and records were added meanwhile.  The difference of both answers would be the exact
difference of the records.  So every name also has this digest.

**What it guarantees.**  Noise is a pseudo-random function of (run id, question, digest), and the
digest a keyed function of every number that the noise is added to.  Two answers of one run have the
same noise exactly where all these numbers are the same, and then they are the same answer; else
their noises are independent, as of two runs.  The digest is made of the very arrays that are
perturbed, not of files that are read beside them: nothing can change in between.

**Why a sum.**  The digest is the sum, modulo 2^64 in each half, of one AES-256 CBC-MAC of three
blocks for each number: its label, its item, its place and value.  It depends on neither the order
of the items nor on how workers share them, so that an answer has the same bytes on every runner.
Without the secret nobody can choose inputs of one sum; two different inputs have one with chance
2^-128, or 2^-64 if they differ only in how often up to 2^32 equal rows occur.  A number that is 0
adds nothing: whether its item was listed does not matter, and sparse arrays cost what is in them.

The digest is private: who can compare the digests of two days learns whether a record changed.  It
is never stored, and enters keyed names only.
"""

from collections.abc import Iterable

import numpy as np

from dpstream.accounting.arrays import Ids, Int64
from dpstream.accounting.errors import InvariantError
from dpstream.dp_transforms.noise.prf import KeyRing

#: Numbers that are worked on at once.
_AT_ONCE = 1 << 16


class InputDigest:
    """PRIVATE: the digest of an answer's exact numbers, of which parts may come from workers.

    Args:
        ring: key ring of the deployment.
    """

    def __init__(self, ring: KeyRing) -> None:
        self._ring, self._halves = ring, np.zeros(2, np.uint64)

    def add(self, label: str, items: Ids, *columns: Int64) -> "InputDigest":
        """Take in the numbers of some items; each item of a label is added once.

        Args:
            label: tells the numbers of one part or table from those of another.
            items: (n, 2) uint64, as the noise is named.
            columns: (n,) or (n, k) int64 numbers of each item.

        Returns:
            This digest.
        """
        head, place = self._head(b"numbers", label), 0
        for values in columns:
            _check(items, values)
            width = values.shape[1] if values.ndim == 2 else 1
            step = max(1, _AT_ONCE // max(1, width))
            for begin in range(0, len(values), step):
                part = values[begin : begin + step].reshape(-1)
                at = np.flatnonzero(part)
                row, column = (at, 0) if width == 1 else np.divmod(at, width)
                self._take(head, items[begin + row], column + place, part[at])
            place += width
        return self

    def add_rows(self, label: str, items: Ids, values: Int64, weights: Int64) -> "InputDigest":
        """Take in rows, each as often as it occurs: rows of one item are told by their value.

        Args:
            label: see `add`.
            items: (n, 2) uint64 what each row belongs to.
            values, weights: (n,) int64 where a row adds, and what.

        Returns:
            This digest.
        """
        _check(items, values, weights)
        head = self._head(b"rows", label)
        for begin in range(0, len(items), _AT_ONCE):
            part = slice(begin, begin + _AT_ONCE)
            self._take(head, items[part], values[part], weights[part])
        return self

    def _head(self, kind: bytes, label: str) -> Ids:
        """The MACs' state after the block of their label."""
        prefix = self._ring.name((b"input digest", kind, label.encode()))
        return self._ring.inputs.blocks(prefix.reshape(1, 2))

    def _take(self, head: Ids, items: Ids, first: Int64 | int, second: Int64) -> None:
        prf = self._ring.inputs
        state = prf.blocks(items ^ head)
        state[:, 0] ^= np.asarray(first, np.int64).view(np.uint64)
        state[:, 1] ^= second.view(np.uint64)
        low, high = prf.blocks(state).T
        self._halves += np.array([low.sum(), high.sum()])

    @property
    def value(self) -> bytes:
        """The digest as 16 bytes, for the name of the noise."""
        return self._halves.tobytes()


def combined(parts: Iterable[bytes]) -> bytes:
    """Return the digest of all items from the digests of disjoint parts of them."""
    halves = np.zeros(2, np.uint64)
    for part in parts:
        halves += np.frombuffer(part, np.uint64)
    return halves.tobytes()


def _check(items: Ids, *columns: Int64) -> None:
    if any(len(values) != len(items) or values.dtype != np.int64 for values in columns):
        raise InvariantError("every item has its whole numbers")
