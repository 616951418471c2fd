"""A pipeline without end on Prism, watched over a store that is away for a while."""

import threading
from pathlib import Path

import pytest

from dpstream.accounting.errors import RunError
from dpstream.dp_transforms.run import Run
from dpstream.pipelines.runners import waiting
from dpstream.state import open as stores
from tests.runners.engines import launched
from tests.runners.prism import binary
from tests.runners.spike import Shape
from tests.streams import begin, make_plan


@pytest.mark.parametrize("away", [0, 2])
def test_a_stop_is_seen_whatever_the_store_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, away: int
) -> None:
    run, calls, stop = begin(make_plan(), tmp_path / "a.db"), list[None](), threading.Event()

    def through(store: object) -> int:
        calls.append(None)
        if len(calls) <= away:
            raise RunError("store", "did not answer", "wait")
        stop.set()
        return 0

    monkeypatch.setattr(waiting, "delivered_through", through)
    flags = [f"--prism_location={binary()}"]
    with launched("PrismRunner", flags, Shape(endless=True), tmp_path) as (result, engine):
        stuck = threading.Timer(30, result.cancel)
        stuck.start()
        try:
            assert waiting.wait_or_stop(result, run, False, stop, engine)
        finally:
            stuck.cancel()
    assert len(calls) == away + 1
    stores.close_all()


def test_the_last_trigger_time_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run: Run = begin(make_plan(), tmp_path / "a.db")
    last = run.plan.timeline.last_trigger_time
    trigger_times = iter([0, last - 1, last])
    monkeypatch.setattr(waiting, "delivered_through", lambda store: next(trigger_times))
    flags = [f"--prism_location={binary()}"]
    with launched("PrismRunner", flags, Shape(endless=True), tmp_path) as (result, engine):
        assert waiting.wait_or_stop(result, run, False, None, engine)
    assert next(trigger_times, None) is None
    stores.close_all()
