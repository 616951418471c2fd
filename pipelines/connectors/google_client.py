"""Shared parts of the clients of Google's services: absence, opening, retries, errors."""

import importlib
from abc import ABC, abstractmethod
from typing import Any

from dpstream.accounting.errors import DpstreamError, RunError
from dpstream.accounting.extras import require
from dpstream.state.connecting import may_pass, reach

#: Looking at the place when a run begins: nothing is lost by giving up early.
LOOK_SECONDS = 15.0


def imported(kind: str, module: str, field: str = "sink.kind") -> Any:
    """Return a service's client.

    Args:
        kind: of the sink, which is also the name of its extra.
        module: the client's.
        field: that names the kind, for the error.

    Raises:
        UsageError: they are not installed.
    """
    require(kind, field)
    return importlib.import_module(module)


def retry(seconds: float) -> Any:
    """Return the policy that retries passing errors for ``seconds``, at most ten seconds apart."""
    from google.api_core.retry import Retry

    return Retry(predicate=may_pass(), initial=0.1, maximum=10.0, multiplier=1.5, timeout=seconds)


class ServiceClient(ABC):
    """A client of a service that is opened where it is used, and never travels.

    Args:
        field: that names the place, for errors.
    """

    #: The service's public name.
    service = ""

    def __init__(self, field: str) -> None:
        self.field = field
        self._client: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None}

    @abstractmethod
    def _made(self) -> Any:
        """A new client; what its library raises without credentials is told as a coded error."""

    @abstractmethod
    def _end(self, client: Any) -> None:
        """Let go of a client."""

    def _open(self) -> Any:
        if self._client is None:
            try:
                self._client = self._made()
            except DpstreamError:
                raise
            except Exception as error:  # no credentials
                raise failed(self.field, error, "cannot be reached") from None
        return self._client

    def _reached(self) -> Any:
        """The client, after its service has answered for the first time: when a run begins.

        Raises:
            UsageError: the client is not installed.
            RunError: the service does not answer.
        """
        client = self._open()
        reach(client.transport.grpc_channel, self.field, self.service)
        return client

    def close(self) -> None:
        """Let go of the client; the next use opens another."""
        client, self._client = self._client, None
        if client is not None:
            self._end(client)


def failed(field: str, error: BaseException | None, what: str) -> RunError:
    """Return the class of a client's error only: its text can quote a request."""
    fix = "check the place and the account's rights, then run again"
    if field.startswith("sink."):
        fix += ": the store has every release"
    return RunError(field, f"{what}: {type(error).__name__}", fix)
