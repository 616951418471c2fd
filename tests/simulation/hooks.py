"""Where a world takes hold of the product: work that may fail, and settings for speed."""

import contextlib
import functools
import os
import traceback
from collections.abc import Iterator
from typing import Any
from unittest import mock

from dpstream.accounting.budget.calibration import calibrate
from dpstream.dp_transforms import bounding, flow, run, step
from dpstream.state.sqlite import file as sqlite_file
from dpstream.state.sqlite import retention as sqlite
from dpstream.state.sqlite.database import sqlite3

#: Between the calls of a store: states in memory are half changed when these fail.
WORK = [
    (bounding, "admit"), (bounding, "expand"), (step, "aggregate"),
    (step, "select"), (step, "publish"), (step, "predict"),
]  # fmt: skip
calibrated_once = functools.lru_cache(maxsize=256)(calibrate)


def _struck(world: Any, name: str, real: Any) -> Any:
    def call(*args: Any) -> Any:
        out = real(*args)
        world.strike(name)
        return out

    return call


def _sooner(world: Any, real: Any) -> Any:
    """Expiry as often as the world likes: how often is a setting for speed."""

    def expire(store: Any, line: Any, least: int, *more: Any) -> Any:
        return real(store, line, min(least, world.expire_least), *more)

    return expire


def _recalled(world: Any, real: Any) -> Any:
    def recall(plan: Any, store: Any, shard: int, batch: Any, *more: Any) -> Any:
        out = real(plan, store, shard, batch, *more)
        world.recalled(batch)
        return out

    return recall


@contextlib.contextmanager
def nothing_expires() -> Iterator[None]:
    """For the run that others are compared with."""
    with mock.patch.object(flow, "expire"):
        yield


def _fast(real: Any) -> Any:
    """The machine of a world never loses power: nothing waits for its disk."""

    def connect(path: Any) -> sqlite3.Connection:
        db: sqlite3.Connection = real(path)
        db.execute("PRAGMA synchronous = OFF")
        return db

    return connect


@contextlib.contextmanager
def watched(world: Any) -> Iterator[None]:
    """The product in the hands of a world."""
    with contextlib.ExitStack() as stack:
        for owner, name in WORK:
            struck = _struck(world, name, getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, struck))
        stack.enter_context(mock.patch.object(flow, "COMMIT_STEPS", world.group_steps))
        for owner, name, make in ((flow, "expire", _sooner), (bounding, "_recall", _recalled)):
            made = make(world, getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, made))
        yield


@contextlib.contextmanager
def fast() -> Iterator[None]:
    """Budgets computed once, files that are not synchronised."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(run, "calibrate", calibrated_once))
        for owner in (sqlite, sqlite_file):
            stack.enter_context(mock.patch.object(owner, "connect", _fast(owner.connect)))
        yield


def memory_folder() -> str | None:
    """A folder without a disk, where there is one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def place_of(error: BaseException) -> str:
    """The innermost function of an error."""
    frames = traceback.extract_tb(error.__traceback__)
    return frames[-1].name if frames else "?"
