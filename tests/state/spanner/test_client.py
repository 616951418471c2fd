"""What a user sees when Spanner refuses or is not there: a field, a rule, a fix, and no text of
the client, which can hold keys of rows.

Statuses come over a real socket from a small gRPC server; credentials from files.

Digests of the Spanner store: every cell that a hand changes is noticed.
"""

import functools
import json
import traceback
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import pytest

from dpstream.accounting.errors import DpstreamError, RunError, UsageError
from dpstream.state import open as stores
from dpstream.state.seals import damaged
from dpstream.state.spanner import client
from dpstream.state.spanner import client as spanner_client
from dpstream.state.spanner import client as spanner_seals
from dpstream.state.spanner import schema as spanner_schema
from dpstream.state.spanner.client import NothingThereError, connect, refused
from dpstream.state.spanner.schema import (
    claim,
    create_identity,
    create_tables,
    has_identity,
    switch,
)
from dpstream.state.spanner.store import SpannerStore
from dpstream.state.store import Store
from dpstream.state.transfer import copy_store
from tests import emulator
from tests.emulator import CANARY, HOST, free_port, refusing
from tests.faults.unsure import failure
from tests.golden.refusals import Refused
from tests.state.conformance import IDENTITY, KEY_SCHEMA, STREAMS, take_step
from tests.state.life_conformance import LINE, OLD, everything_of, sample
from tests.state.spanner.bench import SpannerRetentionBench

_KEYS, _SEALED = spanner_seals._KEYS, spanner_seals._SEALED
#: Columns that a use of ``sample`` reads.
CELLS = [
    (t, c) for t, columns in _SEALED.items() for c in sorted(columns) if t not in ("KeyUnits",)
]


@pytest.fixture
def bench(life: SpannerRetentionBench) -> SpannerRetentionBench:
    return life


def raw(bench: SpannerRetentionBench, table: str, column: str) -> list[list[Any]]:
    """Keys and a cell of every row that has one."""
    columns = (*_KEYS[table], column)
    with connect(bench.url).snapshot() as snapshot:
        rows = snapshot.execute_sql(f"SELECT {', '.join(columns)} FROM {table}")
        return [row for row in rows if row[-1] is not None]


def put(bench: SpannerRetentionBench, table: str, column: str, row: list[Any]) -> None:
    with connect(bench.url).batch() as batch:
        batch.update(table, (*_KEYS[table], column), [row])


def flipped(value: Any, bit: int) -> Any:
    """A cell with one bit changed."""
    if isinstance(value, int):
        return value ^ 1 << bit % 62
    if isinstance(value, str):
        at = bit % len(value)
        return value[:at] + chr(ord(value[at]) ^ 1) + value[at + 1 :]
    data = bytearray(b64decode(value))
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    return b64encode(bytes(data))


def everything(store: Store) -> object:
    """All that a run or a copy reads."""
    for window, shard, _ in store.progress():
        assert list(store.key_pieces(window, shard)) is not None
    for shard in range(OLD.shards):
        assert store.unit_progress(shard) and list(store.unit_pieces(shard)) is not None
    assert store.retained_windows is not None and store.metadata("x") == "a"
    return everything_of(store)


def filled(bench: SpannerRetentionBench) -> object:
    store = bench.open()
    sample(store)
    store.set_metadata("x", "a")
    return everything(bench.open())


@pytest.mark.parametrize(("table", "column"), CELLS)
def test_a_flipped_bit_of_any_cell_is_noticed(
    bench: SpannerRetentionBench, table: str, column: str, refused: Refused
) -> None:
    expected, rows = filled(bench), raw(bench, table, column)
    if table == "Steps":  # decisions that are behind are not read any more
        rows = [row for row in rows if row[1] >= 0]
    assert rows
    for number, row in enumerate(rows[:6]):
        put(bench, table, column, [*row[:-1], flipped(row[-1], 37 * number + 5)])
        caught = refused(lambda: everything(bench.open()))
        assert str(caught) == str(damaged())
        put(bench, table, column, row)
    assert everything(bench.open()) == expected


def test_rows_that_stand_in_each_others_place_are_noticed(
    bench: SpannerRetentionBench, refused: Refused
) -> None:
    filled(bench)
    one, other, *_ = raw(bench, "Units", "Records")
    put(bench, "Units", "Records", [*one[:-1], other[-1]])
    refused(lambda: everything(bench.open()))


def test_without_the_check_nobody_notices(bench: SpannerRetentionBench) -> None:
    """Sabotaged: the state of a key is another one, and is used."""
    expected, row = filled(bench), raw(bench, "Keys", "State")[0]
    put(bench, "Keys", "State", [*row[:-1], flipped(row[-1], 8 * 18)])
    with mock.patch.object(spanner_seals, "_open_cell", lambda _, column, value: value[24:]):
        assert everything(bench.open()) != expected


def moved(bench: SpannerRetentionBench) -> Callable[[], Store]:
    """What a restore or a reshard does: a generation of its own, then the switch."""
    database, source = connect(bench.url), bench.open()
    number = claim(database)
    target = SpannerStore(bench.url, source._schema, source._streams, successor=(OLD, number))
    copy_store(source, target, LINE)
    target.set_metadata("x", "a")
    switch(database, 0, number, OLD)
    return bench.open


def test_an_answer_of_the_switch_that_was_lost(bench: SpannerRetentionBench) -> None:
    """It is tried again, and finds what it has written."""
    filled(bench)
    real, lost = client.transact, list[bool]()

    def twice(database: Any, work: Any) -> Any:
        if not lost and database.name == connect(bench.url).name and work.__name__ == "work":
            lost.append(real(database, work))
        return real(database, work)

    with mock.patch.object(spanner_schema, "transact", twice):
        reopened = moved(bench)
    assert lost == [True] and everything(reopened())


URL = "spanner://project/instance/database"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give up after a moment; leave no client of this test behind."""
    monkeypatch.setattr(spanner_client, "_RETRY", spanner_client._RETRY.with_timeout(0.3))
    monkeypatch.setattr("dpstream.state.connecting.CONNECT_SECONDS", 1.0)
    spanner_client._connect.cache_clear()
    yield
    spanner_client._connect.cache_clear()


#: What is done to a store, from the first command to the last commit.
ACTIONS: dict[str, Callable[[], Any]] = {
    "init": lambda: create_tables(connect(URL)),
    "begin": lambda: create_identity(connect(URL), IDENTITY),
    "open": lambda: SpannerStore(URL, KEY_SCHEMA, STREAMS),
}


def refusal(action: Callable[[], Any]) -> DpstreamError:
    """The coded error of an action; neither it nor its traceback shows the server's text."""
    with pytest.raises(DpstreamError) as caught:
        action()
    trace_text = "".join(traceback.format_exception(caught.value))
    assert CANARY not in trace_text and CANARY not in json.dumps(caught.value.as_dict())
    error = caught.value
    assert error.field == "store" and error.rule and error.fix
    return error


CODES = [
    (grpc.StatusCode.PERMISSION_DENIED, UsageError, "may not use"),
    (grpc.StatusCode.UNAUTHENTICATED, UsageError, "credentials"),
    (grpc.StatusCode.UNAVAILABLE, RunError, "does not answer"),
    (grpc.StatusCode.INTERNAL, RunError, "refused (InternalServerError)"),
    (grpc.StatusCode.INVALID_ARGUMENT, RunError, "refused (InvalidArgument)"),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, RunError, "refused (ResourceExhausted)"),
]


@pytest.mark.parametrize(("code", "kind", "rule"), CODES, ids=lambda x: getattr(x, "name", ""))
@pytest.mark.parametrize("action", ACTIONS)
def test_statuses_of_the_server(
    monkeypatch: pytest.MonkeyPatch, code: Any, kind: type[DpstreamError], rule: str, action: str
) -> None:
    for sessions in (True, False):
        with refusing(code, monkeypatch, sessions):
            error = refusal(ACTIONS[action])
        assert isinstance(error, kind) and rule in error.rule


def test_whoever_may_not_look_is_not_told_that_nothing_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run is begun, and charged, only where the store says that none was."""
    for code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED):
        with refusing(code, monkeypatch):
            refusal(lambda: has_identity(connect(URL)))
            refusal(lambda: stores.exists(URL))
    with refusing(grpc.StatusCode.NOT_FOUND, monkeypatch):
        assert has_identity(connect(URL)) is False


@pytest.mark.parametrize("action", ACTIONS)
def test_a_host_that_is_not_there(monkeypatch: pytest.MonkeyPatch, action: str) -> None:
    monkeypatch.setenv(HOST, f"127.0.0.1:{free_port()}")
    error = refusal(ACTIONS[action])
    assert isinstance(error, RunError) and "does not answer" in error.rule


def test_a_host_that_goes_away_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client itself would read on for ever, and commit for an hour."""
    with emulator.running("--enable_fault_injection=false"):  # one of its own
        url = emulator.fresh_url()
        create_tables(connect(url))
        create_identity(connect(url), IDENTITY)
        store = SpannerStore(url, KEY_SCHEMA, STREAMS)
        take_step(store, 1, [1], 1)
    error = refusal(lambda: take_step(store, 2, [2], 2))
    assert isinstance(error, RunError) and "does not answer" in error.rule
    assert not store._key_shards, "what is not durable was kept"
    assert "does not answer" in refusal(lambda: store.key_shard(0, 0)).rule


SERVICE = {
    "type": "service_account", "client_email": "a@b.c", "token_uri": "http://127.0.0.1:9/",
    "private_key": f"-----BEGIN PRIVATE KEY-----\n{CANARY}\n-----END PRIVATE KEY-----\n",
}  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [None, "", f"{{{CANARY}", json.dumps({"type": CANARY}), json.dumps(SERVICE)],
    ids=["no file", "empty", "no JSON", "other type", "broken key"],
)
def test_credentials_of_a_bad_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None
) -> None:
    """google.auth itself refuses: no emulator, no network."""
    file = tmp_path / "account.json"
    if text is not None:
        file.write_text(text)
    monkeypatch.delenv(HOST, raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    for action in ACTIONS.values():
        error = refusal(action)
        assert isinstance(error, UsageError) and "credentials" in error.rule
        assert "gcloud auth" in error.fix


def test_no_credentials_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(HOST, raising=False)
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "credentials" in refusal(ACTIONS["open"]).rule


def test_a_token_that_cannot_be_renewed() -> None:
    """gRPC reports it under the code of a host that is not there."""
    lost = failure(grpc.StatusCode.UNAVAILABLE)
    assert "does not answer" in refused(lost).rule
    lost.message = f"Getting metadata from plugin failed with error: {CANARY}"
    error = refused(lost)
    assert "credentials" in error.rule and CANARY not in str(error)


def test_init_whose_answers_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call that changes something takes effect and seems to fail; the next attempt goes on."""
    with emulator.running():
        url = emulator.fresh_url()
        database = connect(url)
        api, lost = database._instance._client.database_admin_api, list[Any]()

        def unheard(real: Callable[..., Any], *args: Any, **options: Any) -> Any:
            answer = real(*args, **options)
            if real not in lost:
                lost.append(real)
                raise failure(grpc.StatusCode.UNAVAILABLE)
            return answer

        for owner, name in ((api, "create_database"), (database.spanner_api, "commit")):
            monkeypatch.setattr(owner, name, functools.partial(unheard, getattr(owner, name)))
        assert create_tables(database)
        assert create_identity(database, IDENTITY) == IDENTITY
        assert len(lost) == 2 and create_tables(database) is False
        emulator.drop(url)


def test_what_is_missing_on_a_server() -> None:
    with emulator.running():
        nowhere = f"spanner://{emulator.PROJECT}/no-such-instance/d"
        assert isinstance(refusal(lambda: create_tables(connect(nowhere))), NothingThereError)
        url = emulator.fresh_url()
        for action in (
            lambda: SpannerStore(url, KEY_SCHEMA, STREAMS),
            lambda: create_identity(connect(url), IDENTITY),
        ):
            error = refusal(action)
            assert isinstance(error, NothingThereError) and "state init" in error.fix
        connect(url).create().result(60)  # a database, but no tables
        assert has_identity(connect(url)) is False
        assert isinstance(
            refusal(lambda: create_identity(connect(url), IDENTITY)), NothingThereError
        )
        create_tables(connect(url))
        assert "holds no run" in refusal(lambda: SpannerStore(url, KEY_SCHEMA, STREAMS)).rule
        emulator.drop(url)
