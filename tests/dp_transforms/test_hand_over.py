"""Batches by reference: each is taken once, by the process and the run that gave it."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.errors import RunError, required
from dpstream.dp_transforms.batches import ArrowBatchCoder
from dpstream.dp_transforms.hand_over import HAND_OVER, is_ticket
from dpstream.dp_transforms.telemetry import forget_error


def test_large_batches_are_handed_over_by_reference_and_once() -> None:
    coder, large = ArrowBatchCoder(), pa.RecordBatch.from_pydict({"n": list(range(2000))})
    assert not is_ticket(coder.encode(large))
    with HAND_OVER.open():
        ticket = coder.encode(large)
        assert len(ticket) < 50 and coder.decode(ticket) is large
        with pytest.raises(RunError, match="a second time"):
            coder.decode(ticket)
        assert coder.decode(coder.encode(large.slice(0, 9))).num_rows == 9
        lost = coder.encode(large)
        assert len(HAND_OVER) == 1
    assert len(HAND_OVER) == 0, "what nobody has taken is freed"
    forget_error()
    with pytest.raises(RunError, match="run that has ended"):
        coder.decode(lost)
    forget_error()
    with HAND_OVER.open():
        assert is_ticket(coder.encode(large)), "the number of the ticket before is in use again"
        with pytest.raises(RunError, match="another process, or of a run that has ended"):
            coder.decode(lost)
    forget_error()


def test_hand_overs_that_overlap_end_together() -> None:
    large = pa.RecordBatch.from_pydict({"n": list(range(2000))})
    with HAND_OVER.open():
        with HAND_OVER.open():
            ticket = required(HAND_OVER.give(large), "it is large and one is open")
        assert HAND_OVER.take(ticket) is large
    assert HAND_OVER.give(large) is None


def test_runs_by_reference_and_by_bytes_are_not_mixed_in_a_process() -> None:
    """A run whose runner decodes elsewhere would otherwise get the tickets of the other."""
    large = pa.RecordBatch.from_pydict({"n": list(range(2000))})
    with HAND_OVER.open(), pytest.raises(RunError, match="passes batches as references"):
        HAND_OVER.by_bytes().__enter__()
    with HAND_OVER.by_bytes():
        with HAND_OVER.by_bytes():
            pass
        with pytest.raises(RunError, match="passes batches as bytes"):
            HAND_OVER.open().__enter__()
        assert HAND_OVER.give(large) is None
    with HAND_OVER.open():
        assert HAND_OVER.give(large) is not None


def test_batches_of_many_threads_keep_apart() -> None:
    """Each gets back what it gave, and nothing is left."""

    def pass_on(number: int) -> bool:
        batch = pa.RecordBatch.from_pydict({"n": np.full(2000, number)})
        tickets = [required(HAND_OVER.give(batch), "one is open") for _ in range(200)]
        return all(HAND_OVER.take(ticket) is batch for ticket in tickets)

    with HAND_OVER.open(), ThreadPoolExecutor(8) as threads:
        assert all(threads.map(pass_on, range(16)))
        assert len(HAND_OVER) == 0
