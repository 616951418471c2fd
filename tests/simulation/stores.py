"""Databases a world can run on; a new store is one more entry.

On the Spanner emulator a world is ten times slower:
``python -m tests.simulation.world --store spanner --seeds 20``.
"""

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from dpstream.accounting.plan.plan import Plan
from dpstream.state.open import key_schema
from dpstream.state.sqlite.file import create_store
from dpstream.state.sqlite.store import SqliteStore
from dpstream.state.store import RunIdentity, Store
from tests.simulation.limited import Database
from tests.state.conformance import Bench

#: (identity, plan, folder, seed) -> a new database for this run.
Make = Callable[[RunIdentity, Plan, str, int], Bench]


class SqliteFile(Bench):
    """The embedded store: each handle as of a process of its own."""

    def __init__(self, identity: RunIdentity, plan: Plan, path: str) -> None:
        self._path, self._plan = path, plan
        create_store(path, identity)

    def open(self) -> Store:
        return SqliteStore(self._path, key_schema(self._plan), self._plan.design.sums)

    def close(self) -> None:
        """Every handle is closed by its process."""


def sqlite(identity: RunIdentity, plan: Plan, folder: str, seed: int) -> Bench:
    """A new file in a folder of its own."""
    return SqliteFile(identity, plan, f"{folder}/world{seed}.db")


def limited(identity: RunIdentity, plan: Plan, folder: str, seed: int) -> Bench:
    """The model, with room for few rows in a commit."""
    rows = (1, 2, 1, 3, 1 << 30)[seed // 2 % 5]
    return Database(identity, key_schema(plan), plan.design.sums, rows, seed)


class SpannerDatabase(Bench):
    """A database of the emulator that runs; see ``emulated``."""

    def __init__(self, identity: RunIdentity, plan: Plan) -> None:
        from dpstream.state.spanner.client import connect
        from dpstream.state.spanner.schema import create_identity, create_tables
        from tests import emulator

        self._url, self._plan = emulator.fresh_url(), plan
        create_tables(connect(self._url))
        create_identity(connect(self._url), identity)

    def open(self) -> Store:
        from dpstream.state.spanner.rows import Layout
        from dpstream.state.spanner.store import SpannerStore

        class Hooked(SpannerStore):
            """Every commit of a part is a point of the world."""

            hook: Callable[[str, str], None]

            def _commit_once(self, out: Any, fence: tuple[int, ...]) -> None:
                self.hook("before", "commit")
                super()._commit_once(out, fence)
                self.hook("after", "commit")

        plan = self._plan
        arguments = key_schema(plan), plan.design.sums, plan.design.window_sets
        store = Hooked(self._url, *arguments, layout=Layout(plan.design.admits_per_key))
        store.hook = lambda when, what: None
        return store

    def close(self) -> None:
        from tests import emulator

        emulator.drop(self._url)


def spanner(identity: RunIdentity, plan: Plan, folder: str, seed: int) -> Bench:
    """A new database of the emulator."""
    return SpannerDatabase(identity, plan)


@contextlib.contextmanager
def emulated(mutations: int = 40) -> Iterator[None]:
    """The emulator, with room for two or three keys in a commit and for few in memory."""
    from dpstream.state.spanner import schema as spanner_commits
    from dpstream.state.spanner import shards as spanner_shards
    from dpstream.state.spanner import store as spanner
    from tests import emulator

    with (
        emulator.running(),
        mock.patch.object(spanner, "COMMIT_MUTATIONS", mutations),
        mock.patch.object(spanner_commits, "COMMIT_MUTATIONS", mutations),
        mock.patch.object(spanner_shards, "INLINE_PAIRS", 2),
        mock.patch.object(spanner, "CACHED_STATES", 30),
    ):
        yield


#: The databases whose turn comes with the seed.
DRAWN: dict[str, Make] = {"sqlite": sqlite, "limited": limited}
MAKERS: dict[str, Make] = {**DRAWN, "spanner": spanner}


# What a world likes to do: drawn once, then the same to its end.


class Habits:
    """Rates and numbers of the disturbances of a world."""

    random: random.Random

    def _draw_habits(self) -> None:
        """How this world likes to behave."""
        draw = self.random
        self.switches = draw.choice([0.05, 0.3, 0.8])
        self.races = draw.choice([0, 4, 20])
        self.fault_rate = draw.choice([0.0, 0.01, 0.05, 0.15])
        self.faults = draw.randint(0, 20)
        self.restores = draw.choice([0, 0, 1, 2])
        self.restores_early = draw.choice([False, True])  # before anything has expired
        self.zombies = draw.choice([0, 3, 12])
        self.by_trigger_time = draw.choice([0.0, 0.5, 1.0])
        self.threads = draw.choice([1, 2])
        self.group_steps = draw.randint(1, 6)
        self.expire_least = draw.choice([1, 1, 2, 1 << 30])

    def splits(self, what: str) -> bool:
        """Whether a race begins at a part of a commit: not at one that is the whole."""
        return not what.endswith(" of 1") and self.random.random() < 0.5
