"""Batches that pass between the stages of one process by reference instead of by bytes.

A runner copies every batch several times between two stages: five encodings a record in the flow,
and on Prism two crossings of a socket each.  While a hand-over is open, the coder keeps a large
batch here and writes a ticket in its place; decoding the ticket removes the batch, so nothing is
held longer than the runner holds the ticket.

Only for runners whose stages are threads of this process and that decode each element once:
Beam's FnApiRunner, and Prism with workers in this process (``pipelines.runners.table``).
Neither runs a failed bundle again: its run ends, and the hand-over closes with it.  If a runner
did so, the batch would be gone, and the ticket refused.  A ticket names the hand-over that wrote
it, so it never stands for a batch of another run or process.
"""

import contextlib
import itertools
import secrets
import threading
from collections.abc import Iterator

import pyarrow as pa

from dpstream.accounting.errors import RunError

#: Smaller batches travel as bytes: they cost no more than a ticket's bookkeeping.
HAND_OVER_ROWS = 1024
_TICKET = b"dpstream-ticket:"
_NAME_BYTES, _NUMBER_BYTES = 8, 8
_AGAIN = "run it again on the same state, and report it: what is committed stays"


class HandOver:
    """The batches of this process that are between two stages."""

    def __init__(self) -> None:
        self._held: dict[bytes, pa.RecordBatch] = {}
        self._lock = threading.Lock()
        self._open, self._name, self._numbers = 0, b"", itertools.count()
        self._by_bytes = 0

    def __len__(self) -> int:
        """Return the number of batches that were not taken yet."""
        return len(self._held)

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Pass large batches by reference inside the block; the remaining ones are freed at its
        end.

        Blocks that overlap share one hand-over.

        Raises:
            RunError: a run of this process passes its batches as bytes (`by_bytes`).
        """
        with self._lock:
            if self._by_bytes:
                raise _other_run("bytes")
            if not self._open:
                self._name, self._numbers = secrets.token_bytes(_NAME_BYTES), itertools.count()
            self._open += 1
        try:
            yield
        finally:
            with self._lock:
                self._open -= 1
                if not self._open:
                    self._held.clear()

    @contextlib.contextmanager
    def by_bytes(self) -> Iterator[None]:
        """Keep every batch in bytes inside the block, for a runner that decodes elsewhere or twice.

        Raises:
            RunError: a run of this process passes its batches by reference (`open`); coders are
                shared by all runs of a process, so that this one would get tickets.
        """
        with self._lock:
            if self._open:
                raise _other_run("references")
            self._by_bytes += 1
        try:
            yield
        finally:
            with self._lock:
                self._by_bytes -= 1

    def give(self, batch: pa.RecordBatch) -> bytes | None:
        """Return a ticket for the batch, or ``None`` if it should be encoded as bytes."""
        if batch.num_rows < HAND_OVER_ROWS:
            return None
        with self._lock:
            if not self._open:
                return None
            ticket = self._name + next(self._numbers).to_bytes(_NUMBER_BYTES, "little")
            self._held[ticket] = batch
        return _TICKET + ticket

    def take(self, ticket: bytes) -> pa.RecordBatch:
        """Return the batch of a ticket, and remove it from the hand-over.

        Raises:
            RunError: the ticket was taken before, or its hand-over is not open in this process.
        """
        rest = ticket[len(_TICKET) :]
        with self._lock:
            batch = self._held.pop(rest, None)
            here = self._open and rest[:_NAME_BYTES] == self._name
        if batch is not None:
            return batch
        if here:
            raise RunError(
                "runner", "requested a batch a second time, after a stage had received it", _AGAIN
            )
        raise RunError(
            "runner", "requested a batch of another process, or of a run that has ended", _AGAIN
        )


def _other_run(passed: str) -> RunError:
    return RunError(
        "runner",
        f"a run of this process on another runner passes batches as {passed}",
        "run this one in a process of its own, or after that one has ended",
    )


def is_ticket(encoded: bytes) -> bool:
    """Return whether an encoded batch is a ticket."""
    return encoded.startswith(_TICKET)


#: The one of this process.
HAND_OVER = HandOver()
