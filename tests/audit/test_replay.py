"""P5, the replay attack: same run, same bytes; new run, fresh noise and a second charge; a lost,
forked or older store is refused, a restored one accepted only when it was restored on purpose."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pyarrow as pa
import pytest

from dpstream.accounting.errors import DpstreamError, PolicyError
from dpstream.pipelines.connectors import run_manifest
from dpstream.pipelines.formats.encodings import read_releases
from dpstream.pipelines.jobs import charging
from dpstream.pipelines.stream import begin as beginning
from dpstream.state import open as stores
from dpstream.state.ledger import lineage as tokens
from dpstream.state.ledger.contract import Ledger
from dpstream.state.ledger.events import Head
from dpstream.state.store import Store
from tests.audit.replays import Place, new_place, write_input


@pytest.fixture(autouse=True)
def closed_stores() -> Iterator[None]:
    yield
    stores.close_all()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A run that has ended but for its expiry, so that `Place.forget` leaves a store as it was
    once; tests work on copies."""
    place = new_place(tmp_path_factory.mktemp("finished"))
    with mock.patch("dpstream.dp_transforms.flow.expire"):
        place.run()
    stores.close_all()
    return place


@pytest.fixture
def place(finished: Place, tmp_path: Path) -> Place:
    shutil.copytree(finished.folder, tmp_path / "place")
    return Place(tmp_path / "place")


def noise(place: Place, sink: str) -> pa.Table:
    return read_releases(place.folder / sink).select(["window_start", "trigger", "page", "n"])


def test_the_same_run_gives_the_same_bytes(place: Place) -> None:
    first = place.files()
    assert sorted(first) == ["_final.parquet", "guarantee.json", "run.json"] + [
        f"window-00000{w}/trigger-00000{t}.parquet" for w in (0, 1) for t in (1, 2, 3, 4)
    ]
    assert place.run() == first  # again, on what is there
    assert place.run(sink="elsewhere") == first  # to a new folder
    shutil.rmtree(place.folder / "out")
    assert place.run() == first  # to one that was lost
    assert len(place.entries()) == 1


def test_another_process_gives_the_same_bytes(place: Place) -> None:
    first = place.files()
    shutil.rmtree(place.folder / "out")
    place.forget("state", 1)
    job = place.job()
    done = subprocess.run(
        [sys.executable, "-m", "dpstream", "run", "--project", str(job.path), "--quiet"],
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(p for p in sys.path if p)},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert place.files() == first
    assert len(place.entries()) == 1


def test_a_new_run_is_fresh_noise_and_a_second_charge(place: Place) -> None:
    place.run(store="second", sink="out2")
    assert [c.kind for c in place.entries()] == ["stream", "stream"]
    assert len({c.run_id for c in place.entries()}) == 2
    one, two = noise(place, "out"), noise(place, "out2")
    assert set(one["page"].to_pylist()) == set(two["page"].to_pylist()) == {"p0", "p1", "p2"}
    # Not one figure of the other run's: equal figures would be the same noise on the same data.
    differing = sum(a != b for a, b in zip(one["n"].to_pylist(), two["n"].to_pylist(), strict=True))
    assert differing > one.num_rows / 2


def test_other_data_is_another_run(place: Place) -> None:
    """Corrected input: the old store gives what it has; a new one is charged; beyond the limit it
    is refused."""
    write_input(place.folder, 63)
    assert place.run(sink="copy") == place.files() and len(place.entries()) == 1
    place.run(store="second", sink="out2")
    assert len(place.entries()) == 2
    # Twenty users a page became twenty-one; the difference of two releases is mostly noise.
    one, two = noise(place, "out")["n"].to_pylist(), noise(place, "out2")["n"].to_pylist()
    shifts = {round(b - a) for a, b in zip(one, two, strict=True)}
    assert len(shifts) > 3
    with pytest.raises(PolicyError, match="this would spend"):
        place.run(store="third", sink="out3")
    assert place.files("out3") == {} and not (place.folder / "third").exists()
    assert len(place.entries()) == 2


def older_store(place: Place) -> None:
    """The store of this morning under this evening's releases."""
    place.forget("state", 1)


def lost_store(place: Place) -> None:
    shutil.rmtree(place.folder / "state")


def lost_store_unnamed(place: Place) -> None:
    """As above, in a sink from before there were manifests."""
    (place.folder / "out" / "run.json").unlink()
    lost_store(place)


def lost_before_release(place: Place) -> None:
    """The run had begun, and its store was lost before anything was published."""
    for window in (place.folder / "out").glob("window-*"):
        shutil.rmtree(window)
    lost_store(place)


def foreign_store(place: Place) -> None:
    """The store of another run of the same job, behind nothing."""
    place.run(store="second", sink="out2")
    stores.close_all()
    shutil.rmtree(place.folder / "state")
    (place.folder / "second").rename(place.folder / "state")


def forked_store(place: Place) -> None:
    """A store whose history differs from what was published, in the last release of a window."""
    shutil.copyfile(
        place.folder / "out" / "window-000001" / "trigger-000003.parquet",
        place.folder / "out" / "window-000001" / "trigger-000004.parquet",
    )


def forked_elsewhere(place: Place) -> None:
    """A copy of the store goes on into another folder; then the original is used again."""
    place.copy("state", "copy")
    place.run(store="copy", sink="out2")


def older_elsewhere(place: Place) -> None:
    """The other way round: the original went on, and an old copy of it is run elsewhere."""
    place.copy("state", "copy")
    place.run()
    stores.close_all()
    shutil.rmtree(place.folder / "state")
    (place.folder / "copy").rename(place.folder / "state")
    (place.folder / "out").rename(place.folder / "out-of-sight")


def older_ledger(place: Place) -> None:
    """The ledger's backup, without the last entries and without what was accepted since."""
    place.shorten_ledger(1)


def shorter_ledger(place: Place) -> None:
    """The ledger loses another run's charge, which this run's store has seen."""
    rows = place.rows()
    place.run(store="second", sink="out2")
    place.run()
    place.shorten_ledger(rows)


def ledger_left_out(place: Place) -> None:
    """The job names its ledger no more."""


class Attack(NamedTuple):
    """What is done, the words of the refusal, and the check without which it goes through."""

    prepare: Callable[[Place], None]
    rule: str
    unguarded: Callable[[], contextlib.AbstractContextManager[Any]]
    ledger: bool = True


def without(owner: Any, name: str, result: Any = None) -> Callable[[], Any]:
    return lambda: mock.patch.object(owner, name, lambda *_, **__: result)


def any_token() -> Any:
    real = tokens._accept
    return mock.patch.object(tokens, "_accept", lambda db, run, t, _: real(db, run, t, True))


def loss_unseen() -> Any:
    """Neither the check before the charge nor the one of the sink."""
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(beginning, "refuse_lost_store", lambda _: None))
    stack.enter_context(mock.patch.object(charging, "folder_used", lambda _: False))
    return stack


def ledger_unseen() -> Any:
    """Neither the check before the store is opened nor the one of the charge."""
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(tokens, "remembered", lambda _: None))
    stack.enter_context(mock.patch.object(charging, "ledger_seen", lambda _: None))
    return stack


ATTACKS = {
    "an older store": Attack(
        older_store, "older than its sink", without(beginning, "check_sink", True)
    ),
    "a lost store": Attack(lost_store, "lost, moved or belongs elsewhere", loss_unseen),
    "a lost store, unnamed": Attack(
        lost_store_unnamed, "lost, moved or belongs elsewhere", loss_unseen
    ),
    "a lost store, nothing published": Attack(
        lost_before_release, "lost, moved or belongs elsewhere", loss_unseen
    ),
    "a foreign store": Attack(
        foreign_store, "another run than the store's", without(run_manifest, "refuse_foreign")
    ),
    "a forked store": Attack(
        forked_store, "is a fork", without(run_manifest, "_refuse_forked")
    ),
    "a fork elsewhere": Attack(forked_elsewhere, "older or forked copy", any_token),
    "an older copy elsewhere": Attack(older_elsewhere, "older or forked copy", any_token),
    "an older ledger": Attack(
        older_ledger, "older or replaced account", without(Head, "check")
    ),
    "a shorter ledger": Attack(
        shorter_ledger, "older or replaced account", without(Head, "check")
    ),
    "a ledger left out": Attack(
        ledger_left_out, "the job names none", ledger_unseen, ledger=False
    ),
}  # fmt: skip


def refusal(place: Place, ledger: bool) -> str:
    """The rule that refuses to begin, or nothing."""
    try:
        beginning.begin(place.job(ledger=ledger))
    except DpstreamError as error:
        assert isinstance(error, PolicyError)
        return error.rule
    finally:
        stores.close_all()
    return ""


@pytest.mark.filterwarnings("ignore::dpstream.accounting.errors.AccountWarning")
@pytest.mark.parametrize("name", ATTACKS)
def test_a_replay_is_refused(place: Place, name: str) -> None:
    attack = ATTACKS[name]
    attack.prepare(place)
    files, entries = place.files(), len(place.entries())
    assert attack.rule in refusal(place, attack.ledger)
    with pytest.raises(PolicyError):
        place.run(ledger=attack.ledger)
    # Nothing was charged, drawn or published.
    assert place.files() == files and len(place.entries()) == entries
    # Without the check it would not have been refused so: the check is what refuses.
    with attack.unguarded():
        assert attack.rule not in refusal(place, attack.ledger)


@pytest.mark.filterwarnings("ignore::dpstream.accounting.errors.AccountWarning")
@pytest.mark.parametrize("name", ["an older ledger", "a shorter ledger"])
def test_the_charge_itself_refuses_an_older_ledger(place: Place, name: str) -> None:
    """What a store in a database has seen of the account is known only then."""
    attack = ATTACKS[name]
    attack.prepare(place)
    with mock.patch.object(charging, "ledger_seen", lambda _: None):
        assert attack.rule in refusal(place, attack.ledger)
        with mock.patch.object(Ledger, "refuse_older", lambda *_: None):
            assert attack.rule not in refusal(place, attack.ledger)


def test_a_copy_taken_while_it_ran_is_refused_once_it_has_ended(place: Place) -> None:
    leave = tokens.leave

    def copying(ledger: Ledger, store: Store) -> None:
        shutil.copytree(place.folder / "state", place.folder / "copy")  # open, as `cp -r` finds it
        leave(ledger, store)

    with mock.patch.object(tokens, "leave", copying):
        first = place.run()
    with pytest.raises(PolicyError, match="older or forked copy"):
        place.run(store="copy", sink="out2")
    assert place.files("out2") == {} and place.run() == first


def restore(place: Place) -> None:
    """What `dpstream state restore` does to the restored store."""
    job = place.job()
    store: Store = stores.open_store(
        job.state.store or "", job.plan, stores.identity_of(job.state.store or "", job.plan).run_id
    )
    store.begin_restoring()
    stores.close_all()


def test_a_backup_is_accepted_only_when_it_was_restored(place: Place) -> None:
    first = place.files()
    place.copy("state", "backup")
    place.forget("backup", 1)
    place.run()  # the run goes on after the backup
    place.copy("state", "newest")
    shutil.rmtree(place.folder / "state")
    place.copy("backup", "state")
    assert "older than its sink" in refusal(place, True)
    restore(place)
    # It may be interrupted at once and begin again: it is still the restored one.
    assert refusal(place, True) == ""
    place.copy("state", "copy")
    assert refusal(place, True) == ""
    assert place.run() == first  # replayed, and every release compared with the sink's
    assert refusal(place, True) == ""
    assert len(place.entries()) == 1
    # Neither the store it replaces, nor the backup, nor a copy of the restored one goes on.
    for other in ("newest", "backup", "copy"):
        shutil.rmtree(place.folder / "state")
        place.copy(other, "state")
        assert refusal(place, True) != ""


def test_a_restored_store_that_replays_otherwise_is_stopped(place: Place) -> None:
    """The first release that differs from the published one ends the replay."""
    place.forget("state", 1)
    restore(place)
    changed = place.folder / "out" / "window-000001"
    shutil.copyfile(changed / "trigger-000004.parquet", changed / "trigger-000003.parquet")
    with pytest.raises(PolicyError, match="another release of window 1, trigger 3"):
        place.run()


def test_once_caught_up_a_restored_store_is_like_any_other(place: Place) -> None:
    place.forget("state", 1)
    restore(place)
    place.run()
    assert refusal(place, True) == ""  # this begin sees that nothing is missing
    place.forget("state", 1)
    assert "older than its sink" in refusal(place, True)


def test_without_a_ledger_only_the_sink_is_checked(tmp_path: Path) -> None:
    place = new_place(tmp_path / "place")
    first = place.run(ledger=False)
    place.copy("state", "copy")
    # The limit of what is promised: the same run, so the same bytes, in another folder.
    assert place.run(ledger=False) == first
    assert place.run(store="copy", sink="out2", ledger=False) == first
    place.forget("state", 1)
    assert "older than its sink" in refusal(place, False)
    shutil.rmtree(place.folder / "state")
    assert "lost" in refusal(place, False)
