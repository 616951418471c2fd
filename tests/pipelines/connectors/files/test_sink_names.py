"""Only a file that stands at its release's own name is that release."""

import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.dp_transforms.batches import TRIGGER, WINDOW
from dpstream.pipelines.connectors.files.sink import FileSink, release_path
from dpstream.pipelines.formats.encodings import name_of
from tests.written import write_release

STRANGE = [
    "window-000001.bak/trigger-000002.parquet",
    "window-000001-000003/trigger-000002.parquet",
    "window-1/trigger-000002.parquet",
    "window-000003/trigger-2.parquet",
    "window-000003/trigger-old-000002.parquet",
    "window-000003/trigger-000002.000001.parquet",
    "window-000003/trigger-٠٠٠٠٠٢.parquet",
]


def released(folder: Path, window: int, trigger: int) -> Path:
    batch = pa.record_batch({"records": [1.0]})
    where = {WINDOW: str(window), TRIGGER: str(trigger)}
    write_release(folder, "parquet", batch.replace_schema_metadata(where))
    return folder / release_path(window, trigger, "parquet")


@pytest.mark.parametrize("name", STRANGE)
def test_a_copy_beside_a_release_is_no_release_of_this_run(tmp_path: Path, name: str) -> None:
    path = released(tmp_path, 1, 2)
    sink = FileSink(tmp_path, "parquet")
    assert [tuple(one) for one in sink.published()] == [(1, 2, path)]
    copy = tmp_path / name
    copy.parent.mkdir(exist_ok=True)
    shutil.copy(path, copy)
    with pytest.raises(PolicyError, match="no release of this run"):
        list(sink.published())


def test_names_of_large_numbers_are_longer(tmp_path: Path) -> None:
    released(tmp_path, 12_345_678, 1_000_000)
    sink = FileSink(tmp_path, "parquet")
    assert [one[:2] for one in sink.published()] == [(12_345_678, 1_000_000)]


def test_a_copied_folder_has_no_number() -> None:
    assert name_of(Path("out/window-000001/trigger-000002.csv")) == (1, 2)
    assert name_of(Path("out/window-000001.bak/trigger-000002.csv")) == (-1, 2)
    assert name_of(Path("out/window-000001/trigger-x.csv")) == (1, -1)
