"""A database of the emulator for the suites and the tests of its modules."""

import itertools

from dpstream.state.spanner.client import connect
from dpstream.state.spanner.schema import create_identity, create_tables
from dpstream.state.spanner.store import SpannerStore
from dpstream.state.store import RunIdentity, Store
from tests import emulator
from tests.state.conformance import IDENTITY, KEY_SCHEMA, STREAMS, Bench
from tests.state.life_conformance import RetentionBench


class SpannerBench(Bench):
    """A database of its own; every handle has states of its own."""

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


class SpannerRetentionBench(SpannerBench, RetentionBench):
    """New stores are generations beside the one in force, as they are in the product."""

    def fresh(self, identity: RunIdentity) -> SpannerStore:
        successor = identity, next(self._generations)
        store = SpannerStore(self.url, KEY_SCHEMA, STREAMS, successor=successor)
        self._open.append(store)
        return store
