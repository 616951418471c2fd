"""The model of the contract passes the contract's own suite, whole and in small parts."""

import pytest

from tests.simulation.limited import Database
from tests.state.conformance import IDENTITY, KEY_SCHEMA, STREAMS, StoreConformance


@pytest.fixture(params=[(1 << 30, None), (1 << 30, 1), (2, 2), (1, 3)], ids=str)
def bench(request: pytest.FixtureRequest) -> Database:
    return Database(IDENTITY, KEY_SCHEMA, STREAMS, *request.param)


class TestLimitedStore(StoreConformance):
    """The suite every store passes."""
