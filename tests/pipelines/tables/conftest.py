"""A server of PostgreSQL for the tests that read its tables."""

from collections.abc import Iterator

import pytest

from tests.postgresql import postgresql_server


@pytest.fixture
def server() -> Iterator[str]:
    """Address of a server of its own."""
    with postgresql_server() as address:
        yield address
