"""What may be counted and said: allowed counters, public latencies, errors without their causes."""

import time
from collections.abc import Iterator

import pytest

from dpstream.accounting.errors import PolicyError, RunError, UsageError
from dpstream.dp_transforms import telemetry
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


def test_a_coded_error_passes_as_it_is() -> None:
    coded = UsageError("table.unit_column", "is missing", "name it")

    @guarded("records")
    def fails() -> None:
        raise coded from KeyError(SECRET)

    with pytest.raises(UsageError) as caught:
        fails()
    assert caught.value is coded and coded.__cause__ is None


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
