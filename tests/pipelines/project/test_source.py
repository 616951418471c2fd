"""Source, store and sink of a job: what each says beside its fields, and no unknown key."""

from pathlib import Path

import msgspec
import pytest

from dpstream.pipelines.jobs.job import StorePlace
from dpstream.pipelines.project.job_section import SinkSection
from dpstream.pipelines.project.source import GIVEN_STAMPS, Source, SourceKind


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl", "folder", "kafka", "pubsub"])
def test_only_sources_without_end_give_stamps(kind: SourceKind) -> None:
    source = Source(kind)
    given = GIVEN_STAMPS.get(kind)
    assert source.unbounded is (given is not None)
    assert source.stamp_column == (f"_{given[0]}" if given else "event_time")
    assert Source(kind, stamp="at").stamp_column == "at"


def test_a_folder_can_be_stamped_by_either_of_its_stamps() -> None:
    assert Source("folder", stamp="closed").stamp_column == "_closed"


def test_names_of_sources_say_where() -> None:
    assert Source("kafka", topic="t").name == "kafka:t"
    assert Source("pubsub", subscription="s").name == "pubsub:s"
    assert Source("csv", "in/*.csv").name == "csv:in/*.csv"


def test_only_an_embedded_store_is_a_file() -> None:
    assert StorePlace("sqlite:a/b:c.db").path == Path("a/b:c.db")
    assert StorePlace("spanner://p/i/d").path is None


def test_what_a_sink_is_beside_its_fields() -> None:
    assert [SinkSection(k).file_kind for k in ("csv", "jsonl", "parquet", "kafka")] == [
        "csv", "jsonl", "parquet", "parquet",
    ]  # fmt: skip
    assert SinkSection("kafka").folder is None and SinkSection("csv", "x").folder == Path("x")
    assert SinkSection("csv").guarded and SinkSection("csv", formulas="guard").guarded
    assert not SinkSection("csv", formulas="keep").guarded


@pytest.mark.parametrize("table", [Source, SinkSection, StorePlace])
def test_unknown_keys_are_refused(table: type[msgspec.Struct]) -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.convert({"kind": "csv", "nothing": 1} | {}, table)
