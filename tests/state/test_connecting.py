"""Services that nobody answers for: a short wait, the setting's name, one line on a terminal."""

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from dpstream.accounting.errors import RunError
from dpstream.state import connecting as module
from dpstream.state.connecting import CONNECT_SECONDS, EMULATORS, connecting, show_connecting

NOWHERE = "127.0.0.1:1"


def spanner_store() -> None:
    from dpstream.state.spanner.client import connect

    connect("spanner://project/instance/nowhere")


def spanner_ledger() -> None:
    from dpstream.state.ledger.open import open_ledger

    open_ledger("spanner://project/instance/nowhere-either", "data")


def subscription() -> None:
    from dpstream.pipelines.connectors.pubsub import client

    client.client.cache_clear()
    client.described("projects/p/subscriptions/s")


CASES: list[tuple[Callable[[], None], str, str]] = [
    (spanner_store, "state.store", "Cloud Spanner"),
    (spanner_ledger, "ledger.path", "Cloud Spanner"),
    (subscription, "source.subscription", "Pub/Sub"),
]


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in EMULATORS.values():
        monkeypatch.setenv(name, NOWHERE)
    yield
    show_connecting(True)


@pytest.mark.parametrize(
    ("call", "field", "service"), CASES, ids=[case[0].__name__ for case in CASES]
)
def test_a_service_that_does_not_answer_is_told_soon(
    call: Callable[[], None], field: str, service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CONNECT_SECONDS == 10
    monkeypatch.setattr(module, "CONNECT_SECONDS", 0.5)
    begun = time.monotonic()
    with pytest.raises(RunError) as caught:
        call()
    assert time.monotonic() - begun < 8
    assert caught.value.field == field and service in caught.value.rule
    assert EMULATORS.get(service, "reaches") in caught.value.fix


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("wanted", "terminal"), [(True, True), (False, True), (True, False)])
def test_one_line_on_a_terminal_alone(
    wanted: bool, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(module, "_SHOWN_AFTER", 0.01)
    show_connecting(wanted)
    with connecting("Kafka"):
        time.sleep(0.2)
    with connecting("another"):
        pass  # it is there at once
    shown = ["Connecting to Kafka (up to 10 s) ..."] if wanted and terminal else []
    assert stderr.getvalue().splitlines() == shown


@pytest.mark.slow
def test_a_real_command_ends_within_twenty_seconds() -> None:
    """A command whose ledger is on a Spanner that does not answer."""
    begun = time.monotonic()
    place = "spanner://project/instance/database"
    done = subprocess.run(
        [sys.executable, "-m", "dpstream.pipelines.cli.main", "ledger", "init", place, "--json"],
        capture_output=True, text=True, check=False, env={**os.environ},
    )  # fmt: skip
    assert time.monotonic() - begun < 20 and done.returncode == 4
    told = json.loads(done.stderr.strip().splitlines()[-1])
    assert told["field"] == "ledger.path" and "SPANNER_EMULATOR_HOST" in told["fix"]
