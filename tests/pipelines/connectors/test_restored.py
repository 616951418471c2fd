"""Committed releases of a stream without end, written again."""

from pathlib import Path

import msgspec

from dpstream.dp_transforms.flow import ReleaseCallback
from dpstream.pipelines.connectors.files.sink import FileSink, release_path
from dpstream.pipelines.connectors.restored import committed_names, publish_committed
from dpstream.state import open as stores
from tests.streams import begin, make_plan

BOUNDED = make_plan(triggers=4, windows=3, slide=2)
ENDLESS = msgspec.structs.replace(
    BOUNDED, timeline=msgspec.structs.replace(BOUNDED.timeline, end=None)
).check()


def test_a_stream_without_end_can_be_published_again(tmp_path: Path) -> None:
    run, line = begin(ENDLESS, tmp_path / "a.db", shards=2), ENDLESS.timeline
    assert list(committed_names(run, run.open())) == []
    release = ReleaseCallback(run)()
    for shard, upto in ((0, 7), (1, 6)):
        assert list(release(shard, [], upto, 0).outputs)
    done = [(w, c - line.base(w)) for c in range(1, 7) for w in line.windows_at(c)]
    assert list(committed_names(run, run.open())) == done and len(done) > 6
    assert publish_committed(run, FileSink(tmp_path / "out", "parquet")) == len(done)
    assert all((tmp_path / "out" / release_path(*name, "parquet")).exists() for name in done)
    stores.close_all()
