"""Beginning a run: cut off anywhere it is charged once; the sink's manifest; many at once."""

import json
import multiprocessing
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pyarrow.parquet as pq
import pytest

from dpstream.accounting.errors import PolicyError, RunError
from dpstream.pipelines.connectors.files import sink as sink_files
from dpstream.pipelines.connectors.files.sink import manifest_path
from dpstream.pipelines.connectors.sink import RunManifest
from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.stream import begin as beginning
from dpstream.pipelines.stream.begin import begin
from dpstream.state import open as stores
from dpstream.state.ledger import lineage as tokens
from dpstream.state.ledger.contract import Ledger
from dpstream.state.ledger.history import History
from dpstream.state.sqlite import file as sqlite_file
from dpstream.state.sqlite.database import sqlite3
from dpstream.state.sqlite.file import put_meta, read_meta
from dpstream.state.sqlite.store import SqliteStore
from tests.audit.replays import Place, new_place
from tests.golden.refusals import Refused


@pytest.fixture(autouse=True)
def closed_stores() -> Iterator[None]:
    yield
    stores.close_all()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Nothing has been run yet."""
    return new_place(tmp_path / "place")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = new_place(tmp_path_factory.mktemp("finished"))
    place.run()
    stores.close_all()
    return place


@pytest.fixture
def done(finished: Place, tmp_path: Path) -> Place:
    """A copy of a run that has ended."""
    shutil.copytree(finished.folder, tmp_path / "done")
    return Place(tmp_path / "done")


def begun(place: Place, **options: Any) -> str:
    """Begin; the run id."""
    try:
        return begin(place.job(**options))[0].run_id
    finally:
        stores.close_all()


class CutOff(BaseException):
    """The process is gone."""


def cut_off(owner: Any, name: str, nth: int, after: bool) -> Any:
    """Die before or after the nth call of a function."""
    real, left = getattr(owner, name), [nth]

    def call(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0 and not after:
            raise CutOff
        result = real(*args, **options)
        if left[0] == 0:
            raise CutOff
        return result

    return mock.patch.object(owner, name, call)


#: Everything that makes something durable between the first check and the first draw.
POINTS: list[tuple[Any, str, int]] = [
    (History, "check", 1),
    (sqlite_file, "create_store", 1),
    (beginning, "begin_run", 1),
    (beginning, "check_sink", 1),
    (Ledger, "charge_within", 1),
    (tokens, "_announce", 1),
    (tokens, "_remember", 1),
    (SqliteStore, "swap_metadata", 1),
    (SqliteStore, "swap_metadata", 2),
    (tokens, "_accept", 2),
    (beginning, "write_manifest", 1),
    (sink_files, "put_once", 1),
]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("owner", "name", "nth"), POINTS)
def test_cut_off_anywhere_it_is_charged_once(
    place: Place, owner: Any, name: str, nth: int, after: bool
) -> None:
    with cut_off(owner, name, nth, after), pytest.raises(CutOff):
        begun(place)
    stored = (place.folder / "state" / "s.db").exists()
    charged = [c.run_id for c in place.entries()]
    identity = (
        stores.identity_of(place.job().state.store or "", place.job().plan) if stored else None
    )
    # No charge without a store that knows its run id, and no manifest without a charge.
    assert charged in ([], [identity.run_id] if identity else [])
    assert not place.files() or charged
    run_id = begun(place)
    assert identity is None or run_id == identity.run_id
    assert begun(place) == run_id
    assert [c.run_id for c in place.entries()] == [run_id]
    assert sorted(place.files()) == ["guarantee.json", "run.json"]


def test_every_point_was_reached_and_the_order_is_kept(place: Place) -> None:
    """Check, store, sink, charge, token, manifest: what the argument in ``begin`` rests on."""
    seen: list[str] = []

    def watched(owner: Any, name: str) -> Any:
        real = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            seen.append(name)
            return real(*args, **options)

        return mock.patch.object(owner, name, call)

    patches = [watched(owner, name) for owner, name, nth in POINTS if nth == 1]
    for patch in patches:
        patch.start()
    try:
        begun(place)
    finally:
        for patch in patches:
            patch.stop()
    assert seen == [
        "check", "begin_run", "create_store", "check_sink", "charge_within", "check", "_announce",
        "_remember", "swap_metadata", "swap_metadata", "write_manifest", "put_once",
        "put_once",
    ]  # fmt: skip


def test_the_limit_used_up_meanwhile(place: Place, refused: Refused) -> None:
    """Another run takes the budget between check and charge: refused, and resumed when raised."""

    def refuse(*_: object) -> None:
        raise PolicyError("account.limit", "they spend more", "spend less")

    with (
        mock.patch.object(beginning, "check_begin", lambda *_, **__: None),
        mock.patch.object(History, "check", refuse),
    ):
        refused(begun, place)
    assert place.entries() == [] and place.files() == {}
    job = place.job()
    run_id = stores.identity_of(job.state.store or "", job.plan).run_id
    assert begun(place) == run_id and [c.run_id for c in place.entries()] == [run_id]


def begin_together(path: str, together: Any, queue: Any) -> None:
    """What a child does: begin when all are ready."""
    job = load_job(Path(path))
    together.wait(120)
    queue.put(begin(job)[0].run_id)


def test_many_begin_at_once(place: Place) -> None:
    """Processes that begin one job on a store that none has made: one run, one charge."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.pipelines.stream.test_begin"])
    together, queue = context.Barrier(5), context.Queue()
    arguments = (str(place.job().path), together, queue)
    children = [context.Process(target=begin_together, args=arguments) for _ in range(5)]
    for child in children:
        child.start()
    ids = {queue.get(timeout=120) for _ in children}
    for child in children:
        child.join(120)
        assert child.exitcode == 0
    assert len(ids) == 1 and {c.run_id for c in place.entries()} == ids
    assert len(place.entries()) == 1 and sorted(place.files()) == ["guarantee.json", "run.json"]
    assert begun(place) in ids


def test_the_manifest_is_a_function_of_plan_and_run(done: Place) -> None:
    text = (done.folder / "out" / "run.json").read_bytes()
    manifest = msgspec.json.decode(text, type=RunManifest)
    plan, run_id = done.job().plan, done.entries()[0].run_id
    assert manifest == RunManifest(1, f"INSECURE-{run_id}", 0, plan.hash, "parquet")
    table = pq.read_table(done.folder / "out" / "window-000001" / "trigger-000004.parquet")
    assert set(table["run_id"].to_pylist()) == {manifest.run_id}
    # Begun again, elsewhere, or exported: the same bytes.
    begun(done, sink="other")
    guarantee = (done.folder / "out" / "guarantee.json").read_bytes()
    assert done.files("other") == {"run.json": text, "guarantee.json": guarantee}


def test_a_sink_from_before_there_were_manifests_is_named(done: Place) -> None:
    path = done.folder / "out" / "run.json"
    text = path.read_bytes()
    path.unlink()
    begun(done)
    assert path.read_bytes() == text


def edited(place: Place, **fields: Any) -> None:
    path = place.folder / "out" / "run.json"
    manifest = msgspec.json.decode(path.read_bytes(), type=RunManifest)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(manifest, **fields)))


REFUSED: dict[str, dict[str, Any]] = {
    "another run": {"run_id": "00" * 16},
    "the run without its stamp": {},
    "another plan": {"plan_hash": "00"},
    "other files": {"kind": "csv"},
    "a later epoch": {"epoch": 2},
    "a newer layout": {"format": 2},
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_manifest_that_is_not_the_stores(done: Place, name: str, refused: Refused) -> None:
    edited(done, **(REFUSED[name] or {"run_id": done.entries()[0].run_id}))
    before = done.files()
    refused(begun, done)
    assert done.files() == before


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[1]", b"\xff", b'{"format": 1, "more": 2}', b'{"run_id": "\xff"}']
)
def test_a_damaged_manifest_is_refused(done: Place, data: bytes, refused: Refused) -> None:
    (done.folder / "out" / "run.json").write_bytes(data)
    refused(begun, done)


def test_a_file_that_is_no_release(done: Place, refused: Refused) -> None:
    (done.folder / "out" / "window-000000" / "trigger-x.parquet").touch()
    refused(begun, done)


def in_epoch(place: Place, epoch: int) -> None:
    stores.close_all()
    with sqlite3.connect(place.folder / "state" / "s.db") as db:
        identity = json.loads(read_meta(db, "identity") or "")
        put_meta(db, "identity", json.dumps(identity | {"epoch": epoch}))
    db.close()


def test_a_further_epoch_is_charged_and_named(place: Place, refused: Refused) -> None:
    """What a restore without replay asks for: the same run, charged again, under its epoch."""
    run_id = begun(place)
    in_epoch(place, 1)
    assert begun(place) == run_id == begun(place)
    assert [(c.run_id, c.epoch) for c in place.entries()] == [(run_id, 0), (run_id, 1)]
    names = {"run.json", "guarantee.json", "run-epoch-1.json", "guarantee-epoch-1.json"}
    assert set(place.files()) == names
    in_epoch(place, 0)
    refused(begun, place)


def test_what_another_worker_publishes_meanwhile_is_no_older_store(done: Place) -> None:
    """A worker commits and publishes a window while this one looks at store and sink."""
    shutil.copytree(done.folder / "out" / "window-000001", done.folder / "hidden")
    shutil.rmtree(done.folder / "out" / "window-000001")
    done.forget("state", 1)
    real, seen = SqliteStore.completed, [0]

    def completed(store: SqliteStore, shards: int, first: int = 0) -> dict[int, int]:
        triggers = real(store, shards, first)
        if not seen[0]:
            seen[0] = 1
            shutil.copytree(done.folder / "hidden", done.folder / "out" / "window-000001")
        return triggers

    with mock.patch.object(SqliteStore, "completed", completed):
        begun(done)
    assert seen == [1]


def test_every_windows_latest_release_is_compared(done: Place, refused: Refused) -> None:
    """An early window counts like the last; an earlier release of it waits for the sink."""
    folder = done.folder / "out" / "window-000000"
    honest = (folder / "trigger-000003.parquet").read_bytes()
    shutil.copyfile(folder / "trigger-000002.parquet", folder / "trigger-000003.parquet")
    begun(done)
    refused(done.run)
    (folder / "trigger-000003.parquet").write_bytes(honest)
    shutil.copyfile(folder / "trigger-000002.parquet", folder / "trigger-000004.parquet")
    refused(begun, done)


def test_a_manifest_that_cannot_be_written(
    place: Place, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(sink_files, "put_once", full)
        refused(begun, place)
    begun(place)
    assert len(place.entries()) == 1 and manifest_path(place.folder / "out").exists()


def test_a_ledger_that_is_gone_at_the_end_ends_no_run(place: Place) -> None:
    """The last renewal is a help against copies, not a part of the run."""
    real: Callable[..., Any] = tokens.leave

    def leave(ledger: Ledger, store: Any) -> None:
        ledger.close()
        with mock.patch.object(ledger, "transaction", side_effect=RunError("ledger", "x", "y")):
            real(ledger, store)

    with mock.patch.object(tokens, "leave", leave):
        assert len(place.run()) == 11
