"""Places for stores, by kind, so that one test serves every store; and commits made small."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from dpstream.state import open as stores
from dpstream.state.spanner import rows as spanner_rows
from dpstream.state.spanner import schema as spanner_commits
from dpstream.state.spanner import shards as spanner_shards
from dpstream.state.spanner import store as spanner
from dpstream.state.spanner.client import connect
from dpstream.state.spanner.schema import create_tables
from tests import emulator

KINDS = ("sqlite", "spanner")
#: Gives the path or URL of a store that does not exist yet.
Places = Callable[[], str]
MOST_DATABASES = 40
#: Mutations of a commit in split runs: two or three keys.
FEW = 40


@contextlib.contextmanager
def places(kind: str, folder: Path) -> Iterator[Places]:
    """Fresh places of one kind; old databases are dropped: the emulator holds 100."""
    made: list[str] = []
    numbers = itertools.count()

    def fresh() -> str:
        if kind == "sqlite":
            return str(folder / f"store{next(numbers)}.db")
        while len(made) >= MOST_DATABASES:
            emulator.drop(made.pop(0))
        made.append(emulator.fresh_url())
        create_tables(connect(made[-1]))
        return made[-1]

    with emulator.running() if kind == "spanner" else contextlib.nullcontext():
        try:
            yield fresh
        finally:
            stores.close_all()
            for url in made:
                emulator.drop(url)


@contextlib.contextmanager
def small_commits() -> Iterator[None]:
    """With tiny limits every step and decision is committed in many parts."""
    with (
        mock.patch.object(spanner_commits, "COMMIT_MUTATIONS", FEW),
        mock.patch.object(spanner, "COMMIT_MUTATIONS", FEW),
        mock.patch.object(spanner_shards, "INLINE_PAIRS", 6),
        mock.patch.object(spanner_shards, "CELL_BYTES", 64),
        mock.patch.object(spanner_rows, "CELL_BYTES", 64),
        mock.patch.object(spanner, "CACHED_STATES", 30),
    ):
        yield
