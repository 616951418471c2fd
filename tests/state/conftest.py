"""Fixtures of the store's tests."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from dpstream.state import open as stores

settings.register_profile("flow", deadline=None, derandomize=True)
settings.load_profile("flow")


@pytest.fixture(autouse=True)
def closed_stores() -> Iterator[None]:
    """Every test opens its stores anew."""
    stores.close_all()
    yield
    stores.close_all()
