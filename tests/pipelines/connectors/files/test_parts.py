"""Parts of a release in the sink of files: they appear together, whatever happens between them."""

from pathlib import Path

import pyarrow as pa
import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.dp_transforms.batches import PART
from dpstream.pipelines.connectors.files.sink import FileSink, release_path
from dpstream.pipelines.connectors.sink import PublishedRelease
from dpstream.pipelines.formats.encodings import read_releases
from dpstream.pipelines.project.job_section import SinkKind
from tests.golden.refusals import Refused
from tests.pipelines.connectors.files.test_sink import KINDS, files, release


def part(number: int, count: int, keys: list[str]) -> pa.RecordBatch:
    batch = release(12, 5, keys)
    metadata = batch.schema.metadata | {PART: f"{number}/{count}".encode()}
    return batch.replace_schema_metadata(metadata)


PARTS = [part(0, 3, ["a", "b"]), part(1, 3, ["c", "d"]), part(2, 3, ["e"])]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (0, 0, 2, 1)])
def test_parts_appear_together(tmp_path: Path, kind: SinkKind, order: tuple[int, ...]) -> None:
    """Also after a writer was cut off, and whoever writes which of them."""
    for number in order[:-1]:
        sink = FileSink(tmp_path, kind)
        sink.prepare()
        assert sink.write([PARTS[number]]) == [] == list(sink.published())
        assert read_releases(tmp_path).num_rows == 0 and not sink.holds(PARTS[number])
    sink.write([PARTS[order[-1]]])
    path = tmp_path / release_path(12, 5, kind)
    assert sorted(p.name for p in path.iterdir()) == [
        f"part-00000{number}-of-000003.{kind}" for number in range(3)
    ]
    [one] = sink.published()
    assert one == PublishedRelease(12, 5, path)
    assert read_releases(tmp_path).column("key").to_pylist() == list("abcde")
    before = files(tmp_path)
    assert sink.write(PARTS) == sink.write(PARTS, only_compare=True) == [(12, 5)]
    assert all(sink.holds(batch) and sink.same(one, batch) for batch in PARTS)
    assert files(tmp_path) == before


def test_a_part_that_was_lost_or_damaged_is_written_again(tmp_path: Path) -> None:
    sink = FileSink(tmp_path, "parquet")
    sink.write(PARTS)
    before, path = files(tmp_path), tmp_path / release_path(12, 5, "parquet")
    first, second, _ = sorted(path.iterdir())
    first.unlink()
    second.write_bytes(b"torn")
    assert sink.write(PARTS) == [(12, 5)] and files(tmp_path) == before
    first.unlink()
    [one] = sink.published()
    assert sink.same(one, PARTS[0]) and files(tmp_path) == before


@pytest.mark.parametrize(
    ("there", "comes"),
    [([part(0, 3, ["x"])], PARTS), (PARTS, [part(0, 3, ["x"])]), (PARTS, [release(12, 5, ["a"])]),
     ([release(12, 5, ["a"])], PARTS), ([part(0, 2, ["a", "b"])], PARTS),
     ([part(0, 2, ["a", "b"]), part(1, 2, ["c"])], PARTS)],
    ids=["hidden", "shown", "one part", "several parts", "another number", "another number shown"],
)  # fmt: skip
def test_parts_of_another_release_are_refused(
    there: list[pa.RecordBatch], comes: list[pa.RecordBatch], tmp_path: Path, refused: Refused
) -> None:
    sink = FileSink(tmp_path, "parquet")
    sink.write(there)
    before = read_releases(tmp_path)
    assert not any(sink.same(one, comes[0]) for one in sink.published())
    with pytest.raises(PolicyError):
        sink.write(comes, only_compare=True)
    refused(lambda: sink.write(comes))
    assert read_releases(tmp_path).equals(before)
