"""A store by its URL, backed up, restored and resharded: in place as a whole, or as it was."""

from pathlib import Path

import msgspec
import pytest

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.run import begin_run
from dpstream.state.copying import DELIVERED
from dpstream.state.open import identity_of, open_store
from dpstream.state.store import RunIdentity, Store
from dpstream.state.transfer import backup, reshard, restore
from tests.streams import KEYS, make_plan

PLAN, OTHER = make_plan(), make_plan(triggers=6)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A store of two shards with notes."""
    path = f"sqlite:{tmp_path / 'store' / 's.db'}"
    run, _ = begin_run(PLAN, KEYS, path, 2)
    run.open().set_metadata(DELIVERED, "here")
    run.open().set_metadata("ledger", "its own")
    return path


def opened(url: str, plan: Plan = PLAN) -> Store:
    return open_store(url, plan, identity_of(url, plan).run_id)


def test_a_backup_is_restored_beside_the_old_store(url: str, tmp_path: Path) -> None:
    out, confirmations = tmp_path / "out" / "backup", list[RunIdentity]()
    identity = backup(url, PLAN, out)
    assert identity == identity_of(url, PLAN)
    restored_identity, aside = restore(url, PLAN, out, replace=True, confirm=confirmations.append)
    assert restored_identity == identity and confirmations == [identity]
    assert aside is not None and aside.name == "s.db.old"
    store = opened(url)
    assert store.restoring and not store.anew
    assert store.metadata("ledger") == "its own" and store.metadata(DELIVERED) is None


def test_a_backup_makes_a_store_where_none_is(url: str, tmp_path: Path) -> None:
    new, out = f"sqlite:{tmp_path / 'new.db'}", tmp_path / "backup"
    backup(url, PLAN, out)

    def next_epoch(identity: RunIdentity) -> RunIdentity:
        return msgspec.structs.replace(identity, epoch=1)

    restored_identity, aside = restore(new, PLAN, out, change=next_epoch)
    assert restored_identity.epoch == 1 == identity_of(new, PLAN).epoch and aside is None


def test_refusals_leave_the_store_as_it_was(url: str, tmp_path: Path) -> None:
    out, damaged = tmp_path / "backup", tmp_path / "damaged"
    backup(url, PLAN, out)
    data = bytearray(out.read_bytes())
    data[5000] ^= 1
    damaged.write_bytes(data)

    def never(identity: RunIdentity) -> None:
        raise PolicyError("budget", "is spent", "wait")

    folder = tmp_path / "store"
    before = sorted(folder.iterdir())
    for kind, field, attempt in (
        (UsageError, "backup", lambda: backup(url, PLAN, out)),
        (PolicyError, "store", lambda: backup(url, OTHER, tmp_path / "x")),
        (UsageError, "store", lambda: backup(f"sqlite:{tmp_path}/no", PLAN, tmp_path / "x")),
        (UsageError, "store", lambda: restore(url, PLAN, out)),
        (UsageError, "backup", lambda: restore(url, PLAN, tmp_path / "none", replace=True)),
        (PolicyError, "backup", lambda: restore(url, PLAN, damaged, replace=True)),
        (PolicyError, "backup", lambda: restore(url, OTHER, out, replace=True)),
        (PolicyError, "budget", lambda: restore(url, PLAN, out, replace=True, confirm=never)),
        (UsageError, "shards", lambda: reshard(url, PLAN, 2)),
        (PolicyError, "store", lambda: reshard(url, OTHER, 3)),
    ):
        with pytest.raises(kind) as caught:
            attempt()
        assert caught.value.field == field
    assert not (tmp_path / "x").exists() and sorted(folder.iterdir()) == before
    assert opened(url).metadata(DELIVERED) == "here" and not opened(url).restoring


def test_a_reshard_keeps_the_run_and_what_its_sink_has(url: str) -> None:
    before = identity_of(url, PLAN)
    aside = reshard(url, PLAN, 5)
    assert aside is not None and aside.exists()
    assert identity_of(url, PLAN) == msgspec.structs.replace(before, shards=5)
    store = opened(url)
    assert store.metadata(DELIVERED) == "here" and not store.restoring
