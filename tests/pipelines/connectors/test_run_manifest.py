"""A sink's manifests: whose releases it holds, and stores that are not the run's."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.pipelines.connectors.files.sink import FileSink
from dpstream.pipelines.connectors.run_manifest import (
    _refuse_foreign,
    published_epoch,
    refuse_lost_store,
)
from dpstream.pipelines.connectors.sink import FORMAT, RunManifest
from tests.pipelines.connectors.files.test_sink import release
from tests.written import write_release

MINE = RunManifest(FORMAT, "abc", 1, "hash", "csv")


@pytest.fixture
def sink(tmp_path: Path) -> FileSink:
    made = FileSink(str(tmp_path / "releases"), "csv")
    made.put_manifest(MINE)
    return made


def test_ones_own_manifest_is_fine_and_says_its_epoch(sink: FileSink) -> None:
    _refuse_foreign(MINE, sink)
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
        _refuse_foreign(msgspec.structs.replace(MINE, **change), sink)
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
