"""The model of the contract passes the contract's own suites, whole and in small parts."""

import pytest

from dpstream.state.store import RunIdentity
from tests.simulation.limited import Database, LimitedStore
from tests.state.conformance import IDENTITY, KEY_SCHEMA, STREAMS, StoreConformance
from tests.state.life_conformance import OLD, RetentionBench, RetentionConformance

SIZES = [(1 << 30, None), (1 << 30, 1), (2, 2), (1, 3)]


@pytest.fixture(params=SIZES, ids=str)
def bench(request: pytest.FixtureRequest) -> Database:
    return Database(IDENTITY, KEY_SCHEMA, STREAMS, *request.param)


class TestLimitedStore(StoreConformance):
    """The suite every store passes."""


class LimitedLifeBench(Database, RetentionBench):
    def fresh(self, identity: RunIdentity) -> LimitedStore:
        return Database(identity, KEY_SCHEMA, STREAMS, self.limit, 5).open()


@pytest.fixture(params=SIZES, ids=str)
def life(request: pytest.FixtureRequest) -> LimitedLifeBench:
    return LimitedLifeBench(OLD, KEY_SCHEMA, STREAMS, *request.param)


class TestLimitedLife(RetentionConformance):
    """The suite of every store's own life."""
