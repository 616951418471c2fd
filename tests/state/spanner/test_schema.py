"""Tables and identity: made once, told from those of others, their numbers asked for once.

Notes of the Spanner store: changed by comparison, apart by generation.
"""

from pathlib import Path

import msgspec
import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.state.spanner.client import commit, connect
from dpstream.state.spanner.schema import (
    DDL,
    create_identity,
    create_tables,
    named,
    read_metadata,
    swap_metadata,
)
from tests import emulator
from tests.state.conformance import IDENTITY
from tests.state.spanner.bench import SpannerBench


def test_each_generation_has_notes_of_its_own() -> None:
    assert named(0, "x") == "note.x" and named(3, "x") == "note.3.x"
    assert len({named(g, n) for g in range(12) for n in ("x", "token")}) == 24


def test_a_note_is_of_its_generation(bench: SpannerBench) -> None:
    database = connect(bench.url)
    assert swap_metadata(database, named(0, "x"), None, "b")
    assert bench.open().metadata("x") == "b" and read_metadata(database, named(1, "x")) is None


def test_the_schema_file_is_the_schema() -> None:
    text = (Path(__file__).parents[3] / "deploy" / "spanner" / "schema.sql").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("--")]
    assert "\n".join(lines).strip() == DDL.strip()


def test_tables_are_created_once(bench: SpannerBench) -> None:
    assert create_tables(connect(bench.url)) is False


def test_tables_of_others_are_left_alone(running: None) -> None:
    url = emulator.fresh_url()
    database = connect(url)
    database.create().result(60)
    database.update_ddl(["CREATE TABLE Mine (A INT64) PRIMARY KEY (A)"]).result(60)
    with pytest.raises(PolicyError, match="other tables"):
        create_tables(database)
    emulator.drop(url)


def test_another_format_is_refused(bench: SpannerBench) -> None:
    database = connect(bench.url)
    commit(database, lambda batch: batch.update("Meta", ("Name", "Value"), [("format", "1")]))
    for attempt in (bench.open, lambda: create_identity(database, IDENTITY)):
        with pytest.raises(PolicyError) as caught:
            attempt()
        assert "the program that wrote it" in caught.value.fix


def test_the_numbers_of_a_run_are_asked_for_once(running: None) -> None:
    url = emulator.fresh_url()
    create_tables(connect(url))
    begun = create_identity(connect(url), IDENTITY, lambda: "numbers")
    assert begun == msgspec.structs.replace(IDENTITY, calibration="numbers")
    assert create_identity(connect(url), IDENTITY, pytest.fail) == begun
    emulator.drop(url)
