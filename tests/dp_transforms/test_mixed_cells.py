"""Mixed cells through the whole flow: what is published, and that nothing else changes it."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.arrays import Ids
from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.errors import PolicyError
from dpstream.accounting.limits import MIXED_BITS
from dpstream.accounting.mixing import Mixing
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.batches import HAND_OVER, ID, PARTITION, ROWS
from dpstream.dp_transforms.beam.clock import paced_clock
from dpstream.dp_transforms.flow import DPStream
from dpstream.dp_transforms.ingest.records import (
    canonical_public_keys,
    positions,
    public_key_ids,
    require_once,
)
from dpstream.dp_transforms.noise.continuous import ContinuousGaussian
from dpstream.dp_transforms.noise.mixing import MixedNoise
from dpstream.dp_transforms.noise.paths import NoiseStream, Paths
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.noise.secret_source import SecretSource, read_secret
from dpstream.dp_transforms.run import begin_run
from dpstream.dp_transforms.step import Stepper, run_name
from dpstream.state import open as stores
from dpstream.state.store import RunIdentity
from dpstream.state.transfer import reshard
from tests.dp_transforms.noise.test_paths import key_ids, stream_of
from tests.dp_transforms.runs import (
    PLANS,
    begin_mixed,
    exact_counts,
    factors,
    matrices,
    mixed_plan,
    mixed_released,
)
from tests.dp_transforms.test_flow import through_beam
from tests.golden.pinned import check, of_refusals
from tests.golden.refusals import Refused
from tests.streams import (
    COUNT,
    KEYS,
    MEAN,
    RUN_ID,
    SUM,
    UNITS,
    begin,
    generate,
    make_plan,
    public_table,
)
from tests.streams import released as released_keys

ALL = (COUNT, SUM, MEAN)
MIXING = Mixing(factors(4, 5))
CELLS = MIXING.size


def plan_of(**options: object) -> Plan:
    return mixed_plan(MIXING, aggregates=ALL, **options)


def noise_of(plan: Plan, window: int, column: int = 0) -> MixedNoise:
    """The noise of one column from its names alone."""
    noise = allocate(plan).values[column]
    name = run_name(RunIdentity(plan.hash, RUN_ID, 0, 3, "", "", ""))
    bounds, sampler = plan.timeline.window_bounds(window), ContinuousGaussian(noise.sigma)
    return MixedNoise(NoiseStream(KEYS.ring(), name, bounds, "value", noise, sampler), MIXING)


@pytest.mark.parametrize("strategy", ["blt", "dense"])
def test_published_is_the_exact_prefix_and_the_mixed_noise(strategy: str, tmp_path: Path) -> None:
    """Of all cells, data or not, at every trigger; sds are each cell's own."""
    plan = mixed_plan(MIXING, strategy=strategy, contributions=10_000, epsilon=900.0)
    stream = generate(plan, records=600, keys=30)
    columns = matrices(
        mixed_released(begin_mixed(plan, tmp_path, MIXING), stream.batches(100)), ["n", "n_sd"]
    )
    exact, noise, sds = exact_counts(plan, stream, CELLS), [], []
    for window in range(plan.timeline.windows):
        of_window = noise_of(plan, window)
        for trigger in range(1, plan.timeline.triggers + 1):
            noise.append(of_window.at(trigger) / (1 << MIXED_BITS))
            sds.append(allocate(plan).values[0].sd[trigger - 1] * MIXING.row_norms)
    assert np.array_equal(columns["n"], exact + np.array(noise))
    assert np.array_equal(columns["n_sd"], np.array(sds))
    assert (exact[-1] == 0).any() or exact.min() == 0


def test_the_identity_is_todays_stream_byte_for_byte(tmp_path: Path) -> None:
    plain = make_plan(strategy="dense", triggers=8, public="all cells", aggregates=ALL)
    identity = Mixing([np.eye(4), np.eye(5)])
    plan, stream = mixed_plan(identity, aggregates=ALL), generate(plain)
    public = public_table(plain, range(CELLS))
    expected = released_keys(plain, stream.batches(100), tmp_path / "plain.db", public=public)
    assert plan == plain
    assert (
        mixed_released(begin_mixed(plan, tmp_path / "m", identity), stream.batches(100)) == expected
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"slide": 3, "windows": 4, "triggers": 9}, {"refresh_every": 3},
     {"stamped": True, "lateness": 3, "skew": 1_000_000}, {"windows": 1, "triggers": 1}],
    ids=["tumbling", "sliding", "refresh", "late", "once"],
)  # fmt: skip
def test_shards_order_and_batches_do_not_matter(options: dict[str, object], tmp_path: Path) -> None:
    plan = plan_of(**options)
    stream = generate(plan)
    expected = mixed_released(begin_mixed(plan, tmp_path / "a", MIXING, 1), stream.batches(400))
    other = begin_mixed(plan, tmp_path / "b", MIXING, 5)
    assert mixed_released(other, stream.batches(37, seed=1)) == expected


def test_through_beam(tmp_path: Path) -> None:
    plan = plan_of()
    source = generate(plan).batches(150)
    expected = mixed_released(begin_mixed(plan, tmp_path / "a", MIXING), source)
    run = begin_mixed(plan, tmp_path / "b", MIXING, 4)
    assert through_beam(DPStream(plan, run), source, tmp_path / "out")[0] == expected
    stores.close_all()


def steps_of(plan: Plan, folder: Path, restarts: int, again: int | None) -> dict[Any, bytes]:
    """Releases of all steps without data, the process begun anew every so many steps, and the
    store moved to other shards in the midst."""
    run, by_step = begin_mixed(plan, folder, MIXING), {}
    shards, work = run.shards, []
    for window in range(plan.timeline.windows):
        work += [(window, t) for t in range(1, plan.timeline.triggers + 1)]
    stepper = None
    for number, (window, trigger) in enumerate(work):
        if again is not None and number == again:
            stores.close_all()
            reshard(run.store, plan, 5)
            run, shards, stepper = run._replace(shards=5), 5, None
        if stepper is None or number % restarts == 0:
            stores.close_all()
            ring = KEYS.ring()
            public = public_table(plan, range(CELLS))
            ids = ids_of(plan, ring)
            stepper = Stepper(plan, ring, run.open(), (public, ids), None, MIXING)
        rows = dict[Any, Any]()
        for shard in range(shards):
            batch, _ = stepper.step(window, shard, trigger, None)
            rows |= {row["page"]: (row["n"], row["n_sd"]) for row in batch.to_pylist()}
        by_step[window, trigger] = repr(sorted(rows.items())).encode()
    stores.close_all()
    return by_step


def ids_of(plan: Plan, ring: KeyRing) -> Ids:
    return public_key_ids(plan, ring, public_table(plan, range(CELLS)))


def test_restarts_and_reshards_change_nothing(tmp_path: Path) -> None:
    plan = mixed_plan(MIXING)
    expected = steps_of(plan, tmp_path / "whole", 1000, None)
    assert len(expected) == 16 and len(set(expected.values())) == 16
    assert steps_of(plan, tmp_path / "restarted", 1, None) == expected
    assert steps_of(plan, tmp_path / "moved", 1000, 11) == expected


def test_a_run_that_was_cut_off_goes_on_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With data, at several steps of several shards; each time in a new process's objects."""
    plan = plan_of()
    source = generate(plan).batches(100)
    expected = mixed_released(begin_mixed(plan, tmp_path / "whole", MIXING), source)
    computed, honest = 0, Stepper._compute

    def failing(self: Stepper, *args: object) -> object:
        nonlocal computed
        computed += 1
        if computed in (3, 21, 40):
            raise InterruptedError
        return honest(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Stepper, "_compute", failing)
    for _ in range(3):
        with pytest.raises(InterruptedError):
            mixed_released(begin_mixed(plan, tmp_path / "cut", MIXING), source)
        stores.close_all()
    assert mixed_released(begin_mixed(plan, tmp_path / "cut", MIXING), source) == expected


def test_no_run_begins_without_its_mixing(tmp_path: Path) -> None:
    plan, public = plan_of(), public_table(plan_of(), range(CELLS))
    other = Mixing(factors(5, 4))
    for mixing, table in ((None, public), (other, public), (MIXING, public.slice(1))):
        with pytest.raises(PolicyError) as refused:
            begin_run(plan, KEYS, f"sqlite:{tmp_path}/s.db", public=table, mixing=mixing)
        assert refused.value.field == "cells"
    run = begin_mixed(plan, tmp_path, MIXING)
    ids = ids_of(plan, KEYS.ring())
    with pytest.raises(PolicyError):
        Stepper(plan, KEYS.ring(), run.open(), (public, ids), None, other)
    stores.close_all()


def test_a_count_of_units_is_not_mixed(refused: Refused) -> None:
    refused(mixed_plan, MIXING, aggregates=(UNITS,))


# What the flow refuses, and in which words: a golden text, renewed by ``REWRITE=1``.


KEY = "5e" * 32
VERSIONS = "gcp:projects/p/secrets/s/versions"
BATCH = generate(PLANS["sticky"], records=10).batches(100)[0]
LARGE = pa.RecordBatch.from_pydict({"n": list(range(2000))})


def twice() -> None:
    where = {"partition": pa.array([0, 0], pa.int32()), "offset": pa.array([3, 3])}
    require_once(pa.RecordBatch.from_pydict({"unit": pa.array([bytes(16)] * 2, ID), **where}))


def public(*pages: str | None) -> None:
    canonical_public_keys(make_plan(public="list"), pa.table({"page": pages}))


def opened_by(first: Callable[[], object], second: Callable[[], object]) -> None:
    with first(), second():  # type: ignore[attr-defined]
        pass


def taken(times: int, ended: bool) -> None:
    with HAND_OVER.open():
        ticket = HAND_OVER.give(LARGE) or b""
        for _ in range(times):
            HAND_OVER.take(ticket)
    if ended:
        HAND_OVER.take(ticket)


def named_twice() -> None:
    table, rows = Paths(stream_of(9)), np.arange(3)
    table.start(rows, key_ids(3))
    for _ in range(2):
        table.advance(rows, np.full(3, 4))


def destroyed() -> None:
    ring = KeyRing(bytes(range(32)))
    ring.destroy()
    ring.name(())


@pytest.fixture
def calls(tmp_path: Path, store_paths: Iterator[str]) -> dict[str, Callable[[], object]]:
    """By what is wrong with them."""
    for name, text, mode in (("open", KEY, 0o644), ("short", KEY[:-1], 0o600)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
    run, line = begin(PLANS["sticky"], next(store_paths)), PLANS["sticky"].timeline
    ring = SecretSource(None, KEY).ring()
    runs = f"{BATCH.num_rows},1".encode()
    return {
        "no batches": partial(positions, pa.table({})),
        "no position": partial(positions, BATCH.replace_schema_metadata(None)),
        "runs of other lengths": partial(
            positions,
            BATCH.replace_schema_metadata({**BATCH.schema.metadata, ROWS: runs, PARTITION: b"0"}),
        ),
        "a position twice": twice,
        "a public key that is NULL": partial(public, "a", None),
        "a clock that cannot wait": partial(paced_clock, beam.Create([1]), line, lambda at: at),
        "a batch taken twice": partial(taken, 2, False),
        "a batch of a run that has ended": partial(taken, 0, True),
        "bytes beside references": partial(opened_by, HAND_OVER.open, HAND_OVER.by_bytes),
        "references beside bytes": partial(opened_by, HAND_OVER.by_bytes, HAND_OVER.open),
        "a prefix twice": named_twice,
        "a ring that has ended": destroyed,
        "a key of another length": partial(KeyRing, b"\1" * 31),
        "two secrets": partial(SecretSource, "env:A", KEY),
        "no reference": partial(SecretSource, "noise.secret"),
        "a version that can move": partial(SecretSource, f"{VERSIONS}/latest"),
        "a test secret of other digits": partial(SecretSource, None, "5E" * 32),
        "no secret": SecretSource().ring,
        "no secret where one is needed": partial(SecretSource().required, "secret", "is needed"),
        "a secret of another run": SecretSource(None, KEY).of_run("r", "0" * 32).ring,
        "a variable that is not set": partial(read_secret, "env:DPSTREAM_NO_SUCH_VARIABLE"),
        "a file that others can read": partial(read_secret, f"file:{tmp_path / 'open'}"),
        "63 digits": partial(read_secret, f"file:{tmp_path / 'short'}"),
        "a stream without a source": partial(DPStream, run.plan, secret="env:A"),
        "a plan that is not the run's": partial(DPStream, make_plan(epsilon=5.5), run),
        "an account of a run": partial(DPStream, run.plan, run, account=ring),  # type: ignore[arg-type]
    }


def test_refusals(calls: dict[str, Callable[[], object]], tmp_path: Path) -> None:
    text = of_refusals(calls).replace(str(tmp_path), "FOLDER")
    stores.close_all()
    check(Path(__file__).with_name("refusals.txt"), text)
