"""How long a stream may be still, and how often that is said (pipelines in tests/runners)."""

from collections.abc import Callable

import pytest

from dpstream.accounting.errors import DpstreamError, instance
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.runners.waiting import QUIET_SECONDS, Stillness, quiet_seconds


@pytest.mark.parametrize(("live", "seconds"), [(False, QUIET_SECONDS), (True, 43_200)])
def test_two_triggers_at_the_streams_own_pace(
    live: bool, seconds: float, make_job: Callable[..., Job]
) -> None:
    assert quiet_seconds(make_job().plan.timeline, live) == seconds


def test_it_is_said_again_after_twice_the_time_and_any_change_is_progress() -> None:
    now, messages = [0.0], list[DpstreamError | str]()
    still = Stillness(10, messages.append, lambda: now[0])
    at = []
    for second in range(100):
        now[0] = float(second)
        before = len(messages)
        still.look("other" if second >= 60 else "same")
        at += [second] if len(messages) > before else []
    # The first look is progress, too; and so is the change at 60.
    assert at == [10, 20, 40, 70, 80]
    assert {instance(error, DpstreamError).field for error in messages} == {"runner"}
