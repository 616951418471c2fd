"""A run: the plan, the key's place and the store it was begun on; picklable, without secrets."""

import secrets
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import pyarrow as pa

from accounting.budget import allocate
from accounting.errors import UsageError
from accounting.plan import Plan
from dp_transforms.noise.prf import KeyRing, load_key
from state import open as stores
from state.store import RunIdentity, Store


class KeySource:
    """Where a worker finds the noise key: a file, or an insecure test key.

    Pickles hold the file's path, never the key.
    """

    def __init__(self, path: str | None, insecure_test_key: str | None = None) -> None:
        self.path, self.insecure_test_key = path, insecure_test_key

    def ring(self) -> KeyRing:
        """The key ring, read from its file."""
        if self.insecure_test_key is not None:
            return KeyRing(bytes.fromhex(self.insecure_test_key))
        return load_key(self.path or "")


class Performance(NamedTuple):
    """Settings that change speed and memory, never a released byte.

    Attributes:
        batch_rows: rows of a batch between stages.
        look_ahead: leaves of noise computed ahead of a key's last test (default by T).
    """

    batch_rows: int = 20_000
    look_ahead: int | None = None


class Run(NamedTuple):
    """What a worker needs to take part in a run.

    Attributes:
        plan: the public plan.
        keys: where the noise key is found.
        store: URL of an initialised store, e.g. ``sqlite:flights.db``.
        shards: key shards and unit shards, as recorded in the store.
        run_id: the run that was begun on the store.
        public: canonical public key list with the plan's key columns, or ``None``.
        performance: settings without effect on results.
    """

    plan: Plan
    keys: KeySource
    store: str
    shards: int
    run_id: str
    public: pa.Table | None = None
    performance: Performance = Performance()

    def open(self) -> Store:
        """The store, shared by the workers of a process."""
        return stores.open_store(self.store, self.plan, self.run_id)


def begin_run(
    plan: Plan,
    keys: KeySource,
    store: str,
    shards: int = 4,
    *,
    source: Sequence[bytes] = (),
    run_id: str | None = None,
    public: pa.Table | None = None,
    performance: Performance | None = None,
) -> tuple[Run, bool]:
    """Begin a run on a new store, or go on with the one an existing store holds.

    The run id (128 random bits) is committed here, before the first draw.

    Args:
        source: parts that identify the input; kept as a keyed fingerprint.
        run_id: a fixed run id, for tests only.

    Returns:
        (run, whether the store existed).

    Raises:
        PolicyError: the store belongs to another plan, key or input.
    """
    allocate(plan)
    if plan.public_keys is not None and public is None:
        raise UsageError("keys.public", "the plan has public keys", "give begin_run their table")
    ring = keys.ring()
    resumed = stores.exists(store)
    identity = RunIdentity(
        plan_hash=plan.hash,
        run_id=run_id or secrets.token_hex(16),
        epoch=0,
        shards=shards,
        key_fingerprint=ring.fingerprint,
        source_fingerprint=ring.source_fingerprint(source),
        plan=msgspec.json.encode(plan, order="sorted").decode(),
        insecure=keys.insecure_test_key is not None or run_id is not None,
    )
    found = stores.initialise(store, identity)
    settings = performance or Performance()
    return Run(plan, keys, store, shards, found.run_id, public, settings), resumed
