"""Prism splits slow bundles; a stage with state then loses rows, unless it is told not to."""

import itertools
import time
from pathlib import Path

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pytest

from dpstream.dp_transforms.beam import buffer
from dpstream.dp_transforms.beam.clock import Announced, ClockTick, clock_tick_of
from dpstream.dp_transforms.flow import DPStream
from dpstream.pipelines.runners import table as runner_settings
from dpstream.pipelines.runners.table import make_runner
from dpstream.state import open as stores
from tests.runners.feed import Collect, Feed, collected
from tests.runners.prism import binary
from tests.streams import begin, generate, make_plan, released


@pytest.mark.parametrize("sabotaged", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_slow_stage_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sabotaged: bool
) -> None:
    plan = make_plan(triggers=12, windows=3, stamped=True)
    stream, last = generate(plan, 8, records=3000), plan.timeline.last_trigger_time
    order = np.argsort(stream.stamp, kind="stable")
    rows = np.split(
        order, np.flatnonzero(np.diff(plan.timeline.trigger_time_of(stream.stamp[order]))) + 1
    )
    batches = [batch for row_numbers in rows for batch in stream.take(row_numbers).batches(40)]
    want, out = released(plan, batches, tmp_path / "calm.db"), tmp_path / "out"
    calls = itertools.count(1)

    def slowly(batch: pa.RecordBatch) -> ClockTick | None:
        time.sleep(0.35 if next(calls) % 40 == 0 else 0)
        return clock_tick_of(batch)

    monkeypatch.setattr(buffer, "clock_tick_of", slowly)
    if sabotaged:
        monkeypatch.setattr(runner_settings, "PRISM_WHOLE_BUNDLES", "--streaming")
    engine = make_runner("PrismRunner", [f"--prism_location={binary()}", "--prism_log_level=error"])
    run = begin(plan, tmp_path / "a.db")
    out.mkdir()
    with beam.Pipeline(runner=engine.runner, options=engine.options) as pipeline:
        records = pipeline | Feed(batches, "arrived", 4)
        output = records | DPStream(plan, run, clock=Announced(last))
        _ = output.releases | Collect(out)
    stores.close_all()
    assert (collected(out) == want) != sabotaged
