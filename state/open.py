"""Stores by URL, one object per process and store."""

import threading

import pyarrow as pa

from accounting.errors import PolicyError, UsageError
from accounting.plan import Plan
from state.sqlite import SqliteStore
from state.sqlite_file import create_store, store_exists
from state.store import RunIdentity, Store

_KEY_TYPES = {"string": pa.string(), "int": pa.int64(), "bool": pa.bool_(), "bytes": pa.binary()}
_OPEN: dict[str, Store] = {}
_LOCK = threading.Lock()


def path_of(url: str) -> str:
    """File of the embedded store with this URL."""
    scheme, _, path = url.partition(":")
    if scheme != "sqlite" or not path:
        raise UsageError("state.store", "must be 'sqlite:PATH'", "write e.g. 'sqlite:state.db'")
    return path


def key_schema(plan: Plan) -> pa.Schema:
    """Arrow schema of the key columns."""
    return pa.schema([pa.field(f.column, _KEY_TYPES[f.type], nullable=False) for f in plan.key])


def exists(url: str) -> bool:
    """Whether the store was initialised before."""
    return store_exists(path_of(url))


def initialise(url: str, identity: RunIdentity) -> RunIdentity:
    """Create the store with this identity, or check that an existing one is the same run's.

    Returns:
        The identity that is in force: an existing store keeps its run id.

    Raises:
        PolicyError: the store belongs to another plan, key or input.
    """
    with _LOCK:
        # A store this process holds open may be of a file that is gone by now.
        cached = _OPEN.pop(url, None)
        if cached is not None:
            cached.close()
    found = create_store(path_of(url), identity)
    if found.plan_hash != identity.plan_hash:
        raise PolicyError(
            "state.store",
            "holds the state of a job with another plan",
            "use a new store (a new run, charged again) or restore the old job file",
        )
    if found.key_fingerprint != identity.key_fingerprint:
        raise PolicyError(
            "privacy.key_file",
            "is not the key this store was begun with",
            "use the run's own key; a new key needs a new run",
        )
    if found.source_fingerprint != identity.source_fingerprint:
        raise PolicyError(
            "source",
            "the input is not the one this store was begun with",
            "use a new store: other input is a new run with fresh noise and its own charge",
        )
    if found.shards != identity.shards:
        raise PolicyError(
            "state.shards", "the number of shards is fixed in the store", "restore the old number"
        )
    return found


def open_store(url: str, plan: Plan, run_id: str) -> Store:
    """The store of an initialised URL, shared within the process.

    Raises:
        PolicyError: it belongs to another plan or run.
    """
    with _LOCK:
        store = _OPEN.get(url)
        if store is None:
            store = SqliteStore(path_of(url), key_schema(plan), plan.sums)
            _OPEN[url] = store
        if (store.identity.plan_hash, store.identity.run_id) != (plan.hash, run_id):
            _OPEN.pop(url).close()
            raise PolicyError(
                "state.store", "holds the state of another plan or run", "use a new store"
            )
        return store


def identity_of(url: str, plan: Plan) -> RunIdentity:
    """Identity of an existing store.

    Raises:
        PolicyError: it is no store of this program, or holds the state of another plan.
    """
    store = SqliteStore(path_of(url), key_schema(plan), plan.sums)
    try:
        if store.identity.plan_hash != plan.hash:
            raise PolicyError(
                "state.store",
                "holds the state of a job with another plan",
                "use the job file the store was begun with",
            )
        return store.identity
    finally:
        store.close()


def close_all() -> None:
    """Close every store of this process (end of a run; tests that reopen)."""
    with _LOCK:
        for store in _OPEN.values():
            store.close()
        _OPEN.clear()
