"""A sink's manifests: whose releases it holds, and stores that are not the run's.

Committed releases of a stream without end, written again.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.dp_transforms.flow import ReleaseCallback
from dpstream.pipelines.connectors.files.sink import FileSink, release_path
from dpstream.pipelines.connectors.run_manifest import (
    committed_names,
    publish_committed,
    published_epoch,
    refuse_foreign,
    refuse_lost_store,
)
from dpstream.pipelines.connectors.sink import FORMAT, RunManifest
from dpstream.state import open as stores
from tests.pipelines.connectors.files.test_sink import release
from tests.streams import begin, make_plan
from tests.written import write_release

MINE = RunManifest(FORMAT, "abc", 1, "hash", "csv")


@pytest.fixture
def sink(tmp_path: Path) -> FileSink:
    made = FileSink(str(tmp_path / "releases"), "csv")
    made.put_manifest(MINE)
    return made


def test_ones_own_manifest_is_fine_and_says_its_epoch(sink: FileSink) -> None:
    refuse_foreign(MINE, sink)
    assert published_epoch(sink, "abc") == 1
    assert published_epoch(sink, "other") == -1


@pytest.mark.parametrize(
    ("change", "field"),
    [({"run_id": "other"}, "sink.path"), ({"plan_hash": "other"}, "sink.path"),
     ({"epoch": 0}, "store"), ({"kind": "parquet"}, "sink.kind")],
)  # fmt: skip
def test_anothers_manifest_is_refused(
    change: dict[str, object], field: str, sink: FileSink
) -> None:
    with pytest.raises(PolicyError) as error:
        refuse_foreign(msgspec.structs.replace(MINE, **change), sink)
    assert error.value.field == field


def test_a_new_store_never_adds_to_releases_that_are_there(
    sink: FileSink, tmp_path: Path, make_job: Callable[..., object]
) -> None:
    refuse_lost_store(FileSink(str(tmp_path / "empty"), "csv"))
    with pytest.raises(PolicyError) as error:
        refuse_lost_store(sink)
    assert error.value.field == "sink.path"
    write_release(tmp_path / "used", "csv", release(0, 1, ["a"]))
    with pytest.raises(PolicyError):
        refuse_lost_store(FileSink(str(tmp_path / "used"), "csv"))


BOUNDED = make_plan(triggers=4, windows=3, slide=2)
ENDLESS = msgspec.structs.replace(
    BOUNDED, timeline=msgspec.structs.replace(BOUNDED.timeline, end=None)
).check()


def test_a_stream_without_end_can_be_published_again(tmp_path: Path) -> None:
    run, timeline = begin(ENDLESS, tmp_path / "a.db", shards=2), ENDLESS.timeline
    assert list(committed_names(run, run.open())) == []
    release = ReleaseCallback(run)()
    for shard, upto in ((0, 7), (1, 6)):
        assert list(release(shard, [], upto, 0).outputs)
    done = [(w, c - timeline.base(w)) for c in range(1, 7) for w in timeline.windows_at(c)]
    assert list(committed_names(run, run.open())) == done and len(done) > 6
    assert publish_committed(run, FileSink(tmp_path / "out", "parquet")) == len(done)
    assert all((tmp_path / "out" / release_path(*name, "parquet")).exists() for name in done)
    stores.close_all()
