"""A network between Spanner's client and its server that loses requests and answers, from a seed.

``Network.between(database)`` stands below the client's own code, where gRPC's errors come out:
the client and the store see what they would see of a real server.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import grpc
import numpy as np
from google.api_core import exceptions
from google.cloud.spanner_v1.database import Database

_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class _RpcError(grpc.RpcError):
    """What gRPC raises; the client looks into it for a pause that the server asks for."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "injected"

    def trailing_metadata(self) -> tuple[()]:
        return ()


def failure(code: grpc.StatusCode) -> exceptions.GoogleAPICallError:
    """The error as it comes out of the client's lower layer."""
    made: exceptions.GoogleAPICallError = exceptions.from_grpc_error(_RpcError(code))
    return made


class Network:
    """Faults of commits, by probability.

    Args:
        seed: of every decision.
        aborted: the server refuses; nothing happened.
        unknown: the answer is lost.  Half of these commits were applied; the others are on their
            way, and reach the server after the next one to four commits were sent.

    Attributes:
        attempts, applied: commits sent, and those that took effect, by their writer's mark.
        faults: how many of each kind; late: delayed commits, by what became of them.
    """

    def __init__(self, seed: int, aborted: float, unknown: float) -> None:
        self._rng = np.random.default_rng(seed)
        self._aborted, self._unknown = aborted, unknown
        self._waiting: list[tuple[int, Any]] = []
        self.attempts: Counter[str] = Counter()
        self.late: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.applied: Counter[str] = Counter()

    @contextlib.contextmanager
    def between(self, database: Database) -> Iterator[None]:
        """Stand between a client and its server."""
        real = database.spanner_api.commit

        def commit(request: Any, metadata: Any) -> Any:
            if writer := writer_of(request):
                self.attempts[writer] += 1
            draw = self._rng.random()
            if draw < self._aborted:
                self.faults["aborted"] += 1
                raise failure(grpc.StatusCode.ABORTED)
            if draw < self._aborted + self._unknown:
                error = failure(_LOST[int(self._rng.integers(2))])
                if self._rng.random() < 0.5:
                    self.faults["answer lost"] += 1
                    self._send(real, request, metadata)
                else:
                    self.faults["delayed"] += 1
                    self._waiting.append((int(self._rng.integers(1, 5)), (request, metadata)))
                raise error
            # Some of what is on its way overtakes this commit, some arrives behind it.
            self._arrive(real)
            return self._send(real, request, metadata)

        with mock.patch.object(database.spanner_api, "commit", commit):
            yield
        while self._waiting:
            self._arrive(real)

    def _send(self, real: Any, request: Any, metadata: Any) -> Any:
        answer = real(request=request, metadata=metadata)
        if writer := writer_of(request):
            self.applied[writer] += 1
        return answer

    def _arrive(self, real: Any) -> None:
        soon = [(left - 1, what) for left, what in self._waiting]
        self._waiting = [item for item in soon if item[0] > 0]
        for _, (request, metadata) in (item for item in soon if item[0] <= 0):
            try:
                self._send(real, request, metadata)
                self.late["applied"] += 1
            except exceptions.AlreadyExists:
                self.late["refused"] += 1
            except exceptions.NotFound as error:
                # What it would change is gone with its window, or its transaction is.
                assert "not found" in str(error)
                self.late["refused"] += 1
            except exceptions.FailedPrecondition:
                # Not one of a step: its transaction read before it wrote, and is over by now.
                assert not writer_of(request)


def writer_of(request: Any) -> str:
    """The mark of a commit's writer, read from its mutations ('' for a run's identity)."""
    for mutation in request.mutations:
        write = mutation.insert or mutation.insert_or_update
        if write.table == "Steps":
            return str(write.values[0][list(write.columns).index("Writer")])
    return ""
