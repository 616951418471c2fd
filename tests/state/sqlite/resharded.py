"""What a reshard and an expiry leave in a store: rows in every table."""

from pathlib import Path

import msgspec

from dpstream.state.sqlite.file import create_store
from dpstream.state.sqlite.store import SqliteStore
from dpstream.state.transfer import copy_store
from tests.state.conformance import KEY_SCHEMA, STREAMS
from tests.state.life_conformance import LINE, sample
from tests.state.life_conformance import OLD as OLD_IDENTITY


def opened(path: Path) -> SqliteStore:
    """The file as a run opens it."""
    return SqliteStore(path, KEY_SCHEMA, STREAMS)


def resharded(folder: Path) -> SqliteStore:
    """A store after a reshard, a note and an expiry."""
    old, new = folder / "old.db", folder / "new.db"
    create_store(old, OLD_IDENTITY)
    source = opened(old)
    sample(source, uneven=True)
    create_store(new, msgspec.structs.replace(OLD_IDENTITY, shards=3))
    target = opened(new)
    copy_store(source, target, LINE)
    source.close(), target.close()
    target = opened(new)
    target.set_metadata("x", "a")
    for shard in range(3):
        target.forget_positions(shard, 2)
    target.compact()
    return target
