"""Fixtures of the fault tests."""

from collections.abc import Iterator

import pytest

from dpstream.state import open as stores


@pytest.fixture(autouse=True)
def closed_stores() -> Iterator[None]:
    """No store stays open between tests."""
    yield
    stores.close_all()
