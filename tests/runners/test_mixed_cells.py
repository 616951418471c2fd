"""Mixed cells on another runner: the same bytes as in memory."""

from pathlib import Path

import apache_beam as beam
import pytest

from dpstream.accounting.mixing import Mixing
from dpstream.dp_transforms.flow import DPStream
from dpstream.pipelines.runners.table import make_runner
from dpstream.state import open as stores
from tests.dp_transforms.mixed import begin_mixed, factors, mixed_plan, released
from tests.runners.feed import Collect, collected
from tests.runners.prism import binary
from tests.streams import COUNT, SUM, generate


@pytest.mark.slow
def test_prism_gives_the_same_bytes_as_memory(tmp_path: Path) -> None:
    mixing = Mixing(factors(4, 5))
    plan = mixed_plan(mixing, aggregates=(COUNT, SUM))
    source = generate(plan).batches(150)
    expected = released(begin_mixed(plan, tmp_path / "a", mixing), source)
    run, out = begin_mixed(plan, tmp_path / "b", mixing, 4), tmp_path / "out"
    out.mkdir()
    engine = make_runner("PrismRunner", [f"--prism_location={binary()}"])
    with beam.Pipeline(engine.runner, engine.options) as pipeline:
        output = pipeline | beam.Create(source, reshuffle=False) | DPStream(plan, run)
        _ = output.releases | Collect(out)
    stores.close_all()
    assert collected(out) == expected
