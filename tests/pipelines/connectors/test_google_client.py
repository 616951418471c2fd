"""Clients of Google's services: opened where they are used, absent with words, errors by class."""

import pickle
import sys

import pytest
from typing_extensions import override

from dpstream.accounting.errors import PolicyError, RunError, UsageError
from dpstream.pipelines.connectors.google_client import ServiceClient, failed, imported


class Service(ServiceClient):
    """A service whose clients are numbers."""

    made, ended = 0, 0
    fault: Exception | None = None

    @override
    def _made(self) -> int:
        if self.fault is not None:
            raise self.fault
        self.made += 1
        return self.made

    @override
    def _end(self, client: int) -> None:
        self.ended = client


def test_a_client_is_made_once_and_never_travels() -> None:
    service = Service("sink.topic")
    assert (service._open(), service._open()) == (1, 1)
    assert pickle.loads(pickle.dumps(service))._client is None  # noqa: S301
    service.close()
    service.close()
    assert service.ended == 1 and service._open() == 2


def test_no_credentials_are_a_coded_error_without_text() -> None:
    service = Service("sink.topic")
    service.fault = ValueError("SECRET")
    with pytest.raises(RunError) as error:
        service._open()
    assert error.value.field == "sink.topic" and "SECRET" not in str(error.value)
    service.fault = PolicyError("sink.kind", "rule", "fix")
    with pytest.raises(PolicyError):
        service._open()


def test_a_missing_client_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert imported("pubsub", "json").dumps([]) == "[]"
    monkeypatch.setitem(sys.modules, "google.cloud.pubsub_v1", None)
    with pytest.raises(UsageError) as error:
        imported("pubsub", "google.cloud.pubsub_v1", "table.format")
    assert error.value.field == "table.format" and "[pubsub]" in error.value.fix


def test_only_sinks_have_their_releases_in_the_store() -> None:
    assert "the store has every release" in failed("sink.table", OSError(), "failed").fix
    assert "store" not in failed("table.path", OSError(), "failed").fix
    assert "KeyError" in str(failed("sink.table", KeyError("x"), "failed"))
