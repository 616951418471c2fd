"""Stores by URL, one object per process and store.

A backend imports its store's code only when it is needed: a plan opens no store.
"""

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from dpstream.accounting.budget.calibration import begun
from dpstream.accounting.errors import NEW_RUN, PolicyError, UsageError
from dpstream.accounting.extras import require
from dpstream.accounting.places import below
from dpstream.accounting.plan.design import Design
from dpstream.accounting.plan.plan import Plan
from dpstream.state import durable

if TYPE_CHECKING:
    import pyarrow as pa

    from dpstream.state.store import Calibrate, RunIdentity, Store

#: Arrow's names of the types of keys.
_KEY_TYPES = {"string": "string", "int": "int64", "bool": "bool", "bytes": "binary"}
_OPEN: dict[str, "Store"] = {}
_LOCK = threading.Lock()


class Backend(ABC):
    """The operations on a store before it is opened."""

    def __init__(self, url: str) -> None:
        self.url = url

    @abstractmethod
    def check(self) -> None:
        """Refuse a URL that cannot name a store; only the text is read."""

    def below(self, folder: Path) -> "Backend":
        """Return the same store, with its path below a folder."""
        return self

    @abstractmethod
    def exists(self) -> bool:
        """Return whether a run was begun in it."""

    @abstractmethod
    def identity(self) -> "RunIdentity | None":
        """Return the run in it, of whatever plan; ``None`` if none was begun.

        Raises:
            PolicyError: it is damaged, or of another format; RunError: it cannot be read.
        """

    @abstractmethod
    def sweep(self) -> None:
        """Remove temporary files of killed commands beside the store."""

    @abstractmethod
    def prepare(self) -> None:
        """Make what is needed before a run can be begun (``dpstream state init``)."""

    @abstractmethod
    def create(
        self, identity: "RunIdentity", calibrate: "Calibrate | None" = None
    ) -> "RunIdentity":
        """Begin a run, or return the identity of the one that was begun.

        Args:
            calibrate: returns the calibration of the identity; called only when a run begins.
        """

    @abstractmethod
    def open(self, plan: Plan) -> "Store":
        """Return the store of a begun run."""


class SqliteBackend(Backend):
    """``sqlite:PATH``: one file."""

    @property
    def path(self) -> str:
        """The path of the store's file."""
        return self.url.partition(":")[2]

    @override
    def check(self) -> None:
        if not self.path:
            raise UsageError("store", "names no file", "write e.g. 'sqlite:state.db'")

    @override
    def below(self, folder: Path) -> Backend:
        return SqliteBackend(f"sqlite:{below(folder, self.path, 'store')}")

    @override
    def exists(self) -> bool:
        from dpstream.state.sqlite.file import store_exists

        return store_exists(self.path)

    @override
    def identity(self) -> "RunIdentity | None":
        from dpstream.state.sqlite.file import peek_identity

        return peek_identity(self.path)

    @override
    def sweep(self) -> None:
        durable.sweep(Path(self.path).parent)

    @override
    def prepare(self) -> None:
        """Do nothing: the file is made with its tables when a run begins."""

    @override
    def create(
        self, identity: "RunIdentity", calibrate: "Calibrate | None" = None
    ) -> "RunIdentity":
        from dpstream.state.sqlite.file import create_store

        return create_store(self.path, identity, calibrate)

    @override
    def open(self, plan: Plan) -> "Store":
        from dpstream.state.sqlite.file import peek_identity
        from dpstream.state.sqlite.store import SqliteStore

        identity = peek_identity(self.path)
        sums = plan.design.sums if identity is None else design_of_run(plan, identity).sums
        return SqliteStore(self.path, key_schema(plan), sums)


class SpannerBackend(Backend):
    """``spanner://PROJECT/INSTANCE/DATABASE``: one database; needs the extra ``spanner``."""

    @override
    def check(self) -> None:
        require("spanner", "store")
        from dpstream.state.spanner.client import parse

        parse(self.url)

    def _connect(self) -> Any:
        from dpstream.state.spanner.client import connect

        return connect(self.url)

    @override
    def exists(self) -> bool:
        from dpstream.state.spanner.schema import has_identity

        return has_identity(self._connect())

    @override
    def identity(self) -> "RunIdentity | None":
        from dpstream.state.spanner.schema import begun_identity

        return begun_identity(self._connect())

    @override
    def sweep(self) -> None:
        """Do nothing: the next attempt clears a generation that was not finished."""

    @override
    def prepare(self) -> None:
        from dpstream.state.spanner.schema import create_tables

        create_tables(self._connect())

    @override
    def create(
        self, identity: "RunIdentity", calibrate: "Calibrate | None" = None
    ) -> "RunIdentity":
        from dpstream.state.spanner.schema import create_identity

        return create_identity(self._connect(), identity, calibrate)

    @contextlib.contextmanager
    def successor(
        self, plan: Plan, identity: "RunIdentity", confirm: Callable[[], None]
    ) -> Iterator["Store"]:
        """Yield a new empty generation to fill, which replaces the old one when the block ends.

        ``confirm`` is called just before that and may refuse by raising.  On any error the store is
        as it was; what was filled is cleared by the next attempt.
        """
        from dpstream.state.spanner import schema

        database = self._connect()
        schema.create_tables(database)
        old = schema.generation_of(database)
        new = schema.claim(database)
        for failed in range((old or 0) + 1, new):  # their claims no longer count
            schema.clear(database, failed)
        yield self._opened(plan, identity, (identity, new))
        confirm()
        schema.switch(database, old, new, identity)

    @override
    def open(self, plan: Plan) -> "Store":
        from dpstream.state.spanner.schema import read_identity

        return self._opened(plan, read_identity(self._connect())[0])

    def _opened(
        self,
        plan: Plan,
        identity: "RunIdentity",
        successor: "tuple[RunIdentity, int] | None" = None,
    ) -> "Store":
        from dpstream.state.spanner.rows import Layout
        from dpstream.state.spanner.store import SpannerStore

        design = design_of_run(plan, identity)
        layout = Layout(design.admits_per_key, plan.record_id is not None)
        arguments = key_schema(plan), design.sums, design.window_sets, successor
        return SpannerStore(self.url, *arguments, layout=layout)


def backend(url: str) -> Backend:
    """Return the backend of a store's URL.

    Raises:
        UsageError: an unknown kind of store, or its client is not installed.
    """
    kinds = {"sqlite": SqliteBackend, "spanner": SpannerBackend}
    kind = kinds.get(url.partition(":")[0])
    if kind is None:
        raise UsageError(
            "store",
            "is not a known store",
            "write 'sqlite:PATH' or 'spanner://PROJECT/INSTANCE/DATABASE'",
        )
    store = kind(url)
    store.check()
    return store


def key_schema(plan: Plan) -> "pa.Schema":
    """Return the Arrow schema of the key columns."""
    import pyarrow as pa

    kinds = [pa.type_for_alias(_KEY_TYPES[field.type]) for field in plan.key]
    columns = zip((field.column for field in plan.key), kinds, strict=True)
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns])


def design_of_run(plan: Plan, identity: "RunIdentity") -> Design:
    """Return the design of the plan in a run that was begun."""
    return begun(plan, identity.calibration).design


def exists(url: str) -> bool:
    """Return whether the store was initialised before."""
    return backend(url).exists()


def check_new(url: str, check: Callable[[], object]) -> bool:
    """Check a run that may begin, unless the store has a run; return whether the store has one.

    A refusal holds only if no other process has begun the run meanwhile.  Otherwise the charge or
    the manifest that the check refused belongs to this very run.

    Raises:
        PolicyError: the check refuses, and the store has no run; or the store cannot be read.
    """
    store = backend(url)
    if store.identity() is not None:
        return True
    try:
        check()
    except PolicyError:
        if store.identity() is None:
            raise
        return True
    return False


def initialise(
    url: str, identity: "RunIdentity", calibrate: "Calibrate | None" = None
) -> "RunIdentity":
    """Create the store with this identity, or check that an existing one is the same run's.

    Args:
        calibrate: returns the calibration of the identity; called only when a run begins, because
            a later program may calculate other numbers, or refuse the plan.

    Returns:
        The identity in force: an existing store keeps its run id.

    Raises:
        PolicyError: the store belongs to another plan, secret or input.
    """
    with _LOCK:
        # A store this process holds open may be of a file that is gone by now.
        cached = _OPEN.pop(url, None)
        if cached is not None:
            cached.close()
    backend(url).sweep()
    stored_identity = backend(url).create(identity, calibrate)
    if stored_identity.plan_hash != identity.plan_hash:
        raise PolicyError(
            "store",
            "holds the state of a job with another plan",
            f"restore the old job, or {NEW_RUN}",
        )
    refuse_other_secret(stored_identity, identity.secret_fingerprint)
    if stored_identity.source_fingerprint != identity.source_fingerprint:
        raise PolicyError(
            "source",
            "the input is not the one this store was begun with",
            f"bring the old input back, or {NEW_RUN}; files join only a run that was begun with"
            " `--through`",
        )
    if stored_identity.shards != identity.shards:
        raise PolicyError(
            "shards",
            f"the store has {stored_identity.shards}",
            f"write shards = {stored_identity.shards}, or change the store by `dpstream state"
            " reshard`",
        )
    return stored_identity


def refuse_other_secret(identity: "RunIdentity", fingerprint: str) -> None:
    """Refuse a secret that is not the one of a store's run.

    Args:
        fingerprint: of the secret.

    Raises:
        PolicyError: it is another one.
    """
    if identity.secret_fingerprint != fingerprint:
        raise PolicyError(
            "secret",
            "is not the one this store was begun with",
            f"use the run's own secret; to rotate it, {NEW_RUN}",
        )


def open_store(url: str, plan: Plan, run_id: str) -> "Store":
    """Return the store of an initialised URL, shared within the process.

    Raises:
        PolicyError: it belongs to another plan or run.
    """
    with _LOCK:
        store = _OPEN.get(url)
        if store is None:
            store = backend(url).open(plan)
            _OPEN[url] = store
        if (store.identity.plan_hash, store.identity.run_id) != (plan.hash, run_id):
            _OPEN.pop(url).close()
            raise PolicyError("store", "holds the state of another plan or run", NEW_RUN)
        return store


def identity_of(url: str, plan: Plan) -> "RunIdentity":
    """Return the identity of an existing store.

    Raises:
        PolicyError: it is not a store of this program, or holds the state of another plan.
    """
    with contextlib.closing(backend(url).open(plan)) as store:
        refuse_other_plan(store.identity, plan)
        return store.identity


def refuse_other_plan(identity: "RunIdentity", plan: Plan) -> None:
    """Refuse a store that was begun with another plan.

    Raises:
        PolicyError: the store belongs to another plan.
    """
    if identity.plan_hash != plan.hash:
        raise PolicyError(
            "store",
            "holds the state of a job with another plan",
            "use the job the store was begun with",
        )


def close_all() -> None:
    """Close every store of this process (end of a run; tests that reopen)."""
    with _LOCK:
        for store in _OPEN.values():
            store.close()
        _OPEN.clear()
