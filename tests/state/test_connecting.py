"""Services that nobody answers for: a short wait, the setting's name, one line on a terminal.

What of Google's services is tried again: one list for stores, sources and sinks.  Their clients:
opened where they are used, absent with words, errors by class.

A context is closed whether its block succeeds or fails.
"""

import io
import json
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from google.api_core import exceptions
from typing_extensions import override

from dpstream.accounting.errors import PolicyError
from dpstream.dp_transforms.noise import secret_source
from dpstream.pipelines.connectors.kafka import client as kafka_client
from dpstream.pipelines.tables import databases
from dpstream.pipelines.tables.catalog import Table
from dpstream.state import connecting as connecting_module
from dpstream.state.connecting import (
    CONNECT_SECONDS,
    EMULATORS,
    Closing,
    ServiceClient,
    connecting,
    failed,
    imported,
    may_pass,
    show_connecting,
)
from tests.golden.refusals import Refused

NOWHERE = "127.0.0.1:1"


def spanner_store(_: str) -> None:
    from dpstream.state.spanner.client import connect

    connect("spanner://project/instance/nowhere")


def spanner_ledger(_: str) -> None:
    from dpstream.state.ledger.open import open_path

    open_path("spanner://project/instance/nowhere-either")


def subscription(_: str) -> None:
    from dpstream.pipelines.connectors.pubsub import source

    source.client.cache_clear()
    source.described("projects/p/subscriptions/s")


def topic(_: str) -> None:
    from dpstream.pipelines.connectors.pubsub.sink import PubsubTopic

    PubsubTopic("projects/p/topics/t").look()


def big_table(address: str) -> None:
    from dpstream.pipelines.connectors.bigquery.sink import SEAL_SCHEMA, BigQueryTables
    from tests.bigquery_server import client

    BigQueryTables(lambda: client(address)).look("project.set.table", SEAL_SCHEMA)


def secret(_: str) -> None:
    secret_source.access("projects/p/secrets/s/versions/1")


def kafka_topic(address: str) -> None:
    kafka_client.connect(
        kafka_client.library().admin.AdminClient({"bootstrap.servers": address}), "sink"
    )


def postgresql(address: str) -> None:
    place = f"postgresql://user@{address}/db"
    databases.server_columns(Table(name="visits", kind="postgresql", place=place, columns={}))


CASES: list[tuple[Callable[[str], None], str, str]] = [
    (spanner_store, "store", "Cloud Spanner"),
    (spanner_ledger, "account.path", "Cloud Spanner"),
    (subscription, "table.subscription", "Pub/Sub"),
    (topic, "sink.topic", "Pub/Sub"),
    (big_table, "sink.table", "BigQuery"),
    (secret, "secret", "Secret Manager"),
    (kafka_topic, "sink.servers", "Kafka"),
    (postgresql, "table visits", "database"),
]
#: What a fix names where it is not the emulator's variable.
CHECKS = {"BigQuery": "reaches", "Kafka": "sink.servers", "database": "address"}


@pytest.fixture(params=["refuses", "silent"])
def address(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A port where nothing listens, or one that accepts connections and never answers."""
    with socket.socket() as listening:
        if request.param == "silent":
            listening.bind(("127.0.0.1", 0))
            listening.listen(8)
        port = listening.getsockname()[1] if request.param == "silent" else 1
        for name in EMULATORS.values():
            monkeypatch.setenv(name, f"127.0.0.1:{port}")
        yield f"127.0.0.1:{port}"


@pytest.fixture(autouse=True)
def speaking() -> Iterator[None]:
    yield
    show_connecting(True)


@pytest.mark.parametrize(
    ("call", "field", "service"), CASES, ids=[case[0].__name__ for case in CASES]
)
def test_a_service_that_does_not_answer_is_told_soon(
    call: Callable[[str], None],
    field: str,
    service: str,
    address: str,
    monkeypatch: pytest.MonkeyPatch,
    refused: Refused,
) -> None:
    assert CONNECT_SECONDS == 10
    for module in (connecting_module, kafka_client):
        monkeypatch.setattr(module, "CONNECT_SECONDS", 0.5)
    monkeypatch.setenv("PGCONNECT_TIMEOUT", "2")  # libpq takes no less
    begun = time.monotonic()
    caught = refused(lambda: call(address))
    assert time.monotonic() - begun < 8
    assert caught.field == field and service in caught.rule
    assert CHECKS.get(service, EMULATORS.get(service, "")) in caught.fix


def test_postgresql_is_waited_for_as_long_as_the_others(
    monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    monkeypatch.delenv("PGCONNECT_TIMEOUT", raising=False)
    refused(lambda: postgresql(NOWHERE))
    assert os.environ.pop("PGCONNECT_TIMEOUT") == f"{CONNECT_SECONDS:.0f}"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("wanted", "terminal"), [(True, True), (False, True), (True, False)])
def test_one_line_on_a_terminal_alone(
    wanted: bool, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(connecting_module, "_SHOWN_AFTER", 0.01)
    show_connecting(wanted)
    with connecting("Kafka"):
        time.sleep(0.2)
    with connecting("another"):
        pass  # it is there at once
    expected_lines = ["Connecting to Kafka (up to 10 s) ..."] if wanted and terminal else []
    assert stderr.getvalue().splitlines() == expected_lines


@pytest.mark.slow
def test_a_real_command_ends_within_twenty_seconds() -> None:
    """A command whose account is on a Spanner that does not answer."""
    begun = time.monotonic()
    place = "spanner://project/instance/database"
    done = subprocess.run(
        [sys.executable, "-m", "dpstream.pipelines.cli.main", "account", "show", place, "--json"],
        capture_output=True, text=True, check=False,
        env={**os.environ, EMULATORS["Cloud Spanner"]: NOWHERE},
    )  # fmt: skip
    assert time.monotonic() - begun < 20 and done.returncode == 4
    error = json.loads(done.stderr.strip().splitlines()[-1])
    assert error["field"] == "account.path" and "SPANNER_EMULATOR_HOST" in error["fix"]


PASSING = (
    exceptions.Aborted, exceptions.Cancelled, exceptions.DeadlineExceeded,
    exceptions.InternalServerError, exceptions.ResourceExhausted,
    exceptions.ServiceUnavailable, exceptions.Unknown,
)  # fmt: skip
LASTING = (
    exceptions.NotFound, exceptions.PermissionDenied, exceptions.InvalidArgument,
    exceptions.AlreadyExists, exceptions.FailedPrecondition, ValueError,
)  # fmt: skip


def test_what_may_pass_is_tried_again_and_nothing_else() -> None:
    passes = may_pass()
    assert all(passes(kind("x")) for kind in PASSING)
    assert not any(passes(kind("x")) for kind in LASTING)


class Service(ServiceClient):
    """A service whose clients are numbers."""

    made, ended = 0, 0
    fault: Exception | None = None

    @override
    def _new_client(self) -> int:
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


def test_no_credentials_are_a_coded_error_without_text(refused: Refused) -> None:
    service = Service("sink.topic")
    service.fault = ValueError("SECRET")
    error = refused(service._open)
    assert error.field == "sink.topic" and "SECRET" not in str(error)
    service.fault = PolicyError("sink.kind", "rule", "fix")
    refused(service._open)


def test_a_missing_client_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    assert imported("pubsub", "json").dumps([]) == "[]"
    monkeypatch.setitem(sys.modules, "google.cloud.pubsub_v1", None)
    # its fix names this installation
    refused(imported, "pubsub", "google.cloud.pubsub_v1", "table.format")


def test_only_sinks_have_their_releases_in_the_store() -> None:
    assert "the store has every release" in failed("sink.table", OSError(), "failed").fix
    assert "store" not in failed("table.path", OSError(), "failed").fix
    assert "KeyError" in str(failed("sink.table", KeyError("x"), "failed"))


class Counted(Closing):
    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def test_it_is_closed_once_by_its_block() -> None:
    with Counted() as counted:
        assert counted.closed == 0
    assert counted.closed == 1
