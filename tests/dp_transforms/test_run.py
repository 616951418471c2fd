"""A run's keys: the same on every worker, had by each for itself, and gone at the end.

What may be counted and said: allowed counters, public latencies, errors without their causes.
"""

import os
import pickle
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dpstream.accounting.errors import PolicyError, RunError, UsageError
from dpstream.dp_transforms import flow, telemetry
from dpstream.dp_transforms.beam.buffer import BufferUntilTriggerTime
from dpstream.dp_transforms.flow import BoundCallback, ReleaseCallback, SealFactory, run_in_memory
from dpstream.dp_transforms.ingest.records import CanonicaliserFactory, Records
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.dp_transforms.release import Seal
from dpstream.dp_transforms.run import Run, begin_run
from dpstream.dp_transforms.telemetry import (
    LATENCY_SECONDS,
    PRIVATE_COUNTERS,
    PUBLIC_COUNTERS,
    Deliveries,
    Latency,
    add_counts,
    count,
    counted_apart,
    first_error,
    forget_error,
    guarded,
    operator_totals,
    stage_cpu_seconds,
    stage_seconds,
    step_done,
    steps_done,
    timed,
    watch_steps,
)
from tests.dp_transforms.runs import PLANS
from tests.golden.refusals import Refused
from tests.streams import KEYS, begin, generate

KEY, OTHER = os.urandom(32).hex(), os.urandom(32).hex()
VARIABLE = "DPSTREAM_TEST_KEY"
PLAN = PLANS["sticky"]


@pytest.fixture
def run(store_paths: Iterator[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run whose key is in the environment."""
    monkeypatch.setenv(VARIABLE, KEY)
    keys = SecretSource(f"env:{VARIABLE}")
    return begin_run(PLAN, keys, f"sqlite:{next(store_paths)}", 2, source=[b"1"])[0]


def makers(run: Run) -> list[Callable[[], object]]:
    """Every place of the flow that reads the key on a worker."""
    return [
        CanonicaliserFactory(run.plan, run.keys),
        ReleaseCallback(run),
        BoundCallback(run),
        SealFactory(run),
    ]


def test_a_worker_with_another_key_is_refused(
    run: Run, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    """Otherwise a unit would have two ids, and count twice; and noise would not come back."""
    for make in makers(run):
        make()
    monkeypatch.setenv(VARIABLE, OTHER)
    for make in makers(run):
        refused(make)
    refused(lambda: run_in_memory(run, generate(PLAN).batches(300)))
    assert not run.open().progress(), "nothing is committed"
    monkeypatch.delenv(VARIABLE)
    for make in makers(run):
        refused(make)
    # Sabotage: a source that is not bound to its run takes what there is.
    monkeypatch.setenv(VARIABLE, OTHER)
    unbound = run._replace(keys=SecretSource(f"env:{VARIABLE}"))
    assert len([make() for make in makers(unbound)]) == 4


WORKER = """
import pickle, sys
run = pickle.loads(sys.stdin.buffer.read())
try:
    print(run.keys.ring().fingerprint)
except Exception as error:
    print(type(error).__name__)
"""


def test_a_worker_finds_the_key_for_itself(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process gets the reference only: its own environment decides."""
    data = pickle.dumps(run)
    assert KEY.encode() not in data and bytes.fromhex(KEY) not in data
    outputs = []
    for value in (KEY, OTHER, ""):
        env = os.environ | {VARIABLE: value, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", WORKER],
            input=data,
            env=env,
            capture_output=True,
            check=True,
        )
        outputs.append(done.stdout.decode().strip())
        assert KEY.encode() not in done.stderr and OTHER.encode() not in done.stderr
    with KeyRing(bytes.fromhex(KEY)) as ring:
        assert outputs == [ring.fingerprint, "PolicyError", "UsageError"]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[KeyRing]:
    """All rings that are made, kept alive as a runner's cache of workers would."""
    rings: list[KeyRing] = []
    honest = SecretSource.ring

    def ring(source: SecretSource) -> KeyRing:
        rings.append(honest(source))
        return rings[-1]

    monkeypatch.setattr(SecretSource, "ring", ring)
    return rings


def alive(rings: list[KeyRing]) -> int:
    """How many can still be used."""
    count = 0
    for ring in rings:
        try:
            ring.name(())
            count += 1
        except RunError:
            continue
    return count


def test_all_keys_of_a_run_and_no_others_are_destroyed(
    run: Run, made: list[KeyRing], store_paths: Iterator[str], refused: Refused
) -> None:
    other = begin(PLAN, next(store_paths))
    neighbour = other.keys.ring()
    made.clear()
    callbacks = [make() for make in makers(run)]
    assert len(made) == alive(made) == len(callbacks) == 4
    run.destroy_keys()
    assert alive(made) == 0
    neighbour.name(())
    run.destroy_keys()
    refused(lambda: callbacks[0](generate(PLAN).batches(300)[0]))  # type: ignore[operator]
    assert alive([run.keys.ring()]) == 1, "a run that goes on reads its key again"
    run.destroy_keys()


def test_what_begins_a_run_is_destroyed_there(
    made: list[KeyRing], store_paths: Iterator[str], refused: Refused
) -> None:
    path = next(store_paths)
    begin(PLAN, path)
    assert len(made) == 1 and alive(made) == 0
    refused(lambda: begin_run(PLAN, SecretSource(None, "12" * 32), f"sqlite:{path}", 2))
    assert len(made) == 2 and alive(made) == 0


def test_teardown_lets_go_of_the_key(run: Run, made: list[KeyRing]) -> None:
    stages: list[Any] = [
        Records(CanonicaliserFactory(run.plan, run.keys)),
        BufferUntilTriggerTime(run.plan.timeline, BoundCallback(run)),
        BufferUntilTriggerTime(run.plan.timeline, ReleaseCallback(run)),
        Seal(SealFactory(run)),
    ]
    for stage in stages:
        stage.setup()
    buffers = [ring._name for ring in made]
    gone = [weakref.ref(ring) for ring in made]
    made.clear()
    assert all(any(buffer) for buffer in buffers)
    for stage in stages:
        stage.teardown()
        stage.teardown()
    assert [ref() for ref in gone] == [None] * 4
    assert not any(any(buffer) for buffer in buffers)


def test_the_interface_takes_a_reference(
    store_paths: Iterator[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, KEY)
    store = f"sqlite:{next(store_paths)}"
    made = flow.DPStream(PLAN, secret=f"env:{VARIABLE}", store=store, source="s")
    assert made._run.keys.reference == f"env:{VARIABLE}"


def test_the_flow_does_not_depend_on_where_the_key_is(
    store_paths: Iterator[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, KEY)
    releases = []
    for keys in (SecretSource(None, KEY), SecretSource(f"env:{VARIABLE}"), KEYS):
        url = f"sqlite:{next(store_paths)}"
        run, _ = begin_run(PLAN, keys, url, 2, run_id="22" * 16)
        releases.append(
            [batch.to_pylist() for batch in run_in_memory(run, generate(PLAN).batches(9))[0]]
        )
    assert releases[0] == releases[1] != releases[2]
    assert any(releases[0])


SECRET = "user-4711"


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    forget_error()
    yield
    forget_error()


def test_only_allowed_counters_exist() -> None:
    with pytest.raises(ValueError, match="allow-list"):
        count(SECRET)
    assert not set(PUBLIC_COUNTERS) & set(PRIVATE_COUNTERS)
    assert all(name.startswith("operator_") for name in PRIVATE_COUNTERS)
    assert not any(name.startswith("operator_") for name in PUBLIC_COUNTERS)


def test_what_a_thread_counts_apart_is_counted_once() -> None:
    before = operator_totals["operator_records_in"]
    with counted_apart() as counts:
        count("operator_records_in", 3)
        count("operator_records_in", 4)
        count("operator_records_in", 0)
    assert counts == {"operator_records_in": 7}
    assert operator_totals["operator_records_in"] == before
    add_counts(counts)
    assert operator_totals["operator_records_in"] == before + 7


def test_a_stages_seconds_are_added_up_when_it_fails_too() -> None:
    before = stage_seconds["seal"], stage_cpu_seconds["seal"]
    with pytest.raises(InterruptedError), timed("seal"):
        time.sleep(0.01)
        raise InterruptedError
    assert stage_seconds["seal"] >= before[0] + 0.01
    assert stage_cpu_seconds["seal"] < before[1] + 0.01


@pytest.mark.parametrize(("public", "total"), [(True, 1 + 1 + 4000), (False, 0.1 + 0.4 + 4000)])
def test_latencies_by_bucket(public: bool, total: float) -> None:
    """A bound belongs to its bucket; a public sum is of whole seconds."""
    latency = Latency("release_latency", public)
    for seconds in (0.1, 0.4, 4000.0):
        latency.add(seconds)
    expected = [0] * (len(LATENCY_SECONDS) + 1)
    expected[0] = expected[2] = expected[-1] = 1
    assert latency.counts == expected and latency.total == pytest.approx(total)


def test_only_live_trigger_times_have_a_latency() -> None:
    deliveries = Deliveries()
    deliveries.delivered(5_000_000, 9_000_000)
    deliveries.live_from(6_000_000)
    deliveries.live_from(1)  # the first call holds
    deliveries.delivered(5_999_999, 9_000_000)
    deliveries.delivered(9_000_001, 9_000_000)
    assert sum(deliveries.since_trigger_time.counts) == 0 and deliveries.last_instant == 9_000_001
    deliveries.delivered(6_000_000, 9_000_000)
    assert deliveries.since_trigger_time.total == 3 and deliveries.last_instant == 9_000_001


def test_the_time_since_a_trigger_time_passed() -> None:
    deliveries = Deliveries()
    deliveries.passed([1, 2])
    deliveries.delivered(2, 10)
    deliveries.delivered(3, 10)
    assert sum(deliveries.since_passed.counts) == 1 and deliveries.since_passed.counts[0] == 1


def test_long_streams_forget_what_passed_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "_TRIGGER_TIMES_KEPT", 3)
    deliveries = Deliveries()
    deliveries.passed(range(10))
    assert [*deliveries._passed] == [7, 8, 9]


@pytest.mark.parametrize("as_generator", [False, True])
def test_an_unforeseen_error_shows_its_class_only(as_generator: bool) -> None:
    def function(value: str) -> None:
        raise KeyError(value)

    def generator(value: str) -> Iterator[str]:
        yield "first"
        raise KeyError(value)

    with pytest.raises(RunError) as caught:
        if as_generator:
            list(guarded("bound")(generator)(SECRET))
        else:
            guarded("bound")(function)(SECRET)
    error = caught.value
    assert (error.field, error.rule) == ("stage.bound", "failed with KeyError")
    assert error.__cause__ is None and error.__context__ is None and SECRET not in str(error)


def test_a_coded_error_passes_as_it_is(refused: Refused) -> None:
    coded = UsageError("table.unit_column", "is missing", "name it")

    @guarded("records")
    def fails() -> None:
        raise coded from KeyError(SECRET)

    caught = refused(fails)
    assert caught is coded and coded.__cause__ is None


def test_the_first_refusal_stands_before_failures() -> None:
    """What follows is its echo; a failure may itself be one, of a refusal elsewhere."""

    def fail(error: Exception) -> None:
        @guarded("bound")
        def stage() -> None:
            raise error

        with pytest.raises(type(error)):
            stage()

    assert first_error() is None
    for error in (
        RunError("a", "failed", "x"),
        PolicyError("b", "no", "x"),
        UsageError("c", "", ""),
    ):
        fail(error)
    failure = first_error()
    assert failure is not None and failure.field == "b" and failure.__traceback__ is None


def test_progress_is_told_from_where_it_stood() -> None:
    step_done()
    reports: list[tuple[int, int]] = []
    with watch_steps(lambda done, of: reports.append((done, of)), 5, every_seconds=30):
        step_done()
        step_done()
    assert reports == [(2, 5)]
    before = steps_done()
    with watch_steps(None, 5):
        step_done()
    assert steps_done() == before + 1 and len(reports) == 1
