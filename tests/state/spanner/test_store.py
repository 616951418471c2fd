"""The Spanner store on the official emulator: conformance, and what is its own."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.state.spanner.client import connect
from dpstream.state.spanner.schema import DDL, create_identity, create_tables
from dpstream.state.spanner.store import SpannerStore
from dpstream.state.store import RunIdentity, Store
from tests import emulator
from tests.state.conformance import IDENTITY, KEY_SCHEMA, STREAMS, Bench, StoreConformance
from tests.state.life_conformance import OLD, RetentionBench, RetentionConformance


@pytest.fixture(scope="module", autouse=True)
def running() -> Iterator[None]:
    with emulator.running():
        yield


class SpannerBench(Bench):
    def __init__(self, identity: RunIdentity = IDENTITY) -> None:
        self.url = emulator.fresh_url()
        create_tables(connect(self.url))
        create_identity(connect(self.url), identity)
        self._open: list[Store] = []
        self._generations = itertools.count(1)

    def open(self) -> SpannerStore:
        store = SpannerStore(self.url, KEY_SCHEMA, STREAMS)
        self._open.append(store)
        return store

    def close(self) -> None:
        for store in self._open:
            store.close()
        emulator.drop(self.url)


@pytest.fixture
def bench() -> Iterator[SpannerBench]:
    made = SpannerBench()
    yield made
    made.close()


class TestSpannerStore(StoreConformance):
    """The suite every store passes."""


class SpannerRetentionBench(SpannerBench, RetentionBench):
    """New stores are generations beside the one in force, as they are in the product."""

    def fresh(self, identity: RunIdentity) -> SpannerStore:
        successor = identity, next(self._generations)
        store = SpannerStore(self.url, KEY_SCHEMA, STREAMS, successor=successor)
        self._open.append(store)
        return store


@pytest.fixture
def life() -> Iterator[SpannerRetentionBench]:
    made = SpannerRetentionBench(OLD)
    yield made
    made.close()


class TestSpannerRetention(RetentionConformance):
    """The suite of every store's own life."""


def test_the_schema_file_is_the_schema() -> None:
    text = (Path(__file__).parents[3] / "deploy" / "spanner" / "schema.sql").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("--")]
    assert "\n".join(lines).strip() == DDL.strip()


def test_tables_are_created_once(bench: SpannerBench) -> None:
    assert create_tables(connect(bench.url)) is False


def test_tables_of_others_are_left_alone() -> None:
    url = emulator.fresh_url()
    database = connect(url)
    database.create().result(60)
    database.update_ddl(["CREATE TABLE Mine (A INT64) PRIMARY KEY (A)"]).result(60)
    with pytest.raises(PolicyError, match="other tables"):
        create_tables(database)
    emulator.drop(url)


def test_a_schema_of_another_version_is_refused(bench: SpannerBench) -> None:
    with connect(bench.url).batch() as batch:
        batch.update("Meta", ("Name", "Value"), [("schema_version", "99")])
    with pytest.raises(PolicyError, match="schema version"):
        bench.open()


def test_the_numbers_of_a_run_are_asked_for_once() -> None:
    url = emulator.fresh_url()
    create_tables(connect(url))
    begun = create_identity(connect(url), IDENTITY, lambda: "numbers")
    assert begun == msgspec.structs.replace(IDENTITY, calibration="numbers")
    assert create_identity(connect(url), IDENTITY, pytest.fail) == begun
    emulator.drop(url)
