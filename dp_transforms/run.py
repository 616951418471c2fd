"""A run: the plan, the reference to the secret and the store; picklable, without secrets."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec
import pyarrow as pa

from dpstream.accounting.budget.allocation import Budget
from dpstream.accounting.budget.calibration import begun, calibrate, calibrated
from dpstream.accounting.errors import UsageError, required
from dpstream.accounting.limits import DEFAULT_SHARDS
from dpstream.accounting.mixing import Mixing, checked_mixing
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.noise.secret_source import SecretSource, destroy_keys
from dpstream.state import open as stores
from dpstream.state.ledger.events import new_run_id
from dpstream.state.private_log import keep_beside
from dpstream.state.store import RunIdentity, Store


class Performance(NamedTuple):
    """Settings that change speed and memory, never a released byte.

    Attributes:
        look_ahead: steps of noise computed ahead of a key's last test (default by T).
        threads: number of threads for the shards of a stage, where the stages share a process.
    """

    look_ahead: int | None = None
    threads: int = 1


class Run(NamedTuple):
    """The parameters with which a worker takes part in a run.

    Attributes:
        plan: the public plan, with the rules that the run was begun with; defaults that it does
            not contain are this program's (see ``explicit``).
        keys: the reference to the secret.
        store: URL of an initialised store, e.g. ``sqlite:flights.db``.
        shards: number of key shards and of unit shards, as recorded in the store.
        run_id: the run that was begun on the store.
        public: canonical public key list with the plan's key columns, or ``None``.
        performance: settings without effect on results.
        mixing: how the noise of public keys is mixed, if the plan mixes it.
        upto: last trigger time of this pass, where bounded input grows and more passes follow
            (see `pipelines.stream.passes`); ``None``: the plan's last.
        joined: for partitions that were added to the run in a later pass, (the first of them, last
            trigger time that was released before), in order.
    """

    plan: Plan
    keys: SecretSource
    store: str
    shards: int
    run_id: str
    public: pa.Table | None = None
    performance: Performance = Performance()
    mixing: Mixing | None = None
    upto: int | None = None
    joined: tuple[tuple[int, int], ...] = ()

    def open(self) -> Store:
        """Return the store, shared by the workers of a process."""
        return stores.open_store(self.store, self.plan, self.run_id)

    def budget(self) -> Budget:
        """Return the budget of the run, as committed when it began."""
        return calibrated(self.plan, self.open().identity.calibration).budget

    def explicit(self) -> Plan:
        """Return the plan with the defaults that were committed when the run began.

        Above all it says when keys are tested.  Every stage uses this plan.  Its hash is not the
        run's.
        """
        return calibrated(self.plan, self.open().identity.calibration).plan

    def destroy_keys(self) -> None:
        """Destroy every key ring that this process has made for the run's workers.

        Call it at the end of a run; a later attempt to draw noise fails with a coded error.
        """
        destroy_keys(self.run_id)


class Account(Protocol):
    """The account that charges a run before it draws; see ``pipelines.frames.project_file``."""

    def check(self, plan: Plan) -> None:
        """Raise the error that ``charge`` would raise now; write no entry."""

    def charge(self, run: Run) -> None:
        """Charge a run whose store has committed its run id, once."""


def begin_run(
    plan: Plan,
    keys: SecretSource,
    store: str,
    shards: int = DEFAULT_SHARDS,
    *,
    source: Sequence[bytes] | None = (),
    run_id: str | None = None,
    calibration: str | None = None,
    public: pa.Table | None = None,
    performance: Performance | None = None,
    account: Account | None = None,
    mixing: Mixing | None = None,
) -> tuple[Run, bool]:
    """Begin a run on a new store, or continue the one that an existing store holds.

    The run id (128 random bits) is committed here, before the first draw, and with it the numbers
    that every worker draws and tests with; a run that continues keeps its own.

    Args:
        source: parts that identify the input; stored as a keyed fingerprint.  ``None``: the run was
            begun before and reads nothing, so its input is not compared.
        run_id: a fixed run id, for tests only.
        calibration: the numbers of a run that begins here, if they are not to be computed; those
            of a run that continues are never computed again.
        mixing: how the noise of public keys is mixed, if the plan mixes it.
        account: charges the run once its run id is committed: a begin that is interrupted has
            charged nothing, or its run id is found and not charged again.  Without it nothing is
            charged here.

    Returns:
        (run, whether the store existed).

    Raises:
        PolicyError: the store belongs to another plan, secret or input, or the account refuses.
    """
    keep_beside(store)
    mixing = _checked_cells(plan, public, mixing)
    with keys.ring() as ring:
        fingerprint = ring.fingerprint
        if source is None:
            begun_before = required(stores.backend(store).identity(), "it was begun before")
            source_fingerprint = begun_before.source_fingerprint
        else:
            source_fingerprint = ring.source_fingerprint(source)
    resumed = stores.check_new(  # a refused charge leaves no store behind
        store, lambda: None if account is None else account.check(plan)
    )
    identity = RunIdentity(
        plan_hash=plan.hash,
        run_id=run_id or new_run_id(),
        epoch=0,
        shards=shards,
        secret_fingerprint=fingerprint,
        source_fingerprint=source_fingerprint,
        plan=msgspec.json.encode(plan, order="sorted").decode(),
        insecure=keys.insecure_test_secret is not None or run_id is not None,
    )
    store_identity = stores.initialise(
        store, identity, lambda: calibrate(plan) if calibration is None else calibration
    )
    bound = keys.of_run(store_identity.run_id, fingerprint)
    mine, settings = begun(plan, store_identity.calibration), performance or Performance()
    run = Run(mine, bound, store, shards, store_identity.run_id, public, settings, mixing)
    if account is not None:
        account.charge(run)
    return run, resumed


def _checked_cells(plan: Plan, public: pa.Table | None, mixing: Mixing | None) -> Mixing | None:
    """Return the mixing of the plan's cells, if it has any, after a check of its public keys."""
    if plan.public_keys is not None and public is None:
        raise UsageError("public_keys", "the plan has public keys", "give begin_run their table")
    if plan.cells is None:
        return None
    return checked_mixing(plan.cells, mixing, 0 if public is None else public.num_rows)
