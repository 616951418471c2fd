"""Starters of stores that stop at every step of ``tokens.enter``, and every order of their steps.

A starter is a thread that waits at each gate until the scheduler lets it go on, and may die
at one of them (its open transaction is rolled back, as when a process dies).  The gates stand
before each ledger transaction, after each reading of the store's token, and before the swap: two
starters can interleave there and nowhere else.
"""

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from dpstream.accounting.errors import DpstreamError
from dpstream.state.ledger import lineage as tokens
from dpstream.state.ledger.contract import Ledger
from dpstream.state.ledger.events import Charge
from dpstream.state.ledger.open import open_path
from dpstream.state.ledger.sqlite import AccountStorage
from dpstream.state.sqlite.file import create_store
from dpstream.state.sqlite.store import SqliteStore
from dpstream.state.store import Store
from tests import accounts
from tests.state.conformance import IDENTITY, KEY_SCHEMA, STREAMS

LIMIT = (2.0, 1e-6)
CHARGE = Charge(IDENTITY.run_id, IDENTITY.plan_hash, accounts.USER, 1.0, 1e-7, None, 0.0, "stream")
GATES = ("txn", "read", "swap", "txn", "read")


class Died(BaseException):
    """The starter's process is gone."""


class Starter(threading.Thread):
    """One ``enter`` on a store file, gate by gate.

    Attributes:
        gate: where it waits, ``None`` when it has ended.
        locked: it waits inside a ledger transaction.
        end: ``settled``, ``refused`` or ``died``.
    """

    def __init__(self, ledger: Path, store: Path, die_at: int | None = None) -> None:
        super().__init__(daemon=True)
        self.paths, self.die_at = (ledger, store), die_at
        self.gate: str | None = "start"
        self.locked, self.end = False, ""
        self.passed = 0
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)

    def stop_at(self, gate: str, locked: bool) -> None:
        if self.passed == self.die_at:
            raise Died
        self.passed += 1
        self.gate, self.locked = gate, locked
        self._paused.release()
        self._go.acquire()
        self.locked = False

    def run(self) -> None:
        self._go.acquire()
        try:
            self.end = self.act()
        except Died:
            self.end = "died"
        except BaseException as error:  # shown by the scheduler, in the test's thread
            self.end = f"failed: {error!r}"
        self.gate = None
        self._paused.release()

    def act(self) -> str:
        """What it does; how it ended."""
        return enter(*self.paths, self.stop_at)

    def step(self) -> None:
        self._go.release()
        assert self._paused.acquire(timeout=30), "a starter hangs"


def enter(
    ledger_path: Path, store_path: Path, at: Callable[[str, bool], None] = lambda *_: None
) -> str:
    """``tokens.enter`` on real files, with gates; how it ended."""
    inside = False

    class GatedLedger(Ledger):
        @contextlib.contextmanager
        def transaction(self) -> Iterator[None]:
            nonlocal inside
            at("txn", False)
            with super().transaction():
                inside = True
                try:
                    yield
                finally:
                    inside = False

    class GatedStore(SqliteStore):
        def token(self) -> str:
            head_token = super().token()
            at("read", inside)
            return head_token

        def renew_token(self, old: str, new: str) -> bool:
            at("swap", False)
            return super().renew_token(old, new)

    ledger = accounts.unsynced(GatedLedger(AccountStorage(ledger_path)))
    store: Store = GatedStore(store_path, KEY_SCHEMA, STREAMS)
    # The order of writes is tested here, not the disk.
    store._db.execute("PRAGMA synchronous = OFF")  # type: ignore[attr-defined]
    try:
        tokens.enter(ledger, store, CHARGE)
        return "settled"
    except DpstreamError as error:
        assert "older or forked" in error.rule, error
        return "refused"
    finally:
        store.close()
        ledger.close()


class World(NamedTuple):
    """A ledger and store files."""

    ledger: Path
    stores: tuple[Path, ...]

    def entries(self) -> int:
        ledger = open_path(self.ledger)
        try:
            return len(ledger.entries())
        finally:
            ledger.close()


def new_world(folder: Path) -> World:
    """An empty ledger and the store of a run that has not begun."""
    folder.mkdir()
    accounts.create(folder / "ledger.db", "flights", LIMIT)
    create_store(folder / "store.db", IDENTITY)
    return World(folder / "ledger.db", (folder / "store.db",))


def copied(world: World, folder: Path, stores: int) -> World:
    """The same files elsewhere, the first store ``stores`` times."""
    folder.mkdir()
    shutil.copyfile(world.ledger, folder / "ledger.db")
    paths = tuple(folder / f"store{n}.db" for n in range(stores))
    for path in paths:
        shutil.copyfile(world.stores[0], path)
    return World(folder / "ledger.db", paths)


def play(starters: Sequence[Starter], choices: Sequence[int]) -> list[list[int]]:
    """Run starters to their end; at each step go on with ``choices`` (then with the first).

    Returns:
        The starters that could have gone on, step by step.
    """
    options: list[list[int]] = []
    for starter in starters:
        starter.start()
    while any(s.gate is not None for s in starters):
        held = any(s.locked for s in starters if s.gate is not None)
        ready = [
            n for n, s in enumerate(starters)
            if s.gate is not None and (s.locked or not held or s.gate != "txn")
        ]  # fmt: skip
        step = len(options)
        options.append(ready)
        starters[choices[step] if step < len(choices) else ready[0]].step()
    for starter in starters:
        starter.join()
        if starter.end.startswith("failed"):  # no assertion: no sabotage is told from it
            raise RuntimeError(starter.end)
    return options


def every_order(make: Callable[[], Sequence[Starter]]) -> Iterator[Sequence[Starter]]:
    """Starters that have run, once for each order of their steps."""
    choices: list[int] = []
    while True:
        starters = make()
        options = play(starters, choices)
        yield starters
        taken = choices + [ready[0] for ready in options[len(choices) :]]
        while options and taken[-1] == options[-1][-1]:
            taken.pop()
            options.pop()
        if not options:
            return
        later = options[-1][options[-1].index(taken[-1]) + 1]
        choices = [*taken[:-1], later]
