"""One attempt at a change of a whole store in a process of its own, killed at a chosen point."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from dpstream.state import durable, retention, transfer
from dpstream.state import open as stores
from dpstream.state.sqlite import store as sqlite_store
from dpstream.state.sqlite.store import SqliteStore
from tests.faults.child import plan_of

#: Calls before and after which a process may die; each is one step towards the new file.
CALLS: tuple[tuple[Any, str], ...] = (
    (sqlite_store, "sync"), (sqlite_store, "_move_sides"), (durable, "sweep"),
    (durable, "_new_draft"),
    (os, "link"), (os, "replace"),
    (transfer, "create_store"), (transfer, "copy_store"),
    (transfer, "check_file"), (transfer, "replace_file"),
    (sqlite_store, "check_file"),
    (SqliteStore, "put_released_ahead"), (SqliteStore, "put_unit_progress"),
    (SqliteStore, "begin_restoring"), (SqliteStore, "_compact_keys"), (SqliteStore, "_insert_keys"),
)  # fmt: skip


def commands(name: str, folder: Path) -> dict[str, Callable[[], object]]:
    """What may be cut short."""
    plan, url = plan_of(name), f"sqlite:{folder / 's.db'}"

    def expire() -> None:
        run_id = stores.identity_of(url, plan).run_id
        store = stores.open_store(url, plan, run_id)
        retention.expire(store, plan.timeline)
        store.compact()

    return {
        "reshard": lambda: transfer.reshard(url, plan, 5),
        "backup": lambda: transfer.backup(url, plan, folder / "new.backup"),
        "restore": lambda: transfer.restore(url, plan, folder / "b", replace=True),
        "restore a lost one": lambda: transfer.restore(url, plan, folder / "b"),
        "expire": expire,
    }


def attempt(command: str, name: str, folder: str, nth: int) -> None:
    """Run a command; die at the nth point (from 0)."""
    left = [nth]

    def at() -> None:
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(owner: Any, function: str) -> Any:
        real = getattr(owner, function)

        def call(*args: Any, **options: Any) -> Any:
            at()
            result = real(*args, **options)
            at()
            return result

        return mock.patch.object(owner, function, call)

    patches = [around(owner, function) for owner, function in CALLS]
    for patch in patches:
        patch.start()
    commands(name, Path(folder))[command]()
    stores.close_all()
