"""Fixtures of the flow's tests; generators are in ``tests/streams.py``."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dp_transforms.noise.prf import KeyRing
from state import open as stores
from tests.streams import KEYS, fresh_names


@pytest.fixture(autouse=True)
def closed_stores() -> Iterator[None]:
    """Every test opens its stores anew."""
    stores.close_all()
    yield
    stores.close_all()


@pytest.fixture
def store_paths(tmp_path: Path) -> Iterator[str]:
    """An endless supply of unused store paths: ``next(store_paths)``."""
    return fresh_names(tmp_path)


@pytest.fixture(scope="session")
def ring() -> KeyRing:
    """The key ring of the fixed test key."""
    return KEYS.ring()
