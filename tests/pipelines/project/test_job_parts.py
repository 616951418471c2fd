"""The parts of a job: what each says beside its fields, and no unknown key."""

from pathlib import Path

import msgspec
import pytest

from dpstream.pipelines.project.job_parts import (
    GIVEN_STAMPS,
    SinkConfig,
    SourceConfig,
    SourceKind,
    StateConfig,
)


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl", "folder", "kafka", "pubsub"])
def test_only_sources_without_end_give_stamps(kind: SourceKind) -> None:
    source = SourceConfig(kind)
    given = GIVEN_STAMPS.get(kind)
    assert source.unbounded is (given is not None)
    assert source.stamp_column == (f"_{given[0]}" if given else "event_time")
    assert SourceConfig(kind, stamp="at").stamp_column == "at"


def test_a_folder_can_be_stamped_by_either_of_its_stamps() -> None:
    assert SourceConfig("folder", stamp="closed").stamp_column == "_closed"


def test_names_of_sources_say_where() -> None:
    assert SourceConfig("kafka", topic="t").name == "kafka:t"
    assert SourceConfig("pubsub", subscription="s").name == "pubsub:s"
    assert SourceConfig("csv", "in/*.csv").name == "csv:in/*.csv"


def test_only_an_embedded_store_is_a_file() -> None:
    assert StateConfig("sqlite:a/b:c.db").path == Path("a/b:c.db")
    assert StateConfig("spanner://p/i/d").path is None


def test_what_a_sink_is_beside_its_fields() -> None:
    assert [SinkConfig(k).file_kind for k in ("csv", "jsonl", "parquet", "kafka")] == [
        "csv", "jsonl", "parquet", "parquet",
    ]  # fmt: skip
    assert SinkConfig("kafka").folder is None and SinkConfig("csv", "x").folder == Path("x")
    assert SinkConfig("csv").guarded and SinkConfig("csv", formulas="guard").guarded
    assert not SinkConfig("csv", formulas="keep").guarded


@pytest.mark.parametrize("table", [SourceConfig, SinkConfig, StateConfig])
def test_unknown_keys_are_refused(table: type[msgspec.Struct]) -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.convert({"kind": "csv", "nothing": 1} | {}, table)
