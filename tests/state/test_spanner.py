"""The Spanner store on the official emulator: conformance, and what is its own."""

from collections.abc import Iterator

import pytest

from state.spanner import SpannerStore
from state.spanner_client import connect
from state.spanner_schema import create_identity, create_tables
from state.store import Store
from tests import emulator
from tests.state.conformance import IDENTITY, KEY_SCHEMA, STREAMS, Bench, StoreConformance


@pytest.fixture(scope="module", autouse=True)
def running() -> Iterator[None]:
    with emulator.running():
        yield


class SpannerBench(Bench):
    def __init__(self) -> None:
        self.url = emulator.fresh_url()
        create_tables(connect(self.url))
        create_identity(connect(self.url), IDENTITY)
        self._open: list[Store] = []

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
