"""A file beside a release: the same, damaged, or another one that must stay."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.pipelines.connectors.files.compare import Verdict, verdict
from dpstream.pipelines.formats.encodings import encode
from tests.pipelines.connectors.files.test_sink import release

KINDS = ("parquet", "csv", "jsonl")
BATCH = release(0, 1, ["a", "b"])


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bytes_and_other_values(kind: str) -> None:
    assert verdict(encode(BATCH, kind), BATCH, kind) is Verdict.SAME
    assert verdict(encode(release(0, 1, ["a", "b"], 0.2), kind), BATCH, kind) is Verdict.OTHER
    assert verdict(encode(release(0, 1, ["a"]), kind), BATCH, kind) is Verdict.OTHER


@pytest.mark.parametrize("kind", KINDS)
def test_what_no_run_can_have_written_is_damaged(kind: str) -> None:
    data = encode(BATCH, kind)
    for broken in (data[:-9], b"", b"\xff" * 40):
        other = kind == "jsonl" and not broken  # a release without rows
        assert verdict(broken, BATCH, kind) is (Verdict.OTHER if other else Verdict.DAMAGED)


def test_what_says_the_same_in_other_bytes_is_damaged() -> None:
    data = encode(BATCH, "jsonl")
    assert verdict(data.replace(b'":', b'" :'), BATCH, "jsonl") is Verdict.DAMAGED


def test_other_bytes_are_the_same_only_of_another_version_of_the_library() -> None:
    written = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_batches([BATCH]), written, compression="gzip")
    other = written.getvalue().to_pybytes()
    assert verdict(other, BATCH, "parquet") is Verdict.DAMAGED
    version = pa.__version__.encode()
    older = other.replace(b"version " + version, b"version " + b"1" * (len(version) - 4) + b".1.1")
    assert len(older) == len(other) and older != other
    assert verdict(older, BATCH, "parquet") is Verdict.SAME
    foreign = other.replace(b"parquet-cpp-arrow", b"parquet-cpp-ARROW")
    assert verdict(foreign, BATCH, "parquet") is Verdict.DAMAGED


def test_a_sink_that_was_begun_without_a_guard_goes_on() -> None:
    batch = release(0, 1, ["=1+1"])
    for guard in (True, False):
        other = encode(batch, "csv", not guard)
        assert other != encode(batch, "csv", guard)
        assert verdict(other, batch, "csv", guard) is Verdict.SAME
